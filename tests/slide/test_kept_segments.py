"""Decoded segments in a temporary file are those that the decoder would give again."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from thinsection.errors import SlideReadError
from thinsection.slide import open_slide
from thinsection.slide.formats.kept_segments import KeptFile
from thinsection.slide.formats.segments import Decoder, KeptDecoder
from thinsection.slide.formats.tiff_reader import TiffSlide
from thinsection.testing.slide_contract import KINDS
from thinsection.testing.synthetic import PyramidKind, write_pyramid
from thinsection.types import Level, RgbArray

SEGMENT = (24, 16)
SEGMENT_BYTES = 24 * 16 * 3


class NumberedDecoder(Decoder):
    """Segments whose pixels are their index; counts how often each is decoded."""

    def __init__(self) -> None:
        level = Level(index=0, size=(70, 50), downsample=1.0, segment=SEGMENT)
        super().__init__(level, "numbered")
        self.counts: Counter[int] = Counter()

    def _decode_one(self, index: int, out: RgbArray) -> None:
        self.counts[index] += 1
        out[:] = index


def decode(decoder: Decoder, indices: list[int]) -> list[int]:
    """First value of each segment, all decoded into one array."""
    out = np.zeros(decoder.shape, dtype=np.uint8)
    values = []
    for _ in decoder.decode(indices, iter([out] * len(indices))):
        assert len(np.unique(out)) == 1
        values.append(int(out[0, 0, 0]))
    return values


def test_each_segment_is_decoded_once_in_any_order(tmp_path: Path) -> None:
    numbered = NumberedDecoder()
    kept = KeptDecoder(numbered, KeptFile(tmp_path))
    assert (kept.columns, kept.rows, kept.shape) == (3, 4, (16, 24, 3))
    assert decode(kept, [5, 2, 7]) == [5, 2, 7]
    assert decode(kept, [0, 2, 3, 5, 7, 1]) == [0, 2, 3, 5, 7, 1]
    assert set(numbered.counts.values()) == {1}


def test_strided_arrays_are_filled(tmp_path: Path) -> None:
    kept = KeptDecoder(NumberedDecoder(), KeptFile(tmp_path))
    decode(kept, [4, 9])
    wide = np.zeros((16, 48, 3), dtype=np.uint8)
    list(kept.decode([9, 4], [wide[:, :24], wide[:, 24:]]))
    assert (wide[:, :24] == 9).all()
    assert (wide[:, 24:] == 4).all()


def test_nothing_more_is_kept_when_the_file_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "thinsection.slide.formats.kept_segments.MAX_KEPT_BYTES", 2 * SEGMENT_BYTES
    )
    numbered = NumberedDecoder()
    kept = KeptDecoder(numbered, KeptFile(tmp_path))
    for _ in range(2):
        assert decode(kept, [3, 4, 5, 6]) == [3, 4, 5, 6]
    assert numbered.counts == {3: 1, 4: 1, 5: 2, 6: 2}


@pytest.mark.parametrize("failure", ["error", "short"])
def test_a_disk_that_is_full_ends_the_keeping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    write = os.pwrite

    def refuse(descriptor: int, data: memoryview, place: int) -> int:
        if place == 0:
            return write(descriptor, data, place)
        if failure == "error":
            raise OSError(28, "No space left on device")
        return 5

    monkeypatch.setattr(os, "pwrite", refuse)
    numbered = NumberedDecoder()
    kept = KeptDecoder(numbered, KeptFile(tmp_path))
    for _ in range(2):
        assert decode(kept, [1, 2, 8]) == [1, 2, 8]
    assert numbered.counts == {1: 1, 2: 2, 8: 2}


def test_only_what_the_cache_drops_is_kept_after_the_context(tmp_path: Path) -> None:
    numbered = NumberedDecoder()
    kept = KeptDecoder(numbered, KeptFile(tmp_path))
    kept.keeps_new = False
    decode(kept, [3, 6])
    kept.keep(6, np.full(kept.shape, 6, dtype=np.uint8))
    assert decode(kept, [3, 6]) == [3, 6]
    assert numbered.counts == {3: 2, 6: 1}


def test_a_closed_file_says_so(tmp_path: Path) -> None:
    file = KeptFile(tmp_path)
    kept = KeptDecoder(NumberedDecoder(), file)
    decode(kept, [1])
    file.close()
    file.close()
    assert decode(kept, [2]) == [2]
    with pytest.raises(SlideReadError, match="closed"):
        decode(kept, [1])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("compression", "is_kept"), [("jpeg2000", True), ("deflate", False)]
)
def test_only_slow_codecs_are_kept(
    tmp_path: Path, compression: str, is_kept: bool
) -> None:
    kind = PyramidKind(compression=compression, aperio=compression == "jpeg2000")
    write_pyramid(tmp_path / "a.tif", (600, 400), kind)
    with TiffSlide(str(tmp_path / "a.tif")) as slide:
        with slide.keeping_decoded([0], tmp_path):
            before = slide.read_region((40, 30), 0, (300, 200))
        kept = [isinstance(decoder, KeptDecoder) for decoder in slide._decoders]
        assert kept == [is_kept, False]
        slide.drop_decoded()
        after = slide.read_region((40, 30), 0, (300, 200))
    np.testing.assert_array_equal(before, after)


def test_a_turned_slide_keeps_what_its_file_stores(tmp_path: Path) -> None:
    kind = PyramidKind(compression="jpeg2000", aperio=True, orientation=6)
    write_pyramid(tmp_path / "a.tif", (600, 400), kind)
    with open_slide(tmp_path / "a.tif", reader="tiff") as slide:
        assert slide.stored is not slide
        before = slide.read_region((10, 30), 0, (200, 300))
        with slide.keeping_decoded([0], tmp_path):
            slide.drop_decoded()
            slide.read_region((0, 0), 0, slide.size)
        slide.drop_decoded()
        after = slide.read_region((10, 30), 0, (200, 300))
    np.testing.assert_array_equal(before, after)


def test_kinds_of_the_contract_that_are_slow_are_those_of_jpeg_2000(
    tmp_path: Path,
) -> None:
    slow = set()
    for name, kind in KINDS.items():
        write_pyramid(tmp_path / f"{name}.tif", (300, 200), kind)
        with TiffSlide(str(tmp_path / f"{name}.tif")) as slide:
            if slide._decoders[0].slow:
                slow.add(name)
    assert slow == {
        name for name, kind in KINDS.items() if "2000" in str(kind.compression)
    }
    assert slow
