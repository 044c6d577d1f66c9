"""A run prepares the next slides while it encodes, and divides the CPUs among its GPUs."""

import threading
from dataclasses import replace
from pathlib import Path

import torch

from thinsection.encode import TileEncoder, encoder_spec
from thinsection.jobs import executor
from thinsection.jobs.executor import ExecutorConfig, local_shape
from thinsection.run.process import RunEvent
from thinsection.run.run import make_task, run
from thinsection.stages.config import RunConfig
from thinsection.stages.spec import resolve
from thinsection.testing.synthetic import write_he_slide
from thinsection.usage.monitor import read_limits

LONGEST_WAIT_S = 60.0


class _Waiting(TileEncoder):
    """Encoder whose first batch is ready when a slide has been opened."""

    spec = replace(encoder_spec("efficientnet_lite0"), name="waiting", dim=3)
    version = "1"

    def __init__(self, opened: threading.Event) -> None:
        super().__init__()
        self.opened = opened
        self.waited = False

    def encode(self, tiles_u8) -> torch.Tensor:
        if not self.waited:
            self.waited = True
            # otherwise the run would open the slide only after this batch
            assert self.opened.wait(LONGEST_WAIT_S), "the slide was not opened"
        return torch.as_tensor(tiles_u8).float().mean((1, 2))


def test_the_next_slides_are_prepared_while_the_first_is_encoded(
    tmp_path: Path,
) -> None:
    """The run opens 'c' once 'b' is ready, so that 'b' can follow 'a' without a pause."""
    for name in "abc":
        write_he_slide(tmp_path / f"{name}.svs", (1400, 1000), seed=ord(name))
    opened = threading.Event()

    def note(event: RunEvent) -> None:
        if event.kind == "opening" and event.slide_id == "c":
            opened.set()

    encoder = _Waiting(opened)
    summary = run(
        [tmp_path / f"{name}.svs" for name in "abc"],
        out=tmp_path / "out",
        encoder=encoder,
        on_event=note,
        prefetch_slides=2,
        batch_size=2,
        until="embeddings",
        overview=False,
    )
    assert summary.counts["done"] == 3
    assert encoder.waited


def test_each_gpu_has_its_share_of_decoding_threads(monkeypatch, tmp_path) -> None:
    limits = replace(read_limits(), cpus=16.0)
    monkeypatch.setattr(executor, "read_limits", lambda: limits)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    config = ExecutorConfig(gpus="all")
    workers, threads = local_shape(config)
    assert (workers, threads) == (4, 4)
    spec = resolve(RunConfig(executor=config), {"until": "embeddings"})
    task = make_task(tmp_path / "out", spec)
    on_worker = task.on_worker(threads=threads, monitored=False)
    assert on_worker.spec.stream.decode_threads == 4
    named = make_task(tmp_path / "out", resolve(spec, {"decode_threads": 3}))
    on_worker = named.on_worker(threads=threads, monitored=False)
    assert on_worker.spec.stream.decode_threads == 3
