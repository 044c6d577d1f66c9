"""The k smallest of each row, ties to the lower column. torch.topk leaves ties open."""

import torch
from torch import Tensor


def smallest_k(distances: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and columns (R, k) of the smallest entries of (R, C), ascending, lower column first.

    Columns of infinite values are arbitrary. Where C < k the rest is inf.

    Memory: a bool per entry and 16 bytes per entry that equals its row's k-th smallest.
    """
    num_columns = distances.shape[1]
    values, columns = torch.topk(distances, min(k + 1, num_columns), largest=False, sorted=True)
    tied = ((values[:, 1:] == values[:, :-1]) & values[:, 1:].isfinite()).any(dim=1)
    values, columns = values[:, :k], columns[:, :k]
    rows = tied.nonzero()[:, 0]
    if rows.numel():
        columns[rows] = _settled(distances[rows], values[rows], columns[rows])
    missing = k - columns.shape[1]
    if missing > 0:
        values = torch.nn.functional.pad(values, (0, missing), value=torch.inf)
        columns = torch.nn.functional.pad(columns, (0, missing), value=0)
    return values, columns


def merge(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], k: int
) -> tuple[Tensor, Tensor]:
    """The k best of two sorted lists (R, k) each; every index of `second` is above `first`'s."""
    values = torch.cat((first[0], second[0]), dim=1)
    indices = torch.cat((first[1], second[1]), dim=1)
    values, order = torch.sort(values, dim=1, stable=True)
    return values[:, :k], indices.gather(1, order[:, :k])


def _settled(distances: Tensor, values: Tensor, columns: Tensor) -> Tensor:
    """Columns (R, k) in order where values tie: the first of those that equal the k-th value."""
    num_rows, k = values.shape
    last = values[:, -1:]
    row, column = ((distances == last) & last.isfinite()).nonzero(as_tuple=True)
    counts = torch.bincount(row, minlength=num_rows)
    rank = torch.arange(row.numel(), device=row.device) - (counts.cumsum(0) - counts)[row]
    places = (values == last).sum(dim=1)[row]  # the last slots of a row hold its k-th value
    taken = rank < places
    columns[row[taken], (k - places + rank)[taken]] = column[taken]
    columns, order = columns.sort(dim=1)
    order = values.gather(1, order).sort(dim=1, stable=True).indices
    return columns.gather(1, order)
