"""Progress of a run for the user: a live bar on a terminal, or occasional lines in a log."""

import threading
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from thinsection.cli.flags import Level
from thinsection.run.counts import RunCounts
from thinsection.run.process import RunEvent
from thinsection.store.outcome import SlideResult, describe
from thinsection.types import counted

# seconds between two lines without a terminal; they double from the first to the second value
_FIRST_LINE_S = 5.0
_LINE_EVERY_S = 60.0


class RunProgress:
    """Turns run events into one `bar`: finished slides, tiles/s, slowest step, remaining time.

    Skipped slides are counted, and the level verbose prints a line for each. The level quiet prints
    only warnings and slides without results.
    """

    def __init__(
        self, console: Console, num_slides: int, *, level: Level = "usual"
    ) -> None:
        self._console = console
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
        now = time.monotonic()
        self._counts = RunCounts(num_slides, now)
        self._num_skipped = 0
        self._pause_s = _FIRST_LINE_S
        self._next_line = now + _FIRST_LINE_S

    def __call__(self, event: RunEvent) -> None:
        """Handles one event; safe in any thread."""
        with self._lock:
            now = time.monotonic()
            phase = self._counts.note(event, now)
            if phase:
                self.say(phase)
            if event.kind == "waiting":
                self.say(f"{event.slide_id}: waiting, {event.text}")
            elif event.kind == "ended" and event.result is not None:
                self.say_result(event.result)
            self._show(now)

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

    def _show(self, now: float) -> None:
        """Updates the bar; without a terminal, prints a line if enough time has passed."""
        counts = self._counts
        parts = counts.words(now)
        self.bar.update(self._task, completed=counts.done, description=", ".join(parts))
        if not self._console.is_terminal and now >= self._next_line:
            self._pause_s = min(2 * self._pause_s, _LINE_EVERY_S)
            self._next_line = now + self._pause_s
            slides = f"{counts.num_ended}/{counts.num_slides} slides"
            self.say(", ".join([slides, *parts]))


def say(text: str) -> None:
    """Prints a line and flushes, so that a log has it at the right time."""
    print(text, flush=True)
