"""Stores for SpatialData, read by spatialdata itself."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import thinsection as ts
from thinsection.cli.app import build_app
from thinsection.config import replace_flat
from thinsection.errors import InvalidInputError, StoreError
from thinsection.testing.synthetic import write_he_slide

spatialdata = pytest.importorskip("spatialdata")
pytestmark = pytest.mark.filterwarnings("ignore")  # of spatialdata's own packages
FEATURES = "128px_0.5mpp/features_efficientnet_lite0_seed0"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("spatial")
    for seed, name in enumerate("ab"):
        path = root / "slides" / f"{name}.svs"
        path.parent.mkdir(exist_ok=True)
        write_he_slide(path, (1300, 900), seed=seed, downsamples=(1, 4))
    flat = {
        "tile_px": 128,
        "memory": "128MiB",
        "pretrained": False,
        "encoders": ["efficientnet_lite0"],
        "until": "embeddings",
    }
    config = replace_flat(ts.RunConfig(), flat)
    ts.run([root / "slides"], out=root / "results", config=config)
    return root / "results"


def test_spatialdata_reads_tiles_outlines_and_embeddings(
    out: Path, tmp_path: Path
) -> None:
    command = ["export", "spatialdata", str(out), "--out", str(tmp_path)]
    result = CliRunner().invoke(build_app(["export"]), command)
    assert result.exit_code == 0 and "2 slides are in" in result.output
    results = ts.open_results(out)
    for name in "ab":
        data = spatialdata.read_zarr(tmp_path / f"{name}.zarr")
        stored = results.tile_embeddings(name)
        table = data.tables["embeddings"]
        np.testing.assert_array_equal(table.X, stored.features)
        np.testing.assert_array_equal(table.obsm["spatial"], stored.coords_l0)
        assert table.uns["features"] == FEATURES
        bounds = data.shapes["tiles"].bounds.to_numpy()
        np.testing.assert_array_equal(bounds[:, :2], stored.coords_l0)
        np.testing.assert_array_equal(bounds[:, 2:], stored.coords_l0 + 128)
        joined = spatialdata.match_element_to_table(data, "tiles", "embeddings")[1]
        assert joined.n_obs == len(stored.coords_l0)
        shares = data.shapes["tiles"]["tissue_fraction"]
        tissue = data.shapes["outlines"].union_all()
        areas = data.shapes["tiles"].intersection(tissue).area / 128**2
        # outlines run along the pixels of the mask, of which shares are made
        assert np.abs(areas - shares).max() < 0.02
        assert data.attrs["slide"]["slide_path"].endswith(f"{name}.svs")
        extent = spatialdata.get_extent(data["tiles"], coordinate_system="um")
        assert extent["x"][1] == bounds[:, 2].max() * 0.5


def test_a_store_is_kept_if_it_is_of_the_same_results(
    out: Path, tmp_path: Path
) -> None:
    from thinsection.exchange.spatialdata import export_spatialdata

    export_spatialdata(out, tmp_path)
    shutil.rmtree(tmp_path / "b.zarr")
    time = (tmp_path / "a.zarr" / "zarr.json").stat().st_mtime_ns
    assert export_spatialdata(out, tmp_path) == 2
    assert (tmp_path / "a.zarr" / "zarr.json").stat().st_mtime_ns == time
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zarr", "b.zarr"]
    ledger = out / "slides" / "a" / "slide.json"
    text = ledger.read_text()
    try:
        ledger.write_text(re.sub(r'"key": "\w{4}', '"key": "0000', text))
        with pytest.raises(
            StoreError, match="store must be new or of the same results"
        ):
            export_spatialdata(out, tmp_path)
    finally:
        ledger.write_text(text)


def test_embeddings_that_are_not_there_are_refused(out: Path, tmp_path: Path) -> None:
    from thinsection.exchange.spatialdata import export_spatialdata

    with pytest.raises(InvalidInputError, match="features must match one of"):
        export_spatialdata(out, tmp_path, features="uni2_h")
    assert not list(tmp_path.iterdir())
