"""`thinsection run`, its stages `tissue`, `tile` and `embed`, and `aggregate` on what is stored."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from thinsection.cli.options import with_config

SlidesArgument = Annotated[
    list[str],
    typer.Argument(help="Slide files, folders, URLs or cohort CSVs.", show_default=False),
]
OutOption = Annotated[
    str, typer.Option("--out", help="Results folder, or URL (s3://, ...).", show_default=False)
]

_STAGES = {
    "run": ("aggregate", "Everything: tissue, tiles, tile embeddings, slide embedding."),
    "tissue": ("tissue", "Find the tissue of each slide: PNG mask and GeoJSON polygons."),
    "tile": ("tile", "Lay the tile grid of each slide: GRID/tiles/ID.h5 with coordinates."),
    "embed": ("embed", "Embed the tiles of each slide: GRID/features_ENCODER/ID.h5."),
}
_EXAMPLES = """

Other settings, encoders and slide encoders lie beside each other in one results folder: nothing is
replaced unless --overwrite says so, and nothing is computed twice.

Examples:

    thinsection {name} slide.svs --out results

    thinsection {name} slides/ more.csv --out results --tile-px 512 --tile-mpp 0.5

    thinsection {name} slides/ --out results --config run.toml --memory 1GiB
"""


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    from thinsection.stages.config import AggregateRunConfig, RunConfig

    for name, (stage, summary) in _STAGES.items():
        command = with_config(RunConfig)(_command(name, stage))
        command.__doc__ = summary + _EXAMPLES.format(name=name)
        app.command(name)(command)
    app.command("aggregate")(with_config(AggregateRunConfig)(aggregate))


def _command(name: str, stage: str) -> Any:
    def command(slides: SlidesArgument, out: OutOption, config: Any = None) -> None:
        raise typer.Exit(run_and_report(slides, out, config, stage).exit_code)

    command.__name__ = name
    return command


def run_and_report(slides: list[str], out: str, config: Any, stage: str) -> Any:
    """Runs with progress, and prints where the results are."""
    from thinsection.cli.progress import RunProgress
    from thinsection.pipeline.run import run
    from thinsection.slide.cohort import load_cohort

    console = Console()
    progress = RunProgress(console, num_slides=len(load_cohort(slides)))
    with progress.live():
        summary = run(
            slides, out=out, config=config, stage=stage, on_event=progress, on_message=console.print
        )
    counts = summary.counts
    line = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    console.print(f"{line} in {summary.seconds:.1f} s -> {out}/summary.csv", highlight=False)
    if counts["failed"]:
        console.print(f"see {out}/failed.csv", highlight=False)
    return summary


def aggregate(
    folder: Annotated[Path, typer.Argument(help="A results folder, or features of others.")],
    out: Annotated[Path | None, typer.Option(help="Other output folder.")] = None,
    config: Any = None,
) -> None:
    """Pool tile embeddings that are there into one embedding per slide.

    Exit code 0: every slide has its embedding; 3: some failed.

    Examples:

        thinsection aggregate results --slide-encoder max

        thinsection aggregate trident/20x_512px/features_conch_v15 --slide-encoder titan

        thinsection aggregate results --slide-encoder titan --executor dask --workers 4
    """
    from thinsection.cli.progress import describe
    from thinsection.pipeline.pooling import aggregate_folder
    from thinsection.pipeline.run import EXIT_SOME_FAILED

    results = aggregate_folder(
        folder,
        out=out,
        config=config,
        on_result=lambda result: print(describe(result), flush=True),
        on_message=lambda text: print(text, flush=True),
    )
    failed = sum(result.status == "failed" for result in results)
    name = config.pooling.slide_encoder
    print(f"{len(results) - failed} of {len(results)} slides have an embedding of {name}")
    raise typer.Exit(EXIT_SOME_FAILED if failed else 0)
