"""Embeddings are given to nobody before the file that they stand in was checked."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from thinsection.errors import InvalidInputError, StoreError
from thinsection.store import hdf5, tile_tables
from thinsection.store.hdf5 import CHECKSUM, add_dataset
from thinsection.store.ledger import SlideLedger, StageRecord
from thinsection.store.tile_tables import EmbeddingRows
from thinsection.store.tiles_h5 import TilesWriter, read_tiles

GRID = "256px_0.5mpp"
FEATURES = f"{GRID}/features_x"
NUM_TILES = 700
DIM = 12


def write(path: Path, *, seed: int, name: str, rows: int = NUM_TILES) -> None:
    x = np.random.default_rng(seed).normal(size=(rows, DIM)).astype(np.float32)
    coords = np.stack([np.arange(rows) * 256, np.zeros(rows)], axis=1).astype(np.int64)
    attributes = {"name": name, "thinsection_version": "1", "patch_size_level0": 256}
    path.parent.mkdir(parents=True, exist_ok=True)
    with TilesWriter(path, dim=DIM, attributes=attributes) as writer:
        writer.append(coords, x)


def results(out: Path, *slides: str) -> list[Path]:
    """Files of embeddings of slides, as their ledgers list them."""
    paths = []
    for seed, slide in enumerate(slides):
        path = out / FEATURES / f"{slide}.h5"
        write(path, seed=seed, name=slide)
        size = path.stat().st_size
        ledger = SlideLedger(out=out, slide_id=slide, slide={"slide_id": slide})
        tiles = StageRecord(key="t", files={}, facts={"num_tiles": NUM_TILES})
        record = StageRecord(
            key="f",
            files={str(path.relative_to(out)): size},
            needs=(f"{GRID}/tiles",),
            facts={"dim": DIM},
        )
        ledger = ledger.with_stage(f"{GRID}/tiles", tiles)
        ledger.with_stage(FEATURES, record).save()
        paths.append(path)
    return paths


def others_values(path: Path, other: Path) -> None:
    """Values of another slide written into the dataset of this one."""
    with h5py.File(path, "r+") as file, h5py.File(other) as source:
        file["features"][:] = source["features"][:]  # type: ignore[index]


def reversed_rows(path: Path, other: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["features"][:] = file["features"][:][::-1]  # type: ignore[index]


def moved_tiles(path: Path, other: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["coords"][:] = file["coords"][:][::-1]  # type: ignore[index]


def no_coords(path: Path, other: Path) -> None:
    with h5py.File(path, "r+") as file:
        del file["coords"]


def no_features(path: Path, other: Path) -> None:
    with h5py.File(path, "r+") as file:
        del file["features"]


def others_file(path: Path, other: Path) -> None:
    """A whole file of another slide, with checksums that are right and the same size."""
    path.write_bytes(other.read_bytes())


def fewer_rows(path: Path, other: Path) -> None:
    write(path, seed=0, name=path.stem, rows=NUM_TILES - 1)


def cut(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4096])


def emptied(path: Path, other: Path) -> None:
    path.write_bytes(b"")


def removed(path: Path, other: Path) -> None:
    path.unlink()


def damaged_ledger(path: Path, other: Path) -> None:
    ledger = path.parents[2] / "slides" / path.stem / "slide.json"
    ledger.write_bytes(ledger.read_bytes().replace(b'"stages"', b'"stagfs"'))


DAMAGES = [
    others_values,
    reversed_rows,
    moved_tiles,
    no_coords,
    no_features,
    others_file,
    fewer_rows,
    cut,
    emptied,
    removed,
    damaged_ledger,
]
READS: list[Callable[[Path], object]] = [
    lambda path: EmbeddingRows(path)[:],
    lambda path: EmbeddingRows(path)[3:9],
    lambda path: EmbeddingRows(path)[[5, 2]],
    read_tiles,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("read", READS, ids=["all", "run", "rows", "read_tiles"])
def test_a_damaged_file_gives_no_row_and_is_named(
    tmp_path: Path,
    damage: Callable[[Path, Path], None],
    read: Callable[[Path], object],
) -> None:
    good, bad = results(tmp_path, "a", "b")
    damage(bad, good)
    read(good)
    with pytest.raises(StoreError, match=r"features_x/b\.h5|slide\.json"):
        read(bad)


@pytest.mark.parametrize("read", READS, ids=["all", "run", "rows", "read_tiles"])
def test_a_value_that_is_not_finite_is_refused_with_the_remedy(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    (path,) = results(tmp_path, "a")
    with h5py.File(path, "r+") as file:
        x = file["features"][:]  # type: ignore[index]
        x[600, 3] = np.nan
        file["features"][:] = x  # type: ignore[index]
        del file["features"].attrs[CHECKSUM]
    with pytest.raises(
        InvalidInputError, match=r"1 of \d+ rows \(600\) .*precision=.fp32"
    ):
        read(path)


def test_sums_that_overflow_are_finite_values(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        add_dataset(file, "features", np.full((4, 8), 3e38, np.float32))
        add_dataset(file, "coords", np.zeros((4, 2), np.int64))
    assert (EmbeddingRows(tmp_path / "a.h5")[:] == np.float32(3e38)).all()


def test_a_file_of_another_tool_without_checksums_is_read_as_it_is(
    tmp_path: Path,
) -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["features"] = x
    rows = EmbeddingRows(tmp_path / "a.h5")
    assert not rows.is_signed
    assert (rows[:] == x).all() and (rows[[2]] == x[[2]]).all()


def test_a_checked_file_is_checked_once(tmp_path: Path) -> None:
    """Training draws rows of a file in each epoch."""
    (path,) = results(tmp_path, "a")
    rows = EmbeddingRows(path)
    first = rows[[1, 2]]
    reversed_rows(path, path)
    assert not (rows[[1, 2]] == first).all()
    with pytest.raises(StoreError, match="bytes that were written"):
        EmbeddingRows(path)[[1, 2]]


def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that have just been written count as old."""
    monkeypatch.setattr(tile_tables, "_SETTLED_NS", -(10**12))
    monkeypatch.setattr(tile_tables, "_CHECKED", {})


def count_checks(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files whose values are read for a check, from now on."""
    checked: list[Path] = []
    read_blocks, read_values = hdf5.read_blocks, hdf5.read_values

    def blocks(
        dataset: h5py.Dataset, path: Path, num_rows: int, *, verify: bool
    ) -> Iterator[np.ndarray]:
        if verify:
            checked.append(path)
        return read_blocks(dataset, path, num_rows, verify=verify)

    def values(file: h5py.File, name: str, path: Path) -> np.ndarray:
        if name == "features":
            checked.append(path)
        return read_values(file, name, path)

    monkeypatch.setattr(tile_tables, "read_blocks", blocks)
    monkeypatch.setattr(tile_tables, "read_values", values)
    return checked


Reader = Callable[[Path], np.ndarray]


def read_whole(path: Path) -> np.ndarray:
    return np.asarray(EmbeddingRows(path)[:])


def read_some(path: Path) -> np.ndarray:
    return np.asarray(EmbeddingRows(path)[3:])


def read_blockwise(path: Path) -> np.ndarray:
    return np.concatenate([*EmbeddingRows(path).checked_blocks(50)])


READERS = (read_whole, read_some, read_blockwise)


def known_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Reader
) -> list[Path]:
    """Files of two slides that this process has checked."""
    settled(monkeypatch)
    paths = results(tmp_path, "a", "b")
    for path in paths:
        read(path)
    return paths


def test_one_process_checks_the_values_of_a_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(monkeypatch)
    paths = results(tmp_path, "a", "b")
    checked = count_checks(monkeypatch)
    for read in READERS:
        assert [read(path)[-1, 0] for path in paths] == [
            h5py.File(path)["features"][-1, 0]  # type: ignore[index]
            for path in paths
        ]
    assert checked == paths


@pytest.mark.parametrize("read", READERS)
def test_a_file_that_has_changed_is_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Reader
) -> None:
    """Also if its size and its time of change are put back."""
    first, second = known_files(tmp_path, monkeypatch, read)
    before = first.stat()
    with h5py.File(first, "r+") as file:
        file["features"][5, 5] += 1  # type: ignore[index]
    os.utime(first, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert first.stat().st_size == before.st_size
    with pytest.raises(StoreError, match="bytes that were written"):
        read(first)
    read(second)


def test_a_file_that_was_just_written_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_tables, "_SETTLED_NS", 10**15)
    monkeypatch.setattr(tile_tables, "_CHECKED", {})
    (path,) = results(tmp_path, "a")
    checked = count_checks(monkeypatch)
    for _ in range(2):
        read_whole(path)
    assert checked == [path, path]


@pytest.mark.parametrize("age_s", [0, 60])
def test_a_file_that_is_written_while_it_is_checked_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: int
) -> None:
    """Time stamps tick every 2 s, and the check lasts 6 s, longer than a file must be old."""
    path, other = results(tmp_path, "a", "b")
    tick = 2 * 10**9
    clock = SimpleNamespace(now_ns=1000 * tick)
    times = {path: clock.now_ns - age_s * 10**9, other: 0}

    def stamp(asked: Path) -> tuple[int, ...]:
        rounded = times[asked] // tick * tick
        return 1, 1, asked.stat().st_size, rounded, rounded

    monkeypatch.setattr(tile_tables, "_CHECKED", {})
    monkeypatch.setattr(tile_tables, "_stamp", stamp)
    monkeypatch.setattr(
        tile_tables, "time", SimpleNamespace(time_ns=lambda: clock.now_ns)
    )
    starts = EmbeddingRows(path)._chunk_starts
    assert starts is not None
    read_blockwise(other)
    blocks = EmbeddingRows(path).checked_blocks(50)
    next(blocks)
    clock.now_ns += tick // 2
    times[path] = clock.now_ns
    with path.open("r+b") as file:
        file.seek(int(starts[0]))
        file.write(np.float32(7).tobytes())
    clock.now_ns += 6 * 10**9
    for _ in blocks:
        pass
    assert [*tile_tables._CHECKED] == [other]
    with pytest.raises(StoreError, match="bytes that were written"):
        read_blockwise(path)


def test_a_known_file_is_opened_once_for_all_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = known_files(tmp_path, monkeypatch, read_blockwise)
    opened: list[Path] = []
    open_h5 = hdf5.open_h5

    def counted(path: Path) -> h5py.File:
        opened.append(path)
        return open_h5(path)

    known = [EmbeddingRows(path) for path in paths]
    monkeypatch.setattr(tile_tables, "open_h5", counted)
    for rows in known:
        assert sum(map(len, rows.checked_blocks(50))) == NUM_TILES
    assert opened == paths


def test_no_more_than_so_many_files_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(monkeypatch)
    monkeypatch.setattr(tile_tables, "_MOST_CHECKED", 2)
    for path in results(tmp_path, "a", "b", "c"):
        read_some(path)
        assert path in tile_tables._CHECKED
        assert len(tile_tables._CHECKED) <= 2


@pytest.mark.parametrize("num_rows", [128, 2500, 20_000])
def test_each_compressed_chunk_is_decompressed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    """Two files, whose chunks have 8192 and 1000 rows; also when they are known."""
    settled(monkeypatch)
    x = np.random.default_rng(0).normal(size=(8192, 8)).astype(np.float32)
    read_rows: list[tuple[int, int]] = []
    read_part = hdf5._read_part

    def noted(dataset: h5py.Dataset, part: slice, path: Path) -> np.ndarray:
        if dataset.name == "/features":
            read_rows.append((part.start, part.stop))
        return read_part(dataset, part, path)

    monkeypatch.setattr(hdf5, "_read_part", noted)
    for chunk_rows in (8192, 1000):
        path = tmp_path / f"{chunk_rows}.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset(
                "features", data=x, chunks=(chunk_rows, 8), compression="gzip"
            )
        for _ in range(2):
            read_rows.clear()
            blocks = [*EmbeddingRows(path).checked_blocks(num_rows)]
            assert max(map(len, blocks)) <= num_rows
            np.testing.assert_array_equal(np.concatenate(blocks), x)
            chunks = [
                chunk
                for start, stop in read_rows
                for chunk in range(
                    start // chunk_rows, -(-min(stop, 8192) // chunk_rows)
                )
            ]
            assert chunks == [*range(-(-8192 // chunk_rows))]


@pytest.mark.parametrize("read", READERS)
def test_the_ledger_of_a_known_file_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Reader
) -> None:
    first, second = known_files(tmp_path, monkeypatch, read)
    damaged_ledger(first, second)
    with pytest.raises(StoreError, match=r"slide\.json"):
        read(first)
    read(second)
