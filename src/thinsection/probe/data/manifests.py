"""Manifests of tiles: images, embedding files, or rows of one embedding file; eva's too.

Columns: `label` (or `target`); `split` (optional); and one of `path` / `image` (an image, or an
embedding file), `embeddings` (an embedding file; eva), `row` (of the file given with
`--embeddings`). `row` beside `path` or `embeddings` picks a row of that file. Test rows are never
opened.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from thinsection.errors import DatasetError
from thinsection.probe.data.files import EMBEDDING_SUFFIXES, read_embeddings
from thinsection.probe.data.sets import (
    IMAGE_SUFFIXES,
    Embeddings,
    ImagePart,
    ImageRef,
    ImageSet,
    TileSet,
    make_split,
)
from thinsection.probe.data.tables import (
    FOLDS,
    TEST,
    Row,
    encode_labels,
    read_table,
    split_fold,
    split_name,
)
from thinsection.probe.statistics import stratified_folds

PATH_COLUMNS = ("embeddings", "path", "image")
LABEL_COLUMNS = ("label", "target")


def load_manifest(
    table: Path, *, embeddings: Path | None = None, seed: int = 1337
) -> TileSet | ImageSet:
    """The tiles that a manifest lists; paths are relative to its folder.

    Args:
        table: the CSV, TSV or Parquet file.
        embeddings: one file of embeddings, for a `row` column.
        seed: of the fold that validates where there is no `split` column.

    Memory: 8 N D while the rows are split, 4 N D after; the largest embedding file.

    Raises:
        DatasetError: a column, file or row is missing, or kinds are mixed.
    """
    rows = read_table(table, ())
    label_column = _present(rows, LABEL_COLUMNS, table)
    has_split = "split" in rows[0]
    if has_split:
        rows = [r for r in rows if split_name(r["split"], str(table)) != TEST]
    names, labels = encode_labels([r[label_column] for r in rows], str(table))
    if embeddings is not None:
        paths: Sequence[Path] = [embeddings] * len(rows)
    else:
        column = _present(rows, PATH_COLUMNS, table)
        paths = [table.parent / r[column] for r in rows]
    if has_split:
        remedy = f"; leave the column out to have one of {FOLDS} folds validate"
        splits = [split_name(r["split"], str(table)) for r in rows]
        fold, rule = split_fold(splits, repr(str(table)), remedy), "split column"
    else:
        fold = stratified_folds(labels, folds=FOLDS, seed=seed, class_names=names)[0]
        rule = f"stratified fold 0 of {FOLDS}, seed {seed}"
    facts = {"split_rule": rule, "manifest": table.name}
    suffixes = {p.suffix.lower() for p in paths}
    if suffixes <= set(IMAGE_SUFFIXES):
        images = ImagePart(images=tuple(map(ImageRef, paths)), labels=labels)
        return ImageSet.folded(images, fold, name=table.stem, class_names=names, facts=facts)
    if not suffixes <= set(EMBEDDING_SUFFIXES):
        raise DatasetError(
            f"files must be all images ({', '.join(IMAGE_SUFFIXES)}) or all embeddings "
            f"({', '.join(EMBEDDING_SUFFIXES)}), got {', '.join(sorted(suffixes))} in "
            f"{str(table)!r}"
        )
    given = [r.get("row", "") for r in rows]
    ids = [f"{p.name}:{row}" if row else p.name for p, row in zip(paths, given, strict=True)]
    tiles = make_split(gather_rows(paths, given, table), labels, ids)
    return TileSet.folded(tiles, fold, name=table.stem, class_names=names, facts=facts)


def gather_rows(paths: Sequence[Path], rows: Sequence[str], table: Path) -> Embeddings:
    """One row per entry, each file opened once.

    Raises:
        DatasetError: a row is missing, out of range, or not given where a file has several.
    """
    by_path: dict[Path, list[int]] = {}
    for i, path in enumerate(paths):
        by_path.setdefault(path, []).append(i)
    out: Embeddings | None = None
    for path, entries in by_path.items():
        array = read_embeddings(path)
        index = [_row_index(rows[i], len(array), path, table) for i in entries]
        if out is None:
            out = np.empty((len(paths), array.shape[1]), dtype=np.float32)
        if array.shape[1] != out.shape[1]:
            raise DatasetError(
                f"embeddings must have the same D, got {array.shape[1]} after {out.shape[1]} in "
                f"{str(path)!r}"
            )
        out[entries] = array[index]
    assert out is not None  # a table has rows
    return out


def _row_index(text: str, count: int, path: Path, table: Path) -> int:
    if not text and count == 1:
        return 0
    if not text.isdigit() or int(text) >= count:
        raise DatasetError(
            f"row must lie in 0..{count - 1} of {path.name!r}, got {text!r} in {str(table)!r}"
        )
    return int(text)


def _present(rows: Sequence[Row], names: Sequence[str], table: Path) -> str:
    for name in names:
        if name in rows[0]:
            return name
    raise DatasetError(
        f"manifest must have a column {' or '.join(map(repr, names))}, got "
        f"{', '.join(rows[0])} in {str(table)!r}"
    )
