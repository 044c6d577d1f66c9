"""Tile encoders as data, and their names: ours, other packages', and other tools'.

The declarations are `encoders_own.toml` and `encoders_timm.toml` beside this file.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from thinsection.config import nearest
from thinsection.errors import UnknownEncoderError
from thinsection.registry import Entry, Registry

Interpolation = Literal["bilinear", "bicubic"]
# How tokens become one vector. cls: the class token; cls_mean: it and the mean of the patch tokens,
# concatenated; mean: of the patch tokens or the feature map; head: the architecture's own pooling.
Pooling = Literal["cls", "cls_mean", "mean", "head"]
ArchitectureKind = Literal[
    "lite0", "timm", "transformers", "conch_v15", "auto", "custom"
]
Rgb = tuple[float, float, float]

IMAGENET_MEAN: Rgb = (0.485, 0.456, 0.406)
IMAGENET_STD: Rgb = (0.229, 0.224, 0.225)
DEFAULT_ENCODER = "efficientnet_lite0"
# package that builds each kind of architecture, beside ours
_PACKAGE_OF = {"timm": "timm", "transformers": "transformers", "auto": "transformers"}
_TABLES = ("encoders_own.toml", "encoders_timm.toml")
TIMM_PREFIX = "timm:"
HUB_PREFIX = "hf:"


class _ToolNames(NamedTuple):
    """Names of one of our encoders in other tools; '' where a tool has none."""

    trident: str = ""  # `enc_name`
    stamp: str = ""  # `ExtractorName`
    slide2vec: str = ""  # in its registry


# STAMP's virchow and virchow2 take the class token alone: ours is its virchow-full
_TOOL_NAMES = {
    "conch_v15": _ToolNames("conch_v15", "conch1_5", "conchv15"),
    "gigapath": _ToolNames("gigapath", "gigapath", "gigapath"),
    "h0_mini": _ToolNames("h0-mini", "", "h0-mini"),
    "h_optimus_0": _ToolNames("hoptimus0", "h-optimus-0", "h-optimus-0"),
    "h_optimus_1": _ToolNames("hoptimus1", "h-optimus-1", "h-optimus-1"),
    "hibou_b": _ToolNames("", "", "hibou-b"),
    "hibou_l": _ToolNames("hibou_l", "", "hibou-l"),
    "kaiko_vitb16": _ToolNames("kaiko-vitb16"),
    "kaiko_vitb8": _ToolNames("kaiko-vitb8"),
    "kaiko_vitl14": _ToolNames("kaiko-vitl14"),
    "kaiko_vits16": _ToolNames("kaiko-vits16"),
    "kaiko_vits8": _ToolNames("kaiko-vits8"),
    "lunit_vits8": _ToolNames("lunit-vits8", "", "lunit"),
    "midnight_12k": _ToolNames("midnight12k", "", "midnight"),
    "phikon": _ToolNames("phikon", "", "phikon"),
    "phikon_v2": _ToolNames("phikon_v2", "", "phikonv2"),
    "uni": _ToolNames("uni_v1", "uni", "uni"),
    "uni2_h": _ToolNames("uni_v2", "uni2", "uni2"),
    "virchow": _ToolNames("virchow", "virchow-full", "virchow"),
    "virchow2": _ToolNames("virchow2", "", "virchow2"),
}
# other tools' names of slide encoders, and ours
_SLIDE_ENCODERS = {
    "gigapath_slide": "gigapath",
    "prov_gigapath": "gigapath",
    "titan_slide": "titan",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Architecture of a network, without its weights."""

    kind: ArchitectureKind  # decides which builder of `encode.backbone` reads the rest
    model: str  # a timm name, a class of transformers, or the folder with a config.json (auto)
    # arguments of the builder; layers by name
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """Everything that is declared of a tile encoder before it is loaded."""

    name: str  # in the registry
    dim: int  # length D of an embedding
    architecture: Architecture
    tile_px: int = 224  # edge of the tiles that it was made for, px at `tile_mpp`
    # µm/px of those tiles; None where the model states none
    tile_mpp: float | None = 0.5
    input_px: int = 224  # edge of the network's input, after resizing and centre crop
    # the tile's shorter side after resizing; None: not resized
    resize_px: int | None = 224
    interpolation: Interpolation = "bilinear"  # always antialiased
    mean: Rgb = IMAGENET_MEAN  # per channel, applied to values in [0, 1], like std
    std: Rgb = IMAGENET_STD
    pooling: Pooling = "cls"
    supports_tokens: bool = True  # whether `encode_tokens` gives a dense map
    # whether `precision='auto'` may take bf16 or fp16: true where embeddings keep a cosine
    # >= 0.9999 to float32's, as those of vision transformers do
    half_precision: bool = True
    # count in the network as built here; None for an encoder that is not declared
    num_params: int | None = None
    licence: str = "unknown"  # SPDX identifier, or the publisher's name of it
    source: str = ""  # paper or project
    repo: str | None = None  # on the Hugging Face hub
    # pinned commit of `repo`; None: none is known, main is taken, with a warning that names it
    revision: str | None = None
    # names of the weights file, the preferred first
    weights_files: tuple[str, ...] = ("model.safetensors", "pytorch_model.bin")
    # whether the hub wants a token of an account that accepted the terms
    gated: bool = False

    @property
    def preprocessing(self) -> dict[str, Any]:
        """Settings of a tile's way to the network, in plain values."""
        return {
            "input_px": self.input_px,
            "resize_px": self.resize_px,
            "interpolation": self.interpolation,
            "mean": self.mean,
            "std": self.std,
        }

    @property
    def needs(self) -> tuple[str, ...]:
        """Python packages beyond the package's own dependencies."""
        kind = self.architecture.kind
        if kind == "lite0":
            return ()
        if kind in _PACKAGE_OF:
            return (_PACKAGE_OF[kind], "huggingface_hub")
        return ("huggingface_hub",)


@cache
def declared_encoders() -> Mapping[str, EncoderSpec]:
    """Every declared encoder by name."""
    folder = files("thinsection.encode")
    specs: dict[str, EncoderSpec] = {}
    for table in _TABLES:
        text = folder.joinpath(table).read_text(encoding="utf-8")
        for row in tomllib.loads(text)["encoder"]:
            spec = _spec(row)
            if spec.name in specs:
                raise AssertionError(f"two declarations of encoder {spec.name!r}")
            specs[spec.name] = spec
    return MappingProxyType(specs)


def _spec(row: Mapping[str, Any]) -> EncoderSpec:
    """Spec of one table of the TOML files."""
    architecture = Architecture(
        kind=row["kind"], model=row["model"], options=row.get("options", {})
    )
    fields: dict[str, Any] = {}
    for name, value in row.items():
        if name not in ("kind", "model", "options"):
            fields[name] = tuple(value) if isinstance(value, list) else value
    if fields.get("tile_mpp") == "any":
        fields["tile_mpp"] = None
    return EncoderSpec(**fields, architecture=architecture)


def _entries() -> Iterator[Entry]:
    for spec in declared_encoders().values():
        mpp = f" at {spec.tile_mpp:g} µm/px" if spec.tile_mpp else ""
        yield Entry(
            name=spec.name,
            help=(
                f"{spec.dim}-d, tiles of {spec.tile_px} px{mpp}; "
                f"{spec.licence}; {spec.source}"
            ),
            target=spec,
            needs=spec.needs,
            extra="hub",
        )


# Ours are specs; another package's is called with device, precision, weights, pretrained and seed,
# by keyword, and gives a TileEncoder.
ENCODERS: Registry[Any] = Registry(
    "encoder", "thinsection.encoders", _entries, error=UnknownEncoderError
)


def check_encoder_name(name: str) -> None:
    """Raise UnknownEncoderError for a name of no encoder; nothing is imported or downloaded."""
    is_undeclared = name.startswith((TIMM_PREFIX, HUB_PREFIX)) or Path(name).exists()
    if name not in ENCODERS and not is_undeclared:
        encoder_spec(name)  # raises


def encoder_spec(name: str) -> EncoderSpec:
    """The declaration of a registry name, or another tool's of one; else an UnknownEncoderError."""
    if name not in ENCODERS:
        name = our_name(name)
    if name in declared_encoders():
        return declared_encoders()[name]
    hint = nearest(name, ENCODERS.names())
    if "did you mean" not in hint:
        hint = ""  # which would list all names
    raise UnknownEncoderError(
        "encoder must be a declared one, 'timm:<name>', 'hf:<repo>' or a checkpoint's path, "
        f"got {name!r}{hint}; 'thinsection models' lists all"
    )


def peer_encoder(tool: str, encoder: str, label: str) -> str:
    """The tool's name of embeddings whose folder of ours is `features_LABEL`.

    The rest of the label, after the encoder, stays; an encoder that the tool lacks keeps our name.
    """
    if tool not in _ToolNames._fields or not label.startswith(encoder):
        return label
    tool_name: str = getattr(_TOOL_NAMES.get(encoder, _ToolNames()), tool)
    return (tool_name or encoder) + label.removeprefix(encoder)


@cache
def _our_names() -> dict[str, str]:
    """Our name by each tool's name, and by our own."""
    our_names = {"conch_v1_5": "conch_v15"}
    for encoder, names in _TOOL_NAMES.items():
        our_names |= {_plain(name): encoder for name in names if name}
    return our_names | {encoder: encoder for encoder in _TOOL_NAMES}


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def our_name(name: str) -> str:
    """Our name of a tile encoder that a tool calls so; the name itself where none does."""
    return _our_names().get(_plain(name), name)


def our_slide_encoder(name: str) -> str:
    """Our name of a slide encoder that a tool calls so; the name itself where none does."""
    model, colon, output = name.partition(":")
    return _SLIDE_ENCODERS.get(_plain(model), model) + colon + output
