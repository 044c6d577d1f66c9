"""Labels of tiles by region: polygons drawn on slides (GeoJSON, as QuPath writes it) or a table.

A tile takes the class of the polygon that holds its centre; tiles of no polygon are left out.
Coordinates are level-0 px.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import DatasetError
from thinsection.probe.data.files import SlideTiles, read_slide_tiles
from thinsection.probe.data.sets import TileSet, make_split
from thinsection.probe.data.tables import (
    FOLDS,
    TABLE_SUFFIXES,
    TEST,
    encode_labels,
    read_rows,
    split_fold,
    split_name,
)
from thinsection.probe.statistics import Fold, grouped_folds, stratified_folds

Ring = npt.NDArray[np.float64]  # (M, 2), x and y in level-0 px
Picked = tuple[list[int], list[str], list[str | None]]  # rows, labels, splits


@dataclass(frozen=True, slots=True)
class LabelledRegion:
    """One labelled polygon.

    Attributes:
        label: name of its class.
        slide_id: whose slide; None where there is only one.
        split: 'train', 'val', or None.
        rings: outer rings and holes together: a point inside an odd number of them is inside.
    """

    label: str
    slide_id: str | None
    split: str | None
    rings: tuple[Ring, ...]

    def holds(self, points: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        """Which points (N, 2) lie inside, by the even-odd rule.

        Memory: O(N).
        """
        inside = np.zeros(len(points), dtype=bool)
        x, y = points[:, 0], points[:, 1]
        for ring in self.rings:
            for (x0, y0), (x1, y1) in zip(ring, np.roll(ring, -1, axis=0), strict=True):
                if y0 == y1:
                    continue
                spans = (y0 <= y) != (y1 <= y)
                inside ^= spans & (x < x0 + (y - y0) * (x1 - x0) / (y1 - y0))
        return inside


def read_regions(path: Path) -> list[LabelledRegion]:
    """Labelled polygons of a GeoJSON file; the label is QuPath's classification name.

    Raises:
        DatasetError: not GeoJSON, a feature without label, or not a polygon.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DatasetError(f"labels must be GeoJSON, got {str(path)!r}: {error}") from error
    features = document.get("features") if isinstance(document, dict) else document
    if not isinstance(features, list) or not features:
        raise DatasetError(f"labels must be a FeatureCollection with features, got {str(path)!r}")
    return [_region(feature, i, path) for i, feature in enumerate(features)]


def _region(feature: Any, number: int, path: Path) -> LabelledRegion:
    properties = feature.get("properties") or {}
    geometry = feature.get("geometry") or {}
    classification = properties.get("classification") or {}
    label = properties.get("label") or classification.get("name") or properties.get("name")
    kind = geometry.get("type")
    if not label or kind not in ("Polygon", "MultiPolygon"):
        raise DatasetError(
            f"each feature must be a labelled Polygon or MultiPolygon, got {kind!r} with label "
            f"{label!r} as feature {number} in {str(path)!r}; name a class in QuPath or set "
            "properties.classification.name"
        )
    polygons = [geometry["coordinates"]] if kind == "Polygon" else geometry["coordinates"]
    rings = tuple(
        np.asarray(ring, dtype=np.float64)[:, :2] for polygon in polygons for ring in polygon
    )
    split = properties.get("split")
    return LabelledRegion(
        label=str(label),
        slide_id=properties.get("slide_id"),
        split=None if split is None else split_name(str(split), str(path)),
        rings=rings,
    )


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
    pick = _Table(labels) if labels.suffix.lower() in TABLE_SUFFIXES else _Polygons(labels)
    vectors, texts, splits, slides, ids = [], [], [], [], []
    seen: list[str] = []
    encoders: set[tuple[str | None, int]] = set()  # name and width
    for path in tile_files:
        slide = read_slide_tiles(path)
        rows, row_labels, row_splits = pick(slide, alone=len(tile_files) == 1)
        vectors.append(slide.embeddings[rows])
        texts += row_labels
        splits += row_splits
        slides += [slide.slide_id] * len(rows)
        ids += [f"{slide.slide_id}:{x}x{y}" for x, y in slide.coords_l0[rows].tolist()]
        seen.append(slide.slide_id)
        encoders.add((slide.encoder, slide.embeddings.shape[1]))
    _check_slides(pick.named, seen, labels)
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
    tiles = make_split(np.concatenate(vectors), codes, ids)
    facts: dict[str, Any] = {"split_rule": rule, "labels": labels.name, "slides": len(set(slides))}
    encoder, _ = encoders.pop()
    if encoder is not None:
        facts["encoder"] = encoder
    return TileSet.folded(tiles, fold, name=labels.stem, class_names=names, facts=facts)


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
        return split_fold(splits, "the labels"), "split of the labels"
    if len(set(slides)) >= FOLDS:
        rule = f"fold 0 of {FOLDS} over slides, seed {seed}"
        return grouped_folds(codes, slides, folds=FOLDS, seed=seed)[0], rule
    rule = (
        f"stratified fold 0 of {FOLDS} over tiles, seed {seed}: train and validation tiles share "
        "slides and neighbours, so the score flatters"
    )
    return stratified_folds(codes, folds=FOLDS, seed=seed, class_names=names)[0], rule


def _check_slides(named: set[str], slide_ids: Sequence[str], labels: Path) -> None:
    """Raises DatasetError where the labels name a slide that is not there."""
    unknown = named - set(slide_ids)
    if unknown:
        raise DatasetError(
            f"slide_id must name a slide of the data ({', '.join(slide_ids[:5])}), got "
            f"{', '.join(sorted(map(repr, unknown)))} in {str(labels)!r}"
        )


class _Polygons:
    """Labels from GeoJSON.

    Attributes:
        named: ids of the slides that the labels name.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._regions = path, read_regions(path)
        self.named = {r.slide_id for r in self._regions if r.slide_id}

    def __call__(self, slide: SlideTiles, *, alone: bool) -> Picked:
        centres = slide.coords_l0.astype(np.float64) + slide.tile_px_l0 / 2
        chosen: dict[int, LabelledRegion] = {}
        for region in self._regions:
            if region.slide_id is None and not alone:
                raise DatasetError(
                    f"each region must have the property 'slide_id' where there are several "
                    f"slides, got one without in {str(self._path)!r}"
                )
            if region.slide_id not in (None, slide.slide_id) or region.split == TEST:
                continue
            for i in np.flatnonzero(region.holds(centres)).tolist():
                other = chosen.setdefault(i, region)
                if (other.label, other.split) != (region.label, region.split):
                    raise DatasetError(
                        f"a tile must lie in one class and split, got {other.label!r} and "
                        f"{region.label!r} at {slide.coords_l0[i].tolist()} in {slide.slide_id!r}"
                    )
        rows = sorted(chosen)
        return rows, [chosen[i].label for i in rows], [chosen[i].split for i in rows]


class _Table:
    """Labels from a table: slide_id, x, y, label[, split]; attributes as of `_Polygons`."""

    def __init__(self, path: Path) -> None:
        self._by_slide: dict[str, dict[tuple[int, int], tuple[str, str | None]]] = {}
        for row in read_rows(path, ("slide_id", "x", "y", "label")):
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
        self.named = set(self._by_slide)

    def __call__(self, slide: SlideTiles, *, alone: bool) -> Picked:
        del alone  # every row names its slide
        wanted = self._by_slide.get(slide.slide_id, {})
        places = [(x, y) for x, y in slide.coords_l0.tolist()]
        absent = sorted(set(wanted) - set(places))
        if absent:
            x, y = absent[0]
            raise DatasetError(
                f"each labelled tile must be in the tile file, got none at {x}, {y} "
                f"({len(absent)} missing) in {slide.slide_id!r}"
            )
        rows = [i for i, place in enumerate(places) if place in wanted]
        found = [wanted[places[i]] for i in rows]
        return rows, [label for label, _ in found], [split for _, split in found]
