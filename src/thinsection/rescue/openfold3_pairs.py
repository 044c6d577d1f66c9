"""OpenFold3's reductions over all pairs of atoms, formed from the pairs within their radius alone.

Arguments (`given`, by name) and results are those of OpenFold3 0.5 (Apache-2.0). Clashes and lDDT
give no gradient to positions, as the originals: distances are only compared with thresholds.
"""

import importlib
from itertools import product
from typing import Any

import torch
from torch import Tensor

from thinsection.neighbors.reference import distances_between
from thinsection.neighbors.search import pairs_within
from thinsection.structures.frames import FrameOptions, backbone_offsets, token_frame_atoms

_THRESHOLDS = (0.5, 1, 2, 4)  # of lDDT, Å


def token_frames(given: Any, options: FrameOptions) -> Any:
    """Frames of tokens, by `token_frame_atoms`."""
    return token_frame_atoms(**vars(given), options=options)


@torch.no_grad()
def has_clash(given: Any, options: FrameOptions) -> Tensor:
    """1.0 for each sample (S,) in which two polymer chains clash, else 0.0.

    Memory: budget_bytes, O(N_atom) and 8 bytes per pair of chains.
    """
    chains, chain = torch.unique(given.asym_id, return_inverse=True)
    polymer, num = torch.ones_like(chains, dtype=torch.bool), len(chains)
    polymer[chain[~given.is_polymer]] = False
    atoms = (given.atom_mask & polymer[chain]).nonzero()[:, 0]
    chain, positions = chain[atoms], given.atom_positions_predicted
    sizes = torch.bincount(chain, minlength=num)
    clashing: Tensor = positions.new_zeros(len(positions))
    for s, x in enumerate(positions[:, atoms]):
        counts = torch.zeros(num * num, dtype=torch.int64, device=x.device)
        for i, j in pairs_within(x, x, given.threshold, budget_bytes=options.budget_bytes):
            near = (chain[i] < chain[j]) & (distances_between(x[i], x[j]) < given.threshold)
            counts += torch.bincount(chain[i[near]] * num + chain[j[near]], minlength=num * num)
        fraction = counts / torch.minimum(sizes[:, None], sizes).flatten().clamp(min=1)
        clashing[s] = ((counts > given.violation_abs) | (fraction > given.violation_frac)).any()
    return clashing


def plddt_loss(given: Any, options: FrameOptions) -> Tensor:
    """Loss (*,) of the predicted lDDT. Memory: budget_bytes and O(N_atom)."""
    theirs = importlib.import_module("openfold3.core.loss.confidence")
    lddt = _atom_lddt(given, options)
    bin_size = (given.bin_max - given.bin_min) / given.no_bins
    steps = torch.arange(given.no_bins, device=lddt.device) * bin_size
    labels = theirs.binned_one_hot(lddt, given.bin_min + bin_size / 2 + steps).to(given.x.dtype)
    errors = theirs.softmax_cross_entropy(given.logits, labels)
    resolved = given.batch["ground_truth"]["atom_resolved_mask"].bool()
    loss: Tensor = torch.sum(errors * resolved, -1) / (torch.sum(resolved, -1) + given.eps)
    return loss


@torch.no_grad()
def _atom_lddt(given: Any, options: FrameOptions) -> Tensor:
    """lDDT of each atom (*, A) to CA and C1' atoms, protein within 15 Å and nucleic within 30 Å."""
    x, batch, lead = given.x, given.batch, given.x.shape[:-1]
    truth = batch["ground_truth"]["atom_positions"].expand(x.shape)
    resolved = batch["ground_truth"]["atom_resolved_mask"].bool().expand(lead)
    offsets, exists = backbone_offsets(batch["restype"])
    hits, counts = x.new_zeros(2, *lead, dtype=torch.int64)
    nucleic = batch["is_dna"] + batch["is_rna"]
    for kind, which, radius in ((batch["is_protein"], 1, 15), (nucleic, 4, 30)):
        named = (kind * (1 - batch["is_atomized"]) * exists[..., which]).bool()
        index = batch["start_atom_index"].long() + offsets[..., which]
        marks = x.new_zeros(*named.shape[:-1], lead[-1] + 1)
        marks.scatter_(-1, torch.where(named, index, lead[-1]), 1)
        columns = marks[..., :-1].bool().expand(lead) & resolved
        for at in product(*map(range, lead[:-1])):
            rows, column = (each[at].nonzero()[:, 0] for each in (resolved, columns))
            ends = (truth[at][column], truth[at][rows])
            for row, rep in pairs_within(*ends, radius, budget_bytes=options.budget_bytes):
                i, j = rows[row], column[rep]
                square = (torch.sum((p[i] - p[j]) ** 2, -1) for p in (x[at], truth[at]))
                d, d_true = (torch.sqrt(given.eps + each) for each in square)
                near, error = (d_true < radius) & (i != j), (d_true - d).abs()
                counts[at].index_add_(0, i, near.long())
                for threshold in _THRESHOLDS:
                    hits[at].index_add_(0, i, (near & (error < threshold)).long())
    lddt: Tensor = 0.25 * hits.to(x.dtype) / (counts + given.eps)
    return lddt
