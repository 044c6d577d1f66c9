"""What no check judged and what is only shown, in the tables and folders of a run."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.qc.slides import needs_real_slide, real_slide
from tests.support.qc_csv import read_qc_csv
from tests.support.smooth_tissue import with_smooth_tissue

import thinsection as ts
from thinsection.config import replace_flat
from thinsection.errors import ConfigError
from thinsection.report.qc_files import load_qc
from thinsection.run.qc_run import QcRunConfig, chosen_pipeline
from thinsection.testing.synthetic import write_he_slide

tifffile = pytest.importorskip("tifffile")


def write_slide(path: Path, rgb: np.ndarray, mpp: float) -> None:
    per_cm = 10_000 / mpp
    tifffile.imwrite(
        path,
        rgb,
        tile=(256, 256),
        compression="jpeg",
        photometric="rgb",
        resolution=(per_cm, per_cm),
        resolutionunit="CENTIMETER",
    )


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real section, the same with smooth tissue, and the same at 2 µm/px."""
    folder = tmp_path_factory.mktemp("slides")
    slide = real_slide()
    rgb = slide.read_region((0, 0), 0, slide.size)
    rows, columns = np.mgrid[: rgb.shape[0], : rgb.shape[1]]
    where = np.hypot(rows - 1300, columns - 1150) < 450
    write_slide(folder / "plain.tif", rgb, 0.5)
    muscle = with_smooth_tissue(rgb, where, "muscle", 31)
    write_slide(folder / "muscle.tif", muscle, 0.5)
    coarse = np.asarray(Image.fromarray(rgb).reduce(4))
    write_slide(folder / "coarse.tif", coarse, 2.0)
    return folder


def rows_of(path: Path) -> Mapping[str, Mapping[str, object]]:
    return {str(row["slide_id"]): row for row in read_qc_csv(path)}


@needs_real_slide
def test_tables_and_folders_of_runs_say_what_was_not_judged(
    slides: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ts.run(slides, out=out, qc="auto", until="tiles", tile_px=64, tile_mpp=2.0)
    rows = rows_of(out / "qc_auto.csv")
    assert rows.keys() == {"plain", "muscle", "coarse"}
    shares = {name: float(str(row["unjudged_percent"])) for name, row in rows.items()}
    assert shares["coarse"] == 1  # blur cannot be seen
    assert shares["muscle"] > shares["plain"] + 0.05
    assert rows["coarse"]["verdict"] == "look"
    assert "much of the tissue was not judged" in str(rows["coarse"]["why"])
    assert rows["plain"]["verdict"] == "good"
    results = ts.open_results(out)
    grid = results.choose_grid()
    for name, row in rows.items():
        result = load_qc(out / "slides" / name / "qc_auto")
        focus = result.unjudged["focus"].sum() / result.tissue.mask.sum()
        assert float(str(row["focus_unjudged_percent"])) == pytest.approx(focus)
        columns = results.tiles(name, grid).columns
        assert "qc_unjudged" in columns
        assert "qc_folds" in columns
        if name == "coarse":
            np.testing.assert_array_less(0.1, columns["qc_unjudged"])
    # the checks that remove what they only show have a folder, a table and tiles of their own
    ts.run(
        slides / "plain.tif",
        out=out,
        qc="auto",
        qc_remove=("folds", "dust"),
        until="tiles",
        tile_px=64,
        tile_mpp=2.0,
    )
    assert (out / "qc_auto_remove_dust_folds.csv").is_file()
    assert rows_of(out / "qc_auto.csv").keys() == rows.keys()
    removing = load_qc(out / "slides" / "plain" / "qc_auto_remove_dust_folds")
    assert removing.shown == frozenset()
    shown = load_qc(out / "slides" / "plain" / "qc_auto")
    assert shown.shown == {"folds", "dust"}
    np.testing.assert_array_equal(removing.masks["dust"], shown.masks["dust"])
    assert not (removing.mask_use & removing.masks["dust"]).any()


def test_a_name_that_cannot_be_removed_is_refused_before_work_starts(
    tmp_path: Path,
) -> None:
    write_he_slide(tmp_path / "a.svs", (600, 500), seed=1)
    with pytest.raises(ConfigError, match="qc_remove must be combined with qc"):
        ts.run(tmp_path / "a.svs", out=tmp_path / "out", qc_remove=("folds",))
    with pytest.raises(ConfigError, match="must be a check that only shows"):
        ts.run(
            tmp_path / "a.svs", out=tmp_path / "out", qc="auto", qc_remove=("focus",)
        )
    config = replace_flat(QcRunConfig(), {"qc_remove": ("fold",)})
    with pytest.raises(ConfigError, match="did you mean 'folds'"):
        chosen_pipeline(config)
    config = replace_flat(QcRunConfig(), {"qc_remove": ("folds",)})
    pipeline = chosen_pipeline(config)
    assert [check.name for check in pipeline.checks if not check.removes] == ["dust"]
