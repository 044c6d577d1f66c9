"""Do token frames need all pairs of atoms? Time and memory of ours, of all pairs, of OpenFold3's.

Each row is a process of its own; frames and mask are compared by digest before anything is timed.
Atoms fill a sphere at a protein's density (0.1 per Å^3); a tenth of them are tokens of their own.
"""

import hashlib
import importlib.util
import time
from dataclasses import asdict
from typing import Any

import torch
from tests.frames.all_pairs import token_frame_atoms_all_pairs

from benchmarks.harness import arguments, finish
from thinsection.frames import FrameOptions, frame_table, token_frame_atoms
from thinsection.frames.structure import ATOM, PROTEIN, Structure, joined
from thinsection.testing import run_and_measure

MODULE = "benchmarks.bench_frames"
RESIDUE_ATOMS = 9
COMPARED = (1_000, 2_000, 5_000, 10_000, 15_000)
ALONE = (42_000, 200_000, 1_000_000)
CHAIN_ATOMS = 5_000
TARGET_BYTES = 20 * 2**20  # beyond the inputs at 42k atoms

State = tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]


def prepare(num_atoms: int, one_chain: bool, impl: str = "", times: int = 1) -> State:
    """A batch; runs the function once on a tiny one, so that libraries are loaded."""
    torch.manual_seed(num_atoms)
    state = _batch(num_atoms, num_atoms if one_chain else CHAIN_ATOMS)
    if impl:
        _function(impl)(*_batch(500, 500))
    if impl == "ours":
        forced = FrameOptions(search="kdtree")
        token_frame_atoms(*_batch(500, 500), options=forced)
    return state


def frames(
    state: State, num_atoms: int, one_chain: bool, impl: str, times: int
) -> dict[str, Any]:
    """Digest of frames and mask, and the CPU- and wall-seconds of each call."""
    function, seconds, cpu_seconds = _function(impl), [], []
    for _ in range(times):
        start, cpu = time.perf_counter(), time.process_time()
        phi, valid = function(*state)
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu)
    keep = valid.bool()
    digest = hashlib.sha256(valid.numpy().tobytes())
    for position in phi:
        digest.update(position[keep].numpy().tobytes())
    return {
        "digest": digest.hexdigest(),
        "valid": int(keep.sum()),
        "seconds": sorted(seconds)[times // 2],
        "cpu_seconds": sorted(cpu_seconds)[times // 2],
    }


def assembly(num_atoms: int) -> dict[str, Any]:
    """A structure of 1,000 atoms repeated by rotations and shifts, to a table of frames."""
    start = time.process_time()
    base = _structure()
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0].numpy()
    copies = num_atoms // len(base.atom_name)
    parts = [
        base.placed(turn, (i % 100 * 50.0, i // 100 * 50.0, 0), f"-{i}")
        for i in range(copies)
    ]
    table, summary = frame_table(joined(parts), "assembly")
    assert summary.valid_frames % copies == 0 and table.num_rows == summary.tokens
    return {**asdict(summary), "cpu_seconds": time.process_time() - start}


def _batch(num_atoms: int, chain_atoms: int) -> State:
    num_atomized = num_atoms // 10
    num_residues = (num_atoms - num_atomized) // RESIDUE_ATOMS
    counts = torch.cat(
        (
            torch.full((num_residues,), RESIDUE_ATOMS),
            torch.ones(num_atomized, dtype=torch.int64),
        )
    )
    counts = counts[
        torch.randperm(len(counts))
    ].int()  # ligand atoms all along the chains
    total = int(counts.sum())
    start = (counts.cumsum(0) - counts).int()
    atomized = (counts == 1).int()
    restype = torch.zeros(len(counts), 32)
    restype[:, 7] = 1
    zeros = torch.zeros_like(atomized)
    batch = {
        "token_mask": torch.ones(len(counts)),
        "num_atoms_per_token": counts,
        "asym_id": start // chain_atoms + 1,
        "start_atom_index": start,
        "is_protein": 1 - atomized,
        "is_dna": zeros,
        "is_rna": zeros,
        "is_atomized": atomized,
        "restype": restype,
    }
    direction = torch.nn.functional.normalize(torch.randn(total, 3), dim=1)
    radius = (total / 0.1 * 3 / 4 / torch.pi) ** (1 / 3) * torch.rand(total, 1) ** (
        1 / 3
    )
    return batch, direction * radius, (torch.rand(total) > 0.02).float()


def _structure() -> Structure:
    kind = torch.tensor([PROTEIN] * 100 + [ATOM] * 100).to(torch.int8)
    count = torch.where(kind == ATOM, 1, RESIDUE_ATOMS).int()
    positions = torch.rand(int(count.sum()), 3) * 21
    return Structure(
        atom_positions=positions.numpy(),
        atom_name=torch.zeros(len(positions), dtype=torch.int32).numpy(),
        token_kind=kind.numpy(),
        token_num_atoms=count.numpy(),
        token_chain=(kind == ATOM).int().numpy(),
        token_residue=torch.arange(200).int().numpy(),
        token_insertion=torch.zeros(200).int().numpy(),
        token_residue_name=torch.zeros(200).int().numpy(),
        token_restype=torch.where(kind == ATOM, 31, 7).to(torch.int8).numpy(),
        names=("X",),
        chains=("A", "B"),
    )


def _function(impl: str) -> Any:
    if impl == "openfold3":
        return importlib.import_module(
            "openfold3.core.utils.atomize_utils"
        ).get_token_frame_atoms
    return {"ours": token_frame_atoms, "all_pairs": token_frame_atoms_all_pairs}[impl]


def _measure(num_atoms: int, one_chain: bool, impl: str, times: int) -> dict[str, Any]:
    settings = {
        "num_atoms": num_atoms,
        "one_chain": one_chain,
        "impl": impl,
        "times": times,
    }
    measured = run_and_measure(MODULE, "frames", setup="prepare", **settings)
    row = {
        **settings,
        **measured.result,
        "peak_beyond_inputs_bytes": measured.growth_bytes,
    }
    print({k: v for k, v in row.items() if k != "digest"}, flush=True)
    return row


def _compare(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    others = ["all_pairs"]
    if importlib.util.find_spec("openfold3") is not None:
        others.append("openfold3")
    rows = []
    for num_atoms in sizes:
        ours = _measure(num_atoms, False, "ours", 5)
        rows.append(ours)
        for impl in others:
            other = _measure(num_atoms, False, impl, 3 if num_atoms <= 5_000 else 1)
            assert other["digest"] == ours["digest"], (
                f"{impl} differs at {num_atoms} atoms"
            )
            other["equal_to_ours"] = True
            other["cpu_time_ratio"] = other["cpu_seconds"] / ours["cpu_seconds"]
            other["memory_ratio"] = other["peak_beyond_inputs_bytes"] / max(
                ours["peak_beyond_inputs_bytes"], 1 << 20
            )
            rows.append(other)
    return rows


def main() -> None:
    args = arguments(__doc__ or "")
    compared = _compare((1_000,) if args.smoke else COMPARED)
    alone = []
    for num_atoms in (42_000,) if args.smoke else ALONE:
        for one_chain in (True,) if args.smoke else (False, True):
            alone.append(_measure(num_atoms, one_chain, "ours", 3))
    at_42k = [
        row["peak_beyond_inputs_bytes"] for row in alone if row["num_atoms"] == 42_000
    ]
    assert max(at_42k) <= TARGET_BYTES, at_42k
    results: dict[str, Any] = {"compared": compared, "alone": alone}
    if not args.smoke:
        built = run_and_measure(MODULE, "assembly", num_atoms=1_000_000)
        results["assembly"] = {
            **built.result,
            "peak_beyond_imports_bytes": built.growth_bytes,
        }
    finish("bench_frames", results, args)


if __name__ == "__main__":
    main()
