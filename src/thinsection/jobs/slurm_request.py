"""What an array task asks Slurm for: what the plan predicts, flags that were given, or defaults.

`thinsection slurm script|submit`, `run --executor slurm` and `thinsection plan --slurm` ask here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thinsection.errors import BudgetError, CohortError, ConfigError, ThinsectionError
from thinsection.jobs.executor import Entry, ExecutorConfig, make_chunks
from thinsection.jobs.slurm_script import parse_walltime
from thinsection.plan.memory import SlideSize
from thinsection.plan.run_plan import (
    ENCODING_STAGES,
    Planner,
    planned_gpu,
    planner,
    slide_sizes,
)
from thinsection.slide.cohort import SlideEntry
from thinsection.slide.remote import is_url
from thinsection.stages.config import RunConfig
from thinsection.types import GIB, MIB
from thinsection.units import format_bytes, parse_bytes
from thinsection.usage.analysis import Request, format_walltime

MEMORY_MARGIN, TIME_MARGIN = 1.2, 1.5  # over the prediction; said beside the numbers
MAX_OPENED = 64  # headers that a submission opens at most: seconds, not minutes
_DEFAULT = Request(cpus=4, memory_bytes=8 * GIB, gpus=0, walltime_s=4 * 3600)
_ARRAY_TASKS = 8  # for a small cohort, where --workers does not say it
_MEMORY_STEP, LEAST_TIME_S = 256 * MIB, 300
_MIN_GPU_CPUS, _MAX_GPU_CPUS = 2, 16

Numbers = dict[str, tuple[int, str]]  # field of `Request` -> value, and where it comes from


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """The resources of one array task.

    Attributes:
        request: what is asked for.
        origins: a line per number: where it comes from, with its margin.
        warning: why there is no prediction; '' where there is one or nothing was left to predict.
    """

    request: Request
    origins: tuple[str, ...]
    warning: str = ""

    def lines(self) -> tuple[str, ...]:
        """For the person who submits: the warning, then the origins."""
        return (*([f"warning: {self.warning}"] if self.warning else []), *self.origins)


def array_chunks(entries: Sequence[Entry], config: ExecutorConfig) -> list[tuple[Entry, ...]]:
    """The slides of each array task."""
    return make_chunks(entries, config, workers=config.workers or _ARRAY_TASKS)


def job_request(
    chunks: Sequence[Sequence[SlideEntry]], config: RunConfig, *, stage: str = "aggregate"
) -> JobRequest:
    """What each task of an array over these chunks should ask for.

    All tasks of an array get the same, so it is planned for the hungriest imaginable: as many
    slides as the largest chunk has, as if they were the largest of up to `MAX_OPENED` whose headers
    and thumbnails are opened, evenly over the cohort by file size. A flag always wins; where all
    are given nothing is opened. Without a prediction the defaults are taken and `warning` says why.

    Raises:
        ConfigError: unknown GPU or setting.
        BudgetError: `--memory` does not hold the stream's least.
    """
    settings = config.executor
    numbers, warning = _defaults(config, stage), ""
    if not (settings.job_cpus and settings.job_memory and settings.walltime):
        try:
            numbers |= _predicted(chunks, config, stage)
        except (ConfigError, BudgetError):
            raise
        except ThinsectionError as error:
            warning = f"no prediction, so defaults are asked for: {error}"
    numbers |= _given(settings)
    request = Request(**{name: value for name, (value, _) in numbers.items()})
    return JobRequest(request=request, origins=_origins(request, numbers), warning=warning)


def given_or_default(
    settings: ExecutorConfig, *, bounds: Numbers | None = None, warning: str = ""
) -> JobRequest:
    """The flags that were given, else the bounds, else defaults: for jobs that no plan knows."""
    gpus = 1 if (settings.gres or "").startswith("gpu") else 0
    numbers = _plain(gpus=gpus) | (bounds or {}) | _given(settings)
    request = Request(**{name: value for name, (value, _) in numbers.items()})
    return JobRequest(request=request, origins=_origins(request, numbers), warning=warning)


def _defaults(config: RunConfig, stage: str) -> Numbers:
    wanted = stage in ENCODING_STAGES and planned_gpu(config) is not None
    return _plain(gpus=1 if wanted else 0)


def with_margins(memory_bytes: float, seconds: float) -> tuple[int, int]:
    """What is asked for: memory in steps of 256 MiB, whole minutes of at least five."""
    asked = math.ceil(memory_bytes * MEMORY_MARGIN / _MEMORY_STEP) * _MEMORY_STEP
    return asked, max(LEAST_TIME_S, math.ceil(seconds * TIME_MARGIN / 60) * 60)


def _plain(*, gpus: int) -> Numbers:
    names = ("cpus", "memory_bytes", "walltime_s")
    defaults = {name: (getattr(_DEFAULT, name), "default") for name in names}
    return {"gpus": (gpus, "the settings name one"), **defaults}


def _given(settings: ExecutorConfig) -> Numbers:
    found: Numbers = {}
    if settings.job_cpus:
        found["cpus"] = (settings.job_cpus, "--job-cpus")
    if settings.job_memory:
        found["memory_bytes"] = (parse_bytes(settings.job_memory), "--job-memory")
    if settings.walltime:
        found["walltime_s"] = (parse_walltime(settings.walltime), "--walltime")
    return found


def _predicted(chunks: Sequence[Sequence[SlideEntry]], config: RunConfig, stage: str) -> Numbers:
    opened = sample_entries([entry for chunk in chunks for entry in chunk])
    if not opened:
        raise CohortError(
            "no slide is a local file; those by URL are not opened before the job runs"
        )
    sizes, unreadable = slide_sizes(opened, config)
    if not sizes:
        raise CohortError(f"no slide opens, got {next(iter(unreadable.values()))}")
    by = planner(config, stage=stage)
    count = max(len(chunk) for chunk in chunks)
    ranked = sorted(sizes, key=lambda size: size.num_tiles, reverse=True)
    largest = (ranked * math.ceil(count / len(ranked)))[:count]
    cpus, why = config.executor.job_cpus, ""
    if not cpus:
        cpus, why = _cpus(by, largest)
    memory = by.memory(largest, cpus=cpus).host_bytes
    seconds = by.time(largest, cpus=cpus).wall_s
    asked, wall = with_margins(memory, seconds)
    on = f"on the {by.gpu.name}" if by.gpu else "at this machine's rates"
    slides = f"{count} slides" if count > 1 else "1 slide"
    return {
        "cpus": (cpus, why),
        "memory_bytes": (
            asked,
            f"predicted peak {format_bytes(memory)}, +{MEMORY_MARGIN - 1:.0%}",
        ),
        "walltime_s": (
            wall,
            f"predicted {seconds:.0f} s {on} for {slides} as large as the largest of "
            f"{len(sizes)} opened, +{TIME_MARGIN - 1:.0%}, at least {LEAST_TIME_S} s",
        ),
    }


def sample_entries(entries: Sequence[SlideEntry]) -> list[SlideEntry]:
    """At most `MAX_OPENED` local slides, evenly over their file sizes, the largest among them."""
    local = [e for e in entries if not is_url(e.slide_path) and Path(e.slide_path).is_file()]
    if len(local) <= MAX_OPENED:
        return local
    ranked = sorted(local, key=lambda e: Path(e.slide_path).stat().st_size, reverse=True)
    return [ranked[i * (len(ranked) - 1) // (MAX_OPENED - 1)] for i in range(MAX_OPENED)]


def _cpus(by: Planner, slides: Sequence[SlideSize]) -> tuple[int, str]:
    """As many as keep a GPU fed; on a CPU any number will do, so the default."""
    time = by.time(slides, cpus=1)
    if by.gpu is None or not time.encode_s:
        return _DEFAULT.cpus, "default"
    host_s = time.prepare_s + time.decode_s
    cpus = min(max(_MIN_GPU_CPUS, math.ceil(host_s / time.encode_s) + 1), _MAX_GPU_CPUS)
    return cpus, (
        f"decoding takes {host_s:.0f} CPU-s, the {by.gpu.name} encodes in {time.encode_s:.0f} s; "
        f"one more, {_MIN_GPU_CPUS} to {_MAX_GPU_CPUS}"
    )


def _origins(request: Request, numbers: Numbers) -> tuple[str, ...]:
    shown = {
        "cpus": f"{request.cpus} CPUs",
        "memory_bytes": format_bytes(request.memory_bytes),
        "walltime_s": format_walltime(request.walltime_s),
        **({"gpus": f"{request.gpus} GPU"} if request.gpus else {}),
    }
    return tuple(f"{text}: {numbers[name][1]}" for name, text in shown.items())
