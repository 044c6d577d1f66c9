"""Several resolutions on other workers and at a URL: the bytes of one process and one folder."""

import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.support.faults import FaultyTask

from thinsection.config import replace_flat
from thinsection.files.sources import RemoteFolder
from thinsection.jobs.execute import execute
from thinsection.jobs.executor import ExecutorConfig
from thinsection.results.folder import open_results
from thinsection.run.run import make_task, run
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.config import RunConfig
from thinsection.stages.spec import resolve
from thinsection.store.outcome import SlideResult
from thinsection.testing.synthetic import write_he_slide

FILTERS = "tile_filter-tissue+contrast"
GRIDS = (f"128px_0.5mpp_{FILTERS}", f"128px_1mpp_{FILTERS}")
SETTINGS = {
    "tile_mpp": ["0.5", "1.0"],
    "tile_px": 128,
    "memory": "256MiB",
    "pretrained": False,
    "batch_size": 4,
    "slide_encoders": ["mean"],
    "threads": 1,
    "tile_filter": ["tissue", "contrast"],
}
CONFIG = replace_flat(RunConfig(), SETTINGS)


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("slides")
    for number in range(3):
        path = folder / f"s{number}.tiff"
        write_he_slide(
            path,
            (1000 + 125 * number, 1100),
            seed=number,
            downsamples=(1, 4),
            white=255,
        )
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory, slides: list[Path]) -> Path:
    """Results of one process."""
    # tables name slides relative to results that lie beside them
    out = tmp_path_factory.mktemp("inline") / "out"
    summary = run(slides, out=out, config=CONFIG)
    assert summary.counts["done"] == 3
    results = open_results(out)
    for grid in GRIDS:
        assert all(len(results.tiles(path.stem, grid).coords_l0) for path in slides)
    return out


def files_of(out: Path) -> dict[str, bytes]:
    """Every file of results, but the pages, which have the time of the run."""
    paths = [path for path in out.rglob("*") if path.is_file()]
    names = {str(path.relative_to(out)): path for path in paths}
    return {
        name: path.read_bytes()
        for name, path in names.items()
        if not name.startswith(("records/", "index", ".killed"))
    }


def of_the_grids(files: dict[str, bytes]) -> dict[str, bytes]:
    """Files of the tile grids; the other files name the slide's address."""
    return {name: data for name, data in files.items() if name.split("/")[0] in GRIDS}


@pytest.mark.check
@pytest.mark.parametrize("executor", ["pool", "dask"])
def test_workers_leave_the_bytes_of_one_process(
    tmp_path: Path, slides: list[Path], inline: Path, executor: str
) -> None:
    if executor == "dask":
        pytest.importorskip("distributed", reason="dask is not installed")
    workers = ExecutorConfig(executor=executor, workers=2, threads=1)
    events: list[Any] = []
    out = tmp_path / "out"
    config = replace(CONFIG, executor=workers)
    summary = run(slides, out=out, config=config, on_event=events.append)
    assert summary.counts["done"] == 3
    assert files_of(out) == files_of(inline)
    if executor == "pool":
        kinds = [event.kind for event in events]
        assert (kinds.count("started"), kinds.count("ended")) == (3, 3)
    again = run(slides, out=out, config=config)
    assert again.counts["skipped"] == 3
    # another resolution alone is there, too
    alone = replace_flat(config, {"tile_mpp": "1.0"})
    assert run(slides, out=out, config=alone).counts["skipped"] == 3


@pytest.mark.check
@pytest.mark.parametrize("executor", ["pool", "dask"])
def test_a_worker_killed_between_the_grids_leaves_the_same_bytes(
    tmp_path: Path, slides: list[Path], inline: Path, executor: str
) -> None:
    if executor == "dask":
        pytest.importorskip("distributed", reason="dask is not installed")
    out = tmp_path / "out"
    out.mkdir()
    workers = ExecutorConfig(executor=executor, workers=2, threads=1)
    spec = resolve(replace(CONFIG, executor=workers), {})
    plain = make_task(out, spec)
    task = FaultyTask(**vars(plain), killed_once=frozenset({"s1"}))
    results: list[SlideResult] = []
    messages: list[str] = []
    execute(
        [SlideEntry(slide_id=path.stem, slide_path=str(path)) for path in slides],
        task,
        spec.executor,
        folder=task.record,
        on_report=lambda report: results.extend(report.results),
        on_message=messages.append,
    )
    ends = sorted((result.slide_id, result.status) for result in results)
    assert ends == [(path.stem, "done") for path in slides]
    assert (out / ".killed-s1").exists()
    assert any("retried alone" in message for message in messages)
    assert of_the_grids(files_of(out)) == of_the_grids(files_of(inline))


class PlainHandler(SimpleHTTPRequestHandler):
    """Sends whole files, as `python -m http.server` does."""

    def log_message(self, *args: object) -> None:
        """Nothing is printed."""


class RangeHandler(PlainHandler):
    """Sends the range of a file that a request asks for."""

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        assert asked is not None
        data = Path(self.translate_path(self.path)).read_bytes()
        part = data[int(asked[1]) : int(asked[2]) + 1]
        end = int(asked[1]) + len(part) - 1
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {asked[1]}-{end}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


@contextmanager
def web_server(folder: Path, handler: type[PlainHandler]) -> Iterator[str]:
    """Address of a web server of a folder, on this machine."""
    serve = partial(handler, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), serve)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def web(slides: list[Path]) -> Iterator[str]:
    with web_server(slides[0].parent, RangeHandler) as address:
        yield address


def without_pictures(files: dict[str, bytes]) -> dict[str, bytes]:
    """Files of the grids; by URL a picture is made of fewer pixels."""
    return {
        name: data
        for name, data in of_the_grids(files).items()
        if "/overviews/" not in name
    }


@pytest.mark.parametrize("source", ["memory", "web"])
def test_slides_by_url_leave_the_bytes_of_slides_of_a_folder(
    tmp_path: Path,
    slides: list[Path],
    inline: Path,
    source: str,
    request: pytest.FixtureRequest,
) -> None:
    if source == "web":
        start = request.getfixturevalue("web")
    else:
        start = f"memory://{secrets.token_hex(4)}"
        for path in slides:
            RemoteFolder(start).put(path, path.name)
    urls = [f"{start}/{path.name}" for path in slides]
    out = tmp_path / "out"
    summary = run(urls, out=out, config=CONFIG)
    assert summary.counts["done"] == 3, [result.error for result in summary.results]
    remote = files_of(out)
    local = files_of(inline)
    assert remote.keys() == local.keys()
    assert without_pictures(remote) == without_pictures(local)
    assert run(urls, out=out, config=CONFIG).counts["skipped"] == 3


def test_a_web_server_that_sends_whole_files_is_refused(
    tmp_path: Path, slides: list[Path]
) -> None:
    with web_server(slides[0].parent, PlainHandler) as address:
        summary = run([f"{address}/s0.tiff"], out=tmp_path, config=CONFIG)
    assert summary.counts["failed"] == 1
    assert "server must answer range requests" in summary.results[0].error
    assert "download the slide" in summary.results[0].error


def test_results_by_url_are_those_of_a_folder(slides: list[Path], inline: Path) -> None:
    url = f"memory://{secrets.token_hex(4)}/out"
    summary = run(slides, out=url, config=CONFIG)
    assert summary.counts["done"] == 3
    target = RemoteFolder(url)
    names = [name for name in target.sizes() if name.split("/")[0] in GRIDS]
    stored = {name: target.read(name) for name in names}
    assert stored == of_the_grids(files_of(inline))
    # one grid of one slide is lost: it is made again, and only it
    lost = f"{GRIDS[1]}/features_efficientnet_lite0_seed0/s1.h5"
    target.delete(lost)
    again = run(slides, out=url, config=CONFIG)
    statuses = [result.status for result in again.results]
    assert statuses == ["skipped", "done", "skipped"]
    assert {name: target.read(name) for name in names} == stored
