"""Reads a `qc.csv` back."""

import csv
from pathlib import Path

from thinsection.qc.checks.check import Score


def read_qc_csv(path: Path) -> list[dict[str, Score]]:
    """The rows; cells that are numbers come back as float."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{k: _number_or_text(v) for k, v in row.items()} for row in csv.DictReader(file)]


def _number_or_text(text: str) -> Score:
    try:
        return float(text)
    except ValueError:
        return text
