"""Base of slide encoders with published weights, and the plan that keeps them within a budget."""

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

# tokens a block of the MLP: hidden states of 1024 x 3072 float32 are 12 MiB
TOKEN_BLOCK = 1024
# block buffers of the attention; its preferred CPU blocks take 20 MiB
ATTENTION_BYTES = 64 * MIB

ConfigT = TypeVar("ConfigT")
_DEFAULT_OPTIONS = LoadOptions()


class PublishedSlideEncoder(SlideEncoder, Generic[ConfigT]):
    """A network with published weights; a subclass says where they are and calls the network.

    `ConfigT` describes the network's sizes, None where it comes in one size.
    """

    network: ClassVar[Callable[..., nn.Module]]  # builds the network of its sizes
    published_sizes: ClassVar[Any]
    repository: ClassVar[str | None]  # on the hub; None where the weights lie elsewhere
    revision: ClassVar[str | None]  # a commit; None where no public record names one
    published_at: ClassVar[str] = ""  # where weights are that the hub does not have
    files: ClassVar[tuple[str, ...]]  # names of the weights file, the preferred first
    # the weights' names begin with it; beside them lies another model
    prefix: ClassVar[str] = ""
    # name of a file beside the weights that states sizes which they do not show
    config_file: ClassVar[str] = ""
    # tables of a checkpoint that together are the weights; none: it is one table
    tables: ClassVar[tuple[str, ...]] = ()
    # how names begin that the file has, and the slide embedding does not need
    unused: ClassVar[tuple[str, ...]] = ()
    # pattern of the names of the layers whose products bfloat16 is for; None: of no layer
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
        """Channels D of the tile embeddings that the network takes; None: of several lengths."""
        return int(cast(Any, self.net).sizes.tile_dim)

    def encode(
        self, tile_embeddings: TileEmbeddings, coords_l0: CoordsL0, *, tile_px_l0: int
    ) -> SlideEmbedding:
        """Slide embedding (D',) float32, in the memory that the class states."""
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
        """The network, of the published sizes or of `config`, its weights to be loaded."""
        return cls.network(config or cls.published_sizes)

    @classmethod
    def sizes_of(cls, state_dict: Mapping[str, Tensor]) -> ConfigT | None:
        """Sizes that names and shapes of the weights show; None: the published ones.

        Raises WeightsError: the shapes are not the published ones, and do not show all sizes.
        """
        return None

    @classmethod
    def stated_sizes(
        cls, path: Path, state_dict: Mapping[str, Tensor]
    ) -> ConfigT | None:
        """Sizes that the authors' file states, or one beside it; None: neither states any.

        Raises WeightsError: they contradict each other or the weights.
        """
        return None

    @classmethod
    def first_name(cls, name: str, config: ConfigT | None) -> str:
        """Name under which a shared weight stands first, where a file may repeat it."""
        return name

    @classmethod
    def from_state_dict(
        cls,
        state_dict: Mapping[str, Tensor],
        *,
        config: ConfigT | None = None,
        options: LoadOptions = _DEFAULT_OPTIONS,
    ) -> Self:
        """The encoder with published weights; a WeightsError where a name or shape does not fit."""
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
        """Weights under their first names; a WeightsError where the copies of one differ."""
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

        Raises WeightsError: nothing is there, or it does not fit; MissingDependencyError: a hub
        repository without huggingface_hub.
        """
        source = path_or_repo or cls.repository
        if source is None:
            raise WeightsError(
                f"weights of slide encoder {cls.name!r} must be passed, got none; download them "
                f"from {cls.published_at}, then pass --slide-weights FILE (weights=FILE)"
            )
        revision = cls.revision if str(source) == cls.repository else None
        path = find_weights(source, files=cls.files, revision=revision)
        if cls.config_file and revision is None:
            commit = commit_of(path)
            if commit is not None and not Path(source).exists():
                # from the repository that the weights come from
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
            if len(shape) == 1 and name.endswith("weight"):  # of a layer norm
                value = 1 + 0.1 * value
            elif name.endswith("bias"):
                value = 0.05 * value
            elif not name.endswith(("query", "cls_token")):
                # so that every layer matters
                value = value * shape[-1] ** -0.5
            weights[cls.prefix + name] = value
        return weights


def stated_int(table: Document, name: str, place: str, *, default: int | None) -> int:
    """A size of a table of the authors, where absent the default.

    Raises WeightsError: it is no whole number >= 0, or missing without a default.
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
    """Raises WeightsError where so many heads do not share `dim` channels evenly."""
    if num_heads < 1 or dim % num_heads:
        raise WeightsError(
            f"{name} must divide the {dim} channels of the weights, got {num_heads}"
        )


class HeadPlan(NamedTuple):
    """Heads of a forward pass that keeps within a budget."""

    heads_at_a_time: int  # whose q, k and v are held
    peak_bytes: int


def plan_heads(
    name: str,
    num_tokens: int,
    num_heads: int,
    *,
    peak_bytes: Callable[[int], int],
    budget_bytes: int,
) -> HeadPlan:
    """Most heads at a time that the budget allows; their number divides all heads.

    Args:
        name: of the encoder, for the message.
        num_tokens: tokens of the slide, for the message.
        num_heads: all heads.
        peak_bytes: memory for so many heads at a time.
        budget_bytes: bound on it.

    Raises BudgetError: not even one head fits.
    """
    for heads in range(num_heads, 0, -1):
        if num_heads % heads == 0 and peak_bytes(heads) <= budget_bytes:
            return HeadPlan(heads, peak_bytes(heads))
    raise BudgetError(
        f"{name} needs {format_bytes(peak_bytes(1))} for {num_tokens} tokens, "
        f"the budget is {format_bytes(budget_bytes)}; raise budget_bytes"
    )
