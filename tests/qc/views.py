"""Views for checks without a slide."""

import numpy as np
import numpy.typing as npt

from thinsection.arrays import get_namespace
from thinsection.arrays.filters import gray_from_rgb
from thinsection.qc.checks.artefact_network import artefact_maps
from thinsection.qc.checks.check import QcView, Regions
from thinsection.qc.checks.pen_ink import find_pen_ink


def view_of(
    rgb: npt.NDArray[np.uint8],
    mask: npt.NDArray[np.bool_] | None = None,
    *,
    mpp_th: float = 8.0,
) -> QcView:
    """A view of one picture, which is also what every other resolution answers."""
    ns = get_namespace("cpu")

    def regions_at(mpp: float) -> Regions:
        return rgb.shape[1::-1], lambda left, top, right, bottom: rgb[
            top:bottom, left:right
        ]

    def probability_of(params: object) -> object:
        raise AssertionError("these views have no pixel model")

    return QcView(
        ns=ns,
        rgb=rgb,
        mask_use=np.ones(rgb.shape[:2], dtype=bool) if mask is None else mask,
        mpp_th=mpp_th,
        gray_at=lambda nominal_mpp: gray_from_rgb(ns, rgb),
        regions_at=regions_at,
        probability_of=probability_of,
        artefact_maps=lambda: artefact_maps(ns, rgb, mpp_th),
        pen_ink=lambda: find_pen_ink(rgb, mpp_th),
    )
