"""Networks of tile encoders: pixels in, one vector or a token map out; one builder per kind.

Shapes: [B, 3, H, W] normalised pixels; features are [B, P + T, C] tokens with P prefix tokens
(class, registers) or a map [B, C, H', W'].
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from thinsection.encode.conch_v15 import ConchConfig, ConchV15
from thinsection.encode.efficientnet_lite0 import EfficientNetLite0
from thinsection.encode.spec import EncoderSpec, Pooling
from thinsection.errors import WeightsError
from thinsection.weights.packages import optional_package


class Backbone(nn.Module):
    """A network, how many prefix tokens it has, and how its features are pooled.

    The weights are those of `network` alone, under the names that their publisher gave them.
    """

    def __init__(self, network: nn.Module, *, pooling: Pooling, num_prefix_tokens: int = 0) -> None:
        super().__init__()
        self.network = network
        self.pooling = pooling
        self.num_prefix_tokens = num_prefix_tokens

    def features(self, pixels: Tensor) -> Tensor:
        """Tokens with their prefix, or a feature map."""
        out: Tensor = self.network(pixels)
        return out

    def head(self, features: Tensor) -> Tensor:
        """The architecture's own pooling, for `pooling='head'`."""
        raise NotImplementedError(f"{type(self).__name__} has no head of its own")

    def tokens(self, pixels: Tensor) -> Tensor:
        """[B, T, C]: patch tokens in row-major order, or the positions of the feature map."""
        return self._patch_tokens(self.features(pixels))

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, D] embeddings in float32."""
        return self._pooled(self.features(pixels))

    def pooled_and_tokens(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """What `forward` and `tokens` give, from one pass."""
        features = self.features(pixels)
        return self._pooled(features), self._patch_tokens(features)

    def _pooled(self, features: Tensor) -> Tensor:
        if self.pooling == "head":
            return self.head(features).float()
        if self.pooling == "mean":
            return self._patch_tokens(features).float().mean(dim=1)
        if self.pooling == "cls":
            return features[:, 0].float()
        mean = self._patch_tokens(features).float().mean(dim=1)
        return torch.cat([features[:, 0].float(), mean], dim=1)

    def _patch_tokens(self, features: Tensor) -> Tensor:
        if features.ndim == 4:
            return features.flatten(2).transpose(1, 2)
        return features[:, self.num_prefix_tokens :]


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
