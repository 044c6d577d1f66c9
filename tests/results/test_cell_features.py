"""Features of cells: the same channels for every slide, alone and beside embeddings."""

from pathlib import Path

import numpy as np
import pytest
from tests.support.cell_files import SIZE, write_cells

import thinsection as ts
from thinsection.errors import StoreError
from thinsection.results.cell_features import cell_channels
from thinsection.results.folder import Results
from thinsection.stages.config import RunConfig
from thinsection.testing.synthetic import write_he_slide


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Two slides; one of them lacks a class."""
    root = tmp_path_factory.mktemp("features")
    (root / "slides").mkdir()
    for seed, (name, classes) in enumerate(
        {"a": ("Tumour",), "b": ("Immune",)}.items()
    ):
        write_he_slide(root / "slides" / f"{name}.svs", SIZE, seed=seed)
        path = root / "nuclei" / f"{name}.geojson"
        write_cells(path, number=200, seed=seed, names=classes)
    ts.run(
        root / "slides",
        out=root / "results",
        config=RunConfig(),
        until="embeddings",
        tile_px=128,
        pretrained=False,
        cells=[str(root / "nuclei")],
    )
    return ts.open_results(root / "results")


def test_densities_are_logarithms_and_shares_are_kept() -> None:
    columns = {
        "per_mm2": np.array([99.0, np.nan]),
        "share_a": np.array([0.25, np.nan]),
        "count": np.array([7, 0]),
    }
    names = ["area_um2_mean", "per_mm2", "share_a"]
    channels = cell_channels(columns, names, 2)
    assert channels == pytest.approx(np.array([[0, 2, 0.25], [0, 0, 0]]))


def test_every_slide_has_the_channels_of_all_classes(results: Results) -> None:
    address = results.write_cell_features("nuclei")
    assert address.endswith("/features_cells_nuclei")
    stored = {slide: results.tile_embeddings(slide, address) for slide in "ab"}
    names = [
        *("area_um2_mean", "area_um2_std", "per_mm2", "per_mm2_Immune"),
        *("per_mm2_Tumour", "share_Immune", "share_Tumour"),
    ]
    for slide, other in (("a", "Immune"), ("b", "Tumour")):
        tiles = results.tiles(slide)
        assert list(stored[slide].attributes["channels_of_cells"]) == names
        assert stored[slide].features.shape == (len(tiles), 7)
        density = np.nan_to_num(tiles.columns["cells_nuclei:per_mm2"])
        np.testing.assert_allclose(
            stored[slide].features[:, 2], np.log10(1 + density), rtol=1e-5
        )
        assert density.any()
        assert not stored[slide].features[:, names.index(f"share_{other}")].any()
    again = (results.folder / address / "a.h5").stat().st_mtime_ns
    results.write_cell_features("nuclei")
    assert (results.folder / address / "a.h5").stat().st_mtime_ns == again


def test_the_channels_follow_those_of_an_embedding(results: Results) -> None:
    address = results.write_cell_features("nuclei", features="efficientnet")
    alone = results.write_cell_features("nuclei")
    (embedding,) = [name for name in results.features if "cells" not in name]
    for slide in "ab":
        joined = results.tile_embeddings(slide, address).features
        first = results.tile_embeddings(slide, embedding).features
        last = results.tile_embeddings(slide, alone).features
        np.testing.assert_array_equal(joined, np.concatenate((first, last), axis=1))
    record = results.ledgers["a"].stages[address]
    assert embedding in record.needs
    assert record.facts["dim"] == 1287


def test_cells_that_no_slide_has_are_refused(results: Results) -> None:
    with pytest.raises(StoreError, match="slides must have cells 'other' on the grid"):
        results.write_cell_features("other")


def test_the_slides_of_the_fixture_are_two(results: Results) -> None:
    assert Path(results.folder, "failed.csv").read_text().count("\n") == 1
    assert len(results) == 2
