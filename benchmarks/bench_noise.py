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
from thinsection.evaluation.cases import group_rows
from thinsection.probe.data.sets import CaseSet, SurvivalSet, TileSet, make_split
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
        names = (
            group_rows([f"{part}{i}" for i in slide], where="noise")
            if clustered
            else None
        )
        parts.append(make_split(x, labels, groups=names))
    return TileSet(name="noise", class_names=("a", "b"), train=parts[0], val=parts[1])


def cases(seed: int, dim: int, probe: str, *, patients: bool) -> CaseSet | SurvivalSet:
    """Cases with a label, or a follow-up, that their vectors know nothing of.

    100 cases of one slide each, or 80 slides of 20 `patients`, who share vector and label.
    """
    rng = np.random.default_rng(seed)
    n, slides = (20, 4) if patients else (100, 1)
    owner = np.repeat(np.arange(n), slides)
    noise = rng.normal(size=(n * slides, dim))
    x = rng.normal(size=(n, dim))[owner] + (0.5 * noise if patients else 0)
    ids = tuple(f"s{i:03}" for i in range(n * slides))
    names = [f"p{i:03}" for i in owner]
    common = {
        "name": "noise",
        "ids": ids,
        "vectors": x.astype(np.float32),
        "groups": group_rows(ids, names, where="noise") if patients else None,
    }
    if probe == "survival":
        event = (rng.random(n) < 0.6)[owner]
        time = rng.exponential(100, n)[owner]
        return SurvivalSet(event=event, time=time, **common)
    labels = rng.permutation(np.arange(n) % 2)[owner]
    return CaseSet(class_names=("a", "b"), labels=labels, **common)


def floor(
    probe: str, kind: str, protocol: Any, sets: int, dim: int
) -> dict[str, float]:
    """Of `sets` data sets under one protocol."""
    found = []
    for seed in range(sets):
        if probe in TILE_PROBES:
            data = tiles(seed, dim, clustered=kind == "clustered")
            found.append(TILE_PROBES[probe](data, protocol=protocol))
        else:
            noise = cases(seed, dim, probe, patients=kind == "patients")
            found.append(CASE_PROBES[probe](noise, protocol=protocol))
    scores = np.array([r.score for r in found])
    ends = np.array([(r.interval.low, r.interval.high) for r in found if r.interval])
    nulls = [r.details["null_score"] for r in found if "null_score" in r.details]
    p_values = [r.details["null_p"] for r in found if r.details.get("null_p")]
    return {
        "p_at_most_.05": float(np.mean(np.array(p_values) <= 0.05))
        if p_values
        else float("nan"),
        "mean_score": round(float(scores.mean()), 4),
        "standard_deviation": round(float(scores.std()), 4),
        "interval_holds_chance": float(
            ((ends[:, 0] <= CHANCE) & (ends[:, 1] >= CHANCE)).mean()
        ),
        "lower_end_above_chance": float((ends[:, 0] > CHANCE).mean()),
        "mean_null_score": round(float(np.mean(nulls)), 4) if nulls else float("nan"),
    }


def main() -> None:
    """Every probe, protocol and kind of noise."""
    args = arguments(__doc__ or "")
    dim = 8 if args.smoke else 128
    floors: dict[str, Any] = {
        "tile_sets": 1 if args.smoke else 24,
        "case_sets": 1 if args.smoke else 80,
        "dim": dim,
        "chance": CHANCE,
    }
    for probe in (*TILE_PROBES, *CASE_PROBES):
        if probe in TILE_PROBES:
            kinds, sets = ("independent", "clustered"), floors["tile_sets"]
        else:
            kinds, sets = ("cases", "patients"), floors["case_sets"]
        for kind in kinds:
            for protocol_name in ("nanopath", "honest"):
                protocol = PROTOCOLS[protocol_name]
                name = f"{probe}_{kind}_{protocol_name}"
                floors[name] = floor(probe, kind, protocol, sets, dim)
                print(name, floors[name], flush=True)
    finish("bench_noise", floors, args)


if __name__ == "__main__":
    main()
