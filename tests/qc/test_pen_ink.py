"""Ink that the default tissue mask and `auto` remove: of any colour, and no tissue like it."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from benchmarks.bench_artefacts import real_pen
from PIL import Image
from tests.qc.slides import REAL
from tests.qc.views import view_of
from tests.support.artefacts import PENS, plant_pen
from tests.support.held_out_biology import MPP, base_picture, picture_with
from tests.support.held_out_slide import held_out_slide
from tests.support.planted_ink import INKS, STAINS, inked_picture, inked_tissue
from training.tuning_slide import tuning_slide

from thinsection.arrays import get_namespace
from thinsection.qc.checks import dense_ink, pen_ink
from thinsection.qc.checks.artefacts import Ink, ink_color
from thinsection.qc.checks.check import PenInk, QcView
from thinsection.qc.checks.dense_ink import DenseInk
from thinsection.qc.checks.pen_ink import find_pen_ink
from thinsection.types import MaskArray, RgbArray

PX_UM = 8.0
SEED = 17
PICTURES = REAL.parents[1] / "pictures"
GLASS = np.full((240, 320, 3), 240, np.uint8)

needs_tissue = pytest.mark.skipif(
    not REAL.is_file(), reason=f"THINSECTION_TEST_SLIDES has no {REAL.name}"
)
needs_pictures = pytest.mark.skipif(
    not PICTURES.is_dir(), reason="no pictures beside THINSECTION_TEST_SLIDES"
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
    assert find_pen_ink(picture, PX_UM).ink[pen].mean() > 0.95


@needs_pictures
@pytest.mark.parametrize(
    ("strength", "least", "least_found"), [(0.25, 0.45, 0.85), (0.5, 0.65, 0.9)]
)
def test_translucent_ink_over_real_tissue_is_removed_and_little_beside_it(
    strength: float, least: float, least_found: float
) -> None:
    """A stroke of a quarter or half of a pen's strength, in each of seven colours.

    Orange ink on brown stain, and pale red ink on PAS, are found, but not judged.
    """
    counts = np.zeros(5)
    for number, color in enumerate(INKS):
        stain = STAINS[number % len(STAINS)]
        drawn = inked_tissue(700 + number, stain=stain, color=color, strength=strength)
        found = find_pen_ink(drawn.rgb, PX_UM)
        counts += [
            (found.ink & drawn.ink).sum(),
            ((found.ink | found.unjudged) & drawn.ink).sum(),
            drawn.ink.sum(),
            (found.ink & drawn.clean).sum(),
            drawn.clean.sum(),
        ]
    assert counts[2] > 5_000
    assert counts[0] / counts[2] > least
    assert counts[1] / counts[2] > least_found
    assert counts[3] / counts[4] < 0.06


@needs_pictures
def test_real_ink_of_each_colour_is_removed() -> None:
    found = real_pen("auto", PICTURES)
    for color, recall, precision, kept in (
        # a quarter of it is removed as the slide's edge
        ("black", 0.7, 0.85, 0.02),
        ("green", 0.95, 0.6, 0.05),
        # HistoQC's mask leaves out the gaps of a dry pen, and some of its streaks
        ("red", 0.97, 0.4, 0.02),
    ):
        assert found[color]["recall"] >= recall, color
        assert found[color]["precision"] >= precision, color
        assert found[color]["kept"] <= kept, color


@needs_tissue
@pytest.mark.parametrize(
    "name", ["Alcian mucin", "over-stained zone", "melanin", "DAB"]
)
def test_biology_of_the_colour_of_ink_is_left(name: str) -> None:
    picture, where = biology(name)
    assert find_pen_ink(picture, PX_UM).ink[where].mean() < 0.03


@needs_tissue
@pytest.mark.parametrize("seed", [105, 106])
def test_blue_mucin_of_other_pictures_is_left(seed: int) -> None:
    picture, where = biology("Alcian mucin", seed)
    assert find_pen_ink(picture, PX_UM).ink[where].mean() < 0.05


@needs_tissue
def test_tissue_without_ink_has_none() -> None:
    found = find_pen_ink(reduced(base_picture()), PX_UM)
    assert not found.ink.any()


@pytest.mark.parametrize("seed", [15_103, 15_109])
def test_dark_purple_tissue_without_texture_is_no_ink(seed: int) -> None:
    slide = held_out_slide(seed, size=(600, 450), mpp=PX_UM, stain="dark")
    assert find_pen_ink(slide.rgb, PX_UM).ink[slide.clean].mean() < 0.06


def tissue_picture() -> RgbArray:
    """Textured pink tissue of 320 x 240 px at 8 µm/px, with glass on the right side."""
    rng = np.random.default_rng(3)
    texture = np.kron(rng.normal(0, 1, (60, 80, 1)), np.ones((4, 4, 1)))
    light = np.array((0.85, 0.5, 0.75)) * np.exp(-0.05 * texture)
    light[:, 220:] = 0.96
    return np.asarray((light * 250).clip(0, 255), np.uint8)


def with_ink(
    picture: RgbArray, where: MaskArray, density: tuple[float, float, float]
) -> RgbArray:
    """The picture under a layer of a density, by the law of Beer and Lambert."""
    inked = picture.astype(np.float64)
    inked[where] *= np.exp(-np.array(density))
    return inked.astype(np.uint8)


def strokes_of(
    picture: RgbArray,
    probability: npt.NDArray[np.float64],
    monkeypatch: pytest.MonkeyPatch,
    *,
    dense: MaskArray | None = None,
) -> PenInk:
    """Ink for probabilities and dense ink at 16 µm/px, (120, 160), on a picture of 8 µm/px."""
    known = (255 * probability).astype(np.uint8)

    def ink_probability(ns: object, rgb: RgbArray) -> npt.NDArray[np.uint8]:
        assert rgb.shape == (120, 160, 3)
        return known

    def find_dense_ink(*arguments: object, **named: object) -> DenseInk:
        return DenseInk(mask=np.zeros((120, 160), bool) if dense is None else dense)

    monkeypatch.setattr(pen_ink, "ink_probability", ink_probability)
    monkeypatch.setattr(pen_ink, "find_dense_ink", find_dense_ink)
    return find_pen_ink(picture, PX_UM)


def box(top: int, bottom: int, left: int, right: int) -> MaskArray:
    """A box in pixels of 8 µm."""
    mask = np.zeros((240, 320), bool)
    mask[top:bottom, left:right] = True
    return mask


def at_16_um(mask: MaskArray) -> MaskArray:
    return mask[::2, ::2]


BLUE = (0.9, 0.5, 0.1)
PALE_BLUE = (0.3, 0.16, 0.04)


def test_a_stroke_in_tissue_needs_some_ink_that_is_sure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stroke = box(80, 110, 40, 180)
    picture = with_ink(tissue_picture(), stroke, PALE_BLUE)
    probability = 0.5 * at_16_um(stroke)
    assert not strokes_of(picture, probability, monkeypatch).ink.any()
    probability[at_16_um(box(80, 110, 40, 110))] = 0.9
    found = strokes_of(picture, probability, monkeypatch)
    assert found.ink[stroke].all()
    assert not found.ink[130:].any()
    assert not found.unjudged.any()
    # a spot of 4 x 4 px of 16 µm is too small
    spot = 0.95 * at_16_um(box(80, 88, 40, 48))
    assert not strokes_of(picture, spot, monkeypatch).ink.any()


@pytest.mark.parametrize(
    ("strength", "right", "is_ink"),
    [
        (1.0, 260, True),
        # a pale stroke, a pale dot, a dense dot
        (0.5, 260, True),
        (0.5, 90, False),
        (1.0, 90, True),
        # paler than a stroke
        (0.2, 260, False),
    ],
)
def test_what_no_tissue_lies_beside_is_ink_if_it_is_dense_or_a_stroke(
    strength: float,
    right: int,
    is_ink: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stroke = box(80, 110, 60, right)
    blue = (strength * BLUE[0], strength * BLUE[1], strength * BLUE[2])
    picture = with_ink(GLASS, stroke, blue)
    probability = 0.95 * at_16_um(stroke)
    found = strokes_of(picture, probability, monkeypatch).ink
    assert found[stroke].all() if is_ink else not found.any()


@pytest.mark.parametrize(
    ("color", "is_ink"),
    [
        ((190, 110, 170), False),
        ((120, 70, 150), False),
        ((225, 120, 180), False),
        ((40, 50, 160), True),
        ((35, 35, 40), True),
        ((30, 120, 70), True),
        ((200, 30, 45), True),
    ],
    ids=["H&E", "haematoxylin", "eosin", "blue", "black", "green", "red"],
)
def test_a_piece_without_any_other_is_no_ink_if_it_has_the_hue_of_a_stain(
    color: tuple[int, int, int], is_ink: bool
) -> None:
    """A biopsy of one even colour and straight edges alone on the glass, 2 x 1.4 mm."""
    picture = np.full((256, 352, 3), 245, np.uint8)
    noise = np.random.default_rng(0).integers(-6, 7, (175, 250, 3))
    picture[37:212, 50:300] = (np.array(color) + noise).clip(0, 255)
    found = find_pen_ink(picture, 8.0)
    assert found.ink[37:212, 50:300].mean() == is_ink
    assert not found.unjudged.any()


@pytest.mark.parametrize(("strength", "is_ink"), [(0.3, False), (0.9, True)])
def test_more_of_the_same_stain_is_no_ink_unless_it_is_much_more(
    strength: float, is_ink: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stroke = box(80, 110, 40, 180)
    # density of the tissue of the picture
    red, green, blue = strength * -np.log((0.85, 0.5, 0.75))
    picture = with_ink(tissue_picture(), stroke, (red, green, blue))
    probability = 0.95 * at_16_um(stroke)
    found = strokes_of(picture, probability, monkeypatch).ink
    assert found[stroke].all() if is_ink else not found.any()


@pytest.mark.parametrize(
    ("strengths", "is_ink"), [((0.8, 0.8), True), ((0.8, 1.2), True), ((0.8, 3), False)]
)
def test_much_more_of_the_same_stain_is_no_ink_if_it_is_uneven(
    strengths: tuple[float, float], is_ink: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stroke = box(80, 110, 40, 180)
    tissue = -np.log((0.85, 0.5, 0.75))
    picture = tissue_picture()
    for part, strength in zip(
        (box(80, 110, 40, 130), box(80, 110, 130, 180)), strengths, strict=True
    ):
        red, green, blue = strength * tissue
        picture = with_ink(picture, part, (red, green, blue))
    probability = 0.95 * at_16_um(stroke)
    found = strokes_of(picture, probability, monkeypatch).ink
    assert found[stroke].all() if is_ink else not found.any()


@pytest.mark.parametrize(
    ("name", "light", "is_ink"),
    [
        # mucin and pigment take the place of the tissue
        ("mucin", (0.45, 0.7, 0.85), False),
        ("smooth pigment", (0.6, 0.35, 0.5), False),
        # what is opaque has no texture
        ("opaque", (0.2, 0.1, 0.15), True),
    ],
)
def test_what_replaces_tissue_is_no_ink_unless_it_is_opaque(
    name: str,
    light: tuple[float, float, float],
    is_ink: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patch = box(70, 100, 40, 180)
    picture = tissue_picture().copy()
    picture[patch] = np.array(light) * 250
    probability = 0.95 * at_16_um(patch)
    found = strokes_of(picture, probability, monkeypatch).ink
    assert found[patch].all() if is_ink else not found.any(), name


def test_stain_that_is_added_to_a_round_area_is_no_ink_and_a_dense_dot_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    area = box(80, 130, 60, 110)
    probability = 0.95 * at_16_um(area)
    brown = np.array((0.3, 0.6, 0.95))
    for strength, is_ink in ((0.4, False), (1.0, True)):
        picture = with_ink(tissue_picture(), area, tuple(strength * brown))
        found = strokes_of(picture, probability, monkeypatch).ink
        assert bool(found[area].any()) == is_ink, strength


def test_what_adds_another_hue_at_each_place_is_no_ink(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stroke = box(80, 110, 40, 180)
    picture = tissue_picture()
    for left, density in ((40, (0.3, 0, 0)), (90, (0, 0.3, 0)), (140, (0, 0, 0.3))):
        picture = with_ink(picture, stroke & box(0, 240, left, left + 50), density)
    probability = 0.95 * at_16_um(stroke)
    assert not strokes_of(picture, probability, monkeypatch).ink.any()


def test_parts_of_a_region_that_is_no_stroke_may_be_strokes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stroke = box(40, 70, 40, 180)
    patch = box(90, 150, 60, 140)
    picture = with_ink(tissue_picture(), stroke, PALE_BLUE)
    picture[patch] = np.array((0.45, 0.7, 0.85)) * 250
    # a faint bridge joins them
    probability = 0.4 * at_16_um(box(40, 150, 40, 180))
    probability[at_16_um(patch)] = 0.95
    probability[at_16_um(stroke)] = 0.95
    ink = strokes_of(picture, probability, monkeypatch).ink
    assert ink[stroke].all()
    assert not ink[box(100, 150, 60, 140)].any()


@pytest.mark.parametrize("likely_tissue", [0.75, 0.84])
def test_strokes_are_found_where_the_network_takes_the_tissue_for_ink_too(
    likely_tissue: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    strokes = box(40, 70, 40, 180) | box(110, 140, 60, 190)
    picture = with_ink(tissue_picture(), strokes, PALE_BLUE)
    probability = likely_tissue * at_16_um(box(10, 230, 10, 210))
    assert not strokes_of(picture, probability, monkeypatch).ink.any()
    probability[at_16_um(strokes)] = 0.95
    ink = strokes_of(picture, probability, monkeypatch).ink
    assert ink[strokes].all()
    assert ink.mean() < 1.4 * strokes.mean()


@pytest.mark.parametrize(
    ("density", "is_followed"), [(BLUE, True), ((0.1, 0.8, 0.6), False)]
)
def test_on_glass_a_stroke_is_followed_in_its_own_hue(
    density: tuple[float, float, float],
    is_followed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sure = box(20, 100, 256, 286)
    faint = box(100, 220, 256, 286)
    picture = with_ink(with_ink(tissue_picture(), sure, BLUE), faint, density)
    probability = 0.95 * at_16_um(sure) + 0.1 * at_16_um(faint)
    found = strokes_of(picture, probability, monkeypatch).ink
    assert found[sure].all()
    rest = box(120, 216, 260, 282)
    assert bool(found[rest].all()) == is_followed
    # what the network does not see at all is ink only if it has the colour of a known pen
    probability[at_16_um(faint)] = 0.0
    found = strokes_of(picture, probability, monkeypatch).ink
    assert bool(found[rest].all()) == is_followed
    probability[:] = 0.0
    assert not strokes_of(picture, probability, monkeypatch).ink.any()


RED = (0.1, 0.8, 0.6)
# The tissue of `tissue_picture` is of one stain, of which this is more.
MORE_STAIN = (0.14, 0.62, 0.24)


@pytest.mark.parametrize("strength", [0.3, 0.6])
@pytest.mark.parametrize("known_pen", [RED, (0.9, 0.3, 0.4)])
def test_a_stroke_in_tissue_that_no_model_sees_is_ink_if_another_shows_its_pen(
    known_pen: tuple[float, float, float],
    strength: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The known stroke lies on glass; a stroke of red crosses the tissue far from it."""
    on_glass = box(40, 200, 256, 286)
    in_tissue = box(100, 130, 40, 180)
    pale = (strength * RED[0], strength * RED[1], strength * RED[2])
    picture = with_ink(tissue_picture(), on_glass, known_pen)
    picture = with_ink(picture, in_tissue, pale)
    probability = 0.95 * at_16_um(on_glass)
    found = strokes_of(picture, probability, monkeypatch).ink
    assert found[on_glass].all()
    assert bool(found[box(104, 126, 48, 172)].all()) == (known_pen == RED)
    assert bool(found[box(104, 126, 48, 172)].any()) == (known_pen == RED)
    # tissue is left
    assert found[box(0, 240, 0, 216)].mean() < 0.12


@pytest.mark.parametrize(
    ("known", "further", "is_judged"),
    [
        (box(40, 200, 256, 286), box(100, 160, 60, 120), True),
        (box(60, 150, 228, 314), box(100, 130, 40, 180), False),
    ],
)
def test_blood_is_left_as_a_clot_shows_no_pen_and_what_is_round_is_no_further_stroke(
    known: MaskArray,
    further: MaskArray,
    is_judged: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first known one is a stroke, and the further one is round; then the other way round.

    So the second known one is a clot, and there is more blood elsewhere.
    """
    dense = (1.3 * RED[0], 1.3 * RED[1], 1.3 * RED[2])
    picture = with_ink(with_ink(tissue_picture(), known, RED), further, dense)
    # the clot has a hole
    picture[100:112, 265:277] = 240
    seen = at_16_um(known)
    found = strokes_of(picture, 0.0 * seen, monkeypatch, dense=seen)
    assert (found.ink if is_judged else found.unjudged)[known].all()
    assert not found.ink[further].any()


@pytest.mark.parametrize("color", [MORE_STAIN, (0.6, 0.6, 0.6)])
def test_neither_more_stain_nor_grey_is_a_known_pen(
    color: tuple[float, float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_glass = box(40, 200, 256, 286)
    in_tissue = box(100, 130, 40, 180)
    picture = with_ink(tissue_picture(), on_glass, color)
    half = (color[0] / 2, color[1] / 2, color[2] / 2)
    picture = with_ink(picture, in_tissue, half)
    found = strokes_of(picture, 0.95 * at_16_um(on_glass), monkeypatch).ink
    assert not found[in_tissue].any()


@pytest.mark.parametrize(("strength", "is_followed"), [(0.2, False), (1.5, True)])
def test_in_tissue_only_dense_ink_is_followed_where_it_is_unlikely(
    strength: float, is_followed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stroke = box(80, 110, 20, 200)
    blue = (strength * BLUE[0], strength * BLUE[1], strength * BLUE[2])
    picture = with_ink(tissue_picture(), stroke, blue)
    probability = 0.1 * at_16_um(stroke)
    probability[at_16_um(box(80, 110, 20, 120))] = 0.95
    found = strokes_of(picture, probability, monkeypatch).ink
    assert found[box(80, 110, 20, 120)].all()
    assert bool(found[box(84, 106, 130, 196)].all()) == is_followed
    assert bool(found[box(84, 106, 130, 196)].any()) == is_followed


def with_models(
    picture: RgbArray,
    candidates: MaskArray,
    seen: MaskArray,
    probability: npt.NDArray[np.float64],
    monkeypatch: pytest.MonkeyPatch,
) -> PenInk:
    """Ink for what each of the three models finds in a picture of 8 µm/px, (240, 320)."""
    known = (255 * at_16_um(probability)).astype(np.uint8)
    monkeypatch.setattr(dense_ink, "_candidates", lambda *_: at_16_um(candidates))
    monkeypatch.setattr(pen_ink, "ink_probability", lambda *_: known)
    return find_pen_ink(picture, PX_UM, lambda: seen)


BROWN = (0.35, 0.6, 1.0)
DENSE_BLUE = (1.5, 0.9, 0.2)
DENSE_GREEN = (1.4, 0.4, 0.55)
DENSE_RED = (0.15, 1.5, 1.1)


@pytest.mark.parametrize("pen", [DENSE_BLUE, DENSE_GREEN])
def test_beside_a_pen_brown_stain_that_two_models_take_for_ink_is_left(
    pen: tuple[float, float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One nest touches the first stroke of two, and another nest lies alone."""
    strokes = box(60, 84, 30, 200) | box(150, 174, 30, 200)
    nests = box(84, 110, 60, 110) | box(200, 226, 60, 110)
    both = strokes | nests
    picture = with_ink(with_ink(tissue_picture(), strokes, pen), nests, BROWN)
    likely = 0.95 * strokes + 0.3 * nests
    found = with_models(picture, both, both, likely, monkeypatch).ink
    assert found[strokes].all()
    assert found[box(90, 110, 60, 110) | box(204, 226, 60, 110)].mean() < 0.05
    # the ink network may take them for ink where the older models do not
    likely = 0.95 * strokes + 0.6 * nests
    found = with_models(picture, strokes, strokes, likely, monkeypatch).ink
    assert found[strokes].all()
    assert found[box(90, 110, 60, 110) | box(204, 226, 60, 110)].mean() < 0.05
    # where no ink is sure, no pen is known
    likely = 0.3 * both
    found = with_models(picture, both, both, likely, monkeypatch).ink
    assert found[both].all()


@pytest.mark.parametrize("darker", [1.0, 1.7, 2.3])
@pytest.mark.parametrize("pen", [(1.0, 1.0, 1.0), DENSE_GREEN])
def test_strokes_that_cross_from_glass_to_tissue_are_ink_on_both(
    pen: tuple[float, float, float], darker: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ink network is sure of two strokes on glass alone, where most of them lies."""
    tissue = (250 * (tissue_picture() / 250) ** darker).round().astype(np.uint8)
    glass = box(0, 240, 120, 320)
    tissue[glass] = 245
    strokes = box(60, 84, 40, 300) | box(150, 174, 40, 300)
    picture = with_ink(tissue, strokes, pen)
    likely = 0.95 * (strokes & glass) + 0.3 * (strokes & ~glass)
    found = with_models(picture, strokes, strokes, likely, monkeypatch).ink
    assert found[strokes & glass].mean() > 0.95
    assert found[strokes & ~glass].mean() > 0.9
    assert found[~strokes & ~box(40, 200, 20, 320)].mean() == 0


def test_beside_a_known_pen_another_one_is_ink_if_the_network_is_sure_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = box(40, 64, 30, 200)
    others = box(110, 134, 30, 200) | box(180, 204, 30, 200)
    picture = with_ink(with_ink(tissue_picture(), first, DENSE_BLUE), others, DENSE_RED)
    for sure, is_ink in ((0.95, True), (0.62, False)):
        likely = 0.95 * first + sure * others
        found = with_models(picture, first, first, likely, monkeypatch).ink
        assert found[first].all()
        assert bool(found[others].all()) == is_ink
        assert bool(found[others].any()) == is_ink


NECROSIS = (218, 150, 178)
PALE_MUCIN = (140, 190, 214)


@pytest.mark.parametrize(
    ("pen", "biology"), [(DENSE_RED, NECROSIS), (DENSE_BLUE, PALE_MUCIN)]
)
def test_what_replaces_tissue_in_the_hue_of_a_pen_is_no_ink_beside_it(
    pen: tuple[float, float, float],
    biology: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ink network takes one area beside each of two strokes for ink; all models, a part."""
    strokes = box(50, 80, 30, 260) | box(150, 180, 30, 260)
    areas = box(80, 110, 60, 130) | box(180, 210, 160, 230)
    part = box(80, 90, 60, 130) | box(180, 190, 160, 230)
    picture = tissue_picture()
    picture[areas] = biology
    picture = with_ink(picture, strokes, pen)
    likely = 0.95 * (strokes | part) + 0.6 * (areas & ~part)
    both = strokes | part
    found = with_models(picture, both, both, likely, monkeypatch).ink
    assert found[strokes].all()
    assert found[box(84, 110, 60, 130) | box(184, 210, 160, 230)].mean() < 0.05


@pytest.mark.parametrize("second", [DENSE_GREEN, DENSE_BLUE])
def test_two_pens_that_cross_are_both_ink(
    second: tuple[float, float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    across = box(100, 130, 30, 290)
    down = box(30, 210, 150, 170)
    picture = with_ink(with_ink(tissue_picture(), across, DENSE_RED), down, second)
    both = across | down
    found = with_models(picture, both, both, 0.95 * both, monkeypatch).ink
    assert found[across].all()
    assert found[down].all()
    assert not found[~box(90, 140, 20, 300) & ~box(20, 220, 140, 180)].any()


@needs_tissue
@pytest.mark.parametrize("name", ["DAB", "Alcian mucin"])
@pytest.mark.parametrize("color", ["blue", "green"])
def test_biology_beside_a_dense_pen_is_left(name: str, color: str) -> None:
    picture, where = picture_with(name, 7_000)
    drawn = inked_picture(picture, MPP, 7_000, color=color, strength=1.0)
    small = Image.fromarray(where.astype(np.uint8) * 255)
    own = np.asarray(small.resize(drawn.ink.shape[::-1], Image.Resampling.BOX)) > 127
    ink = find_pen_ink(drawn.rgb, PX_UM).ink
    assert ink[drawn.ink].mean() > 0.97
    assert np.count_nonzero(own & drawn.clean) > 3_000
    assert ink[own & drawn.clean].mean() < 0.12


def test_the_gaps_of_a_dry_pen_are_ink_and_wider_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # on glass: streaks with two gaps of 48 µm, then one of 112 µm and one of 176 µm
    probability = np.zeros((120, 160))
    for row in (40, 47, 54, 65, 80):
        probability[row : row + 4, 20:125] = 0.9
    streaks = (probability > 0).repeat(2, axis=0).repeat(2, axis=1)
    picture = with_ink(GLASS, streaks, BLUE)
    ink = strokes_of(picture, probability, monkeypatch).ink
    assert ink[80:116, 60:200].all()
    assert not ink[118:128, 60:200].any()
    assert not ink[140:158, 60:200].any()
    assert ink[160:168, 60:200].all()


def test_ink_in_tissue_at_the_border_of_a_picture_is_not_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = box(60, 100, 0, 14)
    # a stroke that comes in from the border, and one on glass along another border
    long = box(180, 200, 0, 160)
    on_glass = box(40, 140, 306, 320)
    picture = tissue_picture()
    probability = np.zeros((120, 160))
    for stroke in (short, long, on_glass):
        picture = with_ink(picture, stroke, BLUE)
        probability[at_16_um(stroke)] = 0.95
    dense = at_16_um(short | on_glass)
    found = strokes_of(picture, probability, monkeypatch)
    # what the older models do not see is not judged on glass either
    assert found.unjudged[on_glass].all()
    found = strokes_of(picture, probability, monkeypatch, dense=dense)
    assert found.unjudged[short].all()
    assert not found.unjudged[150:].any()
    assert not found.ink[:150, :200].any()
    assert found.ink[long].all()
    assert found.ink[on_glass].all()
    assert not (found.ink & found.unjudged).any()
    mask = np.zeros((240, 320), bool)
    mask[70:190] = True
    outcome = Ink()(view_with(view_of(GLASS), found, mask))
    assert outcome.unjudged_area is not None
    assert np.array_equal(outcome.unjudged_area, found.unjudged & mask)
    assert outcome.mask_use is not None
    assert np.array_equal(outcome.mask_use, mask & ~found.ink)
    assert outcome.sure_area is not None
    assert np.array_equal(outcome.sure_area, found.ink & mask)


def view_with(view: QcView, found: PenInk, mask: MaskArray) -> QcView:
    return replace(view, pen_ink=lambda: found, mask_use=mask)


PURPLE = (0.55, 0.75, 0.4)
DAB = (0.3, 0.6, 1.4)


@pytest.mark.parametrize(
    ("added", "elsewhere", "is_judged"),
    [
        # as much of the tissue where the network sees no ink has this colour, or nothing has
        (PURPLE, box(0, 60, 0, 220), False),
        (PURPLE, box(0, 0, 0, 0), True),
        (BLUE, box(0, 60, 0, 220), False),
        (BLUE, box(0, 8, 0, 20), True),
        # brown is a stain where a smaller part of the tissue has it
        (DAB, box(0, 22, 0, 120), False),
        (DAB, box(0, 8, 0, 20), True),
        (BLUE, box(0, 10, 0, 60), True),
    ],
)
def test_a_stroke_with_a_colour_that_tissue_has_elsewhere_is_not_judged(
    added: tuple[float, float, float],
    elsewhere: MaskArray,
    is_judged: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two strokes of one colour, one of them short."""
    long, short = box(100, 130, 40, 200), box(170, 190, 60, 140)
    picture = with_ink(tissue_picture(), long | short | elsewhere, added)
    probability = 0.95 * at_16_um(long | short)
    found = strokes_of(picture, probability, monkeypatch)
    for stroke in (long, short):
        assert bool(found.ink[stroke].all()) == is_judged
        assert bool(found.unjudged[stroke].all()) != is_judged
    assert not (found.ink & found.unjudged).any()
    assert not found.ink[elsewhere].any()


@pytest.mark.parametrize(("added", "is_ink"), [(BLUE, True), (DAB, False)])
def test_sure_ink_is_judged_whatever_tissue_shows_elsewhere_unless_it_is_brown(
    added: tuple[float, float, float], is_ink: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stroke, elsewhere = box(100, 130, 40, 200), box(0, 60, 0, 220)
    picture = with_ink(tissue_picture(), stroke | elsewhere, added)
    sure = at_16_um(stroke)
    known = DenseInk(mask=sure, sure=sure)
    probability = np.where(sure, 242, 0).astype(np.uint8)
    monkeypatch.setattr(pen_ink, "find_dense_ink", lambda *_, **__: known)
    monkeypatch.setattr(pen_ink, "ink_probability", lambda *_: probability)
    found = find_pen_ink(picture, PX_UM)
    assert bool(found.ink[stroke].all()) == is_ink
    assert bool(found.unjudged[stroke].all()) != is_ink


def crossed_tissue(darkness: float, color: str, strength: float) -> RgbArray:
    """Drawn tissue with glass on its right, and two strokes over both, 480 x 360 px."""
    rng = np.random.default_rng(3)
    texture = np.zeros((360, 480, 1))
    for edge in (1, 2, 4, 8):
        blocks = rng.normal(0, 1, (360 // edge + 1, 480 // edge + 1, 1))
        texture += np.kron(blocks, np.ones((edge, edge, 1)))[:360, :480]
    light = np.array((0.85, 0.5, 0.75)) ** darkness
    light = light * np.exp(-0.08 * texture * np.array((1.0, 1.4, 0.6)))
    light[:, 260:] = 0.97
    for rows in (slice(80, 110), slice(220, 250)):
        light[rows, 40:440] *= np.exp(-strength * np.array(INKS[color]))
    pixels = light * 250 + rng.normal(0, 1.5, light.shape)
    return np.asarray(pixels.round().clip(0, 255), np.uint8)


@pytest.mark.parametrize("darkness", [1.0, 1.7])
@pytest.mark.parametrize("color", ["green", "blue", "purple"])
def test_a_pale_stroke_from_glass_to_tissue_is_removed_on_both(
    color: str, darkness: float
) -> None:
    ink = find_pen_ink(crossed_tissue(darkness, color, 0.25), PX_UM).ink
    for rows in (slice(80, 110), slice(220, 250)):
        assert ink[rows, 265:440].mean() > 0.95
        assert ink[rows, 40:255].mean() > 0.7
    assert ink[120:210].mean() < 0.02


@pytest.mark.parametrize("seed", [8007, 8019])
def test_brown_stain_of_a_slide_without_ink_is_not_removed(seed: int) -> None:
    slide = tuning_slide(seed, size=(600, 450), mpp=PX_UM, stain="ihc", artefacts=())
    ink = find_pen_ink(slide.rgb, PX_UM).ink
    assert ink[slide.masks["tissue"]].mean() < 0.03


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
    outcome = Ink()(view_of(GLASS))
    assert outcome.scores == {"ink": 0.0, "ink_color": "NA"}


@needs_tissue
@pytest.mark.parametrize("size", [(401, 203), (32, 700), (9, 9)])
def test_masks_have_the_size_of_their_picture(size: tuple[int, int]) -> None:
    width, height = size
    base = reduced(base_picture())
    tiled = np.tile(base, (3, 4, 1))[:height, :width]
    for px_um in (1.3, 8.0, 40.0):
        found = find_pen_ink(tiled, px_um)
        assert found.ink.shape == found.unjudged.shape == (height, width)
