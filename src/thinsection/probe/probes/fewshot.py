"""Few-shot probe (SimpleShot): class means of small random support sets, voted over many sets."""

import numpy as np
import numpy.typing as npt
import torch

from thinsection.errors import DatasetError
from thinsection.probe.compute import rows_within, to_device, unit_rows
from thinsection.probe.data.sets import Embeddings, Labels, TileSet, check_tile_set
from thinsection.probe.protocol import NANOPATH, FewshotSettings, Protocol
from thinsection.probe.result import ProbeResult, classified
from thinsection.types import GIB
from thinsection.weights.placement import resolve_device

SET_BLOCK = 64  # support sets at a time
QUERY_BLOCK = 8192


def fewshot_probe(
    data: TileSet, *, protocol: Protocol = NANOPATH, device: str = "cpu", budget_bytes: int = GIB
) -> ProbeResult:
    """Majority vote per validation row over the support sets, ties to the lowest label.

    Memory: budget_bytes + 8 Nq K + 8 S K shots (the draws), S = number of support sets.

    Raises:
        DatasetError: a class has fewer training rows than shots.
        ConfigError: the protocol defines no few-shot probe.
        BudgetError: one support set with its prototypes does not fit.
    """
    check_tile_set(data)
    settings: FewshotSettings = protocol.require("fewshot")
    counts = {"shots": settings.shots, "num_sets": settings.support_sets}
    support = draw_support_sets(data.train.labels, data.class_names, **counts, seed=protocol.seed)
    train, val = data.train.embeddings, data.val.embeddings
    votes = simpleshot_votes(train, val, support, device=device, budget_bytes=budget_bytes)
    return classified(
        "fewshot",
        data,
        votes.argmax(axis=1),
        metric=settings.metric,
        protocol=protocol,
        details={"shots": settings.shots, "support_sets": settings.support_sets},
        probability=votes / settings.support_sets,
    )


def draw_support_sets(
    labels: Labels, class_names: tuple[str, ...], *, shots: int, num_sets: int, seed: int
) -> npt.NDArray[np.int64]:
    """Row indices (num_sets, K, shots), drawn without replacement within a set and class.

    Raises:
        DatasetError: a class has fewer than `shots` rows.
    """
    rows_of = [np.flatnonzero(labels == c) for c in range(len(class_names))]
    for name, rows in zip(class_names, rows_of, strict=True):
        if len(rows) < shots:
            raise DatasetError(
                f"each class must have >= {shots} training rows for {shots} shots, "
                f"got {len(rows)} of class {name!r}; label more tiles or drop the class"
            )
    rng = np.random.default_rng(seed)
    return np.array(
        [[rng.choice(rows, shots, replace=False) for rows in rows_of] for _ in range(num_sets)]
    )


def simpleshot_votes(
    train: Embeddings,
    queries: Embeddings,
    support: npt.NDArray[np.int64],
    *,
    device: str = "cpu",
    budget_bytes: int = GIB,
) -> npt.NDArray[np.int64]:
    """How many support sets vote for each class, (Nq, K).

    With support mean m and unit prototype p the cosine of a query q ranks as (q - m) . p, since
    |q - m| is the same for every class. All embeddings are shifted by one fixed vector first
    (the training mean), which changes nothing but the rounding.

    Memory: budget_bytes + 8 Nq K.
    """
    where = resolve_device(device, mps=False)
    _, num_classes, shots = support.shape
    half, dim = budget_bytes // 2, train.shape[1]  # half of the budget for sets, half for queries
    per_set = num_classes * dim * 4 * (2 * shots + 4)
    sets = rows_within(half, per_set, name="support set", most=SET_BLOCK)
    per_query = 8 * dim + sets * num_classes * 8 + sets * 24
    rows = rows_within(half, per_query, name="query", most=QUERY_BLOCK)
    shift = to_device(train.mean(axis=0, dtype=np.float64).astype(np.float32), where)
    votes = np.zeros((len(queries), num_classes), dtype=np.int64)
    with torch.inference_mode():
        for first in range(0, len(support), sets):
            chosen = support[first : first + sets]
            prototypes, offsets = _prototypes(train, chosen, shift)
            for start in range(0, len(queries), rows):
                q = to_device(queries[start : start + rows], where) - shift
                cosine = (q @ prototypes.T).sub_(offsets)
                winner = cosine.view(len(q), len(chosen), num_classes).argmax(dim=2)
                for c in range(num_classes):
                    voted = (winner == c).sum(dim=1)
                    votes[start : start + rows, c] += voted.cpu().numpy()
    return votes


def _prototypes(
    train: Embeddings, chosen: npt.NDArray[np.int64], shift: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit prototypes (sets * K, D) and m . p of each, (sets * K,)."""
    num_classes = chosen.shape[1]
    rows = to_device(train[chosen], shift.device) - shift  # (sets, K, shots, D)
    class_means = rows.mean(dim=2)
    means = class_means.mean(dim=1)  # classes have equally many shots
    prototypes = unit_rows((class_means - means[:, None]).flatten(0, 1))
    repeated = means.repeat_interleave(num_classes, dim=0)
    return prototypes, (prototypes * repeated).sum(dim=1)
