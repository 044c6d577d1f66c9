"""Tiles and embeddings of a slide as HDF5 files, which TRIDENT and CLAM can read.

    GRID/tiles/ID.h5         /coords (N, 2) int64, level-0 px, with TRIDENT's attributes;
                             /tiles/* (N,) values per tile: tissue_fraction, QC checks
    GRID/column_X/ID.h5      /coords and /tiles/X (N,), values that the caller has stored;
                             categories are codes, with names and colours as attributes
    GRID/features_X/ID.h5    /coords and /features (N, D), float32 or float16
    GRID/tokens_X/ID.h5      /coords and /tokens (N, T, C), float16
    GRID/slide_features_Y/ID.h5  /features (D,), under the same name as in TRIDENT

Files of TRIDENT and CLAM are read in the same way. Datasets and checksums: `hdf5.py`.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import thinsection
from thinsection.config import nearest
from thinsection.errors import InvalidInputError, StoreError
from thinsection.files.atomic import KeepingFile, atomic_path, output_errors
from thinsection.files.pages import notebook_html
from thinsection.slide import Slide
from thinsection.slide.geometry import ReadPlan, best_level, nominal_power
from thinsection.store.hdf5 import (
    CHECKSUM,
    Values,
    add_dataset,
    check_finite,
    check_recorded,
    dataset_checksum,
    list_datasets,
    new_h5,
    open_h5,
    read_values,
    stored_dataset,
    stored_group,
)
from thinsection.tiles import TileTable
from thinsection.tiles.categories import NONE, Categories, complete_colors
from thinsection.tiles.grid import TilesConfig
from thinsection.tiles.table import Column, check_coords
from thinsection.types import (
    KIB,
    Closing,
    CoordsL0,
    Size,
    Uncopied,
    counted,
    format_mpp,
    shortened,
)

if TYPE_CHECKING:
    import h5py

Attributes = Mapping[str, Any]  # HDF5 values: numbers, strings or arrays
Embeddings = npt.NDArray[np.floating]

# Approximate size of a chunk; embeddings are read completely or in long runs.
_CHUNK_BYTES = 256 * KIB
_COORDS_CHUNK_ROWS = 4096
_DTYPES = ("float32", "float16")
# Attributes of a column of categories: their names, and a colour for each.
CATEGORIES = "categories"
COLORS = "colors"
_COLOR = re.compile(r"#[0-9A-Fa-f]{6}")
# Attributes that our code computes with.
_NUMBERS = ("patch_size", "patch_size_level0", "patch_level", "downsample", "tile_mpp")


def tile_attributes(
    slide_id: str, slide: Slide, table: TileTable, *, config: TilesConfig
) -> Attributes:
    """Attributes of /coords: TRIDENT's and CLAM's names first, then our own.

    `target_magnification` is the nominal power for the requested mpp (20 for 0.5 µm/px), as
    TRIDENT and CLAM expect. `level0_magnification` is chosen so that TRIDENT reads exactly the
    pixels of a tile. Without an mpp, both are based on the objective's power, or 0. `tile_mpp`
    is the exact resolution.
    """
    plan = table.plan
    # a level that the file has, even if the decoder made a smaller one
    level = best_level(slide.levels, plan.downsample)
    mpp = config.mpp or plan.tile_mpp
    power = nominal_power(mpp) if mpp else slide.objective_power or 0.0
    attributes = {
        "name": slide_id,
        "patch_size": plan.tile_px,
        "patch_size_level0": plan.size_l0[0],
        "level0_magnification": power * plan.size_l0[0] / plan.tile_px,
        "target_magnification": power,
        "overlap": config.overlap,
        "region_px": config.region_px or None,
        "level0_width": slide.size[0],
        "level0_height": slide.size[1],
        "patch_level": level.index,
        "downsample": level.downsample,
        "thinsection_version": thinsection.__version__,
        "tile_size_l0": list(plan.size_l0),
        "stride_l0": list(plan.stride_l0),
        "tile_mpp": plan.tile_mpp,
        "mpp_tolerance": config.mpp_tolerance,
        "slide_mpp": slide.slide_mpp and list(slide.slide_mpp),
        "rendering": slide.rendering or None,
    }
    return {name: value for name, value in attributes.items() if value is not None}


@dataclass(frozen=True, kw_only=True, repr=False)
class TilesFile:
    """Tiles of one slide with their columns, as `results.tiles(slide_id)` returns them.

    Attributes:
        coords_l0: int64 (N, 2), x and y of the top-left corners of the tiles in level-0 px.
        features: embeddings of the tiles, (N, D); None for a table of tiles.
        attributes: what the file states about the tiles: `patch_size` is their edge in px,
            `tile_mpp` their µm/px, `level0_width` and `level0_height` the size of the slide in
            px, `slide_mpp` its µm/px along x and y.
        columns: a value for each tile, (N,), by name of the column: `tissue_fraction` from 0 to 1,
            measures, checks, shares, your own columns. Of a column of categories they are codes;
            `values` gives the names.
        categories: names and colours of the columns of categories, by name of the column.
        plan: how the tiles are read from their slide; None if it is not known.
    """

    coords_l0: CoordsL0  # int64 (N, 2)
    features: Embeddings | None  # (N, D)
    # attributes of the file, its coordinates and its features, merged in this order
    attributes: Attributes = field(default_factory=dict)
    # per-tile values, by name of the column; of categories their codes, see `values`
    columns: Mapping[str, Column] = field(default_factory=dict)
    # names and colours of the columns that hold categories
    categories: Mapping[str, Categories] = field(default_factory=dict)
    # how the tiles are read from their slide; None if unknown
    plan: ReadPlan | None = None

    def values(self, name: str) -> Column:
        """Values (N,) of a column as people read them: numbers, or the names of categories.

        A tile without a category has ''.

        Raises:
            InvalidInputError: no such column.

        Examples:
            >>> stored = results.tiles("a")
            >>> stored.values("tissue_fraction").shape == (len(stored.coords_l0),)
            True
        """
        if name not in self.columns:
            known = sorted(self.columns)
            raise InvalidInputError(
                f"column must be one of {', '.join(known) or 'none'}, got {name!r}"
                f"{nearest(name, known)}"
            )
        if name in self.categories:
            return self.categories[name].labels(self.columns[name])
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.coords_l0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._facts())})"

    def _repr_html_(self) -> str:
        return notebook_html(None, type(self).__name__, self._facts())

    def _facts(self) -> list[str]:
        mpp = self.attributes.get("tile_mpp")
        if self.plan is not None:
            mpp = self.plan.tile_mpp
        resolution = format_mpp(None if mpp is None else (float(mpp), float(mpp)))
        edge = self.attributes.get("patch_size")
        size = "" if edge is None else f" of {int(np.ravel(edge)[0])} px"
        facts = [f"{counted(len(self), 'tile')}{size} at {resolution}"]
        if self.features is not None:
            shape = " x ".join(map(str, self.features.shape[1:]))
            facts.append(f"embeddings of {shape} {self.features.dtype}")
        facts.append(f"columns: {shortened(self.columns)}")
        return facts

    @property
    def tile_px_l0(self) -> int | None:
        """Edge of a tile in level-0 px; None if the file does not state it."""
        attributes = self.attributes
        edge = attributes.get("patch_size_level0")
        if edge is not None:
            return round(float(edge))
        if not {"patch_size", "patch_level", "downsample"} <= set(attributes):
            return None
        # CLAM stores a downsample for each axis
        downsample = np.ravel(attributes["downsample"])[0]
        return round(float(attributes["patch_size"]) * float(downsample))

    @property
    def stride_l0(self) -> Size | None:
        """Step from one tile to the next in level-0 px; None if the file does not state it.

        TRIDENT stores the overlap in px of a tile; CLAM stores neither.
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
    def slide_size_l0(self) -> Size | None:
        """Width and height of the slide in level-0 px; None if the file does not state them."""
        sides = []
        for name in ("level0_width", "level0_height"):
            values = np.ravel(self.attributes.get(name, 0))
            if values.dtype.kind not in "iuf" or values.shape != (1,):
                return None
            if not 1 <= values[0] < np.inf:
                return None
            sides.append(round(float(values[0])))
        return sides[0], sides[1]

    @property
    def size_l0(self) -> Size:
        """Width and height of a tile in level-0 px; (1, 1) if the file does not state them."""
        edge = self.tile_px_l0 or 1
        size = self.attributes.get("tile_size_l0", (edge, edge))
        width, height = np.ravel(size).tolist()
        return int(width), int(height)


@dataclass(frozen=True, kw_only=True, repr=False)
class EmbeddedTiles(TilesFile):
    """The content of a file with the embeddings of its tiles, which are never None."""

    # (N, D), under the name of the dataset, which TRIDENT and CLAM chose
    features: Embeddings

    @property
    def embeddings(self) -> Embeddings:
        """Embeddings of the tiles, (N, D)."""
        return self.features


class TilesWriter(Uncopied, Closing):
    """Writes a tiles file piece by piece, to a temporary path from `atomic_path`.

    Args:
        path: path of the unfinished file.
        dim: channels of the embeddings, or shape of a tile's tokens; 0: coordinates only.
        dataset: name of the embeddings.
        dtype: float32 or float16; values that overflow it are refused.
        attributes: plain numbers and strings, stored with `coords` and with the file.

    Memory: one batch.
    """

    def __init__(
        self,
        path: Path,
        *,
        dim: int | tuple[int, ...],
        dataset: str = "features",
        dtype: str = "float32",
        attributes: Attributes,
    ) -> None:
        # slow to import, and not needed by a run that has nothing left to do
        import h5py

        if dtype not in _DTYPES:
            raise InvalidInputError(
                f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}"
            )
        self._path = path
        self.shape = (dim,) if isinstance(dim, int) else dim
        with ExitStack() as stack:
            self._raw = stack.enter_context(KeepingFile(path, "w+"))
            self._file = stack.enter_context(h5py.File(self._raw, "w"))
            self._coords = _GrowingDataset(
                self._file,
                "coords",
                (2,),
                np.dtype(np.int64),
                _COORDS_CHUNK_ROWS,
                # coordinates are few bytes compared with embeddings
                compressed=not dim,
            )
            self._features: _GrowingDataset | None = None
            if dim:
                kind = np.dtype(dtype)
                row_bytes = math.prod(self.shape) * kind.itemsize
                rows = max(1, _CHUNK_BYTES // row_bytes)
                self._features = _GrowingDataset(
                    self._file, dataset, self.shape, kind, rows
                )
            self._coords.dataset.attrs.update(attributes)
            self._file.attrs.update(attributes)
            self._open_files = stack.pop_all()

    def append(self, coords_l0: CoordsL0, features: Embeddings | None) -> None:
        """Adds tiles.

        Raises:
            InvalidInputError: coords are not int64 (b, 2), or features have another shape or values
                that are not finite.
        """
        check_coords(coords_l0)
        if features is not None and self._features is not None:
            stored = self._convert(coords_l0, features, self._features.dtype)
            self._extend(self._features, stored)
        self._extend(self._coords, coords_l0)

    def _convert(
        self, coords_l0: CoordsL0, features: Embeddings, dtype: np.dtype[np.generic]
    ) -> Embeddings:
        """Returns the embeddings in the file's type. Raises an error if one is not finite."""
        shape = (len(coords_l0), *self.shape)
        if features.shape != shape:
            raise InvalidInputError(
                f"features must have shape {shape}, got {features.shape}"
            )
        with np.errstate(over="ignore"):
            stored = features.astype(dtype)
        values = stored.reshape(len(stored), math.prod(self.shape))
        finite = np.isfinite(values).all(axis=1)
        if not finite.all():
            raise InvalidInputError(
                f"features must be finite in {dtype}, got NaN or infinity for the tile at "
                f"{coords_l0[~finite][0].tolist()}; check the encoder's precision"
            )
        return stored

    def _extend(self, dataset: "_GrowingDataset", values: Values) -> None:
        with output_errors(self._path):
            dataset.extend(values)
            self._raw.check()

    def add_table(self) -> None:
        """Makes the file a tile table, even if no column is added."""
        with output_errors(self._path):
            self._file.require_group("tiles")

    def add_column(
        self, name: str, values: Column, categories: Categories | None = None
    ) -> None:
        """Adds a per-tile column under /tiles."""
        attributes = {}
        if categories is not None:
            attributes = {
                CATEGORIES: list(categories.names),
                COLORS: list(categories.colors),
            }
        with output_errors(self._path):
            add_dataset(
                self._file, f"tiles/{name}", values, attributes, compressed=True
            )

    def close(self) -> None:
        """Adds the checksums and closes the file."""
        with output_errors(self._path), self._open_files:
            self._coords.seal()
            if self._features is not None:
                self._features.seal()
            if self._file:
                list_datasets(self._file)


class _GrowingDataset:
    """A dataset that grows by rows, and the hash of its values so far."""

    def __init__(
        self,
        file: "h5py.File",
        name: str,
        row_shape: tuple[int, ...],
        dtype: np.dtype[np.generic],
        chunk_rows: int,
        *,
        compressed: bool = False,
    ) -> None:
        self.dtype = dtype
        self.dataset = file.create_dataset(
            name,
            (0, *row_shape),
            dtype,
            maxshape=(None, *row_shape),
            chunks=(chunk_rows, *row_shape),
            compression="gzip" if compressed else None,
            shuffle=compressed,
        )
        self._digest = hashlib.sha256()

    def extend(self, values: Values) -> None:
        num_rows = len(self.dataset)
        self.dataset.resize(num_rows + len(values), axis=0)
        self.dataset[num_rows:] = values
        self._digest.update(np.ascontiguousarray(values).data)

    def seal(self) -> None:
        """Stores the checksum; does nothing if the file is already closed."""
        if self.dataset:
            checksum = dataset_checksum(self.dataset, self._digest)
            self.dataset.attrs[CHECKSUM] = checksum


def read_tiles(
    path: str | Path, *, verify: bool = True, embeddings: bool = True
) -> TilesFile:
    """Reads a tiles file of ours, of TRIDENT or of CLAM.

    Args:
        path: path of the file.
        verify: compares each dataset with its checksum, if it has one, and embeddings with the
            slide's ledger.
        embeddings: reads `features`, if there are any.

    Memory: the file's content.

    Raises:
        StoreError: missing, not HDF5, truncated, without `coords`, or changed since it was
            written.
        InvalidInputError: shapes do not fit each other, or embeddings are not finite.
    """
    path = Path(path)
    with open_h5(path) as file:
        coords = read_values(file, "coords", path, verify=verify).astype(np.int64)
        if coords.ndim == 3:
            coords = coords.reshape(-1, 2)
        check_coords(coords)
        attributes = {**file.attrs, **file["coords"].attrs}
        features = None
        if "features" in file:
            attributes = {**file["features"].attrs, **attributes}
        if embeddings and "features" in file:
            features = _read_features(file, path, len(coords), verify=verify)
            if verify:
                num_tiles, channels = features.shape
                check_recorded(path, attributes, num_tiles=num_tiles, channels=channels)
        elif verify and "tiles" in file:
            check_recorded(path, attributes, num_tiles=len(coords))
        check_numbers(attributes, path)
        columns = {}
        categories = {}
        if "tiles" in file:
            for name in stored_group(file, "tiles", path):
                columns[name] = read_column(
                    file, name, path, len(coords), verify=verify
                )
                named = stored_categories(file, name, path)
                if named is not None:
                    _check_codes(columns[name], named, name, path)
                    categories[name] = named
        return TilesFile(
            coords_l0=coords,
            features=features,
            attributes=attributes,
            columns=columns,
            categories=categories,
        )


def read_column(
    file: "h5py.File", name: str, path: Path, num_tiles: int, *, verify: bool = True
) -> Column:
    """Reads a per-tile column, which another program may have written.

    Raises:
        StoreError: it is damaged, or not one number for each tile; names the column and the file.
    """
    import h5py

    dataset_name = f"tiles/{name}"
    remedy = (
        "remove the file, and store the values with "
        "thinsection.open_results(folder).write_column(...), which checks them"
    )
    if isinstance(file.get(dataset_name, getlink=True), h5py.HardLink):
        item = file[dataset_name]
        if isinstance(item, h5py.Dataset) and item.dtype.kind not in "biuf":
            content = "words" if item.dtype.kind in "OSU" else f"values of {item.dtype}"
            raise StoreError(
                f"column {name!r} must hold a number for each tile, got {content} in "
                f"{str(path)!r}; {remedy}"
            )
    values = read_values(file, dataset_name, path, verify=verify)
    if values.shape != (num_tiles,):
        raise StoreError(
            f"column {name!r} must have one value for each of {counted(num_tiles, 'tile')}, "
            f"got shape {values.shape} in {str(path)!r}; {remedy}"
        )
    return values


def stored_categories(file: "h5py.File", name: str, path: Path) -> Categories | None:
    """Categories of a per-tile column; None for a column of numbers.

    Raises:
        StoreError: they are damaged.
    """
    attributes = stored_dataset(file, f"tiles/{name}", path).attrs
    if CATEGORIES not in attributes:
        return None
    names = [str(word) for word in np.ravel(attributes[CATEGORIES])]
    colors = [str(color) for color in np.ravel(attributes.get(COLORS, []))]
    are_colors = all(_COLOR.fullmatch(color) for color in colors)
    if len(set(names)) != len(names) or not are_colors or len(colors) > len(names):
        raise StoreError(
            f"categories of column {name!r} must be different names, each with a colour "
            f"such as '#0072B2', got {names[:5]} and {colors[:5]} in {str(path)!r}; create "
            "the file again"
        )
    chosen = dict(zip(names, colors))
    return Categories(names=tuple(names), colors=complete_colors(names, chosen))


def _check_codes(codes: Column, categories: Categories, name: str, path: Path) -> None:
    """Raises StoreError: a code is not the place of a name."""
    is_place = codes.dtype.kind in "iu"
    if is_place and len(codes):
        is_place = bool(codes.min() >= NONE and codes.max() < len(categories.names))
    if not is_place:
        raise StoreError(
            f"column {name!r} must hold places of its {len(categories.names)} categories, "
            f"or {NONE} for none, got other values in {str(path)!r}; create the file again"
        )


def read_embedded_tiles(path: str | Path) -> EmbeddedTiles:
    """Reads a file of tile embeddings, see `read_tiles`.

    Raises:
        StoreError: the file has no embeddings, or is damaged.
    """
    tiles = read_tiles(path)
    if tiles.features is None:
        raise StoreError(
            f"file must contain the embeddings of its tiles, got none in {str(path)!r}; remove "
            "the file and run the same command again"
        )
    return EmbeddedTiles(
        coords_l0=tiles.coords_l0,
        features=tiles.features,
        attributes=tiles.attributes,
        columns=tiles.columns,
        categories=tiles.categories,
    )


def _read_features(
    file: "h5py.File", path: Path, num_tiles: int, *, verify: bool
) -> Embeddings:
    features = read_values(file, "features", path, verify=verify)
    # some tools store a batch axis of length 1 before the tiles
    if features.ndim == 3 and features.shape[0] == 1:
        features = features[0]
    if features.ndim != 2 or len(features) != num_tiles:
        raise InvalidInputError(
            f"features must have shape ({num_tiles}, D), "
            f"got {features.shape} in {str(path)!r}"
        )
    if verify:
        check_finite(features, path)
    return features


def check_numbers(attributes: Attributes, path: Path) -> None:
    """Refuses tile attributes that must be finite numbers but are not.

    Raises:
        StoreError: names the attribute and its value.
    """
    for name in _NUMBERS:
        values = np.asarray(attributes.get(name, 0))
        if values.dtype.kind in "iuf" and np.isfinite(values).all():
            continue
        raise StoreError(
            f"attribute {name!r} must be a finite number, got {attributes[name]!r} in "
            f"{str(path)!r}; create the file again"
        )


def column_names(path: Path) -> tuple[str, ...] | None:
    """Names of the per-tile columns of a file; None if it is not a tile table.

    The values of the columns are not read.
    """
    with open_h5(path) as file:
        if "tiles" not in file or "coords" not in file:
            return None
        return tuple(stored_group(file, "tiles", path))


@dataclass(frozen=True, kw_only=True)
class SlideEmbeddingFile:
    """A slide embedding, float32 (D,).

    The attributes are name, slide_encoder, weights_hash, num_tiles and key.
    """

    slide_embedding: npt.NDArray[np.float32]
    attributes: Attributes


def write_slide_embedding(
    path: Path, slide_embedding: Embeddings, attributes: Attributes
) -> None:
    """Writes /features (D,) float32 with its attributes, atomically."""
    with atomic_path(path) as tmp, new_h5(tmp) as file:
        add_dataset(file, "features", slide_embedding.astype(np.float32), attributes)


def read_slide_embedding(path: Path) -> SlideEmbeddingFile:
    """Reads a slide embedding that we or TRIDENT have written.

    Raises:
        StoreError: the file has no vector `features`.
    """
    with open_h5(path) as file:
        values = read_values(file, "features", path)
        if values.size != max(values.shape, default=0):
            raise StoreError(
                f"slide embedding must contain a vector 'features' in {str(path)!r}"
            )
        vector = np.ravel(values).astype(np.float32, copy=False)
        attributes = dict(file["features"].attrs)
        check_finite(vector[None], path)
        check_recorded(path, attributes, channels=len(vector))
        return SlideEmbeddingFile(slide_embedding=vector, attributes=attributes)
