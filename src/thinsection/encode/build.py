"""Networks from declarations: one builder per kind of architecture, under random weights."""

from collections.abc import Callable

import torch

from thinsection.encode.backbone import Backbone
from thinsection.encode.efficientnet_lite0 import EfficientNetLite0
from thinsection.encode.spec import EncoderSpec


def _lite0(spec: EncoderSpec) -> Backbone:
    return Backbone(EfficientNetLite0(), pooling=spec.pooling)


BUILDERS: dict[str, Callable[[EncoderSpec], Backbone]] = {"lite0": _lite0}


def build_backbone(spec: EncoderSpec, *, seed: int = 0, device: str = "cpu") -> Backbone:
    """The declared network under seeded random weights; on device 'meta' it takes no memory."""
    builder = BUILDERS[spec.architecture.kind]
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        return builder(spec)


def count_parameters(backbone: Backbone) -> int:
    """Number of parameters of the network, buffers not counted."""
    return sum(p.numel() for p in backbone.network.parameters())
