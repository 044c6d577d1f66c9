"""OpenVINO gives PyTorch's embeddings, the same bytes each time; torch stays where it does not."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from thinsection.encode import (
    NetworkTileEncoder,
    TileEncoder,
    batch_bytes,
    engine_choice,
    load_encoder,
    weights_bytes,
)
from thinsection.encode import engine as engine_module
from thinsection.encode.engine import SelfCheck
from thinsection.encode.engine_choice import why_torch
from thinsection.encode.registry import ENCODERS
from thinsection.errors import InvalidInputError, MissingDependencyError
from thinsection.extras import is_installed
from thinsection.run.run import run
from thinsection.stages.config import RunConfig
from thinsection.testing import run_and_measure
from thinsection.weights.placement import cpu_has_bf16

needs_openvino = pytest.mark.skipif(
    not is_installed("openvino"), reason="openvino is not installed"
)
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM of /proc")
pytestmark = needs_openvino

LITE0, TINY = (
    "efficientnet_lite0",
    "timm:test_vit",
)  # TINY: of 160 px, with random weights
TILES = np.random.default_rng(3).integers(0, 256, (6, 256, 256, 3), dtype=np.uint8)


@pytest.fixture(scope="module", autouse=True)
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache that these tests share, also with processes that they start."""
    root = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root))
        yield root / "thinsection" / "openvino"


def load(name: str = LITE0, **options) -> NetworkTileEncoder:
    options = {"precision": "fp32", "pretrained": name == LITE0} | options
    encoder = load_encoder(name, device="cpu", **options)
    assert isinstance(encoder, NetworkTileEncoder)
    return encoder


@pytest.fixture(scope="module")
def ours() -> NetworkTileEncoder:
    return load()


@pytest.fixture(scope="module")
def torchs() -> NetworkTileEncoder:
    return load(engine="torch")


def share_of_range(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).abs().max() / (wanted.max() - wanted.min()))


def test_auto_takes_openvino_and_its_embeddings_are_torchs(ours, torchs) -> None:
    assert ours.engine == f"openvino {version('openvino')}"
    assert torchs.engine == f"torch {torch.__version__}"
    got, wanted = ours.encode(TILES), torchs.encode(TILES)
    assert got.dtype == torch.float32 and got.shape == wanted.shape
    assert 0 < share_of_range(got, wanted) <= 1e-5
    assert ours.identity == torchs.identity and ours.provenance != torchs.provenance
    assert "openvino" in repr(ours)


def test_the_same_tiles_give_the_same_bytes_whatever_their_batch(ours) -> None:
    whole = ours.encode(TILES)
    assert torch.equal(ours.encode(TILES), whole)
    assert torch.equal(load().encode(TILES), whole)  # of the kept graph
    for count in (1, 3, 5):
        assert torch.equal(ours.encode(TILES[:count]), whole[:count])
    assert torch.equal(ours.encode(TILES[[5, 0]]), whole[[5, 0]])
    assert ours.encode(TILES[:0]).shape == (0, 1280)


def test_tokens_come_from_the_same_pass(ours, torchs) -> None:
    pooled, tokens = ours.encode_with_tokens(TILES[:5])
    assert torch.equal(pooled, ours.encode(TILES[:5]))
    assert share_of_range(tokens, torchs.encode_tokens(TILES[:5])) <= 1e-5


def test_bf16_is_openvinos_too_and_close(torchs) -> None:
    half = load(precision="bf16")
    assert half.engine.startswith("openvino")
    cosine = torch.nn.functional.cosine_similarity(
        half.encode(TILES), torchs.encode(TILES)
    )
    least = 1e-6 if cpu_has_bf16() else -1e-6  # without, OpenVINO computes in fp32
    assert least < 1 - cosine.min() < engine_module.MAX_COSINE_DISTANCE


def test_embeddings_can_be_trained_on(ours) -> None:
    head = torch.nn.Linear(ours.dim, 1)
    head(ours.encode(TILES[:2])).sum().backward()
    assert head.weight.grad is not None


def test_random_weights_stay_with_torch_unless_openvino_is_asked_for() -> None:
    auto = load(TINY)
    assert auto.engine == f"torch {torch.__version__} (not openvino: random weights)"
    asked, tiles = load(TINY, engine="openvino"), TILES[:, :160, :160]
    assert asked.engine.startswith("openvino")
    assert share_of_range(asked.encode(tiles), auto.encode(tiles)) <= 1e-5
    assert share_of_range(asked.encode_tokens(tiles), auto.encode_tokens(tiles)) <= 1e-5


def test_without_the_package_auto_says_so_and_asking_names_the_extra(
    monkeypatch,
) -> None:
    monkeypatch.setattr(engine_choice, "is_installed", lambda package: False)
    assert load().engine.endswith("(not openvino: not installed)")
    monkeypatch.setattr("thinsection.extras.is_installed", lambda package: False)
    with pytest.raises(
        MissingDependencyError, match=r"pip install 'thinsection\[hub\]'"
    ):
        load(engine="openvino")


def test_what_openvino_cannot_do_is_said_and_done_by_torch(monkeypatch, torchs) -> None:
    fp16 = load(precision="fp16")
    assert (
        "(not openvino: precision must be fp32 or bf16 with OpenVINO, got 'fp16'"
        in fp16.engine
    )
    with pytest.raises(
        InvalidInputError, match="for 'efficientnet_lite0' in fp16, got openvino"
    ):
        load(precision="fp16", engine="openvino")
    monkeypatch.setattr(SelfCheck, "passes", lambda self, precision: False)
    far = load()
    assert (
        "(not openvino: the output differs too much from torch's: SelfCheck(error="
        in far.engine
    )
    assert torch.equal(
        far.encode(TILES), torchs.encode(TILES)
    )  # its weights are there again


def test_a_network_that_does_not_convert_says_why(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.jit, "trace", None)
    refused = "network must convert to OpenVINO, got Couldn't get TorchScript module by tracing"
    assert refused in load().engine
    with pytest.raises(
        InvalidInputError, match=r"engine must be torch for .* got openvino"
    ):
        load(engine="openvino")
    assert not list(tmp_path.rglob("*model*"))


def test_engines_are_checked_against_the_device_and_by_name(
    monkeypatch, torchs
) -> None:
    cuda, cpu = "cuda", "cpu"
    assert why_torch("auto", cuda, is_random=False) == "torch"
    assert why_torch("auto", cpu, is_random=False) == ""
    with pytest.raises(
        InvalidInputError, match=r"got .openvino. on cuda; pass device=.cpu"
    ):
        why_torch("openvino", cuda, is_random=False)
    with pytest.raises(
        InvalidInputError, match="one of auto, torch, openvino, compiled, got 'onnx'"
    ):
        load(engine="onnx")


def test_another_packages_encoder_says_its_own_engine(monkeypatch, torchs) -> None:
    class Brought(TileEncoder):
        spec, device, precision, weights_hash = torchs.spec, torchs.device, "fp32", "0"
        engine = "numpy"

        def encode(self, tiles_u8):
            return torchs.encode(tiles_u8)

    monkeypatch.setitem(
        ENCODERS.__dict__, "load", lambda name: lambda **options: Brought()
    )
    monkeypatch.setattr("thinsection.encode.load.is_brought", lambda name: True)
    assert load_encoder(LITE0, device="cpu").provenance["engine"] == "numpy"
    with pytest.raises(
        InvalidInputError, match="which another package provides, got 'openvino'"
    ):
        load_encoder(LITE0, device="cpu", engine="openvino")


def test_a_kept_graph_is_used_and_a_damaged_one_made_anew(graphs, monkeypatch) -> None:
    first, made = load(TINY, engine="openvino"), []
    convert = engine_module._convert

    def counted(network, pixels, folder):
        made.append(folder)
        convert(network, pixels, folder)

    monkeypatch.setattr(engine_module, "_convert", counted)
    tiles = TILES[:, :160, :160]
    again = load(TINY, engine="openvino")
    assert not made and torch.equal(again.encode(tiles), first.encode(tiles))
    del first, again
    (bytes_of,) = [p for p in graphs.glob("*/model.bin") if p.stat().st_size < 4e6]
    damaged = bytearray(bytes_of.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    bytes_of.write_bytes(damaged)
    load(TINY, engine="openvino")
    (bytes_of.parent / "model.xml").unlink()
    load(TINY, engine="openvino")
    assert made == [bytes_of.parent] * 2
    assert not [p for p in graphs.iterdir() if not p.is_dir() or ".tmp-" in p.name]


CHILD = """
import os, signal, sys
from thinsection.encode import engine, load_encoder
convert, write = engine._convert, engine._write_graph
def counted(*arguments):
    print("converts")
    convert(*arguments)
def dies(network, pixels, path):
    write(network, pixels, path)
    os.kill(os.getpid(), signal.SIGKILL)
engine._convert = counted
if sys.argv[1] == "dies":
    engine._write_graph = dies
print(load_encoder("efficientnet_lite0", device="cpu", precision="fp32").engine)
"""


SIGNALLED = """
import gc, mmap, os, signal, sys, time
from thinsection.encode import load_encoder
def load():
    return load_encoder(
        "timm:test_vit", device="cpu", precision="fp32", pretrained=False, engine="openvino"
    )
signal.signal(signal.SIGTERM, lambda *_: print("heard"))
first = load()
second = load()
assert "openvino" in first.engine
del first
gc.collect()
del second
gc.collect()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.1)
"""


def test_a_process_hears_signals_after_its_networks_have_gone() -> None:
    command = [sys.executable, "-c", SIGNALLED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "heard\n"), done.stderr


def start(mode: str, cache: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(cache)}
    command, pipe = [sys.executable, "-c", CHILD, mode], subprocess.PIPE
    return subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=environment
    )


def test_a_killed_conversion_leaves_nothing_and_of_two_processes_one_converts(
    tmp_path,
) -> None:
    killed = start("dies", tmp_path)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    root = tmp_path / "thinsection" / "openvino"
    assert not [p for p in root.iterdir() if p.is_dir() and ".tmp-" not in p.name]
    both = [start("lives", tmp_path) for _ in range(2)]
    said = [child.communicate() for child in both]
    assert [child.returncode for child in both] == [0, 0], said
    lines = [line for out, _ in said for line in out.splitlines()]
    assert lines.count("converts") == 1
    assert sum(line.startswith("openvino") for line in lines) == 2
    assert not any(err for _, err in said)  # what tracing warns of is no news here
    assert len(list(root.iterdir())) == 1


def test_results_and_records_say_the_engine_and_why_not_another(
    he_slide, tmp_path, monkeypatch
) -> None:
    settings = {"overview": False, "batch_size": 4, "device": "cpu"}
    out = tmp_path / "out"
    monkeypatch.setattr(SelfCheck, "passes", lambda self, precision: False)
    assert run([he_slide], out=out, config=RunConfig(), **settings).counts["done"] == 1
    monkeypatch.undo()
    (path,) = out.glob("*/features_*/he.h5")
    with h5py.File(path) as file:
        assert "(not openvino: the output differs too much from torch" in str(
            file["coords"].attrs["engine"]
        )
    (record,) = out.glob("records/*/run.json")
    models = json.loads(record.read_text())["models"]
    assert (
        "(not openvino: the output differs too much from torch"
        in models[LITE0]["engine"]
    )
    # the engine is no part of the key: nothing is computed again
    assert run([he_slide], out=out, engine="torch", **settings).counts["skipped"] == 1


def test_plans_measure_the_engine_that_will_run(graphs, monkeypatch) -> None:
    from thinsection.run import measuring
    from thinsection.run.measuring import measure_cpu_peak, measure_rate

    monkeypatch.setattr(
        measuring, "_PEAK_TIMES", 1
    )  # whether it is measured, not how well

    size = {"batch_size": 4, "tile_px": 160}
    encoder = load(TINY)
    before = set(graphs.parent.rglob("*"))
    assert measure_rate(encoder, tile_px=160, engine="openvino") > 0
    assert encoder.engine.startswith("openvino")
    assert measure_cpu_peak(TINY, precision="fp32", engine="openvino", **size) > 10**8
    assert set(graphs.parent.rglob("*")) == before


@pytest.mark.check
@needs_proc
@pytest.mark.parametrize("name", [LITE0, "timm:vit_small_patch16_224"])
def test_a_process_peaks_within_what_is_counted(name: str) -> None:
    encoder = load(
        name, engine="openvino"
    )  # the graph is kept: only a first run converts
    edge = encoder.spec.tile_px
    measured = run_and_measure(
        "tests.encode.measured_encoding", "load_and_encode", setup="libraries", name=name,
        tile_px=edge, batch_size=32,
    )  # fmt: skip
    weights = weights_bytes(encoder)
    counted = 2 * weights + batch_bytes(encoder, batch_size=32)  # as a plan counts them
    assert measured.growth_bytes <= counted <= 2.5 * measured.growth_bytes
