"""2-D ALiBi attention that PyTorch can trace: PyTorch's FlexAttention.

torch.compile, torch.export and the transforms of torch.func see the operations of a call, and not
the values of its tensors. So values are not checked here, and nothing depends on them.

Shapes: B batch, H heads, P prefix tokens, N grid tokens, T = P + N tokens, D channels of a head.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.nn import functional as F

from thinsection.attention.reference import AttentionItem, math_dtype
from thinsection.errors import MissingDependencyError

Arguments = ParamSpec("Arguments")
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def is_compiling() -> bool:
    """True while PyTorch's compiler traces."""
    return _compiler_answers("is_compiling")


def is_transformed() -> bool:
    """True within a transform of torch.func (vmap, grad, jacrev); not under torch.compile."""
    is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
    return not is_compiling() and is_active()


def is_exporting() -> bool:
    """True within torch.export, which cannot leave a call out of its graph."""
    return _compiler_answers("is_exporting")


def _compiler_answers(question: str) -> bool:
    """Answer of a function of torch.compiler; False where this PyTorch is older than it."""
    compiler = getattr(torch, "compiler", None)
    ask: Callable[[], bool] | None = getattr(compiler, question, None)
    return ask is not None and ask()


def call(
    function: Callable[Arguments, Tensor],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Tensor:
    """Calls a function; `untraced.call_untraced` does so outside a compiled graph."""
    return function(*args, **kwargs)


def attend_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cells: Tensor,
    slopes: Tensor,
    *,
    num_prefix_tokens: int,
    scale: float,
) -> Tensor:
    """Attention [B, H, T, D] by PyTorch's FlexAttention, for cells [B, 2, N] and slopes [H].

    Memory: one float per row and head where it is compiled; 2 H T² elements where it is not.
    """
    dtype = math_dtype(q)
    padded = F.pad(cells.to(q.device, dtype), (num_prefix_tokens, 0))
    score_mod = alibi_score_mod(padded, slopes.to(q.device, dtype), num_prefix_tokens)
    attend = _flex_attention()
    if q.device.type == "cuda" and not is_compiling():
        attend = _compiled_flex_attention()
    out: Tensor = attend(q, k, v, score_mod=score_mod, scale=scale)
    return out


def alibi_score_mod(cells: Tensor, slopes: Tensor, num_prefix_tokens: int) -> ScoreMod:
    """FlexAttention's `score_mod` for cells [B, 2, T], those of prefix tokens in front."""

    def score_mod(
        score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor
    ) -> Tensor:
        row_step = cells[batch, 0, query] - cells[batch, 0, key]
        column_step = cells[batch, 1, query] - cells[batch, 1, key]
        distance = torch.sqrt(row_step * row_step + column_step * column_step)
        on_grid = (query >= num_prefix_tokens) & (key >= num_prefix_tokens)
        return score - slopes[head] * torch.where(on_grid, distance, 0.0)

    return score_mod


def attend_item_flex(item: AttentionItem, out: Tensor | None = None) -> Tensor:
    """Attention [H, T, D] of one item by FlexAttention, with its gradient to q, k and v."""
    result = attend_flex(
        item.q[None],
        item.k[None],
        item.v[None],
        item.cells[None],
        torch.tensor(item.slopes, dtype=item.math_dtype, device=item.q.device),
        num_prefix_tokens=item.num_prefix_tokens,
        scale=item.scale,
    )[0]
    return result if out is None else out.copy_(result)


def _flex_attention() -> Callable[..., Any]:
    try:
        from torch.nn.attention.flex_attention import flex_attention
    except ImportError:
        raise MissingDependencyError(
            "attention 'flex' must have PyTorch 2.5 or newer, got "
            f"{torch.__version__}; use 'chunked'"
        ) from None
    return flex_attention


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    """FlexAttention compiled once for slides of all sizes; not compiled it has T x T matrices."""
    return torch.compile(_flex_attention(), dynamic=True)
