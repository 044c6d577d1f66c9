"""Embeddings in files: ours, TRIDENT's and CLAM's (.h5), .npy, and eva's .pt (tensors only).

A folder of them is flat, `<slide_id>.h5`; of a results folder (ours, or TRIDENT's) the one folder
`*/features_<encoder>` is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinsection.errors import DatasetError
from thinsection.pipeline.records import RECORDS
from thinsection.probe.data.sets import Embeddings
from thinsection.slide.readers import slide_suffixes
from thinsection.store.ledger import LEDGER_NAME, SLIDES
from thinsection.store.tiles_h5 import read_tiles
from thinsection.types import CoordsL0

H5_SUFFIXES = (".h5", ".hdf5")
EMBEDDING_SUFFIXES = (*H5_SUFFIXES, ".npy", ".pt")
RUN_FOLDERS = (SLIDES, RECORDS)  # with both a folder is a run's, whatever else it holds


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideTiles:
    """The tiles of one slide.

    Attributes:
        slide_id: the file's attribute, else its name.
        coords_l0: int64 (N, 2).
        tile_px_l0: edge of a tile in level-0 px.
        embeddings: float32 (N, D).
        encoder: name of the encoder, where the file says.
    """

    slide_id: str
    coords_l0: CoordsL0
    tile_px_l0: float
    embeddings: Embeddings
    encoder: str | None


def read_embeddings(path: Path) -> Embeddings:
    """Embeddings of one file as float32 (N, D); one vector is (1, D), a leading axis of 1 goes.

    Memory: the file's content, twice where it is not float32.

    Raises:
        DatasetError: unreadable, of another kind, or not of a shape that fits.
    """
    suffix = path.suffix.lower()
    if not path.is_file():
        raise DatasetError(f"embeddings must be an existing file, got {str(path)!r}")
    try:
        if suffix in H5_SUFFIXES:
            array = _h5_features(path)
        elif suffix == ".npy":
            array = np.load(path, allow_pickle=False)
        elif suffix == ".pt":
            array = _torch_tensor(path)
        else:
            raise DatasetError(
                f"embeddings must be in {', '.join(EMBEDDING_SUFFIXES)}, got {str(path)!r}"
            )
    except DatasetError:
        raise
    except (OSError, ValueError) as error:
        raise DatasetError(f"embeddings must be readable, got {str(path)!r}: {error}") from error
    if array.ndim == 3 and array.shape[0] == 1:  # TRIDENT's batch axis
        array = array[0]
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.floating):
        raise DatasetError(
            f"embeddings must be floats (N, D), got {array.dtype} {array.shape} in {str(path)!r}"
        )
    return np.ascontiguousarray(array, dtype=np.float32)


def _h5_features(path: Path) -> npt.NDArray:
    import h5py

    with h5py.File(path, "r") as file:
        if "features" not in file:
            raise DatasetError(
                f"embeddings must lie in the dataset 'features', got {sorted(file)} in "
                f"{str(path)!r}; run `thinsection embed` first"
            )
        return np.asarray(file["features"])


def _torch_tensor(path: Path) -> npt.NDArray:
    """A tensor, or a list of one: eva writes both. Only tensors are loaded, no code runs."""
    import pickle

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


def read_slide_tiles(path: Path) -> SlideTiles:
    """Coordinates, embeddings and names of one slide's tiles.

    Memory: the file's content, its embeddings twice where they are not float32.

    Raises:
        StoreError: unreadable, or without coordinates.
        DatasetError: no embeddings, or no tile size.
    """
    tiles = read_tiles(path)
    if tiles.features is None:
        raise DatasetError(
            f"tiles must have 'features', got only coordinates in {str(path)!r}; "
            "run `thinsection embed` first"
        )
    if tiles.tile_px_l0 is None:
        raise DatasetError(
            f"coords must have the attribute 'patch_size_level0', got "
            f"{sorted(tiles.attributes)} in {str(path)!r}"
        )
    encoder = tiles.attributes.get("encoder")
    return SlideTiles(
        slide_id=_text(tiles.attributes.get("name") or path.stem),
        coords_l0=tiles.coords_l0,
        tile_px_l0=float(tiles.tile_px_l0),
        embeddings=np.ascontiguousarray(tiles.features, dtype=np.float32),
        encoder=None if encoder is None else _text(encoder),
    )


def is_results(path: Path) -> bool:
    """Whether a folder is what a run of ours (or of TRIDENT) wrote, or lies in it: no dataset."""
    if all((path / name).is_dir() for name in RUN_FOLDERS):
        return True
    depths = ("", "*/", f"{SLIDES}/*/")  # a slide's folder, the folder of slides, the whole
    has_ledger = any(any(path.glob(f"{depth}{LEDGER_NAME}")) for depth in depths)
    return has_ledger or any(_features(path, kind) for kind in ("features", "slide_features"))


def features_folder(path: Path, *, slides_too: bool = False) -> Path:
    """The folder of embeddings: the path itself, or the one that a results folder holds.

    Args:
        path: a folder.
        slides_too: True takes slide embeddings where there are no tile embeddings.

    Raises:
        DatasetError: a results folder with none, or with several.
    """
    if not is_results(path):
        return path
    found = _features(path, "features")
    if slides_too and not found:
        found = _features(path, "slide_features")
    if not found:
        raise DatasetError(
            f"results must hold embeddings, got no */features_<encoder> in {str(path)!r}; "
            "run `thinsection embed` first"
        )
    if len(found) > 1:
        names = ", ".join(str(p.relative_to(path)) for p in found)
        raise DatasetError(
            f"results must hold one folder of embeddings, got {names} in {str(path)!r}; "
            f"name one, as {str(found[0])!r}"
        )
    return found[0]


def _features(path: Path, kind: str) -> list[Path]:
    """Folders of embeddings in a results folder, or in the folder of one of its tile grids."""
    found = [p for depth in ("", "*/") for p in path.glob(f"{depth}{kind}_*")]
    return sorted(p for p in found if any(p.glob("*.h5")))


def find_tile_files(path: Path) -> list[Path]:
    """The tile files of a path: the file itself, a folder of *.h5, or a results folder's.

    Raises:
        DatasetError: none is there, or several folders are; says what was looked for.
    """
    if path.is_file():
        return [path]
    folder = features_folder(path)
    found = sorted(folder.glob("*.h5"))
    if not found:
        raise DatasetError(
            f"data must hold tile embeddings, got none in {str(folder)!r}; "
            "looked for <slide_id>.h5 and */features_<encoder>/<slide_id>.h5"
        )
    return found


def slide_files(folder: Path, slide_ids: Sequence[str]) -> dict[str, Path]:
    """The embeddings file of each slide: <id>.h5|.npy|.pt, <id> with or without the slide's suffix.

    Raises:
        DatasetError: some are missing; names the first and what was looked for.
    """
    folder = features_folder(folder, slides_too=True)
    found, missing = {}, []
    for slide_id in dict.fromkeys(slide_ids):
        path = next((p for p in _candidates(folder, slide_id) if p.is_file()), None)
        if path is None:
            missing.append(slide_id)
        else:
            found[slide_id] = path
    if missing:
        tried = ", ".join(str(p.relative_to(folder)) for p in _candidates(folder, missing[0]))
        raise DatasetError(
            f"each slide must have embeddings in {str(folder)!r}, got none for {len(missing)} of "
            f"{len(missing) + len(found)} ({', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}); looked for {tried}"
        )
    return found


def _candidates(folder: Path, slide_id: str) -> list[Path]:
    names = [slide_id]
    # tables often keep the file's name
    if Path(slide_id).suffix.lower() in (*slide_suffixes(), *EMBEDDING_SUFFIXES):
        names.append(slide_id.removesuffix(Path(slide_id).suffix))
    return [folder / f"{name}{suffix}" for name in names for suffix in EMBEDDING_SUFFIXES]


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
