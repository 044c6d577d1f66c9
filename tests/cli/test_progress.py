"""What a run says while it works: phases once, rates with the bottleneck, time left."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console
from tests.support.clock import Clock, set_clock

from thinsection.cli import progress as module
from thinsection.cli.progress import RunProgress
from thinsection.run.counts import clock
from thinsection.run.process import RunEvent
from thinsection.store.outcome import SlideResult

Said = Callable[[], list[str]]


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return set_clock(monkeypatch, module)


def begin(num_slides: int, *, terminal: bool = False) -> tuple[RunProgress, Said]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=120)
    return RunProgress(console, num_slides), lambda: file.getvalue().splitlines()


def ended(slide_id: str, status: str = "done", **more: object) -> RunEvent:
    result = SlideResult(slide_id=slide_id, slide_path=slide_id, status=status, **more)
    return RunEvent(kind="ended", slide_id=slide_id, result=result)


def test_each_phase_is_said_once_with_the_seconds_since_the_start(time: Clock) -> None:
    progress, said = begin(3)
    for slide_id in ("a", "b"):
        time.now += 2
        progress(RunEvent(kind="opening", slide_id=slide_id, text="qc, tile"))
        progress(RunEvent(kind="started", slide_id=slide_id, num_tiles=10))
        progress(RunEvent(kind="tiles", slide_id=slide_id, num_tiles=5))
    assert said() == [
        "after 2.0 s: opening slides, then qc, tile",
        "after 2.0 s: first batch",
    ]


def test_without_a_terminal_a_line_comes_now_and_then_and_ever_more_seldom(
    time: Clock,
) -> None:
    progress, said = begin(100)
    progress(RunEvent(kind="started", slide_id="a", num_tiles=10**6))
    lines = []
    for second in range(1, 400):
        time.now = 1000.0 + second
        before = len(said())
        progress(
            RunEvent(
                kind="tiles", slide_id="a", num_tiles=50, text="bottleneck: decode"
            )
        )
        lines += [second] * (len(said()) > before and second > 1)
    assert lines == [5, 15, 35, 75, 135, 195, 255, 315, 375]
    told = "0/100 slides, 18,750 tiles, 50 tiles/s, bottleneck: decode"
    assert said()[-1] == told  # a fiftieth of a slide says nothing of a hundred


def test_the_rate_is_that_of_late_and_the_time_left_counts_tiles_of_slides_at_work(
    time: Clock,
) -> None:
    progress, said = begin(4)
    progress(RunEvent(kind="started", slide_id="a", num_tiles=100))
    progress(RunEvent(kind="tiles", slide_id="a", num_tiles=0))
    for _ in range(50):
        time.now += 1
        progress(RunEvent(kind="tiles", slide_id="a", num_tiles=2))
    progress(ended("a"))
    progress(RunEvent(kind="started", slide_id="b", num_tiles=100))
    for _ in range(25):
        time.now += 1
        progress(RunEvent(kind="tiles", slide_id="b", num_tiles=2))
    assert (
        said()[-1] == "1/4 slides, 150 tiles, 2 tiles/s, 2 min left"
    )  # 75 s for 1.5 of 4


def test_no_time_left_is_told_before_five_seconds_and_two_percent(time: Clock) -> None:
    progress, _ = begin(10, terminal=True)
    progress(RunEvent(kind="started", slide_id="a", num_tiles=100))
    progress(RunEvent(kind="tiles", slide_id="a", num_tiles=8))
    time.now += 0.2
    progress(RunEvent(kind="tiles", slide_id="a", num_tiles=12))  # 2 %, after 0.2 s
    assert "left" not in progress.bar.tasks[0].description
    time.now += 5
    progress(RunEvent(kind="tiles", slide_id="a", num_tiles=2))
    assert progress.bar.tasks[0].description.endswith("4 min left")  # 5.2 s for 2.2 %
    progress, _ = begin(10, terminal=True)
    progress(RunEvent(kind="started", slide_id="a", num_tiles=100))
    for _ in range(10):  # 50 s, and 1 % of the slides
        progress(RunEvent(kind="tiles", slide_id="a", num_tiles=1))
        time.now += 5
    assert "left" not in progress.bar.tasks[0].description


def test_what_ends_is_said_in_red_where_it_is_bad_and_markup_is_text() -> None:
    progress, said = begin(2, terminal=True)
    progress(ended("a[bold]b", "failed", stage="open", error="x must be y, got [z]"))
    progress(ended("c"))
    text = "\n".join(said())
    assert "a[bold]b: failed (open): x must be y, got [z]" in text
    assert "\x1b[31m" in text.split("c: done")[0]


def test_slides_that_were_done_before_do_not_make_the_time_left(time: Clock) -> None:
    progress, said = begin(10)
    for n in range(5):
        progress(ended(f"s{n}", "skipped"))
    progress(RunEvent(kind="opening", slide_id="a", text="tile"))
    time.now += 100
    progress(ended("a"))
    assert said()[-1] == "6/10 slides, 7 min left"


def test_times_are_read_at_a_glance() -> None:
    assert [clock(s) for s in (7.2, 89, 91, 3000, 12_600)] == [
        *("7 s", "89 s", "2 min", "50 min", "3.5 h")
    ]
