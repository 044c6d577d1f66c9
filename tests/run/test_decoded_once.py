"""Segments of JPEG 2000 slides are decoded once for quality control and tiles."""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from thinsection.config import replace_flat
from thinsection.run.run import run
from thinsection.slide import open_slide
from thinsection.slide.formats import kept_segments, segments, tiff_reader
from thinsection.slide.formats.tiff_decoder import SegmentDecoder
from thinsection.slide.formats.tiff_layout import TiffLayout
from thinsection.stages.config import RunConfig
from thinsection.testing.synthetic import PyramidKind, write_he_slide, write_levels
from thinsection.types import RgbArray

# finest levels of the two slides
SIZES = ((1000, 800), (700, 900))
SEGMENT_BYTES = 128 * 128 * 3

Counts = Counter[tuple[int, int]]


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawn H&E slides as JPEG 2000."""
    folder = tmp_path_factory.mktemp("jpeg2000")
    kind = PyramidKind(compression="jpeg2000", tile=(128, 128), aperio=True)
    for number, size in enumerate(SIZES):
        drawn = folder / "drawn.svs"
        write_he_slide(drawn, size, seed=number + 1, downsamples=(1, 4))
        with open_slide(drawn) as slide:
            levels = [
                slide.read_region((0, 0), level.index, level.size)
                for level in slide.levels
            ]
        drawn.unlink()
        write_levels(folder / f"s{number}.svs", levels, kind)
    return folder


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """Number of decodes of each segment, by width of its level and index.

    The comparison of the levels of a new file is not counted: it is made once in a file's life.
    """
    counts: Counts = Counter()
    lock = threading.Lock()
    opening = threading.local()
    decode = SegmentDecoder.decode
    check_layout = tiff_reader.checked_layout

    def checked(*args: Any) -> TiffLayout:
        opening.now = True
        try:
            return check_layout(*args)
        finally:
            opening.now = False

    def counted(
        self: SegmentDecoder, indices: Sequence[int], outs: Iterable[RgbArray]
    ) -> Iterator[None]:
        if not getattr(opening, "now", False):
            with lock:
                counts.update((self.size[0], index) for index in indices)
        return decode(self, indices, outs)

    monkeypatch.setattr(tiff_reader, "checked_layout", checked)
    monkeypatch.setattr(SegmentDecoder, "decode", counted)
    return counts


def read_tiles(slides: Path, out: Path) -> dict[str, np.ndarray]:
    """Quality control, then tiles at two resolutions, which a filter looks at."""
    flat = {
        "qc": "auto",
        "reader": "tiff",
        "tile_mpp": ["0.5", "0.7"],
        "tile_px": 100,
        "tile_filter": ["contrast"],
        "until": "tiles",
    }
    summary = run([slides], out=out, config=replace_flat(RunConfig(), flat))
    assert summary.counts["done"] == len(SIZES)
    tables = {}
    for path in sorted(out.rglob("*.h5")):
        with h5py.File(path) as file:
            tables[str(path.relative_to(out))] = file["coords"][:]
    return tables


def test_focus_picture_and_tiles_decode_each_segment_at_most_once(
    slides: Path, tmp_path: Path, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read_tiles(slides, tmp_path / "all")
    assert len(expected) == 2 * len(SIZES)
    assert all(len(coords) > 5 for coords in expected.values())
    # the picture reads the coarse level, focus and tiles the fine one
    widths = {width for width, _ in counts}
    assert widths == {size[0] // part for size in SIZES for part in (1, 4)}
    assert max(counts.values()) == 1
    # a file that is soon full costs time and changes no tile
    counts.clear()
    monkeypatch.setattr(kept_segments, "MAX_KEPT_BYTES", 20 * SEGMENT_BYTES)
    tables = read_tiles(slides, tmp_path / "few")
    assert max(counts.values()) > 1
    assert tables.keys() == expected.keys()
    for name, coords in tables.items():
        np.testing.assert_array_equal(coords, expected[name])


def test_segments_that_a_small_cache_drops_are_kept_too(
    slides: Path, tmp_path: Path, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "CACHE_BYTES", 4 * SEGMENT_BYTES)
    read_tiles(slides, tmp_path / "out")
    assert max(counts.values()) == 1
