"""Colours of values: matplotlib's, apart with deuteranopia, and none where there is nothing."""

import numpy as np
import pytest
from matplotlib import colormaps

from thinsection.report.draw import draw, legend_colors
from thinsection.report.layers import Values, paint
from thinsection.report.picture import Picture
from thinsection.report.values import (
    COLORMAP_OF_KIND,
    COLORMAPS,
    OPACITY_OF_KIND,
    colorize,
    kind_of_numbers,
    map_colors,
    shown_values,
    value_kind,
    value_words,
)
from thinsection.tiles.categories import CLASS_COLORS

# deuteranopia of linear RGB: Machado, Oliveira and Fernandes, IEEE TVCG 15 (2009), severity 1
DEUTERANOPIA = np.array(
    [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ]
)
XYZ_OF_RGB = np.array(
    [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
)
WHITE_XYZ = np.array([0.9505, 1.0, 1.089])
# CIE 1976 difference; 2.3 is just noticeable
LEAST_DIFFERENCE = 10.0


def lab_with_deuteranopia(colors: tuple[str, ...]) -> np.ndarray:
    """CIELAB (N, 3) of colours as a reader with deuteranopia sees them."""
    rgb = np.array([list(bytes.fromhex(color[1:])) for color in colors]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ DEUTERANOPIA.T, 0, 1)
    xyz = seen @ XYZ_OF_RGB.T / WHITE_XYZ
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    light = 116 * f[:, 1] - 16
    return np.stack(
        [light, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], axis=1
    )


@pytest.mark.parametrize("name", COLORMAPS)
def test_a_map_is_matplotlibs_of_its_name(name: str) -> None:
    shares = np.linspace(0, 1, 256)
    theirs = 255 * colormaps[name](shares)[:, :3]
    difference = np.abs(colorize(shares, name) - theirs)
    assert difference.max() < 20 and difference.mean() < 2


@pytest.mark.parametrize("name", COLORMAPS)
def test_neighbouring_steps_stay_apart_with_deuteranopia(name: str) -> None:
    lab = lab_with_deuteranopia(map_colors(name))
    assert np.linalg.norm(np.diff(lab, axis=0), axis=1).min() > LEAST_DIFFERENCE


def test_the_two_sides_of_a_signed_scale_stay_apart_with_deuteranopia() -> None:
    lab = lab_with_deuteranopia(map_colors(COLORMAP_OF_KIND["signed"]))
    for step in range(4):
        pair = lab[step] - lab[-1 - step]
        assert np.linalg.norm(pair) > 2 * LEAST_DIFFERENCE


def test_classes_stay_apart_with_deuteranopia() -> None:
    lab = lab_with_deuteranopia(CLASS_COLORS)
    between = np.linalg.norm(lab[:, None] - lab[None], axis=-1)
    assert between[np.triu_indices(len(lab), 1)].min() > LEAST_DIFFERENCE
    # the colours that were used before do not
    red_and_green = lab_with_deuteranopia(("#ff7f0e", "#bcbd22"))
    assert np.linalg.norm(red_and_green[0] - red_and_green[1]) < LEAST_DIFFERENCE


PAPER = np.full((60, 100, 3), 200, np.uint8)
PICTURE = Picture(rgb=PAPER, size_l0=(1000, 600))


def painted(values: list[float], **settings: object) -> np.ndarray:
    """Colours of tiles side by side, (N, 3), as they look on the slide."""
    coords = np.array([[100 * i, 0] for i in range(len(values))])
    layer = Values(coords, (100, 100), np.array(values), "x", **settings)  # type: ignore[arg-type]
    return paint(PICTURE, [layer])[5, [10 * i + 5 for i in range(len(values))]].astype(
        int
    )


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("signed", [0.0, -0.25, -0.5, -1.0]),
        ("signed", [0.0, 0.25, 0.5, 1.0]),
        ("amount", [0.0, 0.25, 0.5, 1.0]),
    ],
)
def test_nothing_is_painted_at_0_and_the_more_the_larger_the_value(
    kind: str, values: list[float]
) -> None:
    colors = painted(values, kind=kind)
    distance = np.abs(colors - 200).sum(axis=1)
    assert distance[0] == 0
    if kind == "signed":
        assert (np.diff(distance) > 0).all()
    limits = (-1.0, 1.0) if kind == "signed" else (0.0, 1.0)
    shares = (np.array(values) - limits[0]) / (limits[1] - limits[0])
    alpha = OPACITY_OF_KIND[kind] * np.abs(values)[:, None]  # type: ignore[index]
    expected = alpha * colorize(shares, COLORMAP_OF_KIND[kind]) + (1 - alpha) * 200  # type: ignore[index]
    np.testing.assert_allclose(colors, expected, atol=2.5)


def test_overlapping_tiles_are_averaged_before_they_are_painted() -> None:
    coords = np.array([[0, 0], [0, 0], [500, 0]])
    layer = Values(coords, (100, 100), np.array([1.0, -1.0, 1.0]), "x", "signed")
    pixels = paint(PICTURE, [layer])
    assert (pixels[5, 5] == 200).all()  # for and against cancel
    assert (pixels[5, 55] != 200).any()


def test_a_measure_has_one_opacity_and_values_that_are_not_finite_none() -> None:
    colors = painted([10.0, 20.0, np.nan], kind="measure")
    assert (colors[2] == 200).all()
    ends = colorize(np.array([0.0, 1.0]), "cividis")
    np.testing.assert_allclose(colors[:2], 0.5 * ends + 100, atol=2)


def test_kinds_follow_the_column() -> None:
    kinds = {
        "score_high": "signed",
        "heatmap_grade:score_high": "signed",
        "attention": "amount",
        "heatmap_grade:attention": "amount",
        "tissue_fraction": "amount",
        "qc_focus": "amount",
        "px_focus": "measure",
    }
    assert {column: value_kind(column) for column in kinds} == kinds
    assert kind_of_numbers(np.array([-1.0, 2.0])) == "signed"
    assert kind_of_numbers(np.array([1.0, 2.0, np.nan])) == "measure"


def test_attention_is_shown_in_multiples_of_the_mean_and_says_so() -> None:
    values = np.array([0.1, 0.3, 0.6])
    assert shown_values("m:attention", values).mean() == pytest.approx(1)
    np.testing.assert_array_equal(shown_values("px_focus", values), values)
    assert "1 = mean of the slide" in value_words("m:attention")


def test_the_scale_is_white_where_nothing_is_painted() -> None:
    layer = Values(np.zeros((2, 2)), (9, 9), np.array([-2.0, 1.0]), "x", "signed")
    colors = np.array(legend_colors(layer, 101))
    assert layer.shown_limits == (-2.0, 2.0)
    assert (colors[50] >= 250).all()
    assert colors[0, 2] > colors[0, 0] and colors[-1, 0] > colors[-1, 2]  # blue, red


def test_a_long_caption_takes_several_lines() -> None:
    layer = Values(np.zeros((2, 2)), (9, 9), np.array([0.0, 1.0]), "x")
    parts = [f"part number {number}" for number in range(6)]
    short = draw(PICTURE, [layer], caption=parts[0])
    long = draw(PICTURE, [layer], caption=" | ".join(parts))
    assert len(long) >= len(short) + 5 * 24
