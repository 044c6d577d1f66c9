"""Is a p value at most .05 in 5 % of cohorts where there is nothing to find?

Every p value that the package prints, but for those of comparisons (`bench_coverage`), on cohorts
without signal, of patients with one case or with 1 to 5.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from benchmarks.bench_coverage import (
    FOLDS,
    MOST_CASES,
    SIZES,
    Drawn,
    Kind,
    Task,
    draw,
    error_of,
    fit,
    folds_of_patients,
    groups_of,
    run,
)
from benchmarks.harness import arguments, finish
from thinsection.evaluation.audit import association
from thinsection.evaluation.comparison import permuted_labels, site_probe
from thinsection.evaluation.rows import Predictions, label_permutation_p
from thinsection.evaluation.survival import hazard_ratio

# of tests by permutation: with 19 p <= .05 for the best of 20 orders
PERMUTATIONS = 39
SITE_PERMUTATIONS = 19


def labels_p(drawn: Drawn, rng: np.random.Generator, seed: int) -> float:
    """`train`: a head on permuted labels (`probe` of slides: the same)."""
    classes = drawn.truth.ndim == 1 and len(np.unique(drawn.truth)) <= 2
    kind = Kind("classes" if classes else "values", 0.5, 0.0)
    fold = folds_of_patients(kind, rng, drawn)
    parts = [
        (np.flatnonzero(fold != f), np.flatnonzero(fold == f)) for f in range(FOLDS)
    ]
    found = permuted_labels(
        drawn.x,
        drawn.truth.astype(float),
        2 if classes else 0,
        parts,
        drawn.patient,
        seed=seed,
        permutations=PERMUTATIONS,
    )
    return np.nan if found is None else found.p_value


def split_p(drawn: Drawn, _: np.random.Generator, seed: int) -> float:
    """`probe` on a test split: labels permuted under fixed answers."""
    share = 1 / (1 + np.exp(-drawn.x[:, 0]))
    rows = Predictions(
        ids=tuple(f"c{i:04d}" for i in range(len(share))),
        groups=groups_of(drawn),
        fold=None,
        class_names=("a", "b"),
        truth=drawn.truth,
        prediction=(share > 0.5).astype(int),
        probability=np.stack([1 - share, share], axis=1),
    )
    p = label_permutation_p(rows, "auroc", seed=seed, permutations=PERMUTATIONS)
    return np.nan if p is None else p


def sites_p(drawn: Drawn, rng: np.random.Generator, seed: int) -> float:
    """`train`: the site of a case by its embeddings, which know nothing of it."""
    site = rng.integers(0, 3, int(drawn.patient[-1]) + 1)[drawn.patient]
    found = site_probe(
        drawn.x,
        [f"s{one}" for one in site],
        groups_of(drawn),
        seed=seed,
        permutations=SITE_PERMUTATIONS,
    )
    return np.nan if found is None else found.permuted.p_value


def audit_p(sites: int) -> Callable[[Drawn, np.random.Generator, int], float]:
    """`audit`: the class of patients by their site."""

    def p_value(drawn: Drawn, rng: np.random.Generator, _: int) -> float:
        classes = drawn.truth[np.unique(drawn.patient, return_index=True)[1]]
        site = rng.integers(0, sites, len(classes))
        if len(np.unique(classes)) < 2 or len(np.unique(site)) < sites:
            return np.nan
        return association(site, classes, permutations=PERMUTATIONS)[0]

    return p_value


def hazard_p(mode: str) -> Callable[[Drawn, np.random.Generator, int], float]:
    """`train`, `probe`: 0 where the interval of the hazard ratio of two halves leaves out 1."""
    kind = Kind("times", 0.5, 0.0)

    def p_value(drawn: Drawn, rng: np.random.Generator, _: int) -> float:
        risk = drawn.x[:, 0]
        fold = np.zeros(len(risk), int)
        if mode == "train":
            fold = folds_of_patients(kind, rng, drawn)
            risk = np.empty(len(risk))
            for f in range(FOLDS):
                weights, _ = fit(kind, drawn.x[fold != f], drawn.truth[fold != f])
                risk[fold == f] = drawn.x[fold == f] @ weights
        middle = np.array(
            [np.median(risk[fold == f]) for f in range(FOLDS)[: fold.max() + 1]]
        )
        high = (risk > middle[fold]).astype(float)
        event, time = drawn.truth[:, 0] == 1, drawn.truth[:, 1]
        ratio = hazard_ratio(event, time, high, groups_of(drawn))
        return np.nan if ratio is None else float(ratio.low <= 1 <= ratio.high)

    return p_value


PValue = Callable[[Drawn, np.random.Generator, int], float]
P_VALUES: dict[str, tuple[str, PValue]] = {
    "permuted labels": ("classes", labels_p),
    "permuted values": ("values", labels_p),
    "permuted test split": ("classes", split_p),
    "site probe": ("classes", sites_p),
    "audit, 2 sites": ("classes", audit_p(2)),
    "audit, 5 sites": ("classes", audit_p(5)),
    "hazard ratio, test": ("times", hazard_p("test")),
    "hazard ratio, train": ("times", hazard_p("train")),
}


def nothing_found(
    name: str, n: int, most: int, share: float, sets: int
) -> dict[str, Any] | None:
    """Type I error of a p value of P_VALUES; None where it has none in most cohorts."""
    kind_name, p_of = P_VALUES[name]
    kind = Kind(kind_name, share, 0.0)
    rng = np.random.default_rng([n, most, int(100 * share), len(name)])
    values = []
    for seed in range(sets):
        drawn = draw(kind, rng, n, most)
        rarest = 3 * (kind_name == "classes")
        counts = np.bincount(drawn.truth, minlength=2) if rarest else [n]
        values.append(p_of(drawn, rng, seed) if min(counts) >= rarest else np.nan)
    called = [value <= 0.05 for value in values if np.isfinite(value)]
    return error_of(called) if len(called) >= sets / 3 else None


def tasks(sets: int, sizes: tuple[int, ...]) -> Iterator[Task]:
    """Every cell."""
    for name, (kind_name, _) in P_VALUES.items():
        shares = (0.5, 0.1) if kind_name == "classes" else (0.5,)
        for n in sizes:
            for most in MOST_CASES:
                for share in shares:
                    if name == "site probe" and (n != 60 or share < 0.5):
                        continue  # each fits logistic regressions: one size
                    yield Task(
                        "p_values",
                        f"{name}, n={n} cases={most} share={share:g}",
                        partial(nothing_found, name, n, most, share, sets),
                    )


def main() -> None:
    """Every cell, in `--jobs` processes."""
    args = arguments(__doc__ or "", jobs="processes")
    sets = 12 if args.smoke else 300
    results: dict[str, Any] = {"cohorts": sets, "p_values": {}}
    with ProcessPoolExecutor(int(args.jobs or 1)) as pool:
        for _, name, cell in pool.map(
            run, tasks(sets, SIZES[1:2] if args.smoke else SIZES)
        ):
            results["p_values"][name] = cell
            print(name, cell, flush=True)
    finish("bench_p_values", results, args)


if __name__ == "__main__":
    main()
