"""Segments side by side in the file are fetched together, and each is still its own."""

import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
from tests.slide.test_contract import JUDGED, OURS_ALONE

from thinsection.errors import SlideReadError
from thinsection.files.sources import FileSource
from thinsection.slide.formats import segments, tiff_decoder
from thinsection.slide.formats.segments import SegmentCache
from thinsection.slide.formats.tiff_decoder import SegmentDecoder
from thinsection.slide.formats.tiff_reader import TiffSlide
from thinsection.testing.slide_contract import KINDS
from thinsection.testing.synthetic import PyramidKind, write_pyramid
from thinsection.tiles import StreamConfig, TilesConfig, iter_tiles, tile_grid
from thinsection.types import MIB

SIZE = (1024, 512)  # 4 x 2 segments of 256 px


class CountingSource(FileSource):
    """A file that notes the ranges it is asked for."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.ranges: list[tuple[int, int]] = []

    def read_at(self, offset: int, length: int) -> bytes:
        self.ranges.append((offset, length))
        return super().read_at(offset, length)


def corners(*places: tuple[int, int]) -> np.ndarray:
    return np.array(places, dtype=np.int64).reshape(-1, 2) * 256


def read(path: Path, origins_l0: np.ndarray) -> tuple[np.ndarray, CountingSource]:
    source = CountingSource(path)
    out = np.zeros((len(origins_l0), 256, 256, 3), np.uint8)
    with TiffSlide(str(path), source=source) as slide:
        source.ranges.clear()  # those that opening it read, to compare its levels
        slide.read_regions(origins_l0, 0, out=out)
    return out, source


@pytest.fixture
def slide_path(tmp_path: Path) -> Path:
    write_pyramid(tmp_path / "a.tif", SIZE, KINDS["jpeg-420"])
    return tmp_path / "a.tif"


def test_a_row_of_segments_is_one_request(slide_path: Path) -> None:
    with tifffile.TiffFile(slide_path) as file:
        offsets, counts = file.pages[0].dataoffsets, file.pages[0].databytecounts
    row = corners((0, 1), (1, 1), (2, 1), (3, 1))
    out, source = read(slide_path, row)
    assert source.ranges == [(offsets[4], offsets[7] + counts[7] - offsets[4])]
    for corner, tile in zip(row, out):
        alone, _ = read(slide_path, corner[None])
        np.testing.assert_array_equal(tile, alone[0])


def test_segments_apart_or_in_another_order_are_requests_of_their_own(
    slide_path: Path,
) -> None:
    out, source = read(slide_path, corners((0, 0), (2, 0), (1, 0), (1, 0), (2, 0)))
    assert len(source.ranges) == 4  # only the last two follow each other
    np.testing.assert_array_equal(out[1], out[4])
    np.testing.assert_array_equal(out[2], out[3])


def test_a_request_has_a_bound(
    slide_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tifffile.TiffFile(slide_path) as file:
        largest = max(file.pages[0].databytecounts)
    row = corners((0, 0), (1, 0), (2, 0), (3, 0))
    whole, _ = read(slide_path, row)
    monkeypatch.setattr(tiff_decoder, "MAX_READ_BYTES", 2 * largest)
    out, source = read(slide_path, row)
    assert len(source.ranges) > 1
    assert all(length <= 2 * largest for _, length in source.ranges)
    np.testing.assert_array_equal(out, whole)


def test_a_damaged_segment_in_a_row_is_named(slide_path: Path) -> None:
    with tifffile.TiffFile(slide_path) as file:
        offset, count = file.pages[0].dataoffsets[6], file.pages[0].databytecounts[6]
    data = bytearray(slide_path.read_bytes())
    data[offset : offset + count] = bytes(count)
    slide_path.write_bytes(data)
    with pytest.raises(
        SlideReadError, match=r"column 2, row 1 of a level of .* in 'a\.tif'"
    ):
        read(slide_path, corners((0, 1), (1, 1), (2, 1), (3, 1)))


IN_PLACE = (KINDS | JUDGED | OURS_ALONE).items()
WHOLE = [kind for name, kind in IN_PLACE if not name.startswith("strips")]


@pytest.mark.parametrize("kind", WHOLE, ids=repr)
def test_whole_segments_are_decoded_without_tifffile(
    tmp_path: Path, kind: PyramidKind
) -> None:
    levels = write_pyramid(tmp_path / "a.tif", SIZE, kind)
    with TiffSlide(str(tmp_path / "a.tif")) as slide:
        for decoder in slide._decoders:
            assert isinstance(decoder, SegmentDecoder)
            vars(decoder)["_page"] = None
        pixels = slide.read_region((0, 0), 0, SIZE)  # strided
        tile = (kind.tile or SIZE)[::-1]
        np.testing.assert_array_equal(  # in place
            slide.read_region((0, 0), 0, tile), pixels[: tile[1], : tile[0]]
        )
        assert np.abs(pixels.astype(int) - levels[0]).mean() < (
            9 if kind.compression == "jpeg" else 1
        )


@pytest.mark.parametrize(
    "kind", [KINDS["jpeg-420"], *JUDGED.values(), *OURS_ALONE.values()]
)
def test_damage_of_every_compression_is_an_error(
    tmp_path: Path, kind: PyramidKind
) -> None:
    path = tmp_path / "a.tif"
    write_pyramid(path, SIZE, kind)
    with tifffile.TiffFile(path) as file:
        offset, count = file.pages[0].dataoffsets[0], file.pages[0].databytecounts[0]
    data = bytearray(path.read_bytes())
    data[offset : offset + count] = bytes(count)
    path.write_bytes(data)
    with TiffSlide(str(path)) as slide:
        with pytest.raises(
            SlideReadError, match=r"column 0, row 0 of a level of .* in 'a\.tif'"
        ):
            slide.read_region((0, 0), 0, (64, 16))
        slide.read_region((SIZE[0] - 64, SIZE[1] - 16), 0, (64, 16))


def test_uncompressed_segments_are_read_into_place(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    levels = write_pyramid(path, SIZE, KINDS["uncompressed"])
    places = [(0, 0), (1, 0), (3, 0), (0, 1), (2, 1)]
    out, source = read(path, corners(*places))
    for (x, y), tile in zip(places, out):
        expected = levels[0][y * 256 : y * 256 + 256, x * 256 : x * 256 + 256]
        np.testing.assert_array_equal(tile, expected)
    assert source.ranges == []  # no bytes between the file and `out`
    with TiffSlide(str(path)) as slide:
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(
            SlideReadError, match=r"segment must be complete, got .* in 'a\.tif'"
        ):
            slide.read_region((768, 256), 0, (256, 256))


def write_sparse(path: Path, empty: tuple[int, ...]) -> None:
    """A level of 4 x 2 segments, gray but for those that the file does not hold."""
    tile = np.full((256, 256, 3), 90, np.uint8)
    with tifffile.TiffWriter(path) as writer:
        writer.write(
            (None if place in empty else tile for place in range(8)),
            shape=(512, 1024, 3),
            dtype=np.uint8,
            tile=(256, 256),
            photometric="rgb",
            compression="deflate",
        )


def test_segments_that_were_never_scanned_are_white_and_cost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sparse.tif"
    write_sparse(path, (1, 6, 7))
    out, source = read(path, corners(*[(x, y) for y in range(2) for x in range(4)]))
    for place, tile in enumerate(out):
        assert (tile == (255 if place in (1, 6, 7) else 90)).all()
    assert len(source.ranges) == 1  # what lies side by side is still one request
    with TiffSlide(str(path), source=(source := CountingSource(path))) as slide:
        monkeypatch.setattr(SegmentDecoder, "_decode_segment", None)
        assert (slide.read_region((256, 0), 0, (256, 256)) == 255).all()
        assert (slide.read_region((520, 300), 0, (400, 100)) == 255).all()  # cuts two
        assert not source.ranges
        assert not len(slide._cache)


def test_what_was_announced_is_decoded_once_and_then_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pyramid(
        tmp_path / "a.tif", (2048, 1024), KINDS["jpeg-420"]
    )  # 8 x 4 segments of 192 KiB
    monkeypatch.setattr(segments, "CACHE_BYTES", 20 * 256 * 256 * 3)
    decode, times = SegmentDecoder._decode_segment, Counter[int]()

    def count(
        self: SegmentDecoder, index: int, data: memoryview, out: np.ndarray
    ) -> None:
        times[index] += 1
        decode(self, index, data, out)

    monkeypatch.setattr(SegmentDecoder, "_decode_segment", count)
    config = TilesConfig(tile_px=100, tile_mpp="native", overlap=30, edge="pad")
    with TiffSlide(str(tmp_path / "a.tif")) as slide:
        times.clear()  # opening it has compared its levels
        table = tile_grid(slide, config)
        found = [
            batch.tiles.copy() for batch in iter_tiles(slide, table, batch_size=16)
        ]
        assert times == dict.fromkeys(range(32), 1)
        assert not len(slide._cache)
        alone = slide.read_region(tuple(table.coords_l0[40]), 0, (100, 100))
        np.testing.assert_array_equal(np.concatenate(found)[40], alone)
        assert len(slide._cache)  # nobody said that this will not be cut again


def test_a_cache_is_small_unless_segments_are_large_or_cpus_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segments, "_num_cpus", lambda: 2)
    assert segments.cache_bytes(256 * 256 * 3) == 16 * MIB
    assert segments.cache_bytes(512 * 512 * 3) == 80 * 512 * 512 * 3
    assert segments.cache_bytes(2048 * 2048 * 3) == 64 * MIB
    monkeypatch.setattr(segments, "_num_cpus", lambda: 12)
    assert segments.cache_bytes(256 * 256 * 3) == 48 * MIB
    monkeypatch.setattr(segments, "_num_cpus", lambda: 64)
    assert segments.cache_bytes(256 * 256 * 3) == 64 * MIB


def test_too_small_a_cache_keeps_what_is_needed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = replace(KINDS["jpeg-420"], tile=(64, 64))
    write_pyramid(tmp_path / "a.tif", (2048, 900), kind)
    # blocks of 8 x 8 tiles end within segments: a row of 32 waits for the next row of blocks
    table_of = TilesConfig(tile_px=50, tile_mpp="native")
    segment_bytes = 64 * 64 * 3
    num_decoded = {}
    for num_kept in (100, 24):
        monkeypatch.setattr(segments, "CACHE_BYTES", num_kept * segment_bytes)
        source = CountingSource(tmp_path / "a.tif")
        monkeypatch.setattr(tiff_decoder, "MAX_READ_BYTES", 0)  # one request a segment
        with TiffSlide(str(tmp_path / "a.tif"), source=source) as slide:
            table = tile_grid(slide, table_of)
            config = StreamConfig(decode_threads=1)
            found = [
                batch.tiles.copy()
                for batch in iter_tiles(slide, table, batch_size=16, config=config)
            ]
            assert not len(slide._cache)
            alone = slide.read_region(tuple(table.coords_l0[200]), 0, (50, 50))
        np.testing.assert_array_equal(np.concatenate(found)[200], alone)
        num_decoded[num_kept] = len(source.ranges)
    again = num_decoded[24] - num_decoded[100]
    # if those used least recently were dropped, both rows of 32 would be decoded again
    assert 0 < again <= 40


def test_segments_are_waited_for_and_tried_again_where_another_thread_failed() -> None:
    class Twice:
        shape, calls = (4, 4, 3), 0

        def decode(
            self, indices: Iterable[int], outs: Iterable[np.ndarray]
        ) -> Iterator[None]:
            self.calls += 1
            if self.calls == 1:
                started.set()
                failing.wait(10)
                raise SlideReadError("first")
            for index, out in zip(indices, outs):
                out[:] = index
                yield

    started, failing, cache, segments = (
        threading.Event(),
        threading.Event(),
        SegmentCache(99),
        Twice(),
    )
    with ThreadPoolExecutor(2) as pool:

        def take(uses: dict[int, int]) -> list[int]:
            borrowed = cache.borrow(segments, uses, whole=[6])
            return sorted(int(px[0, 0, 0]) for _, px in borrowed)

        first = pool.submit(take, {5: 1, 6: 1})
        assert started.wait(10)
        second = pool.submit(take, {6: 1, 7: 1})
        failing.set()
        with pytest.raises(SlideReadError, match="first"):
            first.result(10)
        assert second.result(10) == [6, 7]
    assert len(cache) == 1  # 7: of 6 nothing is left to ask for


def test_threads_that_cut_one_segment_decode_it_once(tmp_path: Path) -> None:
    write_pyramid(tmp_path / "a.tif", SIZE, KINDS["jpeg-420"])
    source = CountingSource(tmp_path / "a.tif")
    start = threading.Barrier(8, timeout=30)
    with TiffSlide(str(tmp_path / "a.tif"), source=source) as slide:
        source.ranges.clear()

        def cut(x: int) -> np.ndarray:
            start.wait()
            return slide.read_region((200 + x, 100), 0, (100, 100))

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(cut, range(8)))
        alone = slide.read_region((200, 100), 0, (107, 100))
    assert len(source.ranges) == 1  # both side by side
    for x, region in enumerate(found):
        np.testing.assert_array_equal(region, alone[:, x : x + 100])
