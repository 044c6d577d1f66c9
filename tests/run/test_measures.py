"""Measures of a run: taken from the tiles that encoders get, kept beside them, and compared."""

import csv
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow.parquet as pq
import pytest
import tifffile

from thinsection.config import replace_flat
from thinsection.errors import ConfigError, StoreError
from thinsection.exchange.anndata import export_anndata
from thinsection.results.folder import open_results
from thinsection.run.ending import RunSummary
from thinsection.run.process import RunEvent
from thinsection.run.run import run
from thinsection.slide import open_slide
from thinsection.stages.config import RunConfig
from thinsection.stages.own_tables import distances
from thinsection.stages.stage import GridTiles
from thinsection.stages.tiles import TileMeasures
from thinsection.store.tiles_h5 import TilesWriter
from thinsection.testing.synthetic import write_he_slide
from thinsection.tiles import TileTable, iter_tiles
from thinsection.tiles.filters import MEASURES, measure_tiles
from thinsection.tiles.grid import TilesConfig
from thinsection.tiles.transforms import STAIN_COLUMNS, StainVectors

GRID = "256px_0.5mpp"


def measured_run(
    *slides: Path, out: Path, until: str = "tiles", **flat: Any
) -> RunSummary:
    config = replace_flat(RunConfig(), {"memory": "256MiB", "measures": True, **flat})
    return run([str(s) for s in slides], out=out, config=config, until=until)


def plain_measures(path: Path, coords_l0: np.ndarray) -> np.ndarray:
    """Of the tiles at these places, read by themselves."""
    with open_slide(path) as slide:
        table = TileTable(coords_l0=coords_l0, plan=TilesConfig().plan(slide))
        return np.concatenate(
            [measure_tiles(b.tiles) for b in iter_tiles(slide, table)]
        )


def columns_of(out: Path, slide_id: str, grid: str = GRID) -> np.ndarray:
    columns = open_results(out).tiles(slide_id, grid).columns
    return np.stack([columns[name] for name in MEASURES], axis=1)


def rows_of(path: Path) -> dict[str, dict[str, str]]:
    with path.open(newline="") as file:
        return {row["slide_id"]: row for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Five slides, each of its own tissue."""
    folder = tmp_path_factory.mktemp("cohort")
    paths = [folder / f"s{n}.svs" for n in range(5)]
    for n, path in enumerate(paths):
        write_he_slide(path, (1100, 900), seed=n, downsamples=(1,))
    return paths


def test_one_pass_gives_embeddings_and_the_measures_of_the_same_tiles(
    tmp_path: Path, he_slide: Path
) -> None:
    told: list[RunEvent] = []
    flat = {
        "memory": "256MiB",
        "measures": True,
        "stain_norm": "macenko",
        "write": ["parquet"],
    }
    config = replace_flat(RunConfig(), {**flat, "batch_size": 4})
    run(
        [he_slide],
        out=tmp_path,
        config=config,
        until="embeddings",
        on_event=told.append,
    )
    tiles = open_results(tmp_path).tiles("he", GRID)
    started = [event.num_tiles for event in told if event.kind == "started"]
    assert started == [len(tiles.coords_l0)]  # each tile was read once
    want = plain_measures(he_slide, tiles.coords_l0)  # of the px before normalisation
    np.testing.assert_array_equal(columns_of(tmp_path, "he"), want)
    (parquet,) = tmp_path.glob(f"{GRID}/parquet_*_measures/he.parquet")
    assert {"tissue_fraction", "embedding", *MEASURES} <= set(
        pq.read_schema(parquet).names
    )
    export_anndata(tmp_path, tmp_path / "t.h5ad")
    import anndata

    obs = anndata.read_h5ad(tmp_path / "t.h5ad").obs
    np.testing.assert_array_equal(obs["px_focus"], want[:, -1])
    lines = (tmp_path / GRID / "measures" / "he.tsv").read_text().splitlines()
    assert lines[0].split("\t") == ["x_l0", "y_l0", "tissue_fraction", *MEASURES]
    values = np.array(
        [line.split("\t")[-len(MEASURES) :] for line in lines[1:]], np.float32
    )
    np.testing.assert_array_equal(values, want)


def test_measures_asked_for_later_encode_no_tile(
    tmp_path: Path, he_slide: Path
) -> None:
    config = replace_flat(RunConfig(), {"memory": "256MiB"})
    run([he_slide], out=tmp_path, config=config, until="embeddings")
    (features,) = tmp_path.glob(f"{GRID}/features_*/he.h5")
    before, written = features.read_bytes(), features.stat().st_mtime_ns
    told: list[RunEvent] = []
    later = replace_flat(config, {"measures": True})
    run(
        [he_slide], out=tmp_path, config=later, until="embeddings", on_event=told.append
    )
    assert not [event for event in told if event.kind == "tiles"]  # what encoders did
    assert (features.read_bytes(), features.stat().st_mtime_ns) == (before, written)
    coords_l0 = open_results(tmp_path).tiles("he", GRID).coords_l0
    np.testing.assert_array_equal(
        columns_of(tmp_path, "he"), plain_measures(he_slide, coords_l0)
    )
    assert (
        run([he_slide], out=tmp_path, config=later, until="embeddings").counts[
            "skipped"
        ]
        == 1
    )


def test_a_filter_on_a_measure_keeps_the_tiles_that_it_holds_for(
    tmp_path: Path, he_slide: Path
) -> None:
    measured_run(he_slide, out=tmp_path / "all")
    every = open_results(tmp_path / "all").tiles("he", GRID)
    red = every.columns["px_mean_red"]
    rule = f"px_mean_red<{float(np.median(red))!r}"
    measured_run(
        he_slide, out=tmp_path / "some", tile_filter=["tissue", rule], batch_size=2
    )
    (grid,) = open_results(tmp_path / "some").grids
    kept = open_results(tmp_path / "some").tiles("he", grid)
    want = red < np.median(red)
    assert 0 < want.sum() < len(want)
    np.testing.assert_array_equal(kept.coords_l0, every.coords_l0[want])
    for name in MEASURES:
        np.testing.assert_array_equal(kept.columns[name], every.columns[name][want])


def test_stain_vectors_are_those_of_a_sample_of_every_tile(
    tmp_path: Path, he_slide: Path
) -> None:
    measured_run(he_slide, out=tmp_path)
    row = rows_of(tmp_path / f"measures_{GRID}.csv")["he"]
    with open_slide(he_slide) as slide:
        coords_l0 = open_results(tmp_path).tiles("he", GRID).coords_l0
        table = TileTable(coords_l0=coords_l0, plan=TilesConfig().plan(slide))
        px = [b.tiles[:, ::8, ::8].reshape(-1, 3) for b in iter_tiles(slide, table)]
    found = StainVectors.estimate(np.concatenate(px), "he")
    want = [*found.hematoxylin, *found.eosin, *found.strengths]
    assert [float(row[name]) for name in STAIN_COLUMNS] == want
    assert row["measures_distance"] == ""  # one slide says nothing of what is usual
    focus = open_results(tmp_path).tiles("he", GRID).columns["px_focus"]
    assert float(row["px_focus"]) == float(np.median(focus))


class Tiles:
    """A table that has a length and the size of its tiles."""

    plan = SimpleNamespace(tile_px=64)

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count


def test_the_sample_is_bounded_and_the_same_whatever_the_order_of_batches() -> None:
    rng = np.random.default_rng(0)
    tiles = rng.integers(0, 256, (40, 64, 64, 3)).astype(np.uint8)
    for many in (40, 4000):
        table: Any = Tiles(many)
        source = GridTiles(slide=None, table=table, work=cast(Any, None))
        one, other = (TileMeasures(cast(Any, None), source) for _ in range(2))
        places = np.arange(many).reshape(-1, 40)
        for made, order in ((one, places), (other, places[::-1])):
            for indices in order:
                made.measure(indices, tiles)
        kept = np.arange(0, many, 3)
        assert len(one.sample(kept)) <= 2**20
        np.testing.assert_array_equal(one.sample(kept), other.sample(kept))
        np.testing.assert_array_equal(one.values, other.values)
    assert len(one.sample(np.arange(many))) == 256 * 32 * 32


def test_a_slide_of_one_stain_has_measures_no_vectors_and_a_word(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(2)
    gray = np.full((900, 1100), 245, np.uint8)
    gray[100:800, 100:1000] = rng.integers(90, 190, (700, 900))
    path = tmp_path / "grey.tif"
    tags = {"resolution": (20000, 20000), "resolutionunit": "CENTIMETER"}
    tifffile.imwrite(
        path, np.stack([gray] * 3, axis=2), photometric="rgb", tile=(256, 256), **tags
    )
    (result,) = measured_run(path, out=tmp_path / "out").results
    assert (
        "stain vectors must have two stains in the tissue" in result.facts["warnings"]
    )
    row = rows_of(tmp_path / "out" / f"measures_{GRID}.csv")["grey"]
    assert row["px_focus"] and not any(row[name] for name in STAIN_COLUMNS)


def test_a_slide_without_tiles_has_an_empty_table(tmp_path: Path) -> None:
    path, white = tmp_path / "white.tif", np.full((600, 700, 3), 245, np.uint8)
    tags = {"resolution": (20000, 20000), "resolutionunit": "CENTIMETER"}
    tifffile.imwrite(path, white, photometric="rgb", tile=(256, 256), **tags)
    summary = measured_run(path, out=tmp_path / "out")
    assert summary.counts["empty"] == 1
    assert columns_of(tmp_path / "out", "white").shape == (0, len(MEASURES))
    assert rows_of(tmp_path / "out" / f"measures_{GRID}.csv") == {}


def test_distances_are_those_of_the_stated_formula() -> None:
    rng = np.random.default_rng(5)
    names = (*STAIN_COLUMNS, *MEASURES)
    table = rng.normal(size=(9, len(names))) * 10 ** rng.uniform(-3, 3, len(names))
    table[:, 2] = 4.0  # a column that all agree in
    usual, far = table[1:], table.copy()
    far[0, 2] = 4.5
    rows = [dict(zip(names, row.tolist())) for row in far]
    found = distances(rows, rows[1:])
    median = np.median(usual, axis=0)
    mad = 1.4826 * np.median(abs(usual - median), axis=0)
    z = (far - median) / np.maximum(mad, 1e-3 * np.maximum(1, abs(median)))
    want = np.sqrt((z**2).mean(axis=1))
    assert [row["measures_distance"] for row in found] == pytest.approx(want.tolist())
    of_stains = np.sqrt((z[:, : len(STAIN_COLUMNS)] ** 2).mean(axis=1)).tolist()
    assert [row["measures_stain_distance"] for row in found] == pytest.approx(of_stains)
    without = [{n: v for n, v in rows[0].items() if n in MEASURES}]
    (alone,) = distances(without, rows[1:])
    assert list(alone) == ["measures_distance"]
    assert alone["measures_distance"] == pytest.approx(
        math.sqrt((z[0, len(STAIN_COLUMNS) :] ** 2).mean())
    )
    assert distances(rows, rows[:4]) == [{}] * 9  # too few to say what is usual


def test_slides_are_compared_with_the_cohort_or_a_reference_and_the_qc_page_shows_it(
    tmp_path: Path, cohort: list[Path]
) -> None:
    measured_run(*cohort, out=tmp_path / "usual")
    own = rows_of(tmp_path / "usual" / f"measures_{GRID}.csv")
    assert all(0 < float(row["measures_distance"]) < 10 for row in own.values())
    odd = tmp_path / "odd.tif"
    pale = tifffile.imread(cohort[0])
    pale = 255 - (255 - pale) // 2
    tags = {"resolution": (20000, 20000), "resolutionunit": "CENTIMETER"}
    tifffile.imwrite(odd, pale, photometric="rgb", tile=(256, 256), **tags)
    flat: dict[str, Any] = {
        "measures_reference": tmp_path / "usual",
        "qc": "histoqc-light",
    }
    with pytest.raises(
        ConfigError, match=r"must contain 256px.*; run it with measures=True"
    ):
        measured_run(odd, out=tmp_path / "out", **flat)
    measured_run(*cohort, out=tmp_path / "usual", qc="histoqc-light")
    measured_run(cohort[1], odd, out=tmp_path / "out", **flat)
    grid = f"{GRID}_qc-histoqc-light"
    rows = rows_of(tmp_path / "out" / f"measures_{grid}.csv")
    assert float(rows["odd"]["measures_distance"]) > 3 * float(
        rows["s1"]["measures_distance"]
    )
    in_qc = rows_of(tmp_path / "out" / "qc_histoqc-light.csv")
    assert in_qc["odd"]["measures_distance"] == rows["odd"]["measures_distance"]
    page = (tmp_path / "out" / "qc_histoqc-light.html").read_text()
    assert "measures_distance" in page and "measures of tiles" in page


def test_a_reference_goes_with_measures_and_is_a_results_folder(
    tmp_path: Path, he_slide: Path
) -> None:
    with pytest.raises(
        ConfigError,
        match="must be combined with measures, got it alone; pass measures=True",
    ):
        measured_run(
            he_slide, out=tmp_path, measures=False, measures_reference=tmp_path
        )
    with pytest.raises(StoreError, match="measures_reference must be a results folder"):
        measured_run(he_slide, out=tmp_path / "o", measures_reference=tmp_path / "none")


def test_every_table_of_the_grids_tiles_is_listed_and_gives_columns(
    tmp_path: Path, he_slide: Path
) -> None:
    """A heatmap is a folder that no ledger names; embeddings and other tiles are none of it."""
    measured_run(he_slide, out=tmp_path)
    results = open_results(tmp_path)
    plain = results.tiles("he", GRID)
    for name, coords_l0 in (
        ("heatmap_a", plain.coords_l0),
        ("other", plain.coords_l0[1:]),
    ):
        (tmp_path / GRID / name).mkdir()
        with TilesWriter(
            tmp_path / GRID / name / "he.h5", dim=3, attributes={}
        ) as writer:
            writer.append(coords_l0, np.ones((len(coords_l0), 3), dtype=np.float32))
            writer.add_column("attention", coords_l0[:, 0].astype(np.float32))
    (tmp_path / GRID / "no_table").mkdir()
    with TilesWriter(
        tmp_path / GRID / "no_table" / "he.h5", dim=3, attributes={}
    ) as writer:
        writer.append(
            plain.coords_l0, np.ones((len(plain.coords_l0), 3), dtype=np.float32)
        )
    tables = results.tile_tables("he", GRID)
    addresses = [
        f"{GRID}/{name}" for name in ("tiles", "measures", "heatmap_a", "other")
    ]
    assert [table.address for table in tables] == addresses
    assert tables[0].columns == ("tissue_fraction",)
    assert set(tables[1].columns) == set(MEASURES)
    assert [table.label("attention") for table in tables[2:]] == [
        "heatmap_a:attention",
        "other:attention",
    ]
    columns = results.tiles("he", GRID).columns
    assert set(columns) == {
        *plain.columns,
        "heatmap_a:attention",
    }  # the other has other tiles
    np.testing.assert_array_equal(columns["heatmap_a:attention"], plain.coords_l0[:, 0])
    ledger = results.ledgers["he"].without([f"{GRID}/tiles"])
    with pytest.raises(StoreError, match="must exist, got none"):
        replace(results, ledgers={"he": ledger}).tile_tables("he", GRID)
