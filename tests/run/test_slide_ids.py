"""One slide is counted once: its id follows from its file, however the file is named."""

import csv
import json
import os
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from thinsection.cli.slurm import TASKS
from thinsection.config import replace_flat
from thinsection.errors import OutputError, StoreError
from thinsection.evaluation.label_values import LabelsConfig
from thinsection.evaluation.labels import read_cohort
from thinsection.jobs.backend import Attempt
from thinsection.jobs.executor import ExecutorConfig
from thinsection.jobs.slurm_array import Array, load_array
from thinsection.run.ending import RunSummary
from thinsection.run.process import RunEvent
from thinsection.run.run import check_folder, make_task, run
from thinsection.slide.cohort import SlideEntry, load_cohort
from thinsection.stages.config import RunConfig
from thinsection.stages.spec import resolve
from thinsection.store.ledger import SLIDES
from thinsection.store.slide_ids import SLIDE_IDS_NAME, assign_stored_ids
from thinsection.usage.analysis import Request

NUM_CASES = 12


def write_slide(path: Path, *, seed: int) -> None:
    """A pink square on glass, 520 x 480 px at 0.5 µm/px, with seeded noise."""
    rng = np.random.default_rng(seed)
    pixels = np.full((480, 520, 3), 245, dtype=np.uint8)
    pixels[60:420, 60:460] = rng.integers(
        (150, 60, 120), (220, 140, 190), (360, 400, 3)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tifffile.TiffWriter(path) as writer:
        writer.write(
            pixels,
            tile=(256, 256),
            photometric="rgb",
            metadata=None,
            resolution=(20000, 20000),
            resolutionunit="CENTIMETER",
        )


def cases(folder: Path, count: int = NUM_CASES) -> list[Path]:
    """Slides `P01/scan.svs`, `P02/scan.svs`, ...: one file name, other pixels each."""
    paths = []
    for number in range(1, count + 1):
        path = folder / f"P{number:02}" / "scan.svs"
        write_slide(path, seed=number)
        paths.append(path)
    return paths


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of twelve slides of one name."""
    folder = tmp_path_factory.mktemp("cohort") / "cas"
    cases(folder)
    return folder


def tissue(slides: Sequence[str | Path], out: Path, **settings: object) -> RunSummary:
    summary = run(slides, out=out, until="tissue", **settings)
    assert not summary.counts["failed"], summary.results
    return summary


def ids(slides: Sequence[str | Path], out: Path) -> dict[str, str]:
    """Slide id by the name of the slide's folder, as a run into `out` would have them."""
    entries = assign_stored_ids(out, load_cohort(slides))
    return {
        Path(entry.slide_path).resolve().parent.name: entry.slide_id
        for entry in entries
    }


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "summary.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def spellings(cohort: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str | Path]]:
    """Ways to name one cohort, from the folder that holds it."""
    monkeypatch.chdir(cohort.parent)
    link = cohort.parent / "link"
    link.unlink(missing_ok=True)
    link.symlink_to(cohort)
    table = cohort.parent / "cohort.csv"
    lines = [f"cas/P{number:02}/scan.svs" for number in range(1, NUM_CASES + 1)]
    table.write_text("slide_path\n" + "\n".join(lines) + "\n")
    return [
        ["cas"],
        [cohort],
        ["cas/../cas/"],
        lines,
        list(reversed(lines)),
        ["link"],
        [table],
        [*lines[:5], "cas"],
    ]


def test_however_a_cohort_is_named_its_slides_are_computed_and_counted_once(
    cohort: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    ways = spellings(cohort, monkeypatch)
    first = tissue(ways[0], out)
    assert first.counts["done"] == NUM_CASES
    names = {result.slide_id for result in first.results}
    for way in ways[1:]:
        again = tissue(way, out)
        assert again.counts["skipped"] == NUM_CASES, way
        assert {result.slide_id for result in again.results} == names
    monkeypatch.chdir(cohort)
    inside = tissue(["."], out)
    assert inside.counts["skipped"] == NUM_CASES
    assert len(rows(out)) == NUM_CASES
    assert len(list((out / SLIDES).glob("*/slide.json"))) == NUM_CASES


def test_new_folders_agree_on_the_ids_whatever_the_spelling(
    cohort: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = spellings(cohort, monkeypatch)
    found = [ids(way, tmp_path / str(index)) for index, way in enumerate(ways)]
    assert len(set(found[0].values())) == NUM_CASES
    assert all(other == found[0] for other in found[1:])
    assert all(name.startswith("scan-") for name in found[0].values())


def test_slides_that_are_named_one_by_one_keep_their_ids(
    cohort: Path, tmp_path: Path
) -> None:
    one_by_one: dict[str, str] = {}
    for path in sorted(cohort.glob("*/scan.svs")):
        one_by_one |= ids([path], tmp_path / "out")
    assert one_by_one["P01"] == "scan"
    assert len(set(one_by_one.values())) == NUM_CASES
    assert ids([cohort], tmp_path / "out") == one_by_one


def test_a_slide_that_is_added_later_changes_no_others_id(
    tmp_path: Path,
) -> None:
    (first,) = cases(tmp_path / "a", 1)
    said: list[str] = []
    before = tissue([tmp_path / "a"], tmp_path / "out")
    write_slide(tmp_path / "other" / "scan.svs", seed=30)
    both = [tmp_path / "a", tmp_path / "other"]
    after = tissue(both, tmp_path / "out", on_message=said.append)
    assert before.results[0].slide_id == "scan"
    named = {result.slide_path: result.slide_id for result in after.results}
    assert named[str(first)] == "scan"
    assert named[str(tmp_path / "other" / "scan.svs")].startswith("scan-")
    assert after.counts["skipped"] == 1
    assert len(rows(tmp_path / "out")) == 2
    assert any("another file with the same name" in text for text in said)


def test_a_repeated_name_gets_its_hash_alone_or_with_the_others(
    cohort: Path, tmp_path: Path
) -> None:
    together = ids([cohort], tmp_path / "together")
    eleven = sorted(cohort.glob("*/scan.svs"))[:-1]
    ids(eleven, tmp_path / "later")
    last = ids([cohort / f"P{NUM_CASES}" / "scan.svs"], tmp_path / "later")
    assert last[f"P{NUM_CASES}"] == together[f"P{NUM_CASES}"]


def test_a_moved_cohort_is_known_by_name_and_content(tmp_path: Path) -> None:
    cases(tmp_path / "here", 3)
    before = ids([tmp_path / "here"], tmp_path / "out")
    tissue([tmp_path / "here"], tmp_path / "out")
    (tmp_path / "here").rename(tmp_path / "there")
    said: list[str] = []
    moved = tissue([tmp_path / "there"], tmp_path / "out", on_message=said.append)
    assert moved.counts["skipped"] == 3
    assert ids([tmp_path / "there"], tmp_path / "out") == before
    assert any("has the name and content of" in text for text in said)
    shutil.copytree(tmp_path / "there", tmp_path / "scratch")
    copied = tissue([tmp_path / "scratch"], tmp_path / "out")
    assert copied.counts["skipped"] == 3
    assert len(rows(tmp_path / "out")) == 3


def test_copies_of_one_content_stay_apart_and_are_found_by_the_end_of_their_path(
    tmp_path: Path,
) -> None:
    (first,) = cases(tmp_path / "here", 1)
    for case in ("P02", "P03"):
        (tmp_path / "here" / case).mkdir()
        shutil.copy(first, tmp_path / "here" / case / "scan.svs")
    tissue([tmp_path / "here"], tmp_path / "out")
    before = ids([tmp_path / "here"], tmp_path / "out")
    assert len(set(before.values())) == 3
    shutil.copytree(tmp_path / "here", tmp_path / "scratch")
    assert ids([tmp_path / "scratch"], tmp_path / "out") == before


def test_results_of_earlier_versions_keep_the_ids_that_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cases(tmp_path / "cas", 3)
    tissue(["cas"], tmp_path / "out")
    old = {}
    for number, folder in enumerate(sorted((tmp_path / "out" / SLIDES).glob("scan-*"))):
        # an earlier version's hash, of the path as it was typed
        new_name = folder.with_name(f"scan-abc{number}")
        text = (folder / "slide.json").read_text().replace(folder.name, new_name.name)
        (folder / "slide.json").write_text(text)
        folder.rename(new_name)
        typed = json.loads(text)["slide"]["slide_path"]
        assert typed.startswith("cas/")
        old[Path(typed).parent.name] = new_name.name
    (tmp_path / "out" / SLIDE_IDS_NAME).unlink()
    monkeypatch.chdir(tmp_path / "cas")
    again = tissue(["."], tmp_path / "out")
    assert again.counts["skipped"] == 3
    assert ids([tmp_path / "cas"], tmp_path / "out") == old
    assert len(rows(tmp_path / "out")) == 3


def test_a_links_name_is_the_slides_and_its_target_is_the_same_slide(
    tmp_path: Path,
) -> None:
    (target,) = cases(tmp_path / "archive", 1)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "patient7.svs").symlink_to(target)
    tissue([tmp_path / "in"], tmp_path / "out")
    assert ids([target], tmp_path / "out") == {"P01": "patient7"}
    assert tissue([target], tmp_path / "out").counts["skipped"] == 1


def test_a_tables_id_stays_and_its_slides_are_known_without_it(tmp_path: Path) -> None:
    cases(tmp_path / "cas", 2)
    table = tmp_path / "c.csv"
    table.write_text(
        "slide_path,slide_id\ncas/P01/scan.svs,one\ncas/P02/scan.svs,two\n"
    )
    tissue([table], tmp_path / "out")
    assert ids([tmp_path / "cas"], tmp_path / "out") == {"P01": "one", "P02": "two"}
    assert tissue([tmp_path / "cas"], tmp_path / "out").counts["skipped"] == 2


def test_processes_that_name_one_cohort_at_once_agree(
    cohort: Path, tmp_path: Path
) -> None:
    code = (
        "import sys; from pathlib import Path;"
        "from thinsection.slide.cohort import load_cohort;"
        "from thinsection.store.slide_ids import assign_stored_ids;"
        "found = assign_stored_ids(Path(sys.argv[1]), load_cohort(sys.argv[2:]));"
        "print(*(f'{e.slide_path}={e.slide_id}' for e in found), sep='\\n')"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    slides = sorted(map(str, cohort.glob("*/scan.svs")))
    ways = [[str(cohort)], slides[:4], [slides[0]], slides[2:]]
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    jobs = [
        subprocess.Popen([*command, *way], env=env, stdout=subprocess.PIPE, text=True)
        for way in ways
    ]
    ids_by_path: dict[str, set[str]] = {}
    for job in jobs:
        text, _ = job.communicate(timeout=60)
        assert job.returncode == 0
        for line in text.splitlines():
            path, _, slide_id = line.partition("=")
            ids_by_path.setdefault(path, set()).add(slide_id)
    assert [len(found) for found in ids_by_path.values()] == [1] * NUM_CASES
    assert len(set.union(*ids_by_path.values())) == NUM_CASES


def test_names_that_differ_in_unicode_form_alone_are_named(tmp_path: Path) -> None:
    for form in ("NFC", "NFD"):
        name = unicodedata.normalize(form, "Prä.svs")
        write_slide(tmp_path / name, seed=len(name))
    said: list[str] = []
    entries = load_cohort([tmp_path], on_message=said.append)
    assert len({unicodedata.normalize("NFC", e.slide_id) for e in entries}) == 2
    assert any("differ only in their Unicode form" in text for text in said)


def test_a_damaged_list_of_ids_is_named(tmp_path: Path) -> None:
    (tmp_path / SLIDE_IDS_NAME).write_text("[")
    entry = SlideEntry(slide_id="a", slide_path=str(tmp_path / "a.svs"))
    with pytest.raises(
        StoreError, match=r"list of slide ids must be readable.*remove it"
    ):
        assign_stored_ids(tmp_path, [entry])


def test_slides_of_equal_content_are_named(tmp_path: Path) -> None:
    write_slide(tmp_path / "in" / "a.svs", seed=1)
    shutil.copy(tmp_path / "in" / "a.svs", tmp_path / "in" / "b.svs")
    write_slide(tmp_path / "in" / "c.svs", seed=2)
    said: list[str] = []
    summary = tissue([tmp_path / "in"], tmp_path / "out", on_message=said.append)
    assert summary.equal_slides == (("a", "b"),)
    assert [text for text in said if "same content" in text] == [
        "warning: 'a', 'b' have the same content; check whether they are one slide"
    ]
    warnings = {row["slide_id"]: row["warnings"] for row in rows(tmp_path / "out")}
    assert "same content as b" in warnings["a"]
    assert "same content" not in warnings["c"]


@pytest.mark.parametrize("keep_time", [False, True])
def test_a_slide_that_is_overwritten_while_it_is_read_fails_and_leaves_nothing(
    tmp_path: Path, keep_time: bool
) -> None:
    slide, other = tmp_path / "a.svs", tmp_path / "other.svs"
    write_slide(slide, seed=1)
    write_slide(other, seed=2)
    before = slide.stat()

    def overwrite(event: RunEvent) -> None:
        if event.kind == "started" and slide.read_bytes() != other.read_bytes():
            slide.write_bytes(other.read_bytes())
            if keep_time:
                os.utime(slide, ns=(before.st_atime_ns, before.st_mtime_ns))

    out = tmp_path / "out"
    first = run([slide], out=out, until="tiles", on_event=overwrite)
    assert first.counts["failed"] == 1
    assert "must not change while it is read" in first.results[0].error
    ledger = json.loads((out / SLIDES / "a" / "slide.json").read_text())
    assert ledger["stages"] == {}
    again = run([slide], out=out, until="tiles")
    assert again.counts["done"] == 1


def test_an_output_folder_that_is_deleted_while_slides_are_read_is_named(
    tmp_path: Path,
) -> None:
    for number in range(3):
        write_slide(tmp_path / "in" / f"s{number}.svs", seed=number)
    out = tmp_path / "out"

    def delete(event: RunEvent) -> None:
        if event.kind == "ended" and event.slide_id == "s0":
            out.rename(tmp_path / "gone")

    with pytest.raises(OutputError, match="output must be writable"):
        run([tmp_path / "in"], out=out, until="tissue", on_event=delete)


def test_the_tasks_of_an_array_have_the_ids_of_the_whole_cohort(
    cohort: Path, tmp_path: Path
) -> None:
    whole = assign_stored_ids(tmp_path / "out", load_cohort([cohort]))
    task = make_task(
        check_folder(tmp_path / "out"), resolve(RunConfig(), {"until": "tissue"})
    )
    attempt = Attempt(entries=whole, task=task)
    array = Array(
        tmp_path / "array",
        attempt,
        5,
        request=Request(cpus=1, memory_bytes=2**30, gpus=0, walltime_s=60),
        config=ExecutorConfig(executor="slurm"),
    )
    array.save()
    chunks: list[tuple[Any, ...]] = load_array(array.folder, TASKS).chunks
    assert [len(chunk) for chunk in chunks] == [5, 5, 2]
    assert tuple(entry for chunk in chunks for entry in chunk) == whole
    # tasks of a script of one's own name their part of the cohort themselves
    for chunk in chunks:
        own = assign_stored_ids(
            tmp_path / "out", load_cohort([entry.slide_path for entry in chunk])
        )
        assert [one.slide_id for one in own] == [one.slide_id for one in chunk]


def test_training_counts_each_slide_once_after_several_spellings(
    cohort: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    settings = {
        "pretrained": False,
        "memory": "256MiB",
        "batch_size": 4,
        "tile_px": 224,
        "overview": False,
        "name_pattern": r"(?P<case_id>P\d+)/scan",
    }
    config = replace_flat(RunConfig(), settings)
    monkeypatch.chdir(cohort.parent)
    for way in (["cas"], [cohort], sorted(cohort.glob("*/scan.svs"))):
        assert run(way, out=out, until="embeddings", config=config).exit_code == 0
    labels = tmp_path / "labels.csv"
    lines = [f"P{number:02},{number % 2}" for number in range(1, NUM_CASES + 1)]
    labels.write_text("case_id,grade\n" + "\n".join(lines) + "\n")
    found = read_cohort(out, LabelsConfig(labels=labels, target=("grade",)))
    assert found.account[0] == f"{NUM_CASES} slides of {NUM_CASES} cases for training"


@pytest.mark.parametrize("is_gone", [False, True], ids=["copied", "moved"])
def test_a_slide_whose_ledger_is_damaged_keeps_its_id_at_another_place(
    tmp_path: Path, is_gone: bool
) -> None:
    """Of three slides of one name one has a damaged ledger, and a fourth is new."""
    cases(tmp_path / "a", 3)
    out = tmp_path / "results"
    before = ids([tmp_path / "a"], out)
    tissue([tmp_path / "a"], out)
    ledger = out / SLIDES / before["P02"] / "slide.json"
    ledger.write_bytes(ledger.read_bytes().replace(b'"stages"', b'"stagez"'))
    cases(tmp_path / "b", 4)
    if is_gone:
        shutil.rmtree(tmp_path / "a")
        shutil.rmtree(tmp_path / "b" / "P04")
    lines: list[str] = []
    entries = assign_stored_ids(out, load_cohort([tmp_path / "b"]), lines.append)
    after = {Path(entry.slide_path).parent.name: entry.slide_id for entry in entries}
    assert {name: after[name] for name in before} == before
    assert after.get("P04", "new") not in before.values()
    (line,) = [
        line for line in lines if repr(before["P02"]) in line and "damaged" in line
    ]
    assert "whose slide.json is damaged" in line
