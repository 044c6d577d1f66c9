"""How much memory and time do the rescues of prov-gigapath and STAMP take, and how exact are they?

The authors' own modules with seeded weights, in their published sizes. THINSECTION_TEST_GIGAPATH
and THINSECTION_TEST_STAMP name checkouts of prov-gigapath/prov-gigapath and KatherLab/STAMP;
einops, fairscale, beartype and jaxtyping must be installed. prov-gigapath's FlashAttention, which
needs a GPU, is replaced by a plain softmax in its own runs. The smoke size takes the tests'
stand-ins.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.rescue import stand_in_gigapath, stand_in_stamp
from tests.support.plain_flash import plain_attention

from benchmarks.harness import arguments, finish
from thinsection import rescue
from thinsection.testing import run_and_measure
from thinsection.types import MIB
from thinsection.weights.placement import optional_package

GRID = 300  # of GigaPath's position table; 1000 takes 3 GB more, in ours and in theirs
STAMP_FILE = "src/stamp/modeling/models/vision_tranformer.py"
Encode = Callable[[], torch.Tensor]
BLOCKS = {"gigapath": rescue.gigapath, "stamp": rescue.stamp}
# tiles of a slide at which both run, and at which the authors' code is reported to die
COMPARED = 8_000
LARGE = {"gigapath": 45_680, "stamp": 20_000}


def main() -> None:
    """Compares, then measures the large sizes; each in a fresh process."""
    args = arguments(__doc__ or "", only="gigapath or stamp")
    names = [args.only] if args.only else list(BLOCKS)
    results: dict[str, Any] = {}
    for name in names:
        size = 128 if args.smoke else COMPARED
        results[name] = {"compared": compared(name, size, is_small=args.smoke)}
        if not args.smoke:
            large = LARGE[name]
            figures, _ = measured(name, large, is_rescued=True, is_small=False)
            results[name]["large"] = {"num_tiles": large, **figures}
    finish("bench_rescue", results, args)


def compared(name: str, num_tiles: int, *, is_small: bool) -> dict[str, Any]:
    """Figures of both ways, and the largest difference of their outputs."""
    theirs, wanted = measured(name, num_tiles, is_rescued=False, is_small=is_small)
    ours, got = measured(name, num_tiles, is_rescued=True, is_small=is_small)
    difference = float(np.abs(got - wanted).max())
    if difference > 1e-5 * max(1.0, float(np.abs(wanted).max())):
        raise SystemExit(f"{name} at {num_tiles} tiles: outputs differ by {difference}")
    return {
        "num_tiles": num_tiles,
        "theirs": theirs,
        "ours": ours,
        "max_abs_difference": difference,
        "largest_value": float(np.abs(wanted).max()),
    }


def measured(
    name: str, num_tiles: int, *, is_rescued: bool, is_small: bool
) -> tuple[dict[str, float], np.ndarray]:
    """Figures of one call in a fresh process, and its output."""
    run = run_and_measure(
        "benchmarks.bench_rescue",
        "encode",
        setup="set_up",
        name=name,
        num_tiles=num_tiles,
        is_rescued=is_rescued,
        is_small=is_small,
    )
    figures = {
        "cpu_s": run.cpu_seconds,
        "peak_beyond_model_and_inputs_mib": run.growth_bytes / MIB,
    }
    return figures, np.array(run.result, dtype=np.float64)


def set_up(name: str, num_tiles: int, is_rescued: bool, is_small: bool) -> Encode:
    """Call of the authors' model, or of the stand-in, on seeded tiles."""
    torch.manual_seed(0)
    if is_small:
        return stand_in(name, num_tiles)
    if name == "stamp":
        return stamp_call(num_tiles)
    return gigapath_call(num_tiles, has_flash=not is_rescued)


def encode(
    call: Encode, *, name: str, is_rescued: bool, **_: object
) -> list[list[float]]:
    """Output of one call, in the rescue or as the authors' code is."""
    block = BLOCKS[name]() if is_rescued else nullcontext()
    with torch.inference_mode(), block:
        rows: list[list[float]] = call().double().flatten(0, -2).tolist()
    return rows


def gigapath_call(num_tiles: int, *, has_flash: bool) -> Encode:
    """All 13 slide embeddings of `gigapath_slide_enc12l768d`."""
    source = Path(os.environ["THINSECTION_TEST_GIGAPATH"])
    sys.path[:0] = [str(source), str(source / "gigapath")]
    optional_package("timm")
    encoder = importlib.import_module("gigapath.slide_encoder")
    # they write NumPy integers as text, and evaluate it
    with np.printoptions(legacy="1.25"):
        model = encoder.gigapath_slide_enc12l768d(
            in_chans=1536, slide_ngrids=GRID, global_pool=True
        )
    model.eval()
    if has_flash:
        name = "torchscale.component.multihead_attention"
        vars(importlib.import_module(name))["flash_attn_func"] = plain_attention
    spots = torch.randperm(GRID**2)[:num_tiles].sort().values
    coords = 256 * torch.stack([spots % GRID, spots // GRID], 1)[None]
    tiles = torch.randn(1, num_tiles, 1536)
    return lambda: torch.cat(model(tiles, coords, all_layer_embed=True))


def stamp_call(num_tiles: int) -> Encode:
    """Two outputs of STAMP's vision transformer in its default sizes, with ALiBi."""
    path = Path(os.environ["THINSECTION_TEST_STAMP"]) / STAMP_FILE
    spec = importlib.util.spec_from_file_location("stamp_vision_transformer", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.VisionTransformer(
        dim_output=2,
        dim_input=1536,
        dim_model=512,
        n_layers=2,
        n_heads=8,
        dim_feedforward=512,
        dropout=0.0,
        use_alibi=True,
    ).eval()
    side = int(num_tiles**0.5) + 1
    coords = 256.0 * torch.stack(
        [torch.arange(num_tiles) % side, torch.arange(num_tiles) // side], 1
    )
    # as after training: the mean distance of two tiles
    for part in model.modules():
        if type(part).__name__ == "_RunningMeanScaler":
            part.running_mean.fill_(0.52 * 256 * side)
    tiles = torch.randn(1, num_tiles, 1536)
    return lambda: model(tiles, coords=coords[None], mask=None)


def stand_in(name: str, num_tiles: int) -> Encode:
    """The tests' small modules of the same call structure."""
    if name == "stamp":
        stamp = stand_in_stamp.model()
        coords = 20_000 * torch.rand(1, num_tiles, 2)
        tiles = torch.randn(1, num_tiles, stand_in_stamp.DIM)
        return lambda: stamp(tiles, coords)
    vars(stand_in_gigapath)["flash_attn_func"] = plain_attention
    encoder = stand_in_gigapath.encoder()
    states = torch.randn(1, num_tiles, stand_in_gigapath.DIM)
    return lambda: encoder(states)


if __name__ == "__main__":
    main()
