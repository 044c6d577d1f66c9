"""Tiles by number: the items of the stream, in any order, thread, fork and spawn."""

import pickle
import random
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import pytest
import torch
from tests.results.conftest import COARSE, FINE
from tests.results.test_tile_dataset import make_cohort
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from thinsection.errors import InvalidInputError, SlideOpenError
from thinsection.results.indexed_tiles import IndexedTiles
from thinsection.results.tile_dataset import TileDataset
from thinsection.results.tiled_slide import TiledSlide
from thinsection.slide import Slide
from thinsection.testing.memory import run_and_measure

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def indexed(out: Path, grid: str = FINE, **more: Any) -> IndexedTiles:
    return TileDataset(out, grid=grid, **more).map_style()


@pytest.mark.parametrize("grid", [FINE, COARSE])
def test_an_item_is_that_of_the_stream_to_the_byte(two_grids: Path, grid: str) -> None:
    dataset = TileDataset(
        two_grids,
        grid=grid,
        memory="2MiB",
        labels={"a": 3, "b c": 5},
        columns=["tissue_fraction"],
    )
    tiles = dataset.map_style()
    items = list(dataset)
    assert sorted(item["index"] for item in items) == list(range(len(tiles)))
    assert {item["slide_id"] for item in items} == {"a", "b c"}
    for item in items:
        same = tiles[item["index"]]
        del item["shard"], item["position"]
        assert same.keys() == item.keys()
        for name, value in item.items():
            np.testing.assert_array_equal(same[name], value)
            assert type(same[name]) is type(value), name
            assert getattr(same[name], "dtype", 0) == getattr(value, "dtype", 0)


def test_pixels_are_those_of_openslide(two_grids: Path, two_slides: Path) -> None:
    tiles = indexed(two_grids)
    for item in tiles.__getitems__(range(0, len(tiles), 7)):
        x, y = item["coords_l0"].tolist()
        path = two_slides / f"{item['slide_id']}.svs"
        with openslide.OpenSlide(path) as slide:
            region = slide.read_region((x, y), 0, (64, 64)).convert("RGB")
        expected = np.asarray(region).transpose(2, 0, 1)
        np.testing.assert_array_equal(item["image"].numpy(), expected)


def test_numbers_follow_the_slides_and_the_rows_of_their_tables(
    two_grids: Path,
) -> None:
    tiles = indexed(two_grids)
    places = [(item["slide_id"], item["row"]) for item in tiles]
    assert places == sorted(places) and len(places) == len(tiles)
    assert [tiles[index]["index"] for index in (-1, -len(tiles))] == [
        len(tiles) - 1,
        0,
    ]


@pytest.mark.parametrize("kind", [int, np.int64, np.uint8, torch.tensor])
def test_a_number_may_be_of_any_type_of_whole_numbers(
    two_grids: Path, kind: Any
) -> None:
    assert indexed(two_grids)[kind(5)]["index"] == 5


def test_what_is_no_number_of_a_tile_is_refused(two_grids: Path) -> None:
    tiles = indexed(two_grids)
    count = len(tiles)
    for index in (count, -count - 1):
        with pytest.raises(
            IndexError, match=f"must be in .-{count}, {count - 1}., got"
        ):
            tiles[index]
    for wrong in (slice(0, 3), 1.0, "a", None):
        with pytest.raises(InvalidInputError, match="index must be a whole number"):
            tiles[wrong]  # type: ignore[index]
    part = Subset(tiles, range(2, 5))
    assert [part[place]["index"] for place in range(len(part))] == [2, 3, 4]


def test_a_batch_has_the_order_of_its_numbers_also_if_they_repeat(
    two_grids: Path,
) -> None:
    tiles = indexed(two_grids, open_slides=1)
    numbers = [7, len(tiles) - 1, 7, 0, -2, 7]
    items = tiles.__getitems__(numbers)
    assert [item["index"] for item in items] == [n % len(tiles) for n in numbers]
    for item in items:
        assert torch.equal(item["image"], tiles[item["index"]]["image"])
    items[0]["image"].zero_()
    assert items[2]["image"].any() and items[5]["image"].any()


class Opened:
    """Notes the slides that are opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slides: list[Slide] = []
        self.most_open = 0
        open_slide = TiledSlide.open

        def note(tiled: TiledSlide) -> Slide:
            slide = open_slide(tiled)
            self.slides.append(slide)
            num_open = sum(not slide._closed for slide in self.slides)
            self.most_open = max(self.most_open, num_open)
            return slide

        monkeypatch.setattr(TiledSlide, "open", note)


def test_a_batch_opens_each_slide_once_and_no_more_stay_open_than_were_asked_for(
    two_grids: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = indexed(two_grids, open_slides=1)
    opened = Opened(monkeypatch)
    mixed = list(range(len(tiles)))
    random.Random(0).shuffle(mixed)
    tiles.__getitems__(mixed[:40])
    assert len(opened.slides) == 2 and opened.most_open == 1
    tiles.close()
    assert all(slide._closed for slide in opened.slides)
    wide = indexed(two_grids, open_slides=2)
    for index in mixed[:40]:
        wide[index]
    assert len(opened.slides) == 4 and opened.most_open == 2


@pytest.mark.parametrize("open_slides", [1, 2])
def test_threads_read_the_same_as_one_thread(two_grids: Path, open_slides: int) -> None:
    tiles = indexed(two_grids, open_slides=open_slides)
    expected = [item["image"] for item in tiles]
    numbers = list(range(len(tiles))) * 3
    random.Random(1).shuffle(numbers)
    with ThreadPoolExecutor(8) as threads:
        images = list(threads.map(lambda index: tiles[index]["image"], numbers))
    for index, image in zip(numbers, images):
        assert torch.equal(image, expected[index])


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_open_the_slides_themselves(two_grids: Path, context: str) -> None:
    tiles = indexed(two_grids, labels={"a": 0, "b c": 1})
    expected = [item["image"] for item in tiles]  # this process has both slides open
    numbers = list(range(len(tiles)))
    random.Random(2).shuffle(numbers)
    loader = DataLoader(
        tiles,
        batch_size=16,
        sampler=numbers,
        num_workers=2,
        multiprocessing_context=context,
    )
    seen = []
    for batch in loader:
        for index, image in zip(batch["index"].tolist(), batch["image"]):
            assert torch.equal(image, expected[index])
            seen.append(index)
    assert seen == numbers
    assert torch.equal(tiles[3]["image"], expected[3])


def test_a_copy_reads_the_same(two_grids: Path) -> None:
    tiles = indexed(two_grids)
    first = tiles[0]["image"]
    copy = pickle.loads(pickle.dumps(tiles))  # noqa: S301
    assert len(copy) == len(tiles) and repr(copy) == repr(tiles)
    assert torch.equal(copy[0]["image"], first)


# samplers


def test_a_weighted_sampler_draws_classes_equally_often(two_grids: Path) -> None:
    def rare(slide_id: str, tiles: Any) -> np.ndarray:
        labels = np.zeros(len(tiles.coords_l0), np.int64)
        labels[: 4 if slide_id == "a" else 8] = 1
        return labels

    dataset = TileDataset(two_grids, grid=FINE, labels=rare)
    tiles = dataset.map_style()
    assert dataset.label_counts == {0: len(tiles) - 12, 1: 12}
    sampler = WeightedRandomSampler(
        dataset.weights().tolist(), 2000, generator=torch.Generator().manual_seed(0)
    )
    drawn = Counter()  # type: ignore[var-annotated]
    labels = [int(item["label"]) for item in tiles]
    drawn.update(labels[index] for index in sampler)
    assert abs(drawn[1] / 2000 - 0.5) < 0.035  # three standard errors
    batch = next(iter(DataLoader(tiles, batch_size=64, sampler=sampler)))
    assert (
        batch["image"].shape == (64, 3, 64, 64) and batch["label"].dtype == torch.int64
    )


def test_distributed_samplers_divide_the_tiles(two_grids: Path) -> None:
    tiles = indexed(two_grids)
    seen: Counter[int] = Counter()
    for rank in range(2):
        sampler: Any = DistributedSampler(tiles, num_replicas=2, rank=rank)
        for batch in DataLoader(tiles, batch_size=16, sampler=sampler):
            seen.update(batch["index"].tolist())
    assert set(seen) == set(range(len(tiles)))
    assert (
        seen.total() == len(tiles) + len(tiles) % 2
    )  # it repeats one of an odd number


def test_a_subset_sampler_draws_its_numbers(two_grids: Path) -> None:
    tiles = indexed(two_grids)
    loader = DataLoader(tiles, batch_size=2, sampler=SubsetRandomSampler([9, 4, 31]))
    assert sorted(n for batch in loader for n in batch["index"].tolist()) == [4, 9, 31]


# slides that cannot be read


def test_a_slide_that_cannot_be_read_is_an_error_with_its_name(
    two_grids: Path, two_slides: Path, tmp_path: Path
) -> None:
    slides = tmp_path / "slides"
    slides.mkdir()
    for path in two_slides.glob("*.svs"):
        shutil.copy(path, slides)
    out = tmp_path / "results"
    shutil.copytree(two_grids, out)
    for ledger in out.glob("slides/*/slide.json"):
        text = ledger.read_text().replace(str(two_slides), str(slides))
        ledger.write_text(text)
    bad = slides / "b c.svs"
    bad.write_bytes(bad.read_bytes()[:5000])
    tiles = indexed(out)
    assert tiles[0]["slide_id"] == "a"
    with pytest.raises(SlideOpenError) as caught:
        tiles.__getitems__([0, -1])
    assert "slide 'b c'" in caught.value.__notes__
    assert tiles[1]["slide_id"] == "a"


# memory


def halves(slide_id: str, tiles: Any) -> np.ndarray:
    return np.arange(len(tiles.coords_l0)) % 2


def read_by_number(out: str) -> int:
    """Number of tiles of 20 batches of 32, of all slides."""
    dataset = TileDataset(out, labels=halves, open_slides=2)
    tiles = dataset.map_style()
    numbers = np.random.default_rng(0).integers(0, len(tiles), (20, 32))
    labels = 0
    for batch in numbers.tolist():
        items = tiles.__getitems__(batch)
        labels += sum(int(item["label"]) == item["row"] % 2 for item in items)
    return labels


@pytest.mark.check
@pytest.mark.timeout(300)
def test_memory_does_not_grow_with_the_tiles(tmp_path: Path) -> None:
    peaks = []
    for num_slides in (12, 48):
        out = make_cohort(str(tmp_path), num_slides)
        measured = run_and_measure(__name__, "read_by_number", out=out)
        assert measured.result == 20 * 32
        peaks.append(measured.growth_bytes)
    # a batch twice, two small slides, and 24 MiB for readers and modules that are imported
    assert max(peaks) < 24 << 20
    # labels of 36 more slides of 256 tiles take 0.15 MB
    assert peaks[1] < peaks[0] + (4 << 20)
