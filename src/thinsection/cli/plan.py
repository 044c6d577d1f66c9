"""`thinsection plan`: predicts memory and time of a run."""

import subprocess
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from thinsection.cli.flags import with_config
from thinsection.stages.config import RunConfig
from thinsection.stages.spec import RunSpec, resolve
from thinsection.types import format_bytes

app = typer.Typer()
SlidesArgument = Annotated[
    list[str],
    typer.Argument(
        help="Slide files, folders, URLs, or cohort tables (CSV).", show_default=False
    ),
]
SlurmFlag = Annotated[
    bool,
    typer.Option("--slurm", help="Also print the #SBATCH lines of a Slurm job."),
]


@app.command("plan")
@with_config(RunConfig)
def plan(
    slides: SlidesArgument, slurm: SlurmFlag = False, *, config: RunConfig
) -> None:
    """Predict the peak memory and the time of `thinsection run` with the same options.

    The options are those of `thinsection run`. Here they change only the prediction: no result is
    computed or written. The prediction needs only headers and thumbnails of the slides.
    The first call measures this machine, which takes some seconds.

    \b
    Examples:
      thinsection plan slides/ --encoder uni2_h
      thinsection plan slides/ --encoder uni2_h --slurm --gpu a40

    The option --gpu names the GPU model of a Slurm job; see --help-all.
    """
    from thinsection.slide.cohort import load_cohort

    # report a wrong path or name before slow work
    load_cohort(slides)
    spec = resolve(config)

    from thinsection.planning.cost import MARGIN
    from thinsection.planning.plan import plan as predict

    predicted = predict(
        slides, config=config, on_message=lambda text: typer.echo(text, err=True)
    )
    console = Console()
    memory = predicted.memory
    table = Table("part", "host memory", "GPU memory")
    for name in dict.fromkeys([*memory.host, *memory.gpu]):
        host = _size(memory.host.get(name))
        table.add_row(name, host, _size(memory.gpu.get(name)))
    gpu_peak = _size(memory.gpu_bytes) if memory.gpu else ""
    peak_label = f"peak, margin {MARGIN - 1:.0%}"
    table.add_row(peak_label, _size(memory.host_bytes), gpu_peak, style="bold")
    console.print(table)

    time = predicted.time
    num_tiles = sum(slide.num_tiles for slide in predicted.slides)
    device = "GPU" if predicted.gpu else "CPU"
    console.print(
        f"{len(predicted.slides)} slides, {num_tiles} tiles: {time.wall_s:.0f} s "
        f"(start {time.start_s:.0f}, tissue {time.prepare_s:.0f}, "
        f"decode {time.decode_s:.0f}, encode {time.encode_s:.0f} {device}-s)",
        highlight=False,
    )
    for name, reason in predicted.unreadable.items():
        console.print(f"{name} does not open: {reason}", style="yellow", markup=False)
    for warning in predicted.warnings:
        console.print(f"warning: {warning}", style="bold red", markup=False)
    if slurm:
        _print_request(slides, spec, memory.gpu_bytes)


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else format_bytes(num_bytes)


def _print_request(slides: list[str], spec: RunSpec, gpu_bytes: int) -> None:
    """Prints the request that `thinsection slurm script` would make, and the nodes that fit it."""
    from thinsection.jobs.chunks import make_chunks
    from thinsection.jobs.executor import Rung
    from thinsection.jobs.request import SINFO, fitting_nodes, resource_directives
    from thinsection.planning.cost import GPUS
    from thinsection.planning.job import run_request
    from thinsection.stages.request import cohort_of

    entries = cohort_of(slides, spec.slides, spec.regions)
    chunks = make_chunks(entries, spec.executor)
    job = run_request(chunks, spec)
    typer.echo(f"# for each of {len(chunks)} array tasks")
    for line in job.lines():
        typer.echo(f"# {line}")
    first = spec.executor.at_rung(Rung())
    for directive in resource_directives(job.request, first):
        typer.echo(f"#SBATCH {directive}")
    try:
        sinfo = subprocess.run(
            SINFO, check=True, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        typer.echo("# sinfo does not answer here: no word on partitions")
        return
    gres_parts = (first.gres or "").split(":")[1:]
    wanted_cards = [part for part in gres_parts if not part.isdigit()]

    def suits(card: str) -> bool:
        if wanted_cards:
            return card == "" or card in wanted_cards
        gpu = GPUS.get(card)
        return gpu is None or gpu_bytes <= gpu.memory_bytes

    lines = fitting_nodes(sinfo.stdout, job.request, suits=suits)
    for line in lines or ["no partition has a node that this fits"]:
        typer.echo(f"# {line}")
