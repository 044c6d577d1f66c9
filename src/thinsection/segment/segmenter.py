"""A segmenter with its weights, loaded by its name or from a TOML file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError, WeightsError
from thinsection.files.trust import check_architecture, trusted_file
from thinsection.segment.channels import RgbChannels, StainChannels
from thinsection.segment.spec import (
    SEGMENTERS,
    SegmenterSpec,
    declared_segmenters,
    read_spec,
)
from thinsection.types import RgbArray, shortened

if TYPE_CHECKING:
    from thinsection.segment.network import Network

# Prefix of paths to weights that an installed package contains.
PACKAGE = "package:"
# Declared values that do not change the results.
_NOT_IN_IDENTITY = ("help", "licence", "source", "weights", "sha256")


@dataclass(frozen=True, kw_only=True, repr=False)
class Segmenter:
    """A segmenter and its weights; the network is loaded on first use.

    A copy or a pickle has the paths of its files, and loads the network again.

    Args:
        spec: its declaration.
        weights: file of the weights; None: random weights, for a torch architecture only.
        device: 'auto', 'cpu', 'cuda[:N]' or 'mps'; ONNX computes on the CPU.
        seed: seed of random weights.
        code: trusted file with the architecture; None: an installed package has it.
    """

    spec: SegmenterSpec
    weights: Path | None
    device: str = "auto"
    seed: int = 0
    code: Path | None = None

    def __getstate__(self) -> dict[str, object]:
        state = {name: value for name, value in vars(self).items() if name != "network"}
        for name in ("weights", "code"):
            path = getattr(self, name)
            state[name] = None if path is None else path.absolute()
        return state

    def __repr__(self) -> str:
        weights = "random weights" if self.weights is None else self.weights.name
        return (
            f"<{self.spec.name}: {shortened(self.spec.classes)}, {self.spec.mpp:g} µm/px, "
            f"{weights} on {self.device}>"
        )

    @property
    def identity(self) -> dict[str, object]:
        """Values that decide its results: the declaration and the hash of the weights."""
        identity = asdict(self.spec)
        for name in _NOT_IN_IDENTITY:
            del identity[name]
        identity["weights_hash"] = self._weights_hash
        if self.code is not None:
            identity["code_hash"] = _hash_of(self.code)
        return identity

    @property
    def _weights_hash(self) -> str:
        return f"seed{self.seed}" if self.weights is None else _hash_of(self.weights)

    @property
    def label(self) -> str:
        """Part of a folder's name; any weights other than our declared ones add their hash."""
        is_declared = any(entry.target == self.spec for entry in declared_segmenters())
        if is_declared and self.spec.weights is not None:
            return self.spec.name
        return f"{self.spec.name}_w{self._weights_hash[:6]}"

    @cached_property
    def network(self) -> Network:
        """The network: float32 (B, C, H, W) to float32 (B, K, H, W)."""
        # torch takes a second to import
        from thinsection.segment.network import load_network

        return load_network(
            self.spec, self.weights, self.device, self.seed, code=self.code
        )

    def channels(
        self, picture: RgbArray, slide_path: str
    ) -> RgbChannels | StainChannels:
        """The map from windows to the network's input, fitted to a small picture of the slide."""
        if self.spec.channels == "rgb":
            return RgbChannels(mean=self.spec.mean, std=self.spec.std)
        return StainChannels.fit(picture, slide_path)

    def labels(self, outputs: npt.NDArray[np.floating]) -> npt.NDArray[np.uint8]:
        """Labels (H, W) of outputs (K, H, W): 0 is no class, 1 the first of `spec.classes`, ..."""
        spec = self.spec
        takes_largest = spec.rule == "largest"
        shape = outputs.shape[1:]
        # a class wins only if its output exceeds this
        least = np.full(
            shape, -np.inf if takes_largest else spec.threshold, dtype=np.float32
        )
        if spec.background is not None:
            least = np.maximum(least, outputs[spec.outputs.index(spec.background)])
        labels = np.zeros(shape, dtype=np.uint8)
        # from the last to the first, so that the first class wins
        for number in range(len(spec.classes), 0, -1):
            output = outputs[spec.outputs.index(spec.classes[number - 1])]
            taken = output > least
            labels[taken] = number
            if takes_largest:
                least = np.where(taken, output, least)
        return labels


def load_segmenter(
    name: str | Path,
    *,
    weights: str | Path | None = None,
    device: str = "auto",
    seed: int | None = None,
    trust_code: Sequence[str | Path] = (),
) -> Segmenter:
    """Loads a segmenter by its name, or from a TOML file with a table `segmenter`.

    Args:
        name: name in the registry, or path of the TOML file.
        weights: file that replaces the declared one.
        device: see `Segmenter`.
        seed: seed of random weights, which replace all others (a torch architecture, for tests).
        trust_code: Python files that may be run; an architecture names a class in one of them by
            the name of the file without .py.

    Raises:
        ConfigError: unknown name, an invalid entry, or an architecture of a package that is not
            listed.
        WeightsError: no weights are declared or passed, or the file is not the declared one.
    """
    if str(name).endswith(".toml"):
        spec = read_spec(Path(name))
        folder = Path(name).parent
    else:
        spec = SEGMENTERS.load(str(name))
        folder = Path()
    code = None
    if spec.architecture is not None:
        code = trusted_file(spec.architecture, trust_code)
        check_architecture(spec.architecture, packages=SEGMENTERS.packages(), code=code)
    if seed is not None:
        return Segmenter(spec=spec, weights=None, device=device, seed=seed, code=code)
    if weights is not None:
        spec = replace(spec, weights=None, sha256=None)
        path = Path(weights)
    else:
        path = _declared_path(spec, folder)
    _check_file(path, spec)
    if spec.sha256 is not None and _hash_of(path) != spec.sha256:
        raise WeightsError(
            f"weights of {spec.name!r} must have sha256 {spec.sha256}, "
            f"got {_hash_of(path)} in {str(path)!r}"
        )
    return Segmenter(spec=spec, weights=path, device=device, code=code)


def _declared_path(spec: SegmenterSpec, folder: Path) -> Path:
    """Path of declared weights; a package is not imported to find its file."""
    if spec.weights is None:
        raise WeightsError(
            f"weights must be set, got none for {spec.name!r}; pass segment_weights=FILE "
            f"({spec.source})"
        )
    if not spec.weights.startswith(PACKAGE):
        return folder / spec.weights
    package, _, inner = spec.weights.removeprefix(PACKAGE).partition("/")
    # `find_spec` of a dotted name would import its parent
    module = util.find_spec(package) if package.isidentifier() else None
    places = module.submodule_search_locations if module is not None else None
    if not places:
        raise WeightsError(
            f"weights of {spec.name!r} must be installed, "
            f"got package {package!r}, which is not installed; {spec.help}"
        )
    return Path(places[0]) / inner


def _check_file(path: Path, spec: SegmenterSpec) -> None:
    if not path.is_file():
        raise WeightsError(
            f"weights of {spec.name!r} must be an existing file, got {str(path)!r}"
        )
    needs_onnx = spec.architecture is None
    if needs_onnx != (path.suffix == ".onnx"):
        kind = "ONNX" if needs_onnx else "torch's"
        raise InvalidInputError(
            f"weights of {spec.name!r} must be a file of {kind}, got {path.name!r}"
        )


def _hash_of(path: Path) -> str:
    """sha256 in hex of a file and, for ONNX, of the external data beside it."""
    stat = path.stat()
    return _hash_version(path, stat.st_mtime_ns, stat.st_size)


@cache
def _hash_version(path: Path, time_ns: int, size: int) -> str:
    """Hash of a file, cached as long as its time stamp and size stay the same."""
    digest = hashlib.sha256()
    for part in (path, path.with_name(f"{path.name}.data")):
        if part.is_file():
            with part.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
