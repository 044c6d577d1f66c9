"""Files of tile and slide embeddings: ours, TRIDENT's and CLAM's (.h5), .npy, and eva's .pt.

Of .pt files only tensors are loaded. A folder of embeddings is flat, `<slide_id>.h5`; of a results
folder (ours, or TRIDENT's) the one folder `*/features_<encoder>` is taken.
"""

import pickle
import tokenize
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import (
    DatasetError,
    InvalidInputError,
    StoreError,
    require,
    rewording,
)
from thinsection.evaluation.tables import check
from thinsection.pipeline.folder import one_address, open_results
from thinsection.pipeline.records import RECORDS
from thinsection.slide.readers import slide_suffixes
from thinsection.stages.facts import ledger_facts
from thinsection.store.ledger import LEDGER_NAME, SLIDES, load_ledger
from thinsection.store.tile_tables import EmbeddingRows
from thinsection.store.tiles_h5 import open_h5, stored_dataset

Embeddings = npt.NDArray[np.float32]  # (N, D)
# slide id -> file, slide id -> why it has none, and where they were looked for
Found = tuple[dict[str, Path], dict[str, str], str]
KINDS = ("features", "slide_features")  # of tiles; else of slides
H5_SUFFIXES = (".h5", ".hdf5")
_HOMES = ("h5_files", "pt_files", "tile_embeddings")  # folders of CLAM and slide2vec


def _h5_features(path: Path) -> npt.NDArray:
    with open_h5(path) as file:
        found = f"{sorted(file)} in {str(path)!r}; run `thinsection embed` first"
        check(
            "features" in file, "embeddings must lie in the dataset 'features'", found
        )
        return np.asarray(stored_dataset(file, "features", path)[...])


def _npy_array(path: Path) -> npt.NDArray:
    """An array whose header promises no more than the file has; ValueError for what is none."""
    try:
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    except (SyntaxError, tokenize.TokenError) as error:  # of the header's text
        raise ValueError(f"no header of an array: {error}") from None
    return np.array(mapped)


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


_READERS: dict[str, Callable[[Path], npt.NDArray]] = dict.fromkeys(
    H5_SUFFIXES, _h5_features
)
_READERS |= {".npy": _npy_array, ".pt": _torch_tensor}
EMBEDDING_SUFFIXES = tuple(_READERS)


def read_embeddings(path: Path) -> Embeddings:
    """Embeddings of one file as float32 (N, D); one vector is (1, D), a leading axis of 1 goes.

    Memory: the file's content, twice where it is not float32.
    """
    suffix, shown = path.suffix.lower(), repr(str(path))
    check(path.is_file(), "embeddings must be an existing file", shown)
    check(suffix in _READERS, f"embeddings must be in {', '.join(_READERS)}", shown)
    try:
        with rewording(
            "embeddings must be readable", path, OSError, ValueError, error=DatasetError
        ):
            array = _READERS[suffix](path)
    except StoreError as error:
        raise DatasetError(
            f"embeddings must be readable, got {shown}: {error}"
        ) from error
    array = array[None] if array.ndim == 1 else array
    array = (
        array[0] if array.ndim == 3 and len(array) == 1 else array
    )  # TRIDENT's batch axis
    fits = array.ndim == 2 and np.issubdtype(array.dtype, np.floating)
    check(
        fits,
        "embeddings must be floats (N, D)",
        f"{array.dtype} {array.shape} in {shown}",
    )
    return np.ascontiguousarray(array, dtype=np.float32)


def open_embeddings(path: Path) -> EmbeddingRows | npt.NDArray[Any]:
    """Embeddings (N, D) as a file stores them; rows of HDF5 are read when asked for."""
    is_h5 = path.suffix.lower() in H5_SUFFIXES
    return EmbeddingRows(path) if is_h5 else read_embeddings(path)


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
        places = (
            file,
            *(file[name] for name in ("coords", "features") if name in file),
        )
        said = {name: value for place in places for name, value in place.attrs.items()}
    names = {
        "encoder": "encoder",
        "weights_hash": "weights_sha256",
        "precision": "precision",
    }
    found = {fact: str(said[name]) for name, fact in names.items() if name in said}
    size, mpp = said.get("patch_size"), said.get("tile_mpp")
    return found | ({"tiles": f"{size} px at {mpp:g} µm/px"} if size and mpp else {})


def is_results(path: Path) -> bool:
    """Whether a folder is what a run of ours (or of TRIDENT) wrote, or lies in it: no dataset."""
    run = all(
        (path / name).is_dir() for name in (SLIDES, RECORDS)
    )  # whatever else it holds
    depths = (
        "",
        "*/",
        f"{SLIDES}/*/",
    )  # a slide's folder, the folder of slides, the whole
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
    folder, kept = (
        features_folder(folder, *KINDS),
        (*slide_suffixes(), *EMBEDDING_SUFFIXES),
    )
    found, missing = dict[str, Path](), dict[str, list[Path]]()
    for slide_id in slide_ids:
        suffix = Path(slide_id).suffix  # tables often keep it
        names = (
            [slide_id, slide_id.removesuffix(suffix)]
            if suffix.lower() in kept
            else [slide_id]
        )
        tried = [
            folder / f"{name}{of_file}"
            for name in names
            for of_file in EMBEDDING_SUFFIXES
        ]
        if there := next(filter(Path.is_file, tried), None):
            found[slide_id] = there
        else:
            missing[slide_id] = tried
    if missing:
        some = ", ".join([*missing][:3]) + (", ..." if len(missing) > 3 else "")
        looked_for = ", ".join(
            str(p.relative_to(folder)) for p in next(iter(missing.values()))
        )
        got = f"none for {len(missing)} of {len({*slide_ids})} ({some}); looked for {looked_for}"
        raise DatasetError(
            f"each slide must have embeddings in {str(folder)!r}, got {got}"
        )
    return found


def feature_files(data: Path, features: str | None = None) -> Found:
    """Slide id -> file of embeddings, slide id -> why it has none, and where they were found.

    Of a results folder what its ledgers know; else a folder of files of ours, TRIDENT, CLAM (its
    feat_dir), STAMP (its feature_dir) or slide2vec (its output).

    Raises DatasetError, StoreError, InvalidInputError: none; or several, and none is named.
    """
    if (data / SLIDES).is_dir():
        results = open_results(data)
        known = (
            (*results.features, *results.slide_features)
            if features
            else results.features
        )
        address = one_address(known or results.slide_features, features, "features")
        made = {s: lg for s, lg in results.ledgers.items() if address in lg.stages}
        empty = [
            s
            for s, lg in made.items()
            if ledger_facts(lg, lg.stages).get("num_tiles") == 0
        ]
        found = {
            s: data / next(iter(lg.stages[address].files)) for s, lg in made.items()
        }
        lacking = dict.fromkeys(empty, "no tiles") | results.failures()
        return {s: p for s, p in found.items() if s not in empty}, lacking, address
    home = next((data / n for n in _HOMES if (data / n).is_dir()), None)
    folder, suffixes = (
        home or features_folder(data, "features"),
        EMBEDDING_SUFFIXES,
    )
    check(folder.is_dir(), "data must be a folder", repr(str(folder)))
    files = sorted(p for p in folder.iterdir() if p.suffix.lower() in suffixes)
    got = f"none of {', '.join(suffixes)} in {str(folder)!r}; run `thinsection embed`"
    check(files, "data must hold embeddings", got)
    return {p.stem: p for p in files}, {}, folder.name


def check_finite(embeddings: Embeddings, ids: Sequence[str]) -> None:
    """Raises InvalidInputError naming the rows with NaN or inf.

    Memory: O(N); a row's sum is non-finite where a value is (float64, so nothing overflows).
    """
    bad = np.flatnonzero(~np.isfinite(embeddings.sum(axis=1, dtype=np.float64)))
    if len(bad):
        shown = some_names([ids[i] for i in bad.tolist()])
        found = f"NaN or inf in {len(bad)} of {len(ids)} rows ({shown}); embed these again, in fp32"
        raise InvalidInputError(f"embeddings must be finite, got {found}")


def check_vectors(embeddings: Embeddings, ids: Sequence[str]) -> None:
    """Raises InvalidInputError: not finite, all rows alike, or rows of zeros. Memory: N D bytes."""
    check_finite(embeddings, ids)
    alike = len(embeddings) > 1 and bool((embeddings == embeddings[0]).all())
    remedy = f"{len(embeddings)} times the same; see what the encoder was given"
    require(not alike, "embeddings must differ between rows", remedy)
    zero = np.flatnonzero(~embeddings.any(axis=1))
    shown = some_names([ids[i] for i in zero.tolist()])
    found = f"zeros in {len(zero)} of {len(ids)} rows ({shown})"
    require(not len(zero), "embeddings must not be zero", found)


def some_names(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
