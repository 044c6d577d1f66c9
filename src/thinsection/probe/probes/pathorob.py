"""PathoROB: the robustness index, the clustering score, and what correlated training costs (APD).

Source: PathoROB (bifold-pathomics), `robustness_index`, `clustering_score` and `apd`.
"""

import random
from collections.abc import Sequence
from itertools import chain, combinations, product

import numpy as np
import numpy.typing as npt
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import (
    adjusted_rand_score,
    balanced_accuracy_score,
    silhouette_score,
)

from thinsection.errors import InvalidInputError
from thinsection.evaluation import metrics
from thinsection.evaluation.cases import group_rows
from thinsection.evaluation.embeddings import check_finite, check_vectors
from thinsection.evaluation.metrics import Flags, IndexArray
from thinsection.evaluation.rows import Ratios
from thinsection.probe import protocol as suites
from thinsection.probe.compute import nearest_rows
from thinsection.probe.data.sets import RobustnessSet, data_hashes
from thinsection.probe.probes.tiles import count_votes
from thinsection.probe.protocol import NANOPATH, Protocol
from thinsection.probe.result import ProbeResult, scored
from thinsection.types import GIB

APD_CS = 10 ** np.linspace(-8, 4, 15)  # of the logistic regressions
FIRST_SEED = 1337  # of k-means
_BLOCK_ROWS = 256  # rows whose distances are computed at once
_Chunks = list[IndexArray]  # the rows of each slide of one class and centre


def robustness_probe(
    data: RobustnessSet,
    *,
    protocol: Protocol = NANOPATH,
    k: int | None = None,
    choose_k: bool = False,
    device: str = "cpu",
    budget_bytes: int = GIB,
) -> ProbeResult:
    """The robustness index: do neighbours share biology or hospital? Its interval is over slides.

    Among the k nearest tiles of other slides, SO have the same biological class and another medical
    centre, OS another class and the same centre. The index is SO / (SO + OS): 1 follows biology
    only, 0 the centre only. Without `k` the protocol decides it by the subset's name; `choose_k`
    takes the one whose majority vote names the biological class with the best balanced accuracy.
    `details` has the margin-aware index (MaRI), in which a neighbour at cosine distance d counts
    exp(-d / temperature); the temperature is the median d of SO and OS.
    Where the data have pairs (`pair`, TCGA's 2 x 2 of classes and centres), neighbours are sought
    within each pair, and a tile that several pairs list counts in each.

    Memory: budget_bytes + 28 N k. Raises InvalidInputError: columns of different lengths, NaN, no
    pairs in a set that PathoROB scores by pairs, or no SO and no OS neighbour.
    """
    settings = check_columns(data, protocol)
    pairs = rows_of_pairs(data)
    if k is None:
        k = dict(settings.k_by_subset).get(data.name, settings.default_k)
    most = dict(settings.max_k_by_subset).get(data.name, settings.max_k)
    width = most if choose_k else k
    near_of_pair = [
        _other_slides(data, rows, width, device, budget_bytes) for rows in pairs
    ]
    biology = np.unique(data.biological_class, return_inverse=True)[1]
    accuracy_by_k: dict[int, float] = {}
    if choose_k:
        of_pairs = [
            _vote_by_k(near, biology[rows])
            for near, rows in zip(near_of_pair, pairs, strict=True)
        ]
        shared = [k for k in of_pairs[0] if all(k in votes for votes in of_pairs)]
        accuracy_by_k = {
            k: float(np.mean([votes[k] for votes in of_pairs])) for k in shared
        }
        k = max(shared, key=accuracy_by_k.__getitem__)  # max keeps the first of equals
    counts = np.zeros((4, len(data.slide_id)), dtype=np.int64)
    for near, rows in zip(near_of_pair, pairs, strict=True):
        counts[:, rows] = _count_neighbours(data, rows, near[:, :k])
    so, os, ss, oo = counts
    either = so + os
    if not either.any():
        raise InvalidInputError(
            "neighbours must include tiles of the same class from another centre or of another "
            f"class from the same centre, got neither in {data.name!r}; the index needs two "
            "classes and two centres"
        )
    groups = data.groups or group_rows(data.slide_id, where=repr(data.name))
    ratios = Ratios(
        metric="robustness_index",
        ids=tuple(f"{slide}:{i}" for i, slide in enumerate(data.slide_id)),
        groups=groups,
        top=so.astype(np.float64),
        bottom=either.astype(np.float64),
    )
    distances = [
        _typed_distances(data, rows, near[:, :k])
        for near, rows in zip(near_of_pair, pairs, strict=True)
    ]
    so_distances, os_distances = (
        np.concatenate(parts) for parts in zip(*distances, strict=True)
    )
    margin_aware, temperature = margin_aware_index(so_distances, os_distances)
    details: dict[str, object] = {
        "k": k,
        "margin_aware_index": margin_aware,
        "temperature": temperature,
        "so": int(so.sum()),
        "os": int(os.sum()),
        "ss": int(ss.sum()),
        "oo": int(oo.sum()),
        "biology_by_k": {str(k): v for k, v in accuracy_by_k.items()},
        "tiles_with_fewer_neighbours": int((counts.sum(axis=0) < k).sum()),
    }
    if choose_k:
        details["selected_on"] = "k by the vote for biology on the same tiles"
    if data.pair:
        details["pairs"] = len(pairs)
    return scored(
        "robustness",
        data,
        ratios,
        ratios.metric,
        protocol=protocol,
        details=details,
        facts=facts_of(data, dim=data.embeddings.shape[1]),
    )


def _count_neighbours(
    data: RobustnessSet, rows: IndexArray, near: IndexArray
) -> IndexArray:
    """Neighbours (4, n) of tiles by kind: SO, OS, SS and OO, see `robustness_probe`.

    Args:
        data: all tiles.
        rows: the tiles that are neighbours of each other, (n,).
        near: neighbours of each of them (n, k), as places in `rows`; -1 for none.
    """
    return np.stack([kind.sum(axis=1) for kind in _neighbour_kinds(data, rows, near)])


def _neighbour_kinds(
    data: RobustnessSet, rows: IndexArray, near: IndexArray
) -> list[Flags]:
    """Flags (n, k) of the neighbours of each kind, see `_count_neighbours`."""
    biology = np.array(data.biological_class)[rows]
    centre = np.array(data.medical_center)[rows]
    kin = biology[near] == biology[:, None]
    home = centre[near] == centre[:, None]
    kinds = (kin & ~home, ~kin & home, kin & home, ~kin & ~home)
    return [kind & (near >= 0) for kind in kinds]


def cosine_distances(
    x: npt.NDArray[np.floating], rows: IndexArray, near: IndexArray
) -> npt.NDArray[np.float64]:
    """Cosine distances (n, m) in float64 of rows of x (N, D) to their neighbours (n, m).

    Memory: the result, and 24 D m bytes for each of a few hundred rows.
    """
    distances = np.empty(near.shape)
    for start in range(0, len(rows), _BLOCK_ROWS):
        part = slice(start, start + _BLOCK_ROWS)
        q = _unit(x[rows[part]])
        distances[part] = 1 - np.einsum("nd,nmd->nm", q, _unit(x[near[part]]))
    return distances.clip(0, 2)


def _unit(x: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    wide = x.astype(np.float64)
    wide /= np.sqrt((wide * wide).sum(axis=-1, keepdims=True))
    return wide


def _typed_distances(
    data: RobustnessSet, rows: IndexArray, near: IndexArray
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Cosine distances of all SO and of all OS neighbours; arguments of `_count_neighbours`."""
    kinds = _neighbour_kinds(data, rows, near)
    distances = cosine_distances(data.embeddings, rows, rows[near])
    return distances[kinds[0]], distances[kinds[1]]


def margin_aware_index(
    so_distances: npt.NDArray[np.float64], os_distances: npt.NDArray[np.float64]
) -> tuple[float, float]:
    """MaRI, and its temperature: the median distance; without a scale (0) all count alike.

    Source: Grisi et al., "A distributional robustness margin for pathology foundation models",
    2026.
    """
    temperature = float(np.median(np.concatenate([so_distances, os_distances])))
    scale = temperature or np.inf
    so, os = (np.exp(-d / scale).sum() for d in (so_distances, os_distances))
    return float(so / (so + os)), temperature


def rows_of_pairs(data: RobustnessSet) -> list[IndexArray]:
    """Rows of each pair, in the order of the pairs' names; all rows where there is none."""
    if not data.pair:
        return [np.arange(len(data.slide_id))]
    pair = np.array(data.pair)
    return [np.flatnonzero(pair == name) for name in np.unique(pair)]


def check_columns(data: RobustnessSet, protocol: Protocol) -> suites.RobustnessSettings:
    """The protocol's settings of robustness.

    Raises InvalidInputError: columns of different lengths, NaN, or no pairs in a set that PathoROB
    scores by pairs.
    """
    settings = protocol.require("robustness", suites.RobustnessSettings)
    lengths = [len(column) for column in _columns(data)]
    if data.pair:
        lengths.append(len(data.pair))
    if {*lengths} != {len(data.embeddings)}:
        raise InvalidInputError(
            f"columns must have one entry per tile, got {lengths} for {len(data.embeddings)} "
            "tiles"
        )
    check_vectors(data.embeddings, data.slide_id)
    if data.name in settings.paired_subsets and not data.pair:
        raise InvalidInputError(
            f"{data.name!r} must have the column subset, got none; PathoROB scores its pairs of "
            "classes and centres separately; use its table of 2 x 2 pairs, or rename the table"
        )
    return settings


def _other_slides(
    data: RobustnessSet, rows: IndexArray, k: int, device: str, budget_bytes: int
) -> IndexArray:
    """Neighbours (n, k) of other slides among `rows`, as places in `rows`; -1 for none."""
    x = data.embeddings if len(rows) == len(data.embeddings) else data.embeddings[rows]
    slide = np.unique(np.array(data.slide_id)[rows], return_inverse=True)[1]
    return nearest_rows(
        x,
        x,
        min(k, len(rows)),
        groups=slide,
        device=device,
        budget_bytes=budget_bytes,
    )


def _vote_by_k(near: IndexArray, biology: IndexArray) -> dict[int, float]:
    """Balanced accuracy of the vote of the first k neighbours, where every tile has so many."""
    full = int((near >= 0).all(axis=0).sum())
    num_classes = int(biology.max()) + 1
    accuracy: dict[int, float] = {}
    for k in (1, 3, 5, 7, 9, *range(11, full + 1, 10)):
        if k > full:
            break
        guess = count_votes(biology[near[:, :k]], num_classes).argmax(axis=1)
        counts = metrics.confusion_matrix(biology, guess, num_classes)
        accuracy[k] = float(metrics.balanced_accuracy(counts))
    return accuracy


def _columns(data: RobustnessSet) -> tuple[tuple[str, ...], ...]:
    return data.biological_class, data.medical_center, data.slide_id


def facts_of(data: RobustnessSet, **sizes: int) -> dict[str, object]:
    return {
        "tiles": len(data.slide_id),
        "slides": len(set(data.slide_id)),
        **sizes,
        **data.facts,
        **data_hashes([data.embeddings], _columns(data)),
    }


def clustering_probe(
    data: RobustnessSet, *, protocol: Protocol = NANOPATH
) -> ProbeResult:
    """Adjusted Rand index of clusters with biology minus that with the centre.

    For each two classes and two centres: k-means on unit vectors, the number of clusters by the
    best silhouette, the mean over seeded trials; the score is the mean over these combinations.

    Memory: 8 n D + 8 n² (the silhouette) for n tiles of two classes and two centres. Raises
    InvalidInputError: no two classes at two centres.
    """
    settings = protocol.pathorob
    biology = np.array(data.biological_class)
    centre = np.array(data.medical_center)
    check_finite(data.embeddings, data.slide_id)
    means: dict[str, float] = {}
    spreads = []
    cluster_numbers = []
    class_pairs = combinations(dict.fromkeys(data.biological_class), 2)
    centre_pairs = combinations(dict.fromkeys(data.medical_center), 2)
    for classes, centres in product(class_pairs, centre_pairs):
        parts = [
            np.flatnonzero((biology == b) & (centre == c))
            for b, c in product(classes, centres)
        ]
        if not all(map(len, parts)):
            continue
        rows = np.concatenate(parts)
        x = data.embeddings[rows]
        x = x / np.sqrt((x**2).sum(axis=1))[:, None]
        # the number of clusters with the best silhouette by cosine, the first of equals
        ks = range(2, min(settings.max_clusters, len(x) - 1) + 1)
        silhouettes = [
            silhouette_score(x, _clusters(x, k, FIRST_SEED, starts=20), metric="cosine")
            for k in ks
        ]
        k = ks[int(np.argmax(silhouettes))]
        cluster_numbers.append(k)
        trials = []
        for trial in range(settings.trials):
            labels = _clusters(x, k, FIRST_SEED + trial, starts=5)
            biology_index = adjusted_rand_score(biology[rows], labels)
            centre_index = adjusted_rand_score(centre[rows], labels)
            trials.append(biology_index - centre_index)
        means[f"{'-'.join(classes)} at {'-'.join(centres)}"] = float(np.mean(trials))
        if len(trials) > 1:
            spreads.append(np.std(trials, ddof=1))
    if not means:
        raise InvalidInputError(
            "tiles must have two classes at two centres, got no such four groups in "
            f"{data.name!r}"
        )
    details = {
        "score_by_combination": means,
        "mean_std_over_trials": float(np.mean(spreads)) if spreads else 0.0,
        "clusters": cluster_numbers,
    }
    return ProbeResult(
        probe="clustering",
        dataset=data.name,
        metric="clustering_score",
        score=float(np.mean([*means.values()])),
        interval=None,  # it is one number of all tiles
        protocol=protocol,
        details=details,
        facts=facts_of(data),
    )


def _clusters(
    x: npt.NDArray[np.floating], k: int, seed: int, *, starts: int
) -> npt.NDArray[np.int32]:
    """Cluster of each row, (n,), by the best of several starts of k-means."""
    model = KMeans(n_clusters=k, random_state=seed, n_init=starts, init="random")
    return model.fit(x).labels_  # type: ignore[no-any-return]


def apd_probe(data: RobustnessSet, *, protocol: Protocol = NANOPATH) -> ProbeResult:
    """Average performance drop where training slides tie class to centre ever more closely.

    The first two centres that are named train and test; all others are the out-of-domain test.
    Split s takes s slides more of the first half of the classes from the second centre and s fewer
    from the first, and the other way round for the other half, from none to all. Per split a
    logistic regression, its C by a validation slide's worth of tiles; the score is the mean over
    splits of accuracy over that of split 0, minus 1: 0 loses nothing. As PathoROB has it for
    camelyon and tolkach_esca, without the latter's list of feasible splits. `details` has nIPD, the
    loss of what lies above chance.

    Memory: 24 n D. Raises InvalidInputError: fewer than 2 centres, fewer than 5 slides of a
    class at a centre, or one tile a slide.
    """
    check_finite(data.embeddings, data.slide_id)
    centre = np.array(data.medical_center)
    biology = np.array(data.biological_class)
    inside = [*dict.fromkeys(data.medical_center)][:2]
    if len(inside) != 2:
        raise InvalidInputError(f"apd needs two training centres, got {inside}")
    classes = [*dict.fromkeys(data.biological_class)]
    y = np.array([classes.index(name) for name in data.biological_class])
    centre_chunks = []
    for name in inside:
        of_class = [_slides(data, (centre == name) & (biology == c)) for c in classes]
        centre_chunks.append(of_class)
    all_chunks = [*chain.from_iterable(centre_chunks)]
    least = min(map(len, all_chunks))
    if least < 5:
        raise InvalidInputError(
            f"each class must have >= 5 slides at each of the two centres, got {least}"
        )
    base = (least - 3) // 2  # slides of a class and centre in split 0
    outside = np.flatnonzero(~np.isin(centre, inside))
    # PathoROB hands scikit-learn tuples of rows, which it converts to float64
    x = data.embeddings.astype(np.float64)
    scores = []  # in and out of the domain, of each iteration's splits
    for seed in random.Random(1000).sample(range(10_000), protocol.pathorob.iterations):
        rng = random.Random(seed)
        for chunks in all_chunks:
            rng.shuffle(chunks)
        for step in range(base + 1):
            train, val, test = _split(centre_chunks, base, step)
            if not len(val):
                tiles = min(
                    sum(map(len, slides)) // len(slides) for slides in all_chunks
                )
                raise InvalidInputError(
                    "each class must have >= 2 tiles a slide at each of the two centres, for the "
                    f"validation set, got {tiles} in {data.name!r}; add tiles"
                )
            scores.append(_accuracies(x, y, train, val, (test, outside)))
    accuracy = np.reshape(scores, (-1, base + 1, 2))  # (iterations, splits, 2)
    drops = (accuracy[:, 1:] / accuracy[:, :1]).mean(axis=1).mean(axis=0) - 1
    nipd, nipd_outside = (
        normalized_degradation(accuracy[:, :, domain].mean(axis=0), 1 / len(classes))
        for domain in (0, 1)
    )
    details = {
        "apd_out_of_domain": float(drops[1]) if len(outside) else None,
        "nipd": nipd,
        "nipd_out_of_domain": nipd_outside if len(outside) else None,
        "accuracy_by_split": accuracy[:, :, 0].mean(axis=0).tolist(),
        "accuracy_by_split_out_of_domain": accuracy[:, :, 1].mean(axis=0).tolist(),
        "centres": inside,
    }
    return ProbeResult(
        probe="apd",
        dataset=data.name,
        metric="apd",
        score=float(drops[0]),
        interval=None,  # it is one number of all tiles
        protocol=protocol,
        details=details,
        facts=facts_of(data),
    )


def normalized_degradation(
    accuracy: npt.NDArray[np.float64], chance: float
) -> float | None:
    """nIPD: the mean loss of accuracy above chance, over Cramér's V from 0 to 1 (trapezoids).

    Args:
        accuracy: mean over iterations (S,) of splits in equal steps of V, from none to all.
        chance: accuracy of a guess.

    Returns:
        0 loses nothing, -0.5 falls in a line to chance. None where split 0 is at chance.

    Source: Grisi et al., "A distributional robustness margin for pathology foundation models",
    2026.
    """
    above = float(accuracy[0] - chance)
    if not above > 0:
        return None
    loss = (accuracy - accuracy[0]) / above
    return float(((loss[1:] + loss[:-1]) / 2).mean())


def _slides(data: RobustnessSet, chosen: Flags) -> _Chunks:
    """The chosen rows by slide, in order of appearance."""
    rows = np.flatnonzero(chosen)
    slide = np.array(data.slide_id)[rows]
    return [rows[slide == name] for name in dict.fromkeys(slide.tolist())]


def _accuracies(
    x: npt.NDArray[np.floating],
    y: IndexArray,
    train: IndexArray,
    val: IndexArray,
    tests: Sequence[IndexArray],
) -> list[float]:
    """Balanced accuracy of each test (NaN for no rows), by the C best on `val`."""

    def accuracy(model: LogisticRegression, rows: IndexArray) -> float:
        return float(balanced_accuracy_score(y[rows], model.predict(x[rows])))

    models = [
        LogisticRegression(C=c, random_state=0).fit(x[train], y[train]) for c in APD_CS
    ]
    # max keeps the first of equals
    best = max(models, key=lambda model: accuracy(model, val))
    return [accuracy(best, rows) if len(rows) else np.nan for rows in tests]


def _split(
    centre_chunks: Sequence[list[_Chunks]], base: int, step: int
) -> tuple[IndexArray, IndexArray, IndexArray]:
    """Rows of training, validation and in-domain test of split `step`: see `apd_probe`."""
    train = []
    val = []
    test = []
    for centre, by_class in enumerate(centre_chunks):
        for k, chunks in enumerate(by_class):
            in_first_half = k < len(by_class) / 2
            grows = in_first_half == (centre == 1)
            rows = np.concatenate(chunks)
            tiles_per_slide = len(rows) // len(chunks)
            used = (base + step if grows else base - step) * tiles_per_slide
            train.append(rows[:used])
            val.append(rows[used : used + used // (2 * base)])
            test.append(rows[(2 * base + 1) * tiles_per_slide :])
    return np.concatenate(train), np.concatenate(val), np.concatenate(test)
