"""Weights are read safely, found where they are said to be, and fit exactly."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from thinsection.errors import WeightsError
from thinsection.pool.weights import (
    check_names,
    find_weights,
    read_state_dict,
    state_dict_hash,
)

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b.c": torch.ones(4, dtype=torch.bfloat16)}


class Evil:
    """Runs a command when unpickled by a careless reader."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('unpickled')",)


def test_safetensors_and_torch_files_read_the_same(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "w.safetensors")
    torch.save(TENSORS, tmp_path / "w.bin")
    torch.save({"model": TENSORS}, tmp_path / "wrapped.pth")
    hashes = {
        state_dict_hash(read_state_dict(tmp_path / name))
        for name in ("w.safetensors", "w.bin", "wrapped.pth")
    }
    assert hashes == {state_dict_hash(TENSORS)}


def test_a_file_with_code_in_it_is_refused_unread(tmp_path: Path) -> None:
    torch.save({"a": Evil()}, tmp_path / "evil.bin")
    with pytest.raises(
        WeightsError, match=r"plain tensors, got .*evil.bin.*convert it to safetens"
    ):
        read_state_dict(tmp_path / "evil.bin")
    (tmp_path / "raw.pth").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(WeightsError, match="plain tensors"):
        read_state_dict(tmp_path / "raw.pth")


@pytest.mark.parametrize("name", ["cut.safetensors", "cut.bin"])
def test_a_truncated_file_is_named(tmp_path: Path, name: str) -> None:
    save_file(TENSORS, tmp_path / "w.safetensors")
    torch.save(TENSORS, tmp_path / "w.bin")
    whole = (tmp_path / name.replace("cut", "w")).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightsError, match=name):
        read_state_dict(tmp_path / name)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.bin")
    with pytest.raises(WeightsError, match="a dict of named tensors"):
        read_state_dict(tmp_path / "list.bin")
    with pytest.raises(WeightsError, match=r"an existing file, got .*nowhere"):
        read_state_dict(tmp_path / "nowhere.bin")


def test_the_hub_is_asked_for_the_safe_file_first_at_the_pinned_revision(tmp_path: Path) -> None:
    asked = []

    def download(repository: str, name: str, revision: str) -> Path | None:
        asked.append((repository, name, revision))
        return tmp_path / name if name.endswith(".bin") else None

    files = ("model.safetensors", "pytorch_model.bin")
    pinned, other = "abc1" * 10, "def2" * 10
    found = find_weights("owner/model", files=files, revision=pinned, download=download)
    assert found == tmp_path / "pytorch_model.bin"
    assert asked == [("owner/model", name, pinned) for name in files]
    asked.clear()
    find_weights(f"owner/model@{other}", files=files, revision=pinned, download=download)
    assert asked == [("owner/model", name, other) for name in files]
    with pytest.raises(WeightsError, match=r"'owner/model' at abc1abc1abc1 must hold model\.safe"):
        find_weights("owner/model", files=files[:1], revision=pinned, download=download)


@pytest.mark.parametrize("source", ["owner/model", "owner/model@main", "owner/model@abc"])
def test_a_moving_branch_is_refused(source: str) -> None:
    def download(repository: str, name: str, revision: str) -> Path | None:
        raise AssertionError((repository, name, revision))

    with pytest.raises(WeightsError, match="must name a full commit, owner/model@COMMIT"):
        find_weights(source, files=("w.safetensors",), revision=None, download=download)


def test_a_folder_without_weights_and_a_path_that_is_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"folder must hold model\.safetensors, got"):
        find_weights(tmp_path, files=("model.safetensors",), revision="x")
    with pytest.raises(WeightsError, match="existing file or folder, or a hub repository"):
        find_weights(tmp_path / "no.bin", files=("model.safetensors",), revision="x")
    with pytest.raises(WeightsError, match="existing file or folder"):
        find_weights("./no.bin", files=("model.safetensors",), revision="x")


def test_names_and_shapes_must_fit_exactly() -> None:
    wanted = {name: value.shape for name, value in TENSORS.items()}
    check_names(TENSORS, wanted, model="m")
    with pytest.raises(WeightsError, match=r"m state dict must fit exactly, got missing b\.c"):
        check_names({"a": TENSORS["a"]}, wanted, model="m")
    with pytest.raises(WeightsError, match="got unexpected d"):
        check_names(TENSORS | {"d": torch.ones(1)}, wanted, model="m")
    with pytest.raises(WeightsError, match=r"m a must be of shape \(2, 3\), got \(3, 2\)"):
        check_names(TENSORS | {"a": torch.ones(3, 2)}, wanted, model="m")


def test_the_hash_sees_names_shapes_dtypes_and_values() -> None:
    base = state_dict_hash(TENSORS)
    a = TENSORS["a"]
    for changed in ({"A": a}, {"a": a.view(3, 2)}, {"a": a.half()}, {"a": a + 1}):
        rest = {k: v for k, v in TENSORS.items() if k != "a"}
        assert state_dict_hash({**rest, **changed}) != base
    assert state_dict_hash(dict(reversed(TENSORS.items()))) == base
