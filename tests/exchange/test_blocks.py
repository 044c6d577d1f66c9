"""Embeddings that are copied in several blocks are those that were there, to the bit."""

import shutil
from pathlib import Path

import anndata
import h5py
import numpy as np
import pytest
import torch
from benchmarks.bench_memory import write_trident

from thinsection.errors import InvalidInputError, StoreError
from thinsection.exchange.anndata import export_anndata
from thinsection.exchange.peer_export import BLOCK_ROWS, export_peer
from thinsection.exchange.peer_import import import_peer
from thinsection.pool.encoder import BLOCK_ROWS as POOLED_ROWS
from thinsection.pool.means import MaxSlideEncoder, MeanSlideEncoder
from thinsection.results.folder import Results, open_results
from thinsection.store.tile_tables import EmbeddingRows
from thinsection.store.tiles_h5 import read_tiles

TILES = {"large": 2 * BLOCK_ROWS + 5, "small": 7}
WIDE = 1100  # several blocks of an import


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    for seed, (name, num_tiles) in enumerate(TILES.items()):
        write_trident(folder / "20x", name, num_tiles, seed, dim=WIDE)
    rows = [f"{name},{name}.svs,0.25" for name in TILES]
    (folder / "slides.csv").write_text(
        "\n".join(["slide_id,slide_path,mpp", *rows]) + "\n"
    )
    return folder


@pytest.fixture(scope="module")
def results(job: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    out = tmp_path_factory.mktemp("blocks") / "results"
    assert import_peer(job, out, "trident") == 2
    return open_results(out)


def embeddings_of(job: Path, name: str) -> np.ndarray:
    with h5py.File(next(job.glob(f"20x/features_*/{name}.h5"))) as file:
        return np.asarray(file["features"][...])


@pytest.mark.parametrize("name", TILES)
def test_an_import_has_the_rows_of_the_tool(
    job: Path, results: Results, name: str
) -> None:
    stored = results.tile_embeddings(name)
    np.testing.assert_array_equal(stored.embeddings, embeddings_of(job, name))
    assert import_peer(job, results.folder, "trident") == 2


def test_another_value_in_the_last_block_is_another_result(
    job: Path, results: Results, tmp_path: Path
) -> None:
    other = tmp_path / "job"
    for seed, (name, num_tiles) in enumerate(TILES.items()):
        write_trident(other / "20x", name, num_tiles, seed, dim=WIDE)
    shutil.copy(job / "slides.csv", other / "slides.csv")
    (path,) = other.glob("20x/features_*/large.h5")
    with h5py.File(path, "a") as file:
        file["features"][-1, -1] += 1
    with pytest.raises(StoreError, match="imported results must be new or unchanged"):
        import_peer(other, results.folder, "trident")
    with h5py.File(path, "a") as file:
        file["features"][-1, -1] = np.nan
    with pytest.raises(InvalidInputError, match="embeddings must be finite"):
        import_peer(other, tmp_path / "fresh", "trident")


def test_exports_have_the_rows_of_both_slides(
    job: Path, results: Results, tmp_path: Path
) -> None:
    expected = {name: embeddings_of(job, name) for name in TILES}
    assert export_anndata(results.folder, tmp_path / "t.h5ad") == sum(TILES.values())
    table = anndata.read_h5ad(tmp_path / "t.h5ad")
    np.testing.assert_array_equal(table.X, np.concatenate(list(expected.values())))
    in_memory = results.to_anndata()
    np.testing.assert_array_equal(table.X, in_memory.X)
    assert table.X.dtype == in_memory.X.dtype == np.float32
    assert list(table.var_names) == list(in_memory.var_names)
    assert table.uns["encoder"] == in_memory.uns["encoder"]
    for tool in ("clam", "stamp"):
        export_peer(results.folder, tmp_path / tool, tool)
    for name, embeddings in expected.items():
        (tensor,) = (tmp_path / "clam").glob(f"pt_files/{name}.pt")
        loaded = torch.load(tensor, weights_only=True)
        np.testing.assert_array_equal(loaded.numpy(), embeddings)
        (path,) = (tmp_path / "stamp").glob(f"*/{name}.h5")
        # its checksum is compared
        rows = EmbeddingRows(path)
        assert rows.is_signed
        np.testing.assert_array_equal(rows[:], embeddings)


@pytest.mark.parametrize("encoder", [MeanSlideEncoder(), MaxSlideEncoder()])
def test_pooling_of_rows_on_disk_is_that_of_an_array(
    tmp_path: Path, encoder: MeanSlideEncoder | MaxSlideEncoder
) -> None:
    for seed, num_tiles in enumerate((2 * POOLED_ROWS + 3, 5)):
        write_trident(tmp_path, f"s{num_tiles}", num_tiles, seed, dim=6)
        (path,) = tmp_path.glob(f"features_*/s{num_tiles}.h5")
        coords_l0 = read_tiles(path).coords_l0
        rows = EmbeddingRows(path)
        assert encoder.reads_blocks
        pooled = encoder.encode(rows, coords_l0, tile_px_l0=256)
        whole = encoder.encode(rows[:], coords_l0, tile_px_l0=256)
        assert pooled.tobytes() == whole.tobytes()
        with pytest.raises(InvalidInputError, match="one row per tile embedding"):
            encoder.encode(rows, coords_l0[1:], tile_px_l0=256)
