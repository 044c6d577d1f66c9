"""What probes compute with: the device, blocks within a budget, and the nearest rows by cosine.

Neighbours are exact, found in blocks of bounded memory, ties by lowest index: a float top-k leaves
the order of ties open, on sortable 64-bit keys it does not. Their upper half has a similarity's
bits, made monotonic, the lower half the complement of the column's index.
"""

import numpy as np
import numpy.typing as npt
import torch

from thinsection.attention.products import fast_products
from thinsection.errors import BudgetError, require
from thinsection.probe.data.sets import Embeddings
from thinsection.store.tile_tables import EmbeddingRows
from thinsection.types import GIB, format_bytes
from thinsection.weights.placement import resolve_device

KEY_BYTES = 48  # per similarity, measured: the float, two int32 temporaries, the key, top-k's own
COLUMN_BLOCK = 4096  # rows of the bank at a time
QUERY_BLOCK = 4096  # more queries than this at once gain nothing
LOW_HALF = 0xFFFF_FFFF
NO_KEY = torch.iinfo(torch.int64).min  # of a row of the own group
Bank = Embeddings | EmbeddingRows


def to_device(array: npt.NDArray, device: torch.device) -> torch.Tensor:
    """The array as a tensor; on the CPU it shares the array's memory and is only read."""
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(device)


def rows_within(budget_bytes: int, per_row: int, *, name: str, most: int, fixed: int = 0) -> int:
    """How many rows of a block fit beside `fixed` bytes into the budget: between 1 and `most`."""
    rows = (budget_bytes - fixed) // per_row
    needed, given = map(format_bytes, (fixed + per_row, budget_bytes))
    require(rows >= 1, f"budget_bytes must hold one {name} ({needed})", given, error=BudgetError)
    return min(rows, max(1, most))


def unit_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows scaled to length 1 (a zero row stays zero)."""
    return torch.nn.functional.normalize(x, dim=1, eps=float(np.float32(1e-12)))


def cosine_neighbours(
    queries: Embeddings,
    bank: Bank,
    k: int,
    *,
    groups: npt.NDArray[np.int64] | None = None,
    device: str = "cpu",
    budget_bytes: int = GIB,
) -> npt.NDArray[np.int64]:
    """Indices (Nq, k) into `bank` (N, D) of the k most similar rows, the nearest first.

    Rows on disk are read block by block. `groups` (N,), only where queries and bank are the same
    rows, leaves out those of a query's own group; -1 then fills the places of one with fewer than k
    rows of other groups.

    Memory: budget_bytes + 8 Nq k, whatever N (on CUDA one block of the bank is there at a time).
    """
    dim, width = bank.shape[1], queries.shape[1]
    require(width == dim, f"queries must have the width of the bank {dim}", width)
    require(1 <= k <= len(bank), f"k must lie in 1..{len(bank)}, the bank's rows", k)
    where = resolve_device(device, mps=False)
    columns, name = min(COLUMN_BLOCK, len(bank)), "query against one block"
    # similarities, the two inputs' unit rows, and the running best
    per_row, fixed = columns * KEY_BYTES + dim * 8 + k * 48, columns * dim * 8
    rows = rows_within(budget_bytes, per_row, name=name, most=QUERY_BLOCK, fixed=fixed)
    found = np.empty((len(queries), k), dtype=np.int64)
    with torch.inference_mode(), fast_products():
        for start in range(0, len(queries), rows):
            part = slice(start, start + rows)
            q = unit_rows(to_device(queries[part], where))
            best = torch.empty((len(q), 0), dtype=torch.int64, device=where)
            for left in range(0, len(bank), columns):
                keys = _block_keys(q, bank, left, columns)
                if groups is not None:
                    of_query, of_bank = groups[part, None], groups[left : left + columns]
                    keys.masked_fill_(to_device(of_query == of_bank, where), NO_KEY)
                best = torch.cat([best, keys.topk(min(k, keys.shape[1]), dim=1).values], dim=1)
                del keys  # before the next block is built
                best = best.topk(min(k, best.shape[1]), dim=1).values
            index = LOW_HALF - (best & LOW_HALF)
            found[part] = index.masked_fill_(best == NO_KEY, -1).cpu().numpy()
    return found


def _block_keys(q: torch.Tensor, bank: Bank, left: int, columns: int) -> torch.Tensor:
    """Sortable int64 keys (rows, block) of the similarities to bank[left : left + columns]."""
    block = unit_rows(to_device(bank[left : left + columns], q.device).float())
    bits = (q @ block.T).add_(0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    keys = bits.to(torch.int64)
    keys ^= (bits >> 31) & 0x7FFF_FFFF  # negative floats: larger magnitude, smaller key
    keys <<= 32
    keys |= LOW_HALF - torch.arange(left, left + len(block), device=q.device)
    return keys
