"""Networks of segmenters: ONNX files with ONNX Runtime, and torch modules by their class.

Only ONNX Runtime is used for ONNX. OpenVINO needed two thirds of its CPU time for the network
that was measured, but its outputs differed by up to 8e-3 (docs/validation/readers.md), because
its Mish is approximate.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from thinsection.errors import (
    ConfigError,
    DeviceError,
    InvalidInputError,
    WeightsError,
    rewording,
)
from thinsection.extras import importing
from thinsection.files.trust import architecture
from thinsection.segment.spec import SEGMENTERS, SegmenterSpec
from thinsection.weights.files import fill_strictly, read_state_dict
from thinsection.weights.placement import importable_torchvision, resolve_device

Planes = npt.NDArray[np.float32]  # (B, C, H, W)
Network = Callable[[Planes], Planes]
# Stands for None in an entry, as TOML has no null.
_NONE = "none"


def load_network(
    spec: SegmenterSpec,
    weights: Path | None,
    device: str,
    seed: int,
    *,
    code: Path | None = None,
) -> Network:
    """Loads the network of an entry to a device; `code` is a trusted file that has its class."""
    if spec.architecture is not None:
        importable_torchvision()
        make = architecture(
            spec.architecture, packages=SEGMENTERS.packages(), code=code
        )
        module = _make_module(spec, make, weights, seed)
        return _torch_network(module, resolve_device(device), spec.output)
    assert weights is not None  # only torch networks can have random weights
    return _onnx_network(weights, resolve_device(device, mps=False))


def _onnx_network(path: Path, device: torch.device) -> Network:
    with importing("segmenters in ONNX", "onnxruntime"):
        import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # this option takes a third more memory and saves no time
    options.enable_mem_pattern = False
    provider = f"{device.type.upper()}ExecutionProvider"
    if provider not in onnxruntime.get_available_providers():
        raise DeviceError(
            f"onnxruntime must be a build for {device.type}, got {onnxruntime.__version__}"
        )
    with rewording(
        "weights must be readable ONNX", path, Exception, error=WeightsError
    ):
        session = onnxruntime.InferenceSession(str(path), options, providers=[provider])
    input_name = session.get_inputs()[0].name

    def run(planes: Planes) -> Planes:
        outputs = session.run(None, {input_name: planes})
        return np.asarray(outputs[0], dtype=np.float32)

    return run


def _make_module(
    spec: SegmenterSpec, make: type[torch.nn.Module], weights: Path | None, seed: int
) -> torch.nn.Module:
    options = {
        name: None if value == _NONE else value for name, value in spec.options.items()
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with rewording(
            "options must be arguments of the architecture",
            spec.options,
            Exception,
            error=ConfigError,
            more=f" in the segmenter {spec.name!r}",
        ):
            module = make(**options)
    if weights is not None:
        state = read_state_dict(weights)
        fill_strictly(module, state, source=str(weights), unused=spec.unused)
    return module.eval()


def _torch_network(
    module: torch.nn.Module, device: torch.device, output_name: str
) -> Network:
    module = module.to(device)

    def run(planes: Planes) -> Planes:
        with torch.inference_mode():
            outputs = module(torch.from_numpy(planes).to(device))
        if isinstance(outputs, dict):
            outputs = outputs[output_name]
        if not isinstance(outputs, torch.Tensor) or outputs.ndim != 4:
            value = getattr(outputs, "shape", type(outputs).__name__)
            raise InvalidInputError(f"segmenter must return (B, K, H, W), got {value}")
        return np.asarray(outputs.float().cpu().numpy())

    return run
