"""Labels by region: which tiles of a slide lie in a labelled polygon, a listed place or a class.

Labels are polygons (QuPath's GeoJSON), a table of places, or the classes that were drawn before the
run. A tile takes the class of the polygon that holds its centre, level-0 px. Test rows of a table
are never opened.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from thinsection.errors import ConfigError, DatasetError, rewording, slide_boundary
from thinsection.evaluation import embeddings, tables
from thinsection.evaluation.cases import CASE_COLUMNS
from thinsection.evaluation.metrics import Flags, FloatVector
from thinsection.evaluation.tables import TEST, TextRow, split_name
from thinsection.probe.data import sets
from thinsection.probe.data.sets import LabelledRows
from thinsection.slide.annotation_formats import Shape, read_geojson
from thinsection.store.tiles_h5 import TilesFile, read_tiles
from thinsection.tiles.table import Column
from thinsection.types import CoordsL0, Json, counted

CLASS_PREFIX = "class_"  # of columns of the tile table: what was drawn

# (M, 2) each, outer ones and holes; level-0 px
Rings = Sequence[FloatVector]
# rows of labels (label, split where there is one, case_id) by the tile's place, level-0 px
RowsByPlace = dict[tuple[int, int], TextRow]
# rows of labels by the tile's row in the file of embeddings
RowsByTile = Mapping[int, TextRow]


class LabelledRegion(NamedTuple):
    """One labelled polygon."""

    rings: Rings
    row: TextRow  # label, split and case of its tiles
    slide_id: str | None = None  # None where there is only one slide


class LabelledSlide(NamedTuple):
    """The labelled tiles of one slide."""

    name: str
    encoder: str
    rows: Sequence[TextRow]
    vectors: embeddings.Embeddings
    facts: Mapping[str, Json]  # see `encoder_facts`


# a table's places by slide, or regions
Labels = dict[str, RowsByPlace] | list[LabelledRegion]


def load_regions(
    tile_files: Sequence[Path], labels: Path | None, *, seed: int = 1337
) -> LabelledRows:
    """The labelled tiles of the slides, and how they are split for a probe.

    A `split` property or column decides; without it one of three folds validates: over slides
    (patients, where they are known) if there are at least three with labels, else over tiles:
    neighbours of validation tiles are then trained on, which `check_tile_set` refuses.

    Memory: 8 N D for N labelled tiles; one slide's file.
    """
    left_out = {
        slide: reason
        for slide, reason in embeddings.damaged_slides(tile_files[0].parent).items()
        if len(tile_files) > 1
    }
    drawn = []
    for path in tile_files:
        with slide_boundary(path.stem, left_out.__setitem__):
            drawn.append(bool(drawn_classes(path)))
    if labels is None and drawn and not any(drawn):
        raise ConfigError(
            "labels must be set for tile embeddings, got none for "
            f"{str(tile_files[0].parent)!r}; pass labels=..."
        )
    ignored: Counter[str] = Counter()
    label_source = None if labels is None else _read_labels(labels, ignored)
    where = str(labels or "classes drawn")
    labelled_slides: list[str | None] = []  # None for a region that names none
    if isinstance(label_source, dict):
        labelled_slides += label_source
    elif label_source is not None:
        labelled_slides += [region.slide_id for region in label_source]
    if len(tile_files) > 1 and not all(labelled_slides):
        raise DatasetError(
            "each region must have the property 'slide_id' when there are several slides, got "
            f"a region without it in {where!r}"
        )
    slides = []
    for path in tile_files:
        tiles = None
        with slide_boundary(path.stem, left_out.__setitem__):
            tiles = read_tiles(path)
            if tiles.features is None:
                raise DatasetError(
                    f"tiles must have 'features', got only coordinates in {str(path)!r}; run "
                    "`thinsection run` first"
                )
        if tiles is not None and path.stem not in left_out:
            slides.append(_labelled_slide(path, tiles, label_source))
    if not slides:
        reasons = "; ".join(f"{slide}: {why}" for slide, why in left_out.items())
        raise DatasetError(
            f"a slide must have embeddings that can be used, got {reasons}"
        )
    _check_slides(slides, labelled_slides, where, left_out)
    rows: list[TextRow] = []
    for slide in slides:
        rows += slide.rows
    classes = sorted({row["label"] for row in rows})
    if len(classes) < 2:
        raise DatasetError(
            f"labels must cover tiles of at least two classes, got {classes} for {len(rows)} "
            f"tiles of {len(slides)} slides in {where!r}"
        )
    facts = {
        "labels": Path(where).name,
        "slides": len({row["slide_id"] for row in rows}),
        **sets.left_out_fact(left_out),
        **slides[0].facts,
    }
    if ignored:
        facts["labels_without_area"] = ", ".join(
            counted(number, kind) for kind, number in sorted(ignored.items())
        )
    return sets.label_rows(
        rows,
        Path(where).stem,
        where=repr(where),
        rule="split of the labels",
        seed=seed,
        facts=facts,
        ids=[row["origin"] for row in rows],
        embeddings=np.concatenate([slide.vectors for slide in slides]),
    )


def _check_slides(
    slides: Sequence[LabelledSlide],
    labelled: Sequence[str | None],
    where: str,
    left_out: Collection[str],
) -> None:
    """Refuses labels of slides that are not there, and slides of several encoders."""
    names = [slide.name for slide in slides]
    unknown = {slide_id for slide_id in labelled if slide_id} - {*names, *left_out}
    if unknown:
        raise DatasetError(
            f"slide_id must be a slide of the data ({', '.join(names[:5])}), got "
            f"{', '.join(sorted(map(repr, unknown)))} in {where!r}"
        )
    encoders = sorted({slide.encoder for slide in slides})
    if len(encoders) > 1:
        raise DatasetError(
            f"slides must have embeddings of one encoder, got {', '.join(encoders)}; run one "
            "probe per encoder"
        )


def _labelled_slide(
    path: Path, tiles: TilesFile, labels: Labels | None
) -> LabelledSlide:
    """A slide's labelled tiles and their embeddings; without labels as classes were drawn."""
    assert tiles.features is not None
    name = _text(tiles.attributes.get("name")) or path.stem
    encoder = _text(tiles.attributes.get("encoder")) or "unnamed"
    if labels is None:
        row_by_tile = drawn_labels(path)
    elif isinstance(labels, dict):
        row_by_tile = _rows_at_places(labels.get(name, {}), tiles.coords_l0, name)
    else:
        if not tiles.tile_px_l0:
            raise DatasetError(
                "coords must have the attribute 'patch_size_level0', "
                f"got {sorted(tiles.attributes)} in {str(path)!r}"
            )
        centers = tiles.coords_l0 + np.float64(tiles.tile_px_l0 / 2)
        row_by_tile = _rows_in_regions(labels, tiles.coords_l0, centers, name)
    chosen = sorted(row_by_tile)
    patient = embeddings.known_patient(path, name)
    rows = []
    for tile, (x, y) in zip(chosen, tiles.coords_l0[chosen].tolist(), strict=True):
        origin = f"{name}:{x}x{y}"
        rows.append(
            {
                "case_id": patient,
                **row_by_tile[tile],
                "slide_id": name,
                "origin": origin,
            }
        )
    return LabelledSlide(
        name=name,
        encoder=f"{encoder} ({tiles.features.shape[1]}-d)",
        rows=rows,
        vectors=tiles.features[chosen].astype(np.float32),
        facts=embeddings.encoder_facts(path),
    )


def _text(attribute: object) -> str:
    """Attribute of an HDF5 file as text; '' where it is not there."""
    if isinstance(attribute, bytes):
        return attribute.decode()
    return str(attribute or "")


def drawn_labels(path: Path) -> RowsByTile:
    """Rows with the class that covers more than half of a tile, by row of the file."""
    classes = drawn_classes(path)
    if not classes:
        return {}
    names = [*classes]
    shares = np.stack([*classes.values()])
    covered = np.flatnonzero(shares.max(axis=0) > 0.5).tolist()
    return {tile: {"label": names[shares[:, tile].argmax()]} for tile in covered}


def drawn_classes(path: Path) -> dict[str, Column]:
    """Columns `class_NAME` of the tile table beside a file of embeddings: what was drawn."""
    tiles = path.parent.parent / "tiles" / path.name
    if not tiles.is_file():
        return {}
    classes = {}
    for name, column in read_tiles(tiles).columns.items():
        if name.startswith(CLASS_PREFIX):
            classes[name.removeprefix(CLASS_PREFIX)] = column
    return classes


def _rows_in_regions(
    regions: Sequence[LabelledRegion],
    coords_l0: CoordsL0,
    centers_l0: FloatVector,
    slide_id: str,
) -> RowsByTile:
    """Rows of the regions that hold the centres of tiles."""
    row_by_tile: dict[int, TextRow] = {}
    for region in regions:
        if region.slide_id not in (None, slide_id) or region.row.get("split") == TEST:
            continue
        for tile in np.flatnonzero(inside(region.rings, centers_l0)).tolist():
            other = row_by_tile.setdefault(tile, region.row)
            if other != region.row:
                raise DatasetError(
                    f"a tile must belong to one class and split, got {other['label']!r} and "
                    f"{region.row['label']!r} at {coords_l0[tile].tolist()} in {slide_id!r}"
                )
    return row_by_tile


def inside(rings: Rings, points: FloatVector) -> Flags:
    """True for points (N, 2) inside an odd number of rings. Memory: O(N)."""
    is_inside = np.zeros(len(points), dtype=bool)
    x, y = points.T
    for ring in rings:
        for (x0, y0), (x1, y1) in zip(ring, np.roll(ring, -1, axis=0), strict=True):
            if y0 == y1:
                continue
            crosses = (y0 <= y) != (y1 <= y)
            is_inside ^= crosses & (x < x0 + (y - y0) * (x1 - x0) / (y1 - y0))
    return is_inside


def _rows_at_places(
    row_by_place: RowsByPlace, coords_l0: CoordsL0, slide_id: str
) -> RowsByTile:
    """Rows of listed places; refuses a place without a tile."""
    tile_by_place = {(x, y): tile for tile, (x, y) in enumerate(coords_l0.tolist())}
    absent = sorted(row_by_place.keys() - tile_by_place.keys())
    if absent:
        x, y = absent[0]
        raise DatasetError(
            f"each labelled tile must be in the tile file, got none at {x}, {y} ({len(absent)} "
            f"missing) in {slide_id!r}"
        )
    return {tile_by_place[place]: row for place, row in row_by_place.items()}


def _read_labels(path: Path, ignored: Counter[str]) -> Labels:
    """Places of a table, or regions of a GeoJSON file; test rows of a table are left out.

    `ignored` counts shapes that have no area.
    """
    if path.suffix.lower() not in tables.TABLE_SUFFIXES:
        return read_regions(path, ignored)
    places_by_slide: dict[str, RowsByPlace] = {}
    for row in tables.read_rows(path, ("slide_id", "x", "y", "label")):
        label_row = _label_row(row, path)
        if label_row.get("split") == TEST:
            continue
        try:
            place = (int(row["x"]), int(row["y"]))
        except ValueError:
            raise DatasetError(
                f"x and y must be whole level-0 pixels, got {row['x']!r}, {row['y']!r} in "
                f"{str(path)!r}"
            ) from None
        places_by_slide.setdefault(row["slide_id"], {})[place] = label_row
    return places_by_slide


def _label_row(properties: Mapping[str, Json], path: Path) -> TextRow:
    """Label, and case and split where they are known, of a row or a region's properties."""
    row = {"label": str(properties["label"])}
    cases = [properties[name] for name in CASE_COLUMNS if properties.get(name)]
    if cases:
        row["case_id"] = str(cases[0])
    if properties.get("split"):
        row["split"] = split_name(str(properties["split"]), str(path))
    return row


def read_regions(
    path: Path, ignored: Counter[str] | None = None
) -> list[LabelledRegion]:
    """Labelled areas of a GeoJSON file, as annotations of a run are read.

    The label is the class, else the name. Points, lines, cells and objects without geometry have
    no area and label no tile; `ignored` counts them by kind.
    """
    with rewording(
        "labels must be GeoJSON", path, OSError, ValueError, error=DatasetError
    ):
        shapes = list(read_geojson(path))
    regions = [_region(shape, path) for shape in shapes if not shape.ignored]
    if ignored is not None:
        ignored.update(shape.ignored for shape in shapes if shape.ignored)
    if not regions:
        kinds = sorted({shape.ignored for shape in shapes})
        raise DatasetError(
            "labels must contain a labelled area, got "
            f"{'only shapes of kind ' + ', '.join(kinds) if kinds else 'none'} in {str(path)!r}"
        )
    return regions


def _region(shape: Shape, path: Path) -> LabelledRegion:
    label = shape.class_name or shape.properties.get("name")
    if not label:
        raise DatasetError(
            f"each area must have a label, got none as {shape.place} in {str(path)!r}; "
            "name a class in QuPath or set properties.classification.name"
        )
    rings = []
    damages = (ValueError, IndexError, TypeError)
    where = f"{shape.place} of {path}"
    with rewording("rings must be points", where, *damages, error=DatasetError):
        for polygon in shape.polygons:
            rings += [np.asarray(ring, dtype=np.float64)[:, :2] for ring in polygon]
    row = _label_row({**shape.properties, "label": label}, path)
    return LabelledRegion(rings, row, shape.properties.get("slide_id"))
