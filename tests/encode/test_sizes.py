"""The declared sizes of encoders are those of their networks."""

import pytest
from tests.support.network_sizes import table

from thinsection.encode import NetworkTileEncoder, load_encoder
from thinsection.encode.counting import count_size
from thinsection.encode.memory import batch_bytes, weights_bytes
from thinsection.encode.registry import (
    DEFAULT_ENCODER,
    declared_encoders,
    needs_of_encoder,
)
from thinsection.encode.sizes import (
    CPU_TILES,
    MAX_TILE_PX,
    declared_size,
    weights_in_memory,
)
from thinsection.extras import missing_of
from thinsection.types import MIB


@pytest.mark.parametrize("name", list(declared_encoders()))
def test_declared_operations_and_bytes_are_those_of_the_network(name: str) -> None:
    spec = declared_encoders()[name]
    missing = missing_of(needs_of_encoder(name, from_hub=False)[1])
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    counted = count_size(spec, tile_px=256)
    declared = declared_size(name, tile_px=256)
    assert declared is not None
    assert table(name, declared) == table(name, counted)
    assert declared.dim == counted.dim
    assert declared.is_transformer == (name != DEFAULT_ENCODER)


@pytest.mark.parametrize("name", ["efficientnet_lite0", "plip"])
@pytest.mark.parametrize("tile_px", [224, 300, MAX_TILE_PX])
def test_larger_tiles_need_what_a_pass_without_data_says(
    name: str, tile_px: int
) -> None:
    declared = declared_size(name, tile_px=tile_px)
    counted = count_size(declared_encoders()[name], tile_px=tile_px)
    assert declared is not None
    for num_tiles in (1, CPU_TILES):
        peaks = [s.pass_bytes + num_tiles * s.tile_bytes for s in (declared, counted)]
        assert peaks[0] == pytest.approx(peaks[1], rel=0.13)


@pytest.mark.parametrize("batch_size", [1, CPU_TILES, 32])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_declared_batch_and_its_weights_are_those_of_the_loaded_encoder(
    batch_size: int, precision: str
) -> None:
    encoder = load_encoder(
        "efficientnet_lite0", device="cpu", precision=precision, engine="torch"
    )
    assert isinstance(encoder, NetworkTileEncoder)
    size = declared_size("efficientnet_lite0", tile_px=256)
    assert size is not None
    expected = batch_bytes(encoder, batch_size=batch_size, tile_px=256)
    on_cpu = size.batch_bytes(batch_size=batch_size, tile_px=256, on_gpu=False)
    assert on_cpu == pytest.approx(expected, rel=1e-6)
    at_once = batch_bytes(
        encoder, batch_size=batch_size, tile_px=256, at_once=batch_size
    )
    on_gpu = size.batch_bytes(batch_size=batch_size, tile_px=256, on_gpu=True)
    assert on_gpu == pytest.approx(at_once, rel=1e-6)
    in_memory = weights_in_memory(
        size.weights_bytes,
        copied_bytes=size.weights_bytes,
        precision=precision,
        engine="torch",
    )
    assert in_memory == weights_bytes(encoder)
    graph = weights_in_memory(
        size.weights_bytes,
        copied_bytes=size.weights_bytes,
        precision=precision,
        engine="openvino 1",
    )
    assert graph == size.weights_bytes + 64 * MIB


def test_an_unknown_encoder_and_a_huge_tile_have_no_declared_size() -> None:
    assert declared_size("timm:resnet18", tile_px=256) is None
    assert declared_size("uni", tile_px=MAX_TILE_PX + 1) is None
    assert declared_size("uni", tile_px=MAX_TILE_PX) is not None
