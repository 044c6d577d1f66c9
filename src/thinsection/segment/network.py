"""The networks of segmenters: ONNX by ONNX Runtime, torch modules by the name of what makes them.

ONNX Runtime is the one runtime for ONNX. OpenVINO took two thirds of its CPU time on the network
that was measured, but its outputs lay up to 8e-3 off (docs/segment.md), as its Mish is approximate.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from thinsection import errors
from thinsection.errors import importing, require, rewording
from thinsection.weights.files import load_strictly, read_state_dict
from thinsection.weights.placement import importable_torchvision, resolve_device

if TYPE_CHECKING:
    from thinsection.segment.segmenter import SegmenterSpec

Planes = npt.NDArray[np.float32]  # (B, C, H, W)
Network = Callable[[Planes], Planes]
_NONE = "none"  # TOML has no null


def load_network(
    spec: "SegmenterSpec", weights: Path | None, device: str, seed: int
) -> Network:
    """The network of an entry, on its device."""
    if spec.architecture is not None:
        return _on_torch(
            _module(spec, weights, seed), resolve_device(device), spec.output
        )
    assert weights is not None  # ONNX has no random ones
    return _on_onnx(weights, resolve_device(device, mps=False))


def _on_onnx(path: Path, device: torch.device) -> Network:
    with importing("an ONNX segmenter must have ONNX Runtime", "segment"):
        import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.enable_mem_pattern = False  # a third more memory for no time
    provider = f"{device.type.upper()}ExecutionProvider"
    there = provider in onnxruntime.get_available_providers()
    rule = f"onnxruntime must be a build for {device.type}"
    require(there, rule, onnxruntime.__version__, error=errors.DeviceError)
    with rewording(
        "weights must be readable ONNX", path, Exception, error=errors.WeightsError
    ):
        session = onnxruntime.InferenceSession(str(path), options, providers=[provider])
    name = session.get_inputs()[0].name

    def run(planes: Planes) -> Planes:
        return np.asarray(session.run(None, {name: planes})[0], dtype=np.float32)

    return run


def _module(spec: "SegmenterSpec", weights: Path | None, seed: int) -> torch.nn.Module:
    assert spec.architecture is not None
    name, _, attribute = spec.architecture.partition(":")
    importable_torchvision()
    with importing(f"architecture {spec.architecture!r} must be importable", "segment"):
        make: Any = getattr(import_module(name), attribute, None)
    plain = {
        key: None if value == _NONE else value for key, value in spec.options.items()
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = make(**plain) if callable(make) else None
    if not isinstance(module, torch.nn.Module):
        rule = "architecture must be 'module:callable' of a torch module"
        raise errors.ConfigError(f"{rule}, got {spec.architecture!r}")
    if weights is not None:
        load_strictly(
            module, read_state_dict(weights), source=str(weights), unused=spec.unused
        )
    return module.eval()


def _on_torch(module: torch.nn.Module, device: torch.device, output: str) -> Network:
    module = module.to(device)

    def run(planes: Planes) -> Planes:
        with torch.inference_mode():
            found = module(torch.from_numpy(planes).to(device))
        found = found[output] if isinstance(found, dict) else found
        if not isinstance(found, torch.Tensor) or found.ndim != 4:
            got = getattr(found, "shape", type(found).__name__)
            raise errors.InvalidInputError(
                f"segmenter must give (B, K, H, W), got {got}"
            )
        return np.asarray(found.float().cpu().numpy())

    return run
