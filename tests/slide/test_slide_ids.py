"""Ids of slides: the stem, and a hash of the file's place where the stem does not do."""

import hashlib
from pathlib import Path

import pytest

from thinsection.slide import ids as slide_ids
from thinsection.slide.ids import (
    SlideFile,
    assign_ids,
    file_key,
    folded,
    is_unsafe,
    slide_stem,
)


def digest(file: str, digits: int = 8) -> str:
    return hashlib.sha256(file.encode()).hexdigest()[:digits]


def test_a_stem_of_its_own_is_the_id() -> None:
    assert assign_ids({"/x/a.svs": "a", "/x/b.svs": "b"}, {}) == {
        "/x/a.svs": "a",
        "/x/b.svs": "b",
    }


def test_equal_stems_get_a_hash_of_their_place_whatever_the_order() -> None:
    new = {"/y/a.svs": "a", "/x/a.svs": "a", "/x/c.svs": "c"}
    ids = assign_ids(new, {})
    assert ids == {
        "/x/a.svs": f"a-{digest('/x/a.svs')}",
        "/y/a.svs": f"a-{digest('/y/a.svs')}",
        "/x/c.svs": "c",
    }
    assert assign_ids(dict(reversed(new.items())), {}) == ids


def test_a_stem_that_a_known_slide_has_is_not_given_again() -> None:
    known = {"a": SlideFile("/x/a.svs", "a")}
    assert assign_ids({"/y/a.svs": "a"}, known) == {
        "/y/a.svs": f"a-{digest('/y/a.svs')}"
    }
    # also where the known slide has another id by a table, or another name and this id
    by_table = {"first": SlideFile("/x/a.svs", "a")}
    assert assign_ids({"/y/a.svs": "a"}, by_table)["/y/a.svs"] != "a"
    renamed = {"A": SlideFile("/x/other.svs", "other")}
    assert assign_ids({"/y/a.svs": "a"}, renamed)["/y/a.svs"] != "a"


def test_names_that_some_file_system_takes_for_one_are_one() -> None:
    ids = assign_ids({"/x/A.svs": "A", "/x/a.tif": "a"}, {})
    assert set(ids.values()) == {f"A-{digest('/x/A.svs')}", f"a-{digest('/x/a.tif')}"}
    assert folded("Stra\u00dfe") == folded("STRASSE")
    assert folded("e\u0301") == folded("\u00e9")


def test_a_hash_that_is_taken_is_longer() -> None:
    file = "/y/a.svs"
    known = {
        "a": SlideFile("/x/a.svs", "a"),
        f"A-{digest(file)}": SlideFile("/z/b.svs", "b"),
    }
    assert assign_ids({file: "a"}, known)[file] == f"a-{digest(file, 16)}"
    known[f"a-{digest(file, 16)}"] = SlideFile("/z/c.svs", "c")
    assert assign_ids({file: "a"}, known)[file] == f"a-{digest(file, 64)}"


def test_new_slides_do_not_get_one_hash_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slide_ids, "_HASH_DIGITS", (1, 64))  # 40 files, 16 short hashes
    new = {f"/{number}/a.svs": "a" for number in range(40)}
    ids = assign_ids(new, {})
    assert len(set(ids.values())) == 40
    assert assign_ids(dict(reversed(new.items())), {}) == ids


@pytest.mark.parametrize(
    ("name", "odd"),
    [
        ("a", False),
        ("a.b c-1_", False),
        ("", True),
        (".hidden", True),
        ("a/b", True),
        ("a\\b", True),
        ("a:b", True),
        ("a?", True),
        ("a\nb", True),
        ("a\x7f", True),
        ("run.json", True),
        ("Summary.CSV", True),
        ("x" * 200, False),
        ("x" * 201, True),
        ("\u00e9" * 100, False),
        ("\u00e9" * 101, True),
    ],
)
def test_names_that_no_folder_can_have(name: str, odd: bool) -> None:
    assert is_unsafe(name) == odd


def test_an_odd_stem_gets_a_safe_id() -> None:
    ids = assign_ids({"/x/1": "a:b?c", "/x/2": "..", "/x/3": "x" * 300}, {})
    assert ids["/x/1"] == f"a_b_c-{digest('/x/1')}"
    assert ids["/x/2"] == f"slide-{digest('/x/2')}"
    assert ids["/x/3"] == f"{'x' * 135}-{digest('/x/3')}"
    assert not any(is_unsafe(slide_id) for slide_id in ids.values())


def test_a_long_stem_leaves_room_for_the_longest_hash() -> None:
    """135 bytes, a dash and 64 digits are the 200 bytes that an id may have."""
    ids = assign_ids({"/x/1": "x" * 136, "/x/2": "x" * 136, "/x/3": "y" * 136}, {})
    assert ids["/x/1"] == f"{'x' * 135}-{digest('/x/1')}"
    assert ids["/x/3"] == "y" * 136
    assert assign_ids({"/x/1": "z" * 135, "/x/2": "z" * 135}, {})["/x/1"] == (
        f"{'z' * 135}-{digest('/x/1')}"
    )


def test_the_file_of_a_link_is_its_target_and_its_stem_its_own(tmp_path: Path) -> None:
    target = tmp_path / "target.svs"
    target.touch()
    link = tmp_path / "link.tif"
    link.symlink_to(target)
    assert file_key(str(link)) == str(target.resolve())
    assert slide_stem(str(link)) == "link"


def test_the_file_of_a_url_is_the_url() -> None:
    assert file_key("s3://b/x.zarr/") == "s3://b/x.zarr"
    assert slide_stem("https://h/a.svs?token=b/c.d") == "a"
    assert slide_stem("/x/what?.svs") == "what?"
