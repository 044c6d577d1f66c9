"""Before a run: `thinsection plan` predicts memory and time, `config` shows every setting."""

import subprocess
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from thinsection.cli.options import with_config
from thinsection.cli.run import SlidesArgument
from thinsection.stages.config import RunConfig, check_encoder_names

app = typer.Typer()


@app.command("plan")
@with_config(RunConfig)
def plan(
    slides: SlidesArgument,
    slurm: Annotated[bool, typer.Option("--slurm", help="Print #SBATCH lines too.")] = False,
    config: Any = None,
) -> None:
    """Predict peak memory and time from headers and thumbnails; no tile is decoded.

    Example: thinsection plan slides/ --gpu a40 --encoder uni2_h --slurm
    """
    from thinsection.slide.cohort import load_cohort

    load_cohort(slides)  # a wrong path or name is said before what is slow
    check_encoder_names(config, "aggregate")

    from thinsection.planning.cost import MARGIN
    from thinsection.planning.plan import plan as predict
    from thinsection.units import format_bytes

    found = predict(slides, config=config, on_message=lambda text: typer.echo(text, err=True))
    memory, time, console = found.memory, found.time, Console()
    table = Table("part", "host memory", "GPU memory")
    for name in dict.fromkeys((*memory.host, *memory.gpu)):
        parts = (memory.host.get(name), memory.gpu.get(name))
        table.add_row(name, *("" if p is None else format_bytes(p) for p in parts))
    peaks = (format_bytes(memory.host_bytes), format_bytes(memory.gpu_bytes) if memory.gpu else "")
    table.add_row(f"peak, margin {MARGIN - 1:.0%}", *peaks, style="bold")
    console.print(table)
    total = f"{len(found.slides)} slides, {sum(s.num_tiles for s in found.slides)} tiles"
    steps = f"start {time.start_s:.0f}, tissue {time.prepare_s:.0f}, decode {time.decode_s:.0f}"
    encode = f"encode {time.encode_s:.0f} {'GPU' if found.gpu else 'CPU'}-s"
    console.print(f"{total}: {time.wall_s:.0f} s ({steps}, {encode})", highlight=False)
    for name, reason in found.unreadable.items():
        console.print(f"{name} does not open: {reason}", style="yellow", markup=False)
    for warning in found.warnings:
        console.print(f"warning: {warning}", style="bold red", markup=False)
    if slurm:
        _show_request(slides, config, memory.gpu_bytes)


def _show_request(slides: list[str], config: Any, gpu_bytes: int) -> None:
    """Prints what `thinsection slurm script` would write for the same, and where it fits."""
    from thinsection.jobs.executor import Rung, make_chunks
    from thinsection.jobs.request import SINFO, fitting_nodes, resource_directives
    from thinsection.planning.cost import GPUS
    from thinsection.planning.plan import run_request
    from thinsection.stages.request import cohort_of

    chunks = make_chunks(cohort_of(slides, config), config.executor)
    found = run_request(chunks, config)
    for line in (f"for each of {len(chunks)} array tasks", *found.lines()):
        typer.echo(f"# {line}")
    for directive in resource_directives(found.request, config.executor.at(Rung())):
        typer.echo(f"#SBATCH {directive}")
    asked = (config.executor.at(Rung()).gres or "").split(":")[1:]
    named = [part for part in asked if not part.isdigit()]
    try:
        how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 30}
        listed = subprocess.run(SINFO, check=True, **how).stdout
    except (OSError, subprocess.SubprocessError):
        typer.echo("# sinfo does not answer here: no word on partitions")
        return

    def suits(name: str) -> bool:
        card = GPUS.get(name)
        return name in (*named, "") if named else card is None or gpu_bytes <= card.memory_bytes

    fitting = fitting_nodes(listed, found.request, suits=suits)
    for line in fitting or ["no partition has a node that this fits"]:
        typer.echo(f"# {line}")


@app.command("config")
def show_config(
    write: Annotated[Path | None, typer.Option(help="Write to this new file.")] = None,
    config: Annotated[Path | None, typer.Option(help="Start from this TOML file, checked.")] = None,
) -> None:
    """Show every setting of `thinsection run` as commented TOML.

    Example: thinsection config --write run.toml
    """
    from thinsection.config import dump_toml, from_mapping, read_toml
    from thinsection.errors import ConfigError, require
    from thinsection.files.atomic import write_text

    text = dump_toml(from_mapping(RunConfig, read_toml(config)) if config else RunConfig())
    if write is None:
        print(text, end="")
        return
    got = f"{str(write)!r}; it exists"
    require(not write.exists(), "write must name a new file", got, error=ConfigError)
    write_text(write, text)
    print(f"wrote {write}")
