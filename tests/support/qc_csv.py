"""Reads a `qc.csv` back."""

from pathlib import Path

from thinsection.files.atomic import read_table
from thinsection.qc.checks.check import Score


def read_qc_csv(path: Path) -> list[dict[str, Score]]:
    """The rows; cells that are numbers come back as float."""
    return [{k: _number_or_text(v) for k, v in row.items()} for row in read_table(path)]


def _number_or_text(text: str) -> Score:
    try:
        return float(text)
    except ValueError:
        return text
