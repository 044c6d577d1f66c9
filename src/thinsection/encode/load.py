"""`load_encoder`: makes a ready encoder from a name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from thinsection.encode.backbone import Backbone, build_backbone, pretrained_backbone
from thinsection.encode.encoder import NetworkTileEncoder, TileEncoder
from thinsection.encode.engine import EngineChoice, why_torch
from thinsection.encode.registry import (
    ENCODERS,
    HUB_PREFIX,
    EncoderSpec,
    declared_encoders,
)
from thinsection.encode.specs import find_spec
from thinsection.errors import InvalidInputError, StoreError
from thinsection.weights import hub
from thinsection.weights.files import WEIGHTS_FILES, files_of
from thinsection.weights.origin import Origin
from thinsection.weights.placement import place


def load_encoder(
    name: str,
    *,
    device: str | torch.device = "auto",
    precision: str = "auto",
    weights: str | Path | None = None,
    pretrained: bool = True,
    allow_remote_code: bool = False,
    seed: int = 0,
    engine: EngineChoice = "auto",
) -> TileEncoder:
    """Encoder of that name, on its device, with its weights.

    Args:
        name: a registry name, `timm:<name>`, `hf:<repo>[@<revision>]`, the path of a checkpoint
            with its config.json, or the name of an encoder from another package.
        device: auto, cpu, cuda, cuda:N or mps.
        precision: auto, fp32, fp16 or bf16.
        weights: weights in place of the published ones: a file, a folder, or `owner/name@COMMIT`.
        pretrained: False uses seeded random weights, without a download.
        allow_remote_code: True allows code from the hub to run, for the models that need it.
        seed: seed of the random weights.
        engine: engine on a CPU: torch, openvino, or auto. auto uses openvino if it is installed and
            its embeddings match PyTorch's; random weights use torch. `encoder.engine` has the
            reason.

    Memory: the weights once, in float32; twice while OpenVINO converts their layout.
    Raises UnknownEncoderError, DeviceError, MissingDependencyError; WeightsError: the weights
    cannot be downloaded, may not be used, or do not match.
    """
    is_registered = name in ENCODERS
    path = Path(name) if not is_registered and Path(name).exists() else None
    origin = Origin(
        own_weights=weights is not None or path is not None,
        seed=None if pretrained else seed,
    )
    if is_registered and name not in declared_encoders():
        if engine == "openvino":
            raise InvalidInputError(
                f"engine must be auto or torch for {name!r}, which another package provides, "
                f"got {engine!r}"
            )
        brought = _load_from_package(name, device, precision, weights, pretrained, seed)
        brought.origin = replace(origin, name=name)
        return brought
    spec = find_spec(name)
    origin = replace(origin, name=_label_name(path, spec))
    placement = place(device, precision, half_precision=spec.half_precision)

    def load_on_torch() -> NetworkTileEncoder:
        if pretrained:
            source = path if weights is None else weights
            loaded = _load_pretrained(
                spec, name, source, allow_remote_code=allow_remote_code
            )
            own_origin = replace(origin, revision=loaded.revision, files=loaded.files)
            return NetworkTileEncoder(spec, loaded.backbone, placement, own_origin)
        # the spec of a folder or of the hub may change; those of other names cannot
        may_change = path is not None or name.startswith(HUB_PREFIX)
        own_origin = replace(origin, files=None if may_change else ())
        backbone = build_backbone(spec, seed=seed)
        return NetworkTileEncoder(spec, backbone, placement, own_origin)

    return _on_engine(load_on_torch, engine, is_random=not pretrained)


def _load_from_package(  # noqa: PLR0917 - the arguments of `load_encoder`
    name: str,
    device: str | torch.device,
    precision: str,
    weights: str | Path | None,
    pretrained: bool,
    seed: int,
) -> TileEncoder:
    """Encoder that another package registers."""
    placement = place(device, precision)
    encoder = ENCODERS.load(name)(
        device=placement.device,
        precision=placement.precision,
        weights=weights,
        pretrained=pretrained,
        seed=seed,
    )
    if not isinstance(encoder, TileEncoder):
        raise InvalidInputError(
            f"entry point {name!r} must return a TileEncoder, got {type(encoder).__name__}; "
            "subclass TileEncoder"
        )
    return encoder


def _label_name(path: Path | None, spec: EncoderSpec) -> str:
    """Name in labels: for a checkpoint its stem, unless that is generic; else the spec's."""
    if path is not None and path.is_file() and path.name not in WEIGHTS_FILES:
        return path.stem
    return spec.name


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Network with its weights, and their origin."""

    backbone: Backbone
    revision: str | None  # commit on the hub
    files: tuple[str, ...] | None  # None if the weights depend on more than these files


def _load_pretrained(
    spec: EncoderSpec, name: str, source: str | Path | None, *, allow_remote_code: bool
) -> _Loaded:
    """Network with weights from the source, or the published ones."""
    own_path = None
    if source is not None:
        own_path = hub.find_weights(source, files=spec.weights_files)
    backbone, path = pretrained_backbone(
        spec, own_path, allow_remote_code=allow_remote_code
    )
    if path is None:
        return _Loaded(backbone, revision=spec.revision, files=None)
    if own_path is not None:
        return _Loaded(backbone, revision=None, files=files_of(path))
    commit = hub.commit_of(path)
    # 'hf:' without a commit means the current commit of the repository
    is_moving = name.startswith(HUB_PREFIX) and str(commit) not in name
    is_pinned = spec.revision == commit and not is_moving
    return _Loaded(
        backbone, revision=commit, files=files_of(path) if is_pinned else None
    )


def _on_engine(
    load_on_torch: Callable[[], NetworkTileEncoder],
    engine: EngineChoice,
    *,
    is_random: bool,
) -> NetworkTileEncoder:
    """Encoder on the requested engine; with 'auto', it records why OpenVINO was rejected."""
    encoder = load_on_torch()
    reason = why_torch(engine, encoder.device, is_random=is_random)
    if engine == "torch" or encoder.device.type != "cpu":
        return encoder
    if not reason:
        reason = _move_to_openvino(encoder)
        if not reason:
            return encoder
        if engine == "openvino":
            raise InvalidInputError(
                f"engine must be torch for {encoder.spec.name!r} in {encoder.precision}, got "
                f"openvino: {reason}"
            )
        # the PyTorch weights were released
        encoder = load_on_torch()
    encoder.engine += f" (not openvino: {reason})"
    return encoder


def _move_to_openvino(encoder: NetworkTileEncoder) -> str:
    """Move the computation to OpenVINO; returns the reason if that is not possible, or ''."""
    try:
        check = encoder.to_openvino()
    except (InvalidInputError, StoreError, OSError, RuntimeError) as error:
        return str(error).splitlines()[0]
    if check.passes(encoder.precision):
        return ""
    return f"the output differs too much from torch's: {check}"
