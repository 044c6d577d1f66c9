"""What the audit reads of a slide: one reading in blocks, equal to plain formulas on the whole."""

import hashlib
import tracemalloc
from pathlib import Path
from types import ModuleType, SimpleNamespace

import h5py
import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.predict.planted import write_embeddings

from thinsection.errors import DatasetError
from thinsection.evaluation import leaks
from thinsection.evaluation.copies import SAMPLED_TILES, directions, spread_rows
from thinsection.evaluation.label_values import LabelsConfig
from thinsection.evaluation.leaks import (
    BLOCK_VALUES,
    Contents,
    read_contents,
    read_usable,
    rounded,
)
from thinsection.store import hdf5, tile_tables
from thinsection.store.hdf5 import CHECKSUM
from thinsection.store.tile_tables import EmbeddingRows
from thinsection.types import MIB

DIM = 64
BLOCK_ROWS = BLOCK_VALUES // DIM
ROWS = 2 * BLOCK_ROWS + 77  # the size of a block does not divide it

Array = npt.NDArray[np.generic]


def slides() -> dict[str, npt.NDArray[np.floating]]:
    """Slides of different sizes and scales; the last rows of some are unlike the first."""
    rng = np.random.default_rng(0)
    plain = rng.normal(size=(ROWS, DIM)).astype(np.float32)
    huge = plain[: BLOCK_ROWS + 1].copy()
    huge[-1, 0] = 1e6
    late = np.zeros_like(plain)
    late[-1] = plain[0]
    late[5] = -0.0
    return {
        "plain": plain,
        "half": plain[:5000].astype(np.float16),
        "huge": huge,
        "tiny": plain[:9] * np.float32(1e-9),
        "late": late,
        "double": rng.normal(size=(40, DIM)),
    }


def check_one(contents: Contents, number: int, x: npt.NDArray[np.floating]) -> None:
    """Compares a row of `contents` with formulas that have the whole slide."""
    assert contents.digests[number] == hashlib.sha256(rounded(x).data).hexdigest()
    assert contents.num_tiles[number] == len(x)
    # NumPy's own bits
    np.testing.assert_array_equal(
        contents.means[number], x.mean(axis=0, dtype=np.float64)
    )
    np.testing.assert_allclose(
        contents.directions[number], directions(x).mean(axis=0), rtol=1e-12, atol=1e-15
    )
    np.testing.assert_array_equal(
        contents.sampled_tiles[number],
        directions(x[spread_rows(len(x), SAMPLED_TILES)]).astype(np.float16),
    )


@pytest.mark.parametrize("kind", ["ours", "batch of one", "compressed", "npy"])
def test_blocks_give_what_the_whole_slide_gives(tmp_path: Path, kind: str) -> None:
    paths = []
    for name, x in slides().items():
        path = tmp_path / f"{name}.{'npy' if kind == 'npy' else 'h5'}"
        if kind == "npy":
            np.save(path, x.astype(np.float32))
        elif kind == "ours":
            write_embeddings(path, x)
        else:
            with h5py.File(path, "w") as file:
                if kind == "compressed":
                    file.create_dataset("features", data=x, compression="gzip")
                else:
                    file["features"] = x[None]
        paths.append(path)
    contents = read_contents(paths)
    assert len(contents.digests) == len(paths) > 1
    for number, x in enumerate(slides().values()):
        in_file = x if kind in ("batch of one", "compressed") else x.astype(np.float32)
        check_one(contents, number, in_file)


def test_a_vector_is_a_slide_of_one_tile(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    vectors = rng.normal(size=(2, 5000)).astype(np.float32)
    for number, vector in enumerate(vectors):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["features"] = vector
    contents = read_contents([tmp_path / "0.h5", tmp_path / "1.h5"])
    for number, vector in enumerate(vectors):
        check_one(contents, number, vector[None])


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = []
    for name in ("a", "b"):
        paths.append(tmp_path / f"{name}.h5")
        write_embeddings(paths[-1], slides()["plain"])
    rows_read = 0
    read = h5py.Dataset.__getitem__

    def counted(dataset: h5py.Dataset, *args: object) -> Array:
        nonlocal rows_read
        values: Array = read(dataset, *args)
        if str(dataset.name) == "/features":
            rows_read += len(values)
        return values

    monkeypatch.setattr(h5py.Dataset, "__getitem__", counted)
    read_contents(paths)
    assert rows_read == 2 * ROWS


def test_memory_does_not_grow_with_the_slide(tmp_path: Path) -> None:
    peaks = []
    for num_tiles in (20_000, 80_000):
        path = tmp_path / f"{num_tiles}.h5"
        write_embeddings(path, np.ones((num_tiles, 256), dtype=np.float32))
        tracemalloc.start()
        read_contents([path])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # the larger slide has 78 MiB
    assert max(peaks) < 10 * MIB


@pytest.mark.parametrize("damage", ["last value", "not a number", "no tiles", "zeros"])
def test_a_slide_that_cannot_be_used_is_named(tmp_path: Path, damage: str) -> None:
    """Also if its last block alone says so; the slides before and after it are kept."""
    paths = {name: tmp_path / f"{name}.h5" for name in ("a", "bad", "c")}
    for number, path in enumerate(paths.values()):
        write_embeddings(path, slides()["plain"] + np.float32(number))
    with h5py.File(paths["bad"], "r+") as file:
        x = file["features"][:]  # type: ignore[index]
        if damage == "last value":
            file["features"][-1, -1] = 7  # type: ignore[index]
        else:
            del file["features"]
            if damage == "not a number":
                x[-1, -1] = np.nan
            file["features"] = {"no tiles": x[:0], "zeros": 0 * x}.get(damage, x)
    left_out: dict[str, str] = {}
    if damage == "zeros":
        with pytest.raises(DatasetError, match=r"only zeros in 1 of 3 slides \(bad\)"):
            read_usable(paths, left_out.__setitem__)
        return
    contents = read_usable(paths, left_out.__setitem__)
    assert [*left_out] == ["bad"]
    assert str(paths["bad"]) in left_out["bad"]
    check_one(contents, 0, slides()["plain"])
    check_one(contents, 1, slides()["plain"] + np.float32(2))


def test_contents_stay_with_their_slides_if_a_slide_between_is_damaged(
    tmp_path: Path,
) -> None:
    """Of three cases of two slides each, a case loses one, and another both."""
    names = [f"{case}{part}" for case in "pqr" for part in "ab"]
    x = {
        name: slides()["plain"][: 20 + number] + np.float32(number)
        for number, name in enumerate(names)
    }
    for name, tiles in x.items():
        write_embeddings(tmp_path / f"{name}.h5", tiles)
    for name in ("pb", "qa", "qb"):
        with h5py.File(tmp_path / f"{name}.h5", "r+") as file:
            file["features"][3, 3] = 7  # type: ignore[index]
    rows = [f"{name},{name[0]},{'yes' if name[0] == 'p' else 'no'}" for name in names]
    table = "\n".join(["slide_id,case_id,label", *rows])
    (tmp_path / "labels.csv").write_text(table + "\n")
    labels = LabelsConfig(labels=tmp_path / "labels.csv", target=("label",))
    found = leaks.read_labelled(tmp_path, labels)
    assert sorted(found.left_out) == ["pb", "qa", "qb"]
    assert found.cohort.slides == (("pa",), ("ra", "rb"))
    assert len(found.contents.digests) == 3
    for number, name in enumerate(("pa", "ra", "rb")):
        check_one(found.contents, number, x[name])


def test_a_file_that_was_checked_is_not_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of one reading, and of the next, are the same rows."""
    checked_rows: list[int] = []
    check_finite = hdf5.check_finite

    def counted(values: Array, path: Path, *, first_row: int) -> None:
        checked_rows.append(len(values))
        check_finite(values, path, first_row=first_row)

    monkeypatch.setattr(tile_tables, "check_finite", counted)
    path = tmp_path / "a.h5"
    x = slides()["plain"]
    write_embeddings(path, x)
    with h5py.File(path) as file:
        assert CHECKSUM in file["features"].attrs
    rows = EmbeddingRows(path)
    for _ in range(2):
        np.testing.assert_array_equal(np.concatenate([*rows.checked_blocks(1000)]), x)
    assert leaks.content_digest(rows) == leaks.content_digest(x)
    assert sum(checked_rows) == ROWS


@pytest.mark.parametrize("num_rows", [1, 37])
def test_a_digest_does_not_depend_on_how_an_array_lies_in_memory(num_rows: int) -> None:
    """PyTorch, which is loaded here, refuses some of these arrays."""
    x = np.random.default_rng(2).normal(size=(num_rows, 5)).astype(np.float32)
    packed = np.zeros(num_rows, [("tile", np.float32, 5), ("kind", np.uint8)])
    packed["tile"] = x
    unaligned = np.zeros(num_rows, [("kind", np.uint8), ("tile", np.float32, 5)])
    unaligned["tile"] = x
    frozen = x.copy()
    frozen.flags.writeable = False
    arrays = [
        x[::-1],
        x[:, ::-1],
        x[::2, ::2],
        packed["tile"],
        unaligned["tile"],
        np.asfortranarray(x),
        frozen,
        x.astype(">f4"),
    ]
    for array in arrays:
        copy = np.array(array, np.float32, order="C")
        assert leaks.content_digest(array) == leaks.content_digest(copy)
    assert leaks.content_digest(x[:, ::-1]) != leaks.content_digest(x)


def test_a_digest_needs_nothing_of_a_module_that_is_still_being_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = np.random.default_rng(3).normal(size=(37, 5)).astype(np.float32)
    expected = leaks.content_digest(x)
    modules = {"torch": ModuleType("torch")}
    monkeypatch.setattr(leaks, "sys", SimpleNamespace(modules=modules))
    assert leaks.content_digest(x) == expected


@pytest.mark.parametrize("suffix", ["npy", "h5"])
def test_memory_of_many_slides_is_that_of_the_formula(
    tmp_path: Path, suffix: str
) -> None:
    """Means are held twice, and the directions of the sampled tiles once."""
    num_slides, dim = 40, 4096
    x = np.random.default_rng(4).normal(size=(2, dim)).astype(np.float32)
    paths = []
    for number in range(num_slides):
        paths.append(tmp_path / f"{number}.{suffix}")
        if suffix == "npy":
            np.save(paths[-1], x + np.float32(number))
        else:
            write_embeddings(paths[-1], x + np.float32(number))
    read_contents(paths[:2])  # loads what is loaded once
    tracemalloc.start()
    read_contents(paths)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < num_slides * dim * (32 + 2 * 2) + MIB


def test_pytorch_rounds_to_float16_as_numpy_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every float16 number, the middles between two, their neighbours, and too large values."""
    every = np.arange(2**15, dtype=np.uint16).view(np.float16)
    every = every[np.isfinite(every)].astype(np.float32)
    middles = (every[1:] + every[:-1]) / 2
    exact = np.concatenate([every, middles, np.float32([65_519, 65_520, 1e30])])
    x = np.concatenate(
        [np.nextafter(exact, np.float32(-1)), exact, np.nextafter(exact, np.inf)]
    )
    x = np.stack([x, -x])
    small = np.ascontiguousarray(x[:, np.abs(x[0]) < 65_519])
    digests, halves = [], []
    for modules in ({"torch": torch}, dict[str, object]()):
        # the room asks this table alone whether PyTorch is loaded
        monkeypatch.setattr(leaks, "sys", SimpleNamespace(modules=modules))
        halves.append(leaks.rounded(small))
        digests.append(leaks.content_digest(x))
    monkeypatch.undo()
    assert halves[0].dtype == np.float16
    assert halves[0].tobytes() == halves[1].tobytes()
    assert digests[0] == digests[1]
