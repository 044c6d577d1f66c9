"""Declaration of a segmenter as data, from the registry or from a TOML file.

An entry gives the resolution and edge of its windows, the meaning of its input and output
channels, and the place of its weights: an ONNX file, or a torch architecture by name with a
safetensors or safe .pth file. An entry never runs code that is not installed already.
"""

from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from thinsection.config import from_mapping, read_toml
from thinsection.encode.registry import IMAGENET_MEAN, IMAGENET_STD
from thinsection.errors import ConfigError, naming_file
from thinsection.registry import Entry, Registry
from thinsection.types import Json

# Name of the table in a TOML file.
_TABLE = "segmenter"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmenterSpec:
    """Declared values of a segmenter; these are the keys of a TOML entry."""

    # name in the registry, and of its results folder
    name: str
    help: str = ""
    # meaning of the output channels, in order
    outputs: tuple[str, ...]
    # the output that stands for no class; None: all outputs are classes
    background: str | None = None
    # largest: the largest output. threshold: the first class above `threshold` and above
    # the background; a pixel without one is background
    rule: Literal["largest", "threshold"] = "largest"
    # threshold for the network's outputs; for logits, 0 is a probability of 0.5
    threshold: float = 0.0
    # µm/px of the windows
    mpp: float
    # edge of a window, px
    px: int = 512
    # least overlap of neighbouring windows, as a fraction of their edge, [0, 0.5]
    overlap: float = 0.25
    channels: Literal["rgb", "eosin_hematoxylin_density"] = "rgb"
    # one value per channel, for values in [0, 1]; mean and std are used for "rgb" only
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    # a path, relative to the TOML file, or 'package:PATH'
    weights: str | None = None
    # hash of the weights file; a file with another hash is refused
    sha256: str | None = None
    # 'module:class' of torch modules (see files/trust.py); None: ONNX
    architecture: str | None = None
    # arguments of that class; "none" is None
    options: dict[str, Json] = field(default_factory=dict)
    # name of the output, for a network that returns a dict
    output: str = "out"
    # beginnings of names of weights that the network does not use
    unused: tuple[str, ...] = ()
    licence: str = "unknown"
    source: str = ""

    def __post_init__(self) -> None:
        if not self.outputs or len(set(self.outputs)) < len(self.outputs):
            raise self._refusal("outputs must have different names")
        if self.background is not None and self.background not in self.outputs:
            raise self._refusal("background must be one of the outputs")
        if self.mpp <= 0 or self.px < 8:
            raise self._refusal("mpp must be > 0 and px >= 8")
        if not 0 <= self.overlap <= 0.5:
            raise self._refusal("overlap must be in [0, 0.5]")

    def _refusal(self, rule: str) -> ConfigError:
        return ConfigError(f"segmenter {self.name!r}: {rule}, got {asdict(self)}")

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels 1, 2, ...; a pixel of label 0 has no class."""
        return tuple(name for name in self.outputs if name != self.background)


def read_spec(path: Path) -> SegmenterSpec:
    """Reads the entry of a TOML file."""
    values = read_toml(path).get(_TABLE, {})
    with naming_file(path):
        return from_mapping(SegmenterSpec, values, where=f"{_TABLE}.")


@cache
def declared_segmenters() -> tuple[Entry, ...]:
    """Entries of `segmenters.toml` beside this file."""
    rows = read_toml(Path(__file__).with_name("segmenters.toml"))[_TABLE]
    entries = []
    for row in rows:
        spec = from_mapping(SegmenterSpec, row)
        package = "onnxruntime"
        if spec.architecture is not None:
            package = spec.architecture.partition(":")[0].partition(".")[0]
        entry = Entry(
            name=spec.name,
            help=spec.help,
            target=spec,
            needs=(package,),
        )
        entries.append(entry)
    return tuple(entries)


# another package's entry point names a SegmenterSpec, or an Entry with one
SEGMENTERS: Registry[SegmenterSpec] = Registry(
    "segmenter", "thinsection.segmenters", declared_segmenters
)
