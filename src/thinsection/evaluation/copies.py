"""Copies of slides under other names, found by their content: rescans, other tiles, other scales.

The embedding of a tile counts by its direction alone, so that its scale does not matter and one
huge value changes one tile. Two slides are called copies if they are near neighbours and one of
these is true:

- Each is the nearest slide of the other. Their mean directions are nearer than chance allows among
  the pairs of this cohort, and much nearer to each other than to any third slide.
- A quarter of the tiles of one slide, without blank tiles, are much nearer to tiles of the other
  slide than to tiles of the rest of the cohort.

Slides whose embeddings are equal are copies without a comparison. They count as one slide in the
search for others, so that neither the time nor the answers depend on how often a slide occurs.

Sections of one block with the same stain may be called copies. Tissue of the same patient from
another place is not.

Shapes: n slides, D channels, T sampled tiles of a slide.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from thinsection.evaluation.metrics import FloatVector, IndexArray
from thinsection.types import Floats, Reals

# number of tiles of each slide that are sampled for the background
SAMPLED_TILES = 32
# At most so many tiles of the smaller slide of a pair are compared, each with at most so many tiles
# of the larger slide and with at most so many background tiles of other slides.
MAX_SMALLER_TILES = 256
MAX_LARGER_TILES = 4096
MAX_BACKGROUND_TILES = 2048
# number of nearest slides of each slide that are compared tile by tile, and of equal slides that
# are named beside it
NEIGHBOURS = 3
# largest number of pairs of slides that are compared tile by tile; the nearest pairs come first
MAX_PAIRS = 100
# probability of a false pair in the cohort
CHANCE = 1e-3
# largest distance of copies, as a ratio to the distance to the nearest third slide
MAX_MEAN_RATIO = 0.7
# largest distance of a tile to the other slide, as a ratio to its distance to the background
MAX_TILE_RATIO = 0.5
# share of matching tiles from which a pair is called a copy
MIN_TILE_SHARE = 0.25
# smallest number of matching tiles
MIN_MATCHING_TILES = 4
# A tile is blank, and not counted, if its distance to the background is less than this ratio of the
# 0.9 quantile of all tiles.
BLANK_RATIO = 0.5
# standardised values are clipped to so many robust standard deviations
CLIP = 6.0
# smallest number of slides from which copies can be told
MIN_SLIDES = 6


@dataclass(frozen=True, slots=True)
class CopyPair:
    """Two slides that seem to show the same tissue, as indices."""

    first: int
    second: int
    tiles: float  # share of matching tiles
    by: str  # evidence for the copy: 'means', 'tiles' or 'equal'


# reads tiles (N, D) of the slide with this index: those with these row numbers
ReadRows = Callable[[int, IndexArray], Reals]


def directions(tiles: Reals) -> Floats:
    """Tiles (N, D) scaled to unit length; a tile of zeros stays zero."""
    x = np.asarray(tiles, dtype=np.float64)
    length = np.sqrt((x**2).sum(axis=1, keepdims=True))
    return np.asarray(np.divide(x, length, out=np.zeros_like(x), where=length > 0))


def sum_of_directions(tiles: Floats) -> FloatVector:
    """Sum (D,) of the directions of tiles (N, D)."""
    length = np.sqrt(np.einsum("nd,nd->n", tiles, tiles))
    weights = np.divide(1.0, length, out=np.zeros_like(length), where=length > 0)
    return np.asarray(weights @ tiles)


def spread_rows(num_tiles: int, most: int = SAMPLED_TILES) -> IndexArray:
    """Row numbers of at most `most` tiles, evenly spaced."""
    if num_tiles <= most:
        return np.arange(num_tiles)
    return np.linspace(0, num_tiles - 1, most).round().astype(np.int64)


def copied_slides(
    means: Floats,
    sampled_tiles: Sequence[Reals],
    cases: IndexArray,
    read: ReadRows,
    *,
    digests: Sequence[str],
    num_tiles: Sequence[int] | IndexArray,
) -> list[CopyPair]:
    """Pairs of slides of different cases that are probably copies.

    Of slides with equal embeddings each is named with the NEIGHBOURS that come after it. Only one
    of them, in the place of all, is compared with other slides.

    Args:
        means: mean of the directions of each slide's tiles, (n, D).
        sampled_tiles: directions of some tiles of each slide, (T, D) each.
        cases: number of the case (or patient) of each slide, (n,), from 0 on.
        read: reads tiles of a slide.
        digests: hash of the embeddings of each slide; equal embeddings have one hash.
        num_tiles: number of tiles of each slide.

    Memory: 8 d² + 8 D (MAX_BACKGROUND_TILES + MAX_LARGER_TILES) bytes for d different slides.
    """
    if len(means) < MIN_SLIDES:
        return []
    groups = _equal_slides(digests, num_tiles)
    copies = [*_equal_pairs(groups, cases)]
    firsts = np.array([group[0] for group in groups])
    # a slide that occurs in several cases is of no single one
    group_cases = np.array(
        [
            cases[group[0]] if len(set(cases[group].tolist())) == 1 else -1 - number
            for number, group in enumerate(groups)
        ]
    )
    pairs = _copies_among(
        means[firsts],
        [sampled_tiles[first] for first in firsts],
        group_cases,
        lambda group, rows: read(int(firsts[group]), rows),
        num_tiles=np.asarray(num_tiles)[firsts],
    )
    for pair in pairs:
        first, second = _of_two_cases(groups[pair.first], groups[pair.second], cases)
        copies.append(CopyPair(first, second, pair.tiles, pair.by))
    return sorted(copies, key=lambda pair: (pair.first, pair.second))


def _equal_slides(
    digests: Sequence[str], num_tiles: Sequence[int] | IndexArray
) -> list[list[int]]:
    """Slides with equal embeddings, a list for each hash, in the order of their first slides.

    Slides with too few tiles to be copies stay alone: a blank tile may be all that they have.
    """
    by_digest = defaultdict[str, list[int]](list)
    for slide, digest in enumerate(digests):
        few = num_tiles[slide] < MIN_MATCHING_TILES
        by_digest[f"{digest} {slide}" if few else digest].append(slide)
    return [*by_digest.values()]


def _equal_pairs(
    groups: Sequence[Sequence[int]], cases: IndexArray
) -> Iterator[CopyPair]:
    """Pairs of equal slides of different cases: each slide with the NEIGHBOURS after it."""
    for group in groups:
        for number, slide in enumerate(group):
            for other in group[number + 1 : number + 1 + NEIGHBOURS]:
                if cases[slide] != cases[other]:
                    yield CopyPair(slide, other, 1.0, "equal")


def _of_two_cases(
    first: Sequence[int], second: Sequence[int], cases: IndexArray
) -> tuple[int, int]:
    """One slide of each group, in order, of different cases if that can be."""
    slide, other = first[0], second[0]
    if cases[slide] == cases[other]:
        slide = next((i for i in first if cases[i] != cases[other]), slide)
    if cases[slide] == cases[other]:
        other = next((j for j in second if cases[j] != cases[slide]), other)
    return min(slide, other), max(slide, other)


def _copies_among(
    means: Floats,
    sampled_tiles: Sequence[Reals],
    cases: IndexArray,
    read: ReadRows,
    *,
    num_tiles: IndexArray,
) -> list[CopyPair]:
    """`copied_slides` of slides that are all different."""
    if len(means) < MIN_SLIDES:
        return []
    z = _standardised(means, *_scale(means))
    similar = z @ z.T
    distance = np.sqrt(np.maximum(0, 2 - 2 * similar))
    distance[cases[:, None] == cases] = np.inf
    level = chance_level(similar, cases)
    copies = []
    # distance of each pair of a slide and one of its nearest slides
    near: dict[tuple[int, int], float] = {}
    for i, row in enumerate(distance):
        for j in np.argsort(row, kind="stable")[:NEIGHBOURS].tolist():
            if np.isfinite(row[j]):
                near[min(i, j), max(i, j)] = float(row[j])
    for i, j in sorted(near, key=lambda pair: near[pair])[:MAX_PAIRS]:
        # the rows of the larger slide, and fewer of the smaller one
        smaller, larger = sorted((i, j), key=lambda slide: int(num_tiles[slide]))
        few = read(smaller, spread_rows(int(num_tiles[smaller]), MAX_SMALLER_TILES))
        many = read(larger, spread_rows(int(num_tiles[larger]), MAX_LARGER_TILES))
        others = np.flatnonzero((cases != cases[i]) & (cases != cases[j]))
        share = _tile_share(few, many, [sampled_tiles[int(k)] for k in others])
        # only some tiles of a large slide were compared, so that others could not match
        share = min(1.0, share * int(num_tiles[larger]) / len(many))
        is_mutual = distance[i].argmin() == j and distance[j].argmin() == i
        if share >= MIN_TILE_SHARE:
            copies.append(CopyPair(i, j, share, "tiles"))
        elif is_mutual and similar[i, j] > level:
            # slides of other cases must be clearly farther from both
            to_others = np.minimum(distance[i, others], distance[j, others])
            if len(to_others) and distance[i, j] < MAX_MEAN_RATIO * to_others.min():
                copies.append(CopyPair(i, j, share, "means"))
    return copies


def _scale(x: Floats) -> tuple[FloatVector, FloatVector]:
    """Median and robust standard deviation by channel."""
    middle = np.median(x, axis=0)
    spread = 1.4826 * np.median(np.abs(x - middle), axis=0)
    spread[spread < 1e-12] = np.inf  # a constant channel gets the value 0
    return middle, spread


def _standardised(x: Floats, middle: FloatVector, spread: FloatVector) -> Floats:
    return directions(np.clip((x - middle) / spread, -CLIP, CLIP))


def chance_level(similar: Floats, cases: IndexArray) -> float:
    """Cosine that the most similar pair of unrelated slides exceeds with the probability CHANCE.

    Fisher's z of a cosine of d independent channels has the variance 1 / (d - 2). The variance is
    taken from the cohort's own cosines. So d is small if classes, sites and stains make many slides
    similar.
    """
    from scipy.special import ndtri

    upper = np.triu(cases[:, None] != cases, k=1)
    cosines = similar[upper]
    if len(cosines) < MIN_SLIDES:
        return np.inf
    fisher_z = np.arctanh(np.clip(cosines, -0.999999, 0.999999))
    low, middle, high = np.quantile(fisher_z, (0.025, 0.5, 0.975))
    error = max((high - middle) / 1.96, (middle - low) / 1.96)
    quantile = -ndtri(CHANCE / len(cosines))
    return float(np.tanh(middle + quantile * error))


def _tile_share(few: Reals, many: Reals, others: Sequence[Reals]) -> float:
    """Share of the tiles in `few` that match one of `many`, but no tile of the other slides.

    `others` are directions of tiles of slides of other cases.
    """
    background = np.concatenate(others).astype(np.float64)
    background = background[spread_rows(len(background), MAX_BACKGROUND_TILES)]
    middle, spread = _scale(background)
    if not np.isfinite(spread).any():
        return 0.0
    smaller, larger, pool = (
        _standardised(x, middle, spread)
        for x in (directions(few), directions(many), background)
    )
    to_other_slide = _least_distance(smaller, larger)
    to_background = _least_distance(smaller, pool)
    # blank tiles look the same in all slides
    is_counted = to_background > BLANK_RATIO * np.quantile(to_background, 0.9)
    is_matching = is_counted & (to_other_slide < MAX_TILE_RATIO * to_background)
    if is_matching.sum() < MIN_MATCHING_TILES:
        return 0.0
    return float(is_matching.sum() / is_counted.sum())


def _least_distance(x: Floats, others: Floats) -> FloatVector:
    """Distance (N,) of each row of `x` to the nearest row of `others`; rows have unit length."""
    nearest = (x @ others.T).max(axis=1)
    return np.asarray(np.sqrt(np.maximum(0, 2 - 2 * nearest)))
