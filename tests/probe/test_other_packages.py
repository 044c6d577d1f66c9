"""A probe of another package, one file and an entry point, is used from the shell as ours are."""

import json
from pathlib import Path

import pytest
from tests.probe.make import two_regions
from tests.support.other_package import in_shell, install

pytestmark = pytest.mark.check  # processes with another package

TOY = '''
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from thinsection.config import option, section
from thinsection.probe import ProbeConfig, ProbeResult, TileSet, classified


@dataclass(frozen=True, kw_only=True)
class ToySection:
    offset: int = option(0, "added to the most frequent label")


@dataclass(frozen=True, kw_only=True)
class ToyConfig(ProbeConfig):
    toy: ToySection = section(ToySection)


def toy(data: TileSet, config: ToyConfig) -> ProbeResult:
    """Always the most frequent class of training.

    As good as none.
    """
    label = np.bincount(data.train.labels).argmax() + config.toy.offset
    prediction = np.full(len(data.val), label % data.num_classes)
    protocol = config.protocol
    return classified("toy", data, prediction, metric="macro_f1", protocol=protocol, details={})


def untyped(data, config):
    """Declares nothing."""


def silent(data: Path, config: ProbeConfig) -> ProbeResult:
    """Returns nothing."""
'''


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which the other package is installed."""
    points = {name: name for name in ("toy", "untyped", "silent", "gone")}
    return install(tmp_path, "toy_probe", TOY, "probes", **points)


def test_a_probe_of_another_package_works_from_the_shell(
    installed: dict[str, str], tmp_path: Path
) -> None:
    run, labels = two_regions(tmp_path)
    scores = []
    for offset in (0, 1):
        out = tmp_path / f"out{offset}"
        flags = [
            "--labels",
            labels,
            "--allow-leakage",
            "--offset",
            offset,
            "--out",
            out,
        ]
        done = in_shell(installed, "probe", "toy", run, *flags)
        assert done.returncode == 0, done.stderr
        assert "split: stratified fold 0" in done.stdout
        result = json.loads((out / "toy.json").read_text())
        assert f"toy on regions: macro F1 {result['score']:.4f}" in done.stdout
        assert "<h1>Probe toy on regions</h1>" in (out / "toy.html").read_text()
        scores.append(result["score"])
    assert scores[0] > scores[1] > 0


def test_it_is_listed_and_a_broken_one_says_why_and_harms_no_other(
    installed: dict[str, str],
) -> None:
    listed = in_shell(installed, "probe", "--help").stdout
    assert "Always the most frequent class of training." in listed
    assert "Classify tiles by the vote" in listed
    assert "As good as none." in in_shell(installed, "probe", "toy", "--help").stdout
    for name, why in (
        ("gone", "probe 'gone' must be importable"),
        ("untyped", "must declare data as one of TileSet, CaseSet"),
    ):
        done = in_shell(installed, "probe", name, "data", "--out", "out")
        assert done.returncode == 2
        assert why in done.stderr
    assert "Did you mean 'toy'" in in_shell(installed, "probe", "toyy", "data").stderr


def test_a_probe_that_returns_no_result_is_refused(
    installed: dict[str, str], tmp_path: Path
) -> None:
    done = in_shell(installed, "probe", "silent", tmp_path, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert (
        "probe 'silent' must return a ProbeResult or a tuple of them, got None"
        in " ".join(done.stderr.split())
    )


def test_the_grid_takes_it_too(installed: dict[str, str], tmp_path: Path) -> None:
    run, labels = two_regions(tmp_path)
    flags = [
        "--labels",
        labels,
        "--allow-leakage",
        "--probe",
        "toy",
        "--out",
        tmp_path / "grid",
    ]
    done = in_shell(installed, "probe", "grid", run, *flags)
    assert done.returncode == 0, done.stderr
    assert "run-toy: done, toy: macro_f1" in done.stdout
    flags[4] = "tyo"  # for toy
    done = in_shell(installed, "probe", "grid", run, *flags)
    assert done.returncode == 2
    assert "got 'tyo'; did you mean 'toy'?" in done.stderr
