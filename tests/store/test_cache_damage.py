"""Crashes, full disks, damaged files and the cache's housekeeping."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.store.cache_data import SHAPE, bits, features, key, write
from typer.testing import CliRunner

from thinsection.cli.app import build_app
from thinsection.errors import DiskSpaceError, LockedError, StoreError
from thinsection.store.cache import (
    CacheWriter,
    FeatureCache,
    list_caches,
    remove_cache,
    verify_cache,
)
from thinsection.types import GIB, MIB

ROW = 4 * SHAPE[1] * SHAPE[2]
BUDGET = 16 * ROW  # four rows a chunk


def test_a_kill_loses_no_whole_chunk_and_the_next_run_continues(tmp_path: Path) -> None:
    child = (
        "import sys, time, pathlib\n"
        "from tests.store.cache_data import features, key\n"
        "from thinsection.store.cache import CacheWriter\n"
        f"x = features('fp32')\nw = CacheWriter(pathlib.Path({str(tmp_path)!r}), key(), "
        f"x.shape, budget_bytes={BUDGET})\n"
        "w.append(x[:23])\nprint('written', flush=True)\ntime.sleep(60)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen(
        [sys.executable, "-c", child], stdout=subprocess.PIPE, env=env
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"written\n"
    with pytest.raises(LockedError, match="one writer"):
        CacheWriter(tmp_path, key(), SHAPE)
    deadline = time.monotonic() + 30
    while _kept(tmp_path) < 20 and time.monotonic() < deadline:
        pass  # the thread writes the fifth chunk
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    x = features("fp32")
    with CacheWriter(tmp_path, key(), SHAPE, budget_bytes=BUDGET) as writer:
        assert writer.rows_kept == 20
        writer.append(x[20:])
        writer.finish()
    with FeatureCache(writer.folder) as cache:
        assert np.array_equal(bits(cache.read(np.arange(len(x)))), bits(x))


def _kept(root: Path) -> int:
    return sum(entry.rows_kept for entry in list_caches(root))


def unfinished(root: Path) -> Path:
    with CacheWriter(root, key(), SHAPE, budget_bytes=BUDGET) as writer:
        writer.append(features("fp32")[:16])
    return writer.folder


def cut_line(folder: Path) -> None:
    text = (folder / "chunks.jsonl").read_bytes()
    (folder / "chunks.jsonl").write_bytes(text[:-9])


def cut_data(folder: Path) -> None:
    os.truncate(folder / "features.bin", (folder / "features.bin").stat().st_size - 1)


def flip_last(folder: Path) -> None:
    flip(folder, (folder / "features.bin").stat().st_size - 3)


def flip(folder: Path, offset: int) -> None:
    with (folder / "features.bin").open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("harm", [cut_line, cut_data, flip_last])
def test_only_the_chunk_that_a_crash_harmed_is_computed_again(
    harm: Callable[[Path], None], tmp_path: Path
) -> None:
    harm(unfinished(tmp_path))
    x = features("fp32")
    with CacheWriter(tmp_path, key(), SHAPE, budget_bytes=BUDGET) as writer:
        assert writer.rows_kept == 12
    folder, _ = write(tmp_path, x, budget_bytes=BUDGET)
    with FeatureCache(folder) as cache:
        assert np.array_equal(bits(cache.read(np.arange(len(x)))), bits(x))


def test_an_unfinished_cache_is_none(tmp_path: Path) -> None:
    folder = unfinished(tmp_path)
    assert FeatureCache.find(tmp_path, key()) is None
    with pytest.raises(
        StoreError, match=r"must be complete, got .* run again to continue"
    ):
        FeatureCache(folder)


def test_a_truncated_file_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    folder, manifest = write(tmp_path, features("fp32"))
    cut_data(folder)
    size = manifest.data_bytes
    with pytest.raises(
        StoreError, match=f"must have {size} bytes, got {size - 1} in .*cache rm"
    ):
        FeatureCache(folder)


def test_a_file_that_shrinks_while_open_is_an_error_not_zeros(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, features("fp32"), budget_bytes=BUDGET)
    with FeatureCache(folder, budget_bytes=BUDGET) as cache:
        os.truncate(folder / "features.bin", ROW)
        with pytest.raises(StoreError, match="truncated while open"):
            list(cache.batches(np.arange(37), 4))


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("budget", [BUDGET, MIB])
def test_one_wrong_bit_is_found_by_the_first_read_of_its_row(
    kind: str, budget: int, tmp_path: Path
) -> None:
    folder, manifest = write(tmp_path, features(kind), budget_bytes=BUDGET)
    item = 4 if kind == "fp32" else 2
    flip(folder, manifest.chunks[5].offset + 2 * item * SHAPE[1] * SHAPE[2] + 7)
    with FeatureCache(folder, budget_bytes=budget) as cache:
        for _ in cache.batches(np.arange(22), 4):
            pass
        with pytest.raises(
            StoreError, match="must match its checksum, got other bytes in row 22"
        ):
            list(cache.batches(np.arange(37)[::-1], 4))
    assert verify_cache(tmp_path, folder.name) == [22]


def broken_text(text: str) -> str:
    return text[:-20]


def other_shape(text: str) -> str:
    return text.replace("37", "36", 1)


def other_version(text: str) -> str:
    return text.replace('"version": 1', '"version": 9')


def other_file(text: str) -> str:
    del text
    return json.dumps({"format": "a recipe"})


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (broken_text, "manifest must be complete, got .* remove it"),
        (other_shape, "its checksum does not match"),
        (other_version, "version must be 1, got 9"),
        (other_file, "must have the format thinsection feature cache"),
    ],
)
def test_a_damaged_manifest_is_named(
    harm: Callable[[str], str], message: str, tmp_path: Path
) -> None:
    folder, _ = write(tmp_path, features("fp32"))
    path = folder / "manifest.json"
    path.write_text(harm(path.read_text()))
    with pytest.raises(StoreError, match=message):
        FeatureCache.find(tmp_path, key())
    (entry,) = list_caches(tmp_path)
    assert entry.state == "damaged"


def test_a_disk_that_cannot_hold_it_is_refused_before_the_first_row(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        DiskSpaceError, match=r"must have .* free .*, got .*choose another"
    ):
        CacheWriter(tmp_path, key(), (1 << 40, 1024, 1024), budget_bytes=GIB)
    assert CacheWriter(tmp_path, key(), SHAPE).close() is None  # the lock is free


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    size = f"size={24 * MIB}"
    command = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(place)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if mounted.returncode != 0:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill_but(path: Path, spare_bytes: int) -> None:
    """A file that takes all the room of its disk but `spare_bytes`."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(path, path.stat().st_size - spare_bytes)


def test_a_disk_that_fills_up_keeps_what_was_written(small_disk: Path) -> None:
    x = features("fp32", (60, 64, 256))  # 64 KiB a row, 3.75 MiB in all
    other = small_disk / "someone-else.bin"
    message = r"rows 0 to (\d+) are kept .* run again to continue"
    with (
        pytest.raises(DiskSpaceError, match=message),
        CacheWriter(small_disk, key(), x.shape, budget_bytes=MIB) as writer,
    ):
        writer.append(x[:20])
        fill_but(other, 32 * 1024)
        writer.append(x[20:])
        writer.finish()
    other.unlink()
    with CacheWriter(small_disk, key(), x.shape, budget_bytes=MIB) as writer:
        kept = writer.rows_kept
        assert 16 <= kept < 40
        writer.append(x[kept:])
        writer.finish()
    with FeatureCache(writer.folder) as cache:
        assert np.array_equal(bits(cache.read(np.arange(60))), bits(x))


def cli(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(build_app(["cache"]), ["cache", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_caches_are_listed_verified_and_removed_from_the_shell(tmp_path: Path) -> None:
    root = ("--cache-dir", tmp_path)
    assert cli("ls", *root)[1].startswith("0 caches in ")
    whole, _ = write(tmp_path, features("bf16"))
    lossy, _ = write(tmp_path, features("fp32"), storage="fp16")
    (begun := tmp_path / "begun").mkdir()
    (begun / "features.bin").write_bytes(b"")
    code, text = cli("ls", *root)
    assert code == 0
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert "whole" in lines[whole.name]
    assert "37 x 5 x 24  37 rows bf16" in lines[whole.name]
    assert "lossy, largest error" in lines[lossy.name]
    assert "unfinished" in lines["begun"]
    assert cli("verify", whole.name, *root) == (0, f"{whole.name}: whole\n")
    flip_last(whole)
    code, text = cli("verify", whole.name, *root)
    assert (code, "1 damaged rows (36)" in text) == (1, True)
    assert "removed, " in cli("rm", whole.name, *root)[1]
    assert not whole.exists()
    with pytest.raises(
        StoreError, match=rf"must be one of those in .* there are: begun, {lossy.name}"
    ):
        cli("rm", whole.name, *root)


def test_a_cache_that_is_being_written_is_not_removed(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, key(), SHAPE) as writer, pytest.raises(LockedError):
        remove_cache(tmp_path, writer.folder.name)
    assert remove_cache(tmp_path, writer.folder.name) == 0
