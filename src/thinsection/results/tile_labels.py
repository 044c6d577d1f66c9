"""Tiles that a dataset of tiles has, and their labels: of slides, of a column, or of a function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeGuard, cast

import numpy as np
import numpy.typing as npt

from thinsection.config import nearest
from thinsection.errors import InvalidInputError
from thinsection.results.folder import Listener, Results
from thinsection.results.label_tables import LabelTable, is_table, labels_of_table
from thinsection.results.tiled_slide import TiledSlide, tiled_slides
from thinsection.store.tiles_h5 import TilesFile
from thinsection.tiles.order import Numbers
from thinsection.types import Floats, counted, is_missing_value, shortened

Values = npt.NDArray[np.generic]  # (n,), a value per tile
# gets a slide id and the tiles of the slide; returns a label per tile, (N,)
TileLabels: TypeAlias = Callable[[str, TilesFile], object]
Labels: TypeAlias = Mapping[str, object] | str | TileLabels


@dataclass(frozen=True, kw_only=True, eq=False)
class ChosenTiles:
    """A slide, and those of its tiles that a dataset has.

    Attributes:
        slide: the slide with its tile grid.
        rows: int64 (n,), ascending rows of the tile table; None for all of them.
        label: label of all tiles; None if there are none, or if each tile has its own.
        labels: label of each tile, (n,); None if there are none, or one for the slide.
    """

    slide: TiledSlide
    rows: Numbers | None = None
    label: object = None
    labels: Values | None = None

    @property
    def slide_id(self) -> str:
        """Id of the slide."""
        return self.slide.entry.slide_id

    def __len__(self) -> int:
        return self.slide.num_tiles if self.rows is None else len(self.rows)

    def table_rows(self, places: Numbers) -> Numbers:
        """Rows in the tile table of the tiles with these numbers, counted from 0 to n - 1."""
        return places if self.rows is None else self.rows[places]

    def label_of(self, place: int) -> object:
        """Label of a tile by its number; None without labels."""
        if self.labels is None:
            return self.label
        value = self.labels[place]
        # words and truth values as plain Python values, which PyTorch can collate
        return value.item() if value.dtype.kind in "Ub" else value


def choose_tiles(
    results: Results,
    *,
    grid: str | None,
    slide_ids: Sequence[str] | None,
    labels: Labels | LabelTable | None,
    label: str | None,
    classes: Sequence[object] | None,
    on_message: Listener,
) -> list[ChosenTiles]:
    """Chooses the slides and tiles that were asked for and have a label.

    Args:
        results: an opened results folder.
        grid: tile grid, as in `Results.choose_grid`.
        slide_ids: slides to use; None means all.
        labels: label of each slide by its id, name of a column, or function; or a table.
        label: column of the table `labels`.
        classes: labels to use; a label becomes its index among them. None keeps labels as they are.
        on_message: takes a line for each slide that is left out, and one with the number of tiles
            without a label.

    Memory: 8 bytes for each tile with a label of its own, and 8 for the label, if tiles are left
    out; words take 4 bytes for each letter of the longest.

    Raises:
        InvalidInputError: no such grid, slide or column; labels of another length; no tiles.
    """
    if classes is not None and labels is None:
        raise InvalidInputError(
            f"classes must go with labels, got {list(classes)} alone; pass labels=... too"
        )
    address = results.choose_grid(grid)
    if slide_ids is not None:
        ledgers = {slide_id: results.ledger(slide_id) for slide_id in slide_ids}
        results = replace(results, ledgers=ledgers)
    if is_table(labels, label):
        read = labels_of_table(labels, label, results.ledgers, classes=classes)
        if read.line:
            on_message(read.line)
        own_labels: Labels | None = read.labels
    else:
        own_labels = cast("Labels | None", labels)
    if _is_of_slides(own_labels):
        ledgers = {
            slide_id: ledger
            for slide_id, ledger in results.ledgers.items()
            if slide_id in own_labels
        }
        named = list(map(str, own_labels.keys()))  # of a mapping or a pandas Series
        unknown = [name for name in named if name not in results.ledgers]
        left = [name for name in results.ledgers if name not in ledgers]
        if unknown and left:
            on_message(
                f"{counted(len(left), 'slide')} of {len(results.ledgers)} left out, without a "
                f"label: {shortened(left)}; labels name other slides: {shortened(unknown)}"
            )
        results = replace(results, ledgers=ledgers)
    chosen = []
    num_tiles = 0
    others: set[object] = set()  # labels that are no class
    for slide in tiled_slides(results, address, on_message):
        tiles = _labelled(slide, results, address, own_labels)
        if classes is not None:
            if len(tiles):
                others |= set(_distinct(tiles)[0]) - set(classes)
            tiles = _classified(tiles, classes)
        num_tiles += slide.num_tiles
        if len(tiles):
            chosen.append(tiles)
    num_chosen = sum(map(len, chosen))
    if labels is not None and num_chosen < num_tiles:
        reason = "without a label"
        if classes is not None:
            reason = "whose label is no class"
            if others:
                reason += f": {shortened(sorted(map(str, others)))}"
        on_message(
            f"{num_tiles - num_chosen:,} of {num_tiles:,} tiles left out, {reason}"
        )
    if not chosen:
        raise InvalidInputError(
            f"slides must have tiles of grid {address}, got none in "
            f"{str(results.folder)!r}; check slides and labels"
        )
    return chosen


def count_labels(
    chosen: Sequence[ChosenTiles], classes: Sequence[object] | None
) -> dict[object, int]:
    """Number of tiles of each label, in the order of `classes`, or else of the labels."""
    counts: Counter[object] = Counter()
    for tiles in chosen:
        values, numbers = _distinct(tiles)
        counts.update(dict(zip(values, numbers.tolist(), strict=True)))
    if classes is not None:
        return {name: counts[index] for index, name in enumerate(classes)}
    try:
        ordered = sorted(counts)  # type: ignore[type-var]
    except TypeError:  # labels of several types keep the order in which they come
        ordered = list(counts)
    return {value: counts[value] for value in ordered}


def balanced_weights(chosen: Sequence[ChosenTiles], *, by_slide: bool) -> Floats:
    """Weights per tile with which each class is drawn equally often.

    With `by_slide`, the slides of a class are drawn equally often too. Without labels all tiles are
    of one class.

    Returns:
        float64 (N,) with a mean of 1, in the order of the slides and their tiles.

    Raises:
        InvalidInputError: labels are numbers that measure, not classes.
    """
    counts: Counter[object] = Counter()  # tiles by class
    slides: Counter[object] = Counter()  # slides by class
    for tiles in chosen:
        values, numbers = _distinct(tiles)
        for value, number in zip(values, numbers.tolist(), strict=True):
            if isinstance(value, float) and not value.is_integer():
                raise InvalidInputError(
                    f"labels must be classes for weights, got {value!r} in {tiles.slide_id!r}; "
                    "pass labels that are words or whole numbers"
                )
            counts[value] += number
            slides[value] += 1
    num_tiles = sum(counts.values())
    weights = np.empty(num_tiles, np.float64)
    start = 0
    for tiles in chosen:
        values, numbers = _distinct(tiles)
        by_value = []
        for value, number in zip(values, numbers.tolist(), strict=True):
            num_equal = number * slides[value] if by_slide else counts[value]
            by_value.append(num_tiles / (len(counts) * num_equal))
        weights[start : start + len(tiles)] = by_value[0]
        if tiles.labels is not None:
            _, codes = np.unique(tiles.labels, return_inverse=True)
            weights[start : start + len(tiles)] = np.array(by_value)[codes]
        start += len(tiles)
    return weights


def _distinct(tiles: ChosenTiles) -> tuple[list[object], Numbers]:
    """Different labels of a slide's tiles as plain values, and the number of tiles of each."""
    if tiles.labels is None:
        return [tiles.label], np.array([len(tiles)])
    values, numbers = np.unique(tiles.labels, return_counts=True)
    return values.tolist(), numbers


def _labelled(
    slide: TiledSlide, results: Results, grid: str, labels: Labels | None
) -> ChosenTiles:
    """A slide with the labels of its tiles; tiles without a label are left out."""
    slide_id = slide.entry.slide_id
    if labels is None:
        return ChosenTiles(slide=slide)
    if _is_of_slides(labels):
        if _is_missing(labels[slide_id]):
            return ChosenTiles(slide=slide, rows=np.empty(0, np.int64))
        return ChosenTiles(slide=slide, label=labels[slide_id])
    tiles = results.tiles(slide_id, grid)
    if callable(labels):
        return _with_labels(slide, labels(slide_id, tiles))
    name = str(labels)
    if name not in tiles.columns:
        known = tuple(tiles.columns)
        raise InvalidInputError(
            f"labels must be a column of the tiles, got {name!r}{nearest(name, known)} in "
            f"{slide_id!r}; it has {', '.join(known) or 'none'}"
        )
    return _with_labels(slide, tiles.values(name))


def _with_labels(slide: TiledSlide, labels: object) -> ChosenTiles:
    """A slide with a label for each tile, some of which may be missing.

    Raises InvalidInputError: other than (N,) values, or numbers among words.
    """
    slide_id = slide.entry.slide_id
    values = np.asarray(labels)
    if values.shape != (slide.num_tiles,):
        raise InvalidInputError(
            f"labels must have one value for each tile, ({slide.num_tiles},), got "
            f"{values.shape} in {slide_id!r}"
        )
    if values.dtype.kind == "f":
        is_missing = np.isnan(values)
    elif values.dtype.kind in "OU":
        is_missing = np.array([_is_missing(value) for value in values.tolist()], bool)
    else:
        is_missing = np.zeros(len(values), bool)
    rows = np.flatnonzero(~is_missing)
    values = values[rows]
    if values.dtype.kind == "O":
        are_words = {isinstance(value, str) for value in values.tolist()}
        if len(are_words) > 1:
            raise InvalidInputError(
                f"labels must be all words or all numbers, got both in {slide_id!r}"
            )
        values = np.array(values.tolist())
    if values.dtype.kind in "iu":
        values = values.astype(np.int64)  # the type of PyTorch's losses
    if values.dtype.kind not in "iufbU" and len(values):
        raise InvalidInputError(
            f"labels must be words or numbers, got {values.dtype} in {slide_id!r}"
        )
    return ChosenTiles(
        slide=slide, rows=rows if is_missing.any() else None, labels=values
    )


def _is_of_slides(labels: Labels | None) -> TypeGuard[Mapping[str, object]]:
    """True for a mapping, or anything that is indexed like one, such as a pandas Series."""
    return labels is not None and not isinstance(labels, str) and not callable(labels)


def _is_missing(label: object) -> bool:
    """True for '' and what `is_missing_value` names."""
    return label == "" if isinstance(label, str) else is_missing_value(label)


def _classified(tiles: ChosenTiles, classes: Sequence[object]) -> ChosenTiles:
    """The same tiles with the index of their label among the classes; others are left out."""
    names = list(classes)
    if tiles.labels is None:
        if len(tiles) == 0 or tiles.label not in names:
            return replace(tiles, rows=np.empty(0, np.int64), label=None)
        return replace(tiles, label=names.index(tiles.label))
    values, codes = np.unique(tiles.labels, return_inverse=True)
    indices = np.array(
        [names.index(value) if value in names else -1 for value in values.tolist()],
        np.int64,
    )
    labels = indices[codes] if len(values) else np.empty(0, np.int64)
    kept = np.flatnonzero(labels >= 0)
    if len(kept) == len(tiles):
        return replace(tiles, labels=labels)
    return replace(tiles, rows=tiles.table_rows(kept), labels=labels[kept])


def label_words(counts: Mapping[object, int]) -> str:
    """Labels with their number of tiles in short: '2 labels: 0 (120), 1 (35)'."""
    shown = [f"{label} ({number:,})" for label, number in [*counts.items()][:5]]
    more = ", ..." if len(counts) > 5 else ""
    return f"{counted(len(counts), 'label')}: {', '.join(shown)}{more}"
