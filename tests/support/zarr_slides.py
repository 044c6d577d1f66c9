"""OME-Zarr images that are written for tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
import zarr
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

from thinsection.testing.synthetic import PyramidKind

Stored = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class ZarrKind(PyramidKind):
    """How a synthetic OME-Zarr is stored; `tile` is the chunk, `compression` a codec's name."""

    compression: str | int | None = "zstd"
    version: str = "0.5"
    axes: str = "tczyx"
    channels_in_chunk: int = 1
    shard: int = 0  # chunks along x and y of a shard
    unit: str = "micrometer"
    um: float = 1.0  # per unit


def write_ome(
    path: Path, levels: Sequence[Stored], kind: ZarrKind, **omero: Any
) -> None:
    """Writes levels (H, W, C), finest first."""
    old = kind.version == "0.4"
    group = zarr.create_group(path, zarr_format=2 if old else 3)
    for index, pixels in enumerate(levels):
        _write_level(group, str(index), pixels, kind)
    said: dict[str, Any] = {
        "multiscales": [_multiscales(len(levels), levels, kind)],
        **omero,
    }
    group.attrs.update(said if old else {"ome": {"version": "0.5", **said}})


def _write_level(group: Any, name: str, pixels: Stored, kind: ZarrKind) -> None:
    rows, columns = kind.tile or pixels.shape[:2]
    chunk = {"y": rows, "x": columns, "c": kind.channels_in_chunk}
    shape = dict(zip("yxc", pixels.shape))
    order = ["yxc".index(axis) for axis in kind.axes if axis in "yxc"]
    stored = pixels.transpose(order if "c" in kind.axes else [0, 1, 2])
    codecs = {
        "zstd": ZstdCodec(),
        "gzip": GzipCodec(),
        "blosc": BloscCodec(),
        None: None,
    }
    options: dict[str, Any] = {"compressors": codecs.get(kind.compression, ZstdCodec())}
    if kind.version == "0.4":
        options = {"chunk_key_encoding": {"name": "v2", "separator": "/"}}
    chunks = tuple(chunk.get(axis, 1) for axis in kind.axes)
    if kind.shard:
        steps = (kind.shard if axis in "yx" else 1 for axis in kind.axes)
        options["shards"] = tuple(a * b for a, b in zip(chunks, steps))
    array = group.create_array(
        name,
        shape=tuple(shape.get(axis, 1) for axis in kind.axes),
        chunks=chunks,
        dtype=pixels.dtype,
        fill_value=0,
        **options,
    )
    array[...] = stored.reshape(array.shape)


def _multiscales(
    count: int, levels: Sequence[Stored], kind: ZarrKind
) -> Mapping[str, Any]:
    """Half of level 0's scale lies in the whole's transformation, as the format allows."""
    datasets = []
    for index in range(count):
        scale = [1.0] * len(kind.axes)
        for axis, mpp in zip("xy", kind.mpp or ()):
            down = (
                levels[0].shape["yx".index(axis)]
                / levels[index].shape["yx".index(axis)]
            )
            scale[kind.axes.index(axis)] = mpp / kind.um * down / 2
        told = [{"type": "scale", "scale": scale}]
        datasets.append({"path": str(index), "coordinateTransformations": told})
    kinds = {"t": "time", "c": "channel"}
    axes: list[dict[str, str]] = [
        {"name": axis, "type": kinds.get(axis, "space")} for axis in kind.axes
    ]
    for axis in axes:
        if kind.mpp and axis["name"] in "xy":
            axis["unit"] = kind.unit
    twice = [2.0 if axis in "xy" else 1.0 for axis in kind.axes]
    found: dict[str, Any] = {"axes": axes, "datasets": datasets, "name": "a"}
    found["coordinateTransformations"] = [{"type": "scale", "scale": twice}]
    return found | ({"version": "0.4"} if kind.version == "0.4" else {})
