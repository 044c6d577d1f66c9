"""`merge_results`: joined folders equal one run over all slides, or nothing is changed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from thinsection.config import replace_flat
from thinsection.errors import StoreError
from thinsection.files.atomic import link_or_copy, read_table
from thinsection.files.lock import LOCK_NAME, hold
from thinsection.results.folder import open_results
from thinsection.results.records import read_records
from thinsection.results.verify import verify
from thinsection.run import merge
from thinsection.run.merge import MergeSummary, merge_results
from thinsection.run.run import run
from thinsection.stages.config import RunConfig
from thinsection.store.identity import file_sum
from thinsection.testing.synthetic import write_he_slide

GRID = "256px_0.5mpp"
IDS = ("s0", "s1", "s2")


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slides")
    for number, name in enumerate(IDS):
        write_he_slide(folder / f"{name}.svs", (900, 700 + 16 * number), seed=number)
    return folder


def settings(**flat: object) -> RunConfig:
    """Settings of a run to the tile grid, or as they say."""
    return replace_flat(RunConfig(), {"until": "tiles", **flat})


def run_into(
    out: Path, slides: Path, *names: str, config: RunConfig | None = None
) -> Path:
    """Results folder of a run to the tile grid, or of other settings."""
    paths = [slides / f"{name}.svs" for name in names]
    summary = run(paths, out=out, config=config or settings())
    assert summary.counts["failed"] == 0, summary.results
    return out


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory, slides: Path) -> tuple[Path, Path]:
    """Two folders, both of which have s1."""
    home = tmp_path_factory.mktemp("parts")
    first = run_into(home / "a", slides, "s0", "s1")
    return first, run_into(home / "b", slides, "s1", "s2")


@pytest.fixture
def copies(parts: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """The two folders, for tests that damage them."""
    for path in parts:
        shutil.copytree(path, tmp_path / path.name)
    return tmp_path / "a", tmp_path / "b"


def statuses(summary: MergeSummary) -> dict[str, str]:
    return {slide.slide_id: slide.status for slide in summary.slides}


def files_of(out: Path) -> dict[str, bytes]:
    """Files of results: all that ledgers list, and no tables, pages and records."""
    return {
        name: (out / name).read_bytes()
        for ledger in open_results(out).ledgers.values()
        for record in ledger.stages.values()
        for name in record.files
    }


def everything_in(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def change_ledger(out: Path, slide_id: str, change: Callable[[dict], None]) -> None:  # type: ignore[type-arg]
    path = out / "slides" / slide_id / "slide.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_merged_folders_equal_one_run_over_all_slides(
    slides: Path, tmp_path: Path
) -> None:
    config = settings(
        until="slide-embeddings", pretrained=False, memory="256MiB", batch_size=4
    )
    whole = run_into(tmp_path / "whole", slides, *IDS, config=config)
    for number, name in enumerate(IDS):
        run_into(tmp_path / f"{number}", slides, name, config=config)
    sources = [tmp_path / f"{number}" for number in range(3)]
    summary = merge_results(sources, out=tmp_path / "all")
    assert statuses(summary) == dict.fromkeys(IDS, "taken")
    assert files_of(tmp_path / "all") == files_of(whole)
    assert summary.num_files == len(files_of(whole))
    for name in ("summary.csv", "failed.csv"):
        assert read_table(tmp_path / "all" / name) == read_table(whole / name)
    assert verify(tmp_path / "all")[1] == []
    # a run with the same settings finds everything, and reads no slide
    paths = [slides / f"{name}.svs" for name in IDS]
    opened: list[str] = []
    again = run(
        paths,
        out=tmp_path / "all",
        config=config,
        on_event=lambda event: opened.append(event.kind),
    )
    assert again.counts["skipped"] == 3
    assert set(opened) == {"ended"}
    # the later run has a record too, and a folder is listed in any order
    commands = {
        record.document["command"]: record.document
        for record in read_records(tmp_path / "all")
    }
    assert sorted(commands) == ["merge", "run"]
    origins = commands["merge"]["merged_from"]
    assert [Path(row["record"]).parents[1] for row in origins] == sources


def test_a_slide_of_two_folders_is_taken_once_and_the_folders_stay(
    parts: tuple[Path, Path], tmp_path: Path
) -> None:
    before = [everything_in(path) for path in parts]
    summary = merge_results(parts, out=tmp_path / "all")
    origins = {slide.slide_id: Path(slide.source) for slide in summary.slides}
    assert origins == {"s0": parts[0], "s1": parts[0], "s2": parts[1]}
    assert [everything_in(path) for path in parts] == before
    tiles = f"{GRID}/tiles/s0.h5"
    assert (tmp_path / "all" / tiles).samefile(parts[0] / tiles)
    merge_results(parts, out=tmp_path / "copied", copy=True)
    assert not (tmp_path / "copied" / tiles).samefile(parts[0] / tiles)
    assert files_of(tmp_path / "copied") == files_of(tmp_path / "all")


def test_the_second_merge_keeps_what_is_there_and_adds_what_is_new(
    slides: Path, parts: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "all"
    merge_results(parts[:1], out=out)
    before = everything_in(out / GRID)
    summary = merge_results(parts, out=out)
    assert statuses(summary) == {"s0": "kept", "s1": "kept", "s2": "taken"}
    after = everything_in(out / GRID)
    assert {name: after[name] for name in before} == before
    rows = read_table(out / "summary.csv")
    assert [(row["slide_id"], row["status"]) for row in rows] == [
        (name, "done") for name in IDS
    ]
    num_records = len(list((out / "records").glob("*/run.json")))
    assert statuses(merge_results(parts, out=out)) == dict.fromkeys(IDS, "kept")
    assert len(list((out / "records").glob("*/run.json"))) == num_records


def test_other_settings_lie_side_by_side(
    slides: Path, parts: tuple[Path, Path], tmp_path: Path
) -> None:
    other = run_into(tmp_path / "c", slides, "s0", config=settings(tile_px=128))
    notes: list[str] = []
    out = tmp_path / "all"
    merge_results([parts[0], other], out=out, on_message=notes.append)
    assert open_results(out).grids == ("128px_0.5mpp", GRID)
    assert files_of(out) == files_of(parts[0]) | files_of(other)
    assert "note: 1 of 2 slides have 128px_0.5mpp/tiles" in notes
    for tile_px in (256, 128):
        config = settings(tile_px=tile_px)
        again = run([slides / "s0.svs"], out=out, config=config)
        assert again.counts["skipped"] == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda document: document["stages"][f"{GRID}/tiles"].update(key="0" * 24),
            f"'s1' has {GRID}/tiles by other settings, weights or versions in ",
        ),
        (
            lambda document: document["source"].update(samples="0" * 24),
            "'s1' is another slide file in ",
        ),
    ],
)
def test_folders_that_disagree_are_named_and_nothing_is_written(
    copies: tuple[Path, Path],
    tmp_path: Path,
    change: Callable[[object], None],
    named: str,
) -> None:
    change_ledger(copies[1], "s1", change)
    with pytest.raises(StoreError, match="nothing was changed") as raised:
        merge_results(copies, out=tmp_path / "all")
    assert f"{named}{copies[0]} and {copies[1]}" in str(raised.value)
    assert "1 conflict" in str(raised.value)
    assert not (tmp_path / "all").exists()


def test_a_result_with_other_bytes_in_two_folders_is_refused(
    copies: tuple[Path, Path], tmp_path: Path
) -> None:
    name = "slides/s1/tissue.png"
    path = copies[1] / name
    path.write_bytes(path.read_bytes()[::-1])

    def other_sum(document: dict) -> None:  # type: ignore[type-arg]
        document["stages"]["slides/tissue"]["sums"][name] = file_sum(path)

    change_ledger(copies[1], "s1", other_sum)
    with pytest.raises(StoreError, match="'s1' has other files of slides/tissue in "):
        merge_results(copies, out=tmp_path / "all")
    assert not (tmp_path / "all").exists()


@pytest.mark.parametrize("order", [1, -1])
def test_a_file_with_other_bytes_than_were_written_is_taken_from_no_folder(
    copies: tuple[Path, Path], tmp_path: Path, order: int
) -> None:
    """Two slides are damaged: one that both folders have, and one that only one has."""
    for folder, slide in ((copies[1], "s1"), (copies[0], "s0")):
        path = folder / GRID / "tiles" / f"{slide}.h5"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    merged = merge_results(copies[::order], out=tmp_path / "all")
    (left_out,) = [one for one in merged.slides if one.status == "left-out"]
    assert left_out.slide_id == "s0"
    assert left_out.reason == f"{GRID}/tiles/s0.h5 has other bytes than were written"
    assert verify(tmp_path / "all")[1] == []


def test_other_weights_behind_one_name_are_refused(
    slides: Path, tmp_path: Path
) -> None:
    config = settings(until="embeddings", pretrained=False, memory="256MiB")
    first = run_into(tmp_path / "a", slides, "s0", config=config)
    second = run_into(tmp_path / "b", slides, "s2", config=config)
    address = f"{GRID}/features_efficientnet_lite0_seed0"

    def other_weights(document: dict) -> None:  # type: ignore[type-arg]
        document["stages"][address]["facts"]["weights_hash"] = "0" * 64

    change_ledger(second, "s2", other_weights)
    pattern = f"{address} has another weights_hash in {second} than in {first}"
    with pytest.raises(StoreError, match=pattern):
        merge_results([first, second], out=tmp_path / "all")


def test_unfinished_slides_are_left_out_with_the_reason(
    copies: tuple[Path, Path], tmp_path: Path
) -> None:
    first, second = copies
    (second / GRID / "tiles" / "s2.h5").write_bytes(b"")
    summary = merge_results([second], out=tmp_path / "one")
    assert statuses(summary) == {"s1": "taken", "s2": "left-out"}
    reasons = {slide.slide_id: slide.reason for slide in summary.slides}
    assert reasons["s2"] == f"{GRID}/tiles/s2.h5 is missing or incomplete"
    assert not (tmp_path / "one" / GRID / "tiles" / "s2.h5").exists()
    # as a killed run leaves it: the note on its end is missing
    for log in first.glob("records/*/ended/*.jsonl"):
        lines = [line for line in log.read_text().splitlines() if '"s0"' not in line]
        log.write_text("\n".join(lines) + "\n")
    with hold(first / "slides" / "s1" / LOCK_NAME):
        summary = merge_results([first], out=tmp_path / "two")
    reasons = {slide.slide_id: slide.reason for slide in summary.slides}
    assert reasons == {
        "s0": "its run did not finish; run the same command again there",
        "s1": "a process is working on it",
    }
    # another folder has finished it
    assert statuses(merge_results(copies, out=tmp_path / "three"))["s1"] == "taken"


def test_a_failed_slide_is_listed_until_a_folder_brings_its_results(
    slides: Path, parts: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "s2.svs").write_text("no slide")
    run([tmp_path / "bad" / "s2.svs"], out=tmp_path / "failed", until="tiles")
    out = tmp_path / "all"
    summary = merge_results([parts[0], tmp_path / "failed"], out=out)
    assert statuses(summary)["s2"] == "left-out"
    (row,) = read_table(out / "failed.csv")
    assert (row["slide_id"], row["stage"]) == ("s2", "open")
    merge_results([tmp_path / "failed", *parts], out=out)
    assert read_table(out / "failed.csv") == []
    assert open_results(out).failures() == {}


@pytest.mark.parametrize("count", [0, 1, 3, 6])
def test_an_interrupted_merge_continues(
    parts: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
) -> None:
    calls: list[Path] = []

    def place_some(source: Path, target: Path, *, copy: bool) -> None:
        if len(calls) == count:
            raise KeyboardInterrupt
        calls.append(source)
        link_or_copy(source, target, copy=copy)

    out = tmp_path / "all"
    with monkeypatch.context() as patch:
        patch.setattr(merge, "link_or_copy", place_some)
        with pytest.raises(KeyboardInterrupt):
            merge_results(parts, out=out)
    # what has a ledger is complete
    assert verify(out)[1] == []
    summary = merge_results(parts, out=out)
    assert "left-out" not in statuses(summary).values()
    merge_results(parts, out=tmp_path / "at_once")
    assert files_of(out) == files_of(tmp_path / "at_once")
    assert not list(out.rglob(".*.tmp-*"))


def test_a_file_in_the_way_is_not_replaced(
    parts: tuple[Path, Path], tmp_path: Path
) -> None:
    mine = tmp_path / "all" / GRID / "tiles" / "s0.h5"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    with pytest.raises(StoreError, match="must not have another file of this name"):
        merge_results(parts, out=tmp_path / "all")
    assert mine.read_bytes() == b"mine"


def test_a_recorded_name_cannot_leave_its_folder(
    copies: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(b"12345")

    def point_out(document: dict) -> None:  # type: ignore[type-arg]
        stage = document["stages"][f"{GRID}/tiles"]
        stage["files"] = {"../secret": 5}
        stage["sums"] = {}

    change_ledger(copies[0], "s0", point_out)
    summary = merge_results(copies[:1], out=tmp_path / "deep" / "all")
    assert statuses(summary)["s0"] == "left-out"
    assert not (tmp_path / "deep" / "secret").exists()


def test_a_path_that_was_relative_to_another_folder_becomes_absolute(
    slides: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workflow manager runs each slide in a folder of its own, through a link."""
    task = tmp_path / "task"
    task.mkdir()
    (task / "s0.svs").symlink_to(slides / "s0.svs")
    with monkeypatch.context() as patch:
        patch.chdir(task)
        run(["s0.svs"], out="results", until="tiles")
    merge_results([task / "results"], out=tmp_path / "all")
    (row,) = read_table(tmp_path / "all" / "summary.csv")
    assert row["slide_path"] == str(slides / "s0.svs")
    again = run([slides / "s0.svs"], out=tmp_path / "all", until="tiles")
    assert again.counts["skipped"] == 1


def test_tables_of_quality_control_and_exclusions_are_made_again(
    tmp_path: Path,
) -> None:
    for name, rule in (("s0", "pixels_to_use<0"), ("s1", "pixels_to_use<1e12")):
        paths = [tmp_path / f"{name}.svs"]
        write_he_slide(paths[0], (2400, 1800), seed=int(name[1]))
        config = settings(qc="auto", qc_strict=True, qc_fail=(rule,), measures=True)
        ended = run(paths, out=tmp_path / name, config=config)
        assert ended.counts["excluded" if name == "s1" else "done"] == 1
    out = tmp_path / "all"
    summary = merge_results([tmp_path / "s0", tmp_path / "s1"], out=out)
    assert statuses(summary) == {"s0": "taken", "s1": "taken"}
    rows = read_table(out / "qc_auto_strict.csv")
    assert [row["slide_id"] for row in rows] == ["s0", "s1"]
    assert (out / "qc_auto_strict.html").is_file()
    (measures,) = out.glob("measures_*.csv")
    assert [row["slide_id"] for row in read_table(measures)] == ["s0"]
    found = {row["slide_id"]: row["status"] for row in read_table(out / "summary.csv")}
    assert found == {"s0": "done", "s1": "excluded"}


def test_what_is_no_local_results_folder_is_refused(
    parts: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match="must be a results folder that contains"):
        merge_results([tmp_path], out=tmp_path / "all")
    with pytest.raises(StoreError, match="must be another folder than those"):
        merge_results(parts, out=parts[1])
    with pytest.raises(StoreError, match="must be a local folder, got 's3://b/r'"):
        merge_results(["s3://b/r"], out=tmp_path / "all")
    with pytest.raises(StoreError, match="at least one results folder"):
        merge_results([], out=tmp_path / "all")


def test_a_folder_of_results_folders_stands_for_them(
    parts: tuple[Path, Path], tmp_path: Path
) -> None:
    assert parts[0].parent == parts[1].parent
    summary = merge_results([parts[0].parent], out=tmp_path / "all")
    assert statuses(summary) == dict.fromkeys(IDS, "taken")
