"""Labels of tiles by region: polygons drawn on slides (GeoJSON, as QuPath writes it) or a CSV.

A tile takes the class of the polygon that holds its centre; tiles of no polygon are left out.
Coordinates are level-0 px.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import DatasetError
from thinsection.probe.embedding_files import TileTable, read_tile_table
from thinsection.probe.examples import TileSet, make_split
from thinsection.probe.polygons import Region, read_regions
from thinsection.probe.splits import Fold, grouped_folds, stratified_folds
from thinsection.probe.tables import TEST, TRAIN, VAL, encode_labels, read_table, split_name

FOLDS = 3


def load_regions(tile_files: Sequence[Path], labels: Path, *, seed: int = 1337) -> TileSet:
    """The labelled tiles of the slides, split for a probe.

    A `split` property or column decides; without it one of three folds validates: over slides
    where there are at least three with labels, else over tiles (neighbours of validation tiles are
    then trained on, and the facts say so).

    Memory: 12 N D for N labelled tiles while they are split, 4 N D after; one slide's file.

    Raises:
        DatasetError: a region names no slide, a tile lies in regions of two classes or splits,
            fewer than two classes have tiles, or the slides come from several encoders.
    """
    pick = _Csv(labels) if labels.suffix.lower() in (".csv", ".tsv") else _Polygons(labels)
    vectors, texts, splits, slides, ids = [], [], [], [], []
    seen: list[str] = []
    encoders: set[tuple[str | None, int]] = set()  # name and width
    for path in tile_files:
        table = read_tile_table(path)
        rows, row_labels, row_splits = pick(table, alone=len(tile_files) == 1)
        vectors.append(table.embeddings[rows])
        texts += row_labels
        splits += row_splits
        slides += [table.slide_id] * len(rows)
        ids += [f"{table.slide_id}:{x}x{y}" for x, y in table.coords_l0[rows].tolist()]
        seen.append(table.slide_id)
        encoders.add((table.encoder, table.embeddings.shape[1]))
    pick.check_slides(seen)
    if len(encoders) > 1:
        mixed = ", ".join(sorted(f"{name or 'unnamed'} ({dim}-d)" for name, dim in encoders))
        raise DatasetError(f"slides must come from one encoder, got {mixed}; probe them apart")
    if len(set(texts)) < 2:
        raise DatasetError(
            f"labels must put tiles into at least two classes, got {sorted(set(texts))} for "
            f"{len(texts)} tiles of {len(seen)} slides in {str(labels)!r}"
        )
    names, codes = encode_labels(texts, str(labels))
    fold, rule = _fold(codes, names, splits=splits, slides=slides, seed=seed)
    x = np.concatenate(vectors)
    train, val = (make_split(x[part], codes[part], [ids[i] for i in part]) for part in fold)
    facts: dict[str, Any] = {"split_rule": rule, "labels": labels.name, "slides": len(set(slides))}
    encoder, _ = encoders.pop()
    if encoder is not None:
        facts["encoder"] = encoder
    return TileSet(name=labels.stem, class_names=names, train=train, val=val, facts=facts)


def _fold(
    codes: npt.NDArray[np.int64],
    names: tuple[str, ...],
    *,
    splits: list[str | None],
    slides: list[str],
    seed: int,
) -> tuple[Fold, str]:
    if any(splits):
        if not all(splits):
            raise DatasetError("split must be given for every labelled region or tile, or for none")
        kinds = np.array(splits)
        fold = (np.flatnonzero(kinds == TRAIN), np.flatnonzero(kinds == VAL))
        if not len(fold[0]) or not len(fold[1]):
            raise DatasetError(
                f"split must leave train and val tiles, got {len(fold[0])} and {len(fold[1])}"
            )
        return fold, "split of the labels"
    if len(set(slides)) >= FOLDS:
        rule = f"fold 0 of {FOLDS} over slides, seed {seed}"
        return grouped_folds(codes, slides, folds=FOLDS, seed=seed)[0], rule
    rule = (
        f"stratified fold 0 of {FOLDS} over tiles, seed {seed}: train and validation tiles share "
        "slides and neighbours, so the score flatters"
    )
    return stratified_folds(codes, folds=FOLDS, seed=seed, class_names=names)[0], rule


Picked = tuple[list[int], list[str], list[str | None]]  # rows, labels, splits


class _Polygons:
    """Labels from GeoJSON."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._regions = read_regions(path)

    def check_slides(self, slide_ids: Sequence[str]) -> None:
        unknown = {r.slide_id for r in self._regions if r.slide_id} - set(slide_ids)
        if unknown:
            raise DatasetError(
                f"slide_id must name a slide of the data ({', '.join(slide_ids[:5])}), got "
                f"{', '.join(sorted(map(repr, unknown)))} in {str(self._path)!r}"
            )

    def __call__(self, table: TileTable, *, alone: bool) -> Picked:
        centres = table.coords_l0.astype(np.float64) + table.tile_px_l0 / 2
        chosen: list[Region | None] = [None] * len(centres)
        for region in self._regions:
            if region.slide_id is None and not alone:
                raise DatasetError(
                    f"each region must have the property 'slide_id' where there are several "
                    f"slides, got one without in {str(self._path)!r}"
                )
            if region.slide_id not in (None, table.slide_id) or region.split == TEST:
                continue
            for i in np.flatnonzero(region.holds(centres)):
                other = chosen[i]
                if other and (other.label, other.split) != (region.label, region.split):
                    raise DatasetError(
                        f"a tile must lie in one class and split, got {other.label!r} and "
                        f"{region.label!r} at {table.coords_l0[i].tolist()} in {table.slide_id!r}"
                    )
                chosen[i] = region
        rows = [i for i, region in enumerate(chosen) if region]
        picked = [region for region in chosen if region]
        return rows, [r.label for r in picked], [r.split for r in picked]


class _Csv:
    """Labels from a table: slide_id, x, y, label[, split]."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._by_slide: dict[str, dict[tuple[int, int], tuple[str, str | None]]] = {}
        for row in read_table(path, ("slide_id", "x", "y", "label")):
            split = split_name(row["split"], str(path)) if row.get("split") else None
            if split == TEST:
                continue
            try:
                place = (int(row["x"]), int(row["y"]))
            except ValueError:
                raise DatasetError(
                    f"x and y must be whole level-0 px, got {row['x']!r}, {row['y']!r} in "
                    f"{str(path)!r}"
                ) from None
            self._by_slide.setdefault(row["slide_id"], {})[place] = (row["label"], split)

    def check_slides(self, slide_ids: Sequence[str]) -> None:
        unknown = set(self._by_slide) - set(slide_ids)
        if unknown:
            raise DatasetError(
                f"slide_id must name a slide of the data ({', '.join(slide_ids[:5])}), got "
                f"{', '.join(sorted(map(repr, unknown)))} in {str(self._path)!r}"
            )

    def __call__(self, table: TileTable, *, alone: bool) -> Picked:
        del alone  # every row names its slide
        wanted = dict(self._by_slide.get(table.slide_id, {}))
        picked = [
            (i, *wanted.pop((x, y)))
            for i, (x, y) in enumerate(table.coords_l0.tolist())
            if (x, y) in wanted
        ]
        if wanted:
            x, y = next(iter(wanted))
            raise DatasetError(
                f"each labelled tile must be in the tile file, got none at {x}, {y} "
                f"({len(wanted)} missing) in {table.slide_id!r}"
            )
        rows, labels, splits = zip(*picked, strict=True) if picked else ((), (), ())
        return list(rows), list(labels), list(splits)
