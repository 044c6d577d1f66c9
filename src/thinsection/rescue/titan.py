"""Bounded-memory attention inside an already loaded Hugging Face TITAN (its remote code).

While a block runs the model's instances have a `forward_features` that makes cells instead of the
N x N bias, attention that computes the bias by blocks, and an entry that puts both on top again. So
it does not matter who builds the bias, and how: the published code, slide2vec or Mussel.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinsection.attention import alibi2d_attention, alibi_slopes
from thinsection.errors import RescueError, require
from thinsection.types import MIB

DEFAULT_BUDGET_BYTES = 256 * MIB  # block buffers of the attention
_ENTRY = "encode_slide_from_patch_features"
# where each peer's encoder keeps the hub's model, by its package
_PEERS = {"slide2vec": "_model", "mussel": "obj", "trident": "model"}
_ENCODER = (
    *(
        "blocks",
        "forward_features",
        "masked_im_modeling",
        "norm",
        "norm_pre",
        "num_heads",
    ),
    *("patch_embed", "_pos_embed", "pos_encode_type"),
)
_ATTENTION = (
    "attn_drop_prob head_dim k_norm num_heads pos_encode proj proj_drop q_norm qkv"
)
_TOLERANCE = (
    1e-4  # the float32 states of 15 tokens differ by 1e-6; with a wrong bias by 1e-1
)
_ABSENT = object()


@contextmanager
def titan(model: Any, *, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> Iterator[Any]:
    """The same model, its attention in O(N) memory until the block ends; for inference.

    Only single slides (batch of one) take the new way; other calls go to the model's own code.

    Args:
        model: what `AutoModel.from_pretrained("MahmoodLab/TITAN", trust_remote_code=True)` gave,
            or the TitanSlideEncoder of slide2vec, Mussel or TRIDENT, which hold such a model.
        budget_bytes: buffers of the attention.

    Memory: states, q, k and v of one block as the model's own code holds them (O(N)), its dense
    rows x columns x 768 grid of features, and budget_bytes; no N x N bias.
    Raises RescueError: the model's code is not of the form that this recognises, its weights are
    not finite, or its states differ from ours on a probe: nothing is changed then; or our attention
    was not called once within the block.
    """
    hub = getattr(
        model, _PEERS.get(type(model).__module__.partition(".")[0], ""), model
    )
    encoder = _recognise(hub)
    calls: list[int] = []
    ours = _Placed(hub, encoder, calls, budget_bytes)
    own = _states_of_probe(encoder)
    try:
        ours.put()
        _compare(own, _states_of_probe(encoder))
        calls.clear()
        yield model
    finally:
        ours.take_back()
    got = f"no call, so nothing was rescued; use {_ENTRY} of this model, one slide at a time"
    require(
        calls, "our attention must be called within the block", got, error=RescueError
    )


class _Cells(NamedTuple):
    """Stands where the bias was."""

    cells: Tensor


class _Placed:
    """Our methods on the model's instances, above what was found there."""

    def __init__(
        self, hub: Any, encoder: Any, calls: list[int], budget_bytes: int
    ) -> None:
        entry = getattr(hub, _ENTRY)

        def encode(*args: Any, **kwargs: Any) -> Any:
            self.put()  # Mussel puts its methods anew each time it hands out its function
            return entry(*args, **kwargs)

        attentions = [block.attn for block in encoder.blocks.modules_list]
        self._ours = [
            (hub, _ENTRY, encode),
            (encoder, "forward_features", _forward_features_of(encoder)),
            *(
                (each, "forward", _forward_of(each, calls, budget_bytes))
                for each in attentions
            ),
        ]
        self._found: dict[tuple[int, str], Any] = {}

    def put(self) -> None:
        for owner, name, function in self._ours:
            if (there := owner.__dict__.get(name, _ABSENT)) is not function:
                self._found[id(owner), name] = there
                owner.__dict__[name] = function

    def take_back(self) -> None:
        """What was found is there again; what a peer put above ours since stays."""
        for owner, name, function in self._ours:
            if owner.__dict__.get(name) is function:
                owner.__dict__[name] = self._found[id(owner), name]
                if owner.__dict__[name] is _ABSENT:
                    del owner.__dict__[
                        name
                    ]  # the class's own method shows through again


def _recognise(hub: Any) -> Any:
    """The vision encoder of a model whose code has the expected form."""
    encoder: Any = getattr(hub, "vision_encoder", None)
    missing = [name for name in _ENCODER if not hasattr(encoder, name)]
    if missing := missing + [_ENTRY] * (not hasattr(hub, _ENTRY)):
        got = f"a {type(hub).__name__} without {', '.join(missing)}"
        raise RescueError(f"model must be a loaded TITAN, got {got}")
    if encoder.pos_encode_type != "alibi":
        raise RescueError(
            f"pos_encode_type must be 'alibi', got {encoder.pos_encode_type!r}"
        )
    _check_signature(
        encoder.forward_features, "x, coords, mask, bg_mask", "forward_features"
    )
    attentions = [block.attn for block in getattr(encoder.blocks, "modules_list", ())]
    if not attentions:
        raise RescueError("vision_encoder.blocks must hold modules_list, got none")
    for attention in attentions:
        if absent := [
            name for name in _ATTENTION.split() if not hasattr(attention, name)
        ]:
            raise RescueError(
                f"attention must have {', '.join(absent)}, got {type(attention)}"
            )
        if got := attention.attn_drop_prob:
            raise RescueError(
                f"attn_drop_prob must be 0, got {got}; ours has no dropout"
            )
        _check_signature(
            attention.forward, "x, attn_bias, bg_mask", "attention forward"
        )
    if any("forward" in attention.__dict__ for attention in attentions):
        raise RescueError(
            "model must not be changed by another rescue, got one in place"
        )
    for name, weight in encoder.named_parameters():
        if not bool(weight.isfinite().all()):
            raise RescueError(f"weights must be finite, got NaN or infinity in {name}")
    return encoder


def _check_signature(function: Callable[..., Any], wanted: str, name: str) -> None:
    if (got := ", ".join(inspect.signature(function).parameters)) != wanted:
        raise RescueError(f"{name} must take ({wanted}), got ({got})")


@torch.no_grad()
def _states_of_probe(encoder: Any) -> Tensor:
    """States of 3 x 5 cells, one of them background, by the forward that stands there now."""
    weight = next(encoder.patch_embed.parameters())
    mask = torch.ones(1, 3, 5, dtype=torch.bool)
    mask[0, 1, 2] = False
    x = torch.randn(
        1, weight.shape[-1], 3, 5, generator=torch.Generator().manual_seed(0)
    )
    x = (x * mask[:, None]).to(weight.device, weight.dtype)
    states: Tensor = encoder.forward_features(x, bg_mask=mask.to(weight.device))
    return states


def _compare(own: Tensor, ours: Tensor) -> None:
    scale, worst = float(own.abs().max()), float((own - ours).abs().max())
    tolerance = _TOLERANCE if own.dtype == torch.float32 else 0.03
    got = f"a difference of {worst:.2g} at values of {scale:.2g}; it may be another revision"
    rule = "the model's states must equal those by 2-D ALiBi attention"
    require(worst <= tolerance * max(scale, 1e-6), rule, got, error=RescueError)


def _forward_features_of(encoder: Any) -> Callable[..., Any]:
    """The published steps for a single slide; the bias is not among them."""
    found = encoder.forward_features

    def forward_features(
        x: Any, coords: Any = None, mask: Any = None, bg_mask: Any = None
    ) -> Any:
        batch, _, w, h = x.shape
        if batch != 1 or encoder.masked_im_modeling:
            return found(x, coords=coords, mask=mask, bg_mask=bg_mask)
        tokens = encoder.patch_embed(x.flatten(2).transpose(1, 2))
        tokens = encoder.norm_pre(encoder._pos_embed(tokens, coords, w, h))
        shown = x.new_ones(w, h) if bg_mask is None else bg_mask.view(w, h).to(x.device)
        kept = torch.cat([shown.new_ones(1), shown.flatten()]).bool()
        return encoder.norm(
            encoder.blocks(tokens[:, kept], _Cells(shown.nonzero()), bg_mask)
        )

    return forward_features


def _forward_of(
    attention: Any, calls: list[int], budget_bytes: int
) -> Callable[..., Any]:
    original, slopes = attention.forward, alibi_slopes(attention.num_heads)

    def forward(x: Tensor, attn_bias: Any, bg_mask: Tensor | None = None) -> Any:
        if not isinstance(attn_bias, _Cells):
            return original(x, attn_bias, bg_mask)
        calls.append(1)
        batch, tokens, channels = x.shape
        qkv = attention.qkv(x).view(
            batch, tokens, 3, attention.num_heads, attention.head_dim
        )
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = attention.q_norm(q).to(v.dtype), attention.k_norm(k).to(v.dtype)
        with torch.autocast(
            x.device.type, enabled=False
        ):  # blocks are multiplied into buffers
            out = alibi2d_attention(
                q, k, v, attn_bias.cells, slopes, budget_bytes=budget_bytes
            )
        merged = out.transpose(1, 2).reshape(batch, tokens, channels)
        return attention.proj_drop(attention.proj(merged))

    return forward
