"""`thinsection plan`: memory and time before anything runs."""

from typing import Annotated, Any

import typer

from thinsection.cli.options import with_config
from thinsection.cli.run import SlidesArgument


def register(app: typer.Typer) -> None:
    """Adds the command."""
    from thinsection.stages.config import RunConfig

    app.command("plan")(with_config(RunConfig)(_plan))


def _plan(
    slides: SlidesArgument,
    slurm: Annotated[bool, typer.Option("--slurm", help="Print #SBATCH lines too.")] = False,
    config: Any = None,
) -> None:
    """Predict peak memory and time from headers and thumbnails; no tile is decoded.

    Example: thinsection plan slides/ --gpu a40 --encoder uni2_h --slurm
    """
    from rich.console import Console
    from rich.table import Table

    from thinsection.planning.cost import MARGIN
    from thinsection.planning.plan import plan
    from thinsection.units import format_bytes

    found = plan(slides, config=config)
    console = Console()
    table = Table("part", "host memory", "GPU memory")
    for name in [*found.memory.host, *(n for n in found.memory.gpu if n not in found.memory.host)]:
        parts = (found.memory.host.get(name), found.memory.gpu.get(name))
        table.add_row(name, *(format_bytes(p) if p is not None else "" for p in parts))
    on_gpu = format_bytes(found.memory.gpu_bytes) if found.memory.gpu else ""
    table.add_row(
        f"peak, margin {MARGIN - 1:.0%}",
        format_bytes(found.memory.host_bytes),
        on_gpu,
        style="bold",
    )
    console.print(table)
    tiles = sum(s.num_tiles for s in found.slides)
    time = found.time
    console.print(
        f"{len(found.slides)} slides, {tiles} tiles: {time.wall_s:.0f} s "
        f"(start {time.start_s:.0f}, tissue {time.prepare_s:.0f}, decode {time.decode_s:.0f}, "
        f"encode {time.encode_s:.0f} {'GPU' if found.gpu else 'CPU'}-s)",
        highlight=False,
    )
    for name, reason in found.unreadable.items():
        console.print(f"{name} does not open: {reason}", style="yellow", markup=False)
    for warning in found.warnings:
        console.print(f"warning: {warning}", style="bold red", markup=False)
    if slurm:
        _show_request(slides, config)


def _show_request(slides: list[str], config: Any) -> None:
    """Prints what `thinsection slurm script` would write for the same slides and settings."""
    from thinsection.jobs.executor import Rung, array_chunks
    from thinsection.jobs.slurm_script import resource_directives
    from thinsection.planning.request import run_request
    from thinsection.slide.cohort import load_cohort, parse_mpp

    given = config.slides.slide_mpp
    mpp = parse_mpp(given, where="slides.slide_mpp") if given else None
    chunks = array_chunks(load_cohort(slides, slide_mpp=mpp), config.executor)
    found = run_request(chunks, config)
    typer.echo(f"# for each of {len(chunks)} array tasks")
    for line in found.lines():
        typer.echo(f"# {line}")
    for directive in resource_directives(found.request, config.executor.at(Rung())):
        typer.echo(f"#SBATCH {directive}")
