"""Compiled networks: chosen where they pay, taken from the user's own cache, equal to PyTorch.

Most tests put a stand-in in place of the compiler, which takes ten seconds: it writes files as the
compiler does, and the network is PyTorch's. The last ones compile.
"""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.support.few_layers import few_layers_spec
from tests.support.tiny_encoder import tiny_spec
from torch import nn

from thinsection.encode import (
    NetworkTileEncoder,
    compiled,
    engine_choice,
)
from thinsection.encode.backbone import Backbone, build_backbone, unfilled_backbone
from thinsection.encode.compiled import (
    Compilation,
    CompiledCheck,
    CompiledNetwork,
    rows_within,
)
from thinsection.encode.engine_choice import (
    COMPILE_S,
    LOAD_S,
    SAVED_SHARE,
    Workload,
    why_not_compiled,
    why_not_worth,
)
from thinsection.encode.load import load_encoder
from thinsection.encode.load_network import _on_engine
from thinsection.errors import InvalidInputError, StoreError
from thinsection.extras import missing_of
from thinsection.weights.origin import Origin
from thinsection.weights.placement import Placement

TINY = tiny_spec(width=32, layers=2)
TILES = torch.randint(
    0,
    256,
    (6, 80, 80, 3),
    dtype=torch.uint8,
    generator=torch.Generator().manual_seed(1),
)
CPU = torch.device("cpu")


def tiny(seed: int = 0, precision: str = "fp32") -> NetworkTileEncoder:
    loaded_in = "fp32" if precision == "fp8" else precision
    placement = Placement(CPU, loaded_in)  # type: ignore[arg-type]
    backbone = build_backbone(TINY, seed=seed)
    encoder = NetworkTileEncoder(TINY, backbone, placement, Origin(seed=seed))
    if precision == "fp8":
        encoder.to_fp8()
    return encoder


def compile_encoder(encoder: NetworkTileEncoder, cache: Path, batch_size: int = 4):
    return encoder.to_compiled(batch_size=batch_size, load_exact=tiny, cache_dir=cache)


class _StandIn:
    """Compiler that writes two files; the package that it makes is PyTorch's network."""

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self.factor = 1.0  # of the first number of each embedding

    def compile(self, compilation: Compilation, rows: int, folder: Path) -> None:
        self.folders.append(folder)
        (folder / compiled._PACKAGE).write_bytes(b"code" * 100)
        (folder / compiled._CONSTANTS).write_bytes(b"none")

    def load(self, compilation: Compilation):
        module = compiled._WithNormalisation(
            compilation.backbone, compilation.placement
        )

        def run(tiles, colours):
            embeddings, tokens = module(tiles, colours)
            embeddings[:, 0] *= self.factor
            return [embeddings, tokens]

        return run


@pytest.fixture
def stand_in(monkeypatch) -> _StandIn:
    compiler = _StandIn()

    def compile_by_stand_in(self, rows, folder):
        compiler.compile(self, rows, folder)

    monkeypatch.setattr(Compilation, "_compile", compile_by_stand_in)
    monkeypatch.setattr(compiled, "_loaded_package", compiler.load)
    return compiler


def test_a_network_is_compiled_once_and_then_taken_from_the_cache(stand_in, tmp_path):
    encoders = [tiny(), tiny()]
    checks = [compile_encoder(encoder, tmp_path) for encoder in encoders]
    assert len(stand_in.folders) == 1
    assert checks[0] == checks[1]
    assert checks[0].rows == 4
    expected = tiny()
    for encoder in encoders:
        assert encoder.engine.startswith(f"compiled torch {torch.__version__}")
        assert "cosine distance to fp32" in encoder.engine
        assert encoder.identity == expected.identity
        assert encoder.provenance["engine"] == encoder.engine
        torch.testing.assert_close(encoder.encode(TILES), expected.encode(TILES))
    (folder,) = (tmp_path / "compiled").iterdir()
    names = {"network.pt2", "constants.safetensors", "manifest.json", "check.json"}
    assert names <= {path.name for path in folder.iterdir()}


def test_any_number_of_tiles_gives_the_same_bytes(stand_in, tmp_path):
    encoder = tiny()
    compile_encoder(encoder, tmp_path)
    whole = encoder.encode(TILES)
    for count in (1, 3, 4, 5, 6):
        assert torch.equal(encoder.encode(TILES[:count]), whole[:count])
    assert encoder.encode(TILES[:0]).shape == (0, 512)
    embeddings, tokens = encoder.encode_with_tokens(TILES)
    assert torch.equal(embeddings, whole)
    torch.testing.assert_close(tokens, tiny().encode_tokens(TILES))
    assert encoder.tiles_at_once(100) == 4


def test_other_colours_are_normalised_in_the_same_network(stand_in, tmp_path):
    from dataclasses import replace

    encoder = tiny()
    compile_encoder(encoder, tmp_path)
    other = replace(TINY, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    expected = tiny().encode_as(TILES, other)[0]
    torch.testing.assert_close(encoder.encode_as(TILES, other)[0], expected)
    assert not torch.allclose(encoder.encode(TILES), expected)


def test_weights_precision_batch_versions_and_device_have_their_own_networks(
    stand_in, tmp_path, monkeypatch
):
    def make(seed: int = 0, precision: str = "fp32", batch_size: int = 4) -> None:
        compile_encoder(tiny(seed, precision), tmp_path, batch_size)

    make()
    for options in ({"seed": 1}, {"precision": "bf16"}, {"batch_size": 2}):
        before = len(stand_in.folders)
        make(**options)
        make(**options)
        assert len(stand_in.folders) == before + 1, options
    monkeypatch.setattr(compiled, "device_kind", lambda device: "another card")
    make()
    assert len(stand_in.folders) == 5
    monkeypatch.setattr(compiled, "installed_version", lambda name: f"{name} 9.9")
    make()
    assert len(stand_in.folders) == 6
    assert len({path.name for path in stand_in.folders}) == 6


def test_a_damaged_or_unchecked_network_is_compiled_anew(stand_in, tmp_path):
    compile_encoder(tiny(), tmp_path)
    (folder,) = (tmp_path / "compiled").iterdir()
    package = folder / "network.pt2"
    for number, damage in enumerate(
        (
            lambda: package.write_bytes(b"evil" * 100),
            package.unlink,
            (folder / "check.json").unlink,
            lambda: (folder / "check.json").write_text("{"),
        )
    ):
        damage()
        compile_encoder(tiny(), tmp_path)
        assert len(stand_in.folders) == number + 2
        assert package.read_bytes() == b"code" * 100


def test_a_network_with_other_embeddings_leaves_the_work_to_torch(stand_in, tmp_path):
    stand_in.factor = -20.0
    encoder = tiny(precision="bf16")
    check = compile_encoder(encoder, tmp_path)
    assert not check.passes("bf16")
    assert encoder.engine == f"torch {torch.__version__}"
    assert torch.equal(encoder.encode(TILES), tiny(precision="bf16").encode(TILES))


def test_the_tolerance_is_of_the_range_in_fp32_and_of_the_angle_in_half_precision():
    figures = {"rows": 4, "compile_s": 1.0, "distance": 0.1, "torch_distance": 0.1}
    near = CompiledCheck(cosine=0.99995, error=1e-3, **figures)
    far = CompiledCheck(cosine=0.9998, error=1e-3, **figures)
    exact = CompiledCheck(cosine=1.0, error=1e-6, **figures)
    assert near.passes("bf16") and near.passes("fp16") and not near.passes("fp32")
    assert not far.passes("bf16") and far.passes("fp8")
    assert not CompiledCheck(cosine=0.9989, error=0.0, **figures).passes("fp8")
    assert exact.passes("fp32")


def test_a_folder_that_others_may_write_is_refused(stand_in, tmp_path, monkeypatch):
    compile_encoder(tiny(), tmp_path)
    root = tmp_path / "compiled"
    assert root.stat().st_mode & 0o777 == 0o700
    for mode in (0o770, 0o702):
        root.chmod(mode)
        with pytest.raises(InvalidInputError, match="nobody else may write it"):
            compile_encoder(tiny(), tmp_path)
    root.chmod(0o755)
    compile_encoder(tiny(), tmp_path)
    user = os.getuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: user + 1)
        with pytest.raises(InvalidInputError, match="must belong to this user"):
            compile_encoder(tiny(), tmp_path)
    moved = tmp_path / "elsewhere"
    root.rename(moved)
    root.symlink_to(moved)
    with pytest.raises(InvalidInputError, match="must belong to this user"):
        compile_encoder(tiny(), tmp_path)


def test_a_network_that_others_may_write_is_refused_also_in_an_open_folder(
    stand_in, tmp_path
):
    root = tmp_path / "compiled"
    before = os.umask(0o002)
    try:
        compile_encoder(tiny(), tmp_path)
    finally:
        os.umask(before)
    (folder,) = [path for path in root.iterdir() if path.is_dir()]
    assert folder.stat().st_mode & 0o777 == 0o700
    root.chmod(0o755)
    compile_encoder(tiny(), tmp_path)
    folder.chmod(0o775)
    with pytest.raises(InvalidInputError, match=f"got '{folder}'.*mode 775"):
        compile_encoder(tiny(), tmp_path)
    moved = tmp_path / "elsewhere"
    folder.rename(moved)
    folder.symlink_to(moved)
    with pytest.raises(InvalidInputError, match="must belong to this user"):
        compile_encoder(tiny(), tmp_path)
    assert len(stand_in.folders) == 1


class _Card:
    """A second card, as far as a graph of launches needs one; it runs nothing by itself."""

    def __init__(self, *, records: bool) -> None:
        self.device = torch.device("cuda", 1)
        self.records = records
        self.captured_on: list[object] = []
        self.queued: list[str] = []
        self.answer = torch.zeros(2, 3)

    def one_pass(self) -> tuple[torch.Tensor]:
        answer = self.answer if self.captured_on else torch.zeros(2, 3)
        return (answer.fill_(_WARM_VALUE),)

    def replay(self) -> None:
        if self.records:
            self.answer.fill_(_WARM_VALUE)

    def install(self, monkeypatch) -> None:
        card = self

        class Stream:
            def __init__(self, device=None) -> None:
                self.device = device

            def wait_stream(self, other) -> None:
                pass

            def wait_event(self, event) -> None:
                card.queued.append("wait")

        class Event:
            def record(self, stream) -> None:
                assert stream.device == card.device
                card.queued.append("record")

        class Graph:
            def replay(self) -> None:
                card.replay()

        @contextmanager
        def graph(captured, *, stream=None, capture_error_mode):
            assert capture_error_mode == "thread_local"
            card.captured_on.append(stream.device if stream else None)
            yield

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", graph)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "current_stream", Stream)


_WARM_VALUE = 7.0


def test_launches_are_recorded_on_the_card_of_the_network(monkeypatch):
    card = _Card(records=True)
    card.install(monkeypatch)
    graph = compiled._CudaGraph(card.one_pass, card.device)
    assert card.captured_on == [card.device]
    (answer,) = graph.replay()
    assert answer is card.answer
    assert torch.all(answer == _WARM_VALUE)


def test_a_graph_without_launches_is_refused(monkeypatch):
    card = _Card(records=False)
    card.install(monkeypatch)
    with pytest.raises(RuntimeError, match="replayed launches give other embeddings"):
        compiled._CudaGraph(card.one_pass, card.device)


@pytest.mark.parametrize("has_graph", [True, False])
def test_the_next_pass_waits_until_the_last_results_were_read(
    stand_in, tmp_path, monkeypatch, has_graph
):
    encoder = tiny()
    compile_encoder(encoder, tmp_path)
    network = encoder._compiled
    card = _Card(records=True)
    card.install(monkeypatch)
    network._device = card.device
    network._read = torch.cuda.Event()
    if has_graph:
        network._graph = SimpleNamespace(replay=network._pass)
    expected = tiny().encode(TILES)
    torch.testing.assert_close(encoder.encode(TILES), expected)
    # two passes of four rows
    assert card.queued == ["wait", "record"] * 2


def test_copies_load_the_network_again_or_say_that_torch_computes(stand_in, tmp_path):
    encoder = tiny()
    compile_encoder(encoder, tmp_path)
    data = pickle.dumps(encoder)
    copied = pickle.loads(data)  # noqa: S301
    assert isinstance(copied._compiled, CompiledNetwork)
    assert copied.provenance == encoder.provenance
    assert torch.equal(copied.encode(TILES), encoder.encode(TILES))
    shutil.rmtree(tmp_path / "compiled")
    copied = pickle.loads(data)  # noqa: S301
    assert copied.engine.endswith("(not compiled: it is not stored on this machine)")
    assert torch.equal(copied.encode(TILES), tiny().encode(TILES))
    assert len(stand_in.folders) == 1


def load_tiny(name: str = "efficientnet_lite0", **options) -> NetworkTileEncoder:
    options = {"precision": "fp32", "pretrained": False} | options
    encoder = load_encoder(name, device="cpu", **options)
    assert isinstance(encoder, NetworkTileEncoder)
    return encoder


def test_asked_for_by_name_it_is_used_or_refused_with_the_reason(
    stand_in, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    encoder = load_tiny(engine="compiled")
    assert encoder.engine.startswith("compiled torch")
    stand_in.factor = -20.0
    with pytest.raises(
        InvalidInputError,
        match="engine must be torch for 'efficientnet_lite0' in fp32, got compiled: the output "
        "differs too much",
    ):
        load_tiny(engine="compiled", seed=1)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InvalidInputError, match="no-such-compiler' is not on"):
        load_tiny(engine="compiled")
    assert "compiled" not in load_tiny().engine


def test_reasons_that_need_no_try(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(engine_choice, "is_installed", lambda name: False)
    assert why_not_compiled("cpu") == ""
    assert why_not_compiled("cuda:1") == "triton is not installed"
    assert why_not_compiled("mps") == "nothing compiles for mps"
    monkeypatch.setattr(engine_choice, "is_installed", lambda name: True)
    assert why_not_compiled("cuda:1") == ""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(engine_choice, "_CUDA_FOLDER", tmp_path / "cuda")
    found = {"g++": "/bin/g++"}
    monkeypatch.setattr(shutil, "which", found.get)
    monkeypatch.delenv("CXX", raising=False)
    assert why_not_compiled("cpu") == ""
    assert why_not_compiled("cuda:1").startswith("no CUDA toolkit: CUDA_HOME is not")
    monkeypatch.setenv("CUDA_PATH", "/opt/cuda")
    assert why_not_compiled("cuda:1") == ""
    monkeypatch.delenv("CUDA_PATH")
    (tmp_path / "cuda").mkdir()
    assert why_not_compiled("cuda:1") == ""


def test_errors_of_the_compiler_and_of_the_disk_are_told_apart(tmp_path, monkeypatch):
    def export(error: Exception):
        def fail(*args):
            raise error

        return fail

    no_toolkit = OSError("CUDA_HOME environment variable is not set")
    monkeypatch.setattr(torch.export, "export", export(no_toolkit))
    with pytest.raises(InvalidInputError, match="must compile, got CUDA_HOME"):
        compile_encoder(tiny(), tmp_path)
    no_compiler = FileNotFoundError(2, "No such file or directory", "g++")
    monkeypatch.setattr(torch.export, "export", export(no_compiler))
    with pytest.raises(InvalidInputError, match=r"must compile, got .*g\+\+"):
        compile_encoder(tiny(), tmp_path)
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(torch.export, "export", export(full))
    with pytest.raises(StoreError, match="No space left on device; free some space"):
        compile_encoder(tiny(), tmp_path)
    assert not [path for path in (tmp_path / "compiled").iterdir() if path.is_dir()]


def worth(num_tiles: int | None, *, tiles_per_s: float = 500, is_stored: bool = False):
    workload = Workload(num_tiles=num_tiles, batch_size=64)
    return why_not_worth(
        workload, tiles_per_s=lambda: tiles_per_s, is_stored=lambda: is_stored
    )


def test_it_pays_where_the_time_that_it_saves_exceeds_its_cost():
    assert worth(None) == "the number of tiles is not known"
    assert worth(200) == "some 200 tiles take about 0 s, and compiling about 60 s"
    least = COMPILE_S / SAVED_SHARE * 500
    assert worth(int(0.99 * least)) != ""
    assert worth(int(1.01 * least)) == ""
    least = LOAD_S / SAVED_SHARE * 500
    assert "loading about 5 s" in worth(int(0.99 * least), is_stored=True)
    assert worth(int(1.01 * least), is_stored=True) == ""
    assert worth(10**9, tiles_per_s=0).startswith("a batch of 64 tiles does not fit")


class _OnCuda(NetworkTileEncoder):
    """Encoder that says it is on a card, with a rate and a comparison that tests set."""

    def __init__(self, check: CompiledCheck | Exception) -> None:
        self.spec = TINY
        self.device = torch.device("cuda:1")
        self.precision = "bf16"
        self.engine = "torch 9"
        self._check = check
        self.batches: list[int] = []

    def tiles_per_s(self, num_tiles: int) -> float:
        return 100.0

    def has_compiled(self, batch_size: int) -> bool:
        return False

    def to_compiled(self, *, batch_size, load_exact, cache_dir=None) -> CompiledCheck:
        self.batches.append(batch_size)
        if isinstance(self._check, Exception):
            raise self._check
        if self._check.passes(self.precision):
            self.engine = "compiled torch 9"
        return self._check


GOOD = CompiledCheck(
    rows=64, compile_s=40.0, cosine=0.99999, error=0.1, distance=0.1, torch_distance=0.1
)
BAD = CompiledCheck(
    rows=64, compile_s=40.0, cosine=0.99, error=0.1, distance=0.1, torch_distance=0.1
)


@pytest.mark.parametrize(
    ("check", "num_tiles", "engine"),
    [
        (GOOD, 200, "torch 9 (not compiled: some 200 tiles take about 2 s, and"),
        (GOOD, None, "torch 9 (not compiled: the number of tiles is not known)"),
        (GOOD, 10**6, "compiled torch 9"),
        (BAD, 10**6, "torch 9 (not compiled: the output differs too much from torch"),
        (
            InvalidInputError("network must compile, got x\nand y"),
            10**6,
            "torch 9 (not compiled: network must compile, got x)",
        ),
        (torch.OutOfMemoryError("no memory"), 10**6, "torch 9 (not compiled: no memo"),
    ],
)
def test_auto_compiles_on_a_card_for_a_long_run_and_says_why_not(
    check, num_tiles, engine, monkeypatch
):
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(engine_choice, "is_installed", lambda name: True)
    encoder = _OnCuda(check)
    workload = Workload(num_tiles=num_tiles, batch_size=64)
    found = _on_engine(
        lambda *args: encoder, "auto", is_random=False, workload=workload
    )
    assert found is encoder
    assert found.engine.startswith(engine)
    assert encoder.batches == ([64] if num_tiles == 10**6 else [])
    plain = _OnCuda(check)
    asked = _on_engine(lambda *args: plain, "torch", is_random=False, workload=workload)
    assert asked.engine == "torch 9"


def test_a_pass_has_as_few_rows_as_are_nearly_as_fast():
    def rate_of(rates: dict[int, float]):
        return lambda size: rates[size]

    assert rows_within(256, rate_of({64: 99, 128: 100, 256: 100})) == 64
    assert rows_within(256, rate_of({64: 90, 128: 99, 256: 100})) == 128
    assert rows_within(256, rate_of({64: 50, 128: 90, 256: 100})) == 256
    assert rows_within(256, rate_of({64: 50, 128: 60, 256: 0})) == 128
    assert rows_within(1, rate_of({1: 5})) == 1
    with pytest.raises(InvalidInputError, match="must fit the device"):
        rows_within(8, lambda size: 0.0)


def test_a_batch_size_is_timed_on_the_network_itself():
    encoder = tiny()
    assert encoder.tiles_per_s(2) > 0
    assert encoder._rows_of_a_pass(32) == 4


CHILD = """
import os, signal, sys
from tests.encode.test_compiled import _StandIn, Compilation, compile_encoder, compiled, tiny
from pathlib import Path
stand_in = _StandIn()
def compile(self, rows, folder):
    print("compiles", flush=True)
    stand_in.compile(self, rows, folder)
    if sys.argv[1] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
Compilation._compile = compile
compiled._loaded_package = stand_in.load
encoder = tiny()
compile_encoder(encoder, Path(sys.argv[2]))
print(encoder.engine)
"""


def start(mode: str, cache: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, "-c", CHILD, mode, str(cache)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.mark.check
def test_a_killed_compiler_leaves_nothing_and_of_two_processes_one_compiles(tmp_path):
    killed = start("dies", tmp_path)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    root = tmp_path / "compiled"
    assert not [p for p in root.iterdir() if p.is_dir() and ".tmp-" not in p.name]
    both = [start("lives", tmp_path) for _ in range(2)]
    answers = [child.communicate() for child in both]
    assert [child.returncode for child in both] == [0, 0], answers
    lines = [line for out, _ in answers for line in out.splitlines()]
    assert lines.count("compiles") == 1
    assert sum(line.startswith("compiled torch") for line in lines) == 2
    assert len([p for p in root.iterdir() if p.is_dir()]) == 1


needs_compiler = pytest.mark.skipif(
    why_not_compiled("cpu") != "", reason="no C++ compiler"
)


@pytest.fixture(scope="module", params=["fp32", "bf16", "fp8"])
def really_compiled(
    request, tmp_path_factory
) -> Iterator[tuple[NetworkTileEncoder, CompiledCheck]]:
    encoder = tiny(seed=3, precision=request.param)
    cache = tmp_path_factory.mktemp("cache")
    check = encoder.to_compiled(
        batch_size=4, load_exact=lambda: tiny(seed=3), cache_dir=cache
    )
    yield encoder, check


@pytest.mark.check
@needs_compiler
def test_a_compiled_vision_transformer_gives_the_embeddings_of_torch(really_compiled):
    encoder, check = really_compiled
    expected = tiny(seed=3, precision=encoder.precision)
    exact = tiny(seed=3)
    ours = encoder.encode(TILES)
    theirs = expected.encode(TILES)
    assert encoder.engine.startswith("compiled torch"), check
    cosine = torch.nn.functional.cosine_similarity
    if encoder.precision == "fp32":
        error = (ours - theirs).abs().max() / (theirs.max() - theirs.min())
        assert 0 < error <= 1e-5
        torch.testing.assert_close(
            encoder.encode_tokens(TILES), expected.encode_tokens(TILES)
        )
    else:
        # it rounds in other places than PyTorch, and not worse
        least = 0.999 if encoder.precision == "fp8" else 0.9999
        assert cosine(ours, theirs).min() >= least
        distance = 1 - cosine(ours, exact.encode(TILES)).min()
        assert 0 < distance <= 2 * (1 - cosine(theirs, exact.encode(TILES)).min())
    assert torch.equal(encoder.encode(TILES[:1]), ours[:1])
    assert torch.equal(encoder.encode(TILES[[5, 0]]), ours[[5, 0]])
    copied = pickle.loads(pickle.dumps(encoder))  # noqa: S301
    assert torch.equal(copied.encode(TILES), ours)
    stored = json.loads(next(encoder._graphs.glob("compiled/*/check.json")).read_text())
    assert stored["cosine"] == check.cosine
    # the compiler leaves no files of its own beside the network
    names = {path.name for path in encoder._graphs.glob("compiled/*/*")}
    assert names <= {
        *("network.pt2", "constants.safetensors", "manifest.json", "check.json"),
        "stamps.json",
    }


class _Branching(nn.Module):
    """Network whose code depends on the values of its input."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        sign = 1 if float(pixels.sum()) > 0 else -1
        return sign * pixels.mean(dim=(2, 3))[:, None]


@needs_compiler
def test_a_network_that_does_not_compile_says_why(tmp_path):
    backbone = Backbone(_Branching(), "cls", num_prefix_tokens=0)
    encoder = NetworkTileEncoder(TINY, backbone, Placement(CPU, "fp32"), Origin(seed=0))
    with pytest.raises(InvalidInputError, match="network must compile, got"):
        compile_encoder(encoder, tmp_path)
    assert not [path for path in (tmp_path / "compiled").iterdir() if path.is_dir()]
    assert encoder.engine == f"torch {torch.__version__}"


@pytest.mark.check
@pytest.mark.parametrize(
    "name",
    [
        *("efficientnet_lite0", "conch", "conch_v15", "plip", "keep", "musk"),
        *("phikon", "hibou_b", "h0_mini", "virchow2", "kaiko_vits16", "dinov3_vits16"),
    ],
)
def test_declared_networks_of_each_kind_can_be_traced_for_the_compiler(name):
    """Two layers of each, without weights or data; all 39 were traced by hand on 2026-11-30."""
    spec = few_layers_spec(name)
    if missing_of(spec.needs):
        pytest.skip(f"{name} needs {', '.join(missing_of(spec.needs))}")
    backbone = unfilled_backbone(spec).to("meta").eval().requires_grad_(False)
    module = compiled._WithNormalisation(backbone, Placement(CPU, "bf16"))
    edge = spec.input_px
    tiles = torch.empty((4, edge, edge, 3), dtype=torch.uint8, device="meta")
    colours = torch.empty((2, 3), device="meta")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own
        program = torch.export.export(module, (tiles, colours))
    embeddings, tokens = (
        node.meta["val"] for node in program.graph.output_node().args[0]
    )
    assert embeddings.shape == (4, spec.dim)
    assert embeddings.dtype == tokens.dtype == torch.float32
    assert tokens.ndim == 3
