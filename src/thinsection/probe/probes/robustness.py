"""Robustness index: do neighbours share the biology or the hospital?

Source: PathoROB (bifold-pathomics). Among the k nearest tiles of other slides, SO have the same
biological class and another medical centre, OS another class and the same centre; the index is
SO / (SO + OS): 1 follows biology only, 0 the centre only.
"""

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.probe.compute import cosine_neighbours
from thinsection.probe.data.sets import RobustnessSet, check_finite
from thinsection.probe.metrics import ratio
from thinsection.probe.protocol import NANOPATH, Protocol, RobustnessSettings
from thinsection.probe.result import ProbeResult
from thinsection.probe.statistics import bootstrap_rows
from thinsection.types import GIB

Codes = npt.NDArray[np.int64]  # (N,)
KINDS = ("so", "os", "ss", "oo")  # of a neighbour: same or other biology, same or other centre


def robustness_probe(
    data: RobustnessSet,
    *,
    protocol: Protocol = NANOPATH,
    k: int | None = None,
    device: str = "cpu",
    budget_bytes: int = GIB,
) -> ProbeResult:
    """The robustness index, with an interval over tiles.

    Args:
        data: the tiles.
        protocol: decides k by the subset's name.
        k: another k.
        device: where the products run.
        budget_bytes: for the blocks of similarities.

    Memory: budget_bytes + 10 N k.

    Raises:
        InvalidInputError: columns of different lengths, NaN, or no SO and no OS neighbour at all.
    """
    settings: RobustnessSettings = protocol.require("robustness")
    biology, centre, slide = _codes(data)
    k = k or dict(settings.k_by_subset).get(data.name, settings.default_k)
    x = data.embeddings
    found = cosine_neighbours(x, x, k, groups=slide, device=device, budget_bytes=budget_bytes)
    kinds = _count_kinds(found, biology, centre)
    either = kinds["so"] + kinds["os"]
    if not either.any():
        raise InvalidInputError(
            "neighbours must include same-class other-centre or other-class same-centre tiles, "
            f"got neither in {data.name!r}; the index needs two classes and two centres"
        )

    def index(weights: npt.NDArray) -> npt.NDArray[np.float64]:
        return ratio(weights @ kinds["so"], weights @ either, empty=np.nan)

    return ProbeResult(
        probe="robustness",
        dataset=data.name,
        metric="robustness_index",
        score=float(index(np.ones((1, len(x))))[0]),
        interval=bootstrap_rows(len(x), index, seed=protocol.seed),
        protocol=protocol,
        details={
            "k": k,
            **{name: int(counts.sum()) for name, counts in kinds.items()},
            "tiles_with_fewer_neighbours": int((found < 0).any(axis=1).sum()),
        },
        facts={
            "tiles": len(x),
            "slides": len(set(data.slide_id)),
            "dim": int(x.shape[1]),
            **data.facts,
        },
    )


def _count_kinds(found: npt.NDArray[np.int64], biology: Codes, centre: Codes) -> dict[str, Codes]:
    """How many neighbours (N, k; -1 is none) of each tile share its biology (s.), its centre (.s).

    The keys are so, os, ss and oo; each value has the shape (N,).
    """
    there = found >= 0
    same_biology = biology[found] == biology[:, None]
    same_centre = centre[found] == centre[:, None]
    of_biology = {"s": there & same_biology, "o": there & ~same_biology}
    of_centre = {"s": same_centre, "o": ~same_centre}
    return {kind: (of_biology[kind[0]] & of_centre[kind[1]]).sum(axis=1) for kind in KINDS}


def _codes(data: RobustnessSet) -> tuple[Codes, Codes, Codes]:
    """The three columns as integers."""
    columns = (data.biological_class, data.medical_center, data.slide_id)
    n = len(data.embeddings)
    if any(len(column) != n for column in columns):
        raise InvalidInputError(
            f"columns must be one entry a tile, got {[len(c) for c in columns]} for {n} tiles"
        )
    check_finite(data.embeddings, data.slide_id)
    biology, centre, slide = (np.unique(c, return_inverse=True)[1] for c in columns)
    return biology, centre, slide
