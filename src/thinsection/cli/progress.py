"""What a person sees while a run works: a live bar on a terminal, a line per slide in a log."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from thinsection.pipeline.process import RunEvent
from thinsection.pipeline.results import SlideResult

_LINE_EVERY_S = 5.0  # without a terminal: a line as often as that


class RunProgress:
    """Turns run events into one bar: slides ended, tiles/s, time left.

    The time left extrapolates from the slides that are done, and from the tiles of the one at work.
    """

    def __init__(self, console: Console, num_slides: int) -> None:
        self._console = console
        self._next_line_s = _LINE_EVERY_S
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.completed:.1f}/{task.total} slides"),
            BarColumn(),
            TextColumn("{task.fields[tiles]} tiles, {task.fields[rate]:.0f} tiles/s"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("run", total=num_slides, tiles=0, rate=0.0)
        self._lock = threading.Lock()
        self._tiles = self._ended = 0
        self._expected: dict[str, int] = {}  # tiles of the slides at work

    @contextmanager
    def live(self) -> Iterator["RunProgress"]:
        """Shows the bar while the block runs."""
        with self._progress:
            yield self

    def __call__(self, event: RunEvent) -> None:
        """Takes one event; any thread."""
        with self._lock:
            if event.kind == "started":
                self._expected[event.slide_id] = max(1, event.num_tiles)
            elif event.kind == "tiles":
                self._tiles += event.num_tiles
                share = event.num_tiles / self._expected.get(event.slide_id, event.num_tiles)
                self._progress.advance(self._task, min(share, 1.0))
                self._show_rate()
            elif event.kind == "waiting":
                self._console.print(f"{event.slide_id}: another process works on it, waiting")
            elif event.kind == "ended" and event.result is not None:
                self._expected.pop(event.slide_id, None)
                self._ended += 1
                self._progress.update(self._task, completed=self._ended)
                line = describe(event.result)
                bad = "red" if event.result.status in ("failed", "empty") else None
                self._console.print(line, style=bad, highlight=False, markup=False, soft_wrap=True)

    def _show_rate(self) -> None:
        task = self._progress.tasks[0]
        elapsed = task.elapsed or 0.0
        rate = self._tiles / elapsed if elapsed else 0.0
        self._progress.update(self._task, tiles=self._tiles, rate=rate)
        if not self._console.is_terminal and elapsed >= self._next_line_s:
            self._next_line_s = elapsed + _LINE_EVERY_S
            line = f"{self._ended}/{task.total} slides, {self._tiles} tiles, {rate:.0f} tiles/s"
            self._console.print(line, highlight=False)


def say(text: str) -> None:
    """Prints a line at once, so that a log shows it when it is true."""
    print(text, flush=True)


def describe(result: SlideResult) -> str:
    """One line on a slide that ended."""
    if result.status == "failed":
        return f"{result.slide_id}: failed ({result.stage}): {result.error}"
    if result.status == "excluded":
        return f"{result.slide_id}: {result.error}"
    facts = result.facts
    if result.status == "empty":
        why = facts.get("warnings") or "no tile holds enough tissue"
        return f"{result.slide_id}: empty: {why}"
    count = f", {facts['num_tiles']} tiles" if facts.get("num_tiles") is not None else ""
    if not count and facts.get("pixels_to_use") is not None:
        count = f", {facts['pixels_to_use']:.0f} px to use"
    if facts.get("fetched_bytes"):
        share = facts["fetched_bytes"] / facts["file_bytes"]
        count += f", {share:.0%} of the file fetched in {facts['requests']} requests"
    count += f", {facts['stain']}" if facts.get("stain") else ""
    if pen := facts.get("pen_fraction"):
        count += f", pen on {pen:.1%} left out"
    warning = f" (warning: {facts['warnings']})" if facts.get("warnings") else ""
    if result.status == "skipped":
        return f"{result.slide_id}: done before with the same settings and input, skipped{count}"
    return f"{result.slide_id}: done{count}{warning}"
