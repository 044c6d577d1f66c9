"""Base class of slide encoders with published weights, and memory planning for their attention."""

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from thinsection.attention.products import fast_products
from thinsection.errors import BudgetError, ConfigError, WeightsError
from thinsection.pool.encoder import (
    LoadOptions,
    SlideEmbedding,
    SlideEncoder,
    TileEmbeddings,
    TileLayout,
)
from thinsection.pool.pooling import checked_slide
from thinsection.types import MIB, CoordsL0, Document, format_bytes
from thinsection.weights.files import load_strictly, read_state_dict
from thinsection.weights.hub import find_weights, hub_file
from thinsection.weights.origin import commit_of
from thinsection.weights.placement import resolve_device

# tokens per block of the MLP: hidden states of 1024 x 3072 float32 take 12 MiB
TOKEN_BLOCK = 1024
# memory of the attention's block buffers; its preferred block size on a CPU takes 20 MiB
ATTENTION_BYTES = 64 * MIB

ConfigT = TypeVar("ConfigT")
_DEFAULT_OPTIONS = LoadOptions()


class PublishedSlideEncoder(SlideEncoder, Generic[ConfigT]):
    """A network with published weights; a subclass states their origin and calls the network.

    `ConfigT` describes the sizes of the network; None if there is only one size.
    """

    network: ClassVar[Callable[..., nn.Module]]  # builds the network from its sizes
    published_sizes: ClassVar[Any]
    # repository on the hub; None if the weights are elsewhere
    repository: ClassVar[str | None]
    revision: ClassVar[str | None]  # a commit; None if no public record names one
    published_at: ClassVar[str] = ""  # place of weights that are not on the hub
    # possible names of the weights file, the preferred first
    files: ClassVar[tuple[str, ...]]
    # beginning of the names of these weights; names without it belong to another model
    prefix: ClassVar[str] = ""
    # file beside the weights that states sizes which the weights do not show
    config_file: ClassVar[str] = ""
    # tables of a checkpoint that together hold the weights; empty: the checkpoint is one table
    tables: ClassVar[tuple[str, ...]] = ()
    # beginnings of names in the file that the slide embedding does not need
    unused: ClassVar[tuple[str, ...]] = ()
    # pattern for names of the layers that use bfloat16; None: no layer does
    large_layers: ClassVar[str | None] = None

    def __init__(self, net: nn.Module, *, options: LoadOptions) -> None:
        self._device = resolve_device(options.device, mps=False)
        self._budget_bytes = options.budget_bytes
        self.net = net.to(self._device).eval().requires_grad_(False)
        if options.precision == "bf16":
            if self.large_layers is None:
                raise ConfigError(
                    f"precision must be fp32 for slide encoder {type(self).name!r}, whose "
                    "network is small, got 'bf16'"
                )
            self.precision = "bf16"
            for name, layer in net.named_modules():
                if re.fullmatch(self.large_layers, name):
                    layer.to(torch.bfloat16)

    @property
    def tile_dim(self) -> int | None:
        """Channels D of the tile embeddings that the network takes; None: several numbers."""
        return int(cast(Any, self.net).sizes.tile_dim)

    def encode(
        self, tile_embeddings: TileEmbeddings, coords_l0: CoordsL0, *, tile_px_l0: int
    ) -> SlideEmbedding:
        """Slide embedding (D',) float32; the class docstring states the memory."""
        layout = TileLayout.square(tile_px_l0)
        return self.encode_tiles(tile_embeddings, coords_l0, layout)

    @torch.inference_mode()
    @fast_products()
    def encode_tiles(
        self,
        tile_embeddings: TileEmbeddings,
        coords_l0: CoordsL0,
        layout: TileLayout,
    ) -> SlideEmbedding:
        """Slide embedding (D',) float32 of tiles whose layout is known; see `encode`."""
        tiles, coords, _ = checked_slide(
            tile_embeddings, coords_l0, layout.size_l0[0], tile_dim=self.tile_dim
        )
        embedding = self.embed(tiles, coords, layout).float()
        return cast(SlideEmbedding, embedding.cpu().numpy())

    @abstractmethod
    def embed(self, tiles: Tensor, coords_l0: CoordsL0, layout: TileLayout) -> Tensor:
        """Slide embedding (D',) of checked tiles (N, D)."""

    @classmethod
    def build(cls, config: ConfigT | None = None) -> nn.Module:
        """The network without weights, with the published sizes or those of `config`."""
        return cls.network(config or cls.published_sizes)

    @classmethod
    def sizes_of(cls, state_dict: Mapping[str, Tensor]) -> ConfigT | None:
        """Sizes according to names and shapes of the weights; None: the published sizes.

        Raises WeightsError: the sizes are not the published ones, and the shapes do not show all of
            them.
        """
        return None

    @classmethod
    def stated_sizes(
        cls, path: Path, state_dict: Mapping[str, Tensor]
    ) -> ConfigT | None:
        """Sizes stated in the authors' file, or in a file beside it; None if neither states any.

        Raises WeightsError: these sizes contradict each other or the weights.
        """
        return None

    @classmethod
    def first_name(cls, name: str, config: ConfigT | None) -> str:
        """First name of a weight that the file may repeat under other names."""
        return name

    @classmethod
    def from_state_dict(
        cls,
        state_dict: Mapping[str, Tensor],
        *,
        config: ConfigT | None = None,
        options: LoadOptions = _DEFAULT_OPTIONS,
    ) -> Self:
        """The encoder with these weights. Raises WeightsError: a name or shape does not fit."""
        with torch.device("meta"):
            net = cls.build(config or cls.sizes_of(state_dict))
        weights = {
            name.removeprefix(cls.prefix): value.detach().clone()
            for name, value in state_dict.items()
            if name.startswith(cls.prefix)
        }
        own_weights = cls._without_copies(weights, config)
        weights_hash = load_strictly(
            net, own_weights, source=cls.name, unused=cls.unused
        )
        encoder = cls(net, options=options)
        encoder.weights_hash = weights_hash
        return encoder

    @classmethod
    def _without_copies(
        cls, weights: Mapping[str, Tensor], config: ConfigT | None
    ) -> dict[str, Tensor]:
        """Weights under their first names. Raises WeightsError: copies of a weight differ."""
        own: dict[str, Tensor] = {}
        for name, value in weights.items():
            first_name = cls.first_name(name, config)
            first = weights.get(first_name, value)
            if first.shape != value.shape or not torch.equal(first, value):
                raise WeightsError(
                    f"copies of a shared weight must be equal, got another {name!r} than "
                    f"{first_name!r} in {cls.name!r}; check that the file belongs to this encoder"
                )
            own[first_name] = value
        return own

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo: str | Path | None = None,
        *,
        config: ConfigT | None = None,
        options: LoadOptions = _DEFAULT_OPTIONS,
    ) -> Self:
        """The encoder from a file, a folder, or the hub: as published, or `owner/name@COMMIT`.

        Raises WeightsError: there are no weights, or they do not fit; MissingDependencyError: a hub
        repository without huggingface_hub.
        """
        source = path_or_repo or cls.repository
        if source is None:
            raise WeightsError(
                f"weights of slide encoder {cls.name!r} must be passed, got none; download them "
                f"from {cls.published_at}, then pass "
                "slide_weights=FILE (weights=FILE in load_slide_encoder)"
            )
        revision = cls.revision if str(source) == cls.repository else None
        path = find_weights(source, files=cls.files, revision=revision)
        if cls.config_file and revision is None:
            commit = commit_of(path)
            if commit is not None and not Path(source).exists():
                # the file comes from the same repository as the weights
                repo = str(source).partition("@")[0]
                hub_file(repo, (cls.config_file,), revision=commit)
        state_dict = read_state_dict(path, tables=cls.tables)
        sizes = config or cls.stated_sizes(path, state_dict)
        encoder = cls.from_state_dict(state_dict, config=sizes, options=options)
        encoder.origin = replace(encoder.origin, revision=commit_of(path))
        return encoder

    @classmethod
    def load(cls, options: LoadOptions) -> Self:
        """The encoder for the registry; `pretrained=False` gives seeded random weights."""
        if options.pretrained:
            return cls.from_pretrained(options.weights, options=options)
        if options.weights is not None:
            raise WeightsError(
                "weights must be omitted with pretrained=False, got both"
            )
        return cls.from_state_dict(cls.random_weights(seed=0), options=options)

    @classmethod
    def random_weights(
        cls, config: ConfigT | None = None, *, seed: int
    ) -> dict[str, Tensor]:
        """Seeded random values of the published names and shapes; never for results."""
        with torch.device("meta"):
            shapes = {
                name: x.shape for name, x in cls.build(config).state_dict().items()
            }
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=generator)
            if len(shape) == 1 and name.endswith("weight"):  # layer norm
                value = 1 + 0.1 * value
            elif name.endswith("bias"):
                value = 0.05 * value
            elif not name.endswith(("query", "cls_token")):
                # scaled so that every layer affects the result
                value = value * shape[-1] ** -0.5
            weights[cls.prefix + name] = value
        return weights


def stated_int(table: Document, name: str, place: str, *, default: int | None) -> int:
    """A whole number in the authors' table; the default if it is absent.

    Raises WeightsError: it is no whole number >= 0, or it is missing and has no default.
    """
    value = table.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        got = "none" if value is None else repr(value)
        raise WeightsError(
            f"{place}.{name} must be a whole number >= 0, got {got}; check that the file is as "
            "its authors wrote it"
        )
    return value


def check_heads(dim: int, num_heads: int, name: str) -> None:
    """Raises WeightsError if `dim` is not a multiple of the number of heads."""
    if num_heads < 1 or dim % num_heads:
        raise WeightsError(
            f"{name} must divide the {dim} channels of the weights, got {num_heads}"
        )


class HeadPlan(NamedTuple):
    """Number of heads to compute at a time, so that a forward pass keeps within a budget."""

    heads_at_a_time: int  # heads whose q, k and v are in memory
    peak_bytes: int


def plan_heads(
    name: str,
    num_tokens: int,
    num_heads: int,
    *,
    peak_bytes: Callable[[int], int],
    budget_bytes: int,
) -> HeadPlan:
    """Largest number of heads at a time that the budget allows; it divides the number of all heads.

    Args:
        name: name of the encoder, for the message.
        num_tokens: tokens of the slide, for the message.
        num_heads: number of all heads.
        peak_bytes: returns the peak memory for a number of heads at a time.
        budget_bytes: limit for this memory.

    Raises BudgetError: not even one head fits.
    """
    for heads in range(num_heads, 0, -1):
        if num_heads % heads == 0 and peak_bytes(heads) <= budget_bytes:
            return HeadPlan(heads, peak_bytes(heads))
    raise BudgetError(
        f"{name} needs {format_bytes(peak_bytes(1))} for {num_tokens} tokens, "
        f"the budget is {format_bytes(budget_bytes)}; raise budget_bytes"
    )
