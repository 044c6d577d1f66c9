"""Frames of tokens (three atoms each) as AlphaFold 3 defines them, without N_atom^2.

Only the rows of the start atoms of atomised tokens are ever read of the all-pairs distances, and
only columns of their own chain can give a valid frame. So only those are formed.

Legend: T tokens, A atoms of one sample, `*` batch and sample dimensions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from thinsection.config import nearest
from thinsection.errors import BudgetError, require
from thinsection.neighbors.api import DEFAULT_BUDGET_BYTES, Impl, choose
from thinsection.neighbors.reference import NO_SELF, NeighborQuery, order_by_group
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
    """How `token_frame_atoms` works; none changes a frame where distances differ."""

    # 'chain' searches each atom's own chain, equal distances go to the lower index; 'rows' forms
    # the whole row of each atomised token's start atom, and torch.topk's choice among equal
    # distances and in invalid frames is that of the all-pairs original
    impl: Literal["chain", "rows"] = "chain"
    search: Impl = "auto"  # how 'chain' searches, as in `nearest_neighbors`
    # look at values first (holes in token_mask, NaN), which costs a GPU a synchronisation; without
    # it such input gives a wrong result or an error from below
    check: bool = True
    budget_bytes: int = DEFAULT_BUDGET_BYTES  # bound on the memory of the search

    def __post_init__(self) -> None:
        known, got = ("chain", "rows"), self.impl
        rule = f"impl must be one of {', '.join(known)}"
        require(got in known, rule, f"{got!r}{nearest(got, known)}")


class FrameAtoms(NamedTuple):
    """The frame of each token by atom index."""

    indices: Tensor  # (3, *, T) int64: atoms a, b and c
    valid: Tensor  # (*, T) 0/1, in the dtype to which masks and features promote
    cos_angle: Tensor  # (*, T), of a-b-c


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
        (a, b, c), each (*, N_token, 3), and the mask (*, N_token). Invalid frames are atoms of x
        too, so finite where x is.

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
    chains, atomized = atom_chains(batch, x.shape[-2]), batch["is_atomized"]
    ends, found = _two_nearest(batch, x, atom_mask, chains, eps=eps, inf=inf, options=options)
    indices, usable = _frames(batch, ends, atom_mask, chains)
    cos_angle = _cos_angle(*(_gather_positions(x, index) for index in indices), eps=eps)
    low, high = (math.cos(d * math.pi / 180) for d in (180 - angle_threshold, angle_threshold))
    wide = (cos_angle < high) * (cos_angle > low)  # of atomised tokens only
    valid = (wide * atomized + (1 - atomized)) * usable * (found | (atomized == 0))
    return FrameAtoms(indices, valid, cos_angle)


class _Sample(NamedTuple):
    """Atoms of one structure and the tokens whose start atoms are searched for."""

    x: Tensor  # (A, 3)
    mask: Tensor  # (A,), like chains
    chains: Tensor
    start: Tensor  # (T,) start atoms, like wanted
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
) -> tuple[Tensor, Tensor]:
    """Second and third (2, *, T) of each start atom's row of distances, the start atom counted.

    The start atom itself where there is none; and (*, T) whether both exist.
    """
    lead = x.shape[:-2]
    wanted = (batch["is_atomized"] * batch["token_mask"]).bool()
    columns = (atom_mask, chains, batch["start_atom_index"].long(), wanted)
    whole = _Sample(x, *(column.expand(*lead, column.shape[-1]) for column in columns))
    ends, found = torch.stack((whole.start, whole.start)), torch.zeros_like(whole.wanted)
    for at in product(*map(range, lead)):
        sample = _Sample(*(values[at] for values in whole))
        if options.impl == "rows":
            tokens, atoms = _nearest_in_rows(sample, eps, inf, options.budget_bytes)
        else:
            tokens, atoms = _nearest_in_chain(sample, eps, options)
        found[at][tokens] = True
        for end, atom in zip(ends, atoms, strict=True):
            end[at][tokens] = atom
    return ends, found


def _nearest_in_chain(sample: _Sample, eps: float, options: FrameOptions) -> tuple[Tensor, Tensor]:
    """Tokens (t,) that have two, and these atoms (2, t); ties go to the lower atom.

    Only chains with wanted tokens and only present atoms are searched.

    Memory: 52 bytes per present atom of those chains, plus the search's.
    """
    x, mask, chains, start, wanted = sample
    tokens = (wanted & mask[start].bool()).nonzero()[:, 0]
    if not tokens.numel():
        return tokens, tokens.new_empty(2, 0)
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
    return tokens[complete], atoms[positions[complete, 1:].T]


def _nearest_in_rows(
    sample: _Sample, eps: float, inf: float, budget_bytes: int
) -> tuple[Tensor, Tensor]:
    """As above, by torch.topk over whole rows, so that its choice among ties is the original's.

    Masks and chains decide later what is valid; fewer than three atoms in all: nothing is found.

    Memory: A * 10 numbers per row, as many rows at a time as the budget holds.

    Raises:
        BudgetError: it does not hold one row.
    """
    x, mask, chains, start, wanted = sample
    tokens, num_atoms = wanted.nonzero()[:, 0], x.shape[0]
    if num_atoms < 3 or not tokens.numel():
        return tokens[:0], tokens.new_empty(2, 0)
    need = _NUMBERS_PER_PAIR * max(4, x.element_size()) * num_atoms
    rule = f"budget_bytes must be >= {need} for impl 'rows'"
    require(budget_bytes >= need, rule, budget_bytes, error=BudgetError)
    ends = []
    for atom in torch.split(start[tokens], budget_bytes // need):
        allowed = mask[atom][:, None] * mask[None, :] * (chains[atom][:, None] == chains[None, :])
        distance = torch.sum(eps + (x[atom][:, None, :] - x[None, :, :]) ** 2, dim=-1) ** 0.5
        distance = distance * allowed + inf * (1 - allowed)
        ends.append(torch.topk(distance, k=3, dim=-1, largest=False).indices[:, 1:])
    return tokens, torch.cat(ends).T


def _frames(
    batch: Mapping[str, Tensor], ends: Tensor, atom_mask: Tensor, chains: Tensor
) -> tuple[Tensor, Tensor]:
    """Atoms (3, *, T) by kind of token, and (*, T) 0/1 whether all exist, present, in one chain."""
    atomized, usable = batch["is_atomized"], batch["token_mask"]
    protein = batch["is_protein"] * (1 - atomized)
    nucleotide = (batch["is_dna"] + batch["is_rna"]) * (1 - atomized)
    start = batch["start_atom_index"].long()
    offsets, exists = backbone_offsets(batch["restype"])
    lead, last = ends.shape[1:-1], chains.shape[-1] - 1
    masks, chains = (values.expand(*lead, last + 1) for values in (atom_mask, chains))
    indices: list[Tensor] = []
    for i, own in enumerate((ends[0], start, ends[1])):
        as_protein, as_nucleotide = start + offsets[..., i], start + offsets[..., 3 + i]
        of_kind = as_protein * protein.long() + as_nucleotide * nucleotide.long()
        index = (own * atomized.long() + of_kind).expand(ends.shape[1:]).clamp(0, last)
        indices.append(index)
        exist = atomized + exists[..., i] * protein + exists[..., 3 + i] * nucleotide
        one_chain = chains.gather(-1, index) == chains.gather(-1, indices[0])
        usable = usable * exist * masks.gather(-1, index) * one_chain
    return torch.stack(indices), usable


def _cos_angle(a: Tensor, b: Tensor, c: Tensor, *, eps: float) -> Tensor:
    u, v = a - b, c - b
    u_norm, v_norm = ((eps + torch.sum(w**2, dim=-1)) ** 0.5 for w in (u, v))
    return torch.einsum("...i,...i->...", u, v) / (u_norm * v_norm)


def _gather_positions(x: Tensor, index: Tensor) -> Tensor:
    return torch.gather(x, -2, index[..., None].expand(*index.shape, 3))
