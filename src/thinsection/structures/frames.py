"""Frames of tokens (three atoms each) as AlphaFold 3 defines them, without N_atom^2.

Only the rows of the start atoms of atomised tokens are ever read of the all-pairs distances, and
only columns of their own chain can give a valid frame. So only those are formed.

Legend: T tokens, A atoms of one sample, `*` batch and sample dimensions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from thinsection.config import nearest
from thinsection.errors import BudgetError, InvalidInputError
from thinsection.neighbors.api import DEFAULT_BUDGET_BYTES, Impl, choose
from thinsection.neighbors.query import NO_SELF, NeighborQuery, order_by_group
from thinsection.structures.frame_batch import (
    atom_chains,
    backbone_offsets,
    check_shapes,
    check_values,
)

ANGLE_THRESHOLD = 25.0  # degrees from a line, AlphaFold 3's
Coordinates = tuple[Tensor, Tensor, Tensor]
_NUMBERS_PER_PAIR = 10  # differences, their squares (3 each), their sum, the mask, both masked


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
            got = f"{self.impl!r}{nearest(self.impl, known)}"
            raise InvalidInputError(f"impl must be one of {', '.join(known)}, got {got}")


class FrameAtoms(NamedTuple):
    """Frames by atom index (3, *, T) int64: a, b and c of each token; the cosine of a-b-c (*, T).

    `valid` (*, T) is 0/1, in the dtype to which masks and features promote.
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
        how = {"angle_threshold": angle_threshold, "eps": eps, "inf": inf}
        frames = frame_atoms(batch, x.detach(), atom_mask, **how, options=options)
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
    low, high = _cosine(180 - angle_threshold), _cosine(angle_threshold)
    wide = (cos_angle < high) * (cos_angle > low)
    valid = _valid(batch, atom_mask, chains, indices=indices, existence=existence, wide=wide)
    valid = valid * (pair.found | (batch["is_atomized"] == 0))
    return FrameAtoms(indices, valid, cos_angle)


class _Pair(NamedTuple):
    """Second and third entry of each start atom's row of distances, the start atom counted.

    (T,) each; the start atom itself where there is none; `found` says that both exist.
    """

    second: Tensor
    third: Tensor
    found: Tensor


class _Sample(NamedTuple):
    """Atoms (A, 3) of one structure, their mask and chains (A,); tokens' start atoms (T,).

    `wanted` (T,) tells the tokens whose start atoms are searched for.
    """

    x: Tensor
    mask: Tensor
    chains: Tensor
    start: Tensor
    wanted: Tensor


def _two_nearest(
    batch: Mapping[str, Tensor],
    x: Tensor,
    atom_mask: Tensor,
    chains: Tensor,
    *,
    eps: float,
    inf: float,
    options: FrameOptions,
) -> _Pair:
    """Second and third of each start atom's row, sample by sample; all (*, T)."""
    lead = x.shape[:-2]
    wanted, start = batch["is_atomized"] * batch["token_mask"], batch["start_atom_index"].long()
    columns = (atom_mask, chains, start, wanted.bool())
    whole = _Sample(x, *(column.expand(*lead, column.shape[-1]) for column in columns))
    pair = _Pair(whole.start.clone(), whole.start.clone(), torch.zeros_like(whole.wanted))
    for at in product(*map(range, lead)):
        sample, part = _Sample(*(v[at] for v in whole)), _Pair(*(v[at] for v in pair))
        if options.impl == "rows":
            _nearest_in_rows(sample, part, eps=eps, inf=inf, budget=options.budget_bytes)
        else:
            _nearest_in_chain(sample, part, eps=eps, options=options)
    return pair


def _nearest_in_chain(sample: _Sample, pair: _Pair, *, eps: float, options: FrameOptions) -> None:
    """Searches only chains with wanted tokens, only present atoms; ties to the lower atom.

    Memory: 52 bytes per present atom of those chains, plus the search's.
    """
    x, mask, chains, start, wanted = sample
    tokens = (wanted & mask[start].bool()).nonzero()[:, 0]
    if not tokens.numel():
        return
    ids, token_chain = torch.unique(chains[start[tokens]], return_inverse=True)
    place = torch.searchsorted(ids, chains).clamp_(max=ids.numel() - 1)
    atoms = ((ids[place] == chains) & mask.bool()).nonzero()[:, 0]
    atom_chain = place[atoms]
    order, token_order = order_by_group(atom_chain), order_by_group(token_chain)
    atoms, tokens = atoms[order], tokens[token_order]
    query = NeighborQuery(
        points=x[atoms],
        point_group=atom_chain[order],
        queries=x[start[tokens]],
        query_group=token_chain[token_order],
        query_self=torch.full_like(tokens, NO_SELF),  # the start atom counts as its own first
    )
    choice = choose(query, 3, impl=options.search, budget_bytes=options.budget_bytes)
    positions = choice.search(query, 3, eps=eps, budget_bytes=options.budget_bytes).positions
    complete = positions[:, 2] >= 0
    tokens, positions = tokens[complete], positions[complete]
    pair.second[tokens], pair.third[tokens] = atoms[positions[:, 1]], atoms[positions[:, 2]]
    pair.found[tokens] = True


def _nearest_in_rows(sample: _Sample, pair: _Pair, *, eps: float, inf: float, budget: int) -> None:
    """torch.topk over whole rows of all atoms, so that its choice among ties is the original's.

    Fewer than three atoms in all: nothing is found.

    Memory: A * 10 numbers per row, as many rows at a time as the budget holds.

    Raises:
        BudgetError: it does not hold one row.
    """
    x, mask, chains, start, wanted = sample
    tokens, num_atoms = wanted.nonzero()[:, 0], x.shape[0]
    if num_atoms < 3 or not tokens.numel():
        return
    need = _NUMBERS_PER_PAIR * max(4, x.element_size()) * num_atoms
    if budget < need:
        raise BudgetError(f"budget_bytes must be >= {need} for impl 'rows', got {budget}")
    for block in torch.split(tokens, budget // need):
        atom = start[block]
        allowed = mask[atom][:, None] * mask[None, :] * (chains[atom][:, None] == chains[None, :])
        distance = torch.sum(eps + (x[atom][:, None, :] - x[None, :, :]) ** 2, dim=-1) ** 0.5
        distance = distance * allowed + inf * (1 - allowed)
        _, nearest = torch.topk(distance, k=3, dim=-1, largest=False)
        pair.second[block], pair.third[block] = nearest[:, 1], nearest[:, 2]
        pair.found[block] = True  # masks and chains decide what is valid, as in the original


def _frame_indices(
    batch: Mapping[str, Tensor], x: Tensor, pair: _Pair
) -> tuple[Tensor, list[Tensor]]:
    """Atoms (3, *, T) by kind of token, 0 for padding, and each one's 0/1 existence (*, T)."""
    atomized = batch["is_atomized"]
    protein = batch["is_protein"] * (1 - atomized)
    nucleotide = (batch["is_dna"] + batch["is_rna"]) * (1 - atomized)
    start = batch["start_atom_index"].long()
    offsets, exists = backbone_offsets(batch["restype"])
    indices, existence = [], []
    for i, own in enumerate((pair.second, start, pair.third)):
        as_protein, as_nucleotide = start + offsets[..., i], start + offsets[..., 3 + i]
        kinds = as_protein * protein.long() + as_nucleotide * nucleotide.long()
        indices.append((own * atomized.long() + kinds).expand(pair.second.shape))
        existence.append(atomized + exists[..., i] * protein + exists[..., 3 + i] * nucleotide)
    return torch.stack(indices).clamp_(0, x.shape[-2] - 1), existence


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
    u_norm, v_norm = ((eps + torch.sum(w**2, dim=-1)) ** 0.5 for w in (u, v))
    return torch.einsum("...i,...i->...", u, v) / (u_norm * v_norm)


def _cosine(degrees: float) -> float:
    return math.cos(degrees * math.pi / 180)


def _gather_positions(x: Tensor, index: Tensor) -> Tensor:
    return torch.gather(x, -2, index[..., None].expand(*index.shape, 3))
