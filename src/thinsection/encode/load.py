"""`load_encoder`: from a name to an encoder that is ready to run."""

from pathlib import Path

import torch

from thinsection.encode.backbone import Backbone
from thinsection.encode.build import build_backbone
from thinsection.encode.efficientnet_lite0 import packaged_weights_path, without_classifier
from thinsection.encode.encoder import NetworkTileEncoder, TileEncoder
from thinsection.encode.placement import place
from thinsection.encode.registry import encoder_spec
from thinsection.encode.spec import EncoderSpec
from thinsection.encode.weights import load_strictly, read_state_dict


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
        name: a registry name, `timm:<name>`, `hf:<repo>`, a checkpoint's path, or the name of an
            encoder that another package brings.
        device: auto, cpu, cuda, cuda:N or mps.
        precision: auto, fp32, fp16 or bf16.
        weights: a local weights file instead of the published one.
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
    spec = encoder_spec(name)
    placement = place(device, precision, half_precision=spec.half_precision)
    if not pretrained:
        return NetworkTileEncoder(spec, build_backbone(spec, seed=seed), placement)
    backbone = build_backbone(spec, device="meta")
    _load_declared(backbone, spec, weights)
    return NetworkTileEncoder(spec, backbone, placement)


def _load_declared(backbone: Backbone, spec: EncoderSpec, weights: str | Path | None) -> None:
    path = str(weights or packaged_weights_path())
    load_strictly(backbone.network, without_classifier(read_state_dict(path)), source=path)
