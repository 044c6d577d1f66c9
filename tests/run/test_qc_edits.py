"""Corrections of quality control: drawn, applied on stored masks, kept, taken away, exported."""

import csv
import hashlib
import html
import json
import os
import re
import subprocess
import sys
import zipfile
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import shapely
from PIL import Image

from thinsection import qc
from thinsection.config import replace_flat
from thinsection.errors import ConfigError
from thinsection.exchange.qupath import export_qupath
from thinsection.report.qc_files import load_qc
from thinsection.report.stored import QC_FILE
from thinsection.results.folder import open_results
from thinsection.run.ending import RunSummary
from thinsection.run.plan import plan
from thinsection.run.process import RunEvent
from thinsection.run.qc_run import QcRunConfig, check_slides
from thinsection.run.run import run
from thinsection.stages.config import RunConfig
from thinsection.store.tiles_h5 import read_tiles
from thinsection.testing.synthetic import write_he_slide
from thinsection.view.layers import layers_of

SIZE = (2400, 1700)
# two checks that remove, beside the glass; 8 µm/px is 16 level-0 px
PIPELINE = """
name = "two"
work_mpp = 8.0
work_from = "mpp"

[[check]]
kind = "tissue"

[[check]]
kind = "intensity"
name = "dark"
upper_gray = 0.5
invert = true

[[check]]
kind = "intensity"
name = "bright"
lower_gray = 0.7
invert = true
"""


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two slides of H&E, and a pipeline of two checks."""
    root = tmp_path_factory.mktemp("slides")
    for index in range(2):
        write_he_slide(root / f"s{index}.svs", SIZE, seed=index)
    return root


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("pipeline") / "two.toml"
    path.write_text(PIPELINE)
    return str(path)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Checks:
    """How often the checks ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs = 0
        run_qc = qc.run_qc

        def counted(*args: Any, **settings: Any) -> qc.QcResult:
            self.runs += 1
            return run_qc(*args, **settings)

        monkeypatch.setattr(qc, "run_qc", counted)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Checks:
    return Checks(monkeypatch)


def draw(path: Path, *areas: tuple[str, Any], **more: Any) -> Path:
    """A file as QuPath exports it: (class, geometry) each."""
    features = [
        {
            "type": "Feature",
            "id": f"00000000-0000-4000-8000-{number:012d}",
            "geometry": json.loads(shapely.to_geojson(area)),
            "properties": {
                "objectType": "annotation",
                "classification": {"name": name, "color": [200, 0, 0]},
                **more,
            },
        }
        for number, (name, area) in enumerate(areas)
    ]
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    return path


def work(
    slides: Path | list[Path], out: Path, pipeline: str, **settings: Any
) -> RunSummary:
    return run(
        slides if isinstance(slides, list) else [slides],
        out=out,
        config=RunConfig(),
        qc=pipeline,
        **{"until": "tiles", "tile_px": 64, **settings},
    )


def folder_of(out: Path, slide_id: str) -> Path:
    (folder,) = (out / "slides" / slide_id).glob("qc_*")
    return folder


def centres_in(area: Any, shape: tuple[int, int]) -> Any:
    """Judge: the mask px whose centres shapely finds in an area."""
    height, width = shape
    x, y = np.meshgrid(
        (np.arange(width) + 0.5) * SIZE[0] / width,
        (np.arange(height) + 0.5) * SIZE[1] / height,
    )
    return shapely.contains_xy(area, x, y)


def states(summary: RunSummary) -> dict[str, str]:
    return {result.slide_id: result.status for result in summary.results}


def tiles_of(out: Path, slide_id: str) -> Any:
    (grid,) = open_results(out).grids
    return read_tiles(out / grid / "tiles" / f"{slide_id}.h5")


def table(path: Path) -> dict[str, dict[str, str]]:
    with path.open(newline="") as file:
        return {row["slide_id"]: row for row in csv.DictReader(file)}


KEEP = shapely.box(500, 300, 1300, 900)
REMOVE = shapely.box(900, 700, 1700, 1300)


def test_a_correction_is_the_drawn_area_and_leaves_the_checks_and_the_other_slide(
    slides: Path, pipeline: str, tmp_path: Path, checks: Checks
) -> None:
    out = tmp_path / "out"
    assert work(slides, out, pipeline).exit_code == 0
    before = {name: load_qc(folder_of(out, name)) for name in ("s0", "s1")}
    zips = {name: (folder_of(out, name) / QC_FILE).read_bytes() for name in before}
    draw(tmp_path / "edits" / "s0.geojson", ("keep dark", KEEP), ("remove", REMOVE))
    summary = work(slides, out, pipeline, qc_edits=str(tmp_path / "edits"))
    assert summary.exit_code == 0
    assert checks.runs == 2, "stored masks are taken"
    assert (folder_of(out, "s1") / QC_FILE).read_bytes() == zips["s1"]

    raw, edited = before["s0"], load_qc(folder_of(out, "s0"))
    assert edited.checked is not None
    for name, mask in raw.masks.items():
        np.testing.assert_array_equal(edited.checked.masks[name], mask)
    np.testing.assert_array_equal(edited.checked.mask_use, raw.mask_use)
    keep = centres_in(KEEP, raw.mask_use.shape)
    remove = centres_in(REMOVE, raw.mask_use.shape)
    only_dark = raw.masks["dark"] & ~raw.masks["bright"] & ~raw.masks["glass"]
    assert (only_dark & keep & ~remove).sum() > 100, "the area decides something"
    wanted = (raw.mask_use | (only_dark & keep)) & ~remove
    np.testing.assert_array_equal(edited.mask_use, wanted)
    np.testing.assert_array_equal(edited.masks["dark"], raw.masks["dark"] & ~keep)
    np.testing.assert_array_equal(edited.masks["bright"], raw.masks["bright"])
    assert edited.row["pixels_to_use"] == wanted.sum()
    assert edited.row["edited_areas"] == 2

    rows = table(out / f"{folder_of(out, 's0').name}.csv")
    assert [rows[name]["edited_areas"] for name in ("s0", "s1")] == ["2", "0"]
    assert int(rows["s0"]["pixels_to_use"]) == wanted.sum()
    assert "2 areas corrected by hand" in rows["s0"]["why"]
    assert "corrected" not in rows["s1"]["why"]
    page = (out / f"{folder_of(out, 's0').name}.html").read_text()
    assert page.count("2 areas corrected by hand") == 1
    summary_rows = table(out / "summary.csv")
    assert [summary_rows[name]["edited_areas"] for name in ("s0", "s1")] == ["2", "0"]
    assert "edited_areas" not in (out / "failed.csv").read_text()


def test_tiles_lie_on_the_corrected_tissue_with_the_corrected_shares(
    slides: Path, pipeline: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    path = draw(tmp_path / "s0.geojson", ("keep dark", KEEP), ("remove bright", REMOVE))
    work(slides / "s0.svs", out, pipeline, qc_edits=str(path))
    result = load_qc(folder_of(out, "s0"))
    found = tiles_of(out, "s0")
    # tiles of 64 px are 4 px of the mask, on its grid of 16 level-0 px
    inside = (found.coords_l0 >= [900, 700]).all(axis=1)
    inside &= (found.coords_l0 + 64 <= [1700, 1300]).all(axis=1)
    assert not inside.any(), "where a person removes there is no tile"
    inside = (found.coords_l0 >= [500, 300]).all(axis=1)
    inside &= (found.coords_l0 + 64 <= [900, 700]).all(axis=1)
    assert inside.sum() > 3
    assert found.columns["qc_dark"][inside].max() < 0.02
    assert found.columns["qc_dark"][~inside].max() > 0.3
    assert result.checked is not None
    added = result.masks["bright"] & ~result.checked.masks["bright"]
    assert added.sum() > 100


def test_rules_read_the_corrected_row_that_the_table_has(
    slides: Path, pipeline: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    draw(tmp_path / "edits" / "s0.geojson", ("keep", KEEP), ("remove", REMOVE))
    work(slides, out, pipeline, until="qc", qc_edits=str(tmp_path / "edits"))
    (name,) = (path.name for path in out.glob("qc_*.csv"))
    area = {key: float(row["usable_mm2"]) for key, row in table(out / name).items()}
    assert area["s0"] != area["s1"]
    rules = {
        "edited_areas>1": {"s0"},
        "edited_areas<1": {"s1"},
        f"usable_mm2<{max(area.values())}": {min(area, key=area.__getitem__)},
    }
    for rule, excluded in rules.items():
        summary = work(slides, out, pipeline, until="qc", qc_fail=(rule,))
        got = {key for key, value in states(summary).items() if value == "excluded"}
        assert got == excluded, (rule, states(summary))
        failing = {key for key, row in table(out / name).items() if row["fails"]}
        assert failing == excluded


def test_a_mistyped_column_of_a_check_that_judged_no_slide_is_named_once(
    slides: Path, tmp_path: Path
) -> None:
    """Each slide's line says that the check did not judge it, which hides the mistake."""
    coarse = tmp_path / "coarse.toml"
    checks = ("tissue", "folds", "bubbles")
    tables = "".join(f'[[check]]\nkind = "{kind}"\n' for kind in checks)
    coarse.write_text(f'name = "coarse"\nwork_mpp = 16.0\nwork_from = "mpp"\n{tables}')
    messages: list[str] = []
    summary = work(
        slides,
        tmp_path / "out",
        str(coarse),
        until="qc",
        qc_fail=("folds_removed_percnet>0", "bubbles>0.5", "edited_areas>9"),
        on_message=messages.append,
    )
    assert set(states(summary).values()) == {"done"}
    (note,) = (line for line in messages if "to no slide" in line)
    assert note.startswith("rule 'folds_removed_percnet>0' was applied to no slide")
    assert "did you mean 'folds_removed_percent'?" in note
    (page,) = (tmp_path / "out").glob("qc_*.html")
    assert html.unescape(page.read_text()).count(note) == 1


def test_a_rule_for_verdicts_on_a_column_that_no_slide_has_is_named_on_the_page(
    slides: Path, pipeline: str, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.toml"
    names = ("dark>2", "drak>2", "edited_areas>5", "bright_unjudged_percent>2")
    rules.write_text(
        "".join(f'[[verdict]]\nwords = "x"\nrule = "{name}"\n' for name in names)
    )
    work(slides, tmp_path / "out", pipeline, until="qc", qc_rules=str(rules))
    (page,) = (tmp_path / "out").glob("qc_*.html")
    notes = re.findall(r"the rule [^<]* never applies[^<]*", page.read_text())
    (note,) = map(html.unescape, notes)
    assert note.startswith("the rule 'drak>2' for verdicts never applies, because no ")
    assert "did you mean 'dark'?" in note


def test_what_is_stored_is_used_until_a_file_or_the_word_none_takes_it_away(
    slides: Path, pipeline: str, tmp_path: Path, checks: Checks
) -> None:
    out = tmp_path / "out"
    edits = tmp_path / "edits"
    work(slides, out, pipeline)
    plain = (folder_of(out, "s0") / QC_FILE).read_bytes()
    draw(edits / "s0.geojson", ("keep", KEEP))
    work(slides, out, pipeline, qc_edits=str(edits))
    edited = (folder_of(out, "s0") / QC_FILE).read_bytes()
    assert edited != plain
    tiles = (next(out.glob("*px*")) / "tiles" / "s0.h5").read_bytes()

    def stays() -> None:
        assert (folder_of(out, "s0") / QC_FILE).read_bytes() == edited
        assert (next(out.glob("*px*")) / "tiles" / "s0.h5").read_bytes() == tiles

    work(slides, out, pipeline)
    stays()
    # a folder that has a file for the other slide alone
    draw(tmp_path / "other" / "s1.geojson", ("remove", REMOVE))
    work(slides, out, pipeline, qc_edits=str(tmp_path / "other"))
    stays()
    assert len(load_qc(folder_of(out, "s1")).edits) == 1
    # the checks again, and the corrections with them
    runs = checks.runs
    work(slides / "s0.svs", out, pipeline, resume=False)
    assert checks.runs == runs + 1
    stays()
    # a file without corrections
    draw(edits / "s0.geojson")
    work(slides, out, pipeline, qc_edits=str(edits))
    assert (folder_of(out, "s0") / QC_FILE).read_bytes() == plain
    assert len(load_qc(folder_of(out, "s1")).edits) == 1
    work(slides, out, pipeline, qc_edits="none")
    assert not load_qc(folder_of(out, "s1")).edits
    assert checks.runs == 3


def test_a_slide_whose_file_is_gone_is_named_as_one_that_stays_corrected(
    slides: Path, pipeline: str, tmp_path: Path
) -> None:
    """The slide is named by the id that the folder has given it."""
    out = tmp_path / "out"
    edits = tmp_path / "edits"
    same_names = []
    for number, slide in enumerate(sorted(slides.glob("*.svs"))):
        path = tmp_path / str(number) / "same.svs"
        path.parent.mkdir()
        same_names.append(path)
        os.link(slide, path)
    work(same_names[:1], out, pipeline, until="qc")
    draw(edits / "same.geojson", ("keep", KEEP))
    lines: list[str] = []
    chosen = {"until": "qc", "qc_edits": str(edits), "on_message": lines.append}
    summary = work(same_names, out, pipeline, **chosen)
    assert "same" in states(summary) and len(states(summary)) == 2
    assert len(load_qc(folder_of(out, "same")).edits) == 1
    assert not any("stored corrections" in line for line in lines)
    (other,) = states(summary).keys() - {"same"}
    (edits / "same.geojson").unlink()
    draw(edits / f"{other}.geojson", ("remove", REMOVE))
    work(same_names, out, pipeline, **chosen)
    assert [line for line in lines if "stored corrections" in line] == [
        "qc_edits: same keeps its stored corrections, because there is no file; "
        "a file without annotations removes them"
    ]


def test_a_later_grid_and_a_run_after_qc_alone_take_the_corrected_masks(
    slides: Path, pipeline: str, tmp_path: Path, checks: Checks
) -> None:
    out = tmp_path / "out"
    draw(tmp_path / "edits" / "s1.geojson", ("remove", REMOVE))
    config = replace_flat(
        QcRunConfig(), {"qc": pipeline, "qc_edits": str(tmp_path / "edits")}
    )
    check_slides(slides, out=out, config=config)
    assert checks.runs == 2
    # HistoQC's table has no column of ours
    histoqc = replace_flat(config, {"write": ("histoqc",), "qc_edits": None})
    check_slides(slides, out=out, config=histoqc)
    checks.runs = 2
    parquet = replace_flat(config, {"write": ("parquet",), "qc_edits": None})
    check_slides(slides, out=out, config=parquet)
    (path,) = out.glob("qc_*.parquet")
    column = pq.read_table(path).column("edited_areas")
    assert str(column.type) == "int64" and column.to_pylist() == [0, 1]
    assert "edited_areas" not in (out / "results.tsv").read_text()
    assert "edited_areas" in next(out.glob("qc_*.csv")).read_text()
    work(slides, out, pipeline, tile_px=128)
    work(slides, out, pipeline, tile_px=64)
    assert checks.runs == 2
    for grid in ("128px_0.5mpp", "64px_0.5mpp"):
        (folder,) = out.glob(f"{grid}*")
        corners = read_tiles(folder / "tiles" / "s1.h5").coords_l0
        tile_px = int(grid.partition("px")[0])
        inside = (corners >= [900, 700]).all(axis=1)
        inside &= (corners + tile_px <= [1700, 1300]).all(axis=1)
        assert len(corners) and not inside.any()
        # without the correction there are some
        other = read_tiles(folder / "tiles" / "s0.h5").coords_l0
        assert ((other >= [900, 700]) & (other <= [1500, 1100])).all(axis=1).any()


def test_the_same_areas_in_another_file_change_no_result(
    slides: Path, pipeline: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    path = draw(tmp_path / "s0.geojson", ("keep dark", KEEP), ("remove", REMOVE))
    work(slides / "s0.svs", out, pipeline, qc_edits=str(path))
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*.h5")}
    before |= {p: p.stat().st_mtime_ns for p in out.rglob(QC_FILE)}
    turned = shapely.Polygon(
        list(KEEP.exterior.coords)[2:-1] + list(KEEP.exterior.coords)[:2]
    )
    again = draw(
        tmp_path / "more" / "s0.geojson",
        ("Remove", REMOVE),
        ("Keep: dark", turned),
        name="looked at twice",
    )
    work(slides / "s0.svs", out, pipeline, qc_edits=str(again))
    assert {p: p.stat().st_mtime_ns for p in before} == before


BAD = {
    "class": (
        [("Tumor", KEEP)],
        r"is one of glass, dark, bright, got 'Tumor' as feature 0 'Tumor' of .*s0.geojson",
    ),
    "no class": ([("", KEEP)], r"'keep CHECK'.*, got no class as feature 0 of "),
    "check": ([("keep drak", KEEP)], r"got 'drak' as feature 0 .*did you mean 'dark'"),
    "point": (
        [("keep", shapely.Point(5, 5))],
        r"must be areas, got a point as feature 0",
    ),
    "outside": (
        [("keep", shapely.box(9000, 0, 9900, 50))],
        r"must lie on the slide of 2400 x 1700",
    ),
    "crossed": (
        [("keep", shapely.Polygon([(0, 0), (90, 90), (90, 0), (0, 90)]))],
        r"must not cross itself.*; draw it again as areas that do not cross themselves$",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_is_no_correction_fails_its_slide_alone_and_leaves_its_results(
    slides: Path, pipeline: str, tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "out"
    edits = tmp_path / "edits"
    draw(edits / "s0.geojson", ("keep dark", KEEP))
    work(slides, out, pipeline, qc_edits=str(edits))
    stored = (folder_of(out, "s0") / QC_FILE).read_bytes()
    areas, message = BAD[kind]
    draw(edits / "s0.geojson", ("remove", REMOVE), *areas)
    if kind == "outside":
        draw(edits / "s0.geojson", *areas)
    draw(edits / "s1.geojson", ("remove", REMOVE))
    summary = work(slides, out, pipeline, qc_edits=str(edits))
    assert summary.exit_code == 3
    assert states(summary) == {"s0": "failed", "s1": "done"}
    (failed,) = [r for r in summary.results if r.status == "failed"]
    assert re.search(message.replace("feature 0", r"feature \d"), failed.error), (
        failed.error
    )
    assert (folder_of(out, "s0") / QC_FILE).read_bytes() == stored
    assert len(load_qc(folder_of(out, "s1")).edits) == 1
    # the mended file is taken
    draw(edits / "s0.geojson", ("remove", REMOVE))
    assert work(slides, out, pipeline, qc_edits=str(edits)).exit_code == 0


def test_two_files_of_one_slide_and_a_text_that_is_no_json_fail_it(
    slides: Path, pipeline: str, tmp_path: Path
) -> None:
    edits = tmp_path / "edits"
    draw(edits / "s0.geojson", ("keep", KEEP))
    draw(edits / "s0.svs.geojson", ("remove", REMOVE))
    (edits / "s1.json").write_text("{")
    summary = work(slides, tmp_path / "out", pipeline, qc_edits=str(edits))
    errors = {r.slide_id: r.error for r in summary.results}
    assert (
        "must have one file for each slide, got 's0.geojson', 's0.svs.geojson'"
        in errors["s0"]
    )
    assert "qc_edits must be readable" in errors["s1"]


def test_a_source_that_fits_no_slide_is_refused_and_left_over_files_are_named(
    slides: Path, pipeline: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="must be a file, a folder, or a column"):
        work(slides, out, pipeline, qc_edits=str(tmp_path / "none here"))
    with pytest.raises(ConfigError, match="must be a file, a folder, or a column"):
        plan(slides, qc=pipeline, qc_edits=str(tmp_path / "none here"))
    draw(tmp_path / "edits" / "x.geojson", ("keep", KEEP))
    with pytest.raises(ConfigError, match="got none for s0, s1"):
        work(slides, out, pipeline, qc_edits=str(tmp_path / "edits"))
    with pytest.raises(ConfigError, match="one file for 2 slides"):
        work(slides, out, pipeline, qc_edits=str(tmp_path / "edits" / "x.geojson"))
    draw(tmp_path / "edits" / "s1.geojson", ("keep", KEEP))
    with pytest.raises(ConfigError, match="must be combined with qc"):
        work(slides, out, "off", qc_edits=str(tmp_path / "edits"))
    messages: list[str] = []
    work(
        slides,
        out,
        pipeline,
        until="qc",
        qc_edits=str(tmp_path / "edits"),
        on_message=messages.append,
    )
    assert any(
        "x.geojson" in text and "no slide of this run" in text for text in messages
    )


def test_corrections_that_are_stored_with_other_checks_are_named(
    slides: Path, pipeline: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    path = draw(tmp_path / "s0.geojson", ("keep dark", KEEP), ("remove", REMOVE))
    work(slides / "s0.svs", out, pipeline, until="qc", qc_edits=str(path))
    (first,) = out.glob("slides/s0/qc_*")
    summary = work(slides / "s0.svs", out, pipeline, until="qc", qc_strict=True)
    text = str(summary.results[0].facts["warnings"])
    assert f"{first.name} has 2 corrected areas, which {first.name}_strict" in text
    assert "to use them, pass their file" in text
    summary = work(
        slides / "s0.svs", out, pipeline, until="qc", qc_strict=True, qc_edits=str(path)
    )
    assert "corrected areas" not in str(summary.results[0].facts["warnings"])
    assert len(load_qc(out / "slides" / "s0" / f"{first.name}_strict").edits) == 2


def test_a_column_of_the_cohort_names_the_files(
    slides: Path, pipeline: str, tmp_path: Path
) -> None:
    draw(tmp_path / "drawn" / "anything.geojson", ("keep", KEEP))
    cohort = tmp_path / "cohort.csv"
    cohort.write_text(
        "slide_path,qc_edits\n"
        f"{slides / 's0.svs'},drawn/anything.geojson\n"
        f"{slides / 's1.svs'},\n"
    )
    out = tmp_path / "out"
    assert work(cohort, out, pipeline, until="qc", qc_edits="qc_edits").exit_code == 0
    assert [len(load_qc(folder_of(out, name)).edits) for name in ("s0", "s1")] == [1, 0]


def features_of(path: Path) -> list[dict[str, Any]]:
    features: list[dict[str, Any]] = json.loads(path.read_text())["features"]
    return features


def write_features(path: Path, features: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    return path


def as_qupath(features: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Judge of the round trip: QuPath keeps coordinates as float32 and drops unknown properties."""
    known = (
        "objectType", "name", "color", "classification", "isLocked", "measurements", "metadata",
    )  # fmt: skip
    kept = []
    for number, feature in enumerate(features):
        area = shapely.geometry.shape(feature["geometry"])
        area = shapely.transform(area, lambda xy: xy.astype(np.float32).astype(float))
        kept.append(
            {
                "type": "Feature",
                "id": f"00000000-0000-4000-8000-{number:012d}",
                "geometry": json.loads(shapely.to_geojson(area)),
                "properties": {
                    name: value
                    for name, value in feature["properties"].items()
                    if name in known
                },
            }
        )
    return kept


def test_the_export_goes_through_qupath_and_back(
    slides: Path, pipeline: str, tmp_path: Path, checks: Checks
) -> None:
    out = tmp_path / "out"
    work(slides, out, pipeline)
    plain = (folder_of(out, "s0") / QC_FILE).read_bytes()
    export_qupath(out, tmp_path / "q1")
    exported = features_of(tmp_path / "q1" / "s0.geojson")
    classes = {
        f["properties"]["classification"]["name"]
        for f in exported
        if f["properties"]["objectType"] == "annotation"
    }
    assert classes == {"Usable tissue", "glass", "dark", "bright"}
    # as it is, it corrects nothing
    edits = tmp_path / "edits"
    write_features(edits / "s0.geojson", as_qupath(exported))
    work(slides, out, pipeline, qc_edits=str(edits))
    assert (folder_of(out, "s0") / QC_FILE).read_bytes() == plain

    drawn = features_of(
        draw(tmp_path / "d.geojson", ("keep dark", KEEP), metadata={"author": "Dr. A"})
    )
    write_features(edits / "s0.geojson", as_qupath([*exported, *drawn]))
    work(slides, out, pipeline, qc_edits=str(edits))
    (first,) = load_qc(folder_of(out, "s0")).edits
    assert (first.class_name, first.author, first.file) == (
        "keep dark",
        "Dr. A",
        "s0.geojson",
    )
    edited = (folder_of(out, "s0") / QC_FILE).read_bytes()

    # the second export has the correction; with one more it is a second correction
    export_qupath(out, tmp_path / "q2")
    exported = features_of(tmp_path / "q2" / "s0.geojson")
    write_features(edits / "s0.geojson", as_qupath(exported))
    work(slides, out, pipeline, qc_edits=str(edits))
    assert (folder_of(out, "s0") / QC_FILE).read_bytes() == edited
    drawn = features_of(
        draw(tmp_path / "d.geojson", ("remove", REMOVE), metadata={"author": "Dr. B"})
    )
    write_features(edits / "s0.geojson", as_qupath([*exported, *drawn]))
    work(slides, out, pipeline, qc_edits=str(edits))
    one, two = load_qc(folder_of(out, "s0")).edits
    assert one == first, "who, when and the file of the first correction stay"
    assert (two.class_name, two.author) == ("remove", "Dr. B")
    assert checks.runs == 2
    # outlines of the first export, from before any correction, are still known
    old = features_of(tmp_path / "q1" / "s0.geojson")
    write_features(edits / "s0.geojson", as_qupath([*old, *drawn]))
    assert work(slides, out, pipeline, qc_edits=str(edits)).exit_code == 0
    assert len(load_qc(folder_of(out, "s0")).edits) == 1


@pytest.mark.parametrize("change", ["erased", "moved"])
def test_a_changed_outline_of_the_export_is_refused(
    slides: Path, pipeline: str, tmp_path: Path, change: str
) -> None:
    out = tmp_path / "out"
    work(slides / "s0.svs", out, pipeline)
    export_qupath(out, tmp_path / "q")
    features = features_of(tmp_path / "q" / "s0.geojson")
    (outline,) = [
        f
        for f in features
        if f["properties"].get("classification", {}).get("name") == "dark"
    ]
    assert outline["properties"]["isLocked"] is True
    area = shapely.geometry.shape(outline["geometry"])
    other = (
        area.difference(KEEP)
        if change == "erased"
        else shapely.affinity.translate(area, 20, 0)
    )
    outline["geometry"] = json.loads(shapely.to_geojson(other))
    path = write_features(tmp_path / "s0.geojson", features)
    summary = work(slides / "s0.svs", out, pipeline, qc_edits=str(path))
    assert "got a changed one as feature" in summary.results[0].error
    assert "'dark' of" in summary.results[0].error


def test_a_death_between_removal_and_writing_loses_no_stored_correction(
    slides: Path, pipeline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    path = draw(tmp_path / "s0.geojson", ("keep dark", KEEP))
    work(slides / "s0.svs", out, pipeline, qc_edits=str(path))
    edited = (folder_of(out, "s0") / QC_FILE).read_bytes()
    other = draw(tmp_path / "two" / "s0.geojson", ("remove", REMOVE))
    with monkeypatch.context() as patch:

        def dies(*arguments: object, **settings: object) -> None:
            raise KeyboardInterrupt

        patch.setattr("thinsection.stages.checks.write_values", dies)
        with pytest.raises(KeyboardInterrupt):
            work(slides / "s0.svs", out, pipeline, qc_edits=str(other))
    ledger = json.loads((out / "slides" / "s0" / "slide.json").read_text())
    assert not any("/qc" in address for address in ledger["stages"])
    assert (folder_of(out, "s0") / QC_FILE).read_bytes() == edited
    work(slides / "s0.svs", out, pipeline)
    assert (folder_of(out, "s0") / QC_FILE).read_bytes() == edited


@pytest.mark.check  # some twenty killed runs
def test_killed_at_every_rename_the_same_command_leaves_the_same_corrections(
    slides: Path, pipeline: str, tmp_path: Path
) -> None:
    first = draw(tmp_path / "1" / "s0.geojson", ("keep dark", KEEP))
    second = draw(tmp_path / "2" / "s0.geojson", ("remove", REMOVE))
    settings = {"qc": pipeline, "until": "tiles", "tile_px": 64}
    child = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("kill_at_rename.py")),
            str(slides / "s0.svs"),
            str(tmp_path / "out"),
            json.dumps(settings | {"qc_edits": str(second)}),
            json.dumps(settings | {"qc_edits": str(first)}),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        check=False,
    )
    assert child.returncode == 0, child.stderr
    lines = dict(line.split() for line in child.stdout.splitlines())
    reference = lines.pop("reference")
    assert len(lines) >= 7
    assert set(lines.values()) == {reference}


def test_corrections_outlive_other_checks_under_the_same_name(
    slides: Path,
    pipeline: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    checks: Checks,
) -> None:
    out = tmp_path / "out"
    path = draw(tmp_path / "s0.geojson", ("keep dark", KEEP))
    work(slides / "s0.svs", out, pipeline, qc_edits=str(path), until="qc")
    # another version of Thinsection: its checks answer otherwise
    monkeypatch.setattr("thinsection.qc.pipeline._VERSION", 1_000_000)
    monkeypatch.setattr(
        "thinsection.stages.checks.QcStage.name", folder_of(out, "s0").name[3:]
    )
    summary = work(slides / "s0.svs", out, pipeline, until="qc")
    assert "--overwrite" in summary.results[0].error
    summary = work(slides / "s0.svs", out, pipeline, until="qc", overwrite=True)
    assert summary.exit_code == 0
    assert checks.runs == 2
    assert len(load_qc(folder_of(out, "s0")).edits) == 1


def test_corrections_are_never_overruled_and_the_readers_folder_stays_as_it_is(
    slides: Path, pipeline: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    everything = shapely.box(-10, -10, 2500, 1800)
    path = draw(tmp_path / "edits" / "s0.geojson", ("remove dark", everything))
    path.chmod(0o444)
    before = sorted(path.parent.iterdir())
    work(slides / "s0.svs", out, pipeline, qc_edits=str(path.parent), until="qc")
    result = load_qc(folder_of(out, "s0"))
    assert not result.tissue.mask.any()
    assert result.masks["dark"].all()
    assert "all tissue was removed by hand" in result.row["warnings"]
    assert sorted(path.parent.iterdir()) == before
    with zipfile.ZipFile(folder_of(out, "s0") / QC_FILE) as file:
        (feature,) = json.loads(file.read("edits.geojson"))["features"]
        assert "edited_mask_use.tif" not in file.namelist(), "an empty mask has no file"
        assert json.loads(file.read("qc.json"))["masks"]["edited_mask_use"] == 0
        with file.open("dark.tif") as member, Image.open(member) as picture:
            assert result.checked is not None
            np.testing.assert_array_equal(
                np.array(picture), result.checked.masks["dark"]
            )
    metadata = feature["properties"]["metadata"]
    assert metadata["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    written = datetime.fromisoformat(metadata["time"])
    assert abs(written.timestamp() - path.stat().st_mtime) < 1
    assert metadata["author"] == path.owner()


def test_pictures_and_the_viewer_show_the_corrections(
    slides: Path, pipeline: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    path = draw(
        tmp_path / "s0.geojson",
        ("keep dark", KEEP),
        ("remove", REMOVE),
        ("remove", KEEP),
    )
    work(slides / "s0.svs", out, pipeline, qc_edits=str(path), qc_pictures=True)
    folder = folder_of(out, "s0")
    result = load_qc(folder)
    for name, mask in (("mask_use", result.mask_use), ("dark", result.masks["dark"])):
        with Image.open(folder / f"{name}.png") as picture:
            np.testing.assert_array_equal(np.array(picture), mask)
    layers = {
        layer.name: layer
        for layer in layers_of(
            open_results(out), "s0", clusters=2, budget_bytes=1 << 20
        )
        if layer.kind == "outlines"
    }
    names = ["Usable tissue", "glass", "dark", "bright", "keep dark", "remove"]
    assert list(layers) == names
    shapes = [shapely.geometry.shape(s) for s in json.loads(layers["remove"].read())]
    assert shapely.union_all(shapes).symmetric_difference(REMOVE | KEEP).area == 0
    usable = json.loads(layers["Usable tissue"].read())
    inside = centres_in(shapely.geometry.shape(usable[0]), result.mask_use.shape)
    assert (inside & result.mask_use).sum() / (inside | result.mask_use).sum() > 0.995


def test_a_lost_file_of_corrections_is_not_taken_for_none(
    slides: Path, pipeline: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    path = draw(tmp_path / "s0.geojson", ("keep dark", KEEP))
    work(slides / "s0.svs", out, pipeline, qc_edits=str(path))
    stored = folder_of(out, "s0") / QC_FILE
    whole = stored.read_bytes()
    stored.write_bytes(whole[:-100])
    error = work(slides / "s0.svs", out, pipeline).results[0].error
    assert "stored corrections of 's0' must be in qc.zip, got others or none" in error
    work(slides / "s0.svs", out, pipeline, qc_edits=str(path))
    assert stored.read_bytes() == whole
    # and where they are dropped, the slide is checked without them
    stored.write_bytes(whole[:-100])
    assert work(slides / "s0.svs", out, pipeline, qc_edits="none").exit_code == 0
    assert not load_qc(folder_of(out, "s0")).edits


def test_corrections_of_another_file_of_the_slide_are_not_taken(
    slides: Path, pipeline: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    slide = tmp_path / "a.svs"
    slide.write_bytes((slides / "s0.svs").read_bytes())
    path = draw(tmp_path / "a.geojson", ("keep dark", KEEP))
    work(slide, out, pipeline, qc_edits=str(path))
    slide.write_bytes((slides / "s1.svs").read_bytes())
    error = work(slide, out, pipeline, overwrite=True).results[0].error
    assert "must belong to the slide's file" in error
    assert work(slide, out, pipeline, overwrite=True, qc_edits=str(path)).exit_code == 0
    assert len(load_qc(folder_of(out, "a")).edits) == 1


def test_embeddings_of_tiles_that_stay_are_not_made_again(
    slides: Path, pipeline: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    counts: list[int] = []

    def note(event: RunEvent) -> None:
        if event.kind == "tiles":
            counts.append(event.num_tiles)

    settings: dict[str, Any] = {
        "until": "embeddings", "pretrained": False, "tile_px": 128, "on_event": note,
    }  # fmt: skip
    work(slides / "s0.svs", out, pipeline, **settings)
    assert sum(counts) > 10
    counts.clear()
    small = shapely.box(900, 700, 1500, 1100)
    path = draw(tmp_path / "s0.geojson", ("remove", small))
    work(slides / "s0.svs", out, pipeline, qc_edits=str(path), **settings)
    assert sum(counts) == 0, "fewer tiles, and none of them is new"
    work(slides / "s0.svs", out, pipeline, qc_edits="none", **settings)
    assert 0 < sum(counts) < 30


@pytest.mark.parametrize("by", ["run", "qc"])
def test_a_correction_keeps_the_embeddings_of_grids_that_are_not_of_the_run(
    slides: Path, pipeline: str, tmp_path: Path, by: str
) -> None:
    out = tmp_path / "out"
    counts: list[int] = []
    messages: list[str] = []

    def note(event: RunEvent) -> None:
        if event.kind == "tiles":
            counts.append(event.num_tiles)
        if event.result is not None:
            text = str(event.result.facts["warnings"])
            messages.extend([text] if "were removed" in text else [])

    settings: dict[str, Any] = {
        "until": "embeddings", "pretrained": False, "on_event": note,
    }  # fmt: skip
    for tile_px in (256, 128):
        work(slides / "s0.svs", out, pipeline, tile_px=tile_px, **settings)
    assert list(out.glob("128px*/features_*/s0.h5")) and not messages
    small = shapely.box(900, 700, 1500, 1100)
    path = draw(tmp_path / "s0.geojson", ("remove", small))
    if by == "run":
        work(
            slides / "s0.svs",
            out,
            pipeline,
            qc_edits=str(path),
            tile_px=256,
            **settings,
        )
        wanted = 1
    else:
        changed = replace_flat(QcRunConfig(), {"qc": pipeline, "qc_edits": str(path)})
        check_slides(slides / "s0.svs", out=out, config=changed, on_event=note)
        wanted = 2
    assert len(messages) == 1 and messages[0].count("px_0.5mpp") == wanted
    assert "128px_0.5mpp" in messages[0]
    logs = sorted(out.glob("records/*/run.log"))
    assert messages[0] in logs[-1].read_text()
    assert messages[0] not in (out / "summary.csv").read_text()
    # nothing of the other grid is shown as valid
    assert not list(out.glob("128px*/*/*.h5"))
    assert not any("128px" in grid for grid in open_results(out).grids)
    counts.clear()
    work(slides / "s0.svs", out, pipeline, tile_px=128, **settings)
    assert sum(counts) == 0, "fewer tiles, and none of them is new"
    left = {path.name for path in out.glob("128px*/features_*/*")}
    assert left == {"s0.h5"}
