"""Channels and colour profile of a run: refused, recorded, and part of what results are."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile

from thinsection.config import replace_flat
from thinsection.predict.heatmap import GAP_PX, TEXT_PX, TILE_PX, draw_top_tiles
from thinsection.results.folder import open_results
from thinsection.results.tiled_slide import tiled_slide
from thinsection.run.run import run
from thinsection.slide import open_slide
from thinsection.slide.cohort_table import SlidesConfig
from thinsection.stages.config import RunConfig
from thinsection.store.tiles_h5 import read_tiles


def failures(out: Path) -> dict[str, str]:
    with (out / "failed.csv").open(newline="") as file:
        return {row["slide_id"]: row["error"] for row in csv.DictReader(file)}


def summary(out: Path) -> dict[str, dict[str, str]]:
    with (out / "summary.csv").open(newline="") as file:
        return {row["slide_id"]: row for row in csv.DictReader(file)}


@pytest.fixture
def multiplex(tmp_path: Path) -> Path:
    y, x = np.mgrid[:700, :900]
    data = np.stack([(x * (c + 2) + y) % 4000 for c in range(4)]).astype(np.uint16)
    told = {"axes": "CYX", "PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5}
    told |= {"Channel": {"Name": ["DAPI", "CD3", "CD8", "PanCK"]}}
    path = tmp_path / "mux.ome.tif"
    tifffile.imwrite(
        path, data, tile=(256, 256), photometric="minisblack", metadata=told
    )
    return path


def test_a_multiplex_slide_is_refused_until_channels_are_picked(
    multiplex: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    config = replace_flat(RunConfig(), {"tile_filter": (), "overview": False})
    assert run([multiplex], out=out, config=config, until="tiles").counts["failed"] == 1
    (said,) = failures(out).values()
    assert "4 channels of 16 bits (DAPI, CD3, CD8, PanCK)" in said
    assert "--channels DAPI,CD3,CD8" in said

    picked = replace_flat(config, {"channels": "DAPI,PanCK", "channel_range": "1,99"})
    assert run([multiplex], out=out, config=picked, until="tiles").counts["done"] == 1
    stored = read_tiles(next(out.glob("*/tiles/*.h5")))
    assert stored.attributes["rendering"].startswith("channels DAPI ")
    assert "(percentiles 1 and 99) as RGB" in stored.attributes["rendering"]
    assert (
        run([multiplex], out=out, config=picked, until="tiles").counts["skipped"] == 1
    )

    other = replace_flat(picked, {"channels": "CD3"})
    assert run([multiplex], out=out, config=other, until="tiles").counts["failed"] == 1
    (said,) = failures(out).values()
    assert "pass --overwrite to replace it" in said


def test_the_sheet_of_top_tiles_shows_the_channels_of_the_run(
    multiplex: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    flat = {"tile_filter": (), "overview": False, "tile_px": TILE_PX}
    flat |= {"channels": "DAPI,PanCK", "channel_range": "1,99"}
    config = replace_flat(RunConfig(), flat)
    run([multiplex], out=out, config=config, until="tiles")
    results = open_results(out)
    (slide_id,) = results.slides
    tiled = tiled_slide(results, results.ledgers[slide_id], results.grids[0])
    table = results.tiles(slide_id)
    values = np.arange(len(table.coords_l0), dtype=np.float32)
    sheet = draw_top_tiles(tiled, replace(table, columns={"v": values}), ["v"], 1)
    # a tile of the sheet's own edge is pasted as it is
    top = TEXT_PX + 2 * GAP_PX
    shown = np.asarray(sheet)[top : top + TILE_PX, GAP_PX : GAP_PX + TILE_PX]
    with open_slide(multiplex, look=config.slides.look) as slide:
        x, y = table.coords_l0[-1].tolist()
        expected = slide.read_region((x, y), 0, (TILE_PX, TILE_PX))
    np.testing.assert_array_equal(shown, expected)
    assert np.ptp(expected[..., 0]) > 50


def test_gray_is_said_in_the_summary(tmp_path: Path) -> None:
    gray, path = np.full((700, 900), 200, np.uint8), tmp_path / "gray.tif"
    tifffile.imwrite(path, gray, tile=(256, 256), photometric="minisblack")
    config = replace_flat(RunConfig(), {"tile_mpp": "native", "overview": False})
    run([path], out=tmp_path / "out", config=config, until="tiles")
    assert "gray: one channel" in summary(tmp_path / "out")["gray"]["warnings"]


@pytest.mark.parametrize("wrong", ["", "5", "a,b", "1,2,3"])
def test_a_range_is_two_percentiles(wrong: str) -> None:
    with pytest.raises(ValueError, match="channel_range must be two percentiles"):
        SlidesConfig(channels="0", channel_range=wrong)
