"""What one batch job asks for, number by number: a flag, a prediction or bound, or a default."""

import math
from dataclasses import dataclass, fields

from thinsection.jobs.executor import ExecutorConfig, Rung, parse_walltime
from thinsection.types import GIB, MIB
from thinsection.units import format_bytes, parse_bytes
from thinsection.usage.analysis import Request, format_walltime

MEMORY_MARGIN, TIME_MARGIN = 1.2, 1.5  # over a prediction; said beside the numbers
DEFAULT = Request(cpus=4, memory_bytes=8 * GIB, gpus=0, walltime_s=4 * 3600)
LEAST_TIME_S = 300
_MEMORY_STEP = 256 * MIB

Numbers = dict[str, tuple[int, str]]  # field of `Request` -> value, and where it comes from


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """The resources of one job.

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


def job_request(
    config: ExecutorConfig, predicted: Numbers | None = None, *, warning: str = ""
) -> JobRequest:
    """The flags that were given, else what is predicted, else defaults.

    Args:
        config: with the flags; of lists the first.
        predicted: or bounds; by field of `Request`, each with a word on where it comes from.
        warning: why some are not predicted.
    """
    config = config.at(Rung())
    gpus = 1 if (config.gres or "").startswith("gpu") else 0
    numbers: Numbers = {f.name: (getattr(DEFAULT, f.name), "default") for f in fields(Request)}
    numbers |= {"gpus": (gpus, "the settings name one")}
    numbers |= (predicted or {}) | _given(config)
    request = Request(**{name: value for name, (value, _) in numbers.items()})
    shown = {
        "cpus": f"{request.cpus} CPUs",
        "memory_bytes": format_bytes(request.memory_bytes),
        "walltime_s": format_walltime(request.walltime_s),
        **({"gpus": f"{request.gpus} GPU"} if request.gpus else {}),
    }
    origins = tuple(f"{text}: {numbers[name][1]}" for name, text in shown.items())
    return JobRequest(request=request, origins=origins, warning=warning)


def all_given(config: ExecutorConfig) -> bool:
    """Whether flags say everything, so that nothing needs to be predicted."""
    return bool(config.job_cpus and config.job_memory and config.walltime)


def with_margins(memory_bytes: float, seconds: float) -> tuple[int, int]:
    """What is asked for: memory in steps of 256 MiB, whole minutes of at least five."""
    asked = math.ceil(memory_bytes * MEMORY_MARGIN / _MEMORY_STEP) * _MEMORY_STEP
    return asked, max(LEAST_TIME_S, math.ceil(seconds * TIME_MARGIN / 60) * 60)


def _given(config: ExecutorConfig) -> Numbers:
    found: Numbers = {}
    if config.job_cpus:
        found["cpus"] = (config.job_cpus, "--job-cpus")
    if config.job_memory:
        found["memory_bytes"] = (parse_bytes(config.job_memory), "--job-memory")
    if config.walltime:
        found["walltime_s"] = (parse_walltime(config.walltime), "--walltime")
    return found
