"""What goes into a slide encoder, checked before any arithmetic; and those without a transformer.

Shapes: N tiles, D channels of a tile embedding, K hidden channels of the attention score.
"""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from thinsection.attention.products import fast_products
from thinsection.attention.reach import blocks_of
from thinsection.errors import InvalidInputError, WeightsError, require
from thinsection.pool.encoder import (
    Expects,
    LoadOptions,
    SlideEmbedding,
    SlideEncoder,
    TileEmbeddings,
)
from thinsection.types import CoordsL0
from thinsection.weights.files import hash_state_dict, load_strictly, read_state_dict
from thinsection.weights.hub import find_weights

CHECK_ROWS = 2048  # rows a block of the finiteness check: its copies stay below 16 MiB
BLOCK_ROWS = 8192  # tiles a block: a float32 copy of 8192 x 1536 is 48 MiB


def checked_slide(
    tile_embeddings: Any, coords_l0: Any, tile_px_l0: Any, *, tile_dim: int | None = None
) -> tuple[Tensor, CoordsL0, int]:
    """Embeddings (N, D), which share memory with the input, int64 (N, 2) on the host, and the edge.

    Memory: one bool block of CHECK_ROWS x D.
    """
    tiles = _checked_embeddings(tile_embeddings, tile_dim)
    array = coords_l0.cpu().numpy() if isinstance(coords_l0, Tensor) else coords_l0
    array = np.asarray(array)
    paired = array.dtype.kind in "iu" and array.ndim == 2 and array.shape[1] == 2
    require(paired, "coords_l0 must be int64 of shape (N, 2)", f"{array.dtype} {array.shape}")
    rule = f"coords_l0 must have one row per tile embedding ({len(tiles)})"
    require(len(array) == len(tiles), rule, len(array))
    is_int = isinstance(tile_px_l0, int | np.integer) and not isinstance(tile_px_l0, bool)
    require(is_int and tile_px_l0 > 0, "tile_px_l0 must be an int > 0", repr(tile_px_l0))
    return tiles, array.astype(np.int64), int(tile_px_l0)


def _checked_embeddings(found: Any, tile_dim: int | None) -> Tensor:
    if isinstance(found, np.ndarray):
        got = f"{found.dtype} {found.shape}"
        real = found.dtype.kind in "fiub" and found.dtype.itemsize <= 8  # what torch takes
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
            raise InvalidInputError(f"tile_embeddings must be finite, got NaN or inf in row {row}")
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
        self, dim: int, hidden: int, outputs: int = 1, *, gated: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.V, self.U = nn.Linear(dim, hidden), nn.Linear(dim, hidden) if gated else None
        self.w, self.drop = nn.Linear(hidden, outputs), nn.Dropout(dropout)

    def forward(self, tiles: Tensor) -> Tensor:
        hidden = self.drop(torch.tanh(self.V(tiles)))
        if self.U is not None:
            hidden = hidden * self.drop(torch.sigmoid(self.U(tiles)))
        return cast(Tensor, self.w(hidden))


class AbmilSlideEncoder(SlideEncoder):
    """Attention pooling with given weights: sum of a_n x_n, a = softmax over tiles of a score.

    The score is `GatedAttention`'s, gated where the state dict holds `U.*`. Names: `V.weight`
    (K, D), `V.bias` (K), `U.weight`, `U.bias` alike, `w.weight` (1, K), `w.bias` (1).
    """

    name = "abmil"

    def __init__(self, state_dict: Mapping[str, Tensor], *, device: str = "cpu") -> None:
        self._score = _checked_abmil(state_dict).to(device)
        self.dim = self._score.V.in_features
        self.expects = Expects(tile_dim=self.dim)
        self.weights_hash = hash_state_dict(self._score.state_dict())
        self._device = device

    @classmethod
    def load(cls, options: LoadOptions) -> "AbmilSlideEncoder":
        """With the weights that the options name; none are published."""
        if options.weights is None:
            remedy = "pass weights=FILE (trained by you; names in AbmilSlideEncoder)"
            raise WeightsError(f"slide encoder 'abmil' has no published weights; {remedy}")
        path = find_weights(options.weights, files=("abmil.safetensors",))
        return cls(read_state_dict(path), device=options.device)

    def encode(
        self, tile_embeddings: TileEmbeddings, coords_l0: CoordsL0, *, tile_px_l0: int
    ) -> SlideEmbedding:
        """Weighted mean (D,) float32. Memory: N scores, one float32 block of BLOCK_ROWS x D."""
        tiles, *_ = checked_slide(tile_embeddings, coords_l0, tile_px_l0, tile_dim=self.dim)
        blocks = blocks_of(len(tiles), BLOCK_ROWS)
        with torch.inference_mode(), fast_products():
            scores = [self._score(tiles[rows].to(self._device).float()) for rows in blocks]
            attention = torch.cat(scores)[:, 0].double().softmax(0)
            pooled = torch.zeros(tiles.shape[1], dtype=torch.float64, device=self._device)
            for rows in blocks:
                pooled += attention[rows] @ tiles[rows].to(self._device).double()
        return _as_numpy(pooled)


def _checked_abmil(state_dict: Mapping[str, Tensor]) -> GatedAttention:
    first = state_dict.get("V.weight", torch.empty(0))
    rule, names = "abmil state dict must hold V.weight of shape (K, D)", sorted(state_dict)
    require(first.ndim == 2, rule, f"{tuple(first.shape)} in {names}", error=WeightsError)
    hidden, dim = first.shape
    net = GatedAttention(dim, hidden, gated="U.weight" in state_dict).requires_grad_(False)
    load_strictly(net, state_dict, source="abmil state dict")
    return net.eval()


def _as_numpy(vector: Tensor) -> SlideEmbedding:
    return cast(SlideEmbedding, vector.float().cpu().numpy())
