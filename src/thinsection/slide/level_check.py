"""Check of a level against a finer one: whether it shows the same, and at which scale.

A few places are compared: those with the most contrast on the slide's coarsest level where that is
small, and some fixed ones. Both levels are reduced to the same few pixels, because programs reduce
and sharpen levels in ways of their own, and JPEG changes them again.

What pixels said, here and in the comparison with OpenSlide, is known again by the stamps of the
file: each comparison takes some 30 ms. Verdicts count for the same file and the same versions of
the packages that decode it. They are in the user's cache, in at most `_SHARDS` files with `_MOST`
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
STREAMED_PLACES = 1  # of a slide by URL, where each place costs requests
# shares of width and height, where nothing is known of the slide; the first also where something is
_FIXED = ((0.5, 0.5), (0.31, 0.23), (0.23, 0.71), (0.77, 0.42), (0.62, 0.83))
_NUM_GUIDED = 2  # places where the coarsest level has the most contrast
_GUIDE_PX = 1 << 20  # a coarsest level that is larger is not read for it
_GUIDE_CELLS = 12  # along each side
_PROBE_PX = 48  # edge of a place on the level
_MAX_FINER_PX = 384  # edge of a place on the finer level
_MIN_PROBE_PX = 12
_BLOCK_PX = 4  # that become one px before they are compared
# A level fails if its pixels differ from those of the finer one by more than this, of 255, and
# by more than this share of the variance in both. Levels of real slides gave up to 3.5 and .02,
# pictures of other places 15 and .24 at least: tissue on glass is alike everywhere.
_MAX_DIFFERENCE = 5.0
_MAX_SHARE = 0.12
_CLEAR = 0.8  # of two scales, the stated one must not be worse than by this factor
# what the pixels of a level say: it is one at the scale that is stated (or that its size has, where
# nothing is stated); it is one at the scale of its size, not at the stated one; it shows something
# else
LevelVerdict = Literal["level", "level by size", "other"]
LEVEL: LevelVerdict = "level"
BY_SIZE: LevelVerdict = "level by size"
OTHER: LevelVerdict = "other"
# what pixels said of levels, by two numbers: the offsets of level 0 and of the level in a TIFF,
# or the numbers of a picture and of its level
Verdicts = dict[tuple[int, int], LevelVerdict]
Values = npt.NDArray[np.float64]
Place = tuple[float, float]
_SHARDS = 256
_MOST = 128
_LEVELS = "levels"  # subject of verdicts on levels
_MOST_LEVELS = 64  # verdicts on levels that are kept of one file
# packages that decide which pixels the two readers see
_PACKAGES = (
    "thinsection",
    "tifffile",
    "imagecodecs",
    "simplejpeg",
    "openslide-python",
    "openslide-bin",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelClaim:
    """Claim that a part of a file is a level.

    Attributes:
        key: what the verdict is kept by.
        level: the level, at the scale that the file states or that its size has.
        by_size: level-0 px per px of it by its size, where that contradicts the file; None where
            it does not.
    """

    key: tuple[int, int]
    level: Level
    by_size: float | None = None


@dataclass(frozen=True, slots=True)
class LevelDifference:
    """Difference between a level and a finer one.

    Attributes:
        mean: mean absolute difference, of 255.
        share: squared difference per variance of both; 0 where they are alike, about 1 where they
            show different things.
    """

    mean: float
    share: float

    @property
    def is_other(self) -> bool:
        """True where the level shows something else than the finer one."""
        return self.mean > _MAX_DIFFERENCE and self.share > _MAX_SHARE


def judge_levels(
    slide: Slide, claims: Sequence[LevelClaim], *, num_places: int = NUM_PLACES
) -> Verdicts:
    """Returns what the pixels say of each claim.

    Each level is compared with the next finer one that is right. One that cannot be read is not
    judged: that its pixels are damaged is said where they are asked for.

    Args:
        slide: a slide that has level 0 and the claimed levels, by their indices.
        claims: the levels to be judged.
        num_places: places of each level that are compared.

    Memory: that of `probe_places`, and two places of 385 px.
    """
    verdicts: Verdicts = {}
    ordered = sorted(claims, key=lambda claim: claim.level.downsample)
    right = [slide.levels[0]]
    try:
        places = probe_places(slide, ordered[-1].level)[:num_places]
    except SlideReadError:
        places = list(_FIXED)[:num_places]
    for claim in ordered:
        level = claim.level
        finer = [each for each in right if each.downsample < level.downsample]
        downsamples = [level.downsample]
        if claim.by_size is not None:
            downsamples.append(claim.by_size)
        try:
            differences = compare_levels(
                slide, level, (finer or right)[-1], places, downsamples
            )
        except SlideReadError:
            verdicts[claim.key] = LEVEL
            continue
        stated = differences[0]
        by_size = differences[-1]
        # where both scales fit alike, as on bare glass, the stated one counts
        counts = stated.share <= max(by_size.share / _CLEAR, 0.01)
        if (stated if counts else by_size).is_other:
            verdicts[claim.key] = OTHER
        elif counts:
            verdicts[claim.key] = LEVEL
            right.append(level)
        else:
            verdicts[claim.key] = BY_SIZE
    return verdicts


def compare_levels(
    slide: Slide,
    level: Level,
    finer: Level,
    places: Sequence[Place],
    downsamples: Sequence[float],
) -> list[LevelDifference]:
    """Compares a level with a finer one at each of some scales.

    Args:
        slide: the slide that has both levels.
        level: the level.
        finer: a level that is right.
        places: see `probe_places`.
        downsamples: level-0 px per px of the level, by which it may be placed.
    """
    largest = max(downsamples) / finer.downsample
    edge = min(_PROBE_PX, int(_MAX_FINER_PX / largest), *level.size)
    edge = max(min(_MIN_PROBE_PX, *level.size), edge // _BLOCK_PX * _BLOCK_PX)
    # places lie within both levels at every scale
    last_x = min(level.size[0], int(finer.size[0] / largest)) - edge
    last_y = min(level.size[1], int(finer.size[1] / largest)) - edge
    pairs: list[list[tuple[Values, Values]]] = [[] for _ in downsamples]
    for x_share, y_share in places:
        x = max(0, min(round(x_share * level.size[0] - edge / 2), last_x))
        y = max(0, min(round(y_share * level.size[1] - edge / 2), last_y))
        origin_l0 = corner_l0(level, x, y)
        pixels = slide.read_region(origin_l0, level.index, (edge, edge))
        blocks = max(1, edge // _BLOCK_PX)
        own = _reduced(pixels, (0, 0, edge, edge), blocks)
        for index, downsample in enumerate(downsamples):
            factor = downsample / finer.downsample
            finer_pixels = _read_finer(slide, finer, (x, y), edge, factor)
            pairs[index].append((own, _reduced(*finer_pixels, blocks)))
    differences = []
    for each in pairs:
        own = np.concatenate([pair[0].reshape(-1, 3) for pair in each])
        other = np.concatenate([pair[1].reshape(-1, 3) for pair in each])
        variance = own.var(axis=0).sum() + other.var(axis=0).sum()
        squared = ((own - other) ** 2).mean(axis=0).sum()
        share = float(squared / variance) if variance > 0 else float(squared > 0)
        mean = float(np.abs(own - other).mean())
        differences.append(LevelDifference(mean=mean, share=share))
    return differences


def probe_places(slide: Slide, coarsest: Level) -> list[Place]:
    """Returns where levels are compared, as shares of width and height, the best ones first.

    Memory: the coarsest level, where it has at most a million px.
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
    """Reads what a square of a level covers on a finer one, and where it lies in what was read."""
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
    """Returns the means of a box of pixels, float (num_blocks, num_blocks, 3)."""
    image = Image.fromarray(pixels)
    small = image.resize((num_blocks, num_blocks), Image.Resampling.BOX, box=box)
    return np.asarray(small, dtype=np.float64)


def slide_stamps(path: str) -> Stamps | None:
    """Returns the stamps of a slide that is one file; None if it is missing."""
    return read_stamps([Path(path).absolute()])


def known_levels(stamps: Stamps | None) -> Verdicts:
    """Returns what earlier comparisons of this file's levels found.

    Args:
        stamps: `slide_stamps` of the file.
    """
    value = _recorded(stamps, _LEVELS)
    if stamps is None or not isinstance(value, list):
        return {}
    if value[:1] != [_value(stamps)]:
        return {}
    return {(base, page): verdict for base, page, verdict in value[1:]}


def keep_levels(stamps: Stamps | None, verdicts: Verdicts) -> None:
    """Keeps what comparisons of a file's levels found, as `keep_agreement` does."""
    if stamps is not None and len(verdicts) <= _MOST_LEVELS:
        rows = [[base, page, verdict] for (base, page), verdict in verdicts.items()]
        _keep(stamps, _LEVELS, [_value(stamps), *rows])


def is_known_to_agree(stamps: Stamps | None, slide_mpp: Mpp | None) -> bool:
    """Tells whether an earlier comparison of this file found no difference.

    Args:
        stamps: `slide_stamps` of the file.
        slide_mpp: the resolution that was given in place of the file's.
    """
    if stamps is None:
        return False
    return bool(_recorded(stamps, slide_mpp) == _value(stamps))


def keep_agreement(stamps: Stamps | None, slide_mpp: Mpp | None) -> None:
    """Keeps that a comparison found no difference.

    Nothing is kept if the file has changed since its stamps were read or is too young, or if the
    cache cannot be written: the slide is then compared again.
    """
    if stamps is not None:
        _keep(stamps, slide_mpp, _value(stamps))


def _recorded(stamps: Stamps | None, subject: Mpp | str | None) -> Json:
    """Returns what is kept of a file on a subject; None where nothing is."""
    if stamps is None:
        return None
    key = _key(stamps, subject)
    return _read_verdicts(key).get(key)


def _keep(stamps: Stamps, subject: Mpp | str | None, value: Json) -> None:
    """Keeps a verdict on a subject, where the file is old enough."""
    if not are_settled(stamps):
        return
    key = _key(stamps, subject)
    verdicts = _read_verdicts(key)
    verdicts.pop(key, None)
    newest = list(verdicts.items())[1 - _MOST :]
    try:
        path = _shard(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        # another process may write in between: its verdict is lost, and found again
        write_json(path, {**dict(newest), key: value})
    except (OSError, RuntimeError):
        return


def _key(stamps: Stamps, subject: Mpp | str | None) -> str:
    """Returns the key of a file and of what was compared: resolution, or its levels."""
    parts = [stamps[0][0], subject, _versions()]
    return sha256(json.dumps(parts).encode()).hexdigest()[:32]


@cache
def _versions() -> tuple[str, ...]:
    return tuple(installed_version(package) for package in _PACKAGES)


def _value(stamps: Stamps) -> str:
    """Returns size, time stamps and inode; the name is in the key."""
    return " ".join(map(str, stamps[0][1:]))


def _shard(key: str) -> Path:
    """Returns the file that keeps a key; RuntimeError: the user has no home folder."""
    number = int(key[:8], 16) % _SHARDS
    return user_cache_dir() / "compared" / f"{number:02x}.json"


def _read_verdicts(key: str) -> dict[str, Json]:
    """Returns the verdicts in the file that keeps a key; none if it is not readable."""
    try:
        verdicts = read_json(_shard(key))
    except (OSError, ValueError, RuntimeError):
        return {}
    return verdicts if isinstance(verdicts, dict) else {}
