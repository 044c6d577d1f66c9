"""Tile encoders as data, with our names, those of other packages, and those of other tools.

The declarations are in `encoders_own.toml` and `encoders_timm.toml` in this folder.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol

from thinsection.config import nearest, read_toml
from thinsection.errors import UnknownEncoderError
from thinsection.extras import Need
from thinsection.registry import Entry, Registry
from thinsection.types import Document, PlainValues

if TYPE_CHECKING:
    import torch

Interpolation = Literal["bilinear", "bicubic"]
# Pooling of tokens to one vector. cls: the class token; cls_mean: the class token and the mean of
# the patch tokens, concatenated; mean: mean of the patch tokens or the feature map; head: the
# architecture's own pooling.
Pooling = Literal["cls", "cls_mean", "mean", "head"]
ArchitectureKind = Literal[
    "lite0",
    "timm",
    "transformers",
    "conch_v15",
    "clip",
    "conch",
    "keep",
    "isight",
    "musk",
    "pathfm",
    "auto",
    "custom",
]
Rgb = tuple[float, float, float]

IMAGENET_MEAN: Rgb = (0.485, 0.456, 0.406)
IMAGENET_STD: Rgb = (0.229, 0.224, 0.225)
DEFAULT_ENCODER = "efficientnet_lite0"
# package that builds each kind of architecture, other than ours
_PACKAGE_OF = {
    "timm": "timm",
    "keep": "timm",
    "musk": "timm",
    "transformers": "transformers",
    "auto": "transformers",
}
# kinds whose checkpoint has a text tower too
_TWO_TOWERS = ("clip", "conch", "keep")
_TABLES = ("encoders_own.toml", "encoders_timm.toml")
TIMM_PREFIX = "timm:"
HUB_PREFIX = "hf:"
# in the settings of a run, before the name of a network or function of its session
OWN_PREFIX = "own:"
# after the name of an encoder: the edge of the network's input, as in 'uni:448px'
_INPUT_PX = re.compile(r"(.+):(\d+)px")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Architecture of a network, without its weights."""

    # decides which builder in `encode.backbone` reads the other fields
    kind: ArchitectureKind
    model: str  # a timm name, a class of transformers, or the folder with a config.json (auto)
    # arguments of the builder; layers by name
    options: Document = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFile:
    """File of weights as its repository holds it at the pinned commit."""

    name: str
    sha256: str
    size_bytes: int | None = None  # None if no public record names it


_NOT_BUILT_HERE = Architecture(kind="custom", model="")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """Declared facts of a tile encoder, known before it is loaded."""

    name: str  # name in the registry
    dim: int  # length D of an embedding
    # the network that is built by this package; other encoders build their own
    architecture: Architecture = _NOT_BUILT_HERE
    # edge in pixels at `tile_mpp` of the tiles for which it was made
    tile_px: int = 224
    # µm/px of those tiles; None if the publisher gives none
    tile_mpp: float | None = 0.5
    # edge of the network's input in pixels, after resizing and centre crop
    input_px: int = 224
    # shorter side of the tile after resizing; None: not resized
    resize_px: int | None = 224
    interpolation: Interpolation = "bilinear"  # always antialiased
    mean: Rgb = IMAGENET_MEAN  # per channel, applied to values in [0, 1], like std
    std: Rgb = IMAGENET_STD
    pooling: Pooling = "cls"
    supports_tokens: bool = True  # True if `encode_tokens` gives a dense map
    # True if `precision='auto'` may choose bf16 or fp16, since embeddings keep a cosine >= 0.9999
    # to those in float32, as with vision transformers. An encoder of another package that declares
    # it computes in its `precision` itself.
    half_precision: bool = False
    # parameters of the network as built here; None for an encoder that is not declared
    num_params: int | None = None
    licence: str = "unknown"  # SPDX identifier, or the publisher's name for it
    source: str = ""  # paper or project
    repo: str | None = None  # repository on the Hugging Face hub
    # pinned commit of `repo`; None: not known, so that a name must state it ('plip@COMMIT')
    revision: str | None = None
    # names of the weights file, the preferred one first
    weights_files: tuple[str, ...] = ("model.safetensors", "pytorch_model.bin")
    # True if the hub requires a token of an account that accepted the terms
    gated: bool = False
    # what public records state about files at `revision`; other files are not compared
    published: tuple[PublishedFile, ...] = ()

    @property
    def pin(self) -> Literal["packaged", "pinned", "unpinned"]:
        """Whether the weights are always the same: in this package, or at a fixed commit."""
        if self.architecture.kind == "lite0":
            return "packaged"
        return "pinned" if self.revision else "unpinned"

    @property
    def preprocessing(self) -> PlainValues:
        """Settings of the preprocessing, in plain values."""
        return {
            "input_px": self.input_px,
            "resize_px": self.resize_px,
            "interpolation": self.interpolation,
            "mean": self.mean,
            "std": self.std,
        }

    @property
    def has_text_tower(self) -> bool:
        """True if its checkpoint also turns texts into vectors, for `zeroshot`."""
        return self.architecture.kind in _TWO_TOWERS

    @property
    def needs(self) -> tuple[str, ...]:
        """Python packages beyond the package's own dependencies."""
        kind = self.architecture.kind
        if kind in ("lite0", "custom"):
            return ()
        if kind in _PACKAGE_OF:
            return (_PACKAGE_OF[kind], "huggingface_hub")
        return ("huggingface_hub",)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderIdentity:
    """Identity of a tile encoder in its results; equal identities give equal embeddings."""

    name: str  # name in the registry
    label: str  # label in the names of folders: 'uni2_h_bf16'
    # name, weights_hash, precision, preprocessing and engine; the hub's revision
    provenance: Mapping[str, str]
    supports_tokens: bool = False  # True if it has a dense token grid
    # files of its weights; None if the weights depend on more than these files
    files: tuple[str, ...] | None = None


@cache
def declared_encoders() -> Mapping[str, EncoderSpec]:
    """All declared encoders by name."""
    specs: dict[str, EncoderSpec] = {}
    for table in _TABLES:
        for row in read_toml(Path(__file__).with_name(table))["encoder"]:
            spec = _spec(row)
            if spec.name in specs:
                raise AssertionError(
                    f"encoder {spec.name!r} must be declared once, got two declarations"
                )
            specs[spec.name] = spec
    return MappingProxyType(specs)


def _spec(row: Document) -> EncoderSpec:
    """Spec from one table of the TOML files."""
    architecture = Architecture(
        kind=row["kind"], model=row["model"], options=row.get("options", {})
    )
    fields: Document = {"half_precision": True}
    for name, value in row.items():
        if name == "published":
            fields[name] = tuple(PublishedFile(**file) for file in value)
        elif name not in ("kind", "model", "options"):
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
        )


class LoadEncoder(Protocol):
    """Entry of another package, which returns a TileEncoder: a class of it, or a function.

    It takes those of these arguments that it needs.
    """

    def __call__(
        self,
        *,
        device: "torch.device",
        precision: str,
        weights: str | Path | None,
        pretrained: bool,
        seed: int,
    ) -> object: ...


# Our own entries are specs, which `find_spec` looks up; only those of other packages are loaded.
ENCODERS: Registry[LoadEncoder] = Registry(
    "encoder", "thinsection.encoders", _entries, error=UnknownEncoderError
)


def needs_of_encoder(name: str, *, from_hub: bool = True) -> Need:
    """Packages that it takes to load a tile encoder, as its name and declaration say.

    Args:
        name: as in `--encoder`.
        from_hub: False if the weights are given, or random.
    """
    packages: tuple[str, ...] = ()
    name, _ = split_input_px(name)
    if is_declared_encoder(name):
        packages = encoder_spec(name).needs
    elif name in ENCODERS:
        packages = ENCODERS.entry(name).needs
    elif name.startswith(TIMM_PREFIX):
        packages = ("timm", "huggingface_hub")
    elif name.startswith(HUB_PREFIX):
        return f"encoder {name!r}", ("huggingface_hub",)
    if not from_hub:
        packages = tuple(each for each in packages if each != "huggingface_hub")
    return f"encoder {name!r}", packages


def split_input_px(name: str) -> tuple[str, int | None]:
    """Name of an encoder without the input size that follows it, and this size: 'uni', 448."""
    match = _INPUT_PX.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, None)


def with_input_px(spec: EncoderSpec, input_px: int) -> EncoderSpec:
    """The encoder for another input size, and for tiles that are larger by the same factor."""
    factor = input_px / spec.input_px
    resize_px = None if spec.resize_px is None else round(factor * spec.resize_px)
    return replace(
        spec,
        input_px=input_px,
        resize_px=resize_px,
        tile_px=round(factor * spec.tile_px),
    )


def is_brought(name: str) -> bool:
    """True for an encoder that another package registers."""
    return name in ENCODERS and name not in declared_encoders()


def check_encoder_name(name: str) -> None:
    """Raise UnknownEncoderError for an unknown name; nothing is imported or downloaded."""
    name, _ = split_input_px(name)
    is_undeclared = name.startswith((TIMM_PREFIX, HUB_PREFIX)) or Path(name).exists()
    if name not in ENCODERS and not is_undeclared:
        encoder_spec(name)  # raises an error for an unknown name


def is_declared_encoder(name: str) -> bool:
    """True for a name of the registry, or of another tool, also with '@REVISION' or ':448px'."""
    plain = split_input_px(name)[0].partition("@")[0]
    return plain in declared_encoders() or our_name(plain) in declared_encoders()


def encoder_spec(name: str) -> EncoderSpec:
    """Declaration for a registry name, or another tool's name; else UnknownEncoderError.

    'NAME@REVISION' is the declaration at another commit or branch of its repository, 'NAME:448px'
    that for another input size; whether its network allows it, `find_spec` tries.
    """
    base, input_px = split_input_px(name)
    if input_px is not None:
        return with_input_px(encoder_spec(base), input_px)
    plain, at, revision = name.partition("@")
    if at and is_declared_encoder(plain):
        spec = encoder_spec(plain)
        if not revision or spec.repo is None:
            raise UnknownEncoderError(
                "encoder must be followed by a commit or branch of its repository after '@', "
                f"got {name!r}; write {plain!r}"
            )
        return replace(spec, revision=revision, published=())
    if name not in ENCODERS:
        name = our_name(name)
    if name in declared_encoders():
        return declared_encoders()[name]
    if name.startswith(OWN_PREFIX):
        own_name = name.removeprefix(OWN_PREFIX)
        raise UnknownEncoderError(
            f"encoder {own_name!r} must be passed in Python, as it was made there, got its name "
            "alone; embed the slides by ts.run(slides, out=..., encoder=ts.make_encoder(...)) "
            "with the same settings"
        )
    hint = nearest(name, ENCODERS.names())
    if "did you mean" not in hint:
        hint = ""  # without a hint the message would list all names
    raise UnknownEncoderError(
        f"unknown encoder {name!r}{hint}; `thinsection models` lists all; others are given "
        "as 'timm:<name>', 'hf:<repo>' or the path of a checkpoint"
    )


@cache
def _tool_names() -> Document:
    """Content of `tool_names.toml`: our encoders in other tools."""
    return read_toml(Path(__file__).with_name("tool_names.toml"))


def peer_encoder(tool: str, encoder: str, label: str) -> str:
    """Name in the tool for embeddings in our folder `features_LABEL`.

    The part of the label after the encoder stays; an encoder that the tool lacks keeps our name.
    """
    names = _tool_names()["tile_encoders"].get(tool)
    if names is None or not label.startswith(encoder):
        return label
    return str(names.get(encoder, encoder)) + label.removeprefix(encoder)


@cache
def _our_names() -> dict[str, str]:
    """Our names by the tools' names, and by our own."""
    our_names = {"conch_v1_5": "conch_v15"}
    encoders: set[str] = set()
    for names in _tool_names()["tile_encoders"].values():
        our_names |= {_plain(name): encoder for encoder, name in names.items()}
        encoders |= names.keys()
    return our_names | {encoder: encoder for encoder in encoders}


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def our_name(name: str) -> str:
    """Our name of a tile encoder from a tool's name; an unknown name stays."""
    return _our_names().get(_plain(name), name)


def our_slide_encoder(name: str) -> str:
    """Our name of a slide encoder from a tool's name; an unknown name stays."""
    model, colon, output = name.partition(":")
    our_names: dict[str, str] = _tool_names()["slide_encoders"]
    return our_names.get(_plain(model), model) + colon + output
