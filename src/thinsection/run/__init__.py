"""Tasks, executors and the run that holds them together."""

from thinsection.run.api import RunSummary, run
from thinsection.run.cohort import SlideEntry, load_cohort
from thinsection.run.config import RunConfig
from thinsection.run.results import SlideResult
from thinsection.run.slides import RunEvent, process_slides

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
