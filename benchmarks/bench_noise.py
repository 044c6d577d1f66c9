"""What do the probes score where there is nothing to learn?

Embeddings of noise with labels that mean nothing, many data sets: the mean score, its spread, how
often the interval holds chance, and how often its lower end lies above it, under the protocol that
selects on scored rows (nanopath) and one that does not (honest, where there is one). Where
`clustered`, tiles of a slide share most of their embedding and the slide's label, and are split by
slide.
"""

from typing import Any

import numpy as np

from benchmarks.harness import arguments, finish
from thinsection.probe.data.sets import CaseSet, SurvivalSet, TileSet, make_split
from thinsection.probe.groups import group_rows
from thinsection.probe.probes.cases import slide_probe, survival_probe
from thinsection.probe.probes.tiles import fewshot_probe, knn_probe, linear_probe
from thinsection.probe.protocol import PROTOCOLS

CHANCE = 0.5
TILE_PROBES = {"linear": linear_probe, "knn": knn_probe, "fewshot": fewshot_probe}
CASE_PROBES = {"slide": slide_probe, "survival": survival_probe}


def tiles(seed: int, dim: int, *, clustered: bool, rows: int = 100) -> TileSet:
    """3 `rows` tiles to train and `rows` to validate, two classes of equal size."""
    rng = np.random.default_rng(seed)
    parts = []
    for part, n in (("t", 3 * rows), ("v", rows)):
        slide = np.arange(n) // 10
        labels = rng.permutation(np.arange(n) % 2)
        x = rng.normal(size=(n, dim))
        if clustered:
            labels = rng.permutation(np.arange(slide.max() + 1) % 2)[slide]
            x = rng.normal(size=(slide.max() + 1, dim))[slide] + 0.5 * x
        names = group_rows([f"{part}{i}" for i in slide], where="noise") if clustered else None
        parts.append(make_split(x, labels, groups=names))
    return TileSet(name="noise", class_names=("a", "b"), train=parts[0], val=parts[1])


def cases(seed: int, dim: int, probe: str, n: int = 100) -> CaseSet | SurvivalSet:
    """`n` cases with a label, or a follow-up, that their vectors know nothing of."""
    rng = np.random.default_rng(seed)
    ids, x = tuple(map(str, range(n))), rng.normal(size=(n, dim)).astype(np.float32)
    if probe == "survival":
        event, time = rng.random(n) < 0.6, rng.exponential(100, n)
        return SurvivalSet(name="noise", ids=ids, vectors=x, event=event, time=time)
    labels = rng.permutation(np.arange(n) % 2)
    return CaseSet(name="noise", class_names=("a", "b"), ids=ids, vectors=x, labels=labels)


def floor(probe: str, kind: str, protocol: Any, sets: int, dim: int) -> dict[str, float]:
    """Of `sets` data sets under one protocol."""
    found = []
    for seed in range(sets):
        if probe in TILE_PROBES:
            data = tiles(seed, dim, clustered=kind == "clustered")
            found.append(TILE_PROBES[probe](data, protocol=protocol))
        else:
            found.append(CASE_PROBES[probe](cases(seed, dim, probe), protocol=protocol))
    scores = np.array([r.score for r in found])
    ends = np.array([(r.interval.low, r.interval.high) for r in found if r.interval])
    nulls = [r.details["null_score"] for r in found if "null_score" in r.details]
    return {
        "mean_score": round(float(scores.mean()), 4),
        "standard_deviation": round(float(scores.std()), 4),
        "interval_holds_chance": float(((ends[:, 0] <= CHANCE) & (ends[:, 1] >= CHANCE)).mean()),
        "lower_end_above_chance": float((ends[:, 0] > CHANCE).mean()),
        "mean_null_score": round(float(np.mean(nulls)), 4) if nulls else float("nan"),
    }


def main() -> None:
    """Every probe, protocol and kind of noise."""
    args = arguments(__doc__ or "")
    sets, dim = (1, 8) if args.smoke else (24, 128)
    floors: dict[str, Any] = {"data_sets": sets, "dim": dim, "chance": CHANCE}
    for probe in (*TILE_PROBES, *CASE_PROBES):
        for kind in ("independent", "clustered") if probe in TILE_PROBES else ("cases",):
            for protocol in (p for p in PROTOCOLS.values() if p.name in ("nanopath", "honest")):
                name = f"{probe}_{kind}_{protocol.name}"
                floors[name] = floor(probe, kind, protocol, sets, dim)
                print(name, floors[name], flush=True)
    finish("bench_noise", floors, args)


if __name__ == "__main__":
    main()
