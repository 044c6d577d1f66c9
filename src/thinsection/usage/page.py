"""`efficiency.html`: the analysis in one file, without scripts or external resources."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from thinsection.files.pages import render_page
from thinsection.types import format_bytes
from thinsection.usage.analysis import Efficiency, format_walltime
from thinsection.usage.monitor import ProcessUsage, Sample

# folder with the templates
_ROOM = "thinsection.usage"
# sizes of the picture in pixels
_WIDTH = 900
_ROW_HEIGHT = 70
_ROW_STEP = _ROW_HEIGHT + 18
_LABEL_WIDTH = 120
_MAX_POINTS = 600
_COLOURS = ("#1f6f8b", "#c0532b", "#5a7d2a", "#7a4b94", "#8a6d1a", "#2b5fc0")
# stage -> its words on the page
_STAGES = {
    "prepare": "open slides and find tissue",
    "decode": "decode tiles",
    "transfer": "copy tiles to the GPU",
    "encode": "encode tiles",
    "write": "write results",
}


@dataclass(frozen=True)
class _Row:
    """One resource over time: a line of values per process, and the format of its values."""

    label: str
    lines: list[list[float]]
    show: Callable[[float], str]


def efficiency_page(
    analysis: Efficiency, usages: Sequence[ProcessUsage], *, home: str | None = None
) -> str:
    """Page as HTML text; `home` is the address of the results' index, if there is one."""
    seconds = analysis.stage_seconds
    stages = []
    for name, words in _STAGES.items():
        busy = seconds.get(f"{name}_busy")
        wait = seconds.get(f"{name}_wait")
        if busy is not None or wait is not None:
            stages.append((words, busy or 0.0, wait or 0.0))
    request = analysis.next_request
    return render_page(
        _ROOM,
        "efficiency.html",
        home=home,
        analysis=analysis,
        processes=usages,
        wall=format_walltime(analysis.wall_s),
        sbatch="\n".join(request.sbatch_lines()) if request else "",
        timeline=timeline_svg(usages),
        stages=stages,
    )


def timeline_svg(usages: Sequence[ProcessUsage]) -> str:
    """CPU, memory, GPU and disk over time as one SVG picture, with a line per process.

    Memory:
        At most 600 points per line, for a run of any length.
    """
    records = [usage for usage in usages if usage.samples]
    begin = min((usage.started for usage in records), default=0.0)
    ends = [usage.started - begin + usage.wall_s for usage in records]
    length_s = max(ends, default=1.0) or 1.0
    rows = []
    for index, row in enumerate(_resource_rows(records)):
        top = index * _ROW_STEP + 6
        highest = max((max(line) for line in row.lines), default=0.0) or 1.0
        lines = []
        for number, (usage, values) in enumerate(zip(records, row.lines)):
            offset_s = usage.started - begin
            times = [(offset_s + sample.t_s) / length_s for sample in usage.samples]
            shares = [value / highest for value in values]
            colour = _COLOURS[number % len(_COLOURS)]
            lines.append((colour, _polyline(times, shares, top=top)))
        peak = row.show(highest)
        rows.append({"label": row.label, "peak": peak, "top": top, "lines": lines})
    svg = render_page(
        _ROOM,
        "timeline.svg",
        rows=rows,
        height=len(rows) * _ROW_STEP + 24,
        length=format_walltime(length_s),
        width=_WIDTH,
        left=_LABEL_WIDTH,
        row_height=_ROW_HEIGHT,
    )
    return svg.strip()


def _resource_rows(usages: Sequence[ProcessUsage]) -> list[_Row]:
    """Rows of the picture; the GPU has a row if any process used one."""
    cpus = []
    gpu = []
    memory = []
    disk = []
    has_gpu = False
    for usage in usages:
        samples = usage.samples
        has_gpu |= any(sample.gpu_util is not None for sample in samples)
        cpus.append(_rates(samples, [sample.cpu_s for sample in samples]))
        gpu.append([sample.gpu_util or 0.0 for sample in samples])
        memory.append([float(sample.rss_bytes) for sample in samples])
        moved = [float(sample.read_bytes + sample.write_bytes) for sample in samples]
        disk.append(_rates(samples, moved))
    rows = [
        _Row("CPUs", cpus, "{:.1f}".format),
        _Row("memory", memory, format_bytes),
        _Row("disk, per second", disk, format_bytes),
    ]
    if has_gpu:
        rows.insert(1, _Row("GPU", gpu, "{:.0%}".format))
    return rows


def _rates(samples: Sequence[Sample], totals: Sequence[float]) -> list[float]:
    """Growth per second of a total between samples; 0 for the first sample."""
    rates = [0.0]
    for (before, total_before), (after, total_after) in pairwise(zip(samples, totals)):
        span_s = after.t_s - before.t_s
        if span_s > 0:
            rates.append(max(0.0, (total_after - total_before) / span_s))
        else:
            rates.append(rates[-1])
    return rates


def _polyline(times: Sequence[float], values: Sequence[float], *, top: int) -> str:
    """Line in pixels for shares in [0, 1]; of many samples, the largest per column is drawn."""
    columns: dict[int, float] = {}
    for time, value in zip(times, values):
        column = round(time * _MAX_POINTS)
        columns[column] = max(value, columns.get(column, 0.0))
    step = (_WIDTH - _LABEL_WIDTH - 4) / _MAX_POINTS
    points = []
    for column, value in sorted(columns.items()):
        x = _LABEL_WIDTH + column * step
        y = top + _ROW_HEIGHT * (1 - value)
        points.append(f"{x:.1f},{y:.1f}")
    return " ".join(points)
