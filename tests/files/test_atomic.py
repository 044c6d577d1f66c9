"""Files appear whole or not at all."""

import errno
import json
from pathlib import Path

import pytest

from thinsection.errors import OutputError
from thinsection.files.atomic import atomic_path, output_errors, write_json, write_text


def test_a_failure_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "old")
    with (
        pytest.raises(ValueError, match="stop"),
        atomic_path(tmp_path / "a.txt") as tmp,
    ):
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


def test_a_name_that_leaves_no_room_for_a_temporary_one_is_written(
    tmp_path: Path,
) -> None:
    path = tmp_path / ("é" * 120 + ".json")
    write_json(path, {"a": 1})
    with atomic_path(path) as tmp:
        write_json(tmp, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EPERM])
def test_a_deleted_or_forbidden_output_is_lost_and_another_file_is_not(
    tmp_path: Path, number: int
) -> None:
    out = tmp_path / "out"
    inside = OSError(number, "no", str(out / "records" / "run.log"))
    with (
        pytest.raises(OutputError, match=r"run\.log.*bring the folder"),
        output_errors(out),
    ):
        raise inside
    elsewhere = OSError(number, "no", str(tmp_path / "slides" / "a.svs"))
    with pytest.raises(OSError) as caught, output_errors(out):
        raise elsewhere
    assert caught.value is elsewhere
