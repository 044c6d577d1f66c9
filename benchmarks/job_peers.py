"""The peers' ways through the job of `bench_job`, for a Python that has them; nothing of ours here.

`python job_peers.py WAY JOB.json`: the job's tiles, read by one worker through the classes that
WAY's own feature extraction reads with, through its own transform (without a resize to 224 px, and
with ImageNet's mean and std) and the job's network. Rows go to a file; one line of JSON says what
it took in seconds, CPU-seconds and peak memory once everything was imported.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from job_work import (
    CPU,
    MEAN,
    READERS,
    STD,
    TILE_PX,
    Job,
    Pixels,
    measure,
    network,
    through,
)


def to_tensor() -> Callable[[Any], Tensor]:
    """The last steps of most transforms: a channel first, in [0, 1], normalised."""
    from torchvision import transforms

    return transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])


def loader(dataset: Any, job: Job, **options: Any) -> Any:
    """A DataLoader that reads in this process."""
    return torch.utils.data.DataLoader(
        dataset, job.batch_size, num_workers=0, **options
    )


def openslide_pillow(job: Job, model: nn.Module) -> np.ndarray:
    """The loop that most pipelines began with: OpenSlide, Pillow's Lanczos, torch."""
    import openslide
    from PIL import Image

    scale = torch.tensor([MEAN, STD]) * 255

    def tile(corner: list[int]) -> np.ndarray:
        image = slide.read_region(tuple(corner), 0, (job.size_l0, job.size_l0)).convert(
            "RGB"
        )
        return np.asarray(image.resize((TILE_PX, TILE_PX), Image.Resampling.LANCZOS))

    def batches() -> Iterator[Tensor]:
        coords = job.coords_l0().tolist()
        for start in range(0, len(coords), job.batch_size):
            tiles = np.stack(
                [tile(corner) for corner in coords[start : start + job.batch_size]]
            )
            batch = torch.from_numpy(tiles).float().sub_(scale[0]).div_(scale[1])
            yield batch.permute(0, 3, 1, 2)

    with openslide.OpenSlide(job.path) as slide:
        return through(batches(), model)


def trident(job: Job, model: nn.Module) -> np.ndarray:
    """WSIPatcher and its dataset; by µm/px, where its command goes by magnification (40 to 20).

    `reader_type` is what `--reader_type` of its command sets. Pixels are taken as PIL images, which
    its transform needs.
    """
    from trident import WSIPatcherDataset, load_wsi
    from trident.patch_encoder_models.utils.transform_utils import get_eval_transforms

    known = {"src_pixel_size": job.mpp, "dst_pixel_size": job.tile_mpp, "pil": True}
    wsi = load_wsi(job.path, reader_type=READERS["trident"])
    patcher = wsi.create_patcher(TILE_PX, custom_coords=job.coords_l0(), **known)
    dataset = WSIPatcherDataset(patcher, get_eval_transforms(MEAN, STD))
    return through((tiles for tiles, _ in loader(dataset, job)), model)


def slide2vec(job: Job, model: nn.Module) -> np.ndarray:
    """Super tiles and its encode loop; the backend is what hs2p's 'auto' takes."""
    from hs2p.wsi.reader import open_slide, resolve_backend
    from slide2vec.data.dataset import TileIndexDataset
    from slide2vec.data.tile_reader import OnTheFlyBatchTileCollator
    from slide2vec.runtime.batching import build_batch_preprocessor, run_forward_pass
    from slide2vec.runtime.types import LoadedModel

    path, (x, y) = Path(job.path), job.coords_l0().T
    backend = resolve_backend("auto", wsi_path=path).backend
    assert backend == READERS["slide2vec"], backend
    sizes = {
        "requested_tile_size_px": TILE_PX,
        "read_tile_size_px": job.size_l0,
        "overlap": 0.0,
    }
    steps = {
        "tile_size_lv0": job.size_l0,
        "step_px_lv0": job.size_l0,
        "num_tiles": len(x),
    }
    levels = {
        "read_level": 0,
        "level_downsamples": open_slide(job.path, backend).level_downsamples,
    }
    tiling = SimpleNamespace(
        x=x, y=y, tile_index=np.arange(len(x)), **sizes, **steps, **levels
    )
    known = {"backend": backend, "num_cucim_workers": 1}
    collate = OnTheFlyBatchTileCollator(image_path=path, tiling_result=tiling, **known)
    model.encode_tiles = model.forward
    described = {"name": "job", "level": "tile", "feature_dim": 1, "device": CPU}
    loaded = LoadedModel(model=model, transforms=to_tensor(), **described)
    batches = loader(TileIndexDataset(collate.ordered_indices), job, collate_fn=collate)
    prepare = build_batch_preprocessor(loaded, tiling)
    indices, rows = run_forward_pass(
        batches, loaded, nullcontext(), batch_preprocessor=prepare
    )
    return rows.numpy()[np.argsort(indices.numpy())]


def lazyslide(job: Job, model: nn.Module) -> np.ndarray:
    """`feature_extraction` itself, with a callable model and the transform of its models."""
    import geopandas
    import lazyslide as zs
    import shapely
    from lazyslide.preprocess._tiles import _add_tiles
    from torchvision.transforms import v2
    from wsidata import TileSpec, open_wsi

    steps = [
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN, STD),
    ]
    wsi, low = (
        open_wsi(job.path, store=None, reader=READERS["lazyslide"]),
        job.coords_l0(),
    )
    boxes = geopandas.GeoDataFrame(geometry=shapely.box(*low.T, *(low + job.size_l0).T))
    _add_tiles(
        wsi,
        boxes,
        TileSpec.from_wsidata(wsi, TILE_PX, mpp=job.tile_mpp),
        key_added="tiles",
    )
    known = {"device": "cpu", "amp": False, "pbar": False, "return_features": True}
    known |= {"transform": v2.Compose(steps), "batch_size": job.batch_size}
    return zs.tl.feature_extraction(wsi, model, **known)


def mussel(job: Job, model: nn.Module) -> np.ndarray:
    """Its dataset with its default transform (resize, ImageNet) and its loop."""
    from mussel.datasets.tile_coords import WholeSlideImageTileCoordDataset
    from mussel.utils.feature_extract import process_dataset
    from mussel.utils.ml import collate_features

    attrs = {"patch_size": job.size_l0, "patch_level": 0}
    attrs |= {"patch_size_to_resize_to_for_desired_mpp": TILE_PX}
    os.environ["MUSSEL_WSI_BACKEND"] = READERS["mussel"]  # as 'auto' takes it
    coords = list(map(tuple, job.coords_l0().tolist()))
    dataset = WholeSlideImageTileCoordDataset(
        coords, attrs, job.path, init_wsi_in_worker=False
    )
    with torch.inference_mode():
        batches = loader(dataset, job, collate_fn=collate_features)
        return process_dataset(dataset, batches, model_fun=model).features


def atlaspatch(job: Job, model: nn.Module) -> np.ndarray:
    """Its embedding service with an extractor of ours, from a file of coordinates as it has one."""
    import h5py
    from atlas_patch.core.config import (
        ExtractionConfig,
        FeatureExtractionConfig,
        OutputConfig,
    )
    from atlas_patch.core.models import ExtractionResult, Slide
    from atlas_patch.core.wsi import WSIFactory
    from atlas_patch.models.patch.base import PatchFeatureExtractor
    from atlas_patch.services.feature_embedding import PatchFeatureEmbeddingService

    coords, known = job.coords_l0(), {"name": "job", "embedding_dim": 1, "device": CPU}
    extractor = PatchFeatureExtractor(model=model, preprocess=to_tensor(), **known)
    tiles = ExtractionConfig(TILE_PX, target_magnification=round(10 / job.tile_mpp))
    features = {"device": "cpu", "batch_size": job.batch_size, "precision": "float32"}
    size_level = np.tile([job.size_l0, job.size_l0, 0], (len(coords), 1))
    with tempfile.TemporaryDirectory() as folder:
        path, output = Path(folder) / "coords.h5", OutputConfig(Path(folder))
        with h5py.File(path, "w") as file:
            file["coords"] = np.hstack([coords, size_level])
        chosen = FeatureExtractionConfig(["job"], **features)
        service = PatchFeatureEmbeddingService(tiles, output, chosen, registry=object())
        result = ExtractionResult(Slide(Path(job.path)), path, len(coords))
        known = {"wsi": WSIFactory.load(job.path), "extractor": extractor}
        service._embed_with_extractor(result=result, **known)
        with h5py.File(path) as file:
            return file["features/job"][:]


def tiatoolbox(job: Job, model: nn.Module) -> np.ndarray:
    """The dataset of its engines; coordinates in px at the tiles' µm/px."""
    from tiatoolbox.models.architecture.vanilla import _infer_batch
    from tiatoolbox.models.dataset.dataset_abc import WSIPatchDataset

    known = {"resolution": job.tile_mpp, "units": "mpp", "auto_get_mask": False}
    known |= {
        "patch_input_shape": (TILE_PX, TILE_PX),
        "stride_shape": (TILE_PX, TILE_PX),
    }
    dataset, transform = WSIPatchDataset(Path(job.path), **known), to_tensor()
    dataset.preproc_func = lambda tile: transform(tile).permute(1, 2, 0)
    low = np.rint(job.coords_l0() * (job.mpp / job.tile_mpp)).astype(int)
    dataset.inputs = np.hstack([low, low + TILE_PX])
    images = (batch["image"] for batch in loader(dataset, job))
    return np.concatenate([_infer_batch(model, image, "cpu") for image in images])


def main() -> None:
    """Writes a sample of the tiles, so that all is imported, and then measures the way."""
    torch.set_num_threads(1)
    way, job = sys.argv[1], Job(**json.loads(Path(sys.argv[2]).read_text()))
    run, model = globals()[way], network(job.network)
    np.save(job.pixels, run(job.sample, Pixels()).astype(np.uint8))
    run(replace(job, limit=4), model)
    measure(job, lambda: run(job, model))


if __name__ == "__main__":
    main()
