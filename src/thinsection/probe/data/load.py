"""From the path that a person names to the tiles that a probe takes.

A manifest is a table of tiles: images, embedding files, or rows of one embedding file; eva's too.
Columns: `label` (or `target`); `split` (optional); and one of `path` / `image` (an image, or an
embedding file), `embeddings` (an embedding file; eva), `row` (of the file given with
`--embeddings`). `row` beside `path` or `embeddings` picks a row of that file. Test rows are never
opened.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from thinsection.errors import ConfigError, DatasetError
from thinsection.probe.config import ProbeConfig
from thinsection.probe.data import files, images
from thinsection.probe.data.regions import load_regions
from thinsection.probe.data.sets import Embeddings, ImageRef, LabelledRows, RobustnessSet, TileSet
from thinsection.probe.statistics import stratified_folds

if TYPE_CHECKING:
    from thinsection.encode import TileEncoder

PATH_COLUMNS = ("embeddings", "path", "image")
LABEL_COLUMNS = ("label", "target")
ROBUSTNESS_COLUMNS = ("slide_id", "biological_class", "medical_center")


def load_tiles(path: Path, config: ProbeConfig) -> TileSet:
    """Labelled tile embeddings of a path; images are embedded by the configuration's encoder.

    `path`: a manifest, a dataset folder, a file or folder of tile embeddings, or a results folder
    with one encoder's.

    Memory: 12 N D at most while rows are split, 4 N D after; the largest file.

    Raises:
        DatasetError: the data do not look as expected; says what was looked for.
        ConfigError: settings that the data need are missing.
    """
    rows, most = _labelled_rows(path, config), config.data.max_per_class
    if most is not None:  # before the encoder sees them
        rows = rows.at_most_per_class(most, seed=config.protocol.seed)
    if rows.embeddings is not None:
        return rows.tile_set(rows.embeddings.__getitem__)
    return images.embed_rows(rows, _encoder(config), batch_size=config.compute.batch_size)


def _labelled_rows(path: Path, config: ProbeConfig) -> LabelledRows:
    data, seed = config.data, config.protocol.seed
    layout = data.layout if data.layout != "auto" else guess_layout(path, data.labels)
    if layout == "manifest":
        return load_manifest(path, embeddings=data.embeddings, seed=seed)
    if layout != "tiles" and not files.is_results(path):
        return images.LAYOUTS[layout](path, seed=seed)
    tile_files = files.find_tile_files(path)
    if data.labels is None:
        raise ConfigError(
            f"labels must be given for tile embeddings, got none for {str(path)!r}; "
            "pass --labels regions.geojson (or a table slide_id,x,y,label)"
        )
    return load_regions(tile_files, data.labels, seed=seed)


def guess_layout(path: Path, labels: Path | None) -> str:
    """'tiles' with labels or for embeddings, 'manifest' for a table, else 'folder'."""
    suffix = path.suffix.lower()
    if not path.exists():
        raise DatasetError(f"data must exist, got {str(path)!r}")
    if labels is not None or suffix in (".h5", ".hdf5"):
        return "tiles"
    if suffix in files.TABLE_SUFFIXES:
        return "manifest"
    return "tiles" if files.is_results(path) or any(path.glob("*.h5")) else "folder"


def load_manifest(table: Path, *, embeddings: Path | None = None, seed: int = 1337) -> LabelledRows:
    """The tiles that a manifest lists; paths are relative to its folder.

    Args:
        embeddings: one file of embeddings, for a `row` column.
        seed: of the fold that validates where there is no `split` column.
    """
    rows = files.read_rows(table, ())
    label_column, where = _present(rows, LABEL_COLUMNS, table), str(table)
    path_column = "" if embeddings else _present(rows, PATH_COLUMNS, table)
    has_split = "split" in rows[0]
    if has_split:
        rows = [r for r in rows if files.split_name(r["split"], where) != files.TEST]
    names, labels = files.encode_labels([r[label_column] for r in rows], where)
    paths = [embeddings or table.parent / r[path_column] for r in rows]
    if has_split:
        remedy = f"; leave the column out to have one of {files.FOLDS} folds validate"
        splits = [files.split_name(r["split"], where) for r in rows]
        fold, rule = files.split_fold(splits, repr(where), remedy), "split column"
    else:
        fold = stratified_folds(labels, folds=files.FOLDS, seed=seed, class_names=names)[0]
        rule = f"stratified fold 0 of {files.FOLDS}, seed {seed}"
    facts = {"split_rule": rule, "manifest": table.name}
    suffixes = {p.suffix.lower() for p in paths}
    if suffixes <= set(images.IMAGE_SUFFIXES):
        refs = [*map(ImageRef, paths)]
        return LabelledRows(table.stem, names, labels, fold, facts, images=refs)
    if not suffixes <= set(files.EMBEDDING_SUFFIXES):
        of_images, of_tiles = ", ".join(images.IMAGE_SUFFIXES), ", ".join(files.EMBEDDING_SUFFIXES)
        rule = f"files must be all images ({of_images}) or all embeddings ({of_tiles})"
        raise DatasetError(f"{rule}, got {', '.join(sorted(suffixes))} in {where!r}")
    given = [r.get("row", "") for r in rows]
    vectors = gather_rows(paths, given, table)
    ids = [f"{p.name}:{row}" if row else p.name for p, row in zip(paths, given, strict=True)]
    return LabelledRows(table.stem, names, labels, fold, facts, vectors, ids)


def gather_rows(paths: Sequence[Path], rows: Sequence[str], table: Path) -> Embeddings:
    """One row per entry, each file opened once."""
    by_path = defaultdict(list)
    for i, path in enumerate(paths):
        by_path[path].append(i)
    out: Embeddings | None = None
    for path, entries in by_path.items():
        array = files.read_embeddings(path)
        dim = array.shape[1]
        if out is None:
            out = np.empty((len(paths), dim), dtype=np.float32)
        if dim != out.shape[1]:
            found = f"{dim} after {out.shape[1]} in {str(path)!r}"
            raise DatasetError(f"embeddings must have the same D, got {found}")
        out[entries] = array[[_row_index(rows[i], len(array), path, table) for i in entries]]
    assert out is not None  # a table has rows
    return out


def _row_index(text: str, count: int, path: Path, table: Path) -> int:
    if not text and count == 1:
        return 0
    if not text.isdigit() or int(text) >= count:
        found = f"{text!r} in {str(table)!r}"
        raise DatasetError(f"row must lie in 0..{count - 1} of {path.name!r}, got {found}")
    return int(text)


def _present(rows: Sequence[files.TextRow], names: Sequence[str], table: Path) -> str:
    if present := [name for name in names if name in rows[0]]:
        return present[0]
    wanted, found = " or ".join(map(repr, names)), f"{', '.join(rows[0])} in {str(table)!r}"
    raise DatasetError(f"manifest must have a column {wanted}, got {found}")


def load_robustness(path: Path, config: ProbeConfig) -> RobustnessSet:
    """The tiles that a table lists (slide_id, biological_class, medical_center).

    A column `path` names images, which the encoder embeds; rows of a file of embeddings go with the
    table's, or are named in a column `row`.

    Memory: 4 N D + what embeds the images.

    Raises:
        ConfigError: neither images nor an embeddings file.
        DatasetError: columns or rows are missing.
    """
    rows = files.read_rows(path, ROBUSTNESS_COLUMNS)
    file = config.data.embeddings
    if file is None and "path" in rows[0]:
        encoder = _encoder(config)
        encode, words = images.class_and_mean(encoder)
        refs = [ImageRef(path.parent / r["path"]) for r in rows]
        vectors = images.embed_images(refs, encode, batch_size=config.compute.batch_size)
        facts = {"table": path.name, "embedding": words, **images.encoder_facts(encoder)}
    elif file is None or not file.is_file():
        raise ConfigError(
            f"embeddings must be a file, got {file}; pass --embeddings FILE, or give the table a "
            "column 'path' of images"
        )
    else:
        index = [r.get("row") or str(i) for i, r in enumerate(rows)]
        vectors = gather_rows([file] * len(rows), index, path)
        facts = {"table": path.name, "embedding": file.name}
    columns = {name: tuple(r[name] for r in rows) for name in ROBUSTNESS_COLUMNS}
    return RobustnessSet(name=path.stem, embeddings=vectors, facts=facts, **columns)


def _encoder(config: ProbeConfig) -> "TileEncoder":
    from thinsection.encode import DEFAULT_ENCODER, load_encoder

    name, compute = config.data.encoder or DEFAULT_ENCODER, config.compute
    return load_encoder(name, device=compute.device, precision=compute.precision)
