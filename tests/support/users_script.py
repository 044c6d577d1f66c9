"""A user's script: its functions say `ts.`, and objects go to other processes and come back.

    python users_script.py FOLDER spawn|joblib|dask|ray

FOLDER has two slides. The script prints 'equal' when all that the processes returned is what this
process computes.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import thinsection as ts
from thinsection.tiles import TilesConfig

SIZE = (300, 200)
Map = Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], list[Any]]


class Colours(torch.nn.Module):
    """A network of the script's own, with other weights in each process that makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(3, 4)

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.last(tiles.float().mean(dim=(2, 3)) / 255)
        return answer


def table_of(slide: Any) -> Any:
    """Function without objects of its own, but for the module."""
    return ts.tile_grid(slide, TilesConfig(tile_px=128, tile_mpp="native"))


def pixels_of(slide: Any) -> Any:
    """Takes a slide that another process has opened."""
    with slide:
        return slide.read_region((200, 100), 0, SIZE), slide.slide_path, slide.choice


def means_of(slide: Any, table: Any) -> Any:
    """Takes a slide and its table."""
    means = []
    with slide:
        for batch in ts.iter_tiles(slide, table, batch_size=5):
            means += batch.tiles.mean(axis=(1, 2, 3)).tolist()
    return means


def embeddings_of(encoder: Any, slide_encoder: Any, slide: Any, table: Any) -> Any:
    """Takes encoders, too."""
    torch.set_num_threads(1)
    with slide:
        tiles, kept = ts.embed_tiles(slide, table, encoder, batch_size=4)
    return tiles, slide_encoder.encode(tiles, kept.coords_l0, tile_px_l0=128)


def opened(path: Any) -> Any:
    """Returns objects that the caller goes on with."""
    slide = ts.open_slide(path)
    table = table_of(slide)
    batch = copy.copy(next(ts.iter_tiles(slide, table, batch_size=3)))
    return slide, table, ts.tissue_mask(slide), batch, ts


def stored_in(results: Any, slide_id: str) -> Any:
    """Takes a results folder."""
    return results.tiles(slide_id), results, len(results)


def sums_of(dataset: Any) -> Any:
    """Takes a dataset of tiles."""
    torch.set_num_threads(1)
    return [(i["slide_id"], i["row"], int(i["image"].sum())) for i in dataset]


@contextmanager
def spawned() -> Iterator[Map]:
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(2) as pool:
        yield pool.starmap


@contextmanager
def in_joblib() -> Iterator[Map]:
    import joblib

    def run(function: Any, rows: Any) -> list[Any]:
        calls = [joblib.delayed(function)(*row) for row in rows]
        return list(joblib.Parallel(n_jobs=2, backend="loky")(calls))

    yield run


@contextmanager
def in_dask() -> Iterator[Map]:
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address="localhost:0"
        ) as cluster,
        Client(cluster) as client,
    ):
        yield lambda function, rows: client.gather(
            [client.submit(function, *row, pure=False) for row in rows]
        )


@contextmanager
def in_ray() -> Iterator[Map]:
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
    )

    def run(function: Any, rows: Any) -> list[Any]:
        remote = ray.remote(function)
        return list(ray.get([remote.remote(*row) for row in rows]))

    try:
        yield run
    finally:
        ray.shutdown()


WAYS = {"spawn": spawned, "joblib": in_joblib, "dask": in_dask, "ray": in_ray}


def check(folder: Path, run: Map) -> None:
    """Raises AssertionError where a process returned other values than this one computes."""
    torch.set_num_threads(1)
    paths = sorted(folder.glob("*.svs"))
    slides = [ts.open_slide(path) for path in paths]
    truths = [slide.read_region((200, 100), 0, SIZE) for slide in slides]
    assert (truths[0] != truths[1]).any()

    answers = run(pixels_of, [(slide,) for slide in slides] * 2)
    for (pixels, path, choice), slide, truth in zip(
        answers, slides * 2, truths * 2, strict=True
    ):
        np.testing.assert_array_equal(pixels, truth)
        assert (path, choice) == (slide.slide_path, slide.choice)

    tables = run(table_of, [(slide,) for slide in slides])
    for table, slide in zip(tables, slides, strict=True):
        np.testing.assert_array_equal(table.coords_l0, table_of(slide).coords_l0)
    pairs = list(zip(slides, tables, strict=True))
    for means, (slide, table) in zip(run(means_of, pairs), pairs, strict=True):
        expected = [tile.mean() for tile in slide.tiles(table)]
        np.testing.assert_allclose(means, expected)

    returned = run(opened, [(path,) for path in paths])
    for (slide, table, mask, batch, module), original, truth in zip(
        returned, slides, truths, strict=True
    ):
        assert module is ts
        np.testing.assert_array_equal(slide.read_region((200, 100), 0, SIZE), truth)
        np.testing.assert_array_equal(mask.mask, ts.tissue_mask(original).mask)
        for row, tile in zip(batch.indices, batch.tiles, strict=True):
            np.testing.assert_array_equal(tile, original.tiles(table)[int(row)])
        assert batch.source.slide_path == original.slide_path

    mean = ts.load_slide_encoder("mean")
    encoders = [
        ts.load_encoder("efficientnet_lite0", device="cpu"),
        ts.make_encoder(Colours(), name="colours", tile_px=128, device="cpu"),
    ]
    for encoder in encoders:
        rows: list[Any] = [(encoder, mean, slide, table) for slide, table in pairs]
        for (tiles, vector), row in zip(run(embeddings_of, rows), rows, strict=True):
            with ts.open_slide(row[2].slide_path) as slide:
                embeddings, _ = ts.embed_tiles(slide, row[3], encoder, batch_size=4)
            np.testing.assert_allclose(tiles, embeddings, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(vector, embeddings.mean(0), rtol=1e-5, atol=1e-6)

    config = ts.RunConfig()
    ts.run(paths, out=folder / "out", config=config, until="tiles")
    results = ts.open_results(folder / "out")
    rows = [(results, slide_id) for slide_id in results]
    for (tiles, copied, count), (_, slide_id) in zip(
        run(stored_in, rows), rows, strict=True
    ):
        stored = results.tiles(slide_id)
        np.testing.assert_array_equal(tiles.coords_l0, stored.coords_l0)
        assert count == len(copied) == 2

    dataset = ts.TileDataset(results, memory="4MiB", open_slides=1)
    first, second = run(sums_of, [(dataset,), (dataset,)])
    assert first == second == sums_of(dataset)
    assert {slide_id for slide_id, _, _ in first} == set(results)


if __name__ == "__main__":
    with WAYS[sys.argv[2]]() as run_by:
        check(Path(sys.argv[1]), run_by)
    sys.stdout.write("equal\n")
