"""What needs no torch does not import it, nor SciPy: it would be most of a small command's time."""

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from tests.run import without_torch

import thinsection as ts
from thinsection.encode import EncoderSpec, TileEncoder, TilePixels
from thinsection.testing import run_and_measure
from thinsection.testing.memory import Measured
from thinsection.testing.synthetic import write_he_slide
from thinsection.types import MIB

HERE = "tests.run.without_torch"
READING_BYTES = 100 * MIB  # beyond the interpreter with NumPy


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("slides") / "a.tiff"
    write_he_slide(path, (2000, 1500))
    return str(path)


@pytest.fixture(scope="module")
def results(slide: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("out") / "results"
    ts.run([slide], out=out, encoders=["efficientnet_lite0"], engine="torch")
    return str(out)


def measured(function: str, **arguments: object) -> Measured:
    return run_and_measure(HERE, function, **arguments)


def test_native_tiles_are_read_without_torch_in_little_memory(slide: str) -> None:
    reading = measured("tiles_read", slide=slide)
    assert reading.result == [[], 5 * 7]
    alone = measured("nothing")
    assert alone.result == []
    assert reading.peak_bytes - alone.peak_bytes < READING_BYTES


def test_tissue_is_found_without_torch(slide: str) -> None:
    packages, num_px = measured("tissue_found", slide=slide).result
    assert packages == [] and num_px > 0


@pytest.mark.parametrize("num_tiles", [15, 60])
def test_few_resampled_tiles_need_no_torch(num_tiles: int) -> None:
    packages, digest = measured("resampled", num_tiles=num_tiles).result
    assert packages == ([] if num_tiles == 15 else ["torch"])
    # in this process PyTorch is loaded, so that its kernel makes the same tiles
    assert digest == without_torch.resampled(num_tiles)[1]


def test_a_run_to_the_tile_grid_needs_no_torch(slide: str, tmp_path: Path) -> None:
    run = measured("tiles_run", slide=slide, out=str(tmp_path / "out"))
    assert run.result == [[], 1]


class ColourMeans(TileEncoder):
    """Means of red, green and blue, by PyTorch's tensors; in a name of its own."""

    spec = EncoderSpec(name="colour_means_torch", dim=3)

    def encode(self, tiles_u8: TilePixels) -> torch.Tensor:
        means = np.asarray(tiles_u8).mean(axis=(1, 2), dtype=np.float64) / 255
        return torch.from_numpy(means.astype(np.float32))


def stored_rows(out: Path) -> list[bytes]:
    """Tile embeddings, and their mean, of the one slide of a folder."""
    rows = []
    for path in sorted(out.glob("*/*features_*/*.h5")):
        with h5py.File(path) as file:
            rows.append(file["features"][()].tobytes())
    return rows


@pytest.mark.parametrize("tile_mpp", ["native", "1.0"])
def test_an_encoder_on_numpy_needs_no_torch_and_stores_the_same_bytes(
    tile_mpp: str, slide: str, tmp_path: Path
) -> None:
    out = tmp_path / "numpy"
    run = measured("encoded_by_numpy", slide=slide, out=str(out), tile_mpp=tile_mpp)
    # the few tiles that are resampled for 1.0 need no PyTorch
    assert run.result[0] == []
    assert run.result[1] == f"numpy {np.__version__}"
    by_torch = tmp_path / "torch"
    ts.run([slide], out=by_torch, encoder=ColourMeans(), tile_mpp=tile_mpp)
    rows = stored_rows(out)
    assert len(rows) == 2 and rows == stored_rows(by_torch)
    if tile_mpp == "native":
        # the largest value of each channel, beside the mean
        pooling = measured("pooled", folder=str(out))
        assert pooling.result == [[], 0]
        assert len(stored_rows(out)) == 3


def test_results_are_listed_without_torch(results: str) -> None:
    assert measured("listed", folder=results).result == [[], 0]


def test_embeddings_are_exported_without_torch(results: str, tmp_path: Path) -> None:
    out = tmp_path / "trident"
    assert measured("exported", folder=results, out=str(out)).result == [[], 0]
    assert list(out.rglob("*.h5"))
