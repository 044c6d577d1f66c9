"""Retrieval: are the training rows nearest to a validation row of its class?"""

import numpy as np

from thinsection.probe import intervals
from thinsection.probe.compute import cosine_neighbours
from thinsection.probe.data.sets import TileSet, check_tile_set
from thinsection.probe.probes.tiles import count_votes
from thinsection.probe.protocol import NANOPATH, Protocol
from thinsection.probe.result import ProbeResult, Ratios
from thinsection.types import GIB


def retrieval_probe(
    data: TileSet, *, protocol: Protocol = NANOPATH, device: str = "cpu", budget_bytes: int = GIB
) -> ProbeResult:
    """Mean average precision at the largest k; recall and majority vote at each.

    A query's average precision at k is the sum, over its hits among the k nearest, of the
    precision at their rank, divided by k; recall at k asks for one hit.

    Memory: budget_bytes + 24 Nq k.

    Source: Patho-Bench (by cosine here, as in THUNDER).
    """
    check_tile_set(data)
    train, val = data.train, data.val
    ks = [k for k in protocol.retrieval.ks if k <= len(train)]
    near = cosine_neighbours(
        val.embeddings, train.embeddings, ks[-1], device=device, budget_bytes=budget_bytes
    )
    voted = train.labels[near]
    hit = voted == val.labels[:, None]
    precision = hit.cumsum(axis=1) / np.arange(1, ks[-1] + 1)
    details = {}
    for k in ks:
        votes = count_votes(voted[:, :k], data.num_classes)
        own = votes[np.arange(len(votes)), val.labels]
        details[f"recall_at_{k}"] = float(hit[:, :k].any(axis=1).mean())
        details[f"majority_at_{k}"] = float((own == votes.max(axis=1)).mean())
        details[f"map_at_{k}"] = float((hit * precision)[:, :k].sum(axis=1).mean() / k)
    rows = Ratios(
        metric="map",
        ids=val.ids,
        top=(hit * precision).mean(axis=1),
        bottom=np.ones(len(val)),
        groups=val.groups,
    )
    return ProbeResult(
        probe="retrieval",
        dataset=data.name,
        metric="map",
        score=details[f"map_at_{ks[-1]}"],
        interval=intervals.bootstrap_rows(
            len(val), rows.scorers["map"], seed=protocol.seed, groups=val.groups
        ),
        protocol=protocol,
        details={"k": ks[-1], **details},
        facts={"train_rows": len(train), "val_rows": len(val), **data.facts, **data.hashes},
        ratios=rows,
    )
