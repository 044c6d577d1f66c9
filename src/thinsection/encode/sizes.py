"""Memory and operations of a network from a few numbers, which are declared or counted.

`sizes.toml` declares them for our own encoders, so that a plan needs neither torch nor the network.
`thinsection.encode.memory` counts them on a network without data.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from thinsection.config import read_toml
from thinsection.encode.registry import declared_encoders
from thinsection.types import MIB

# memory of OpenVINO's code and graph: 60 MiB for EfficientNet-Lite0 and for ViT-S/16
OPENVINO_BYTES = 64 * MIB
# matrix products of transformers pack their operands: ViT-S/16 took up to 1.37 times the sum
TOKEN_MARGIN = 1.4
# On a CPU, the second part of a batch reuses heap fragments that the first part freed. Therefore
# EfficientNet-Lite0 took 0.9 to 1.4 times the predicted bytes; ViT-S and ResNets took less.
HOLES_MARGIN = 1.5
# Upper bound for weights in FP8, as a share of float32: 0.26 for most vision transformers, 0.46 for
# PLIP, whose attention holds a quarter of them in a layer of another kind.
FP8_SHARE = 0.5
# Tiles in the network at a time on a CPU. Compared with 32, this is some per cent slower at most,
# needs a fraction of the memory, and has a more constant peak (benchmarks/bench_heap.py).
CPU_TILES = 4
# largest tile for which the declared numbers hold: larger ones need more for resizing than for the
# network
MAX_TILE_PX = 512
_ROW_TILE_PX = 256  # edge of the tiles in `sizes.toml`


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSize:
    """Numbers of a network that decide its memory and its time."""

    dim: int  # length of an embedding
    # True if `auto` may choose a lower precision than fp32
    half_precision: bool
    flops_per_tile: float  # multiply-adds count as two
    weights_bytes: int  # in float32
    # peak bytes of a pass, in float32: constant part, and for each tile of this edge
    pass_bytes: int
    tile_bytes: int
    # True for a vision transformer, whose time is that of its matrix products
    is_transformer: bool

    def batch_bytes(self, *, batch_size: int, tile_px: int, on_gpu: bool) -> int:
        """Peak bytes of a batch, with its tiles and without the weights."""
        at_once = batch_size if on_gpu else min(batch_size, CPU_TILES)
        return batch_peak(
            self.pass_bytes + at_once * self.tile_bytes,
            num_waiting=batch_size - at_once,
            waiting_bytes=tile_px * tile_px * 3 + self.dim * 4,
        )


def batch_peak(network_bytes: int, *, num_waiting: int, waiting_bytes: int) -> int:
    """Peak bytes of a batch of which some tiles wait while others are in the network."""
    if not num_waiting:
        return network_bytes
    return int(network_bytes * HOLES_MARGIN) + num_waiting * waiting_bytes


def weights_in_memory(
    stored_bytes: int, *, copied_bytes: int, precision: str, engine: str
) -> int:
    """Bytes of weights, with the half-precision copies that autocast makes of `copied_bytes`.

    With OpenVINO the library is included; loading takes the same amount again.
    """
    if engine.startswith("openvino"):
        return stored_bytes + OPENVINO_BYTES
    if precision == "fp8":
        return int(stored_bytes * FP8_SHARE)
    return stored_bytes if precision == "fp32" else stored_bytes + copied_bytes // 2


def declared_size(name: str, *, tile_px: int) -> NetworkSize | None:
    """Declared numbers of an encoder for tiles of this edge in pixels; None if there are none."""
    row = _rows().get(name)
    if row is None or tile_px > MAX_TILE_PX:
        return None
    spec = declared_encoders()[name]
    is_transformer = bool(row["is_transformer"])
    margin = TOKEN_MARGIN if is_transformer else 1.0
    # a tile waits in uint8 while the network works on it
    more_px = tile_px**2 - _ROW_TILE_PX**2
    return NetworkSize(
        dim=spec.dim,
        half_precision=spec.half_precision,
        flops_per_tile=float(row["flops_per_tile"]),
        weights_bytes=row["weights_bytes"],
        pass_bytes=row["pass_bytes"],
        tile_bytes=row["tile_bytes"] + int(margin * 3 * more_px),
        is_transformer=is_transformer,
    )


@cache
def _rows() -> Mapping[str, Mapping[str, int]]:
    """Tables of `sizes.toml` by the name of the encoder."""
    return MappingProxyType(read_toml(Path(__file__).with_name("sizes.toml")))
