"""What a segmenter is, as data, and how it is loaded: from a name, or an entry of TOML.

An entry says resolution and edge of its windows, what its input channels are, what its output
channels mean, and where its weights lie: an ONNX file, or a torch architecture by name with a
safetensors or safe .pth file. No entry runs code that is not installed already.
"""

import hashlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from importlib import resources, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from thinsection.config import from_mapping, option, read_toml
from thinsection.encode.registry import IMAGENET_MEAN, IMAGENET_STD
from thinsection.errors import ConfigError, InvalidInputError, WeightsError, require
from thinsection.registry import Entry, Registry

if TYPE_CHECKING:
    from thinsection.segment.network import Network

Channels = Literal["rgb", "eosin_hematoxylin_density"]
PACKAGE = "package:"
_TEXT = "segmenter"  # the table of a TOML file


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmenterSpec:
    """Everything that is declared of a segmenter; a TOML entry has these keys."""

    name: str  # in the registry, and of its folder of results
    help: str = ""
    outputs: tuple[str, ...]  # what the output channels stand for, in order
    background: str | None = None  # the one of them that is no class; None: all are classes
    # largest: of the outputs the largest one. threshold: the first class above `threshold` and
    # above the background; a px without is background
    rule: Literal["largest", "threshold"] = "largest"
    threshold: float = 0.0  # of the network's outputs; 0 for logits is a probability of a half
    mpp: float  # µm/px of its windows
    px: int = 512  # edge of a window
    overlap: float = 0.25  # least share of a window's edge that neighbours share, [0, 0.5]
    channels: Channels = "rgb"
    mean: tuple[float, ...] = IMAGENET_MEAN  # per channel, applied to values in [0, 1], like std
    std: tuple[float, ...] = IMAGENET_STD  # both of "rgb" alone
    weights: str | None = None  # a path, beside the TOML file if relative, or 'package:PATH'
    sha256: str | None = None  # of the weights' file: another one is refused
    architecture: str | None = None  # 'module:callable' that makes a torch module; None: ONNX
    options: dict[str, Any] = field(default_factory=dict)  # of that callable; "none" is None
    output: str = "out"  # which of the network's outputs, where it gives a dict
    unused: tuple[str, ...] = ()  # beginnings of names that a weights file may have left over
    licence: str = "unknown"
    source: str = ""

    def __post_init__(self) -> None:
        known = self.background is None or self.background in self.outputs
        rules = (
            (len(set(self.outputs)) == len(self.outputs) > 0, "outputs must be different names"),
            (known, "background must be one of the outputs"),
            (self.mpp > 0 and self.px >= 8, "mpp must be > 0 and px >= 8"),
            (0 <= self.overlap <= 0.5, "overlap must be in [0, 0.5]"),
        )
        for ok, rule in rules:
            require(ok, f"segmenter {self.name!r}: {rule}", asdict(self), error=ConfigError)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels 1, 2, ...; 0 is what no class has."""
        return tuple(name for name in self.outputs if name != self.background)


@cache
def declared_segmenters() -> Mapping[str, SegmenterSpec]:
    """Those of `segmenters.toml` beside this file, by name."""
    text = resources.files("thinsection.segment").joinpath("segmenters.toml").read_text("utf-8")
    specs = [from_mapping(SegmenterSpec, row) for row in tomllib.loads(text)[_TEXT]]
    return {spec.name: spec for spec in specs}


def _entries() -> Iterator[Entry]:
    for spec in declared_segmenters().values():
        needs = ("onnxruntime",) if spec.architecture is None else ("timm",)
        yield Entry(name=spec.name, help=spec.help, target=spec, needs=needs, extra="segment")


# another package's entry point names a SegmenterSpec, or an Entry with one
SEGMENTERS: Registry[SegmenterSpec] = Registry("segmenter", "thinsection.segmenters", _entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentConfig:
    """Which networks name the px of a slide."""

    segmenters: tuple[str, ...] = option(
        (),
        "Segmenter; repeat for several: lavlab-shell, hest-tissue, grandqc-tissue, a .toml file.",
        flag="--segmenter",
    )
    segment_weights: str | None = option(None, "Local weights of the segmenter: ONNX, .pth, ...")
    segment_mpp: float = option(4.0, "Resolution of the classes' shares and outlines, µm/px.")
    segment_memory: str = option("512MiB", "Memory of the strip of windows that is blended.")
    tissue_segmenter: bool = option(
        False, "Take the classes of the one segmenter for the tissue, in place of our detector."
    )

    def __post_init__(self) -> None:
        one = len(self.segmenters) == 1
        for name in ("segment_weights", "tissue_segmenter"):
            if getattr(self, name) and not one:
                raise ConfigError(
                    f"segment.{name} must go with one segmenter, got {len(self.segmenters)}"
                )
        require(self.segment_mpp > 0, "segment.segment_mpp must be > 0", self.segment_mpp)


@dataclass(frozen=True, kw_only=True)
class Segmenter:
    """A segmenter and its weights; the network is loaded when it is first asked for.

    Args:
        weights: file of the weights; None: seeded random ones, of a torch architecture.
        device: 'auto', 'cpu', 'cuda[:N]' or 'mps'; ONNX computes on the CPU.
    """

    spec: SegmenterSpec
    weights: Path | None
    device: str = "auto"
    seed: int = 0

    @property
    def identity(self) -> dict[str, Any]:
        """What decides its results: the declaration and the weights' content."""
        plain = asdict(self.spec)
        for name in ("help", "licence", "source", "weights", "sha256"):
            del plain[name]
        found = f"seed{self.seed}" if self.weights is None else _hash_of(self.weights)
        return plain | {"weights_hash": found}

    @property
    def label(self) -> str:
        """Part of a folder's name: that of the declaration, with a hash of weights of one's own."""
        declared = declared_segmenters().get(self.spec.name)
        given = self.identity["weights_hash"][:6]
        return self.spec.name if declared == self.spec else f"{self.spec.name}_w{given}"

    @cached_property
    def network(self) -> "Network":
        """float32 (B, C, H, W) to float32 (B, K, H, W)."""
        from thinsection.segment.network import load_network  # torch takes a second

        return load_network(self.spec, self.weights, self.device, self.seed)

    def labels(self, outputs: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
        """(K, H, W) to (H, W): 0 for no class, 1 for the first of `spec.classes`, ..."""
        spec = self.spec
        places = [spec.outputs.index(name) for name in spec.classes]
        least = np.full(outputs.shape[1:], spec.threshold, dtype=np.float32)
        if spec.background is not None:
            back = outputs[spec.outputs.index(spec.background)]
            least = np.maximum(least, back) if spec.rule == "threshold" else back
        elif spec.rule == "largest":
            least = np.full_like(least, -np.inf)
        labels = np.zeros(outputs.shape[1:], dtype=np.uint8)
        for number, place in reversed(list(enumerate(places, start=1))):
            taken = outputs[place] > least
            labels[taken] = number
            if spec.rule == "largest":
                least = np.where(taken, outputs[place], least)
        return labels


def load_segmenter(
    name: str | Path,
    *,
    weights: str | Path | None = None,
    device: str = "auto",
    seed: int | None = None,
) -> Segmenter:
    """The segmenter of that name, or of a TOML file with a table `segmenter`.

    Args:
        weights: file in place of the declared one.
        seed: of random weights in place of any (a torch architecture, for tests).

    Raises:
        ConfigError: no such name, or an entry that is wrong.
        WeightsError: no weights are declared or given, or the file is another than declared.
    """
    if str(name).endswith(".toml"):
        path = Path(name)
        spec = from_mapping(SegmenterSpec, read_toml(path).get(_TEXT, {}), where=f"{_TEXT}.")
    else:
        path, spec = Path(), SEGMENTERS.load(str(name))
    if seed is not None:
        return Segmenter(spec=spec, weights=None, device=device, seed=seed)
    if weights is not None:
        spec = replace(spec, weights=None, sha256=None)
        return Segmenter(spec=spec, weights=_existing(Path(weights), spec), device=device)
    if spec.weights is None:
        got = f"none for {spec.name!r}; pass --segment-weights FILE ({spec.source})"
        raise WeightsError(f"weights must be given, got {got}")
    found = _existing(_declared_path(spec, path.parent), spec)
    if spec.sha256 is not None and _hash_of(found) != spec.sha256:
        rule = f"weights of {spec.name!r} must have sha256 {spec.sha256}"
        raise WeightsError(f"{rule}, got {_hash_of(found)} in {str(found)!r}")
    return Segmenter(spec=spec, weights=found, device=device)


def _declared_path(spec: SegmenterSpec, folder: Path) -> Path:
    """Where an entry says that its weights lie; a package's file without importing the package."""
    assert spec.weights is not None
    if not spec.weights.startswith(PACKAGE):
        return folder / spec.weights
    package, _, rest = spec.weights.removeprefix(PACKAGE).partition("/")
    found = util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        got = f"package {package!r}, which is not installed; {spec.help}"
        raise WeightsError(f"weights of {spec.name!r} must be installed, got {got}")
    return Path(found.submodule_search_locations[0]) / rest


def _existing(path: Path, spec: SegmenterSpec) -> Path:
    rule = f"weights of {spec.name!r} must be an existing file"
    require(path.is_file(), rule, repr(str(path)), error=WeightsError)
    fits = (spec.architecture is None) == (path.suffix == ".onnx")
    rule = f"weights of {spec.name!r} must be " + ("ONNX" if not spec.architecture else "torch's")
    require(fits, rule, repr(path.name), error=InvalidInputError)
    return path


def _hash_of(path: Path) -> str:
    """sha256 in hex of a file and, of ONNX, of the data beside it."""
    stat = path.stat()
    return _hash_at(path, stat.st_mtime_ns, stat.st_size)


@cache
def _hash_at(path: Path, *_: int) -> str:
    digest = hashlib.sha256()
    for part in (path, path.with_name(f"{path.name}.data")):
        if part.is_file():
            with part.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
