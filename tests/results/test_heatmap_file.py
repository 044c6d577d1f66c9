"""Values per tile in a file, read back by other programs: places, colours, sizes, measurements."""

import importlib
import json
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import tifffile
from PIL import Image

import thinsection as ts
from thinsection.errors import InvalidInputError, StoreError
from thinsection.report.picture import slide_picture
from thinsection.results.folder import Results
from thinsection.run.run import run
from thinsection.slide import Slide
from thinsection.testing import run_and_measure
from thinsection.testing.synthetic import ArraySlide, write_he_slide
from thinsection.tiles import TileTable
from thinsection.types import MIB, Level, RgbArray

# slides of unequal µm/px along x and y, and sizes that are no multiple of a tile
# our map mixes nine colours of matplotlib's, which differs most near its dark end
COLOR_ATOL = 10
SLIDES = {"a": ((3000, 2200), (0.5, 0.25)), "b c": ((1900, 2700), (0.25, 0.5))}


@pytest.fixture(params=SLIDES)
def slide(request: pytest.FixtureRequest) -> Slide:
    size, mpp = SLIDES[request.param]
    pixels = np.full((size[1], size[0], 3), 255, dtype=np.uint8)
    return ArraySlide([pixels], slide_mpp=mpp)


def tiles_of(slide: Slide) -> TileTable:
    """Tiles over the whole slide but one, square in µm."""
    tiles = ts.tile_grid(slide, tissue=None, tile_px=64, tile_mpp=2.0)
    keep = np.ones(len(tiles), dtype=bool)
    keep[1] = False
    return tiles.select(keep)


def values_of(tiles: TileTable) -> np.ndarray:
    values = np.random.default_rng(len(tiles)).uniform(2, 9, len(tiles))
    values[3] = np.nan
    return values


def expected_rgb(values: np.ndarray, colormap: str, opacity: float) -> np.ndarray:
    """Colours over white by matplotlib's own map."""
    mpl = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    low, high = np.nanmin(values), np.nanmax(values)
    colors = mpl.colormaps[colormap]((values - low) / (high - low))[:, :3] * 255
    rgb = opacity * colors + (1 - opacity) * 255
    rgb[~np.isfinite(values)] = 255
    return rgb


def centres(pixels: np.ndarray, tiles: TileTable, size: tuple[int, int]) -> np.ndarray:
    """Pixels at the centres of the tiles."""
    middle = tiles.coords_l0 + np.array(tiles.size_l0) / 2
    places = (middle * [pixels.shape[1], pixels.shape[0]] / np.array(size)).astype(int)
    return pixels[places[:, 1], places[:, 0]].astype(float)


def test_a_png_has_each_tile_in_its_colour(slide: Slide, tmp_path: Path) -> None:
    tiles = tiles_of(slide)
    values = values_of(tiles)
    path = ts.write_heatmap(tmp_path / "x.png", slide, tiles, values, label="of mine")
    drawn = np.asarray(Image.open(path))
    shown = slide_picture(slide)
    got = centres(drawn[: shown.shape[0]], tiles, slide.size)
    np.testing.assert_allclose(
        got, expected_rgb(values, "cividis", 0.5), atol=COLOR_ATOL
    )
    # the tile that is missing and the one without a value stay white
    assert (got[3] == 255).all()
    corner = np.array(tiles.size_l0) * [1.5, 0.5] * shown.shape[1] / slide.size[0]
    assert (drawn[int(corner[1] * 1), int(corner[0])] == 255).all()


def test_an_ome_tiff_has_places_colours_levels_and_micrometres(
    slide: Slide, tmp_path: Path
) -> None:
    tiles = tiles_of(slide)
    values = values_of(tiles) - 5  # both signs
    path = ts.write_heatmap(
        str(tmp_path / "x.ome.tif"), slide, tiles, values, limits=(-4, 4), mpp=1.0
    )
    with tifffile.TiffFile(path) as file:
        series = file.series[0]
        pixels = [level.asarray() for level in series.levels]
        xml = ElementTree.fromstring(file.ome_metadata or "")
        page = file.pages.first
        assert page.is_tiled and file.is_ome and file.is_bigtiff
    (image,) = xml.iter("{http://www.openmicroscopy.org/Schemas/OME/2016-06}Pixels")
    mpp = [float(image.attrib[f"PhysicalSize{axis}"]) for axis in "XY"]
    assert mpp == pytest.approx([1.0, 1.0], rel=0.02)
    slide_um = np.array(slide.size) * slide.slide_mpp
    assert [pixels[0].shape[1], pixels[0].shape[0]] == pytest.approx(
        slide_um / mpp, abs=1
    )
    mpl = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    share = np.clip((values + 4) / 8, 0, 1)
    alpha = 0.85 * np.abs(2 * share - 1)[:, None]
    wanted = 255 * (1 - alpha) + alpha * 255 * mpl.colormaps["RdBu_r"](share)[:, :3]
    wanted[~np.isfinite(values)] = 255
    for level in pixels:
        got = centres(level, tiles, slide.size)
        np.testing.assert_allclose(got, wanted, atol=6)
    assert len(pixels) == int(max(pixels[0].shape) > 1024) + 1


def test_openslide_opens_the_tiff_with_its_resolution(
    slide: Slide, tmp_path: Path
) -> None:
    openslide = pytest.importorskip("openslide", reason="openslide is not installed")
    tiles = tiles_of(slide)
    path = ts.write_heatmap(tmp_path / "x.ome.tif", slide, tiles, values_of(tiles))
    with openslide.OpenSlide(path) as opened:
        mpp = [float(opened.properties[f"openslide.mpp-{axis}"]) for axis in "xy"]
        size = np.array(opened.dimensions)
        region = np.asarray(opened.read_region((0, 0), 0, opened.dimensions))
    # 64 px of 2 µm/px in 32 pixels
    assert mpp == pytest.approx([4.0, 4.0], rel=1e-3)
    assert size * mpp == pytest.approx(np.array(slide.size) * slide.slide_mpp, abs=4)
    got = centres(region[..., :3], tiles, slide.size)
    wanted = expected_rgb(values_of(tiles), "cividis", 0.5)
    np.testing.assert_allclose(got, wanted, atol=COLOR_ATOL + 2)


def test_our_own_reader_and_the_tissue_below_agree(
    he_slide: Path, tmp_path: Path
) -> None:
    """Where no tile has a value, the picture is the slide at that resolution."""
    with ts.open_slide(he_slide) as slide:
        tiles = ts.tile_grid(
            slide, tissue=None, tile_px=128, tile_mpp=slide.slide_mpp[0]
        )
        nothing = np.full(len(tiles), np.nan)
        nothing[0] = 1.0
        path = ts.write_heatmap(tmp_path / "x.ome.tif", slide, tiles, nothing)
        with ts.open_slide(path) as written:
            factor = 128 // 32
            assert written.slide_mpp == pytest.approx(
                (factor * slide.slide_mpp[0], factor * slide.slide_mpp[1])
            )
            got = written.read_region((0, 0), 0, written.size).astype(float)
        # the file has a level of this resolution
        assert slide.levels[1].downsample == factor
        wanted = slide.read_region((0, 0), 1, slide.levels[1].size).astype(float)
    height, width = wanted.shape[:2]
    difference = np.abs(got[:height, :width] - wanted)
    assert difference[40:].mean() < 1.5


def test_an_svg_has_a_rectangle_per_tile_in_level_0_and_a_size_in_mm(
    slide: Slide, tmp_path: Path
) -> None:
    tiles = tiles_of(slide)
    values = values_of(tiles)
    path = ts.write_heatmap(
        tmp_path / "x.svg", slide, tiles, values, label="my <score>"
    )
    root = ElementTree.parse(path).getroot()
    space = "{http://www.w3.org/2000/svg}"
    width_mm = slide.size[0] * slide.slide_mpp[0] / 1000
    assert root.attrib["width"] == f"{width_mm:.6g}mm"
    group = root.find(f"{space}g[@id='tiles']")
    assert group is not None
    scale = [float(x) for x in re.findall(r"\d[\d.e-]*", group.attrib["transform"])]
    assert scale == pytest.approx([mpp / 1000 for mpp in slide.slide_mpp])
    rects = group.findall(f"{space}rect")
    known = np.isfinite(values)
    assert len(rects) == known.sum()
    places = [
        [int(rect.attrib[name]) for name in ("x", "y", "width", "height")]
        for rect in rects
    ]
    wanted = np.hstack(
        [tiles.coords_l0, np.broadcast_to(tiles.size_l0, (len(tiles), 2))]
    )
    np.testing.assert_array_equal(places, wanted[known])
    titles = [float(rect[0].text.removeprefix("my <score> ")) for rect in rects]
    np.testing.assert_allclose(titles, values[known], rtol=1e-5)
    rgb = np.array([list(bytes.fromhex(rect.attrib["fill"][1:])) for rect in rects])
    over_white = 0.5 * rgb + 0.5 * 255
    np.testing.assert_allclose(
        over_white, expected_rgb(values, "cividis", 0.5)[known], atol=COLOR_ATOL
    )
    assert "my <score>" in "".join(root.itertext())


def test_a_geojson_has_polygons_in_level_0_with_measurements(
    slide: Slide, tmp_path: Path
) -> None:
    shapely = pytest.importorskip("shapely", reason="shapely is not installed")
    tiles = tiles_of(slide)
    values = values_of(tiles)
    path = ts.write_heatmap(
        tmp_path / "x.geojson", slide, tiles, values, label="score: a"
    )
    features = json.loads(path.read_text())["features"]
    assert len(features) == len(tiles)
    for feature, corner, value in zip(features, tiles.coords_l0, values, strict=True):
        box = shapely.geometry.shape(feature["geometry"]).bounds
        assert box == (*corner, *(corner + tiles.size_l0))
        measured = feature["properties"]["measurements"]
        assert measured == (
            {} if np.isnan(value) else {"score: a": pytest.approx(value, rel=1e-5)}
        )
        assert ("color" in feature["properties"]) == (not np.isnan(value))


@pytest.mark.parametrize("form", ["grad", "bfloat16", "float16", "bool"])
def test_tensors_are_numbers(form: str, slide: Slide, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tiles = tiles_of(slide)
    # numbers that every type has
    plain = np.arange(len(tiles)) % 5 / 4
    values = torch.from_numpy(plain)
    if form == "grad":
        values.requires_grad_()
    elif form == "bool":
        plain = plain > 0.5
        values = torch.from_numpy(plain)
    else:
        values = values.to(getattr(torch, form))
    for ending in ("png", "geojson"):
        wanted = ts.write_heatmap(tmp_path / f"n.{ending}", slide, tiles, plain)
        got = ts.write_heatmap(tmp_path / f"t.{ending}", slide, tiles, values)
        assert got.read_bytes() == wanted.read_bytes()


@pytest.mark.parametrize("form", ["words", "categorical", "series"])
def test_categories_have_their_colours_in_every_format(
    form: str, slide: Slide, tmp_path: Path
) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    tiles = tiles_of(slide)
    names = np.array(["stroma 2", "tumour: a", "fat 10"], dtype=object)
    words = names[np.arange(len(tiles)) % 3]
    words[4] = None
    values: Any = words.tolist()
    if form != "words":
        values = pandas.Categorical(
            words, categories=["tumour: a", "fat 10", "stroma 2", "none"]
        )
    if form == "series":
        values = pandas.Series(values, index=np.arange(len(tiles))[::-1])
    colors: Any = {"tumour: a": "red", "stroma 2": (0, 0, 255)}
    if form != "words":
        colors["none"] = "#123456"  # a class that no tile has
    path = ts.write_heatmap(tmp_path / "x.geojson", slide, tiles, values, colors=colors)
    features = json.loads(path.read_text())["features"]
    classes = [f["properties"].get("classification") for f in features]
    assert classes[4] is None and classes[1] == {
        "name": "tumour: a",
        "color": [255, 0, 0],
    }
    fat = tuple(classes[2]["color"])
    assert fat == (0, 114, 178)  # Okabe and Ito's blue, the first colour that is free
    rgb = {"tumour: a": (255, 0, 0), "stroma 2": (0, 0, 255), "fat 10": fat}
    wanted = np.array([[255.0] * 3 if w is None else rgb[w] for w in words])
    wanted = np.where([[w is None] for w in words], 255, 0.5 * wanted + 0.5 * 255)
    png = ts.write_heatmap(tmp_path / "x.png", slide, tiles, values, colors=colors)
    shown = slide_picture(slide)
    drawn = np.asarray(Image.open(png))[: shown.shape[0]]
    np.testing.assert_allclose(centres(drawn, tiles, slide.size), wanted, atol=2)
    tiff = ts.write_heatmap(tmp_path / "x.ome.tif", slide, tiles, values, colors=colors)
    got = centres(tifffile.imread(tiff), tiles, slide.size)
    np.testing.assert_allclose(got, wanted, atol=6)
    svg = ts.write_heatmap(tmp_path / "x.svg", slide, tiles, values, colors=colors)
    assert svg.read_text().count('fill="#ff0000"') == 1 + sum(
        w == "tumour: a" for w in words
    )


def test_overlapping_tiles_are_averaged_and_the_class_of_most_is_taken(
    tmp_path: Path,
) -> None:
    slide = ArraySlide([np.full((400, 600, 3), 255, np.uint8)], slide_mpp=(1.0, 1.0))
    plan = ts.tile_grid(slide, tissue=None, tile_px=200, tile_mpp=1.0).plan
    coords = np.array([[0, 0], [100, 0], [100, 0]], dtype=np.int64)
    tiles = TileTable(coords_l0=coords, plan=plan)
    values = np.array([0.0, 3.0, 6.0])
    path = ts.write_heatmap(tmp_path / "x.svg", slide, tiles, values, kind="measure")
    rects = re.findall(
        r'<rect x="(\d+)" y="0" width="100" height="200" fill="(#\w+)"',
        path.read_text(),
    )
    by_x = {int(x): list(bytes.fromhex(color[1:])) for x, color in rects}
    mpl = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    for x, value in {0: 0.0, 100: 3.0, 200: 4.5}.items():
        wanted = np.array(mpl.colormaps["cividis"](value / 6)[:3]) * 255
        np.testing.assert_allclose(by_x[x], wanted, atol=2 * COLOR_ATOL)
    png = ts.write_heatmap(
        tmp_path / "x.png",
        slide,
        tiles,
        ["p", "q", "q"],
        colors={"p": "#f00", "q": "#00f"},
    )
    drawn = np.asarray(Image.open(png))
    assert drawn[50, 50].tolist() == [255, 127, 127]
    assert drawn[50, 150].tolist() == drawn[50, 250].tolist() == [127, 127, 255]
    tie = ts.write_heatmap(
        tmp_path / "y.png",
        slide,
        tiles.select(np.array([0, 1])),
        ["q", "p"],
        colors={"p": "#f00", "q": "#00f"},
    )
    assert np.asarray(Image.open(tie))[50, 150].tolist() == [255, 127, 127]


def test_the_command_for_models_names_the_function_for_values(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"got ndarray; ts.write_heatmap draws"):
        ts.heatmap(np.ones(3), tmp_path)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Two slides with two grids."""
    folder = tmp_path_factory.mktemp("heatmaps")
    for name, seed in (("a", 3), ("b c", 5)):
        write_he_slide(folder / f"{name}.svs", (1500, 1200), seed=seed)
    for tile_px in (128, 256):
        run([folder], out=folder / "out", until="tiles", tile_px=tile_px)
    return ts.open_results(folder / "out")


def test_a_folder_gives_slides_grids_and_columns_by_name(
    results: Results, tmp_path: Path
) -> None:
    assert len(results.grids) == 2
    for slide_id in results.slides:
        for grid in results.grids:
            tiles = results.tiles(slide_id, grid)
            for ending in ("png", "svg", "ome.tif", "geojson"):
                path = tmp_path / f"{slide_id} {grid}.{ending}"
                ts.write_heatmap(path, results, slide_id, "tissue_fraction", grid)
                assert path.stat().st_size > 500
            features = json.loads(
                (tmp_path / f"{slide_id} {grid}.geojson").read_text()
            )["features"]
            stored = [
                f["properties"]["measurements"]["tissue_fraction"] for f in features
            ]
            np.testing.assert_allclose(
                stored, tiles.columns["tissue_fraction"], rtol=1e-5
            )


def test_the_path_of_a_folder_opens_it(results: Results, tmp_path: Path) -> None:
    for slide_id in results.slides:
        for grid in results.grids:
            args = (slide_id, "tissue_fraction", grid)
            wanted = ts.write_heatmap(tmp_path / "n.png", results, *args)
            for source in (results.folder, str(results.folder)):
                got = ts.write_heatmap(tmp_path / "t.png", source, *args)
                assert got.read_bytes() == wanted.read_bytes()
    with pytest.raises(StoreError, match="results must be a folder of"):
        ts.write_heatmap(tmp_path / "x.png", tmp_path, "a", "tissue_fraction")
    with pytest.raises(InvalidInputError, match=r"source must be .*open_slide\(path"):
        ts.write_heatmap(tmp_path / "x.png", None, "a", "tissue_fraction")  # type: ignore[arg-type]


def test_a_notebook_draws_the_same_colours_as_the_file(
    results: Results, tmp_path: Path
) -> None:
    mpl = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib import pyplot

    mpl.use("Agg")
    grid = results.grids[0]
    count = len(results.tiles("a", grid).coords_l0)
    words = ["tumour" if i % 2 else "stroma" for i in range(count)]
    ax = ts.plot.heatmap(results, "a", words, grid, colors={"tumour": "#D55E00"})
    (image,) = ax.get_images()
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels[:2] == [
        f"stroma: {(count + 1) // 2} tiles",
        f"tumour: {count // 2} tiles",
    ]
    pyplot.close("all")
    path = ts.write_heatmap(
        tmp_path / "x.png", results, "a", words, grid, colors={"tumour": "#D55E00"}
    )
    shown = np.asarray(image.get_array())
    written = np.asarray(Image.open(path))[: shown.shape[0]]
    # the notebook's picture has the outline of the tissue too
    same = (shown == written).all(axis=-1)
    assert same.mean() > 0.9


def test_what_does_not_fit_is_refused(slide: Slide, tmp_path: Path) -> None:
    tiles = tiles_of(slide)
    values = values_of(tiles)
    for wrong in ("x.tif", "x.jpg", "x", ".png"):
        with pytest.raises(
            InvalidInputError, match=r"path must end in .png, .svg, .ome.tif"
        ):
            ts.write_heatmap(tmp_path / wrong, slide, tiles, values)
    with pytest.raises(
        InvalidInputError, match=r"values must be of shape \(\d+,\), got"
    ):
        ts.write_heatmap(tmp_path / "x.png", slide, tiles, values[1:])
    with pytest.raises(InvalidInputError, match="colors must be left out for numbers"):
        ts.write_heatmap(tmp_path / "x.png", slide, tiles, values, colors={"a": "red"})
    with pytest.raises(
        InvalidInputError, match="kind and limits must be left out for categories"
    ):
        ts.write_heatmap(
            tmp_path / "x.png", slide, tiles, ["a"] * len(tiles), limits=(0, 1)
        )
    with pytest.raises(
        InvalidInputError, match="a colour must be a name, '#rrggbb', or three"
    ):
        ts.write_heatmap(
            tmp_path / "x.png", slide, tiles, ["a"] * len(tiles), colors={"a": "rde"}
        )
    with pytest.raises(
        InvalidInputError, match="limits must be two numbers, the lower first"
    ):
        ts.write_heatmap(tmp_path / "x.png", slide, tiles, values, limits=(2, 1))
    with pytest.raises(
        InvalidInputError, match="kind must be one of signed, amount, measure"
    ):
        ts.write_heatmap(tmp_path / "x.png", slide, tiles, values, kind="sign")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="mpp must be >= that of the slide"):
        ts.write_heatmap(tmp_path / "x.ome.tif", slide, tiles, values, mpp=0.01)
    with pytest.raises(
        InvalidInputError, match=r"mpp must be left out but for .ome.tif"
    ):
        ts.write_heatmap(tmp_path / "x.png", slide, tiles, values, mpp=2)
    # one palette of several slides: this one has no 'c'
    words = ["a", "b"] * (len(tiles) // 2) + ["b"] * (len(tiles) % 2)
    palette = {"b": "blue", "c": "red"}
    ts.write_heatmap(tmp_path / "x.png", slide, tiles, words, colors=palette)
    (tmp_path / "x.png").unlink()
    for infinite in (np.inf, -np.inf):
        values[5] = infinite
        with pytest.raises(
            InvalidInputError,
            match=f"values must be finite, or NaN .* got {infinite} for tile 5",
        ):
            ts.write_heatmap(tmp_path / "x.png", slide, tiles, values)
    with pytest.raises(
        InvalidInputError,
        match=r"tiles of the slide, got ndarray; pass .* not only its coords_l0$",
    ):
        ts.write_heatmap(tmp_path / "x.png", slide, tiles.coords_l0, values)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="column must be one of"):
        ts.write_heatmap(tmp_path / "x.png", slide, tiles, "tisue_fraction")
    assert [*tmp_path.iterdir()] == []


class PlainSlide(Slide):
    """A slide of any size, of one level, that has no pixels in memory."""

    reader = "plain"

    def __init__(self, edge: int) -> None:
        level = Level(index=0, size=(edge, edge), downsample=1.0)
        super().__init__("plain.svs", [level], slide_mpp=(0.5, 0.5))

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        out[:] = 200


def plain_slide(edge: int) -> PlainSlide:
    """A slide, for a process on one CPU; the libraries that draw it have been imported and used.

    On several, how many threads hold a band at the same moment is up to the machine's load.
    """
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    # a slide as small as the first one is resampled without it
    importlib.import_module("torch")
    write_values(PlainSlide(2048), edge=2048)
    return PlainSlide(edge)


def write_values(slide: PlainSlide, *, edge: int) -> list[int]:
    """Writes an OME-TIFF with a value for each tile; its size in pixels."""
    tiles = ts.tile_grid(slide, tile_px=256)
    values = np.arange(len(tiles)) % 7 / 7
    with TemporaryDirectory() as folder:
        path = Path(folder) / "x.ome.tif"
        ts.write_heatmap(path, slide, tiles, values, mpp=0.5)
        with tifffile.TiffFile(path) as file:
            return [*file.series[0].shape[:2]]


@pytest.mark.check
def test_an_ome_tiff_of_201_mb_needs_60_mib_and_no_picture_of_the_slide() -> None:
    """30 MiB for the CPU and 30 for the rest, as documented; memory that is freed late on top."""
    measured = run_and_measure(
        "tests.results.test_heatmap_file",
        "write_values",
        setup="plain_slide",
        edge=8192,
    )
    assert measured.result == [8192, 8192]
    assert measured.growth_bytes < 100 * MIB
