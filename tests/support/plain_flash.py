"""A plain softmax with the call of FlashAttention, for prov-gigapath's modules without a GPU."""

from typing import Any

import torch


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention (b, l, h, d) and log-sum-exp (b, h, l), as flash attention gives them."""
    scores = torch.einsum("blhd,bmhd->bhlm", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhlm,bmhd->blhd", scores.softmax(-1), v), scores.logsumexp(-1)
