"""Each peer's own encoder gives the same with the rescue, without a bias, and is left as found."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.rescue.peers import Trident, mussel_encoder, slide2vec_encoder
from tests.rescue.stand_in import Titan
from tests.rescue.test_titan import model, slide

from thinsection import rescue
from thinsection.errors import RescueError

Encode = Callable[[], torch.Tensor]
# the states are layer-normed, so of size 1; Mussel runs under float16 autocast, bias included
TOLERANCE = {"mussel": 2e-2}
PEERS = (
    "hub",
    "slide2vec",
    "slide2vec in rows",
    "mussel",
    "mussel unpatched",
    "trident",
)


def peer(name: str, monkeypatch: pytest.MonkeyPatch, hub: Titan) -> tuple[Any, Encode]:
    """What a user of the peer holds, and a call of it."""
    tiles, coords, size = slide()
    if name == "hub":
        return hub, lambda: hub.encode_slide_from_patch_features(tiles, coords, size)
    if name == "trident":
        batch = {"features": tiles, "coords": coords}
        encoder: Any = Trident(hub)
        return encoder, lambda: encoder.forward(
            {**batch, "attributes": {"patch_size_level0": size}}
        )
    if name.startswith("slide2vec"):
        encoder = slide2vec_encoder(monkeypatch, hub)
        if name.endswith("rows"):
            module = sys.modules[type(encoder).__module__]
            monkeypatch.setattr(module, "_full_bias_fits", lambda *_: False)
        return encoder, lambda: encoder.encode_slide(
            tiles[0], coords[0], tile_size_lv0=size
        )
    encoder = mussel_encoder(monkeypatch, hub, patch_oom=name == "mussel")
    function = encoder.get_model_fun()
    return encoder, lambda: function(tiles, coords, size)


def placed(hub: Titan) -> list[tuple[str, dict[str, Any]]]:
    """All that stands on the model's instances, methods by identity."""
    return [(name, dict(m.__dict__)) for name, m in hub.named_modules()]


@torch.inference_mode()
@pytest.mark.parametrize("name", PEERS)
def test_the_peers_own_call_gives_the_same_without_any_bias_and_all_is_as_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = model()
    encoder, encode = peer(name, monkeypatch, hub)
    found, wanted = placed(hub), encode()
    with rescue.titan(encoder) as rescued, monkeypatch.context() as watched:
        assert rescued is encoder
        forbid_bias(watched)
        got = encode()
    assert_as_found(hub, found)
    assert got.shape == wanted.shape
    worst = TOLERANCE["mussel"] if name.startswith("mussel") else 2e-6
    torch.testing.assert_close(got.float(), wanted.float(), rtol=0, atol=worst)
    torch.testing.assert_close(encode(), wanted, rtol=0, atol=0)


def forbid_bias(watched: pytest.MonkeyPatch) -> None:
    """No dense attention within: scores with a bias come by SDPA in the stand-in and all peers."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the dense attention was called")

    watched.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)


def assert_as_found(hub: Titan, found: list[tuple[str, dict[str, Any]]]) -> None:
    for (name, now), (_, before) in zip(placed(hub), found, strict=True):
        assert list(now) == list(before), name
        assert all(now[key] is before[key] for key in now if callable(now[key])), name


@torch.inference_mode()
def test_mussels_function_may_be_asked_for_within_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = model()
    encoder = mussel_encoder(monkeypatch, hub, patch_oom=True)
    with rescue.titan(encoder), monkeypatch.context() as watched:
        forbid_bias(watched)
        function = encoder.get_model_fun()  # puts Mussel's own methods above ours
        got = function(*slide())
    assert (
        hub.vision_encoder.forward_features.__name__
        == "_titan_forward_features_efficient"
    )
    torch.testing.assert_close(
        got, function(*slide()), rtol=0, atol=TOLERANCE["mussel"]
    )


@torch.inference_mode()
def test_float16_weights_of_slide2vec_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = model().half()
    encoder = slide2vec_encoder(monkeypatch, hub)
    tiles, coords, size = slide()
    arguments = (tiles[0].half(), coords[0])
    wanted = encoder.encode_slide(*arguments, tile_size_lv0=size)
    with rescue.titan(encoder):
        got = encoder.encode_slide(*arguments, tile_size_lv0=size)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-2)


@pytest.mark.parametrize("name", PEERS)
def test_a_block_that_never_calls_it_is_an_error(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = model()
    encoder, _ = peer(name, monkeypatch, hub)
    found = placed(hub)
    with (
        pytest.raises(RescueError, match="must be called during the command or block"),
        rescue.titan(encoder),
    ):
        pass
    assert_as_found(hub, found)
