"""Files of a probe's result: JSON and CSV for programs, Markdown and HTML for people."""

import base64
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinsection.files.atomic import write_bytes, write_json, write_text
from thinsection.files.pages import render_page
from thinsection.files.tables import write_table
from thinsection.probe.data.sets import TileSet
from thinsection.probe.plots import Picture, probe_pictures
from thinsection.probe.result import METRIC_WORDS, ProbeResult, per_class_rows

PROBE_WORDS = {
    "linear": "Linear probe",
    "knn": "kNN probe",
    "fewshot": "16-shot probe (SimpleShot)",
    "tileset": "Tile-set score",
    "slide": "Slide probe (logistic regression)",
    "abmil": "Slide probe (ABMIL)",
    "survival": "Survival probe (Cox)",
    "robustness": "Robustness index (PathoROB)",
    "segment": "Segmentation probe (MaskTransformer)",
}
# shown as pictures or row by row, too long for a table of details
LONG_DETAILS = ("curve", "train_losses", "val_losses")


@dataclass(frozen=True, slots=True)
class ReportFiles:
    """Paths that were written."""

    json: Path
    csv: Path
    markdown: Path
    html: Path


def write_probe_report(
    result: ProbeResult, out_dir: Path, *, tiles: TileSet | None = None
) -> ReportFiles:
    """Writes <probe>.json, .csv, .md, .html and <probe>_<picture>.png, each atomically.

    Args:
        result: of any probe.
        out_dir: made where it is missing.
        tiles: the probed embeddings, for the map.

    Memory: the pictures and the rows as text.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    files = ReportFiles(
        *(out_dir / f"{result.probe}.{suffix}" for suffix in ("json", "csv", "md", "html"))
    )
    pictures = probe_pictures(result, tiles)
    for picture in pictures:
        write_bytes(out_dir / f"{result.probe}_{picture.name}.png", picture.png)
    header, rows = _rows(result)
    write_table(files.csv, rows, header)
    write_text(files.markdown, markdown(result, pictures))
    write_text(files.html, html(result, pictures))
    write_json(files.json, result.as_mapping())  # last: where it is, the rest is
    return files


def _rows(result: ProbeResult) -> tuple[list[str], Iterable[Sequence[Any]]]:
    """Header and rows: predictions with class scores, or risks; else details by name."""
    if result.predictions is not None:
        p, names = result.predictions, result.predictions.class_names
        header = ["id", "truth", "prediction", "correct"]
        pairs = zip(p.truth.tolist(), p.prediction.tolist(), strict=True)
        rows = [[p.ids[i], names[t], names[g], int(t == g)] for i, (t, g) in enumerate(pairs)]
        if p.probability is not None:
            header += [f"p_{name}" for name in names]
            for row, scores in zip(rows, p.probability, strict=True):
                row += [f"{v:.9g}" for v in scores]
        return header, rows
    if result.risks is not None:
        r = result.risks
        columns = (r.risk.tolist(), r.high.astype(int), r.event.astype(int), r.time.tolist())
        header = ["id", "risk", "above_fold_median", "event", "time"]
        return header, zip(r.ids, *columns, strict=True)
    return ["name", "value"], result.details.items()


def markdown(result: ProbeResult, pictures: Sequence[Picture]) -> str:
    """The result as a page of Markdown beside its pictures."""
    lines = [f"# {_title(result)}", "", f"**{_headline(result)}**", ""]
    if result.predictions is not None:
        lines += ["| class | rows | precision | recall | F1 |", "|---|---:|---:|---:|---:|"]
        lines += [
            f"| {_pipe(r['name'])} | {r['rows']} | {r['precision']:.4f} | {r['recall']:.4f} "
            f"| {r['f1']:.4f} |"
            for r in per_class_rows(result.predictions)
        ]
        lines.append("")
    lines += ["| setting | value |", "|---|---|"]
    lines += [f"| {_pipe(k)} | {_pipe(v)} |" for k, v in _facts(result)]
    for picture in pictures:
        link = f"![{picture.title}]({result.probe}_{picture.name}.png)"
        lines += ["", f"## {picture.title}", "", link, "", picture.caption]
    return "\n".join(lines) + "\n"


def html(result: ProbeResult, pictures: Sequence[Picture]) -> str:
    """The result as one self-contained page: pictures inside, nothing is fetched."""
    return render_page(
        "thinsection.probe",
        "probe.html.j2",
        title=_title(result),
        score=f"{result.score:.4f}",
        metric=METRIC_WORDS.get(result.metric, result.metric),
        interval=_interval_words(result),
        classes=[] if result.predictions is None else per_class_rows(result.predictions),
        facts=_facts(result),
        pictures=[(p.title, p.caption, base64.b64encode(p.png).decode("ascii")) for p in pictures],
        protocol=json.dumps(result.protocol.as_mapping(), indent=2),
    )


def _title(result: ProbeResult) -> str:
    return f"{PROBE_WORDS.get(result.probe, f'Probe {result.probe}')} on {result.dataset}"


def _headline(result: ProbeResult) -> str:
    words = METRIC_WORDS.get(result.metric, result.metric)
    return f"{words} {result.score:.4f} ({_interval_words(result)})"


def _interval_words(result: ProbeResult) -> str:
    interval = result.interval
    if interval is None or interval.low != interval.low:  # NaN: no draw gave a number
        return "no interval"
    return (
        f"{interval.level:.0%} interval {interval.low:.4f} to {interval.high:.4f}, "
        f"{interval.draws} bootstrap draws"
    )


def _facts(result: ProbeResult) -> list[tuple[str, str]]:
    """Name and value of the protocol's name, the data's facts and the sweep's short details."""
    rows = [("protocol", f"{result.protocol.name} ({result.protocol.source})")]
    rows.append(("seed", str(result.protocol.seed)))
    rows += [(k.replace("_", " "), _words(v)) for k, v in result.facts.items()]
    short = {k: v for k, v in result.details.items() if k not in LONG_DETAILS}
    return rows + [(k.replace("_", " "), _words(v)) for k, v in short.items()]


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}: {_words(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_words(v) for v in value) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _pipe(value: Any) -> str:
    """Text that stays text and in one cell of a Markdown table."""
    plain = str(value).replace("&", "&amp;").replace("<", "&lt;")
    return plain.replace("|", "\\|").replace("\n", " ")
