"""A network or function of one's own is an encoder, and a changed one never passes for the old."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import thinsection as ts
from thinsection.encode import OwnTileEncoder
from thinsection.encode.own import read_sample, samples_agree
from thinsection.errors import InvalidInputError
from thinsection.stages.features import result_fields
from thinsection.testing.synthetic import write_he_slide
from thinsection.tiles import TilesConfig


class Small(nn.Module):
    """A network with dropout and batch norm, which differ between training and evaluation."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 8, 7, stride=4)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(8, 5)
        self.act: nn.Module = nn.ReLU()

    def forward(self, pixels: Tensor) -> Tensor:
        features = self.act(self.norm(self.conv(pixels))).mean(dim=(2, 3))
        answer: Tensor = self.last(self.drop(features))
        return answer


def to_tensor(tile: Image.Image) -> Tensor:
    """What ToTensor and Normalize of torchvision do, after a crop of 96 pixels."""
    pixels = np.array(tile.crop((8, 8, 104, 104)), dtype=np.float32) / 255
    return (torch.from_numpy(pixels).permute(2, 0, 1) - 0.5) / 0.25


def colours(tiles: Tensor) -> Tensor:
    return tiles.float().mean(dim=(2, 3))


def small_encoder(network: nn.Module | None = None, **more: Any) -> OwnTileEncoder:
    options: dict[str, Any] = {
        "name": "small",
        "transform": to_tensor,
        "tile_px": 112,
    }
    return ts.make_encoder(network or Small(), device="cpu", **(options | more))


@pytest.fixture(scope="module")
def slide_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slide") / "a.svs"
    write_he_slide(path, (900, 700), seed=3, downsamples=(1,))
    return path


def test_embeddings_are_those_of_a_plain_loop_over_openslide(slide_path: Path) -> None:
    network = Small()
    encoder = small_encoder(network)
    network.train()  # a loop of training that went on
    with ts.open_slide(slide_path) as slide:
        tiles = ts.tile_grid(slide, TilesConfig(tile_px=112, tile_mpp="native"))
        embeddings, table = ts.embed_tiles(slide, tiles, encoder, batch_size=7)
    other = openslide.OpenSlide(slide_path)
    plain = Small().eval()
    rows = []
    for x, y in table.coords_l0.tolist():
        tile = other.read_region((x, y), 0, (112, 112)).convert("RGB")
        with torch.no_grad():
            rows.append(plain(to_tensor(tile)[None])[0].numpy())
    assert len(rows) == 8 * 6
    np.testing.assert_allclose(embeddings, np.stack(rows), rtol=1e-4, atol=1e-5)
    assert np.std(embeddings, axis=0).min() > 1e-3


def test_a_function_gets_pixels_and_may_return_an_array(slide_path: Path) -> None:
    encoder = ts.make_encoder(
        lambda tiles: tiles.numpy().mean(axis=(2, 3)), name="colours", version="1"
    )
    with ts.open_slide(slide_path) as slide:
        tiles = ts.tile_grid(slide, TilesConfig(tile_px=200, tile_mpp="native"))
        embeddings, table = ts.embed_tiles(slide, tiles, encoder)
        x, y = table.coords_l0[3].tolist()
        region = slide.read_region((x, y), 0, (200, 200))
    np.testing.assert_allclose(embeddings[3], region.mean(axis=(0, 1)), rtol=1e-6)
    assert encoder.encode(np.zeros((0, 200, 200, 3), np.uint8)).shape == (0, 3)
    assert encoder.label == "colours_v1" and encoder.weights_hash == ""


def test_other_weights_and_versions_have_another_folder_and_another_key() -> None:
    network = Small()
    encoder = small_encoder(network)
    equal = small_encoder(Small())
    versioned = small_encoder(Small(), version="2")
    trained = small_encoder(Small(seed=1))
    assert encoder.label == equal.label
    assert encoder.identity == equal.identity
    labels = {encoder.label, versioned.label, trained.label}
    keys = {str(result_fields(e.provenance)) for e in (encoder, versioned, trained)}
    assert len(labels) == len(keys) == 3
    assert versioned.label.startswith("small_v2_w")
    with torch.no_grad():
        network.last.weight[0, 0] += 1e-6
    with pytest.raises(InvalidInputError, match="weights must not change"):
        encoder.check_unchanged()
    assert encoder.label == equal.label
    assert encoder.current().label != encoder.label


def test_weights_that_a_function_names_are_hashed() -> None:
    network = Small()

    class Wrapped:
        def __init__(self) -> None:
            self.network = network

        def __call__(self, tiles: Tensor) -> Tensor:
            return self.network.forward(tiles.float())

    def in_closure(tiles: Tensor) -> Tensor:
        return network.forward(tiles.float())

    def made(function: object) -> str:
        encoder = small_encoder(function, version="1")  # type: ignore[arg-type]
        return encoder.weights_hash

    expected = small_encoder(network).weights_hash
    hashes = {made(in_closure), made(Wrapped()), made(network.forward)}
    assert hashes == {expected}


@pytest.mark.parametrize("change", ["activation", "transform"])
def test_the_sample_notices_other_code_with_the_same_weights(change: str) -> None:
    first = small_encoder()
    if change == "activation":
        network = Small()
        network.act = nn.GELU()
        second = small_encoder(network)
    else:
        second = small_encoder(transform=lambda tile: to_tensor(tile) * 1.1)
    assert first.identity == second.identity
    stored = read_sample(first.provenance["sample"])
    assert samples_agree(first.sample, stored, "fp32")
    assert not samples_agree(second.sample, stored, "fp32")


def test_a_sample_allows_for_rounding_and_for_nothing_more() -> None:
    encoder = small_encoder()
    spread = encoder.sample - encoder.sample.mean(axis=0)
    assert samples_agree(encoder.sample + 0.005 * spread, encoder.sample, "fp32")
    assert not samples_agree(encoder.sample + 0.02 * spread, encoder.sample, "fp32")
    assert samples_agree(encoder.sample + 0.02 * spread, encoder.sample, "bf16")
    assert not samples_agree(encoder.sample[:, 1:], encoder.sample, "fp32")
    far = encoder.sample + 10  # an offset that all tiles share hides no change
    assert not samples_agree(far + 0.2 * spread, far, "fp32")


def random_crop(tile: Image.Image) -> Tensor:
    return to_tensor(tile) + torch.rand(1)


class Tokens(Small):
    def forward(self, pixels: Tensor) -> Tensor:
        features: Tensor = self.norm(self.conv(pixels))
        return features.flatten(2)


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        ({"state_dict": 1}, {}, "a torch.nn.Module or a function, got dict"),
        (colours, {"transform": None}, "version must be given with a function"),
        (Small(), {"name": "uni"}, "known encoder, got 'uni'; call it 'my_uni'"),
        (Small(), {"name": "UNI2"}, "name must not be that of a known encoder"),
        (Small(), {"name": "../x"}, "name must have letters, digits"),
        (Small(), {"version": "a b"}, "version must have letters"),
        (Small(), {"transform": None}, "network must take tiles of 112 px, got Runt"),
        (Small(), {"transform": lambda tile: tile}, r"a tensor \(C, H, W\), got Image"),
        (Small(), {"transform": random_crop}, "the same for the same tiles"),
        (Tokens(), {}, r"one vector per tile, got \(4, 8, 529\) for 4 tiles"),
        (
            lambda tiles: colours(tiles) * math.nan,
            {"version": "1", "transform": None},
            "finite numbers",
        ),
    ],
)
def test_what_is_no_encoder_is_refused_when_it_is_made(
    network: object, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        small_encoder(network, **options)  # type: ignore[arg-type]


def test_a_notebook_shows_an_encoder_with_a_picture() -> None:
    page = small_encoder()._repr_html_()
    assert "<img" in page and small_encoder().label in page
    assert "embeddings of 5 numbers" in page and len(page) < 60_000


def test_half_precision_is_close_and_has_a_name_of_its_own() -> None:
    tiles = np.random.default_rng(0).integers(0, 256, (3, 112, 112, 3), dtype=np.uint8)
    full, half = small_encoder(), small_encoder(precision="bf16")
    assert half.label.startswith("small_bf16_w")
    torch.testing.assert_close(
        full.encode(tiles), half.encode(tiles), rtol=0.1, atol=0.05
    )
