"""Files of a probe's result: JSON and CSV for programs, a page for people."""

import json
from collections.abc import Iterable
from pathlib import Path

from thinsection.config import as_mapping
from thinsection.files.atomic import write_bytes, write_json, write_table, write_text
from thinsection.files.pages import render_page
from thinsection.probe.plots import LOSSES, probe_pictures
from thinsection.probe.result import ProbeResult, per_class_rows, selection_words
from thinsection.report.home import index_address

PROBE_WORDS = {
    "linear": "Linear probe",
    "knn": "kNN probe",
    "fewshot": "16-shot probe (SimpleShot)",
    "tileset": "Tile-set score",
    "slide": "Slide probe (logistic regression)",
    "survival": "Survival probe (Cox)",
    "robustness": "Robustness index (PathoROB)",
    "segment": "Segmentation probe (MaskTransformer)",
    "regression": "Regression probe (PCA and ridge)",
    "retrieval": "Retrieval",
    "calibration": "Calibration of the linear probe",
    "invariance": "Invariance under stain, blur, JPEG and rotation",
    "clustering": "Clustering score (PathoROB)",
    "apd": "Average performance drop (PathoROB)",
}
# shown above, as pictures or row by row, or too long for a table of details
LONG_DETAILS = ("curve", "selected_on", *LOSSES[:2])


def write_probe_report(result: ProbeResult, out_dir: Path) -> Path:
    """Writes <probe>.json, .csv, .html and <probe>_<picture>.png, each atomically.

    Returns the page, <probe>.html, where nothing is fetched.

    Memory: the pictures and the rows as text. Raises MissingDependencyError: no matplotlib.
    """
    pictures = probe_pictures(result)
    page = out_dir / f"{result.probe}.html"
    for picture in pictures:
        write_bytes(out_dir / f"{result.probe}_{picture.name}.png", picture.png)
    columns = _columns(result)
    write_table(
        page.with_suffix(".csv"), zip(*columns.values(), strict=True), list(columns)
    )
    words = PROBE_WORDS.get(result.probe, f"Probe {result.probe}")
    settings = selection_words(result)
    rows = result.predictions
    html = render_page(
        "thinsection.probe",
        "probe.html.j2",
        home=index_address(out_dir),
        title=f"{words} on {result.dataset}",
        score=f"{result.score:.4f}",
        metric=result.metric_words,
        interval=interval_words(result),
        settings=settings,
        classes=[] if rows is None else per_class_rows(rows),
        facts=_facts(result),
        pictures=[picture.for_page() for picture in pictures],
        protocol=json.dumps(as_mapping(result.protocol), indent=2),
    )
    write_text(page, html)
    document = {**result.as_mapping(), "settings_chosen": settings}
    write_json(page.with_suffix(".json"), document)  # last: where it is, the rest is
    return page


def _columns(result: ProbeResult) -> dict[str, Iterable[object]]:
    """Columns by header: the answers row by row; else details by name."""
    rows = result.rows
    if rows is None:
        return {"name": result.details.keys(), "value": result.details.values()}
    columns: dict[str, Iterable[object]] = {"id": rows.ids}
    if rows.groups is not None:
        columns["group"] = rows.groups.of_row
    if rows.fold is not None:
        columns["fold"] = rows.fold.tolist()
    return columns | rows.columns


def interval_words(result: ProbeResult) -> str:
    """The interval with what was resampled, or why there is none."""
    interval = result.interval
    if interval is None:
        return "no interval"
    if interval.missing:
        return f"no interval: {interval.missing}"
    ends = f"{interval.low:.4f} to {interval.high:.4f}"
    words = (
        f"{interval.level:.0%} interval {ends}, from {interval.units} {interval.unit}"
    )
    null_score = result.details.get("null_score")
    if null_score is not None:
        words += f"; the score with permuted labels is {null_score:.4f}"
    p_value = result.details.get("null_p")
    if p_value is not None:
        words += f", p {p_value:.3g}"
    return words


def _facts(result: ProbeResult) -> list[tuple[str, str]]:
    """Name and value of the protocol's name, the data's facts and the sweep's short details."""
    protocol = result.protocol
    short = {k: v for k, v in result.details.items() if k not in LONG_DETAILS}
    rows = [
        ("protocol", f"{protocol.name} ({protocol.source})"),
        ("seed", protocol.seed),
        *result.facts.items(),
        *short.items(),
    ]
    return [(name.replace("_", " "), _words(value)) for name, value in rows]


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}: {_words(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
