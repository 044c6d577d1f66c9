"""PathoROB beside its index: clustering score, and what correlated training costs (APD).

Source: PathoROB (bifold-pathomics), `clustering_score` and `apd`.
"""

import random
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import adjusted_rand_score, balanced_accuracy_score, silhouette_score

from thinsection.errors import require
from thinsection.probe.data.sets import RobustnessSet, check_finite, data_hashes
from thinsection.probe.protocol import NANOPATH, PathorobSettings, Protocol
from thinsection.probe.result import ProbeResult

APD_CS = 10 ** np.linspace(-8, 4, 15)  # of the logistic regressions
_Chunks = list[npt.NDArray[np.int64]]  # the rows of each slide of one class and centre


def clustering_probe(data: RobustnessSet, *, protocol: Protocol = NANOPATH) -> ProbeResult:
    """Adjusted Rand index of clusters with biology minus that with the centre.

    For each two classes and two centres: k-means on unit vectors, the number of clusters by the
    best silhouette, the mean over seeded trials; the score is the mean over these combinations.

    Memory: 8 n D + 8 n² (the silhouette) for n tiles of two classes and two centres.

    Raises InvalidInputError: no two classes at two centres.
    """
    settings = protocol.pathorob
    biology, centre = (np.array(c) for c in (data.biological_class, data.medical_center))
    check_finite(data.embeddings, data.slide_id)
    by_combination: dict[str, list[float]] = {}
    found_k = []
    names = (list(dict.fromkeys(column.tolist())) for column in (biology, centre))
    for classes, centres in product(*(combinations(of, 2) for of in names)):
        parts = [
            np.flatnonzero((biology == b) & (centre == c)) for b, c in product(classes, centres)
        ]
        if not all(map(len, parts)):
            continue
        rows = np.concatenate(parts)
        x = data.embeddings[rows]
        x = x / np.sqrt((x**2).sum(axis=1))[:, None]
        k = _best_k(x, settings)
        found_k.append(k)
        trials = by_combination[f"{'-'.join(classes)} at {'-'.join(centres)}"] = []
        for trial in range(settings.trials):
            known = {"random_state": 1337 + trial, "n_init": 5, "init": "random"}
            labels = KMeans(n_clusters=k, **known).fit(x).labels_
            bio, where = (adjusted_rand_score(of[rows], labels) for of in (biology, centre))
            trials.append(bio - where)
    rule = "tiles must come of two classes at two centres"
    require(by_combination, rule, f"no such four groups in {data.name!r}")
    means = {name: float(np.mean(trials)) for name, trials in by_combination.items()}
    spread = [np.std(trials, ddof=1) for trials in by_combination.values() if len(trials) > 1]
    details = {
        "score_by_combination": means,
        "mean_std_over_trials": float(np.mean(spread)) if spread else 0.0,
        "clusters": found_k,
    }
    return _result("clustering", data, float(np.mean([*means.values()])), protocol, details)


def _best_k(x: npt.NDArray, settings: PathorobSettings) -> int:
    """The number of clusters with the best silhouette by cosine, the first of equals."""
    ks = range(2, min(settings.max_clusters, len(x) - 1) + 1)
    known = {"random_state": 1337, "init": "random", "n_init": 20}
    labels = [KMeans(n_clusters=k, **known).fit(x).labels_ for k in ks]
    scores = [silhouette_score(x, of, metric="cosine") for of in labels]
    return ks[int(np.argmax(scores))]


def apd_probe(
    data: RobustnessSet, *, centres: Sequence[str] = (), protocol: Protocol = NANOPATH
) -> ProbeResult:
    """Average performance drop where training slides tie class to centre ever more closely.

    The two `centres` (the first two that are named, if none are given) train and test; all others
    are the out-of-domain test. Split s takes s slides more of the first half of the classes from
    the second centre and s fewer from the first, and the other way round for the other half, from
    none to all. Per split a logistic regression, its C by a validation slide's worth of tiles; the
    score is the mean over splits of accuracy over that of split 0, minus 1: 0 loses nothing. As
    PathoROB has it for camelyon and tolkach_esca, without the latter's list of feasible splits.

    Memory: 16 n D.

    Raises InvalidInputError: fewer than 2 centres, or fewer than 5 slides of a class at a centre.
    """
    settings = protocol.pathorob
    check_finite(data.embeddings, data.slide_id)
    centre, classes = np.array(data.medical_center), [*dict.fromkeys(data.biological_class)]
    inside = [*centres] or [*dict.fromkeys(data.medical_center)][:2]
    require(len(inside) == 2, "apd needs two centres to train on", inside)
    y = np.array([classes.index(name) for name in data.biological_class])
    chunks = [
        [_slides(data, (centre == c) & (y == k)) for k in range(len(classes))] for c in inside
    ]
    least = min(len(of) for row in chunks for of in row)
    require(least >= 5, "each class must have >= 5 slides at each of the two centres", least)
    base = (least - 3) // 2  # slides of a class and centre in split 0
    outside = np.flatnonzero(~np.isin(centre, inside))
    draw = random.Random(1000)
    scores = []  # by iteration: splits x (in, out of domain)
    for seed in draw.sample(range(10_000), settings.iterations):
        rng = random.Random(seed)
        for row in chunks:
            for of in row:
                rng.shuffle(of)
        splits = ([*_split(chunks, base, s), outside] for s in range(base + 1))
        scores.append([_accuracies(data.embeddings, y, parts) for parts in splits])
    accuracy = np.array(scores)  # (iterations, splits, 2)
    drops = (accuracy[:, 1:] / accuracy[:, :1]).mean(axis=1).mean(axis=0) - 1
    details = {
        "apd_out_of_domain": float(drops[1]) if len(outside) else None,
        "accuracy_by_split": accuracy[:, :, 0].mean(axis=0).tolist(),
        "accuracy_by_split_out_of_domain": accuracy[:, :, 1].mean(axis=0).tolist(),
        "centres": inside,
    }
    return _result("apd", data, float(drops[0]), protocol, details)


def _slides(data: RobustnessSet, of: npt.NDArray[np.bool_]) -> _Chunks:
    """The chosen rows by slide, in order of appearance."""
    rows = np.flatnonzero(of)
    slide = np.array(data.slide_id)[rows]
    return [rows[slide == name] for name in dict.fromkeys(slide.tolist())]


def _accuracies(
    x: npt.NDArray, y: npt.NDArray[np.int64], parts: list[npt.NDArray[np.int64]]
) -> list[float]:
    """Balanced accuracies of the last two parts (NaN for none), by the C best on the second."""
    train, val, *tests = parts
    models = [LogisticRegression(C=c, random_state=0).fit(x[train], y[train]) for c in APD_CS]
    by_c = [balanced_accuracy_score(y[val], m.predict(x[val])) for m in models]
    best = models[int(np.argmax(by_c))]
    return [
        float(balanced_accuracy_score(y[rows], best.predict(x[rows]))) if len(rows) else np.nan
        for rows in tests
    ]


def _split(chunks: list[list[_Chunks]], base: int, split: int) -> list[npt.NDArray[np.int64]]:
    """Rows of training, validation and in-domain test: see `apd_probe`."""
    parts: list[list[npt.NDArray[np.int64]]] = [[], [], []]
    for c, row in enumerate(chunks):
        for k, of in enumerate(row):
            count = base + split if (k < len(row) / 2) == (c == 1) else base - split
            rows = np.concatenate(of)
            each = len(rows) // len(of)
            used = count * each
            cuts = (
                (0, used),
                (used, used + used // (2 * base)),
                ((2 * base + 1) * each, len(rows)),
            )
            for part, (start, end) in zip(parts, cuts, strict=True):
                part.append(rows[start:end])
    return [np.concatenate(part) for part in parts]


def _result(
    probe: str, data: RobustnessSet, score: float, protocol: Protocol, details: dict[str, Any]
) -> ProbeResult:
    """A score without an interval: it is one number of all tiles."""
    columns = (data.biological_class, data.medical_center, data.slide_id)
    facts = {"tiles": len(data.slide_id), "slides": len(set(data.slide_id)), **data.facts}
    facts |= data_hashes([data.embeddings], columns)
    metric = {"apd": "apd", "clustering": "clustering_score"}[probe]
    shared: dict[str, Any] = {
        "probe": probe,
        "dataset": data.name,
        "metric": metric,
        "protocol": protocol,
    }
    return ProbeResult(**shared, score=score, interval=None, details=details, facts=facts)
