"""The hardest rivals of `bench_job`: no package, but a loop by an expert around a fast reader.

`python job_loops.py WAY JOB.json`, with a Python that has the readers. `cucim_loop` is what a
reader of our README could write in place of our job. It keeps no memory limit, does not resume,
reads only what cuCIM reads, and takes a damaged tile for pixels.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import interpolate

from job_work import MEAN, STD, TILE_PX, Job, exact_means, measure, network

Encode = Callable[[np.ndarray], np.ndarray]  # tiles, uint8 (b, H, W, 3) -> rows


def shrunk(tiles: np.ndarray) -> np.ndarray:
    """Tiles of the job's size, by PyTorch's Lanczos filter on uint8."""
    if tiles.shape[1] == TILE_PX:
        return tiles
    batch = torch.from_numpy(tiles).permute(0, 3, 1, 2)
    small = interpolate(batch, (TILE_PX, TILE_PX), mode="lanczos", antialias=True)
    return small.permute(0, 2, 3, 1).numpy()


def cucim_loop(job: Job, encode: Encode) -> np.ndarray:
    """cuCIM's own batches, which its thread decodes while this one computes."""
    from cucim.clara import CuImage

    size, corners = (job.size_lv, job.size_lv), job.coords_l0().tolist()
    options = {"batch_size": job.batch_size, "num_workers": 1}
    batches = CuImage(job.path).read_region(corners, size, level=job.level, **options)
    tiles = (np.asarray(batch) for batch in batches)
    # the last batch may be one tile without the axis of tiles
    shaped = (batch.reshape(-1, *size[::-1], 3) for batch in tiles)
    return np.concatenate([encode(shrunk(batch)) for batch in shaped])


def fastslide_loop(job: Job, encode: Encode) -> np.ndarray:
    """FastSlide, tile by tile; it averages chroma in another way than libjpeg."""
    from fastslide import FastSlide

    slide, size = FastSlide.from_file_path(job.path), (job.size_lv, job.size_lv)
    # its corners are px of the level
    corners = (job.coords_l0() * job.size_lv // job.size_l0).tolist()

    def batches() -> Iterator[np.ndarray]:
        for start in range(0, len(corners), job.batch_size):
            part = corners[start : start + job.batch_size]
            yield np.stack(
                [slide.read_region((x, y), job.level, size).numpy() for x, y in part]
            )

    return np.concatenate([encode(shrunk(batch)) for batch in batches()])


def microtome_loop(job: Job, encode: Encode) -> np.ndarray:
    """Microtome's batches of stored tiles: only for tiles that the file stores as they are."""
    import microtome

    slide = microtome.open(job.path)
    columns = -(-slide.dimensions[0] // TILE_PX)
    column, row = (job.coords_l0() // TILE_PX).T
    indices = (row * columns + column).tolist()
    starts = range(0, len(indices), job.batch_size)
    parts = (indices[start : start + job.batch_size] for start in starts)
    return np.concatenate([encode(slide.read_batch(0, part)) for part in parts])


def encoder(name: str) -> Encode:
    """The job's network: from grey levels to rows."""
    if name == "mean":
        return exact_means
    if name == "pixels":
        return lambda tiles: tiles.reshape(len(tiles), -1)
    # channels last: what a CPU convolves fastest
    model = network(name).to(memory_format=torch.channels_last)
    mean, std = torch.tensor([MEAN, STD]).view(2, 1, 3, 1, 1) * 255

    @torch.inference_mode()
    def encode(tiles: np.ndarray) -> np.ndarray:
        batch = torch.from_numpy(tiles).permute(0, 3, 1, 2)
        return model(batch.float().sub_(mean).div_(std)).numpy()

    return encode


def main() -> None:
    """Writes a sample of the tiles, so that all is imported, and then measures the way."""
    torch.set_num_threads(1)
    way, job = sys.argv[1], Job(**json.loads(Path(sys.argv[2]).read_text()))
    run, encode = globals()[way], encoder(job.network)
    np.save(job.pixels, run(job.sample, encoder("pixels")).ravel())
    run(replace(job, limit=4), encode)
    measure(job, lambda: run(job, encode))


if __name__ == "__main__":
    main()
