"""What do OpenFold3's reductions over all pairs of atoms take, and ours within the radius?

Each row is a process of its own. Where the original is predicted (by the square of the atoms, from
the size before) to need more than ROOM it is left out and the prediction stands instead.
"""

import importlib
import importlib.util
import math
import sys
import time
from typing import Any
from unittest import mock

import torch

from benchmarks.bench_frames import _batch
from benchmarks.harness import arguments, finish
from thinsection.frames import openfold3
from thinsection.testing import run_and_measure

MODULE = "benchmarks.bench_pairs"
SIZES = (5_000, 15_000, 42_000)
ROOM = 8 * 2**30
PLACES = {
    "compute_has_clash": "core.metrics.sample_ranking",
    "all_atom_plddt_loss": "core.loss.confidence",
    "get_token_frame_atoms": "core.utils.atomize_utils",
    "smooth_lddt_loss": "core.loss.diffusion",
    "bond_loss_sparse": "core.loss.diffusion",
    "bond_loss": "core.loss.diffusion",
    "get_full_complex_lddt": "core.metrics.quality",
    "interface_steric_clash": "core.metrics.quality",
}


def prepare(name: str, num_atoms: int, ours: bool) -> tuple[Any, dict[str, Any]]:
    """The function's home and its arguments: protein in two chains, a tenth of it ligand atoms."""
    for absent in ("biotite", "ml_collections"):
        if absent not in sys.modules and importlib.util.find_spec(absent) is None:
            sys.modules.update(
                {absent: mock.MagicMock(), f"{absent}.structure": mock.MagicMock()}
            )
    home = importlib.import_module(f"openfold3.{PLACES[name]}")
    torch.manual_seed(num_atoms)
    batch, x, mask = _batch(num_atoms, num_atoms // 2)
    given = _arguments(name, batch, x, mask)
    importlib.import_module("scipy.spatial")
    return home, given


def _arguments(
    name: str, batch: dict[str, torch.Tensor], x: torch.Tensor, mask: torch.Tensor
) -> dict[str, Any]:
    chain = batch["asym_id"].repeat_interleave(batch["num_atoms_per_token"])
    moved = x + torch.randn_like(x)
    if name == "get_token_frame_atoms":
        return {"batch": batch, "x": x, "atom_mask": mask}
    if name == "compute_has_clash":
        all_polymer = torch.ones_like(chain, dtype=torch.bool)
        here = {
            "asym_id": chain,
            "atom_positions_predicted": moved[None],
            "is_polymer": all_polymer,
        }
        return {**here, "atom_mask": mask.bool()}
    if name == "get_full_complex_lddt":
        here = {"asym_id": chain[None], "intra_filter_atomized": mask[None].bool()}
        return {
            **here,
            "pred_coords": moved[None],
            "gt_coords": x[None],
            "all_atom_mask": mask[None],
        }
    if name == "interface_steric_clash":
        parts = [(moved[chain == c], mask[chain == c]) for c in chain.unique()[:2]]
        (a, mask_a), (b, mask_b) = parts
        masks = {"all_atom_mask_protein": mask_a, "all_atom_mask_substrate": mask_b}
        return {"pred_protein": a, "pred_substrate": b, **masks}
    lead = {key: value[None, None] for key, value in batch.items()}
    lead["is_ligand"] = lead["is_atomized"]
    lead["ground_truth"] = {  # type: ignore[assignment]
        "atom_positions": x[None, None],
        "atom_resolved_mask": mask[None, None],
    }
    given: dict[str, Any] = {"batch": lead, "x": moved[None, None], "eps": 1e-8}
    if name.startswith("bond"):
        tokens = len(batch["token_mask"])
        lead["token_bonds"] = torch.eye(tokens).roll(1, 0)[None, None]
    if name == "smooth_lddt_loss":
        given["loss_token_mask"] = torch.ones_like(lead["is_protein"])
    if name == "all_atom_plddt_loss":
        given |= {
            "logits": torch.randn(1, 1, len(x), 50),
            "no_bins": 50,
            "bin_min": 0,
            "bin_max": 1,
        }
    return given


def call(
    state: tuple[Any, dict[str, Any]], name: str, num_atoms: int, ours: bool
) -> Any:
    """The CPU-seconds and a number that must agree between both ways."""
    home, given = state
    start = time.process_time()
    if ours:
        with openfold3():
            found = getattr(home, name)(**given)
    else:
        found = getattr(home, name)(**given)
    seconds = time.process_time() - start
    if name == "get_token_frame_atoms":
        found = found[1]
    value = found["lddt_intra_complex"] if isinstance(found, dict) else found
    return {"cpu_seconds": seconds, "value": float(value.double().sum())}


def measure(sizes: tuple[int, ...]) -> dict[str, Any]:
    """Seconds and peak bytes of each function, size and way."""
    rows: dict[str, Any] = {}
    for name in PLACES:
        before: dict[str, float] = {}
        for num_atoms in sizes:
            row = rows[f"{name} {num_atoms}"] = {}
            row["ours"] = _one(name, num_atoms, ours=True)
            factor = (num_atoms / before["num_atoms"]) ** 2 if before else 1.0
            if before and before["peak_bytes"] * factor > ROOM:
                predicted = {
                    k: before[k] * factor for k in ("cpu_seconds", "peak_bytes")
                }
                row["original, predicted"] = predicted
                continue
            theirs = row["original"] = _one(name, num_atoms, ours=False)
            before = {**theirs, "num_atoms": num_atoms}
            values = theirs["value"], row["ours"]["value"]
            assert math.isclose(*values, rel_tol=1e-5), row
    return rows


def _one(name: str, num_atoms: int, *, ours: bool) -> dict[str, float]:
    how: dict[str, Any] = {"name": name, "num_atoms": num_atoms, "ours": ours}
    found = run_and_measure(MODULE, "call", setup="prepare", **how)
    return {**found.result, "peak_bytes": found.growth_bytes}


if __name__ == "__main__":
    args = arguments(__doc__ or "")
    finish("bench_pairs", measure((600,) if args.smoke else SIZES), args)
