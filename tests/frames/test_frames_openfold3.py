"""The installed OpenFold3 0.5 itself against ours. Skipped where it is not installed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.frames.all_pairs import token_frame_atoms_all_pairs
from tests.frames.batches import random_case

from thinsection.frames import FrameOptions, token_frame_atoms

theirs = pytest.importorskip(
    "openfold3.core.utils.atomize_utils",
    reason="needs openfold3 (pip install --no-deps openfold3==0.5.0)",
)


@given(
    seed=st.integers(0, 10**6),
    sizes=st.tuples(st.integers(4, 60), st.integers(1, 6)),
    samples=st.sampled_from([(), (1,), (3,)]),
    distinct=st.sampled_from([None, 2, 5]),
    dtype=st.sampled_from(
        [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    ),
)
@settings(max_examples=150, deadline=None)
def test_frames_and_masks_equal_the_originals_to_the_bit(
    seed: int,
    sizes: tuple[int, int],
    samples: tuple,
    distinct: int | None,
    dtype: torch.dtype,
) -> None:
    case = random_case(
        seed,
        num_tokens=sizes[0],
        num_chains=sizes[1],
        samples=samples,
        distinct=distinct,
        dtype=dtype,
    )
    if case.x.shape[-2] < 3:
        return
    expected, expected_valid = theirs.get_token_frame_atoms(*case)
    rows = token_frame_atoms(*case, options=FrameOptions(impl="rows"))
    for phi, valid in (rows, token_frame_atoms_all_pairs(*case)):
        assert (
            torch.equal(valid, expected_valid) and valid.dtype == expected_valid.dtype
        )
        for ours, original in zip(phi, expected, strict=True):
            torch.testing.assert_close(ours, original, rtol=0, atol=0, equal_nan=True)
    if distinct is None and dtype.itemsize > 2:  # no two distances are equal
        phi, valid = token_frame_atoms(*case)
        assert (
            torch.equal(valid, expected_valid) and valid.dtype == expected_valid.dtype
        )
        keep = valid.bool()
        for ours, original in zip(phi, expected, strict=True):
            assert torch.equal(ours[keep], original[keep])


def test_gradients_equal_the_originals() -> None:
    case = random_case(7, num_tokens=50, samples=(2,), absent=0.0)
    gradients = []
    for function in (theirs.get_token_frame_atoms, token_frame_atoms):
        x = case.x.clone().requires_grad_()
        phi, valid = function(case.batch, x, case.atom_mask)
        sum((p.sin() * valid[..., None]).sum() for p in phi).backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
