"""Tissue that somebody brings covers tiles as other people's code says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely
from PIL import Image

import thinsection as ts
from thinsection.errors import ConfigError, InvalidInputError, MissingMppError
from thinsection.qc import run_qc
from thinsection.qc.own_tissue import as_tissue
from thinsection.slide import Slide
from thinsection.testing.synthetic import ArraySlide, write_he_slide
from thinsection.tiles import TileTable
from thinsection.types import MaskFrame

SIZE = (700, 500)
STAR = shapely.Polygon(
    [(90, 60), (330, 200), (620, 50), (480, 300), (560, 470), (300, 330), (70, 440)],
    [[(300, 220), (360, 220), (330, 270)]],
)


@pytest.fixture
def slide() -> Slide:
    pixels = np.full((SIZE[1], SIZE[0], 3), 240, np.uint8)
    return ArraySlide([pixels], slide_mpp=(0.5, 0.4))


def grid(slide: Slide, tissue: Any, least: float = 0.0) -> TileTable:
    return ts.tile_grid(
        slide,
        tissue=tissue,
        tile_px=40,
        tile_mpp="native",
        min_tissue_fraction=least,
    )


def shares_of(table: Any) -> dict[tuple[int, int], float]:
    shares = table.columns["tissue_fraction"].tolist()
    return dict(zip(map(tuple, table.coords_l0.tolist()), shares, strict=True))


def boxes() -> list[tuple[int, int]]:
    return [(x, y) for x in range(0, 661, 40) for y in range(0, 461, 40)]


def shares_by_shapely(area: shapely.Geometry) -> dict[tuple[int, int], float]:
    shares = {
        (x, y): area.intersection(shapely.box(x, y, x + 40, y + 40)).area / 1600
        for x, y in boxes()
    }
    return {corner: share for corner, share in shares.items() if share > 0}


def assert_same_shares(
    found: dict[tuple[int, int], float], expected: dict[tuple[int, int], float]
) -> None:
    assert found.keys() == expected.keys() and len(found) > 50
    for corner, share in found.items():
        assert share == pytest.approx(expected[corner], abs=2e-6)


@pytest.mark.parametrize("form", ["shapely", "dict", "collection", "file"])
def test_outlines_cover_what_shapely_says(
    slide: Slide, form: str, tmp_path: Path
) -> None:
    document = json.loads(shapely.to_geojson(STAR))
    feature = {"type": "Feature", "geometry": document, "properties": {}}
    path = tmp_path / "outline.geojson"
    path.write_text(json.dumps(feature))
    brought = {
        "shapely": STAR,
        "dict": document,
        "collection": {"type": "FeatureCollection", "features": [feature]},
        "file": path,
    }
    table = grid(slide, brought[form])
    assert_same_shares(shares_of(table), shares_by_shapely(STAR))


@pytest.mark.parametrize("mask_mpp", [(3.5, 2.0), (3.65, 2.1)])
def test_a_mask_covers_the_area_of_its_pixels(
    slide: Slide, mask_mpp: tuple[float, float]
) -> None:
    """Each mask pixel is a box of shapely, at its place by µm/px, not stretched to the slide."""
    down_x, down_y = mask_mpp[0] / 0.5, mask_mpp[1] / 0.4
    shape = (round(500 / down_y), round(700 / down_x))
    mask = np.random.default_rng(1).random(shape) > 0.6
    rows, columns = np.nonzero(mask)
    left, top = columns * down_x, rows * down_y
    area = shapely.union_all(shapely.box(left, top, left + down_x, top + down_y))
    assert_same_shares(
        shares_of(grid(slide, (mask, mask_mpp))), shares_by_shapely(area)
    )


def test_the_least_share_counts_and_all_tissue_is_the_grid(slide: Slide) -> None:
    expected = {c for c, share in shares_by_shapely(STAR).items() if share >= 0.7}
    assert shares_of(grid(slide, STAR, least=0.7)).keys() == expected
    full = np.ones((250, 350), dtype=bool)
    assert (
        len(grid(slide, (full, (1.0, 0.8)))) == len(grid(slide, None)) == len(boxes())
    )


@pytest.mark.parametrize("form", ["list", "image", "tensor"])
def test_a_mask_may_be_anything_that_numpy_reads(slide: Slide, form: str) -> None:
    mask = np.random.default_rng(2).random((50, 70)) > 0.6
    brought: Any = mask.tolist()
    if form == "image":
        brought = Image.fromarray(mask)
    if form == "tensor":
        torch = pytest.importorskip("torch", reason="torch is not installed")
        brought = torch.from_numpy(mask)
    expected = shares_of(grid(slide, (mask, (5.0, 4.0))))
    assert len(expected) > 50
    assert shares_of(grid(slide, (brought, (5.0, 4.0)))) == expected


@pytest.mark.parametrize(
    "mask_mpp",
    [
        np.array([5.0, 4.0]),
        [np.float32(5), np.int64(4)],
        (5, np.array(4)),
    ],
)
def test_micrometres_may_be_numbers_of_numpy(slide: Slide, mask_mpp: Any) -> None:
    mask = np.random.default_rng(2).random((50, 70)) > 0.6
    expected = shares_of(grid(slide, (mask, (5.0, 4.0))))
    assert shares_of(grid(slide, (mask, mask_mpp))) == expected
    square = ArraySlide([np.full((500, 700, 3), 240, np.uint8)], slide_mpp=(0.5, 0.5))
    assert shares_of(grid(square, (mask, np.float32(5)))) == shares_of(
        grid(square, (mask, 5.0))
    )


@pytest.mark.parametrize("pipeline", ["auto", "histoqc-light"])
def test_a_result_of_quality_control_is_its_tissue(
    tmp_path: Path, pipeline: str
) -> None:
    for name in ("a", "b"):
        write_he_slide(tmp_path / f"{name}.svs", (1500, 1200), seed=len(name) + 2)
    for name in ("a", "b"):
        with ts.open_slide(tmp_path / f"{name}.svs") as opened:
            result = run_qc(opened, pipeline)
            # where the guard overruled a check, both masks differ
            smaller = result.mask_use.copy()
            smaller[: len(smaller) // 2] = False
            kept = replace(result, mask_use=smaller, mask_kept=result.tissue.mask)
            expected = grid(opened, result.tissue)
            assert len(expected) > 5
            for brought in (result, kept):
                assert shares_of(grid(opened, brought)) == shares_of(expected)
            fewer = grid(opened, (kept.mask_use, kept.frame))
            assert len(fewer) < len(expected)
    other = ArraySlide([np.full((90, 80, 3), 240, np.uint8)], slide_mpp=None)
    with pytest.raises(
        InvalidInputError, match=r"belong to the slide of \(80, 90\) px"
    ):
        grid(other, result)


def test_the_mask_for_pictures_is_the_same_tissue(slide: Slide) -> None:
    """The mask at the detector's resolution is Pillow's reduction of what was brought."""
    mask = np.zeros((500, 700), dtype=bool)
    mask[100:400, 200:600] = True
    brought = as_tissue(slide, (mask, (0.5, 0.4)))
    assert not isinstance(brought, tuple)
    size = brought.mask.shape[::-1]
    reduced = np.array(Image.fromarray(mask).resize(size, Image.Resampling.NEAREST))
    assert np.mean(brought.mask != reduced) < 0.03
    assert brought.tissue_fraction == pytest.approx(mask.mean(), abs=0.05)
    assert "<img" in brought._repr_html_()


@pytest.mark.parametrize(
    ("tissue", "message"),
    [
        (np.ones((5, 7), bool), r"must say its µm/px, got an array alone"),
        (
            (np.ones((5, 7), np.uint8), 8.0),
            r"bool of shape \(H, W\), got uint8 \(5, 7\)",
        ),
        ((np.ones((50, 70), bool), 8.0), r"cover the slide .* cover 1120 x 1000"),
        ((np.ones((5, 7), bool), -8.0), "one or two numbers > 0, got -8.0"),
        ((np.ones((5, 7), bool), "8"), "one or two numbers > 0, got '8'"),
        (shapely.box(900, 900, 950, 950), "lie on the slide of 700 x 500 px"),
        (shapely.Point(3, 4), "lie on the slide of 700 x 500 px, got no area"),
        (
            shapely.Polygon([(0, 0), (9, 9), (9, 0), (0, 9)]),
            "not cross itself, .*make_valid",
        ),
        ({"type": "Nothing"}, "tissue must be GeoJSON"),
        (7, r"TissueMask, \(mask, µm/px\), a shapely geometry .* got int"),
        (
            [STAR, shapely.box(1, 1, 9, 9)],
            r"one geometry, got 2 in a list; pass shapely.union_all\(",
        ),
        (
            (STAR, shapely.box(1, 1, 9, 9)),
            r"one geometry, got 2 in a tuple; pass shapely.union_all\(",
        ),
        (STAR.wkt, r"got WKT; pass shapely.from_wkt\(text\)"),
        (shapely.to_geojson(STAR), r"got GeoJSON; pass json.loads\(text\)"),
        (
            (Image.new("RGB", (70, 50)), 5.0),
            r"got an image of mode RGB; pass np.asarray\(image.convert\('L'\)\) > 0",
        ),
        (Image.new("L", (70, 50)), r"must say its µm/px, got an array alone"),
        ((np.ones((1, 5, 7), bool), 8.0), r"got bool \(1, 5, 7\); pass one plane"),
        (("mask.png", 8.0), r"bool of shape \(H, W\), got str; pass an array of bool"),
        ((np.ones((5, 7), bool), np.float32("inf")), "one or two numbers > 0, got"),
        ((np.ones((5, 7), bool), np.ones(3)), "one or two numbers > 0, got"),
        ("none.geojson", "existing file, got 'none.geojson'"),
    ],
)
def test_what_is_no_tissue_of_the_slide_is_refused(
    slide: Slide, tissue: Any, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        grid(slide, tissue)


def test_tissue_of_another_slide_and_a_slide_without_resolution(slide: Slide) -> None:
    other = ArraySlide([np.full((90, 80, 3), 240, np.uint8)], slide_mpp=None)
    mask = np.ones((5, 7), dtype=bool)
    with pytest.raises(
        InvalidInputError, match=r"belong to the slide of \(80, 90\) px"
    ):
        grid(other, as_tissue(slide, STAR))
    with pytest.raises(MissingMppError, match="slide_mpp is missing"):
        grid(other, (mask, 8.0))
    frame = MaskFrame(size_th=(7, 5), size_l0=(80, 90))
    assert len(grid(other, (mask, frame))) == 4


def test_a_run_takes_files_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"a folder or a column .* got Polygon; write"
    ):
        ts.run([tmp_path], out=tmp_path / "out", tissue=STAR)
    write_he_slide(tmp_path / "a.svs", (700, 500), seed=1, downsamples=(1,))
    (tmp_path / "a.geojson").write_text(shapely.to_geojson(STAR))
    settings: dict[str, Any] = {"tile_px": 40, "tile_mpp": "native", "until": "tiles"}
    ts.run(
        tmp_path / "a.svs",
        out=tmp_path / "out",
        tissue=tmp_path / "a.geojson",
        **settings,
    )
    stored = ts.open_results(tmp_path / "out").tiles("a")
    expected = {c for c, share in shares_by_shapely(STAR).items() if share >= 0.5}
    assert set(map(tuple, stored.coords_l0.tolist())) == expected


def test_settings_by_name_are_those_of_the_configuration(slide: Slide) -> None:
    with pytest.raises(ConfigError, match=r"tile_pix'; did you mean 'tiles.tile_px'"):
        ts.tile_grid(slide, tile_pix=4)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"tiles.tile_px must be int, got 'big'"):
        ts.tile_grid(slide, tile_px="big")
    with pytest.raises(ConfigError, match="config must be a TilesConfig, got 256"):
        ts.tile_grid(slide, 256)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"opened slide, got 'a.svs'; pass"):
        ts.tile_grid("a.svs")  # type: ignore[arg-type]
