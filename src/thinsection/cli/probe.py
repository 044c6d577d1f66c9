"""`thinsection probe`: how good are these embeddings?"""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from thinsection.cli.options import with_config
from thinsection.probe.config import ProbeConfig

if TYPE_CHECKING:
    from thinsection.probe import ProbeResult, TileSet

TileData = Annotated[
    Path,
    typer.Argument(
        metavar="DATA",
        help="A manifest (CSV), a dataset folder, a tiles.h5, or a run's output folder.",
    ),
]
CaseData = Annotated[
    Path,
    typer.Argument(
        metavar="TABLE",
        help="A CSV of slides, or a Patho-Bench task folder (k=all.tsv and config.yaml).",
    ),
]
Out = Annotated[Path, typer.Option("--out", help="Folder for JSON, CSV, Markdown, HTML, PNG.")]


def register(root: typer.Typer) -> None:
    """Adds the group `probe`; the segmentation probe adds itself where it is there."""
    app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
    for command in (linear, knn, fewshot, tileset, slide, survival, robustness):
        app.command(command.__name__)(command)
    if importlib.util.find_spec("thinsection.cli.probe_segment") is not None:
        importlib.import_module("thinsection.cli.probe_segment").add_to(app)
    importlib.import_module("thinsection.cli.probe_grid").add_to(app)
    root.add_typer(app, name="probe", help="Evaluate embeddings of tiles and slides.")


@with_config(ProbeConfig)
def linear(data: TileData, out: Out, config: ProbeConfig) -> None:
    """One linear layer on frozen embeddings, AdamW, best over learning rate and epoch.

    Examples:

      thinsection probe linear out/ --labels regions.geojson --out probe/

      thinsection probe linear BRACS_RoI/ --layout bracs --encoder uni --out probe/
    """
    _tile_probe("linear", data, out, config)


@with_config(ProbeConfig)
def knn(data: TileData, out: Out, config: ProbeConfig) -> None:
    """Cosine neighbours vote; best k."""
    _tile_probe("knn", data, out, config)


@with_config(ProbeConfig)
def fewshot(data: TileData, out: Out, config: ProbeConfig) -> None:
    """SimpleShot: 1000 support sets of 16 tiles per class, majority vote."""
    _tile_probe("fewshot", data, out, config)


@with_config(ProbeConfig)
def tileset(data: TileData, out: Out, config: ProbeConfig) -> None:
    """Linear, kNN and few-shot on the same tiles, and their mean."""
    from thinsection.probe.api import load_tiles, run_tileset

    tiles = load_tiles(data, config)
    print(f"split: {tiles.facts['split_rule']}")
    for result in run_tileset(tiles, config):
        _finish(result, out, tiles)


@with_config(ProbeConfig)
def slide(
    table: CaseData,
    out: Out,
    config: ProbeConfig,
    method: Annotated[
        Literal["logistic", "abmil"],
        typer.Option(help="Logistic regression on case means, or attention over tiles."),
    ] = "logistic",
) -> None:
    """Labels of slides or patients, AUROC over folds.

    Example: thinsection probe slide labels.csv --embeddings out/ --out probe/
    """
    from thinsection.probe.api import run_slide_probe

    _finish(run_slide_probe(table, config, method=method), out)


@with_config(ProbeConfig)
def survival(table: CaseData, out: Out, config: ProbeConfig) -> None:
    """Cox regression on case means, Harrell's c-index over folds."""
    from thinsection.probe.api import run_survival_probe

    _finish(run_survival_probe(table, config), out)


@with_config(ProbeConfig)
def robustness(
    table: Annotated[
        Path,
        typer.Argument(
            help="CSV of tiles: slide_id, biological_class, medical_center[, path or row]."
        ),
    ],
    out: Out,
    config: ProbeConfig,
    k: Annotated[
        int | None, typer.Option(help="Neighbours, instead of the subset's published number.")
    ] = None,
) -> None:
    """PathoROB: do neighbours on other slides share the biology or the hospital?"""
    from thinsection.probe.api import run_robustness_probe

    _finish(run_robustness_probe(table, config, k=k), out)


def _tile_probe(
    name: Literal["linear", "knn", "fewshot"], data: Path, out: Path, config: ProbeConfig
) -> None:
    from thinsection.probe.api import load_tiles, run_tile_probe

    tiles = load_tiles(data, config)
    print(f"split: {tiles.facts['split_rule']}")
    _finish(run_tile_probe(name, tiles, config), out, tiles)


def _finish(result: "ProbeResult", out: Path, tiles: "TileSet | None" = None) -> None:
    """Writes the report and prints the score and where to look."""
    from thinsection.probe.page import METRIC_WORDS, write_probe_report

    files = write_probe_report(result, out, tiles=tiles)
    interval = result.interval
    span = "" if interval is None else f" [{interval.low:.4f}, {interval.high:.4f}]"
    words = METRIC_WORDS.get(result.metric, result.metric)
    print(f"{result.probe} on {result.dataset}: {words} {result.score:.4f}{span}")
    print(f"  {files.html}")
