"""Networks of tile encoders: pixels in, one vector and a token map out; one builder per kind.

Shapes: [B, 3, H, W] normalised pixels; features are [B, P + T, C] tokens with P prefix tokens
(class, registers) or a map [B, C, H', W'].
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinsection.encode.conch_v15 import ConchConfig, ConchV15
from thinsection.encode.efficientnet_lite0 import EfficientNetLite0
from thinsection.encode.registry import EncoderSpec, Pooling
from thinsection.errors import WeightsError
from thinsection.weights.packages import optional_package

Step = Callable[[Tensor], Tensor]


class Backbone(nn.Module):
    """A network, how it gives features, and how they are pooled.

    The weights are those of `network` alone, under the names that their publisher gave them.

    Args:
        network: the module.
        pooling: of the features.
        features: pixels to tokens with their prefix, or to a feature map; None: the network.
        head: features to the architecture's own pooling, for `pooling='head'`.
        num_prefix_tokens: P.
        channels_last: whether a feature map is [B, H', W', C].
    """

    def __init__(
        self,
        network: nn.Module,
        pooling: Pooling,
        *,
        features: Step | None = None,
        head: Step | None = None,
        num_prefix_tokens: int = 0,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        self.network, self.pooling, self.num_prefix_tokens = network, pooling, num_prefix_tokens
        self.features: Step = features or network.forward
        self.head, self._channels_last = head or _no_head, channels_last

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings [B, D] in float32, and the tokens [B, T, C] that they were made of.

        Tokens are patch tokens in row-major order, or the positions of the feature map.
        """
        features = self.features(pixels)
        if features.ndim == 4:
            dims = (1, 2) if self._channels_last else (2, 3)
            tokens = features.flatten(*dims)
            tokens = tokens if self._channels_last else tokens.transpose(1, 2)
        else:
            tokens = features[:, self.num_prefix_tokens :]
        return self._pooled(features, tokens), tokens

    def _pooled(self, features: Tensor, tokens: Tensor) -> Tensor:
        if self.pooling == "head":
            return self.head(features).float()
        if self.pooling == "mean":
            return tokens.float().mean(dim=1)
        first = features[:, 0].float()
        if self.pooling == "cls":
            return first
        return torch.cat([first, tokens.float().mean(dim=1)], dim=1)


def _no_head(features: Tensor) -> Tensor:
    raise NotImplementedError("network has no head of its own")


def transformers_backbone(network: Any, pooling: Pooling) -> Backbone:
    """A vision transformer of `transformers`: tokens are its last hidden state."""
    return Backbone(
        network,
        pooling,
        features=lambda pixels: network(pixel_values=pixels).last_hidden_state,
        head=lambda features: features[:, 0],
        num_prefix_tokens=1 + int(getattr(network.config, "num_register_tokens", 0) or 0),
    )


def _lite0(spec: EncoderSpec) -> Backbone:
    return Backbone(EfficientNetLite0(), spec.pooling)


def _conch(spec: EncoderSpec) -> Backbone:
    network = ConchV15(ConchConfig(**spec.architecture.options))
    trunk, pool = network.trunk.forward, network.pool
    return Backbone(network, spec.pooling, features=trunk, head=pool, num_prefix_tokens=1)


def _timm(spec: EncoderSpec) -> Backbone:
    timm = optional_package("timm")
    layers = {"SwiGLUPacked": timm.layers.SwiGLUPacked, "SiLU": torch.nn.SiLU}
    given = spec.architecture.options.items()
    options = {k: layers[v] if k.endswith("_layer") else v for k, v in given}
    network = timm.create_model(spec.architecture.model, **{"num_classes": 0, **options})
    return Backbone(
        network,
        spec.pooling,
        features=network.forward_features,
        head=partial(network.forward_head, pre_logits=True),
        num_prefix_tokens=int(getattr(network, "num_prefix_tokens", 0)),
        channels_last=str(getattr(network, "output_fmt", "NCHW")) == "NHWC",
    )


def _transformers(spec: EncoderSpec) -> Backbone:
    network_class, arguments = transformers_class(spec)
    config = network_class.config_class(**spec.architecture.options)
    return transformers_backbone(network_class(config, **arguments), spec.pooling)


def _auto(spec: EncoderSpec) -> Backbone:
    transformers = optional_package("transformers")
    if spec.architecture.options.get("runs_own_code"):
        raise WeightsError(
            f"encoder {spec.name!r} must be pretrained, got pretrained=False; "
            "its architecture is code of its repository"
        )
    folder = spec.architecture.model
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return transformers_backbone(transformers.AutoModel.from_config(config), spec.pooling)


def transformers_class(spec: EncoderSpec) -> tuple[Any, dict[str, Any]]:
    """A class of `transformers`, and what its constructor takes besides a configuration."""
    name = spec.architecture.model
    arguments = {"add_pooling_layer": False} if name == "ViTModel" else {}  # it is not trained
    return getattr(optional_package("transformers"), name), arguments


_BUILDERS: dict[str, Callable[[EncoderSpec], Backbone]] = {
    **{"lite0": _lite0, "timm": _timm, "conch_v15": _conch},
    **{"transformers": _transformers, "auto": _auto},
}


def build_backbone(spec: EncoderSpec, *, seed: int = 0, device: str = "cpu") -> Backbone:
    """The declared network under seeded random weights; on device 'meta' it takes no memory.

    Raises:
        MissingDependencyError: the package that has the architecture is not installed.
    """
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        return _BUILDERS[spec.architecture.kind](spec)
