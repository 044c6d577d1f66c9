"""From the path that a person names to the tiles that a probe takes.

A manifest is a table of tiles: images, embedding files, or rows of one; eva's too. Its columns
stand in docs/probes.md. Labels by region are polygons (QuPath's GeoJSON) or a table; a tile takes
the class of the polygon that holds its centre, level-0 px. Test rows are never opened.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from thinsection.errors import ConfigError, DatasetError, rewording
from thinsection.probe.config import ProbeConfig
from thinsection.probe.data import files, images, sets
from thinsection.probe.data.files import FOLDS, TEST, check
from thinsection.probe.data.regions import LabelledRegion, read_regions
from thinsection.probe.data.sets import (
    LabelledRows,
    RobustnessSet,
    TileSet,
    ValueSet,
    check_tile_set,
)
from thinsection.probe.groups import CASE_COLUMNS, group_rows, table_groups
from thinsection.probe.statistics import first_fold, grouped_folds
from thinsection.store.tiles_h5 import read_tiles
from thinsection.types import CoordsL0

if TYPE_CHECKING:
    from thinsection.encode import TileEncoder

PATH_COLUMNS = ("embeddings", "path", "image")
LABEL_COLUMNS = ("label", "target")
ROBUSTNESS_COLUMNS = ("slide_id", "biological_class", "medical_center")


class Labelled(NamedTuple):
    """What is said of a tile."""

    label: str
    split: str | None  # 'train', 'val', 'test'
    case_id: str = ""


Places = dict[tuple[int, int], Labelled]  # by top-left corner, level-0 px
Picked = dict[int, Labelled]  # by row of the tiles file


def load_tiles(path: Path, config: ProbeConfig) -> TileSet:
    """Labelled tile embeddings of a path; images are embedded by the configuration's encoder.

    Memory: 12 N D at most while rows are split, 4 N D after; the largest file.

    Raises DatasetError: see `check_tile_set`.
    """
    rows = _labelled_rows(path, config)
    if rows.embeddings is not None:
        data = rows.tile_set(rows.embeddings.__getitem__)
    else:
        data = images.embed_rows(rows, _encoder(config), batch_size=config.compute.batch_size)
    data = replace(data, allow_leakage=config.data.allow_leakage)
    if config.data.test is not None:
        seen = replace(config, data=replace(config.data, test=None, allow_leakage=True))
        data = data.tested_on(load_tiles(config.data.test, seen))
    return check_tile_set(data)


def image_rows(path: Path, config: ProbeConfig) -> tuple[LabelledRows, "TileEncoder"]:
    """Labelled images that are not yet embedded, and the encoder that would."""
    return _labelled_rows(path, config), _encoder(config)


def _labelled_rows(path: Path, config: ProbeConfig) -> LabelledRows:
    """The rows of a path, as many of a class as are asked for."""
    rows, most = _all_rows(path, config), config.data.max_per_class
    return rows if most is None else rows.at_most_per_class(most, seed=config.protocol.seed)


def _all_rows(path: Path, config: ProbeConfig) -> LabelledRows:
    data, seed = config.data, config.protocol.seed
    layout = data.layout if data.layout != "auto" else guess_layout(path, data.labels)
    if layout == "manifest":
        known: dict[str, Any] = {"embeddings": data.embeddings, "root": data.root, "seed": seed}
        return load_manifest(path, **known, held_out=data.held_out)
    got = f"{data.held_out!r} for {str(path)!r}"
    check(data.held_out == files.VAL, "held_out test must be of a table with a split", got)
    if layout != "tiles" and not files.is_results(path):
        return images.LAYOUTS[layout](path, seed=seed)
    tile_files = files.find_tile_files(path)
    if data.labels is None and not any(map(files.drawn_classes, tile_files)):
        rule = "labels must be given for tile embeddings"
        raise ConfigError(f"{rule}, got none for {str(path)!r}; pass --labels regions.geojson")
    return load_regions(tile_files, data.labels, seed=seed)


def guess_layout(path: Path, labels: Path | None) -> str:
    """'tiles' with labels or for embeddings, 'manifest' for a table, else 'folder'."""
    suffix = path.suffix.lower()
    check(path.exists(), "data must exist", repr(str(path)))
    if labels is not None or suffix in (".h5", ".hdf5"):
        return "tiles"
    if suffix in files.TABLE_SUFFIXES:
        return "manifest"
    return "tiles" if files.is_results(path) or any(path.glob("*.h5")) else "folder"


def load_manifest(
    table: Path,
    *,
    embeddings: Path | None = None,
    root: Path | None = None,
    seed: int = 1337,
    held_out: str = files.VAL,
) -> LabelledRows:
    """The tiles that a manifest lists: paths below `root`, or rows of `embeddings`, one by one."""
    rows = files.read_rows(table, ())
    label_column, where = _present(rows, LABEL_COLUMNS, table), str(table)
    path_column = "" if embeddings else _present(rows, PATH_COLUMNS, table)
    has_split = "split" in rows[0]
    if has_split and held_out != TEST:
        rows = [r for r in rows if files.split_name(r["split"], where) != TEST]
    names, labels = files.encode_labels([r[label_column] for r in rows], where)
    paths = [embeddings or (root or table.parent) / r[path_column] for r in rows]
    groups = table_groups(rows, repr(where))
    if has_split:
        remedy = f"; leave the column out to have one of {FOLDS} folds validate"
        named = [files.split_name(r["split"], where) for r in rows]
        fold = files.split_fold(files.held_out_splits(named, held_out), repr(where), remedy)
        rule = "split column" + (", test is scored" if held_out == TEST else "")
    else:
        fold, rule = first_fold(labels, groups, folds=FOLDS, seed=seed, class_names=names)
    facts = {"split_rule": rule, "manifest": table.name}
    suffixes = {p.suffix.lower() for p in paths}
    if suffixes <= set(images.IMAGE_SUFFIXES):
        refs = [*map(sets.ImageRef, paths)]
        return LabelledRows(table.stem, names, labels, fold, facts, images=refs, groups=groups)
    if not suffixes <= set(files.EMBEDDING_SUFFIXES):
        of_images, of_tiles = ", ".join(images.IMAGE_SUFFIXES), ", ".join(files.EMBEDDING_SUFFIXES)
        rule = f"files must be all images ({of_images}) or all embeddings ({of_tiles})"
        raise DatasetError(f"{rule}, got {', '.join(sorted(suffixes))} in {where!r}")
    given = [r.get("row", "") for r in rows]
    vectors = files.gather_rows(paths, given, table)
    # a row has one name, whichever encoder's file holds it
    files_of = [table.stem if embeddings else p.name for p in paths]
    origins = [f"{name}:{row}" if row else name for name, row in zip(files_of, given, strict=True)]
    ids = [r.get("origin") or name for r, name in zip(rows, origins, strict=True)]
    return LabelledRows(table.stem, names, labels, fold, facts, vectors, ids, groups=groups)


def _present(rows: Sequence[files.TextRow], names: Sequence[str], table: Path) -> str:
    if present := [name for name in names if name in rows[0]]:
        return present[0]
    wanted, found = " or ".join(map(repr, names)), f"{', '.join(rows[0])} in {str(table)!r}"
    raise DatasetError(f"manifest must have a column {wanted}, got {found}")


def load_regions(
    tile_files: Sequence[Path], labels: Path | None, *, seed: int = 1337
) -> LabelledRows:
    """The labelled tiles of the slides, and how they are split for a probe.

    A `split` property or column decides; without it one of three folds validates: over slides
    (patients, where they are known) if there are at least three with labels, else over tiles:
    neighbours of validation tiles are then trained on, which `check_tile_set` refuses.

    Memory: 8 N D for N labelled tiles; one slide's file.
    """
    slides = _labelled_tiles(tile_files, labels)
    labels = labels or Path("classes drawn")
    encoders = {(s.encoder, s.embeddings.shape[1]) for s in slides}
    mixed = ", ".join(sorted(f"{name or 'unnamed'} ({dim}-d)" for name, dim in encoders))
    check(len(encoders) < 2, "slides must come from one encoder", f"{mixed}; probe them apart")
    texts = [tile.label for s in slides for tile in s.labels]
    found = f"{len(texts)} tiles of {len(slides)} slides in {str(labels)!r}"
    rule = "labels must put tiles into at least two classes"
    check(len(set(texts)) >= 2, rule, f"{sorted(set(texts))} for {found}")
    names, codes = files.encode_labels(texts, str(labels))
    of_slide = [s.name for s in slides for _ in s.labels]
    cases = [tile.case_id or s.patient_id for s in slides for tile in s.labels]
    groups = group_rows(of_slide, cases, where=repr(str(labels)))
    splits = [tile.split for s in slides for tile in s.labels]
    if any(splits):
        if not all(splits):
            raise DatasetError("split must be given for every labelled region or tile, or for none")
        fold, rule = files.split_fold(splits, "the labels"), "split of the labels"
    else:
        fold, rule = first_fold(codes, groups, folds=FOLDS, seed=seed, class_names=names)
    facts = {"split_rule": rule, "labels": labels.name, "slides": len(set(of_slide))}
    facts |= files.probed(tile_files[0])
    ids = [f"{s.name}:{x}x{y}" for s in slides for x, y in s.coords_l0.tolist()]
    vectors = np.concatenate([s.embeddings for s in slides])
    return LabelledRows(labels.stem, names, codes, fold, facts, vectors, ids, groups=groups)


class _SlideTiles(NamedTuple):
    """The labelled tiles of one slide."""

    name: str
    encoder: str | None
    patient_id: str  # of the results folder's ledger; '' where it has none
    coords_l0: CoordsL0
    embeddings: sets.Embeddings
    labels: list[Labelled]


def _labelled_tiles(tile_files: Sequence[Path], labels: Path | None) -> list[_SlideTiles]:
    """Of each file the tiles that the table, or the regions, give a label; None: that have one."""
    is_table = labels is not None and labels.suffix.lower() in files.TABLE_SUFFIXES
    table = _read_table(labels) if labels and is_table else {}
    regions = read_regions(labels) if labels and not is_table else []
    if len(tile_files) > 1 and any(region.slide_id is None for region in regions):
        rule = "each region must have the property 'slide_id' where there are several slides"
        raise DatasetError(f"{rule}, got one without in {str(labels)!r}")
    slides = []
    for path in tile_files:
        tiles = read_tiles(path)
        features, edge_l0 = tiles.features, tiles.tile_px_l0
        if features is None:
            got = f"only coordinates in {str(path)!r}; run `thinsection embed` first"
            raise DatasetError(f"tiles must have 'features', got {got}")
        if edge_l0 is None:
            got = f"{sorted(tiles.attributes)} in {str(path)!r}"
            raise DatasetError(f"coords must have the attribute 'patch_size_level0', got {got}")
        name, encoder = (_text(tiles.attributes.get(key)) for key in ("name", "encoder"))
        name, coords = name or path.stem, tiles.coords_l0
        by_region = _by_region(regions, coords, edge_l0, name)
        drawn = {} if labels else files.drawn_labels(path)
        by_region |= {row: Labelled(label, None) for row, label in drawn.items()}
        found = _by_place(table.get(name, {}), coords, name) if is_table else by_region
        rows = sorted(found)
        vectors, picked = features[rows].astype(np.float32), [found[row] for row in rows]
        patient = files.known_patient(path, name)
        slides.append(_SlideTiles(name, encoder, patient, coords[rows], vectors, picked))
    seen = [s.name for s in slides]
    named = {*table, *(region.slide_id for region in regions if region.slide_id)}
    unknown = ", ".join(sorted(map(repr, named - set(seen))))
    rule = f"slide_id must name a slide of the data ({', '.join(seen[:5])})"
    check(not unknown, rule, f"{unknown} in {str(labels)!r}")
    return slides


def _text(value: object) -> str | None:
    """An attribute of an HDF5 file."""
    return value.decode() if isinstance(value, bytes) else None if value is None else str(value)


def _by_region(
    regions: list[LabelledRegion], coords_l0: CoordsL0, edge_l0: int, name: str
) -> Picked:
    centres = coords_l0.astype(np.float64) + edge_l0 / 2
    picked: Picked = {}
    for region in regions:
        if region.slide_id not in (None, name) or region.split == TEST:
            continue
        for i in np.flatnonzero(region.holds(centres)).tolist():
            own = Labelled(region.label, region.split, region.case_id)
            if (other := picked.setdefault(i, own)) != own:
                both = (
                    f"{other.label!r} and {region.label!r} at {coords_l0[i].tolist()} in {name!r}"
                )
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
        case = next((row[name] for name in CASE_COLUMNS if row.get(name)), "")
        by_slide.setdefault(row["slide_id"], {})[place] = Labelled(row["label"], split, case)
    return by_slide


def _by_place(wanted: Places, coords_l0: CoordsL0, name: str) -> Picked:
    places = [(x, y) for x, y in coords_l0.tolist()]
    if absent := sorted(set(wanted) - set(places)):
        found = f"none at {absent[0][0]}, {absent[0][1]} ({len(absent)} missing) in {name!r}"
        raise DatasetError(f"each labelled tile must be in the tile file, got {found}")
    return {i: wanted[place] for i, place in enumerate(places) if place in wanted}


def load_values(path: Path, config: ProbeConfig) -> ValueSet:
    """Rows of a table with numbers to predict: every column that names no row, split or group.

    Folds are its columns fold_*, or its split, else one of three over groups (rows).

    Memory: 4 N D + 8 N T.
    """
    where, file = repr(str(path)), config.data.embeddings
    rows = [{"row": str(i) if file else ""} | r for i, r in enumerate(files.read_rows(path, ()))]
    if "split" in rows[0]:
        rows = [r for r in rows if files.split_name(r["split"], where) != TEST]
    own = {*PATH_COLUMNS, "row", "slide_id", "split", "x", "y", "origin", *CASE_COLUMNS}
    names = tuple(c for c in rows[0] if c not in own and not c.startswith("fold_"))
    check(names, "table must have a column of numbers to predict", f"none in {where}")
    with rewording("targets must be numbers", path, ValueError, error=DatasetError):
        targets = np.array([[float(r[name]) for name in names] for r in rows])
    check(np.isfinite(targets).all(), "targets must be finite", f"NaN or inf in {where}")
    groups, given = table_groups(rows, where), [r["row"] for r in rows]
    column = "" if file else _present(rows, PATH_COLUMNS, path)
    paths = [file or (config.data.root or path.parent) / r[column] for r in rows]
    splits = [c for c in rows[0] if c.startswith("fold_")] or [c for c in rows[0] if c == "split"]
    folds = [files.split_fold([files.split_name(r[c], where) for r in rows], where) for c in splits]
    if not folds:
        whose, none = groups.of_row if groups else given, np.zeros(len(rows), np.int64)
        folds = grouped_folds(none, whose, folds=FOLDS, seed=config.protocol.seed)
    return ValueSet(
        name=path.stem,
        ids=tuple(f"{path.stem}:{r}" if r else p.name for p, r in zip(paths, given, strict=True)),
        embeddings=files.gather_rows(paths, given, path),
        target_names=names,
        targets=targets,
        folds=tuple(folds),
        groups=groups,
        facts={"table": path.name, "targets": len(names), **files.probed(paths[0])},
    )


def load_robustness(path: Path, config: ProbeConfig) -> RobustnessSet:
    """The tiles that a table lists (slide_id, biological_class, medical_center).

    Memory: 4 N D + what embeds the images.
    """
    rows = files.read_rows(path, ROBUSTNESS_COLUMNS)
    file = config.data.embeddings
    if file is None and "path" in rows[0]:
        encoder = _encoder(config)
        encode, words = images.class_and_mean(encoder)
        refs = [sets.ImageRef(path.parent / r["path"]) for r in rows]
        vectors = images.embed_images(refs, encode, batch_size=config.compute.batch_size)
        facts = {"table": path.name, "embedding": words, **images.encoder_facts(encoder)}
    elif file is None or not file.is_file():
        remedy = "pass --embeddings FILE, or give the table a column 'path' of images"
        raise ConfigError(f"embeddings must be a file, got {file}; {remedy}")
    else:
        index = [r.get("row") or str(i) for i, r in enumerate(rows)]
        vectors = files.gather_rows([file] * len(rows), index, path)
        facts = {"table": path.name, "embedding": file.name}
    columns = {name: tuple(r[name] for r in rows) for name in ROBUSTNESS_COLUMNS}
    groups = table_groups(rows, repr(str(path)))
    return RobustnessSet(name=path.stem, embeddings=vectors, facts=facts, groups=groups, **columns)


def _encoder(config: ProbeConfig) -> "TileEncoder":
    from thinsection.encode import DEFAULT_ENCODER, load_encoder

    name, compute = config.data.encoder or DEFAULT_ENCODER, config.compute
    precision, engine = compute.precision, compute.engine
    return load_encoder(name, device=compute.device, precision=precision, engine=engine)
