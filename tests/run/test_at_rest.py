"""Data at rest: what was damaged or tampered with is named, and stays one slide's."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

from thinsection import __version__
from thinsection.cli.app import build_app
from thinsection.errors import StoreError
from thinsection.exchange.anndata import export_anndata
from thinsection.results.folder import open_results
from thinsection.results.verify import verify
from thinsection.run.run import run
from thinsection.store.ledger import load_ledger
from thinsection.store.tiles_h5 import TilesWriter, read_tiles
from thinsection.testing.synthetic import write_he_slide

COORDS = np.array([[0, 0], [512, 0], [0, 512]], np.int64)
FEATURES = np.arange(12, dtype=np.float32).reshape(3, 4) + 1


def write(path: Path) -> Path:
    with TilesWriter(
        path, dim=4, attributes={"patch_size_level0": 512, "name": "a"}
    ) as writer:
        writer.append(COORDS[:2], FEATURES[:2])
        writer.append(COORDS[2:], FEATURES[2:])
        writer.add_column("tissue_fraction", np.ones(3, np.float32))
    return path


DEEP = "[" * 200_000  # brackets that Python's parser gives up at, with no ValueError


def flip(path: Path, what: bytes) -> None:
    """Turns one bit of these bytes, which occur once in the file."""
    data = bytearray(path.read_bytes())
    at = bytes(data).index(what)
    data[at] ^= 1
    path.write_bytes(data)


def test_every_dataset_carries_its_checksum_and_whole_files_pass(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "a.h5")
    np.testing.assert_array_equal(read_tiles(path).features, FEATURES)  # type: ignore[arg-type]
    assert verify(tmp_path) == (3, [])
    with h5py.File(path) as file:
        names = ("coords", "features", "tiles/tissue_fraction")
        assert all(len(file[name].attrs["thinsection_sha256"]) == 64 for name in names)


@pytest.mark.parametrize("what", [FEATURES[1].tobytes(), COORDS[1].tobytes()])
def test_a_flipped_bit_is_never_read_without_a_word(
    tmp_path: Path, what: bytes
) -> None:
    path = write(tmp_path / "a.h5")
    flip(path, what)
    with pytest.raises(
        StoreError, match=r"must contain the bytes that were written.*a\.h5"
    ):
        read_tiles(path)
    assert len(verify(tmp_path)[1]) == 1
    assert read_tiles(path, verify=False).coords_l0.shape == (3, 2)  # asked for


def test_an_attribute_that_was_changed_is_found(tmp_path: Path) -> None:
    with h5py.File(write(tmp_path / "a.h5"), "a") as file:
        file["coords"].attrs["patch_size_level0"] = 513
    with pytest.raises(StoreError, match="'coords' must contain the bytes"):
        read_tiles(tmp_path / "a.h5")


def replaced(
    name: str, make: Callable[[h5py.File, str, Path], Any]
) -> Callable[[Path], None]:
    def tamper(path: Path) -> None:
        other = write(path.with_name("other.h5"))
        with h5py.File(path, "a") as file:
            del file[name]
            make(file, name, other)

    return tamper


def external(file: h5py.File, name: str, other: Path) -> None:
    file[name] = h5py.ExternalLink(str(other), name)


def soft(file: h5py.File, name: str, other: Path) -> None:
    file["elsewhere"] = FEATURES
    file[name] = h5py.SoftLink("/elsewhere")


def group(file: h5py.File, name: str, other: Path) -> None:
    file.create_group(name)


def virtual(file: h5py.File, name: str, other: Path) -> None:
    layout = h5py.VirtualLayout((3, 4), "f4")
    layout[:] = h5py.VirtualSource(str(other), name, (3, 4))
    file.create_virtual_dataset(name, layout)


def raw(file: h5py.File, name: str, other: Path) -> None:
    file.create_dataset(name, (3, 4), "f4", external=[(str(other), 0, 48)])


def text(file: h5py.File, name: str, other: Path) -> None:
    file[name] = "a list where a table is due"


@pytest.mark.parametrize(
    ("name", "make"),
    [
        *product(["coords", "features", "tiles"], [external, soft, virtual, raw, text]),
        *product(["coords", "features"], [group]),
    ],
)
def test_what_lies_outside_the_file_or_is_of_another_kind_is_refused(
    tmp_path: Path, name: str, make: Callable[[h5py.File, str, Path], Any]
) -> None:
    path = write(tmp_path / "a.h5")
    replaced(name, make)(path)
    with pytest.raises(StoreError, match=rf"'{name}' must .*a\.h5"):
        read_tiles(path)


def test_an_attribute_that_is_no_number_is_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["coords"] = COORDS
        file["coords"].attrs["patch_size_level0"] = "wide"
    with pytest.raises(
        StoreError, match="'patch_size_level0' must be a finite number, got 'wide' in"
    ):
        read_tiles(tmp_path / "a.h5")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("at_rest")
    (folder / "in").mkdir()
    for index in range(2):
        write_he_slide(folder / "in" / f"s{index}.tiff", (900, 700), seed=index)
    run([folder / "in"], out=folder / "out", until="tiles")
    return folder / "in", folder / "out"


def copy(out: Path, to: Path) -> Path:
    for path in out.rglob("*"):
        if path.is_file():
            target = to / path.relative_to(out)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return to


def ls(command: list[str]) -> tuple[int, str]:
    done = CliRunner().invoke(build_app(command), command)
    return done.exit_code, done.output


def test_verify_finds_any_changed_or_missing_file_and_the_run_makes_it_anew(
    tmp_path: Path, finished: tuple[Path, Path]
) -> None:
    out = copy(finished[1], tmp_path / "out")
    made = f"written by Thinsection {__version__}; this is {__version__}\n"
    assert ls(["verify", str(out)]) == (0, f"8 checksums, 0 damaged\n{made}")
    picture = out / "slides" / "s0" / "picture.jpg"
    data = bytearray(picture.read_bytes())
    data[-20] ^= 4
    picture.write_bytes(data)
    (out / "slides" / "s1" / "tissue.png").unlink()
    code, said = ls(["verify", str(out)])
    assert code == 1
    assert (
        "slides/s0/picture.jpg: the bytes differ from those that were written" in said
    )
    assert "slides/s1/tissue.png: missing" in said
    picture.unlink()
    run([finished[0]], out=out, until="tiles")
    assert verify(out) == (8, [])


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        (("stages",), [], "document.stages must be a table"),
        (("slide",), [], "document.slide must be a table"),
        (("slide", "width"), "wide", "slide.width must be int"),
        (
            ("stages", "slides/tissue", "files"),
            ["a"],
            r"slides/tissue.files must be a table",
        ),
        (("stages", "slides/tissue", "files"), {"a": "b"}, "files.a must be int"),
        (("stages", "slides/tissue", "facts"), [], "facts must be a table"),
        (
            ("stages", "slides/tissue", "facts", "warnings"),
            ["x"],
            "facts.warnings must be str",
        ),
        (
            ("stages", "256px_0.5mpp/tiles", "facts", "plan"),
            [1],
            "facts.plan must be a table",
        ),
        (("stages", "256px_0.5mpp/tiles", "needs"), {"a": 1}, "needs must be a list"),
    ],
)
def test_a_tampered_ledger_is_named_with_its_field_and_stays_that_slides(
    tmp_path: Path,
    finished: tuple[Path, Path],
    field: tuple[str, ...],
    value: Any,
    named: str,
) -> None:
    out = copy(finished[1], tmp_path / "out")
    path = out / "slides" / "s0" / "slide.json"
    document = json.loads(path.read_text())
    inner = document
    for name in field[:-1]:
        inner = inner[name]
    inner[field[-1]] = value
    path.write_text(json.dumps(document))
    assert load_ledger(out, "s0").stages == {}
    results = open_results(out)
    assert list(results.failures()) == ["s0"]
    assert results.failures()["s0"].startswith("slide.json is damaged")
    assert named in results.failures()["s0"]
    assert ls(["ls", str(out)])[0] == 0
    assert len(verify(out)[1]) == 1
    with pytest.raises(
        StoreError, match=r"ledger must be readable, got slide\.json is damaged"
    ):
        export_anndata(out, tmp_path / "x.h5ad")
    told: list[Any] = []
    summary = run([finished[0]], out=out, until="tiles", on_event=told.append)
    assert summary.counts == summary.counts | {"done": 1, "skipped": 1, "failed": 0}
    (warned,) = [r.facts["warnings"] for r in summary.results if r.status == "done"]
    assert named in warned
    assert verify(out) == (8, [])


@pytest.mark.parametrize("depth", [200_000, 900, 70, 50])
@pytest.mark.parametrize("place", ["whole", "slide", "facts"])
def test_nested_brackets_are_one_slides_damage(
    tmp_path: Path, finished: tuple[Path, Path], place: str, depth: int
) -> None:
    out = copy(finished[1], tmp_path / "out")
    path = out / "slides" / "s0" / "slide.json"
    document = json.loads(path.read_text())
    if place == "slide":
        document["slide"]["deep"] = "here"
    if place == "facts":
        document["stages"]["slides/tissue"]["facts"]["deep"] = "here"
    nested = "[" * depth + "]" * depth
    text = json.dumps(document).replace('"here"', nested)
    path.write_text(nested if place == "whole" else text)
    results = open_results(out)
    assert list(results.ledgers) == ["s0", "s1"]
    assert ls(["ls", str(out)])[0] == 0
    if depth > 64:
        expected = "slide.json is damaged: brackets must be nested"
        assert results.failures()["s0"].startswith(expected)
    summary = run([finished[0]], out=out, until="tiles")
    assert summary.counts["failed"] == 0
    assert summary.counts["done"] + summary.counts["skipped"] == 2
    assert ls(["ls", str(out)])[0] == 0


@pytest.mark.parametrize(
    "document", ["[]", '{"status": [], "stage": 1}', "{", '"x"', DEEP]
)
def test_other_damaged_documents_stop_nothing(
    tmp_path: Path, finished: tuple[Path, Path], document: str
) -> None:
    out = copy(finished[1], tmp_path / "out")
    (out / "slides" / "s0" / "failure.json").write_text(document)
    (record,) = out.glob("records/*/run.json")
    record.write_text(document)
    assert ls(["ls", str(out)])[0] == 0
    summary = run([finished[0]], out=out, until="tiles")
    assert summary.counts["skipped"] == 2
