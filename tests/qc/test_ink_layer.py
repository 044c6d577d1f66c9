"""Ink over tissue with gaps: the gaps show it, and no biology that fills them is taken for it."""

import numpy as np
import numpy.typing as npt
import pytest

from thinsection.arrays import get_namespace
from thinsection.qc.checks import ink_layer, pen_ink
from thinsection.qc.checks.artefact_network import density_tables
from thinsection.qc.checks.ink_layer import find_layers, without_fine_structure
from thinsection.qc.checks.pen_ink import find_pen_ink
from thinsection.types import MaskArray, RgbArray

NS = get_namespace("cpu")
PX_UM = 16.0
SHAPE = (120, 160)
# The last two have the hue of the walls.
COLORS = {
    "blue": (0.5, 0.3, 0.08),
    "orange": (0.03, 0.2, 0.45),
    "purple": (0.25, 0.43, 0.13),
}
WALLS = np.array((0.5, 0.85, 0.3))

Colors = tuple[float, float, float]


def lung(amount: npt.NDArray[np.float64] | float = 1.0) -> npt.NDArray[np.float64]:
    """Densities of walls around air, (120, 160, 3)."""
    rng = np.random.default_rng(5)
    y, x = np.mgrid[: SHAPE[0], : SHAPE[1]]
    walls = (y % 5 == 0) | (x % 5 == 0)
    strength = rng.uniform(0.6, 1.2, SHAPE) * walls * amount
    return np.asarray(strength[..., None] * WALLS)


def box(top: int, bottom: int, left: int, right: int) -> MaskArray:
    mask = np.zeros(SHAPE, bool)
    mask[top:bottom, left:right] = True
    return mask


def seen(density: npt.NDArray[np.float64]) -> RgbArray:
    return np.asarray(np.exp(-density) * 245, np.uint8)


def layers(
    picture: RgbArray,
    probability: npt.NDArray[np.float64],
    patch: pytest.MonkeyPatch,
    *,
    shows_pen: bool = False,
) -> MaskArray:
    """Layers for probabilities of ink in the picture without its fine structure."""
    known = (255 * probability).astype(np.uint8)
    coarse = without_fine_structure(NS, picture)

    def ink_probability(ns: object, rgb: RgbArray) -> npt.NDArray[np.uint8]:
        assert np.array_equal(rgb, coarse)
        return known

    patch.setattr(ink_layer, "ink_probability", ink_probability)
    tables = density_tables(NS, picture)
    return find_layers(NS, picture, coarse, tables, PX_UM, shows_pen=shows_pen)


STROKES = box(20, 34, 20, 140) | box(70, 110, 60, 74)


@pytest.mark.parametrize("color", COLORS.values(), ids=COLORS)
def test_two_strokes_over_lung_are_layers(
    color: Colors, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = seen(lung() + STROKES[..., None] * np.array(color))
    found = layers(picture, 0.9 * STROKES, monkeypatch)
    assert found[STROKES].mean() > 0.9
    assert not found[~box(17, 37, 17, 143) & ~box(67, 113, 57, 77)].any()


@pytest.mark.parametrize("color", [COLORS["blue"], COLORS["orange"]])
def test_strokes_at_half_strength_over_lung_are_ink_by_the_layers_alone(
    color: Colors, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = seen(lung() + 0.5 * STROKES[..., None] * np.array(color))
    found = find_pen_ink(picture, PX_UM).ink
    assert found[STROKES].mean() > 0.9
    assert found[~STROKES].mean() < 0.05
    monkeypatch.setattr(pen_ink, "find_layers", lambda *_, **__: np.zeros(SHAPE, bool))
    assert not find_pen_ink(picture, PX_UM).ink.any()


def test_what_the_network_does_not_take_for_ink_is_no_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    picture = seen(lung() + STROKES[..., None] * np.array(COLORS["blue"]))
    found = layers(picture, 0.5 * STROKES, monkeypatch)
    assert not found.any()


@pytest.mark.parametrize("color", COLORS.values(), ids=COLORS)
def test_what_replaces_the_tissue_or_lies_on_glass_is_no_layer(
    color: Colors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first picture no walls are seen in the strokes, in the second one none beside them."""
    layer = STROKES[..., None] * np.array(color)
    for amount in (1.0 * ~STROKES, 1.0 * STROKES):
        found = layers(seen(lung(amount) + layer), 0.9 * STROKES, monkeypatch)
        assert not found.any()


def test_tissue_without_gaps_shows_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = lung() + 0.3 * WALLS
    picture = seen(dense + STROKES[..., None] * np.array(COLORS["blue"]))
    # the brightest pixels are glass
    picture[:, 150:] = 245
    assert not layers(picture, 0.9 * STROKES, monkeypatch).any()


def test_fluid_of_the_hue_of_a_stain_in_a_round_area_is_no_layer_and_a_dot_of_ink_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    y, x = np.mgrid[: SHAPE[0], : SHAPE[1]]
    for color, is_ink in ((COLORS["purple"], False), (COLORS["blue"], True)):
        dots = (np.hypot(y - 40, x - 40) < 16) | (np.hypot(y - 80, x - 115) < 20)
        picture = seen(lung() + dots[..., None] * np.array(color))
        found = layers(picture, 0.9 * dots, monkeypatch)
        assert bool(found[:, :75].any()) == is_ink
        assert bool(found[:, 75:].any()) == is_ink


@pytest.mark.parametrize("name", ["blue", "orange"])
def test_a_stroke_that_ends_in_a_dense_lesion_is_a_layer_up_to_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network takes the lesion for ink, too. Unlike ink, its density changes slowly."""
    lesion = box(30, 100, 90, 150)
    stroke = box(55, 69, 15, 130)
    shades = lesion * np.linspace(0, 3.0, SHAPE[1]) ** 2 / 4
    density = lung() + shades[..., None] * WALLS
    picture = seen(density + stroke[..., None] * np.array(COLORS[name]))
    found = layers(picture, 0.9 * (lesion | stroke), monkeypatch)
    assert found[stroke & ~lesion].mean() > 0.8
    assert found[lesion & ~stroke].mean() < 0.05


# Cosines of the angle to the hue of the walls: 0.91, 0.94.
NEAR_WALLS = {"brown": (0.22, 0.4, 0.4), "violet": (0.45, 0.35, 0.2)}


@pytest.mark.parametrize("name", ["blue", "orange", *NEAR_WALLS])
@pytest.mark.parametrize(("width", "shows_pen"), [(16, False), (16, True), (8, False)])
def test_ink_of_nearly_the_hue_of_the_tissue_is_cut_from_a_lesion_if_it_is_large(
    name: str, width: int, shows_pen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lesion begins as softly as it ends, so its part of the stroke is as even as the rest.

    Beside a sure pen, what has nearly the hue of the tissue may be keratin.
    """
    lesion = box(20, 100, 60, 155)
    stroke = box(46, 46 + width, 5, 135)
    shades = lesion * ((np.arange(SHAPE[1]) - 60).clip(0) / 90) ** 2
    density = lung() + 3 * shades[..., None] * WALLS
    color = (COLORS | NEAR_WALLS)[name]
    picture = seen(density + stroke[..., None] * np.array(color))
    likely = 0.9 * (lesion | stroke)
    found = layers(picture, likely, monkeypatch, shows_pen=shows_pen)
    if name in NEAR_WALLS and (shows_pen or width == 8):
        assert not found.any()
    else:
        assert found[stroke & ~lesion].mean() > 0.9
        assert found[lesion & ~stroke].mean() < 0.05
