"""A file is known again by its stamps, and by nothing else; a changed one is read again."""

import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from thinsection.encode import NetworkTileEncoder, load_encoder
from thinsection.encode import encoder as encoder_module
from thinsection.encode import engine as engine_module
from thinsection.encode import graphs as graphs_module
from thinsection.encode import load_network as load_module
from thinsection.encode.backbone import PACKAGED_WEIGHTS
from thinsection.encode.memory import batch_bytes, weights_bytes
from thinsection.errors import InvalidInputError
from thinsection.extras import is_installed
from thinsection.weights.files import hash_state_dict, read_state_dict, write_tensors
from thinsection.weights.origin import (
    keep_hash,
    keep_stamps,
    kept_facts,
    known_hash,
    read_stamps,
)

HOUR_NS = 3600 * 10**9


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every file an hour old to `keep_stamps`."""
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + HOUR_NS)


def test_a_hash_is_known_until_the_file_changes(tmp_path: Path, later: None) -> None:
    path = tmp_path / "w.bin"
    path.write_bytes(b"one")
    stamps = read_stamps([path])
    assert known_hash("net", stamps) is None
    keep_hash("net", stamps, "abc")
    assert known_hash("net", read_stamps([path])) == "abc"
    assert known_hash("other net", read_stamps([path])) is None
    before = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    # size and mtime are the same again; no program can set ctime back
    assert known_hash("net", read_stamps([path])) is None


def test_another_file_in_its_place_is_not_known(tmp_path: Path, later: None) -> None:
    path = tmp_path / "w.bin"
    path.write_bytes(b"one")
    keep_hash("net", read_stamps([path]), "abc")
    other = tmp_path / "other.bin"
    shutil.copy2(path, other)
    other.replace(path)
    assert known_hash("net", read_stamps([path])) is None


def test_stamps_of_a_file_that_changed_while_it_was_read_are_not_kept(
    tmp_path: Path, later: None
) -> None:
    path = tmp_path / "w.bin"
    path.write_bytes(b"one")
    stamps = read_stamps([path])
    path.write_bytes(b"longer")
    keep_hash("net", stamps, "abc")
    assert known_hash("net", stamps) is None
    path.unlink()
    keep_hash("net", stamps, "abc")
    assert read_stamps([path]) is None
    assert known_hash("net", None) is None


def test_stamps_of_a_young_file_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "w.bin"
    path.write_bytes(b"one")
    keep_stamps(tmp_path / "s.json", read_stamps([path]), fact="x")
    assert not (tmp_path / "s.json").exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"stamps": 3}', "3", "\0"])
def test_a_damaged_note_counts_as_none(tmp_path: Path, later: None, text: str) -> None:
    path = tmp_path / "w.bin"
    path.write_bytes(b"one")
    stamps = read_stamps([path])
    keep_stamps(tmp_path / "s.json", stamps, fact="x")
    assert kept_facts(tmp_path / "s.json", stamps) == {"fact": "x"}
    (tmp_path / "s.json").write_text(text)
    assert kept_facts(tmp_path / "s.json", stamps) is None


def published() -> dict[str, torch.Tensor]:
    """Weights of the default encoder."""
    state = read_state_dict(PACKAGED_WEIGHTS)
    return {name: tensor.contiguous() for name, tensor in state.items()}


def load(weights: Path, engine: str) -> NetworkTileEncoder:
    encoder = load_encoder(
        "efficientnet_lite0",
        weights=weights,
        device="cpu",
        precision="fp32",
        engine=engine,  # type: ignore[arg-type]
    )
    assert isinstance(encoder, NetworkTileEncoder)
    return encoder


def calls_of(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str
) -> list[object]:
    """List that gets an item for each call of a function."""
    calls: list[object] = []
    real = getattr(module, name)

    def counted(*arguments: object, **options: object) -> object:
        calls.append(arguments)
        return real(*arguments, **options)

    monkeypatch.setattr(module, name, counted)
    return calls


def test_weights_are_hashed_once_for_all_starts(
    tmp_path: Path, later: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lite0.safetensors"
    state = published()
    write_tensors(path, state, {})
    hashed = calls_of(monkeypatch, load_module, "hash_state_dict")
    first = load(path, "torch")
    again = load(path, "torch")
    assert len(hashed) == 1
    truth = hash_state_dict(again.backbone.network.state_dict())
    assert first.weights_hash == again.weights_hash == truth
    name = next(name for name in state if name.endswith("weight"))
    write_tensors(path, state | {name: torch.zeros_like(state[name])}, {})
    changed = load(path, "torch")
    assert len(hashed) == 2
    assert changed.weights_hash == hash_state_dict(
        changed.backbone.network.state_dict()
    )
    assert changed.weights_hash != truth


@pytest.mark.skipif(not is_installed("openvino"), reason="openvino is not installed")
def test_with_a_converted_graph_no_weights_are_read(
    tmp_path: Path, later: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lite0.safetensors"
    state = published()
    write_tensors(path, state, {})
    tiles = torch.randint(0, 256, (3, 256, 256, 3), dtype=torch.uint8)
    first = load(path, "openvino")
    read = calls_of(monkeypatch, load_module, "pretrained_backbone")
    built = calls_of(monkeypatch, encoder_module, "unfilled_backbone")
    digested = calls_of(monkeypatch, graphs_module, "file_digest")
    # its graph is read whole once more, then known
    load(path, "openvino")
    assert len(digested) == 2
    again = load(path, "openvino")
    assert (len(read), len(digested)) == (0, 2)
    assert again.identity == first.identity
    assert again.engine == first.engine
    assert again.label == first.label
    assert again.origin == first.origin
    assert torch.equal(again.encode(tiles), first.encode(tiles))
    # its network is built only to count memory, and a second graph of it cannot be made
    assert not built
    expected = batch_bytes(first, batch_size=4)
    assert batch_bytes(again, batch_size=4) == pytest.approx(expected, rel=1e-3)
    assert weights_bytes(again) == weights_bytes(first)
    assert len(built) == 1
    with pytest.raises(InvalidInputError, match="network must have weights"):
        again.to_openvino(tmp_path / "elsewhere")
    # other weights at the same place have other embeddings
    name = next(name for name in state if name.endswith("weight"))
    write_tensors(path, state | {name: state[name] * 1.5}, {})
    changed = load(path, "openvino")
    assert len(read) == 1
    assert changed.label != again.label
    assert not torch.equal(changed.encode(tiles), again.encode(tiles))


@pytest.mark.skipif(not is_installed("openvino"), reason="openvino is not installed")
def test_a_graph_that_was_checked_and_then_damaged_is_made_anew(
    tmp_path: Path, cache: Path, later: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lite0.safetensors"
    write_tensors(path, published(), {})
    tiles = torch.randint(0, 256, (3, 256, 256, 3), dtype=torch.uint8)
    expected = load(path, "openvino").encode(tiles)
    load(path, "openvino")
    (graph,) = cache.rglob("model.bin")
    before = graph.stat()
    content = bytearray(graph.read_bytes())
    content[len(content) // 2] ^= 0xFF
    graph.write_bytes(content)
    os.utime(graph, ns=(before.st_atime_ns, before.st_mtime_ns))
    converted = calls_of(monkeypatch, engine_module, "_convert")
    assert torch.equal(load(path, "openvino").encode(tiles), expected)
    assert len(converted) == 1
