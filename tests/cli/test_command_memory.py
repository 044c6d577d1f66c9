"""`plan --command`: the peak memory of commands that read stored embeddings."""

import re
from pathlib import Path

import pytest
import torch
from tests.predict.planted import planted, write_embeddings
from tests.support.shell import thinsection

from thinsection.cli.command_memory import (
    COMMAND_BYTES,
    COMMANDS,
    command_memory,
    stored_size,
)
from thinsection.errors import ConfigError, StoreError
from thinsection.predict.heads.config import BLOCK_HEADS, HEADS
from thinsection.types import MIB

PROCESS_BYTES = 270 * MIB
WITHOUT_TORCH = [name for name in COMMANDS if name.startswith(("import", "export"))]
WITHOUT_TORCH = [name for name in WITHOUT_TORCH if name[-4:] not in ("clam", "2vec")]


def no_process() -> int:
    raise AssertionError("this command loads no PyTorch")


def write(folder: Path, sizes: dict[str, int], dim: int = 24) -> Path:
    folder.mkdir(parents=True)
    for name, count in sizes.items():
        write_embeddings(folder / f"{name}.h5", torch.ones(count, dim).numpy())
    return folder


def test_the_size_of_a_folder_is_that_of_its_headers(tmp_path: Path) -> None:
    size = stored_size(write(tmp_path / "a", {"large": 500, "small": 20}))
    assert sorted(size.num_tiles) == [20, 500]
    assert (size.most_tiles, size.dim, size.item_bytes) == (500, 24, 4)
    assert size.largest_bytes == 500 * 24 * 4
    assert size.rows_bytes(100, 4) == 100 * 24 * 4
    (tmp_path / "none").mkdir()
    with pytest.raises(StoreError, match=r"got none in .*none"):
        stored_size(tmp_path / "none")


@pytest.mark.parametrize("command", WITHOUT_TORCH)
def test_a_command_without_pytorch_measures_no_process(
    command: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "a", {"large": 500, "small": 20})
    _, plan = command_memory(command, [str(folder)], process_bytes=no_process)
    assert plan.host["process"] == COMMAND_BYTES
    assert COMMAND_BYTES < plan.host_bytes < COMMAND_BYTES * 3


def test_tensors_grow_with_the_slide_and_blocks_do_not(tmp_path: Path) -> None:
    def peak(command: str, num_tiles: int, workers: int = 1) -> int:
        folder = tmp_path / f"{num_tiles}"
        if not folder.is_dir():
            write(folder, {"large": num_tiles, "small": 20})
        _, plan = command_memory(
            command,
            [str(folder)],
            workers=workers,
            process_bytes=lambda: PROCESS_BYTES,
        )
        return sum(plan.host.values())

    assert peak("export clam", 40_000) - peak("export clam", 20_000) == 20_000 * 96
    assert peak("aggregate", 40_000) == peak("aggregate", 20_000)
    assert peak("aggregate", 20_000) == PROCESS_BYTES + 8 * 24 * 8192
    one = peak("aggregate", 20_000)
    assert peak("aggregate", 20_000, workers=3) == 3 * one + 96 * MIB
    training = peak("train", 20_000)
    assert peak("train", 20_000, workers=2) == 2 * training + PROCESS_BYTES
    # --workers of a command that has none changes nothing
    assert peak("export clam", 20_000, workers=3) == peak("export clam", 20_000)


def test_training_keeps_bags_within_its_memory(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {f"s{i}": 2000 for i in range(20)}, dim=256)
    stored = 20 * 2000 * 256 * 4
    kept = []
    for memory in ("64MiB", "200MiB", None):
        _, plan = command_memory(
            "train",
            [str(folder)],
            memory=memory,
            process_bytes=lambda: PROCESS_BYTES,
        )
        assert plan.host["bags at work"] == 9 * stored // 20
        kept.append(plan.host["bags kept"])
    assert kept[0] == 0 < kept[1] < kept[2] == stored


def test_the_named_heads_are_those_that_read_blocks() -> None:
    reading = {name for name in HEADS.names() if HEADS.load(name).reads_blocks}
    assert reading == set(BLOCK_HEADS)


def test_the_command_prints_the_parts_and_names_what_it_does_not_know(
    tmp_path: Path,
) -> None:
    folder = planted(tmp_path / "a", cases=4, tiles=(5, 9))
    shown = thinsection("plan", folder, "--command", "export qupath").stdout
    assert "4 slides" in shown and re.search(r"peak, margin 6% .* MiB", shown)
    unknown = thinsection("plan", folder, "--command", "agregate").stderr
    assert "did you mean 'aggregate'?" in unknown
    refused = thinsection("plan", folder, "--command", "train", "--json").stderr
    assert "command must be run with --slurm or --json, got 'train'" in refused
    listed = " ".join(thinsection("plan", "--help-all").stdout.split())
    for command in COMMANDS:
        assert command in listed


@pytest.mark.parametrize(
    ("command", "paths"), [("train", ["a", "b"]), ("predict", ["a"]), ("heatmap", [])]
)
def test_other_paths_are_refused(command: str, paths: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"for {command}, got"):
        command_memory(command, paths, process_bytes=no_process)
