"""Numbers of a run's progress: finished slides, tiles/s, slowest step, remaining time."""

from collections import deque

from thinsection.run.process import RunEvent

# time window of the displayed rate, in seconds
_WINDOW_S = 20.0
# least time and share of the work before a remaining time is estimated
_LEAST_WORK_S = 5.0
_LEAST_WORK_SHARE = 0.02


class RunCounts:
    """Adds up the events of a run. The caller passes the time, and a lock if there are threads.

    From the first batch on, the remaining time is extrapolated from finished slides and from
    tiles of slides in progress. It appears after 5 s and 2 % of the work.

    Attributes:
        num_slides: slides of the run.
        num_ended: slides that ended, with or without a result.
        num_tiles: tiles that were encoded.
    """

    def __init__(self, num_slides: int, now: float) -> None:
        self.num_slides = num_slides
        self.num_ended = 0
        self.num_tiles = 0
        self._started = now
        # tiles of the slides in progress
        self._expected_tiles: dict[str, int] = {}
        self._seen_phases: set[str] = set()
        # (time, tiles so far) for the events within the window
        self._recent: deque[tuple[float, int]] = deque()
        # (time, finished slides) at the start of the last phase
        self._first_work: tuple[float, float] | None = None
        # finished tiles of slides in progress, as a share of slides
        self._share_done = 0.0
        self._bottleneck = ""

    @property
    def done(self) -> float:
        """Finished slides, with the finished share of those in progress."""
        return min(self.num_ended + self._share_done, self.num_slides)

    def note(self, event: RunEvent, now: float) -> str:
        """Takes an event; returns a line about the phase that begins with it, or ''."""
        line = ""
        if event.kind == "opening":
            text = f"opening slides, then {event.text}"
            line = self._begin_phase("opening slides", text, now)
        elif event.kind == "started":
            self._expected_tiles[event.slide_id] = max(1, event.num_tiles)
        elif event.kind == "tiles":
            line = self._begin_phase("first batch", "first batch", now)
            self.num_tiles += event.num_tiles
            self._bottleneck = event.text
            # share of the slide that these tiles are
            expected = self._expected_tiles.get(event.slide_id, event.num_tiles)
            share_done = self._share_done + event.num_tiles / expected
            self._share_done = min(share_done, len(self._expected_tiles) or 1)
        elif event.kind == "ended":
            if self._expected_tiles.pop(event.slide_id, None):
                self._share_done = max(0.0, self._share_done - 1)
            self.num_ended += 1
        return line

    def words(self, now: float) -> list[str]:
        """Tiles, tiles/s, the slowest step and the remaining time, as far as they are known."""
        self._recent.append((now, self.num_tiles))
        while self._recent[0][0] < now - _WINDOW_S:
            self._recent.popleft()
        parts = []
        if self.num_tiles:
            before, tiles_before = self._recent[0]
            rate = (self.num_tiles - tiles_before) / max(now - before, 1e-3)
            parts += [f"{self.num_tiles:,} tiles", f"{rate:.0f} tiles/s"]
            if self._bottleneck:
                parts.append(self._bottleneck)
        seconds_left = self._seconds_left(now)
        if seconds_left is not None:
            parts.append(f"{clock(seconds_left)} left")
        return parts

    def seconds(self, now: float) -> float:
        """Seconds since the start."""
        return now - self._started

    def _begin_phase(self, name: str, text: str, now: float) -> str:
        """Line about a phase that begins for the first time, with the time since the start."""
        if name in self._seen_phases:
            return ""
        self._seen_phases.add(name)
        self._first_work = (now, self.num_ended + self._share_done)
        return f"after {self.seconds(now):.1f} s: {text}"

    def _seconds_left(self, now: float) -> float | None:
        """Seconds until the end; None while too little work is done for an estimate."""
        if self._first_work is None or self.done >= self.num_slides:
            return None
        began, done_before = self._first_work
        seconds = now - began
        worked = self.done - done_before
        to_do = self.num_slides - done_before
        if seconds < _LEAST_WORK_S or worked < _LEAST_WORK_SHARE * to_do:
            return None
        return seconds / worked * (self.num_slides - self.done)


def clock(seconds: float) -> str:
    """Formats a time in short: '45 s', '12 min', '3.5 h'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
