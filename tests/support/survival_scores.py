"""Scores of survival at a time by plain loops, with lifelines' estimate of the censoring."""

from collections.abc import Sequence

import numpy as np


def plain_scores(
    event: np.ndarray,
    time: np.ndarray,
    risk: np.ndarray,
    survival: np.ndarray,
    *,
    times: Sequence[float],
) -> list[tuple[float, float]]:
    """AUROC (Uno's) and Brier score (Graf's) at each time; `survival` is (n, T)."""
    from lifelines import KaplanMeierFitter

    # of an event and a censoring on the same day the event comes first
    censoring = KaplanMeierFitter().fit(time - 1e-6 * event, ~event)
    share = censoring.predict(time).to_numpy()
    found = []
    for k, t in enumerate(times):
        later = np.flatnonzero(time > t)
        died = np.flatnonzero(event & (time <= t))
        right = total = 0.0
        for case in died:
            ahead = (risk[case] > risk[later]).sum() + (
                risk[case] == risk[later]
            ).sum() / 2
            right += ahead / share[case]
            total += len(later) / share[case]
        error = (survival[died, k] ** 2 / share[died]).sum()
        error += ((1 - survival[later, k]) ** 2).sum() / censoring.predict(t)
        found.append((float(right / total), float(error / len(time))))
    return found
