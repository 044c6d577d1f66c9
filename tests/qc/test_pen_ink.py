"""The ink that the default tissue mask removes: pen of any colour, and no tissue like it."""

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage
from tests.qc.slides import REAL
from tests.qc.views import view_of
from tests.support.artefacts import PENS, plant_pen
from tests.support.held_out_biology import MPP, base_picture, picture_with
from tests.support.held_out_slide import held_out_slide

from thinsection.arrays import get_namespace
from thinsection.qc.checks import artefact_network, pen_ink
from thinsection.qc.checks.artefacts import Ink, ink_color
from thinsection.qc.checks.check import COARSEST_MPP
from thinsection.qc.checks.pen_ink import find_pen_ink
from thinsection.types import MaskArray, RgbArray

PX_UM = 8.0
SEED = 17

needs_tissue = pytest.mark.skipif(
    not REAL.is_file(), reason=f"THINSECTION_TEST_SLIDES has no {REAL.name}"
)


def reduced(picture: RgbArray) -> RgbArray:
    return np.asarray(Image.fromarray(picture).reduce(round(PX_UM / MPP)))


def biology(name: str, seed: int = SEED) -> tuple[RgbArray, MaskArray]:
    """Real tissue with biology at 8 µm/px, and where it is."""
    picture, where = picture_with(name, seed)
    return reduced(picture), reduced(where.astype(np.uint8) * 255) > 127


@needs_tissue
@pytest.mark.parametrize("color", PENS)
def test_pen_on_real_tissue_is_found(color: str) -> None:
    picture, pen = plant_pen(reduced(base_picture()), color, seed=SEED)
    assert find_pen_ink(picture, PX_UM)[pen].mean() > 0.97


@needs_tissue
@pytest.mark.parametrize("name", ["Alcian mucin", "over-stained zone", "melanin"])
def test_biology_of_the_colour_of_ink_is_left(name: str) -> None:
    picture, where = biology(name)
    assert find_pen_ink(picture, PX_UM)[where].mean() < 0.03


@needs_tissue
@pytest.mark.parametrize("seed", [105, 106])
def test_blue_mucin_of_other_pictures_is_left(seed: int) -> None:
    picture, where = biology("Alcian mucin", seed)
    assert find_pen_ink(picture, PX_UM)[where].mean() < 0.05


@needs_tissue
def test_a_picture_too_coarse_for_the_artefact_network_keeps_all_candidates() -> None:
    picture, where = biology("Alcian mucin")
    coarse = COARSEST_MPP + 1
    assert find_pen_ink(picture, coarse)[where].mean() > 0.5


@pytest.mark.parametrize("seed", [15_103, 15_109])
def test_dark_purple_tissue_without_texture_is_no_ink(seed: int) -> None:
    slide = held_out_slide(seed, size=(600, 450), mpp=PX_UM, stain="dark")
    assert find_pen_ink(slide.rgb, PX_UM)[slide.clean].mean() < 0.06


@needs_tissue
def test_ink_is_that_of_the_whole_picture_where_only_parts_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over-stained tissue at the edge of a part without its surroundings looked like ink."""
    monkeypatch.setattr(artefact_network, "_CUT_SQUARES", 288**2)
    picture, where = biology("over-stained zone", 115)
    picture = np.concatenate([picture, plant_pen(picture, "red", seed=SEED)[0]])
    ns = get_namespace("cpu")
    whole = artefact_network.ink_of(artefact_network.artefact_maps(ns, picture, PX_UM))
    near = np.zeros(whole.shape, dtype=bool)
    near[300:420, 60:150] = near[-20:, -20:] = True
    parts = artefact_network.ink_within(ns, picture, PX_UM, near)
    # windows differ by one 255th, see test_windows_do_not_show
    assert (parts ^ whole & near).sum() <= 0.001 * near.sum()
    assert 0.1 < whole[near].mean() < 0.9
    ink = find_pen_ink(picture, PX_UM)
    assert (ink ^ find_pen_ink(picture, PX_UM, lambda: whole)).sum() <= 8
    assert ink[: len(where)][where].mean() < 0.03


@needs_tissue
def test_the_artefact_network_looks_at_candidates_and_half_a_mm_around(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    areas = []

    def look(ns: object, rgb: RgbArray, px_um: float, area: MaskArray) -> MaskArray:
        areas.append(area)
        return np.zeros_like(area)

    monkeypatch.setattr(artefact_network, "ink_within", look)
    pen, _ = plant_pen(reduced(base_picture()), "blue", seed=SEED)
    # an odd size: the last block of the candidates' px is cut
    pen = pen[:-1, :-1]
    small = np.asarray(Image.fromarray(pen).reduce(2))
    candidates = pen_ink._candidates(get_namespace("cpu"), small, 2 * PX_UM)
    find_pen_ink(pen, PX_UM)
    # 512 µm are 32 px of 16 µm
    around = ndimage.binary_dilation(candidates, np.ones((65, 65)))
    expected = np.kron(around, np.ones((2, 2), bool))[: pen.shape[0], : pen.shape[1]]
    (area,) = areas
    assert np.array_equal(area, expected)
    assert 0 < candidates.sum() < around.sum() < around.size


@needs_tissue
def test_a_picture_without_candidates_does_not_ask_the_artefact_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(artefact_network, "ink_within", fail)
    picture = reduced(base_picture())
    assert not find_pen_ink(picture, PX_UM).any()
    pen, _ = plant_pen(picture, "blue", seed=SEED)
    with pytest.raises(AssertionError, match="asked"):
        find_pen_ink(pen, PX_UM)


def test_the_most_frequent_colour_of_ink_is_a_column() -> None:
    ns = get_namespace("cpu")
    colors = {
        "blue": (60, 80, 190),
        "green": (40, 150, 100),
        "red": (200, 40, 60),
        "black": (40, 38, 42),
        "brown": (110, 85, 40),
    }
    for name, rgb in colors.items():
        others = [value for other, value in colors.items() if other != name]
        assert ink_color(ns, np.array([*others, rgb, rgb], np.uint8)) == name
    assert ink_color(ns, np.zeros((0, 3), np.uint8)) == "NA"
    outcome = Ink()(view_of(np.full((64, 64, 3), 240, np.uint8)))
    assert outcome.scores == {"ink": 0.0, "ink_color": "NA"}


@needs_tissue
def test_one_check_removes_ink_of_two_colours_at_once() -> None:
    base = reduced(base_picture())
    red, where_red = plant_pen(base, "red", seed=SEED)
    both, where_green = plant_pen(red, "green", seed=SEED + 1)
    outcome = Ink()(view_of(both))
    assert outcome.affected_area is not None
    for where in (where_red & ~where_green, where_green):
        assert outcome.affected_area[where].mean() > 0.9
    assert outcome.scores["ink_color"] in ("red", "green")
