"""Reads tiles and features in the formats of TRIDENT, CLAM, STAMP and slide2vec, slide by slide."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import PickleError
from zipfile import BadZipFile

import numpy as np

from thinsection.errors import InvalidInputError, StoreError, rewording
from thinsection.files.atomic import read_json
from thinsection.store.hdf5 import Values, open_h5, stored_dataset
from thinsection.store.tile_tables import EmbeddingRows
from thinsection.store.tiles_h5 import Embeddings, read_tiles
from thinsection.types import CoordsL0, Document, Json, Size, counted

# Facts of a slide have our names: mpp_x, mpp_y, ...

# exceptions that a malformed file can cause; UnpicklingError is a PickleError
_DAMAGE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    RuntimeError,
    PickleError,
    BadZipFile,
)
_PATCHES_END = "_patches.h5"
_TILING_END = ".coordinates.meta.json"
# tiles of STAMP before version 2
_HISTORIC_PX = 224
_HISTORIC_UM = 256.0


@dataclass(frozen=True, kw_only=True)
class PeerTiles:
    """Tiles of one slide, with or without features of one encoder.

    Attributes:
        grid: name of the grid, from the tool's folder or from its files.
        coords_l0: int64 (N, 2).
        edge_l0: edge of a tile in level-0 pixels.
        tile_px: edge of the tile in pixels before the encoder's own resizing.
        overlap_px: overlap in pixels of `tile_px`.
        power: nominal magnification of the tiles.
        size: width and height of level 0.
        encoder: the tool's name of the encoder; '' if the file does not name it.
        features: (N, D), in memory or read from their file when they are indexed.
    """

    grid: str
    coords_l0: CoordsL0
    edge_l0: int
    tile_px: int
    overlap_px: int = 0
    power: float | None = None
    size: Size | None = None
    encoder: str = ""
    features: Embeddings | EmbeddingRows | None = None


@dataclass(frozen=True)
class PeerSource:
    """Patterns of a tool's files, and the function that reads one.

    Attributes:
        patterns: patterns of its tile files; the first one that matches any file is used.
        end: part of a tile file's name after the slide's name.
        read: reads one file, with the facts of its slide.
    """

    patterns: tuple[str, ...]
    end: str
    read: Callable[[Path, Document], Iterator[PeerTiles]]

    def find_files(self, folder: Path) -> list[Path]:
        """Tile files of a folder, sorted by name."""
        for pattern in self.patterns:
            paths = sorted(folder.glob(pattern))
            if paths:
                return [path for path in paths if not path.name.startswith(".")]
        return []


def _read_trident(path: Path, facts: Document) -> Iterator[PeerTiles]:
    """Reads the tiles of a job_dir, or of one grid in it.

    Source:
        mahmoodlab/TRIDENT a91fa84, trident/IO.py.
    """
    tiles = read_tiles(path)
    attributes = tiles.attributes
    names = ("patch_size", "level0_magnification", "target_magnification")
    missing = [name for name in names if not attributes.get(name)]
    if missing:
        raise StoreError(
            f"coords must state their magnification, got no {missing} in {str(path)!r}"
        )
    tile_px = float(attributes["patch_size"])
    slide_power = float(attributes["level0_magnification"])
    power = float(attributes["target_magnification"])
    grid = path.parent.parent
    bare = PeerTiles(
        grid=grid.name,
        coords_l0=tiles.coords_l0,
        edge_l0=round(tile_px * slide_power / power),  # formula of TRIDENT's patcher
        tile_px=int(tile_px),
        overlap_px=int(attributes.get("overlap", 0)),
        power=power,
        size=_size(attributes.get("level0_width"), attributes.get("level0_height")),
    )
    stem = path.name.removesuffix(_PATCHES_END)
    feature_files = sorted(grid.glob(f"features_*/{stem}.h5"))
    if not feature_files:
        yield bare
    for file in feature_files:
        encoder = file.parent.name.removeprefix("features_")
        features = _features_of(file, bare.coords_l0)
        yield replace(bare, features=features, encoder=encoder)


def _features_of(file: Path, coords_l0: CoordsL0) -> EmbeddingRows | None:
    """Features of tiles with these corners; None if the file has none.

    Memory: 8 MiB and the corners.

    Raises:
        StoreError: the file has different tiles.
    """
    tiles = read_tiles(file, embeddings=False)
    if not np.array_equal(tiles.coords_l0, coords_l0):
        raise StoreError(
            f"features must belong to the tiles in patches/, got other coords in {str(file)!r}"
        )
    with open_h5(file) as opened:
        if "features" not in opened:
            return None
    return _checked_rows(file, len(coords_l0))


def _checked_rows(file: Path, num_tiles: int) -> EmbeddingRows:
    """Rows of a file of features, which are checked.

    Raises:
        StoreError: the file is damaged, or has another number of rows.
    """
    rows = EmbeddingRows(file)
    if len(rows) != num_tiles:
        raise StoreError(
            f"features must have a row for each of {counted(num_tiles, 'tile')}, got "
            f"{rows.shape} in {str(file)!r}"
        )
    rows.check()
    return rows


def _read_clam(path: Path, facts: Document) -> Iterator[PeerTiles]:
    """Reads the tiles of a save_dir that is also the feat_dir.

    Source:
        mahmoodlab/CLAM 53e2409, create_patches_fp.py
    """
    tiles = read_tiles(path)
    attributes = tiles.attributes
    edge_l0 = tiles.tile_px_l0
    if edge_l0 is None or "patch_level" not in attributes:
        raise StoreError(
            "coords must state patch_size and patch_level, got the attributes "
            f"{sorted(attributes)} in {str(path)!r}"
        )
    size = None
    if int(attributes["patch_level"]) == 0:
        size = _size(*np.ravel(attributes.get("level_dim", (0, 0))).tolist())
    feature_file = path.parent.parent / "h5_files" / path.name
    features = None
    if feature_file.exists():
        features = _features_of(feature_file, tiles.coords_l0)
    yield PeerTiles(
        # one grid per folder; tile sizes in pixels may differ between scanners
        grid="patches",
        coords_l0=tiles.coords_l0,
        edge_l0=int(edge_l0),
        tile_px=int(attributes["patch_size"]),
        size=size,
        features=features,
    )


def _read_stamp(path: Path, facts: Document) -> Iterator[PeerTiles]:
    """Reads the tiles of a feature_dir, or of the folder above it.

    Source:
        KatherLab/STAMP c54ce06, modeling/data.py: get_coords.
    """
    mpp_x = facts.get("mpp_x")
    mpp_y = facts.get("mpp_y")
    if not mpp_x or not mpp_y:
        raise InvalidInputError(
            f"slide_mpp is missing for {str(path)!r}, whose coordinates are in µm; pass "
            "slides=..., or a table with the column mpp"
        )
    with open_h5(path) as file:
        feature_shape = stored_dataset(file, "feats", path).shape
        coords = stored_dataset(file, "coords", path)[...]
        attributes = dict(file.attrs)
    coords_um, edge_um, tile_px = _stamp_units(coords, attributes, path)
    if len(feature_shape) != 2 or coords_um.shape != (feature_shape[0], 2):
        raise StoreError(
            f"feats and coords must belong to the same tiles, got {feature_shape} and "
            f"{coords_um.shape} in {str(path)!r}"
        )
    edge_l0 = round(edge_um / mpp_x)
    tile_px = tile_px or edge_l0
    yield PeerTiles(
        grid=f"{tile_px}px",
        coords_l0=np.rint(coords_um / np.array([mpp_x, mpp_y])).astype(np.int64),
        edge_l0=edge_l0,
        tile_px=tile_px,
        encoder=str(attributes.get("extractor", "")),
        features=_checked_rows(path, len(coords_um)),
    )


def _stamp_units(
    coords: Values, attributes: Document, path: Path
) -> tuple[Values, float, int]:
    """Corners and edge of STAMP's tiles in µm, and their edge in pixels; 0 if it is not stated.

    Version 2 states `unit` and `tile_size` or `tile_size_um`. Older versions had tiles of 224 px
    and 256 µm with corners in these pixels, and their files need not state it.

    Raises StoreError: the file fits neither.
    """
    coords_um = np.asarray(coords, dtype=np.float64)
    tile_px = int(attributes.get("tile_size_px", 0))
    in_um = attributes.get("unit") == "um"
    edge_um = float(attributes.get("tile_size_um", 0))
    if in_um and not edge_um:
        edge_um = float(attributes.get("tile_size", 0))
    if edge_um > 0:
        return coords_um, edge_um, tile_px
    # smallest distance between different columns or rows of corners; 0 for a single tile
    steps = [np.diff(np.unique(axis)) for axis in np.reshape(coords_um, (-1, 2)).T]
    least_step = min((step.min() for step in steps if len(step)), default=0)
    edge = float(attributes.get("tile_size", 0) or least_step)
    if not in_um and round(edge) == _HISTORIC_PX:
        return coords_um / _HISTORIC_PX * _HISTORIC_UM, _HISTORIC_UM, _HISTORIC_PX
    raise StoreError(
        "coords must be in µm with the attribute tile_size_um (STAMP 2), or in pixels of tiles of "
        f"{_HISTORIC_PX} px (STAMP 1), got tiles of {edge:g} and the attributes "
        f"{sorted(attributes)} in {str(path)!r}; extract them again with `stamp preprocess`"
    )


def _read_slide2vec(path: Path, facts: Document) -> Iterator[PeerTiles]:
    """Reads the tiles of slide2vec's output folder.

    Source:
        clemsgrs/slide2vec 7cfa6bf, artifacts.py; hs2p 6.1.0.
    """
    slide_id = path.name.removesuffix(_TILING_END)
    embeddings = path.parent.parent / "tile_embeddings"
    embedding_document = embeddings / f"{slide_id}.meta.json"
    with rewording("tiling must be one of hs2p's", path, *_DAMAGE, error=StoreError):
        document = read_json(path)
        tiling = document["tiling"]
        npz_path = path.with_name(f"{slide_id}.coordinates.npz")
        with np.load(npz_path, allow_pickle=False) as file:
            coords = np.stack([file["x"], file["y"]], axis=1).astype(np.int64)
        encoder = ""
        features = None
        if embedding_document.exists():
            encoder = str(read_json(embedding_document)["encoder_name"])
            features = _read_array(embeddings, slide_id)
        tile_px = int(tiling["requested_tile_size_px"])
        tiles = PeerTiles(
            grid=f"{tile_px}px_{float(tiling['requested_spacing_um']):.6g}mpp",
            coords_l0=coords,
            edge_l0=int(tiling["tile_size_lv0"]),
            tile_px=tile_px,
            overlap_px=round(float(tiling["overlap"]) * tile_px),
            size=_size(*document["slide"]["dimensions"]),
            encoder=encoder,
            features=features,
        )
    yield tiles


def _read_array(folder: Path, slide_id: str) -> Embeddings:
    """Reads one array (N, D) from an .npz or a .pt without running code from a pickle."""
    import torch

    packed = folder / f"{slide_id}.npz"
    if packed.exists():
        with np.load(packed, allow_pickle=False) as file:
            return np.asarray(file["features"])
    path = folder / f"{slide_id}.pt"
    tensor = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(tensor, torch.Tensor) or tensor.ndim != 2:
        kind = type(tensor).__name__
        raise ValueError(f"{kind} in {path.name} is not a tensor (N, D)")
    return np.asarray(tensor if tensor.dtype == torch.float16 else tensor.float())


def _size(width: Json, height: Json) -> Size | None:
    return (int(width), int(height)) if width and height else None


SOURCES = {
    "trident": PeerSource(
        (f"patches/*{_PATCHES_END}", f"*/patches/*{_PATCHES_END}"),
        _PATCHES_END,
        _read_trident,
    ),
    "clam": PeerSource(("patches/*.h5",), ".h5", _read_clam),
    "stamp": PeerSource(("**/*.h5",), ".h5", _read_stamp),
    "slide2vec": PeerSource((f"tiles/*{_TILING_END}",), _TILING_END, _read_slide2vec),
}
