"""Progress of a run for the user: a live bar on a terminal, or occasional lines in a log."""

import threading
import time
from collections import deque

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from thinsection.cli.flags import Level
from thinsection.run.process import RunEvent
from thinsection.store.outcome import SlideResult, describe
from thinsection.types import counted

# seconds between two lines without a terminal; they double from the first to the second value
_FIRST_LINE_S = 5.0
_LINE_EVERY_S = 60.0
# time window of the displayed rate, in seconds
_WINDOW_S = 20.0
# least time and share of the work before a remaining time is estimated
_LEAST_WORK_S = 5.0
_LEAST_WORK_SHARE = 0.02


class RunProgress:
    """Turns run events into one `bar`: finished slides, tiles/s, slowest step, remaining time.

    From the first batch on, the remaining time is extrapolated from finished slides and from
    tiles of slides in progress. It appears after 5 s and 2 % of the work.

    Skipped slides are counted, and the level verbose prints a line for each. The level quiet prints
    only warnings and slides without results.
    """

    def __init__(
        self, console: Console, num_slides: int, *, level: Level = "usual"
    ) -> None:
        self._console = console
        self._num_slides = num_slides
        self._level = level
        self.bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.completed:.1f}/{task.total} slides"),
            BarColumn(),
            TextColumn("{task.description}"),
            console=console,
            disable=level == "quiet" or not console.is_terminal,
        )
        self._task = self.bar.add_task("starting", total=num_slides)
        self._lock = threading.Lock()
        # tiles of the slides in progress
        self._expected_tiles: dict[str, int] = {}
        self._seen_phases: set[str] = set()
        # (time, tiles so far) for the events within the window
        self._recent: deque[tuple[float, int]] = deque()
        self._started = time.monotonic()
        # (time, finished slides) at the start of the last phase
        self._first_work: tuple[float, float] | None = None
        self._num_tiles = 0
        self._num_ended = 0
        self._num_skipped = 0
        # finished tiles of slides in progress, as a share of slides
        self._share_done = 0.0
        self._bottleneck = ""
        self._pause_s = _FIRST_LINE_S
        self._next_line = self._started + _FIRST_LINE_S

    def __call__(self, event: RunEvent) -> None:
        """Handles one event; safe in any thread."""
        with self._lock:
            if event.kind == "opening":
                self._begin_phase(
                    "opening slides", f"opening slides, then {event.text}"
                )
            elif event.kind == "started":
                self._expected_tiles[event.slide_id] = max(1, event.num_tiles)
            elif event.kind == "tiles":
                self._begin_phase("first batch", "first batch")
                self._num_tiles += event.num_tiles
                self._bottleneck = event.text
                # share of the slide that these tiles are
                expected = self._expected_tiles.get(event.slide_id, event.num_tiles)
                share_done = self._share_done + event.num_tiles / expected
                self._share_done = min(share_done, len(self._expected_tiles) or 1)
            elif event.kind == "waiting":
                self.say(f"{event.slide_id}: waiting, {event.text}")
            elif event.kind == "ended" and event.result is not None:
                if self._expected_tiles.pop(event.slide_id, None):
                    self._share_done = max(0.0, self._share_done - 1)
                self._num_ended += 1
                self.say_result(event.result)
            self._show()

    def say(self, text: str) -> None:
        """Prints a message above the bar; `quiet` leaves out all but warnings."""
        if self._level != "quiet" or text.startswith("warning"):
            self._print(text)

    def say_result(self, result: SlideResult) -> None:
        """Prints the line of a finished slide, or counts a skipped one."""
        is_bad = result.status in ("failed", "empty")
        is_skipped = result.status == "skipped"
        has_news = is_bad or result.status == "excluded" or result.facts.get("warnings")
        self._num_skipped += is_skipped
        is_shown = not is_skipped and (has_news or self._level != "quiet")
        if is_shown or self._level == "verbose":
            self._print(describe(result), style="red" if is_bad else "")

    def say_skipped(self) -> None:
        """Prints how many slides were skipped, if each had no line of its own."""
        if self._num_skipped and self._level == "usual":
            self._print(
                f"{counted(self._num_skipped, 'slide')} skipped: an earlier run completed them "
                "with the same settings and input (--verbose lists them)"
            )

    def _print(self, text: str, *, style: str = "") -> None:
        self._console.print(Text(text, style=style), highlight=False, soft_wrap=True)

    def _begin_phase(self, name: str, text: str) -> None:
        """Prints a line when a step begins for the first time, with the time since the start."""
        if name in self._seen_phases:
            return
        self._seen_phases.add(name)
        now = time.monotonic()
        self._first_work = (now, self._num_ended + self._share_done)
        self.say(f"{text}, after {now - self._started:.1f} s")

    def _show(self) -> None:
        """Updates the bar; without a terminal, prints a line if enough time has passed."""
        now = time.monotonic()
        done = min(self._num_ended + self._share_done, self._num_slides)
        self._recent.append((now, self._num_tiles))
        while self._recent[0][0] < now - _WINDOW_S:
            self._recent.popleft()
        parts = []
        if self._num_tiles:
            before, tiles_before = self._recent[0]
            rate = (self._num_tiles - tiles_before) / max(now - before, 1e-3)
            parts += [f"{self._num_tiles:,} tiles", f"{rate:.0f} tiles/s"]
            if self._bottleneck:
                parts.append(self._bottleneck)
        seconds_left = self._seconds_left(now, done)
        if seconds_left is not None:
            parts.append(f"{clock(seconds_left)} left")
        self.bar.update(self._task, completed=done, description=", ".join(parts))
        if not self._console.is_terminal and now >= self._next_line:
            self._pause_s = min(2 * self._pause_s, _LINE_EVERY_S)
            self._next_line = now + self._pause_s
            slides = f"{self._num_ended}/{self._num_slides} slides"
            self.say(", ".join([slides, *parts]))

    def _seconds_left(self, now: float, done: float) -> float | None:
        """Seconds until the end; None while too little work is done for an estimate."""
        if self._first_work is None or done >= self._num_slides:
            return None
        began, done_before = self._first_work
        seconds = now - began
        worked = done - done_before
        to_do = self._num_slides - done_before
        if seconds < _LEAST_WORK_S or worked < _LEAST_WORK_SHARE * to_do:
            return None
        return seconds / worked * (self._num_slides - done)


def clock(seconds: float) -> str:
    """Formats a time in short: '45 s', '12 min', '3.5 h'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def say(text: str) -> None:
    """Prints a line and flushes, so that a log has it at the right time."""
    print(text, flush=True)
