"""`efficiency.html`: what a run used of what it held, with the timeline as a picture.

One file without scripts or outside resources, so that it opens from any file system.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import markupsafe

from thinsection.files.pages import render_page
from thinsection.units import format_bytes
from thinsection.usage.analysis import Efficiency, cpu_rates, format_walltime
from thinsection.usage.monitor import ProcessUsage

WIDTH, ROW_HEIGHT, LABEL_WIDTH = 900, 70, 120
ROW_STEP = ROW_HEIGHT + 18
_MAX_POINTS = 600
_COLOURS = ("#1f6f8b", "#c0532b", "#5a7d2a", "#7a4b94", "#8a6d1a", "#2b5fc0")
_STAGES = ("prepare", "decode", "transfer", "encode", "write")


def efficiency_page(analysis: Efficiency, usages: Sequence[ProcessUsage]) -> str:
    """The page as HTML text."""
    return render_page(
        "thinsection.usage",
        "efficiency.html",
        analysis=analysis,
        wall=format_walltime(analysis.wall_s),
        processes=usages,
        sbatch="\n".join(analysis.next_request.sbatch_lines()) if analysis.next_request else "",
        timeline=markupsafe.Markup(timeline_svg(usages)),
        stages=_stage_rows(analysis),
    )


def _stage_rows(analysis: Efficiency) -> list[tuple[str, float, float]]:
    seconds = analysis.stage_seconds
    return [
        (name, seconds.get(f"{name}_busy", 0.0), seconds.get(f"{name}_wait", 0.0))
        for name in _STAGES
        if f"{name}_busy" in seconds or f"{name}_wait" in seconds
    ]


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One quantity over time: its label, its peak in words, and per process a colour and points."""

    label: str
    peak: str
    top: int
    lines: tuple[tuple[str, str], ...]


def timeline_svg(usages: Sequence[ProcessUsage]) -> str:
    """CPU, memory, GPU and disk over time as one SVG picture, a line per process.

    Memory: at most 600 points per line, however long the run was.
    """
    records = [u for u in usages if u.samples]
    begin = min((u.started for u in records), default=0.0)
    length = max((u.started - begin + u.samples[-1].t_s for u in records), default=1.0) or 1.0
    kinds: list[tuple[str, list[list[float]], Callable[[float], str]]] = [
        ("CPUs", [cpu_rates(u.samples) for u in records], "{:.1f}".format),
        ("memory", [[float(s.rss_bytes) for s in u.samples] for u in records], format_bytes),
        ("disk /s", [_rates(u) for u in records], format_bytes),
    ]
    if any(s.gpu_util is not None for u in records for s in u.samples):
        busy = [[s.gpu_util or 0.0 for s in u.samples] for u in records]
        kinds.insert(1, ("GPU", busy, "{:.0%}".format))
    rows = []
    for index, (label, lines, show) in enumerate(kinds):
        top = index * ROW_STEP + 6
        highest = max((v for line in lines for v in line), default=0.0) or 1.0
        drawn = []
        for number, (usage, line) in enumerate(zip(records, lines)):
            times = [usage.started - begin + s.t_s for s in usage.samples]
            points = _points(times, line, length=length, highest=highest, top=top)
            drawn.append((_COLOURS[number % len(_COLOURS)], points))
        rows.append(_Row(label=label, peak=show(highest), top=top, lines=tuple(drawn)))
    return render_page(
        "thinsection.usage",
        "timeline.svg",
        rows=rows,
        width=WIDTH,
        left=LABEL_WIDTH,
        row_height=ROW_HEIGHT,
        height=len(rows) * ROW_STEP + 24,
        length=format_walltime(length),
    ).strip()


def _points(
    times: Sequence[float], values: Sequence[float], *, length: float, highest: float, top: int
) -> str:
    """The line in px; of many samples the highest of each px column stays."""
    columns: dict[int, float] = {}
    scale = min(WIDTH - LABEL_WIDTH - 4, _MAX_POINTS)
    for t, value in zip(times, values):
        column = round(t / length * scale)
        columns[column] = max(value, columns.get(column, 0.0))
    stretch = (WIDTH - LABEL_WIDTH - 4) / scale
    return " ".join(
        f"{LABEL_WIDTH + x * stretch:.1f},{top + ROW_HEIGHT * (1 - v / highest):.1f}"
        for x, v in sorted(columns.items())
    )


def _rates(usage: ProcessUsage) -> list[float]:
    rates = [0.0]
    for a, b in pairwise(usage.samples):
        moved = b.read_bytes + b.write_bytes - a.read_bytes - a.write_bytes
        rates.append(max(0.0, moved / (b.t_s - a.t_s)) if b.t_s > a.t_s else rates[-1])
    return rates
