"""Numbers of a network that decide its memory and time, counted without weights or data."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from thinsection.encode.encoder import NetworkTileEncoder
from thinsection.encode.memory import simulate_pass, weights_bytes
from thinsection.encode.preprocessing import preprocess
from thinsection.encode.registry import EncoderSpec
from thinsection.encode.sizes import NetworkSize
from thinsection.weights.origin import Origin
from thinsection.weights.placement import Placement


def count_size(spec: EncoderSpec, *, tile_px: int) -> NetworkSize:
    """Numbers of a network, counted on two passes without data; needs the packages that build it.

    Memory: a declared network takes none, another one its weights while it is built.
    """
    placement = Placement(torch.device("cpu"), "fp32")
    encoder = NetworkTileEncoder(spec, None, placement, Origin(), weights_hash="")
    backbone = encoder.backbone
    tile = torch.empty((1, tile_px, tile_px, 3), dtype=torch.uint8, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        backbone(preprocess(tile, spec))
    one_bytes = simulate_pass(encoder, 1, tile_px)[0]
    two_bytes = simulate_pass(encoder, 2, tile_px)[0]
    return NetworkSize(
        dim=spec.dim,
        half_precision=spec.half_precision,
        flops_per_tile=float(counter.get_total_flops()),
        weights_bytes=weights_bytes(encoder, engine="torch"),
        pass_bytes=2 * one_bytes - two_bytes,
        tile_bytes=two_bytes - one_bytes,
        is_transformer=backbone.num_prefix_tokens > 0,
    )
