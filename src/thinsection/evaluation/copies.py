"""Copies of slides under other names, known by their content: rescans, other tiles, other scales.

Two slides are called copies where they are near neighbours and stand out, in one of two ways. They
are each other's nearest, their mean directions are nearer than chance allows among so many pairs of
this cohort, and much nearer than to any third slide. Or a quarter of the tiles that are not blank
are much nearer to tiles of the other slide than to any of the cohort. A tile counts by its
direction, so that a scale does not matter, and one huge value changes one tile.

Sections of one block with the same stain may be called copies; the tissue of one patient from
another place is not.

Shapes: n slides, D channels, T tiles that are kept of a slide.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from thinsection.evaluation.metrics import FloatVector, IndexArray
from thinsection.types import Floats, Reals

KEPT_TILES = 32  # of each slide, for the background
FEW_TILES = 256  # of the smaller slide of a pair, each compared with
MANY_TILES = 4096  # of the larger one, and with
MOST_BACKGROUND = 2048  # of other slides
NEIGHBOURS = 3  # of a slide that are looked at tile by tile
MOST_PAIRS = 100  # that are looked at tile by tile, the nearest
CHANCE = 1e-3  # of a false pair in the cohort
MEAN_RATIO = 0.7  # distance to the copy over that to the next other slide
TILE_RATIO = 0.5  # the same of a tile
TILE_SHARE = 0.25  # of tiles
LEAST_TILES = 4  # that match
BLANK_RATIO = (
    0.5  # of a tile's distance to other slides to the usual one: nearer is no evidence
)
CLIP = 6.0  # robust standard deviations
MIN_SLIDES = 6  # with fewer nothing stands out


@dataclass(frozen=True, slots=True)
class CopyPair:
    """Two slides that seem to show the same tissue, as indices."""

    first: int
    second: int
    tiles: float  # share of matching tiles
    by: str  # what stands out: 'means' or 'tiles'


def directions(tiles: Reals) -> Floats:
    """Tiles (N, D) of unit length; zero where a tile is."""
    x = np.asarray(tiles, dtype=np.float64)
    length = np.sqrt((x**2).sum(axis=1, keepdims=True))
    return np.asarray(np.divide(x, length, out=np.zeros_like(x), where=length > 0))


def kept_rows(num_tiles: int, most: int = KEPT_TILES) -> IndexArray:
    """Rows of at most so many tiles, evenly spaced."""
    if num_tiles <= most:
        return np.arange(num_tiles)
    return np.linspace(0, num_tiles - 1, most).round().astype(np.int64)


def copied_slides(
    means: Floats,
    kept: Sequence[Reals],
    owners: IndexArray,
    read: Callable[[int], Reals],
) -> list[CopyPair]:
    """Pairs of slides of different owners that stand out as copies.

    Args:
        means: mean of the directions of each slide's tiles, (n, D).
        kept: directions of some tiles of each slide, (T, D) each.
        owners: case or patient of each slide, (n,).
        read: the tiles (N, D) of a slide.

    Memory: 8 n² + 8 D (MOST_BACKGROUND + MANY_TILES) bytes, and two slides.
    """
    if len(means) < MIN_SLIDES:
        return []
    z = _standardised(means, *_scale(means))
    similar = z @ z.T
    distance = np.sqrt(np.maximum(0, 2 - 2 * similar))
    distance[owners[:, None] == owners] = np.inf
    level = chance_level(similar, owners)
    found = []
    # pairs of a slide and one of its nearest, those first that are nearest to each other
    near: dict[tuple[int, int], float] = {}
    for i, row in enumerate(distance):
        for j in np.argsort(row, kind="stable")[:NEIGHBOURS].tolist():
            if np.isfinite(row[j]):
                near[min(i, j), max(i, j)] = float(row[j])
    for i, j in sorted(near, key=lambda pair: near[pair])[:MOST_PAIRS]:
        share = _tile_share(i, j, kept, owners, read)
        mutual = distance[i].argmin() == j and distance[j].argmin() == i
        if share >= TILE_SHARE:
            found.append(CopyPair(i, j, share, "tiles"))
        elif mutual and similar[i, j] > level:
            # no third slide of another owner is nearly as near to either of the two
            others = (owners != owners[i]) & (owners != owners[j])
            thirds = np.minimum(distance[i, others], distance[j, others])
            if len(thirds) and distance[i, j] < MEAN_RATIO * thirds.min():
                found.append(CopyPair(i, j, share, "means"))
    return sorted(found, key=lambda pair: (pair.first, pair.second))


def _scale(x: Floats) -> tuple[FloatVector, FloatVector]:
    """Median and robust standard deviation by channel."""
    middle = np.median(x, axis=0)
    spread = 1.4826 * np.median(np.abs(x - middle), axis=0)
    spread[spread < 1e-12] = np.inf  # a constant channel says nothing
    return middle, spread


def _standardised(x: Floats, middle: FloatVector, spread: FloatVector) -> Floats:
    return directions(np.clip((x - middle) / spread, -CLIP, CLIP))


def chance_level(similar: Floats, owners: IndexArray) -> float:
    """Cosine that among all pairs of unrelated slides one has with the probability CHANCE.

    Fisher's z of a cosine of d independent channels has the variance 1 / (d - 2); d follows from
    the spread of the cohort's own cosines, so that classes, sites and stains make it small.
    """
    from scipy.stats import norm

    upper = np.triu(owners[:, None] != owners, k=1)
    cosines = similar[upper]
    if len(cosines) < MIN_SLIDES:
        return np.inf
    spread = np.arctanh(np.clip(cosines, -0.999999, 0.999999))
    low, middle, high = np.quantile(spread, (0.025, 0.5, 0.975))
    error = max((high - middle) / 1.96, (middle - low) / 1.96)
    quantile = norm.isf(CHANCE / len(cosines))
    return float(np.tanh(middle + quantile * error))


def _tile_share(
    i: int,
    j: int,
    kept: Sequence[Reals],
    owners: IndexArray,
    read: Callable[[int], Reals],
) -> float:
    """Share of the smaller slide's tiles that match a tile of the other slide and no third."""
    smaller, larger = sorted((read(i), read(j)), key=len)
    few = directions(smaller[kept_rows(len(smaller), FEW_TILES)])
    many = directions(larger[kept_rows(len(larger), MANY_TILES)])
    others = np.flatnonzero((owners != owners[i]) & (owners != owners[j]))
    background = np.concatenate([kept[int(k)] for k in others]).astype(np.float64)
    background = background[kept_rows(len(background), MOST_BACKGROUND)]
    middle, spread = _scale(background)
    if not np.isfinite(spread).any():
        return 0.0
    few, many, pool = (
        _standardised(x, middle, spread) for x in (few, many, background)
    )
    near = _least_distance(few, many)
    far = _least_distance(few, pool)
    # blank tiles are alike in all slides
    telling = far > BLANK_RATIO * np.quantile(far, 0.9)
    matching = telling & (near < TILE_RATIO * far)
    if matching.sum() < LEAST_TILES:
        return 0.0
    # tiles of a large slide that were not read cannot be matched
    return min(1.0, float(matching.sum() / telling.sum()) * len(larger) / len(many))


def _least_distance(x: Floats, others: Floats) -> FloatVector:
    """Distance (N,) of each row of unit length to the nearest of the others."""
    nearest = (x @ others.T).max(axis=1)
    return np.asarray(np.sqrt(np.maximum(0, 2 - 2 * nearest)))
