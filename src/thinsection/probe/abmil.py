"""ABMIL on bags of tile embeddings: gated attention weighs the tiles of a case, then classifies.

Source: Ilse, Tomczak, Welling, "Attention-based deep multiple instance learning", ICML 2018.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.probe.cases import CaseSet, ReadEmbeddings
from thinsection.probe.devices import probe_device
from thinsection.probe.examples import check_finite
from thinsection.probe.protocol import NANOPATH, AbmilSettings, Protocol
from thinsection.probe.result import ProbeResult
from thinsection.probe.slide import case_folds, fold_result
from thinsection.probe.splits import Fold

if TYPE_CHECKING:
    import torch


def abmil_probe(
    cases: CaseSet,
    files_of_case: Sequence[Sequence[Path]],
    read: ReadEmbeddings,
    *,
    protocol: Protocol = NANOPATH,
    device: str = "cpu",
) -> ProbeResult:
    """Mean AUROC over folds of one model per fold, trained for a fixed number of epochs.

    Args:
        cases: labels and folds; `vectors` are not used.
        files_of_case: files of tile embeddings per case, in the order of `cases.ids`.
        read: reads one file.
        protocol: settings and seed; fold i is seeded with seed + i.
        device: where the model trains.

    Memory: the tiles of one case + the model; tiles are read again each epoch, never kept.

    Raises:
        InvalidInputError: another number of bags than cases, an empty bag, non-finite tiles.
        DatasetError: a fold lacks a class.
    """
    settings: AbmilSettings = protocol.require("abmil")
    if len(files_of_case) != len(cases.ids):
        raise InvalidInputError(
            f"files_of_case must be one a case, got {len(files_of_case)} for {len(cases.ids)}"
        )
    folds = case_folds(cases, protocol)
    bags = _Bags(files_of_case, read, settings.bag_size)
    parts, losses = [], []
    for i, fold in enumerate(folds):
        probability, loss = _train_fold(
            cases, bags, fold, settings=settings, seed=protocol.seed + i, device=device
        )
        parts.append(probability)
        losses.append(loss)
    details: dict[str, Any] = {"first_loss": losses[0][0], "last_loss": losses[0][-1]}
    return fold_result("abmil", cases, folds, parts, protocol=protocol, details=details)


class _Bags:
    """Reads the tiles of a case; a training draw takes at most `bag_size` of them."""

    def __init__(
        self, files_of_case: Sequence[Sequence[Path]], read: ReadEmbeddings, bag_size: int
    ) -> None:
        self._files, self._read, self._bag_size = files_of_case, read, bag_size

    def load(self, case: int, rng: np.random.Generator | None) -> npt.NDArray[np.float32]:
        """Tiles (n, D) of a case: all of them, or a draw in their order where rng is given."""
        tiles = np.concatenate([self._read(path) for path in self._files[case]])
        if not len(tiles):
            raise InvalidInputError(f"a bag must hold tiles, got none in {self._files[case]!r}")
        if rng is not None and len(tiles) > self._bag_size:
            tiles = tiles[np.sort(rng.choice(len(tiles), self._bag_size, replace=False))]
        tiles = np.ascontiguousarray(tiles, dtype=np.float32)
        if not np.isfinite(tiles).all():
            check_finite(tiles, [f"{self._files[case][0].name}:{i}" for i in range(len(tiles))])
        return tiles


def gated_attention(
    dim: int, hidden: int, num_classes: int, generator: "torch.Generator"
) -> "torch.nn.ModuleDict":
    """The layers, initialised from a generator of their own (uniform in ±1/sqrt(fan in))."""
    import torch

    layers = torch.nn.ModuleDict(
        {
            "project": torch.nn.Linear(dim, hidden, device="meta"),
            "value": torch.nn.Linear(hidden, hidden, device="meta"),
            "gate": torch.nn.Linear(hidden, hidden, device="meta"),
            "weight": torch.nn.Linear(hidden, 1, device="meta"),
            "classify": torch.nn.Linear(hidden, num_classes, device="meta"),
        }
    ).to_empty(device="cpu")
    with torch.no_grad():
        for layer in layers.values():
            bound = layer.in_features**-0.5  # type: ignore[operator]
            for parameter in layer.parameters():
                parameter.uniform_(-bound, bound, generator=generator)  # type: ignore[arg-type]
    return layers


def attend(layers: "torch.nn.ModuleDict", tiles: "torch.Tensor") -> "torch.Tensor":
    """Logits (K,) of one bag (n, D)."""
    import torch

    hidden = torch.relu(layers["project"](tiles))
    gated = torch.tanh(layers["value"](hidden)) * torch.sigmoid(layers["gate"](hidden))
    share = torch.softmax(layers["weight"](gated), dim=0)
    logits: torch.Tensor = layers["classify"]((share * hidden).sum(dim=0))
    return logits


def _train_fold(
    cases: CaseSet, bags: _Bags, fold: Fold, *, settings: AbmilSettings, seed: int, device: str
) -> tuple[npt.NDArray[np.float64], list[float]]:
    """Probabilities (n_val, K) after the last epoch, and the mean loss of each epoch."""
    import torch

    where, rng = probe_device(device), np.random.default_rng(seed)
    train, val = fold
    dim = bags.load(int(train[0]), None).shape[1]
    layers = gated_attention(
        dim, settings.hidden, len(cases.class_names), torch.Generator().manual_seed(seed)
    ).to(where)
    optimizer = torch.optim.AdamW(
        layers.parameters(), lr=settings.lr, weight_decay=settings.weight_decay
    )
    counts = np.bincount(cases.labels[train], minlength=len(cases.class_names))
    balance = torch.tensor(len(train) / (len(counts) * counts), dtype=torch.float32, device=where)
    losses = []
    for _ in range(settings.epochs):
        total = 0.0
        for case in rng.permutation(train):
            logits = attend(layers, torch.from_numpy(bags.load(int(case), rng)).to(where))
            target = torch.tensor(int(cases.labels[case]), device=where)
            # one bag a step: `weight=` would cancel under mean reduction, so it is applied here
            loss = balance[target] * torch.nn.functional.cross_entropy(logits, target)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += float(loss.detach())
        losses.append(total / len(train))
    with torch.inference_mode():
        rows = [
            torch.softmax(
                attend(layers, torch.from_numpy(bags.load(int(case), None)).to(where)).double(), 0
            )
            for case in val
        ]
    return torch.stack(rows).cpu().numpy(), losses
