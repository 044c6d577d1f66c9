"""Progress for the person who waits: one line that changes in place, in a notebook or a terminal.

The command line has its own bar (`cli/progress.py`), with the same numbers.
"""

from __future__ import annotations

import html
import multiprocessing
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from thinsection.jobs.backend import Submitted
from thinsection.run.counts import RunCounts
from thinsection.run.process import RunEvent

# seconds between two changes of the line
_NOTEBOOK_S = 0.25
# seconds between two lines of a log; they double from the first to the second value
_FIRST_LINE_S = 5.0
_LINE_EVERY_S = 60.0


def progress() -> Progress:
    """Returns a listener that shows the progress of a call: `ts.run(..., on_event=ts.progress())`.

    In a notebook, one line with a bar changes in place; on a terminal, one line. In a log, a line
    appears after 5 s, and then ever more seldom. Text goes to standard error.

    In a notebook `run`, `train`, `predict` and `heatmap` show it themselves, unless `on_event` is
    passed. In a script they show nothing.
    """
    if in_notebook():
        return Progress(_NotebookScreen())
    return Progress(_TextScreen())


class Screen(Protocol):
    """Place that shows one line of progress."""

    def show(self, line: Line, *, is_last: bool) -> None:
        """Shows a line in place of the one before; the last one stays."""


@dataclass(frozen=True)
class Line:
    """A line of progress; a notebook shows it with a bar."""

    share: float  # finished part of the work, from 0 to 1
    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        bar = f'<progress value="{self.share:.3f}" max="1"></progress>'
        return f"<div>{bar} {html.escape(self.text)}</div>"


class Progress:
    """Listener for `on_event` that shows one line: finished slides, tiles/s, remaining time.

    It may be called from any thread, and used for several calls one after the other.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._lock = threading.Lock()
        self._noun = "slides"
        self._num_failed = 0
        self._message = ""
        self._counts = RunCounts(0, time.monotonic())

    def __repr__(self) -> str:
        counts = self._counts
        return f"Progress({counts.num_ended}/{counts.num_slides} {self._noun})"

    def begin(self, total: int, noun: str) -> None:
        """Begins a line about so many slides, folds or predictions; `noun` is their plural."""
        with self._lock:
            self._noun = noun
            self._num_failed = 0
            self._message = ""
            self._counts = RunCounts(total, time.monotonic())
            self._show()

    def __call__(self, event: object) -> None:
        """Takes an event of a run. An event of another kind is the end of one piece of work."""
        if not isinstance(event, RunEvent):
            event = RunEvent(kind="ended", slide_id="")
        with self._lock:
            self._message = self._counts.note(event, time.monotonic())
            if event.result is not None and event.result.status == "failed":
                self._num_failed += 1
            if event.kind == "waiting":
                self._message = f"{event.slide_id}: waiting, {event.text}"
            self._show()

    def say(self, text: str) -> None:
        """Shows a message at the end of the line, until the next event."""
        with self._lock:
            self._message = text
            self._show()

    def end(self, text: str) -> None:
        """Shows the line for the last time, with a text at its end."""
        with self._lock:
            self._message = text
            self._show(is_last=True)

    def _show(self, *, is_last: bool = False) -> None:
        counts = self._counts
        now = time.monotonic()
        parts = [f"{counts.num_ended}/{counts.num_slides} {self._noun}"]
        if self._num_failed:
            parts.append(f"{self._num_failed} failed")
        words = counts.words(now)
        if is_last:
            words = [f"{counts.num_tiles:,} tiles"] if counts.num_tiles else []
            words.append(f"{counts.seconds(now):.1f} s")
        parts += words
        if self._message:
            parts.append(self._message)
        share = counts.done / counts.num_slides if counts.num_slides else 1.0
        self._screen.show(Line(share, ", ".join(parts)), is_last=is_last)


@contextmanager
def showing(progress: Progress | None, total: int, noun: str) -> Iterator[None]:
    """Shows the progress of a block from its begin to its end; None shows nothing."""
    if progress is None:
        yield
        return
    progress.begin(total, noun)
    try:
        yield
    except Submitted:  # the work continues in the batch system
        progress.end("submitted")
        raise
    except BaseException as error:
        progress.end(f"stopped by {type(error).__name__}")
        raise
    progress.end("")


def chosen_progress(on_event: object) -> Progress | None:
    """Progress that a call shows: the listener itself, or a new one in a notebook without any.

    A thread or a process that the notebook has started shows nothing: there may be many of them.
    """
    if isinstance(on_event, Progress):
        return on_event
    is_main = (
        threading.current_thread() is threading.main_thread()
        and multiprocessing.parent_process() is None
    )
    if on_event is None and is_main and in_notebook():
        return progress()
    return None


def in_notebook() -> bool:
    """True in a kernel of Jupyter, which shows HTML; False in a script or in IPython's shell."""
    # a module that nobody has imported is no notebook's
    find_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None if find_shell is None else find_shell()
    return getattr(shell, "kernel", None) is not None


class _NotebookScreen:
    """An output of a notebook's cell that is updated, at most four times in a second."""

    def __init__(self) -> None:
        self._handle: Any = None  # of IPython, which has no types
        self._next = 0.0

    def show(self, line: Line, *, is_last: bool) -> None:
        """See `Screen.show`."""
        display: Any = import_module("IPython.display").display
        now = time.monotonic()
        if self._handle is None:
            self._handle = display(line, display_id=True)
        elif now >= self._next or is_last:
            self._handle.update(line)
        else:
            return
        self._next = now + _NOTEBOOK_S


class _TextScreen:
    """Standard error: a line that is overwritten on a terminal, or lines now and then in a log."""

    def __init__(self) -> None:
        self._width = 0  # of the line that is shown
        self._pause_s = _FIRST_LINE_S
        self._next = time.monotonic() + _FIRST_LINE_S

    def show(self, line: Line, *, is_last: bool) -> None:
        """See `Screen.show`."""
        stream = sys.stderr
        now = time.monotonic()
        if stream.isatty():
            stream.write("\r" + line.text.ljust(self._width))
            self._width = len(line.text)
            if is_last:
                stream.write("\n")
                self._width = 0
        elif now >= self._next or is_last:
            stream.write(f"{line.text}\n")
            self._pause_s = min(2 * self._pause_s, _LINE_EVERY_S)
            self._next = now + self._pause_s
        stream.flush()
