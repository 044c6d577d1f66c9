"""`thinsection train`, `predict`, `heatmap`, `model`: heads, what they say, where it comes from."""

from pathlib import Path
from typing import Annotated, Any

import typer

from thinsection.cli.main import with_config

app = typer.Typer()
group = typer.Typer(no_args_is_help=True, help="Model files: what one was trained on.")
group.callback()(lambda: None)
app.add_typer(group, name="model")
_MODEL = typer.Argument(help="Model file of `thinsection train`.", show_default=False)
_SOURCE = typer.Argument(
    help="Model file, or a per-tile column: px_focus.", show_default=False
)
_CARD = typer.Option(help="Also write it as Markdown.")
_SLIDES = typer.Argument(
    help="Slides, folders, cohort CSVs; or a folder with embeddings."
)
_OUT = typer.Option("--out", help="Results folder. [default: that of the embeddings]")
ModelFile = Annotated[Path, _MODEL]
SlidesArgument = Annotated[list[str], _SLIDES]
Out = Annotated[Path | None, _OUT]
_DATA = "Results folder, or features of TRIDENT, CLAM, STAMP, slide2vec."
Data = Annotated[Path, typer.Argument(metavar="RESULTS", help=_DATA)]
Folder = Annotated[
    Path, typer.Option(help="Folder of the experiment: RESULTS/experiments/NAME.")
]
Against = Annotated[
    Path | None, typer.Option(help="Experiment to compare with, case by case.")
]


@app.command("train")
@with_config("thinsection.predict.experiment:TrainConfig")
def train_command(
    data: Data, out: Folder, config: Any, against: Against = None
) -> None:
    """Train a head on stored embeddings; test each case by a model that has not seen it.

    Writes experiment.json, index.html, predictions.csv and model.safetensors for `predict`.

    Examples:

      thinsection train results/ --labels labels.csv --target subtype --out results/experiments/a

      thinsection train results/ --labels labels.csv --target dead --time days --head clam_sb
      --grid lr=1e-4,5e-4 --out results/experiments/survival
    """
    from thinsection.predict.experiment import train
    from thinsection.probe.result import METRIC_WORDS

    told = train(data, out=out, config=config, against=against, on_message=typer.echo)
    words = METRIC_WORDS.get(told["metric"], told["metric"])
    score = "none" if told["value"] is None else f"{told['value']:.4f}"
    if told["interval"]:
        low, high = told["interval"]
        span = f"[{low:.4f}, {high:.4f}], {told['interval_by']}"
    else:
        span = f"(no interval: {told['interval_missing']})"
    typer.echo(f"{words} {score} {span}; computed over {told['pooled_over']}")
    if found := told.get("against"):
        span = f"[{found['low']:+.4f}, {found['high']:+.4f}]"
        than = f"{found['value']:+.4f} {span}, p {found['p_value']:.3g}"
        typer.echo(f"  against {found['name']}: {than}")
    typer.echo(out / "index.html")


@app.command("predict")
@with_config("thinsection.predict.predicting:PredictRunConfig")
def predict(
    model: ModelFile, slides: SlidesArgument, out: Out = None, config: Any = None
) -> None:
    """Predict slides and their cases by a model: embeds what is not embedded, as the model says.

    Exit code 0: every slide has its prediction; 3: some have none, the table says why.

    Examples:

        thinsection predict grade.safetensors slides/ --out results

        thinsection predict grade.safetensors results --executor dask --workers 4

        thinsection predict grade.safetensors external/ --out predicted --labels external.csv
    """
    from thinsection.cli.progress import say
    from thinsection.predict import predicting

    found = predicting.predict(model, slides, out=out, config=config, on_message=say)
    missing = [row for row in found.rows if not row.answers]
    for row in found.rows:
        for line in filter(None, (row.error, *row.warnings)):
            print(f"{row.name}: {line}")
    print(
        f"{len(found.rows) - len(missing)} of {len(found.rows)} predicted -> {found.table}"
    )
    if found.validation is not None:
        print(_validation_line(found.validation))
        print(found.page)
    raise typer.Exit(3 if missing else 0)


def _validation_line(told: dict[str, Any]) -> str:
    """The headline of a validation in one line."""
    from thinsection.probe.result import METRIC_WORDS

    line = f"{told['validation']} validation on {told['cases']} cases"
    if told["value"] is not None:
        line += (
            f": {METRIC_WORDS.get(told['metric'], told['metric'])} {told['value']:.4f}"
        )
    low, high = told["interval"]
    if low is not None:
        line += f" [{low:.4f}, {high:.4f}]"
    if told["left_out"]:
        line += f"; {len(told['left_out'])} labelled cases left out"
    return line


@app.command("heatmap")
@with_config("thinsection.predict.heatmap:HeatmapRunConfig")
def heatmap(
    source: Annotated[str, _SOURCE],
    slides: SlidesArgument,
    out: Out = None,
    config: Any = None,
) -> None:
    """Draw where a model's answer comes from: pictures, GeoJSON for QuPath, top tiles.

    Examples:

        thinsection heatmap grade.safetensors slides/ --out results

        thinsection heatmap px_focus results
    """
    from thinsection.cli.progress import say
    from thinsection.predict import heatmap as heatmaps

    for path in heatmaps.heatmap(
        source, slides, out=out, config=config, on_message=say
    ):
        print(path)


@group.command("show")
def show(model: ModelFile, out: Annotated[Path | None, _CARD] = None) -> None:
    """Print the card of a model: intended use, data, figures, limits.

    Example: thinsection model show grade.safetensors --out card.md
    """
    from thinsection.files.atomic import write_text
    from thinsection.predict.model_file import card_markdown, read_card

    text = card_markdown(read_card(model))
    if out is not None:
        write_text(out, text)
    print(text, end="")
