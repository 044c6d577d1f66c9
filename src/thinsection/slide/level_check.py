"""Check of a level against a finer level: whether it shows the same tissue, and at which scale.

A few places of the slide are compared: those with the most contrast on the coarsest level if that
level is small, and some fixed places. The same place of both levels is reduced to the same few
pixels before it is compared, because scanners and converters reduce and sharpen levels differently,
and JPEG changes them again.

Verdicts are cached, because each comparison takes about 30 ms. This module also caches whether
OpenSlide and the TIFF reader gave equal pixels of a file. A cached verdict counts for the same
stamps of the file (its path, size, times and inode) and the same versions of the packages that
decode it. The cache is in the user's cache folder, in at most `_SHARDS` files with `_MAX_PER_SHARD`
verdicts each: some 4 MB in all.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.config import user_cache_dir
from thinsection.errors import SlideReadError
from thinsection.files.atomic import read_json, write_json
from thinsection.slide.base import Slide
from thinsection.slide.geometry import corner_l0
from thinsection.types import Json, Level, Mpp
from thinsection.weights.origin import (
    Stamps,
    are_settled,
    installed_version,
    read_stamps,
)

NUM_PLACES = 4
STREAMED_PLACES = 1  # for a slide by URL: each place costs requests
# fixed places, as shares of width and height, for slides whose coarsest level is not read; the
# first is used for all slides
_FIXED = ((0.5, 0.5), (0.31, 0.23), (0.23, 0.71), (0.77, 0.42), (0.62, 0.83))
_NUM_GUIDED = 2  # places where the coarsest level has the most contrast
_GUIDE_PX = 1 << 20  # a coarsest level with more pixels is not searched for contrast
_GUIDE_CELLS = (
    12  # cells along each side of the coarsest level, whose contrast is compared
)
_PROBE_PX = 48  # edge of a place on the level
_MAX_FINER_PX = 384  # edge of a place on the finer level
_MIN_PROBE_PX = 12
_BLOCK_PX = 4  # edge of the blocks of which the means are compared
# A level fails if its mean difference from the finer level is more than `_MAX_DIFFERENCE` (of 255)
# and its relative difference is more than `_MAX_RELATIVE_DIFFERENCE`. Correct levels of real slides
# had at most 3.5 and .02; pictures of other places had at least 15 and .24. (Unrelated pictures
# have a relative difference of about 1, but bright glass and dark tissue look alike everywhere.)
_MAX_DIFFERENCE = 5.0
_MAX_RELATIVE_DIFFERENCE = 0.12
# The scale by size is taken only if its relative difference is less than this share of the relative
# difference at the stated scale.
_CLEARLY_BETTER = 0.8
LevelVerdict = Literal["level", "level by size", "other"]
# a level, at the stated scale (or at the scale of its size if no scale is stated)
LEVEL: LevelVerdict = "level"
# a level, at the scale of its size, against the stated scale
BY_SIZE: LevelVerdict = "level by size"
# no level: it shows something else
OTHER: LevelVerdict = "other"
# verdict of each level, by two numbers: the offsets of level 0 and of the level in a TIFF, or the
# numbers of a picture and of its level
Verdicts = dict[tuple[int, int], LevelVerdict]
Values = npt.NDArray[np.float64]
Place = tuple[float, float]
_SHARDS = 256
_MAX_PER_SHARD = 128  # verdicts in one file of the cache
_LEVELS = "levels"  # name of the comparison of a file's levels
_MAX_CACHED_LEVELS = 64  # a file with more levels is not cached
# packages whose versions decide which pixels the TIFF reader and OpenSlide return
_PACKAGES = (
    "thinsection",
    "tifffile",
    "imagecodecs",
    "simplejpeg",
    "openslide-python",
    "openslide-bin",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelCandidate:
    """A part of a file that may be a level.

    Attributes:
        key: key of its verdict in `Verdicts`.
        level: the level, at the scale that the file states, or else at the scale of its size.
        downsample_by_size: level-0 px per px of the level, computed from its size, if that
            contradicts the scale that the file states; else None.
    """

    key: tuple[int, int]
    level: Level
    downsample_by_size: float | None = None


@dataclass(frozen=True, slots=True)
class LevelDifference:
    """Difference between a level and a finer level.

    Attributes:
        mean: mean absolute difference, of 255.
        relative: squared difference over the sum of both variances; 0 for equal pixels, about 1
            for unrelated pictures.
    """

    mean: float
    relative: float

    @property
    def is_other(self) -> bool:
        """True if the level shows something else than the finer level."""
        is_large = self.mean > _MAX_DIFFERENCE
        return is_large and self.relative > _MAX_RELATIVE_DIFFERENCE


def judge_levels(
    slide: Slide, candidates: Sequence[LevelCandidate], *, num_places: int = NUM_PLACES
) -> Verdicts:
    """Returns the verdict on each candidate.

    Each candidate is compared with the next finer level that was accepted. A level that cannot be
    read is accepted: the error is raised when its pixels are read.

    Args:
        slide: a slide that has level 0 and the candidates, by their indices.
        candidates: the possible levels.
        num_places: number of places of each level that are compared.

    Memory: that of `probe_places`, and two places of 385 px.
    """
    verdicts: Verdicts = {}
    ordered = sorted(candidates, key=lambda candidate: candidate.level.downsample)
    accepted = [slide.levels[0]]
    try:
        places = probe_places(slide, ordered[-1].level)[:num_places]
    except SlideReadError:
        places = list(_FIXED)[:num_places]
    for candidate in ordered:
        level = candidate.level
        finer = [each for each in accepted if each.downsample < level.downsample]
        downsamples = [level.downsample]
        if candidate.downsample_by_size is not None:
            downsamples.append(candidate.downsample_by_size)
        try:
            differences = compare_levels(
                slide, level, (finer or accepted)[-1], places, downsamples
            )
        except SlideReadError:
            verdicts[candidate.key] = LEVEL
            continue
        stated = differences[0]
        by_size = differences[-1]
        # if both scales fit equally well, as on bare glass, the stated scale is taken
        stated_fits = stated.relative <= max(by_size.relative / _CLEARLY_BETTER, 0.01)
        if (stated if stated_fits else by_size).is_other:
            verdicts[candidate.key] = OTHER
        elif stated_fits:
            verdicts[candidate.key] = LEVEL
            accepted.append(level)
        else:
            verdicts[candidate.key] = BY_SIZE
    return verdicts


def compare_levels(
    slide: Slide,
    level: Level,
    finer: Level,
    places: Sequence[Place],
    downsamples: Sequence[float],
) -> list[LevelDifference]:
    """Compares a level with a finer level, once at each of some scales.

    Args:
        slide: the slide that has both levels.
        level: the level.
        finer: a finer level that was accepted.
        places: see `probe_places`.
        downsamples: possible scales of the level, in level-0 px per px of the level.
    """
    largest_factor = max(downsamples) / finer.downsample
    edge = min(_PROBE_PX, int(_MAX_FINER_PX / largest_factor), *level.size)
    # whole blocks, but at least 12 px if the level has as many
    edge = max(min(_MIN_PROBE_PX, *level.size), edge // _BLOCK_PX * _BLOCK_PX)
    # the last corner at which a place lies within both levels at every scale
    last_x = min(level.size[0], int(finer.size[0] / largest_factor)) - edge
    last_y = min(level.size[1], int(finer.size[1] / largest_factor)) - edge
    pairs: list[list[tuple[Values, Values]]] = [[] for _ in downsamples]
    for x_share, y_share in places:
        x = max(0, min(round(x_share * level.size[0] - edge / 2), last_x))
        y = max(0, min(round(y_share * level.size[1] - edge / 2), last_y))
        origin_l0 = corner_l0(level, x, y)
        pixels = slide.read_region(origin_l0, level.index, (edge, edge))
        blocks = max(1, edge // _BLOCK_PX)
        level_means = _reduced(pixels, (0, 0, edge, edge), blocks)
        for index, downsample in enumerate(downsamples):
            factor = downsample / finer.downsample
            finer_pixels = _read_finer(slide, finer, (x, y), edge, factor)
            pairs[index].append((level_means, _reduced(*finer_pixels, blocks)))
    differences = []
    for pairs_at_scale in pairs:
        coarse = np.concatenate([pair[0].reshape(-1, 3) for pair in pairs_at_scale])
        fine = np.concatenate([pair[1].reshape(-1, 3) for pair in pairs_at_scale])
        variance = coarse.var(axis=0).sum() + fine.var(axis=0).sum()
        squared = ((coarse - fine) ** 2).mean(axis=0).sum()
        relative = float(squared / variance) if variance > 0 else float(squared > 0)
        mean = float(np.abs(coarse - fine).mean())
        differences.append(LevelDifference(mean=mean, relative=relative))
    return differences


def probe_places(slide: Slide, coarsest: Level) -> list[Place]:
    """Returns the places for the comparison, as shares of width and height; most contrast first.

    Memory: the coarsest level, if it has at most a million pixels.
    """
    width, height = coarsest.size
    if width * height > _GUIDE_PX or min(width, height) < _GUIDE_CELLS:
        return list(_FIXED)
    places: list[Place] = []
    pixels = slide.read_region((0, 0), coarsest.index, coarsest.size)
    gray = pixels.mean(axis=2, dtype=np.float32)
    rows = height // _GUIDE_CELLS
    columns = width // _GUIDE_CELLS
    cells = gray[: rows * _GUIDE_CELLS, : columns * _GUIDE_CELLS]
    cells = cells.reshape(_GUIDE_CELLS, rows, _GUIDE_CELLS, columns)
    contrast = cells.std(axis=(1, 3))
    for number in np.argsort(-contrast, axis=None, kind="stable")[:_NUM_GUIDED]:
        row, column = divmod(int(number), _GUIDE_CELLS)
        x = (column + 0.5) * columns / width
        y = (row + 0.5) * rows / height
        places.append((x, y))
    return [*places, _FIXED[0]]


def _read_finer(
    slide: Slide, finer: Level, origin_lv: tuple[int, int], edge: int, factor: float
) -> tuple[npt.NDArray[np.uint8], tuple[float, float, float, float]]:
    """Reads the area of a square of a level from a finer level.

    Returns the pixels, and the box of the square in them (left, top, right, bottom).
    """
    left = origin_lv[0] * factor
    top = origin_lv[1] * factor
    size = edge * factor
    x = int(left)
    y = int(top)
    read_px = int(np.ceil(size)) + 1
    origin_l0 = corner_l0(finer, x, y)
    pixels = slide.read_region(origin_l0, finer.index, (read_px, read_px))
    return pixels, (left - x, top - y, left - x + size, top - y + size)


def _reduced(
    pixels: npt.NDArray[np.uint8],
    box: tuple[float, float, float, float],
    num_blocks: int,
) -> Values:
    """Returns the mean color of each block of a box of pixels, (num_blocks, num_blocks, 3)."""
    image = Image.fromarray(pixels)
    small = image.resize((num_blocks, num_blocks), Image.Resampling.BOX, box=box)
    return np.asarray(small, dtype=np.float64)


def slide_stamps(path: str) -> Stamps | None:
    """Returns the stamps of a slide that is one file; None if it is missing."""
    return read_stamps([Path(path).absolute()])


def cached_levels(stamps: Stamps | None) -> Verdicts:
    """Returns the cached verdicts on the levels of a file; empty if there are none.

    Args:
        stamps: `slide_stamps` of the file.
    """
    cached = _read_cached(stamps, _LEVELS)
    if stamps is None or not isinstance(cached, list):
        return {}
    if cached[:1] != [_file_state(stamps)]:
        return {}
    return {(base, page): verdict for base, page, verdict in cached[1:]}


def cache_levels(stamps: Stamps | None, verdicts: Verdicts) -> None:
    """Caches the verdicts on the levels of a file, under the conditions of `cache_agreement`."""
    if stamps is not None and len(verdicts) <= _MAX_CACHED_LEVELS:
        rows = [[base, page, verdict] for (base, page), verdict in verdicts.items()]
        _write_cached(stamps, _LEVELS, [_file_state(stamps), *rows])


def is_cached_agreement(stamps: Stamps | None, slide_mpp: Mpp | None) -> bool:
    """Tells whether a cached comparison of this file with OpenSlide found no difference.

    Args:
        stamps: `slide_stamps` of the file.
        slide_mpp: the resolution that the user gave in place of the file's; None if none.
    """
    if stamps is None:
        return False
    return bool(_read_cached(stamps, slide_mpp) == _file_state(stamps))


def cache_agreement(stamps: Stamps | None, slide_mpp: Mpp | None) -> None:
    """Caches that a comparison with OpenSlide found no difference.

    Nothing is cached if the cache cannot be written, if the file has changed since its stamps were
    read, or if it was changed a moment ago, so that its times could miss another change. The slide
    is then compared again.
    """
    if stamps is not None:
        _write_cached(stamps, slide_mpp, _file_state(stamps))


def _read_cached(stamps: Stamps | None, comparison: Mpp | str | None) -> Json:
    """Returns the cached result of a comparison of a file; None if there is none."""
    if stamps is None:
        return None
    key = _key(stamps, comparison)
    return _read_shard(key).get(key)


def _write_cached(stamps: Stamps, comparison: Mpp | str | None, result: Json) -> None:
    """Caches the result of a comparison, if the file is old enough."""
    if not are_settled(stamps):
        return
    key = _key(stamps, comparison)
    verdicts = _read_shard(key)
    verdicts.pop(key, None)
    newest = list(verdicts.items())[1 - _MAX_PER_SHARD :]
    try:
        path = _shard_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        # if another process writes in between, its verdict is lost and computed again later
        write_json(path, {**dict(newest), key: result})
    except (OSError, RuntimeError):
        return


def _key(stamps: Stamps, comparison: Mpp | str | None) -> str:
    """Returns the key of a comparison in the cache.

    `comparison` is `_LEVELS`, or the resolution at which the slide was compared with OpenSlide.
    """
    parts = [stamps[0][0], comparison, _versions()]
    return sha256(json.dumps(parts).encode()).hexdigest()[:32]


@cache
def _versions() -> tuple[str, ...]:
    return tuple(installed_version(package) for package in _PACKAGES)


def _file_state(stamps: Stamps) -> str:
    """Returns size, times and inode of a file as text; its path is in the key."""
    return " ".join(map(str, stamps[0][1:]))


def _shard_path(key: str) -> Path:
    """Returns the file of the cache for a key; RuntimeError: the user has no home folder."""
    number = int(key[:8], 16) % _SHARDS
    return user_cache_dir() / "compared" / f"{number:02x}.json"


def _read_shard(key: str) -> dict[str, Json]:
    """Returns all verdicts in the file of the cache for a key; empty if it is not readable."""
    try:
        verdicts = read_json(_shard_path(key))
    except (OSError, ValueError, RuntimeError):
        return {}
    return verdicts if isinstance(verdicts, dict) else {}
