"""Backbones of tile encoders: built by kind, with random or given weights, loaded strictly.

Networks are imported inside functions, because a run on a stored OpenVINO graph builds no backbone.

Shapes: [B, 3, H, W] normalised pixels; features are [B, P + T, C] tokens with P prefix tokens
(class, registers) or a map [B, C, H', W'].
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinsection.encode.registry import EncoderSpec, Pooling
from thinsection.errors import WeightsError, errors_of_others
from thinsection.weights.files import WEIGHTS_FILES, fill_strictly, read_state_dict
from thinsection.weights.hub import hub_file
from thinsection.weights.origin import commit_of
from thinsection.weights.placement import optional_package

CONFIG_NAME = "config.json"
# weights of the default encoder; `training/encoders/default_encoder.py` makes them, and NOTICE
# says their origin
PACKAGED_WEIGHTS = Path(__file__).parent / "models" / "efficientnet_lite0.safetensors"
PACKAGED_SHA256 = "dfd9b18e946c10eddbe4a8cf5718424c55c7d78e87bd0b11f2aef32687785182"
# heads that a transformer's checkpoint may have or lack, and that do not affect embeddings
_UNUSED_HEADS = ("pooler.", "classifier.", "head.")
# positional embeddings are interpolated, so the image size may differ from the declared size
_FREE_OPTIONS = ("image_size",)

TensorFunction = Callable[[Tensor], Tensor]
Foreign = Any  # an object of timm or transformers, which have no types


class Backbone(nn.Module):
    """Network with its publisher's parameter names, and the pooling of its features.

    Args:
        network: network with the weights.
        pooling: rule that pools tokens to one vector.
        features: function from pixels to tokens or a feature map; None uses the network itself.
        head: the architecture's own pooling of features.
        num_prefix_tokens: class token and registers in front of the patch tokens.
        channels_last: True if a feature map is [B, H', W', C].
    """

    def __init__(
        self,
        network: nn.Module,
        pooling: Pooling,
        *,
        features: TensorFunction | None = None,
        head: TensorFunction | None = None,
        num_prefix_tokens: int = 0,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        self.network = network
        self.pooling = pooling
        self.num_prefix_tokens = num_prefix_tokens
        self.features: TensorFunction = features or network.forward
        self.head: TensorFunction = head or _no_head
        self._channels_last = channels_last

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings [B, D] in float32, and the tokens [B, T, C] from which they are made.

        Tokens are patch tokens in row-major order, or the positions of the feature map.
        """
        features = self.features(pixels)
        if features.ndim != 4:
            tokens = features[:, self.num_prefix_tokens :]
        elif self._channels_last:
            tokens = features.flatten(1, 2)
        else:
            tokens = features.flatten(2).transpose(1, 2)
        if self.pooling == "head":
            return self.head(features).float(), tokens
        parts = []
        if self.pooling != "mean":
            parts.append(features[:, 0].float())
        if self.pooling != "cls":
            parts.append(tokens.float().mean(dim=1))
        embeddings = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return embeddings, tokens


def cast_matmul_weights(network: nn.Module, dtype: torch.dtype) -> None:
    """Casts the weights of linear layers and convolutions once, in place.

    Under autocast to `dtype` the results stay equal to the bit, since autocast casts the same
    weights in every pass (it keeps no copy of weights without a gradient). Other layers stay
    float32.
    """
    from thinsection.encode.networks import SameConv2d

    for layer in network.modules():
        if type(layer) in (nn.Linear, nn.Conv2d, SameConv2d):
            layer.to(dtype)


def _no_head(features: Tensor) -> Tensor:
    raise NotImplementedError("network has no head of its own")


def _last_hidden_state(network: Foreign, pixels: Tensor) -> Tensor:
    states: Tensor = network(pixel_values=pixels).last_hidden_state
    return states


def _class_token(features: Tensor) -> Tensor:
    return features[:, 0]


def transformers_backbone(network: Foreign, pooling: Pooling) -> Backbone:
    """A vision transformer of `transformers`: tokens are its last hidden state."""
    num_registers = int(getattr(network.config, "num_register_tokens", 0) or 0)
    return Backbone(
        network,
        pooling,
        features=partial(_last_hidden_state, network),
        head=_class_token,
        num_prefix_tokens=1 + num_registers,
    )


def _build_timm(spec: EncoderSpec) -> Backbone:
    timm = optional_package("timm")
    layers = {"SwiGLUPacked": timm.layers.SwiGLUPacked, "SiLU": torch.nn.SiLU}
    options: dict[str, object] = {"num_classes": 0}
    for name, value in spec.architecture.options.items():
        options[name] = layers[value] if name.endswith("_layer") else value
    network = timm.create_model(spec.architecture.model, **options)
    if spec.architecture.kind == "musk":
        from thinsection.encode import musk

        return Backbone(
            network,
            spec.pooling,
            features=partial(musk.two_scales, network),
            head=musk.two_class_tokens,
            num_prefix_tokens=musk.NUM_PREFIX_TOKENS,
        )
    return Backbone(
        network,
        spec.pooling,
        features=network.forward_features,
        head=partial(network.forward_head, pre_logits=True),
        num_prefix_tokens=int(getattr(network, "num_prefix_tokens", 0)),
        channels_last=str(getattr(network, "output_fmt", "NCHW")) == "NHWC",
    )


def _build_auto(spec: EncoderSpec) -> Backbone:
    transformers = optional_package("transformers")
    if needs_remote_code(spec):
        raise WeightsError(
            f"encoder {spec.name!r} must be pretrained, got pretrained=False; its architecture "
            "is defined by the code in its repository"
        )
    config = transformers.AutoConfig.from_pretrained(
        spec.architecture.model, trust_remote_code=False
    )
    network = transformers.AutoModel.from_config(config)
    return transformers_backbone(network, spec.pooling)


def _build_image_tower(spec: EncoderSpec) -> Backbone:
    from thinsection.encode import towers

    kind = spec.architecture.kind
    options = spec.architecture.options
    tower: towers.ClipImage | towers.ConchImage | towers.KeepImage
    if kind == "clip":
        tower = towers.ClipImage(towers.clip_config(options))
    elif kind == "isight":
        tower = towers.ISightImage(towers.clip_config(options))
    elif kind == "conch":
        tower = towers.ConchImage(towers.ConchTowersConfig(**options))
    else:
        tower = towers.KeepImage()
    return Backbone(tower, spec.pooling, head=tower.pool, num_prefix_tokens=1)


def _transformers_class(spec: EncoderSpec) -> Foreign:
    return getattr(optional_package("transformers"), spec.architecture.model)


def _constructor_options(spec: EncoderSpec) -> dict[str, bool]:
    """Arguments of a `transformers` class other than its configuration."""
    # published weights have no trained pooling layer
    return {"add_pooling_layer": False} if spec.architecture.model == "ViTModel" else {}


def build_backbone(
    spec: EncoderSpec, *, seed: int = 0, device: str = "cpu"
) -> Backbone:
    """Declared network with seeded random weights; on device 'meta' it takes no memory."""
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        remedy = "check the architecture in its config.json"
        with errors_of_others("network must build", spec.name, remedy):
            return _build(spec)


def _build(spec: EncoderSpec) -> Backbone:
    from thinsection.encode import networks

    match spec.architecture.kind:
        case "lite0":
            return Backbone(networks.EfficientNetLite0(), spec.pooling)
        case "conch_v15":
            sizes = networks.ConchConfig(**spec.architecture.options)
            conch = networks.ConchV15(sizes)
            return Backbone(
                conch,
                spec.pooling,
                features=conch.trunk.forward,
                head=conch.pool,
                num_prefix_tokens=1,
            )
        case "clip" | "conch" | "keep" | "isight":
            return _build_image_tower(spec)
        case "pathfm":
            from thinsection.encode import pathfm

            return Backbone(
                pathfm.PathFm(pathfm.PathFmConfig(**spec.architecture.options)),
                spec.pooling,
                num_prefix_tokens=1 + pathfm.NUM_REGISTERS,
            )
        case "transformers":
            network_class = _transformers_class(spec)
            config = network_class.config_class(**spec.architecture.options)
            network = network_class(config, **_constructor_options(spec))
            return transformers_backbone(network, spec.pooling)
        case "auto":
            return _build_auto(spec)
        case "timm" | "musk":
            return _build_timm(spec)
    raise WeightsError(
        f"architecture must be one that thinsection can build, got {spec.architecture.kind!r} "
        f"for {spec.name!r}"
    )


def needs_remote_code(spec: EncoderSpec) -> bool:
    """True if code of the hub repository defines the architecture and loads the weights."""
    return bool(spec.architecture.options.get("runs_own_code"))


def pretrained_backbone(spec: EncoderSpec, path: Path) -> Backbone:
    """Declared network with the weights of a file.

    Memory: the weights once in float32, and the file's own tensors if their type is smaller.
    """
    from thinsection.encode.authors_names import under_our_names

    if spec.architecture.kind in ("transformers", "auto"):
        return _load_transformers(spec, path)
    if path == PACKAGED_WEIGHTS:
        _check_packaged(path)
    backbone = unfilled_backbone(spec)
    state, unused = under_our_names(spec, backbone.network, read_state_dict(path))
    fill_strictly(backbone.network, state, source=str(path), unused=unused)
    return backbone


def _check_packaged(path: Path) -> None:
    """Checks that the weights in this package are the ones that were published with it."""
    content = path.read_bytes() if path.is_file() else b""
    digest = hashlib.sha256(content).hexdigest()
    if digest != PACKAGED_SHA256:
        raise WeightsError(
            f"weights of the default encoder must have sha256 {PACKAGED_SHA256}, got {digest} in "
            f"{str(path)!r}; install thinsection again"
        )


def unfilled_backbone(spec: EncoderSpec) -> Backbone:
    """Network before its weights are read.

    It is on the meta device if the spec states its number of parameters, and if the state dict has
    all of its state. Else it is on the CPU: a buffer that no checkpoint has, such as the periods of
    rotary positions, gets its values when the network is built.
    """
    if spec.num_params is None:
        return build_backbone(spec)
    backbone = build_backbone(spec, device="meta")
    stored = backbone.state_dict().keys()
    if all(name in stored for name, _ in backbone.named_buffers()):
        return backbone
    return build_backbone(spec)


def published_weights(spec: EncoderSpec) -> Path:
    """Path of the published weights, in this package or in the hub's cache."""
    if spec.architecture.kind == "lite0":
        return PACKAGED_WEIGHTS
    if spec.repo is None:
        raise WeightsError(
            f"encoder must have published weights, got {spec.name!r}, which has none; pass "
            "weights=, or pretrained=False"
        )
    revision = spec.revision
    if spec.architecture.kind in ("transformers", "auto"):
        # weights of the same commit as the config
        config = hub_file(spec.repo, (CONFIG_NAME,), revision=revision)
        revision = commit_of(config) or revision
    return hub_file(spec.repo, spec.weights_files, revision=revision)


def _load_transformers(spec: EncoderSpec, path: Path) -> Backbone:
    """Network of `transformers` from the folder with its weights and config."""
    folder = _folder(path)
    if spec.architecture.kind == "auto":
        auto_model = optional_package("transformers").AutoModel
        network = _from_pretrained(auto_model, folder, trust_remote_code=False)
    else:
        network_class = _transformers_class(spec)
        network = _from_pretrained(network_class, folder, **_constructor_options(spec))
        for option, declared in spec.architecture.options.items():
            stated = getattr(network.config, option, None)
            if option not in _FREE_OPTIONS and stated != declared:
                raise WeightsError(
                    f"{CONFIG_NAME} must have {option} {declared!r} for {spec.name!r}, "
                    f"got {stated!r} in {str(path)!r}; check that the file belongs to this encoder"
                )
    return transformers_backbone(network, spec.pooling)


def load_with_code(spec: EncoderSpec, *, allow_remote_code: bool) -> Backbone:
    """Network that is defined by code of its repository; transformers downloads that code."""
    if not allow_remote_code:
        raise WeightsError(
            f"encoder {spec.name!r} must have your permission to run code of its repository, "
            "got none; read that code, then pass allow_remote_code=True"
        )
    network = _from_pretrained(
        optional_package("transformers").AutoModel,
        spec.repo or spec.architecture.model,
        revision=spec.revision or "main",
        trust_remote_code=True,
    )
    return transformers_backbone(network, spec.pooling)


def _folder(path: Path) -> str:
    """Folder from which transformers loads exactly these weights."""
    if path.is_file() and path.name not in WEIGHTS_FILES:
        raise WeightsError(
            f"weights for transformers must be named {' or '.join(WEIGHTS_FILES)}, "
            f"got {str(path)!r}"
        )
    folder = path if path.is_dir() else path.parent
    if not (folder / CONFIG_NAME).is_file():
        raise WeightsError(
            f"the folder of weights for transformers must contain {CONFIG_NAME}, got none in "
            f"{str(folder)!r}"
        )
    return str(folder)


def _from_pretrained(
    network_class: Foreign, source: str, **options: str | bool
) -> Foreign:
    """`from_pretrained` in float32; missing, unused or misshapen weights are an error."""
    with torch.random.fork_rng(devices=[]), _without_progress_bars():
        # an unused head without weights would otherwise change the hash
        torch.manual_seed(0)
        try:
            network, info = network_class.from_pretrained(
                source, output_loading_info=True, **options
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise WeightsError(
                f"weights must load, got {error} in {source!r}"
            ) from error
    problems = []
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = [str(key) for key in info[kind]]
        wrong = [key for key in keys if not key.startswith(_UNUSED_HEADS)]
        if wrong:
            problems.append(f"{len(wrong)} {kind} ({wrong[0]}, ...)")
    if problems:
        raise WeightsError(
            "weights must fit the architecture name by name, "
            f"got {'; '.join(problems)} in {source!r}"
        )
    return network.float()


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Hides transformers' progress bars on standard error, which would break our own."""
    logging = optional_package("transformers").utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
