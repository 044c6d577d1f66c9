"""The ledger takes nothing for done that is not, and knows what was made from what."""

import json
import secrets
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinsection.errors import StoreError
from thinsection.files.sources import RemoteFolder
from thinsection.store.identity import fingerprint
from thinsection.store.ledger import (
    FORMAT,
    Elsewhere,
    SlideLedger,
    StageRecord,
    load_ledger,
    load_ledgers,
    stage_key,
)

MASK, TILES = "slides/tissue", "256px_0.5mpp/tiles"
FEATURES, POOLED = "256px_0.5mpp/features_a", "256px_0.5mpp/slide_features_mean-a"
OTHER = "512px_0.5mpp/tiles"


def ledger(out: Path) -> SlideLedger:
    (out / "a.bin").write_bytes(b"12345")
    made = SlideLedger(out=out, slide_id="s", slide={"slide_id": "s"})
    made = made.with_stage(MASK, StageRecord(key="k1", files={"a.bin": 5}))
    tiles = StageRecord(key="k2", files={}, needs=(MASK,), facts={"num_tiles": 3})
    return made.with_stage(TILES, tiles)


def graph(out: Path, *edges: tuple[str, str]) -> SlideLedger:
    """A ledger of stages in this order, each made from one other; '' for none."""
    made = SlideLedger(out=out, slide_id="s")
    for address, need in edges:
        record = StageRecord(key=address, files={}, needs=(need,) if need else ())
        made = made.with_stage(address, record)
    return made


def test_a_saved_ledger_comes_back(tmp_path: Path) -> None:
    made = ledger(tmp_path)
    made.save()
    assert made.path == tmp_path / "slides" / "s" / "slide.json"
    assert load_ledger(tmp_path, "s") == made
    assert load_ledger(tmp_path, "s").done(MASK, "k1")
    assert load_ledger(tmp_path, "other").stages == {}


def test_ledgers_of_a_folder_come_by_slide_id(tmp_path: Path) -> None:
    assert load_ledgers(tmp_path) == []
    for name in ("b", "a"):
        SlideLedger(out=tmp_path, slide_id=name).save()
    (tmp_path / "slides" / "c").mkdir()
    assert [found.slide_id for found in load_ledgers(tmp_path)] == ["a", "b"]


def test_another_key_a_missing_file_or_another_size_is_not_done(tmp_path: Path) -> None:
    made = ledger(tmp_path)
    assert not made.done(MASK, "other")
    assert not made.done("slides/none", "k1")
    (tmp_path / "a.bin").write_bytes(b"1234")
    assert not made.done(MASK, "k1")
    (tmp_path / "a.bin").unlink()
    assert not made.done(MASK, "k1")
    assert made.done(TILES, "k2")  # a stage without files


def test_a_folder_in_the_place_of_a_file_is_not_complete(tmp_path: Path) -> None:
    made = ledger(tmp_path)
    record = made.stages[MASK]
    assert made.complete(record)
    (tmp_path / "a.bin").unlink()
    (tmp_path / "a.bin").mkdir()
    assert not made.complete(record)


def test_what_was_made_from_a_stage_is_found_through_all_that_lies_between(
    tmp_path: Path,
) -> None:
    made = graph(
        tmp_path,
        (MASK, ""),
        (TILES, MASK),
        (FEATURES, TILES),
        (POOLED, FEATURES),
        (OTHER, MASK),
    )
    assert made.derived(MASK) == (TILES, FEATURES, POOLED, OTHER)
    assert made.derived(TILES) == (FEATURES, POOLED)
    assert made.derived(POOLED) == ()
    assert made.derived("slides/none") == ()


@given(
    st.permutations([(MASK, ""), (TILES, MASK), (FEATURES, TILES), (POOLED, FEATURES)])
)
def test_what_was_made_from_a_stage_does_not_depend_on_the_order_of_the_ledger(
    edges: list[tuple[str, str]],
) -> None:
    assert set(graph(Path(), *edges).derived(MASK)) == {TILES, FEATURES, POOLED}


def test_a_ledger_without_some_stages_keeps_the_others_as_they_were(
    tmp_path: Path,
) -> None:
    made = graph(tmp_path, (MASK, ""), (TILES, MASK), (OTHER, MASK))
    less = made.without((TILES, "slides/none"))
    assert less == replace(
        made, stages={n: r for n, r in made.stages.items() if n != TILES}
    )
    assert list(less.stages) == [MASK, OTHER]
    assert TILES in made.stages  # a value


def test_a_stage_that_is_done_again_keeps_its_place_and_the_others(
    tmp_path: Path,
) -> None:
    made = graph(tmp_path, (MASK, ""), (TILES, MASK))
    again = made.with_stage(MASK, StageRecord(key="new", files={}))
    assert list(again.stages) == [MASK, TILES]
    assert again.stages[MASK].key == "new"


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", '{"format": 99}', '{"format": 2}'),
        '{"format": 2, "slide": {}, "stages": {"a": {}}}',
        '{"format": 2, "slide": {}, "stages": {"a": null}}',
        '{"format": 2, "slide": {}, "stages": []}',
        '{"format": 1, "slide": {}, "stages": {"tissue": {"key": "k", "files": {}, "facts": {}}}}',
        "\udc80",
    ],
)
def test_a_damaged_or_foreign_ledger_counts_as_none(tmp_path: Path, text: str) -> None:
    path = SlideLedger(out=tmp_path, slide_id="s").path
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert load_ledger(tmp_path, "s") == SlideLedger(out=tmp_path, slide_id="s")


def test_the_document_names_its_format(tmp_path: Path) -> None:
    ledger(tmp_path).save()
    document = json.loads(SlideLedger(out=tmp_path, slide_id="s").path.read_text())
    assert (document["format"], FORMAT) == (2, 2)
    assert document["stages"][TILES] == {
        **{
            "key": "k2",
            "files": {},
            "needs": [MASK],
            "facts": {"num_tiles": 3},
            "sums": {},
        }
    }


def test_files_at_a_url_count_and_are_fetched_once_when_they_are_read(
    tmp_path: Path,
) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    url = f"memory://{secrets.token_hex(4)}/out"
    made = ledger(tmp_path)
    RemoteFolder(url).put(tmp_path / "a.bin", "a.bin")
    (tmp_path / "a.bin").unlink()
    assert not made.done(MASK, "k1")
    made.save()
    Elsewhere(url=url, files={"a.bin": 5}).save(made.path.parent)
    there = load_ledger(tmp_path, "s")
    assert there.done(MASK, "k1")
    here = there.bring(there.stages[MASK])
    assert (tmp_path / "a.bin").read_bytes() == b"12345"
    assert here.elsewhere.brought == ("a.bin",)
    assert load_ledger(tmp_path, "s") == here
    assert here.bring(here.stages[MASK]) is here


def test_keys_do_not_depend_on_order_but_on_every_value() -> None:
    assert stage_key(a=1, b={"x": 1, "y": 2}) == stage_key(b={"y": 2, "x": 1}, a=1)
    assert stage_key(a=1) != stage_key(a=2)


def test_a_fingerprint_follows_the_content_not_the_name(tmp_path: Path) -> None:
    a, b = tmp_path / "a.svs", tmp_path / "b.svs"
    data = bytes(range(256)) * 4000
    a.write_bytes(data)
    b.write_bytes(data)
    assert fingerprint(a) == fingerprint(b)
    b.write_bytes(data[:-1] + b"\1")
    assert fingerprint(a) != fingerprint(b)
    b.write_bytes(data + b"\0")
    assert fingerprint(a) != fingerprint(b)
    with pytest.raises(StoreError, match="slide must be readable"):
        fingerprint(tmp_path / "none.svs")


def test_files_beside_a_mrxs_belong_to_its_fingerprint(tmp_path: Path) -> None:
    slide = tmp_path / "a.mrxs"
    slide.write_bytes(b"x")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "Data0000.dat").write_bytes(b"12")
    before = fingerprint(slide)
    (tmp_path / "a" / "Data0000.dat").write_bytes(b"123")
    assert fingerprint(slide) != before


def test_records_are_values(tmp_path: Path) -> None:
    made = ledger(tmp_path)
    assert replace(made) == made
