"""The ledger takes nothing for done that is not."""

from dataclasses import replace
from pathlib import Path

import pytest

from thinsection.errors import StoreError
from thinsection.store.ledger import (
    LEDGER_NAME,
    SlideLedger,
    StageRecord,
    fingerprint,
    load_ledger,
    stage_key,
)


def ledger(folder: Path) -> SlideLedger:
    (folder / "a.bin").write_bytes(b"12345")
    made = SlideLedger(folder=folder, slide={"slide_id": "s"})
    made = made.with_stage("tissue", StageRecord(key="k1", files={"a.bin": 5}))
    return made.with_stage("tile", StageRecord(key="k2", files={}, facts={"num_tiles": 3}))


def test_a_saved_ledger_comes_back(tmp_path: Path) -> None:
    made = ledger(tmp_path)
    made.save()
    assert load_ledger(tmp_path) == made
    assert load_ledger(tmp_path).done("tissue", "k1")


def test_another_key_a_missing_file_or_another_size_is_not_done(tmp_path: Path) -> None:
    made = ledger(tmp_path)
    assert not made.done("tissue", "other")
    assert not made.done("embed", "k1")
    (tmp_path / "a.bin").write_bytes(b"1234")
    assert not made.done("tissue", "k1")
    (tmp_path / "a.bin").unlink()
    assert not made.done("tissue", "k1")


def test_a_changed_stage_forgets_the_later_ones(tmp_path: Path) -> None:
    made = ledger(tmp_path)
    same = made.with_stage("tissue", StageRecord(key="k1", files={}))
    assert "tile" in same.stages
    changed = made.with_stage("tissue", StageRecord(key="new", files={}))
    assert list(changed.stages) == ["tissue"]


@pytest.mark.parametrize("text", ["", "{", '{"format": 99}', '{"format": 1, "stages": {"a": {}}}'])
def test_a_damaged_or_foreign_ledger_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / LEDGER_NAME).write_text(text)
    assert load_ledger(tmp_path).stages == {}


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
