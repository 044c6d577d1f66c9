"""Layers of cells: every cell is counted and outlined once, wherever the squares lie."""

from pathlib import Path

import numpy as np
import pytest
from tests.support.cell_files import run_with_cells, write_cells

import thinsection as ts
from thinsection.cells.outlines import decode_wkb
from thinsection.cells.table import CellTable
from thinsection.results.folder import Results
from thinsection.testing.synthetic import write_he_slide
from thinsection.view.cells import COUNTED_PX, count_in_squares, outlines_in_square
from thinsection.view.layers import Layer, layers_of
from thinsection.view.shown import ShownSlides, ViewConfig

NUMBER = 500
WIDE = (5000, 3000)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A slide of several squares, with two tables of cells."""
    root = tmp_path_factory.mktemp("cells")
    write_he_slide(root / "a.svs", WIDE, seed=3, downsamples=(1, 4))
    for seed, name in enumerate(("nuclei", "other")):
        write_cells(root / name / "a.geojson", number=NUMBER, seed=seed, size=WIDE)
    return ts.open_results(run_with_cells(root, ("nuclei", "other"), tile_px=256))


def of_kind(results: Results, kind: str) -> list[Layer]:
    return [
        layer for layer in layers_of(results, "a", 3, 1 << 27) if layer.kind == kind
    ]


def test_each_table_is_a_layer_beside_the_columns_of_tiles(results: Results) -> None:
    layers = of_kind(results, "cells")
    assert [layer.group for layer in layers] == ["cells_nuclei", "cells_other"]
    assert layers[0].names == ("Immune cells", "Tumour")
    assert len(layers[0].colors) == 2
    words = {layer.key: layer.words for layer in of_kind(results, "values")}
    (grid,) = results.grids
    assert words[f"{grid}/cells_nuclei:per_mm2"] == "Cells per mm² of tissue"
    assert (
        words[f"{grid}/cells_other:share_Immune-cells"]
        == "Share of cells, Immune-cells"
    )
    scales = {layer.key: layer.scale for layer in of_kind(results, "values")}
    assert scales[f"{grid}/cells_nuclei:count_Tumour"] == "amount"
    assert scales[f"{grid}/cells_nuclei:area_um2_mean"] == "measure"


def test_the_numbers_in_squares_are_those_of_the_centres(results: Results) -> None:
    table = results.cells("a", "nuclei")
    data = count_in_squares(table)
    number, *edges = np.frombuffer(data, "<u4", 5).tolist()
    assert edges == [COUNTED_PX] * 4
    corners = np.frombuffer(data, "<i4", 2 * number, 20).reshape(-1, 2)
    values = np.frombuffer(data, "<f4", offset=20 + 8 * number)
    rows = table.to_table(["x_l0", "y_l0"])
    x, y = (rows[name].to_numpy() for name in ("x_l0", "y_l0"))
    for (left, top), value in zip(corners.tolist(), values.tolist()):
        inside = (x >= left) & (x < left + COUNTED_PX)
        inside &= (y >= top) & (y < top + COUNTED_PX)
        assert inside.sum() == value > 0
    assert values.sum() == NUMBER
    assert number > 5


def unpacked(data: bytes) -> tuple[list[int], list[np.ndarray]]:
    """Classes and outlines of a square, as the browser reads them."""
    (number,) = np.frombuffer(data, "<u4", 1).tolist()
    codes = np.frombuffer(data, "<u4", number, 4)
    first = np.frombuffer(data, "<u4", number + 1, 4 + 4 * number)
    points = np.frombuffer(data, "<f4", offset=8 + 8 * number).reshape(-1, 2)
    return codes.tolist(), np.split(points, first[1:-1]) if number else []


def test_the_squares_have_each_outline_once(results: Results) -> None:
    table = results.cells("a", "other")
    found = []
    for column in range(3):
        for row in range(2):
            codes, rings = unpacked(outlines_in_square(table, column, row))
            for code, ring in zip(codes, rings, strict=True):
                corner = np.array((column, row)) * 2048
                found.append((*(ring + corner).mean(axis=0).round(1).tolist(), code))
    rows = table.to_table()
    outlines = decode_wkb(rows["geometry"].combine_chunks()).outlines
    rings = np.split(outlines.points, outlines.offsets[1:-1])
    names = rows["class"].to_pylist()
    expected = [
        (*ring.mean(axis=0).round(1).tolist(), table.classes.index(name))
        for ring, name in zip(rings, names, strict=True)
    ]
    np.testing.assert_allclose(sorted(found), sorted(expected), atol=0.11)
    assert outlines_in_square(table, 40, 40) == bytes(8)


def test_the_viewer_answers_for_a_square(results: Results) -> None:
    shown = ShownSlides(results, ViewConfig())
    layers = shown.facts("a")["layers"]
    assert isinstance(layers, list)
    kinds = [layer["kind"] for layer in layers]
    number = kinds.index("cells")
    table = CellTable(results.folder / "cells" / "nuclei" / "a.parquet")
    assert shown.layer("a", number) == count_in_squares(table)
    assert shown.layer_part("a", number, 1, 0) == outlines_in_square(table, 1, 0)
    with pytest.raises(KeyError):
        shown.layer_part("a", kinds.index("grid"), 0, 0)
    with pytest.raises(KeyError):
        shown.layer_part("nowhere", number, 0, 0)


def test_a_cell_without_an_outline_is_its_centre(tmp_path: Path) -> None:
    from thinsection.cells.outlines import Outlines
    from thinsection.view.cells import _with_centers

    square = np.array([(0.0, 0.0), (4, 0), (4, 4), (0, 4)])
    outlines = Outlines.of_counts(np.concatenate((square, square + 9)), [4, 0, 4, 0])
    centers = np.array([(2.0, 2), (5, 6), (11, 11), (7, 8)])
    filled = _with_centers(outlines, centers)
    assert filled.num_points.tolist() == [4, 1, 4, 1]
    rings = np.split(filled.points, filled.offsets[1:-1])
    assert rings[1].tolist() == [[5, 6]]
    assert rings[3].tolist() == [[7, 8]]
    assert rings[2].tolist() == (square + 9).tolist()
