"""Random numbers of transforms: generators that are seeded for each tile.

A tile's transform then gives the same in every run with the same seed and epoch, whatever was read
before it, and however many workers and ranks there are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import get_worker_info


@runtime_checkable
class Stateful(Protocol):
    """A transform with a state of its own, such as a `torch.Generator` that it holds."""

    def state_dict(self) -> Any:
        """The state; a copy, which later calls of the transform do not change."""

    def load_state_dict(self, state: Any) -> Any:
        """Goes on from a state."""


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Seeds the generators of PyTorch (CPU), NumPy and `random` by a key, within the block.

    Afterwards they go on as if the block had not drawn from them. This takes 0.1 ms, so a worker of
    a loader, whose generators nobody else uses, does without (0.015 ms).
    """
    if get_worker_info() is not None:
        _seed(key)
        yield
        return
    torch_state = torch.random.get_rng_state()
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    try:
        _seed(key)
        yield
    finally:
        torch.random.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def _seed(key: tuple[int, ...]) -> None:
    words = np.random.SeedSequence(key).generate_state(4)
    # of the CPU alone: `torch.manual_seed` would start CUDA in a worker
    torch.default_generator.manual_seed(int(words[0]) << 32 | int(words[1]))
    np.random.seed(words[2])
    random.seed(int(words[3]))
