"""What a file merely declares takes no memory, and a number that is none is said by name."""

from pathlib import Path

import h5py
import numpy as np
import pytest

from thinsection.errors import DatasetError, StoreError
from thinsection.evaluation.embeddings import read_embeddings
from thinsection.predict.bags import Bags
from thinsection.predict.inputs import read_inputs
from thinsection.store.tile_tables import EmbeddingRows
from thinsection.store.tiles_h5 import read_tiles

ROWS = 1 << 38  # of 256 float32: 256 TiB


def write_tiles(path: Path, **attributes: float) -> Path:
    with h5py.File(path, "w") as file:
        file["features"] = np.zeros((3, 8), np.float32)
        file["coords"] = np.arange(6).reshape(3, 2)
        file["coords"].attrs.update({"patch_size_level0": 256, **attributes})
    return path


def declare(path: Path, name: str) -> Path:
    """A sound file but for one dataset, of which nothing is stored."""
    write_tiles(path)
    with h5py.File(path, "r+") as file:
        attributes = dict(file[name].attrs)
        del file[name]
        shape = (ROWS, 256 if name == "features" else 2)
        file.create_dataset(name, shape=shape, dtype="f4", chunks=(1024, shape[1]))
        file[name].attrs.update(attributes)
    assert path.stat().st_size < 10_000
    return path


def test_embeddings_that_are_only_declared_are_refused_by_every_reader(
    tmp_path: Path,
) -> None:
    path = declare(tmp_path / "a.h5", "features")
    refusal = r"256\.0 TiB of shape .* in '.*a\.h5'"
    for read in (read_tiles, read_inputs, EmbeddingRows):
        with pytest.raises(StoreError, match=refusal):
            read(path)
    with pytest.raises(DatasetError, match=refusal):
        read_embeddings(path)
    with Bags([[path]]) as bags, pytest.raises(StoreError, match=r"256\.0 TiB"):
        bags.read(0)


def test_coordinates_that_are_only_declared_are_refused(tmp_path: Path) -> None:
    path = declare(tmp_path / "a.h5", "coords")
    with pytest.raises(StoreError, match=r"'coords' must have at most as many values"):
        read_tiles(path)
    with (
        Bags([[path]], cells=True) as bags,
        pytest.raises(StoreError, match="'coords' must have at most as many values"),
    ):
        bags.read(0)


def test_what_compresses_best_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["coords"] = np.zeros((30_000, 2), np.int64)
        blank = np.zeros((30_000, 768), np.float16)
        file.create_dataset("features", data=blank, compression="gzip", shuffle=True)
    found = read_tiles(path).features
    assert found is not None
    assert found.shape == (30_000, 768)


def test_an_array_whose_header_promises_too_much_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    head = {"descr": "<f4", "fortran_order": False, "shape": (ROWS, 256)}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, head)
        file.write(bytes(1000))
    with pytest.raises(DatasetError, match=r"embeddings must be readable.*a\.npy"):
        read_embeddings(path)
    path.write_bytes(path.read_bytes().replace(b"}", b"("))
    with pytest.raises(DatasetError, match=r"embeddings must be readable.*a\.npy"):
        read_embeddings(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["patch_size", "patch_size_level0", "tile_mpp"])
def test_a_number_that_is_none_is_named_with_its_file(
    tmp_path: Path, name: str, value: float
) -> None:
    path = write_tiles(tmp_path / "a.h5", **{name: value})
    rule = rf"attribute '{name}' must be a finite number, got .*{value}.* in '.*a\.h5'"
    for read in (read_tiles, read_inputs):
        with pytest.raises(StoreError, match=rule):
            read(path)
    with Bags([[path]], cells=True) as bags, pytest.raises(StoreError, match=rule):
        bags.read(0)


def test_a_magnification_that_is_none_is_named_with_its_file(tmp_path: Path) -> None:
    path = write_tiles(tmp_path / "a.h5", target_magnification=float("nan"))
    with pytest.raises(
        StoreError, match=r"'target_magnification' must be .* got nan in"
    ):
        read_inputs(path)
