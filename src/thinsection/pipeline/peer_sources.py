"""What TRIDENT, CLAM, STAMP and slide2vec wrote of slides: tiles, field of view, features."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pickle import PickleError
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError, StoreError, require, rewording
from thinsection.store.tiles_h5 import open_h5, read_tiles, stored_dataset
from thinsection.types import CoordsL0, Size


@dataclass(frozen=True, kw_only=True)
class Found:
    """Tiles of one slide with one encoder's features, or without."""

    grid: str  # as the tool names the folder, or what its files say
    coords_l0: CoordsL0
    edge_l0: int  # level-0 px that a tile covers
    tile_px: int  # that the encoder was given, before its own resizing
    overlap_px: int = 0  # of tile_px
    power: float | None = None  # nominal, of the tiles
    size: Size | None = None  # of level 0
    encoder: str = ""  # as the tool calls it; '' where it does not say
    features: npt.NDArray[Any] | None = None  # (N, D)


# what Python raises of a file that is not what it should be; UnpicklingError is a PickleError
_DAMAGE = (OSError, ValueError, KeyError, TypeError, RuntimeError, PickleError, BadZipFile)

# told what is known of the slide (mpp_x), gives its tiles
Sourced = Callable[[Mapping[str, Any]], Iterator[Found]]


def _trident(folder: Path) -> Iterator[tuple[str, Sourced]]:
    """A job_dir, or one grid of it. Source: mahmoodlab/TRIDENT a91fa84, trident/IO.py."""
    name, by_slide = "patches/*_patches.h5", dict[str, list[Path]]()
    for path in sorted(folder.glob(name)) or sorted(folder.glob(f"*/{name}")):
        by_slide.setdefault(path.name.removesuffix("_patches.h5"), []).append(path)
    for slide_id, paths in by_slide.items():
        yield slide_id, partial(_of_trident, slide_id, paths)


def _of_trident(slide_id: str, paths: list[Path], told: Mapping[str, Any]) -> Iterator[Found]:
    for path in paths:
        grid, tiles = path.parent.parent, read_tiles(path)
        said = tiles.attributes
        names = ("patch_size", "level0_magnification", "target_magnification")
        missing = [name for name in names if not said.get(name)]
        got = f"none of {missing} in {str(path)!r}"
        require(not missing, "coords must say their magnification", got, error=StoreError)
        px, source, power = (float(said[name]) for name in names)
        bare = Found(
            grid=grid.name,
            coords_l0=tiles.coords_l0,
            edge_l0=round(px * source / power),  # what its patcher reads
            tile_px=int(px),
            overlap_px=int(said.get("overlap", 0)),
            power=power,
            size=_size(said.get("level0_width"), said.get("level0_height")),
        )
        embedded = sorted(grid.glob(f"features_*/{slide_id}.h5"))
        if not embedded:
            yield bare
        for file in embedded:
            encoder = file.parent.name.removeprefix("features_")
            yield replace(bare, features=_features(file, bare.coords_l0), encoder=encoder)


def _features(file: Path, coords_l0: CoordsL0) -> npt.NDArray[Any] | None:
    """Those of the tiles at these corners. Raises StoreError: the file has others."""
    found, got = read_tiles(file), f"other coords in {str(file)!r}"
    same = np.array_equal(found.coords_l0, coords_l0)
    require(same, "features must be of the tiles in patches/", got, error=StoreError)
    return found.features


def _clam(folder: Path) -> Iterator[tuple[str, Sourced]]:
    """A save_dir that is the feat_dir too. Source: mahmoodlab/CLAM 53e2409, create_patches_fp.py"""
    for path in sorted(folder.glob("patches/*.h5")):
        yield path.stem, partial(_of_clam, path, folder / "h5_files" / path.name)


def _of_clam(path: Path, file: Path, told: Mapping[str, Any]) -> Iterator[Found]:
    tiles = read_tiles(path)
    said, edge = tiles.attributes, tiles.tile_px_l0
    missing = edge is None or "patch_level" not in said
    got = f"attributes {sorted(said)} in {str(path)!r}"
    require(not missing, "coords must say patch_size and patch_level", got, error=StoreError)
    size = _size(*np.ravel(said.get("level_dim", (0, 0))).tolist())
    yield Found(
        grid="patches",  # a folder is one run: sizes in px may differ by scanner
        coords_l0=tiles.coords_l0,
        edge_l0=int(edge or 0),
        tile_px=int(said["patch_size"]),
        size=size if int(said["patch_level"]) == 0 else None,
        features=_features(file, tiles.coords_l0) if file.exists() else None,
    )


def _stamp(folder: Path) -> Iterator[tuple[str, Sourced]]:
    """A feature_dir, or the folder above. Source: KatherLab/STAMP c54ce06, modeling/data.py."""
    for path in sorted(folder.rglob("*.h5")):
        if not path.name.startswith("."):
            yield path.stem, partial(_of_stamp, path)


def _of_stamp(path: Path, told: Mapping[str, Any]) -> Iterator[Found]:
    mpp = told.get("mpp_x"), told.get("mpp_y")
    if not mpp[0] or not mpp[1]:
        remedy = "its coordinates are µm: pass --slides, or a table with the column mpp"
        raise InvalidInputError(f"slide_mpp is missing for {str(path)!r}; {remedy}")
    with open_h5(path) as file:
        features = np.asarray(stored_dataset(file, "feats", path)[...])
        coords_um = np.asarray(stored_dataset(file, "coords", path)[...], dtype=np.float64)
        said = dict(file.attrs)
    edge_um = float(said.get("tile_size_um", 0) or said.get("tile_size", 0))
    known = said.get("unit") == "um" and edge_um > 0
    got = f"attributes {sorted(said)} in {str(path)!r}"
    require(known, "coords must be µm with their tile_size_um", got, error=StoreError)
    fits = features.ndim == 2 and coords_um.shape == (len(features), 2)
    got = f"{features.shape} and {coords_um.shape} in {str(path)!r}"
    require(fits, "feats and coords must be of the same tiles", got, error=StoreError)
    edge = round(edge_um / mpp[0])
    px = int(said.get("tile_size_px", 0)) or edge
    yield Found(
        grid=f"{px}px",
        coords_l0=np.rint(coords_um / np.array(mpp)).astype(np.int64),
        edge_l0=edge,
        tile_px=px,
        encoder=str(said.get("extractor", "")),
        features=features,
    )


def _slide2vec(folder: Path) -> Iterator[tuple[str, Sourced]]:
    """Its output folder. Source: clemsgrs/slide2vec 7cfa6bf, artifacts.py; hs2p 6.1.0."""
    for path in sorted(folder.glob("tiles/*.coordinates.meta.json")):
        slide_id = path.name.removesuffix(".coordinates.meta.json")
        yield slide_id, partial(_of_slide2vec, slide_id, path, folder / "tile_embeddings")


def _of_slide2vec(
    slide_id: str, path: Path, home: Path, told: Mapping[str, Any]
) -> Iterator[Found]:
    arrays, meta = path.with_name(f"{slide_id}.coordinates.npz"), home / f"{slide_id}.meta.json"
    with rewording("tiling must be one of hs2p's", path, *_DAMAGE, error=StoreError):
        document = json.loads(path.read_text(encoding="utf-8"))
        tiling, embedded = document["tiling"], {"encoder_name": ""}
        with np.load(arrays, allow_pickle=False) as file:
            coords = np.stack([file["x"], file["y"]], axis=1).astype(np.int64)
        if meta.exists():
            embedded = json.loads(meta.read_text(encoding="utf-8"))
        px = int(tiling["requested_tile_size_px"])
        found = Found(
            grid=f"{px}px_{float(tiling['requested_spacing_um']):.6g}mpp",
            coords_l0=coords,
            edge_l0=int(tiling["tile_size_lv0"]),
            tile_px=px,
            overlap_px=round(float(tiling["overlap"]) * px),
            size=_size(*document["slide"]["dimensions"]),
            encoder=str(embedded["encoder_name"]),
            features=_array(home, slide_id) if meta.exists() else None,
        )
    yield found


def _array(home: Path, slide_id: str) -> npt.NDArray[Any]:
    """One array (N, D) of an .npz or a .pt, without running what a pickle may hold."""
    import torch

    if (packed := home / f"{slide_id}.npz").exists():
        with np.load(packed, allow_pickle=False) as file:
            return np.asarray(file["features"])
    tensor = torch.load(home / f"{slide_id}.pt", map_location="cpu", weights_only=True)
    if not isinstance(tensor, torch.Tensor) or tensor.ndim != 2:
        raise ValueError(f"{type(tensor).__name__} in {slide_id}.pt is not a tensor (N, D)")
    return np.asarray(tensor if tensor.dtype == torch.float16 else tensor.float())


def _size(width: Any, height: Any) -> Size | None:
    return (int(width), int(height)) if width and height else None


_Source = Callable[[Path], Iterator[tuple[str, Sourced]]]
_NAMED: dict[str, _Source] = {"trident": _trident, "clam": _clam, "stamp": _stamp}
SOURCES: Mapping[str, _Source] = {**_NAMED, "slide2vec": _slide2vec}
