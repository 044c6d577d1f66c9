"""The loader: epochs counted, the same training after a stop, in one process and in two ranks."""

import json
import multiprocessing
import random
from collections import Counter
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.results.conftest import FINE
from torch import distributed
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader

from thinsection.errors import InvalidInputError
from thinsection.results.tile_dataset import TileDataset
from thinsection.results.tile_loader import TileLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
LABELS = {"a": 0, "b c": 1}


def crop(tile: np.ndarray) -> torch.Tensor:
    """A random crop that draws from all three global generators."""
    x = int(torch.randint(0, 17, ()))
    y = int(np.random.randint(0, 17))
    pixels = tile[y : y + 48, x : x + 48]
    if random.random() < 0.5:
        pixels = pixels[:, ::-1]
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255


class OwnCrop:
    """A random crop with a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)

    def __call__(self, tile: np.ndarray) -> torch.Tensor:
        x, y = torch.randint(0, 17, (2,), generator=self.generator).tolist()
        pixels = tile[y : y + 48, x : x + 48]
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def make_loader(
    out: Path, num_workers: int = 0, *, batch_size: int = 8, **more: Any
) -> TileLoader:
    names = ("drop_last", "collate_fn", "persistent_workers", "shuffel")
    options = {name: more.pop(name) for name in names if name in more}
    settings = {"grid": FINE, "memory": "1MiB", "seed": 3} | more
    dataset = TileDataset(out, **settings)
    return dataset.loader(batch_size=batch_size, num_workers=num_workers, **options)


def numbers_of(loader: TileLoader, limit: int | None = None) -> list[list[int]]:
    return [batch["index"].tolist() for batch in islice(loader, limit)]


def epoch_of(loader: TileLoader) -> list[int]:
    return list(chain.from_iterable(numbers_of(loader)))


class Training:
    """A small network with dropout, trained on the batches of a loader."""

    def __init__(self, loader: TileLoader) -> None:
        torch.manual_seed(0)
        self.loader = loader
        self.network = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 5, stride=4),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Dropout(),
            torch.nn.LazyLinear(2),
        )
        self.network(torch.zeros(1, 3, 48, 48))
        self.optimizer = torch.optim.Adam(self.network.parameters())
        self.losses: list[float] = []

    def run(self, num_epochs: int, *, stop: tuple[int, int] | None = None) -> None:
        """Trains until an epoch, or until a number of batches in an epoch."""
        while self.loader.epoch < num_epochs:
            epoch = self.loader.epoch
            for number, batch in enumerate(self.loader, start=1):
                scores = self.network(batch["image"])
                loss = torch.nn.functional.cross_entropy(scores, batch["label"])
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.losses.append(loss.item())
                if stop == (epoch, number):
                    return

    def save(self, path: Path) -> None:
        checkpoint = {
            "loader": self.loader.state_dict(),
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }
        torch.save(checkpoint, path)

    def load(self, path: Path) -> None:
        checkpoint = torch.load(path, weights_only=True)
        self.loader.load_state_dict(checkpoint["loader"])
        self.network.load_state_dict(checkpoint["network"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(checkpoint["random"])


# the same training after a stop


@pytest.mark.parametrize("transform", [crop, OwnCrop])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loss_after_a_stop_is_that_without_it_to_the_bit(
    two_grids: Path, tmp_path: Path, transform: Any, num_workers: int
) -> None:
    def training() -> Training:
        transforming = transform() if isinstance(transform, type) else transform
        loader = make_loader(
            two_grids, num_workers, labels=LABELS, transform=transforming
        )
        return Training(loader)

    whole = training()
    whole.run(2)
    stopped = training()
    stopped.run(2, stop=(1, 6))
    stopped.save(tmp_path / "checkpoint.pt")
    resumed = training()
    resumed.load(tmp_path / "checkpoint.pt")
    resumed.run(2)
    assert len(stopped.losses) > 10 and len(resumed.losses) > 10
    assert stopped.losses + resumed.losses == whole.losses
    for name, value in whole.network.state_dict().items():
        assert torch.equal(resumed.network.state_dict()[name], value)


def test_a_transform_with_a_state_goes_on_from_one_epoch_to_the_next(
    two_grids: Path,
) -> None:
    loader = make_loader(two_grids, 2, transform=OwnCrop())
    first = {index: image for batch in loader for index, image in pairs(batch)}
    second = {index: image for batch in loader for index, image in pairs(batch)}
    same = [torch.equal(first[index], second[index]) for index in first]
    assert first.keys() == second.keys() and np.mean(same) < 0.2


def pairs(batch: dict[str, Any]) -> list[tuple[int, torch.Tensor]]:
    return list(zip(batch["index"].tolist(), batch["image"]))


def test_a_tile_gets_the_same_crop_with_any_number_of_workers_but_another_each_epoch(
    two_grids: Path,
) -> None:
    crops = []
    for num_workers in (0, 1, 3):
        loader = make_loader(two_grids, num_workers, transform=crop)
        crops.append(
            {index: image for batch in loader for index, image in pairs(batch)}
        )
    for other in crops[1:]:
        assert other.keys() == crops[0].keys()
        assert all(torch.equal(other[index], crops[0][index]) for index in other)
    again = {index: image for batch in loader for index, image in pairs(batch)}
    same = [torch.equal(again[index], crops[0][index]) for index in again]
    assert np.mean(same) < 0.2


def draw(tile: np.ndarray) -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def test_no_two_tiles_get_the_same_random_numbers(two_grids: Path) -> None:
    loader = make_loader(two_grids, 2, transform=draw)
    drawn = [torch.stack(batch["image"]) for _ in range(2) for batch in loader]
    for numbers in torch.cat(drawn, dim=1):
        assert len(numbers.unique()) == len(numbers) > 300
        assert abs(numbers.mean() - 0.5) < 3 / (12 * len(numbers)) ** 0.5


def test_reading_does_not_draw_from_the_generators_of_the_training(
    two_grids: Path,
) -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    expected = (torch.rand(3), np.random.rand(3), random.random())
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    for num_workers in (0, 2):
        numbers_of(make_loader(two_grids, num_workers, transform=crop))
    drawn = (torch.rand(3), np.random.rand(3), random.random())
    assert torch.equal(drawn[0], expected[0])
    np.testing.assert_array_equal(drawn[1], expected[1])
    assert drawn[2] == expected[2]


def mix(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Mixes the images of a batch by random weights, as mixup does."""
    images = torch.stack([item["image"] for item in items])
    weights = torch.rand(len(images), len(images))
    mixed = torch.einsum("ij,jchw->ichw", weights, images.float())
    return {"image": mixed, "index": torch.tensor([item["index"] for item in items])}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_random_collate_function_is_repeated_after_a_stop(
    two_grids: Path, num_workers: int
) -> None:
    def loader() -> TileLoader:
        return make_loader(two_grids, num_workers, collate_fn=mix)

    whole = [batch["image"] for batch in loader()]
    stopped = loader()
    first = [batch["image"] for batch in islice(stopped, 5)]
    resumed = loader()
    resumed.load_state_dict(stopped.state_dict())
    rest = [batch["image"] for batch in resumed]
    assert len(first) + len(rest) == len(whole) > 10
    for image, other in zip(whole, first + rest):
        assert torch.equal(image, other)


# epochs and positions


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_those_of_a_plain_loader(two_grids: Path, num_workers: int) -> None:
    dataset = TileDataset(two_grids, grid=FINE, memory="1MiB", labels=LABELS)
    loader = dataset.loader(batch_size=8, num_workers=num_workers)
    for epoch in range(2):
        assert loader.epoch == epoch
        dataset.set_epoch(epoch)
        plain = DataLoader(dataset, batch_size=8, num_workers=num_workers)
        for batch, other in zip(loader, plain, strict=True):
            del other["shard"], other["position"]
            assert batch.keys() == other.keys()
            assert torch.equal(batch["image"], other["image"])
            assert torch.equal(batch["label"], other["label"])
            assert batch["slide_id"] == other["slide_id"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_loop_is_an_epoch_of_its_own_with_each_tile_once(
    two_grids: Path, num_workers: int
) -> None:
    loader = make_loader(two_grids, num_workers)
    epochs = [epoch_of(loader) for _ in range(3)]
    assert all(sorted(numbers) == list(range(len(numbers))) for numbers in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert loader.epoch == 3
    loader.set_epoch(1)
    assert epoch_of(loader) == epochs[1]


def test_a_loop_that_is_left_counts_as_an_epoch(two_grids: Path) -> None:
    whole = make_loader(two_grids)
    epochs = [numbers_of(whole) for _ in range(2)]
    loader = make_loader(two_grids)
    assert numbers_of(loader, 3) == epochs[0][:3]
    assert loader.epoch == 0  # until the next loop begins
    assert numbers_of(loader) == epochs[1]
    loader.set_epoch(0)
    assert numbers_of(loader, 2) == epochs[0][:2]
    loader.set_epoch(0)
    assert numbers_of(loader) == epochs[0]


@pytest.mark.parametrize("num_workers", [0, 2, 3])
@pytest.mark.parametrize("num_used", [1, 7])
def test_a_state_goes_on_in_the_same_epoch(
    two_grids: Path, num_workers: int, num_used: int
) -> None:
    whole = make_loader(two_grids, num_workers)
    epochs = [numbers_of(whole) for _ in range(3)]
    stopped = make_loader(two_grids, num_workers)
    numbers_of(stopped)
    numbers_of(stopped, num_used)
    text = json.dumps(stopped.state_dict())
    resumed = make_loader(two_grids, num_workers)
    resumed.load_state_dict(json.loads(text))
    rest = []
    for epoch in range(resumed.epoch, 3):
        resumed.set_epoch(epoch)  # as loops do that are written for other samplers
        rest.append(numbers_of(resumed))
    assert rest == [epochs[1][num_used:], epochs[2]]


def test_a_state_of_the_last_batch_leaves_nothing_of_its_epoch(two_grids: Path) -> None:
    loader = make_loader(two_grids, 2)
    for _ in loader:
        inside = loader.state_dict()
    after = loader.state_dict()
    second = numbers_of(loader)
    resumed = make_loader(two_grids, 2)
    resumed.load_state_dict(inside)
    assert (numbers_of(resumed), numbers_of(resumed)) == ([], second)
    # between epochs, the number of workers may change
    other = make_loader(two_grids, 0)
    other.load_state_dict(after)
    assert other.epoch == 1
    assert sorted(epoch_of(other)) == sorted(chain.from_iterable(second))


def test_workers_that_persist_read_the_same(two_grids: Path) -> None:
    fresh = make_loader(two_grids, 2, transform=crop)
    lasting = make_loader(two_grids, 2, transform=crop, persistent_workers=True)
    for _ in range(3):
        for batch, other in zip(fresh, lasting, strict=True):
            assert torch.equal(batch["image"], other["image"])
    lasting.set_epoch(0)
    fresh.set_epoch(0)
    assert numbers_of(lasting) == numbers_of(fresh)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("num_workers", [0, 3])
def test_the_length_is_the_number_of_batches(
    two_grids: Path, drop_last: bool, even: bool, num_workers: int
) -> None:
    loader = make_loader(two_grids, num_workers, drop_last=drop_last, even=even)
    assert len(loader) == len(numbers_of(loader))


def two_crops(tile: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return crop(tile), crop(tile)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_transform_may_return_two_crops_for_self_supervision(
    two_grids: Path, num_workers: int
) -> None:
    seen = []
    for batch in make_loader(two_grids, num_workers, transform=two_crops):
        first, second = batch["image"]
        assert first.shape == second.shape == (len(batch["row"]), 3, 48, 48)
        assert not torch.equal(first, second)
        seen += batch["index"].tolist()
    assert sorted(seen) == list(range(len(seen)))


# what is refused


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"shuffel": True}, "options must be of pin_memory.*got 'shuffel'"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        (
            {"persistent_workers": True, "transform": OwnCrop()},
            "persistent_workers must be False with a transform that has a state_dict",
        ),
    ],
)
def test_what_a_loader_cannot_be(
    two_grids: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make_loader(two_grids, 2, **more)


def test_a_state_of_another_order_or_number_of_workers_is_refused(
    two_grids: Path,
) -> None:
    loader = make_loader(two_grids, 2)
    numbers_of(loader, 2)
    state = loader.state_dict()
    with pytest.raises(InvalidInputError, match="with seed 4, got 3"):
        make_loader(two_grids, 2, seed=4).load_state_dict(state)
    with pytest.raises(
        InvalidInputError, match="num_workers must be 2 as in the state"
    ):
        make_loader(two_grids, 3).load_state_dict(state)


# two ranks


def train_rank(rank: int, out: str, folder: str, even: bool | None) -> None:
    """One of two DDP ranks: trains two epochs whole, stopped, and resumed; writes what it saw."""
    torch.set_num_threads(1)
    # as in a rank of torchrun; a process that was spawned would spawn its workers
    multiprocessing.set_start_method("fork", force=True)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)

    def training() -> Training:
        loader = make_loader(
            Path(out), 2, labels=LABELS, transform=crop, seed=11, even=even
        )
        one = Training(loader)
        one.network = torch.nn.parallel.DistributedDataParallel(one.network)
        one.optimizer = torch.optim.Adam(one.network.parameters())
        return one

    whole = training()
    with Join([whole.network], enable=even is False):
        whole.run(2)
    checkpoint = Path(folder, f"{rank}.pt")
    losses = []
    if even is not False:
        stopped = training()
        stopped.run(2, stop=(1, 3))
        stopped.save(checkpoint)
        resumed = training()
        resumed.load(checkpoint)
        resumed.run(2)
        losses = stopped.losses + resumed.losses
    whole.loader.set_epoch(0)
    seen = epoch_of(whole.loader)
    document = {
        "seen": seen,
        "whole": whole.losses,
        "stopped": losses,
        "even": whole.loader.state_dict()["even"],
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(document))
    distributed.barrier()
    distributed.destroy_process_group()


def run_ranks(out: Path, folder: Path, even: bool | None) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    arguments = (str(out), str(folder), even)
    processes = [
        context.Process(target=train_rank, args=(rank, *arguments)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.check
@pytest.mark.timeout(300)
def test_two_ranks_have_even_shards_by_default_and_resume_to_the_bit(
    two_grids: Path, tmp_path: Path
) -> None:
    ranks = run_ranks(two_grids, tmp_path, None)
    assert [rank["even"] for rank in ranks] == [True, True]
    for rank in ranks:
        assert rank["stopped"] == rank["whole"] and len(rank["whole"]) > 8
    assert len(ranks[0]["whole"]) == len(ranks[1]["whole"])
    seen = Counter(ranks[0]["seen"] + ranks[1]["seen"])
    num_tiles = TileDataset(two_grids, grid=FINE).num_tiles
    assert max(seen.values()) == 1 and seen.total() == num_tiles // 4 * 4


@pytest.mark.check
@pytest.mark.timeout(300)
def test_two_ranks_that_are_not_even_see_each_tile_once(
    two_grids: Path, tmp_path: Path
) -> None:
    ranks = run_ranks(two_grids, tmp_path, False)
    assert [rank["even"] for rank in ranks] == [False, False]
    num_tiles = TileDataset(two_grids, grid=FINE).num_tiles
    assert sorted(ranks[0]["seen"] + ranks[1]["seen"]) == list(range(num_tiles))


def test_shards_are_even_by_default_only_with_several_ranks(two_grids: Path) -> None:
    assert make_loader(two_grids).state_dict()["even"] is False
    assert make_loader(two_grids, even=True).state_dict()["even"] is True
