"""What a notebook shows of a slide, its tissue and its tiles: short, escaped, with a picture."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from thinsection.qc import TissueMask, tissue_mask
from thinsection.slide import Slide
from thinsection.testing.synthetic import ArraySlide, he_texture
from thinsection.tiles import TilesConfig, TileTable, tile_grid

TEXTURE = he_texture(np.random.default_rng(0))


def objects(
    mpp: tuple[float, float] | None = (0.5, 0.5),
) -> tuple[Slide, TissueMask, TileTable]:
    pixels = np.full((600, 900, 3), 245, np.uint8)
    pixels[:600, :450] = TEXTURE[:600, :450]
    slide = ArraySlide(
        [pixels, pixels[::2, ::2]], slide_mpp=mpp, name="s3://b/<i>a&b.svs"
    )
    tissue = tissue_mask(slide)
    tile_mpp = "native" if mpp is None else "0.5"
    return (
        slide,
        tissue,
        tile_grid(slide, TilesConfig(tile_px=64, tile_mpp=tile_mpp), tissue=tissue),
    )


def picture_of(page: str) -> np.ndarray:
    data = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', page)[0]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def test_what_is_shown_says_size_resolution_and_content() -> None:
    slide, tissue, tiles = map(repr, objects())
    assert slide == (
        "ArraySlide('<i>a&b.svs': 900 x 600 px, 2 levels, 0.5 µm/px, reader 'array')"
    )
    assert re.fullmatch(
        r"TissueMask\(56 x 38 px, 8\.\d+ x 7\.\d+ µm/px, 5\d\.\d% tissue\)", tissue
    )
    assert re.fullmatch(
        r"TileTable\(\d+ tiles of 64 px at 0\.5 µm/px, x 0 to 448 and y 0 to 576 in level-0 px, "
        r"columns: tissue_fraction\)",
        tiles,
    )
    without = list(map(repr, objects(mpp=None)))
    assert all("no resolution" in text for text in without[1:])
    assert "px, 2 levels, no resolution," in without[0]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_pages_are_escaped_and_small(index: int) -> None:
    shown = objects()[index]
    page = shown._repr_html_()
    assert "<i>" not in page
    assert len(page) < 60_000
    assert len(repr(shown)) < 300


def test_the_slides_picture_is_its_thumbnail_and_a_closed_slide_has_none() -> None:
    slide, *_ = objects()
    pixels = picture_of(slide._repr_html_())
    assert pixels.shape == (240, 360, 3)
    assert pixels[:, :170].mean() < 200 < pixels[:, 190:].mean()
    slide.close()
    assert "closed" in repr(slide)
    assert "<img" not in slide._repr_html_()
    assert "closed" in slide._repr_html_()


def test_the_masks_picture_is_dimmed_outside_the_tissue() -> None:
    _, tissue, _ = objects()
    pixels = picture_of(tissue._repr_html_()).astype(int)
    assert pixels.shape == tissue.thumbnail.shape
    assert np.abs(pixels[~tissue.mask] - tissue.thumbnail[~tissue.mask]).mean() > 5
    assert np.abs(pixels[tissue.mask] - tissue.thumbnail[tissue.mask]).mean() < 25


def test_the_tables_picture_is_a_map_of_its_tiles() -> None:
    """Tiles lie at their place, and those with more tissue are darker."""
    *_, tiles = objects()
    shares = np.linspace(0.5, 1, len(tiles))
    some = tiles.with_columns({"tissue_fraction": shares}).select(
        np.arange(0, len(tiles), 2)
    )
    pixels = picture_of(some._repr_html_()).astype(int)
    factor = max(pixels.shape[:2]) / (some.coords_l0 + 64).max()
    covered = np.zeros(pixels.shape[:2], dtype=bool)
    for x, y in (some.coords_l0 * factor).tolist():
        middle_x, middle_y = round(x + 32 * factor), round(y + 32 * factor)
        assert pixels[middle_y, middle_x].max() < 240
        edges = [round(v) for v in (x, y, x + 64 * factor + 2, y + 64 * factor + 2)]
        covered[edges[1] : edges[3], edges[0] : edges[2]] = True
    assert pixels[~covered].min() > 200
    full = some.columns["tissue_fraction"].argmax()
    least = some.columns["tissue_fraction"].argmin()
    shades = [
        pixels[tuple(((some.coords_l0[i, ::-1] + 32) * factor).astype(int))][0]
        for i in (full, least)
    ]
    assert shades[0] < shades[1] - 20


def test_an_empty_table_is_shown_too() -> None:
    *_, tiles = objects()
    empty = tiles.select(np.zeros(len(tiles), dtype=bool))
    assert (
        repr(empty)
        == "TileTable(0 tiles of 64 px at 0.5 µm/px, columns: tissue_fraction)"
    )
    assert "0 tiles" in empty._repr_html_()
