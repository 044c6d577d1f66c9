"""From the path that a person names to the tiles that a probe takes.

A manifest is a table of tiles: images, embedding files, or rows of one; eva's too. Its columns
stand in docs/probes.md. Labels by region are polygons (QuPath's GeoJSON) or a table; a tile takes
the class of the polygon that holds its centre, level-0 px. Test rows are never opened.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from thinsection.errors import ConfigError, DatasetError, rewording
from thinsection.evaluation import embeddings, tables
from thinsection.evaluation.cases import CASE_COLUMNS, table_groups
from thinsection.evaluation.splits import grouped_folds
from thinsection.evaluation.tables import TEST, TextRow, check, split_name
from thinsection.files.json_text import read_json
from thinsection.probe.config import DataSection, ProbeConfig
from thinsection.probe.data import images, sets
from thinsection.probe.data.sets import LabelledRows, RobustnessSet, TileSet, ValueSet
from thinsection.store.tiles_h5 import read_tiles
from thinsection.types import CoordsL0

if TYPE_CHECKING:
    from thinsection.encode import TileEncoder

PATH_COLUMNS = ("embeddings", "path", "image")
LABEL_COLUMNS = ("label", "target")
ROBUSTNESS_COLUMNS = ("slide_id", "biological_class", "medical_center")

Rings = Sequence[
    npt.NDArray[np.float64]
]  # (M, 2) each, outer ones and holes; level-0 px
# what is said of tiles (label, split where there is one, case_id): by place, or by row of the file
Places = dict[tuple[int, int], TextRow]
Picked = Mapping[int, TextRow]
LabelledSlide = tuple[
    str, str, Sequence[TextRow], embeddings.Embeddings
]  # its name, encoder and tiles


def load_tiles(path: Path, config: ProbeConfig) -> TileSet:
    """Labelled tile embeddings of a path; images are embedded by the configuration's encoder.

    Memory: 12 N D at most while rows are split, 4 N D after; the largest file. Raises DatasetError:
    see `check_tile_set`.
    """
    rows = _labelled_rows(path, config)
    if rows.embeddings is not None:
        data = rows.tile_set(rows.embeddings.__getitem__)
    else:
        data = images.embed_rows(
            rows, _encoder(config), batch_size=config.compute.batch_size
        )
    data = replace(data, allow_leakage=config.data.allow_leakage)
    if config.data.test is not None:
        seen = replace(config, data=replace(config.data, test=None, allow_leakage=True))
        data = data.tested_on(load_tiles(config.data.test, seen))
    return sets.check_tile_set(data)


def image_rows(path: Path, config: ProbeConfig) -> tuple[LabelledRows, "TileEncoder"]:
    """Labelled images that are not yet embedded, and the encoder that would."""
    return _labelled_rows(path, config), _encoder(config)


def _labelled_rows(path: Path, config: ProbeConfig) -> LabelledRows:
    """The rows of a path, as many of a class as are asked for."""
    data, seed, suffix = config.data, config.protocol.seed, path.suffix.lower()
    layout, most = str(data.layout), data.max_per_class
    if layout == "auto":
        check(path.exists(), "data must exist", repr(str(path)))
        tiles = (
            data.labels is not None
            or suffix in embeddings.H5_SUFFIXES
            or any(path.glob("*.h5"))
        )
        table = suffix in tables.TABLE_SUFFIXES
        layout = "tiles" if tiles else "manifest" if table else "folder"
    if layout == "manifest":
        rows = load_manifest(path, data, seed=seed)
    else:
        got = f"{data.held_out!r} for {str(path)!r}"
        check(
            data.held_out == tables.VAL,
            "held_out test must be of a table with a split",
            got,
        )
        if layout == "tiles" or embeddings.is_results(path):
            rows = load_regions(
                embeddings.find_tile_files(path), data.labels, seed=seed
            )
        else:
            rows = images.load_images(layout, path, seed=seed)
    return rows if most is None else rows.at_most_per_class(most, seed=seed)


def _sources(
    rows: Sequence[TextRow], column: str, table: Path, data: DataSection
) -> tuple[list[Path], list[str], list[str]]:
    """Of each row its file (`embeddings`, or below `root`), the row there ('': the one), a name."""
    paths = [data.embeddings or (data.root or table.parent) / r[column] for r in rows]
    given = [r.get("row", "") for r in rows]
    files_of = [table.stem if data.embeddings else p.name for p in paths]
    # the same, whichever encoder's file holds it
    names = [
        f"{name}:{row}" if row else name
        for name, row in zip(files_of, given, strict=True)
    ]
    return paths, given, names


def _present(row: TextRow, names: Sequence[str], table: Path) -> str:
    """The first of some columns that a table has."""
    found, wanted = (
        [name for name in names if name in row],
        " or ".join(map(repr, names)),
    )
    check(
        found,
        f"manifest must have a column {wanted}",
        f"{', '.join(row)} in {str(table)!r}",
    )
    return found[0]


def load_manifest(
    table: Path, data: DataSection | None = None, *, seed: int = 1337
) -> LabelledRows:
    """The tiles that a manifest lists: paths below `root`, or rows of `embeddings`, one by one."""
    data, listed, where = (
        data or DataSection(),
        tables.read_rows(table, ()),
        repr(str(table)),
    )
    label = _present(listed[0], LABEL_COLUMNS, table)
    column = "" if data.embeddings else _present(listed[0], PATH_COLUMNS, table)
    rows = tables.open_rows(
        [{**r, "label": r[label]} for r in listed], where, data.held_out
    )
    paths, given, names = _sources(rows, column, table, data)
    known: dict[str, Any] = {
        "where": where,
        "seed": seed,
        "facts": {"manifest": table.name},
    }
    known["rule"] = "split column" + (
        ", test is scored" if data.held_out == TEST else ""
    )
    suffixes = {p.suffix.lower() for p in paths}
    if suffixes <= {*images.IMAGE_SUFFIXES}:
        return sets.label_rows(
            rows, table.stem, images=[*map(sets.ImageRef, paths)], **known
        )
    of_images, of_tiles = (
        ", ".join(images.IMAGE_SUFFIXES),
        ", ".join(embeddings.EMBEDDING_SUFFIXES),
    )
    rule = f"files must be all images ({of_images}) or all embeddings ({of_tiles})"
    found = f"{', '.join(sorted(suffixes))} in {where}"
    check(suffixes <= {*embeddings.EMBEDDING_SUFFIXES}, rule, found)
    known["ids"] = [
        r.get("origin") or name for r, name in zip(rows, names, strict=True)
    ]
    vectors = embeddings.gather_rows(paths, given, table)
    return sets.label_rows(rows, table.stem, embeddings=vectors, **known)


def load_regions(
    tile_files: Sequence[Path], labels: Path | None, *, seed: int = 1337
) -> LabelledRows:
    """The labelled tiles of the slides, and how they are split for a probe.

    A `split` property or column decides; without it one of three folds validates: over slides
    (patients, where they are known) if there are at least three with labels, else over tiles:
    neighbours of validation tiles are then trained on, which `check_tile_set` refuses.

    Memory: 8 N D for N labelled tiles; one slide's file.
    """
    if labels is None and not any(map(drawn_classes, tile_files)):
        got = f"none for {str(tile_files[0].parent)!r}; pass --labels regions.geojson"
        raise ConfigError(f"labels must be given for tile embeddings, got {got}")
    said, source = _read_labels(labels), labels or Path("classes drawn")
    where, several = str(source), "where there are several slides"
    named = [*said] if isinstance(said, dict) else [region.slide_id for region in said]
    rule = f"each region must have the property 'slide_id' {several}"
    check(len(tile_files) < 2 or all(named), rule, f"one without in {where!r}")
    slides = [_labelled_tiles(path, said if labels else None) for path in tile_files]
    seen, encoders, by_slide, vectors = zip(*slides, strict=True)
    unknown = ", ".join(sorted(map(repr, {*filter(None, named)} - {*seen})))
    rule = f"slide_id must name a slide of the data ({', '.join(seen[:5])})"
    check(not unknown, rule, f"{unknown} in {where!r}")
    mixed = f"{', '.join(sorted({*encoders}))}; probe them apart"
    check(len({*encoders}) < 2, "slides must come from one encoder", mixed)
    rows = [row for of_slide in by_slide for row in of_slide]
    classes = sorted({row["label"] for row in rows})
    found = f"{classes} for {len(rows)} tiles of {len(slides)} slides in {where!r}"
    check(len(classes) > 1, "labels must put tiles into at least two classes", found)
    facts = {"labels": source.name, "slides": len({row["slide_id"] for row in rows})}
    known: dict[str, Any] = {
        "facts": facts | embeddings.encoder_facts(tile_files[0]),
        "seed": seed,
    }
    known |= {
        "ids": [row["origin"] for row in rows],
        "embeddings": np.concatenate(vectors),
    }
    rule = "split of the labels"
    return sets.label_rows(rows, source.stem, where=repr(where), rule=rule, **known)


def _labelled_tiles(path: Path, said: "_Said | None") -> LabelledSlide:
    """A slide's name, encoder, labelled tiles and their embeddings; None: as classes were drawn."""
    tiles = read_tiles(path)
    coords, features, edge_l0 = tiles.coords_l0, tiles.features, tiles.tile_px_l0
    if features is None:
        got = f"only coordinates in {str(path)!r}; run `thinsection embed` first"
        raise DatasetError(f"tiles must have 'features', got {got}")
    texts = (tiles.attributes.get(key) or b"" for key in ("name", "encoder"))
    name, encoder = (t.decode() if isinstance(t, bytes) else str(t) for t in texts)
    name = name or path.stem
    if said is None:
        picked = drawn_labels(path)
    elif isinstance(said, dict):
        picked = _by_place(said.get(name, {}), coords, name)
    else:
        got = f"{sorted(tiles.attributes)} in {str(path)!r}"
        check(edge_l0, "coords must have the attribute 'patch_size_level0'", got)
        picked = _by_region(said, coords, (edge_l0 or 0) / 2, name)
    chosen, patient = sorted(picked), embeddings.known_patient(path, name)
    origins = [f"{name}:{x}x{y}" for x, y in coords[chosen].tolist()]
    pairs, whose = zip(chosen, origins, strict=True), {"case_id": patient}
    rows = [
        whose | {**picked[i], "slide_id": name, "origin": origin} for i, origin in pairs
    ]
    encoder = f"{encoder or 'unnamed'} ({features.shape[1]}-d)"
    return name, encoder, rows, features[chosen].astype(np.float32)


def drawn_labels(path: Path) -> Picked:
    """By row of a file of embeddings the class that covers more than half of the tile."""
    if not (classes := drawn_classes(path)):
        return {}
    names, shares = [*classes], np.stack([*classes.values()])
    rows = np.flatnonzero(shares.max(axis=0) > 0.5).tolist()
    return {row: {"label": names[shares[:, row].argmax()]} for row in rows}


def drawn_classes(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Columns `class_NAME` of the tile table beside a file of embeddings: what was drawn."""
    tiles, prefix = path.parent.parent / "tiles" / path.name, "class_"
    columns = read_tiles(tiles).columns if tiles.is_file() else {}
    return {
        n.removeprefix(prefix): c for n, c in columns.items() if n.startswith(prefix)
    }


def _by_region(
    regions: Sequence["LabelledRegion"], coords_l0: CoordsL0, half_l0: float, name: str
) -> Picked:
    """The tiles whose centre lies in a region."""
    picked: dict[int, TextRow] = {}
    for region in regions:
        if region.slide_id not in (None, name) or region.row.get("split") == TEST:
            continue
        for i in np.flatnonzero(
            inside(region.rings, coords_l0 + np.float64(half_l0))
        ).tolist():
            if (other := picked.setdefault(i, region.row)) != region.row:
                both = f"{other['label']!r} and {region.row['label']!r}"
                found = f"{both} at {coords_l0[i].tolist()} in {name!r}"
                raise DatasetError(
                    f"a tile must lie in one class and split, got {found}"
                )
    return picked


def inside(rings: Rings, points: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Which points (N, 2) lie inside an odd number of rings. Memory: O(N)."""
    found, (x, y) = np.zeros(len(points), dtype=bool), points.T
    for ring in rings:
        for (x0, y0), (x1, y1) in zip(ring, np.roll(ring, -1, axis=0), strict=True):
            if y0 != y1:
                found ^= ((y0 <= y) != (y1 <= y)) & (
                    x < x0 + (y - y0) * (x1 - x0) / (y1 - y0)
                )
    return found


def _by_place(wanted: Places, coords_l0: CoordsL0, name: str) -> Picked:
    rows = {(x, y): i for i, (x, y) in enumerate(coords_l0.tolist())}
    if absent := sorted(wanted.keys() - rows.keys()):
        found = f"none at {absent[0][0]}, {absent[0][1]} ({len(absent)} missing) in {name!r}"
        raise DatasetError(f"each labelled tile must be in the tile file, got {found}")
    return {rows[place]: row for place, row in wanted.items()}


class LabelledRegion(NamedTuple):
    """One labelled polygon."""

    rings: Rings
    row: TextRow  # what it says of its tiles
    slide_id: str | None = None  # None where there is only one slide


_Said = dict[str, Places] | list[LabelledRegion]  # by slide


def _read_labels(labels: Path | None) -> _Said:
    """Of a table, or of GeoJSON; test rows of a table are left out."""
    if labels is None or labels.suffix.lower() not in tables.TABLE_SUFFIXES:
        return read_regions(labels) if labels else {}
    by_slide: dict[str, Places] = {}
    for row in tables.read_rows(labels, ("slide_id", "x", "y", "label")):
        said = _said(row, labels)
        if said.get("split") == TEST:
            continue
        try:
            place = (int(row["x"]), int(row["y"]))
        except ValueError:
            found = f"{row['x']!r}, {row['y']!r} in {str(labels)!r}"
            raise DatasetError(
                f"x and y must be whole level-0 px, got {found}"
            ) from None
        by_slide.setdefault(row["slide_id"], {})[place] = said
    return by_slide


def _said(given: Mapping[str, Any], path: Path) -> TextRow:
    """Of a row or of a region's properties: label, and split and case where they are there."""
    split, case = (
        given.get("split"),
        next((given[n] for n in CASE_COLUMNS if given.get(n)), ""),
    )
    row = {"label": str(given["label"])} | ({"case_id": str(case)} if case else {})
    return row | ({"split": split_name(str(split), str(path))} if split else {})


def read_regions(path: Path) -> list[LabelledRegion]:
    """Labelled polygons of a GeoJSON file; the label is QuPath's classification name."""
    with rewording(
        "labels must be GeoJSON", path, OSError, ValueError, error=DatasetError
    ):
        document = read_json(path)
    features: Any = document.get("features") if isinstance(document, dict) else document
    some = isinstance(features, list) and features
    check(some, "labels must be a FeatureCollection with features", repr(str(path)))
    return [_region(feature, i, path) for i, feature in enumerate(features)]


def _region(feature: Any, number: int, path: Path) -> LabelledRegion:
    properties, geometry = (
        feature.get(key) or {} for key in ("properties", "geometry")
    )
    of_class = (properties.get("classification") or {}).get("name")
    label = properties.get("label") or of_class or properties.get("name")
    kind, remedy = geometry.get("type"), "set properties.classification.name"
    found = f"{kind!r} with label {label!r} as feature {number} in {str(path)!r}"
    rule = "each feature must be a labelled Polygon or MultiPolygon"
    fits = label and kind in ("Polygon", "MultiPolygon")
    check(fits, rule, f"{found}; name a class in QuPath or {remedy}")
    polygons = (
        [geometry["coordinates"]] if kind == "Polygon" else geometry["coordinates"]
    )
    rings = [
        np.asarray(ring, dtype=np.float64)[:, :2]
        for polygon in polygons
        for ring in polygon
    ]
    row = _said({**properties, "label": label}, path)
    return LabelledRegion(rings, row, properties.get("slide_id"))


def load_values(path: Path, config: ProbeConfig) -> ValueSet:
    """Rows of a table with numbers to predict: every column that names no row, split or group.

    Folds are its columns fold_*, or its split, else one of three over groups (rows). Memory: 4 N D
    + 8 N T.
    """
    where, data, listed = repr(str(path)), config.data, tables.read_rows(path, ())
    of_file = data.embeddings is not None
    column = "" if of_file else _present(listed[0], PATH_COLUMNS, path)
    listed = [({"row": str(i)} if of_file else {}) | r for i, r in enumerate(listed)]
    rows = tables.open_rows(listed, where)
    own = {*PATH_COLUMNS, "row", "slide_id", "split", "x", "y", "origin", *CASE_COLUMNS}
    names = tuple(c for c in listed[0] if c not in own and not c.startswith("fold_"))
    check(names, "table must have a column of numbers to predict", f"none in {where}")
    with rewording("targets must be numbers", path, ValueError, error=DatasetError):
        targets = np.array([[float(r[name]) for name in names] for r in rows])
    check(
        np.isfinite(targets).all(), "targets must be finite", f"NaN or inf in {where}"
    )
    groups, (paths, given, ids) = (
        table_groups(rows, where),
        _sources(rows, column, path, data),
    )
    splits = [c for c in listed[0] if c.startswith("fold_")] or [
        c for c in rows[0] if c == "split"
    ]
    folds = [
        tables.split_fold([split_name(r[c], where) for r in rows], where)
        for c in splits
    ]
    if not folds:
        whose, none = groups.of_row if groups else given, np.zeros(len(rows), np.int64)
        folds = grouped_folds(none, whose, folds=sets.FOLDS, seed=config.protocol.seed)
    return ValueSet(
        name=path.stem,
        ids=tuple(ids),
        embeddings=embeddings.gather_rows(paths, given, path),
        target_names=names,
        targets=targets,
        folds=tuple(folds),
        groups=groups,
        facts={
            "table": path.name,
            "targets": len(names),
            **embeddings.encoder_facts(paths[0]),
        },
    )


def load_robustness(path: Path, config: ProbeConfig) -> RobustnessSet:
    """The tiles that a table lists (slide_id, biological_class, medical_center).

    Memory: 4 N D + what embeds the images.
    """
    rows, file = tables.read_rows(path, ROBUSTNESS_COLUMNS), config.data.embeddings
    if file is None and "path" in rows[0]:
        encoder = _encoder(config)
        encode, words = images.class_and_mean(encoder)
        refs = [sets.ImageRef(path.parent / r["path"]) for r in rows]
        vectors = images.embed_images(
            refs, encode, batch_size=config.compute.batch_size
        )
        facts = {"embedding": words, **images.encoder_facts(encoder)}
    elif file is None or not file.is_file():
        remedy = "pass --embeddings FILE, or give the table a column 'path' of images"
        raise ConfigError(f"embeddings must be a file, got {file}; {remedy}")
    else:
        index = [r.get("row") or str(i) for i, r in enumerate(rows)]
        vectors = embeddings.gather_rows([file] * len(rows), index, path)
        facts = {"embedding": file.name}
    settings = config.protocol.robustness
    in_pairs = settings is not None and path.stem in settings.paired_subsets
    pairs: tuple[str, ...] = ()
    if in_pairs and "subset" in rows[0]:
        pairs = tuple(row["subset"] for row in rows)
    return RobustnessSet(
        name=path.stem,
        embeddings=vectors,
        biological_class=tuple(row["biological_class"] for row in rows),
        medical_center=tuple(row["medical_center"] for row in rows),
        slide_id=tuple(row["slide_id"] for row in rows),
        pair=pairs,
        groups=table_groups(rows, repr(str(path))),
        facts={"table": path.name, **facts},
    )


def _encoder(config: ProbeConfig) -> "TileEncoder":
    from thinsection.encode import DEFAULT_ENCODER, load_encoder

    name, compute = config.data.encoder or DEFAULT_ENCODER, config.compute
    precision, engine = compute.precision, compute.engine
    return load_encoder(name, device=compute.device, precision=precision, engine=engine)
