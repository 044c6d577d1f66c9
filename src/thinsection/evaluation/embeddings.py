"""Reads files of tile and slide embeddings: ours, TRIDENT's and CLAM's .h5, .npy, and eva's .pt.

From .pt files only tensors are loaded. A folder of embeddings has a file `<slide_id>.h5` for each
slide. In a results folder (ours, or TRIDENT's), the folder `*/features_<encoder>` must be unique.
"""

import pickle
import tokenize
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from thinsection.errors import (
    ChoiceError,
    DatasetError,
    InvalidInputError,
    StoreError,
    rewording,
    slide_boundary,
)
from thinsection.evaluation.cases import listed_names
from thinsection.report.index import is_results_folder
from thinsection.results.folder import Results, open_results
from thinsection.slide.ids import KnownIds
from thinsection.store.hdf5 import open_h5
from thinsection.store.ledger import LEDGER_NAME, SLIDES, load_ledger, load_ledgers
from thinsection.store.outcome import grid_of, ledger_facts
from thinsection.store.tile_tables import EmbeddingRows
from thinsection.types import Floats, Reals

Embeddings = npt.NDArray[np.float32]  # (N, D)
# reason for a slide whose embeddings are in its ledger but not on disk
GONE = "its embeddings are not in this folder any more"
H5_SUFFIXES = (".h5", ".hdf5")
_TILE_FEATURES = "features"
_SLIDE_FEATURES = "slide_features"
# folders in which CLAM and slide2vec store embeddings
_FOLDERS_OF_OTHERS = ("h5_files", "pt_files", "tile_embeddings")


class FeatureFiles(NamedTuple):
    """Embedding files of a folder, by slide."""

    files: dict[str, Path]  # by slide id
    lacking: dict[str, str]  # reasons why slides have no embeddings, by slide id
    place: str  # folder of the embeddings, for messages
    # reasons why embeddings or ledgers of slides cannot be used, by slide id
    damaged: Mapping[str, str] = MappingProxyType({})

    @property
    def missing(self) -> dict[str, str]:
        """Reasons why slides have no usable embeddings, by slide id."""
        return {**self.lacking, **self.damaged}

    def without(self, damaged: Mapping[str, str]) -> "FeatureFiles":
        """Returns the files without slides that turned out to be damaged."""
        files = {s: file for s, file in self.files.items() if s not in damaged}
        return self._replace(files=files, damaged={**self.damaged, **damaged})

    def taking(self, slides: Collection[str]) -> "FeatureFiles":
        """Returns the files and the reasons for these slides only."""
        return self._replace(
            files={s: file for s, file in self.files.items() if s in slides},
            lacking={s: why for s, why in self.lacking.items() if s in slides},
            damaged={s: why for s, why in self.damaged.items() if s in slides},
        )


def _h5_features(path: Path) -> npt.NDArray[np.generic]:
    with open_h5(path) as file:
        names = sorted(file)
    if "features" not in names:
        raise DatasetError(
            f"embeddings must be in the dataset 'features', got {names} in {str(path)!r}; run "
            "`thinsection run` first"
        )
    return EmbeddingRows(path)[:]


def _npy_array(path: Path) -> npt.NDArray[np.generic]:
    """Array of a .npy file. Raises ValueError: its header is damaged, or the file is truncated."""
    try:
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    # the header is text that fails to parse
    except (SyntaxError, tokenize.TokenError) as error:
        raise ValueError(f"not the header of an array: {error}") from None
    return np.array(mapped)


def _torch_tensor(path: Path) -> npt.NDArray[np.generic]:
    """A tensor, or a list of one tensor as eva writes it. Only tensors are loaded; no code runs."""
    import torch

    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise DatasetError(
            f"embeddings must be a plain tensor, got {str(path)!r}: {type(error).__name__}"
        ) from error
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, torch.Tensor):
        raise DatasetError(
            f"embeddings must be one tensor, got {type(value).__name__} in {str(path)!r}"
        )
    return value.float().numpy()


_READERS: dict[str, Callable[[Path], npt.NDArray[np.generic]]] = {
    ".h5": _h5_features,
    ".hdf5": _h5_features,
    ".npy": _npy_array,
    ".pt": _torch_tensor,
}
EMBEDDING_SUFFIXES = tuple(_READERS)


def read_embeddings(path: Path) -> Embeddings:
    """Embeddings of one file as float32 (N, D); a vector becomes (1, D), a batch axis is removed.

    Memory: the file's content; twice if it is not float32.
    """
    suffix = path.suffix.lower()
    shown = repr(str(path))
    if not path.is_file():
        raise DatasetError(f"embeddings must be an existing file, got {shown}")
    if suffix not in _READERS:
        raise DatasetError(f"embeddings must be in {', '.join(_READERS)}, got {shown}")
    rule = "embeddings must be readable"
    try:
        with rewording(rule, path, OSError, ValueError, error=DatasetError):
            array = _READERS[suffix](path)
    except StoreError as error:
        raise DatasetError(f"{rule}, got {shown}: {error}") from error
    if array.ndim == 1:
        array = array[None]
    if array.ndim == 3 and len(array) == 1:  # TRIDENT's batch axis
        array = array[0]
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.floating):
        raise DatasetError(
            f"embeddings must be floats (N, D), got {array.dtype} {array.shape} in {shown}"
        )
    return np.ascontiguousarray(array, dtype=np.float32)


def open_embeddings(path: Path, *, verify: bool = True) -> EmbeddingRows | Embeddings:
    """Embeddings (N, D) in the type of the file; rows of HDF5 files are read on demand.

    `verify` is False if the caller has checked the file.
    """
    if path.suffix.lower() in H5_SUFFIXES:
        return EmbeddingRows(path, verify=verify)
    return read_embeddings(path)


def gather_rows(
    paths: Sequence[Path],
    rows: Sequence[str],
    table: Path,
    leave_out: Callable[[str, str], None] | None = None,
) -> tuple[Embeddings, list[int]]:
    """One embedding per entry of a table, and the numbers of these entries; opens each file once.

    `rows` has the row number of each entry in its file; '' if the file has one row. `leave_out` is
    called with a file that cannot be used and the reason, and its entries are left out; with None,
    the error is raised.
    """
    entries_by_path: dict[Path, list[int]] = {}
    for entry, path in enumerate(paths):
        entries_by_path.setdefault(path, []).append(entry)
    gathered = np.empty((0, 0), dtype=np.float32)
    used_entries: list[int] = []
    for path, entries in entries_by_path.items():
        array = None
        with slide_boundary(path.name, leave_out):
            array = read_embeddings(path)
        if array is None:
            continue
        used_entries += entries
        num_rows, dim = array.shape
        if not gathered.size:
            gathered = np.empty((len(paths), dim), dtype=np.float32)
        if dim != gathered.shape[1]:
            raise DatasetError(
                f"embeddings must have the same number of channels in all files, got {dim} "
                f"after {gathered.shape[1]} in {str(path)!r}"
            )
        for entry in entries:
            text = rows[entry] or ("0" if num_rows == 1 else "")
            if not text.isdigit() or int(text) >= num_rows:
                raise DatasetError(
                    f"row must be in 0..{num_rows - 1} of {path.name!r}, got {text!r} in "
                    f"{str(table)!r}"
                )
            gathered[entry] = array[int(text)]
    if not used_entries:
        raise DatasetError(
            f"embeddings must be readable, got none for the rows of {str(table)!r}"
        )
    used_entries.sort()
    if len(used_entries) < len(paths):
        gathered = gathered[used_entries]
    return gathered, used_entries


def encoder_facts(path: Path) -> dict[str, str]:
    """Encoder and tile size of a file of embeddings, from its attributes; {} if it has none."""
    if path.suffix.lower() not in H5_SUFFIXES:
        return {}
    import h5py

    attributes: dict[str, Any] = {}
    with h5py.File(path, "r") as file:
        attributes.update(file.attrs.items())
        for name in ("coords", "features"):
            if name in file:
                attributes.update(file[name].attrs.items())
    facts = {}
    names = {
        "encoder": "encoder",
        "weights_hash": "weights_sha256",
        "precision": "precision",
    }
    for name, fact in names.items():
        if name in attributes:
            facts[fact] = str(attributes[name])
    size = attributes.get("patch_size")
    mpp = attributes.get("tile_mpp")
    if size and mpp:
        facts["tiles"] = f"{size} px at {mpp:g} µm/px"
    return facts


def is_results(path: Path) -> bool:
    """True for a results folder of ours (or of TRIDENT), and for a folder inside of one."""
    if is_results_folder(path):
        return True
    # the path may be a slide's folder, the folder of slides, or the results folder
    for depth in ("", "*/", f"{SLIDES}/*/"):
        if any(path.glob(f"{depth}{LEDGER_NAME}")):
            return True
    return any(
        _feature_folders(path, kind) for kind in (_TILE_FEATURES, _SLIDE_FEATURES)
    )


def features_folder(path: Path, *kinds: str) -> Path:
    """The folder of embeddings: the path itself, or one in a results folder, of the first kind."""
    if not is_results(path):
        return path
    by_kind = [_feature_folders(path, kind) for kind in kinds]
    folders = next(filter(None, by_kind), [])
    if not folders:
        raise DatasetError(
            f"results must contain embeddings, got no */features_<encoder> in {str(path)!r}; "
            "run `thinsection run` first"
        )
    if len(folders) > 1 and (path / SLIDES).is_dir():
        by_address = {f.relative_to(path).as_posix(): f for f in folders}
        # if there are several, the error below explains how to choose
        with suppress(ChoiceError):
            chosen = open_results(path).choose_features(
                None, [*by_address], chooser="its path in place of the folder's"
            )
            return by_address[chosen]
    if len(folders) > 1:
        names = ", ".join(str(folder.relative_to(path)) for folder in folders)
        raise DatasetError(
            f"results must contain one folder of embeddings, got {names} in {str(path)!r}; name "
            f"one of them, such as {str(folders[0])!r}"
        )
    return folders[0]


def _feature_folders(path: Path, kind: str) -> list[Path]:
    """Folders of embeddings in a results folder, or in the folder of one tile grid."""
    folders = [*path.glob(f"{kind}_*"), *path.glob(f"*/{kind}_*")]
    return sorted(folder for folder in folders if any(folder.glob("*.h5")))


def damaged_slides(folder: Path) -> dict[str, str]:
    """Slides whose ledger is damaged or lists a missing file, and the reasons.

    Args:
        folder: `GRID/features_NAME` of a results folder; other folders give {}.
    """
    out = folder.absolute().parents[1] if len(folder.absolute().parts) > 2 else folder
    if not (out / SLIDES).is_dir():
        return {}
    address = str(folder.absolute().relative_to(out))
    reasons = {}
    for ledger in load_ledgers(out):
        record = ledger.stages.get(address)
        if ledger.damage:
            reasons[ledger.slide_id] = ledger.damage
        elif record and any(not (out / name).is_file() for name in record.files):
            reasons[ledger.slide_id] = GONE
    return reasons


def known_patient(path: Path, slide_id: str) -> str:
    """The patient of a slide, according to the results folder of its file; '' if unknown."""
    # the file is <grid>/features_<encoder>/<slide_id>.h5, or one folder less deep
    for folder in path.parents[1:3]:
        patient = load_ledger(folder, slide_id).slide.get("patient_id")
        if patient:
            return str(patient)
    return ""


def find_tile_files(path: Path) -> list[Path]:
    """The tile files of a path: the file itself, a folder's *.h5, or those of a results folder."""
    if path.is_file():
        return [path]
    folder = features_folder(path, _TILE_FEATURES)
    files = sorted(folder.glob("*.h5"))
    if not files:
        raise DatasetError(
            f"data must contain tile embeddings, got none in {str(folder)!r}; searched for "
            "<slide_id>.h5 and */features_<encoder>/<slide_id>.h5"
        )
    return files


def slide_files(
    data: Path,
    slide_ids: Sequence[str],
    leave_out: Callable[[str, str], None] | None = None,
) -> dict[str, Path]:
    """The embeddings file of each slide: <id>.h5|.npy|.pt, see `KnownIds`.

    `leave_out` is called with a slide without a file and the reason; None raises an error.

    Raises DatasetError: a slide has no file; with `leave_out`: no slide has a file.
    """
    folder = features_folder(data, _TILE_FEATURES, _SLIDE_FEATURES)
    files_by_id: dict[str, Path] = {}
    # if a slide has files of several types, the first of EMBEDDING_SUFFIXES is used
    for suffix in reversed(EMBEDDING_SUFFIXES):
        files_by_id |= {path.stem: path for path in folder.glob(f"*{suffix}")}
    known = KnownIds(files_by_id)
    ids = known.match(slide_ids, repr(str(folder)))
    missing = [
        known.words(name) for name in dict.fromkeys(slide_ids) if name not in ids
    ]
    if missing and leave_out is not None and ids:
        for name in dict.fromkeys(slide_ids):
            if name not in ids:
                leave_out(name, f"no embeddings in {folder.name}")
    elif missing:
        raise DatasetError(
            f"each slide must have embeddings in {str(folder)!r}, got none for {len(missing)} "
            f"of {len(set(slide_ids))} ({listed_names(missing)}); searched for files of type "
            f"{', '.join(EMBEDDING_SUFFIXES)}"
        )
    return {name: files_by_id[file_id] for name, file_id in ids.items()}


def feature_files(data: Path, features: str | None = None) -> FeatureFiles:
    """Embedding files by slide, slides without embeddings, and the folder of the files.

    In a results folder, the ledgers list the files. Another folder must have files of ours, of
    TRIDENT, CLAM (its feat_dir), STAMP (its feature_dir) or slide2vec (its output).

    Raises DatasetError, StoreError, InvalidInputError: there are no embeddings, or several, and
    `features` is not the name of one of them.
    """
    if (data / SLIDES).is_dir():
        return _result_files(data, open_results(data), features)
    folder = None
    for name in _FOLDERS_OF_OTHERS:
        if folder is None and (data / name).is_dir():
            folder = data / name
    if folder is None:
        folder = features_folder(data, _TILE_FEATURES)
    if not folder.is_dir():
        raise DatasetError(f"data must be a folder, got {str(folder)!r}")
    files = sorted(
        path for path in folder.iterdir() if path.suffix.lower() in EMBEDDING_SUFFIXES
    )
    if not files:
        raise DatasetError(
            f"data must contain embeddings, got no file of type {', '.join(EMBEDDING_SUFFIXES)} "
            f"in {str(folder)!r}; run `thinsection run` first"
        )
    return FeatureFiles({path.stem: path for path in files}, {}, folder.name)


def _result_files(data: Path, results: Results, features: str | None) -> FeatureFiles:
    """Files that the ledgers of a results folder list."""
    addresses = results.features
    if features and not any(features in address for address in results.features):
        addresses = (*results.features, *results.slide_features)
    address = results.choose_features(features, addresses or results.slide_features)
    files: dict[str, Path] = {}
    lacking: dict[str, str] = {}
    damaged: dict[str, str] = {}
    for slide_id, ledger in results.ledgers.items():
        if ledger.damage:
            damaged[slide_id] = ledger.damage
        if address not in ledger.stages:
            continue
        grid_stages = [
            name for name in ledger.stages if grid_of(name) == grid_of(address)
        ]
        if ledger_facts(ledger, grid_stages).get("num_tiles") == 0:
            lacking[slide_id] = "no tiles"
            continue
        file = data / next(iter(ledger.stages[address].files))
        if file.is_file():
            files[slide_id] = file
        else:
            damaged[slide_id] = GONE
    return FeatureFiles(files, lacking | results.failures(), address, damaged)


def unsigned_note(embeddings: FeatureFiles) -> list[str]:
    """Note that the files have no checksums of thinsection; [] if the first readable one has."""
    for path in embeddings.files.values():
        with suppress(StoreError):
            is_h5 = path.suffix.lower() in H5_SUFFIXES
            if is_h5 and EmbeddingRows(path).is_signed:
                return []
            return [
                f"files in {embeddings.place} carry no checksums of thinsection: they are read "
                "as they are"
            ]
    return []


def check_finite(embeddings: Reals, ids: Sequence[str]) -> None:
    """Raises InvalidInputError naming the rows with NaN or inf.

    A row has such a value if and only if its sum in float64 is not finite.

    Memory: O(N).
    """
    bad = np.flatnonzero(~np.isfinite(embeddings.sum(axis=1, dtype=np.float64)))
    if len(bad):
        names = listed_names([repr(ids[i]) for i in bad.tolist()])
        raise InvalidInputError(
            f"embeddings must be finite, got NaN or inf in {len(bad)} of {len(ids)} rows "
            f'({names}); compute these again with precision="fp32"'
        )


def check_finite_rows(tiles: Reals, path: Path) -> None:
    """Raises InvalidInputError naming rows of a file (N, D) with NaN or inf.

    Memory: O(N) if a value is not finite.
    """
    # a sum in float32 may overflow although every value is finite, so check them one by one
    with np.errstate(over="ignore", invalid="ignore"):
        is_finite = np.isfinite(tiles.sum())
    if not is_finite:
        check_finite(tiles, [f"row {i} of {path.name}" for i in range(len(tiles))])


def added_in_order(total: Floats, rows: Floats) -> Floats:
    """Sum (D,) of `total` and of rows (N, D): the bits that NumPy gives for one array of all rows.

    The first row becomes part of the sum: pass rows of your own.
    """
    rows[0] += total
    return np.asarray(rows.sum(axis=0))


def check_vectors(embeddings: Embeddings, ids: Sequence[str]) -> None:
    """Raises InvalidInputError: not finite, all rows equal, or rows of zeros. Memory: N D bytes."""
    check_finite(embeddings, ids)
    count = len(embeddings)
    if count > 1 and (embeddings == embeddings[0]).all():
        raise InvalidInputError(
            f"embeddings must differ between rows, got {count} equal rows; check the images "
            "that the encoder received"
        )
    zero = np.flatnonzero(~embeddings.any(axis=1))
    if len(zero):
        names = listed_names([repr(ids[i]) for i in zero.tolist()])
        raise InvalidInputError(
            f"embeddings must not be zero, got only zeros in {len(zero)} of {len(ids)} rows "
            f"({names})"
        )
