"""What a segmenter is, as data, and how it is loaded: from a name, or an entry of TOML.

An entry says resolution and edge of its windows, what its input channels are, what its output
channels mean, and where its weights lie: an ONNX file, or a torch architecture by name with a
safetensors or safe .pth file. No entry runs code that is not installed already.
"""

import hashlib
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, partial
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from thinsection.config import from_mapping, option, read_toml
from thinsection.encode.registry import IMAGENET_MEAN, IMAGENET_STD
from thinsection.errors import ConfigError, InvalidInputError, WeightsError, require
from thinsection.registry import Entry, Registry
from thinsection.segment.channels import RgbChannels, StainChannels
from thinsection.types import RgbArray

if TYPE_CHECKING:
    from thinsection.segment.network import Network

PACKAGE = "package:"
_TEXT = "segmenter"  # the table of a TOML file


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmenterSpec:
    """Everything that is declared of a segmenter; a TOML entry has these keys."""

    name: str  # in the registry, and of its folder of results
    help: str = ""
    outputs: tuple[str, ...]  # what the output channels stand for, in order
    background: str | None = (
        None  # the one of them that is no class; None: all are classes
    )
    # largest: of the outputs the largest one. threshold: the first class above `threshold` and
    # above the background; a px without is background
    rule: Literal["largest", "threshold"] = "largest"
    threshold: float = (
        0.0  # of the network's outputs; 0 for logits is a probability of a half
    )
    mpp: float  # µm/px of its windows
    px: int = 512  # edge of a window
    overlap: float = (
        0.25  # least share of a window's edge that neighbours share, [0, 0.5]
    )
    channels: Literal["rgb", "eosin_hematoxylin_density"] = "rgb"
    mean: tuple[float, ...] = (
        IMAGENET_MEAN  # per channel, applied to values in [0, 1], like std
    )
    std: tuple[float, ...] = IMAGENET_STD  # both of "rgb" alone
    weights: str | None = (
        None  # a path, beside the TOML file if relative, or 'package:PATH'
    )
    sha256: str | None = None  # of the weights' file: another one is refused
    architecture: str | None = (
        None  # 'module:callable' that makes a torch module; None: ONNX
    )
    options: dict[str, Any] = field(
        default_factory=dict
    )  # of that callable; "none" is None
    output: str = "out"  # which of the network's outputs, where it gives a dict
    unused: tuple[
        str, ...
    ] = ()  # beginnings of names that a weights file may have left over
    licence: str = "unknown"
    source: str = ""

    def __post_init__(self) -> None:
        different = len(set(self.outputs)) == len(self.outputs) > 0
        known = self.background is None or self.background in self.outputs
        rules = {"outputs must be different names": different}
        rules |= {"background must be one of the outputs": known}
        rules |= {"mpp must be > 0 and px >= 8": self.mpp > 0 and self.px >= 8}
        rules |= {"overlap must be in [0, 0.5]": 0 <= self.overlap <= 0.5}
        for rule, ok in rules.items():
            require(
                ok, f"segmenter {self.name!r}: {rule}", asdict(self), error=ConfigError
            )

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels 1, 2, ...; 0 is what no class has."""
        return tuple(name for name in self.outputs if name != self.background)


@cache
def _entries() -> tuple[Entry, ...]:
    """Those of `segmenters.toml` beside this file."""
    rows = read_toml(Path(__file__).with_name("segmenters.toml"))[_TEXT]
    made = partial(Entry, extra="segment")
    needs = {True: ("onnxruntime",), False: ("timm",)}
    specs = [
        (s := from_mapping(SegmenterSpec, row), needs[s.architecture is None])
        for row in rows
    ]
    return tuple(
        made(name=s.name, help=s.help, target=s, needs=packages)
        for s, packages in specs
    )


# another package's entry point names a SegmenterSpec, or an Entry with one
SEGMENTERS: Registry[SegmenterSpec] = Registry(
    "segmenter", "thinsection.segmenters", _entries
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentConfig:
    """Which networks name the px of a slide."""

    segmenters: tuple[str, ...] = option(
        (),
        "Segmenter; repeat for several: lavlab-shell, hest-tissue, grandqc-tissue, a .toml file.",
        flag="--segmenter",
    )
    segment_weights: str | None = option(
        None, "Local weights of the segmenter: ONNX, .pth, ..."
    )
    segment_mpp: float = option(
        4.0, "Resolution of the classes' shares and outlines, µm/px."
    )
    segment_memory: str = option(
        "512MiB", "Memory of the strip of windows that is blended."
    )
    tissue_segmenter: bool = option(
        False,
        "Take the classes of the one segmenter for the tissue, in place of our detector.",
    )

    def __post_init__(self) -> None:
        count = len(self.segmenters)
        for name in ("segment_weights", "tissue_segmenter"):
            rule = f"segment.{name} must go with one segmenter"
            require(
                count == 1 or not getattr(self, name), rule, count, error=ConfigError
            )
        require(
            self.segment_mpp > 0, "segment.segment_mpp must be > 0", self.segment_mpp
        )


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
        given = self.identity["weights_hash"][:6]
        declared = any(entry.target == self.spec for entry in _entries())
        return self.spec.name if declared else f"{self.spec.name}_w{given}"

    @cached_property
    def network(self) -> "Network":
        """float32 (B, C, H, W) to float32 (B, K, H, W)."""
        from thinsection.segment.network import load_network  # torch takes a second

        return load_network(self.spec, self.weights, self.device, self.seed)

    def channels(self, picture: RgbArray, where: str) -> RgbChannels | StainChannels:
        """What makes the network's input of a slide's windows, from a picture of the slide."""
        if self.spec.channels == "rgb":
            return RgbChannels(mean=self.spec.mean, std=self.spec.std)
        return StainChannels.of(picture, where)

    def labels(self, outputs: npt.NDArray[np.floating]) -> npt.NDArray[np.uint8]:
        """(K, H, W) to (H, W): 0 for no class, 1 for the first of `spec.classes`, ..."""
        spec, largest = self.spec, self.spec.rule == "largest"
        least = np.full(
            outputs.shape[1:], -np.inf if largest else spec.threshold, dtype=np.float32
        )
        if spec.background is not None:
            least = np.maximum(least, outputs[spec.outputs.index(spec.background)])
        labels = np.zeros(outputs.shape[1:], dtype=np.uint8)
        for number, name in reversed(list(enumerate(spec.classes, start=1))):
            output = outputs[spec.outputs.index(name)]
            taken = output > least
            labels[taken] = number
            least = np.where(taken, output, least) if largest else least
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
        spec = from_mapping(
            SegmenterSpec, read_toml(path).get(_TEXT, {}), where=f"{_TEXT}."
        )
    else:
        path, spec = Path(), SEGMENTERS.load(str(name))
    if seed is not None:
        return Segmenter(spec=spec, weights=None, device=device, seed=seed)
    if weights is not None:
        spec = replace(spec, weights=None, sha256=None)
        return Segmenter(
            spec=spec, weights=_existing(Path(weights), spec), device=device
        )
    got = f"none for {spec.name!r}; pass --segment-weights FILE ({spec.source})"
    require(spec.weights, "weights must be given", got, error=WeightsError)
    found = _existing(_declared_path(spec, path.parent), spec)
    rule = f"weights of {spec.name!r} must have sha256 {spec.sha256}"
    got = f"{_hash_of(found)} in {str(found)!r}"
    require(spec.sha256 in (None, _hash_of(found)), rule, got, error=WeightsError)
    return Segmenter(spec=spec, weights=found, device=device)


def _declared_path(spec: SegmenterSpec, folder: Path) -> Path:
    """Where an entry says that its weights lie; a package's file without importing the package."""
    assert spec.weights is not None
    if not spec.weights.startswith(PACKAGE):
        return folder / spec.weights
    package, _, rest = spec.weights.removeprefix(PACKAGE).partition("/")
    places = getattr(util.find_spec(package), "submodule_search_locations", None)
    got = f"package {package!r}, which is not installed; {spec.help}"
    require(
        places, f"weights of {spec.name!r} must be installed", got, error=WeightsError
    )
    return Path((places or [""])[0]) / rest


def _existing(path: Path, spec: SegmenterSpec) -> Path:
    rule = f"weights of {spec.name!r} must be an existing file"
    require(path.is_file(), rule, repr(str(path)), error=WeightsError)
    fits = (spec.architecture is None) == (path.suffix == ".onnx")
    rule = f"weights of {spec.name!r} must be " + (
        "ONNX" if not spec.architecture else "torch's"
    )
    require(fits, rule, repr(path.name), error=InvalidInputError)
    return path


def _hash_of(path: Path) -> str:
    """sha256 in hex of a file and, of ONNX, of the data beside it."""
    return _hash_at(path, path.stat().st_mtime_ns, path.stat().st_size)


@cache
def _hash_at(path: Path, *_: int) -> str:
    digest = hashlib.sha256()
    for part in (path, path.with_name(f"{path.name}.data")):
        if part.is_file():
            with part.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
