"""Progress in a notebook, once and in place; `ts.progress()` in scripts; silence elsewhere."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.clock import Clock, set_clock

import thinsection as ts
from thinsection.run import progress as module
from thinsection.run.process import RunEvent
from thinsection.run.progress import Line, Progress, chosen_progress, showing
from thinsection.store.outcome import SlideResult
from thinsection.testing.synthetic import write_he_slide


class Shown:
    """A screen that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, float, bool]] = []

    def show(self, line: Line, *, is_last: bool) -> None:
        self.lines.append((line.text, line.share, is_last))


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return set_clock(monkeypatch, module)


@pytest.fixture
def two_slides(tmp_path: Path) -> Path:
    folder = tmp_path / "slides"
    folder.mkdir()
    for seed, name in enumerate(("a", "b c")):
        write_he_slide(folder / f"{name}.svs", (700, 500), seed=seed, mpp=0.5)
    return folder


def ended(slide_id: str, status: Any = "done") -> RunEvent:
    result = SlideResult(slide_id=slide_id, slide_path=slide_id, status=status)
    return RunEvent(kind="ended", slide_id=slide_id, result=result)


# one line


def test_a_line_counts_slides_tiles_and_failures(time: Clock) -> None:
    shown = Shown()
    progress = Progress(shown)
    with showing(progress, 4, "slides"):
        progress(RunEvent(kind="started", slide_id="a", num_tiles=100))
        time.now += 2
        progress(RunEvent(kind="tiles", slide_id="a", num_tiles=50, text="bottleneck"))
        progress(ended("a"))
        time.now += 3
        progress(ended("b", "failed"))
    texts = [text for text, _, _ in shown.lines]
    assert texts[0] == "0/4 slides"
    assert texts[2].startswith("0/4 slides, 50 tiles, 25 tiles/s, bottleneck")
    assert shown.lines[2][1] == pytest.approx(0.5 / 4)
    assert texts[-1] == "2/4 slides, 1 failed, 50 tiles, 5.0 s"
    assert [is_last for _, _, is_last in shown.lines] == [False] * 5 + [True]


def test_messages_and_other_kinds_of_work_share_the_line(time: Clock) -> None:
    shown = Shown()
    progress = Progress(shown)
    with showing(progress, 2, "slides"):
        progress.say("loading uni")
        progress(RunEvent(kind="waiting", slide_id="a", text="process 7 on host"))
    with showing(progress, 3, "folds"):
        progress(object())
    texts = [text for text, _, _ in shown.lines]
    assert "0/2 slides, loading uni" in texts
    assert "0/2 slides, a: waiting, process 7 on host" in texts
    assert texts[-1] == "1/3 folds, 0.0 s"


def test_an_error_ends_the_line_with_its_name() -> None:
    shown = Shown()
    with pytest.raises(KeyError), showing(Progress(shown), 2, "slides"):
        raise KeyError("x")
    text, _, is_last = shown.lines[-1]
    assert text.endswith("stopped by KeyError") and is_last


def test_a_line_of_a_notebook_is_html_with_a_bar_and_text_as_it_is() -> None:
    line = Line(0.25, "1/4 slides, <b>")
    assert 'value="0.250"' in line._repr_html_()
    assert "1/4 slides, &lt;b&gt;" in line._repr_html_()
    assert repr(line) == "1/4 slides, <b>"


# where it is shown


def test_a_terminal_has_one_line_that_is_written_over(
    time: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", stream)
    progress = ts.progress()
    with showing(progress, 10, "slides"):
        progress.say("a long message")
        progress(ended("a"))
    written = stream.getvalue()
    assert written.count("\n") == 1 and written.endswith("\n")
    last = written.rstrip("\n").split("\r")[-1]
    assert last.rstrip() == "1/10 slides, 0.0 s"
    widths = [len(line) for line in written.rstrip("\n").split("\r")[1:]]
    assert widths[2] >= widths[1]  # nothing of the longer line stays


def test_a_log_has_a_line_now_and_then(
    time: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = ts.progress()
    seconds = []
    with showing(progress, 500, "slides"):
        for second in range(1, 200):
            time.now = 1000.0 + second
            before = len(stream.getvalue())
            progress(ended(f"s{second}"))
            seconds += [second] * (len(stream.getvalue()) > before)
    assert seconds == [5, 15, 35, 75, 135, 195]
    assert stream.getvalue().splitlines()[0].startswith("5/500 slides")


def test_a_script_is_silent_and_shows_progress_where_it_asks(
    two_slides: Path, tmp_path: Path
) -> None:
    out = tmp_path / "results"
    code = (
        "import sys, thinsection as ts\n"
        f"ts.run([{str(two_slides)!r}], out={str(out)!r}, until='tiles')\n"
        "sys.stderr.write('--\\n')\n"
        f"ts.run([{str(two_slides)!r}], out={str(out)!r}, until='tiles',\n"
        "    on_event=ts.progress())\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout == ""
    silent, shown = process.stderr.split("--\n")
    assert silent == ""
    assert len(shown.splitlines()) == 1 and shown.startswith("2/2 slides")


def test_a_listener_of_the_caller_hears_what_it_heard_before(
    two_slides: Path, tmp_path: Path
) -> None:
    events: list[RunEvent] = []
    ts.run([two_slides], out=tmp_path / "r", until="tiles", on_event=events.append)
    assert {event.slide_id for event in events} == {"a", "b c"}
    assert [e.kind for e in events].count("ended") == 2


def test_only_the_notebook_itself_shows_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call in one of its threads, a script, or with a listener shows none."""
    from concurrent.futures import ThreadPoolExecutor

    assert chosen_progress(None) is None
    monkeypatch.setattr(module, "in_notebook", lambda: True)
    assert isinstance(chosen_progress(None), Progress)
    assert chosen_progress(print) is None
    own = Progress(Shown())
    assert chosen_progress(own) is own
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(chosen_progress, None).result() is None


# in a notebook


def executed(cells: list[str], folder: Path) -> list[list[dict[str, Any]]]:
    """Outputs of the cells of a notebook that is executed in a folder."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook()
    for text in cells:
        notebook.cells.append(nbformat.v4.new_code_cell(text))
    client = nbclient.NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    return [cell.outputs for cell in notebook.cells]


# nbclient and Jupyter warn of one another's settings
@pytest.mark.filterwarnings("ignore")
@pytest.mark.check
def test_a_notebook_shows_progress_once_in_place_and_then_the_result(
    two_slides: Path,
) -> None:
    run = f"ts.run([{str(two_slides)!r}], out='results', encoder=encoder, tile_px=64"
    encoder = (
        "import thinsection as ts\n"
        "def mean(tiles):\n"
        "    return tiles.float().mean(dim=(2, 3))\n"
        "encoder = ts.make_encoder(mean, name='mean', version='1')"
    )
    cells = [
        encoder,
        f"{run})",
        f"{run}, on_event=lambda event: None)",
        f"summary = {run}, overwrite=True, on_event=ts.progress())",
        "ts.open_results('results')",
    ]
    _, first, silent, asked, results = executed(cells, two_slides.parent)
    shown, summary = first
    assert shown["output_type"] == "display_data"
    text = shown["data"]["text/plain"]
    assert text.startswith("2/2 slides") and len(text.splitlines()) == 1
    assert "tiles" in text and text.endswith(" s")
    assert "<progress" in shown["data"]["text/html"]
    assert summary["output_type"] == "execute_result"
    assert "RunSummary" in summary["data"]["text/plain"]
    assert [output["output_type"] for output in silent] == ["execute_result"]
    assert [output["output_type"] for output in asked] == ["display_data"]
    assert asked[0]["data"]["text/plain"].startswith("2/2 slides")
    assert "Results" in results[0]["data"]["text/plain"]
