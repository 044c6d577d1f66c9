"""What is read from disk: tables of labels with their splits, and files of embeddings.

Embeddings are ours, TRIDENT's and CLAM's (.h5), .npy, and eva's .pt (tensors only). A folder of
them is flat, `<slide_id>.h5`; of a results folder (ours, or TRIDENT's) the one folder
`*/features_<encoder>` is taken.
"""

import csv
import json
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.config import nearest
from thinsection.errors import DatasetError, importing, require, rewording
from thinsection.pipeline.records import RECORDS
from thinsection.probe.data.sets import Embeddings, LabelledRows, Labels
from thinsection.probe.groups import table_groups
from thinsection.probe.statistics import Fold, drawn_folds
from thinsection.slide.readers import slide_suffixes
from thinsection.store.ledger import LEDGER_NAME, SLIDES, load_ledger
from thinsection.store.tiles_h5 import read_tiles

TextRow = Mapping[str, str]
TRAIN, VAL, TEST = "train", "val", "test"
TABLE_SUFFIXES = (".csv", ".tsv", ".parquet", ".json")
FOLDS = 3  # where data bring no split: one of so many validates
_WORDS = {TRAIN: "train training", VAL: "val valid validation dev", TEST: "test testing"}
SPLITS = {word: name for name, words in _WORDS.items() for word in words.split()}
_LISTED = dict.fromkeys(("case_slides", "slides", "slide_ids"), "slide_id")
_LISTED |= {"images": "path", "labels": "label", "events": "event", "days": "time"}
_LISTED["case_ids"] = "case_id"
KINDS = ("features", "slide_features")  # of tiles; else of slides
H5_SUFFIXES = (".h5", ".hdf5")
check = partial(require, error=DatasetError)


def read_rows(path: Path, required: Sequence[str]) -> list[dict[str, str]]:
    """Rows of a CSV (or TSV, Parquet or JSON, by its suffix) as text, spaces stripped."""
    with rewording("table must be readable text", path, OSError, ValueError, error=DatasetError):
        names, raw = _raw_rows(path)  # pyarrow's errors and UnicodeDecodeError are such
    require_columns([name.strip() for name in names], required, path)
    out = [{k.strip(): "" if v is None else str(v).strip() for k, v in r.items() if k} for r in raw]
    check(out, "table must have rows", f"none in {str(path)!r}")
    return out


def require_columns(columns: Iterable[str], required: Sequence[str], path: Path) -> None:
    """Raises DatasetError: a table lacks a column; it says what is there."""
    there = [*columns]
    for name in required:
        near = nearest(name, there) if there else ""
        got = f"{', '.join(there) or 'none'} in {str(path)!r}{near}"
        check(name in there, f"table must have the column {name!r}", got)


def _raw_rows(path: Path) -> tuple[Sequence[str], list[dict[str, Any]]]:
    """Column names and rows as they are in the file."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        with importing("Parquet tables need pyarrow", "export"):
            from pyarrow import parquet
        table = parquet.read_table(path)
        return table.column_names, table.to_pylist()
    if suffix == ".json":
        rows = _listed(json.loads(path.read_text(encoding="utf-8")), path)
        return [*dict.fromkeys(name for row in rows for name in row)], rows
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, delimiter="\t" if suffix == ".tsv" else ",")
        return reader.fieldnames or (), list(reader)


def _listed(task: Any, path: Path) -> list[dict[str, Any]]:
    """Rows of a task as nanopath and THUNDER write it: lists by split, or cases with their folds.

    Lists of the test split are left out.
    """
    rows: list[dict[str, Any]] = []
    whole = isinstance(task, dict) and "case_ids" in task
    shape = whole or (isinstance(task, dict) and {TRAIN, VAL} <= task.keys())
    check(shape, "list must have train and val, or case_ids", f"something else in {str(path)!r}")
    for split, part in {"": task}.items() if whole else ((s, task[s]) for s in (TRAIN, VAL)):
        columns = {_LISTED[name]: values for name, values in part.items() if name in _LISTED}
        sizes = {len(values) for values in columns.values()}
        check(len(sizes) == 1, "lists must be equally long", f"{sorted(sizes)} in {str(path)!r}")
        for values in zip(*columns.values(), strict=True):
            row = dict(zip(columns, values, strict=True)) | ({"split": split} if split else {})
            if "path" in row:  # of a file of embeddings in the list's order
                row["row"] = len(rows)
            for i, fold in enumerate(part.get("folds", ())):
                row[f"fold_{i}"] = TRAIN if row["case_id"] in fold[TRAIN] else VAL
            rows.append(row)
    return rows


def split_name(text: str, where: str) -> str:
    """'train', 'val' or 'test' of what a file calls it; raises DatasetError for another word."""
    word = text.strip().lower()
    check(word in SPLITS, "split must be train, val or test", f"{text!r} in {where}")
    return SPLITS[word]


def open_rows(rows: Sequence[TextRow], where: str, held_out: str = VAL) -> list[TextRow]:
    """The rows with their split in our words, without those of test: they stay shut.

    Where `held_out` is test, its rows are val and all others train.
    """
    if not rows or "split" not in rows[0]:
        return [*rows]
    named = [{**r, "split": split_name(r["split"], where)} for r in rows]
    if held_out == VAL:
        return [r for r in named if r["split"] != TEST]
    return [{**r, "split": VAL if r["split"] == TEST else TRAIN} for r in named]


def split_fold(splits: Sequence[str], where: str, remedy: str = "") -> Fold:
    """Rows of train and of val; raises DatasetError where one of them has none."""
    train, val = (np.flatnonzero(np.array(splits) == name) for name in (TRAIN, VAL))
    found = f"{len(train)} and {len(val)} in {where}{remedy}"
    check(len(train) and len(val), "split must name train and val rows", found)
    return train, val


def encode_labels(
    texts: Sequence[str], where: str, class_names: Sequence[str] = ()
) -> tuple[tuple[str, ...], Labels]:
    """(class names, labels): names sorted, as numbers where all are; labels are their ranks."""
    if "" in texts:
        raise DatasetError(f"label must not be empty, got '' in row {texts.index('')} of {where}")
    distinct = sorted(set(texts))
    if all(t.removeprefix("-").isdigit() for t in distinct):
        distinct.sort(key=int)
    names = tuple(class_names or distinct)
    for text in distinct:
        check(text in names, f"label must be one of {', '.join(names)}", f"{text!r} in {where}")
    index = {name: i for i, name in enumerate(names)}
    return names, np.array([index[t] for t in texts], dtype=np.int64)


def label_rows(
    rows: Sequence[TextRow],
    name: str,
    *,
    where: str,
    seed: int,
    class_names: Sequence[str] = (),
    rule: str = "split column",
    **content: Any,
) -> LabelledRows:
    """The one way from rows (label[, split, case_id, slide_id]) to classes, groups and a fold.

    Without a split one of FOLDS validates; `rule` tells of what is given, {} of what is drawn.
    """
    names, labels = encode_labels([r["label"] for r in rows], where, class_names)
    groups, splits = table_groups(rows, where), [r.get("split", "") for r in rows]
    if not rows or any(splits):
        every = "split must be given for every labelled region or tile, or for none"
        check(all(splits), every, f"some in {where}")
        remedy = f"; leave the column out to have one of {FOLDS} folds validate"
        fold = split_fold(splits, where, remedy)
    else:
        folds, over = drawn_folds(labels, groups, folds=FOLDS, seed=seed, class_names=names)
        drawn = f"fold 0 of {FOLDS} {over}" if over else f"stratified fold 0 of {FOLDS}"
        drawn, fold = f"{drawn}, seed {seed}", folds[0]
        rule = rule.format(drawn) if "{}" in rule else drawn
    content["facts"] = {"split_rule": rule, **content.get("facts", {})}
    return LabelledRows(name, names, labels, fold, groups=groups, **content)


def unexpected(root: Path, kind: str, looked_for: Sequence[str]) -> DatasetError:
    """The error of a folder that is not what was expected: what is there, what was looked for."""
    there = "nothing: no such folder"
    if root.exists():
        names = sorted(p.name + ("/" if p.is_dir() else "") for p in root.iterdir())
        there = ", ".join(names[:8]) + (f", ... ({len(names)})" if len(names) > 8 else "")
    found = f"{there or 'an empty folder'} in {str(root)!r}; looked for {', '.join(looked_for)}"
    return DatasetError(f"dataset must look like {kind}, got {found}")


def _h5_features(path: Path) -> npt.NDArray:
    import h5py

    with h5py.File(path, "r") as file:
        found = f"{sorted(file)} in {str(path)!r}; run `thinsection embed` first"
        check("features" in file, "embeddings must lie in the dataset 'features'", found)
        return np.asarray(file["features"])


def _torch_tensor(path: Path) -> npt.NDArray:
    """A tensor, or a list of one: eva writes both. Only tensors are loaded, no code runs."""
    import torch

    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        found = f"{str(path)!r}: {type(error).__name__}"
        raise DatasetError(f"embeddings must be a plain tensor, got {found}") from error
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    found = f"{type(value).__name__} in {str(path)!r}"
    check(isinstance(value, torch.Tensor), "embeddings must be one tensor", found)
    return value.float().numpy()  # type: ignore[no-any-return]


_READERS: dict[str, Callable[[Path], npt.NDArray]] = dict.fromkeys(H5_SUFFIXES, _h5_features)
_READERS |= {".npy": np.load, ".pt": _torch_tensor}
EMBEDDING_SUFFIXES = tuple(_READERS)


def read_embeddings(path: Path) -> Embeddings:
    """Embeddings of one file as float32 (N, D); one vector is (1, D), a leading axis of 1 goes.

    Memory: the file's content, twice where it is not float32.
    """
    suffix, shown = path.suffix.lower(), repr(str(path))
    check(path.is_file(), "embeddings must be an existing file", shown)
    check(suffix in _READERS, f"embeddings must be in {', '.join(_READERS)}", shown)
    with rewording("embeddings must be readable", path, OSError, ValueError, error=DatasetError):
        array = _READERS[suffix](path)
    array = array[None] if array.ndim == 1 else array
    array = array[0] if array.ndim == 3 and len(array) == 1 else array  # TRIDENT's batch axis
    fits = array.ndim == 2 and np.issubdtype(array.dtype, np.floating)
    check(fits, "embeddings must be floats (N, D)", f"{array.dtype} {array.shape} in {shown}")
    return np.ascontiguousarray(array, dtype=np.float32)


def gather_rows(paths: Sequence[Path], rows: Sequence[str], table: Path) -> Embeddings:
    """One row per entry ('' of a file of one), each file opened once."""
    by_path: dict[Path, list[int]] = {}
    for i, path in enumerate(paths):
        by_path.setdefault(path, []).append(i)
    out = np.empty((0, 0), dtype=np.float32)
    for path, entries in by_path.items():
        array = read_embeddings(path)
        n, dim = array.shape
        out = out if out.size else np.empty((len(paths), dim), dtype=np.float32)
        found = f"{dim} after {out.shape[1]} in {str(path)!r}"
        check(dim == out.shape[1], "embeddings must have the same D", found)
        for i in entries:
            text = rows[i] or ("0" if n == 1 else "")
            rule = f"row must lie in 0..{n - 1} of {path.name!r}"
            check(text.isdigit() and int(text) < n, rule, f"{text!r} in {str(table)!r}")
            out[i] = array[int(text)]
    return out


def probed(path: Path) -> dict[str, Any]:
    """What a file of embeddings says of its encoder and its tiles; {} where it says nothing."""
    if path.suffix.lower() not in H5_SUFFIXES:
        return {}
    import h5py

    with h5py.File(path, "r") as file:
        places = (file, *(file[name] for name in ("coords", "features") if name in file))
        said = {name: value for place in places for name, value in place.attrs.items()}
    names = {"encoder": "encoder", "weights_hash": "weights_sha256", "precision": "precision"}
    found = {fact: str(said[name]) for name, fact in names.items() if name in said}
    size, mpp = said.get("patch_size"), said.get("tile_mpp")
    return found | ({"tiles": f"{size} px at {mpp:g} µm/px"} if size and mpp else {})


def is_results(path: Path) -> bool:
    """Whether a folder is what a run of ours (or of TRIDENT) wrote, or lies in it: no dataset."""
    run = all((path / name).is_dir() for name in (SLIDES, RECORDS))  # whatever else it holds
    depths = ("", "*/", f"{SLIDES}/*/")  # a slide's folder, the folder of slides, the whole
    has_ledger = run or any(any(path.glob(f"{depth}{LEDGER_NAME}")) for depth in depths)
    return has_ledger or any(_features(path, kind) for kind in KINDS)


def features_folder(path: Path, *kinds: str) -> Path:
    """The folder of embeddings: the path itself, or a results folder's one of the first kind."""
    if not is_results(path):
        return path
    found = next(filter(None, (_features(path, kind) for kind in kinds)), [])
    none = f"no */features_<encoder> in {str(path)!r}; run `thinsection embed` first"
    check(found, "results must hold embeddings", none)
    names = ", ".join(str(p.relative_to(path)) for p in found)
    got = f"{names} in {str(path)!r}; name one, as {str(found[0])!r}"
    check(len(found) == 1, "results must hold one folder of embeddings", got)
    return found[0]


def _features(path: Path, kind: str) -> list[Path]:
    """Folders of embeddings in a results folder, or in the folder of one of its tile grids."""
    found = [p for depth in ("", "*/") for p in path.glob(f"{depth}{kind}_*")]
    return sorted(p for p in found if any(p.glob("*.h5")))


def known_patient(path: Path, slide_id: str) -> str:
    """The patient that the results folder around a slide's file knows; '' where it has none."""
    around = path.parents[1:3]  # of <grid>/features_<encoder>/<slide_id>.h5
    known = (load_ledger(folder, slide_id).slide.get("patient_id") for folder in around)
    return str(next(filter(None, known), ""))


def find_tile_files(path: Path) -> list[Path]:
    """The tile files of a path: the file itself, a folder of *.h5, or a results folder's."""
    if path.is_file():
        return [path]
    folder = features_folder(path, "features")
    looked_for = "<slide_id>.h5 and */features_<encoder>/<slide_id>.h5"
    got = f"none in {str(folder)!r}; looked for {looked_for}"
    check(found := sorted(folder.glob("*.h5")), "data must hold tile embeddings", got)
    return found


def slide_files(folder: Path, slide_ids: Sequence[str]) -> dict[str, Path]:
    """The embeddings file of each slide: <id>.h5|.npy|.pt, with or without the slide's suffix."""
    folder, kept = features_folder(folder, *KINDS), (*slide_suffixes(), *EMBEDDING_SUFFIXES)
    found, missing = dict[str, Path](), dict[str, list[Path]]()
    for slide_id in slide_ids:
        suffix = Path(slide_id).suffix  # tables often keep it
        names = [slide_id, slide_id.removesuffix(suffix)] if suffix.lower() in kept else [slide_id]
        tried = [folder / f"{name}{of_file}" for name in names for of_file in EMBEDDING_SUFFIXES]
        if there := next(filter(Path.is_file, tried), None):
            found[slide_id] = there
        else:
            missing[slide_id] = tried
    if missing:
        some = ", ".join([*missing][:3]) + (", ..." if len(missing) > 3 else "")
        looked_for = ", ".join(str(p.relative_to(folder)) for p in next(iter(missing.values())))
        got = f"none for {len(missing)} of {len({*slide_ids})} ({some}); looked for {looked_for}"
        raise DatasetError(f"each slide must have embeddings in {str(folder)!r}, got {got}")
    return found


def drawn_classes(path: Path) -> dict[str, npt.NDArray]:
    """Columns `class_NAME` of the tile table beside a file of embeddings: what was drawn."""
    tiles, prefix = path.parent.parent / "tiles" / path.name, "class_"
    columns = read_tiles(tiles).columns if tiles.is_file() else {}
    return {n.removeprefix(prefix): c for n, c in columns.items() if n.startswith(prefix)}
