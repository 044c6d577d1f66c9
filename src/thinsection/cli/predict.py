"""`thinsection train`, `predict`, `heatmap`, `model`: train heads, predict, and explain results."""

from pathlib import Path
from typing import Annotated, Any

import typer

from thinsection.cli.flags import with_config

app = typer.Typer()
group = typer.Typer(no_args_is_help=True, help="Model files: what one was trained on.")
app.add_typer(group, name="model")

ModelFile = Annotated[
    Path,
    typer.Argument(help="Model file of `thinsection train`.", show_default=False),
]
SlidesArgument = Annotated[
    list[str],
    typer.Argument(help="Slides, folders, cohort CSVs; or a folder with embeddings."),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="Results folder. [default: that of the embeddings]"),
]


@app.command("train")
@with_config("thinsection.predict.experiment:TrainConfig")
def train_command(
    data: Annotated[
        Path,
        typer.Argument(
            metavar="RESULTS",
            help="Results folder, or features of TRIDENT, CLAM, STAMP, slide2vec.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder of the experiment: RESULTS/experiments/NAME.")
    ],
    config: Any,
    against: Annotated[
        Path | None, typer.Option(help="Experiment to compare with, case by case.")
    ] = None,
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

    result = train(data, out=out, config=config, against=against, on_message=typer.echo)
    metric = METRIC_WORDS.get(result["metric"], result["metric"])
    score = "none" if result["value"] is None else f"{result['value']:.4f}"
    if result["interval"]:
        low, high = result["interval"]
        interval = f"[{low:.4f}, {high:.4f}], {result['interval_by']}"
    else:
        interval = f"(no interval: {result['interval_missing']})"
    typer.echo(f"{metric} {score} {interval}; computed over {result['pooled_over']}")
    other = result.get("against")
    if other:
        interval = f"[{other['low']:+.4f}, {other['high']:+.4f}]"
        typer.echo(
            f"  against {other['name']}: {other['value']:+.4f} {interval}, "
            f"p {other['p_value']:.3g}"
        )
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

    result = predicting.predict(model, slides, out=out, config=config, on_message=say)
    num_missing = 0
    for row in result.rows:
        num_missing += not row.answers
        if row.error:
            print(f"{row.name}: {row.error}")
        for warning in row.warnings:
            print(f"{row.name}: {warning}")
    num_rows = len(result.rows)
    print(f"{num_rows - num_missing} of {num_rows} predicted -> {result.table}")
    if result.validation is not None:
        print(_validation_line(result.validation))
        print(result.page)
    raise typer.Exit(3 if num_missing else 0)


def _validation_line(validation: dict[str, Any]) -> str:
    """Headline of a validation in one line."""
    from thinsection.probe.result import METRIC_WORDS

    line = f"{validation['validation']} validation on {validation['cases']} cases"
    if validation["value"] is not None:
        metric = METRIC_WORDS.get(validation["metric"], validation["metric"])
        line += f": {metric} {validation['value']:.4f}"
    low, high = validation["interval"]
    if low is not None:
        line += f" [{low:.4f}, {high:.4f}]"
    if validation["left_out"]:
        line += f"; {len(validation['left_out'])} labelled cases left out"
    return line


@app.command("heatmap")
@with_config("thinsection.predict.heatmap:HeatmapRunConfig")
def heatmap(
    source: Annotated[
        str,
        typer.Argument(
            help="Model file, or a per-tile column: px_focus.", show_default=False
        ),
    ],
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

    paths = heatmaps.heatmap(source, slides, out=out, config=config, on_message=say)
    for path in paths:
        print(path)


@group.callback()
def model_group() -> None:
    """Makes typer treat `model` as a group, although it has only one command."""


@group.command("show")
def show(
    model: ModelFile,
    out: Annotated[Path | None, typer.Option(help="Also write it as Markdown.")] = None,
) -> None:
    """Print the card of a model: intended use, data, figures, limits.

    Example: thinsection model show grade.safetensors --out card.md
    """
    from thinsection.files.atomic import write_text
    from thinsection.predict.model_file import card_markdown, read_card

    text = card_markdown(read_card(model))
    if out is not None:
        write_text(out, text)
    print(text, end="")
