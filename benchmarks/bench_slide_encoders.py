"""How exact are the published slide encoders, and how does their memory grow with the tiles?

Seeded random weights of the published sizes. First each embedding is compared with that of the
authors' own module, which `tests.support.author_embeddings` stored. Then memory beyond weights and
inputs, and CPU time, in a fresh process for each size. Of MOOZY one of its six layers is measured:
memory peaks in each alike.
"""

from dataclasses import replace
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
from benchmarks.titan_inputs import give_back_freed_memory, tissue_cells
from thinsection.pool import LoadOptions, SlideEncoder, TileLayout
from thinsection.pool.encoder import SLIDE_ENCODERS
from thinsection.pool.moozy import MoozySizes
from thinsection.testing import run_and_measure
from thinsection.types import MIB

State = tuple[SlideEncoder, np.ndarray, np.ndarray]


def main() -> None:
    """Checks and measures each encoder."""
    args = arguments(__doc__ or "")
    sizes = (300, 600) if args.smoke else (1_000, 10_000, 100_000)
    rows = []
    for name, case in AUTHORS.items():
        if args.smoke and not case.is_quick:
            continue
        row: dict[str, Any] = {"name": name, "commit": case.commit}
        row |= compared(name)
        if name in SLIDE_ENCODERS:
            # MOOZY's time grows with the square
            most = 30_000 if name == "moozy" else sizes[-1]
            row["sizes"] = [measured(name, min(most, size)) for size in sizes]
        print(row, flush=True)
        rows.append(row)
    finish("bench_slide_encoders", {"slide_encoders": rows}, args)


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
    config = AUTHORS[name].config
    if isinstance(config, MoozySizes):
        config = replace(config, num_layers=1)
    encoder = seeded_encoder(name, config)
    tiles = seeded_tiles(num_tiles, tile_dim_of(AUTHORS[name]))
    coords = tissue_cells(num_tiles) * TILE_PX_L0
    give_back_freed_memory()
    return encoder, tiles, coords


def encode(state: State, *, name: str, num_tiles: int) -> float:
    """First value of the embedding."""
    encoder, tiles, coords = state
    return float(encoder.encode(tiles, coords, tile_px_l0=TILE_PX_L0)[0])


if __name__ == "__main__":
    main()
