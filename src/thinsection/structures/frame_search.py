"""The two nearest atoms of atomised tokens' start atoms in one sample: by chain, or by whole rows.

Legend: T tokens, A atoms of one sample.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from thinsection.errors import BudgetError
from thinsection.neighbors.api import choose
from thinsection.neighbors.query import NO_SELF, NeighborQuery, order_by_group

_NUMBERS_PER_PAIR = 10  # differences, their squares (3 each), their sum, the mask, both masked


class Pair(NamedTuple):
    """Second and third entry of each start atom's row of distances, the start atom counted.

    Attributes:
        second, third: (T,) int64 atoms; the start atom itself where there is none.
        found: (T,) bool: both exist.
    """

    second: Tensor
    third: Tensor
    found: Tensor


class AtomSample(NamedTuple):
    """One structure's atoms and tokens.

    Attributes:
        x: (A, 3). mask, chains: (A,).
        start: (T,) atoms.
        wanted: (T,) bool, the tokens whose start atoms are searched for.
    """

    x: Tensor
    mask: Tensor
    chains: Tensor
    start: Tensor
    wanted: Tensor

    def nothing(self) -> Pair:
        """No neighbour for any token yet."""
        return Pair(self.start.clone(), self.start.clone(), torch.zeros_like(self.wanted))


def nearest_in_chain(sample: AtomSample, *, eps: float, impl: str, budget: int) -> Pair:
    """Searches only chains with wanted tokens, only present atoms; ties to the lower atom.

    Args:
        sample: where to search.
        eps: added to each squared difference.
        impl: of the search; 'auto' decides by size.
        budget: bytes of the search.

    Memory: 52 bytes per present atom of those chains, plus the search's.
    """
    x, mask, chains, start, wanted = sample
    tokens = (wanted & mask[start].bool()).nonzero()[:, 0]
    pair = sample.nothing()
    if not tokens.numel():
        return pair
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
    choice = choose(query, 3, impl=impl, budget_bytes=budget)
    positions = choice.search(query, 3, eps=eps, budget_bytes=budget).positions
    complete = positions[:, 2] >= 0
    tokens, positions = tokens[complete], positions[complete]
    pair.second[tokens] = atoms[positions[:, 1]]
    pair.third[tokens] = atoms[positions[:, 2]]
    pair.found[tokens] = True
    return pair


def nearest_in_rows(sample: AtomSample, *, eps: float, inf: float, budget: int) -> Pair:
    """torch.topk over whole rows of all atoms, so that its choice among ties is the original's.

    Fewer than three atoms in all: nothing is found.

    Memory: A * 10 numbers per row, as many rows at a time as the budget holds.

    Raises:
        BudgetError: it does not hold one row.
    """
    x, mask, chains, start, wanted = sample
    tokens, pair = wanted.nonzero()[:, 0], sample.nothing()
    num_atoms = x.shape[0]
    if num_atoms < 3 or not tokens.numel():
        return pair
    need = _NUMBERS_PER_PAIR * max(4, x.element_size()) * num_atoms
    rows = budget // need
    if rows < 1:
        raise BudgetError(f"budget_bytes must be >= {need} for impl 'rows', got {budget}")
    for block in torch.split(tokens, rows):
        atom = start[block]
        allowed = mask[atom][:, None] * mask[None, :] * (chains[atom][:, None] == chains[None, :])
        distance = torch.sum(eps + (x[atom][:, None, :] - x[None, :, :]) ** 2, dim=-1) ** 0.5
        distance = distance * allowed + inf * (1 - allowed)
        _, nearest = torch.topk(distance, k=3, dim=-1, largest=False)
        pair.second[block], pair.third[block] = nearest[:, 1], nearest[:, 2]
        pair.found[block] = True  # masks and chains decide what is valid, as in the original
    return pair
