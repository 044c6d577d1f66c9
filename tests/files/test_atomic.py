"""Files appear whole or not at all."""

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from thinsection.errors import OutputError, StoreError
from thinsection.files.atomic import (
    TMP_MARK,
    KeepingFile,
    atomic_path,
    link_or_copy,
    output_errors,
    read_json,
    write_bytes,
    write_json,
    write_text,
)


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
        pytest.raises(OutputError, match=r"run\.log.*restore the folder"),
        output_errors(out),
    ):
        raise inside
    elsewhere = OSError(number, "no", str(tmp_path / "slides" / "a.svs"))
    with pytest.raises(OSError) as caught, output_errors(out):
        raise elsewhere
    assert caught.value is elsewhere


# order and names


def test_bytes_reach_the_disk_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.bin"
    synced: list[tuple[int, bool]] = []

    def fsync(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_bytes(path, b"12")
    assert path.read_bytes() == b"12"
    assert synced == [(path.stat().st_ino, False), (tmp_path.stat().st_ino, True)]


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    before = os.open(tmp_path, os.O_RDONLY)  # the lowest number that is free
    os.close(before)
    write_text(tmp_path / "a.txt", "x")
    after = os.open(tmp_path, os.O_RDONLY)
    os.close(after)
    assert after == before


def test_folders_above_the_file_are_made(tmp_path: Path) -> None:
    write_text(tmp_path / "a" / "b" / "c.txt", "x")
    write_text(tmp_path / "a" / "b" / "d.txt", "y")
    assert (tmp_path / "a" / "b" / "c.txt").read_text() == "x"


def test_an_unfinished_file_is_hidden_and_marked_and_no_h5(tmp_path: Path) -> None:
    with atomic_path(tmp_path / "a.h5") as tmp:
        tmp.write_bytes(b"")
        assert tmp.name.startswith(f".a{TMP_MARK}{os.getpid()}-")
        assert tmp.suffix != ".h5"


def test_a_name_is_shortened_as_little_as_its_unfinished_file_needs(
    tmp_path: Path,
) -> None:
    stem = "".join(chr(ord("a") + i % 26) for i in range(250))
    with atomic_path(tmp_path / f"{stem}.txt") as tmp:
        tmp.write_text("x")
        assert len(tmp.name) == 255
        kept = tmp.name.partition(TMP_MARK)[0]
        assert kept[0] == "."
        assert stem.startswith(kept[1:])
    assert [path.stem for path in tmp_path.iterdir()] == [stem]


# JSON


def test_json_is_indented_by_two_and_keeps_order_and_letters(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"ö": [1], "a": None})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert text == '{\n  "ö": [\n    1\n  ],\n  "a": null\n}\n'


def test_a_name_that_is_no_text_comes_back_from_json(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"name": "\udc80.svs"})
    assert read_json(tmp_path / "a.json") == {"name": "\udc80.svs"}


# links


def test_a_link_is_the_same_file(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "x")
    link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").samefile(tmp_path / "a")


def test_a_copy_is_another_file_of_the_same_bytes(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "x")
    link_or_copy(tmp_path / "a", tmp_path / "b", copy=True)
    assert not (tmp_path / "b").samefile(tmp_path / "a")
    assert (tmp_path / "b").read_text() == "x"


def test_where_no_link_can_be_the_file_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", link)
    write_text(tmp_path / "a", "x")
    link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "x"


# errors of the output


def passed_on(error: Exception, path: Path) -> bool:
    """True if the error leaves `output_errors` as it was; False if an OutputError does."""
    try:
        with output_errors(path):
            raise error
    except OutputError as output_error:
        assert output_error.__cause__ is error
        return False
    except type(error) as caught:
        return caught is error


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_lost_file_system_is_named_with_its_reason(
    tmp_path: Path, number: int
) -> None:
    with (
        pytest.raises(OutputError) as caught,
        output_errors(tmp_path / "a.h5"),
    ):
        raise OSError(number, "no", "elsewhere.bin")
    assert str(caught.value) == (
        f"output must be writable, got {os.strerror(number)!r} for 'elsewhere.bin'; "
        "free some space, or restore the file system, then run the same command again"
    )


def test_an_error_without_a_name_is_of_the_output(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with pytest.raises(OutputError) as caught, output_errors(path):
        raise OSError(errno.ENOSPC, "no")
    assert f"for {str(path)!r};" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "is_passed_on"),
    [
        ("Can't write data (errno = 28, error message = 'No space left')", False),
        ("Can't write data (errno = 4, error message = 'Interrupted')", True),
        ("Can't write data", True),
    ],
)
def test_the_number_in_the_words_of_hdf5_counts(
    tmp_path: Path, words: str, is_passed_on: bool
) -> None:
    assert errno.ENOSPC == 28
    assert passed_on(RuntimeError(words), tmp_path / "a.h5") == is_passed_on


def test_hdf5_words_about_a_folder_that_went_are_of_the_output(tmp_path: Path) -> None:
    words = f"Unable to create file (name = '{tmp_path}/.a', errno = 2)"
    assert not passed_on(RuntimeError(words), tmp_path / "a.h5")
    assert passed_on(RuntimeError(words), tmp_path / "other" / "a.h5")


def test_words_about_the_folder_without_a_number_pass(tmp_path: Path) -> None:
    error = RuntimeError(f"cannot understand {tmp_path}")
    assert passed_on(error, tmp_path / "a.h5")


def test_errors_of_this_package_pass(tmp_path: Path) -> None:
    class FullStoreError(StoreError, OSError):
        """An error of the package with a number of the system."""

    error = FullStoreError(errno.ENOSPC, "no")
    with pytest.raises(FullStoreError) as caught, output_errors(tmp_path):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("name", "is_passed_on"),
    [
        ("out/a.h5", False),
        ("out", False),
        ("out/a.h5/inside", False),
        (f"out/.a{TMP_MARK}1", False),
        ("out/b.h5", True),
        (f"other/.a{TMP_MARK}1", True),
        ("other/b.h5", True),
    ],
)
def test_a_forbidden_file_is_the_output_its_folder_or_its_unfinished_file(
    tmp_path: Path, name: str, is_passed_on: bool
) -> None:
    error = OSError(errno.EACCES, "no", str(tmp_path / name))
    assert passed_on(error, tmp_path / "out" / "a.h5") == is_passed_on


# files that keep their first error


class Disk(io.FileIO):
    """A file that takes at most 3 bytes a write, until its disk is full."""

    bytes_left = 100

    def write(self, data: Any) -> int:
        if self.bytes_left == 0:
            raise OSError(errno.ENOSPC, "full")
        num_written = super().write(bytes(data[: min(3, self.bytes_left)]))
        self.bytes_left -= num_written
        return num_written

    def truncate(self, size: int | None = None) -> int:
        if self.bytes_left == 0:
            raise OSError(errno.EIO, "lost")
        return super().truncate(size)


class KeepingFileOnDisk(KeepingFile, Disk):
    """The file under test, on such a disk."""


def test_a_file_on_a_good_disk_takes_everything(tmp_path: Path) -> None:
    with KeepingFileOnDisk(tmp_path / "a", "w") as file:
        assert file.write(b"12345678") == 8
        assert file.truncate(5) == 5
    assert file.closed
    assert (tmp_path / "a").read_bytes() == b"12345"


def test_a_full_disk_is_kept_until_the_file_is_closed(tmp_path: Path) -> None:
    file = KeepingFileOnDisk(tmp_path / "a", "w")
    file.bytes_left = 4
    with pytest.raises(OSError, match="full"), file:
        assert file.write(b"123456") == 6
        file.bytes_left = 100
        assert file.write(b"78") == 2
        assert file.truncate(1) == 0
    assert file.closed
    assert (tmp_path / "a").read_bytes() == b"1234"


def test_a_truncation_that_fails_is_kept_too(tmp_path: Path) -> None:
    file = KeepingFileOnDisk(tmp_path / "a", "w")
    file.bytes_left = 0
    assert file.truncate(0) == 0
    with pytest.raises(OSError, match="lost"):
        file.check()
    file.close()
