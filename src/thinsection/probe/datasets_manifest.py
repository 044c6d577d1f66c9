"""CSV manifests of tiles: images, embedding files, or rows of one embedding file; eva's too.

Columns: `label` (or `target`); `split` (optional); and one of `path` / `image` (an image, or an
embedding file), `embeddings` (an embedding file; eva), `row` (of the file given with
`--embeddings`). `row` beside `path` or `embeddings` picks a row of that file. Test rows are never
opened.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from thinsection.errors import DatasetError
from thinsection.probe.embedding_files import EMBEDDING_SUFFIXES, read_embeddings
from thinsection.probe.examples import Embeddings, TileSet, make_split
from thinsection.probe.image_sets import IMAGE_SUFFIXES, ImagePart, ImageRef, ImageSet
from thinsection.probe.splits import Fold, stratified_folds
from thinsection.probe.tables import TEST, TRAIN, VAL, Row, encode_labels, read_table, split_name

FOLDS = 3
PATH_COLUMNS = ("embeddings", "path", "image")
LABEL_COLUMNS = ("label", "target")


def load_manifest(
    table: Path, *, embeddings: Path | None = None, seed: int = 1337
) -> TileSet | ImageSet:
    """The tiles that a manifest lists; paths are relative to its folder.

    Args:
        table: the CSV (or .tsv).
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
        fold, rule = _file_split(rows, table), "split column"
    else:
        fold = stratified_folds(labels, folds=FOLDS, seed=seed, class_names=names)[0]
        rule = f"stratified fold 0 of {FOLDS}, seed {seed}"
    facts = {"split_rule": rule, "manifest": table.name}
    suffixes = {p.suffix.lower() for p in paths}
    if suffixes <= set(IMAGE_SUFFIXES):
        refs = [ImageRef(p) for p in paths]
        train, val = (
            ImagePart(images=tuple(refs[i] for i in part), labels=labels[part]) for part in fold
        )
        return ImageSet(name=table.stem, class_names=names, train=train, val=val, facts=facts)
    if not suffixes <= set(EMBEDDING_SUFFIXES):
        raise DatasetError(
            f"files must be all images ({', '.join(IMAGE_SUFFIXES)}) or all embeddings "
            f"({', '.join(EMBEDDING_SUFFIXES)}), got {', '.join(sorted(suffixes))} in "
            f"{str(table)!r}"
        )
    given = [r.get("row", "") for r in rows]
    vectors = gather_rows(paths, given, table)
    ids = [f"{p.name}:{row}" if row else p.name for p, row in zip(paths, given, strict=True)]
    train_split, val_split = (
        make_split(vectors[part], labels[part], [ids[i] for i in part]) for part in fold
    )
    return TileSet(
        name=table.stem, class_names=names, train=train_split, val=val_split, facts=facts
    )


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


def _file_split(rows: Sequence[Row], table: Path) -> Fold:
    kinds = np.array([split_name(r["split"], str(table)) for r in rows])
    fold = (np.flatnonzero(kinds == TRAIN), np.flatnonzero(kinds == VAL))
    if not len(fold[0]) or not len(fold[1]):
        raise DatasetError(
            f"split must name train and val rows, got {len(fold[0])} and {len(fold[1])} in "
            f"{str(table)!r}; leave the column out to have one of {FOLDS} folds validate"
        )
    return fold


def _present(rows: Sequence[Row], names: Sequence[str], table: Path) -> str:
    for name in names:
        if name in rows[0]:
            return name
    raise DatasetError(
        f"manifest must have a column {' or '.join(map(repr, names))}, got "
        f"{', '.join(rows[0])} in {str(table)!r}"
    )
