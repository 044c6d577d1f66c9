"""OpenFold3's work on all pairs of atoms replaced by ours while a block runs.

Ours forms the pairs within their radius alone. Arguments (`given`, by name) and results are those
of OpenFold3 0.5 (Apache-2.0). The losses of bonds and of the smooth lDDT give the originals'
gradients to positions; the others only compare distances with thresholds, as the originals, and
give none. Sums of pairs are formed in float64.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from thinsection.errors import MissingDependencyError, RescueError
from thinsection.neighbors.reference import distances_between
from thinsection.neighbors.search import pairs_within
from thinsection.structures.frames import (
    FrameOptions,
    backbone_offsets,
    token_frame_atoms,
)

VERSIONS = ("0.4.5", "0.5.0")  # whose functions were compared with ours
_Function = Callable[..., Any]
_THRESHOLDS = (0.5, 1, 2, 4)  # of lDDT, Å


def token_frames(given: Any, options: FrameOptions) -> Any:
    """Frames of tokens, by `token_frame_atoms`."""
    return token_frame_atoms(**vars(given), options=options)


@torch.no_grad()
def has_clash(given: Any, options: FrameOptions) -> Tensor:
    """1.0 for each sample (S,) in which two polymer chains clash. Memory: O(N_atom), 8 B a pair."""
    chains, chain = torch.unique(given.asym_id, return_inverse=True)
    polymer, num = torch.ones_like(chains, dtype=torch.bool), len(chains)
    polymer[chain[~given.is_polymer]] = False
    atoms = (given.atom_mask & polymer[chain]).nonzero()[:, 0]
    chain, positions = chain[atoms], given.atom_positions_predicted
    sizes = torch.bincount(chain, minlength=num)
    clashing: Tensor = positions.new_zeros(len(positions))
    for s, x in enumerate(positions[:, atoms]):
        counts = torch.zeros(num * num, dtype=torch.int64, device=x.device)
        for i, j in pairs_within(
            x, x, given.threshold, budget_bytes=options.budget_bytes
        ):
            near = (chain[i] < chain[j]) & (
                distances_between(x[i], x[j]) < given.threshold
            )
            counts += torch.bincount(
                chain[i[near]] * num + chain[j[near]], minlength=num * num
            )
        fraction = counts / torch.minimum(sizes[:, None], sizes).flatten().clamp(min=1)
        clashing[s] = (
            (counts > given.violation_abs) | (fraction > given.violation_frac)
        ).any()
    return clashing


def plddt_loss(given: Any, options: FrameOptions) -> Tensor:
    """Loss (*,) of the predicted lDDT. Memory: budget_bytes and O(N_atom)."""
    theirs = importlib.import_module("openfold3.core.loss.confidence")
    lddt = _atom_lddt(given, options)
    bin_size = (given.bin_max - given.bin_min) / given.no_bins
    steps = torch.arange(given.no_bins, device=lddt.device) * bin_size
    labels = theirs.binned_one_hot(lddt, given.bin_min + bin_size / 2 + steps).to(
        given.x.dtype
    )
    errors = theirs.softmax_cross_entropy(given.logits, labels)
    resolved = given.batch["ground_truth"]["atom_resolved_mask"].bool()
    loss: Tensor = torch.sum(errors * resolved, -1) / (
        torch.sum(resolved, -1) + given.eps
    )
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
            atoms = resolved[at].nonzero()[:, 0], columns[at].nonzero()[:, 0]
            for i, j, d_true in _near(truth[at], atoms, radius, given.eps, options):
                error = (d_true - _distances(x[at], i, j, given.eps)).abs()
                counts[at].index_add_(0, i, torch.ones_like(i))
                for threshold in _THRESHOLDS:
                    hits[at].index_add_(0, i, (error < threshold).long())
    lddt: Tensor = 0.25 * hits.to(x.dtype) / (counts + given.eps)
    return lddt


class _Slope(torch.autograd.Function):
    """A value of x whose gradient is known already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():  # so it is under create_graph alone
            raise RescueError(
                "smooth_lddt_loss must be differentiated once in the rescue, got "
                "create_graph=True; compute a gradient of the gradient outside of it"
            )
        return grad * ctx.saved_tensors[0], None, None


def smooth_lddt_loss(given: Any, options: FrameOptions) -> Tensor:
    """1 - smooth lDDT (*,), and its gradient to x. Memory: budget_bytes and O(N_atom)."""
    batch, x, lead = given.batch, given.x, given.x.shape[:-2]
    truth = batch["ground_truth"]["atom_positions"].expand(x.shape)
    resolved = batch["ground_truth"]["atom_resolved_mask"]
    nucleic = _of_atoms(batch, batch["is_dna"] + batch["is_rna"], x).bool()
    kept = (
        _of_atoms(batch, given.loss_token_mask, x) * resolved.expand(x.shape[:-1])
    ).bool()
    losses = []
    for at in product(*map(range, lead)):
        value, slope = x.new_zeros((), dtype=torch.float64), torch.zeros_like(x[at])
        count = 0
        ends = kept[at].nonzero()[:, 0]
        for rows, radius in (
            (ends[nucleic[at][ends]], 30),
            (ends[~nucleic[at][ends]], 15),
        ):
            for i, j, d_true in _near(
                truth[at], (rows, ends), radius, given.eps, options
            ):
                count += len(i)
                part, rise = _smooth_sum(x[at], i, j, d_true, given.eps)
                value += part
                slope += rise
        pairs = len(ends) * (len(ends) - 1) + given.eps
        near = _Slope.apply(x[at], value.to(x.dtype), slope)  # type: ignore[no-untyped-call]
        losses.append(1 - near / pairs / (count / pairs + given.eps))
    return torch.stack(losses).view(lead)


def _near(
    truth: Tensor,
    atoms: tuple[Tensor, Tensor],
    radius: float,
    eps: float,
    options: FrameOptions,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Blocks of pairs, one of each atoms, not the same, nearer than the radius; their distances."""
    rows, ends = atoms
    budget = options.budget_bytes // 4  # a gradient keeps what is made of the pairs
    for row, end in pairs_within(truth[ends], truth[rows], radius, budget_bytes=budget):
        i, j = rows[row], ends[end]
        d_true = _distances(truth, i, j, eps)
        near = (d_true < radius) & (i != j)
        yield i[near], j[near], d_true[near]


def _distances(x: Tensor, i: Tensor, j: Tensor, eps: float) -> Tensor:
    return torch.sqrt(eps + torch.sum((x[i] - x[j]) ** 2, -1))


def _smooth_sum(
    x: Tensor, i: Tensor, j: Tensor, d_true: Tensor, eps: float
) -> tuple[Tensor, ...]:
    """The sum of the smooth hits of pairs, and its gradient to x."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        error = (d_true - _distances(leaf, i, j, eps)).abs()
        hits = torch.stack(
            [torch.sigmoid(threshold - error) for threshold in _THRESHOLDS]
        )
        total = 0.25 * torch.sum(hits, dtype=torch.float64)
        return total.detach(), torch.autograd.grad(total, leaf)[0]


def _of_atoms(batch: Any, token_feature: Tensor, x: Tensor) -> Tensor:
    """A feature of tokens for each atom of x, (*, A)."""
    theirs = importlib.import_module("openfold3.core.utils.atomize_utils")
    atoms: Tensor = theirs.broadcast_token_feat_to_atoms(
        batch["token_mask"], batch["num_atoms_per_token"], token_feature
    )
    return atoms.expand(x.shape[:-1])


def bond_loss(given: Any, options: FrameOptions) -> Tensor:
    """Loss (*,) of bonds of ligands to polymers. Memory: O(N_atom) and that of the bonded pairs."""
    batch, x, lead = given.batch, given.x, given.x.shape[:-2]
    truth = batch["ground_truth"]["atom_positions"].expand(x.shape)
    resolved = batch["ground_truth"]["atom_resolved_mask"].expand(x.shape[:-1]).bool()
    tokens = batch["token_mask"].shape[-1]
    polymer = (batch["is_protein"] + batch["is_dna"] + batch["is_rna"]).expand(
        *lead, tokens
    )
    ligand = batch["is_ligand"].expand(*lead, tokens)
    bonds = batch["token_bonds"].expand(*lead, tokens, tokens)
    sizes = (
        (batch["num_atoms_per_token"] * batch["token_mask"].int())
        .expand(*lead, tokens)
        .long()
    )
    losses = []
    for at in product(*map(range, lead)):
        row, column = bonds[at].nonzero().unbind(-1)
        bonded = (ligand[at][row] * polymer[at][column]).bool()
        i, j = _atom_pairs(sizes[at], row[bonded], column[bonded])
        both = resolved[at][i] & resolved[at][j]
        i, j = i[both], j[both]
        error = _distances(x[at], i, j, given.eps) - _distances(
            truth[at], i, j, given.eps
        )
        losses.append(torch.sum(error**2) / (len(i) + given.eps))
    return torch.stack(losses).view(lead)


def _atom_pairs(sizes: Tensor, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """Every pair (atom of row's token, atom of column's), tokens having sizes atoms in order."""
    starts = torch.cumsum(sizes, 0) - sizes
    counts = sizes[row] * sizes[column]
    bond = torch.repeat_interleave(counts)
    place = (
        torch.arange(len(bond), device=bond.device)
        - (torch.cumsum(counts, 0) - counts)[bond]
    )
    width = sizes[column][bond]
    first = starts[row][bond] + torch.div(place, width, rounding_mode="floor")
    return first, starts[column][bond] + place % width


@torch.no_grad()
def complex_lddt(given: Any, options: FrameOptions) -> dict[str, Tensor | None]:
    """lDDT (*,) within the chains of a complex. Memory: budget_bytes and O(N_atom)."""
    x, lead = given.pred_coords, given.pred_coords.shape[:-2]
    truth, shape = given.gt_coords.expand(x.shape), x.shape[:-1]
    weight = (given.all_atom_mask * given.intra_filter_atomized).expand(shape).double()
    chain = given.asym_id.expand(shape)
    hits, counts = x.new_zeros(2, *lead, dtype=torch.float64)
    for at in product(*map(range, lead)):
        ends = weight[at].nonzero()[:, 0]
        for i, j, d_true in _near(truth[at], (ends, ends), 15, given.eps, options):
            same = weight[at][i] * weight[at][j] * (chain[at][i] == chain[at][j])
            error = d_true - _distances(x[at], i, j, given.eps)
            counts[at] += same.sum()
            for threshold in _THRESHOLDS:
                hits[at] += 0.25 * torch.sum(same * (error.abs() < threshold))
    score = (hits / (given.eps + counts)).to(x.dtype) if counts.any() else None
    return {"lddt_intra_complex": score}


@torch.no_grad()
def interface_clash(given: Any, options: FrameOptions) -> Tensor | None:
    """Mean overlap (*,) of two molecules' atoms. Memory: budget_bytes and O(N_atom)."""
    a, b, lead = given.pred_protein, given.pred_substrate, given.pred_protein.shape[:-2]
    weight_a = given.all_atom_mask_protein.expand(a.shape[:-1]).double()
    weight_b = given.all_atom_mask_substrate.expand(b.shape[:-1]).double()
    pairs = weight_a.sum(-1) * weight_b.sum(-1)
    if not pairs.any():
        return None
    overlap = torch.zeros_like(pairs)
    for at in product(*map(range, lead)):
        for i, j in pairs_within(
            b[at], a[at], given.threshold, budget_bytes=options.budget_bytes
        ):
            d = torch.sqrt(given.eps + torch.sum((a[at][i] - b[at][j]) ** 2, -1))
            weight = weight_a[at][i] * weight_b[at][j]
            overlap[at] += torch.sum(weight * torch.relu(given.threshold - d))
    mean: Tensor = overlap / (pairs + given.eps) / given.threshold
    return mean.to(a.dtype)


# originals with their parameters; ours
_TARGETS: dict[str, _Function] = {
    "core.utils.atomize_utils.get_token_frame_atoms(batch, x, atom_mask, angle_threshold=25.0, "
    "eps=1e-08, inf=1000000000.0)": token_frames,
    "core.metrics.sample_ranking.compute_has_clash(asym_id, atom_positions_predicted, atom_mask, "
    "is_polymer, threshold=1.1, violation_abs=100, violation_frac=0.5)": has_clash,
    "core.loss.diffusion.smooth_lddt_loss(x, batch, loss_token_mask, eps)": smooth_lddt_loss,
    "core.loss.diffusion.bond_loss(x, batch, eps)": bond_loss,
    "core.loss.diffusion.bond_loss_sparse(x, batch, eps)": bond_loss,
    "core.metrics.quality.get_full_complex_lddt(asym_id, intra_filter_atomized, pred_coords, "
    "gt_coords, all_atom_mask, eps=1e-10)": complex_lddt,
    "core.metrics.quality.interface_steric_clash(pred_protein, pred_substrate, "
    "all_atom_mask_protein, all_atom_mask_substrate, threshold=1.1, eps=1e-10)": interface_clash,
    "core.loss.confidence.all_atom_plddt_loss(batch, x, logits, no_bins, bin_min, bin_max, eps, "
    "kwargs)": plddt_loss,  # not in 0.4.5, which has other bins
}


@contextmanager
def openfold3(options: FrameOptions | None = None) -> Iterator[None]:
    """OpenFold3's work on all pairs of atoms, in O(N_atom) memory, inside the installed package.

    Frames of tokens, clashes, the losses of pLDDT, smooth lDDT and bonds, the lDDT of a complex.
    Every module of openfold3 that holds an original function gets ours, also one that is imported
    within the block; all get the original back. Process-wide, not for concurrent use by threads.
    FrameOptions(impl='rows') keeps the original's choice among equal distances; its budget_bytes
    bounds each search. 0.4.5, whose lDDT has other bins, keeps its own lDDT.

    Raises MissingDependencyError: openfold3 is not installed; RescueError: another version or
    signature than was compared, or already replaced; or a block without one call of ours.
    """
    calls: list[str] = []
    swaps = _recognised(options or FrameOptions(), calls)
    try:
        for name, original, ours in swaps:
            _swap(name, original, ours)
        yield
    finally:
        for name, original, ours in swaps:
            _swap(name, ours, original)
    if not calls:
        names = ", ".join(name for name, *_ in swaps)
        raise RescueError(
            f"one of {names} must be called within the block, got no call"
        )


def _recognised(
    options: FrameOptions, calls: list[str]
) -> list[tuple[str, _Function, _Function]]:
    """Names, originals of a version that we know and ours, or the errors of `openfold3`."""
    try:
        installed = version("openfold3")
    except PackageNotFoundError:
        raise MissingDependencyError(
            "rescue.openfold3 needs openfold3, which is absent"
        ) from None
    if installed not in VERSIONS:
        rule = f"openfold3 must be of version {' or '.join(VERSIONS)}"
        raise RescueError(f"{rule}, got {installed}; nothing was replaced")
    swaps = []
    for original, ours in _TARGETS.items():
        if installed == "0.4.5" and ours is plddt_loss:
            continue
        place, _, parameters = original.removesuffix(")").partition("(")
        home, _, name = f"openfold3.{place}".rpartition(".")
        function = getattr(importlib.import_module(home), name, None)
        if function is None or function.__module__ != home:
            raise RescueError(
                f"{home}.{name} must be the original function, got {function!r}"
            )
        signature = inspect.signature(function)
        known = ((p.name, p.default) for p in signature.parameters.values())
        got = ", ".join(
            n if d is inspect.Parameter.empty else f"{n}={d}" for n, d in known
        )
        if got != parameters:
            raise RescueError(
                f"{name} must take ({parameters}), got ({got}); nothing was replaced"
            )
        swaps.append((name, function, _bound(ours, signature, options, calls)))
    return swaps


def _bound(
    ours: _Function,
    signature: inspect.Signature,
    options: FrameOptions,
    calls: list[str],
) -> _Function:
    """Ours, called as the original is."""

    def function(*args: Any, **kwargs: Any) -> Any:
        calls.append(ours.__name__)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return ours(SimpleNamespace(**given.arguments), options)

    return function


def _swap(name: str, old: _Function, new: _Function) -> None:
    for place, module in list(sys.modules.items()):
        if (
            place.partition(".")[0] == "openfold3"
            and getattr(module, name, None) is old
        ):
            setattr(module, name, new)
