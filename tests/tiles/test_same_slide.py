"""Tiles of one slide are not read from another one, nor drawn on it."""

import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

import thinsection as ts
from thinsection.errors import InvalidInputError
from thinsection.slide import Slide
from thinsection.store.tiles_h5 import TilesFile
from thinsection.testing.synthetic import ArraySlide, position_pixels, write_he_slide
from thinsection.tiles import TileTable, iter_tiles
from thinsection.tiles.table import parent_rows
from thinsection.types import Size

SMALL: Size = (390, 260)  # not square, no multiple of a tile
LARGE: Size = (520, 330)


def make_slide(name: str, size: Size) -> ArraySlide:
    return ArraySlide([position_pixels(size)], slide_mpp=(0.5, 0.5), name=name)


def tiles_of(slide: Slide, tile_px: int = 64) -> TileTable:
    return ts.tile_grid(slide, tile_px=tile_px, tile_mpp=0.5)


def own_encoder() -> Any:
    return ts.make_encoder(
        lambda tiles: tiles.float().mean(dim=(2, 3)), name="mean", version="1"
    )


def draw(slide: Slide, tiles: Any, folder: Path) -> object:
    values = np.arange(len(tiles.coords_l0), dtype=float)
    return ts.write_heatmap(folder / "x.png", slide, tiles, values)


USES: dict[str, Callable[[Slide, Any, Path], object]] = {
    "slide.tiles": lambda slide, tiles, _: slide.tiles(tiles)[0],
    "iter_tiles": lambda slide, tiles, _: list(iter_tiles(slide, tiles)),
    "embed_tiles": lambda slide, tiles, _: ts.embed_tiles(slide, tiles, own_encoder()),
    "write_heatmap": draw,
    "plot.tiles": lambda slide, tiles, _: ts.plot.tiles(slide, tiles),
    "plot.heatmap": lambda slide, tiles, _: ts.plot.heatmap(
        slide, tiles, np.arange(len(tiles.coords_l0), dtype=float)
    ),
}
# uses that also take tiles of a results folder
USES_OF_FILES = {name: USES[name] for name in USES if not name.endswith("_tiles")}


@pytest.mark.parametrize("use", USES)
def test_tiles_of_a_slide_of_another_size_are_refused(use: str, tmp_path: Path) -> None:
    small = make_slide("a.svs", SMALL)
    large = make_slide("b.svs", LARGE)
    USES[use](small, tiles_of(small), tmp_path)
    USES[use](large, tiles_of(large), tmp_path)
    message = (
        "tiles must be of a slide of 520 x 330 px, got tiles of one of 390 x 260 px in 'b.svs'; "
        "pass the tiles of this slide"
    )
    # all of these tiles lie inside the larger slide
    with pytest.raises(InvalidInputError, match=f"^{re.escape(message)}$"):
        USES[use](large, tiles_of(small), tmp_path)
    with pytest.raises(InvalidInputError, match="tiles of one of 520 x 330 px"):
        USES[use](small, tiles_of(large), tmp_path)


@pytest.mark.parametrize("use", USES)
def test_tiles_of_a_slide_of_equal_size_and_another_name_are_refused(
    use: str, tmp_path: Path
) -> None:
    first = make_slide("a.svs", SMALL)
    second = make_slide("b.svs", SMALL)
    message = (
        "tiles must be of slide 'b', got tiles of 'a' in 'b.svs'; pass the tiles of this slide, "
        "or dataclasses.replace(tiles, slide_name=None) if both are the same slide"
    )
    with pytest.raises(InvalidInputError, match=f"^{re.escape(message)}$"):
        USES[use](second, tiles_of(first), tmp_path)
    USES[use](second, replace(tiles_of(first), slide_name=None), tmp_path)
    # the folder and the suffix of a file may change
    USES[use](make_slide("other/a.png", SMALL), tiles_of(first), tmp_path)


@pytest.fixture(scope="module")
def two_sizes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of two slides, of which the larger one covers the smaller one."""
    folder = tmp_path_factory.mktemp("two_sizes")
    write_he_slide(folder / "a.tif", size=(1300, 900), mpp=0.5)
    write_he_slide(folder / "b.tif", size=(1700, 1100), mpp=0.5)
    ts.run(
        sorted(folder.glob("*.tif")),
        out=folder / "r",
        until="tiles",
        tile_px=64,
        tile_mpp=1.0,
        memory="64MiB",
    )
    return folder


@pytest.mark.parametrize("use", USES_OF_FILES)
def test_tiles_of_a_results_folder_know_the_size_of_their_slide(
    two_sizes: Path, use: str, tmp_path: Path
) -> None:
    results = ts.open_results(two_sizes / "r")
    stored = results.tiles("a")
    assert stored.slide_size_l0 == (1300, 900)
    with results.open_slide("a") as slide:
        USES[use](slide, stored, tmp_path)
    other_size = pytest.raises(InvalidInputError, match="tiles of one of 1300 x 900 px")
    with results.open_slide("b") as slide, other_size:
        USES[use](slide, stored, tmp_path)


def test_a_copy_of_a_table_or_of_rows_of_it_keeps_its_slide() -> None:
    tiles = tiles_of(make_slide("a.svs", SMALL))
    copies = [
        pickle.loads(pickle.dumps(tiles)),  # noqa: S301
        tiles[2],
        tiles.select(np.arange(3)),
        tiles.with_columns({"x": tiles.coords_l0[:, 0]}),
    ]
    for copy in copies:
        assert (copy.slide_size_l0, copy.slide_name) == (SMALL, "a")


def test_a_table_of_own_coordinates_is_taken_for_each_slide() -> None:
    first = make_slide("a.svs", SMALL)
    second = make_slide("b.svs", LARGE)
    tiles = tiles_of(first)
    own = TileTable(coords_l0=tiles.coords_l0[1:3], plan=tiles.plan)
    expected = second.read_region(tuple(own.coords_l0[1].tolist()), 0, (64, 64))
    np.testing.assert_array_equal(second.tiles(own)[1], expected)


@pytest.mark.parametrize("value", [None, 0, "wide", float("inf"), np.array([])])
def test_a_file_without_a_usable_size_states_none(value: object) -> None:
    attributes = {"level0_width": value, "level0_height": 300}
    if value is None:
        del attributes["level0_width"]
    coords_l0 = np.zeros((1, 2), np.int64)
    tiles = TilesFile(coords_l0=coords_l0, features=None, attributes=attributes)
    assert tiles.slide_size_l0 is None


def test_parents_are_of_the_slide_of_the_tiles() -> None:
    small = make_slide("a.svs", SMALL)
    large = make_slide("b.svs", LARGE)
    tiles = tiles_of(small)
    rows = parent_rows(tiles, tiles_of(small, tile_px=128))
    assert rows[0] == 0
    with pytest.raises(InvalidInputError, match="parents must be of the slide of the"):
        parent_rows(tiles, tiles_of(large, tile_px=128))


def test_the_name_of_a_slide_has_its_image(tmp_path: Path) -> None:
    path = tmp_path / "two.ome.tif"
    with tifffile.TiffWriter(path, ome=True) as tiff:
        for name in ("first", "second"):
            tiff.write(
                position_pixels((600, 500)),
                photometric="rgb",
                tile=(64, 64),
                metadata={"axes": "YXS", "Name": name, "PhysicalSizeX": 0.5},
            )
    with ts.open_slide(path, image="first") as first:
        tiles = ts.tile_grid(first, tile_px=64, tile_mpp="native")
    with ts.open_slide(path, image="second") as second:
        assert second.slide_name == "two.ome-second"
        with pytest.raises(InvalidInputError, match=r"got tiles of 'two\.ome-first'"):
            second.tiles(tiles)


def test_a_turned_slide_has_the_name_of_its_file(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274] = 6
    path = tmp_path / "turned.jpg"
    Image.fromarray(position_pixels(SMALL)).save(path, exif=exif)
    with ts.open_slide(path) as slide:
        assert slide.size == (260, 390)
        assert slide.slide_name == slide.stored.slide_name == "turned"
        tiles = ts.tile_grid(slide, tile_px=64, tile_mpp="native")
        with pytest.raises(InvalidInputError, match="tiles of one of 260 x 390 px"):
            slide.stored.tiles(tiles)
