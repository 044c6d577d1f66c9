"""The colour of a pen is told from the stains, whatever their amounts are."""

import numpy as np
import numpy.typing as npt
import pytest

from thinsection.qc.checks.pen_colour import pen_colour

HAEMATOXYLIN = np.array((0.65, 0.70, 0.29))
EOSIN = np.array((0.07, 0.99, 0.11))
RED_PEN = np.array((0.15, 1.7, 1.25))

_Floats = npt.NDArray[np.float32]


def tissue(count: int = 4_000, seed: int = 4) -> _Floats:
    """Mixtures of two stains, with the noise of a camera."""
    rng = np.random.default_rng(seed)
    amounts = rng.uniform(0.02, 0.6, (count, 2))
    mixed = amounts @ np.stack([HAEMATOXYLIN, EOSIN])
    return np.asarray(mixed + rng.normal(0, 0.01, mixed.shape), np.float32)


def strokes(color: npt.NDArray[np.float64], count: int = 200) -> _Floats:
    rng = np.random.default_rng(5)
    return np.asarray(rng.uniform(0.2, 1, (count, 1)) * color, np.float32)


def test_the_amount_of_a_pen_is_its_density_over_any_tissue() -> None:
    pen = pen_colour(strokes(RED_PEN), tissue())
    assert pen is not None
    np.testing.assert_allclose(pen.hue, RED_PEN / np.linalg.norm(RED_PEN), atol=1e-3)
    layer = 0.3 * np.asarray(RED_PEN, np.float32)
    bare = tissue(seed=6) @ pen.normal
    inked = (tissue(seed=6) + layer) @ pen.normal
    np.testing.assert_allclose(inked - bare, np.linalg.norm(layer), rtol=1e-3)
    assert np.abs(bare.mean()) < 0.02
    assert bare.std() == pytest.approx(pen.noise, rel=0.2)


def test_ink_that_is_not_known_yet_does_not_count_as_tissue() -> None:
    clean = pen_colour(strokes(RED_PEN), tissue())
    hidden = tissue()
    hidden[:400] += 0.5 * np.asarray(RED_PEN, np.float32)
    mixed = pen_colour(strokes(RED_PEN), hidden)
    assert clean is not None
    assert mixed is not None
    assert mixed.normal @ clean.normal == pytest.approx(
        np.linalg.norm(mixed.normal) * np.linalg.norm(clean.normal), rel=0.01
    )
    assert mixed.noise < 1.5 * clean.noise


@pytest.mark.parametrize(
    "color", [HAEMATOXYLIN, EOSIN, 0.5 * HAEMATOXYLIN + EOSIN, np.array((1, 1.02, 1))]
)
def test_a_mixture_of_the_stains_and_grey_are_no_pen(
    color: npt.NDArray[np.float64],
) -> None:
    assert pen_colour(strokes(color), tissue()) is None


def test_a_few_pixels_show_no_pen() -> None:
    assert pen_colour(strokes(RED_PEN, 39), tissue()) is None
    assert pen_colour(strokes(RED_PEN, 40), tissue(399)) is None
    assert pen_colour(strokes(RED_PEN, 40), tissue(400)) is not None
