"""Requested against used: the page of an invocation's record."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from thinsection.errors import StoreError
from thinsection.files.atomic import write_text
from thinsection.pipeline.records import Record, end_record, last_record
from thinsection.usage.analysis import Efficiency, analyse
from thinsection.usage.monitor import read_usage
from thinsection.usage.page import efficiency_page

PAGE_NAME = "efficiency.html"


def efficiency(out: Path) -> tuple[Efficiency, Path]:
    """The analysis of the newest invocation that did work, and its page.

    Args:
        out: a results folder.

    Raises:
        StoreError: no invocation did work there, or it left no record of what it used.
    """
    record = last_record(out)
    return write_efficiency(record.folder), record.folder / PAGE_NAME


def write_efficiency(folder: Path) -> Efficiency:
    """Writes efficiency.html of a record, and its section 'efficiency' of run.json.

    Raises:
        StoreError: no process left a record of what it used.
    """
    usages = read_usage(folder)
    if not any(usage.samples for usage in usages):
        raise StoreError(f"record must hold usage/*.jsonl of a run, got none in {str(folder)!r}")
    analysis = analyse(usages)
    write_text(folder / PAGE_NAME, efficiency_page(analysis, usages))
    end_record(Record.read(folder), {"efficiency": as_document(analysis)})
    return analysis


def as_document(analysis: Efficiency) -> dict[str, Any]:
    """The analysis as plain JSON values."""
    document = asdict(analysis)
    if analysis.next_request is not None:
        document["next_request"]["sbatch"] = list(analysis.next_request.sbatch_lines())
    return document
