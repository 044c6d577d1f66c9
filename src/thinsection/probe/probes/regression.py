"""Numbers from embeddings: HEST's PCA and ridge regression, Pearson's correlation by target."""

import numpy as np
import numpy.typing as npt
from sklearn.decomposition import PCA
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler

from thinsection.probe import intervals, metrics
from thinsection.probe.data.sets import ValueSet, check_finite, data_hashes
from thinsection.probe.protocol import NANOPATH, Protocol, RegressionSettings
from thinsection.probe.result import ProbeResult, Values


def regression_probe(data: ValueSet, *, protocol: Protocol = NANOPATH) -> ProbeResult:
    """Mean Pearson correlation over targets, then over folds, of ridge on principal components.

    Per fold: z-scores, PCA, ridge without intercept at alpha 100 / (components x targets). A target
    that is constant in a fold's validation rows does not count there (HEST's mean is NaN then).

    Memory: 8 N D + 16 N T.

    Source: HEST-1k (mahmoodlab/HEST), `hest.bench`.
    """
    settings = protocol.regression
    check_finite(data.embeddings, data.ids)
    rows, sizes = np.concatenate([val for _, val in data.folds]), [len(v) for _, v in data.folds]
    values = Values(
        ids=tuple(data.ids[i] for i in rows),
        target_names=data.target_names,
        truth=data.targets[rows],
        prediction=np.concatenate([_ridge(data, *fold, settings) for fold in data.folds]),
        groups=data.groups.take(rows) if data.groups else None,
        fold=np.repeat(np.arange(len(sizes)), sizes),
    )
    score = values.scorers["pearson"]
    by_target = [
        metrics.pearson(values.truth[of], values.prediction[of], np.ones((1, len(of))))[0]
        for of in np.split(np.arange(len(rows)), np.cumsum(sizes)[:-1])
    ]
    asked = (data.ids, data.targets.tolist(), [(t.tolist(), v.tolist()) for t, v in data.folds])
    return ProbeResult(
        probe="regression",
        dataset=data.name,
        metric="pearson",
        score=float(score(np.ones((1, len(rows))))[0]),
        interval=intervals.bootstrap_rows(
            len(rows), score, seed=protocol.seed, groups=values.groups, bounds=(-1.0, 1.0)
        ),
        protocol=protocol,
        details={
            "fold_scores": [float(np.nanmean(found)) for found in by_target],
            "pearson_by_target": dict(
                zip(data.target_names, np.nanmean(by_target, axis=0).tolist(), strict=True)
            ),
        },
        facts={
            **{"rows": len(data.ids), "dim": data.embeddings.shape[1], **data.facts},
            **data_hashes([data.embeddings], asked),
        },
        values=values,
    )


def _ridge(
    data: ValueSet, train: npt.NDArray, val: npt.NDArray, settings: RegressionSettings
) -> npt.NDArray[np.float64]:
    """Predictions (n_val, T); components are rounded to float32, as HEST hands them on."""
    scaler = StandardScaler().fit(data.embeddings[train])
    x = [scaler.transform(data.embeddings[rows]) for rows in (train, val)]
    most = min(settings.components, *x[0].shape)
    pca = PCA(n_components=most, random_state=settings.seed)
    # `fit_transform`, as HEST has it: of a randomised decomposition it is not `transform` of `fit`
    x = [part.astype(np.float32) for part in (pca.fit_transform(x[0]), pca.transform(x[1]))]
    alpha = 100 / (most * data.targets.shape[1])
    known = {"random_state": settings.seed, "fit_intercept": False, "max_iter": 1000}
    model = Ridge(solver="lsqr", alpha=alpha, **known).fit(x[0], data.targets[train])
    return np.asarray(model.predict(x[1]), dtype=np.float64).reshape(len(val), -1)
