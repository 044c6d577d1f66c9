"""Prov-GigaPath's slide encoder without FlashAttention: our dilated attention in its modules.

The published code asserts FlashAttention, which needs a GPU and a compiler. Here each of its
`DilatedAttention` modules gets ours, in plain PyTorch, whichever package built it.

Shapes: B slides, L tokens (class token first), C channels.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from thinsection.attention.dilated import Branch, dilated_heads
from thinsection.errors import RescueError
from thinsection.rescue.loading import (
    RAISING,
    Conduct,
    FirstCall,
    Forward,
    check_attributes,
    check_equal,
    check_signature,
    replaced_entry,
    replaced_forward,
)
from thinsection.types import MIB

DEFAULT_BUDGET_BYTES = 64 * MIB  # block buffers of the attention
_MODULE = "DilatedAttention"
_ATTRIBUTES = (
    "args",
    "attention_ops",
    "inner_attn_ln",
    "k_proj",
    "num_heads",
    "out_proj",
    "q_proj",
    "v_proj",
    "xpos",
)
_PARAMETERS = (
    "query, key, value, incremental_state, key_padding_mask, attn_mask, rel_pos, "
    "is_first_step, is_causal"
)
_FLASH = "flash_attn_func"  # name in the module of their `attention_ops`
_CHECKED_TOKENS = 200
# segments are this much shorter in the check, so that it has several of them
_SHORTENING = 16
_TOLERANCE_FP32 = 1e-4

Foreign = Any  # an object of prov-gigapath or of a peer's package


@contextmanager
def gigapath(
    *, budget_bytes: int = DEFAULT_BUDGET_BYTES, conduct: Conduct = RAISING
) -> Iterator[None]:
    """Prov-GigaPath's dilated attention in O(L) memory, in every model called in the block.

    For inference, on a CPU or GPU, without FlashAttention; training goes to the authors' own code.
    TRIDENT's check for the package flash_attn passes within the block.

    Memory: budget_bytes, and three states of one layer beyond q, k and v.
    Raises RescueError: the module is not of the form that this recognises, or gives other numbers
    on the first tokens of its first call; or no such module was called within the block.
    """

    make_forward = partial(_forward_of, budget_bytes=budget_bytes, conduct=conduct)
    with _trident_without_flash(), replaced_forward(_MODULE, make_forward, conduct):
        yield


def _forward_of(
    attention: Foreign, calls: list[int], *, budget_bytes: int, conduct: Conduct
) -> Forward:
    """Forward of one attention module: ours in inference, else its own."""
    check_attributes(attention, _ATTRIBUTES, _MODULE)
    original = attention.forward
    check_signature(original, _PARAMETERS, f"{_MODULE}.forward")
    if attention.xpos is not None:
        raise RescueError("xpos_rel_pos must be False, got a module with xPos")
    first_call = FirstCall(conduct=conduct)

    def forward(
        query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        is_plain = query is key and key is value and not args
        # their FlashAttention takes no padding mask either
        others = {name for name, given in kwargs.items() if given is not None}
        is_plain = is_plain and others <= {"key_padding_mask"}
        is_plain = is_plain and not attention.training and not torch.is_grad_enabled()
        if not is_plain or not first_call.agrees(
            lambda: _check(attention, original, query)
        ):
            theirs: tuple[Tensor, None] = original(query, key, value, *args, **kwargs)
            return theirs
        calls.append(1)
        return _attend(attention, query, budget_bytes), None

    return forward


def _check(attention: Foreign, original: Forward, x: Tensor) -> None:
    """Compare ours with theirs on the first tokens, in shorter segments."""
    dtype = attention.out_proj.weight.dtype
    first = x[:1, :_CHECKED_TOKENS].to(dtype)
    lengths = [
        max(1, length // _SHORTENING) for length in attention.args.segment_length
    ]
    functions = attention.attention_ops.__func__.__globals__
    with (
        replaced_entry(vars(attention.args), "segment_length", lengths),
        replaced_entry(functions, _FLASH, _plain_attention),
        torch.autocast(x.device.type, enabled=False),
    ):
        theirs, _ = original(first, first, first)
        ours = _attend(attention, first, DEFAULT_BUDGET_BYTES)
    check_equal(
        theirs,
        ours,
        tolerance_fp32=_TOLERANCE_FP32,
        what="the model's dilated attention must equal ours",
    )


def _plain_attention(
    q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, Tensor]:
    """Attention (b, l, h, d) and log-sum-exp (b, h, l), as FlashAttention gives them."""
    scores = torch.einsum("blhd,bmhd->bhlm", q, k) * q.shape[-1] ** -0.5
    out = torch.einsum("bhlm,bmhd->blhd", scores.softmax(-1), v)
    return out, scores.logsumexp(-1)


def _attend(attention: Foreign, x: Tensor, budget_bytes: int) -> Tensor:
    """Output [B, L, C] of the module for inputs [B, L, C]."""
    branches = tuple(
        Branch(length=length, dilation=dilation)
        for length, dilation in zip(
            attention.args.segment_length, attention.args.dilated_ratio, strict=True
        )
    )
    num_heads = attention.num_heads
    # (B, H, L, D) each
    q, k, v = (
        project(x).unflatten(-1, (num_heads, -1)).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    outputs = []
    # blocks are multiplied into buffers, which autocast would give another dtype
    with torch.autocast(x.device.type, enabled=False):
        for slide in range(len(x)):
            out = dilated_heads(
                (q[slide], k[slide], v[slide]),
                branches,
                first_head=0,
                num_heads=num_heads,
                budget_bytes=budget_bytes,
            )
            outputs.append(out.transpose(0, 1).flatten(1).to(q.dtype))
    del q, k, v, out
    attended = torch.stack(outputs) if len(outputs) > 1 else outputs[0][None]
    outputs.clear()
    if attention.inner_attn_ln is not None:
        attended = attention.inner_attn_ln(attended)
    result: Tensor = attention.out_proj(attended)
    return result


@contextmanager
def _trident_without_flash() -> Iterator[None]:
    """TRIDENT builds its GigaPath without flash_attn, whose version it checks and does not use."""
    is_needed = (
        importlib.util.find_spec("trident") is not None
        and importlib.util.find_spec("flash_attn") is None
    )
    if not is_needed:
        yield
        return
    encoder = importlib.import_module("trident.slide_encoder_models.load")
    build = encoder.GigaPathSlideEncoder._build
    flash = ModuleType("flash_attn")
    flash.__version__ = "2.5.8"  # type: ignore[attr-defined]
    flash.__spec__ = ModuleSpec("flash_attn", None)

    def build_without_flash(*args: object, **kwargs: object) -> object:
        # only here: transformers takes any flash_attn that it finds for a working one
        with replaced_entry(sys.modules, "flash_attn", flash):
            return build(*args, **kwargs)

    encoder.GigaPathSlideEncoder._build = build_without_flash
    try:
        yield
    finally:
        encoder.GigaPathSlideEncoder._build = build
