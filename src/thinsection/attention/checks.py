"""Checks of the arguments of 2-D ALiBi attention, and its batch as items without padding.

Shapes: B batch, H heads, P prefix tokens, N grid tokens, T = P + N tokens, D channels of a head.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinsection.attention.reference import AttentionItem, math_dtype
from thinsection.errors import InvalidInputError

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MAX_EXTENT = 1 << 24  # cells are float32 in the fast paths: larger integers are inexact


class BatchItem(NamedTuple):
    """One item of a batch and where its tokens stood before the padding was taken out."""

    item: AttentionItem
    real_tokens: Tensor | None  # int64 indices; None where there was no padding


def checked_items(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cells: Tensor,
    slopes: Tensor,
    *,
    num_prefix_tokens: int = 1,
    scale: float | None = None,
    key_mask: Tensor | None = None,
) -> list[BatchItem]:
    """Items of the batch, without padding; arguments and errors as of `alibi2d_attention`."""
    check_qkv(q, k, v)
    batch, heads, tokens, dim = q.shape
    check_prefix(num_prefix_tokens, tokens)
    if scale is not None and not math.isfinite(scale):
        raise InvalidInputError(f"scale must be finite, got {scale}")
    num_cells = tokens - num_prefix_tokens
    counted_cells = _checked_cells(cells, (batch, num_cells, 2))
    grid = counted_cells.to(q.device, math_dtype(q))
    check_slopes_form(slopes, heads)
    slope_values: list[float] = slopes.double().tolist()
    if not all(math.isfinite(value) and value >= 0 for value in slope_values):
        raise InvalidInputError(f"slopes must be finite and >= 0, got {slope_values}")
    if key_mask is not None:
        _check_key_mask(key_mask, batch, tokens, num_prefix_tokens)
    items = []
    for index in range(batch):
        item = AttentionItem(
            q=q[index],
            k=k[index],
            v=v[index],
            cells=grid[index].T.contiguous(),
            slopes=tuple(slope_values),
            num_prefix_tokens=num_prefix_tokens,
            scale=dim**-0.5 if scale is None else scale,
        )
        if key_mask is None or bool(key_mask[index].all()):
            items.append(BatchItem(item, None))
        else:
            items.append(_without_padding(item, key_mask[index].to(q.device)))
    return items


def _without_padding(item: AttentionItem, is_real: Tensor) -> BatchItem:
    """The tokens of an item for which the mask [T] is True."""
    prefix = item.num_prefix_tokens
    real_tokens = is_real.nonzero()[:, 0]
    real_cells = real_tokens[prefix:] - prefix
    shortened = AttentionItem(
        q=item.q.index_select(1, real_tokens),
        k=item.k.index_select(1, real_tokens),
        v=item.v.index_select(1, real_tokens),
        cells=item.cells[:, real_cells].contiguous(),
        slopes=item.slopes,
        num_prefix_tokens=prefix,
        scale=item.scale,
    )
    return BatchItem(shortened, real_tokens)


def check_prefix(num_prefix_tokens: int, tokens: int) -> None:
    """Raise InvalidInputError where there are not so many tokens."""
    if not 0 <= num_prefix_tokens <= tokens:
        raise InvalidInputError(
            f"num_prefix_tokens must be in 0..{tokens}, got {num_prefix_tokens}"
        )


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise InvalidInputError where q, k and v are not alike, or of another form."""
    if q.ndim != 4 or 0 in q.shape:
        raise InvalidInputError(
            f"q must be of shape [B, H, T, D] with no size of 0, got {tuple(q.shape)}"
        )
    if q.dtype not in DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise InvalidInputError(f"q must have the dtype {allowed}, got {q.dtype}")
    for name, x in (("k", k), ("v", v)):
        if (x.shape, x.dtype, x.device) != (q.shape, q.dtype, q.device):
            raise InvalidInputError(
                f"{name} must have the shape, dtype and device of q, {_form(q)} on {q.device}, "
                f"got {_form(x)} on {x.device}"
            )


def cells_tensor(cells: object) -> Tensor:
    """Cells as a tensor; those of NumPy are copied.

    Raises InvalidInputError: cells are neither a tensor nor an array.
    """
    if isinstance(cells, Tensor):
        return cells
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "iu":
        return torch.from_numpy(cells.astype(np.int64, order="C"))
    kind = getattr(cells, "dtype", type(cells).__name__)
    raise InvalidInputError(
        f"cells must be a tensor or a NumPy array of integers, got {kind}"
    )


def _checked_cells(cells: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Cells as int64 [B, N, 2], counted from the least row and column of each item."""
    check_cells_form(cells, shape)
    counted = cells.long().expand(shape)
    if shape[1] == 0:
        return counted
    counted = counted - counted.amin(1, keepdim=True)
    extent = int(counted.max())
    if extent >= MAX_EXTENT:
        raise InvalidInputError(
            f"cells must span fewer than {MAX_EXTENT} rows and columns, got {extent}"
        )
    return counted


def check_cells_form(cells: Tensor, shape: tuple[int, int, int]) -> None:
    """Raise InvalidInputError where cells are not integers [N, 2] or [B, N, 2]."""
    is_integer = not (
        cells.is_floating_point() or cells.is_complex() or cells.dtype == torch.bool
    )
    if not is_integer or tuple(cells.shape) not in (shape[1:], shape):
        raise InvalidInputError(
            f"cells must be int of shape {shape[1:]} or {shape}, got {_form(cells)}"
        )


def check_slopes_form(slopes: Tensor, heads: int) -> None:
    """Raise InvalidInputError where slopes are not [H], or ask for a gradient."""
    if slopes.requires_grad:
        raise InvalidInputError(
            "slopes must not require a gradient, got one that does; no gradient is computed "
            "for slopes"
        )
    if tuple(slopes.shape) != (heads,):
        raise InvalidInputError(
            f"slopes must be of shape ({heads},), got {tuple(slopes.shape)}"
        )


def _check_key_mask(key_mask: Tensor, batch: int, tokens: int, prefix: int) -> None:
    if key_mask.dtype != torch.bool or tuple(key_mask.shape) != (batch, tokens):
        raise InvalidInputError(
            f"key_mask must be bool of shape ({batch}, {tokens}), got {_form(key_mask)}"
        )
    if not key_mask[:, :prefix].all():
        raise InvalidInputError("key_mask must be True for prefix tokens, got False")


def check_out(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise InvalidInputError where `out` is not like q, or writing it changes other input."""
    if (out.shape, out.dtype, out.device) != (q.shape, q.dtype, q.device):
        raise InvalidInputError(
            f"out must have the shape, dtype and device of q, got {_form(out)}"
        )
    for name, x in (("k", k), ("v", v)):
        if _share_memory(out, x):
            raise InvalidInputError(
                f"out must not share memory with {name}, got shared memory; omit out, or pass a "
                "copy"
            )
    is_q = out.data_ptr() == q.data_ptr() and out.stride() == q.stride()
    if not is_q and _share_memory(out, q):
        raise InvalidInputError(
            "out must be q itself or share no memory with it, got a part of q; omit out, or "
            "pass a copy"
        )


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """True where an element of one lies where one of the other does; reads no element."""
    one_places = np.asarray(_Addresses(one))
    other_places = np.asarray(_Addresses(other))
    return bool(np.shares_memory(one_places, other_places))


class _Addresses:
    """Addresses of a tensor's elements for NumPy, whatever the dtype or device; not to be read."""

    def __init__(self, x: Tensor) -> None:
        size = x.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "shape": tuple(x.shape),
            "strides": tuple(step * size for step in x.stride()),
            "data": (x.data_ptr(), True),
        }


def _form(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}"
