"""Values far from all others, by one stated rule; they are named, and never dropped."""

import numpy as np
import numpy.typing as npt

FAR = 5.0  # robust standard deviations from the median
_TO_SD = 1.4826  # standard deviation over MAD of a normal distribution


def outliers(values: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """True for values (n,) more than FAR robust standard deviations (1.4826 MAD) from the median.

    None is one where half of the values are equal, since nothing says how far they spread.
    """
    if len(values) == 0:
        return np.zeros(0, dtype=bool)
    distance = np.abs(values - np.median(values))
    spread = _TO_SD * float(np.median(distance))
    if spread == 0:
        return np.zeros(len(values), dtype=bool)
    return np.asarray(distance > FAR * spread)
