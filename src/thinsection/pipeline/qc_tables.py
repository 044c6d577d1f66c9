"""The table and the page of quality control, from what each slide's folder says."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinsection.pipeline.results import read_failure
from thinsection.qc import load_pipeline, qc_fail
from thinsection.qc.checks.check import Score
from thinsection.qc.engine import QcRule, parse_rule
from thinsection.report.qc_files import QC_FORMAT, QC_JSON, write_qc_csv
from thinsection.report.qc_sheet import write_qc_sheet
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.config import RunConfig
from thinsection.stages.masks import QcStage
from thinsection.stages.request import mask_stage


def qc_stage(config: RunConfig) -> QcStage:
    """The stage of a run's quality control."""
    stage = mask_stage(config, load_pipeline(config.qc.qc))
    assert isinstance(stage, QcStage)
    return stage


def write_qc_tables(out: Path, entries: Sequence[SlideEntry], config: RunConfig) -> None:
    """Writes qc_NAME.csv and qc_NAME.html of the slides that quality control has looked at."""
    stage = qc_stage(config)
    rows = qc_rows(out, entries, stage)
    failing = failing_rules(rows, config.qc.qc_fail)
    for row in rows:
        row["fails"] = "|".join(str(rule) for slide, rule in failing if slide == row["slide_id"])
    write_qc_csv(out / f"qc_{stage.name}.csv", rows)
    write_qc_sheet(out / f"qc_{stage.name}.html", rows, title="Quality control")


def qc_rows(out: Path, entries: Sequence[SlideEntry], stage: QcStage) -> list[dict[str, Score]]:
    """The line of each slide: what its qc.json says, or why there is none."""
    rows: list[dict[str, Score]] = []
    for entry in entries:
        folder = stage.folder(entry.slide_id)
        first: dict[str, Score] = {"slide_id": entry.slide_id, "slide_path": entry.slide_path}
        first["folder"] = folder
        document = _document(out / folder / QC_JSON)
        if document is not None:
            found = {**document["facts"], **document["scores"]}
            warnings = "|".join(document["warnings"])
            rows.append({**first, "status": "done", **found, "warnings": warnings})
            continue
        failure = read_failure(out, entry.slide_id)
        if failure is not None:
            rows.append({**first, "status": "failed", "warnings": failure.error})
    return rows


def _document(path: Path) -> dict[str, Any] | None:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if document.get("format") == QC_FORMAT else None


def failing_rules(
    rows: Sequence[dict[str, Score]], rules: Sequence[str]
) -> list[tuple[str, QcRule]]:
    """(slide_id, rule) for each rule that holds for a slide that was looked at."""
    parsed = [parse_rule(rule) for rule in rules]
    done = [row for row in rows if row["status"] == "done"]
    return [(str(row["slide_id"]), rule) for row in done for rule in parsed if qc_fail(row, rule)]
