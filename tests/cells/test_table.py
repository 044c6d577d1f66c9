"""The table of cells: what is written is read back, block by block, in any window."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import shapely
from tests.support.cells import SLIDE, random_rings

from thinsection.cells.batch import CellBatch
from thinsection.cells.outlines import Outlines, decode_wkb
from thinsection.cells.place import (
    CellSlide,
    Placement,
    PlacementCheck,
    placement_of,
)
from thinsection.cells.table import CellTable, class_codes, numbers_of
from thinsection.cells.writing import CellOrigin, write_cells
from thinsection.errors import InvalidInputError, StoreError
from thinsection.types import Floats

ORIGIN = CellOrigin(path="a.geojson", digest="00", format="geojson")


def batch_of(rings: list[Floats], first: int = 0) -> CellBatch:
    points = np.concatenate(rings)
    return CellBatch(
        ids=[f"id-{first + number}" for number in range(len(rings))],
        outlines=Outlines.of_counts(points, [len(ring) for ring in rings]),
        classes=["ab"[number % 2] for number in range(len(rings))],
        measurements={"brown": np.arange(len(rings), dtype=np.float64)},
    )


def written(
    folder: Path, batches: list[CellBatch], slide: CellSlide = SLIDE
) -> CellTable:
    return write_cells(
        folder / "cells" / "own" / "a.parquet",
        batches,
        name="own",
        slide=slide,
        origin=ORIGIN,
        placement=Placement(),
        fit=PlacementCheck(slide, Placement(), None),
    )


@pytest.fixture(scope="module")
def rings() -> list[Floats]:
    return random_rings(20_000)


@pytest.fixture(scope="module")
def table(rings: list[Floats], tmp_path_factory: pytest.TempPathFactory) -> CellTable:
    batches = [
        batch_of(rings[first : first + 3000], first)
        for first in range(0, len(rings), 3000)
    ]
    return written(tmp_path_factory.mktemp("table"), batches)


def test_every_cell_comes_back_with_its_outline_and_class(
    table: CellTable, rings: list[Floats]
) -> None:
    rows = table.to_table()
    assert table.num_cells == len(rows) == len(rings)
    assert table.classes == ("a", "b")
    assert (table.slide_id, table.name, table.slide_mpp) == ("a", "own", (0.25, 0.3))
    numbers = [int(text[3:]) for text in rows["id"].to_pylist()]
    assert sorted(numbers) == list(range(len(rings)))
    outlines = shapely.from_wkb(rows["geometry"].to_numpy())
    classes = rows["class"].to_pylist()
    brown = rows["source:brown"].to_numpy()
    for row in range(0, len(rows), 97):
        number = numbers[row]
        assert outlines[row].equals_exact(shapely.Polygon(rings[number]), 0)
        assert classes[row] == "ab"[number % 3000 % 2]
        assert brown[row] == number % 3000


def test_measures_are_those_of_shapely_on_20000_cells(
    table: CellTable, rings: list[Floats]
) -> None:
    rows = table.to_table().to_pandas()
    outlines = shapely.from_wkb(rows["geometry"].to_numpy())
    in_um = shapely.transform(outlines, lambda xy: xy * SLIDE.slide_mpp)
    area = shapely.area(in_um)
    length = shapely.length(in_um)
    centers = shapely.get_coordinates(shapely.centroid(outlines))
    np.testing.assert_allclose(rows[["x_l0", "y_l0"]].to_numpy(), centers, atol=1e-6)
    np.testing.assert_allclose(rows["area_um2"], area, rtol=1e-6)
    np.testing.assert_allclose(rows["perimeter_um"], length, rtol=1e-6)
    np.testing.assert_allclose(
        rows["circularity"], 4 * np.pi * area / length**2, rtol=1e-5
    )
    bounds = shapely.bounds(outlines)
    boxes = np.array([list(box.values()) for box in rows["bbox"]])
    np.testing.assert_array_equal(boxes, bounds)


def test_axes_are_those_of_the_ellipse_that_was_drawn(tmp_path: Path) -> None:
    """The moments of a fine ellipse are its own: 4 sqrt(variance) along an axis is its length."""
    slide = CellSlide(slide_id="a", size_l0=(9000, 8000), slide_mpp=(0.5, 0.5))
    angles = np.linspace(0, 2 * np.pi, 2001)[:-1]
    rings = []
    turns = [0.0, 30.0, 90.0, 150.0]
    for turn in np.radians(turns):
        points = np.stack([40 * np.cos(angles), 16 * np.sin(angles)], axis=1)
        turned = np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])
        rings.append(points @ turned + 5000)
    rows = written(tmp_path, [batch_of(rings)], slide).to_table()
    np.testing.assert_allclose(rows["major_axis_um"], 40, rtol=1e-4)
    np.testing.assert_allclose(rows["minor_axis_um"], 16, rtol=1e-4)
    np.testing.assert_allclose(rows["orientation_deg"], turns, atol=1e-2)


def test_axes_are_those_of_scikit_image_on_a_drawn_mask(tmp_path: Path) -> None:
    from skimage.draw import polygon2mask
    from skimage.measure import regionprops

    slide = CellSlide(slide_id="a", size_l0=(5000, 7000), slide_mpp=(1.0, 1.0))
    rng = np.random.default_rng(3)
    angles = np.linspace(0, 2 * np.pi, 25)[:-1]
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    for _ in range(5):
        lengths = rng.uniform(80, 200, 2)
        skew = np.array([[1, rng.uniform(-1, 1)], [0, 1]])
        ring = 500 + (circle * lengths) @ skew
        row = written(tmp_path, [batch_of([ring])], slide).to_table().to_pylist()[0]
        mask = polygon2mask((1200, 1200), ring[:, ::-1]).astype(np.uint8)
        (region,) = regionprops(mask)
        assert row["major_axis_um"] == pytest.approx(region.axis_major_length, rel=5e-3)
        assert row["minor_axis_um"] == pytest.approx(region.axis_minor_length, rel=5e-3)


def test_a_window_gives_the_cells_whose_centres_lie_in_it_and_reads_few_groups(
    table: CellTable,
) -> None:
    whole = table.to_table(["x_l0", "y_l0"])
    x = whole["x_l0"].to_numpy()
    y = whole["y_l0"].to_numpy()
    window = (1000.0, 17_000.0, 9000.0, 18_500.0)
    inside = (x >= window[0]) & (x < window[2]) & (y >= window[1]) & (y < window[3])
    rows = table.to_table(["id", "x_l0"], window)
    assert rows.column_names == ["id", "x_l0"]
    assert len(rows) == np.count_nonzero(inside) > 100
    # a cell exactly on the border belongs to the window that begins there
    left = float(x[inside].min())
    first = table.to_table(["x_l0"], (left, *window[1:]))
    assert len(first) == len(rows)
    assert len(table.to_table(["x_l0"], (window[0], window[1], left, window[3]))) == 0
    assert len(table._groups(window)) < pq.read_metadata(table.path).num_row_groups


def test_rows_lie_in_blocks_whatever_the_order_of_the_source(
    table: CellTable,
) -> None:
    for batch in table.batches(["x_l0", "y_l0"]):
        rows = np.unique(np.floor(batch["y_l0"].to_numpy() / 8192))
        assert len(rows) == 1


def test_many_rows_are_sorted_over_a_file_and_none_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rings: list[Floats]
) -> None:
    """The temporary file holds several sorted runs, and batches have different columns."""
    monkeypatch.setattr("thinsection.cells.spill._HELD_BYTES", 100_000)
    batches = []
    for first in range(0, 6000, 500):
        batch = batch_of(rings[first : first + 500], first)
        if first % 1000:
            object.__setattr__(batch, "measurements", {})
        batches.append(batch)
    rows = written(tmp_path, batches).to_table().to_pandas()
    assert sorted(rows["id"]) == sorted(f"id-{number}" for number in range(6000))
    assert rows["source:brown"].isna().sum() == 3000
    for row in range(0, 6000, 61):
        number = int(rows["id"][row][3:])
        center = shapely.centroid(shapely.Polygon(rings[number]))
        assert rows["x_l0"][row] == pytest.approx(center.x)


def test_cells_that_cannot_be_used_are_counted_by_reason(tmp_path: Path) -> None:
    good = random_rings(400)
    nan_ring = good[0].copy()
    nan_ring[1, 0] = np.nan
    line = np.array([[100.0, 100], [200, 200], [300, 300]])
    rings = [*good, nan_ring, line, line[:2], good[1] + 20_000]
    table = written(tmp_path, [batch_of(rings), batch_of(good[:2])])
    assert table.num_cells == 402
    assert table.counts.refused == {
        "with coordinates that are no numbers": 1,
        "of fewer than three points": 1,
        "without area": 1,
        "outside the slide": 1,
    }
    assert table.counts.changed == {"with the id of another cell": 2}
    assert table.counts.read == 406


def test_cells_of_another_slide_are_refused_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    rings = random_rings(100, size_l0=(90_000, 90_000))
    with pytest.raises(
        InvalidInputError, match="must lie on the slide of 20000 x 31000"
    ):
        written(tmp_path, [batch_of(rings)])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_file_without_cells_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="at least one, got none"):
        written(tmp_path, [])


def test_a_frame_of_micrometres_is_scaled_by_each_axis(tmp_path: Path) -> None:
    ring = random_rings(1)[0]
    for frame, unit_um in (("um", 1.0), ("µm", 1.0), ("0.5", 0.5)):
        placement = placement_of(frame, SLIDE)
        in_frame = ring * SLIDE.slide_mpp / unit_um
        table = write_cells(
            tmp_path / "a.parquet",
            [batch_of([in_frame])],
            name="own",
            slide=SLIDE,
            origin=ORIGIN,
            placement=placement,
            fit=PlacementCheck(SLIDE, placement, None),
        )
        (wkb,) = table.to_table()["geometry"].to_pylist()
        assert shapely.from_wkb(wkb).equals_exact(shapely.Polygon(ring), 1e-6)
    with pytest.raises(InvalidInputError, match="frame of cells must be px"):
        placement_of("inches", SLIDE)


def test_a_table_of_another_tool_is_not_one_of_ours(tmp_path: Path) -> None:
    import pyarrow as pa

    pq.write_table(pa.table({"x": [1.0]}), tmp_path / "b.parquet")
    with pytest.raises(
        StoreError, match="must be a table of `thinsection run --cells`"
    ):
        _ = CellTable(tmp_path / "b.parquet").classes
    (tmp_path / "c.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(StoreError, match="readable Parquet"):
        _ = CellTable(tmp_path / "c.parquet").num_cells


def test_wkb_with_holes_pieces_points_and_damage_is_read_as_its_largest_ring() -> None:
    import pyarrow as pa

    square = shapely.box(10, 20, 30, 50)
    holed = shapely.Polygon(square.exterior, [shapely.box(12, 22, 15, 25).exterior])
    pieces = shapely.MultiPolygon([shapely.box(0, 0, 1, 1), square])
    texts = [
        shapely.to_wkb(square),
        shapely.to_wkb(holed, byte_order=0),
        shapely.to_wkb(pieces),
        shapely.to_wkb(shapely.Point(3, 4)),
        b"no geometry",
        None,
        shapely.to_wkb(square),
    ]
    decoded = decode_wkb(pa.array(texts))
    assert decoded.outlines.num_points.tolist() == [4, 4, 4, 0, 0, 0, 4]
    assert (decoded.num_with_holes, decoded.num_in_pieces) == (1, 1)
    np.testing.assert_array_equal(decoded.centers[3], (3, 4))
    np.testing.assert_array_equal(
        decoded.outlines.bounds()[[0, 1, 2, 6]], [(10, 20, 30, 50)] * 4
    )
    written_again = decoded.outlines.to_wkb()
    assert written_again.null_count == 3
    assert shapely.from_wkb(written_again[6].as_py()).equals(square)


def test_codes_of_classes_are_those_of_the_words_also_in_a_slice() -> None:
    import pyarrow as pa

    words = ["b", None, "a", "b", None, "a", "a"]
    names = pa.array(["a", "b"])
    for given in (words, [word for word in words if word]):
        places = pa.array(
            [None if word is None else "ab".index(word) for word in given]
        )
        column = pa.DictionaryArray.from_arrays(places.cast(pa.int32()), names)
        batch = pa.record_batch({"class": column})
        expected = [-1 if word is None else "ab".index(word) for word in given]
        assert class_codes(batch).tolist() == expected
        assert class_codes(batch.slice(2, 2)).tolist() == expected[2:4]


def test_numbers_of_pieces_follow_each_other() -> None:
    import pyarrow as pa

    pieces = pa.chunked_array([[1.5, 2.5], [], [3.5]], type=pa.float64())
    assert numbers_of(pieces).tolist() == [1.5, 2.5, 3.5]
    assert numbers_of(pa.chunked_array([], type=pa.float64())).tolist() == []


def test_centres_and_classes_are_read_without_pandas(table: CellTable) -> None:
    """Its import takes longer than reading a million centres."""
    code = """
import sys
from pathlib import Path
from thinsection.cells.table import CellTable, centers_of, class_codes
table = CellTable(Path(sys.argv[1]))
window = (0, 0, 3000, 3000)
number = 0
for batch in table.batches(["x_l0", "y_l0", "class"], window):
    number += len(centers_of(batch)) + len(class_codes(batch))
print(number > 0, "pandas" in sys.modules)
"""
    command = [sys.executable, "-c", code, str(table.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
