"""What every reader of slides must do: subclass `SlideContract` in a test module.

    class TestMyReader(SlideContract):
        reader = "mine"

The suite writes small pyramids of many kinds, and opens each with `open_slide(reader=...)`. They
are TIFFs unless the subclass has a `name`, `write`, `damage` and `cut` of its own.
"""

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import tifffile
from PIL import Image

from thinsection.errors import InvalidInputError, SlideOpenError, SlideReadError
from thinsection.slide import Slide, open_slide, read_resized
from thinsection.slide.geometry import best_level, lv_from_l0
from thinsection.testing.synthetic import PyramidKind, write_pyramid
from thinsection.types import CoordsL0, PointL0, RgbArray, Size

SIZE: Size = (600, 436)  # not square, no multiple of any tile
Written = tuple[Slide, list[RgbArray]]  # and the levels that were written
ODD_SIZE: Size = (601, 439)  # downsamples of the levels are no whole numbers

KINDS = {
    "jpeg-420": PyramidKind(),
    "jpeg-rgb": PyramidKind(ycbcr=False),
    "jpeg-tables": PyramidKind(jpeg_tables=True),
    "jpeg-tables-aperio": PyramidKind(jpeg_tables=True, aperio=True),
    "jpeg-240": PyramidKind(tile=(240, 240)),
    "jpeg-128x256": PyramidKind(tile=(128, 256)),
    "lzw": PyramidKind(compression="lzw"),
    "deflate": PyramidKind(compression="deflate"),
    "uncompressed": PyramidKind(compression=None),
    "jpeg2000-aperio": PyramidKind(compression="jpeg2000", aperio=True),
    "no-levels": PyramidKind(downsamples=(1,), compression="lzw"),
    "gap-in-levels": PyramidKind(downsamples=(1, 2, 4), compression="deflate"),
    "no-mpp": PyramidKind(mpp=None),
    "mpp-x-y": PyramidKind(mpp=(0.25, 0.5)),
}
STRIPED = {
    f"strips-{name or 'uncompressed'}": PyramidKind(
        downsamples=(1,), tile=None, compression=name
    )
    for name in ("jpeg", "lzw", "deflate", "jpeg2000", None)
}


class SlideContract:
    """Tests that a reader's own test class inherits.

    Attributes:
        whole_px: True where any px of any level can be addressed. False where the library takes
            level-0 px and interpolates on levels whose downsample is no whole number.
        reports_damage: False for a library that gives px of no meaning for a tile that it cannot
            decode, and says nothing.
    """

    reader: ClassVar[str]  # name for `open_slide`
    name: ClassVar[str] = "a.tif"  # of the file or folder that `write` makes
    kinds: ClassVar[dict[str, PyramidKind]] = KINDS  # what it must read, by name
    usual: ClassVar[PyramidKind] = KINDS["jpeg-420"]  # for the tests that need only one
    whole_px: ClassVar[bool] = True
    reports_damage: ClassVar[bool] = True

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Every test that takes a kind runs once per kind of the subclass."""
        if "kind" in metafunc.fixturenames:
            kinds = metafunc.cls.kinds
            metafunc.parametrize("kind", kinds.values(), ids=kinds.keys())

    def open(self, path: Path) -> Slide:
        return open_slide(path, reader=self.reader)

    def write(self, path: Path, size: Size, kind: PyramidKind) -> list[RgbArray]:
        """Writes a slide whose px are `position_pixels` of each level, and returns the levels."""
        return write_pyramid(path, size, kind)

    def damage(self, path: Path) -> None:
        """Spoils the last level-0 tile or strip of a slide of the usual kind."""
        with tifffile.TiffFile(path) as tiff:
            offset, count = (
                tiff.pages[0].dataoffsets[-1],
                tiff.pages[0].databytecounts[-1],
            )
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(bytes(count))

    def cut(self, path: Path) -> None:
        """Leaves three quarters of a slide of one level."""
        os.truncate(path, path.stat().st_size * 3 // 4)

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / self.name

    @pytest.fixture
    def slide(self, path: Path) -> Iterator[Slide]:
        """A slide of the usual kind, open."""
        self.write(path, SIZE, self.usual)
        with self.open(path) as slide:
            yield slide

    @pytest.fixture
    def any_slide(self, path: Path, kind: PyramidKind) -> Iterator[Written]:
        """A slide of each kind in turn, open, and the levels that were written."""
        levels = self.write(path, SIZE, kind)
        with self.open(path) as slide:
            yield slide, levels

    @pytest.fixture
    def damaged(self, path: Path) -> Iterator[Slide]:
        """A slide whose last level-0 tile or strip holds zeros, open."""
        if not self.reports_damage:
            pytest.skip(f"reader {self.reader!r} does not see damage")
        self.write(path, SIZE, self.usual)
        self.damage(path)
        with self.open(path) as slide:
            yield slide

    def test_levels_px_and_mpp_are_as_written(
        self, any_slide: Written, kind: PyramidKind
    ) -> None:
        slide, levels = any_slide
        assert isinstance(slide, Slide)
        assert (slide.reader, slide.size) == (self.reader, SIZE)
        assert [lv.size for lv in slide.levels] == [
            (a.shape[1], a.shape[0]) for a in levels
        ]
        assert [lv.downsample for lv in slide.levels] == list(
            map(float, kind.downsamples)
        )
        assert [lv.index for lv in slide.levels] == list(range(len(levels)))
        expected = (kind.mpp[0], kind.mpp[0]) if kind.mpp and kind.aperio else kind.mpp
        assert slide.slide_mpp == (
            pytest.approx(expected, rel=1e-6) if expected else None
        )
        assert slide.objective_power == (20.0 if kind.aperio else None)
        for level, truth in zip(slide.levels, levels):
            pixels = slide.read_region((0, 0), level.index, level.size)
            if (
                kind.compression == "jpeg" or kind.ycbcr_2000
            ):  # lossy; equality is tested beside
                assert np.abs(pixels.astype(int) - truth).mean() < 9
            else:
                np.testing.assert_array_equal(pixels, truth)

    def test_a_region_is_the_crop_of_its_level_wherever_it_lies(
        self, any_slide: Written
    ) -> None:
        slide, _ = any_slide
        for level in slide.levels:
            whole = slide.read_region((0, 0), level.index, level.size)
            down = level.downsample
            for (x, y), size in regions(slide.size):
                origin = (
                    round(lv_from_l0(x, down) * down),
                    round(lv_from_l0(y, down) * down),
                )
                pixels = slide.read_region(origin, level.index, size)
                expected = crop_on_white(whole, origin, down, size)
                np.testing.assert_array_equal(
                    pixels, expected, str((level, origin, size))
                )

    def test_levels_of_no_whole_fraction_are_addressed_by_rounding(
        self, path: Path
    ) -> None:
        if len(self.usual.downsamples) == 1:
            pytest.skip(f"reader {self.reader!r} reads files of one level")
        self.write(path, ODD_SIZE, replace(self.usual, compression="lzw"))
        with self.open(path) as slide:
            down = slide.levels[1].downsample
            columns, rows = slide.levels[1].size
            width, height = slide.size
            assert down != round(down), (
                f"levels[1].downsample must be the mean of the exact ratios of both axes, "
                f"{(width / columns + height / rows) / 2}, got {down}; docs/readers.md"
            )
            whole = slide.read_region((0, 0), 1, slide.levels[1].size)
            for origin_l0, size in regions(slide.size):
                pixels = slide.read_region(origin_l0, 1, size)
                expected = crop_on_white(whole, origin_l0, down, size)
                if self.whole_px:
                    np.testing.assert_array_equal(
                        pixels, expected, str((origin_l0, size))
                    )
                else:
                    black = crop_on_white(whole * 0, origin_l0, down, size)
                    assert (pixels[black.all(axis=2)] == 255).all()
                    assert np.median(np.abs(pixels.astype(int) - expected)) <= 1

    def test_decodes_into_out_and_refuses_one_that_does_not_fit(
        self, slide: Slide
    ) -> None:
        out = np.zeros((100, 130, 3), np.uint8)
        assert slide.read_region((37, 41), 0, (130, 100), out=out) is out
        np.testing.assert_array_equal(out, slide.read_region((37, 41), 0, (130, 100)))
        for wrong in (
            np.zeros((130, 100, 3), np.uint8),
            np.zeros((100, 130, 3), np.float32),
        ):
            with pytest.raises(InvalidInputError, match="out must be"):
                slide.read_region((0, 0), 0, (130, 100), out=wrong)  # type: ignore[arg-type]

    def test_many_regions_are_each_the_region_read_alone(
        self, any_slide: Written
    ) -> None:
        slide, _ = any_slide
        for level in slide.levels:
            for size in {(256, 256), level.segment or (64, 48), (33, 20)}:
                for origins_l0 in origin_sets(size, level.downsample):
                    out = np.zeros((len(origins_l0), size[1], size[0], 3), np.uint8)
                    slide.read_regions(origins_l0, level.index, out=out)
                    for (x, y), pixels in zip(origins_l0.tolist(), out):
                        alone = slide.read_region((x, y), level.index, size)
                        np.testing.assert_array_equal(
                            pixels, alone, str((level, x, y, size))
                        )

    def test_refuses_what_does_not_fit(self, slide: Slide) -> None:
        origins_l0, out = np.zeros((3, 2), np.int64), np.zeros((3, 8, 8, 3), np.uint8)
        for wrong in ((2, 8, 8, 3), (3, 8, 8, 4), (3, 8, 8), (3, 0, 8, 3)):
            with pytest.raises(
                InvalidInputError, match=r"out must be uint8 of shape \(3, h"
            ):
                slide.read_regions(origins_l0, 0, out=np.zeros(wrong, np.uint8))
        no_level = r"level must be in \[0, \d\], got 9"
        with pytest.raises(InvalidInputError, match=no_level):
            slide.read_regions(origins_l0, 9, out=out)
        with pytest.raises(InvalidInputError, match=no_level):
            slide.read_region((0, 0), 9, (10, 10))
        with pytest.raises(
            InvalidInputError, match=r"size must be >= \(1, 1\), got \(10, 0\)"
        ):
            slide.read_region((0, 0), 0, (10, 0))
        with pytest.raises(InvalidInputError, match="nosuch"):
            slide.associated_image("nosuch")

    def test_threads_read_the_same_px_as_one_thread(self, slide: Slide) -> None:
        places = regions(slide.size)
        jobs = [
            (origin, lv.index, size) for lv in slide.levels for origin, size in places
        ]
        alone = [slide.read_region(*job) for job in jobs]
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda job: slide.read_region(*job), jobs * 6))
        assert all(map(np.array_equal, together, alone * 6))

    def test_a_closed_slide_says_so_and_closes_twice(self, slide: Slide) -> None:
        slide.read_region((0, 0), 0, (10, 10))
        slide.close()
        slide.close()
        with pytest.raises(
            SlideReadError, match=r"slide must be open, got a closed one"
        ):
            slide.read_region((300, 300), 0, (10, 10))
        with pytest.raises(SlideReadError, match="closed"):
            slide.read_regions(
                np.zeros((1, 2), np.int64), 0, out=np.zeros((1, 8, 8, 3), np.uint8)
            )

    def test_closing_while_threads_read_ends_in_px_or_in_an_error(
        self, slide: Slide
    ) -> None:
        truth = slide.read_region((0, 0), 0, SIZE)

        def read(_: int) -> bool:
            try:
                return np.array_equal(slide.read_region((0, 0), 0, SIZE), truth)
            except SlideReadError as error:
                return "closed" in str(error)

        with ThreadPoolExecutor(4) as pool:
            answers = pool.map(read, range(40))
            slide.close()
            assert all(answers)

    def test_a_cut_file_gives_an_error_that_names_the_slide(self, path: Path) -> None:
        self.write(path, SIZE, replace(self.usual, downsamples=(1,)))
        self.cut(path)
        refused = pytest.raises(
            (SlideOpenError, SlideReadError), match=re.escape(self.name)
        )
        with refused, self.open(path) as slide:
            slide.read_region((400, 300), 0, (200, 136))

    def test_a_damaged_tile_fails_alone_and_spoils_no_other_thread(
        self, damaged: Slide
    ) -> None:
        good = damaged.read_region((0, 0), 0, (200, 200))
        assert good.std() > 10

        def read(index: int) -> bool:
            if index % 4:
                return np.array_equal(damaged.read_region((0, 0), 0, (200, 200)), good)
            with pytest.raises(SlideReadError, match=re.escape(self.name)):
                damaged.read_region((520, 400), 0, (80, 36))
            return True

        assert all(map(read, range(5)))
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(64)))

    @pytest.mark.parametrize(
        "size_th", [(150, 109), (97, 70), (600, 436), (33, 17), (1, 1)]
    )
    def test_read_resized_is_pillows_of_the_whole_level(
        self, slide: Slide, size_th: Size
    ) -> None:
        level = best_level(
            slide.levels, min(SIZE[0] / size_th[0], SIZE[1] / size_th[1])
        )
        whole = slide.read_region((0, 0), level.index, level.size)
        expected = Image.fromarray(whole).resize(size_th, Image.Resampling.LANCZOS)
        np.testing.assert_array_equal(
            read_resized(slide, size_th), np.asarray(expected)
        )

    def test_a_thumbnail_fits_and_keeps_the_aspect(self, slide: Slide) -> None:
        assert slide.thumbnail((100, 100)).shape == (73, 100, 3)
        assert slide.thumbnail((5000, 5000)).shape == (436, 600, 3)


def regions(size: Size) -> list[tuple[PointL0, Size]]:
    """(origin_l0, size) inside, across each border, at a corner and wholly outside."""
    x, y = size
    inside = [((0, 0), (256, 256)), ((256, 0), (256, 256)), ((101, 57), (77, 130))]
    across = [
        ((-20, -36), (64, 48)),
        ((x - 40, 12), (90, 70)),
        ((12, y - 40), (70, 90)),
    ]
    corners = [((240, 240), (33, 1)), ((x - 8, y - 8), (300, 200))]
    outside = [((x + 40, 0), (20, 30)), ((0, -400), (20, 30))]
    return [*inside, *across, *corners, *outside, ((-10, -10), (x + 20, y + 20))]


def origin_sets(size: Size, downsample: float) -> list[CoordsL0]:
    """Level-0 corners: on multiples of the size on a level, off them, and across the border."""
    steps = np.rint(np.multiply(size, downsample)).astype(np.int64)
    aligned = (
        np.array([(column, row) for row in range(2) for column in range(3)]) * steps
    )
    inside = aligned[(aligned + steps <= SIZE).all(axis=1)]
    return [
        inside,
        inside[::-1].copy(),
        inside + 7,
        aligned,
        aligned - steps // 3,
        aligned[:0],
    ]


def crop_on_white(
    whole: RgbArray, origin_l0: PointL0, downsample: float, size: Size
) -> RgbArray:
    """What `read_region` must give, from the px of the whole level."""
    out = np.full((size[1], size[0], 3), 255, np.uint8)
    x, y = (lv_from_l0(edge, downsample) for edge in origin_l0)
    cut = whole[max(0, y) : max(0, y + size[1]), max(0, x) : max(0, x + size[0])]
    out[max(0, -y) :, max(0, -x) :][: cut.shape[0], : cut.shape[1]] = cut
    return out
