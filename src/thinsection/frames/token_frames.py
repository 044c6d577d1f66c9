"""Frames of tokens (three atoms each) as defined by AlphaFold 3, without N_atom² memory.

Of all pairwise distances, only the rows of atomised tokens' start atoms are needed, and in these
only atoms of the same chain can give a valid frame. So only these distances are computed.

Legend: T tokens, A atoms of one sample, t tokens whose neighbours are searched, `*` batch and
sample dimensions. Token features may lack dimensions of x, or have length 1 there.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from thinsection.config import nearest
from thinsection.errors import BudgetError, InvalidInputError
from thinsection.frames.features import (
    atom_chains,
    backbone_offsets,
    check_shapes,
    check_values,
    expand_features,
)
from thinsection.frames.neighbors import DEFAULT_BUDGET_BYTES, Impl, choose
from thinsection.frames.reference import NO_SELF, NeighborQuery, order_by_group

# smallest deviation from a straight line in degrees, as in AlphaFold 3
ANGLE_THRESHOLD = 25.0
Coordinates = tuple[Tensor, Tensor, Tensor]
FrameImpl = Literal["chain", "rows"]
# numbers per distance of a row: differences and squares (3 each), sum, mask, both masked
_NUMBERS_PER_PAIR = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameOptions:
    """Options of `token_frame_atoms`; they change frames only if distances are equal."""

    # 'chain' searches each atom's own chain, and ties go to the lower index. 'rows' computes whole
    # rows of distances for atomised tokens: ties and invalid frames are then as in the original
    impl: FrameImpl = "chain"
    search: Impl = "auto"  # search for 'chain', as in `nearest_neighbors`
    # first checks values (holes in token_mask, NaN), for which a GPU must synchronise
    check: bool = True
    budget_bytes: int = DEFAULT_BUDGET_BYTES  # limit for the memory of the search

    def __post_init__(self) -> None:
        names = get_args(FrameImpl)
        if self.impl not in names:
            raise InvalidInputError(
                f"impl must be one of {', '.join(names)}, "
                f"got {self.impl!r}{nearest(self.impl, names)}"
            )


class FrameAtoms(NamedTuple):
    """The frame of each token as atom indices."""

    indices: Tensor  # (3, *, T) int64: atoms a, b and c
    valid: Tensor  # (*, T) 0/1, in the dtype to which masks and features promote
    cos_angle: Tensor  # (*, T), of the angle at b between a and c


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

    Standard residues have N, CA, C, and nucleotides C3', C1', C4'. The frame of an atomised token
    is its atom b with the two nearest atoms a and c of the same chain; it is valid if the angle is
    far enough from a straight line. Frames and mask equal those of OpenFold3 0.5's
    `get_token_frame_atoms` to the bit if no two distances are equal. Gradients flow to x through
    the coordinates only.

    Args:
        batch: token features (*, T), or features that expand to the shape of token_mask:
            token_mask, num_atoms_per_token, asym_id, start_atom_index, is_protein, is_dna, is_rna,
            is_atomized and one-hot restype (*, T, 32); all 0 for padding.
        x: (*, N_atom, 3) positions, Å, float64, float32, bfloat16 or float16.
        atom_mask: (*, N_atom) 0/1, expanded to the dimensions of x; absent atoms may be NaN.
        angle_threshold: smallest deviation from a straight line in degrees, exclusive.
        eps: added to each squared difference, Å^2.
        inf: distance of atoms that are not neighbours, for 'rows'; larger than all other distances.
        options: options of the search; see `FrameOptions`.

    Returns:
        (a, b, c), each (*, N_token, 3), and the mask (*, N_token). Invalid frames are also made of
        atoms of x.

    Memory: about 9 * 8 bytes per token and sample beyond the result, 24 bytes per atom, and for the
        search of one sample 72 per atom in chains of atomised tokens, within
        `options.budget_bytes`.
    Raises StructureError: keys, shapes or dtypes do not fit; with `options.check` also values.

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
    """Frames of `token_frame_atoms` as atom indices, with the angle. Same Memory and Raises."""
    check_shapes(batch, x, atom_mask)
    features = expand_features(batch)
    if options.check:
        check_values(features, x, atom_mask)
    chains = atom_chains(features, x.shape[-2])
    is_atomized = features["is_atomized"]
    if options.impl == "chain":
        is_searched = (is_atomized * features["token_mask"]).bool()
        nearest_two = partial(
            nearest_in_chain,
            eps=eps,
            impl=options.search,
            budget_bytes=options.budget_bytes,
        )
    else:
        # the mask of tokens is applied later, as in the original
        is_searched = is_atomized.bool()
        nearest_two = partial(
            nearest_in_rows, eps=eps, inf=inf, budget_bytes=options.budget_bytes
        )
    atoms = Atoms(
        x=x,
        mask=atom_mask,
        chains=chains,
        start=features["start_atom_index"].long(),
        is_searched=is_searched,
    )
    ends, has_both = nearest_atoms(atoms, nearest_two)
    indices, is_usable = _frames(features, ends, atom_mask, chains)
    a, b, c = (_gather_positions(x, index) for index in indices)
    cos_angle = _cos_angle(a, b, c, eps=eps)
    # the angle must differ from 0 and 180 degrees by more than the threshold; for atomised tokens
    # only
    lowest = math.cos((180 - angle_threshold) * math.pi / 180)
    highest = math.cos(angle_threshold * math.pi / 180)
    is_wide = (cos_angle < highest) * (cos_angle > lowest)
    is_found = has_both | (is_atomized == 0)
    valid = (is_wide * is_atomized + (1 - is_atomized)) * is_usable * is_found
    return FrameAtoms(indices, valid, cos_angle)


def _frames(
    features: Mapping[str, Tensor], ends: Tensor, atom_mask: Tensor, chains: Tensor
) -> tuple[Tensor, Tensor]:
    """Atoms (3, *, T) by kind of token, and (*, T) 0/1: all exist, are present, in one chain."""
    is_atomized = features["is_atomized"]
    is_protein = features["is_protein"] * (1 - is_atomized)
    is_nucleotide = (features["is_dna"] + features["is_rna"]) * (1 - is_atomized)
    start = features["start_atom_index"].long()
    offsets, exists = backbone_offsets(features["restype"])
    lead = ends.shape[1:-1]
    num_atoms = chains.shape[-1]
    atom_mask = atom_mask.expand(*lead, num_atoms)
    chains = chains.expand(*lead, num_atoms)
    is_usable = features["token_mask"]
    indices: list[Tensor] = []
    for column, own_atom in enumerate((ends[0], start, ends[1])):
        protein_atom = start + offsets[..., column]
        nucleotide_atom = start + offsets[..., 3 + column]
        residue_atom = (
            protein_atom * is_protein.long() + nucleotide_atom * is_nucleotide.long()
        )
        index = own_atom * is_atomized.long() + residue_atom
        index = index.expand(ends.shape[1:]).clamp(0, num_atoms - 1)
        indices.append(index)
        has_atom = (
            is_atomized
            + exists[..., column] * is_protein
            + exists[..., 3 + column] * is_nucleotide
        )
        same_chain = chains.gather(-1, index) == chains.gather(-1, indices[0])
        is_usable = is_usable * has_atom * atom_mask.gather(-1, index) * same_chain
    return torch.stack(indices), is_usable


def _cos_angle(a: Tensor, b: Tensor, c: Tensor, *, eps: float) -> Tensor:
    """Cosine of the angle at b."""
    to_a = a - b
    to_c = c - b
    length_a = (eps + torch.sum(to_a**2, dim=-1)) ** 0.5
    length_c = (eps + torch.sum(to_c**2, dim=-1)) ** 0.5
    return torch.einsum("...i,...i->...", to_a, to_c) / (length_a * length_c)


def _gather_positions(x: Tensor, index: Tensor) -> Tensor:
    return torch.gather(x, -2, index[..., None].expand(*index.shape, 3))


class Atoms(NamedTuple):
    """Atoms (*, A) and tokens (*, T) of several structures; without `*` of a single structure."""

    x: Tensor  # (*, A, 3) positions
    mask: Tensor  # (*, A)
    chains: Tensor  # (*, A)
    start: Tensor  # (*, T) start atom of each token
    is_searched: Tensor  # (*, T) True if neighbours of the start atom are needed


# returns, for one structure, tokens (t,) and two neighbours (2, t) for each, or -1
NearestTwo = Callable[[Atoms], tuple[Tensor, Tensor]]


def nearest_atoms(atoms: Atoms, nearest_two: NearestTwo) -> tuple[Tensor, Tensor]:
    """The two atoms (2, *, T) nearest to each start atom, and (*, T) whether there are two.

    An atom that is missing is replaced by the start atom itself.
    """
    # expand every tensor to the leading dimensions of x
    lead = atoms.x.shape[:-2]
    features = [part.expand(*lead, part.shape[-1]) for part in atoms[1:]]
    atoms = Atoms(atoms.x, *features)
    ends = torch.stack((atoms.start, atoms.start))
    has_both = torch.zeros_like(atoms.is_searched)
    for index in product(*map(range, lead)):
        tokens, nearest = nearest_two(Atoms(*(part[index] for part in atoms)))
        has_both[index][tokens] = nearest[1] >= 0
        for end, atom in zip(ends, nearest, strict=True):
            end[index][tokens] = torch.where(atom < 0, end[index][tokens], atom)
    return ends, has_both


def nearest_in_chain(
    atoms: Atoms, *, eps: float, impl: Impl, budget_bytes: int
) -> tuple[Tensor, Tensor]:
    """The two nearest atoms in the same chain, for one structure; ties go to the lower index.

    Memory: 52 bytes per atom, and that of the search.
    """
    is_present = atoms.mask.bool()
    tokens = (atoms.is_searched & is_present[atoms.start]).nonzero()[:, 0]
    if not tokens.numel():
        return tokens, tokens.new_empty(2, 0)
    searched_chains, token_chain = torch.unique(
        atoms.chains[atoms.start[tokens]], return_inverse=True
    )
    place = torch.searchsorted(searched_chains, atoms.chains)
    place = place.clamp_(max=searched_chains.numel() - 1)
    in_searched_chain = searched_chains[place] == atoms.chains
    candidates = (in_searched_chain & is_present).nonzero()[:, 0]
    candidate_chain = place[candidates]
    candidate_order = order_by_group(candidate_chain)
    token_order = order_by_group(token_chain)
    candidates = candidates[candidate_order]
    tokens = tokens[token_order]
    query = NeighborQuery(
        points=atoms.x[candidates],
        point_group=candidate_chain[candidate_order],
        queries=atoms.x[atoms.start[tokens]],
        query_group=token_chain[token_order],
        # the search returns the start atom too; it is dropped below
        query_self=torch.full_like(tokens, NO_SELF),
    )
    choice = choose(query, 3, impl=impl, budget_bytes=budget_bytes)
    result = choice.search(query, 3, eps=eps, budget_bytes=budget_bytes)
    positions = result.positions[:, 1:].T
    nearest = candidates[positions.clamp(min=0)]
    return tokens, torch.where(positions < 0, -1, nearest)


def nearest_in_rows(
    atoms: Atoms, *, eps: float, inf: float, budget_bytes: int
) -> tuple[Tensor, Tensor]:
    """The two nearest atoms for one structure, by torch.topk over whole rows of distances.

    Ties are resolved by topk, as in the original. Masks and chains decide later which frames are
    valid.

    Memory: A * 10 numbers per row, within the budget.
    """
    x = atoms.x
    num_atoms = x.shape[0]
    tokens = atoms.is_searched.nonzero()[:, 0]
    if num_atoms < 3 or not tokens.numel():
        return tokens[:0], tokens.new_empty(2, 0)
    row_bytes = _NUMBERS_PER_PAIR * max(4, x.element_size()) * num_atoms
    if budget_bytes < row_bytes:
        raise BudgetError(
            f"budget_bytes must be >= {row_bytes} for impl 'rows', got {budget_bytes}"
        )
    nearest = []
    for start in torch.split(atoms.start[tokens], budget_bytes // row_bytes):
        same_chain = atoms.chains[start][:, None] == atoms.chains[None, :]
        allowed = atoms.mask[start][:, None] * atoms.mask[None, :] * same_chain
        squares = (x[start][:, None, :] - x[None, :, :]) ** 2
        distance = torch.sum(eps + squares, dim=-1) ** 0.5
        distance = distance * allowed + inf * (1 - allowed)
        first_three = torch.topk(distance, k=3, dim=-1, largest=False).indices
        nearest.append(first_three[:, 1:])
    return tokens, torch.cat(nearest).T
