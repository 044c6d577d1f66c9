"""Bounded-memory attention inside an already loaded Hugging Face TITAN (its remote code).

For the time of a `with` block two things stand on the model's instances: a `get_alibi` that returns
the cells instead of the N x N bias, and an attention forward that computes the bias by blocks.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from thinsection.attention import alibi2d_attention, alibi_slopes
from thinsection.errors import RescueError
from thinsection.types import MIB

DEFAULT_BUDGET_BYTES = 256 * MIB  # block buffers of the attention
_ENCODER = ("blocks", "forward_features", "get_alibi", "norm", "num_heads", "pos_encode_type")
_ATTENTION = (
    *("attn_drop_prob", "head_dim", "k_norm", "num_heads", "pos_encode", "proj", "proj_drop"),
    *("q_norm", "qkv"),
)
_TOLERANCE = 1e-4  # float32 attention on 16 tokens differs by 1e-6; a wrong bias by 1e-1


@contextmanager
def titan(model: Any, *, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> Iterator[Any]:
    """The same model, its attention in O(N) memory until the block ends; for inference.

    Only single slides (batch of one) take the new way; other calls go to the model's own code.

    Args:
        model: what `AutoModel.from_pretrained("MahmoodLab/TITAN", trust_remote_code=True)` gave.
        budget_bytes: buffers of the attention.

    Memory: states, q, k and v of one block as the model's own code holds them (O(N)), its dense
    rows x columns x 768 grid of features, and budget_bytes; no N x N bias.

    Raises:
        RescueError: the model's code is not of the form that this recognises, or its attention
            gives other numbers than ours on a small probe. Nothing is changed then.
    """
    encoder = _recognise(model)
    attentions = [block.attn for block in encoder.blocks.modules_list]
    _probe(encoder, attentions[0], budget_bytes)
    ours = [(encoder, "get_alibi", _cells_instead(encoder.get_alibi))]
    ours += [(each, "forward", _forward_of(each, budget_bytes)) for each in attentions]
    try:
        for owner, name, function in ours:
            owner.__dict__[name] = function
        yield model
    finally:
        for owner, name, _ in ours:
            owner.__dict__.pop(name)  # the class's own method shows through again


@dataclass(frozen=True, slots=True)
class Cells:
    """Stands where the bias was; takes what the model's code does to it on the way."""

    cells: torch.Tensor

    def repeat(self, *sizes: int) -> "Cells":
        """Itself; the batch is one."""
        if sizes != (1, 1, 1, 1):
            raise RescueError(f"repeat of the bias must be (1, 1, 1, 1), got {sizes}")
        return self

    def type(self, dtype: torch.dtype) -> "Cells":
        """Itself: distances stay exact whatever the dtype of the features."""
        return self

    def to(self, device: torch.device) -> "Cells":
        """The cells on that device."""
        return Cells(self.cells.to(device))


def _recognise(model: Any) -> Any:
    """The vision encoder of a model whose code has the expected form."""
    encoder: Any = getattr(model, "vision_encoder", None)
    if missing := [name for name in _ENCODER if not hasattr(encoder, name)]:
        got = f"a {type(model).__name__} without {', '.join(missing)}"
        raise RescueError(f"model must be a loaded TITAN, got {got}")
    if encoder.pos_encode_type != "alibi":
        raise RescueError(f"pos_encode_type must be 'alibi', got {encoder.pos_encode_type!r}")
    _check_signature(encoder.get_alibi, "w, h, bg_mask", "get_alibi")
    attentions = [block.attn for block in getattr(encoder.blocks, "modules_list", ())]
    if not attentions:
        raise RescueError("vision_encoder.blocks must hold modules_list, got none")
    for attention in attentions:
        if absent := [name for name in _ATTENTION if not hasattr(attention, name)]:
            raise RescueError(f"attention must have {', '.join(absent)}, got {type(attention)}")
        if got := attention.attn_drop_prob:
            raise RescueError(f"attn_drop_prob must be 0, got {got}; ours has no dropout")
        _check_signature(attention.forward, "x, attn_bias, bg_mask", "attention forward")
    if any({"forward", "get_alibi"} & owner.__dict__.keys() for owner in (encoder, *attentions)):
        raise RescueError("model must not be changed by another rescue, got one in place")
    return encoder


def _check_signature(function: Callable[..., Any], wanted: str, name: str) -> None:
    if (got := ", ".join(inspect.signature(function).parameters)) != wanted:
        raise RescueError(f"{name} must take ({wanted}), got ({got})")


@torch.no_grad()
def _probe(encoder: Any, attention: Any, budget_bytes: int) -> None:
    """The model's own attention against ours on 3 x 5 cells, one of them background."""
    weight = attention.qkv.weight
    mask = torch.ones(1, 3, 5, dtype=torch.bool)
    mask[0, 1, 2] = False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 15, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    own = attention.forward(x, encoder.get_alibi(3, 5, mask).to(weight.device, weight.dtype), None)
    cells = Cells(mask[0].nonzero().to(weight.device))
    ours = _forward_of(attention, budget_bytes)(x, cells, None)
    scale, worst = float(own.abs().max()), float((own - ours).abs().max())
    tolerance = _TOLERANCE if weight.dtype == torch.float32 else 0.03
    if not worst <= tolerance * max(scale, 1e-6):
        got = f"a difference of {worst:.2g} at values of {scale:.2g}; it may be another revision"
        raise RescueError(f"the model's attention must equal 2-D ALiBi attention, got {got}")


def _cells_instead(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_alibi(w: int, h: int, bg_mask: torch.Tensor | None = None) -> Any:
        if bg_mask is None or bg_mask.shape[0] != 1:
            return original(w, h, bg_mask)
        return Cells(bg_mask[0].nonzero())

    return get_alibi


def _forward_of(attention: Any, budget_bytes: int) -> Callable[..., Any]:
    original, slopes = attention.forward, alibi_slopes(attention.num_heads)

    def forward(x: torch.Tensor, attn_bias: Any, bg_mask: torch.Tensor | None = None) -> Any:
        if not isinstance(attn_bias, Cells):
            return original(x, attn_bias, bg_mask)
        batch, tokens, channels = x.shape
        qkv = attention.qkv(x).view(batch, tokens, 3, attention.num_heads, attention.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = attention.q_norm(q), attention.k_norm(k)
        out = alibi2d_attention(q, k, v, attn_bias.cells, slopes, budget_bytes=budget_bytes)
        merged = out.transpose(1, 2).reshape(batch, tokens, channels)
        return attention.proj_drop(attention.proj(merged))

    return forward
