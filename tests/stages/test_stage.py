"""Keys, values and the ledger of a slide at work, by stages that write a line of text."""

import copy
import os
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from thinsection.config import as_mapping, from_mapping
from thinsection.errors import StaleResultError, StoreError
from thinsection.run.pooling import RecordedStage
from thinsection.slide.cohort import SlideEntry
from thinsection.slide.look import Look
from thinsection.stages.stage import (
    Output,
    Reads,
    SlideWork,
    Stage,
)
from thinsection.store.identity import (
    Source,
    file_sum,
    file_times,
    fingerprint,
    source_key,
)
from thinsection.store.ledger import (
    SlideLedger,
    StageRecord,
    load_ledger,
    stage_key,
)
from thinsection.store.outcome import ledger_facts

PIXELS = Source(key="pixels")


@dataclass(frozen=True, kw_only=True)
class Words(Stage[str]):
    """A file of text, made of other stages."""

    title: ClassVar[str] = "words"
    reads: ClassVar[Reads] = "store"

    text: str
    name: str = "words"
    of: Stage[Any] | None = None

    @property
    def address(self) -> str:
        return f"grid/{self.name}"

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"text": self.text}

    def make(self, work: SlideWork) -> Output[str]:
        name = self.file(work.entry.slide_id, ".txt")
        work.path(name).parent.mkdir(parents=True, exist_ok=True)
        work.path(name).write_text(self.text)
        facts = {"length": len(self.text), "rows": f"rows of {self.name}"}
        return Output(files=(name,), facts=facts, value=self.text)

    def load(self, work: SlideWork) -> str:
        return work.path(self.file(work.entry.slide_id, ".txt")).read_text() + " read"


@dataclass(frozen=True, kw_only=True)
class Named(Words):
    """Words that repeat the cohort's label."""

    cohort_columns: ClassVar[tuple[str, ...]] = ("label",)


@dataclass(frozen=True, kw_only=True)
class Drawn(Words):
    """Words of what was drawn."""

    @property
    def annotation_setting(self) -> str:
        return "roi"

    def make(self, work: SlideWork) -> Output[str]:
        output = super().make(work)
        facts = {"pixels": work.source.key}
        return Output(files=output.files, facts=facts, value=output.value)


@dataclass(frozen=True, kw_only=True)
class Size(Stage[int]):
    """The width of the opened slide."""

    title: ClassVar[str] = "size"
    reads: ClassVar[Reads] = "slide"

    @property
    def address(self) -> str:
        return "slides/size"

    def make(self, work: SlideWork) -> Output[int]:
        width = work.opened.size[0]
        return Output(files=(), facts={"width": width}, value=width)


@dataclass(frozen=True, kw_only=True)
class SizeOf(Size):
    """The same, of a slide with another stage."""

    of: Stage[Any]


FIRST = Words(text="first", name="first")
SECOND = Words(text="second", name="second", of=FIRST)
THIRD = Words(text="third", name="third", of=SECOND)


def work_in(
    out: Path,
    *stages: Stage[Any],
    source: Source = PIXELS,
    overwrite: bool = False,
    **entry: Any,
) -> SlideWork:
    """The slide 'a' as its ledger has it."""
    slide = out / "a.svs"
    if not slide.exists():
        slide.write_bytes(b"pixels of a slide")
    row = {"slide_id": "a", "slide_path": str(slide)} | entry
    ledger = load_ledger(out, "a")
    return SlideWork(
        entry=SlideEntry(**row),
        out=out,
        source=source,
        ledger=ledger,
        stages=stages,
        overwrite=overwrite,
    )


def made(out: Path, *stages: Any, **more: Any) -> SlideWork:
    """The slide with these stages performed."""
    work = work_in(out, *stages, **more)
    for stage in stages:
        work.perform(stage)
    return work


# keys


def test_a_key_is_of_the_source_the_settings_and_the_keys_of_what_is_needed() -> None:
    first = stage_key(of=["pixels"], settings={"text": "first"})
    assert FIRST.key(PIXELS) == first
    assert SECOND.key(PIXELS) == stage_key(of=[first], settings={"text": "second"})
    assert SECOND.key(PIXELS) != SECOND.key(Source(key="other"))
    other = Words(text="second", name="second", of=Words(text="x", name="first"))
    assert other.key(PIXELS) != SECOND.key(PIXELS)
    assert SECOND.needs == (FIRST,) and FIRST.needs == ()


def test_what_was_drawn_counts_for_the_stage_that_is_made_of_it_alone() -> None:
    source = Source(key="pixels", annotation_hashes={"roi": "ab", "tissue": "cd"})
    edited = Source(key="pixels", annotation_hashes={"roi": "xx", "tissue": "cd"})
    other_role = Source(key="pixels", annotation_hashes={"roi": "ab", "tissue": "xx"})
    drawn = Drawn(text="x")
    expected = stage_key(of=["pixels"], settings={"text": "x"}, drawn="ab")
    assert drawn.key(source) == drawn.key(other_role) == expected != drawn.key(edited)
    assert FIRST.key(source) == FIRST.key(edited) == FIRST.key(PIXELS)
    # where nothing was drawn, the key is that of a stage without annotations
    assert drawn.key(PIXELS) == stage_key(of=["pixels"], settings={"text": "x"})


def test_a_source_survives_copies_pickle_and_json() -> None:
    entry = SlideEntry(slide_id="a", slide_path="a.svs", slide_mpp=(0.5, 0.25))
    source = replace(source_key("content", entry), annotation_hashes={"roi": "ab"})
    assert source.key == stage_key(slide="content", mpp=(0.5, 0.25))
    assert copy.deepcopy(source) == pickle.loads(pickle.dumps(source)) == source  # noqa: S301
    assert from_mapping(Source, as_mapping(source)) == source
    assert Drawn(text="x").key(copy.copy(source)) == Drawn(text="x").key(source)
    look = Look(channels=("DAPI",))
    shown = SlideEntry(slide_id="a", slide_path="a.svs", look=look)
    plain = SlideEntry(slide_id="a", slide_path="a.svs")
    assert source_key("content", shown).key == stage_key(
        slide="content", mpp=None, look=asdict(look)
    )
    assert source_key("content", plain) == Source(
        key=stage_key(slide="content", mpp=None)
    )


def test_a_recorded_stage_has_the_recorded_key() -> None:
    stage = RecordedStage(recorded_address="grid/x", recorded_key="k")
    assert (stage.address, stage.key(PIXELS)) == ("grid/x", "k")


def test_files_lie_below_the_address_and_folders_below_the_slide() -> None:
    assert FIRST.file("a") == "grid/first/a.h5"
    assert FIRST.file("a", ".txt") == "grid/first/a.txt"
    assert Size().folder("a") == "slides/a/size"
    assert FIRST.folder("a") == "slides/a/grid/first"


def test_a_stage_that_nobody_reads_says_so(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="slides/size must define `load`"):
        Size().load(work_in(tmp_path))
    assert (
        Size().settings == {}
        and Size().annotation_setting == ""
        and Size().cohort_columns == ()
    )


# ledger and values


def test_a_stage_is_recorded_with_key_files_needs_facts_and_sums(
    tmp_path: Path,
) -> None:
    work = made(tmp_path, FIRST, SECOND)
    record = load_ledger(tmp_path, "a").stages["grid/second"]
    assert record.key == SECOND.key(PIXELS)
    assert record.files == {"grid/second/a.txt": len("second")}
    assert record.needs == ("grid/first",)
    assert record.facts == {"length": 6, "rows": "rows of second"}
    path = tmp_path / "grid/second/a.txt"
    assert record.sums == {"grid/second/a.txt": file_sum(path)}
    assert work.is_done(SECOND) and not work.is_done(THIRD)
    assert work.stage_title == "words"


def test_a_value_is_what_the_stage_gave_or_what_is_read_back_once(
    tmp_path: Path,
) -> None:
    work = made(tmp_path, FIRST)
    assert work.value(FIRST) == "first"
    later = work_in(tmp_path, FIRST)
    assert later.value(FIRST) == "first read"
    (tmp_path / "grid/first/a.txt").write_text("changed")
    assert later.value(FIRST) == "first read"


def test_a_stage_without_a_value_is_read_back(tmp_path: Path) -> None:
    work = made(tmp_path, FIRST)
    work.record(FIRST, Output(files=("grid/first/a.txt",)))
    assert work.value(FIRST) == "first"  # that of before stays
    later = work_in(tmp_path, FIRST)
    later.record(FIRST, Output(files=("grid/first/a.txt",)))
    assert later.value(FIRST) == "first read"


def test_what_is_missing_is_what_the_ledger_lacks_or_everything(
    tmp_path: Path,
) -> None:
    made(tmp_path, FIRST)
    work = work_in(tmp_path, FIRST, SECOND)
    assert work.missing == []
    work.find_missing()
    assert work.missing == [SECOND]
    work.find_missing(resume=False)
    assert work.missing == [FIRST, SECOND]
    work.perform(FIRST)
    assert work.missing == [SECOND]


def test_a_stage_of_the_slide_runs_on_it(tmp_path: Path) -> None:
    work = work_in(tmp_path, Size())
    work.find_missing()
    work.slide = SimpleNamespace(size=(7, 5))  # type: ignore[assignment]
    work.perform(Size())
    assert work.value(Size()) == 7 and work.missing == []
    assert work.stage_title == "size"
    assert load_ledger(tmp_path, "a").stages["slides/size"].facts == {"width": 7}


def test_the_title_of_a_stage_that_fails_is_known(tmp_path: Path) -> None:
    work = work_in(tmp_path, Size())
    assert work.stage_title == "open"
    work.slide = SimpleNamespace()  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        work.perform(Size())
    assert work.stage_title == "size"


def test_the_columns_of_the_cohort_count_where_a_result_repeats_them(
    tmp_path: Path,
) -> None:
    named = Named(text="x", name="named")
    work = made(tmp_path, named, FIRST, label="LUAD")
    assert work.result_key(FIRST) == FIRST.key(PIXELS)
    key = named.key(PIXELS)
    assert work.result_key(named) == stage_key(of=key, said={"label": "LUAD"}) != key
    corrected = work_in(tmp_path, named, FIRST, label="LUSC")
    corrected.find_missing()
    assert corrected.missing == [named]
    corrected.check_stale()  # it costs no tile
    unnamed = work_in(tmp_path, named, FIRST)
    unnamed.find_missing()
    assert unnamed.missing == []


def test_columns_of_an_earlier_cohort_are_kept_and_new_ones_win(tmp_path: Path) -> None:
    work = made(tmp_path, FIRST, label="LUAD", more={"site": "x", "scanner": "y"})
    assert work.ledger.slide["more"] == {"site": "x", "scanner": "y"}
    later = work_in(tmp_path, FIRST, patient_id="p", more={"site": "z"})
    assert later.ledger.slide["label"] == "LUAD"
    assert later.ledger.slide["patient_id"] == "p"
    assert later.ledger.slide["more"] == {"site": "z", "scanner": "y"}


def test_facts_of_a_slide_are_those_of_the_runs_stages_with_warnings_joined() -> None:
    ledger = SlideLedger(out=Path("out"), slide_id="a", slide={"warnings": "w1"})
    stage = SimpleNamespace(facts={"n": 1, "warnings": "w2"})
    other = SimpleNamespace(facts={"n": 2, "warnings": "w1"})
    tissue, qc = "slides/tissue", "slides/qc_auto"
    ledger.stages.update({tissue: stage, qc: other})  # type: ignore[dict-item]
    assert ledger_facts(ledger, [tissue, "gone"]) == {"n": 1, "warnings": "w1; w2"}
    assert ledger_facts(ledger, [tissue, qc]) == {"n": 2, "warnings": "w1; w2"}


def test_of_several_grids_tiles_are_added_and_warnings_name_the_grid() -> None:
    ledger = SlideLedger(out=Path("out"), slide_id="a", slide={"warnings": "w1"})
    for address, count in (("fine/tiles", 16), ("coarse/tiles", 1)):
        facts = {"num_tiles": count, "warnings": "w2"}
        ledger.stages[address] = SimpleNamespace(facts=facts)  # type: ignore[assignment]
    assert ledger_facts(ledger, ["fine/tiles"]) == {
        "num_tiles": 16,
        "warnings": "w1; w2",
    }
    assert ledger_facts(ledger, ["fine/tiles", "coarse/tiles"]) == {
        "num_tiles": 17,
        "warnings": "w1; fine: w2; coarse: w2",
    }


def test_work_tells_the_facts_of_its_own_stages(tmp_path: Path) -> None:
    made(tmp_path, FIRST, SECOND)
    assert work_in(tmp_path, FIRST).facts()["length"] == len("first")


# what is outdated


def changed(text: str = "other") -> Words:
    return Words(text=text, name="first")


def test_another_result_under_the_name_is_refused(tmp_path: Path) -> None:
    made(tmp_path, FIRST)
    work = work_in(tmp_path, changed())
    work.find_missing()
    with pytest.raises(
        StaleResultError,
        match=r"grid/first of 'a' must come from the same slide file and settings, "
        r"got a result of another slide file, resolution, weights or version; pass "
        r"overwrite=True to replace it and all "
        r"results that were "
        r"made from it, or pass another out=",
    ):
        work.check_stale()
    allowed = work_in(tmp_path, changed(), overwrite=True)
    allowed.find_missing()
    allowed.check_stale()
    again = work_in(tmp_path, FIRST)
    again.find_missing(resume=False)  # the same key is no other result
    again.check_stale()


def test_a_result_that_is_replaced_takes_along_what_was_made_from_it(
    tmp_path: Path,
) -> None:
    beside = Words(text="beside", name="beside")
    made(tmp_path, FIRST, SECOND, THIRD, beside)
    work = work_in(tmp_path, changed())
    work.remove_outdated(changed())
    left = {path.name for path in tmp_path.glob("grid/*/a.txt")}
    assert left == {"a.txt"} and (tmp_path / "grid/beside/a.txt").exists()
    assert not (tmp_path / "grid/first/a.txt").exists()
    assert not (tmp_path / "grid/third/a.txt").exists()
    assert list(load_ledger(tmp_path, "a").stages) == ["grid/beside"]
    assert work.embeddings_before_edit == {}


def test_the_same_result_removes_nothing(tmp_path: Path) -> None:
    made(tmp_path, FIRST, SECOND)
    work_in(tmp_path, FIRST).perform(FIRST)
    assert list(load_ledger(tmp_path, "a").stages) == ["grid/first", "grid/second"]
    assert (tmp_path / "grid/second/a.txt").exists()


def test_a_file_that_is_not_written_again_goes(tmp_path: Path) -> None:
    work = made(tmp_path, FIRST)
    (tmp_path / "grid/first/b.txt").write_text("b")
    work.record(FIRST, Output(files=("grid/first/b.txt",)))
    assert not (tmp_path / "grid/first/a.txt").exists()
    assert (tmp_path / "grid/first/b.txt").exists()


# edits


def test_an_edit_is_made_again_and_keeps_the_rows_of_before_aside(
    tmp_path: Path,
) -> None:
    drawn = Drawn(text="drawn", name="drawn")
    rows = Words(text="rows", name="rows", of=drawn)
    before = Source(key="pixels", annotation_hashes={"roi": "1"})
    after = Source(key="pixels", annotation_hashes={"roi": "2"})
    made(tmp_path, drawn, rows, source=before)
    work = work_in(tmp_path, drawn, rows, source=after)
    work.find_missing()
    assert work.missing == [drawn, rows]
    work.check_stale()  # an edit is no other slide
    work.perform(drawn)
    ((path, settings_hash),) = work.embeddings_before_edit.items()
    assert settings_hash == "rows of rows"
    assert path.read_text() == "rows" and path.name.startswith(".a.txt")
    assert not (tmp_path / "grid/rows/a.txt").exists()
    assert work.removed_by_edit == []
    work.perform(rows)
    assert not path.exists() and not work.embeddings_before_edit


def test_rows_of_a_grid_that_is_not_of_the_run_wait_for_their_own_next_run(
    tmp_path: Path,
) -> None:
    drawn = Drawn(text="drawn", name="drawn")
    rows = Words(text="rows", name="rows", of=drawn)
    sources = [
        Source(key="pixels", annotation_hashes={"roi": str(number)})
        for number in range(3)
    ]
    made(tmp_path, drawn, rows, source=sources[0])
    for number, source in enumerate(sources[1:]):
        work = work_in(tmp_path, drawn, source=source)
        work.find_missing()
        work.perform(drawn)
        assert list(load_ledger(tmp_path, "a").stages) == ["grid/drawn"]
        # the second edit finds nothing to remove, and leaves what the first has kept
        assert work.removed_by_edit == (["grid/rows"] if number == 0 else [])
        (kept,) = (tmp_path / "grid/rows").iterdir()
        assert kept.read_text() == "rows" and kept.suffix != ".h5"
    later = work_in(tmp_path, drawn, rows, source=sources[2])
    later.find_missing()
    later.perform(rows)
    assert [path.name for path in (tmp_path / "grid/rows").iterdir()] == ["a.txt"]


def test_drawings_on_other_pixels_are_no_edit(tmp_path: Path) -> None:
    drawn = Drawn(text="drawn", name="drawn")
    rows = Words(text="rows", name="rows", of=drawn)
    made(
        tmp_path,
        drawn,
        rows,
        source=Source(key="pixels", annotation_hashes={"roi": "1"}),
    )
    other = Source(key="other", annotation_hashes={"roi": "2"})
    work = work_in(tmp_path, drawn, rows, source=other)
    work.find_missing()
    with pytest.raises(StaleResultError):
        work.check_stale()
    work.remove_outdated(drawn)
    assert work.embeddings_before_edit == {}


# the slide's file


def test_a_slide_that_changed_while_it_was_read_loses_what_was_made_of_it(
    tmp_path: Path,
) -> None:
    made(tmp_path, FIRST)
    slide = tmp_path / "a.svs"
    work = work_in(tmp_path, FIRST, SECOND)
    work.ledger.source["samples"] = fingerprint(slide)
    work.times = file_times(slide)
    work.perform(SECOND)
    work.check_unchanged()
    slide.write_bytes(b"other pixels of it")
    with pytest.raises(StoreError, match="slide must not change while it is read"):
        work.check_unchanged()
    assert list(load_ledger(tmp_path, "a").stages) == ["grid/first"]
    assert not (tmp_path / "grid/second/a.txt").exists()
    assert (tmp_path / "grid/first/a.txt").exists()


def test_results_of_a_changed_slide_may_be_gone_already(tmp_path: Path) -> None:
    work = work_in(tmp_path, FIRST, SECOND)
    work.ledger.source["samples"] = fingerprint(tmp_path / "a.svs")
    work.perform(FIRST)
    work.perform(SECOND)
    work.remove_outdated(changed())  # with it goes what was made from it
    work.perform(SECOND)
    (tmp_path / "grid/second/a.txt").unlink()
    (tmp_path / "a.svs").write_bytes(b"other pixels of it")
    with pytest.raises(StoreError, match="slide must not change"):
        work.check_unchanged()
    assert load_ledger(tmp_path, "a").stages == {}


def test_times_that_do_not_count_are_not_compared_but_bytes_are(tmp_path: Path) -> None:
    slide = tmp_path / "a.svs"
    work = work_in(tmp_path)
    work.ledger.source["samples"] = fingerprint(slide)
    times = file_times(slide)
    work.times = times
    work.check_unchanged()
    os.utime(slide, (1, 1))
    work.times = ""
    work.check_unchanged()
    work.times = times
    with pytest.raises(StoreError):  # who wrote the same bytes may have been at it
        work.check_unchanged()
    work.times = ""
    slide.write_bytes(b"x")
    with pytest.raises(StoreError):
        work.check_unchanged()


def test_the_hash_of_every_byte_is_added_to_what_is_known_of_the_file(
    tmp_path: Path,
) -> None:
    work = work_in(tmp_path)
    work.ledger.source["samples"] = "s"
    work.note_file_hash("w")
    assert work.ledger.source == {"samples": "s", "whole": "w"}


def test_an_opened_slide_is_described_in_the_ledger(tmp_path: Path) -> None:
    work = work_in(tmp_path, label="LUAD", more={"site": "x"})
    level = SimpleNamespace(size=(40, 30), downsample=1.0)
    slide = SimpleNamespace(
        slide_mpp=None,
        levels=[level],
        reader="tiff",
        size=(40, 30),
        objective_power=20,
        vendor="v",
        rendering="r",
        notes=("n1", "n2"),
    )
    work.note_opened(slide)  # type: ignore[arg-type]
    assert work.ledger.slide == {
        "slide_id": "a",
        "slide_path": str(tmp_path / "a.svs"),
        "image": None,
        "reader": "tiff",
        "width": 40,
        "height": 30,
        "levels": [{"size": [40, 30], "downsample": 1.0}],
        "mpp_x": None,
        "mpp_y": None,
        "objective_power": 20,
        "vendor": "v",
        "rendering": "r",
        "warnings": "n1; n2",
        "patient_id": None,
        "label": "LUAD",
        "split": None,
        "more": {"site": "x"},
    }
    slide.slide_mpp = (0.5, 0.25)
    work.note_opened(slide)  # type: ignore[arg-type]
    assert (work.ledger.slide["mpp_x"], work.ledger.slide["mpp_y"]) == (0.5, 0.25)


def test_files_that_lie_elsewhere_are_fetched_before_a_stage_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path, FIRST)
    fetched: list[str] = []

    def bring(ledger: SlideLedger, record: StageRecord) -> SlideLedger:
        fetched.append(record.key)
        return ledger

    monkeypatch.setattr(SlideLedger, "with_local_files", bring)
    key = FIRST.key(PIXELS)
    work = work_in(tmp_path, FIRST, SECOND)
    work.value(FIRST)
    assert fetched == [key]
    work.perform(SECOND)
    assert fetched == [key, key]
    work.slide = SimpleNamespace(size=(7, 5))  # type: ignore[assignment]
    work.perform(SizeOf(of=FIRST))
    assert fetched == [key, key, key]


def test_files_that_are_gone_already_are_no_error(tmp_path: Path) -> None:
    work = made(tmp_path, FIRST)
    path = tmp_path / "grid/first/a.txt"
    path.unlink()
    (tmp_path / "grid/first/b.txt").write_text("b")
    work.record(FIRST, Output(files=("grid/first/b.txt",)))
    (tmp_path / "grid/first/b.txt").unlink()
    other = work_in(tmp_path, changed())
    other.remove_outdated(changed())
    assert not load_ledger(tmp_path, "a").stages


def test_loaded_slide_encoders_are_found_by_name(tmp_path: Path) -> None:
    work = work_in(tmp_path)
    assert work.slide_encoders == {}
    encoders: Any = {"mean": object()}
    pooling = SlideWork(
        entry=work.entry,
        out=tmp_path,
        source=PIXELS,
        ledger=work.ledger,
        stages=(),
        slide_encoders=encoders,
    )
    assert pooling.slide_encoders == encoders
