"""Do the kNN and few-shot probes stay within their budget, and are they slower for it?

Ours against the plain way on the same embeddings, each in a fresh process: predictions compared
first, then peak memory beyond the embeddings, CPU-seconds and seconds. Plain kNN holds the whole
similarity matrix; plain few-shot centres and normalises all queries for each of the support sets.
"""

import argparse
from typing import Any

import numpy as np
import torch

from benchmarks.harness import arguments, finish
from thinsection.probe.compute import nearest_rows
from thinsection.probe.data.sets import TileSet, make_split
from thinsection.probe.probes.tiles import (
    count_votes,
    draw_support_sets,
    linear_probe,
    simpleshot_votes,
)
from thinsection.testing import Measured, run_and_measure
from thinsection.types import MIB

CLASSES, K, SHOTS, SUPPORT_SETS = 7, 50, 16, 1000
State = tuple[np.ndarray, np.ndarray, np.ndarray]  # bank, its labels, queries


def data(*, n: int, queries: int, dim: int, **_: Any) -> State:
    """Overlapping classes off the origin; also makes torch load its libraries."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((CLASSES, dim), dtype=np.float32) * 0.12 + 0.5
    labels = rng.integers(0, CLASSES, n + queries)
    x = rng.standard_normal((n + queries, dim), dtype=np.float32)
    for start in range(0, len(x), 4096):
        x[start : start + 4096] += centres[labels[start : start + 4096]]
    torch.from_numpy(x[:256]) @ torch.from_numpy(x[:256]).T
    nearest_rows(x[:8], x[:64], 3)
    return x[:n], labels[:n], x[n:]


def knn_ours(state: State, *, budget_bytes: int, **_: Any) -> list[int]:
    """Predictions by blocks."""
    bank, labels, queries = state
    found = nearest_rows(queries, bank, K, budget_bytes=budget_bytes)
    return _plain_list(count_votes(labels[found], CLASSES).argmax(axis=1))


def knn_plain(state: State, **_: Any) -> list[int]:
    """Predictions from the whole similarity matrix."""
    bank, labels, queries = state
    q, b = (
        torch.nn.functional.normalize(torch.from_numpy(x), dim=1)
        for x in (queries, bank)
    )
    found = (q @ b.T).topk(K, dim=1).indices
    votes = torch.nn.functional.one_hot(torch.from_numpy(labels)[found], CLASSES).sum(1)
    return _plain_list(votes.argmax(dim=1).numpy())


def fewshot_ours(state: State, *, budget_bytes: int, **_: Any) -> list[int]:
    """Predictions by blocks of support sets."""
    bank, labels, queries = state
    votes = simpleshot_votes(bank, queries, _support(labels), budget_bytes=budget_bytes)
    return _plain_list(votes.argmax(axis=1))


def fewshot_plain(state: State, **_: Any) -> list[int]:
    """Predictions one support set at a time."""
    bank, labels, queries = state
    votes = np.zeros((len(queries), CLASSES), dtype=np.int64)
    for chosen in _support(labels):
        rows = bank[chosen]
        mean = rows.mean(axis=(0, 1))
        prototypes = (rows - mean).mean(axis=1)
        prototypes /= np.linalg.norm(prototypes, axis=1, keepdims=True)
        q = queries - mean
        q /= np.linalg.norm(q, axis=1, keepdims=True)
        votes[np.arange(len(q)), (q @ prototypes.T).argmax(axis=1)] += 1
    return _plain_list(votes.argmax(axis=1))


def linear_ours(state: State, **_: Any) -> float:
    """The linear probe's score: all rates, all epochs."""
    bank, labels, queries = state
    names = tuple(map(str, range(CLASSES)))
    split = make_split(bank, labels)
    val = make_split(
        queries, np.arange(len(queries)) % CLASSES
    )  # only the time counts here
    return linear_probe(
        TileSet(name="bench", class_names=names, train=split, val=val)
    ).score


def _support(labels: np.ndarray) -> np.ndarray:
    names = tuple(map(str, range(CLASSES)))
    return draw_support_sets(
        labels, names, shots=SHOTS, num_sets=SUPPORT_SETS, seed=1337
    )


def _plain_list(values: np.ndarray) -> list[int]:
    return [int(v) for v in values]


def measure(name: str, **sizes: int) -> Measured:
    """One function of this module in a fresh process."""
    return run_and_measure("benchmarks.bench_probes", name, setup="data", **sizes)


def figures(measured: Measured) -> dict[str, float]:
    """What is reported of one run."""
    return {
        "peak_mib_beyond_embeddings": round(measured.growth_bytes / MIB, 1),
        "cpu_seconds": round(measured.cpu_seconds, 3),
        "seconds": round(measured.seconds, 3),
    }


def compare(probe: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Ours against plain: equal predictions (but for near ties), memory and time."""
    ours, plain = measure(f"{probe}_ours", **sizes), measure(f"{probe}_plain", **sizes)
    differ = int(np.sum(np.array(ours.result) != np.array(plain.result)))
    if differ > max(1, len(ours.result) // 500):
        raise AssertionError(
            f"{probe}: {differ} of {len(ours.result)} predictions differ"
        )
    return {
        **sizes,
        "predictions_that_differ": differ,
        "ours": figures(ours),
        "plain": figures(plain),
        "cpu_ratio_plain_to_ours": round(
            plain.cpu_seconds / max(ours.cpu_seconds, 1e-9), 2
        ),
        "peak_ratio_plain_to_ours": round(
            plain.growth_bytes / max(ours.growth_bytes, 1), 2
        ),
    }


def main() -> None:
    """kNN at N and 4N, few-shot, and what a linear probe of BRACS' size takes."""
    args: argparse.Namespace = arguments(__doc__ or "")
    n, queries, dim = (4_000, 400, 64) if args.smoke else (25_000, 4_000, 1024)
    budget_bytes = (16 if args.smoke else 128) * MIB
    sizes = {"queries": queries, "dim": dim, "budget_bytes": budget_bytes}
    results: dict[str, Any] = {
        "knn_n": compare("knn", {"n": n, **sizes}),
        "knn_4n": compare("knn", {"n": 4 * n, **sizes}),
        "fewshot": compare("fewshot", {"n": n, **sizes}),
    }
    if not args.smoke:
        bracs = {"n": 3657, "queries": 312, "dim": 1024}
        results["linear_of_bracs_size"] = {
            **bracs,
            **figures(measure("linear_ours", **bracs)),
        }
    finish("bench_probes", results, args)


if __name__ == "__main__":
    main()
