"""Requested against used, for a run's output folder."""

import datetime
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from thinsection.errors import StoreError
from thinsection.files.atomic import write_json, write_text
from thinsection.usage.analysis import Efficiency, analyse
from thinsection.usage.model import ProcessUsage
from thinsection.usage.monitor import USAGE_FOLDER, read_usage
from thinsection.usage.page import efficiency_page

PAGE_NAME = "efficiency.html"


def efficiency(out: Path) -> Efficiency:
    """The analysis of an output folder.

    Raises:
        StoreError: no process left a record there.
    """
    usages = usages_of_run(out)
    if not any(usage.samples for usage in usages):
        raise StoreError(
            f"out must hold records of a run in {USAGE_FOLDER}/, got none in {str(out)!r}; "
            "run with the monitor on"
        )
    return analyse(usages)


def usages_of_run(out: Path) -> list[ProcessUsage]:
    """The records of the newest run, by the start that run.json names; all where it names none."""
    usages = read_usage(out)
    try:
        text = json.loads((out / "run.json").read_text(encoding="utf-8"))["started"]
    except (FileNotFoundError, ValueError, KeyError):
        return usages
    started = datetime.datetime.fromisoformat(text).timestamp() - 1  # it is cut to the second
    return [usage for usage in usages if usage.started >= started]


def write_efficiency(out: Path) -> Efficiency:
    """Writes efficiency.html and the section 'efficiency' of run.json where there is one."""
    analysis = efficiency(out)
    write_text(out / PAGE_NAME, efficiency_page(analysis, usages_of_run(out)))
    path = out / "run.json"
    if path.is_file():
        document = json.loads(path.read_text(encoding="utf-8"))
        write_json(path, document | {"efficiency": as_document(analysis)})
    return analysis


def as_document(analysis: Efficiency) -> dict[str, Any]:
    """The analysis as plain JSON values."""
    document = asdict(analysis)
    document["next_request"]["sbatch"] = list(analysis.next_request.sbatch_lines())
    return document
