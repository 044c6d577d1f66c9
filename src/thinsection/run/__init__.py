"""Tasks, executors and the run that holds them together.

Names are imported when they are first used: a worker that only does quality control, or reads a
cohort, starts without torch (0.3 s and 60 MB in place of 1.7 s and 270 MB).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinsection.pipeline.api import RunSummary, run
    from thinsection.pipeline.results import SlideResult
    from thinsection.pipeline.slides import RunEvent, process_slides
    from thinsection.slide.cohort import SlideEntry, load_cohort
    from thinsection.stages.config import RunConfig

_MODULES = {
    "RunConfig": "config",
    "RunEvent": "slides",
    "RunSummary": "api",
    "SlideEntry": "cohort",
    "SlideResult": "results",
    "load_cohort": "cohort",
    "process_slides": "slides",
    "run": "api",
}

__all__ = [
    "RunConfig",
    "RunEvent",
    "RunSummary",
    "SlideEntry",
    "SlideResult",
    "load_cohort",
    "process_slides",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
