"""`cells check` finds what was planted, and little else."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import shapely
from PIL import Image
from tests.support.cells import (
    cut_at_lines,
    feature,
    random_rings,
    scattered_polygons,
    write_geojson,
)
from tests.support.shell import thinsection

from thinsection.cells.check import CellsFindings, check_cells
from thinsection.cells.check_picture import save_examples
from thinsection.cells.place import CellSlide
from thinsection.cells.seams import find_seams
from thinsection.qc.tissue import TissueMask
from thinsection.types import MaskFrame

NUM_CELLS = 6000
NUM_PLANTED = 100


@pytest.fixture(scope="module")
def nuclei() -> list[shapely.Polygon]:
    """Nuclei of integer coordinates, as contours of masks have them."""
    return scattered_polygons(NUM_CELLS)


def checked(polygons: list[shapely.Polygon], folder: Path) -> CellsFindings:
    path = folder / "cells.parquet"
    wkb = pa.array(shapely.to_wkb(polygons), type=pa.binary())
    pq.write_table(pa.table({"geometry": wkb}), path)
    findings, around = check_cells(path)
    assert set(around) == set(findings.examples)
    assert all(outlines for outlines in around.values())
    return findings


def test_nuclei_that_nobody_cut_give_no_finding(
    nuclei: list[shapely.Polygon], tmp_path: Path
) -> None:
    findings = checked(nuclei, tmp_path)
    assert findings.num_cells == NUM_CELLS
    assert findings.seams == {}
    assert findings.num_doubled_pairs == 0
    assert sum(findings.num_by_kind.values()) <= NUM_CELLS / 1000
    assert "on glass" not in findings.num_by_kind


def test_98_of_100_planted_doubles_are_found(
    nuclei: list[shapely.Polygon], tmp_path: Path
) -> None:
    """Copies that are moved by a quarter of their width, and turned, as of a second tile."""
    rng = np.random.default_rng(5)
    doubles = []
    for place in rng.choice(NUM_CELLS, NUM_PLANTED, replace=False):
        nucleus = nuclei[place]
        width = nucleus.bounds[2] - nucleus.bounds[0]
        moved = shapely.affinity.translate(nucleus, 0.25 * width, -0.1 * width)
        doubles.append(shapely.affinity.rotate(moved, float(rng.uniform(-15, 15))))
    findings = checked([*nuclei, *doubles], tmp_path)
    assert findings.num_doubled_pairs >= NUM_PLANTED - 2
    # a moved copy may also meet a neighbour
    truth = _pairs_by_shapely([*nuclei, *doubles])
    assert findings.num_doubled_pairs == len(truth)
    assert findings.num_by_kind["doubled"] == len(
        {one for pair in truth for one in pair}
    )


def _pairs_by_shapely(polygons: list[shapely.Polygon]) -> set[tuple[int, int]]:
    """Pairs that share more than a fifth of the smaller one, each pair looked at by itself."""
    pairs = set()
    tree = shapely.STRtree(polygons)
    for first, polygon in enumerate(polygons):
        for second in tree.query(polygon).tolist():
            other = polygons[second]
            shared = polygon.intersection(other).area
            if first < second and shared > 0.2 * min(polygon.area, other.area):
                pairs.add((first, second))
    return pairs


def test_a_pair_across_the_border_of_a_block_counts_once(tmp_path: Path) -> None:
    one = shapely.box(8180, 8180, 8200, 8200)
    other = shapely.box(8186, 8186, 8206, 8206)
    findings = checked([one, other, shapely.box(100, 100, 120, 120)], tmp_path)
    assert findings.num_doubled_pairs == 1
    assert findings.num_by_kind["doubled"] == 2


@pytest.mark.parametrize("period", [256.0, 1000.0, 700.5])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_98_of_100_planted_cuts_are_found_and_the_seams_too(
    nuclei: list[shapely.Polygon], tmp_path: Path, period: float, num_parts: int
) -> None:
    """Tools keep both parts of a cut cell, or the one in the tile alone."""
    axis = 1 if period == 1000 else 0
    lines = [33 + period * number for number in range(60)]
    with_parts, parts = cut_at_lines(nuclei, lines, NUM_PLANTED, axis=axis)
    if num_parts == 1:
        left_out = set(parts[1::2])
        with_parts = [
            polygon for place, polygon in enumerate(with_parts) if place not in left_out
        ]
    findings = checked(with_parts, tmp_path)
    (seams,) = findings.seams.values()
    assert list(findings.seams) == ["xy"[axis]]
    assert seams.period == pytest.approx(period, rel=1e-4)
    for line in (*seams.after, *seams.before):
        assert line == pytest.approx(33, abs=1)
    num_cut = findings.num_by_kind["cut"]
    num_planted = NUM_PLANTED * num_parts
    assert 0.98 * num_planted <= num_cut
    assert num_cut - num_planted <= len(with_parts) / 1000


def test_places_on_a_coarse_grid_are_no_seams() -> None:
    """Outlines of a mask at an eighth of the resolution have all their sides on a grid of 8 px."""
    rng = np.random.default_rng(0)
    places = rng.integers(0, 5000, 4000) * 8.0
    assert find_seams(places, places + 24) is None
    assert find_seams(np.zeros(0), np.zeros(0)) is None
    assert find_seams(rng.uniform(0, 40_000, 4000), np.zeros(3)) is None


def test_self_crossing_tiny_huge_and_empty_cells_are_counted(
    nuclei: list[shapely.Polygon], tmp_path: Path
) -> None:
    bow = shapely.Polygon([(9000, 9000), (9030, 9030), (9030, 9000), (9000, 9020)])
    tiny = shapely.box(10_100, 10_100, 10_103, 10_103)
    huge = shapely.box(11_000, 11_000, 11_200, 11_200)
    line = shapely.Polygon([(50, 50), (60, 60), (70, 70)])
    findings = checked([*nuclei[:500], bow, tiny, huge, line], tmp_path)
    found = findings.num_by_kind
    assert (found["self-crossing"], found["tiny"], found["huge"]) == (1, 1, 1)
    assert findings.unusable == {"without area": 1}
    assert findings.num_read == 504
    median = np.median([nucleus.area for nucleus in nuclei[:500]])
    assert findings.median_area_px == pytest.approx(median, rel=0.05)


def test_cells_on_glass_and_outside_the_slide_are_counted_with_a_slide(
    tmp_path: Path,
) -> None:
    slide = CellSlide(slide_id="a", size_l0=(4000, 3000), slide_mpp=(0.5, 0.5))
    mask = np.zeros((30, 40), dtype=bool)
    mask[:, :20] = True
    tissue = TissueMask(
        mask=mask,
        frame=MaskFrame(size_th=(40, 30), size_l0=(4000, 3000)),
        mask_mpp=(50.0, 50.0),
        thumbnail=np.zeros((30, 40, 3), dtype=np.uint8),
    )
    boxes = [shapely.box(x, 500, x + 20, 520) for x in range(0, 6000, 100)]
    path = tmp_path / "cells.parquet"
    pq.write_table(pa.table({"geometry": shapely.to_wkb(boxes)}), path)
    findings, around = check_cells(path, slide=slide, tissue=tissue)
    assert findings.outside_slide == 20
    assert findings.num_by_kind["on glass"] == 20
    save_examples(tmp_path / "a.png", around, None)
    with Image.open(tmp_path / "a.png") as picture:
        red = np.asarray(picture)[..., 0].astype(int) - np.asarray(picture)[..., 1]
        assert picture.size == (5 * 180, 4 * 208)
        assert np.count_nonzero(red > 150) > 20 * 50


def test_the_command_names_a_file_that_cannot_be_read_and_checks_the_others(
    tmp_path: Path,
) -> None:
    rings = [*random_rings(200), random_rings(200)[0] + 2]
    good = write_geojson(
        tmp_path / "good.geojson", [feature(ring, n) for n, ring in enumerate(rings)]
    )
    bad = tmp_path / "bad.geojson"
    bad.write_bytes(good.read_bytes()[:5000])
    ended = thinsection("cells", "check", good, bad, "--json")
    assert ended.returncode == 3
    document = json.loads(ended.stdout)
    (checked_file,) = document["files"]
    (failure,) = document["failures"]
    assert checked_file["num_cells"] == 201
    assert checked_file["num_doubled_pairs"] >= 1
    assert failure["file"] == str(bad)
    assert "cells must be readable" in failure["error"]
    picture = tmp_path / "doubtful.png"
    ended = thinsection("cells", "check", good, "--picture", picture)
    assert ended.returncode == 0
    assert "doubled:" in ended.stdout
    assert picture.is_file()
    assert (
        thinsection("cells", "check", good, bad, "--picture", "a.png").returncode == 2
    )
