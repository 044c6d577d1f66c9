"""Slide encoders without a transformer: mean, max, and attention pooling with given weights.

Shapes: N tiles, D channels of a tile embedding, K hidden channels of the attention score.
"""

from collections.abc import Mapping
from typing import cast

import torch

from thinsection.errors import WeightsError
from thinsection.pool.encoder import (
    Expects,
    LoadOptions,
    SlideEmbedding,
    SlideEncoder,
    TileEmbeddings,
)
from thinsection.pool.inputs import checked_slide, row_blocks
from thinsection.types import CoordsL0
from thinsection.weights.files import hash_state_dict, read_state_dict
from thinsection.weights.hub import find_weights

BLOCK_ROWS = 8192  # tiles a block: a float32 copy of 8192 x 1536 is 48 MiB


class MeanSlideEncoder(SlideEncoder):
    """The mean over tiles, summed in float64, so that the order of tiles does not matter."""

    name = "mean"

    def encode(
        self, tile_embeddings: TileEmbeddings, coords_l0: CoordsL0, *, tile_px_l0: int
    ) -> SlideEmbedding:
        """Mean (D,) float32.

        Memory: one float64 block of BLOCK_ROWS x D.
        """
        tiles, *_ = checked_slide(tile_embeddings, coords_l0, tile_px_l0)
        total = torch.zeros(tiles.shape[1], dtype=torch.float64, device=tiles.device)
        for rows in row_blocks(len(tiles), BLOCK_ROWS):
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


class AbmilSlideEncoder(SlideEncoder):
    """Attention pooling with given weights: sum of a_n x_n, a = softmax over tiles of a score.

    The score is w . tanh(V x + b), or gated, w . (tanh(V x + b) * sigmoid(U x + c)), where the
    state dict holds `U.*`. Names: `V.weight` (K, D), `V.bias` (K), `U.weight`, `U.bias` alike,
    `w.weight` (1, K), `w.bias` (1).

    Source: Ilse, Tomczak, Welling, "Attention-based Deep Multiple Instance Learning", 2018.
    """

    name = "abmil"

    def __init__(self, state_dict: Mapping[str, torch.Tensor], *, device: str = "cpu") -> None:
        self._weights = _checked_abmil(state_dict, device)
        self.dim = self._weights["V.weight"].shape[1]
        self.expects = Expects(tile_dim=self.dim)
        self.weights_hash = hash_state_dict(self._weights)
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
        """Weighted mean (D,) float32.

        Memory: N scores and one float32 block of BLOCK_ROWS x D.
        """
        tiles, *_ = checked_slide(tile_embeddings, coords_l0, tile_px_l0, tile_dim=self.dim)
        blocks = row_blocks(len(tiles), BLOCK_ROWS)
        with torch.inference_mode():
            scores = [self._score(tiles[rows].to(self._device).float()) for rows in blocks]
            attention = torch.cat(scores).double().softmax(0)
            pooled = torch.zeros(tiles.shape[1], dtype=torch.float64, device=self._device)
            for rows in blocks:
                pooled += attention[rows] @ tiles[rows].to(self._device).double()
        return _as_numpy(pooled)

    def _score(self, tiles: torch.Tensor) -> torch.Tensor:
        w = self._weights
        hidden = torch.tanh(tiles @ w["V.weight"].T + w["V.bias"])
        if "U.weight" in w:
            hidden = hidden * torch.sigmoid(tiles @ w["U.weight"].T + w["U.bias"])
        return hidden @ w["w.weight"][0] + w["w.bias"]


def _checked_abmil(state_dict: Mapping[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    plain = {"V.weight", "V.bias", "w.weight", "w.bias"}
    allowed = (plain, plain | {"U.weight", "U.bias"})
    if set(state_dict) not in allowed:
        rule = "hold V.*, w.* and, where gated, U.* (weight and bias each)"
        raise WeightsError(f"abmil state dict must {rule}, got {sorted(state_dict)}")
    if len(got := tuple(state_dict["V.weight"].shape)) != 2:
        raise WeightsError(f"V.weight must be of shape (K, D), got {got}")
    hidden, dim = got
    shapes = {"V.weight": (hidden, dim), "V.bias": (hidden,), "w.weight": (1, hidden)}
    shapes |= {"U.weight": (hidden, dim), "U.bias": (hidden,), "w.bias": (1,)}
    for name, value in state_dict.items():
        if (got := tuple(value.shape)) != shapes[name]:
            raise WeightsError(f"{name} must be of shape {shapes[name]}, got {got}")
    return {name: value.detach().to(device).float() for name, value in state_dict.items()}


def _as_numpy(vector: torch.Tensor) -> SlideEmbedding:
    return cast(SlideEmbedding, vector.float().cpu().numpy())
