"""`thinsection train`, `predict`, `zeroshot`, `heatmap` and `model`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from thinsection.cli.flags import EXIT_SOME_LEFT_OUT, with_config
from thinsection.types import counted, rounded

app = typer.Typer()
group = typer.Typer(
    no_args_is_help=True, help="Show a trained model's data, scores and limitations."
)
app.add_typer(group, name="model")

ModelFile = Annotated[
    Path,
    typer.Argument(
        help="Model file that `thinsection train` wrote (model.safetensors).",
        show_default=False,
    ),
]
SlidesArgument = Annotated[
    list[str],
    typer.Argument(
        help="Slide files, folders, URLs, or cohort tables (CSV); or one results folder that has "
        "embeddings already."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Results folder. Required if you pass slides. [default: the results folder that you "
        "pass in place of slides]",
    ),
]


@app.command("train")
@with_config("thinsection.predict.config:TrainConfig")
def train_command(
    data: Annotated[
        Path,
        typer.Argument(
            metavar="RESULTS",
            help="Results folder, or a folder with features of TRIDENT, CLAM, STAMP or slide2vec.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Folder of the experiment, such as RESULTS/experiments/NAME."
        ),
    ],
    config: Any,
    against: Annotated[
        list[Path],
        typer.Option(
            default_factory=list,
            show_default=False,
            help="Experiment to compare with, on the same cases; repeat for several.",
        ),
    ],
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace a model in OUT that was trained with other labels or settings.",
        ),
    ] = False,
) -> None:
    """Train a model on stored embeddings, with cross-validation.

    Each case is tested by a model that was not trained on it. OUT gets a page with the scores
    (index.html), the predictions of the test cases (predictions.csv) and the model for
    `thinsection predict` (model.safetensors). Exit code 3: slides with damaged files were left out.

    \b
    Examples:
      thinsection train results --labels labels.csv --target subtype \\
          --out results/experiments/subtype
      thinsection train results --labels labels.csv --target dead --time days \\
          --out results/experiments/survival
    """
    from thinsection.evaluation.labels import check_label_table

    # report a wrong table or column before PyTorch is imported, which takes seconds
    check_label_table(config.labels)

    from thinsection.evaluation.rows import METRIC_WORDS
    from thinsection.predict.experiment import train

    result = train(
        data,
        out=out,
        config=config,
        against=against,
        overwrite=overwrite,
        on_message=typer.echo,
    )
    cases = result["cases"]
    metric = METRIC_WORDS.get(result["metric"], result["metric"])
    score = "none" if result["value"] is None else rounded(result["value"], cases)
    interval = _interval_words(result["interval"], cases, result["interval_missing"])
    if result["interval"]:
        interval += f", {result['interval_by']}"
    typer.echo(f"{metric} {score} {interval}; computed over {result['pooled_over']}")
    for other in result["against"]:
        cases = other["cases"]
        difference = rounded(other["value"], cases, "+")
        interval = _interval_words((other["low"], other["high"]), cases, sign="+")
        typer.echo(
            f"  against {other['name']}: {difference} {interval}, "
            f"p {other['p_value']:.3g}, Holm {other['p_holm']:.3g}"
        )
    typer.echo(out / "index.html")
    raise typer.Exit(EXIT_SOME_LEFT_OUT if result["left_out"] else 0)


@app.command("predict")
@with_config("thinsection.predict.predicting:PredictRunConfig")
def predict(
    model: ModelFile,
    slides: SlidesArgument,
    out: Out = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace an earlier validation in OUT that used another model or other labels.",
        ),
    ] = False,
    config: Any = None,
) -> None:
    """Predict new slides and cases with a trained model.

    Slides without embeddings are embedded first, with the settings that are stored in the model.
    OUT gets a table of the predictions. With --labels it also gets a page that tests the model on
    the new cases.

    Exit code: 0 every slide has its prediction, 3 some have none; the table gives the reason.

    \b
    Examples:
      thinsection predict model.safetensors slides/ --out predicted
      thinsection predict model.safetensors external/ --out tested --labels external.csv
    """
    from thinsection.cli.progress import say
    from thinsection.predict import predicting

    result = predicting.predict(
        model, slides, out=out, config=config, overwrite=overwrite, on_message=say
    )
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


def _interval_words(
    interval: Sequence[float | None] | None,
    cases: int,
    missing: str | None = None,
    *,
    sign: str = "",
) -> str:
    """Confidence interval of a score of so many cases, or why there is none."""
    low, high = interval or (None, None)
    if low is None or high is None:
        return f"(no interval: {missing})"
    return f"[{rounded(low, cases, sign)}, {rounded(high, cases, sign)}]"


def _validation_line(validation: dict[str, Any]) -> str:
    """Headline of a validation in one line."""
    from thinsection.evaluation.rows import METRIC_WORDS

    cases = validation["cases"]
    line = f"{validation['validation']} validation on {validation['cases']} cases"
    if validation["value"] is not None:
        metric = METRIC_WORDS.get(validation["metric"], validation["metric"])
        if validation["averaged"]:
            metric += f", mean over {counted(len(validation['averaged']), 'label')},"
        line += f": {metric} {rounded(validation['value'], cases)}"
        scores = validation["scores"].get(validation["metric"], {})
        missing = scores.get("missing")
        line += " " + _interval_words(validation["interval"], cases, missing)
    if validation["positive_words"]:
        line += f"; positive class: {validation['positive_words']}"
    if validation["left_out"]:
        line += f"; {len(validation['left_out'])} labelled cases left out"
    return line


@app.command("heatmap")
@with_config("thinsection.predict.heatmap:HeatmapRunConfig", without=("validation",))
def heatmap(
    source: Annotated[
        str,
        typer.Argument(
            help="Model file that `thinsection train` wrote (model.safetensors), or a column of "
            "the tile table, such as tissue_fraction.",
            show_default=False,
        ),
    ],
    slides: SlidesArgument,
    out: Out = None,
    config: Any = None,
) -> None:
    """Show which tiles a prediction depends on.

    OUT/GRID/heatmap_MODEL/ gets a picture of each slide with its scores as colours, a picture of
    the tiles with the highest scores, and the scores as GeoJSON for QuPath. With a column of the
    tile table in place of a model, the pictures show this column.

    Without --out, OUT is the results folder that you pass in place of slides. Its page and
    `thinsection view` then show the heatmaps.

    Exit code: 0 every slide has its heatmap, 3 some have none.

    \b
    Examples:
      thinsection heatmap model.safetensors slides/ --out predicted
      thinsection heatmap tissue_fraction results
    """
    from thinsection.cli.progress import say
    from thinsection.predict import heatmap as heatmaps

    left_out: list[str] = []
    paths = heatmaps.heatmap(
        source,
        slides,
        out=out,
        config=config,
        on_message=say,
        on_left_out=left_out.append,
    )
    for line in (*paths, *left_out):
        print(line)
    raise typer.Exit(EXIT_SOME_LEFT_OUT if left_out else 0)


@group.callback()
def model_group() -> None:
    """Makes typer treat `model` as a group, although it has only one command."""


@group.command("show")
def show(
    model: ModelFile,
    out: Annotated[
        Path | None, typer.Option(help="Also write it to this Markdown file.")
    ] = None,
) -> None:
    """Print a model's intended use, training data, scores and limitations.

    \b
    Example:
      thinsection model show model.safetensors --out card.md
    """
    from thinsection.files.atomic import write_text
    from thinsection.predict.model_file import card_markdown, read_card

    text = card_markdown(read_card(model))
    if out is not None:
        write_text(out, text)
    print(text, end="")


@app.command("zeroshot")
@with_config("thinsection.predict.zeroshot:ZeroshotRunConfig")
def zeroshot_command(
    results: Annotated[
        Path,
        typer.Argument(
            metavar="RESULTS",
            help="Results folder with embeddings of an encoder that has a text tower.",
        ),
    ],
    prompts: Annotated[
        Path,
        typer.Option(
            "--prompts",
            help="TOML file with the classes and the words for each. The page 'Zero-shot classes' "
            "of the docs has an example.",
        ),
    ],
    config: Any,
) -> None:
    """Score tiles and slides for classes that you describe in words.

    No labels and no training are needed. RESULTS gets a tile table for each slide, with one
    column per class, and scores.csv with one row per slide.

    Exit code: 0 every slide has scores, 3 some have none.

    \b
    Examples:
      thinsection run slides/ --out results --encoder plip --tile-px 224
      thinsection zeroshot results --prompts prompts.toml
    """
    from thinsection.cli.progress import say
    from thinsection.predict.zeroshot import zeroshot

    # a wrong file of prompts is reported before PyTorch is imported, which takes seconds
    result = zeroshot(results, prompts, config=config, on_message=say)
    for row in result.rows:
        score = f", score {row.scores[row.predicted]:.4f}" if row.scores else ""
        print(f"{row.slide_id}: {row.predicted or 'no tiles'}{score}")
    for column in result.columns:
        print(f"thinsection heatmap {column} {results}")
    print(result.table)
    is_complete = not result.unread and all(row.scores for row in result.rows)
    raise typer.Exit(0 if is_complete else 3)
