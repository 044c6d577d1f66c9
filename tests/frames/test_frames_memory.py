"""Frames of long chains: by tree as by blocks, in little memory that grows with the atoms."""

import numpy as np
import pytest
import torch
from benchmarks.bench_frames import prepare
from tests.frames.structures import write_small

from thinsection.frames import (
    FrameOptions,
    frame_table,
    read_structure,
    token_frame_atoms,
)
from thinsection.frames.structure import joined
from thinsection.testing import run_and_measure
from thinsection.types import MIB

pytestmark = pytest.mark.check  # peak memory, in processes of its own


def peak_beyond_inputs(num_atoms: int) -> int:
    measured = run_and_measure(
        "benchmarks.bench_frames",
        "frames",
        setup="prepare",
        num_atoms=num_atoms,
        one_chain=True,
        impl="ours",
        times=1,
    )
    assert measured.result["valid"] > num_atoms / 10
    return measured.growth_bytes


def test_42k_atoms_in_one_chain_need_at_most_20_mb_and_memory_grows_no_faster_than_atoms() -> (
    None
):
    at_42k, at_168k = peak_beyond_inputs(42_000), peak_beyond_inputs(168_000)
    assert at_42k <= 20 * MIB
    assert at_168k <= 4 * max(at_42k, 6 * MIB)


def test_a_long_chain_is_the_same_by_tree_and_by_blocks() -> None:
    case = prepare(12_000, True)
    tree = token_frame_atoms(*case, options=FrameOptions(search="kdtree"))
    blocks = token_frame_atoms(*case, options=FrameOptions(search="blocks"))
    rows = token_frame_atoms(*case, options=FrameOptions(impl="rows"))
    assert torch.equal(tree[1], blocks[1]) and torch.equal(tree[1], rows[1])
    keep = tree[1].bool()
    for a, b, c in zip(tree[0], blocks[0], rows[0], strict=True):
        assert torch.equal(a, b) and torch.equal(a[keep], c[keep])


def test_an_assembly_of_2e5_atoms_by_symmetry_has_the_frames_of_its_part(
    tmp_path,
) -> None:
    part = read_structure(write_small(tmp_path / "s.cif"))
    copies = 200_000 // len(part.atom_name)
    quarter = np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]])
    parts = [part.placed(quarter, (0, 0, float(i)), f"-{i}") for i in range(copies)]
    table, summary = frame_table(joined(parts), "assembly")
    _, alone = frame_table(part, "part")
    assert (summary.tokens, summary.chains) == (alone.tokens * copies, 4 * copies)
    assert summary.valid_frames == alone.valid_frames * copies
    assert table["index_b"][-1].as_py() == len(part.atom_name) * copies - 1
