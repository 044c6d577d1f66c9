"""STAMP's vision transformer with ALiBi, without its N x N matrices of each head.

Its bias is subtracted after the softmax: the weights of a query are softmax(q . k) - c * distance,
and not a softmax again. So a block of queries needs all keys, but no other query, and the result is
the same. Distances are computed once for all heads, by differences; STAMP's `torch.cdist` forms
them for each head, from products, which loses digits where coordinates are large.

Shapes: B bags, N tokens (class token first), C channels; m queries of a block.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinsection.attention.blocks import blocks_of
from thinsection.attention.products import fast_products
from thinsection.rescue.loading import (
    RAISING,
    Conduct,
    FirstCall,
    Forward,
    check_attributes,
    check_equal,
    check_signature,
    replaced_forward,
)
from thinsection.types import MIB

DEFAULT_BUDGET_BYTES = 64 * MIB  # rows of distances and weights
_MODULE = "MultiHeadALiBi"
_ATTRIBUTES = ("attentions", "fc", "key_encoders", "query_encoders", "value_encoders")
_PARAMETERS = "q, k, v, coords_q, coords_k, attn_mask, alibi_mask"
# rows of distances, of weights, and of two intermediates of a softmax, in float32
_BYTES_PER_PAIR = 16
_CHECKED_TOKENS = 40
_TOLERANCE_FP32 = 1e-4

Foreign = Any  # an object of STAMP


@contextmanager
def stamp(
    *, budget_bytes: int = DEFAULT_BUDGET_BYTES, conduct: Conduct = RAISING
) -> Iterator[None]:
    """STAMP's ALiBi attention in O(N) memory, in every model called in the block; for inference.

    Training, and calls that need a gradient, go to STAMP's own code.

    Memory: budget_bytes and the states, q, k and v of one layer, O(N).
    Raises RescueError: the module is not of the form that this recognises, or gives other numbers
    on the first tokens of its first call; or no such module was called within the block.
    """

    make_forward = partial(_forward_of, budget_bytes=budget_bytes, conduct=conduct)
    with replaced_forward(_MODULE, make_forward, conduct):
        yield


def _forward_of(
    attention: Foreign, calls: list[int], *, budget_bytes: int, conduct: Conduct
) -> Forward:
    """Forward of one attention module: ours in inference, else its own."""
    check_attributes(attention, _ATTRIBUTES, _MODULE)
    original = attention.forward
    check_signature(original, _PARAMETERS, f"{_MODULE}.forward")
    first_call = FirstCall(conduct=conduct)

    def forward(**inputs: Any) -> Tensor:
        is_inference = not attention.training and not torch.is_grad_enabled()
        if not is_inference or not first_call.agrees(
            lambda: _check(attention, original, inputs)
        ):
            theirs: Tensor = original(**inputs)
            return theirs
        calls.append(1)
        return _attend(attention, budget_bytes, **inputs)

    return forward


def _check(attention: Foreign, original: Forward, inputs: dict[str, Any]) -> None:
    """Compare ours with theirs on the first tokens, without masks."""
    first: dict[str, Any] = {"attn_mask": None, "alibi_mask": None}
    for name in ("q", "k", "v", "coords_q", "coords_k"):
        first[name] = inputs[name][:, :_CHECKED_TOKENS]
    theirs = original(**first)
    ours = _attend(attention, DEFAULT_BUDGET_BYTES, **first)
    check_equal(
        theirs,
        ours,
        tolerance_fp32=_TOLERANCE_FP32,
        what="STAMP's attention must equal softmax weights less scaled distances",
    )


@fast_products()
def _attend(
    attention: Foreign,
    budget_bytes: int,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coords_q: Tensor,
    coords_k: Tensor,
    attn_mask: Tensor | None,
    alibi_mask: Tensor | None,
) -> Tensor:
    """Attention [B, N, C], by blocks of queries.

    A masked pair has the weight 0, and takes part in the softmax, as in STAMP.
    """
    batch, num_queries, _ = q.shape
    num_keys = k.shape[1]
    heads = [
        _Head(query_of(q), key_of(k), value_of(v), scaler)
        for query_of, key_of, value_of, scaler in zip(
            attention.query_encoders,
            attention.key_encoders,
            attention.value_encoders,
            attention.attentions,
            strict=True,
        )
    ]
    values = heads[0].v
    channels = sum(head.v.shape[-1] for head in heads)
    merged = values.new_empty(batch, num_queries, channels)
    rows_per_block = max(1, budget_bytes // (_BYTES_PER_PAIR * batch * num_keys))
    for rows in blocks_of(num_queries, rows_per_block):
        distances = torch.cdist(
            coords_q[:, rows],
            coords_k,
            compute_mode="donot_use_mm_for_euclid_dist",
        )
        if alibi_mask is not None:
            distances.masked_fill_(alibi_mask[:, rows], 0)
        start = 0
        for head in heads:
            weights = head.weights(rows, distances)
            if attn_mask is not None:
                weights.masked_fill_(attn_mask[:, rows], 0)
            stop = start + head.v.shape[-1]
            merged[:, rows, start:stop] = weights.to(head.v.dtype) @ head.v
            start = stop
    result: Tensor = attention.fc(merged)
    return result


class _Head:
    """Queries, keys and values [B, N, D] of one head, and the factor of its distances."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, scaler: Foreign) -> None:
        self.q = q * k.shape[-1] ** -0.5
        self.k = k
        self.v = v
        self.factor = float(scaler.bias_scale / scaler.scale_distance.running_mean)

    def weights(self, rows: slice, distances: Tensor) -> Tensor:
        """Weights [B, m, N] of a block of queries."""
        weights = torch.softmax(self.q[:, rows] @ self.k.transpose(1, 2), dim=-1)
        weights = weights.to(distances.dtype)
        return weights.sub_(distances, alpha=self.factor)
