"""What goes into slide encoders, checked; those without a transformer; the base of the published.

Shapes: N tiles, D channels of a tile embedding, K hidden channels of the attention score.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from thinsection.attention.products import fast_products
from thinsection.attention.reach import blocks_of
from thinsection.config import from_mapping
from thinsection.errors import (
    BudgetError,
    InvalidInputError,
    WeightsError,
    require,
    rewording,
)
from thinsection.pool.encoder import (
    Expects,
    LoadOptions,
    SlideEmbedding,
    SlideEncoder,
    TileEmbeddings,
)
from thinsection.types import MIB, CoordsL0, format_bytes
from thinsection.weights.files import (
    MODEL_KEY,
    SAFETENSORS,
    load_strictly,
    read_state_dict,
)
from thinsection.weights.hub import commit_of, find_weights
from thinsection.weights.placement import resolve_device

CHECK_ROWS = 2048  # rows a block of the finiteness check: its copies stay below 16 MiB
BLOCK_ROWS = 8192  # tiles a block: a float32 copy of 8192 x 1536 is 48 MiB
TOKEN_BLOCK = (
    1024  # tokens a block of the MLP: hidden states of 1024 x 3072 float32 are 12 MiB
)
ATTENTION_BYTES = (
    64 * MIB
)  # block buffers of the attention; its preferred CPU blocks take 20 MiB
_PLAIN = LoadOptions()


def checked_slide(
    tile_embeddings: Any,
    coords_l0: Any,
    tile_px_l0: Any,
    *,
    tile_dim: int | None = None,
) -> tuple[Tensor, CoordsL0, int]:
    """Embeddings (N, D), which share memory with the input, int64 (N, 2) on the host, the edge."""
    tiles = _checked_embeddings(tile_embeddings, tile_dim)
    array = coords_l0.cpu().numpy() if isinstance(coords_l0, Tensor) else coords_l0
    array = np.asarray(array)
    paired = array.dtype.kind in "iu" and array.ndim == 2 and array.shape[1] == 2
    require(
        paired,
        "coords_l0 must be int64 of shape (N, 2)",
        f"{array.dtype} {array.shape}",
    )
    rule = f"coords_l0 must have one row per tile embedding ({len(tiles)})"
    require(len(array) == len(tiles), rule, len(array))
    is_int = isinstance(tile_px_l0, int | np.integer) and not isinstance(
        tile_px_l0, bool
    )
    require(
        is_int and tile_px_l0 > 0, "tile_px_l0 must be an int > 0", repr(tile_px_l0)
    )
    return tiles, array.astype(np.int64), int(tile_px_l0)


def _checked_embeddings(found: Any, tile_dim: int | None) -> Tensor:
    if isinstance(found, np.ndarray):
        got = f"{found.dtype} {found.shape}"
        real = (
            found.dtype.kind in "fiub" and found.dtype.itemsize <= 8
        )  # what torch takes
        require(real, "tile_embeddings must be float of shape (N, D)", got)
        # torch would warn of a view of foreign memory that is not writeable
        found = torch.from_numpy(found if found.flags.writeable else found.copy())
    is_tensor, kind = isinstance(found, Tensor), type(found).__name__
    require(is_tensor, "tile_embeddings must be an array or a tensor", kind)
    shape, dim = tuple(found.shape), "D" if tile_dim is None else tile_dim
    got = f"{str(found.dtype).removeprefix('torch.')} {shape}"
    fits = found.is_floating_point() and len(shape) == 2 and 0 not in shape
    require(fits, f"tile_embeddings must be float of shape (N, {dim}) with N >= 1", got)
    got = f"{shape}; were they made by another tile encoder?"
    require(dim in ("D", shape[1]), f"tile_embeddings must be of shape (N, {dim})", got)
    for rows in blocks_of(shape[0], CHECK_ROWS):
        wrong = (~found[rows].isfinite().all(1)).nonzero()
        if len(wrong):
            row = rows.start + int(wrong[0, 0])
            raise InvalidInputError(
                f"tile_embeddings must be finite, got NaN or inf in row {row}"
            )
    return cast(Tensor, found)


class MeanSlideEncoder(SlideEncoder):
    """The mean over tiles, summed in float64, so that the order of tiles does not matter."""

    name = "mean"

    def encode(
        self, tile_embeddings: TileEmbeddings, coords_l0: CoordsL0, *, tile_px_l0: int
    ) -> SlideEmbedding:
        """Mean (D,) float32. Memory: one float64 block of BLOCK_ROWS x D."""
        tiles, *_ = checked_slide(tile_embeddings, coords_l0, tile_px_l0)
        total = torch.zeros(tiles.shape[1], dtype=torch.float64, device=tiles.device)
        for rows in blocks_of(len(tiles), BLOCK_ROWS):
            total += tiles[rows].double().sum(0)
        return _as_numpy(total / len(tiles))


class MaxSlideEncoder(SlideEncoder):
    """The largest value of each channel over tiles."""

    name = "max"

    def encode(
        self, tile_embeddings: TileEmbeddings, coords_l0: CoordsL0, *, tile_px_l0: int
    ) -> SlideEmbedding:
        """Maximum (D,) float32."""
        tiles, *_ = checked_slide(tile_embeddings, coords_l0, tile_px_l0)
        return _as_numpy(tiles.amax(0))


class GatedAttention(nn.Module):
    """Scores (N, A) of tiles (N, D): w . (tanh(V x + b) * sigmoid(U x + c)); plain without U.
    Source: Ilse, Tomczak, Welling, "Attention-based Deep Multiple Instance Learning", 2018, eq. 9.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        outputs: int = 1,
        *,
        gated: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.V, self.U = (
            nn.Linear(dim, hidden),
            nn.Linear(dim, hidden) if gated else None,
        )
        self.w, self.drop = nn.Linear(hidden, outputs), nn.Dropout(dropout)

    def forward(self, tiles: Tensor) -> Tensor:
        hidden = self.drop(torch.tanh(self.V(tiles)))
        if self.U is not None:
            hidden = hidden * self.drop(torch.sigmoid(self.U(tiles)))
        return cast(Tensor, self.w(hidden))


class _Attention(nn.Module):
    """A projection (none for bare attention), and the attentions on it: a head's, by its names."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        shapes = {name: value.shape for name, value in state.items()}
        hidden, width = shapes["attention.V.weight"]
        outputs, gated = (
            shapes.get("attention.w.bias", [1])[0],
            "attention.U.weight" in state,
        )
        self.attention = GatedAttention(width, hidden, outputs, gated=gated)
        self.embed: nn.Module = nn.Identity()
        self.tile_dim, self.dim = width, width * outputs
        if "embed.0.weight" in state:
            self.tile_dim = shapes["embed.0.weight"][-1]
            self.embed = nn.Sequential(nn.Linear(self.tile_dim, width), nn.ReLU())


class AbmilSlideEncoder(SlideEncoder):
    """Attention pooling with given weights: sum of a_n h_n, a = softmax over tiles of a score.

    The score is `GatedAttention`'s. A state dict of it alone, gated or not (`V.weight` (K, D),
    `V.bias` (K), `U.weight`, `U.bias` alike, `w.weight` (1, K), `w.bias` (1)): h_n is the tile x_n.
    A model of `thinsection train` with an attention (abmil, clam_sb, clam_mb): h_n is its
    projection; the sums of its members and of their attentions stand one after another, (D',).
    """

    name = "abmil"

    def __init__(
        self, state_dict: Mapping[str, Tensor], *, device: str = "cpu"
    ) -> None:
        bare = "V.weight" in state_dict
        state = (
            {f"0.attention.{k}": v for k, v in state_dict.items()}
            if bare
            else state_dict
        )
        state = {
            k: v
            for k, v in state.items()
            if k.split(".")[1:2] in (["attention"], ["embed"])
        }
        firsts = [
            state.get(f"{i}.attention.V.weight", torch.empty(0))
            for i in range(len(state))
        ]
        members = [i for i, first in enumerate(firsts) if first.ndim == 2]
        got = f"{sorted(state_dict)[:4]}; give a state dict of V, U and w, or such a model"
        rule = "abmil weights must hold V.weight of shape (K, D)"
        require(members, rule, got, error=WeightsError)
        split = [k.partition(".") for k in state]
        parts = (
            {n: state[f"{m}.{n}"] for m, _, n in split if m == str(i)} for i in members
        )
        self._nets = list(map(_Attention, parts))
        both = nn.ModuleList(self._nets)
        self.weights_hash = load_strictly(both, state, source="abmil state dict")
        both.requires_grad_(False).eval().to(device)
        self.dim = sum(net.dim for net in self._nets)
        self.expects = replace(self.expects, tile_dim=self._nets[0].tile_dim)
        self._device = device

    @classmethod
    def load(cls, options: LoadOptions) -> "AbmilSlideEncoder":
        """With the weights that the options name; none are published."""
        if options.weights is None:
            remedy = (
                "pass weights=FILE (a model of `thinsection train`, or a state dict)"
            )
            raise WeightsError(
                f"slide encoder 'abmil' has no published weights; {remedy}"
            )
        path = find_weights(options.weights, files=("abmil.safetensors",))
        encoder = cls(read_state_dict(path), device=options.device)
        if path.suffix == SAFETENSORS:
            encoder.expects = replace(encoder.expects, **_trained_on(path))
        return encoder

    def encode(
        self, tile_embeddings: TileEmbeddings, coords_l0: CoordsL0, *, tile_px_l0: int
    ) -> SlideEmbedding:
        """Weighted mean (D',) float32. Memory: N scores, one float32 block of BLOCK_ROWS x D."""
        dim = self.expects.tile_dim
        tiles, *_ = checked_slide(tile_embeddings, coords_l0, tile_px_l0, tile_dim=dim)
        with torch.inference_mode(), fast_products():
            pooled = [self._pooled(net, tiles) for net in self._nets]
        return _as_numpy(torch.cat(pooled))

    def _pooled(self, net: _Attention, tiles: Tensor) -> Tensor:
        blocks = blocks_of(len(tiles), BLOCK_ROWS)

        def projected(rows: slice) -> Tensor:
            return cast(Tensor, net.embed(tiles[rows].to(self._device).float()))

        scores = [net.attention(projected(rows)) for rows in blocks]
        attention = torch.cat(scores).double().softmax(0).T  # (A, N)
        parts = (attention[:, rows] @ projected(rows).double() for rows in blocks)
        return reduce(add, parts).flatten()


def _trained_on(path: Path) -> dict[str, Any]:
    """What the header of a model of `thinsection train` says of its tiles, as `Expects` has it."""
    errors = (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError)
    rule = "header of a model must say what it was trained on"
    with (
        rewording(rule, path, *errors, error=WeightsError),
        safe_open(path, "pt") as file,
    ):
        told = (file.metadata() or {}).get(MODEL_KEY)
        inputs = json.loads(told)["inputs"] if told else {}
        names = {"tile_encoders": [inputs["encoder"]]} if inputs.get("encoder") else {}
        names |= {
            name: inputs[name] for name in ("tile_px", "tile_mpp") if name in inputs
        }
        wants = from_mapping(Expects, names)
    return {name: getattr(wants, name) for name in names}


def _as_numpy(vector: Tensor) -> SlideEmbedding:
    return cast(SlideEmbedding, vector.float().cpu().numpy())


class PublishedSlideEncoder(SlideEncoder):
    """A network with published weights; a subclass says where they are and builds the network."""

    repository: ClassVar[str]  # on the hub
    revision: ClassVar[str]  # a commit
    files: ClassVar[
        tuple[str, ...]
    ]  # names of the weights file, the preferred one first
    prefix: ClassVar[str] = (
        ""  # of the weights' names; outside of it lies another model
    )
    large: ClassVar[
        str
    ]  # pattern of the names of the layers whose products bfloat16 is for

    def __init__(self, net: nn.Module, *, options: LoadOptions) -> None:
        self._device = resolve_device(options.device, mps=False)
        self._budget_bytes = options.budget_bytes
        self.net = net.to(self._device).eval().requires_grad_(False)
        if options.precision == "bf16":  # all but the large products stays as it is
            self.precision = "bf16"
            for name, layer in net.named_modules():
                if re.fullmatch(self.large, name):
                    layer.to(torch.bfloat16)

    @classmethod
    @abstractmethod
    def build(cls, config: Any = None) -> nn.Module:
        """The network, of the published sizes or of `config`, its weights to be loaded."""

    @classmethod
    def from_state_dict(
        cls,
        state_dict: Mapping[str, Tensor],
        *,
        config: Any = None,
        options: LoadOptions = _PLAIN,
    ) -> Self:
        """The encoder with published weights; a WeightsError where a name or shape does not fit."""
        with torch.device("meta"):
            net = cls.build(config)
        own_names = [name for name in state_dict if name.startswith(cls.prefix)]
        weights = {
            n.removeprefix(cls.prefix): state_dict[n].detach().clone()
            for n in own_names
        }
        digest = load_strictly(net, weights, source=cls.name)
        encoder = cls(net, options=options)
        encoder.weights_hash = digest
        return encoder

    @classmethod
    def from_pretrained(
        cls, path_or_repo: str | Path | None = None, **how: Any
    ) -> Self:
        """The encoder from a file, a folder, or the hub: as published, or `owner/name@COMMIT`.

        `how` is as of `from_state_dict`. Raises WeightsError: nothing is there, or it does not fit;
        MissingDependencyError: a hub repository without huggingface_hub.
        """
        source = path_or_repo or cls.repository
        known = cls.revision if str(source) == cls.repository else None
        path = find_weights(source, files=cls.files, revision=known)
        encoder = cls.from_state_dict(read_state_dict(path), **how)
        encoder.origin = replace(encoder.origin, revision=commit_of(path))
        return encoder

    @classmethod
    def load(cls, options: LoadOptions) -> Self:
        """The encoder for the registry; `pretrained=False` gives seeded random weights."""
        if options.pretrained:
            return cls.from_pretrained(options.weights, options=options)
        rule = "weights must be left out with pretrained=False"
        require(options.weights is None, rule, "both", error=WeightsError)
        return cls.from_state_dict(cls.random_weights(seed=0), options=options)

    @classmethod
    def random_weights(cls, config: Any = None, *, seed: int) -> dict[str, Tensor]:
        """Seeded random values of the published names and shapes; never for results."""
        with torch.device("meta"):
            wanted = cls.build(config).state_dict()
        generator, weights = torch.Generator().manual_seed(seed), {}
        for name, value in wanted.items():
            noise = torch.randn(value.shape, generator=generator)
            if re.search(r"norm|\.ln_|_ln\.", name) and name.endswith("weight"):
                noise = 1 + 0.1 * noise
            elif name.endswith("bias"):
                noise = 0.05 * noise
            elif not name.endswith(
                ("query", "cls_token")
            ):  # so that every layer matters
                noise = noise * value.shape[-1] ** -0.5
            weights[cls.prefix + name] = noise
        return weights


class HeadPlan(NamedTuple):
    """How a forward pass keeps within a budget."""

    heads_at_a_time: int  # whose q, k and v are held
    peak_bytes: int


def plan_heads(
    name: str,
    num_tokens: int,
    num_heads: int,
    peak: Callable[[int], int],
    budget_bytes: int,
) -> HeadPlan:
    """As many heads at a time as the budget allows, by the `peak` bytes of so many; or an error."""
    for heads in (n for n in range(num_heads, 0, -1) if num_heads % n == 0):
        if peak(heads) <= budget_bytes:
            return HeadPlan(heads, peak(heads))
    needs = f"{name} needs {format_bytes(peak(1))} for {num_tokens} tokens"
    raise BudgetError(
        f"{needs}, the budget is {format_bytes(budget_bytes)}; raise budget_bytes"
    )
