"""Files appear whole or not at all."""

from pathlib import Path

import pytest

from thinsection.files.atomic import atomic_path, write_json, write_text


def test_a_failure_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "old")
    with pytest.raises(ValueError, match="stop"), atomic_path(tmp_path / "a.txt") as tmp:
        tmp.write_text("half")
        raise ValueError("stop")
    assert (tmp_path / "a.txt").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_the_file_is_not_there_before_the_block_ends(tmp_path: Path) -> None:
    with atomic_path(tmp_path / "sub" / "a.txt") as tmp:
        tmp.write_text("x")
        assert not (tmp_path / "sub" / "a.txt").exists()
        assert tmp.suffix == ".txt"
    assert (tmp_path / "sub" / "a.txt").read_text() == "x"


def test_json_refuses_nan_and_keeps_the_old_file(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"a": float("nan")})
    assert "1" in (tmp_path / "a.json").read_text()
