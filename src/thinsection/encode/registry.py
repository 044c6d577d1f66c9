"""What tile encoders are, as data, and their names: ours, other packages', and other tools'.

The declarations are `encoders_own.toml` and `encoders_timm.toml` beside this file.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from thinsection.config import nearest
from thinsection.errors import UnknownEncoderError
from thinsection.registry import Entry, Registry

Interpolation = Literal["bilinear", "bicubic"]
# how tokens become one vector. cls: the class token; cls_mean: it and the mean of the patch tokens,
# concatenated; mean: of the patch tokens or the feature map; head: the architecture's own pooling
Pooling = Literal["cls", "cls_mean", "mean", "head"]
ArchitectureKind = Literal[
    "lite0", "timm", "transformers", "conch_v15", "auto", "custom"
]
Rgb = tuple[float, float, float]

IMAGENET_MEAN: Rgb = (0.485, 0.456, 0.406)
IMAGENET_STD: Rgb = (0.229, 0.224, 0.225)
DEFAULT_ENCODER = "efficientnet_lite0"
_PACKAGE_OF = {
    "timm": ("timm",),
    "transformers": ("transformers",),
    "auto": ("transformers",),
}
_TABLES = ("encoders_own.toml", "encoders_timm.toml")
TIMM_PREFIX, HUB_PREFIX = "timm:", "hf:"

# ours -> TRIDENT's `enc_name`, STAMP's `ExtractorName`, slide2vec's registry; '' where it has none.
# STAMP's virchow and virchow2 take the class token alone: ours is its virchow-full.
_KAIKO = ("vitb16", "vitb8", "vitl14", "vits16", "vits8")
_TOOLS = ("trident", "stamp", "slide2vec")
_NAMES = {
    "conch_v15": ("conch_v15", "conch1_5", "conchv15"),
    "gigapath": ("gigapath", "gigapath", "gigapath"),
    "h0_mini": ("h0-mini", "", "h0-mini"),
    "h_optimus_0": ("hoptimus0", "h-optimus-0", "h-optimus-0"),
    "h_optimus_1": ("hoptimus1", "h-optimus-1", "h-optimus-1"),
    **{"hibou_b": ("", "", "hibou-b"), "hibou_l": ("hibou_l", "", "hibou-l")},
    **{f"kaiko_{vit}": (f"kaiko-{vit}", "", "") for vit in _KAIKO},
    "lunit_vits8": ("lunit-vits8", "", "lunit"),
    "midnight_12k": ("midnight12k", "", "midnight"),
    **{"phikon": ("phikon", "", "phikon"), "phikon_v2": ("phikon_v2", "", "phikonv2")},
    **{"uni": ("uni_v1", "uni", "uni"), "uni2_h": ("uni_v2", "uni2", "uni2")},
    "virchow": ("virchow", "virchow-full", "virchow"),
    "virchow2": ("virchow2", "", "virchow2"),
}
# slide encoders
_POOLERS = {
    "gigapath_slide": "gigapath",
    "prov_gigapath": "gigapath",
    "titan_slide": "titan",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How the network is built, without its weights."""

    kind: ArchitectureKind  # which builder of `thinsection.encode.backbone` understands the rest
    model: str  # a timm name, a class of transformers, or the folder with a config.json (auto)
    options: Mapping[str, Any] = field(
        default_factory=dict, hash=False
    )  # layers by name


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """Everything that is declared of a tile encoder before it is loaded."""

    name: str  # in the registry
    dim: int  # length D of an embedding
    architecture: Architecture
    tile_px: int = 224  # edge of the tiles that it was made for, px at `tile_mpp`
    tile_mpp: float | None = (
        0.5  # µm/px of those tiles; None where the model states none
    )
    input_px: int = 224  # edge of what the network sees, after resizing and centre crop
    resize_px: int | None = (
        224  # of the tile's shorter side after resizing; None: not resized
    )
    interpolation: Interpolation = "bilinear"  # always antialiased
    mean: Rgb = IMAGENET_MEAN  # per channel, applied to values in [0, 1], like std
    std: Rgb = IMAGENET_STD
    pooling: Pooling = "cls"
    supports_tokens: bool = True  # whether `encode_tokens` gives a dense map
    # whether `precision='auto'` may take bf16 or fp16: true where embeddings keep a cosine
    # >= 0.9999 to float32's, as those of vision transformers do
    half_precision: bool = True
    num_params: int | None = (
        None  # of the network as built here; None for what is not declared
    )
    licence: str = "unknown"  # SPDX identifier, or what the publisher calls it
    source: str = ""  # paper or project
    repo: str | None = None  # on the Hugging Face hub
    # pinned commit of `repo`; None: none is known, main is taken, with a warning that names it
    revision: str | None = None
    weights_files: tuple[str, ...] = (
        "model.safetensors",
        "pytorch_model.bin",
    )  # the first found
    gated: bool = (
        False  # whether the hub wants a token of an account that accepted the terms
    )

    @property
    def preprocessing(self) -> dict[str, Any]:
        """What a tile goes through before the network sees it, in plain values."""
        names = ("input_px", "resize_px", "interpolation", "mean", "std")
        return {name: getattr(self, name) for name in names}

    @property
    def needs(self) -> tuple[str, ...]:
        """Python packages beyond the package's own dependencies."""
        hub = () if self.architecture.kind == "lite0" else ("huggingface_hub",)
        return (*_PACKAGE_OF.get(self.architecture.kind, ()), *hub)


@cache
def declared_encoders() -> Mapping[str, EncoderSpec]:
    """Every declared encoder by name."""
    folder = files("thinsection.encode")
    texts = [folder.joinpath(table).read_text(encoding="utf-8") for table in _TABLES]
    specs = [_spec(row) for text in texts for row in tomllib.loads(text)["encoder"]]
    by_name = {spec.name: spec for spec in specs}
    if len(by_name) != len(specs):
        raise AssertionError("two declarations of an encoder have the same name")
    return MappingProxyType(by_name)


def _spec(row: dict[str, Any]) -> EncoderSpec:
    declared: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in row.items()
    }
    network = {
        k: declared.pop(k) for k in ("kind", "model", "options") if k in declared
    }
    if declared.get("tile_mpp") == "any":
        declared["tile_mpp"] = None
    return EncoderSpec(**declared, architecture=Architecture(**network))


def _entries() -> Iterator[Entry]:
    for spec in declared_encoders().values():
        at = f" at {spec.tile_mpp:g} µm/px" if spec.tile_mpp else ""
        line = f"{spec.dim}-d, tiles of {spec.tile_px} px{at}; {spec.licence}; {spec.source}"
        yield Entry(
            name=spec.name, help=line, target=spec, needs=spec.needs, extra="hub"
        )


# ours are specs; another package's is called with device, precision, weights, pretrained and seed,
# by keyword, and gives a TileEncoder
ENCODERS: Registry[Any] = Registry(
    "encoder", "thinsection.encoders", _entries, error=UnknownEncoderError
)


def check_encoder_name(name: str) -> None:
    """An UnknownEncoderError for what can be no encoder; nothing is imported or downloaded."""
    elsewhere = name.startswith((TIMM_PREFIX, HUB_PREFIX)) or Path(name).exists()
    if name not in ENCODERS and not elsewhere:
        encoder_spec(name)  # raises


def encoder_spec(name: str) -> EncoderSpec:
    """The declaration of a registry name, or another tool's of one; else an UnknownEncoderError."""
    if name not in ENCODERS:
        name = our_name(name)
    if name in declared_encoders():
        return declared_encoders()[name]
    hint = nearest(name, ENCODERS.names())
    raise UnknownEncoderError(
        "encoder must be a declared one, 'timm:<name>', 'hf:<repo>' or a checkpoint's path, "
        f"got {name!r}{hint if 'did you mean' in hint else ''}; 'thinsection models' lists all"
    )


def peer_encoder(tool: str, encoder: str, label: str) -> str:
    """The tool's name of embeddings whose folder of ours is `features_LABEL`.
    What the label says beside the encoder stays; an encoder that the tool lacks keeps our name."""
    if tool not in _TOOLS or not label.startswith(encoder):
        return label
    theirs = _NAMES.get(encoder, ("",) * len(_TOOLS))[_TOOLS.index(tool)]
    return (theirs or encoder) + label[len(encoder) :]


@cache
def _ours() -> dict[str, str]:
    named = {_plain(t): ours for ours, theirs in _NAMES.items() for t in theirs if t}
    return {"conch_v1_5": "conch_v15", **named, **{name: name for name in _NAMES}}


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def our_name(name: str) -> str:
    """Our name of a tile encoder that a tool calls so; the name itself where none does."""
    return _ours().get(_plain(name), name)


def our_slide_encoder(name: str) -> str:
    """Our name of a slide encoder that a tool calls so; the name itself where none does."""
    model, colon, output = name.partition(":")
    return _POOLERS.get(_plain(model), model) + colon + output
