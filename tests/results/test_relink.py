"""Slides that moved: found again by name and content, and nothing else changes."""

import random
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.shell import thinsection

import thinsection as ts
from thinsection.errors import InvalidInputError
from thinsection.exchange.peer_export import export_peer
from thinsection.exchange.peer_import import import_peer
from thinsection.files.atomic import read_json, read_table, write_json
from thinsection.results.folder import open_results
from thinsection.results.relink import Relinked, relink
from thinsection.slide.cohort import SlideEntry, load_cohort
from thinsection.store.identity import fingerprint
from thinsection.store.ledger import SlideLedger, StageRecord
from thinsection.store.slide_ids import assign_stored_ids
from thinsection.testing.synthetic import write_he_slide

SMALL: dict[str, Any] = {"memory": "256MiB", "pretrained": False, "tile_px": 128}


def write_file(path: Path, seed: int, size: int = 200_000) -> Path:
    """A file with a slide's suffix; its content follows from the seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(random.Random(seed).randbytes(size))
    return path


def add_slide(out: Path, slide_id: str, path: Path, **facts: object) -> None:
    """A slide of a results folder, as far as `relink` reads it."""
    content = fingerprint(path)
    source = {"source": content, "samples": content, "times": "t", "whole": ""}
    SlideLedger(
        out=out,
        slide_id=slide_id,
        slide={"slide_id": slide_id, "slide_path": str(path), **facts},
        source=source,
        stages={"slides/tissue": StageRecord(key="k", files={})},
    ).save()


def files_below(out: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def paths_of(out: Path) -> dict[str, str]:
    ledgers = open_results(out).ledgers
    return {name: str(ledger.slide["slide_path"]) for name, ledger in ledgers.items()}


def test_a_name_that_two_slides_share_is_told_apart_by_content(tmp_path: Path) -> None:
    out, old, new = tmp_path / "out", tmp_path / "old", tmp_path / "new"
    for number, folder in enumerate(("a", "b")):
        add_slide(out, f"s-{folder}", write_file(old / folder / "s.svs", number))
        # the folders changed places
        write_file(new / "ba"[number] / "s.svs", number)
    shutil.rmtree(old)
    told = relink(out, [new])
    assert told.found == {
        "s-a": str(new / "b" / "s.svs"),
        "s-b": str(new / "a" / "s.svs"),
    }
    assert paths_of(out) == told.found
    assert (told.ambiguous, told.missing, told.kept) == ({}, (), ())


def test_a_file_that_got_another_name_is_found_by_content(tmp_path: Path) -> None:
    out = tmp_path / "out"
    path = write_file(tmp_path / "old" / "s.svs", 1)
    add_slide(out, "s", path)
    (tmp_path / "new").mkdir()
    path.rename(tmp_path / "new" / "other.svs")
    # the same name with other content is another slide
    write_file(tmp_path / "new" / "s.svs", 2)
    assert relink(out, [tmp_path / "new"]).found == {
        "s": str(tmp_path / "new" / "other.svs")
    }


def test_copies_are_ambiguous_unless_one_path_ends_like_the_former(
    tmp_path: Path,
) -> None:
    out, new = tmp_path / "out", tmp_path / "new"
    for number, name in enumerate(("s", "t")):
        add_slide(
            out, name, write_file(tmp_path / "old" / "p1" / f"{name}.svs", number)
        )
    for folder in ("p1", "copy"):
        write_file(new / folder / "s.svs", 0)
    for folder in ("x", "y"):
        write_file(new / folder / "t.svs", 1)
    shutil.rmtree(tmp_path / "old")
    before = paths_of(out)
    told = relink(out, [new])
    assert told.found == {"s": str(new / "p1" / "s.svs")}
    assert told.ambiguous == {"t": (str(new / "x" / "t.svs"), str(new / "y" / "t.svs"))}
    assert paths_of(out)["t"] == before["t"]


def test_two_pictures_of_a_file_keep_their_ids(tmp_path: Path) -> None:
    out, old = tmp_path / "out", tmp_path / "old"
    path = write_file(old / "s.svs", 1)
    for image in ("a", "b"):
        add_slide(out, f"s-{image}", path, image=image)
    old.rename(tmp_path / "new")
    told = relink(out, [tmp_path / "new"])
    file = str(tmp_path / "new" / "s.svs")
    assert told.found == {"s-a": file, "s-b": file}
    entries = [SlideEntry(slide_id="", slide_path=file, image=image) for image in "ab"]
    named = assign_stored_ids(out, entries)
    assert [(entry.slide_id, entry.image) for entry in named] == [
        ("s-a", "a"),
        ("s-b", "b"),
    ]


def test_only_paths_change(tmp_path: Path) -> None:
    out = tmp_path / "out"
    path = write_file(tmp_path / "old" / "s.svs", 1)
    add_slide(out, "s", path)
    relink(out, [tmp_path / "old"])  # writes the tables
    ledger = out / "slides" / "s" / "slide.json"
    before, stamp = files_below(out), ledger.stat().st_mtime_ns
    (tmp_path / "old").rename(tmp_path / "new")
    relink(out, [tmp_path / "new"])
    after = files_below(out)
    assert before.keys() == after.keys()
    for name, content in before.items():
        assert after[name] == content.replace(b"old/s.svs", b"new/s.svs"), name
    assert ledger.stat().st_mtime_ns == stamp


def test_what_is_neither_here_nor_there_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    stays = write_file(tmp_path / "old" / "stays.svs", 1)
    goes = write_file(tmp_path / "old" / "goes.svs", 2)
    for path in (stays, goes):
        add_slide(out, path.stem, path)
    goes.unlink()
    write_file(tmp_path / "new" / "third.svs", 3)
    assert relink(out, [tmp_path / "new"]) == Relinked(
        found={}, ambiguous={}, missing=("goes",), kept=("stays",)
    )
    ended = thinsection("relink", out, tmp_path / "new")
    assert ended.returncode == 3
    assert "goes: missing" in ended.stdout and "0 found, 0 ambiguous" in ended.stdout
    with pytest.raises(InvalidInputError, match="new place must contain slides"):
        relink(out, [out])


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("project")
    for seed in range(2):
        path = home / "slides" / f"s{seed}.svs"
        path.parent.mkdir(exist_ok=True)
        write_he_slide(path, (700, 600), seed=seed, downsamples=(1,))
    (home / "slides" / "bad.svs").write_text("no slide")
    ts.run([home / "slides"], out=home / "results", **SMALL)
    return home


@pytest.fixture
def moved(project: Path, tmp_path: Path) -> Iterator[Path]:
    """The project, one of whose slides moved."""
    home = tmp_path / "project"
    shutil.copytree(project, home)
    relink(home / "results", [home / "slides"])
    (home / "elsewhere").mkdir()
    (home / "slides" / "s1.svs").rename(home / "elsewhere" / "s1.svs")
    yield home


COMMANDS = (
    ("export", "jpeg", "results", "--out", "jpeg"),
    ("heatmap", "tissue_fraction", "results"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_commands_that_open_slides_leave_out_what_is_missing(
    command: tuple[str, ...], moved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(moved)
    ended = thinsection(*command)
    assert ended.returncode == 3, ended.stdout + ended.stderr
    assert "s1: left out: slide must be at its recorded path" in ended.stdout
    assert "`thinsection relink RESULTS NEW_PLACE` finds" in ended.stdout
    assert thinsection("relink", "results", "elsewhere").returncode == 0
    ended = thinsection(*command)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_heatmap_records_only_slides_that_it_drew(moved: Path) -> None:
    """A slide that was left out keeps its picture, and the scale of that picture."""
    results = moved / "results"
    for picture in (results / "slides" / "s1").rglob("*.jpg"):
        picture.unlink()  # so that it must be made from the slide
    told: list[str] = []

    def draw() -> dict[str, Any]:
        told.clear()
        ts.heatmap("tissue_fraction", results, scale="cohort", on_left_out=told.append)
        (record,) = results.glob("*/heatmap_tissue_fraction/scale.json")
        content: dict[str, Any] = read_json(record)
        return content

    assert set(draw()["pictures"]) == {"s0"}
    assert [line.partition(":")[0] for line in told] == ["s1"]
    relink(results, [moved / "elsewhere"])
    whole = draw()
    assert set(whole["pictures"]) == set(whole["limits"]) == {"s0", "s1"} and not told
    (moved / "elsewhere").rename(moved / "third")
    whole["limits"]["s1"] = {"tissue_fraction": [0.0, 0.25]}
    (record,) = results.glob("*/heatmap_tissue_fraction/scale.json")
    write_json(record, whole)
    assert draw()["limits"]["s1"] == {"tissue_fraction": [0.0, 0.25]}


def test_a_dataset_reads_the_slides_at_their_new_place(moved: Path) -> None:
    relink(moved / "results", [moved / "elsewhere"])
    dataset = ts.TileDataset(moved / "results", slides=["s1"])
    assert sum(1 for _ in dataset) == dataset.num_tiles > 0


def test_a_run_at_a_new_place_relinks_what_it_recognises(moved: Path) -> None:
    (moved / "slides").rename(moved / "new")
    shutil.move(moved / "elsewhere" / "s1.svs", moved / "new")
    messages: list[str] = []
    summary = ts.run(
        [moved / "new"], out=moved / "results", on_message=messages.append, **SMALL
    )
    assert summary.counts["skipped"] == 2
    assert any("has the name and content of" in line for line in messages)
    assert paths_of(moved / "results") == {
        f"s{seed}": str(moved / "new" / f"s{seed}.svs") for seed in range(2)
    }
    failure = read_json(moved / "results" / "slides" / "bad" / "failure.json")
    assert failure["entry"]["slide_path"] == str(moved / "new" / "bad.svs")


def test_paths_in_tables_are_relative_where_the_slide_lies_in_the_project(
    project: Path, tmp_path: Path
) -> None:
    for table in ("summary.csv", "failed.csv"):
        rows = read_table(project / "results" / table)
        assert {row["slide_path"] for row in rows} <= {
            f"../slides/{name}.svs" for name in ("s0", "s1", "bad")
        }
    # so the table is a cohort
    entries = load_cohort([project / "results" / "summary.csv"])
    assert all(Path(entry.slide_path).is_file() for entry in entries)
    out = tmp_path / "elsewhere" / "out"
    ts.run([project / "slides" / "s0.svs"], out=out, until="tiles", **SMALL)
    (row,) = read_table(out / "summary.csv")
    assert row["slide_path"] == str(project / "slides" / "s0.svs")


def test_slides_typed_relative_to_another_folder_are_opened(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "project"
    shutil.copytree(project / "slides", home / "deep" / "slides")
    monkeypatch.chdir(home / "deep")
    ts.run(["slides/s0.svs"], out="../results", until="tiles", **SMALL)
    monkeypatch.chdir(tmp_path)
    ended = thinsection("export", "jpeg", home / "results", "--out", tmp_path / "jpeg")
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_imported_slides_are_known_by_content(project: Path, tmp_path: Path) -> None:
    export_peer(project / "results", tmp_path / "job", "trident")
    slides = tmp_path / "slides"
    shutil.copytree(project / "slides", slides)
    (slides / "bad.svs").unlink()
    import_peer(tmp_path / "job", tmp_path / "out", "trident", slides=[slides])
    slides.rename(tmp_path / "moved")
    (tmp_path / "moved" / "s0.svs").rename(tmp_path / "moved" / "renamed.svs")
    told = relink(tmp_path / "out", [tmp_path / "moved"])
    assert told.found == {
        "s0": str(tmp_path / "moved" / "renamed.svs"),
        "s1": str(tmp_path / "moved" / "s1.svs"),
    }


@pytest.mark.check
@pytest.mark.timeout(300)
def test_a_thousand_slides_take_at_most_20_seconds_of_a_cpu(tmp_path: Path) -> None:
    """Names doubled, three missing, two that have a copy."""
    out, old, new = tmp_path / "out", tmp_path / "old", tmp_path / "new"
    for number in range(1000):
        name = f"s{number // 2}"
        path = write_file(old / f"site{number % 2}" / f"{name}.svs", number)
        add_slide(out, f"{name}-{number % 2}", path)
    shutil.move(old, new)
    for number in (0, 1, 2):
        (new / "site0" / f"s{number}.svs").unlink()
    for number in (7, 8):
        (new / "copies").mkdir(exist_ok=True)
        file = new / "site1" / f"s{number}.svs"
        (new / "others").mkdir(exist_ok=True)
        shutil.copy(file, new / "copies")
        file.rename(new / "others" / file.name)
    write_json(out / "slide_ids.json", {})
    before = resource.getrusage(resource.RUSAGE_SELF)
    told = relink(out, [new])
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert told.missing == ("s0-0", "s1-0", "s2-0")
    assert set(told.ambiguous) == {"s7-1", "s8-1"}
    assert len(told.found) == 995
    for slide_id, file in told.found.items():
        name, site = slide_id.split("-")
        assert file == str(new / f"site{site}" / f"{name}.svs")
    assert seconds < 20, seconds
