"""Resources for each batch job of a run, predicted from a sample of its slides."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from thinsection.errors import BudgetError, CohortError, ConfigError, ThinsectionError
from thinsection.files.urls import is_url
from thinsection.jobs.executor import ResourceStep
from thinsection.jobs.request import (
    DEFAULT,
    Numbers,
    fit_to_nodes,
    fitting_nodes,
    job_request,
)
from thinsection.jobs.slurm_array import node_list
from thinsection.qc import load_pipeline
from thinsection.run import cost
from thinsection.run.cost import Planner, QcSize, SlideSize
from thinsection.run.plan import (
    Size,
    measure_slides,
    planned_gpu,
    planner,
    qc_size,
    slide_size,
)
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.config import RunConfig
from thinsection.types import counted, format_bytes
from thinsection.usage.analysis import (
    LEAST_TIME_S,
    MEMORY_MARGIN,
    TIME_MARGIN,
    Request,
    with_margins,
)

# largest number of headers that a submission opens, so that it takes seconds
MAX_OPENED = 64
_MIN_GPU_CPUS = 2
_MAX_GPU_CPUS = 16


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Largest use of resources in earlier jobs with the same settings."""

    peak_bytes: int  # peak memory of a process
    slide_s: float  # seconds of the slowest slide
    num_slides: int  # number of slides whose time is known


def run_request(
    chunks: Sequence[Sequence[SlideEntry]],
    spec: RunConfig,
    measured: Measured | None = None,
) -> Request:
    """Resources for each job of a run; a job works on one chunk.

    All jobs request the same, so the worst case is planned: as many slides as in the largest chunk,
    each as large as the largest in a sample. The sample has up to `MAX_OPENED` slides, evenly over
    the cohort by file size, whose headers and thumbnails are opened. Flags take precedence; if all
    are given, nothing is opened. Without a prediction (slides by URL, ...) the request follows
    from what earlier jobs used; without these, too, the defaults are used, and `warning` gives the
    reason.

    Raises ConfigError (unknown GPU or setting), BudgetError (`--memory` is below the minimum).
    """
    executor = spec.executor
    numbers: Numbers = {}
    if spec.output.until != "qc":
        on_gpu = bool(spec.encoding.encoders) and planned_gpu(spec) is not None
        numbers["gpus"] = (int(on_gpu), "the number in the settings")
    warning = ""
    if not (executor.job_cpus and executor.job_memory and executor.walltime):
        count = max(len(chunk) for chunk in chunks)
        try:
            sample = sample_entries([entry for chunk in chunks for entry in chunk])
            if spec.output.until == "qc":
                numbers |= _qc_numbers(sample, count, spec)
            else:
                numbers |= _run_numbers(sample, count, spec)
        except (ConfigError, BudgetError):
            raise
        except ThinsectionError as error:
            if measured is None:
                warning = f"no prediction, so the job requests the defaults: {error}"
            else:
                numbers |= _measured_numbers(measured, count, spec)
    return job_request(executor, numbers, warning=warning)


def fitting_request(
    chunks: Sequence[Sequence[SlideEntry]], spec: RunConfig, gpu_bytes: int
) -> tuple[Request, tuple[str, ...] | None]:
    """`run_request` fitted to the nodes of the batch system, and a line for each that suits it.

    Args:
        chunks: slides of each job.
        spec: settings of the run.
        gpu_bytes: memory that the run needs on a GPU.

    Returns:
        The request, and the lines; None in place of the lines if no batch system answers here.
    """
    nodes = node_list()
    request = fit_to_nodes(run_request(chunks, spec), nodes, spec.executor)
    first = spec.executor.at_step(ResourceStep())
    gres_parts = (first.gres or "").split(":")[1:]
    wanted_gpus = [part for part in gres_parts if not part.isdigit()]

    def suits(gpu_name: str) -> bool:
        if wanted_gpus:
            return gpu_name == "" or gpu_name in wanted_gpus
        gpu = cost.GPUS.get(gpu_name)
        return gpu is None or gpu_bytes <= gpu.memory_bytes

    if not nodes:
        return request, None
    return request, tuple(fitting_nodes(nodes, request, suits=suits))


def sample_entries(entries: Sequence[SlideEntry]) -> list[SlideEntry]:
    """At most `MAX_OPENED` local slides, evenly over their file sizes, including the largest.

    Raises CohortError: there is no local file.
    """
    local = [
        entry
        for entry in entries
        if not is_url(entry.slide_path) and Path(entry.slide_path).exists()
    ]
    if not local:
        raise CohortError(
            "no slide is a local file, and slides by URL are opened only when the job runs"
        )
    if len(local) <= MAX_OPENED:
        return local
    local.sort(key=lambda entry: Path(entry.slide_path).stat().st_size, reverse=True)
    last = len(local) - 1
    return [local[i * last // (MAX_OPENED - 1)] for i in range(MAX_OPENED)]


def _measure_sample(
    sample: Sequence[SlideEntry], measure: Callable[[SlideEntry], Size]
) -> tuple[Size, ...]:
    """Results of `measure` for the slides that open. Raises CohortError: no slide opens."""
    sizes, unreadable = measure_slides(sample, measure)
    if not sizes:
        raise CohortError(
            f"no slide can be opened, got {next(iter(unreadable.values()))}"
        )
    return sizes


def _run_numbers(sample: list[SlideEntry], count: int, spec: RunConfig) -> Numbers:
    """Predicted CPUs, memory and time of a run over `count` slides."""
    sizes = _measure_sample(sample, partial(slide_size, spec=spec))
    formulas = planner(spec)
    ranked = sorted(sizes, key=lambda size: size.num_tiles, reverse=True)
    largest = (ranked * math.ceil(count / len(ranked)))[:count]
    cpus = (spec.executor.job_cpus or 0, "")
    if not cpus[0]:
        cpus = _cpus(formulas, largest)
    memory = formulas.memory(largest, cpus=cpus[0]).host_bytes
    seconds = formulas.time(largest, cpus=cpus[0]).wall_s
    rates = "at this machine's rates"
    if formulas.gpu is not None:
        rates = f"on the {formulas.gpu.name}"
    return _with_margins(
        cpus,
        (
            memory,
            f"predicted peak {format_bytes(memory)} of an array task on "
            f"{counted(cpus[0], 'CPU')} over {counted(count, 'slide')}",
        ),
        (seconds, f"predicted {seconds:.0f} s {rates} {_basis(count, len(sizes))}"),
    )


def _cpus(formulas: Planner, slides: Sequence[SlideSize]) -> tuple[int, str]:
    """Number of CPUs that keep a GPU busy, and why; without a GPU, the default."""
    time = formulas.time(slides, cpus=1)
    if formulas.gpu is None or not time.encode_s:
        return DEFAULT.cpus, "default"
    host_s = time.prepare_s + time.decode_s
    cpus = math.ceil(host_s / time.encode_s) + 1
    reason = (
        f"decoding needs {host_s:.0f} CPU-s and encoding {time.encode_s:.0f} s on the "
        f"{formulas.gpu.name}; one CPU more than that, between {_MIN_GPU_CPUS} and "
        f"{_MAX_GPU_CPUS}"
    )
    return min(max(_MIN_GPU_CPUS, cpus), _MAX_GPU_CPUS), reason


def _qc_numbers(sample: Sequence[SlideEntry], count: int, spec: RunConfig) -> Numbers:
    """One CPU, and upper bounds of memory and time, for quality control of `count` slides."""
    pipeline = load_pipeline(spec.qc.qc, remove=spec.qc.qc_remove)

    def measure(entry: SlideEntry) -> QcSize:
        # only its header is read
        with entry.open(spec.slides.reader) as slide:
            return qc_size(slide, pipeline, entry)

    sizes = _measure_sample(sample, measure)
    memory = max(size.peak_bytes for size in sizes)
    seconds = cost.TRAINING_S + count * max(size.most_s for size in sizes)
    opened = counted(len(sizes), "opened slide")
    peak = f"at most {format_bytes(memory)} for the largest of {opened}"
    time = f"at most {math.ceil(seconds)} s {_basis(count, len(sizes))}"
    return _with_margins((1, "the checks use one CPU"), (memory, peak), (seconds, time))


def _measured_numbers(measured: Measured, count: int, spec: RunConfig) -> Numbers:
    """Memory and time of a job over `count` slides, from earlier jobs."""
    slides = counted(measured.num_slides, "slide")
    seconds = count * measured.slide_s
    return _with_margins(
        (spec.executor.job_cpus or DEFAULT.cpus, "default"),
        (
            measured.peak_bytes,
            f"earlier jobs used {format_bytes(measured.peak_bytes)}",
        ),
        (
            seconds,
            f"{math.ceil(seconds)} s for {counted(count, 'slide')} that take as long as the "
            f"slowest of {slides} before",
        ),
    )


def _with_margins(
    cpus: tuple[int, str], memory: tuple[int, str], time: tuple[float, str]
) -> Numbers:
    """Each number with its margin, which is stated beside the source of the number."""
    memory_bytes, walltime_s = with_margins(memory[0], time[0])
    return {
        "cpus": cpus,
        "memory_bytes": (memory_bytes, f"{memory[1]}, +{MEMORY_MARGIN - 1:.0%}"),
        "walltime_s": (
            walltime_s,
            f"{time[1]}, +{TIME_MARGIN - 1:.0%}, at least {LEAST_TIME_S} s",
        ),
    }


def _basis(count: int, num_opened: int) -> str:
    """Describes the slides on which a prediction is based."""
    slides = counted(count, "slide")
    return f"for {slides} of the size of the largest ({num_opened} opened)"
