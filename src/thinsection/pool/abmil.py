"""Pooling by attention: softmax sums over blocks of tiles, the gated score, and ABMIL.

Shapes: N tiles, D channels of a tile embedding, K hidden channels of the attention score; n tiles
in a block, A scores per tile, E channels of a value.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from thinsection.attention.blocks import blocks_of
from thinsection.attention.products import fast_products
from thinsection.config import from_mapping
from thinsection.errors import WeightsError, rewording
from thinsection.pool.dropout import Dropout
from thinsection.pool.encoder import (
    BLOCK_ROWS,
    Expects,
    LoadOptions,
    SlideEmbedding,
    SlideEncoder,
    TileEmbeddings,
)
from thinsection.pool.pooling import as_numpy, checked_slide
from thinsection.types import CoordsL0
from thinsection.weights.files import (
    MODEL_KEY,
    SAFETENSORS,
    load_strictly,
    read_state_dict,
)
from thinsection.weights.hub import find_weights


@dataclass(frozen=True, slots=True)
class _AuthorsNames:
    """Regular expressions for an author's names of the parts of an attention network."""

    projection: str
    attention: str
    # beginnings of names that the slide embedding does not need
    unused: tuple[str, ...]


# CLAM counts a dropout layer that older versions lack; in some published files names have `module.`
_CLAM = _AuthorsNames(
    projection=r"attention_net\.(module\.)?(?=0\.)",
    attention=r"attention_net\.(module\.)?[23]\.",
    unused=("classifiers.", "instance_classifiers.", "instance_loss_fn."),
)
_MIL_LAB = _AuthorsNames(
    projection=r"(model\.)?patch_embed\.",
    attention=r"(model\.)?global_attn\.",
    unused=("classifier.", "model.classifier."),
)
# layers of the attention in both authors' files, gated or not, and our names for them
_AUTHORS_LAYERS = {
    r"attention_a\.0\.": "V.",
    r"attention_b\.0\.": "U.",
    r"attention_c\.": "w.",
    r"module\.0\.": "V.",
    r"module\.[23]\.": "w.",
}


class SoftmaxSums:
    """Weighted sums of values, one for each score; the weights are a softmax over all tiles.

    The division into blocks changes only the last bits of the result.

    Memory: A (E + 2) float64, independent of the number of tiles.
    Source: Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018.
    """

    def __init__(self) -> None:
        self._largest: Tensor | None = None  # (A,), largest of all scores so far
        self._weights = torch.empty(0)  # (A,), sums of exp(score - largest)
        self._sums = torch.empty(0)  # (A, E), sums of exp(score - largest) * value

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Adds a block of tiles.

        Args:
            scores: (n, A).
            values: (n, E), shared by all scores, or (n, A, E), separate for each score.
        """
        scores = scores.double()
        largest = scores.amax(0)
        if self._largest is not None:
            largest = torch.maximum(largest, self._largest)
        weights = (scores - largest).exp()
        # products have the precision of the values; sums over blocks are float64
        of_values = weights.to(values.dtype)
        if values.ndim == 2:
            sums = (of_values.T @ values).double()
        else:
            sums = torch.einsum("na,nae->ae", of_values, values).double()
        totals = weights.sum(0)
        if self._largest is not None:
            earlier = (self._largest - largest).exp()
            totals += earlier * self._weights
            sums += earlier[:, None] * self._sums
        self._largest = largest
        self._weights = totals
        self._sums = sums

    def result(self) -> Tensor:
        """Weighted sums (A, E) float64 of all tiles so far."""
        return self._sums / self._weights[:, None]


class GatedAttention(nn.Module):
    """Scores (N, A) of tiles (N, D): w . (tanh(V x + b) * sigmoid(U x + c)); without U no gate.

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
        self.V = nn.Linear(dim, hidden)
        self.U = nn.Linear(dim, hidden) if gated else None
        self.w = nn.Linear(hidden, outputs)
        self.drop = Dropout(dropout)

    def forward(self, tiles: Tensor) -> Tensor:
        hidden = self.drop(torch.tanh(self.V(tiles)))
        if self.U is not None:
            hidden = hidden * self.drop(torch.sigmoid(self.U(tiles)))
        return cast(Tensor, self.w(hidden))


class _Member(nn.Module):
    """One model of an ensemble: an optional projection, and attention on its output.

    Modules have the names of a trained model.
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        hidden, width = state["attention.V.weight"].shape
        outputs = len(state.get("attention.w.bias", torch.empty(1)))
        gated = "attention.U.weight" in state
        self.attention = GatedAttention(width, hidden, outputs, gated=gated)
        self.dim = width * outputs
        self.tile_dim = width
        self.embed: nn.Module = nn.Identity()
        if "embed.0.weight" in state:
            self.tile_dim = state["embed.0.weight"].shape[-1]
            self.embed = nn.Sequential(nn.Linear(self.tile_dim, width), nn.ReLU())


class AbmilSlideEncoder(SlideEncoder):
    """Attention pooling with given weights: sum of a_n h_n, a = softmax over tiles of a score.

    The score is `GatedAttention`'s. Four kinds of weights are possible:
    A state dict of the score alone, gated or not (`V.weight` (K, D), `V.bias` (K), `U.weight` and
    `U.bias` alike, `w.weight` (1, K), `w.bias` (1)). Then h_n is the tile embedding x_n.
    An ABMIL of MIL-Lab, under its own names. Then h_n is its projection, as in `forward_features`.
    A checkpoint of CLAM (clam_sb, clam_mb; gated or not), under its own names. Then h_n is its
    projection, as in the `features` that CLAM returns; the sums of all branches are concatenated.
    A model of `thinsection train` with attention (abmil, clam_sb, clam_mb). Then h_n is its
    projection; the sums of all members and of their attentions are concatenated to (D',).
    """

    name = "abmil"

    def __init__(
        self, state_dict: Mapping[str, Tensor], *, device: str = "cpu"
    ) -> None:
        state = _attention_weights(state_dict)
        self._members = [_Member(part) for part in _states_of_members(state)]
        if not self._members:
            raise WeightsError(
                "abmil weights must contain V.weight of shape (K, D), got "
                f"{sorted(state_dict)[:4]}; pass a state dict of V, U and w, a checkpoint of CLAM "
                "or MIL-Lab, or a model of `thinsection train`"
            )
        network = nn.ModuleList(self._members)
        self.weights_hash = load_strictly(network, state, source="abmil state dict")
        network.requires_grad_(False).eval().to(device)
        self.dim = sum(member.dim for member in self._members)
        self.expects = replace(self.expects, tile_dim=self._members[0].tile_dim)
        self._device = device

    @classmethod
    def load(cls, options: LoadOptions) -> "AbmilSlideEncoder":
        """Encoder with the weights that the options name; there are no published ones."""
        if options.weights is None:
            raise WeightsError(
                "slide encoder 'abmil' has no published weights; "
                "pass weights=FILE (a model of `thinsection train`, or a state dict)"
            )
        path = find_weights(options.weights, files=("abmil.safetensors",))
        encoder = cls(read_state_dict(path), device=options.device)
        if path.suffix == SAFETENSORS:
            encoder.expects = _read_expects(path, tile_dim=encoder.expects.tile_dim)
        return encoder

    def encode(
        self, tile_embeddings: TileEmbeddings, coords_l0: CoordsL0, *, tile_px_l0: int
    ) -> SlideEmbedding:
        """Weighted mean (D',) float32. Memory: one float32 block of BLOCK_ROWS x D."""
        dim = self.expects.tile_dim
        tiles, _, _ = checked_slide(
            tile_embeddings, coords_l0, tile_px_l0, tile_dim=dim
        )
        with torch.inference_mode(), fast_products():
            parts = []
            for member in self._members:
                sums = SoftmaxSums()
                for rows in blocks_of(len(tiles), BLOCK_ROWS):
                    projected = member.embed(tiles[rows].to(self._device).float())
                    sums.add(member.attention(projected), projected)
                parts.append(sums.result().flatten())
        return as_numpy(torch.cat(parts))


def _attention_weights(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of attentions and projections only, under names as 'MEMBER.attention.V.weight'."""
    if "V.weight" in state_dict:
        return {f"0.attention.{name}": value for name, value in state_dict.items()}
    if any("global_attn." in name for name in state_dict):
        return _weights_of_authors(state_dict, _MIL_LAB)
    if any(name.startswith("attention_net.") for name in state_dict):
        return _weights_of_authors(state_dict, _CLAM)
    return {
        name: value
        for name, value in state_dict.items()
        if name.split(".")[1:2] in (["attention"], ["embed"])
    }


def _weights_of_authors(
    state_dict: Mapping[str, Tensor], names: _AuthorsNames
) -> dict[str, Tensor]:
    """Weights of an author's network under our names; unknown weights keep their names."""
    weights = {}
    for name, value in state_dict.items():
        if not name.startswith(names.unused):
            own_name = re.sub(f"^{names.projection}", "embed.", name)
            for theirs, ours in _AUTHORS_LAYERS.items():
                pattern = f"^{names.attention}{theirs}"
                own_name = re.sub(pattern, f"attention.{ours}", own_name)
            weights[f"0.{own_name}"] = value
    return weights


def _states_of_members(state: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Weights of each member that has an attention, under names without the member's number."""
    states = []
    for member in range(len(state)):
        prefix = f"{member}."
        first_layer = state.get(f"{prefix}attention.V.weight")
        if first_layer is not None and first_layer.ndim == 2:
            own_names = [name for name in state if name.startswith(prefix)]
            states.append(
                {name.removeprefix(prefix): state[name] for name in own_names}
            )
    return states


def _read_expects(path: Path, *, tile_dim: int | None) -> Expects:
    """Tiles that a model was trained on, from the header of its file; other files state nothing."""
    errors = (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError)
    rule = "header of a model must state its training data"
    with (
        rewording(rule, path, *errors, error=WeightsError),
        safe_open(path, "pt") as file,
    ):
        header = (file.metadata() or {}).get(MODEL_KEY)
        inputs = json.loads(header)["inputs"] if header else {}
        stated: dict[str, object] = {"tile_dim": tile_dim}
        if inputs.get("encoder"):
            stated["tile_encoders"] = [inputs["encoder"]]
        for name in ("tile_px", "tile_mpp"):
            if name in inputs:
                stated[name] = inputs[name]
        return from_mapping(Expects, stated)
