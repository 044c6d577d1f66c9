"""One bad slide stops no other, in every command that reads slides or results.

The commands come from the application: a new one must be walked here, or be named with a reason.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.bad_slides import DAMAGES, GOOD, Home, make_home
from typer.testing import CliRunner

from thinsection.cli.app import COMMANDS, build_app
from thinsection.errors import ThinsectionError
from thinsection.files.atomic import read_table

pytestmark = [pytest.mark.check, pytest.mark.timeout(1200)]

OF_EMBEDDINGS = frozenset(DAMAGES) - {"tiles"}
OF_TILES = frozenset(("ledger", "tiles"))
OF_ALL = frozenset(DAMAGES)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return make_home(tmp_path_factory.mktemp("home"))


@dataclass(frozen=True)
class Walk:
    """A command that is called with bad slides."""

    arguments: Callable[
        [Home, Path], list[object]
    ]  # after its name; given a new folder
    # kinds of damage that it must name; others it may leave aside
    damages: frozenset[str] = OF_EMBEDDINGS
    code: int = 3
    # it writes into the results folder, so it works on a copy
    writes_there: bool = False


def exported(name: str, damages: frozenset[str] = OF_EMBEDDINGS) -> Walk:
    ending = ".h5ad" if name == "anndata" else ""
    return Walk(lambda home, new: [home.bad, "--out", f"{new}/x{ending}"], damages)


def archives(home: Home) -> list[str]:
    """Slides in archives that are none."""
    text = home.slides / "text.svs"
    return [f"{scheme}://good0.svs::{text}" for scheme in ("zip", "tar")]


LABELS = ("--target", "label", "--folds", 2, "--inner-folds", 2, "--epochs", 1)
OF_COHORT = frozenset(("absent", "empty", "text", "BadZipFile", "ReadError"))
WALKS = {
    "train": Walk(
        lambda home, new: [
            *(home.bad, "--labels", home.labels, "--out", new / "e", *LABELS)
        ]
    ),
    "audit": Walk(
        lambda home, new: [home.bad, "--labels", home.labels, "--target", "label"]
    ),
    "predict": Walk(lambda home, new: [home.model, home.bad, "--out", new]),
    "predict --labels": Walk(
        lambda home, new: [
            *(home.model, home.bad, "--out", new, "--labels", home.new_labels)
        ]
    ),
    "heatmap": Walk(
        lambda home, new: [home.model, home.bad, "--out", new, "--top-tiles", 1],
        OF_ALL,
    ),
    "heatmap COLUMN": Walk(
        lambda home, new: [
            *("tissue_fraction", home.bad, "--out", new, "--top-tiles", 0)
        ],
        OF_TILES,
    ),
    "zeroshot": Walk(
        lambda home, new: [
            *(home.bad, "--prompts", home.prompts),
            *("--text-encoder", home.model.parents[1] / "small_clip"),
        ],
        writes_there=True,
    ),
    "aggregate": Walk(
        lambda home, new: [home.bad, "--slide-encoder", "mean"], writes_there=True
    ),
    "aggregate --out": Walk(
        lambda home, new: [home.bad, "--slide-encoder", "max", "--out", new]
    ),
    "merge": Walk(lambda home, new: [home.bad, "--out", new / "all"], OF_ALL),
    "verify": Walk(lambda home, new: [home.bad], OF_ALL, code=1),
    "export anndata": exported("anndata", OF_ALL),
    "export spatialdata": exported("spatialdata", OF_ALL),
    "export qupath": exported("qupath", OF_TILES),
    "export trident": exported("trident", OF_ALL),
    "export clam": exported("clam", OF_ALL),
    "export stamp": exported("stamp", OF_ALL),
    "export slide2vec": exported("slide2vec", OF_ALL),
    "export jpeg": exported("jpeg", OF_TILES),
    "export png": exported("png", OF_TILES),
    "export webdataset": exported("webdataset", OF_TILES),
    "probe slide": Walk(
        lambda home, new: [home.labels, "--embeddings", home.bad, "--out", new]
    ),
    "bench": Walk(lambda home, new: [home.suite, "--out", new]),
    "run": Walk(
        lambda home, new: [
            *(home.cohort, *archives(home), "--out", new, "--until", "tissue")
        ],
        OF_COHORT,
    ),
    "qc": Walk(
        lambda home, new: [home.cohort, *archives(home), "--out", new], OF_COHORT
    ),
    "convert": Walk(
        lambda home, new: [
            *sorted(home.slides.glob("*.svs")),
            *("--out", new / "converted"),
        ],
        frozenset(("cut", "empty", "text")),
    ),
    "deid": Walk(
        lambda home, new: [
            *sorted(home.slides.glob("*.svs")),
            *("--out", new / "copies"),
        ],
        frozenset(("empty", "text")),
    ),
}
NOT_WALKED = {
    "doctor": "reads no slide",
    "models check": "reads no slide",
    "models fingerprint": "reads no slide",
    "plan": "measures the machine for a minute; tests/run has bad slides",
    "labels": "reads a table",
    "ls": "lists; the failed slides are lines of it",
    "view": "a server; tests/view has bad slides",
    "segment": "`run` with a network, through the same boundary",
    "import": "tests/exchange/test_peer_import.py has bad files",
    "cells check": "tests/cells/test_check.py has files that cannot be read",
    "efficiency": "reads no slide",
    "cite": "reads no slide",
    "info": "a slide that no reader opens is a line of it",
    "relink": "tests/results/test_relink.py has missing slides and copies",
    "config": "reads no slide",
    "cache ls": "reads no slide",
    "cache verify": "reads no slide",
    "cache rm": "reads no slide",
    "model show": "reads no slide",
    "slurm submit": "`run` on a cluster",
    "slurm array-task": "`run` on a cluster",
    "slurm script": "reads no slide",
    "slurm status": "reads no slide",
    "slurm collect": "`run` on a cluster",
    "rescue": "another tool's command",
    "demo": "makes its own slide",
    "skill": "reads no slide",
    "frames": "reads no slide",
    "probe compare": "reads scores",
    "probe scores": "reads scores",
    "probe grid": "`bench` without a suite",
    # they load what `probe slide`, or a table of tiles, loads
    **dict.fromkeys(
        (
            *("probe linear", "probe knn", "probe fewshot", "probe tileset"),
            *("probe survival", "probe robustness", "probe segment"),
            *("probe regression", "probe retrieval", "probe calibration"),
            *("probe invariance", "probe clustering", "probe apd", "probe croma"),
        ),
        "tests/probe has bad files of each kind of data",
    ),
}


def leaves() -> Iterator[str]:
    """Every command of the application, with its group."""
    for name in COMMANDS:
        app = build_app([name])
        yield from (name for command in app.registered_commands if command.name == name)
        for group in app.registered_groups:
            assert group.typer_instance is not None
            for command in group.typer_instance.registered_commands:
                yield f"{name} {command.name}"


def test_every_command_is_walked_or_has_a_reason() -> None:
    walked = {" ".join(name.split()[:2]) for name in WALKS}
    walked |= {name.split()[0] for name in WALKS}
    commands = set(leaves())
    assert commands - walked - set(NOT_WALKED) == set()
    assert set(NOT_WALKED) - commands == set()
    assert set(NOT_WALKED) & set(WALKS) == set()


def call(name: str, arguments: list[object]) -> tuple[int, str]:
    """Exit code and output of a command, as `cli.main` gives them."""
    words = [word for word in name.split() if word.islower() and word[0] != "-"]
    command = [*words, *map(str, arguments)]
    result = CliRunner().invoke(build_app(command), command)
    if isinstance(result.exception, ThinsectionError):
        return 2, f"{result.output}\n{result.exception}"
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize("name", WALKS)
def test_a_bad_slide_is_left_out_and_named_and_the_others_are_done(
    name: str, home: Home, tmp_path: Path
) -> None:
    if name == "export spatialdata":
        pytest.importorskip("spatialdata", reason="spatialdata is not installed")
    walk = WALKS[name]
    if walk.writes_there:
        shutil.copytree(home.bad, tmp_path / "bad")
        home = Home(**{**vars(home), "bad": tmp_path / "bad"})
    new = tmp_path / "new"
    new.mkdir()
    code, output = call(name, walk.arguments(home, new))
    assert code == walk.code, output
    bad_lines = [
        line
        for line in output.splitlines()
        if "left out" in line or "failed" in line or "must" in line or "damage" in line
    ]
    for slide in walk.damages:
        assert slide in output, output
    assert "Traceback" not in output
    for slide in GOOD:
        assert not any(line.startswith(f"{slide}:") for line in bad_lines), output


def test_predictions_of_the_others_are_those_without_the_bad_ones(
    home: Home, tmp_path: Path
) -> None:
    """Damaged files change no number of another slide."""
    tables = []
    for results in (home.whole, home.bad):
        out = tmp_path / results.name
        call("predict", [home.model, results, "--out", out])
        (path,) = out.glob("predictions_*.csv")
        tables.append({row["slide_id"]: row for row in read_table(path)})
    whole, bad = tables
    assert {name: bad[name] for name in (*GOOD, "tiles")} == {
        name: whole[name] for name in (*GOOD, "tiles")
    }
    assert all(bad[name]["p_a"] == "" for name in OF_EMBEDDINGS)


def test_a_model_of_the_others_is_that_of_a_table_without_the_bad_ones(
    home: Home, tmp_path: Path
) -> None:
    some = tmp_path / "labels.csv"
    lines = home.labels.read_text().splitlines()
    kept = [line for line in lines if line.split(",")[0] not in OF_EMBEDDINGS]
    some.write_text("\n".join(kept) + "\n")
    folds = []
    for number, (results, labels) in enumerate(
        ((home.whole, some), (home.bad, home.labels))
    ):
        out = tmp_path / str(number) / "e"
        code, output = call(
            "train", [results, "--labels", labels, "--out", out, *LABELS]
        )
        assert code == (0, 3)[number], output
        folds.append(read_table(out / "predictions.csv"))
    assert folds[0] == folds[1]


def test_counts_are_of_what_was_written(home: Home, tmp_path: Path) -> None:
    """A second aggregation finds slide embeddings of slides that are damaged since then."""
    out = tmp_path / "results"
    shutil.copytree(home.whole, out)
    code, output = call("aggregate", [out, "--slide-encoder", "mean"])
    assert code == 0 and f"{len(GOOD) + len(DAMAGES)} of" in output
    for name, damage in DAMAGES.items():
        damage(out, name)
    code, output = call("aggregate", [out, "--slide-encoder", "mean"])
    assert code == 3
    assert f"{len(GOOD) + 1} of {len(GOOD) + len(DAMAGES)} slides" in output
