"""tiles.h5: what was written comes back, files of TRIDENT and CLAM too, bad ones are named."""

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from thinsection.errors import InvalidInputError, StoreError
from thinsection.store.hdf5 import DATASETS, damaged_datasets
from thinsection.store.tiles_h5 import (
    EmbeddedTiles,
    TilesWriter,
    column_names,
    read_embedded_tiles,
    read_tiles,
)

COORDS = np.random.default_rng(0).integers(0, 100_000, (300, 2)).astype(np.int64)
FEATURES = np.random.default_rng(1).normal(size=(300, 40)).astype(np.float32)


def write(path: Path, **options: object) -> None:
    with TilesWriter(
        path, dim=40, attributes={"patch_size_level0": 512}, **options
    ) as writer:  # type: ignore[arg-type]
        writer.append(COORDS[:130], FEATURES[:130])
        writer.append(COORDS[130:], FEATURES[130:])
        writer.add_column("tissue_fraction", np.ones(300, np.float32))


def test_batches_come_back_to_the_bit(tmp_path: Path) -> None:
    write(tmp_path / "tiles.h5")
    tiles = read_tiles(tmp_path / "tiles.h5")
    np.testing.assert_array_equal(tiles.coords_l0, COORDS)
    np.testing.assert_array_equal(tiles.features, FEATURES)
    assert tiles.tile_px_l0 == 512
    assert tiles.columns["tissue_fraction"].shape == (300,)


def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    write(tmp_path / "a.h5")
    write(tmp_path / "b.h5")
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


def test_trident_finds_its_names(tmp_path: Path) -> None:
    write(tmp_path / "tiles.h5")
    with h5py.File(tmp_path / "tiles.h5") as file:
        assert file["features"].shape == (300, 40)
        assert file["coords"].dtype == np.int64
        assert file["coords"].attrs["patch_size_level0"] == 512


def test_a_trident_file_with_a_leading_batch_axis_is_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "t.h5", "w") as file:
        file["features"] = FEATURES[None]
        file["coords"] = COORDS.astype(np.int32)
        file["coords"].attrs["patch_size_level0"] = 1024.0
    tiles = read_tiles(tmp_path / "t.h5")
    assert tiles.features is not None
    assert tiles.features.shape == (300, 40)
    assert tiles.coords_l0.dtype == np.int64
    assert tiles.tile_px_l0 == 1024


def test_a_clam_file_gives_its_tile_size_in_level_0_px(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file["features"], file["coords"] = FEATURES, COORDS
        attributes = {
            "patch_size": 256,
            "patch_level": 1,
            "downsample": np.array([4.0, 4.0]),
        }
        file["coords"].attrs.update(attributes)
    assert read_tiles(tmp_path / "c.h5").tile_px_l0 == 1024


def test_coordinates_alone_are_a_valid_file(tmp_path: Path) -> None:
    with TilesWriter(tmp_path / "t.h5", dim=0, attributes={}) as writer:
        writer.append(COORDS, None)
    assert read_tiles(tmp_path / "t.h5").features is None
    with pytest.raises(StoreError, match="must contain the embeddings of its tiles"):
        read_embedded_tiles(tmp_path / "t.h5")


def test_embeddings_of_a_file_of_embeddings_are_there_by_both_names(
    tmp_path: Path,
) -> None:
    with TilesWriter(tmp_path / "a b.h5", dim=40, attributes={"name": "a b"}) as writer:
        writer.append(COORDS, FEATURES)
    for path in (tmp_path / "a b.h5", str(tmp_path / "a b.h5")):
        stored = read_embedded_tiles(path)
        assert stored.embeddings is stored.features
        np.testing.assert_array_equal(stored.embeddings, FEATURES)
        np.testing.assert_array_equal(stored.coords_l0, COORDS)
        assert stored.attributes["name"] == "a b"
        assert isinstance(replace(stored, plan=None), EmbeddedTiles)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_embeddings_that_are_not_finite_are_refused_with_their_tile(
    tmp_path: Path, bad: float
) -> None:
    features = FEATURES[:2].copy()
    features[1, 3] = bad
    with TilesWriter(tmp_path / "t.h5", dim=40, attributes={}) as writer:
        message = rf"for the tile at \[{COORDS[1, 0]}, {COORDS[1, 1]}\]"
        with pytest.raises(InvalidInputError, match=message):
            writer.append(COORDS[:2], features)


def test_a_value_that_overflows_float16_is_refused(tmp_path: Path) -> None:
    features = np.full((1, 40), 1e6, np.float32)
    with (
        TilesWriter(
            tmp_path / "t.h5", dim=40, dtype="float16", attributes={}
        ) as writer,
        pytest.raises(InvalidInputError, match="finite in float16"),
    ):
        writer.append(COORDS[:1], features)


def test_rows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with (
        TilesWriter(tmp_path / "t.h5", dim=40, attributes={}) as writer,
        pytest.raises(InvalidInputError, match=r"shape \(3, 40\), got \(2, 40\)"),
    ):
        writer.append(COORDS[:3], FEATURES[:2])


def test_missing_truncated_and_foreign_files_are_named(tmp_path: Path) -> None:
    write(tmp_path / "tiles.h5")
    data = (tmp_path / "tiles.h5").read_bytes()
    (tmp_path / "short.h5").write_bytes(data[: len(data) // 2])
    (tmp_path / "text.h5").write_text("not HDF5")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["images"] = np.zeros(3)
    with pytest.raises(StoreError, match=r"got '.*none.h5': no such file"):
        read_tiles(tmp_path / "none.h5")
    for name in ("short.h5", "text.h5"):
        with pytest.raises(StoreError, match=f"readable HDF5, got '.*{name}'"):
            read_tiles(tmp_path / name)
    with pytest.raises(StoreError, match=r"must contain 'coords', got \['images'\]"):
        read_tiles(tmp_path / "other.h5")


@pytest.mark.parametrize(
    "name", ["tiles/tissue_fraction", "tiles", "coords", "features"]
)
def test_a_file_that_lost_a_dataset_is_damaged_and_one_of_others_is_not(
    tmp_path: Path, name: str
) -> None:
    """A column that is gone would otherwise be a tile table without this column."""
    for file_name in ("a.h5", "b.h5"):
        write(tmp_path / file_name)
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        del file[name]
    for read in (read_tiles, column_names):
        with pytest.raises(StoreError, match=r"the datasets that were written.*a\.h5"):
            read(tmp_path / "a.h5")
    assert damaged_datasets(tmp_path / "a.h5")[1] != []
    assert damaged_datasets(tmp_path / "b.h5")[1] == []
    with h5py.File(tmp_path / "b.h5", "r+") as file:  # other tools do not write it
        del file.attrs[DATASETS]
        del file["tiles"]
    assert read_tiles(tmp_path / "b.h5").columns == {}
