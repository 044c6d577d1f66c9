"""Cells exported as AnnData and SpatialData, read back by these packages."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.support.cell_files import SIZE, run_with_cells, write_cells
from typer.testing import CliRunner

import thinsection as ts
from thinsection.cli.app import build_app
from thinsection.errors import StoreError
from thinsection.exchange.cells import export_cells_anndata
from thinsection.stages.config import RunConfig
from thinsection.testing.synthetic import write_he_slide

NUMBER = 400


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tables of cells of a slide, and another slide without cells."""
    root = tmp_path_factory.mktemp("cells")
    write_he_slide(root / "a.svs", SIZE, seed=7)
    for seed, name in enumerate(("nuclei", "other")):
        path = write_cells(root / name / "a.geojson", number=NUMBER, seed=seed)
        document = json.loads(path.read_text())
        del document["features"][5]["properties"]["classification"]
        path.write_text(json.dumps(document))
    return run_with_cells(root, ("nuclei", "other"), tile_px=128)


def run_export(*arguments: str) -> str:
    result = CliRunner().invoke(build_app(["export"]), ["export", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_anndata_reads_measures_classes_tiles_and_the_graph(
    out: Path, tmp_path: Path
) -> None:
    anndata = pytest.importorskip("anndata")
    words = ("anndata", str(out), "--out", str(tmp_path), "--cells", "nuclei")
    assert "cells of 1 slides" in run_export(*words, "--neighbors", "4")
    read = anndata.read_h5ad(tmp_path / "a.h5ad")
    table = ts.open_results(out).cells("a", "nuclei").to_table().to_pandas()
    assert read.shape == (NUMBER, 6)
    assert read.obs_names.tolist() == table["id"].tolist()
    np.testing.assert_array_equal(read.obsm["spatial"], table[["x_l0", "y_l0"]])
    np.testing.assert_array_equal(read[:, "area_um2"].X[:, 0], table["area_um2"])
    classes = read.obs["class"].astype(object).where(read.obs["class"].notna(), None)
    assert (
        classes.tolist()
        == table["class"].astype(object).where(table["class"].notna(), None).tolist()
    )
    assert read.obs["class"].isna().sum() == 1
    # the tile of each cell has the name that the AnnData of tiles has
    tiles = ts.open_results(out).tiles("a")
    edge = np.array(tiles.size_l0)
    for name, center in zip(read.obs["tile"], read.obsm["spatial"]):
        inside = (tiles.coords_l0 <= center) & (center < tiles.coords_l0 + edge)
        rows = np.flatnonzero(inside.all(axis=1))
        if len(rows):
            x, y = tiles.coords_l0[rows[0]].tolist()
            assert name == f"a:{x}x{y}"
        else:
            assert isinstance(name, float)  # NaN: missing
    lengths = read.obsp["spatial_distances"].toarray()
    assert (np.count_nonzero(lengths, axis=1) == 4).all()
    differences = read.obsm["spatial"][:, None] - read.obsm["spatial"]
    every = np.sort(np.hypot(*(differences * 0.5).transpose(2, 0, 1)), axis=1)
    np.testing.assert_allclose(np.sort(lengths, axis=1)[:, -4:], every[:, 1:5])
    ones = read.obsp["spatial_connectivities"]
    assert (ones.toarray() == (lengths > 0)).all()


def test_another_table_is_chosen_by_its_name(out: Path, tmp_path: Path) -> None:
    anndata = pytest.importorskip("anndata")
    export_cells_anndata(out, tmp_path, name="other")
    read = anndata.read_h5ad(tmp_path / "a.h5ad")
    assert read.uns["cells"] == "other"
    assert not len(read.obsp)


def test_a_folder_without_cells_is_refused(out: Path, tmp_path: Path) -> None:
    ts.run(
        out.parent / "a.svs",
        out=tmp_path / "plain",
        config=RunConfig(),
        until="tissue",
    )
    with pytest.raises(StoreError, match="folder must contain cells"):
        export_cells_anndata(tmp_path / "plain", tmp_path / "out")


@pytest.mark.filterwarnings("ignore")  # of spatialdata's own packages
def test_spatialdata_reads_outlines_and_their_table(out: Path, tmp_path: Path) -> None:
    spatialdata = pytest.importorskip("spatialdata")
    words = ("spatialdata", str(out), "--out", str(tmp_path), "--cells", "nuclei")
    assert "1 slides are in" in run_export(*words)
    data = spatialdata.read_zarr(tmp_path / "a.zarr")
    frame = ts.open_results(out).cells("a", "nuclei").to_geopandas()
    shapes = data.shapes["cells"]
    assert shapes["id"].tolist() == frame.index.tolist()
    assert shapes.geometry.geom_equals(frame.geometry, align=False).all()
    joined = spatialdata.match_element_to_table(data, "cells", "cell_measures")[1]
    assert joined.n_obs == NUMBER
