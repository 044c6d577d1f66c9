"""Encoders of other packages: the shortest one works, and a wrong one says what to write."""

import copy
import itertools
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from thinsection.encode import EncoderSpec, TileEncoder, embed_tiles, load_encoder
from thinsection.encode.answers import (
    encoded,
    encoded_by_numpy,
    load_from_package,
)
from thinsection.encode.base import NUMPY, encoder_identity, random_tiles
from thinsection.encode.registry import ENCODERS
from thinsection.errors import DeviceError, InvalidInputError, error_words
from thinsection.slide import open_slide
from thinsection.testing.synthetic import write_he_slide
from thinsection.tiles import tile_grid
from thinsection.weights.files import hash_networks

TILES = np.random.default_rng(0).integers(0, 255, (5, 32, 40, 3), dtype=np.uint8)
SPEC = EncoderSpec(name="own", dim=6, tile_px=32)


class Shortest(TileEncoder):
    """What docs/encoders.md shows."""

    spec = SPEC

    def encode(self, tiles_u8):
        pixels = torch.as_tensor(tiles_u8, device=self.device).flatten(1, 2) / 255
        return torch.cat([pixels.mean(dim=1), pixels.std(dim=1)], dim=1)


class WithNumpy(TileEncoder):
    """Arrays in, arrays out, on the CPU alone; attributes set in `__init__`."""

    device = torch.device("cpu")

    def __init__(self, device="cpu", precision="fp32", weights=None):
        super().__init__(device=device, precision=precision)
        self.spec = EncoderSpec(name="own", dim=3, tile_px=32)
        self.weights_hash = "abc" if weights is None else str(weights)

    def encode(self, tiles_u8):
        return np.asarray(tiles_u8).mean(axis=(1, 2))


class WithNetworks(TileEncoder):
    """Two networks; their weights are hashed without a word of the author."""

    spec = EncoderSpec(name="own", dim=2, tile_px=32)

    def __init__(self, seed=0, **options):
        super().__init__(device=options["device"])
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)
        for parameter in (*self.first.parameters(), *self.second.parameters()):
            nn.init.normal_(parameter, generator=generator)

    def encode(self, tiles_u8):
        means = torch.as_tensor(tiles_u8).float().mean(dim=(1, 2)) / 255
        return self.second(self.first(means))  # with a gradient, which nobody asked for

    def encode_with_tokens(self, tiles_u8):
        embeddings = self.encode(tiles_u8)
        return embeddings, embeddings[:, None].repeat(1, 4, 1)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Registers a class or function as the encoder 'own' of a package 'their_package'."""

    def install(factory: object) -> None:
        module = ModuleType("their_package")
        if callable(factory):
            factory.__module__ = "their_package"
        vars(module)["part"] = factory
        monkeypatch.setitem(sys.modules, "their_package", module)
        point = metadata.EntryPoint("own", "their_package:part", ENCODERS.group)
        monkeypatch.setitem(ENCODERS._points, "own", point)

    return install


def test_the_shortest_encoder_is_loaded_by_name_and_embeds(installed, tmp_path) -> None:
    installed(Shortest)
    encoder = load_encoder("own", device="cpu")
    assert (encoder.label, encoder.dim, encoder.weights_hash) == ("own", 6, "")
    assert encoder.spec.architecture.kind == "custom" and encoder.spec.needs == ()
    assert not encoder_identity(encoder).supports_tokens
    write_he_slide(tmp_path / "a.svs", (700, 500))
    with open_slide(tmp_path / "a.svs") as slide:
        tiles = tile_grid(slide, tile_px=64)
        embeddings, table = embed_tiles(slide, tiles, encoder)
    assert embeddings.shape == (len(table), 6) and embeddings.dtype == np.float32


def test_an_encoder_takes_and_returns_numpy_or_torch(installed) -> None:
    expected = TILES.mean(axis=(1, 2))
    installed(WithNumpy)
    encoder = load_encoder("own", device="cpu", precision="fp32", weights="w1")
    assert encoder.weights_hash == "w1" and encoder.label == "own_ww1"
    for tiles in (TILES, torch.from_numpy(TILES)):
        (answer,) = encoded(encoder, tiles)
        np.testing.assert_allclose(answer.numpy(), expected)
        (answer,) = encoded(Shortest(), tiles)
        np.testing.assert_allclose(answer[:, :3].numpy(), expected / 255, rtol=1e-5)


def test_the_weights_of_all_networks_are_the_identity(installed) -> None:
    installed(WithNetworks)
    first, again, other = (
        load_encoder("own", device="cpu", pretrained=False, seed=seed)
        for seed in (1, 1, 2)
    )
    assert first.identity == again.identity != other.identity
    assert first.weights_hash == hash_networks(
        [getattr(first, name) for name in ("second", "first")]
    )
    assert encoder_identity(first).supports_tokens
    embeddings, tokens = encoded(first, TILES, with_tokens=True)
    assert tuple(tokens.shape) == (5, 4, 2) and not embeddings.requires_grad


class InHalf(Shortest):
    """Declares that it computes in its precision itself."""

    spec = EncoderSpec(name="own", dim=6, tile_px=32, half_precision=True)


def make_in_half(device, precision):
    return InHalf(device=device, precision=precision)


def test_auto_is_fp32_unless_the_spec_declares_half_precision(
    installed, monkeypatch
) -> None:
    monkeypatch.setattr("thinsection.weights.placement.cpu_has_bf16", lambda: True)
    for factory, precision in (
        (Shortest, "fp32"),
        (lambda device: Shortest(device=device), "fp32"),
        (WithNumpy, "fp32"),  # takes the precision, and passes it on
        (WithNetworks, "fp32"),
        (InHalf, "bf16"),
        (make_in_half, "fp32"),  # the spec is not known before the call
    ):
        installed(factory)
        assert load_encoder("own", device="cpu").precision == precision
    vars(make_in_half)["spec"] = InHalf.spec
    assert load_encoder("own", device="cpu").precision == "bf16"
    installed(WithNumpy)
    named = load_encoder("own", device="cpu", precision="bf16")
    assert named.precision == "bf16" and named.label == "own_bf16"


def test_a_version_is_part_of_the_identity() -> None:
    class Newer(Shortest):
        version = "2"

    assert Newer().identity != Shortest().identity
    assert Newer().label == Shortest().label


def wrong(**members: object) -> type:
    """Subclass of the shortest encoder with other members."""
    return type("TheirEncoder", (Shortest,), members)


class NoEncode(TileEncoder):
    spec = SPEC


class NoSuper(Shortest):
    def __init__(self, **options):
        pass


def constant(value: object):
    return lambda self, tiles_u8: value


CALLS = iter(range(1000))
WRONG = {
    "no-encode": (NoEncode, "must define encode, got none in NoEncode"),
    "no-spec": (
        type("TheirEncoder", (Shortest,), {"spec": None}),
        "TheirEncoder must have the attribute spec, EncoderSpec, got none; set spec = Enc",
    ),
    "no-super": (
        NoSuper,
        r"NoSuper must have the attribute device, device, got none; call super\(\).__init__",
    ),
    "no-dim": (
        wrong(spec=EncoderSpec(name="own", dim=0)),
        "dim in the EncoderSpec of TheirEncoder must be >= 1, got 0",
    ),
    "other-name": (
        wrong(spec=EncoderSpec(name="my own", dim=6, tile_px=32)),
        "name in the EncoderSpec of TheirEncoder must be that of its entry point, 'own', got "
        "'my own'; change one",
    ),
    "other-dim": (
        wrong(spec=EncoderSpec(name="own", dim=5, tile_px=32)),
        r"TheirEncoder.encode must return shape \(4, 5\) .* got \(4, 6\); the EncoderSpec of ",
    ),
    "not-pooled": (
        wrong(encode=lambda self, tiles: torch.as_tensor(tiles).float()),
        r"must return shape \(4, 6\).* got \(4, 32, 32, 3\); return one vector per tile",
    ),
    "integers": (
        wrong(encode=lambda self, tiles: torch.zeros(len(tiles), 6, dtype=torch.int64)),
        "must return a tensor or a NumPy array of floating-point numbers, got int64",
    ),
    "list": (wrong(encode=constant([1.0, 2.0])), "floating-point numbers, got list"),
    "nan": (
        wrong(encode=lambda self, tiles: torch.full((len(tiles), 6), torch.nan)),
        "TheirEncoder.encode must return finite numbers, got NaN",
    ),
    "random": (
        wrong(
            encode=lambda self, tiles: torch.full((len(tiles), 6), 1.0 + next(CALLS))
        ),
        "must return the same for the same tiles, got other numbers at the second call",
    ),
    "arguments": (
        lambda path, **options: Shortest(),
        "must take no other arguments than device, precision, weights, pretrained, seed, got",
    ),
    "no-encoder": (lambda: 3, "'own' must return a TileEncoder, got int"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_encoder_names_class_attribute_and_remedy(name: str, installed) -> None:
    factory, message = WRONG[name]
    installed(factory)
    with pytest.raises(InvalidInputError, match=message):
        load_encoder("own", device="cpu")


def test_weights_and_a_device_that_it_does_not_take_are_refused(installed) -> None:
    installed(Shortest)
    with pytest.raises(
        InvalidInputError, match="weights must be left out for encoder 'own'"
    ):
        load_encoder("own", device="cpu", weights=Path("w.pth"))


def test_an_error_inside_an_encoder_names_it_and_its_package(installed) -> None:
    def encode(self, tiles_u8):
        return {}["layer"]

    installed(wrong(encode=encode))
    ENCODERS.load("own").__module__ = "their_package"
    with pytest.raises(KeyError) as caught:
        load_encoder("own", device="cpu")
    note = (
        "raised in encoder 'own' of package 'their_package', called with tiles "
        "(4, 32, 32, 3)"
    )
    assert caught.value.__notes__ == [note]
    assert (
        error_words(caught.value) == f"unexpected error: there is no 'layer' ({note})"
    )


def test_an_error_of_an_encoder_of_ours_has_no_note() -> None:
    encoder = load_encoder("efficientnet_lite0", device="cpu", engine="torch")
    with pytest.raises(InvalidInputError, match="tiles_u8 must be uint8") as caught:
        encoded(encoder, TILES[0])
    assert not hasattr(caught.value, "__notes__")


def on_numpy(answer: Callable[[np.ndarray], object]) -> type[TileEncoder]:
    """A class of encoders on NumPy, whose answers are those of the function."""

    class OnNumpy(TileEncoder):
        """An encoder of a test."""

        spec = EncoderSpec(name="on_numpy", dim=3)
        device = NUMPY
        precision = "fp32"

        def encode(self, tiles_u8: object) -> object:  # type: ignore[override]
            assert isinstance(tiles_u8, np.ndarray)
            return answer(tiles_u8)

    return OnNumpy


def test_an_encoder_on_numpy_gets_arrays_and_its_answers_are_checked() -> None:
    tiles = random_tiles(32)
    means = on_numpy(lambda x: x.mean(axis=(1, 2)))()
    (rows,) = encoded_by_numpy(means, tiles)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, tiles.mean(axis=(1, 2)), rtol=1e-6)
    # callers with tensors get tensors
    (tensors,) = encoded(means, torch.from_numpy(tiles))
    assert torch.equal(tensors, torch.from_numpy(rows))
    assert means.weights_hash == "" and means.engine == f"numpy {np.__version__}"
    for answer, words in (
        (lambda x: x.sum(axis=(1, 2)), "must return a NumPy array of floating-point"),
        (lambda x: torch.ones(len(x), 3), "must return a NumPy array of floating-"),
        (lambda x: np.ones((len(x), 4)), r"must return shape \(4, 3\) for 4 tiles"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            encoded_by_numpy(on_numpy(answer)(), tiles)


def test_an_encoder_on_numpy_is_loaded_by_its_name_and_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = itertools.count()
    classes = {
        "means": on_numpy(lambda x: x.mean(axis=(1, 2))),
        "other": on_numpy(lambda x: x.mean(axis=(1, 2)) + next(calls)),
        "nan": on_numpy(lambda x: np.full((len(x), 3), np.nan)),
    }
    monkeypatch.setattr(ENCODERS, "load", classes.__getitem__)

    def load(name: str, device: str = "auto") -> TileEncoder:
        classes[name].spec = replace(classes[name].spec, name=name)
        return load_from_package(
            name,
            device=device,
            precision="auto",
            weights=None,
            pretrained=True,
            seed=0,
        )

    assert load("means").device is NUMPY
    assert load("means", "cpu").precision == "fp32"
    for name, words in (
        ("other", "must return the same"),
        ("nan", "must return finite"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            load(name)
    with pytest.raises((DeviceError, InvalidInputError)):
        load("means", "cuda")


def test_the_device_numpy_stays_itself_in_copies_and_other_processes() -> None:
    """It is compared by identity, and encoders are copied and sent to workers."""
    assert copy.deepcopy(NUMPY) is NUMPY
    assert pickle.loads(pickle.dumps(NUMPY)) is NUMPY  # noqa: S301 - our own bytes
