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

# largest number of tiles of each slide that are sampled for the background, and of all slides;
# every slide has one at least
SAMPLED_TILES = 32
ALL_SAMPLED_TILES = 32 * 1024
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
# largest number of slides whose cosines with each other say what chance allows
MAX_LEVEL_SLIDES = 1000
_BLOCK = 512  # number of slides that are compared with all others at a time


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


def spread_rows(num_tiles: int, most: int) -> IndexArray:
    """Row numbers of at most `most` tiles, evenly spaced; the middle row if there is one only."""
    if num_tiles <= most:
        return np.arange(num_tiles)
    if most == 1:
        # the first tile lies at the border of the tissue
        return np.array([num_tiles // 2])
    return np.linspace(0, num_tiles - 1, most).round().astype(np.int64)


def samples_per_slide(num_slides: int) -> int:
    """Number of tiles of each of `num_slides` slides that are sampled."""
    return max(1, min(SAMPLED_TILES, ALL_SAMPLED_TILES // max(1, num_slides)))


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

    Memory: 24 d (D + _BLOCK) + 24 MAX_LEVEL_SLIDES² + 32 D (MAX_BACKGROUND_TILES +
    MAX_LARGER_TILES) bytes for d different slides. Their pairs are compared in blocks.
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
    level = _level_among(z, cases)
    copies = []
    for i, j in _near_pairs(z, cases):
        others = np.flatnonzero((cases != cases[i]) & (cases != cases[j]))
        if not len(others):
            continue  # no third case says what is usual
        # the rows of the larger slide, and fewer of the smaller one
        smaller, larger = sorted((i, j), key=lambda slide: int(num_tiles[slide]))
        few = read(smaller, spread_rows(int(num_tiles[smaller]), MAX_SMALLER_TILES))
        many = read(larger, spread_rows(int(num_tiles[larger]), MAX_LARGER_TILES))
        share = _tile_share(few, many, _background(sampled_tiles, others))
        # only some tiles of a large slide were compared, so that others could not match
        share = min(1.0, share * int(num_tiles[larger]) / len(many))
        distance = _distances(z, cases, np.array([i, j]))
        is_mutual = distance[0].argmin() == j and distance[1].argmin() == i
        if share >= MIN_TILE_SHARE:
            copies.append(CopyPair(i, j, share, "tiles"))
        elif is_mutual and z[i] @ z[j] > level:
            # slides of other cases must be clearly farther from both
            to_others = distance[:, others]
            if distance[0, j] < MAX_MEAN_RATIO * to_others.min():
                copies.append(CopyPair(i, j, share, "means"))
    return copies


def _distances(z: Floats, cases: IndexArray, rows: IndexArray) -> Floats:
    """Distances (R, d) of some rows of unit vectors (d, D) to all; infinite within a case."""
    distance = np.sqrt(np.maximum(0, 2 - 2 * (z[rows] @ z.T)))
    distance[cases[rows, None] == cases] = np.inf
    return np.asarray(distance)


def _near_pairs(z: Floats, cases: IndexArray) -> list[tuple[int, int]]:
    """Pairs of a slide and one of its NEIGHBOURS nearest slides of other cases, nearest first.

    At most MAX_PAIRS. Memory: 24 d _BLOCK bytes for d slides.
    """
    near: dict[tuple[int, int], float] = {}
    for start in range(0, len(z), _BLOCK):
        rows = np.arange(start, min(start + _BLOCK, len(z)))
        distance = _distances(z, cases, rows)
        for _ in range(NEIGHBOURS):
            nearest = distance.argmin(axis=1)
            least = distance[np.arange(len(rows)), nearest]
            distance[np.arange(len(rows)), nearest] = np.inf
            for i, j, between in zip(
                rows.tolist(), nearest.tolist(), least.tolist(), strict=True
            ):
                if between < np.inf:
                    near[min(i, j), max(i, j)] = between
        # pairs beyond MAX_PAIRS never come back
        near = dict(sorted(near.items(), key=lambda pair: pair[1])[:MAX_PAIRS])
    return [*near]


def _level_among(z: Floats, cases: IndexArray) -> float:
    """`chance_level` of the pairs of all slides.

    Of more than MAX_LEVEL_SLIDES slides, the variance is that of so many, evenly spaced.
    """
    sample = spread_rows(len(z), MAX_LEVEL_SLIDES)
    per_case = np.unique(cases, return_counts=True)[1]
    num_pairs = (len(z) ** 2 - int((per_case**2).sum())) // 2
    return chance_level(z[sample] @ z[sample].T, cases[sample], num_pairs)


def _scale(x: Floats) -> tuple[FloatVector, FloatVector]:
    """Median and robust standard deviation by channel."""
    middle = np.median(x, axis=0)
    spread = 1.4826 * np.median(np.abs(x - middle), axis=0)
    spread[spread < 1e-12] = np.inf  # a constant channel gets the value 0
    return middle, spread


def _standardised(x: Floats, middle: FloatVector, spread: FloatVector) -> Floats:
    return directions(np.clip((x - middle) / spread, -CLIP, CLIP))


def chance_level(
    similar: Floats, cases: IndexArray, num_pairs: int | None = None
) -> float:
    """Cosine that the most similar pair of unrelated slides exceeds with the probability CHANCE.

    `num_pairs` is the number of pairs that are looked at, if there are more than in `similar`.

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
    quantile = -ndtri(CHANCE / (num_pairs or len(cosines)))
    return float(np.tanh(middle + quantile * error))


def _background(sampled_tiles: Sequence[Reals], slides: IndexArray) -> Floats:
    """Directions (T, D) of at most MAX_BACKGROUND_TILES sampled tiles of these slides."""
    ends = np.cumsum([len(sampled_tiles[slide]) for slide in slides.tolist()])
    rows = spread_rows(int(ends[-1]), MAX_BACKGROUND_TILES)
    places = np.searchsorted(ends, rows, side="right")
    tiles = [
        sampled_tiles[slides[place]][row - ends[place]]
        for place, row in zip(places.tolist(), rows.tolist(), strict=True)
    ]
    return np.stack(tiles).astype(np.float64)


def _tile_share(few: Reals, many: Reals, background: Floats) -> float:
    """Share of the tiles in `few` that match one of `many`, but no tile of the background.

    `background` has directions of tiles of slides of other cases.
    """
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
