"""What a person sees while a run works: a live bar on a terminal, now and then a line in a log."""

import threading
import time
from collections import deque

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from thinsection.pipeline.events import RunEvent
from thinsection.pipeline.results import describe

_FIRST_LINE_S, _LINE_EVERY_S = (
    5.0,
    60.0,
)  # without a terminal: the pause doubles up to this
_WINDOW_S = 20.0  # of the rate that is shown
# a time left is extrapolated from at least so much work
_LEAST_WORK_S = 5.0
_LEAST_WORK_SHARE = 0.02


class RunProgress:
    """Turns run events into one `bar`: slides ended, tiles/s, what holds them up, time left.

    The time left extrapolates, from the first batch on, what slides and tiles of the slides at work
    have taken; it is told after 5 s and 2 % of what was to do.
    """

    def __init__(self, console: Console, num_slides: int) -> None:
        self._console, self._num_slides = console, num_slides
        self.bar = Progress(
            *(
                SpinnerColumn(),
                TextColumn("{task.completed:.1f}/{task.total} slides"),
                BarColumn(),
            ),
            TextColumn("{task.description}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self.bar.add_task("starting", total=num_slides)
        self._lock = threading.Lock()
        self._expected: dict[str, int] = {}  # tiles of the slides at work
        self._seen: set[str] = set()  # phases that were told
        self._recent: deque[tuple[float, int]] = deque()  # when, and tiles so far
        self._started = time.monotonic()
        self._first: tuple[float, float] | None = (
            None  # when work began, and slides done then
        )
        self._tiles = self._ended = 0
        self._share, self._bound = (
            0.0,
            "",
        )  # slides' worth of tiles done; the bottleneck
        self._next_line, self._pause = self._started + _FIRST_LINE_S, _FIRST_LINE_S

    def __call__(self, event: RunEvent) -> None:
        """Takes one event; any thread."""
        with self._lock:
            if event.kind == "opening":
                self._phase("opening slides", f"opening slides, then {event.text}")
            elif event.kind == "started":
                self._expected[event.slide_id] = max(1, event.num_tiles)
            elif event.kind == "tiles":
                self._phase("first batch", "first batch")
                self._tiles, self._bound = self._tiles + event.num_tiles, event.text
                share = event.num_tiles / self._expected.get(
                    event.slide_id, event.num_tiles
                )
                self._share = min(self._share + share, len(self._expected) or 1)
            elif event.kind == "waiting":
                self.say(f"{event.slide_id}: waiting, {event.text}")
            elif event.kind == "ended" and event.result is not None:
                if self._expected.pop(event.slide_id, None):
                    self._share = max(0.0, self._share - 1)
                self._ended += 1
                bad = "red" if event.result.status in ("failed", "empty") else ""
                self.say(describe(event.result), style=bad)
            self._show()

    def say(self, text: str, *, style: str = "") -> None:
        """Prints a line above the bar."""
        self._console.print(Text(text, style=style), highlight=False, soft_wrap=True)

    def _phase(self, name: str, text: str) -> None:
        """A line when something begins for the first time, and how far into the run that was."""
        if name not in self._seen:
            self._seen.add(name)
            now = time.monotonic()
            self._first = (now, self._ended + self._share)
            self.say(f"{text}, after {now - self._started:.1f} s")

    def _show(self) -> None:
        now, done = time.monotonic(), min(self._ended + self._share, self._num_slides)
        self._recent.append((now, self._tiles))
        while self._recent[0][0] < now - _WINDOW_S:
            self._recent.popleft()
        (before, tiles), parts = self._recent[0], []
        if self._tiles:
            rate = (self._tiles - tiles) / max(now - before, 1e-3)
            parts = [
                f"{self._tiles:,} tiles",
                f"{rate:.0f} tiles/s",
                *filter(None, [self._bound]),
            ]
        if (left := self._seconds_left(now, done)) is not None:
            parts.append(f"{clock(left)} left")
        self.bar.update(self._task, completed=done, description=", ".join(parts))
        if not self._console.is_terminal and now >= self._next_line:
            self._pause = min(2 * self._pause, _LINE_EVERY_S)
            self._next_line = now + self._pause
            self.say(", ".join([f"{self._ended}/{self._num_slides} slides", *parts]))

    def _seconds_left(self, now: float, done: float) -> float | None:
        """Seconds that the rest will take; None while too little work says so."""
        if self._first is None or done >= self._num_slides:
            return None
        began, done_before = self._first
        seconds = now - began
        worked = done - done_before
        to_do = self._num_slides - done_before
        if seconds < _LEAST_WORK_S or worked < _LEAST_WORK_SHARE * to_do:
            return None
        return seconds / worked * (self._num_slides - done)


def clock(seconds: float) -> str:
    """'45 s', '12 min', '3.5 h'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def say(text: str) -> None:
    """Prints a line at once, so that a log shows it when it is true."""
    print(text, flush=True)
