"""The two nearest atoms of each atomised token's start atom, without N_atom².

Only the rows of the start atoms of atomised tokens are ever read of the all-pairs distances, and
only columns of their own chain can give a valid frame. So only those are formed.

Legend: T tokens, A atoms of one structure, t tokens that are searched for, `*` batch and sample
dimensions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from thinsection.errors import BudgetError
from thinsection.neighbors.api import Impl, choose
from thinsection.neighbors.reference import NO_SELF, NeighborQuery, order_by_group

# for each distance of a row: differences, squares (3 each), their sum, the mask, both masked
_NUMBERS_PER_PAIR = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Atoms:
    """Atoms and tokens of structures, (*, A) and (*, T); without `*` those of one."""

    x: Tensor  # (*, A, 3) positions
    mask: Tensor  # (*, A)
    chains: Tensor  # (*, A)
    start: Tensor  # (*, T) start atom of each token
    is_searched: Tensor  # (*, T) whether neighbours of the start atom are wanted

    def expanded(self) -> "Atoms":
        """The same with the leading dimensions of x in every tensor."""
        lead = self.x.shape[:-2]
        return Atoms(
            x=self.x,
            mask=self.mask.expand(*lead, self.mask.shape[-1]),
            chains=self.chains.expand(*lead, self.chains.shape[-1]),
            start=self.start.expand(*lead, self.start.shape[-1]),
            is_searched=self.is_searched.expand(*lead, self.is_searched.shape[-1]),
        )

    def sample(self, index: tuple[int, ...]) -> "Atoms":
        """One structure of expanded ones."""
        return Atoms(
            x=self.x[index],
            mask=self.mask[index],
            chains=self.chains[index],
            start=self.start[index],
            is_searched=self.is_searched[index],
        )


# gives, for one structure, tokens (t,) and their two atoms (2, t) or -1
NearestTwo = Callable[[Atoms], tuple[Tensor, Tensor]]


def nearest_atoms(atoms: Atoms, nearest_two: NearestTwo) -> tuple[Tensor, Tensor]:
    """Second and third atoms (2, *, T) in each start atom's row of distances; it is its own first.

    The start atom itself stands where there is none. And (*, T) whether both exist.
    """
    atoms = atoms.expanded()
    ends = torch.stack((atoms.start, atoms.start))
    has_both = torch.zeros_like(atoms.is_searched)
    for index in product(*map(range, atoms.x.shape[:-2])):
        tokens, nearest = nearest_two(atoms.sample(index))
        has_both[index][tokens] = nearest[1] >= 0
        for end, atom in zip(ends, nearest, strict=True):
            end[index][tokens] = torch.where(atom < 0, end[index][tokens], atom)
    return ends, has_both


def nearest_in_chain(
    atoms: Atoms, *, eps: float, impl: Impl, budget_bytes: int
) -> tuple[Tensor, Tensor]:
    """Nearest two of one structure, among the atoms of the chain; ties go to the lower index.

    Memory: 52 bytes an atom, and the search's.
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
        # the start atom counts as its own first
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
    """Nearest two of one structure, by torch.topk over whole rows.

    Ties go as in the original, which takes topk too. Masks and chains decide later what is valid.

    Memory: A * 10 numbers a row, in the budget.
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
