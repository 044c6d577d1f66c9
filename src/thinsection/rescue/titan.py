"""Bounded-memory attention inside an already loaded Hugging Face TITAN (its remote code).

Inside the `with` block the model's modules have another `forward_features`, which makes grid
positions instead of the N x N bias, and another attention, which computes the bias in parts. Its
`encode_slide_from_patch_features` is wrapped as well: it first puts these two in place again, in
case another package has replaced them. So it does not matter who builds the bias, and how: the
published code, slide2vec or Mussel.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, overload
from weakref import WeakSet

import torch
from torch import Tensor

from thinsection.attention import alibi2d_attention, alibi_slopes
from thinsection.errors import NothingRescuedError, RescueError
from thinsection.rescue.loading import (
    RAISING,
    Conduct,
    check_attributes,
    check_equal,
    check_signature,
    loaded_models,
)
from thinsection.types import MIB

DEFAULT_BUDGET_BYTES = 256 * MIB  # buffers of the attention
_ENTRY = "encode_slide_from_patch_features"
# by package: attribute in which the package's wrapper of TITAN keeps the hub's model
_HUB_ATTRIBUTE = {
    "slide2vec": "_model",
    "mussel": "obj",
    "trident": "model",
    "lazyslide_models": "model",
}
_ENCODER_ATTRIBUTES = (
    "blocks",
    "forward_features",
    "masked_im_modeling",
    "norm",
    "norm_pre",
    "num_heads",
    "patch_embed",
    "_pos_embed",
    "pos_encode_type",
)
_ATTENTION_ATTRIBUTES = (
    "attn_drop_prob",
    "head_dim",
    "k_norm",
    "num_heads",
    "pos_encode",
    "proj",
    "proj_drop",
    "q_norm",
    "qkv",
)
# the float32 states of 15 tokens differ by 1e-6; with a wrong bias by 1e-1
_TOLERANCE_FP32 = 1e-4

Foreign = Any  # an object of the hub's remote code, or of a package that wraps it
Method = Callable[..., object]
ModelT = TypeVar("ModelT")


@overload
def titan(
    model: None = None, *, budget_bytes: int = ..., conduct: Conduct = ...
) -> AbstractContextManager[None]: ...
@overload
def titan(
    model: ModelT, *, budget_bytes: int = ..., conduct: Conduct = ...
) -> AbstractContextManager[ModelT]: ...
def titan(
    model: ModelT | None = None,
    *,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    conduct: Conduct = RAISING,
) -> AbstractContextManager[ModelT | None]:
    """The same model, its attention in O(N) memory until the `with` block ends; for inference.

    Only single slides (batch of one) take the new way; other calls go to the model's own code.

    Args:
        model: what `AutoModel.from_pretrained("MahmoodLab/TITAN", trust_remote_code=True)` gave,
            or the TitanSlideEncoder of slide2vec, Mussel, TRIDENT or LazySlide, which hold such a
            model. None = every TITAN that transformers loads within the block, whoever asks for it.
        budget_bytes: buffers of the attention.
        conduct: what is done with a loaded model that does not match, and where lines go.

    Memory: states, q, k and v of one transformer layer as in the model's own code (O(N)), its dense
    rows x columns x 768 grid of features, and budget_bytes; no N x N bias.
    Raises RescueError: the model's code is not of the form that this recognises, its weights are
    not finite, or its states differ from ours on a probe: nothing is changed then; or our attention
    was not called once within the block.
    """
    return _rescued(model, budget_bytes, conduct)


@contextmanager
def _rescued(
    model: ModelT | None, budget_bytes: int, conduct: Conduct
) -> Iterator[ModelT | None]:
    rescue = _Rescue(budget_bytes, conduct)
    try:
        if model is None:
            with loaded_models(rescue.take_titan):
                yield None
        else:
            package = type(model).__module__.partition(".")[0]
            # a wrapper of another package has the hub's model as an attribute; any other model is
            # taken as the hub's model itself
            rescue.put(getattr(model, _HUB_ATTRIBUTE.get(package, ""), model))
            yield model
    finally:
        rescue.take_back()
    rescue.check_was_used()


class _Rescue:
    """The models of one `with` block, and how often our attention ran in them."""

    def __init__(self, budget_bytes: int, conduct: Conduct) -> None:
        self._budget_bytes = budget_bytes
        self._conduct = conduct
        self._calls: list[int] = []
        self._loaded_names: list[str] = []
        # Weak, because a model holds its replacements: both are freed when the program drops the
        # model.
        self._placed: WeakSet[_Replacements] = WeakSet()

    def take_titan(self, model: Foreign) -> None:
        """Put our attention into a model that was loaded, if it is a TITAN."""
        self._loaded_names.append(type(model).__name__)
        is_titan = hasattr(model, _ENTRY) and hasattr(model, "vision_encoder")
        if is_titan and not any(placed.hub_model is model for placed in self._placed):
            # replacements and model refer to each other: free those of dropped models now
            gc.collect()
            try:
                self.put(model)
            except RescueError as error:
                self._conduct.refuse(error)

    def put(self, hub_model: Foreign) -> None:
        """Put our attention into this model; nothing is changed where it raises RescueError."""
        encoder = _recognised_encoder(hub_model)
        replacements = _Replacements(
            hub_model, encoder, self._calls, self._budget_bytes
        )
        num_calls = len(self._calls)
        own_states = _probe_states(encoder)
        replacements.put()
        try:
            check_equal(
                own_states,
                _probe_states(encoder),
                tolerance_fp32=_TOLERANCE_FP32,
                what="the model's states must equal those by 2-D ALiBi attention",
            )
        except BaseException:
            replacements.take_back()
            raise
        finally:
            # calls of the probe do not count
            del self._calls[num_calls:]
        self._placed.add(replacements)
        num_layers = len(encoder.blocks.modules_list)
        self._conduct.tell(
            f"rescued {type(hub_model).__name__}: {num_layers} attention layers"
        )

    def take_back(self) -> None:
        """Give all models their own methods again."""
        for replacements in list(self._placed):
            replacements.take_back()

    def check_was_used(self) -> None:
        """Raise RescueError where our attention was never called."""
        if self._calls:
            return
        searched = f"use {_ENTRY} of this model, one slide at a time"
        if not self._placed:
            names = ", ".join(sorted(set(self._loaded_names))) or "none"
            searched = (
                "looked for a TITAN among the models that transformers' from_pretrained loads in "
                f"this process, got {names}"
            )
        raise NothingRescuedError(
            "the attention of thinsection must be called during the command or block, got no "
            f"call, so nothing was rescued; {searched}"
        )


class _GridPositions(NamedTuple):
    """Grid position of each token; passed in place of the bias."""

    positions: Tensor


@dataclass(slots=True)
class _Replacement:
    """A method of ours on one object, above the one that was there."""

    owner: Foreign
    name: str
    method: Method
    # the object's own attribute of the name; None where its class has the method
    previous: Method | None = None

    def put(self) -> None:
        """Put ours on top, unless it is there."""
        current = self.owner.__dict__.get(self.name)
        if current is not self.method:
            self.previous = current
            self.owner.__dict__[self.name] = self.method

    def take_back(self) -> None:
        """Bring the previous method back; a method that another package put above stays."""
        if self.owner.__dict__.get(self.name) is not self.method:
            return
        if self.previous is None:
            del self.owner.__dict__[self.name]
        else:
            self.owner.__dict__[self.name] = self.previous


class _Replacements:
    """All methods of ours on the instances of one model."""

    def __init__(
        self, hub_model: Foreign, encoder: Foreign, calls: list[int], budget_bytes: int
    ) -> None:
        self.hub_model = hub_model
        entry = getattr(hub_model, _ENTRY)

        def encode(*args: object, **kwargs: object) -> object:
            # Mussel patches the model again whenever it returns its encode function, and would hide
            # our methods
            self.put()
            return entry(*args, **kwargs)

        self._all = [
            _Replacement(hub_model, _ENTRY, encode),
            _Replacement(encoder, "forward_features", _forward_features_of(encoder)),
        ]
        for block in encoder.blocks.modules_list:
            forward = _forward_of(block.attn, calls, budget_bytes)
            self._all.append(_Replacement(block.attn, "forward", forward))

    def put(self) -> None:
        for replacement in self._all:
            replacement.put()

    def take_back(self) -> None:
        for replacement in self._all:
            replacement.take_back()


def _recognised_encoder(hub_model: Foreign) -> Foreign:
    """Vision encoder of a model whose code has the expected form; else RescueError."""
    encoder: Foreign = getattr(hub_model, "vision_encoder", None)
    missing = [name for name in _ENCODER_ATTRIBUTES if not hasattr(encoder, name)]
    if not hasattr(hub_model, _ENTRY):
        missing.append(_ENTRY)
    if missing:
        raise RescueError(
            f"model must be a loaded TITAN, got a {type(hub_model).__name__} "
            f"without {', '.join(missing)}"
        )
    if encoder.pos_encode_type != "alibi":
        raise RescueError(
            f"pos_encode_type must be 'alibi', got {encoder.pos_encode_type!r}"
        )
    check_signature(
        encoder.forward_features, "x, coords, mask, bg_mask", "forward_features"
    )
    attentions = [block.attn for block in getattr(encoder.blocks, "modules_list", ())]
    if not attentions:
        raise RescueError("vision_encoder.blocks must contain modules_list, got none")
    for attention in attentions:
        check_attributes(attention, _ATTENTION_ATTRIBUTES, "attention")
        if attention.attn_drop_prob:
            raise RescueError(
                f"attn_drop_prob must be 0, got {attention.attn_drop_prob}; the attention of "
                "thinsection has no dropout"
            )
        check_signature(attention.forward, "x, attn_bias, bg_mask", "attention forward")
    if any("forward" in attention.__dict__ for attention in attentions):
        raise RescueError(
            "model must not be changed by another rescue, got one that is"
        )
    for name, weight in encoder.named_parameters():
        if not bool(weight.isfinite().all()):
            raise RescueError(f"weights must be finite, got NaN or infinity in {name}")
    return encoder


@torch.no_grad()
def _probe_states(encoder: Foreign) -> Tensor:
    """States of a grid of 3 x 5 tiles, one of them background, by the forward in place now."""
    weight = next(encoder.patch_embed.parameters())
    has_tissue = torch.ones(1, 3, 5, dtype=torch.bool)
    has_tissue[0, 1, 2] = False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, weight.shape[-1], 3, 5, generator=generator)
    x = (x * has_tissue[:, None]).to(weight.device, weight.dtype)
    states: Tensor = encoder.forward_features(x, bg_mask=has_tissue.to(weight.device))
    return states


def _forward_features_of(encoder: Foreign) -> Method:
    """The published steps for a single slide; the bias is not among them."""
    original = encoder.forward_features

    def forward_features(
        x: Tensor,
        coords: Tensor | None = None,
        mask: Tensor | None = None,
        bg_mask: Tensor | None = None,
    ) -> object:
        batch, _, w, h = x.shape
        if batch != 1 or encoder.masked_im_modeling:
            return original(x, coords=coords, mask=mask, bg_mask=bg_mask)
        tokens = encoder.patch_embed(x.flatten(2).transpose(1, 2))
        tokens = encoder.norm_pre(encoder._pos_embed(tokens, coords, w, h))
        has_tissue = x.new_ones(w, h)
        if bg_mask is not None:
            has_tissue = bg_mask.view(w, h).to(x.device)
        is_kept = torch.cat([has_tissue.new_ones(1), has_tissue.flatten()]).bool()
        positions = _GridPositions(has_tissue.nonzero())
        return encoder.norm(encoder.blocks(tokens[:, is_kept], positions, bg_mask))

    return forward_features


def _forward_of(attention: Foreign, calls: list[int], budget_bytes: int) -> Method:
    """Forward of an attention layer: ours for `_GridPositions`, the model's own for a bias."""
    original = attention.forward
    slopes = alibi_slopes(attention.num_heads)

    def forward(
        x: Tensor, attn_bias: _GridPositions | Tensor, bg_mask: Tensor | None = None
    ) -> object:
        if not isinstance(attn_bias, _GridPositions):
            return original(x, attn_bias, bg_mask)
        calls.append(1)
        batch, tokens, channels = x.shape
        shape = (batch, tokens, 3, attention.num_heads, attention.head_dim)
        q, k, v = attention.qkv(x).view(shape).permute(2, 0, 3, 1, 4)
        q = attention.q_norm(q).to(v.dtype)
        k = attention.k_norm(k).to(v.dtype)
        # Products are written into buffers. Under autocast they would have another dtype.
        with torch.autocast(x.device.type, enabled=False):
            out = alibi2d_attention(
                q, k, v, attn_bias.positions, slopes, budget_bytes=budget_bytes
            )
        merged = out.transpose(1, 2).reshape(batch, tokens, channels)
        return attention.proj_drop(attention.proj(merged))

    return forward
