"""Is a slide unlike the training set? The distance knows how many tiles a mean is of."""

import numpy as np
import pytest

from thinsection.predict.usual import Usual

CASES, DIM, TILES = 200, 12, 1000
WITHIN = 2.0  # standard deviation of a case's tiles, whose cases differ by .3
NEW = 200


def draw(rng: np.random.Generator, cases: int, tiles: int) -> np.ndarray:
    """Mean embeddings (cases, DIM) of cases of the same tissue, of so many tiles each."""
    return 0.3 * rng.normal(size=(cases, DIM)) + WITHIN / np.sqrt(tiles) * rng.normal(
        size=(cases, DIM)
    )


def usual(rng: np.random.Generator) -> Usual:
    residuals = (WITHIN * rng.normal(size=(64, DIM)) for _ in range(CASES))
    centred = (tiles - tiles.mean(axis=0) for tiles in residuals)
    return Usual.of(draw(rng, CASES, TILES), centred, [TILES] * CASES)


@pytest.mark.parametrize("tiles", [10, 50, 1000])
def test_false_alarms_do_not_depend_on_the_number_of_tiles(tiles: int) -> None:
    """At most .01 are promised; the threshold is of 200 cases, and 3 errors of .007 are allowed."""
    rng = np.random.default_rng(tiles)
    known = usual(rng)
    means = draw(rng, NEW, tiles)
    alarms = np.mean([known.distance(z, tiles) > known.threshold for z in means])
    assert alarms <= 0.06
    if tiles == 10:  # what the distance said before it was told
        blind = np.mean([known.distance(z) > known.threshold for z in means])
        assert blind > 0.5


def test_other_tissue_is_found_whatever_the_number_of_tiles() -> None:
    rng = np.random.default_rng(1)
    known = usual(rng)
    means = draw(rng, NEW, 50) + 2.0
    alarms = np.mean([known.distance(z, 50) > known.threshold for z in means])
    assert alarms >= 0.95


def test_the_variance_of_tiles_is_estimated() -> None:
    known = usual(np.random.default_rng(2))
    np.testing.assert_allclose(known.within, WITHIN**2, rtol=0.15)
    assert known.num_tiles == pytest.approx(TILES)
