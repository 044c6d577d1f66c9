"""What people draw decides the tiles: round trips, columns, edits that cost only what changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely

from thinsection.errors import ConfigError
from thinsection.exchange.qupath import export_qupath
from thinsection.results.folder import open_results
from thinsection.run import prepare
from thinsection.run.ending import RunSummary
from thinsection.run.process import RunEvent
from thinsection.run.run import run
from thinsection.stages.config import RunConfig
from thinsection.store.tile_tables import RowMerger
from thinsection.store.tiles_h5 import read_tiles
from thinsection.testing.synthetic import write_he_slide

SIZE = (1700, 1300)
LEFT, RIGHT = shapely.box(0, 0, 600, 1300), shapely.box(600, 0, 1700, 1300)


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slides") / "s.svs"
    write_he_slide(path, SIZE, seed=7)
    return path


def drawn(path: Path, **areas: Any) -> Path:
    features = [
        {
            "type": "Feature",
            "geometry": json.loads(shapely.to_geojson(area)),
            "properties": {
                "objectType": "annotation",
                "classification": {"name": name},
            },
        }
        for name, area in areas.items()
    ]
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    return path


class Counted:
    """How many tiles each run gave to the encoder."""

    def __init__(self) -> None:
        self.tiles = 0

    def __call__(self, event: RunEvent) -> None:
        self.tiles += event.num_tiles if event.kind == "tiles" else 0


def work(
    slides: Any, out: Path, until: str = "embeddings", **settings: Any
) -> tuple[RunSummary, int]:
    counted = Counted()
    given = [slides] if isinstance(slides, Path) else slides
    settings = {"tile_px": 128, "pretrained": False, "batch_size": 8, **settings}
    summary = run(
        given, out=out, config=RunConfig(), until=until, on_event=counted, **settings
    )
    return summary, counted.tiles


def grid(out: Path, slide_id: str = "s", which: str = "") -> Any:
    (name,) = [g for g in open_results(out).grids if which in g]
    return read_tiles(out / name / "tiles" / f"{slide_id}.h5")


def places(found: Any) -> set[tuple[int, int]]:
    return set(map(tuple, found.coords_l0.tolist()))


def test_our_tissue_given_back_keeps_the_tiles_but_those_at_the_limit(
    slide: Path, tmp_path: Path
) -> None:
    assert work(slide, tmp_path / "a", "tiles")[0].exit_code == 0
    export_qupath(tmp_path / "a", tmp_path / "drawn")
    document = json.loads((tmp_path / "drawn" / "s.geojson").read_text())
    kinds = {f["properties"]["objectType"] for f in document["features"]}
    assert kinds == {"annotation", "detection"}  # as exported, the tiles too
    outlines = tmp_path / "tissue.geojson"
    document["features"] = document["features"][:1]
    outlines.write_text(json.dumps(document))
    assert work(slide, tmp_path / "b", "tiles", tissue=str(outlines))[0].exit_code == 0
    one, other = grid(tmp_path / "a"), grid(tmp_path / "b")
    shares = [
        dict(
            zip(map(tuple, f.coords_l0.tolist()), f.columns["tissue_fraction"].tolist())
        )
        for f in (one, other)
    ]
    both = shares[0].keys() & shares[1].keys()
    assert max(abs(shares[0][place] - shares[1][place]) for place in both) < 0.03
    at_limit = [s[place] for s in shares for place in s.keys() - both]
    assert all(0.5 <= share < 0.53 for share in at_limit)
    assert len(both) > 0.95 * len(shares[0])


def test_coverage_is_of_the_polygons_and_not_of_their_px(
    slide: Path, tmp_path: Path
) -> None:
    thin = shapely.box(
        0, 0, 64.5, 1300
    )  # of tiles of 128 px; a px of the mask is 16 wide
    file = drawn(tmp_path / "t.geojson", Tissue=thin)
    assert work(slide, tmp_path / "o", "tiles", tissue=str(file))[0].exit_code == 0
    found = grid(tmp_path / "o")
    assert found.columns["tissue_fraction"] == pytest.approx(64.5 / 128, abs=1e-6)
    assert set(found.coords_l0[:, 0].tolist()) == {0}


def test_classes_are_columns_and_included_or_taken_away(
    slide: Path, tmp_path: Path
) -> None:
    file = drawn(tmp_path / "t.geojson", Tumor=LEFT, Stroma=RIGHT, **{"Ignore*": LEFT})
    kept = drawn(tmp_path / "k.geojson", Tumor=LEFT, Stroma=RIGHT)
    work(slide, tmp_path / "o", "tiles", roi=str(file))
    assert grid(tmp_path / "o").coords_l0[:, 0].min() > 500
    work(slide, tmp_path / "p", "tiles", roi=str(kept), include_class=["Tumor"])
    found = grid(tmp_path / "p")
    assert found.coords_l0[:, 0].max() < 600
    assert {"class_Tumor", "class_Stroma", "roi_fraction"} <= set(found.columns)
    wanted = np.clip(600 - found.coords_l0[:, 0], 0, 128) / 128
    assert found.columns["class_Tumor"] == pytest.approx(wanted, abs=1e-6)


def test_a_column_of_classes_is_a_tile_filter(slide: Path, tmp_path: Path) -> None:
    file = drawn(tmp_path / "t.geojson", Tumor=LEFT, Stroma=RIGHT)
    rules = ["tissue", "class_Tumor>0.9"]
    work(slide, tmp_path / "o", "tiles", roi=str(file), tile_filter=rules)
    assert grid(tmp_path / "o").coords_l0[:, 0].max() <= 600 - 116


def test_after_an_edit_only_the_tiles_that_changed_are_embedded(
    slide: Path, tmp_path: Path
) -> None:
    file, out = drawn(tmp_path / "t.geojson", Tissue=LEFT), tmp_path / "o"
    summary, first = work(slide, out, tissue=str(file))
    assert (summary.exit_code, first) == (0, len(grid(out).coords_l0))
    before = read_tiles(next(out.glob("*/features_*/s.h5")))
    drawn(file, Tissue=shapely.box(250, 0, 900, 1300))
    summary, again = work(slide, out, tissue=str(file))
    assert [r.status for r in summary.results] == ["done"]
    tiles, after = grid(out), read_tiles(next(out.glob("*/features_*/s.h5")))
    assert np.array_equal(after.coords_l0, tiles.coords_l0)
    new = places(tiles) - places(before)
    assert again == len(new) < len(tiles.coords_l0)
    fresh = tmp_path / "fresh"
    work(slide, fresh, tissue=str(file))
    wanted = read_tiles(next(fresh.glob("*/features_*/s.h5")))
    assert np.array_equal(after.coords_l0, wanted.coords_l0)
    assert after.features == pytest.approx(wanted.features, abs=1e-5)
    assert not list(out.rglob("*.tmp-*"))
    assert work(slide, out, tissue=str(file))[0].results[0].status == "skipped"


def test_tiles_that_another_grid_has_are_not_embedded_again(
    slide: Path, tmp_path: Path
) -> None:
    out = tmp_path / "o"
    _, everything = work(slide, out)
    file = drawn(tmp_path / "t.geojson", Tumor=LEFT)
    _, subset = work(slide, out, roi=str(file))
    assert everything > 0 == subset
    part, whole = (
        read_tiles(next(out.glob(f"{name}/features_*/s.h5")))
        for name in ("*_roi-*", "128px_0.5mpp")
    )
    rows = [whole.coords_l0.tolist().index(place) for place in part.coords_l0.tolist()]
    assert len(rows) > 0
    assert np.array_equal(part.features, whole.features[rows])


def test_stored_rows_are_not_read_if_another_stage_needs_all_tiles(
    slide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "o"
    work(slide, out)
    read: list[Path] = []

    def noted(path: Path, coords_l0: Any) -> RowMerger:
        read.append(path)
        return RowMerger(path, coords_l0)

    monkeypatch.setattr(prepare, "RowMerger", noted)
    file = drawn(tmp_path / "t.geojson", Tumor=LEFT)
    # the measures have no rows elsewhere, so that every tile of the grid is read for them
    _, measured = work(slide, out, roi=str(file), measures=True)
    assert read == []
    assert measured == len(grid(out, which="_roi-").coords_l0) > 0
    other = drawn(tmp_path / "other.geojson", Tumor=RIGHT)
    _, alone = work(slide, out, roi=str(other))
    assert (len(read) > 0, alone) == (True, 0)


def test_another_slide_file_under_what_was_drawn_is_refused(
    slide: Path, tmp_path: Path
) -> None:
    file, out = drawn(tmp_path / "t.geojson", Tissue=LEFT), tmp_path / "o"
    copy = tmp_path / "s.svs"
    copy.write_bytes(slide.read_bytes())
    work(copy, out, tissue=str(file))
    write_he_slide(copy, SIZE, seed=8)
    drawn(file, Tissue=RIGHT)
    summary, _ = work(copy, out, tissue=str(file))
    assert "pass --overwrite" in summary.results[0].error


def two_slides(folder: Path) -> list[Path]:
    folder.mkdir()
    for seed, name in enumerate("ab"):
        write_he_slide(folder / f"{name}.svs", SIZE, seed=seed)
    return [folder / "a.svs", folder / "b.svs"]


def by_folder(root: Path, slides: list[Path]) -> tuple[list[Path], str]:
    drawn(root / "drawn" / "a.geojson", Tissue=LEFT)
    return slides, str(root / "drawn")


def by_column(root: Path, slides: list[Path]) -> tuple[list[Path], str]:
    drawn(root / "drawn" / "x.geojson", Tissue=LEFT)
    rows = [
        "slide_path,outlines",
        f"{slides[0]},drawn/x.geojson",
        f"{slides[1]},drawn/none.xml",
    ]
    (root / "c.csv").write_text("\n".join(rows))
    return [root / "c.csv"], "outlines"


def by_boxes(root: Path, slides: list[Path]) -> tuple[list[Path], str]:
    (root / "b.csv").write_text(
        "slide_id,x,y,width,height\na,0,0,600,1300\nb,a,0,1,1\n"
    )
    return slides, str(root / "b.csv")


@pytest.mark.parametrize("way", [by_folder, by_column, by_boxes])
def test_a_folder_a_column_and_a_table_give_each_slide_its_own(
    tmp_path: Path, way: Callable[[Path, list[Path]], tuple[list[Path], str]]
) -> None:
    given, tissue = way(tmp_path, two_slides(tmp_path / "slides"))
    summary, _ = work(given, tmp_path / "o", "tiles", tissue=tissue)
    good, bad = summary.results
    assert (good.status, bad.status) == ("done", "failed")
    assert grid(tmp_path / "o", "a").coords_l0[:, 0].max() < 600
    assert "got no file" in bad.error or "line 3 must have numbers" in bad.error


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tissue": "nowhere"},
            "tissue must be a file, a folder, or a column of the cohort",
        ),
        (
            {"roi": "drawn.geojson"},
            "roi must belong to one slide, got one file for 2 slides",
        ),
        (
            {"tissue": "drawn", "qc": "auto"},
            "tissue and qc exclude each other, because each of them",
        ),
        (
            {
                "tissue": "drawn",
                "tissue_segmenter": True,
                "segmenters": ["hest-tissue"],
            },
            "tissue and tissue_segmenter exclude each other",
        ),
    ],
)
def test_what_can_be_there_for_no_slide_is_said_before_any_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    drawn(tmp_path / "drawn.geojson", Tissue=LEFT)
    (tmp_path / "drawn").mkdir()
    with pytest.raises(ConfigError, match=message):
        work(two_slides(tmp_path / "slides"), tmp_path / "o", "tiles", **settings)


def test_regions_of_tiles_are_kept_whole_by_their_share_of_the_annotation(
    slide: Path, tmp_path: Path
) -> None:
    """The annotation ends at x = 600: in the middle of the second column of tiles of 512 px."""
    file = drawn(tmp_path / "t.geojson", Tumor=LEFT)
    rules = {"tile_filter": [], "region_px": 256, "roi": str(file)}
    work(slide, tmp_path / "o", "tiles", **rules)
    tiles = read_tiles(next((tmp_path / "o").glob("*/tiles/s.h5")))
    corners = tiles.coords_l0.reshape(-1, 4, 2)[:, 0]
    # 88 of the 256 columns from x = 512 on are inside, less than half
    assert set(corners[:, 0].tolist()) == {0, 256}
    work(slide, tmp_path / "p", "tiles", **rules, min_tissue_fraction=0.3)
    tiles = read_tiles(next((tmp_path / "p").glob("*/tiles/s.h5")))
    shares = tiles.columns["roi_fraction"].reshape(-1, 2, 2)
    corners = tiles.coords_l0.reshape(-1, 4, 2)[:, 0]
    assert set(corners[:, 0].tolist()) == {0, 256, 512}
    border = shares[corners[:, 0] == 512]
    np.testing.assert_allclose(border[:, :, 0], 88 / 128, atol=0.01)
    np.testing.assert_allclose(border[:, :, 1], 0, atol=1e-6)
