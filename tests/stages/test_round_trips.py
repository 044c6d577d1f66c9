"""What each stage leaves on disk is what it found, to the bit, for whoever reads it back."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image
from tests.stages.make import Opened, attributes_of, later, lay_grid, open_work

from thinsection.errors import InvalidInputError
from thinsection.qc import QcResult, load_pipeline
from thinsection.qc.tissue import TissueConfig, TissueMask
from thinsection.stages.checks import QcStage
from thinsection.stages.features import FeaturesStage, TokensStage
from thinsection.stages.leaves import FormatStage, GraphStage, OverviewStage
from thinsection.stages.masks import CheckedTissue, TissueStage
from thinsection.stages.stage import GridTiles, SlideWork
from thinsection.stages.tiles import TilesStage
from thinsection.store.tiles_h5 import read_tiles
from thinsection.testing.synthetic import write_he_slide
from thinsection.tiles import TileTable
from thinsection.tiles.grid import TilesConfig
from thinsection.tiles.stream import EmbeddedBatch

MASK = TissueStage(config=TissueConfig())
GRID = TilesStage(config=TilesConfig(tile_px=128, overlap=16), mask=MASK)
PADDED = TilesConfig(tile_px=100, overlap=20, edge="pad")
UNI = FeaturesStage(
    tiles=GRID, encoder="uni", identity={"name": "uni", "weights_hash": "ab"}
)


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not square, with mpp_x != mpp_y."""
    path = tmp_path_factory.mktemp("slides") / "a.svs"
    write_he_slide(path, (1700, 1200), seed=3, downsamples=(1, 4))
    return path


@pytest.fixture
def opened(slide: Path, tmp_path: Path) -> Iterator[Opened]:
    made = open_work(slide, tmp_path / "out")
    yield made
    made.slide.close()


@pytest.fixture
def work(opened: Opened) -> SlideWork:
    return opened.work


def embed(
    opened: Opened, stage: FeaturesStage, values: np.ndarray, *, batch: int = 5
) -> None:
    """What the stream does with the tiles of a slide."""
    work = opened.work
    table = work.value(stage.tiles)
    tiles = tiles_of(opened, table, stage.encoder, values.shape[1])
    writer = stage.open(tiles)
    for start in range(0, len(table), batch):
        writer.append(batch_of(tiles, slice(start, start + batch), values))
    work.record(stage, writer.finish())


def tiles_of(opened: Opened, table: TileTable, encoder: str, width: int) -> GridTiles:
    """Tiles of a grid as the stream gets them."""
    return GridTiles(
        slide=opened.slide,
        table=table,
        work=opened.work,
        attributes=attributes_of(opened, GRID),
        dims={encoder: width},
    )


def batch_of(
    tiles: GridTiles, rows: slice, values: np.ndarray
) -> EmbeddedBatch[GridTiles]:
    """The next tiles, with the embeddings or tokens of an encoder."""
    assert tiles.table is not None
    (label,) = tiles.dims
    kind = "tokens" if values.ndim == 3 else "tile_embeddings"
    coords_l0 = tiles.table.coords_l0[rows]
    return EmbeddedBatch(
        source=tiles,
        indices=np.arange(len(tiles.table))[rows],
        coords_l0=coords_l0,
        **{kind: {label: values[rows][: len(coords_l0)]}},
    )


def random_embeddings(work: SlideWork, width: int = 7) -> np.ndarray:
    rng = np.random.default_rng(4)
    return rng.normal(size=(len(work.value(GRID)), width)).astype(np.float32)


def assert_same(one: Any, other: Any) -> None:
    """Arrays to the bit and of one dtype, everything else equal."""
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, Mapping):
        assert list(one) == list(other)
        for name in one:
            assert_same(one[name], other[name])
    else:
        assert one == other


def test_a_tissue_mask_comes_back_to_the_bit(opened: Opened, work: SlideWork) -> None:
    opened.perform(MASK)
    fresh: TissueMask = work.value(MASK)
    assert 0 < fresh.tissue_fraction < 1
    stored = MASK.load(later(work))
    for name in ("mask", "frame", "mask_mpp", "stain", "pen_fraction"):
        assert_same(getattr(fresh, name), getattr(stored, name))
    # made from the stored picture
    assert stored.thumbnail.shape == fresh.thumbnail.shape
    difference = stored.thumbnail.astype(float) - fresh.thumbnail
    assert np.abs(difference).mean() < 12
    record = work.ledger.stages["slides/tissue"]
    assert set(record.files) == {f"slides/a/{n}" for n in FILES_OF_A_MASK}
    assert record.facts["tissue_fraction"] == round(fresh.tissue_fraction, 6)


def test_the_warning_of_a_smear_is_kept_and_one_of_an_older_version_is_none(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(1)
    pixels = rng.normal(242, 1.5, (300, 400, 3))
    for row, column in rng.integers(0, (298, 398), (1500, 2)):
        pixels[row : row + 2, column : column + 2] = (165, 120, 180)
    path = tmp_path / "smear.tif"
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    # 1,250 pixels per cm: 8 µm/px
    image.save(path, resolution_unit=3, x_resolution=1250.0, y_resolution=1250.0)
    opened = open_work(path, tmp_path / "out")
    with opened.slide:
        opened.perform(MASK)
    fresh: TissueMask = opened.work.value(MASK)
    assert "smear" in fresh.warning
    assert MASK.load(later(opened.work)).warning == fresh.warning
    record = opened.work.ledger.stages[MASK.address]
    assert record.facts["warnings"] == fresh.warning
    older = later(opened.work)
    del older.ledger.stages[MASK.address].facts["warnings"]
    assert MASK.load(older).warning == ""


FILES_OF_A_MASK = ("tissue.png", "picture.jpg")


def test_a_mask_without_an_mpp_comes_back_and_other_settings_lie_beside_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "b.png"
    rng = np.random.default_rng(0)
    pixels = np.full((300, 410, 3), 244, np.uint8)
    pixels[50:200, 60:300] = rng.integers(60, 200, (150, 240, 3))
    Image.fromarray(pixels).save(path)
    other = TissueStage(config=TissueConfig(min_speck_um2=1.0, black_level=0))
    opened = open_work(path, tmp_path / "out")
    work = opened.work
    with opened.slide:
        opened.perform(MASK)
        before = (work.out / "slides/b/tissue.png").read_bytes()
        opened.perform(other)
    assert MASK.load(later(work)).mask_mpp is None
    assert (work.out / "slides/b/tissue.png").read_bytes() == before
    names = {p.name for p in (work.out / "slides" / "b").iterdir()}
    assert names == {
        *FILES_OF_A_MASK,
        "tissue_min_speck_um2-1_black_level-0.png",
        "picture_min_speck_um2-1_black_level-0.jpg",
        "slide.json",
    }


def test_quality_control_comes_back_equal_but_for_its_work_image_and_seconds(
    opened: Opened, work: SlideWork
) -> None:
    stage = QcStage(pipeline=load_pipeline("histoqc-light"), source="histoqc-light")
    opened.perform(stage)
    fresh: CheckedTissue = work.value(stage)
    stored: CheckedTissue = stage.load(later(work))
    assert fresh.qc.masks
    assert (fresh.qc.is_stored, stored.qc.is_stored) == (False, True)
    for name in {f.name for f in fields(QcResult)} - {"rgb", "seconds", "is_stored"}:
        assert_same(getattr(fresh.qc, name), getattr(stored.qc, name))
    for name in ("mask", "frame", "mask_mpp", "stain", "pen_fraction"):
        assert_same(getattr(fresh, name), getattr(stored, name))
    # made from the stored picture
    assert stored.qc.rgb.shape == fresh.qc.rgb.shape
    assert np.abs(stored.qc.rgb.astype(float) - fresh.qc.rgb).mean() < 12
    assert stored.qc.row == fresh.qc.row


@pytest.mark.parametrize("quality", [False, True])
def test_a_tile_table_comes_back_equal(
    opened: Opened, work: SlideWork, quality: bool
) -> None:
    mask = (
        QcStage(pipeline=load_pipeline("histoqc-light"), source="histoqc-light")
        if quality
        else MASK
    )
    config = (
        replace(PADDED, tile_filter=()) if quality else PADDED
    )  # the checks take all of it
    stage = TilesStage(config=config, mask=mask)
    opened.perform(mask)
    table = lay_grid(opened, stage)
    stored: TileTable = stage.load(later(work))
    assert len(table) > 10
    assert stored.plan == table.plan
    assert_same(table.coords_l0, stored.coords_l0)
    names = sorted(table.columns)
    assert names == sorted(stored.columns)
    assert any(name.startswith("qc_") for name in names) == quality
    for name in names:
        assert_same(table.columns[name], stored.columns[name])
    assert work.ledger.stages[stage.address].needs == (mask.address,)


def test_a_grid_without_the_tissue_filter_keeps_every_tile_and_knows_its_tissue(
    opened: Opened,
    work: SlideWork,
) -> None:
    opened.perform(MASK)
    stage = TilesStage(config=TilesConfig(tile_px=128, tile_filter=()), mask=MASK)
    table = lay_grid(opened, stage)
    kept = lay_grid(opened, TilesStage(config=TilesConfig(tile_px=128), mask=MASK))
    assert len(table) > len(kept)
    enough = table.columns["tissue_fraction"] >= 0.5
    np.testing.assert_array_equal(table.coords_l0[enough], kept.coords_l0)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_embeddings_come_back_with_the_grid_and_the_names_of_their_encoder(
    opened: Opened, work: SlideWork, dtype: str
) -> None:
    opened.perform(MASK)
    table = lay_grid(opened, GRID)
    values = random_embeddings(work)
    stage = FeaturesStage(tiles=GRID, encoder="uni", identity=UNI.identity, dtype=dtype)
    embed(opened, stage, values)
    stored = stage.load(later(work))
    assert_same(values.astype(dtype), stored.features)
    assert_same(table.coords_l0, stored.coords_l0)
    assert stored.attributes["encoder"] == "uni"
    assert stored.attributes["weights_hash"] == "ab"
    assert stored.attributes["patch_size"] == 128
    assert work.ledger.stages[stage.address].facts["dim"] == 7
    assert later(work).is_done(stage)


def test_a_slide_without_tiles_has_embeddings_of_no_rows(
    opened: Opened, work: SlideWork
) -> None:
    opened.perform(MASK)
    table = GRID.candidates(work, opened.slide).select(np.empty(0, np.int64))
    work.record(GRID, GRID.write(work, table, {}))
    embed(opened, UNI, np.empty((0, 7), np.float32))
    stored = UNI.load(later(work))
    assert stored.features is not None
    assert stored.features.shape == (0, 7)
    assert (
        work.ledger.stages[GRID.address].facts["warnings"]
        == "no tile contains enough tissue"
    )


def test_tokens_come_back_in_float16(opened: Opened, work: SlideWork) -> None:
    opened.perform(MASK)
    table = lay_grid(opened, GRID)
    stage = TokensStage(features=UNI)
    values = np.random.default_rng(1).normal(size=(len(table), 4, 6)).astype(np.float32)
    tiles = tiles_of(opened, table, "uni", 6)
    writer = stage.open(tiles)
    writer.append(batch_of(tiles, slice(0, 3), values))
    writer.append(batch_of(tiles, slice(3, None), values))
    work.record(stage, writer.finish())
    with h5py.File(work.path(stage.file("a"))) as file:
        assert_same(values.astype(np.float16), file["tokens"][...])
        assert_same(table.coords_l0, file["coords"][...])
        assert file["coords"].attrs["encoder"] == "uni"


def test_what_is_abandoned_leaves_nothing_and_a_bad_value_is_refused(
    opened: Opened,
    work: SlideWork,
) -> None:
    opened.perform(MASK)
    table = lay_grid(opened, GRID)
    tiles = tiles_of(opened, table, "uni", 3)
    writer = UNI.open(tiles)
    values = np.zeros((len(table), 3), np.float32)
    values[2] = np.nan
    writer.append(batch_of(tiles, slice(0, 2), values))
    with pytest.raises(InvalidInputError, match="features must be finite"):
        writer.append(batch_of(tiles, slice(2, 3), values))
    writer.abandon()
    assert not [p for p in work.path(UNI.address).rglob("*") if p.is_file()]
    assert UNI.address not in later(work).ledger.stages


def test_a_graph_and_a_picture_are_made_of_what_is_stored(
    opened: Opened, work: SlideWork
) -> None:
    opened.perform(MASK)
    table = lay_grid(opened, GRID)
    graph, picture = GraphStage(tiles=GRID, spec="knn:3"), OverviewStage(tiles=GRID)
    opened.perform(graph)
    opened.perform(picture)
    paths = (work.path(graph.file("a")), work.path(picture.file("a", ".jpg")))
    first = [path.read_bytes() for path in paths]
    with h5py.File(work.path(graph.file("a"))) as file:
        assert file["edge_index"].shape == (2, 3 * len(table))
        assert file["edge_index"].dtype == np.int64
        assert file.attrs["spec"] == "knn:3"
    again = later(work)
    again.perform(graph)
    again.perform(picture)
    assert [path.read_bytes() for path in paths] == first


def test_another_format_holds_the_stored_embeddings_and_who_the_slide_is_of(
    opened: Opened,
    work: SlideWork,
) -> None:
    opened.perform(MASK)
    lay_grid(opened, GRID)
    embed(opened, UNI, random_embeddings(work))
    stage = FormatStage(features=UNI, format="tsv")
    again = later(work)
    again.perform(stage)
    (path,) = work.path(stage.address).iterdir()
    rows = [row.split("\t") for row in path.read_text().splitlines()]
    assert path.name == "a.tsv"
    assert rows[1][-3:-1] == ["p7", "LUAD"]
    values = np.array([row[:-3] for row in rows[1:]], np.float32)
    np.testing.assert_array_equal(values, read_tiles(work.path(UNI.file("a"))).features)


def test_what_the_stream_feeds_does_not_run_and_what_nobody_needs_is_not_read_back(
    opened: Opened,
    work: SlideWork,
) -> None:
    assert UNI.reads == "tiles"
    with pytest.raises(TypeError, match="reads tiles, so `open` makes its writer"):
        UNI.make(work)
    with pytest.raises(TypeError, match="reads no tiles, so `make` makes its result"):
        MASK.open(GridTiles(slide=opened.slide, table=None, work=work))
    with pytest.raises(TypeError, match=r"128px_.*/overviews must define `load`"):
        OverviewStage(tiles=GRID).load(work)
