"""`thinsection plan`: predicts memory and time of a run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from thinsection.cli.documents import JobPlan, PlanDocument, print_document
from thinsection.cli.flags import AsJson, SlidesArgument, with_config
from thinsection.errors import ConfigError
from thinsection.machine import cpu_count
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.config import RunConfig
from thinsection.tiles.budget import StreamConfig
from thinsection.types import format_bytes

if TYPE_CHECKING:
    from thinsection.run.cost import MemoryPlan
    from thinsection.run.plan import RunPlan

app = typer.Typer()
SlurmFlag = Annotated[
    bool,
    typer.Option("--slurm", help="Also print the #SBATCH lines of a Slurm job."),
]


Planned = Annotated[
    str,
    typer.Option(
        "--command",
        help="Command to plan: run, or one that reads stored embeddings: import, "
        "export trident, export stamp, export qupath, export anndata, export clam, export "
        "slide2vec, aggregate, predict, heatmap, train, view. SLIDES is then its folder; for "
        "predict and heatmap it is the model and the folder.",
    ),
]


@app.command("plan")
@with_config(RunConfig, works=False)
def plan(
    slides: SlidesArgument,
    slurm: SlurmFlag = False,
    as_json: AsJson = False,
    command: Planned = "run",
    *,
    config: RunConfig,
) -> None:
    """Predict the peak memory and the time of `thinsection run` with the same options.

    Nothing is computed or written: headers and thumbnails suffice. The first call measures this
    machine, which takes some seconds. Later calls read the stored rates and say their date.

    \b
    Examples:
      thinsection plan slides/ --encoder uni2_h
      thinsection plan slides/ --encoder uni2_h --slurm --gpu a40
      thinsection plan model.safetensors results/ --command predict

    The option --gpu names the GPU model of a Slurm job; see --help-all.
    """
    if command != "run":
        if slurm:
            raise ConfigError(f"command must be run with --slurm, got {command!r}")
        _plan_command(command, slides, config, as_json=as_json)
        return
    from thinsection.stages.spec import cohort_of, resolve

    # a wrong path or name is said before slow work
    spec = resolve(config)
    entries = cohort_of(slides, spec.slides, spec.regions)

    from thinsection.run.plan import plan as predict

    predicted = predict(
        entries, config=config, on_message=lambda text: typer.echo(text, err=True)
    )
    job = None
    if slurm:
        job = _plan_job(entries, spec, predicted.memory.gpu_bytes)
    if as_json:
        print_document(PlanDocument.of(predicted, job))
        return
    _show_plan(predicted)
    if job is not None:
        _show_job(job)


def _plan_command(
    command: str, paths: Sequence[str], config: RunConfig, *, as_json: bool
) -> None:
    """Prints the peak memory and the time of a command that reads stored embeddings."""
    from thinsection.cli.command_memory import check_command, command_memory
    from thinsection.cli.command_time import command_time
    from thinsection.run.calibration import rates_note
    from thinsection.run.plan import local_workers
    from thinsection.run.rates import machine_rates

    # a wrong name is said before the machine is measured
    check_command(command)
    memory = config.stream.memory
    workers = local_workers(config.executor)[0]

    def process_bytes() -> int:
        return machine_rates(_on_standard_error).process_bytes

    size, planned = command_memory(
        command,
        paths,
        memory=None if memory == StreamConfig().memory else memory,
        workers=workers,
        process_bytes=process_bytes,
    )
    machine = machine_rates(_on_standard_error)
    time = command_time(command, size, machine, workers=workers)
    if as_json:
        print_document(PlanDocument.of_command(command, size, planned, time, machine))
        return
    _show_memory(planned)
    console = Console()
    console.print(
        f"{len(size.num_tiles)} slides, {sum(size.num_tiles)} tiles of {size.dim} channels; the "
        f"largest has {size.most_tiles}: {time.wall_s:.1f} s (start {time.start_s:.1f}, work "
        f"{time.work_s:.1f})",
        highlight=False,
    )
    console.print(rates_note(machine.measured_on, machine.load), highlight=False)
    for warning in time.warnings:
        console.print(warning, highlight=False)


def _on_standard_error(text: str) -> None:
    typer.echo(text, err=True)


def _show_memory(memory: "MemoryPlan") -> None:
    """Prints the parts of a peak."""
    from thinsection.run.cost import MARGIN

    table = Table("part", "host memory", "GPU memory")
    for name in dict.fromkeys([*memory.host, *memory.gpu]):
        host = _size(memory.host.get(name))
        table.add_row(name, host, _size(memory.gpu.get(name)))
    gpu_peak = _size(memory.gpu_bytes) if memory.gpu else ""
    peak_label = f"peak, margin {MARGIN - 1:.0%}"
    table.add_row(peak_label, _size(memory.host_bytes), gpu_peak, style="bold")
    Console().print(table)


def _show_plan(predicted: "RunPlan") -> None:
    """Prints the parts of the memory, the seconds, the warnings and the advice."""
    console = Console()
    _show_memory(predicted.memory)
    time = predicted.time
    num_tiles = sum(slide.num_tiles for slide in predicted.slides)
    device = "GPU" if predicted.gpu else "CPU"
    console.print(
        f"{len(predicted.slides)} slides, {num_tiles} tiles: {time.wall_s:.0f} s "
        f"(start {time.start_s:.0f}, tissue {time.prepare_s:.0f}, "
        f"decode {time.decode_s:.0f}, encode {time.encode_s:.0f} {device}-s)",
        highlight=False,
    )
    console.print(predicted.rates_note, highlight=False)
    if predicted.qc_device:
        console.print(predicted.qc_device, markup=False, highlight=False)
    for name, reason in predicted.unreadable.items():
        console.print(f"{name} does not open: {reason}", style="yellow", markup=False)
    for warning in predicted.warnings:
        console.print(f"warning: {warning}", style="bold red", markup=False)
    for advice in predicted.advice:
        console.print(f"faster: {advice}", markup=False, highlight=False)


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else format_bytes(num_bytes)


def _plan_job(
    entries: Sequence[SlideEntry], spec: RunConfig, gpu_bytes: int
) -> JobPlan:
    """Request that `thinsection slurm script` would make, and the nodes that fit it."""
    from thinsection.jobs.backend import make_chunks
    from thinsection.jobs.executor import ResourceStep
    from thinsection.jobs.request import resource_directives
    from thinsection.run.job import fitting_request

    chunks = make_chunks(entries, spec.executor)
    request, nodes = fitting_request(chunks, spec, gpu_bytes)
    first = spec.executor.at_step(ResourceStep())
    return JobPlan(
        num_tasks=len(chunks),
        **request.numbers,
        directives=tuple(resource_directives(request, first)),
        origins=request.lines,
        nodes=nodes,
    )


def _show_job(job: JobPlan) -> None:
    """Prints a request as the lines of a batch script."""
    typer.echo(
        f"# for each of {job.num_tasks} array tasks, each on {job.cpus} CPUs; the table above is "
        f"for one run on this machine with {cpu_count()} CPUs, whose threads need other memory"
    )
    for line in job.origins:
        typer.echo(f"# {line}")
    for directive in job.directives:
        typer.echo(f"#SBATCH {directive}")
    if job.nodes is None:
        typer.echo("# sinfo does not answer here: no word on partitions")
        return
    for line in job.nodes or ("no partition has a node that this fits",):
        typer.echo(f"# {line}")
