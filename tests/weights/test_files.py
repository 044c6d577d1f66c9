"""Weights are read safely in every form, found where they are said to be, and fit exactly."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from thinsection.attention.dilated import Branch
from thinsection.encode import load_encoder
from thinsection.encode.backbone import PACKAGED_WEIGHTS
from thinsection.errors import WeightsError
from thinsection.pool import GigaPathSlideEncoder
from thinsection.pool.gigapath import LongNetConfig
from thinsection.weights import hub as hub_module
from thinsection.weights.files import hash_state_dict, load_strictly, read_state_dict
from thinsection.weights.hub import find_weights
from thinsection.weights.origin import commit_of

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b.c": torch.ones(4, dtype=torch.bfloat16),
}
SMALL = LongNetConfig(
    **{"tile_dim": 8, "dim": 16, "num_layers": 1, "num_heads": 2, "mlp_dim": 8},
    branches=(Branch(length=16, dilation=1),),
)


class Evil:
    """Runs a command when unpickled by a careless reader."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('unpickled')",)


def write_form(form: str, state: dict[str, torch.Tensor], folder: Path) -> Path:
    """The weights in one of the accepted forms."""
    state = {k: v.contiguous() for k, v in state.items()}
    if form == "safetensors":
        save_file(state, folder / "w.safetensors")
    elif form.startswith("shards"):
        suffix = form.split()[1]
        names = sorted(state)
        parts = {f"part-1{suffix}": names[::2], f"part-2{suffix}": names[1::2]}
        for name, keys in parts.items():
            part = {k: state[k] for k in keys}
            if suffix == ".safetensors":
                save_file(part, folder / name)
            else:
                torch.save(part, folder / name)
        index = {"weight_map": {k: name for name, keys in parts.items() for k in keys}}
        path = folder / f"model{suffix}.index.json"
        path.write_text(json.dumps(index))
        return path
    elif form.endswith("."):
        torch.save(
            {"state_dict": {form + k: v for k, v in state.items()}}, folder / "w.ckpt"
        )
    elif form in ("state_dict", "model", "teacher"):
        torch.save({form: state, "epoch": 3}, folder / "w.pth")
    else:
        torch.save(state, folder / f"w{form}")
    return next(folder.iterdir())


FORMS = [
    *(
        "safetensors",
        "shards .safetensors",
        "shards .bin",
        ".bin",
        ".pth",
        ".pt",
        ".ckpt",
    ),
    *(
        "state_dict",
        "model",
        "teacher",
        "module.",
        "model.",
        "backbone.",
        "module.backbone.",
    ),
]


@pytest.fixture(scope="module")
def lite0() -> dict[str, torch.Tensor]:
    return read_state_dict(PACKAGED_WEIGHTS)


@pytest.mark.parametrize("form", FORMS)
def test_tile_and_slide_encoders_take_the_same_forms_and_hash_equal_weights_equally(
    form: str, tmp_path: Path, lite0: dict[str, torch.Tensor]
) -> None:
    (tmp_path / "tile").mkdir()
    (tmp_path / "slide").mkdir()
    path = write_form(form, lite0, tmp_path / "tile")
    tile = load_encoder("efficientnet_lite0", device="cpu", weights=path)
    bare = {k: v for k, v in lite0.items() if not k.startswith("_fc.")}
    assert tile.weights_hash == hash_state_dict(bare)
    weights = GigaPathSlideEncoder.random_weights(SMALL, seed=0)
    path = write_form(form, weights, tmp_path / "slide")
    slide = GigaPathSlideEncoder.from_pretrained(path, config=SMALL)
    assert slide.weights_hash == hash_state_dict(weights)


def test_weights_in_half_precision_hash_as_the_network_computes_with_them() -> None:
    halves = {"weight": torch.randn(3, 2).bfloat16(), "bias": torch.randn(3).bfloat16()}
    wide = {k: v.float() for k, v in halves.items()}
    assert (
        len({load_strictly(nn.Linear(2, 3), w, source="x") for w in (halves, wide)})
        == 1
    )


def test_a_prefix_is_taken_off_only_where_all_names_carry_it_or_lie_beside_it() -> None:
    own = nn.Linear(2, 3)
    inner = {f"backbone.{k}": v for k, v in own.state_dict().items()}
    dino = inner | {"dino_head.mlp.weight": torch.ones(1)}
    assert load_strictly(nn.Linear(2, 3), dino, source="x") == hash_state_dict(
        own.state_dict()
    )
    with pytest.raises(
        WeightsError, match=r"2 missing .*3 unexpected \(backbone\.bias"
    ):
        load_strictly(
            nn.Linear(2, 3), inner | {"other.weight": torch.ones(1)}, source="x"
        )


@pytest.mark.parametrize("name", ["evil.bin", "raw.pth", "module.pt"])
def test_a_file_with_code_in_it_is_refused_unread(tmp_path: Path, name: str) -> None:
    torch.save({"a": Evil()}, tmp_path / "evil.bin")
    (tmp_path / "raw.pth").write_bytes(pickle.dumps(Evil(), protocol=2))
    torch.save(
        nn.Linear(1, 1), tmp_path / "module.pt"
    )  # a whole module needs unpickling
    with pytest.raises(
        WeightsError, match=rf"plain tensors, got .*{name}.*; convert them to safe"
    ):
        read_state_dict(tmp_path / name)


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
    with pytest.raises(WeightsError, match="a dict of named tensors, got list"):
        read_state_dict(tmp_path / "list.bin")
    with pytest.raises(WeightsError, match=r"an existing file, got .*nowhere"):
        read_state_dict(tmp_path / "nowhere.bin")
    index = tmp_path / "model.safetensors.index.json"
    for wrong in ("{}", "no JSON", "[1]"):
        index.write_text(wrong)
        with pytest.raises(WeightsError, match="must have a weight_map"):
            read_state_dict(index)
    index.write_text(json.dumps({"weight_map": {"a": "../w.safetensors"}}))
    with pytest.raises(
        WeightsError, match=r"shards must be in the folder of their index, got '\.\./w"
    ):
        read_state_dict(index)


def test_the_hub_is_asked_for_the_safe_file_first_at_the_pinned_revision(
    tmp_path: Path, monkeypatch
) -> None:
    asked = []

    def download(_hub, repository: str, name: str, revision: str) -> Path | None:
        asked.append((repository, name, revision))
        return tmp_path / name if name.endswith(".bin") else None

    monkeypatch.setattr(hub_module, "_download", download)
    monkeypatch.setattr(hub_module, "is_reachable", lambda _endpoint: True)
    monkeypatch.setattr(hub_module, "cached_file", lambda *_args: None)
    files = ("model.safetensors", "pytorch_model.bin")
    pinned, other = "abc1" * 10, "def2" * 10
    found = find_weights("owner/model", files=files, revision=pinned)
    assert found == tmp_path / "pytorch_model.bin"
    assert asked == [("owner/model", name, pinned) for name in files]
    asked.clear()
    find_weights(f"owner/model@{other}", files=files, revision=pinned)
    assert asked == [("owner/model", name, other) for name in files]
    with pytest.raises(
        WeightsError, match=r"'owner/model' must have one of model\.safe"
    ):
        find_weights("owner/model", files=files[:1], revision=pinned)


def test_with_an_index_its_shards_are_fetched_at_the_same_commit(
    tmp_path: Path, monkeypatch
) -> None:
    commit, asked = "abc1" * 10, []
    folder = tmp_path / "snapshots" / commit
    folder.mkdir(parents=True)
    index = {"weight_map": {"a": "part-2.bin", "b": "part-1.bin", "c": "part-1.bin"}}
    (folder / "x.index.json").write_text(json.dumps(index))

    def cached(_repo: str, name: str, revision: str | None = None) -> Path:
        asked.append((name, revision))
        return folder / name

    monkeypatch.setattr(hub_module, "cached_file", cached)
    with pytest.warns(
        UserWarning, match=f"'o/m' is not pinned .*'main' is {commit} now"
    ):
        found = hub_module.hub_file("o/m", ("x.index.json",))
    assert commit_of(found) == commit and commit_of(Path("a/b")) is None
    assert asked == [
        ("x.index.json", None),
        ("part-1.bin", commit),
        ("part-2.bin", commit),
    ]


@pytest.mark.parametrize(
    "source", ["owner/model", "owner/model@main", "owner/model@abc"]
)
def test_a_moving_branch_is_refused_where_weights_are_named(
    source: str, monkeypatch
) -> None:
    monkeypatch.setattr(hub_module, "cached_file", None)
    with pytest.raises(
        WeightsError, match="must name a full commit, owner/model@COMMIT"
    ):
        find_weights(source, files=("w.safetensors",))


def test_a_folder_without_weights_and_a_path_that_is_not_there_are_named(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        WeightsError, match=r"folder must contain model\.safetensors, got"
    ):
        find_weights(tmp_path, files=("model.safetensors",), revision="x")
    with pytest.raises(
        WeightsError, match="existing file or folder, or a hub repository"
    ):
        find_weights(tmp_path / "no.bin", files=("model.safetensors",), revision="x")
    with pytest.raises(WeightsError, match="existing file or folder"):
        find_weights("./no.bin", files=("model.safetensors",), revision="x")


def test_names_and_shapes_must_fit_exactly() -> None:
    network, weights = nn.Linear(2, 3), nn.Linear(2, 3).state_dict()
    load_strictly(network, weights, source="m")
    with pytest.raises(WeightsError, match=r"got 1 missing \(weight\) in 'm'"):
        load_strictly(network, {"bias": weights["bias"]}, source="m")
    more = weights | {"d": torch.ones(1)}
    with pytest.raises(WeightsError, match=r"got 1 unexpected \(d\) in 'm'"):
        load_strictly(network, more, source="m")
    assert load_strictly(network, more, source="m", unused=("d",)) == hash_state_dict(
        weights
    )
    with pytest.raises(
        WeightsError, match=r"1 misshapen \(weight \(2, 3\) for \(3, 2\)\)"
    ):
        load_strictly(network, weights | {"weight": torch.ones(2, 3)}, source="m")


def test_the_hash_sees_names_shapes_dtypes_and_values() -> None:
    base = hash_state_dict(TENSORS)
    a = TENSORS["a"]
    for changed in ({"A": a}, {"a": a.view(3, 2)}, {"a": a.half()}, {"a": a + 1}):
        rest = {k: v for k, v in TENSORS.items() if k != "a"}
        assert hash_state_dict({**rest, **changed}) != base
    assert hash_state_dict(dict(reversed(TENSORS.items()))) == base


OPERATORS = """
import sys, torch
from thinsection.encode import load_encoder
from thinsection.weights.placement import optional_package
declared = lambda: hasattr(torch.ops.torchvision, "nms")
load_encoder("efficientnet_lite0", device="cpu")
load_encoder("conch_v15", device="cpu", pretrained=False)
assert not declared() and "torchvision" not in sys.modules, "declared by what needs none"
optional_package("timm")
assert declared() and "torchvision" in sys.modules
"""


def test_operators_of_torchvision_are_declared_by_what_needs_it_and_nothing_else() -> (
    None
):
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", OPERATORS],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
