"""Which file a slide is: copies stay the same one, a change between the samples does not."""

import os
from dataclasses import asdict
from pathlib import Path

import pytest

from thinsection.store.identity import Identity, WholeFileHash, fingerprint, whole_sum

DATA = bytes(range(256)) * 8000  # 2 MB: the samples are 290 kB apart


def slide(path: Path, data: bytes = DATA, *, time_ns: int = 10**18) -> Path:
    path.write_bytes(data)
    os.utime(path, ns=(time_ns, time_ns))
    return path


def changed(data: bytes) -> bytes:
    """200 KB other bytes, none of them in a sample."""
    return data[:40_000] + b"x" * 200_000 + data[240_000:]


@pytest.fixture
def known(tmp_path: Path) -> dict[str, str]:
    """What a run that read tiles has left."""
    path = slide(tmp_path / "a.svs")
    first = asdict(Identity.read(path, {}, "times"))
    assert first["whole"] == ""  # nothing but samples was read
    return first | {"whole": WholeFileHash(str(path)).result()}


def test_the_change_lies_between_the_samples(
    tmp_path: Path, known: dict[str, str]
) -> None:
    other = slide(tmp_path / "b.svs", changed(DATA))
    assert fingerprint(other) == known["samples"]
    assert whole_sum(other) != known["whole"]


def test_an_untouched_file_is_known_without_reading_all_of_it(
    tmp_path: Path, known: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinsection.store.identity.whole_sum", None)
    assert asdict(Identity.read(tmp_path / "a.svs", known, "times")) == known


def test_a_copy_with_another_time_is_the_same_and_compared_once(
    tmp_path: Path, known: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = slide(tmp_path / "copy.svs", time_ns=2 * 10**18)
    found = Identity.read(copy, known, "times")
    assert found.source == known["source"]
    monkeypatch.setattr("thinsection.store.identity.whole_sum", None)
    assert Identity.read(copy, asdict(found), "times") == found


def test_a_change_between_the_samples_is_another_file(
    tmp_path: Path, known: dict[str, str]
) -> None:
    slide(tmp_path / "a.svs", changed(DATA), time_ns=2 * 10**18)
    found = Identity.read(tmp_path / "a.svs", known, "times")
    assert found.source not in (known["source"], "")
    assert (
        Identity.read(tmp_path / "a.svs", asdict(found), "times") == found
    )  # from now on known
    assert Identity.read(tmp_path / "a.svs", known, "samples").source == known["source"]


def test_full_reads_every_byte_even_where_the_time_is_the_same(
    tmp_path: Path, known: dict[str, str]
) -> None:
    assert Identity.read(tmp_path / "a.svs", {}, "full").whole == known["whole"]
    assert Identity.read(tmp_path / "a.svs", known, "full").source == known["source"]
    slide(tmp_path / "a.svs", changed(DATA))
    assert Identity.read(tmp_path / "a.svs", known, "times").source == known["source"]
    assert Identity.read(tmp_path / "a.svs", known, "full").source != known["source"]


def test_a_file_whose_tiles_nobody_read_is_taken_as_it_is_and_remembered(
    tmp_path: Path, known: dict[str, str]
) -> None:
    path = slide(tmp_path / "a.svs", time_ns=3 * 10**18)
    found = Identity.read(path, known | {"whole": ""}, "times")
    assert (found.source, found.whole) == (known["source"], known["whole"])


def test_a_data_file_beside_a_mrxs_counts(tmp_path: Path) -> None:
    path = slide(tmp_path / "a.mrxs", b"x")
    (tmp_path / "a").mkdir()
    slide(tmp_path / "a" / "Data0000.dat", b"12")
    before = asdict(Identity.read(path, {}, "full"))
    slide(tmp_path / "a" / "Data0000.dat", b"13", time_ns=2 * 10**18)
    assert Identity.read(path, before, "times").source != before["source"]
