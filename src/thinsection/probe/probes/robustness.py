"""Robustness index: do neighbours share the biology or the hospital?

Source: PathoROB (bifold-pathomics). Among the k nearest tiles of other slides, SO have the same
biological class and another medical centre, OS another class and the same centre; the index is
SO / (SO + OS): 1 follows biology only, 0 the centre only.
"""

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.probe.compute import DEFAULT_BUDGET_BYTES, cosine_neighbours
from thinsection.probe.data.sets import RobustnessSet, check_finite
from thinsection.probe.protocol import NANOPATH, Protocol, RobustnessSettings
from thinsection.probe.result import ProbeResult
from thinsection.probe.statistics import bootstrap_rows

Codes = npt.NDArray[np.int64]  # (N,)


def robustness_probe(
    data: RobustnessSet,
    *,
    protocol: Protocol = NANOPATH,
    k: int | None = None,
    device: str = "cpu",
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
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
    found = cosine_neighbours(
        data.embeddings,
        data.embeddings,
        k,
        query_groups=slide,
        bank_groups=slide,
        device=device,
        budget_bytes=budget_bytes,
    )
    kinds = _count_kinds(found, biology, centre)
    if not (kinds.so + kinds.os).any():
        raise InvalidInputError(
            "neighbours must include same-class other-centre or other-class same-centre tiles, "
            f"got neither in {data.name!r}; the index needs two classes and two centres"
        )
    return ProbeResult(
        probe="robustness",
        dataset=data.name,
        metric="robustness_index",
        score=float(kinds.index(np.ones((1, len(biology))))[0]),
        interval=bootstrap_rows(len(biology), kinds.index, seed=protocol.seed),
        protocol=protocol,
        details={
            "k": k,
            **{name: int(counts.sum()) for name, counts in asdict(kinds).items()},
            "tiles_with_fewer_neighbours": int((found < 0).any(axis=1).sum()),
        },
        facts={
            "tiles": len(biology),
            "slides": len(set(data.slide_id)),
            "dim": int(data.embeddings.shape[1]),
            **data.facts,
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kinds:
    """How many neighbours of each tile (N,) share its biology (S.) and its centre (.S)."""

    so: Codes
    os: Codes
    ss: Codes
    oo: Codes

    def index(self, weights: npt.NDArray) -> npt.NDArray[np.float64]:
        """The robustness index under each row of tile weights (B, N); NaN where it is 0 / 0."""
        top, bottom = weights @ self.so, weights @ (self.so + self.os)
        values: npt.NDArray[np.float64] = np.full(len(weights), np.nan)
        np.divide(top, bottom, out=values, where=bottom > 0)
        return values


def _count_kinds(found: npt.NDArray[np.int64], biology: Codes, centre: Codes) -> _Kinds:
    """From neighbours (N, k), where -1 is none."""
    there = found >= 0
    same_biology = biology[found] == biology[:, None]
    same_centre = centre[found] == centre[:, None]
    return _Kinds(
        so=(there & same_biology & ~same_centre).sum(axis=1),
        os=(there & ~same_biology & same_centre).sum(axis=1),
        ss=(there & same_biology & same_centre).sum(axis=1),
        oo=(there & ~same_biology & ~same_centre).sum(axis=1),
    )


def _codes(data: RobustnessSet) -> tuple[Codes, Codes, Codes]:
    """The three columns as integers."""
    columns = (data.biological_class, data.medical_center, data.slide_id)
    n = len(data.embeddings)
    if any(len(column) != n for column in columns):
        raise InvalidInputError(
            f"columns must be one entry a tile, got {[len(c) for c in columns]} for {n} tiles"
        )
    check_finite(data.embeddings, data.slide_id)
    biology, centre, slide = (
        np.unique(np.asarray(column), return_inverse=True)[1].astype(np.int64) for column in columns
    )
    return biology, centre, slide
