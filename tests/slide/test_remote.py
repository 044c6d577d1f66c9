"""Slides by URL, from a real S3 server on localhost: streamed, staged, counted, deleted."""

import os
import re
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from thinsection.errors import DiskSpaceError, SlideOpenError
from thinsection.files.sources import FsspecSource, filesystem
from thinsection.files.urls import is_url
from thinsection.run.run import run
from thinsection.slide import open_slide
from thinsection.slide.cohort_table import SlidesConfig
from thinsection.slide.open import CACHE_VARIABLE
from thinsection.stages.config import RunConfig
from thinsection.store.identity import fingerprint
from thinsection.store.outcome import SlideResult, describe
from thinsection.store.tiles_h5 import read_tiles
from thinsection.testing.synthetic import write_he_slide
from thinsection.tiles.grid import TilesConfig

pytest.importorskip("fsspec", reason="fsspec is not installed")

SLIDES = Path(os.environ.get("THINSECTION_TEST_SLIDES", "../shared/slides"))
REAL = SLIDES / "CMU-1-Small-Region.svs"
needs_real = pytest.mark.skipif(not REAL.is_file(), reason=f"no real slide at {REAL}")


def upload(bucket: Any, path: Path) -> str:
    bucket.put_file(str(path), f"slides/{path.name}")
    return f"s3://slides/{path.name}"


def pyramid_of_real(path: Path) -> None:
    """The real slide's px as a pyramid of four levels; the file of the project has only one."""
    with open_slide(REAL) as slide:
        pixels = slide.read_region((0, 0), 0, slide.size)
    with tifffile.TiffWriter(path) as writer:
        for step in (1, 2, 4, 8):
            options: dict[str, Any] = {"subfiletype": 1 if step > 1 else 0}
            writer.write(
                np.ascontiguousarray(pixels[::step, ::step]),
                tile=(256, 256),
                compression="jpeg",
                compressionargs={"level": 80},
                photometric="rgb",
                metadata=None,
                resolution=(20000 / step, 20000 / step),
                resolutionunit="CENTIMETER",
                **options,
            )


@needs_real
def test_the_real_slide_streams_the_same_pixels_and_has_the_same_fingerprint(
    bucket: Any,
) -> None:
    url = upload(bucket, REAL)
    with open_slide(REAL, reader="tiff") as local, open_slide(url) as remote:
        assert remote.choice.startswith("tiff: streamed by range requests")
        assert remote.levels == local.levels
        assert remote.slide_mpp == local.slide_mpp
        region = ((500, 700), 0, (600, 300))
        assert np.array_equal(remote.read_region(*region), local.read_region(*region))
        source = remote.source
        assert source is not None
        assert source.size == REAL.stat().st_size
        # it has one level, and its metadata were read before its copy
        assert source.size <= source.fetched_bytes < 1.2 * source.size
    assert fingerprint(url) == fingerprint(REAL)


@pytest.fixture(scope="module")
def pyramid(bucket: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The pyramid of the real slide's px, here and in the bucket."""
    path = tmp_path_factory.mktemp("pyramid") / "pyramid.tiff"
    pyramid_of_real(path)
    return path, upload(bucket, path)


def result_of(slide: str | Path, out: Path, until: str, **tiles: Any) -> SlideResult:
    config = RunConfig(tiles=TilesConfig(**tiles), slides=SlidesConfig(reader="tiff"))
    (result,) = run([slide], out=out, config=config, until=until).results
    assert result.status == "done", result.error
    return result


@needs_real
@pytest.mark.parametrize(
    ("until", "tiles"),
    [
        ("tissue", {}),
        ("tiles", {}),
        ("embeddings", {"tile_px": 64, "tile_mpp": "4.0"}),
        ("embeddings", {"tile_px": 64, "tile_mpp": "2.0"}),
    ],
)
def test_a_run_that_needs_few_levels_fetches_less_than_60_percent_and_says_so(
    pyramid: tuple[Path, str], tmp_path: Path, until: str, tiles: dict[str, Any]
) -> None:
    path, url = pyramid
    result = result_of(url, tmp_path / "remote", until, **tiles)
    facts = result.facts
    assert facts["file_bytes"] == path.stat().st_size
    share = facts["fetched_bytes"] / facts["file_bytes"]
    assert 0.1 < share < 0.6
    assert (
        f"{share:.0%} of the file fetched in {facts['requests']} requests"
        in describe(result)
    )


@needs_real
def test_the_fingerprints_bytes_are_counted_too(
    pyramid: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    plain = FsspecSource.read_at

    def counted(source: FsspecSource, offset: int, length: int) -> bytes:
        reads.append(length)
        return plain(source, offset, length)

    monkeypatch.setattr(FsspecSource, "read_at", counted)
    facts = result_of(pyramid[1], tmp_path / "out", "tiles").facts
    assert (facts["fetched_bytes"], facts["requests"]) == (sum(reads), len(reads))


@needs_real
def test_a_streamed_slide_gives_the_same_embeddings(
    pyramid: tuple[Path, str], tmp_path: Path
) -> None:
    import h5py

    tables = []
    for name, slide in zip(("local", "remote"), pyramid):
        result_of(slide, tmp_path / name, "embeddings", tile_px=64, tile_mpp="2.0")
        (path,) = (tmp_path / name).glob("*/features_*/pyramid.h5")
        with h5py.File(path) as file:
            tables.append((file["coords"][:], file["features"][:]))
    assert len(tables[0][0]) > 10
    assert np.array_equal(tables[0][0], tables[1][0])
    assert np.array_equal(tables[0][1], tables[1][1])


def one_level(path: Path) -> None:
    """A slide of one level with 17 MB: coloured noise on white, not compressed."""
    pixels = np.full((2048, 2816, 3), 245, np.uint8)
    noise = np.random.default_rng(0).integers(-25, 26, (1400, 2000, 3))
    pixels[300:1700, 400:2400] = np.array([190, 110, 170]) + noise
    with tifffile.TiffWriter(path) as writer:
        writer.write(
            pixels,
            tile=(256, 256),
            photometric="rgb",
            metadata=None,
            resolution=(20000, 20000),
            resolutionunit="CENTIMETER",
        )


@pytest.fixture
def ranges() -> Iterator[tuple[str, list[int]]]:
    """Address of a plain HTTP server of a folder, and the bytes of each answer."""
    answers: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, *, with_body: bool) -> None:
            data = (folder / Path(self.path).name).read_bytes()
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            self.send_response(206 if asked else 200)
            if asked:
                first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
                data = data[first : last + 1]
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if with_body:
                answers.append(len(data))
                self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            """Nothing is printed."""

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one_level(folder / "one.tiff")
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/one.tiff", answers
        server.shutdown()
        server.server_close()
        thread.join()


def test_of_a_slide_of_one_level_no_more_than_its_bytes_are_fetched(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[int] = []
    path = tmp_path / "one.tiff"
    one_level(path)
    url = upload(bucket, path)
    # fsspec gives every reader the same object
    client, *_ = filesystem(url)
    plain = client.cat_file

    def counted(*args: Any, **options: Any) -> bytes:
        data: bytes = plain(*args, **options)
        answers.append(len(data))
        return data

    monkeypatch.setattr(client, "cat_file", counted)
    tiles = {"tile_px": 224, "tile_mpp": "1.0"}
    local = result_of(path, tmp_path / "local", "embeddings", **tiles)
    remote = result_of(url, tmp_path / "remote", "embeddings", **tiles)
    assert remote.facts["num_tiles"] == local.facts["num_tiles"] > 10
    assert path.stat().st_size < sum(answers) <= 1.05 * path.stat().st_size
    assert remote.facts["fetched_bytes"] == sum(answers)
    embeddings = []
    for name in ("local", "remote"):
        (file,) = (tmp_path / name).glob("*/features_*/one.h5")
        embeddings.append(np.asarray(read_tiles(file).features))
    np.testing.assert_array_equal(embeddings[0], embeddings[1])


def test_the_same_holds_for_a_plain_web_server(
    ranges: tuple[str, list[int]], tmp_path: Path
) -> None:
    url, answers = ranges
    facts = result_of(url, tmp_path, "tiles").facts
    assert facts["num_tiles"] > 10
    size = facts["file_bytes"]
    assert size < sum(answers) <= 1.05 * size
    assert not list(Path(tempfile.gettempdir()).glob(f"thinsection-staged-{size}-*"))


def test_a_look_at_a_slide_of_one_level_fetches_little(
    bucket: Any, tmp_path: Path
) -> None:
    path = tmp_path / "look.tiff"
    one_level(path)
    with open_slide(upload(bucket, path)) as slide:
        region = slide.read_region((600, 500), 0, (100, 100))
        assert slide.source is not None
        assert slide.source.fetched_bytes < 0.05 * slide.source.size
    with open_slide(path) as slide:
        np.testing.assert_array_equal(
            region, slide.read_region((600, 500), 0, (100, 100))
        )


def test_a_slide_of_one_level_is_streamed_if_there_is_no_room_for_a_copy(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "room.tiff"
    one_level(path)
    url = upload(bucket, path)
    monkeypatch.setenv(CACHE_VARIABLE, "1kB")
    with open_slide(path) as local, open_slide(url) as remote:
        whole = ((0, 0), 0, local.size)
        np.testing.assert_array_equal(
            remote.read_region(*whole), local.read_region(*whole)
        )
        source = remote.source
        assert source is not None
        assert source.requests > 3


def test_other_readers_stage_the_file_and_delete_it_when_done(
    bucket: Any, tmp_path: Path
) -> None:
    path = tmp_path / "he.tiff"
    write_he_slide(path, (700, 500))
    with open_slide(upload(bucket, path), reader="openslide") as slide:
        assert slide.source is not None
        assert slide.slide_path == "s3://slides/he.tiff"
        with open_slide(path, reader="openslide") as local:
            region = ((100, 50), 0, (300, 200))
            assert np.array_equal(
                slide.read_region(*region), local.read_region(*region)
            )
        copies = list(
            Path(tempfile.gettempdir()).glob(
                f"thinsection-staged-{slide.source.size}-*"
            )
        )
        assert copies
    assert not any(copy.exists() for copy in copies)


def test_staging_stays_within_its_bound(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "large.tiff"
    write_he_slide(path, (700, 500))
    url = upload(bucket, path)
    monkeypatch.setenv(CACHE_VARIABLE, "1kB")
    with pytest.raises(DiskSpaceError, match=r"staged slides must fit into 1000 B"):
        open_slide(url, reader="openslide")


def test_a_missing_object_is_named(bucket: Any) -> None:
    with pytest.raises(
        SlideOpenError, match=r"must be reachable.*s3://slides/none\.svs"
    ):
        open_slide("s3://slides/none.svs")


def test_an_unknown_protocol_is_refused() -> None:
    assert is_url("s3://a/b")
    with pytest.raises(SlideOpenError, match="must have a known protocol"):
        FsspecSource("nosuch://a/b.svs")
