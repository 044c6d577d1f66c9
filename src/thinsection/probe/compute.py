"""Computation of probes: the device, blocks within a budget, and the nearest rows.

Neighbours are exact, found in blocks of bounded memory, ties by lowest index: a float top-k leaves
the order of ties open, on sortable 64-bit keys it does not. Their upper half has a similarity's
bits, made monotonic, the lower half the complement of the column's index.
"""

import numpy as np
import numpy.typing as npt
import torch

from thinsection.attention.products import fast_products
from thinsection.errors import BudgetError, InvalidInputError
from thinsection.evaluation.embeddings import Embeddings
from thinsection.evaluation.metrics import IndexArray
from thinsection.probe.protocol import Similarity
from thinsection.store.tile_tables import EmbeddingRows
from thinsection.types import GIB, format_bytes
from thinsection.weights.placement import resolve_device

KEY_BYTES = 48  # per similarity, measured: the float, two int32 temporaries, the key, top-k's own
COLUMN_BLOCK = 4096  # rows of the bank at a time
QUERY_BLOCK = 4096  # more queries than this at once gain nothing
LOW_HALF = 0xFFFF_FFFF
NO_KEY = torch.iinfo(torch.int64).min  # of a row of the own group
Bank = Embeddings | EmbeddingRows


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array as a tensor; on the CPU it shares the array's memory and is only read."""
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(device)


def rows_within(
    budget_bytes: int, per_row: int, *, name: str, most: int, fixed: int = 0
) -> int:
    """Number of rows (1 to `most`) that fit into the budget beside `fixed` bytes."""
    rows = (budget_bytes - fixed) // per_row
    if rows < 1:
        raise BudgetError(
            f"budget_bytes must be >= {format_bytes(fixed + per_row)} for one {name}, got "
            f"{format_bytes(budget_bytes)}"
        )
    return min(rows, max(1, most))


def unit_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows scaled to length 1 (a zero row stays zero)."""
    return torch.nn.functional.normalize(x, dim=1, eps=float(np.float32(1e-12)))


def nearest_rows(
    queries: Embeddings,
    bank: Bank,
    k: int,
    *,
    similarity: Similarity = "cosine",
    groups: IndexArray | None = None,
    query_groups: IndexArray | None = None,
    device: str = "cpu",
    budget_bytes: int = GIB,
) -> IndexArray:
    """Indices (Nq, k) into `bank` (N, D) of the k most similar rows, the nearest first.

    Similarity 'cosine' compares unit rows in float32; 'l2' compares squared Euclidean
    distances, which are computed in float64 and ranked in float32.

    Rows on disk are read block by block. `groups` (N,) leaves out those of a query's own group; -1
    then fills the places of one with fewer than k rows of other groups. `query_groups` (Nq,) may be
    left out where queries and bank are the same rows.

    Memory: budget_bytes + 8 Nq k, whatever N (on CUDA one block of the bank is there at a time).
    """
    dim, width = bank.shape[1], queries.shape[1]
    if width != dim:
        raise InvalidInputError(
            f"queries must be as wide as the bank, {dim}, got {width}"
        )
    if not 1 <= k <= len(bank):
        raise InvalidInputError(
            f"k must be in 1..{len(bank)}, the number of rows in the bank, got {k}"
        )
    where = resolve_device(device, mps=False)
    columns = min(COLUMN_BLOCK, len(bank))
    # similarities, the two inputs' unit rows, and the running best
    wide = 2 if similarity == "l2" else 1  # float64 inputs and products
    per_row = columns * (KEY_BYTES + 16 * (wide - 1)) + dim * 8 * wide + k * 48
    rows = rows_within(
        budget_bytes,
        per_row,
        name="query against one block",
        most=QUERY_BLOCK,
        fixed=columns * dim * 8 * wide,
    )
    nearest = np.empty((len(queries), k), dtype=np.int64)
    with torch.inference_mode(), fast_products():
        for start in range(0, len(queries), rows):
            part = slice(start, start + rows)
            q = to_device(queries[part], where)
            best = torch.empty((len(q), 0), dtype=torch.int64, device=where)
            for left in range(0, len(bank), columns):
                block = slice(left, left + columns)
                if similarity == "l2":
                    scores = _closeness(q, to_device(bank[block], where))
                else:
                    rows_of_bank = to_device(bank[block], where).float()
                    scores = unit_rows(q) @ unit_rows(rows_of_bank).T
                    del rows_of_bank
                keys = _sortable_keys(scores, first_column=left)
                if groups is not None:
                    own = groups if query_groups is None else query_groups
                    same_group = own[part, None] == groups[block]
                    keys.masked_fill_(to_device(same_group, where), NO_KEY)
                best_of_block = keys.topk(min(k, keys.shape[1]), dim=1).values
                del scores, keys  # before the next block is built
                best = torch.cat([best, best_of_block], dim=1)
                best = best.topk(min(k, best.shape[1]), dim=1).values
            index = LOW_HALF - (best & LOW_HALF)
            nearest[part] = index.masked_fill_(best == NO_KEY, -1).cpu().numpy()
    return nearest


def _closeness(queries: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Minus the squared Euclidean distance (rows, block), summed in float64, as float32."""
    q = queries.double()
    b = block.double()
    squared = (q * q).sum(dim=1)[:, None] + (b * b).sum(dim=1)
    squared.addmm_(q, b.T, alpha=-2)
    return squared.clamp_(min=0).neg_().float()


def _sortable_keys(scores: torch.Tensor, *, first_column: int) -> torch.Tensor:
    """Int64 keys of the shape of `scores`: a larger key is a better score, ties by column."""
    bits = scores.add_(0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    keys = bits.to(torch.int64)
    keys ^= (bits >> 31) & 0x7FFF_FFFF  # negative floats: larger magnitude, smaller key
    keys <<= 32
    last_column = first_column + scores.shape[1]
    keys |= LOW_HALF - torch.arange(first_column, last_column, device=scores.device)
    return keys
