"""Heatmaps: a planted lesion is found on a real slide; pictures, GeoJSON and sheets say so."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import roc_auc_score
from tests.conftest import REAL_SLIDES
from tests.predict.lesions import HEAD, Trained, trained_on_parts
from tests.support.lesion import Box, inside, write_with_lesion

import thinsection as ts
from thinsection.config import replace_flat
from thinsection.errors import InvalidInputError
from thinsection.predict.heatmap import HeatmapRunConfig, heatmap
from thinsection.store.geojson import write_tiles_geojson
from thinsection.store.tiles_h5 import TilesFile

LESION: Box = (2100, 900, 2950, 1750)


@pytest.fixture(scope="module")
def source() -> Path:
    path = REAL_SLIDES / "tcga-cr-7395-01a-01-ts1.svs"
    if not path.is_file():
        pytest.skip(f"no real slide at {path}; set THINSECTION_TEST_SLIDES")
    return path


@pytest.fixture(scope="module")
def trained(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained_on_parts(source, tmp_path_factory.mktemp("parts"), HEAD)


@pytest.fixture(scope="module")
def drawn(source: Path, trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of the whole slide with a lesion at a place of which no training slide has one."""
    folder = tmp_path_factory.mktemp("whole")
    write_with_lesion(source, folder / "whole.tif", LESION, mpp=0.5, seed=77)
    return ts.heatmap(trained.model, folder / "whole.tif", out=folder / "results")


def test_the_top_tiles_lie_in_the_lesion_and_the_others_rank_below(drawn: list[Path]) -> None:
    results = ts.open_results(drawn[0].parents[2])
    table = results.tiles("whole")
    share = inside(table.coords_l0, 512 // 2, LESION)
    planted = share > 0.5
    score = table.columns["heatmap_grade:score_high"]
    assert planted.sum() >= 9
    assert (share[np.argsort(-score)[: planted.sum() // 2]] > 0).all()
    # tiles that the border cuts are neither
    clear = planted | (share == 0)
    assert roc_auc_score(planted[clear], score[clear]) >= 0.95
    attention = table.columns["heatmap_grade:attention"]
    assert attention.sum() == pytest.approx(1, abs=1e-5)
    low = table.columns["heatmap_grade:score_low"]
    np.testing.assert_allclose(low, -score, atol=1e-6)


def test_the_pictures_show_the_lesion_over_the_slide(drawn: list[Path]) -> None:
    names = {path.name for path in drawn}
    assert names == {
        *("whole.attention.png", "whole.score_high.png", "whole.geojson", "whole.top.png"),
    }
    picture = np.asarray(Image.open(drawn[1]).convert("RGB")).astype(int)
    assert max(picture.shape) >= 1600
    scale = picture.shape[1] / 4443
    left, top, right, bottom = (round(v * scale) for v in LESION)
    redder = picture[..., 0] - picture[..., 2]
    assert redder[top:bottom, left:right].mean() > redder[: top // 2].mean() + 50


def test_tutorial_from_heatmap_to_qupath(trained: Trained, drawn: list[Path]) -> None:
    """docs/predictions.md: every tile is a tile object of QuPath with its measurements."""
    document = json.loads(next(p for p in drawn if p.suffix == ".geojson").read_text())
    table = ts.open_results(drawn[0].parents[2]).tiles("whole")
    assert len(document["features"]) == len(table.coords_l0)
    for feature, (x, y), value in zip(
        document["features"],
        table.coords_l0.tolist(),
        table.columns["heatmap_grade:score_high"],
        strict=True,
    ):
        ring = feature["geometry"]["coordinates"][0]
        assert ring[0] == ring[-1] == [x, y] and ring[2] == [x + 256, y + 256]
        assert feature["properties"]["objectType"] == "tile"
        measured = feature["properties"]["measurements"]
        assert measured.keys() == {"attention", "score_low", "score_high"}
        assert measured["score_high"] == pytest.approx(value, rel=1e-5, abs=1e-12)


def test_any_column_of_a_tile_table_can_be_drawn(trained: Trained, tmp_path: Path) -> None:
    paths = heatmap("tissue_fraction", trained.results, top_tiles=0)
    assert {p.suffix for p in paths} == {".png", ".geojson"} and len(paths) == 16
    assert all(p.is_file() and "heatmap_tissue_fraction" in str(p) for p in paths)
    with pytest.raises(InvalidInputError, match=r"one of \['tissue_fraction'\], got 'px_fcus'"):
        heatmap("px_fcus", trained.results)


def test_a_head_that_adds_nothing_up_is_refused_for_heatmaps(
    source: Path, trained: Trained, tmp_path: Path
) -> None:
    from tests.predict.lesions import train

    ids = [path.stem for path in trained.slides[:4]]
    mlp = train(trained.results, ids, replace_head("mlp"), tmp_path / "mlp.safetensors")
    config = replace_flat(HeatmapRunConfig(), {"top_tiles": 0})
    assert not heatmap(mlp.model, trained.results, config=config)
    rows = ts.predict(mlp.model, trained.results).rows
    assert all(row.answers for row in rows)
    failed = ts.predict(mlp.model, trained.results, heatmaps=True).rows
    assert all("head 'mlp' must say what each tile adds" in row.error for row in failed)


def replace_head(name: str) -> object:
    return replace(HEAD, head=name)


def test_geojson_leaves_out_what_json_does_not_know_and_holds_no_tiles_at_all(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.geojson"
    coords = np.array([[0, 0], [8, 0]])
    table = TilesFile(
        coords_l0=coords,
        features=None,
        attributes={"tile_size_l0": (8, 6)},
        columns={"a": np.array([1.0, np.nan]), "b": np.ones(2)},
    )
    write_tiles_geojson(path, table)
    first, second = json.loads(path.read_text())["features"]
    assert first["properties"]["measurements"] == {"a": 1.0, "b": 1.0}
    assert second["properties"]["measurements"] == {"b": 1.0}
    write_tiles_geojson(path, replace(table, coords_l0=coords[:0], columns={}))
    assert json.loads(path.read_text())["features"] == []
