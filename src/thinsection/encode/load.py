"""`load_encoder`: from a name to an encoder that is ready to run."""

import dataclasses
from pathlib import Path

import torch

from thinsection.encode.backbone import build_backbone
from thinsection.encode.encoder import NetworkTileEncoder, TileEncoder
from thinsection.encode.pretrained import CONFIG_NAME, pretrained_backbone
from thinsection.encode.registry import ENCODERS, declared_encoders, unknown_encoder
from thinsection.encode.spec import EncoderSpec
from thinsection.encode.undeclared import (
    PREPROCESSOR_NAME,
    folder_spec,
    is_transformers_config,
    timm_spec,
)
from thinsection.errors import InvalidInputError, WeightsError
from thinsection.weights.files import WEIGHTS_FILES
from thinsection.weights.hub import commit_of, find_weights, hub_file
from thinsection.weights.origin import Origin
from thinsection.weights.placement import place

TIMM_PREFIX, HUB_PREFIX = "timm:", "hf:"


def load_encoder(
    name: str,
    *,
    device: str | torch.device = "auto",
    precision: str = "auto",
    weights: str | Path | None = None,
    pretrained: bool = True,
    allow_remote_code: bool = False,
    seed: int = 0,
) -> TileEncoder:
    """The encoder of that name, on its device, with its weights.

    Args:
        name: a registry name, `timm:<name>`, `hf:<repo>[@<revision>]`, the path of a checkpoint
            with its config.json, or the name of an encoder that another package brings.
        device: auto, cpu, cuda, cuda:N or mps.
        precision: auto, fp32, fp16 or bf16.
        weights: in place of the published ones: a file, a folder, or `owner/name@COMMIT`.
        pretrained: False: seeded random weights, no download.
        allow_remote_code: whether code from the hub may run, for the models that need it.
        seed: of the random weights.

    Memory:
        The weights once, in float32.

    Raises:
        UnknownEncoderError: no such name; the message names the nearest.
        DeviceError: the device is not there.
        MissingDependencyError: a package is needed; the message says which.
        WeightsError: the weights cannot be had, may not be used, or do not fit.
    """
    local = name not in declared_encoders() and Path(name).exists()
    own = weights is not None or local
    asked = Origin(own_weights=own, seed=None if pretrained else seed)
    if name not in declared_encoders() and name in ENCODERS:
        where = place(device, precision)
        encoder = ENCODERS.load(name)(
            device=where.device,
            precision=where.precision,
            weights=weights,
            pretrained=pretrained,
            seed=seed,
        )
        if not isinstance(encoder, TileEncoder):
            rule = f"must give a TileEncoder, got {type(encoder).__name__}"
            raise InvalidInputError(f"entry point {name!r} {rule}; subclass TileEncoder")
        encoder.origin = dataclasses.replace(asked, name=name)
        return encoder
    spec = find_spec(name)
    placement = place(device, precision, half_precision=spec.half_precision)
    asked = dataclasses.replace(asked, name=_label_name(name, spec))
    if not pretrained:
        return NetworkTileEncoder(spec, build_backbone(spec, seed=seed), placement, origin=asked)
    path = _own_weights(name, spec)
    if weights is not None:
        path = find_weights(weights, files=spec.weights_files)
    backbone, commit = pretrained_backbone(spec, path, allow_remote_code=allow_remote_code)
    origin = dataclasses.replace(asked, revision=commit)
    return NetworkTileEncoder(spec, backbone, placement, origin=origin)


def find_spec(name: str) -> EncoderSpec:
    """The spec of a name, declared or not; `hf:` reads the repository's config.

    Raises:
        UnknownEncoderError: no such name; the message names the nearest.
        WeightsError: a repository or checkpoint without a config that can be read.
    """
    if name in declared_encoders():
        return declared_encoders()[name]
    if name.startswith(TIMM_PREFIX):
        return timm_spec(name.removeprefix(TIMM_PREFIX))
    if name.startswith(HUB_PREFIX):
        repo, _, revision = name.removeprefix(HUB_PREFIX).partition("@")
        config = hub_file(repo, (CONFIG_NAME,), revision=revision or None)
        commit = commit_of(config) or revision or None
        if is_transformers_config(config):  # which says nothing of pixels: that is another file
            hub_file(repo, (PREPROCESSOR_NAME,), revision=commit)
        return dataclasses.replace(folder_spec(name, config), repo=repo, revision=commit)
    path = Path(name)
    if not path.exists():
        raise unknown_encoder(name)
    config = (path if path.is_dir() else path.parent) / CONFIG_NAME
    if not config.is_file():
        raise WeightsError(
            f"checkpoint must have a {CONFIG_NAME} beside it, got {name!r}; or name its "
            "architecture: load_encoder('uni', weights=...) (--encoder uni --weights ...)"
        )
    return dataclasses.replace(folder_spec(config.parent.resolve().name, config), repo=None)


def _own_weights(name: str, spec: EncoderSpec) -> Path | None:
    """The weights file of a local checkpoint; None where the spec says where to look."""
    if name in declared_encoders() or not Path(name).exists():
        return None
    return find_weights(Path(name), files=spec.weights_files)


def _label_name(name: str, spec: EncoderSpec) -> str:
    """The name that a label begins with: of a checkpoint its stem, or its folder's name."""
    path = Path(name)
    if name in declared_encoders() or not path.is_file() or path.name in WEIGHTS_FILES:
        return spec.name
    return path.stem
