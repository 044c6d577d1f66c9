"""Several grids and embeddings in one folder: the newest run's is taken, and it is said."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.shell import thinsection

import thinsection as ts
from thinsection.errors import ChoiceError
from thinsection.files.atomic import read_json, write_json
from thinsection.results import choice
from thinsection.results.choice import newest_of
from thinsection.results.folder import open_results
from thinsection.results.records import Record
from thinsection.results.scene import _mask_files
from thinsection.testing.synthetic import write_he_slide

PLAIN = "128px_0.5mpp"
CHECKED = "128px_0.5mpp_qc-auto"
LITE0 = "features_efficientnet_lite0_seed0"
SMALL: dict[str, Any] = {"memory": "256MiB", "pretrained": False, "tile_px": 128}


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slides")
    for seed in range(2):
        write_he_slide(folder / f"s{seed}.svs", (700, 600), seed=seed, downsamples=(1,))
    return folder


@pytest.fixture(scope="module")
def two_days(slides: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and on the second day the run with quality control, into one folder."""
    out = tmp_path_factory.mktemp("two") / "results"
    cohort = out.parent / "cohort.csv"
    rows = [f"{slides / f's{number}.svs'},p{number}\n" for number in range(2)]
    cohort.write_text("slide_path,patient_id\n" + "".join(rows))
    ts.run([cohort], out=out, **SMALL)
    ts.run([cohort], out=out, qc="auto", **SMALL)
    return out


@pytest.fixture
def copied(two_days: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_days, tmp_path / "copied"))


class Lines(logging.Handler):
    """Keeps the lines about choices, which Python shows on standard error."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[list[str]]:
    handler = Lines()
    logger = logging.getLogger(choice.__name__)
    logger.addHandler(handler)
    yield handler.texts
    logger.removeHandler(handler)


def test_the_grid_of_the_newest_run_is_taken_and_said_once(
    two_days: Path, lines: list[str]
) -> None:
    results = open_results(two_days)
    assert results.grids == (PLAIN, CHECKED)
    for slide_id in results.slides:
        stored = results.tiles(slide_id).coords_l0
        assert (stored == results.tiles(slide_id, CHECKED).coords_l0).all()
    assert lines == [f'using {CHECKED}, the newest of 2; grid="..." chooses']
    assert results.choose_grid(PLAIN) == PLAIN
    assert results.choose_features() == f"{CHECKED}/{LITE0}"
    assert len(lines) == 2


def test_the_first_settings_again_are_the_newest_run(
    copied: Path, slides: Path, lines: list[str]
) -> None:
    ts.run([slides], out=copied, **SMALL)
    assert open_results(copied).choose_grid() == PLAIN


def test_a_folder_of_an_older_version_has_its_grids_from_the_settings(
    copied: Path, lines: list[str]
) -> None:
    for path in copied.glob("records/*/run.json"):
        document = read_json(path)
        assert len(document.pop("grids")) == 1
        write_json(path, document)
    assert open_results(copied).choose_grid() == CHECKED
    assert open_results(copied).choose_features() == f"{CHECKED}/{LITE0}"


def test_two_grids_of_one_run_are_listed_with_what_they_are(
    slides: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ts.run([slides], out=out, until="tiles", tile_mpp=["0.5", "1.0"], **SMALL)
    with pytest.raises(ChoiceError, match=r"2 slides, \d+ tiles\), 128px_1mpp \(2 sl"):
        open_results(out).tiles("s0")
    ended = thinsection("export", "qupath", out, "--out", tmp_path / "qupath")
    assert ended.returncode == 2
    assert "got None; pass --grid 128px_0.5mpp" in ended.stderr


def test_what_no_record_tells_is_asked(copied: Path) -> None:
    shutil.rmtree(copied / "records")
    with pytest.raises(ChoiceError, match=rf'pass grid="{PLAIN}"'):
        open_results(copied).choose_grid()


def test_the_newest_slide_encoder_is_taken(copied: Path, lines: list[str]) -> None:
    ended = thinsection("aggregate", copied, "--slide-encoder", "max")
    assert ended.returncode == 0, ended.stderr
    results = open_results(copied)
    # both grids were pooled by one command
    with pytest.raises(ChoiceError, match="slide features must match one of"):
        results.slide_embeddings()
    assert results.slide_embeddings(CHECKED)[0] == results.slides
    (line,) = lines
    assert line.startswith(f"using {CHECKED}/slide_features_max-efficientnet_lite0")


@pytest.mark.parametrize("order", [1, -1])
def test_the_time_in_the_record_decides_and_of_a_merge_that_of_its_runs(
    tmp_path: Path, order: int
) -> None:
    settings = {"config": {}, "command": "run"}
    run = {"started": "2026-01-03", "grids": ["new"], **settings}
    merged = {
        "started": "2026-01-09",
        "grids": ["old"],
        "merged_from": [{"started": "2026-01-01"}, {"started": "2026-01-02"}],
        **settings,
    }
    records = [Record(tmp_path, run), Record(tmp_path, merged)][::order]
    assert newest_of(["old", "new"], records) == ["new"]
    assert newest_of(["old"], records) == ["old"]
    assert newest_of(["other"], records) == []


def test_nothing_is_guessed_where_a_newer_run_is_unreadable(tmp_path: Path) -> None:
    older = {"started": "2026-01-01", "grids": ["a"], "config": {}}
    of_lost_file = {"tiles": {}, "qc": {"qc": str(tmp_path / "gone.toml")}}
    newer = {"started": "2026-01-02", "config": of_lost_file}
    records = [Record(tmp_path, older), Record(tmp_path, newer)]
    assert newest_of(["a", "b"], records) == []


def test_every_command_that_needs_one_grid_takes_the_newest(
    copied: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    commands = [
        ("export", "qupath", copied, "--out", out / "qupath"),
        ("export", "jpeg", copied, "--out", out / "jpeg"),
        ("export", "trident", copied, "--out", out / "trident"),
        ("heatmap", "tissue_fraction", copied),
    ]
    for command in commands:
        ended = thinsection(*command)
        assert ended.returncode == 0, ended.stderr
        told = [line for line in ended.stdout.splitlines() if "the newest of 2" in line]
        flag = "--features" if command[1] in ("jpeg", "trident") else "--grid"
        assert len(told) == 1 and told[0].endswith(f"; {flag} chooses"), told
        assert told[0].startswith(f"using {CHECKED}"), told


def test_python_draws_the_tiles_of_the_newest_run(
    two_days: Path, lines: list[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    results = open_results(two_days)
    ax = ts.plot.tiles(results, "s0")
    num_tiles = len(results.tiles("s0", CHECKED).coords_l0)
    legend = ax.get_legend()
    assert legend is not None
    assert f"{num_tiles:,} tiles" in [text.get_text() for text in legend.get_texts()]
    assert len(lines) == 1
    masks = {}
    for grid in (PLAIN, CHECKED):
        (masks[grid],) = _mask_files(results.ledgers["s0"], grid)
    assert masks[PLAIN].name == "tissue.png"
    assert masks[CHECKED].parent.name == "qc_auto"


def test_a_run_pools_the_patients_of_its_own_grid(two_days: Path) -> None:
    messages: list[str] = []
    cohort = two_days.parent / "cohort.csv"
    ts.run(
        [cohort],
        out=two_days,
        qc="auto",
        patients="late",
        on_message=messages.append,
        **SMALL,
    )
    assert "2 of 2 patients have an embedding" in messages
    folders = [path.parent.name for path in two_days.glob("*/patient_features_*")]
    assert folders == [CHECKED]
