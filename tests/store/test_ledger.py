"""The ledger takes nothing for done that is not, and knows what was made from what."""

import hashlib
import json
import os
import secrets
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinsection.errors import StoreError
from thinsection.files.sources import RemoteFolder
from thinsection.store.identity import Identity, fingerprint
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
    every = tuple(sorted((TILES, FEATURES, POOLED, OTHER)))
    assert made.addresses_made_from(MASK) == every
    assert made.addresses_made_from(TILES) == (FEATURES, POOLED)
    assert made.addresses_made_from(POOLED) == ()
    assert made.addresses_made_from("slides/none") == ()


@given(
    st.permutations([(MASK, ""), (TILES, MASK), (FEATURES, TILES), (POOLED, FEATURES)])
)
def test_what_was_made_from_a_stage_does_not_depend_on_the_order_of_the_ledger(
    edges: list[tuple[str, str]],
) -> None:
    assert set(graph(Path(), *edges).addresses_made_from(MASK)) == {
        TILES,
        FEATURES,
        POOLED,
    }


def test_a_ledger_without_some_stages_keeps_the_others_as_they_were(
    tmp_path: Path,
) -> None:
    made = graph(tmp_path, (MASK, ""), (TILES, MASK), (OTHER, MASK))
    less = made.without((TILES, "slides/none"))
    assert less == replace(
        made, stages={n: r for n, r in made.stages.items() if n != TILES}
    )
    assert list(less.stages) == [OTHER, MASK]
    assert TILES in made.stages  # a value


def test_stages_are_sorted_whatever_order_they_are_done_in(tmp_path: Path) -> None:
    """So a slide that was killed and resumed has the bytes of one that was not."""
    made = graph(tmp_path, (OTHER, ""), (MASK, ""), (TILES, MASK))
    again = made.with_stage(MASK, StageRecord(key="new", files={}))
    assert list(again.stages) == [TILES, OTHER, MASK]
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
    here = there.with_local_files(there.stages[MASK])
    assert (tmp_path / "a.bin").read_bytes() == b"12345"
    assert here.elsewhere.brought == ("a.bin",)
    assert load_ledger(tmp_path, "s") == here
    assert here.with_local_files(here.stages[MASK]) is here


def test_keys_do_not_depend_on_order_but_on_every_value() -> None:
    assert stage_key(a=1, b={"x": 1, "y": 2}) == stage_key(b={"y": 2, "x": 1}, a=1)
    assert stage_key(a=1) != stage_key(a=2)


def test_a_key_is_24_digits_of_the_hash_of_sorted_json() -> None:
    digest = hashlib.sha256(b'{"a": 1, "b": {"x": [2, null], "y": "z"}}').hexdigest()
    assert stage_key(b={"y": "z", "x": (2, None)}, a=1) == digest[:24]


def test_a_whole_number_has_one_key_however_it_is_written() -> None:
    assert stage_key(a=8.0) == stage_key(a=8)
    assert stage_key(a=[{"b": (8.0,)}]) == stage_key(a=[{"b": (8,)}])
    assert stage_key(a=8.5) != stage_key(a=8)


@pytest.mark.parametrize(
    ("slide", "facts", "field"),
    [
        ({"width": "wide"}, {}, "slide.width"),
        ({"more": {"site": 3}}, {}, "slide.more.site"),
        ({}, {"num_tiles": "x"}, "stages.a.facts.num_tiles"),
        ({}, {"warnings": 3}, "stages.a.facts.warnings"),
    ],
)
def test_a_value_of_another_type_damages_the_ledger_and_is_named(
    tmp_path: Path, slide: dict[str, object], facts: dict[str, object], field: str
) -> None:
    made = SlideLedger(out=tmp_path, slide_id="s", slide=slide)
    made.with_stage("a", StageRecord(key="k", files={}, facts=facts)).save()
    damaged = load_ledger(tmp_path, "s")
    assert damaged.stages == {}
    assert damaged.damage.startswith("slide.json is damaged: ")
    assert field in damaged.damage


def test_values_that_are_none_or_absent_damage_nothing(tmp_path: Path) -> None:
    made = SlideLedger(out=tmp_path, slide_id="s", slide={"width": None})
    made = made.with_stage(MASK, StageRecord(key="k", files={}, facts={"dim": None}))
    made.save()
    assert load_ledger(tmp_path, "s") == made
    assert load_ledger(tmp_path, "s").damage == ""


def test_a_ledger_is_saved_with_its_time_where_that_is_asked(tmp_path: Path) -> None:
    made = ledger(tmp_path)
    made.save()
    os.utime(made.path, ns=(3_000_000_000, 5_000_000_000))
    made.without([MASK]).save(keep_time=True)
    assert list(load_ledger(tmp_path, "s").stages) == [TILES]
    assert made.path.stat().st_mtime_ns == 5_000_000_000
    made.save()
    assert made.path.stat().st_mtime_ns > 5_000_000_000


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
    with pytest.raises(StoreError, match="slide must be an existing file"):
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


def test_a_source_with_other_fields_damages_the_ledger_of_its_slide_alone(
    tmp_path: Path,
) -> None:
    """One renamed field ended the runs of all slides once."""
    for name in ("a", "b"):
        SlideLedger(
            out=tmp_path,
            slide_id=name,
            source={"source": "s", "samples": "s", "times": "t", "whole": ""},
        ).save()
    path = tmp_path / "slides" / "a" / "slide.json"
    path.write_text(path.read_text().replace('"times"', '"timesx"'))
    a, b = load_ledgers(tmp_path)
    assert "source must have known fields, got ['timesx']" in a.damage
    assert b.damage == "" and b.source["times"] == "t"


def test_an_identity_without_its_fields_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "x.tif"
    path.write_bytes(b"pixels")
    whole = Identity.read(path, {}, "times")
    for recorded in ({"samples": whole.samples}, {"times": whole.times}, {"whole": ""}):
        assert Identity.read(path, recorded, "times") == whole
