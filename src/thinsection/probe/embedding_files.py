"""Embeddings in files: our tiles.h5, TRIDENT's and CLAM's, .npy, and eva's .pt (tensors only)."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinsection.errors import DatasetError
from thinsection.probe.examples import Embeddings
from thinsection.slide.readers import slide_suffixes
from thinsection.store.tiles_h5 import read_tiles
from thinsection.types import CoordsL0

H5_SUFFIXES = (".h5", ".hdf5")
EMBEDDING_SUFFIXES = (*H5_SUFFIXES, ".npy", ".pt")


@dataclass(frozen=True, slots=True, kw_only=True)
class TileTable:
    """The tiles of one slide.

    Attributes:
        slide_id: the file's attribute, else its folder's or its own name.
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
    except (OSError, ValueError) as error:
        if isinstance(error, DatasetError):
            raise
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


def read_tile_table(path: Path) -> TileTable:
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
    slide_id = tiles.attributes.get("name")
    if not slide_id:
        slide_id = path.parent.name if path.stem == "tiles" else path.stem
    encoder = tiles.attributes.get("encoder")
    return TileTable(
        slide_id=_text(slide_id),
        coords_l0=tiles.coords_l0,
        tile_px_l0=float(tiles.tile_px_l0),
        embeddings=np.ascontiguousarray(tiles.features, dtype=np.float32),
        encoder=None if encoder is None else _text(encoder),
    )


def find_tile_files(path: Path) -> list[Path]:
    """The tile files below a path: the file itself, a run's */tiles.h5, or a folder of *.h5.

    Raises:
        DatasetError: none is there; says what was looked for.
    """
    if path.is_file():
        return [path]
    for pattern in ("tiles.h5", "*/tiles.h5", "*.h5"):
        found = sorted(path.glob(pattern))
        if found:
            return found
    raise DatasetError(
        f"data must hold tile embeddings, got none in {str(path)!r}; "
        "looked for tiles.h5, */tiles.h5 and *.h5"
    )


def slide_files(folder: Path, slide_ids: list[str]) -> dict[str, Path]:
    """The embeddings file of each slide: <id>.h5|.npy|.pt or <id>/tiles.h5, <id> with or without
    the slide's own extension.

    Raises:
        DatasetError: some are missing; names the first and what was looked for.
    """
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
    # tables often keep the file name
    if Path(slide_id).suffix.lower() in (*slide_suffixes(), *H5_SUFFIXES):
        names.append(slide_id[: -len(Path(slide_id).suffix)])
    files = [folder / f"{name}{suffix}" for name in names for suffix in EMBEDDING_SUFFIXES]
    return files + [folder / name / "tiles.h5" for name in names]


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
