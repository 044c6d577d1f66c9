"""Weights files: read without running code, loaded strictly, identified by their content.

Accepted is a safetensors file; a torch file (.pth, .pt, .bin, .ckpt) of a state dict, bare or under
one of `WRAPPERS`; the index (`*.index.json`) of a checkpoint in shards of either kind. Names may
carry one of `PREFIXES`, or several.
"""

import hashlib
import json
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from thinsection.errors import WeightsError, rewording
from thinsection.files.atomic import write_bytes

StateDict = dict[str, Tensor]
SAFETENSORS, INDEX = ".safetensors", ".index.json"
MODEL_KEY = "thinsection_model"  # of the metadata of a model of `thinsection train`
# a file of a checkpoint, the preferred one first
_STEMS = ("model.safetensors", "pytorch_model.bin")
WEIGHTS_FILES = tuple(f"{stem}{end}" for stem in _STEMS for end in ("", INDEX))
WRAPPERS = (
    "state_dict",
    "model",
    "teacher",
)  # keys under which training scripts nest weights
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


def read_state_dict(path: str | Path) -> StateDict:
    """The tensors of a checkpoint, under their names. Memory: once; safetensors are mapped.

    Raises WeightsError: the file is missing, damaged, needs unpickling, or holds no named tensors.
    """
    path = Path(path)
    if not path.is_file():
        raise WeightsError(f"weights must be an existing file, got {str(path)!r}")
    if path.name.endswith(INDEX):
        shards = (read_state_dict(path.parent / name) for name in shard_names(path))
        return {name: tensor for shard in shards for name, tensor in shard.items()}
    if path.suffix != SAFETENSORS:
        return _read_torch(path)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with rewording(
        "weights must be whole", path, SafetensorError, OSError, error=WeightsError
    ):
        return load_file(path)


def shard_names(index: Path) -> tuple[str, ...]:
    """File names of the shards of an index, each once; WeightsError if they lie elsewhere."""
    try:
        names = sorted(
            set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        )
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(
            f"index must have a weight_map, got {str(index)!r}"
        ) from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name.endswith(INDEX):
            got = f"got {name!r} in {str(index)!r}"
            raise WeightsError(f"shards must lie beside their index, {got}")
    return tuple(names)


def files_of(path: Path) -> tuple[str, ...]:
    """All that decides what a checkpoint is: the file, its shards and configs, and the folder."""
    shards = shard_names(path) if path.name.endswith(INDEX) else ()
    beside = (
        *sorted(path.parent.glob("*.json")),
        *(path.parent / name for name in shards),
    )
    return tuple(str(p.absolute()) for p in dict.fromkeys((path.parent, path, *beside)))


def _read_torch(path: Path) -> StateDict:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        got = f"got {str(path)!r}: {first}; convert them to safetensors"
        raise WeightsError(f"weights must be plain tensors, {got}") from error
    found = loaded
    while isinstance(found, Mapping):
        if found and all(isinstance(v, Tensor) for v in found.values()):
            return {str(k): v for k, v in found.items()}
        found = next(
            (found[k] for k in WRAPPERS if isinstance(found.get(k), Mapping)), None
        )
    kind = type(loaded).__name__
    raise WeightsError(
        f"weights must be a dict of named tensors, got {kind} in {str(path)!r}"
    )


def load_strictly(
    network: nn.Module,
    state: Mapping[str, Tensor],
    *,
    source: str,
    unused: tuple[str, ...] = (),
) -> str:
    """Gives the network exactly these weights, as float32; every name and shape must fit.

    The network may have been built on the meta device: no second copy of the weights is made. A
    prefix that all names share is taken off; names that begin as `unused` (a classifier's) may be
    left over; messages say `source`. What comes back is `hash_state_dict` of the network then,
    whatever form the file had. Raises WeightsError: names are missing or left over, or a shape
    differs.
    """
    expected = network.state_dict()
    state = _without_prefix(state, expected)
    state = {
        k: v for k, v in state.items() if k in expected or not k.startswith(unused)
    }
    shapes = {
        k: (tuple(state[k].shape), tuple(expected[k].shape))
        for k in expected
        if k in state
    }
    problems = {
        "missing": expected.keys() - state.keys(),
        "unexpected": state.keys() - expected.keys(),
        "misshapen": {
            f"{k} {got} for {want}" for k, (got, want) in shapes.items() if got != want
        },
    }
    if any(problems.values()):
        listed = "; ".join(
            _listed(what, sorted(n)) for what, n in problems.items() if n
        )
        got = f"got {listed} in {source!r}; check that the file belongs to this encoder"
        raise WeightsError(f"weights must fit the architecture name by name, {got}")
    floats = {k: v.float() if v.is_floating_point() else v for k, v in state.items()}
    network.load_state_dict(floats, strict=True, assign=True)
    unfilled = [n for n, t in network.named_buffers() if t.is_meta]
    if unfilled:
        raise WeightsError(
            f"network must have all its buffers, got none for {unfilled[0]!r}"
        )
    return hash_state_dict(network.state_dict())


def _listed(what: str, names: list[str]) -> str:
    return f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


def _without_prefix(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> StateDict:
    """The weights under the expected names, or as they are where no known prefix leads there."""
    tried = [dict(state)]
    for names in tried:  # grows: one prefix taken off at a time
        if expected.keys() <= names.keys():
            return names
        for prefix in PREFIXES:
            inner = {
                k.removeprefix(prefix): v
                for k, v in names.items()
                if k.startswith(prefix)
            }
            if inner and all(k.startswith((prefix, *_BESIDE)) for k in names):
                tried.append(inner)
    return tried[0]


def hash_state_dict(state: Mapping[str, Tensor]) -> str:
    """sha256 in hex over names, dtypes, shapes and bytes in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
