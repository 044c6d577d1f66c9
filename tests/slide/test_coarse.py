"""A giant without levels is read at an eighth: its tissue costs seconds, empty parts nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from thinsection.errors import InvalidInputError
from thinsection.qc import tissue_mask
from thinsection.slide import open_slide, read_resized, resize
from thinsection.slide.formats.tiff_decoder import SegmentDecoder
from thinsection.store.tiles_h5 import tile_attributes
from thinsection.testing.synthetic import (
    PyramidKind,
    he_texture,
    write_he_slide,
    write_pyramid,
)
from thinsection.tiles import TilesConfig, iter_tiles, tile_grid

KINDS = {
    "jpeg": {"compression": "jpeg", "tile": (256, 256)},
    "jpeg-strips": {"compression": "jpeg", "rowsperstrip": 32},
    "lzw": {"compression": "lzw", "tile": (256, 240)},
    "none": {"compression": None, "rowsperstrip": 16},
}


@pytest.fixture
def all_are_giants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resize, "_GIANT_PX", 1)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("size_th", [(88, 61), (43, 30), (300, 200)])
def test_a_coarse_reading_is_nearly_the_exact_one(
    tmp_path: Path,
    kind: dict[str, Any],
    size_th: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pixels = np.tile(he_texture(np.random.default_rng(2)), (1, 2, 1))[:984, :1408]
    tifffile.imwrite(
        tmp_path / "a.tif", pixels, photometric="rgb", metadata=None, **kind
    )
    with open_slide(tmp_path / "a.tif", reader="tiff") as slide:
        exact = read_resized(slide, size_th)
        monkeypatch.setattr(resize, "_GIANT_PX", 1)
        coarse = read_resized(slide, size_th)
    difference = np.abs(coarse.astype(int) - exact)
    assert coarse.shape == exact.shape
    assert difference.any()
    assert difference.mean() < 1.6
    assert np.percentile(difference, 99) <= 9


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_grey_becomes_rgb_also_when_read_coarsely(
    tmp_path: Path, kind: dict[str, Any], all_are_giants: None
) -> None:
    grey = he_texture(np.random.default_rng(2))[:810, :, 1]
    tifffile.imwrite(
        tmp_path / "a.tif", grey, photometric="minisblack", metadata=None, **kind
    )
    with open_slide(tmp_path / "a.tif", reader="tiff") as slide:
        pixels = slide.read_region((0, 0), 0, slide.size)
        assert np.abs(pixels.astype(int) - grey[..., None]).mean() < 2
        small = read_resized(slide, (64, 50))
    assert abs(small.mean() - grey.mean()) < 1.5
    assert (small[..., 0] == small[..., 2]).all()


def test_tissue_of_a_coarse_reading_is_that_of_the_exact_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_he_slide(tmp_path / "a.tif", (4100, 3000), seed=3, downsamples=(1,))
    with open_slide(tmp_path / "a.tif") as slide:
        exact = tissue_mask(slide).mask
        monkeypatch.setattr(resize, "_GIANT_PX", 1)
        coarse = tissue_mask(slide).mask
    assert (exact & coarse).sum() / (exact | coarse).sum() > 0.985


def test_empty_segments_are_never_decoded_and_small_slides_are_read_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pyramid(tmp_path / "a.tif", (1024, 768), PyramidKind(downsamples=(1,)))
    with tifffile.TiffFile(tmp_path / "a.tif", mode="r+b") as file:
        file.pages[0].tags["TileByteCounts"].overwrite(
            [0] * 11 + [file.pages[0].databytecounts[11]]
        )
    decoded, decode_one = [], SegmentDecoder._decode_segment

    def counted(
        self: SegmentDecoder, index: int, data: memoryview, out: np.ndarray
    ) -> None:
        decoded.append(out.shape)
        decode_one(self, index, data, out)

    monkeypatch.setattr(SegmentDecoder, "_decode_segment", counted)
    with open_slide(tmp_path / "a.tif", reader="tiff") as slide:
        read_resized(slide, (64, 48))
        assert decoded == [(256, 256, 3)]
        monkeypatch.setattr(resize, "_GIANT_PX", 1)
        assert (read_resized(slide, (64, 48))[:32, :32] == 255).all()
        assert decoded[1:] == [(32, 32, 3)]


@pytest.mark.parametrize(
    ("tile_mpp", "downsample"), [("1.0", 2), ("1.3", 2), ("4.0", 8)]
)
def test_fast_tiles_are_nearly_the_exact_ones(
    tmp_path: Path, tile_mpp: str, downsample: int
) -> None:
    write_he_slide(tmp_path / "a.svs", (2300, 1500), seed=3, mpp=0.5)
    exact, fast = (
        TilesConfig(tile_px=96, tile_mpp=tile_mpp, resample=r)
        for r in ("exact", "fast")
    )
    with open_slide(tmp_path / "a.svs", reader="tiff") as slide:
        slow_table, table = tile_grid(slide, exact), tile_grid(slide, fast)
        np.testing.assert_array_equal(table.coords_l0, slow_table.coords_l0)
        assert table.plan.level >= len(slide.levels)
        assert table.plan.downsample == pytest.approx(downsample, rel=0.005)
        assert table.plan.resamples == (tile_mpp == "1.3")
        pairs = zip(iter_tiles(slide, slow_table), iter_tiles(slide, table))
        pixels = [(a.tiles.astype(int), b.tiles.astype(int)) for a, b in pairs]
        attributes = tile_attributes("a", slide, table, config=fast)
        assert attributes["patch_level"] == slow_table.plan.level
    difference = np.concatenate([np.abs(a - b) for a, b in pixels])
    assert 0 < difference.mean() < 2.5


def test_what_is_no_jpeg_has_no_reduced_levels(tmp_path: Path) -> None:
    write_pyramid(tmp_path / "a.tif", (800, 600), PyramidKind(compression="deflate"))
    with open_slide(tmp_path / "a.tif", reader="tiff") as slide:
        assert slide.reduced == ()
        with pytest.raises(InvalidInputError, match=r"level must be in \[0, "):
            slide.read_region((0, 0), len(slide.levels), (8, 8))
