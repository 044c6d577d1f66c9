"""Tiles and embeddings of a slide as HDF5: TRIDENT and CLAM read the same.

    GRID/tiles/ID.h5         /coords (N, 2) int64, level-0 px, with TRIDENT's attributes;
                             /tiles/* (N,) what is known per tile: tissue_fraction, QC checks
    GRID/features_X/ID.h5    /coords and /features (N, D), float32 or float16
    GRID/tokens_X/ID.h5      /coords and /tokens (N, T, C), float16
    GRID/slide_features_Y/ID.h5  /features (D,), under the name that TRIDENT's have

Files of TRIDENT and CLAM read back the same way. Each dataset of ours carries the hash of its
values, type, shape and attributes, which a reader compares; nothing outside the file is followed.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import thinsection
from thinsection.errors import InvalidInputError, StoreError, require
from thinsection.files.atomic import KeepingFile, atomic_path, writing
from thinsection.slide import Slide
from thinsection.slide.geometry import best_level, nominal_power
from thinsection.tiles import TileTable
from thinsection.tiles.grid import TilesConfig
from thinsection.tiles.table import check_coords
from thinsection.types import KIB, Closing, CoordsL0, Size, format_bytes

if TYPE_CHECKING:
    import h5py

_CHUNK_BYTES = 256 * KIB  # about: embeddings are read whole or in runs
_DTYPES = ("float32", "float16")
CHECKSUM = "thinsection_sha256"  # attribute of a dataset
# attributes that somebody computes with
# Bytes of values for each byte of a file: deflate gives 1,032 of one repeated value
_MAX_UNPACKED = 4096
_NUMBERS = ("patch_size", "patch_size_level0", "patch_level", "downsample", "tile_mpp")


def tile_attributes(
    slide_id: str, slide: Slide, table: TileTable, *, config: TilesConfig
) -> dict[str, Any]:
    """Attributes of /coords: TRIDENT's and CLAM's names first, then our own.

    `target_magnification` is the nominal power of the mpp that was asked for (0.5 µm/px: 20), as
    their readers expect, `level0_magnification` such that TRIDENT reads exactly a tile's px. Both
    are the objective's power, or 0, without an mpp. `tile_mpp` is the true one.
    """
    plan = table.plan
    level = best_level(
        slide.levels, plan.downsample
    )  # of the file, also where a part was decoded
    mpp = config.mpp or plan.tile_mpp
    power = nominal_power(mpp) if mpp else slide.objective_power or 0.0
    attributes = {
        **{
            "name": slide_id,
            "patch_size": plan.tile_px,
            "patch_size_level0": plan.size_l0[0],
        },
        "level0_magnification": power * plan.size_l0[0] / plan.tile_px,
        **{"target_magnification": power, "overlap": config.overlap},
        **{"level0_width": slide.size[0], "level0_height": slide.size[1]},
        **{"patch_level": level.index, "downsample": level.downsample},
        "thinsection_version": thinsection.__version__,
        **{"tile_size_l0": list(plan.size_l0), "stride_l0": list(plan.stride_l0)},
        **{"tile_mpp": plan.tile_mpp, "mpp_tolerance": config.mpp_tolerance},
        "slide_mpp": slide.slide_mpp and list(slide.slide_mpp),
        "rendering": slide.rendering or None,
    }
    return {name: value for name, value in attributes.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class TilesFile:
    """The content of a tiles file."""

    coords_l0: CoordsL0  # int64 (N, 2)
    features: npt.NDArray[np.floating] | None  # (N, D)
    # of the file, its coords and its features, merged in that order
    attributes: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, npt.NDArray] = field(
        default_factory=dict
    )  # per-tile values by name

    @property
    def tile_px_l0(self) -> int | None:
        """Edge of a tile in level-0 px, where the file says."""
        value = self.attributes.get("patch_size_level0")
        if value is None and {"patch_size", "patch_level", "downsample"} <= set(
            self.attributes
        ):
            down = np.ravel(self.attributes["downsample"])[
                0
            ]  # CLAM: one value per axis
            value = float(self.attributes["patch_size"]) * float(down)
        return None if value is None else round(float(value))

    @property
    def stride_l0(self) -> Size | None:
        """Step from one tile to the next in level-0 px, where the file says.

        TRIDENT says the overlap in px of a tile, CLAM nothing.
        """
        if "stride_l0" in self.attributes:
            width, height = np.ravel(self.attributes["stride_l0"]).tolist()
            return int(width), int(height)
        edge = self.tile_px_l0
        if edge is None or not {"overlap", "patch_size"} <= set(self.attributes):
            return None
        downsample = edge / float(self.attributes["patch_size"])
        step = edge - round(float(self.attributes["overlap"]) * downsample)
        return step, step

    @property
    def size_l0(self) -> Size:
        """Width and height of a tile in level-0 px; (1, 1) where the file does not say."""
        edge = self.tile_px_l0 or 1
        width, height = np.ravel(
            self.attributes.get("tile_size_l0", (edge, edge))
        ).tolist()
        return int(width), int(height)


class TilesWriter(Closing):
    """Writes a tiles file piece by piece into a path that `atomic_path` gave. Memory: one batch.

    `dim` is the width of the embeddings, or the shape of a tile's tokens; 0: coordinates only.
    `dtype` is float32 or float16, where a value that overflows is refused; `attributes` (plain
    numbers and strings) are set on `coords` and on the file.
    """

    def __init__(
        self,
        path: Path,
        *,
        dim: int | tuple[int, ...],
        dataset: str = "features",
        dtype: str = "float32",
        attributes: Mapping[str, Any],
    ) -> None:
        import h5py  # slow to import: a run that finds everything done needs none

        require(
            dtype in _DTYPES, f"dtype must be one of {', '.join(_DTYPES)}", repr(dtype)
        )
        self._path = path
        self.shape = (dim,) if isinstance(dim, int) else dim
        with ExitStack() as stack:
            self._raw = stack.enter_context(KeepingFile(path, "w+"))
            self._file = stack.enter_context(h5py.File(self._raw, "w"))
            self._coords, self._features = (
                self._growing("coords", (2,), np.int64, 4096),
                None,
            )
            if dim:
                rows = max(
                    1,
                    _CHUNK_BYTES // (math.prod(self.shape) * np.dtype(dtype).itemsize),
                )
                self._features = self._growing(dataset, self.shape, dtype, rows)
            self._coords.attrs.update(attributes)
            self._file.attrs.update(attributes)
            self._closing = stack.pop_all()
        self._hashes = hashlib.sha256(), hashlib.sha256()

    def _growing(
        self, name: str, shape: tuple[int, ...], kind: Any, rows: int
    ) -> "h5py.Dataset":
        how = {"maxshape": (None, *shape), "chunks": (rows, *shape)}
        return self._file.create_dataset(name, (0, *shape), kind, **how)

    def append(
        self, coords_l0: CoordsL0, features: npt.NDArray[np.floating] | None
    ) -> None:
        """Adds tiles; InvalidInputError: coords not int64 (b, 2), other rows, non-finite values."""
        check_coords(coords_l0)
        if features is not None and self._features is not None:
            shape, kind = (len(coords_l0), *self.shape), self._features.dtype
            require(
                features.shape == shape,
                f"features must have shape {shape}",
                features.shape,
            )
            with np.errstate(over="ignore"):
                stored = features.astype(kind)
            finite = (
                np.isfinite(stored)
                .reshape(len(stored), math.prod(self.shape))
                .all(axis=1)
            )
            if not finite.all():
                bad = f"a value that is not for the tile at {coords_l0[~finite][0].tolist()}"
                remedy = "check the encoder's precision"
                raise InvalidInputError(
                    f"features must be finite in {kind}, got {bad}; {remedy}"
                )
            self._extend(1, self._features, stored)
        self._extend(0, self._coords, coords_l0)

    def _extend(self, place: int, dataset: "h5py.Dataset", values: npt.NDArray) -> None:
        with writing(self._path):
            dataset.resize(len(dataset) + len(values), axis=0)
            dataset[len(dataset) - len(values) :] = values
            self._hashes[place].update(np.ascontiguousarray(values).data)
            self._raw.check()

    def add_column(self, name: str, values: npt.NDArray) -> None:
        """Adds a per-tile column under /tiles."""
        with writing(self._path):
            add_dataset(self._file, f"tiles/{name}", values)

    def close(self) -> None:
        """Adds the checksums and closes the file."""
        with writing(self._path), self._closing:
            for dataset, digest in zip((self._coords, self._features), self._hashes):
                if dataset:  # not so of a file that is closed
                    dataset.attrs[CHECKSUM] = _checksum(dataset, digest)


@contextmanager
def new_h5(path: Path) -> "Iterator[h5py.File]":
    """A new HDF5 file; OSError at the end of the block where not all of it could be written."""
    import h5py

    with KeepingFile(path, "w+") as raw, h5py.File(raw, "w") as file:
        yield file


def add_dataset(
    file: "h5py.File",
    name: str,
    values: npt.NDArray,
    attributes: Mapping[str, Any] | None = None,
) -> None:
    """Writes a dataset with its attributes and its checksum."""
    dataset = file.create_dataset(name, data=values)
    dataset.attrs.update(attributes or {})
    digest = hashlib.sha256(np.ascontiguousarray(values).data)
    dataset.attrs[CHECKSUM] = _checksum(dataset, digest)


def _checksum(dataset: "h5py.Dataset", of_values: "hashlib._Hash") -> str:
    """Hash of a dataset's values, type, shape and attributes."""
    named = sorted((n, v) for n, v in dataset.attrs.items() if n != CHECKSUM)
    attributes, digest = {n: np.asarray(v).tolist() for n, v in named}, of_values.copy()
    digest.update(
        json.dumps([dataset.dtype.str, dataset.shape, attributes], default=str).encode()
    )
    return digest.hexdigest()


def read_tiles(
    path: Path, *, verify: bool = True, embeddings: bool = True
) -> TilesFile:
    """A tiles file of ours, of TRIDENT's or of CLAM's. Memory: the file's content.

    `verify` compares each dataset with its checksum, where it has one; without `embeddings` these
    are left where they are.

    Raises StoreError: missing, not HDF5, truncated, without `coords`, not the bytes that were
    written; InvalidInputError: shapes that do not fit each other.
    """
    with open_h5(path) as file:
        coords = _values(file, "coords", path, verify=verify).astype(np.int64)
        coords = coords.reshape(-1, 2) if coords.ndim == 3 else coords
        check_coords(coords)
        attrs = dict(file.attrs) | dict(file["coords"].attrs)
        features = None
        if embeddings and "features" in file:
            features = _values(file, "features", path, verify=verify)
            if (
                features.ndim == 3 and features.shape[0] == 1
            ):  # a leading batch axis occurs
                features = features[0]
            fits = features.ndim == 2 and len(features) == len(coords)
            rule = f"features must have shape ({len(coords)}, D)"
            require(fits, rule, f"{features.shape} in {str(path)!r}")
            attrs = dict(file["features"].attrs) | attrs
        check_numbers(attrs, path)
        names = list(_group(file, "tiles", path)) if "tiles" in file else []
        columns = {
            name: _values(file, f"tiles/{name}", path, verify=verify) for name in names
        }
        return TilesFile(
            coords_l0=coords, features=features, attributes=attrs, columns=columns
        )


def check_numbers(attributes: Mapping[str, Any], path: Path) -> None:
    """Refuses what a tiles file says of its tiles where that is no finite number.

    Raises:
        StoreError: with the attribute's name and value.
    """
    for name in _NUMBERS:
        values = np.asarray(attributes.get(name, 0))
        if values.dtype.kind in "iuf" and np.isfinite(values).all():
            continue
        raise StoreError(
            f"attribute {name!r} must be a finite number, got {attributes[name]!r} in "
            f"{str(path)!r}; make the file anew"
        )


def column_names(path: Path) -> tuple[str, ...] | None:
    """Names of the per-tile columns of a file, no value of which is read; None where it is none."""
    with open_h5(path) as file:
        whole = "tiles" in file and "coords" in file
        return tuple(_group(file, "tiles", path)) if whole else None


def damaged_datasets(path: Path) -> tuple[int, list[str]]:
    """(Datasets of any HDF5 file of ours that have a checksum, what is wrong with the file)."""
    import h5py

    checked, names = 0, list[str]()
    try:
        with open_h5(path) as file:
            file.visit_links(names.append)
            for name in names:
                if not isinstance(_inside(file, name, path), h5py.Group):
                    _values(file, name, path)
                    checked += CHECKSUM in file[name].attrs
    except (StoreError, RuntimeError) as error:
        return checked, [str(error)]
    return checked, []


def open_h5(path: Path) -> "h5py.File":
    """The file opened for reading; StoreError where it is missing, not HDF5, or truncated."""
    import h5py

    try:
        return h5py.File(path, "r", locking="best-effort")
    except OSError as error:
        why = "no such file" if not Path(path).exists() else str(error)
        raise StoreError(
            f"tiles file must be readable HDF5, got {str(path)!r}: {why}"
        ) from None


@dataclass(frozen=True, kw_only=True)
class SlideEmbeddingFile:
    """A slide embedding, float32 (D,); name, slide_encoder, weights_hash, num_tiles, key."""

    slide_embedding: npt.NDArray[np.float32]
    attributes: Mapping[str, Any]


def write_slide_embedding(
    path: Path, slide_embedding: npt.NDArray[np.floating], attributes: Mapping[str, Any]
) -> None:
    """Writes /features (D,) float32 with its attributes, atomically."""
    with atomic_path(path) as tmp, new_h5(tmp) as file:
        add_dataset(file, "features", slide_embedding.astype(np.float32), attributes)


def read_slide_embedding(path: Path) -> SlideEmbeddingFile:
    """A slide embedding of ours or of TRIDENT's; StoreError without a vector `features`."""
    with open_h5(path) as file:
        values = _values(file, "features", path)
        if values.size != max(values.shape, default=0):
            raise StoreError(
                f"slide embedding must hold a vector 'features' in {str(path)!r}"
            )
        vector = np.ravel(values).astype(np.float32, copy=False)
        return SlideEmbeddingFile(
            slide_embedding=vector, attributes=dict(file["features"].attrs)
        )


def stored_dataset(file: "h5py.File", name: str, path: Path) -> "h5py.Dataset":
    """A dataset of numbers that lies in the file itself; else a StoreError.

    A file of a few bytes may declare any size, for which nothing is stored: more than
    `_MAX_UNPACKED` bytes for each one of the file is refused.
    """
    import h5py

    expected = (
        "expected a tiles.h5 of thinsection, or a features file of TRIDENT or CLAM"
    )
    got = f"{sorted(file)} in {str(path)!r}; {expected}"
    require(name in file, f"tiles file must hold {name!r}", got, error=StoreError)
    found = _inside(file, name, path)
    numbers = isinstance(found, h5py.Dataset) and found.dtype.kind in "biuf"
    got = f"{found!r} in {str(path)!r}"
    require(numbers, f"{name!r} must be a dataset of numbers", got, error=StoreError)
    outside = found.is_virtual or found.external
    require(not outside, f"{name!r} must lie in its own file", got, error=StoreError)
    declared_bytes = found.dtype.itemsize * math.prod(found.shape)
    if declared_bytes > _MAX_UNPACKED * Path(path).stat().st_size:
        raise StoreError(
            f"{name!r} must have as many values as its file can hold, got "
            f"{format_bytes(declared_bytes)} of shape {found.shape} in {str(path)!r}; "
            "the file is damaged"
        )
    return found


def _inside(file: "h5py.File", name: str, path: Path) -> Any:
    """What has this name, on a way without links."""
    import h5py

    parts = name.split("/")
    for way in ("/".join(parts[: n + 1]) for n in range(len(parts))):
        link = file.get(way, getlink=True)
        got = f"a link {vars(link)} in {str(path)!r}"
        require(
            isinstance(link, h5py.HardLink),
            f"{way!r} must be no link",
            got,
            error=StoreError,
        )
    return file[name]


def _group(file: "h5py.File", name: str, path: Path) -> Any:
    import h5py

    found = _inside(file, name, path)
    got = f"{found!r} in {str(path)!r}"
    require(
        isinstance(found, h5py.Group),
        f"{name!r} must be a group",
        got,
        error=StoreError,
    )
    return found


def _values(
    file: "h5py.File", name: str, path: Path, *, verify: bool = True
) -> npt.NDArray:
    dataset = stored_dataset(file, name, path)
    try:
        values = np.asarray(dataset[...])
    except (OSError, RuntimeError) as error:
        raise StoreError(
            f"{name!r} must be readable, got {error} in {str(path)!r}"
        ) from None
    written = dataset.attrs.get(CHECKSUM) if verify else None
    digest = (
        None if written is None else hashlib.sha256(np.ascontiguousarray(values).data)
    )
    if digest and written != _checksum(dataset, digest):
        got = f"others in {str(path)!r}; remove the file and run the same command again"
        raise StoreError(f"{name!r} must hold the bytes that were written, got {got}")
    return values
