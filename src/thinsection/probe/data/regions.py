"""Labels of tiles by region: polygons drawn on slides (GeoJSON, as QuPath writes it) or a table.

A tile takes the class of the polygon that holds its centre; tiles of no polygon are left out.
Coordinates are level-0 px.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from thinsection.errors import DatasetError
from thinsection.probe.data import files
from thinsection.probe.data.files import FOLDS, TEST
from thinsection.probe.data.sets import Embeddings, LabelledRows, Labels
from thinsection.probe.statistics import Fold, grouped_folds, stratified_folds
from thinsection.store.tiles_h5 import TilesFile, read_tiles
from thinsection.types import CoordsL0

Ring = npt.NDArray[np.float64]  # (M, 2), x and y in level-0 px
Labelled = tuple[str, str | None]  # label and split of a tile
Places = dict[tuple[int, int], Labelled]  # by top-left corner, level-0 px
Picked = dict[int, Labelled]  # by row of the tiles file


@dataclass(frozen=True, slots=True)
class LabelledRegion:
    """One labelled polygon."""

    label: str
    slide_id: str | None  # None where there is only one slide
    split: str | None  # 'train', 'val', 'test'
    rings: tuple[Ring, ...]  # outer rings and holes: inside is inside an odd number of them

    def holds(self, points: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        """Which points (N, 2) lie inside, by the even-odd rule. Memory: O(N)."""
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
    """Labelled polygons of a GeoJSON file; the label is QuPath's classification name."""
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
    rings = [np.asarray(ring, dtype=np.float64)[:, :2] for polygon in polygons for ring in polygon]
    split = properties.get("split")
    split = None if split is None else files.split_name(str(split), str(path))
    return LabelledRegion(str(label), properties.get("slide_id"), split, tuple(rings))


def load_regions(tile_files: Sequence[Path], labels: Path, *, seed: int = 1337) -> LabelledRows:
    """The labelled tiles of the slides, and how they are split for a probe.

    A `split` property or column decides; without it one of three folds validates: over slides
    where there are at least three with labels, else over tiles (neighbours of validation tiles are
    then trained on, and the facts say so).

    Memory: 8 N D for N labelled tiles; one slide's file.

    Raises:
        DatasetError: a region names no slide, a tile lies in regions of two classes or splits,
            fewer than two classes have tiles, or the slides come from several encoders.
    """
    slides = _labelled_tiles(tile_files, labels)
    encoders = {(s.encoder, s.embeddings.shape[1]) for s in slides}
    if len(encoders) > 1:
        mixed = ", ".join(sorted(f"{name or 'unnamed'} ({dim}-d)" for name, dim in encoders))
        raise DatasetError(f"slides must come from one encoder, got {mixed}; probe them apart")
    texts = [label for s in slides for label, _ in s.labels]
    if len(set(texts)) < 2:
        raise DatasetError(
            f"labels must put tiles into at least two classes, got {sorted(set(texts))} for "
            f"{len(texts)} tiles of {len(slides)} slides in {str(labels)!r}"
        )
    names, codes = files.encode_labels(texts, str(labels))
    of_slide = [s.name for s in slides for _ in s.labels]
    splits = [split for s in slides for _, split in s.labels]
    fold, rule = _fold(codes, names, splits, of_slide, seed=seed)
    facts: dict[str, Any] = {"split_rule": rule, "labels": labels.name}
    facts["slides"] = len(set(of_slide))
    if slides[0].encoder is not None:
        facts["encoder"] = slides[0].encoder
    ids = [f"{s.name}:{x}x{y}" for s in slides for x, y in s.coords_l0.tolist()]
    vectors = np.concatenate([s.embeddings for s in slides])
    return LabelledRows(labels.stem, names, codes, fold, facts, vectors, ids)


class _SlideTiles(NamedTuple):
    """The labelled tiles of one slide."""

    name: str
    encoder: str | None
    coords_l0: CoordsL0
    embeddings: Embeddings
    labels: list[Labelled]


def _labelled_tiles(tile_files: Sequence[Path], labels: Path) -> list[_SlideTiles]:
    """Of each file the tiles that the table, or the regions, give a label."""
    is_table = labels.suffix.lower() in files.TABLE_SUFFIXES
    table = _read_table(labels) if is_table else {}
    regions = [] if is_table else read_regions(labels)
    if len(tile_files) > 1 and any(region.slide_id is None for region in regions):
        rule = "each region must have the property 'slide_id' where there are several slides"
        raise DatasetError(f"{rule}, got one without in {str(labels)!r}")
    slides = []
    for path in tile_files:
        tiles, features, edge_l0 = _read_tiles(path)
        name, encoder = (_text(tiles.attributes.get(key)) for key in ("name", "encoder"))
        name, coords = name or path.stem, tiles.coords_l0
        by_region = _by_region(regions, coords, edge_l0, name)
        found = _by_place(table.get(name, {}), coords, name) if is_table else by_region
        rows = sorted(found)
        vectors, picked = features[rows].astype(np.float32), [found[row] for row in rows]
        slides.append(_SlideTiles(name, encoder, coords[rows], vectors, picked))
    seen = [s.name for s in slides]
    named = {*table, *(region.slide_id for region in regions if region.slide_id)}
    if unknown := named - set(seen):
        known, got = ", ".join(seen[:5]), ", ".join(sorted(map(repr, unknown)))
        got = f"{got} in {str(labels)!r}"
        raise DatasetError(f"slide_id must name a slide of the data ({known}), got {got}")
    return slides


def _read_tiles(path: Path) -> tuple[TilesFile, npt.NDArray[np.floating], int]:
    """A tiles file, its features, and the edge of a tile in level-0 px."""
    tiles = read_tiles(path)
    if tiles.features is None:
        found = f"only coordinates in {str(path)!r}; run `thinsection embed` first"
        raise DatasetError(f"tiles must have 'features', got {found}")
    if tiles.tile_px_l0 is None:
        found = f"{sorted(tiles.attributes)} in {str(path)!r}"
        raise DatasetError(f"coords must have the attribute 'patch_size_level0', got {found}")
    return tiles, tiles.features, tiles.tile_px_l0


def _text(value: object) -> str | None:
    """An attribute of an HDF5 file."""
    return value.decode() if isinstance(value, bytes) else None if value is None else str(value)


def _fold(
    codes: Labels, names: tuple[str, ...], splits: list[str | None], slides: list[str], *, seed: int
) -> tuple[Fold, str]:
    """Training and validation rows, and the rule in words."""
    if any(splits):
        if not all(splits):
            raise DatasetError("split must be given for every labelled region or tile, or for none")
        return files.split_fold(splits, "the labels"), "split of the labels"
    if len(set(slides)) >= FOLDS:
        rule = f"fold 0 of {FOLDS} over slides, seed {seed}"
        return grouped_folds(codes, slides, folds=FOLDS, seed=seed)[0], rule
    rule = (
        f"stratified fold 0 of {FOLDS} over tiles, seed {seed}: train and validation tiles share "
        "slides and neighbours, so the score flatters"
    )
    return stratified_folds(codes, folds=FOLDS, seed=seed, class_names=names)[0], rule


def _by_region(
    regions: list[LabelledRegion], coords_l0: CoordsL0, edge_l0: int, name: str
) -> Picked:
    centres = coords_l0.astype(np.float64) + edge_l0 / 2
    picked: Picked = {}
    for region in regions:
        if region.slide_id not in (None, name) or region.split == TEST:
            continue
        for i in np.flatnonzero(region.holds(centres)).tolist():
            other = picked.setdefault(i, (region.label, region.split))
            if other != (region.label, region.split):
                both = f"{other[0]!r} and {region.label!r} at {coords_l0[i].tolist()} in {name!r}"
                raise DatasetError(f"a tile must lie in one class and split, got {both}")
    return picked


def _read_table(path: Path) -> dict[str, Places]:
    """Label and split by slide and place, of slide_id, x, y, label[, split]; without test rows."""
    by_slide: dict[str, Places] = {}
    for row in files.read_rows(path, ("slide_id", "x", "y", "label")):
        split = files.split_name(row["split"], str(path)) if row.get("split") else None
        if split == TEST:
            continue
        try:
            place = (int(row["x"]), int(row["y"]))
        except ValueError:
            found = f"{row['x']!r}, {row['y']!r} in {str(path)!r}"
            raise DatasetError(f"x and y must be whole level-0 px, got {found}") from None
        by_slide.setdefault(row["slide_id"], {})[place] = (row["label"], split)
    return by_slide


def _by_place(wanted: Places, coords_l0: CoordsL0, name: str) -> Picked:
    places = [(x, y) for x, y in coords_l0.tolist()]
    if absent := sorted(set(wanted) - set(places)):
        x, y = absent[0]
        found = f"none at {x}, {y} ({len(absent)} missing) in {name!r}"
        raise DatasetError(f"each labelled tile must be in the tile file, got {found}")
    return {i: wanted[place] for i, place in enumerate(places) if place in wanted}
