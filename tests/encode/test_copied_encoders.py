"""Encoders that are copied or pickled give the embeddings of the original, or refuse."""

import copy
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

import thinsection as ts
from thinsection.encode import NetworkTileEncoder, TileEncoder
from thinsection.encode.encoder import seeded_tiles
from thinsection.errors import WeightsError
from thinsection.extras import is_installed
from thinsection.weights.placement import optional_package

WAYS: list[Callable[[Any], Any]] = [
    copy.copy,
    copy.deepcopy,
    lambda encoder: pickle.loads(pickle.dumps(encoder)),  # noqa: S301
    lambda encoder: pickle.loads(cloudpickle.dumps(encoder)),  # noqa: S301
]


def check_equal(copied: TileEncoder, encoder: TileEncoder) -> None:
    tiles = seeded_tiles(encoder.spec.tile_px)
    torch.testing.assert_close(
        copied.encode(tiles), encoder.encode(tiles), rtol=0, atol=0
    )
    assert copied.identity == encoder.identity
    assert copied.provenance == encoder.provenance
    assert copied.label == encoder.label
    assert repr(copied) == repr(encoder)


@pytest.mark.parametrize("way", WAYS)
def test_two_encoders_on_torch_travel_with_their_weights(
    way: Callable[[Any], Any],
) -> None:
    encoders = [
        ts.load_encoder(
            "efficientnet_lite0",
            device="cpu",
            pretrained=False,
            seed=seed,
            engine="torch",
        )
        for seed in (1, 2)
    ]
    copies = [way(encoder) for encoder in encoders]
    for copied, encoder in zip(copies, encoders, strict=True):
        check_equal(copied, encoder)
    tiles = seeded_tiles(224)
    assert (copies[0].encode(tiles) != copies[1].encode(tiles)).any()


@pytest.mark.parametrize("name", ["timm:resnet18", "timm:vit_tiny_patch16_224", "plip"])
def test_networks_of_timm_and_transformers_travel(name: str) -> None:
    if name.startswith("timm") and not is_installed("timm"):
        pytest.skip("timm is not installed")
    encoder = ts.load_encoder(name, device="cpu", pretrained=False, seed=4)
    for way in (WAYS[1], WAYS[2]):
        check_equal(way(encoder), encoder)


def test_a_backbone_of_transformers_travels() -> None:
    if not is_installed("transformers"):
        pytest.skip("transformers is not installed")
    transformers = optional_package("transformers")
    from thinsection.encode.backbone import transformers_backbone

    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    network = transformers.ViTModel(config, add_pooling_layer=False).eval()
    backbone = transformers_backbone(network, "head")
    pixels = torch.rand(2, 3, 224, 224)
    with torch.no_grad():
        expected = backbone(pixels)
        for way in WAYS[1:]:
            for answer, part in zip(way(backbone)(pixels), expected, strict=True):
                torch.testing.assert_close(answer, part, rtol=0, atol=0)


@pytest.fixture
def on_openvino(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NetworkTileEncoder:
    if not is_installed("openvino"):
        pytest.skip("openvino is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    encoder = ts.load_encoder("efficientnet_lite0", device="cpu", engine="openvino")
    assert isinstance(encoder, NetworkTileEncoder)
    assert encoder.engine.startswith("openvino")
    return encoder


@pytest.mark.parametrize("way", WAYS)
def test_an_encoder_on_openvino_goes_on_with_the_stored_graph(
    on_openvino: NetworkTileEncoder, way: Callable[[Any], Any]
) -> None:
    assert len(pickle.dumps(on_openvino)) < 8192
    check_equal(way(on_openvino), on_openvino)


def test_without_the_graph_it_is_loaded_by_its_name_again(
    on_openvino: NetworkTileEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pickle.dumps(on_openvino)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    check_equal(pickle.loads(data), on_openvino)  # noqa: S301


def test_other_weights_of_that_name_are_refused(
    on_openvino: NetworkTileEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_openvino.weights_hash = "0" * 64
    data = pickle.dumps(on_openvino)
    with pytest.raises(WeightsError, match="with weights 000000000000, got others"):
        pickle.loads(data)  # noqa: S301
    on_openvino.reload = None
    with pytest.raises(WeightsError, match="got no graph of them on this machine"):
        copy.deepcopy(on_openvino)


# encoders of one's own


class Linear(nn.Module):
    """A network whose weights the seed decides."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.last = nn.Linear(3, 5)

    def forward(self, tiles: Tensor) -> Tensor:
        answer: Tensor = self.last(tiles.float().mean(dim=(2, 3)) / 255)
        return answer


def colours(tiles: Tensor) -> Tensor:
    return tiles.float().mean(dim=(2, 3))


@pytest.mark.parametrize("way", WAYS)
def test_networks_and_functions_of_ones_own_travel(way: Callable[[Any], Any]) -> None:
    encoders = [
        ts.make_encoder(Linear(1), name="mine", device="cpu", tile_px=64),
        ts.make_encoder(Linear(2), name="mine", device="cpu", tile_px=64),
        ts.make_encoder(colours, name="colours", version="3", tile_px=64),
    ]
    copies = [way(encoder) for encoder in encoders]
    for copied, encoder in zip(copies, encoders, strict=True):
        check_equal(copied, encoder)
        copied.check_unchanged()
        check_equal(copied.current(), encoder)
    assert copies[0].label != copies[1].label


def test_a_function_of_a_notebook_travels_by_cloudpickle_with_its_network() -> None:
    networks = [Linear(7), Linear(8)]
    for network in networks:
        encoder = ts.make_encoder(
            adding_one(network),
            name="mine",
            version="1",
            device="cpu",
            tile_px=64,
        )
        with pytest.raises((pickle.PicklingError, AttributeError)):
            pickle.dumps(encoder)
        assert encoder.weights_hash
        check_equal(pickle.loads(cloudpickle.dumps(encoder)), encoder)  # noqa: S301


def adding_one(network: Linear) -> Callable[[Tensor], Tensor]:
    def embed(tiles: Tensor) -> Tensor:
        answer: Tensor = network(tiles) + 1
        return answer

    return embed


def test_a_function_whose_network_is_another_one_there_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a script: a spawned process imports it anew, and makes its networks anew."""
    module = ModuleType("somebodys_script")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    code = "def embed(tiles):\n    return network(tiles) * factor\n"
    exec(code, module.__dict__)
    module.__dict__.update(network=Linear(1), factor=1)
    encoder = ts.make_encoder(
        module.__dict__["embed"], name="mine", version="1", device="cpu", tile_px=64
    )
    data = pickle.dumps(encoder)
    check_equal(pickle.loads(data), encoder)  # noqa: S301
    module.__dict__.update(network=Linear(2))
    with pytest.raises(WeightsError, match="got other weights or code for 'mine'"):
        pickle.loads(data)  # noqa: S301
    module.__dict__.update(network=Linear(1), factor=2)
    with pytest.raises(WeightsError, match="send the encoder by cloudpickle"):
        pickle.loads(data)  # noqa: S301
