"""`slide.tiles(tiles)[i]` is the picture that the stream gives."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import thinsection as ts
from thinsection.errors import InvalidInputError
from thinsection.testing.synthetic import write_he_slide


@pytest.fixture(scope="module")
def slide_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slide") / "a.svs"
    write_he_slide(path, (900, 700), seed=3, downsamples=(1, 4))
    return path


@pytest.mark.parametrize(
    "settings",
    [
        {"tile_px": 100, "tile_mpp": "native"},
        {"tile_px": 64, "tile_mpp": 1.3},
        {"tile_px": 50, "tile_mpp": 1.1, "resample": "fast", "edge": "pad"},
    ],
)
def test_pictures_are_those_of_the_stream(
    slide_path: Path, settings: dict[str, Any]
) -> None:
    with ts.open_slide(slide_path) as slide:
        table = ts.tile_grid(slide, **settings)
        pictures = slide.tiles(table)
        streamed = [
            tile.copy()
            for batch in ts.iter_tiles(slide, table, batch_size=7)
            for tile in batch.tiles
        ]
        assert len(pictures) == len(streamed) > 8
        for picture, tile in zip(pictures, streamed, strict=True):
            np.testing.assert_array_equal(picture, tile)
        np.testing.assert_array_equal(pictures[-1], streamed[-1])
        np.testing.assert_array_equal(pictures[2:9:3], np.stack(streamed[2:9:3]))
        assert pictures[4:4].shape == (0, settings["tile_px"], settings["tile_px"], 3)
        with pytest.raises(IndexError):
            pictures[len(streamed)]
        assert "<img" in pictures._repr_html_()


def test_tiles_of_a_results_folder_have_pictures(
    slide_path: Path, tmp_path: Path
) -> None:
    ts.run([slide_path], out=tmp_path, until="tiles", tile_px=64, tile_mpp="1.3")
    tiles = ts.open_results(tmp_path).tiles("a")
    with ts.open_slide(slide_path) as slide:
        table = ts.tile_grid(
            slide, tissue=ts.tissue_mask(slide), tile_px=64, tile_mpp=1.3
        )
        np.testing.assert_array_equal(tiles.coords_l0, table.coords_l0)
        np.testing.assert_array_equal(slide.tiles(tiles)[3], slide.tiles(table)[3])


def test_tiles_without_a_plan_or_of_another_slide_are_refused(
    slide_path: Path, tmp_path: Path
) -> None:
    write_he_slide(tmp_path / "b.svs", (1900, 700), seed=4, downsamples=(1, 2))
    with (
        ts.open_slide(slide_path) as slide,
        ts.open_slide(tmp_path / "b.svs") as other,
    ):
        with pytest.raises(InvalidInputError, match="tiles, got ndarray"):
            slide.tiles(np.zeros((1, 2)))  # type: ignore[arg-type]
        for settings in ({"tile_px": 64}, {"tile_px": 64, "tile_mpp": 2.0}):
            with pytest.raises(InvalidInputError, match="pass the tiles of this slide"):
                slide.tiles(ts.tile_grid(other, **settings))
