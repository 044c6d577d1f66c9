"""Leaks: data that training and test cases share, found before anything is trained.

A certain leak (one patient, one slide, the same embeddings) is refused; a likely one gives a
warning. A copy is found by its content, whatever its name: embeddings that are equal after rounding
to float16, or slides whose mean embeddings nearly coincide.
"""

import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from thinsection.errors import DatasetError, slide_boundary
from thinsection.evaluation.cases import Groups, listed_names
from thinsection.evaluation.copies import (
    chance_level,
    directions,
    samples_per_slide,
    spread_rows,
    sum_of_directions,
)
from thinsection.evaluation.covariates import with_covariates
from thinsection.evaluation.embeddings import (
    Embeddings,
    added_in_order,
    check_finite_rows,
    feature_files,
    open_embeddings,
    unsigned_note,
)
from thinsection.evaluation.label_values import LabelsConfig
from thinsection.evaluation.labels import Cohort, join_labels, known_patients
from thinsection.evaluation.metrics import IndexArray
from thinsection.evaluation.parts import FoldCases
from thinsection.store.tile_tables import EmbeddingRows
from thinsection.types import Floats, Reals, counted

# cosine from which two mean embeddings nearly coincide, after the mean of all is subtracted
NEAR_COSINE = 0.9999
CaseFold = tuple[Sequence[int] | IndexArray, Sequence[int] | IndexArray]  # train, test
SKETCH_BITS = 256
# Sketches with at most so many different bits are from nearly the same mean embedding; their angle
# is at most about 4 degrees.
SKETCH_NEAR = 6
# largest number of training slides whose sketches are compared with each other
MAX_SKETCHES = 1000
# bits of float16 numbers: of infinity, of minus zero, and all but the sign
_INFINITE = np.float16(np.inf).view(np.uint16)
_MINUS_ZERO = np.float16(-0.0).view(np.uint16)
_MAGNITUDE = np.uint16(0x7FFF)
# embeddings whose largest value is smaller than 2**-10 lose too many bits in float16
_LEAST_LARGEST = np.float16(2**-10).view(np.uint16)
# Values of embeddings that are read at a time, 1 MiB in float64: they stay in the cache of a CPU
BLOCK_VALUES = 2**17
_SHOWN_PAIRS = 3  # pairs that a sentence names
_BLOCK = 1024  # number of rows that are compared with all others at a time


class Rows(Protocol):
    """Rows of a training set or of a validation set."""

    @property
    def embeddings(self) -> Embeddings: ...
    @property
    def ids(self) -> tuple[str, ...]: ...
    @property
    def groups(self) -> Groups | None: ...


@dataclass(frozen=True)
class Contents:
    """Digests, means and sizes of the embeddings of n slides, whatever their names."""

    digests: tuple[str, ...]  # see `content_digest`
    means: Floats  # (n, D)
    num_tiles: npt.NDArray[np.int64]  # (n,)
    directions: Floats  # (n, D), mean of each slide's L2-normalised tile embeddings
    # L2-normalised embeddings of some tiles of each slide, (T, D) each
    sampled_tiles: tuple[Reals, ...]

    def take(self, rows: Sequence[int]) -> "Contents":
        """Contents of some slides."""
        digests = tuple(self.digests[row] for row in rows)
        return Contents(
            digests=digests,
            means=self.means[rows],
            num_tiles=self.num_tiles[rows],
            directions=self.directions[rows],
            sampled_tiles=tuple(self.sampled_tiles[row] for row in rows),
        )

    def joined(self, other: "Contents") -> "Contents":
        """Contents of these slides, then of the others."""
        return Contents(
            digests=(*self.digests, *other.digests),
            means=np.concatenate([self.means, other.means]),
            num_tiles=np.concatenate([self.num_tiles, other.num_tiles]),
            directions=np.concatenate([self.directions, other.directions]),
            sampled_tiles=(*self.sampled_tiles, *other.sampled_tiles),
        )

    def case_means(self, cases: IndexArray) -> Floats:
        """Mean over all tiles of each case, (C, D), of slides whose cases are 0..C-1."""
        sums = np.zeros((int(cases.max()) + 1, self.means.shape[1]))
        np.add.at(sums, cases, self.means * self.num_tiles[:, None])
        return sums / np.bincount(cases, weights=self.num_tiles)[:, None]


class NamedTiles(NamedTuple):
    """Embeddings of one slide."""

    slide: str
    place: str  # where they come from, for messages
    tiles: Reals | EmbeddingRows  # (N, D)


class _SlideContents(NamedTuple):
    """One row of `Contents`."""

    slide: str
    place: str  # where the embeddings come from, for messages
    digest: str
    mean: Floats  # (D,)
    num_tiles: int
    direction: Floats  # (D,)
    sampled_tiles: Reals  # (T, D)
    is_zero: bool  # True if all values are 0


class Labelled(NamedTuple):
    """Labelled cases whose embeddings can be read."""

    cohort: Cohort
    contents: Contents  # contents of the cohort's slides, in its order
    left_out: Mapping[str, str]  # why a slide of the folder cannot be used, by slide id


def read_labelled(data: Path, config: LabelsConfig) -> Labelled:
    """Joins labels and embeddings, and reads each file of embeddings once.

    A slide whose file is missing, damaged, empty or not finite is left out; a case keeps its
    other slides.

    Memory: as `read_cohort` and `read_contents`.

    Raises DatasetError, ConfigError, InvalidInputError: as `read_cohort` and `read_contents`.
    """
    embeddings = feature_files(data, config.features)
    patient_by_slide = known_patients(data)
    cohort = join_labels(embeddings, patient_by_slide, config)
    files: dict[str, Path] = {}
    for slides, paths in zip(cohort.slides, cohort.paths, strict=True):
        files.update(zip(slides, paths, strict=True))
    damaged: dict[str, str] = {}
    contents = read_usable(files, damaged.__setitem__)
    if damaged:
        embeddings = embeddings.without(damaged)
        cohort = join_labels(embeddings, patient_by_slide, config)
        usable = [slide for slide in files if slide not in damaged]
        row_of = {slide: row for row, slide in enumerate(usable)}
        contents = contents.take([row_of[slide] for slide in chain(*cohort.slides)])
    cohort = with_covariates(cohort, config, data, patient_by_slide)
    left_out = embeddings.damaged
    lines = unsigned_note(embeddings)
    if left_out:
        lines.append(
            f"{counted(len(left_out), 'slide')} left out, whose stored results cannot be used: "
            f"{listed_names([*left_out])}"
        )
    cohort = replace(cohort, account=(*cohort.account, *lines))
    return Labelled(cohort, contents, left_out)


def read_contents(files: Sequence[Path]) -> Contents:
    """Reads each file once.

    Memory: a few MiB, or one file's embeddings if it is not an HDF5 file, and
    n D (32 + 2 samples_per_slide(n)) bytes: each mean twice while they are stacked. See
    `EmbeddingRows.checked_blocks` for compressed files.

    Raises DatasetError, InvalidInputError: a file that cannot be used, another number of channels
    than in the first, or only zeros.
    """

    def refuse(name: str, reason: str) -> None:
        raise DatasetError(reason)

    return read_usable({str(path): path for path in files}, refuse)


def read_usable(
    files: Mapping[str, Path], leave_out: Callable[[str, str], None]
) -> Contents:
    """Contents of the files that can be used; the others go to `leave_out` with the reason."""
    return _joined(
        _usable_slides(files, leave_out, samples=samples_per_slide(len(files)))
    )


def _usable_slides(
    files: Mapping[str, Path], leave_out: Callable[[str, str], None], *, samples: int
) -> Iterator[_SlideContents]:
    """Contents of each file that can be used."""
    for slide, path in files.items():
        read = None
        with slide_boundary(slide, leave_out):
            tiles = open_embeddings(path)
            if len(tiles) == 0:
                raise DatasetError(
                    f"a slide must have tiles, got none in {str(path)!r}"
                )
            # HDF5 files are checked while they are read
            if isinstance(tiles, np.ndarray):
                check_finite_rows(tiles, path)
            named = NamedTiles(path.stem, str(path), tiles)
            read = _slide_contents(named, samples=samples)
        if read is not None:
            yield read


def contents_of(slides: Iterable[NamedTiles], num_slides: int) -> Contents:
    """Contents of so many slides, whose finite embeddings (N, D) come one after another.

    Memory: as `read_contents`.

    Raises DatasetError: another number of channels than in the first, or only zeros.
    """
    samples = samples_per_slide(num_slides)
    return _joined(_slide_contents(slide, samples=samples) for slide in slides)


def _joined(slides: Iterable[_SlideContents]) -> Contents:
    """Contents of all slides. Raises DatasetError: as `contents_of`."""
    read: list[_SlideContents] = []
    for slide in slides:
        first = read[0] if read else slide
        if len(slide.mean) != len(first.mean):
            raise DatasetError(
                f"embeddings must have the same number of channels, got {len(first.mean)} in "
                f"{first.place!r} and {len(slide.mean)} in {slide.place!r}; keep the embeddings "
                "of one encoder in a folder"
            )
        read.append(slide)
    zero = [one.slide for one in read if one.is_zero]
    if zero:
        raise DatasetError(
            f"embeddings must not be all zero, got only zeros in {len(zero)} of {len(read)} "
            f"slides ({listed_names(zero)}); embed these again, or remove them from the labels"
        )
    empty = np.empty((0, 0))
    return Contents(
        digests=tuple(one.digest for one in read),
        means=np.stack([one.mean for one in read]) if read else empty,
        num_tiles=np.array([one.num_tiles for one in read], dtype=np.int64),
        directions=np.stack([one.direction for one in read]) if read else empty,
        sampled_tiles=tuple(one.sampled_tiles for one in read),
    )


def _slide_contents(named: NamedTiles, *, samples: int) -> _SlideContents:
    """Contents of one slide, whose embeddings are read and checked once; `samples` tiles of it.

    Memory: some blocks of BLOCK_VALUES values.
    """
    slide, place, tiles = named
    num_tiles, dim = tiles.shape
    digest = _ContentDigest()
    sampled = spread_rows(num_tiles, samples)
    total, direction = np.zeros(dim), np.zeros(dim)
    read_samples = []
    is_zero = True
    first = 0
    for block in _blocks(tiles):
        digest.update(block)
        is_zero = is_zero and not block.any()
        x = block.astype(np.float64)
        direction += sum_of_directions(x)
        rows = sampled[np.searchsorted(sampled, first) :]
        read_samples.append(x[rows[rows < first + len(x)] - first])
        total = added_in_order(total, x)
        first += len(x)
    return _SlideContents(
        slide=slide,
        place=place,
        digest=digest.of(tiles),
        mean=total / num_tiles,
        num_tiles=num_tiles,
        direction=direction / num_tiles,
        sampled_tiles=directions(np.concatenate(read_samples)).astype(np.float16),
        is_zero=is_zero,
    )


def content_digest(tiles: Reals | EmbeddingRows) -> str:
    """Hash of embeddings (N, D); float32 values and the same values in float16 have one hash.

    Memory: one block of BLOCK_VALUES values, three times. Rows on disk are read as by
    `EmbeddingRows.checked_blocks`.
    """
    digest = _ContentDigest()
    for block in _blocks(tiles):
        digest.update(block)
    return digest.of(tiles)


class _ContentDigest:
    """The hash of `content_digest`, of embeddings that come in blocks."""

    def __init__(self) -> None:
        self._of_halves = hashlib.sha256()
        self._largest = 0

    def update(self, block: Reals) -> None:
        """Adds the next rows."""
        half, largest = _halved(block)
        self._largest = max(self._largest, largest)
        self._of_halves.update(half.data)

    def of(self, tiles: Reals | EmbeddingRows) -> str:
        """Hash of the rows that were added; all are read again if they do not fit into float16."""
        if _fits_half(self._largest):
            return self._of_halves.hexdigest()
        digest = hashlib.sha256()
        for block in _blocks(tiles):
            digest.update(np.ascontiguousarray(block, dtype=np.float32).data)
        return digest.hexdigest()


def rounded(x: Reals) -> Reals:
    """Values rounded to float16; unchanged in float32 if they do not fit into float16."""
    half, largest = _halved(x)
    return half if _fits_half(largest) else np.ascontiguousarray(x, dtype=np.float32)


def _halved(x: Reals) -> tuple[npt.NDArray[np.float16], int]:
    """Values rounded to float16, without -0, and the bits of the largest magnitude."""
    half = _as_half(x)
    # bits without the sign have the order of the values; arithmetic in float16 is slow on a CPU
    bits = half.view(np.uint16)
    largest = int((bits & _MAGNITUDE).max(initial=0))
    bits[bits == _MINUS_ZERO] = 0
    return half, largest


def _as_half(x: Reals) -> npt.NDArray[np.float16]:
    """Values in float16, as an array of its own.

    NumPy's conversion takes as long as all else that is read of a slide. That of PyTorch gives the
    same bits in a tenth of the time, where PyTorch is loaded already.
    """
    # a module that is being imported by another thread may lack the function
    from_numpy = getattr(sys.modules.get("torch"), "from_numpy", None)
    # `carray`: contiguous, aligned and writeable
    if from_numpy is not None and x.dtype == np.float32 and x.flags.carray:
        # PyTorch refuses some strides even where an axis has one entry, so it gets a flat array
        half: npt.NDArray[np.float16] = from_numpy(x.reshape(-1)).half().numpy()
        return half.reshape(x.shape)
    with np.errstate(over="ignore"):
        return x.astype(np.float16, order="C")


def _fits_half(largest: int) -> bool:
    """True if values whose largest magnitude has these bits fit into float16."""
    return bool(_LEAST_LARGEST <= largest < _INFINITE)


def _blocks(tiles: Reals | EmbeddingRows) -> Iterator[Reals]:
    """Blocks of at most BLOCK_VALUES values, or of one row; a file is checked while it is read."""
    num_rows = max(1, BLOCK_VALUES // max(1, tiles.shape[1]))
    if isinstance(tiles, EmbeddingRows):
        yield from tiles.checked_blocks(num_rows)
        return
    for start in range(0, len(tiles), num_rows):
        yield tiles[start : start + num_rows]


def check_copies(
    cohort: Cohort, parts: Sequence[FoldCases], contents: Contents, *, allowed: bool
) -> list[str]:
    """Warnings on test slides that are copies of training slides.

    Memory: 8 KiB a slide; the time grows with the slides where their embeddings are equal.

    Raises DatasetError: a test slide has the embeddings of a training slide, without `allowed`.
    """
    case_of = np.repeat(np.arange(len(cohort.cases)), [len(s) for s in cohort.slides])
    names = [*chain.from_iterable(cohort.slides)]
    folds = [([*part.train, *part.stop], part.test) for part in parts]
    slides_by_digest = defaultdict[str, list[int]](list)
    for slide, digest in enumerate(contents.digests):
        slides_by_digest[digest].append(slide)
    num_equal, equal = crossing_equals(
        [*slides_by_digest.values()], sides_of_slides(case_of, folds)
    )
    warnings = []
    if num_equal:
        shown = _listed_pairs(equal, names, num_equal)
        copies = f"{counted(num_equal, 'pair')} equal in float16 ({shown})"
        if not allowed:
            raise DatasetError(
                f"test cases must not have the embeddings of training cases, got {copies}; "
                "remove the copies, give both slides one case_id, or pass allow_leakage=True"
            )
        warnings.append(
            f"training and test set share slides, {copies}: the score is too optimistic"
        )
    # equal slides have one mean; it is compared once with those of other slides
    firsts = [slides[0] for slides in slides_by_digest.values()]
    groups = [*slides_by_digest.values()]
    nearly_equal = sorted(
        (min(i, j), max(i, j))
        for first, second in near_pairs(contents.means, firsts)
        for i, j in product(groups[first], groups[second])
    )
    near = _crossing_pairs(nearly_equal, case_of, folds)
    if near:
        shown = _listed_pairs(near, names, len(near))
        warnings.append(
            f"training and test set have {counted(len(near), 'pair')} of slides with nearly the "
            f"same mean embedding ({shown}): if they show the same tissue, the score is too "
            "optimistic; give both one case_id"
        )
    return warnings


def near_cases(
    vectors: Embeddings, ids: Sequence[str], folds: Sequence[CaseFold]
) -> str:
    """Text to append to a sentence: pairs of a training and a test case with nearly equal vectors.

    It begins with '; '. It is '' if there are no such pairs.
    """
    near = _crossing_pairs(near_pairs(vectors), np.arange(len(ids)), folds)
    if not near:
        return ""
    shown = _listed_pairs(near, ids, len(near))
    return f"; {counted(len(near), 'pair')} of cases with nearly the same mean embedding ({shown})"


def _listed_pairs(
    pairs: Sequence[tuple[int, int]], names: Sequence[str], count: int
) -> str:
    """The names of the first three of `count` pairs, and dots if there are more."""
    shown = [f"{names[i]!r} and {names[j]!r}" for i, j in pairs[:_SHOWN_PAIRS]]
    return listed_names([*shown, *[""] * (count - len(shown))])


def sides_of_slides(
    case_of: IndexArray, folds: Sequence[CaseFold]
) -> list[tuple[int, ...]]:
    """Side of each slide in each fold: 1 in the training set, -1 in the test set, else 0."""
    sides = np.zeros((int(case_of.max(initial=0)) + 1, len(folds)), dtype=np.int8)
    for number, (train, test) in enumerate(folds):
        sides[np.asarray(train, dtype=np.int64), number] = 1
        sides[np.asarray(test, dtype=np.int64), number] = -1
    return [tuple(row) for row in sides[case_of].tolist()]


def crossing_equals(
    groups: Sequence[Sequence[int]], sides: Sequence[tuple[int, ...]]
) -> tuple[int, list[tuple[int, int]]]:
    """Number of pairs of equal slides of which a fold trains on one and tests on the other.

    Also the first of these pairs. The slides of a group are counted by their sides, so that no pair
    is made for it.
    """
    num_pairs = 0
    first_pairs: list[tuple[int, int]] = []
    for slides in groups:
        earlier = defaultdict[tuple[int, ...], list[int]](list)
        for slide in slides if len(slides) > 1 else ():
            crossing = []
            for side, others in earlier.items():
                if any(a * b < 0 for a, b in zip(side, sides[slide], strict=True)):
                    num_pairs += len(others)
                    crossing += others[:_SHOWN_PAIRS]
            room = _SHOWN_PAIRS - len(first_pairs)
            first_pairs += [(other, slide) for other in sorted(crossing)[:room]]
            earlier[sides[slide]].append(slide)
    return num_pairs, first_pairs


def _crossing_pairs(
    pairs: Sequence[tuple[int, int]], case_of: IndexArray, folds: Sequence[CaseFold]
) -> list[tuple[int, int]]:
    """Pairs of which one slide is in the training set of a fold and the other in its test set."""
    if not pairs:
        return []
    first, second = case_of[np.array(pairs)].T
    crossed = np.zeros(len(pairs), dtype=bool)
    for train, test in folds:
        trains = np.zeros(int(case_of.max()) + 1, dtype=bool)
        trains[np.asarray(train, dtype=np.int64)] = True
        tests = np.zeros_like(trains)
        tests[np.asarray(test, dtype=np.int64)] = True
        crossed |= trains[first] & tests[second]
        crossed |= tests[first] & trains[second]
    return [pair for pair, crosses in zip(pairs, crossed, strict=True) if crosses]


def near_pairs(
    means: Reals, rows: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """Pairs of rows (n, D) that nearly coincide, after the mean of all rows is subtracted.

    With `rows`, pairs of places in it; other rows count for the mean only. The limit is the
    distance of two rows of equal length whose cosine is NEAR_COSINE.

    Memory: 8 KiB a row.
    """
    z = means - means.mean(axis=0)
    if rows is not None:
        z = z[rows]
    squares = (z**2).sum(axis=1)
    pairs = list[tuple[int, int]]()
    for start in range(0, len(z), _BLOCK):
        block_squares = squares[start : start + _BLOCK, None]
        distances = block_squares + squares - 2 * (z[start : start + _BLOCK] @ z.T)
        limit = 2 * (1 - NEAR_COSINE) * np.minimum(block_squares, squares)
        lines, columns = np.nonzero(distances <= limit)
        for i, j in zip((lines + start).tolist(), columns.tolist(), strict=True):
            if i < j:
                pairs.append((i, j))
    return pairs


def sketches(means: Reals, center: Reals) -> tuple[str, ...]:
    """Signs of mean embeddings (n, D) along 256 random directions, as hex text.

    Sketches of nearly equal embeddings differ in few bits.

    Source: Charikar, "Similarity estimation techniques from rounding algorithms", 2002.
    """
    # RandomState: its stream is frozen for ever, and a model file outlives a release of NumPy
    random_directions = np.random.RandomState(0).standard_normal(
        (SKETCH_BITS, len(center))
    )
    signs = (np.asarray(means, np.float64) - center) @ random_directions.T > 0
    return tuple(row.tobytes().hex() for row in np.packbits(signs, axis=1))


def near_limit(trained: Sequence[str]) -> int:
    """Number of bits by which a sketch may differ from one of `trained` and still count as near.

    It is at most SKETCH_NEAR. It is smaller if training slides are so similar to each other that
    chance alone gives near sketches (`copies.chance_level`), as with few channels or with variance
    in few directions. Below 0 no sketch is near.

    Memory: 16 MAX_SKETCHES² bytes.
    """
    if not trained:
        return -1
    sample = [trained[row] for row in spread_rows(len(trained), MAX_SKETCHES)]
    bits = np.array(
        [np.unpackbits(np.frombuffer(bytes.fromhex(x), "u1")) for x in sample]
    )
    signs = 2.0 * bits - 1
    # the share of equal signs of two vectors is 1 - angle / pi
    angles = np.pi * (1 - signs @ signs.T / SKETCH_BITS) / 2
    level = chance_level(np.cos(angles), np.arange(len(sample)))
    differing = np.arange(SKETCH_NEAR + 1)
    return int((np.cos(np.pi * differing / SKETCH_BITS) > level).sum()) - 1


def is_near(first: str, others: Sequence[str], limit: int) -> bool:
    """True if a sketch differs from one of the others in at most `limit` bits (`near_limit`)."""
    bits = int(first, 16)
    return any((bits ^ int(other, 16)).bit_count() <= limit for other in others)


def check_leakage(
    parts: Sequence[tuple[Rows, Rows]], name: str, *, allowed: bool, rows: str = "rows"
) -> str:
    """Sentence on patients, slides and rows that both sets share, in the first fold with any.

    Memory: 24 N bytes, and the rows whose sums are equal.

    Raises DatasetError: the sets share patients, slides or identical rows, without `allowed`.
    """
    for train, val in parts:
        shared = train.groups.shared(val.groups) if train.groups and val.groups else {}
        shared[f"identical {rows}"] = [val.ids[i] for i in identical_rows(train, val)]
        leaks = ", ".join(
            f"{len(ids)} {kind} ({listed_names([*map(repr, ids)])})"
            for kind, ids in shared.items()
            if ids
        )
        if leaks and not allowed:
            raise DatasetError(
                "training and validation set must not share a patient, slide or row, got "
                f"{leaks} in {name!r}; split by patient, or pass allow_leakage=True"
            )
        if leaks:
            return (
                f"training and validation set share {leaks}: the score is too optimistic; "
                "--allow-leakage accepts this"
            )
    units = {train.groups.unit if train.groups else None for train, _ in parts}
    if None in units:
        unknown = "their patients and slides are unknown (no case_id, no slide_id)"
        return f"training and validation set share no identical {rows}; {unknown}"
    words = " or ".join(map(str, units))
    return f"training and validation set share no {words} and no identical {rows}"


def identical_rows(train: Rows, val: Rows) -> IndexArray:
    """Rows of `val` whose embeddings also occur in `train`, after rounding to float16."""
    rounded_rows = [rounded(part.embeddings) for part in (train, val)]
    if rounded_rows[0].dtype != rounded_rows[1].dtype:
        rounded_rows = [np.asarray(part.embeddings) for part in (train, val)]
    sums = [rows.sum(axis=1, dtype=np.float64) for rows in rounded_rows]
    candidates_in_train = np.flatnonzero(np.isin(sums[0], sums[1]))
    candidates_in_val = np.flatnonzero(np.isin(sums[1], sums[0]))
    train_bytes = {rounded_rows[0][row].tobytes() for row in candidates_in_train}
    copies = [
        row
        for row in candidates_in_val
        if rounded_rows[1][row].tobytes() in train_bytes
    ]
    return np.array(copies, dtype=np.int64)
