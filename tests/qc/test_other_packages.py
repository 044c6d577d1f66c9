"""A check of another package: one file and an entry point, usable from a pipeline's TOML."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.support.other_package import in_shell, install
from tests.support.qc_csv import read_qc_csv

from thinsection.qc import CHECKS
from thinsection.testing.synthetic import write_he_slide

pytestmark = pytest.mark.check  # processes with another package

TOY_CHECK = '''
from dataclasses import dataclass
from typing import ClassVar

from thinsection.qc import Outcome, QcCheck, QcView, length


@dataclass(frozen=True, kw_only=True)
class LeftPart(QcCheck):
    """Removes what lies left of a line.

    Attributes:
        width: of what is removed.
    """

    kind: ClassVar[str] = "left_part"

    name: str = "left"
    width: str = length("100 um")

    def __call__(self, view: QcView) -> Outcome:
        found = view.ns.xp.zeros_like(view.mask_use)
        found[:, : round(view.length_px(self.width))] = True
        return view.left(view.mask_use & ~found, self.name)


def no_check(view):
    """Is a function."""
'''
PIPELINE = """
name = "mine"
work_mpp = 8.0
work_from = "mpp"

[[check]]
kind = "{kind}"
width = "{width}"

[[check]]
kind = "count_pieces"
"""


@pytest.fixture(scope="module")
def slide_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slides") / "a.svs"
    write_he_slide(path, (1500, 1100), seed=1)
    return path


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which the other package is installed."""
    points = {"left_part": "LeftPart", "no_check": "no_check", "gone": "Gone"}
    return install(tmp_path, "toy_check", TOY_CHECK, "qc_checks", **points)


def written(tmp_path: Path, kind: str, width: str = "160 um") -> str:
    path = tmp_path / "my.toml"
    path.write_text(PIPELINE.format(kind=kind, width=width))
    return str(path)


def test_a_check_of_another_package_works_from_the_shell(
    installed: dict[str, str], slide_path: Path, tmp_path: Path
) -> None:
    out = tmp_path / "o"
    pipeline = written(tmp_path, "left_part")
    done = in_shell(
        installed,
        *("qc", str(slide_path), "--qc", pipeline, "--out", str(out), "--qc-pictures"),
    )
    assert done.returncode == 0, done.stderr + done.stdout
    (table,) = out.glob("qc_*.csv")
    (row,) = read_qc_csv(table)
    (picture,) = out.rglob("left.png")
    mask = np.asarray(Image.open(picture))
    assert mask.any(axis=0).nonzero()[0].tolist() == list(range(round(160 / 8)))
    assert row["left"] == pytest.approx(mask.mean())
    assert row["tissue_pieces_num_regions"] == 1


@pytest.mark.parametrize(
    ("kind", "width", "message"),
    [
        (
            "left_prt",
            "1 px",
            "qc check must be a known name, got 'left_prt'; did you mean 'left_",
        ),
        (
            "left_part",
            "1 um2",
            "left_part.width must be a length such as '10 px' or '80 um'",
        ),
        (
            "no_check",
            "1 px",
            "qc check 'no_check' must be a QcCheck of that kind, got <function",
        ),
        ("gone", "1 px", "qc check 'gone' must be importable, got AttributeError"),
    ],
)
def test_a_mistake_with_another_packages_check_is_said_in_one_sentence(
    kind: str, width: str, message: str, installed: dict[str, str], tmp_path: Path
) -> None:
    pipeline = written(tmp_path, kind, width)
    slide = tmp_path / "a.svs"
    slide.touch()
    failed = in_shell(
        installed, "qc", str(slide), "--qc", pipeline, "--out", str(tmp_path)
    )
    assert failed.returncode != 0
    said = " ".join(failed.stderr.split())  # a narrow terminal wraps it
    assert said.startswith("error: ")
    assert message in said


def test_every_check_says_its_kind_and_one_line_of_help() -> None:
    entries = list(CHECKS)
    assert len(entries) >= 21
    for entry in entries:
        assert CHECKS.load(entry.name).kind == entry.name
        assert entry.help.endswith(".")
        assert "\n" not in entry.help


def test_the_table_of_the_docs_is_that_of_the_registry() -> None:
    page = (Path(__file__).parents[2] / "docs" / "qc.md").read_text()
    lines = [f"| `{entry.name}` | {entry.help} |" for entry in CHECKS]
    assert "\n".join(lines) in page, "docs/qc.md must hold:\n" + "\n".join(lines)
