"""The input of a call, checked once and cut into the items of its batch, their padding taken out.

Shapes: B batch, H heads, P prefix tokens, N grid tokens, T = P + N tokens, D channels of a head.
"""

import math
from dataclasses import dataclass, field

import torch

from thinsection.errors import InvalidInputError

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MAX_EXTENT = 1 << 24  # cells are float32 in the fast paths: integers above are not exact


@dataclass(frozen=True, slots=True)
class AttentionItem:
    """One item of a batch, its padding taken out: what every implementation computes.

    q, k, v are [H, T, D] of any strides; cells [2, N], rows then columns, in the dtype of the
    arithmetic; `scale` is the factor of q . k.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cells: torch.Tensor
    slopes: tuple[float, ...]
    num_prefix_tokens: int
    scale: float = field(kw_only=True)

    @property
    def math_dtype(self) -> torch.dtype:
        """Of softmax and sums: float64 for float64 input, else float32."""
        return math_dtype(self.q)


Item = tuple[AttentionItem, torch.Tensor | None]  # and int64 indices of its real tokens; None: all


def checked_items(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cells: torch.Tensor,
    slopes: torch.Tensor,
    *,
    num_prefix_tokens: int = 1,
    scale: float | None = None,
    key_mask: torch.Tensor | None = None,
) -> list[Item]:
    """Each item of the batch, its padding taken out.

    Raises:
        InvalidInputError: naming the argument, the rule and what was got.
    """
    _check_qkv(q, k, v)
    (batch, heads, tokens, dim), prefix = q.shape, num_prefix_tokens
    if not 0 <= prefix <= tokens:
        raise InvalidInputError(f"num_prefix_tokens must be in 0..{tokens}, got {prefix}")
    if scale is not None and not math.isfinite(scale):
        raise InvalidInputError(f"scale must be finite, got {scale}")
    cells = _check_cells(cells, batch, tokens - prefix, q.device).to(math_dtype(q))
    steep = _check_slopes(slopes, heads)
    key_mask = _check_mask(key_mask, batch, tokens, prefix, q.device)
    scale = dim**-0.5 if scale is None else scale
    result: list[Item] = []
    for b in range(batch):
        (item_q, item_k, item_v), grid, valid = (x[b] for x in (q, k, v)), cells[b], None
        if key_mask is not None and not bool(key_mask[b].all()):
            valid = key_mask[b].nonzero()[:, 0]
            item_q, item_k, item_v = (x[b].index_select(1, valid) for x in (q, k, v))
            grid = grid[valid[prefix:] - prefix]
        item = AttentionItem(
            item_q, item_k, item_v, grid.T.contiguous(), steep, prefix, scale=scale
        )
        result.append((item, valid))
    return result


def math_dtype(x: torch.Tensor) -> torch.dtype:
    """In which softmax and sums are taken: float64 for float64 input, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if q.ndim != 4 or 0 in q.shape:
        raise InvalidInputError(f"q must be of shape [B, H, T, D], none 0, got {tuple(q.shape)}")
    if q.dtype not in DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise InvalidInputError(f"q must be one of {allowed}, got {q.dtype}")
    for name, x in (("k", k), ("v", v)):
        if x.shape != q.shape or x.dtype != q.dtype or x.device != q.device:
            wanted = f"{q.dtype} {tuple(q.shape)} on {q.device}"
            got = f"{x.dtype} {tuple(x.shape)} on {x.device}"
            raise InvalidInputError(f"{name} must be like q, {wanted}, got {got}")


def _check_cells(
    cells: torch.Tensor, batch: int, num_grid: int, device: torch.device
) -> torch.Tensor:
    integer = not cells.is_floating_point() and not cells.is_complex() and cells.dtype != torch.bool
    shapes = ((num_grid, 2), (batch, num_grid, 2))
    if not integer or tuple(cells.shape) not in shapes:
        wanted = f"int of shape ({num_grid}, 2) or ({batch}, {num_grid}, 2)"
        raise InvalidInputError(f"cells must be {wanted}, got {cells.dtype} {tuple(cells.shape)}")
    cells = cells.to(device=device, dtype=torch.int64).expand(batch, num_grid, 2)
    if num_grid:
        cells = cells - cells.amin(1, keepdim=True)
        if (extent := int(cells.max())) >= MAX_EXTENT:
            raise InvalidInputError(f"cells must span less than {MAX_EXTENT} cells, got {extent}")
    return cells


def _check_slopes(slopes: torch.Tensor, heads: int) -> tuple[float, ...]:
    if slopes.requires_grad:
        raise InvalidInputError("slopes must not require a gradient; none is computed for them")
    slopes = slopes.detach().to(device="cpu", dtype=torch.float64)
    if tuple(slopes.shape) != (heads,):
        raise InvalidInputError(f"slopes must be of shape ({heads},), got {tuple(slopes.shape)}")
    if not bool((slopes.isfinite() & (slopes >= 0)).all()):
        raise InvalidInputError(f"slopes must be finite and >= 0, got {slopes.tolist()}")
    return tuple(slopes.tolist())


def _check_mask(
    key_mask: torch.Tensor | None, batch: int, tokens: int, prefix: int, device: torch.device
) -> torch.Tensor | None:
    if key_mask is None:
        return None
    if key_mask.dtype != torch.bool or tuple(key_mask.shape) != (batch, tokens):
        got = f"{key_mask.dtype} {tuple(key_mask.shape)}"
        raise InvalidInputError(f"key_mask must be bool of shape ({batch}, {tokens}), got {got}")
    if not bool(key_mask[:, :prefix].all()):
        raise InvalidInputError("key_mask must be True for prefix tokens, got False")
    return key_mask.to(device)
