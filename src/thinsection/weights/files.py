"""Weights files: read without running code, loaded strictly, identified by their content.

Accepted is a safetensors file; a torch file (.pth, .pt, .bin, .ckpt) of a state dict, bare or under
one of `WRAPPERS`; the index (`*.index.json`) of a checkpoint in shards of either kind. Names may
carry one of `PREFIXES`, or several.
"""

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from thinsection.errors import WeightsError, rewording
from thinsection.files.atomic import write_bytes
from thinsection.types import Document
from thinsection.weights.origin import INDEX, shard_names

StateDict = dict[str, Tensor]
SAFETENSORS = ".safetensors"
MODEL_KEY = "thinsection_model"  # of the metadata of a model of `thinsection train`
# names of a checkpoint's file, the preferred one first
WEIGHTS_FILES = (
    "model.safetensors",
    f"model.safetensors{INDEX}",
    "pytorch_model.bin",
    f"pytorch_model.bin{INDEX}",
)
# keys under which training scripts nest weights
WRAPPERS = ("state_dict", "model", "teacher", "model_state_dict")
PREFIXES = ("module.", "model.", "backbone.", "encoder.", "teacher.", "network.")
# what training scripts keep beside a backbone of such a prefix
_BESIDE = ("head.", "dino_head.", "ibot_head.", "projector.", "classifier.", "fc.")


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Writes a safetensors file, atomically; the umask says who may read it, as of any file.

    safetensors' own `save_file` makes files that only their owner may read. Memory: the tensors,
    once more.
    """
    write_bytes(path, save(dict(tensors), dict(metadata)))


def read_state_dict(path: str | Path, *, tables: tuple[str, ...] = ()) -> StateDict:
    """Returns the tensors of a checkpoint, under their names. Memory: once; safetensors are mapped.

    Args:
        path: the file.
        tables: of a torch file whose weights stand in several tables beside each other; the name
            of its table comes before the name of each tensor.

    Raises WeightsError: the file is missing, damaged, needs unpickling, or holds no named tensors.
    """
    path = Path(path)
    if not path.is_file():
        raise WeightsError(f"weights must be an existing file, got {str(path)!r}")
    if path.name.endswith(INDEX):
        state: StateDict = {}
        for name in shard_names(path):
            state |= read_state_dict(path.parent / name)
        return state
    if path.suffix != SAFETENSORS:
        return _read_torch(path, tables)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with rewording(
        "weights must be complete", path, SafetensorError, OSError, error=WeightsError
    ):
        return load_file(path)


def read_settings(path: Path, names: tuple[str, ...]) -> dict[str, Document]:
    """Tables of plain values that a torch checkpoint holds beside its weights, those of `names`.

    A safetensors file has none. Tensors are not read.

    Raises WeightsError: the file is damaged or needs unpickling, or a table is none.
    """
    if path.suffix == SAFETENSORS or path.name.endswith(INDEX):
        return {}
    loaded = _load_torch(path, device="meta")
    if not isinstance(loaded, Mapping):
        return {}
    settings = {}
    for name in names:
        table = loaded.get(name)
        if table is not None and not isinstance(table, Mapping):
            raise WeightsError(
                f"{name} must be a table, got {type(table).__name__} in {str(path)!r}"
            )
        if table is not None:
            settings[name] = dict(table)
    return settings


def _load_torch(path: Path, *, device: str) -> Any:
    """Content of a torch file, without running code; its tensors lie on the device."""
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WeightsError(
            f"weights must be plain tensors, got {str(path)!r}: {reason}; "
            "convert them to safetensors, or save the `state_dict()` of a pickled module "
            "with the code of its authors"
        ) from error


def _read_torch(path: Path, tables: tuple[str, ...]) -> StateDict:
    loaded = _load_torch(path, device="cpu")
    if tables and isinstance(loaded, Mapping) and loaded.keys() >= set(tables):
        loaded = {
            f"{table}.{name}": tensor
            for table in tables
            for name, tensor in loaded[table].items()
        }
    table = loaded
    while isinstance(table, Mapping):
        if table and all(isinstance(value, Tensor) for value in table.values()):
            return {str(name): tensor for name, tensor in table.items()}
        inner = (table[key] for key in WRAPPERS if isinstance(table.get(key), Mapping))
        table = next(inner, None)
    raise WeightsError(
        f"weights must be a dict of named tensors, got {type(loaded).__name__} in {str(path)!r}"
    )


def load_strictly(
    network: nn.Module,
    state: Mapping[str, Tensor],
    *,
    source: str,
    unused: tuple[str, ...] = (),
) -> str:
    """Does what `fill_strictly` does, and returns `hash_state_dict` of the filled network.

    The hash does not depend on the form that the file had.
    """
    fill_strictly(network, state, source=source, unused=unused)
    return hash_state_dict(network.state_dict())


def fill_strictly(
    network: nn.Module,
    state: Mapping[str, Tensor],
    *,
    source: str,
    unused: tuple[str, ...] = (),
) -> None:
    """Gives the network exactly these weights, as float32; every name and shape must fit.

    The network may have been built on the meta device: no second copy of the weights is made. A
    prefix that all names share is taken off.

    Args:
        network: the network to fill.
        state: the weights by name.
        source: what they are called in messages.
        unused: how names begin (a classifier's) that may be left over.

    Raises:
        WeightsError: names are missing or left over, or a shape differs.
    """
    expected = network.state_dict()
    state = _without_prefix(state, expected)
    state = {
        name: tensor
        for name, tensor in state.items()
        if name in expected or not name.startswith(unused)
    }
    problems = _find_problems(state, expected)
    if problems:
        raise WeightsError(
            f"weights must fit the architecture name by name, got {'; '.join(problems)} in "
            f"{source!r}; check that the file belongs to this encoder"
        )
    floats = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }
    network.load_state_dict(floats, strict=True, assign=True)
    unfilled = [name for name, buffer in network.named_buffers() if buffer.is_meta]
    if unfilled:
        raise WeightsError(
            f"network must have values for all its buffers, got none for {unfilled[0]!r}"
        )


def _find_problems(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> list[str]:
    """Describes the names that are missing or left over, and shapes that differ."""
    misshapen = []
    for name in expected.keys() & state.keys():
        shape = tuple(state[name].shape)
        expected_shape = tuple(expected[name].shape)
        if shape != expected_shape:
            misshapen.append(f"{name} {shape} for {expected_shape}")
    names_by_problem = {
        "missing": sorted(expected.keys() - state.keys()),
        "unexpected": sorted(state.keys() - expected.keys()),
        "misshapen": sorted(misshapen),
    }
    problems = []
    for problem, names in names_by_problem.items():
        if names:
            more = ", ..." if len(names) > 3 else ""
            problems.append(f"{len(names)} {problem} ({', '.join(names[:3])}{more})")
    return problems


def _without_prefix(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> StateDict:
    """Returns the weights under the expected names, or as they are where no prefix leads there."""
    candidates = [dict(state)]
    for candidate in candidates:  # the list grows: one prefix is taken off at a time
        if expected.keys() <= candidate.keys():
            return candidate
        for prefix in PREFIXES:
            inner = {
                name.removeprefix(prefix): tensor
                for name, tensor in candidate.items()
                if name.startswith(prefix)
            }
            if inner and all(name.startswith((prefix, *_BESIDE)) for name in candidate):
                candidates.append(inner)
    return candidates[0]


def hash_state_dict(state: Mapping[str, Tensor]) -> str:
    """sha256 in hex over names, dtypes, shapes and bytes in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hash_networks(networks: Sequence[nn.Module]) -> str:
    """sha256 of the weights of all networks, in any order; '' without a network."""
    hashes = [hash_state_dict(network.state_dict()) for network in networks]
    if len(hashes) < 2:
        return "".join(hashes)
    return hashlib.sha256("".join(sorted(hashes)).encode()).hexdigest()
