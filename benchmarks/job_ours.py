"""Our way through the job of `bench_job`, by what is public: `python job_ours.py JOB.json`."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.job_work import (
    CPU,
    MEAN,
    NETWORKS,
    STD,
    TILE_PX,
    Job,
    exact_means,
    measure,
)
from thinsection.encode import (
    EncoderSpec,
    TileEncoder,
    embed_tiles,
    load_encoder,
)
from thinsection.encode.registry import Architecture
from thinsection.slide import Slide, open_slide
from thinsection.tiles import (
    StreamConfig,
    TilesConfig,
    TileTable,
    iter_tiles,
    tile_grid,
)

# name of a network of the job -> timm's name, and arguments of its class
TIMM_NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet18": ("resnet18", {}),
    "vit_s": ("vit_small_patch16_224", {"img_size": TILE_PX}),
}


class MeanEncoder(TileEncoder):
    """Three means a tile, of normalised pixels: the least that an encoder can do."""

    device, precision, weights_hash = CPU, "fp32", "none"
    spec = EncoderSpec(
        name="mean",
        dim=3,
        architecture=Architecture(kind="mean", model="mean"),
        input_px=TILE_PX,
        resize_px=None,
    )

    def encode(self, tiles_u8: Any) -> torch.Tensor:
        """See `TileEncoder.encode`."""
        return torch.from_numpy(exact_means(np.asarray(tiles_u8)))


def warm(job: Job) -> TileEncoder:
    """The encoder of a job, after a sample of the tiles."""
    torch.set_num_threads(1)
    encoder: TileEncoder = MeanEncoder()
    with open_slide(job.path) as slide:
        batches = iter_tiles(
            slide, table_of(slide, job.sample), batch_size=job.batch_size
        )
        np.save(job.pixels, np.concatenate([batch.tiles.copy() for batch in batches]))
    if job.network != "mean":
        encoder = load_encoder(job.network, device="cpu", precision="fp32")
    ours(replace(job, limit=4), encoder)
    return encoder


def table_of(slide: Slide, job: Job) -> TileTable:
    """The job's tiles."""
    table = tile_grid(slide, TilesConfig(tile_mpp=str(job.tile_mpp)))
    return replace(table, coords_l0=job.coords_l0(), columns={})


def ours(job: Job, encoder: TileEncoder) -> np.ndarray:
    """Rows, from the open slide on."""
    config = StreamConfig(decode_threads=1)
    with open_slide(job.path) as slide:
        rows, _ = embed_tiles(
            slide,
            table_of(slide, job),
            encoder,
            batch_size=job.batch_size,
            config=config,
        )
    return rows


def write_network(folder: Path) -> str:
    """A network under seeded weights, with a config that takes tiles as they are.

    `folder` is named like one of `TIMM_NAMES`.
    """
    name, arguments = TIMM_NAMES[folder.name]
    folder.mkdir()
    torch.manual_seed(0)
    # weights by timm's names; of a transformer they are drawn here
    weights = {
        key: values.contiguous()
        for key, values in NETWORKS[folder.name]().state_dict().items()
    }
    for key in ("cls_token", "pos_embed"):
        if key in weights:
            weights[key] = torch.randn_like(weights[key]) * 0.02
    save_file(weights, folder / "model.safetensors")
    sizes = {"input_size": [3, TILE_PX, TILE_PX], "crop_pct": 1.0}
    config = {
        "architecture": name,
        "model_args": arguments,
        "pretrained_cfg": {**sizes, "mean": MEAN, "std": STD},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def main() -> None:
    """Warms up and measures."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    encoder = warm(job)
    measure(job, lambda: ours(job, encoder))


if __name__ == "__main__":
    main()
