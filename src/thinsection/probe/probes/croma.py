"""CRoMa: how much nearer is the same biology elsewhere than other biology at home?

Source: Grisi et al., "A distributional robustness margin for pathology foundation models", 2026;
checked against its package, croma 1.0.

Shapes: N tiles with vectors of D channels; m neighbours of a kind; n queries.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.evaluation.cases import group_rows
from thinsection.evaluation.metrics import IndexArray
from thinsection.evaluation.rows import Margins
from thinsection.probe.compute import nearest_rows
from thinsection.probe.data.sets import RobustnessSet
from thinsection.probe.probes.pathorob import (
    check_columns,
    cosine_distances,
    facts_of,
    rows_of_pairs,
)
from thinsection.probe.protocol import NANOPATH, Protocol
from thinsection.probe.result import ProbeResult, scored
from thinsection.types import GIB

NEIGHBOURS = 5  # m of the publication's headline
# SO and OS in words
_KINDS = ("of its class at other centres", "of other classes at its centre")
TAIL = 0.1  # share of the tiles with the least margins


def croma_probe(
    data: RobustnessSet,
    *,
    protocol: Protocol = NANOPATH,
    num_neighbours: int = NEIGHBOURS,
    device: str = "cpu",
    budget_bytes: int = GIB,
) -> ProbeResult:
    """The cross-confounder robustness margin: its median over tiles, interval over slides.

    For each tile: SO is the mean cosine distance to the m nearest tiles of the same biological
    class from other medical centres, OS that to the m nearest of other classes from its own centre;
    none is of its own slide. The margin is (OS - SO) / (OS + SO): above 0 biology is nearer, below
    0 the centre. Where the data have pairs, neighbours are sought within each pair, and the score
    is the median of the pairs' medians. `details` has the lower tail: the mean of the tenth with
    the least margins, and the share of the tiles whose margin is at most 0.

    Memory: budget_bytes + 40 N. Raises InvalidInputError: columns of different lengths, NaN, a tile
    with fewer than m neighbours of a kind, or one whose neighbours all equal it.
    """
    check_columns(data, protocol)
    pairs = rows_of_pairs(data)
    margins = np.empty(len(data.slide_id))
    pair_of_row = np.empty(len(data.slide_id), dtype=np.int64)
    near = partial(
        nearest_rows, k=num_neighbours, device=device, budget_bytes=budget_bytes
    )
    for number, rows in enumerate(pairs):
        so, os = _mean_distances(data, rows, num_neighbours, near)
        if not (so + os).all():
            first = int(rows[np.flatnonzero(so + os == 0)[0]])
            raise InvalidInputError(
                f"tiles must differ from their neighbours, got row {first} of {data.name!r} "
                f"(slide {data.slide_id[first]!r}) with {num_neighbours} equal ones of each kind; "
                "leave out doubled tiles, or check the embeddings"
            )
        margins[rows] = (os - so) / (os + so)
        pair_of_row[rows] = number
    groups = data.groups or group_rows(data.slide_id, where=repr(data.name))
    least = float(np.percentile(margins, 100 * TAIL))
    details: dict[str, object] = {
        "neighbours": num_neighbours,
        "lower_tail_share": TAIL,
        "lower_tail_mean": float(margins[margins <= least].mean()),
        "share_at_most_0": float((margins <= 0).mean()),
    }
    if data.pair:
        details["pairs"] = len(pairs)
    rows_of_margins = Margins(
        metric="croma",
        ids=tuple(f"{slide}:{i}" for i, slide in enumerate(data.slide_id)),
        groups=groups,
        margin=margins,
        part=pair_of_row,
    )
    return scored(
        "croma",
        data,
        rows_of_margins,
        rows_of_margins.metric,
        protocol=protocol,
        details=details,
        facts=facts_of(data, dim=data.embeddings.shape[1]),
    )


def _mean_distances(
    data: RobustnessSet,
    rows: IndexArray,
    num_neighbours: int,
    nearest: Callable[..., IndexArray],
) -> npt.NDArray[np.float64]:
    """Mean cosine distances (2, n) of each of `rows` to the nearest SO and OS among them.

    `nearest` is `nearest_rows` for so many neighbours.
    """
    biology, centre, slide = (
        np.unique(np.array(column)[rows], return_inverse=True)[1]
        for column in (data.biological_class, data.medical_center, data.slide_id)
    )
    means = np.empty((2, len(rows)))
    for cell in np.unique(np.stack([biology, centre]), axis=1).T:
        kin, home = biology == cell[0], centre == cell[1]
        queries = np.flatnonzero(kin & home)
        for number, is_in_bank in enumerate((kin & ~home, ~kin & home)):
            bank = np.flatnonzero(is_in_bank)
            near = np.full((len(queries), num_neighbours), -1)
            if len(bank) >= num_neighbours:
                near = nearest(
                    data.embeddings[rows[queries]],
                    data.embeddings[rows[bank]],
                    groups=slide[bank],
                    query_groups=slide[queries],
                )
            lacking = np.flatnonzero((near < 0).any(axis=1))
            if len(lacking):
                row = int(rows[queries[lacking[0]]])
                _refuse(data, row, _KINDS[number], num_neighbours)
            means[number, queries] = cosine_distances(
                data.embeddings, rows[queries], rows[bank[near]]
            ).mean(axis=1)
    return means


def _refuse(data: RobustnessSet, row: int, wanted: str, num_neighbours: int) -> None:
    """Raises InvalidInputError: a tile lacks neighbours of the `wanted` kind."""
    own = f"class {data.biological_class[row]!r} at centre {data.medical_center[row]!r}"
    raise InvalidInputError(
        f"each tile must have {num_neighbours} tiles {wanted} in other slides, got fewer for "
        f"row {row} of {data.name!r} ({own}); add tiles, or leave out this class or centre"
    )
