"""The networks of segmenters: ONNX by ONNX Runtime, torch modules by the name of what makes them.

ONNX Runtime is the one runtime for ONNX. OpenVINO took two thirds of its CPU time on the network
that was measured, but its outputs lay up to 8e-3 off (docs/segment.md), as its Mish is approximate.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from thinsection.errors import (
    ConfigError,
    DeviceError,
    InvalidInputError,
    WeightsError,
    importing,
    require,
    rewording,
)
from thinsection.weights.files import load_strictly, read_state_dict
from thinsection.weights.placement import importable_torchvision, resolve_device

Planes = npt.NDArray[np.float32]  # (B, C, H, W)
Network = Callable[[Planes], Planes]
_NONE = "none"  # TOML has no null


def load_network(
    architecture: str | None,
    options: dict[str, Any],
    weights: Path | None,
    *,
    device: str,
    seed: int,
    output: str,
    unused: tuple[str, ...],
) -> Network:
    """The network on its device; see `SegmenterSpec` for the arguments."""
    if architecture is not None:
        module = _torch_module(architecture, options, weights, seed=seed, unused=unused)
        return _on_torch(module, resolve_device(device), output)
    require(weights, "weights must be a file for a network in ONNX", "none", error=WeightsError)
    assert weights is not None
    where = resolve_device(device, mps=False)
    return _on_onnx(weights, where)


def _on_onnx(path: Path, device: torch.device) -> Network:
    with importing("an ONNX segmenter must have ONNX Runtime", "segment"):
        import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.enable_mem_pattern = False  # a third more memory for no time
    provider = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}[device.type]
    there = provider in onnxruntime.get_available_providers()
    rule = f"onnxruntime must be a build for {device.type}"
    require(there, rule, onnxruntime.__version__, error=DeviceError)
    with rewording("weights must be readable ONNX", path, Exception, error=WeightsError):
        session = onnxruntime.InferenceSession(str(path), options, providers=[provider])
    name = session.get_inputs()[0].name

    def run(planes: Planes) -> Planes:
        return np.asarray(session.run(None, {name: planes})[0], dtype=np.float32)

    return run


def _torch_module(
    architecture: str,
    options: dict[str, Any],
    weights: Path | None,
    *,
    seed: int,
    unused: tuple[str, ...],
) -> torch.nn.Module:
    name, _, attribute = architecture.partition(":")
    importable_torchvision()
    with importing(f"architecture {architecture!r} must be importable", "segment"):
        make = getattr(import_module(name), attribute, None)
    require(
        callable(make), "architecture must be 'module:callable'", architecture, error=ConfigError
    )
    plain = {key: None if value == _NONE else value for key, value in options.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = make(**plain)  # type: ignore[misc]
    fits = isinstance(module, torch.nn.Module)
    require(fits, "architecture must give a torch module", architecture, error=ConfigError)
    if weights is not None:
        state = read_state_dict(weights)
        load_strictly(module, state, source=str(weights), unused=unused)
    return module.eval()  # type: ignore[no-any-return]


def _on_torch(module: torch.nn.Module, device: torch.device, output: str) -> Network:
    module = module.to(device)

    def run(planes: Planes) -> Planes:
        with torch.inference_mode():
            found = module(torch.from_numpy(planes).to(device))
        found = found[output] if isinstance(found, dict) else found
        if not isinstance(found, torch.Tensor) or found.ndim != 4:
            got = getattr(found, "shape", type(found).__name__)
            raise InvalidInputError(f"segmenter must give (B, K, H, W), got {got}")
        return np.asarray(found.float().cpu().numpy())

    return run
