"""Networks from declarations: one builder per kind of architecture, under random weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinsection.encode.backbone import Backbone
from thinsection.encode.conch_v15 import ConchConfig, ConchV15
from thinsection.encode.efficientnet_lite0 import EfficientNetLite0
from thinsection.encode.optional import optional_package
from thinsection.encode.spec import EncoderSpec, Pooling
from thinsection.errors import WeightsError


class TimmBackbone(Backbone):
    """A timm network: `forward_features`, and its own head where the pooling is 'head'."""

    def __init__(self, network: Any, *, pooling: Pooling) -> None:
        prefix = int(getattr(network, "num_prefix_tokens", 0))
        super().__init__(network, pooling=pooling, num_prefix_tokens=prefix)
        self._channels_last = str(getattr(network, "output_fmt", "NCHW")) == "NHWC"

    def features(self, pixels: Tensor) -> Tensor:
        out: Tensor = self.network.forward_features(pixels)  # type: ignore[operator]
        return out

    def head(self, features: Tensor) -> Tensor:
        out: Tensor = self.network.forward_head(features, pre_logits=True)  # type: ignore[operator]
        return out

    def _patch_tokens(self, features: Tensor) -> Tensor:
        if features.ndim == 4 and self._channels_last:
            return features.flatten(1, 2)
        return super()._patch_tokens(features)


class TransformersBackbone(Backbone):
    """A vision transformer of `transformers`: tokens are its last hidden state."""

    def __init__(self, network: Any, *, pooling: Pooling) -> None:
        registers = int(getattr(network.config, "num_register_tokens", 0) or 0)
        super().__init__(network, pooling=pooling, num_prefix_tokens=1 + registers)

    def features(self, pixels: Tensor) -> Tensor:
        out: Tensor = self.network(pixel_values=pixels).last_hidden_state
        return out

    def head(self, features: Tensor) -> Tensor:
        return features[:, 0]


class ConchBackbone(Backbone):
    """CONCH v1.5: tokens from the trunk, the embedding from its pooler."""

    network: ConchV15

    def features(self, pixels: Tensor) -> Tensor:
        out: Tensor = self.network.trunk(pixels)
        return out

    def head(self, features: Tensor) -> Tensor:
        return self.network.pool(features)


def _lite0(spec: EncoderSpec) -> Backbone:
    return Backbone(EfficientNetLite0(), pooling=spec.pooling)


def _conch(spec: EncoderSpec) -> Backbone:
    config = ConchConfig(**spec.architecture.options)
    return ConchBackbone(ConchV15(config), pooling=spec.pooling, num_prefix_tokens=1)


def _timm(spec: EncoderSpec) -> Backbone:
    timm = optional_package("timm")
    layers = {"SwiGLUPacked": timm.layers.SwiGLUPacked, "SiLU": torch.nn.SiLU}
    options = {
        k: layers[v] if k.endswith("_layer") else v for k, v in spec.architecture.options.items()
    }
    network = timm.create_model(
        spec.architecture.model, pretrained=False, **{"num_classes": 0, **options}
    )
    return TimmBackbone(network, pooling=spec.pooling)


def _transformers(spec: EncoderSpec) -> Backbone:
    network_class = transformers_class(spec.architecture.model)
    config = network_class.config_class(**spec.architecture.options)
    network = network_class(config, **transformers_arguments(spec.architecture.model))
    return TransformersBackbone(network, pooling=spec.pooling)


def _auto(spec: EncoderSpec) -> Backbone:
    transformers = optional_package("transformers")
    if spec.architecture.options.get("runs_own_code"):
        raise WeightsError(
            f"encoder {spec.name!r} must be pretrained, got pretrained=False; "
            "its architecture is code of its repository"
        )
    folder = spec.architecture.model
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return TransformersBackbone(transformers.AutoModel.from_config(config), pooling=spec.pooling)


def transformers_class(name: str) -> Any:
    """A model class of `transformers` by name."""
    return getattr(optional_package("transformers"), name)


def transformers_arguments(name: str) -> dict[str, Any]:
    """What the constructor takes besides a configuration: ViT would add an untrained pooler."""
    return {"add_pooling_layer": False} if name == "ViTModel" else {}


BUILDERS: dict[str, Callable[[EncoderSpec], Backbone]] = {
    "lite0": _lite0,
    "timm": _timm,
    "transformers": _transformers,
    "auto": _auto,
    "conch_v15": _conch,
}


def build_backbone(spec: EncoderSpec, *, seed: int = 0, device: str = "cpu") -> Backbone:
    """The declared network under seeded random weights; on device 'meta' it takes no memory.

    Raises:
        MissingDependencyError: the package that has the architecture is not installed.
    """
    builder = BUILDERS[spec.architecture.kind]
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        return builder(spec)


def count_parameters(backbone: Backbone) -> int:
    """Number of parameters of the network, buffers not counted."""
    return sum(p.numel() for p in backbone.network.parameters())
