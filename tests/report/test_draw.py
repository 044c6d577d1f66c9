"""Pictures of slides: layers lie where their px are, outlines are smooth, the strip explains."""

from pathlib import Path
from typing import cast

import numpy as np
import pytest
from PIL import Image

from thinsection.errors import StoreError
from thinsection.report.draw import draw, nice_length, write_drawing
from thinsection.report.layers import (
    OUTLINE,
    TILE,
    Outline,
    Tiles,
    Tint,
    Values,
    paint,
    short_number,
)
from thinsection.report.picture import Picture, slide_picture
from thinsection.report.stored import open_picture
from thinsection.report.values import COLORMAPS, colorize
from thinsection.slide import Slide, open_slide
from thinsection.store.ledger import SlideLedger
from thinsection.testing.memory import run_and_measure
from thinsection.testing.synthetic import write_he_slide
from thinsection.types import Level

GRAY = Picture(
    rgb=np.full((500, 800, 3), 240, np.uint8),
    size_l0=(8000, 5000),
    slide_mpp=(0.5, 0.25),
)


def near(pixels: np.ndarray, color: tuple[int, int, int], by: int = 3) -> np.ndarray:
    return (abs(pixels.astype(int) - color) <= by).all(axis=-1)


@pytest.mark.parametrize("downsample", [2, 10, 37], ids=["finer", "as fine", "coarser"])
def test_an_outline_runs_along_the_masks_border_at_any_resolution(
    downsample: int,
) -> None:
    rows, columns = np.mgrid[: 5000 // downsample, : 8000 // downsample] * downsample
    mask = np.hypot(rows - 2500, columns - 4000) < 1500  # a disk
    seen = near(paint(GRAY, [Outline(mask)]), OUTLINE)
    y, x = np.nonzero(seen)
    radius = np.hypot(y * 10 - 2500, x * 10 - 4000)
    assert abs(radius.mean() - 1500) < 20 + downsample
    assert np.ptp(radius) < 120  # px of level 0: no steps of the mask's px
    assert len(x) > 2 * np.pi * 150


def test_tiles_share_thin_lines_and_a_tint_lies_on_its_mask() -> None:
    coords_l0 = np.array([[1000, 1000], [1500, 1000]])
    mask = np.zeros((50, 80), bool)
    mask[30:40, 10:30] = True
    tint = Tint(mask, "pen", (200, 0, 0), opacity=1.0)
    pixels = paint(GRAY, [Tiles(coords_l0, (500, 400)), tint])
    row = abs(pixels[120].astype(int) - 240).max(axis=1)
    lines = np.flatnonzero(row > 60)
    assert lines.tolist() == [100, 150, 200]
    assert 5 < row[125] < 30  # shaded
    assert row[90] == row[210] == 0
    assert near(pixels[350, 200], (200, 0, 0))
    assert (pixels[350, 360] == 240).all()


def test_very_small_tiles_are_shaded_only() -> None:
    grid = np.stack(
        np.meshgrid(np.arange(0, 4000, 40), np.arange(0, 4000, 40)), axis=-1
    )
    pixels = paint(GRAY, [Tiles(grid.reshape(-1, 2), (40, 40))])
    expected = 0.72 * 240 + 0.28 * np.array(TILE)
    assert near(pixels[:400, :400], expected.round().astype(int)).all()


def test_values_are_colours_where_their_tiles_lie_overlaps_averaged_and_nan_left_out() -> (
    None
):
    coords_l0 = np.array([[0, 0], [1000, 0], [1500, 0], [4000, 4000]])
    values = np.array([0.0, 0.0, 1.0, np.nan])
    layer = Values(coords_l0, (1000, 1000), values, "a", "measure")
    pixels = paint(GRAY, [layer])
    for x, share in ((50, 0.0), (120, 0.0), (170, 0.5), (220, 1.0)):
        over_gray = 0.5 * colorize(np.array(share), "cividis") + 0.5 * 240
        assert near(pixels[50, x], over_gray.round().astype(int)), x
    assert (pixels[450, 450] == 240).all()


def test_colours_begin_and_end_as_the_map_does_and_stay_within_it() -> None:
    for name in COLORMAPS:
        ends = colorize(np.array([-5.0, 0.0, 1.0, 7.0]), name)
        assert (ends[0] == ends[1]).all()
        assert (ends[2] == ends[3]).all()
        assert not (ends[1] == ends[2]).all()


def test_the_strip_has_a_scale_bar_of_the_right_length_and_a_legend() -> None:
    layers = [
        Outline(np.ones((5, 8), bool), "tissue"),
        Values(np.zeros((1, 2)), (9, 9), np.ones(1), "x"),
    ]
    pixels = draw(GRAY, layers)
    assert (pixels[:500] == paint(GRAY, layers)).all()
    strip = pixels[500:]
    assert len(strip) > 15
    dark = (strip < 60).all(axis=2)
    longest = max(len(run) for row in dark for run in bytes(row).split(b"\0"))
    assert longest == pytest.approx(100, abs=2)  # 0.5 mm: 1000 px of level 0 along x
    without = Picture(rgb=GRAY.rgb, size_l0=GRAY.size_l0)
    assert draw(without, []).shape == GRAY.rgb.shape


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0"),
        (0.12345, "0.123"),
        (999.4, "999"),
        (-8061.4, "-8,061"),
        (1_234_567.0, "1,234,567"),
        (2.5e8, "2.5e+08"),
    ],
)
def test_numbers_of_a_scale_are_short(value: float, words: str) -> None:
    assert short_number(value) == words


def test_a_narrow_picture_wraps_its_legend() -> None:
    narrow = Picture(rgb=np.full((300, 120, 3), 9, np.uint8), size_l0=(1200, 3000))
    layers = [Tint(np.ones((3, 3), bool), f"class number {n} ä") for n in range(4)]
    assert len(draw(narrow, layers)) >= 300 + 4 * 20


def test_lengths_of_bars_are_round() -> None:
    assert [nice_length(most) for most in (0.13, 0.2, 0.99, 5.1, 74)] == [
        0.1,
        0.2,
        0.5,
        5,
        50,
    ]


def test_a_picture_is_read_from_the_slide_unless_the_thumbnail_is_large_enough(
    tmp_path: Path,
) -> None:
    write_he_slide(tmp_path / "s.svs", (3000, 2000), seed=1)
    with open_slide(tmp_path / "s.svs") as slide:
        assert slide_picture(slide).shape == (1067, 1600, 3)
        small, large = (
            np.zeros((10, 15, 3), np.uint8),
            np.zeros((1200, 1800, 3), np.uint8),
        )
        assert slide_picture(slide, small).any()
        assert not slide_picture(slide, large).any()
        assert slide_picture(slide, large).shape == (1067, 1600, 3)


def test_of_a_giant_level_a_fair_thumbnail_is_enough() -> None:
    class Giant:
        size, slide_path, source = (60_000, 40_000), "giant", None
        levels = (Level(index=0, size=size, downsample=1.0),)

    fair = np.zeros((800, 1200, 3), np.uint8)
    assert slide_picture(cast(Slide, Giant()), fair).shape == fair.shape


def paint_all() -> list[int]:
    """In a process of its own."""
    picture = Picture(
        rgb=np.zeros((1200, 1600, 3), np.uint8), size_l0=(160_000, 120_000)
    )
    mask = np.zeros((1500, 2000), bool)
    mask[200:900, 300:1200] = True
    corners = np.stack(
        np.meshgrid(np.arange(0, 160_000, 1000), np.arange(0, 120_000, 1000)), -1
    )
    values = Values(corners.reshape(-1, 2), (1000, 1000), np.arange(160 * 120) / 9, "x")
    return list(paint(picture, [values, Outline(mask)]).shape)


@pytest.mark.check
def test_drawing_takes_the_memory_that_is_said() -> None:
    found = run_and_measure("tests.report.test_draw", "paint_all")
    assert found.result == [1200, 1600, 3]
    assert found.growth_bytes < 60 * 1200 * 1600 + 8e6


def test_a_slide_without_a_picture_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        StoreError,
        match=r"picture of 'a' must exist, got none; run `thinsection run` first",
    ):
        open_picture(SlideLedger(out=tmp_path, slide_id="a"))


def test_the_same_layers_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        write_drawing(tmp_path / name, GRAY, [Outline(np.eye(9, dtype=bool), "tissue")])
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size[0] == 800
