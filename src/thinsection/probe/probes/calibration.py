"""Calibration: are the linear probe's probabilities as often right as they say?"""

from dataclasses import replace

import numpy as np

from thinsection.probe import intervals, metrics
from thinsection.probe.data.sets import TileSet
from thinsection.probe.probes.tiles import linear_probe
from thinsection.probe.protocol import NANOPATH, Protocol
from thinsection.probe.result import ProbeResult, selection_words


def calibration_probe(
    data: TileSet, *, protocol: Protocol = NANOPATH, device: str = "cpu"
) -> ProbeResult:
    """Expected calibration error of the linear probe, with its reliability by confidence.

    Memory and Raises: as of `linear_probe`.

    Source: Guo et al., On calibration of modern neural networks, ICML 2017.
    """
    result = linear_probe(data, protocol=protocol, device=device)
    rows = result.predictions
    assert rows is not None  # a linear probe classifies
    score, n = rows.scorers["ece"], len(rows.ids)
    once = np.ones((1, n))
    assert rows.probability is not None
    bins = metrics.calibration_bins(rows.probability, rows.truth, once)
    count, sure, right = (part[0] for part in bins)
    used = count > 0
    gaps = np.abs(sure - right)[used] / count[used]
    details = {
        "linear_score": result.score,
        "selected_on": selection_words(result),
        "largest_gap": float(gaps.max()),
        "reliability": {
            "rows": count[used].tolist(),
            "confidence": (sure[used] / count[used]).tolist(),
            "right": (right[used] / count[used]).tolist(),
        },
    }
    return replace(
        result,
        probe="calibration",
        metric="ece",
        score=float(score(once)[0]),
        interval=intervals.bootstrap_rows(n, score, seed=protocol.seed, groups=data.val.groups),
        details=details,
    )
