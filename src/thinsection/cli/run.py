"""`thinsection run`, and its stages `tissue`, `tile` and `embed`."""

from typing import Annotated, Any

import typer
from rich.console import Console

from thinsection.cli.options import with_config

SlidesArgument = Annotated[
    list[str],
    typer.Argument(help="Slide files, folders, URLs or cohort CSVs.", show_default=False),
]
OutOption = Annotated[
    str, typer.Option("--out", help="Output folder, or URL (s3://, ...).", show_default=False)
]

_STAGES = {
    "run": ("aggregate", "Everything: tissue, tiles, tile embeddings, slide embedding."),
    "tissue": ("tissue", "Find the tissue of each slide: PNG mask and GeoJSON polygons."),
    "tile": ("tile", "Lay the tile grid of each slide: tiles.h5 with coordinates."),
    "embed": ("embed", "Embed the tiles of each slide: tiles.h5 with coordinates and features."),
}
_EXAMPLES = """

Examples:

    thinsection {name} slide.svs --out results

    thinsection {name} slides/ more.csv --out results --tile-px 512 --tile-mpp 0.5

    thinsection {name} slides/ --out results --config run.toml --memory 1GiB
"""


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    from thinsection.stages.config import RunConfig

    for name, (stage, summary) in _STAGES.items():
        command = with_config(RunConfig)(_command(name, stage))
        command.__doc__ = summary + _EXAMPLES.format(name=name)
        app.command(name)(command)


def _command(name: str, stage: str) -> Any:
    def command(slides: SlidesArgument, out: OutOption, config: Any = None) -> None:
        run_and_report(slides, out, config, stage)

    command.__name__ = name
    return command


def run_and_report(slides: list[str], out: str, config: Any, stage: str) -> None:
    """Runs with progress, prints where the results are, exits with the run's code."""
    from thinsection.cli.progress import RunProgress
    from thinsection.pipeline.api import run
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
    raise typer.Exit(summary.exit_code)
