"""OpenFold3's losses and metrics over pairs of atoms, computed from near pairs only.

Names of arguments and results are those of OpenFold3 0.5 (Apache-2.0). The bond loss and the
smooth lDDT loss have the same gradients with respect to positions as the originals. The others
compare distances with thresholds, so, like the originals, they have no gradients. Sums over pairs
are computed in float64.

Legend: T tokens, A atoms, S samples, `*` batch and sample dimensions; i, j the atoms of a pair.
"""

import importlib
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx

from thinsection.errors import RescueError
from thinsection.frames.features import backbone_offsets
from thinsection.frames.reference import distances_between
from thinsection.frames.token_frames import FrameOptions
from thinsection.frames.tree import pairs_within

# OpenFold3's batch: tensors, and a mapping 'ground_truth' of tensors
Batch = Mapping[str, Any]
_THRESHOLDS = (0.5, 1, 2, 4)  # thresholds of lDDT, Å
_PROTEIN_RADIUS = 15  # radius for lDDT, Å
_NUCLEIC_RADIUS = 30


@torch.no_grad()
def has_clash(
    options: FrameOptions,
    *,
    asym_id: Tensor,
    atom_positions_predicted: Tensor,
    atom_mask: Tensor,
    is_polymer: Tensor,
    threshold: float,
    violation_abs: float,
    violation_frac: float,
) -> Tensor:
    """1.0 for samples (S,) in which two polymer chains clash. Memory: O(A), 8 bytes per pair."""
    chains, chain = torch.unique(asym_id, return_inverse=True)
    num_chains = len(chains)
    chain_is_polymer = torch.ones_like(chains, dtype=torch.bool)
    chain_is_polymer[chain[~is_polymer]] = False
    atoms = (atom_mask & chain_is_polymer[chain]).nonzero()[:, 0]
    chain = chain[atoms]
    sizes = torch.bincount(chain, minlength=num_chains)
    smaller_size = torch.minimum(sizes[:, None], sizes).flatten()
    clashing: Tensor = atom_positions_predicted.new_zeros(len(atom_positions_predicted))
    for sample, x in enumerate(atom_positions_predicted[:, atoms]):
        counts = torch.zeros(num_chains**2, dtype=torch.int64, device=x.device)
        for i, j in pairs_within(x, x, threshold, budget_bytes=options.budget_bytes):
            is_near = distances_between(x[i], x[j]) < threshold
            is_clash = (chain[i] < chain[j]) & is_near
            pair_of_chains = chain[i[is_clash]] * num_chains + chain[j[is_clash]]
            counts += torch.bincount(pair_of_chains, minlength=num_chains**2)
        fraction = counts / smaller_size.clamp(min=1)
        is_violation = (counts > violation_abs) | (fraction > violation_frac)
        clashing[sample] = is_violation.any()
    return clashing


def plddt_loss(
    options: FrameOptions,
    *,
    batch: Batch,
    x: Tensor,
    logits: Tensor,
    no_bins: int,
    bin_min: float,
    bin_max: float,
    eps: float,
    kwargs: Mapping[str, object],
) -> Tensor:
    """Loss (*,) of the predicted lDDT. Memory: budget_bytes and O(A)."""
    del kwargs  # unused in the original too
    confidence = importlib.import_module("openfold3.core.loss.confidence")
    lddt = _atom_lddt(batch, x, eps, options)
    bin_size = (bin_max - bin_min) / no_bins
    steps = torch.arange(no_bins, device=lddt.device) * bin_size
    centres = bin_min + bin_size / 2 + steps
    labels = confidence.binned_one_hot(lddt, centres).to(x.dtype)
    errors = confidence.softmax_cross_entropy(logits, labels)
    is_resolved = batch["ground_truth"]["atom_resolved_mask"].bool()
    num_resolved = torch.sum(is_resolved, -1)
    loss: Tensor = torch.sum(errors * is_resolved, -1) / (num_resolved + eps)
    return loss


@torch.no_grad()
def _atom_lddt(batch: Batch, x: Tensor, eps: float, options: FrameOptions) -> Tensor:
    """lDDT of each atom (*, A), from CA and C1' atoms that are within the radius of their kind."""
    lead = x.shape[:-1]
    truth, resolved = _ground_truth(batch, x)
    is_resolved = resolved.bool()
    is_nucleic = batch["is_dna"] + batch["is_rna"]
    hits = x.new_zeros(lead, dtype=torch.int64)
    counts = x.new_zeros(lead, dtype=torch.int64)
    for is_kind, column, radius in (
        (batch["is_protein"], 1, _PROTEIN_RADIUS),
        (is_nucleic, 4, _NUCLEIC_RADIUS),
    ):
        is_centre = _is_frame_atom(batch, is_kind, column, x).expand(lead) & is_resolved
        for sample in product(*map(range, lead[:-1])):
            rows = is_resolved[sample].nonzero()[:, 0]
            columns = is_centre[sample].nonzero()[:, 0]
            for i, j, true_distance in _near_pairs(
                truth[sample], rows, columns, radius, eps=eps, options=options
            ):
                error = (true_distance - _distances(x[sample], i, j, eps)).abs()
                counts[sample].index_add_(0, i, torch.ones_like(i))
                for threshold in _THRESHOLDS:
                    hits[sample].index_add_(0, i, (error < threshold).long())
    lddt: Tensor = 0.25 * hits.to(x.dtype) / (counts + eps)
    return lddt


def _ground_truth(batch: Batch, x: Tensor) -> tuple[Tensor, Tensor]:
    """True positions of the atoms of x, and (*, A) 0/1 whether they were resolved."""
    truth = batch["ground_truth"]["atom_positions"].expand(x.shape)
    resolved = batch["ground_truth"]["atom_resolved_mask"].expand(x.shape[:-1])
    return truth, resolved


def _is_frame_atom(batch: Batch, is_kind: Tensor, column: int, x: Tensor) -> Tensor:
    """(*, A) True for frame atoms in this column of `backbone_offsets`, for tokens of one kind."""
    offsets, exists = backbone_offsets(batch["restype"])
    num_atoms = x.shape[-2]
    has_atom = (is_kind * (1 - batch["is_atomized"]) * exists[..., column]).bool()
    atom = batch["start_atom_index"].long() + offsets[..., column]
    # the extra last place takes the marks of tokens without this atom
    marks = x.new_zeros(*has_atom.shape[:-1], num_atoms + 1)
    marks.scatter_(-1, torch.where(has_atom, atom, num_atoms), 1)
    return marks[..., :-1].bool()


class _KnownGradient(torch.autograd.Function):
    """Returns a value that depends on x, together with its gradient, which is already known."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value

    @staticmethod
    def backward(ctx: BackwardCFunction, d_value: Tensor) -> tuple[Tensor, None, None]:
        # here gradients are recorded only if create_graph is set
        if torch.is_grad_enabled():
            raise RescueError(
                "smooth_lddt_loss must be differentiated only once in the rescue, got "
                "create_graph=True; compute second derivatives without the rescue"
            )
        return d_value * ctx.saved_tensors[0], None, None


def smooth_lddt_loss(
    options: FrameOptions,
    *,
    x: Tensor,
    batch: Batch,
    loss_token_mask: Tensor,
    eps: float,
) -> Tensor:
    """1 - smooth lDDT (*,), and its gradient to x. Memory: budget_bytes and O(A)."""
    lead = x.shape[:-2]
    truth, resolved = _ground_truth(batch, x)
    is_nucleic = _per_atom(batch, batch["is_dna"] + batch["is_rna"], x).bool()
    is_kept = (_per_atom(batch, loss_token_mask, x) * resolved).bool()
    losses = []
    for sample in product(*map(range, lead)):
        hits = x.new_zeros((), dtype=torch.float64)
        gradient = torch.zeros_like(x[sample])
        count = 0
        atoms = is_kept[sample].nonzero()[:, 0]
        nucleic = atoms[is_nucleic[sample][atoms]]
        others = atoms[~is_nucleic[sample][atoms]]
        for rows, radius in ((nucleic, _NUCLEIC_RADIUS), (others, _PROTEIN_RADIUS)):
            for i, j, true_distance in _near_pairs(
                truth[sample], rows, atoms, radius, eps=eps, options=options
            ):
                count += len(i)
                block_hits, block_gradient = _smooth_hits(
                    x[sample], i, j, true_distance, eps
                )
                hits += block_hits
                gradient += block_gradient
        num_pairs = len(atoms) * (len(atoms) - 1) + eps
        near_hits = _KnownGradient.apply(x[sample], hits.to(x.dtype), gradient)  # type: ignore[no-untyped-call]
        losses.append(1 - near_hits / num_pairs / (count / num_pairs + eps))
    return torch.stack(losses).view(lead)


def _near_pairs(
    truth: Tensor,
    rows: Tensor,
    columns: Tensor,
    radius: float,
    *,
    eps: float,
    options: FrameOptions,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Blocks of pairs of different atoms, from `rows` and `columns`, closer than the radius.

    Yields both atoms of each pair and their true distance.
    """
    # autograd keeps arrays that are computed from the pairs, so a block gets a quarter of the
    # budget
    budget_bytes = options.budget_bytes // 4
    for row, column in pairs_within(
        truth[columns], truth[rows], radius, budget_bytes=budget_bytes
    ):
        i = rows[row]
        j = columns[column]
        true_distance = _distances(truth, i, j, eps)
        is_near = (true_distance < radius) & (i != j)
        yield i[is_near], j[is_near], true_distance[is_near]


def _distances(x: Tensor, i: Tensor, j: Tensor, eps: float) -> Tensor:
    return torch.sqrt(eps + torch.sum((x[i] - x[j]) ** 2, -1))


def _smooth_hits(
    x: Tensor, i: Tensor, j: Tensor, true_distance: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Sum of the smooth lDDT hits of pairs, and its gradient with respect to x."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        error = (true_distance - _distances(leaf, i, j, eps)).abs()
        hits = [torch.sigmoid(threshold - error) for threshold in _THRESHOLDS]
        total = 0.25 * torch.sum(torch.stack(hits), dtype=torch.float64)
        return total.detach(), torch.autograd.grad(total, leaf)[0]


def _per_atom(batch: Batch, token_feature: Tensor, x: Tensor) -> Tensor:
    """Values (*, A) of a token feature for the atoms of x."""
    atomize_utils = importlib.import_module("openfold3.core.utils.atomize_utils")
    atoms: Tensor = atomize_utils.broadcast_token_feat_to_atoms(
        batch["token_mask"], batch["num_atoms_per_token"], token_feature
    )
    return atoms.expand(x.shape[:-1])


def bond_loss(options: FrameOptions, *, x: Tensor, batch: Batch, eps: float) -> Tensor:
    """Loss (*,) for bonds between ligands and polymers. Memory: O(A) and the bonded pairs."""
    lead = x.shape[:-2]
    truth, resolved = _ground_truth(batch, x)
    num_tokens = batch["token_mask"].shape[-1]
    polymer = batch["is_protein"] + batch["is_dna"] + batch["is_rna"]
    polymer = polymer.expand(*lead, num_tokens)
    ligand = batch["is_ligand"].expand(*lead, num_tokens)
    bonds = batch["token_bonds"].expand(*lead, num_tokens, num_tokens)
    sizes = batch["num_atoms_per_token"] * batch["token_mask"].int()
    sizes = sizes.expand(*lead, num_tokens).long()
    losses = []
    for sample in product(*map(range, lead)):
        row, column = bonds[sample].nonzero().unbind(-1)
        is_bonded = (ligand[sample][row] * polymer[sample][column]).bool()
        i, j = _atom_pairs(sizes[sample], row[is_bonded], column[is_bonded])
        both_resolved = (resolved[sample][i] * resolved[sample][j]).bool()
        i = i[both_resolved]
        j = j[both_resolved]
        distance = _distances(x[sample], i, j, eps)
        error = distance - _distances(truth[sample], i, j, eps)
        losses.append(torch.sum(error**2) / (len(i) + eps))
    return torch.stack(losses).view(lead)


def _atom_pairs(sizes: Tensor, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs (atom of token `row`, atom of token `column`); `sizes`: atoms per token."""
    first_atom = torch.cumsum(sizes, 0) - sizes
    counts = sizes[row] * sizes[column]
    first_pair = torch.cumsum(counts, 0) - counts
    bond = torch.repeat_interleave(counts)
    place = torch.arange(len(bond), device=bond.device) - first_pair[bond]
    width = sizes[column][bond]
    row_place = torch.div(place, width, rounding_mode="floor")
    i = first_atom[row][bond] + row_place
    j = first_atom[column][bond] + place % width
    return i, j


@torch.no_grad()
def complex_lddt(
    options: FrameOptions,
    *,
    asym_id: Tensor,
    intra_filter_atomized: Tensor,
    pred_coords: Tensor,
    gt_coords: Tensor,
    all_atom_mask: Tensor,
    eps: float,
) -> dict[str, Tensor | None]:
    """lDDT (*,) within the chains of a complex. Memory: budget_bytes and O(A)."""
    x = pred_coords
    lead = x.shape[:-2]
    truth = gt_coords.expand(x.shape)
    weight = (all_atom_mask * intra_filter_atomized).expand(x.shape[:-1]).double()
    chain = asym_id.expand(x.shape[:-1])
    hits = x.new_zeros(lead, dtype=torch.float64)
    counts = x.new_zeros(lead, dtype=torch.float64)
    for sample in product(*map(range, lead)):
        atoms = weight[sample].nonzero()[:, 0]
        for i, j, true_distance in _near_pairs(
            truth[sample], atoms, atoms, _PROTEIN_RADIUS, eps=eps, options=options
        ):
            same_chain = chain[sample][i] == chain[sample][j]
            pair_weight = weight[sample][i] * weight[sample][j] * same_chain
            error = true_distance - _distances(x[sample], i, j, eps)
            counts[sample] += pair_weight.sum()
            for threshold in _THRESHOLDS:
                is_hit = error.abs() < threshold
                hits[sample] += 0.25 * torch.sum(pair_weight * is_hit)
    score = (hits / (eps + counts)).to(x.dtype) if counts.any() else None
    return {"lddt_intra_complex": score}


@torch.no_grad()
def interface_clash(
    options: FrameOptions,
    *,
    pred_protein: Tensor,
    pred_substrate: Tensor,
    all_atom_mask_protein: Tensor,
    all_atom_mask_substrate: Tensor,
    threshold: float,
    eps: float,
) -> Tensor | None:
    """Mean overlap (*,) of the atoms of two molecules. Memory: budget_bytes and O(A)."""
    protein = pred_protein
    substrate = pred_substrate
    protein_weight = all_atom_mask_protein.expand(protein.shape[:-1]).double()
    substrate_weight = all_atom_mask_substrate.expand(substrate.shape[:-1]).double()
    num_pairs = protein_weight.sum(-1) * substrate_weight.sum(-1)
    if not num_pairs.any():
        return None
    overlap = torch.zeros_like(num_pairs)
    for sample in product(*map(range, protein.shape[:-2])):
        for i, j in pairs_within(
            substrate[sample],
            protein[sample],
            threshold,
            budget_bytes=options.budget_bytes,
        ):
            difference = protein[sample][i] - substrate[sample][j]
            distance = torch.sqrt(eps + torch.sum(difference**2, -1))
            weight = protein_weight[sample][i] * substrate_weight[sample][j]
            overlap[sample] += torch.sum(weight * torch.relu(threshold - distance))
    mean: Tensor = overlap / (num_pairs + eps) / threshold
    return mean.to(protein.dtype)
