"""Cox regression of many features, with a ridge or an elastic net.

Tied events have Breslow's likelihood. A constant that is added to a feature changes nothing.

Shapes: n cases, D features.

Source: Cox, JRSS B 34 (1972); Breslow, Biometrics 30 (1974); Verweij and Van Houwelingen,
Statistics in Medicine 13 (1994): ridge; Simon et al., Journal of Statistical Software 39 (2011):
elastic net; Beck and Teboulle, SIAM Journal on Imaging Sciences 2 (2009), and O'Donoghue and
Candès, Foundations of Computational Mathematics 15 (2015): its solver. Written from these papers.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from thinsection.errors import InvalidInputError
from thinsection.evaluation.metrics import Flags, FloatVector, IndexArray
from thinsection.types import Floats

# a fit ends where the slope of the objective is at most this share of its slope at 0
TOLERANCE = 1e-9
# rounding of the objective, as a share of its value
ROUNDING = 1e-13


def cox_ridge(
    x: Floats, event: Flags, time: FloatVector, *, penalty: float, max_steps: int
) -> FloatVector:
    """Coefficients (D,) that maximise the log likelihood - penalty / 2 x their sum of squares.

    Memory: 32 n D + 16 D².

    Raises InvalidInputError: no case has an event, or the fit needs more than `max_steps`.
    """
    cohort = _Cohort.of(x, event, time)
    coefficients = np.zeros(x.shape[1])
    here = cohort.at(coefficients)
    slope = here.slope @ cohort.x
    small = TOLERANCE * np.abs(slope).max()
    for _ in range(max_steps):
        if np.abs(slope).max() <= small:
            return coefficients
        curvature = cohort.curvature(here)
        curvature[np.diag_indices_from(curvature)] += penalty
        step = np.linalg.solve(curvature, slope)
        value = here.loss + penalty / 2 * coefficients @ coefficients
        new = coefficients - step
        here = cohort.at(new)
        while here.loss + penalty / 2 * new @ new > value * (1 + ROUNDING):
            step /= 2  # it led too far
            new = coefficients - step
            here = cohort.at(new)
        coefficients = new
        slope = here.slope @ cohort.x + penalty * coefficients
    raise _unfinished(max_steps)


def cox_elastic_net(
    x: Floats,
    event: Flags,
    time: FloatVector,
    *,
    penalty: float,
    l1_ratio: float,
    max_steps: int,
) -> FloatVector:
    """Coefficients (D,) that maximise the log likelihood / n - penalty x the elastic net.

    The elastic net is `l1_ratio` x the sum of absolute values + (1 - `l1_ratio`) / 2 x the sum of
    squares of the coefficients. A feature that does not help has the coefficient 0.

    Memory: 24 n D.

    Raises InvalidInputError: no case has an event, or the fit needs more than `max_steps`.
    """
    cohort = _Cohort.of(x, event, time)
    lasso = penalty * l1_ratio
    ridge = penalty * (1 - l1_ratio)
    coefficients = np.zeros(x.shape[1])
    ahead = coefficients  # where the next step starts: further on in the same direction
    momentum = 1.0
    step = 1.0
    small: float | None = None
    for _ in range(max_steps):
        here = cohort.at(ahead)
        slope = here.slope @ cohort.x / len(x)
        if small is None:
            small = TOLERANCE * float(np.abs(slope).max())
        step *= 1.25
        while True:
            new = ahead - step * slope
            new = np.sign(new) * np.maximum(np.abs(new) - step * lasso, 0)
            new /= 1 + step * ridge
            move = new - ahead
            bound = here.loss / len(x) + slope @ move + move @ move / (2 * step)
            if cohort.at(new).loss / len(x) <= bound + ROUNDING * abs(bound):
                break
            step /= 2  # the objective curves more
        if np.abs(move).max() <= small * step:
            return new
        # momentum that leads back starts again
        if move @ (new - coefficients) < 0:
            momentum = 1.0
        next_momentum = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = new + (momentum - 1) / next_momentum * (new - coefficients)
        coefficients = new
        momentum = next_momentum
    raise _unfinished(max_steps)


def _unfinished(max_steps: int) -> InvalidInputError:
    return InvalidInputError(
        f"max_iter must be enough for Cox regression to end, got {max_steps}; check for features "
        "of very different sizes, or raise the penalty"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Likelihood:
    """Negative log likelihood at some coefficients; cases in the order of `_Cohort`."""

    loss: float
    slope: FloatVector  # (n,), by the log risk of each case
    log_risk: FloatVector  # (n,)
    log_at_risk: (
        FloatVector  # (n,), log of the risks that are observed at each case's time
    )
    expected: FloatVector  # (n,), events that are expected of each case


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cohort:
    """Cases in the order of their times."""

    x: Floats  # centred
    event: Flags
    first: IndexArray  # (n,), first case with the same time
    last: IndexArray  # (n,), last case with the same time

    @classmethod
    def of(cls, x: Floats, event: Flags, time: FloatVector) -> Self:
        """Cases in any order. Raises InvalidInputError: no case has an event."""
        if not event.any():
            raise InvalidInputError(
                f"event must be true for at least one case, got {len(event)} censored cases"
            )
        order = np.argsort(time, kind="stable")
        ordered = time[order]
        return cls(
            x=x[order] - x.mean(axis=0),
            event=event[order],
            first=np.searchsorted(ordered, ordered, side="left"),
            last=np.searchsorted(ordered, ordered, side="right") - 1,
        )

    def at(self, coefficients: FloatVector) -> _Likelihood:
        """Likelihood of coefficients (D,)."""
        log_risk = self.x @ coefficients
        log_at_risk = np.logaddexp.accumulate(log_risk[::-1])[::-1][self.first]
        # sums of logarithms: the risks themselves may be too large or too small for a float
        hazards = np.where(self.event, -log_at_risk, -np.inf)
        log_hazard = np.logaddexp.accumulate(hazards)[self.last]
        expected = np.exp(log_risk + log_hazard)
        return _Likelihood(
            loss=float((log_at_risk - log_risk)[self.event].sum()),
            slope=expected - self.event,
            log_risk=log_risk,
            log_at_risk=log_at_risk,
            expected=expected,
        )

    def curvature(self, likelihood: _Likelihood) -> Floats:
        """Second derivatives (D, D) of the loss by the coefficients."""
        scale = likelihood.log_risk.max()
        weight = np.exp(likelihood.log_risk - scale)
        at_risk = np.exp(likelihood.log_at_risk - scale)
        sums = (weight[:, None] * self.x)[::-1].cumsum(axis=0)[::-1]
        means = sums[self.first][self.event] / at_risk[self.event, None]
        return np.asarray((self.x.T * likelihood.expected) @ self.x - means.T @ means)
