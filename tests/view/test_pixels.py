"""Deep-zoom tiles: the file's own bytes where they fit, the same px everywhere."""

import io
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from thinsection.errors import InvalidInputError
from thinsection.slide import Slide, open_slide
from thinsection.slide.geometry import l0_from_lv
from thinsection.testing.synthetic import (
    ArraySlide,
    PyramidKind,
    position_pixels,
    write_pyramid,
)
from thinsection.view.pixels import EDGE, BytesCache, DeepZoom

SIZE = (3000, 1700)


def decoded(jpeg: bytes) -> np.ndarray:
    return simplejpeg.decode_jpeg(jpeg, "RGB")


def smooth(size: tuple[int, int]) -> np.ndarray:
    """A picture (H, W, 3) that a JPEG and a smaller size keep."""
    x, y = np.meshgrid(np.linspace(0, 6, size[0]), np.linspace(0, 4, size[1]))
    return np.stack(
        [np.sin(x) * 90 + 120, np.cos(y) * 90 + 120, x * 30 + y * 10], -1
    ).astype(np.uint8)


@pytest.fixture(params=["rgb", "ycbcr", "abbreviated", "strips", "deflate"])
def slide(request: pytest.FixtureRequest, tmp_path: Path) -> Slide:
    kinds = {
        "rgb": PyramidKind(ycbcr=False),
        "ycbcr": PyramidKind(tile=(240, 240), downsamples=(1, 2, 8)),
        "abbreviated": PyramidKind(jpeg_tables=True),
        "strips": PyramidKind(tile=None),
        "deflate": PyramidKind(compression="deflate"),
    }
    write_pyramid(tmp_path / "s.tif", SIZE, kinds[request.param])
    return open_slide(tmp_path / "s.tif", reader="tiff")


def test_tiles_of_the_files_levels_have_its_px(slide: Slide) -> None:
    """To the bit where its segments are sent; else as JPEG of the quality that is said."""
    deep = DeepZoom(slide)
    own = {level.downsample: level for level in slide.levels}
    sent = 0
    for index, level in enumerate(deep.levels):
        if level.downsample not in own:
            continue
        for column, row in ((0, 0), (1, 0), (level.size[0] // level.tile[0], 0)):
            size = (
                min(level.tile[0], level.size[0] - column * level.tile[0]),
                min(level.tile[1], level.size[1] - row * level.tile[1]),
            )
            if min(size) <= 0:
                continue
            x, y = (
                l0_from_lv(p * e, level.downsample)
                for p, e in zip((column, row), level.tile)
            )
            want = slide.read_region((x, y), own[level.downsample].index, size)
            got = decoded(deep.tile(index, column, row))
            assert got.shape == want.shape
            if level.stored is not None and size == level.tile:
                np.testing.assert_array_equal(got, want)
                sent += 1
    jpeg = any(level.stored is not None for level in deep.levels)
    assert (sent > 0) == jpeg


def test_levels_are_halves_down_to_one_tile_and_cover_the_slide(slide: Slide) -> None:
    levels = DeepZoom(slide).levels
    assert max(levels[0].size) <= EDGE
    for coarse, fine in pairwise(levels):
        assert 1.4 < coarse.downsample / fine.downsample < 2.9
        assert coarse.size[0] * coarse.downsample == pytest.approx(
            SIZE[0], abs=coarse.downsample
        )


@pytest.mark.parametrize("size", [(2500, 1300), (700, 4100)])
def test_tiles_between_levels_are_means_of_the_finer_px(size: tuple[int, int]) -> None:
    pixels = smooth(size)
    deep = DeepZoom(ArraySlide([pixels], segment=None))
    for index, level in enumerate(deep.levels):
        whole = Image.fromarray(pixels).resize(level.size, Image.Resampling.BOX)
        columns, rows = (math.ceil(px / EDGE) for px in level.size)
        for column, row in {(0, 0), (columns - 1, rows - 1)}:
            box = (column * EDGE, row * EDGE, min(level.size[0], (column + 1) * EDGE))
            want = np.asarray(
                whole.crop((*box, min(level.size[1], (row + 1) * EDGE))), dtype=int
            )
            got = decoded(deep.tile(index, column, row)).astype(int)
            assert got.shape == want.shape
            if (
                min(got.shape[:2]) > 16
            ):  # the last px of a level is of the slide's in part
                assert np.abs(got - want)[:-2, :-2].mean() < 3


def test_a_tile_that_is_not_there_is_refused(slide: Slide) -> None:
    deep = DeepZoom(slide)
    with pytest.raises(InvalidInputError, match="tile must be within"):
        deep.tile(0, 5, 0)
    with pytest.raises(IndexError):
        deep.tile(99, 0, 0)
    with pytest.raises(InvalidInputError, match="crop must have edges"):
        deep.crop(0, 0, (1 << 20, 5), 100)


def test_a_crop_is_the_region_and_white_beyond_the_slide() -> None:
    deep = DeepZoom(ArraySlide([smooth((900, 700))]))
    picture = Image.open(io.BytesIO(deep.crop(-200, 0, (400, 200), 100)))
    assert picture.size == (100, 50)
    pixels = np.asarray(picture).astype(int)
    assert pixels[:, :46].min() > 245
    want = np.asarray(
        Image.fromarray(smooth((900, 700))[:200, :200]).resize((50, 50)), dtype=int
    )
    assert np.abs(pixels[:, 54:] - want[:, 4:]).mean() < 4


def test_what_is_used_stays_and_the_bytes_are_bounded() -> None:
    cache, made = BytesCache(100), []

    def make(key: int, size: int) -> bytes:
        made.append(key)
        return bytes(size)

    for key in (1, 2, 1, 3, 1, 4):
        assert len(cache.get((key,), lambda key=key: make(key, 40))) == 40
    assert made == [1, 2, 3, 4]  # 1 was used, and stayed
    cache.get((2,), lambda: make(2, 40))
    assert made[-1] == 2
    assert (
        len(cache.get((9,), lambda: make(9, 1000))) == 1000
    )  # larger than all: not kept
    cache.get((9,), lambda: make(9, 1000))
    assert made[-2:] == [9, 9]


def test_position_tells_that_no_tile_is_misplaced(tmp_path: Path) -> None:
    levels = write_pyramid(
        tmp_path / "p.tif", (1100, 900), PyramidKind(compression="deflate")
    )
    deep = DeepZoom(open_slide(tmp_path / "p.tif", reader="tiff"))
    np.testing.assert_array_equal(levels[0], position_pixels((1100, 900)))
    pixels = deep._pixels(1.0, 512, 512, (400, 300))
    np.testing.assert_array_equal(pixels, levels[0][512:812, 512:912])
