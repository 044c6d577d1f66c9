"""`TileDataset` in PyTorch's own loaders: every tile once, resumable, right pixels, flat memory."""

import json
import multiprocessing
import operator
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import pytest
import torch
from torch import distributed
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader

import thinsection as ts
from thinsection.config import replace_flat
from thinsection.errors import BudgetError, InvalidInputError, SlideReadError
from thinsection.results.tile_dataset import TileDataset
from thinsection.testing.memory import run_and_measure
from thinsection.testing.synthetic import PyramidKind, write_he_slide, write_pyramid

pytestmark = [
    # the machine of the tests may have fewer CPUs than workers
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    # torchdata asks PyTorch for all of its names
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]
SIZES = {"a": (2300, 1700), "b": (1100, 900), "c": (1500, 2100), "d": (700, 800)}
MEMORY = "2MiB"  # 85 tiles a buffer
BATCH = 16
Tile = tuple[str, int, int]


def settings(**flat: object) -> ts.RunConfig:
    first = {"tile_px": 64, "memory": "64MiB", "until": "tiles"}
    return replace_flat(ts.RunConfig(), first | flat)


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slides")
    for seed, (name, size) in enumerate(SIZES.items()):
        write_he_slide(folder / f"{name}.svs", size, seed=seed, downsamples=(1, 4))
    return folder


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, slides: Path) -> Path:
    out = tmp_path_factory.mktemp("tiled") / "results"
    ts.run([slides], out=out, config=settings())
    return out


def loader(dataset: TileDataset, num_workers: int = 2) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=BATCH, num_workers=num_workers)


def tiles_of(batch: dict[str, Any]) -> list[Tile]:
    corners = batch["coords_l0"].tolist()
    return [(name, x, y) for name, (x, y) in zip(batch["slide_id"], corners)]


def tiles_in(batches: Iterator[dict[str, Any]] | DataLoader[Any]) -> list[Tile]:
    return [tile for batch in batches for tile in tiles_of(batch)]


def all_tiles(out: Path) -> Counter[Tile]:
    results = ts.open_results(out)
    tiles: Counter[Tile] = Counter()
    for name in results.slides:
        for x, y in results.tiles(name).coords_l0.tolist():
            tiles[name, x, y] += 1
    return tiles


# each tile once


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_an_epoch_has_each_tile_once(out: Path, num_workers: int) -> None:
    dataset = TileDataset(out, memory=MEMORY, open_slides=2)
    assert Counter(tiles_in(loader(dataset, num_workers))) == all_tiles(out)
    assert dataset.num_tiles == all_tiles(out).total() > 3 * dataset.buffer_tiles


def train_rank(rank: int, out: str, folder: str) -> None:
    """One of two DDP ranks: trains a network for two epochs, and writes the tiles that it saw.

    The second epoch has even shards, so that ranks need not wait for each other with `Join`.
    """
    # as in a rank of torchrun; a process that was spawned would spawn its workers
    multiprocessing.set_start_method("fork", force=True)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    network = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    for epoch, even in enumerate((False, True)):
        dataset = TileDataset(out, memory=MEMORY, open_slides=2, even=even)
        dataset.set_epoch(epoch)
        seen = []
        with Join([network], enable=not even):
            for batch in loader(dataset):
                means = batch["image"].float().mean(dim=(2, 3))
                network(means / 255).mean().backward()
                seen += tiles_of(batch)
        Path(folder, f"{epoch}_{rank}.json").write_text(json.dumps(seen))
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.mark.check
@pytest.mark.timeout(300)
def test_two_ranks_with_two_workers_see_each_tile_once(
    out: Path, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=train_rank, args=(rank, str(out), str(tmp_path)))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    ranks = {}
    for path in tmp_path.glob("*.json"):
        ranks[path.stem] = [tuple(tile) for tile in json.loads(path.read_text())]
    assert Counter(ranks["0_0"] + ranks["0_1"]) == all_tiles(out)
    assert len(ranks["1_0"]) == len(ranks["1_1"])
    even = Counter(ranks["1_0"] + ranks["1_1"])
    assert max(even.values()) == 1
    assert even.total() == all_tiles(out).total() // 4 * 4


# epochs and positions


def test_epochs_differ_and_one_epoch_is_the_same_again(out: Path) -> None:
    dataset = TileDataset(out, memory=MEMORY, seed=5)
    first = tiles_in(loader(dataset))
    dataset.set_epoch(1)
    second = tiles_in(loader(dataset))
    dataset.set_epoch(0)
    assert tiles_in(loader(dataset)) == first
    assert tiles_in(loader(TileDataset(out, memory=MEMORY, seed=6))) != first
    assert second != first and Counter(second) == Counter(first)


def test_workers_that_persist_learn_the_epoch(out: Path) -> None:
    dataset = TileDataset(out, memory=MEMORY)
    lasting = DataLoader(
        dataset, batch_size=BATCH, num_workers=2, persistent_workers=True
    )
    first = tiles_in(lasting)
    dataset.set_epoch(1)
    second = tiles_in(lasting)
    dataset.set_epoch(0)
    assert tiles_in(lasting) == first != second


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("num_used", [1, 7, 10])
def test_a_resumed_epoch_goes_on_with_the_same_batches(
    out: Path, num_workers: int, num_used: int
) -> None:
    dataset = TileDataset(out, memory=MEMORY, open_slides=2)
    dataset.set_epoch(4)
    batches = []
    text = ""
    for number, batch in enumerate(loader(dataset, num_workers), start=1):
        dataset.advance(batch)
        batches.append(tiles_of(batch))
        if number == num_used:
            text = json.dumps(dataset.state_dict())
    again = TileDataset(out, memory=MEMORY, open_slides=2)
    again.load_state_dict(json.loads(text))
    rest = [tiles_of(batch) for batch in loader(again, num_workers)]
    assert rest == batches[num_used:]
    again.set_epoch(5)
    assert Counter(tiles_in(loader(again, num_workers))) == all_tiles(out)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loader_of_torchdata_resumes_it(out: Path, num_workers: int) -> None:
    """Torchdata asks the workers for their positions, and needs no `advance`."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    dataset = TileDataset(out, memory=MEMORY, open_slides=2)
    first = stateful(dataset, batch_size=BATCH, num_workers=num_workers)
    batches = []
    for number, batch in enumerate(first, start=1):
        batches.append(tiles_of(batch))
        if number == 7:
            state = first.state_dict()
    again = TileDataset(out, memory=MEMORY, open_slides=2)
    second = stateful(again, batch_size=BATCH, num_workers=num_workers)
    second.load_state_dict(state)
    assert [tiles_of(batch) for batch in second] == batches[7:]


def test_without_workers_the_position_needs_no_help(out: Path) -> None:
    dataset = TileDataset(out, memory=MEMORY)
    items = iter(dataset)
    seen = [next(items)["position"] for _ in range(100)]
    state = dataset.state_dict()
    items.close()  # type: ignore[attr-defined]
    assert seen == list(range(100))
    dataset.load_state_dict(state)
    assert next(iter(dataset))["position"] == 100


def test_a_position_of_another_order_is_refused(out: Path) -> None:
    state = TileDataset(out, memory=MEMORY, seed=1).state_dict()
    with pytest.raises(
        InvalidInputError, match="state must be of a dataset with seed 0, got 1"
    ):
        TileDataset(out, memory=MEMORY).load_state_dict(state)


def test_another_number_of_workers_is_refused(out: Path) -> None:
    dataset = TileDataset(out, memory=MEMORY)
    dataset.advance(next(iter(loader(dataset, 2))))
    dataset.load_state_dict(dataset.state_dict())
    with pytest.raises(
        InvalidInputError, match="num_workers must be 2 as in the state, got 1"
    ):
        next(iter(dataset))


# pixels


def test_pixels_are_those_of_openslide(out: Path, slides: Path) -> None:
    """Level 0 of these slides is JPEG, which `auto` only reads itself where it equals OpenSlide."""
    dataset = TileDataset(out, memory=MEMORY, open_slides=2)
    opened = {name: openslide.OpenSlide(slides / f"{name}.svs") for name in SIZES}
    for item in dataset:
        x, y = item["coords_l0"].tolist()
        region = opened[item["slide_id"]].read_region((x, y), 0, (64, 64))
        expected = np.asarray(region.convert("RGB"))
        np.testing.assert_array_equal(
            item["image"].numpy(), expected.transpose(2, 0, 1)
        )


def test_a_tile_that_is_resampled_shows_its_place(tmp_path: Path) -> None:
    kind = PyramidKind(downsamples=(1,), compression=None)
    (level,) = write_pyramid(tmp_path / "s.tif", (700, 430), kind)
    out = tmp_path / "out"
    config = settings(tile_mpp="1.0", slide_mpp="0.5", tile_filter=[])
    ts.run([tmp_path / "s.tif"], out=out, config=config)
    dataset = TileDataset(out, memory=MEMORY, transform=lambda tile: tile)
    count = 0
    for item in dataset:
        x, y = item["coords_l0"].tolist()
        part = level[y : y + 128, x : x + 128]
        means = part.reshape(64, 2, 64, 2, 3).mean(axis=(1, 3))
        # the filter is not a mean of 2 x 2, but inside the red ramp it is
        inside = np.abs(item["image"].astype(float) - means)[4:-4, 4:-4, 0]
        assert np.median(inside) <= 1
        count += 1
    assert count == dataset.num_tiles > 3


def test_a_transform_for_pictures_is_told_what_it_gets(out: Path) -> None:
    dataset = TileDataset(
        out, memory=MEMORY, transform=operator.methodcaller("convert", "L")
    )
    with pytest.raises(AttributeError, match="'convert'") as raised:
        next(iter(dataset))
    (note,) = raised.value.__notes__
    assert "Image.fromarray(tile)" in note


def test_labels_columns_and_a_transform_are_in_the_items(out: Path) -> None:
    messages: list[str] = []
    dataset = TileDataset(
        out,
        memory=MEMORY,
        labels={"a": 1, "c": 0, "unknown": 7},
        columns=["tissue_fraction"],
        transform=lambda tile: tile.mean(),
        on_message=messages.append,
    )
    assert len(messages) == 1 and messages[0].endswith("other slides: unknown")
    assert dataset.slide_ids == ("a", "c")
    results = ts.open_results(out)
    tables = {name: results.tiles(name) for name in dataset.slide_ids}
    for item in dataset:
        table = tables[item["slide_id"]]
        assert item["label"] == {"a": 1, "c": 0}[item["slide_id"]]
        assert item["tissue_fraction"] == table.columns["tissue_fraction"][item["row"]]
        np.testing.assert_array_equal(item["coords_l0"], table.coords_l0[item["row"]])
        assert 0 < item["image"] < 255


# what is refused or left out


@pytest.fixture
def with_bad_slide(out: Path, slides: Path, tmp_path: Path) -> Path:
    """The same folder; slide b was cut after the run, as on a disk that is full."""
    copies = tmp_path / "slides"
    shutil.copytree(slides, copies)
    moved = tmp_path / "results"
    shutil.copytree(out, moved)
    for ledger in moved.glob("slides/*/slide.json"):
        ledger.write_text(ledger.read_text().replace(str(slides), str(copies)))
    bad = copies / "b.svs"
    bad.write_bytes(bad.read_bytes()[:5000])
    return moved


def test_a_bad_slide_is_reported_and_the_others_are_read(with_bad_slide: Path) -> None:
    messages: list[str] = []
    dataset = TileDataset(with_bad_slide, memory=MEMORY, on_message=messages.append)
    tiles = Counter(tiles_in(loader(dataset, 0)))
    expected = all_tiles(with_bad_slide)
    assert tiles == Counter({t: n for t, n in expected.items() if t[0] != "b"})
    assert len(messages) == 1 and messages[0].startswith("b: left out: ")


def test_a_bad_slide_is_a_warning_by_default(with_bad_slide: Path) -> None:
    with pytest.warns(UserWarning, match="b: left out: "):
        list(TileDataset(with_bad_slide, memory=MEMORY))


def test_even_shards_keep_their_size_when_a_slide_is_bad(with_bad_slide: Path) -> None:
    dataset = TileDataset(
        with_bad_slide, memory="8MiB", even=True, on_message=lambda text: None
    )
    items = list(dataset)
    assert len(items) == dataset.num_tiles
    assert {item["slide_id"] for item in items} == {"a", "c", "d"}


def test_even_shards_of_a_bad_slide_alone_are_an_error(with_bad_slide: Path) -> None:
    dataset = TileDataset(
        with_bad_slide, slides=["b"], even=True, on_message=lambda text: None
    )
    with pytest.raises(SlideReadError, match="even shards must have a readable tile"):
        list(dataset)


def test_another_file_in_the_place_of_a_slide_is_left_out(
    with_bad_slide: Path, slides: Path
) -> None:
    shutil.copy(slides / "a.svs", with_bad_slide.parent / "slides" / "b.svs")
    messages: list[str] = []
    dataset = TileDataset(
        with_bad_slide, slides=["b"], memory=MEMORY, on_message=messages.append
    )
    assert not list(dataset)
    assert "slide must be the file of the run" in messages[0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"memory": "20kB"},
            BudgetError,
            "memory must be >= 24.0 KiB for two tiles of 64 px",
        ),
        ({"columns": ["tissue"]}, InvalidInputError, "did you mean 'tissue_fraction'"),
        ({"slides": ["e"]}, InvalidInputError, "slide_id must be in this folder"),
        ({"labels": {}}, InvalidInputError, "slides must have tiles of grid"),
        ({"grid": "256px"}, InvalidInputError, "grid must match one of"),
        ({"open_slides": 0}, InvalidInputError, "open_slides must be >= 1, got 0"),
    ],
)
def test_what_cannot_be_is_refused(
    out: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        TileDataset(out, **arguments)


# memory


def make_cohort(folder: str, num_slides: int) -> str:
    """Slides of 256 tiles each; a tile is a segment of the file, which no cache keeps."""
    root = Path(folder) / str(num_slides)
    root.mkdir(parents=True)
    kind = PyramidKind(downsamples=(1,), compression="jpeg", tile=(64, 64))
    write_pyramid(root / "0.tif", (1024, 1024), kind)
    for number in range(1, num_slides):
        os.link(root / "0.tif", root / f"{number}.tif")
    cohort = root / "cohort.csv"
    rows = [f"{number},{number}.tif\n" for number in range(num_slides)]
    cohort.write_text("slide_id,slide_path\n" + "".join(rows))
    config = settings(slide_mpp="0.5", tile_filter=[])
    ts.run([cohort], out=root / "out", config=config)
    return str(root / "out")


def read_epochs(out: str) -> int:
    """Number of tiles of two epochs."""
    dataset = TileDataset(out, memory="32MiB", open_slides=2)
    num_tiles = sum(1 for _ in dataset)
    dataset.set_epoch(1)
    return num_tiles + sum(1 for _ in dataset)


@pytest.mark.check
@pytest.mark.timeout(300)
def test_memory_does_not_grow_with_the_tiles(tmp_path: Path) -> None:
    peaks = []
    for num_slides in (12, 48):
        out = make_cohort(str(tmp_path), num_slides)
        measured = run_and_measure(__name__, "read_epochs", out=out)
        assert measured.result == 2 * 256 * num_slides
        peaks.append(measured.growth_bytes)
    # two buffers of 16 MiB, 5/32 of that, and 24 MiB for readers and for modules that are imported
    assert max(peaks) < (32 + 5 + 24) << 20
    assert peaks[1] < peaks[0] + (6 << 20)
