"""How exact are the published slide encoders, and how does their memory grow with the tiles?

Seeded random weights of the published sizes. First each embedding is compared with that of the
authors' own module, which `tests.support.author_embeddings` stored. Then memory beyond weights and
inputs, and CPU time, in a fresh process for each size; memory must not grow faster than the number
of tiles. Of encoders whose tiles attend to each other one layer is measured: memory peaks in each
alike, and time grows with the square in TITAN and MOOZY.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tests.support.author_embeddings import (
    AUTHORS,
    GOLDEN,
    SEED,
    TILE_PX_L0,
    seeded_slides,
    seeded_tiles,
    tile_dim_of,
)

from benchmarks.harness import arguments, finish
from benchmarks.titan_inputs import give_back_freed_memory, tissue_cells, titan_of
from thinsection.pool import (
    GigaPathSlideEncoder,
    LoadOptions,
    SlideEncoder,
    TileLayout,
)
from thinsection.pool.encoder import SLIDE_ENCODERS
from thinsection.pool.gigapath import LongNetConfig
from thinsection.pool.moozy import MoozySizes
from thinsection.testing import run_and_measure
from thinsection.types import MIB

# encoders of which one layer is measured, with the number of theirs
LAYERS = {"titan": 6, "gigapath": 12, "moozy": MoozySizes().num_layers}
# `bench_titan` and `bench_gigapath` compare the first two
MEASURED = (*LAYERS, *(name for name in AUTHORS if name in SLIDE_ENCODERS))
SIZES = (1_000, 10_000, 100_000)
# what a peak may have above ten times that of a tenth of the tiles, in MiB
SLACK_MIB = 16
SMOKE_COMPARED = ("chief", "moozy_small")
SMOKE_MEASURED = ("chief",)
SMOKE_SIZES = (300, 600)
State = tuple[SlideEncoder, np.ndarray, np.ndarray]


def main() -> None:
    """Checks each encoder, then measures it."""
    args = arguments(
        __doc__ or "", only="comma-separated names, to measure these alone"
    )
    compared_names = SMOKE_COMPARED if args.smoke else tuple(AUTHORS)
    measured_names = SMOKE_MEASURED if args.smoke else tuple(dict.fromkeys(MEASURED))
    if args.only:
        compared_names = ()
        measured_names = tuple(args.only.split(","))
    differences = []
    for name in compared_names:
        row = {"name": name, "commit": AUTHORS[name].commit, **compared(name)}
        print(row, flush=True)
        differences.append(row)
    memory = []
    for name in measured_names:
        sizes = [measured(name, n) for n in (SMOKE_SIZES if args.smoke else SIZES)]
        check_linear(name, sizes)
        row = {"name": name, "layers": LAYERS.get(name), "sizes": sizes}
        print(row, flush=True)
        memory.append(row)
    finish("bench_slide_encoders", {"differences": differences, "memory": memory}, args)


def compared(name: str) -> dict[str, Any]:
    """Largest differences to the authors' module in float64, and of their float32 to it."""
    case = AUTHORS[name]
    layout = TileLayout.square(TILE_PX_L0)
    slides = [(tiles, coords, layout) for tiles, coords in seeded_slides(case)]
    embedding = seeded_encoder(name).encode_case(slides)
    golden = np.load(GOLDEN / f"{name}.npz")
    largest = float(np.abs(golden["float64"]).max())
    ours = float(np.abs(embedding - golden["float64"]).max())
    theirs = float(np.abs(golden["float32"] - golden["float64"]).max())
    assert ours <= max(3e-6 * largest, 2 * theirs), (name, ours, theirs, largest)
    weights = case.encoder.random_weights(case.config, seed=SEED)
    return {
        "parameters_million": sum(map(torch.numel, weights.values())) / 1e6,
        "dim": len(embedding),
        "slides_compared": case.num_slides,
        "tiles_compared": case.num_tiles,
        "largest_value": largest,
        "largest_difference": ours,
        "authors_float32_difference": theirs,
    }


def check_linear(name: str, sizes: list[dict[str, Any]]) -> None:
    """Raises AssertionError where a peak grows faster than the number of tiles."""
    for small, large in pairwise(sizes):
        times = large["num_tiles"] / small["num_tiles"]
        bound = times * small["peak_beyond_inputs_mib"] + SLACK_MIB
        assert large["peak_beyond_inputs_mib"] <= bound, (name, small, large)


def seeded_encoder(name: str, config: object = None) -> SlideEncoder:
    """The encoder with the weights that its authors' module had, or of these sizes."""
    case = AUTHORS[name]
    config = config or case.config
    weights = case.encoder.random_weights(config, seed=SEED)
    options = LoadOptions(device="cpu", output=case.output)
    encoder: SlideEncoder = case.encoder.from_state_dict(
        weights, config=config, options=options
    )
    return encoder


def one_layer(name: str) -> tuple[SlideEncoder, int]:
    """The encoder with the first of its layers alone, if it is in `LAYERS`; and its tile_dim."""
    if name == "titan":
        titan = titan_of("fp32")
        del titan.net.blocks.modules_list[1:]  # type: ignore[union-attr]
        return titan, 768
    if name == "gigapath":
        layer = LongNetConfig(num_layers=1)
        weights = GigaPathSlideEncoder.random_weights(layer, seed=SEED)
        gigapath = GigaPathSlideEncoder.from_state_dict(
            weights, config=layer, options=LoadOptions(device="cpu")
        )
        return gigapath, 1536
    config = AUTHORS[name].config
    if isinstance(config, MoozySizes):
        config = replace(config, num_layers=1)
    return seeded_encoder(name, config), tile_dim_of(AUTHORS[name])


def measured(name: str, num_tiles: int) -> dict[str, Any]:
    """Time and memory of one embedding in a fresh process."""
    run = run_and_measure(
        "benchmarks.bench_slide_encoders",
        "encode",
        setup="set_up",
        name=name,
        num_tiles=num_tiles,
    )
    return {
        "num_tiles": num_tiles,
        "cpu_s": run.cpu_seconds,
        "peak_beyond_inputs_mib": run.growth_bytes / MIB,
    }


def set_up(*, name: str, num_tiles: int) -> State:
    """The encoder and a slide."""
    torch.set_num_threads(1)
    encoder, tile_dim = one_layer(name)
    tiles = seeded_tiles(num_tiles, tile_dim)
    coords = tissue_cells(num_tiles) * TILE_PX_L0
    give_back_freed_memory()
    return encoder, tiles, coords


def encode(state: State, *, name: str, num_tiles: int) -> float:
    """First value of the embedding."""
    encoder, tiles, coords = state
    return float(encoder.encode(tiles, coords, tile_px_l0=TILE_PX_L0)[0])


if __name__ == "__main__":
    main()
