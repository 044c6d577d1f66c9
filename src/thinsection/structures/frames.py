"""Frames of tokens (three atoms each) as AlphaFold 3 defines them, without N_atom^2.

Only the rows of the start atoms of atomised tokens are ever read of the all-pairs distances, and
only columns of their own chain can give a valid frame. So only those are formed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from thinsection.config import nearest
from thinsection.errors import InvalidInputError
from thinsection.neighbors.api import DEFAULT_BUDGET_BYTES, Impl
from thinsection.structures.frame_batch import (
    atom_chains,
    backbone_offsets,
    check_shapes,
    check_values,
)
from thinsection.structures.frame_search import AtomSample, Pair, nearest_in_chain, nearest_in_rows

ANGLE_THRESHOLD = 25.0  # degrees from a line, AlphaFold 3's
Coordinates = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameOptions:
    """How `token_frame_atoms` works; none changes a frame where distances differ.

    Attributes:
        impl: 'chain' searches each atom's own chain, equal distances go to the lower index;
            'rows' forms the whole row of each atomised token's start atom, and torch.topk's choice
            among equal distances and in invalid frames is that of the all-pairs original.
        search: implementation of the search of 'chain', as in `nearest_neighbors`.
        check: look at values first (holes in token_mask, NaN); costs a GPU a synchronisation.
            Without it such input gives a wrong result or an error from below.
        budget_bytes: bound on the memory of the search.
    """

    impl: Literal["chain", "rows"] = "chain"
    search: Impl = "auto"
    check: bool = True
    budget_bytes: int = DEFAULT_BUDGET_BYTES

    def __post_init__(self) -> None:
        known = get_args(Literal["chain", "rows"])
        if self.impl not in known:
            raise InvalidInputError(
                f"impl must be one of {', '.join(known)}, got {self.impl!r}"
                f"{nearest(self.impl, known)}"
            )


class FrameAtoms(NamedTuple):
    """Frames by atom index.

    Attributes:
        indices: (3, *, T) int64: a, b and c of each token.
        valid: (*, T) 0/1, in the dtype to which masks and features promote.
        cos_angle: (*, T) cosine of the angle a-b-c.
    """

    indices: Tensor
    valid: Tensor
    cos_angle: Tensor


def token_frame_atoms(  # noqa: PLR0917 - the signature of the function that it replaces
    batch: Mapping[str, Tensor],
    x: Tensor,
    atom_mask: Tensor,
    angle_threshold: float = ANGLE_THRESHOLD,
    eps: float = 1e-8,
    inf: float = 1e9,
    options: FrameOptions = FrameOptions(),
) -> tuple[Coordinates, Tensor]:
    """The three frame atoms of each token and whether they make a frame.

    Standard residues: N, CA, C; nucleotides: C3', C1', C4'; atomised tokens: their atom b between
    its two nearest atoms a and c of the same chain, valid if the angle is wide of a line. Frames
    and mask are those of OpenFold3 0.5's `get_token_frame_atoms` to the bit where no two distances
    are equal; gradients flow to x through the coordinates only.

    Args:
        batch: token features (*, T): token_mask, num_atoms_per_token, asym_id, start_atom_index,
            is_protein, is_dna, is_rna, is_atomized and one-hot restype (*, T, 32); all 0 for
            padding.
        x: (*, N_atom, 3) positions, Å, float32, float64 or bfloat16.
        atom_mask: (*, N_atom) 0/1, spread over the dimensions of x; absent atoms may be NaN.
        angle_threshold: degrees from a line, exclusive.
        eps: added to each squared difference, Å^2.
        inf: stands for 'not a neighbour' in 'rows'; no distance reaches it.
        options: how to search; see `FrameOptions`.

    Returns:
        (a, b, c), each (*, N_token, 3), and the mask (*, N_token). Invalid frames are
        atoms of x too, so finite where x is.

    Memory: about 9 * 8 bytes per token and sample beyond the result, 24 bytes per atom, and for the
        search of one sample 72 bytes per atom of the chains that hold atomised tokens, bounded by
        `options.budget_bytes`.

    Raises:
        StructureError: keys, shapes, dtypes; with `options.check` also values.

    Source: the contract of OpenFold3 0.5 (Apache-2.0); AlphaFold 3, supplement, section 4.3.2.
    """
    with torch.no_grad():
        frames = frame_atoms(
            batch,
            x.detach(),
            atom_mask,
            angle_threshold=angle_threshold,
            eps=eps,
            inf=inf,
            options=options,
        )
    a, b, c = (_gather_positions(x, index) for index in frames.indices)
    return (a, b, c), frames.valid


def frame_atoms(
    batch: Mapping[str, Tensor],
    x: Tensor,
    atom_mask: Tensor,
    *,
    angle_threshold: float = ANGLE_THRESHOLD,
    eps: float = 1e-8,
    inf: float = 1e9,
    options: FrameOptions = FrameOptions(),
) -> FrameAtoms:
    """As `token_frame_atoms`, by index and with the angle; for tables. Same Memory and Raises."""
    check_shapes(batch, x, atom_mask)
    if options.check:
        check_values(batch, x, atom_mask)
    chains = atom_chains(batch, x.shape[-2])
    pair = _two_nearest(batch, x, atom_mask, chains, eps=eps, inf=inf, options=options)
    indices, existence = _frame_indices(batch, x, pair)
    cos_angle = _cos_angle(*(_gather_positions(x, index) for index in indices), eps=eps)
    low = _cosine(180 - angle_threshold)
    wide = (cos_angle < _cosine(angle_threshold)) * (cos_angle > low)
    valid = _valid(batch, atom_mask, chains, indices=indices, existence=existence, wide=wide)
    valid = valid * (pair.found | (batch["is_atomized"] == 0))
    return FrameAtoms(indices, valid, cos_angle)


def _two_nearest(
    batch: Mapping[str, Tensor],
    x: Tensor,
    atom_mask: Tensor,
    chains: Tensor,
    *,
    eps: float,
    inf: float,
    options: FrameOptions,
) -> Pair:
    """Second and third of each start atom's row, sample by sample; all (*, T)."""
    lead, num_tokens = x.shape[:-2], batch["token_mask"].shape[-1]
    all_samples = AtomSample(
        x=x,
        mask=atom_mask.expand(*lead, x.shape[-2]),
        chains=chains.expand(*lead, x.shape[-2]),
        start=batch["start_atom_index"].long().expand(*lead, num_tokens),
        wanted=(batch["is_atomized"] * batch["token_mask"]).bool().expand(*lead, num_tokens),
    )
    result = all_samples.nothing()
    for at in product(*map(range, lead)):
        sample = AtomSample(*(values[at] for values in all_samples))
        if options.impl == "rows":
            found = nearest_in_rows(sample, eps=eps, inf=inf, budget=options.budget_bytes)
        else:
            found = nearest_in_chain(
                sample, eps=eps, impl=options.search, budget=options.budget_bytes
            )
        for whole, part in zip(result, found, strict=True):
            whole[at] = part
    return result


def _frame_indices(
    batch: Mapping[str, Tensor], x: Tensor, pair: Pair
) -> tuple[Tensor, list[Tensor]]:
    """Atoms (3, *, T) by kind of token, 0 for padding, and each one's 0/1 existence (*, T)."""
    atomized = batch["is_atomized"]
    protein = batch["is_protein"] * (1 - atomized)
    nucleotide = (batch["is_dna"] + batch["is_rna"]) * (1 - atomized)
    start = batch["start_atom_index"].long()
    offsets, exists = backbone_offsets(batch["restype"])
    own = (pair.second, start, pair.third)
    indices = torch.empty((3, *pair.second.shape), dtype=torch.int64, device=x.device)
    existence = []
    for i, nearest_atom in enumerate(own):
        indices[i] = (
            nearest_atom * atomized.long()
            + (start + offsets[..., i]) * protein.long()
            + (start + offsets[..., 3 + i]) * nucleotide.long()
        )
        existence.append(atomized + exists[..., i] * protein + exists[..., 3 + i] * nucleotide)
    return indices.clamp_(0, x.shape[-2] - 1), existence


def _valid(
    batch: Mapping[str, Tensor],
    atom_mask: Tensor,
    chains: Tensor,
    *,
    indices: Tensor,
    existence: list[Tensor],
    wide: Tensor,
) -> Tensor:
    """Product of the angle (atomised tokens only), the three masks and the equality of chains."""
    atomized, token_mask = batch["is_atomized"], batch["token_mask"]
    valid = (wide * atomized + (1 - atomized)) * token_mask
    lead = indices.shape[1:-1]
    masks = atom_mask.expand(*lead, atom_mask.shape[-1])
    chains = chains.expand(*lead, chains.shape[-1])
    first = chains.gather(-1, indices[0])
    for index, exists in zip(indices, existence, strict=True):
        present = masks.gather(-1, index) * token_mask * exists
        valid = valid * present * (chains.gather(-1, index) == first)
    return valid


def _cos_angle(a: Tensor, b: Tensor, c: Tensor, *, eps: float) -> Tensor:
    u, v = a - b, c - b
    dot = torch.einsum("...i,...i->...", u, v)
    u_norm = (eps + torch.sum(u**2, dim=-1)) ** 0.5
    v_norm = (eps + torch.sum(v**2, dim=-1)) ** 0.5
    return dot / (u_norm * v_norm)


def _cosine(degrees: float) -> float:
    return math.cos(degrees * math.pi / 180)


def _gather_positions(x: Tensor, index: Tensor) -> Tensor:
    return torch.gather(x, -2, index[..., None].expand(*index.shape, 3))
