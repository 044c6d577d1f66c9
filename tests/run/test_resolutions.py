"""A cohort of other resolutions than the one that was asked for; docs/concepts.md has the table."""

import csv
from pathlib import Path

import pytest

from thinsection.run.run import run
from thinsection.slide import open_slide
from thinsection.stages.config import RunConfig
from thinsection.store.tiles_h5 import read_tiles
from thinsection.testing.synthetic import PyramidKind, write_pyramid
from thinsection.tiles.grid import TilesConfig

SIZE = (1400, 900)
COHORT: dict[
    str, tuple[float | None, tuple[int, ...]]
] = {  # id -> mpp, downsamples of its levels
    "same": (0.5, (1,)),
    "near": (0.504, (1,)),
    "half": (0.2527, (1, 2)),
    "flat": (0.2527, (1,)),
    "finer": (0.46, (1,)),
    "coarse": (0.6, (1,)),
    "dpi": (352.8, (1,)),
    "missing": (None, (1,)),
}
# id -> true µm/px of a tile, level that is read, edge of a tile in level-0 px
TILED = {
    "same": (0.5, 0, 256),
    "near": (0.504, 0, 256),
    "half": (0.5054, 1, 512),
    "flat": (0.5, 0, 507),
    "finer": (0.5, 0, 278),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    slides = tmp_path_factory.mktemp("slides")
    for name, (mpp, downs) in COHORT.items():
        kind = PyramidKind(mpp=mpp and (mpp, mpp), downsamples=downs, compression=None)
        write_pyramid(slides / f"{name}.tif", SIZE, kind)
    config = RunConfig(tiles=TilesConfig(tile_filter=()))
    out = tmp_path_factory.mktemp("out")
    run([slides], out=out, config=config, until="tiles")
    return out


def rows_of(results: Path, name: str) -> dict[str, dict[str, str]]:
    with (results / name).open(newline="") as file:
        return {row["slide_id"]: row for row in csv.DictReader(file)}


@pytest.mark.parametrize("name", TILED)
def test_a_slide_near_the_resolution_is_tiled_and_its_true_one_recorded(
    results: Path, name: str
) -> None:
    mpp, level, edge_l0 = TILED[name]
    found = read_tiles(next(results.glob(f"*/tiles/{name}.h5")))
    assert len(found.coords_l0) > 0
    assert found.attributes["tile_mpp"] == pytest.approx(mpp, rel=1e-6)
    assert found.attributes["mpp_tolerance"] == 0.05
    assert (found.attributes["patch_level"], found.attributes["patch_size_level0"]) == (
        level,
        edge_l0,
    )
    assert found.attributes["target_magnification"] == 20.0
    row = rows_of(results, "summary.csv")[name]
    assert row["status"] == "done"
    assert float(row["tile_mpp"]) == pytest.approx(mpp, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("coarse", "pass --tile-mpp 0.6 or native, or a higher --mpp-tolerance"),
        (
            "dpi",
            "352.8 µm/px (72 dpi), which is not possible for a slide, so its resolution counts as "
            "missing); pass --slide-mpp",
        ),
        ("missing", "slide_mpp is missing in 'missing.tif'; pass --slide-mpp"),
    ],
)
def test_a_slide_that_cannot_be_tiled_says_what_to_do(
    results: Path, name: str, remedy: str
) -> None:
    assert remedy in rows_of(results, "failed.csv")[name]["error"]


def test_a_resolution_that_is_not_believed_is_said_in_the_summary_where_none_is_needed(
    tmp_path: Path,
) -> None:
    write_pyramid(
        tmp_path / "dpi.tif", SIZE, PyramidKind(mpp=(352.8, 352.8), downsamples=(1,))
    )
    out, tiles = tmp_path / "out", TilesConfig(tile_mpp="native", tile_filter=())
    run([tmp_path / "dpi.tif"], out=out, config=RunConfig(tiles=tiles), until="tiles")
    row = rows_of(out, "summary.csv")["dpi"]
    assert (row["status"], row["mpp_x"], row["tile_mpp"]) == ("done", "", "")
    assert "72 dpi" in row["warnings"]


def test_a_resolution_that_a_person_gives_is_believed(tmp_path: Path) -> None:
    write_pyramid(
        tmp_path / "a.tif", SIZE, PyramidKind(mpp=(352.8, 352.8), downsamples=(1,))
    )
    with open_slide(tmp_path / "a.tif", slide_mpp=(25.0, 25.0)) as slide:
        assert (slide.slide_mpp, slide.notes) == ((25.0, 25.0), ())


def test_another_tolerance_is_another_grid(tmp_path: Path) -> None:
    write_pyramid(
        tmp_path / "a.tif", SIZE, PyramidKind(mpp=(0.504, 0.504), downsamples=(1,))
    )
    tiles = TilesConfig(tile_filter=(), mpp_tolerance=0.0)
    out = tmp_path / "out"
    run([tmp_path / "a.tif"], out=out, config=RunConfig(tiles=tiles), until="tiles")
    assert "higher --mpp-tolerance" in rows_of(out, "failed.csv")["a"]["error"]
    tiles = TilesConfig(tile_filter=(), mpp_tolerance=0.01)
    run([tmp_path / "a.tif"], out=out, config=RunConfig(tiles=tiles), until="tiles")
    assert "mpp_tolerance-0.01" in rows_of(out, "summary.csv")["a"]["grid"]
