"""What a check sees and what it answers."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from thinsection.arrays import Array, ArrayNamespace
from thinsection.arrays.morphology import Regions

Score = float | str
Statistics = Literal["relative2mask", "relative2image", "absolute"]
EMPTY_SCORE = -100.0  # what HistoQC writes where there is no px to measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Strips:
    """The slide at another resolution, in strips from top to bottom.

    Attributes:
        mpp: µm per px.
        size: (width, height) of all strips together.
        strips: yields RGB uint8 (rows, width, 3) on the host; rows is a multiple of the multiple
            that was asked for, but for the last.
    """

    mpp: float
    size: tuple[int, int]
    strips: Iterator[npt.NDArray[np.uint8]]


@dataclass(frozen=True, slots=True, kw_only=True)
class QcView:
    """One slide at the work resolution, as a check sees it. Arrays live on the namespace's device.

    Attributes:
        ns: where arrays live.
        rgb: uint8 (H, W, 3).
        gray: float64 (H, W), luma in [0, 1].
        mask_use: bool (H, W), what the checks before this one have left.
        mpp_th: µm per px of the work image.
        statistics: how a share is written.
        gray_at: gray, float32, of the whole slide at a nominal mpp, from the same pass over it.
        strips_at: strips at about a real mpp, with rows a multiple of the second argument.
        probability_of: P of each px, float32 (H, W), by the model of a by-example check.
    """

    ns: ArrayNamespace
    rgb: Array
    gray: Array
    mask_use: Array
    mpp_th: float
    statistics: Statistics = "relative2mask"
    gray_at: Callable[[float], Array]
    strips_at: Callable[[float, int], Strips]
    probability_of: Callable[[Any], Array]

    def share(self, new_mask: Array) -> float:
        """What the step took from `mask_use`, in the view's statistics."""
        left, before = (int(self.ns.xp.count_nonzero(m)) for m in (new_mask, self.mask_use))
        if self.statistics == "absolute":
            return float(left)
        if self.statistics == "relative2image":
            return left / float(new_mask.size)
        return EMPTY_SCORE if before == 0 else 1.0 - left / before


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one check answers.

    Attributes:
        mask_use: bool (H, W), the mask after it; None leaves it as it was.
        touched: bool (H, W), what the check found (or filled); None if it only measures.
        scores: columns of the slide's row.
        tables: small arrays for the report, on the host.
        enforce: True takes `touched` out of the final mask again, whatever filled it since.
        warnings: sentences for the slide's row.
    """

    mask_use: Array | None = None
    touched: Array | None = None
    scores: Mapping[str, Score] = field(default_factory=dict)
    tables: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    enforce: bool = False
    warnings: tuple[str, ...] = ()


def region_scores(prefix: str, regions: Regions, share: float) -> dict[str, Score]:
    """The four columns of a check that removes or fills regions."""
    return {
        f"{prefix}_num_regions": float(regions.count),
        f"{prefix}_mean_area": regions.mean_area_px,
        f"{prefix}_max_area": float(regions.max_area_px),
        f"{prefix}_percent": share,
    }
