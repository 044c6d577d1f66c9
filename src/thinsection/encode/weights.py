"""Weights files: read without running code, loaded strictly, identified by their content."""

import hashlib
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from thinsection.errors import WeightsError

StateDict = dict[str, Tensor]
SAFE_SUFFIXES = (".safetensors",)
TORCH_SUFFIXES = (".pth", ".pt", ".bin")
_WRAPPERS = ("state_dict", "model", "teacher")  # keys under which training scripts nest weights


def read_state_dict(path: str | Path) -> StateDict:
    """The tensors of a safetensors file, or of a torch file that holds nothing but tensors.

    Raises:
        WeightsError: the file is missing, damaged, of another kind, or needs unpickling.
    """
    path = Path(path)
    if not path.is_file():
        raise WeightsError(f"weights must be an existing file, got {str(path)!r}")
    if path.suffix in SAFE_SUFFIXES:
        return _read_safetensors(path)
    if path.suffix not in TORCH_SUFFIXES:
        allowed = ", ".join((*SAFE_SUFFIXES, *TORCH_SUFFIXES))
        raise WeightsError(f"weights must be one of {allowed}, got {str(path)!r}")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise WeightsError(
            f"weights must load without unpickling code, got {str(path)!r}: "
            f"{str(error).splitlines()[0]}; convert them to safetensors"
        ) from error
    return _tensors(loaded, path)


def _read_safetensors(path: Path) -> StateDict:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"weights must be whole, got {str(path)!r}: {error}") from error


def _tensors(loaded: object, path: Path) -> StateDict:
    if isinstance(loaded, Mapping):
        if loaded and all(isinstance(v, Tensor) for v in loaded.values()):
            return {str(k): v for k, v in loaded.items()}
        for key in _WRAPPERS:
            if isinstance(loaded.get(key), Mapping):
                return _tensors(loaded[key], path)
    raise WeightsError(
        f"weights must map names to tensors, got {type(loaded).__name__} in {str(path)!r}"
    )


def load_strictly(network: nn.Module, state: Mapping[str, Tensor], *, source: str) -> None:
    """Gives the network exactly these weights, as float32; every name and shape must fit.

    The network may have been built on the meta device: no second copy of the weights is made.

    Raises:
        WeightsError: names are missing or left over, or a shape differs.
    """
    expected = network.state_dict()
    missing = sorted(expected.keys() - state.keys())
    unexpected = sorted(state.keys() - expected.keys())
    shapes = [
        f"{k} {tuple(state[k].shape)} for {tuple(expected[k].shape)}"
        for k in sorted(expected.keys() & state.keys())
        if state[k].shape != expected[k].shape
    ]
    problems = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("misshapen", shapes))
        if names
    ]
    if problems:
        raise WeightsError(
            f"weights must fit the architecture name by name, got {'; '.join(problems)} "
            f"in {source!r}; check that the file belongs to this encoder"
        )
    floats = {k: v.float() if v.is_floating_point() else v for k, v in state.items()}
    network.load_state_dict(floats, strict=True, assign=True)
    unfilled = [n for n, t in network.named_buffers() if t.is_meta]
    if unfilled:
        raise WeightsError(f"network must have all its buffers, got none for {unfilled[0]!r}")


def hash_state_dict(state: Mapping[str, Tensor]) -> str:
    """sha256 in hex over names, dtypes, shapes and bytes in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
