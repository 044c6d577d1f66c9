"""Token frames: against a loop written from the contract, and the contract's edge cases."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.frames.all_pairs import token_frame_atoms_all_pairs
from tests.frames.batches import (
    ATOM,
    DNA,
    PROTEIN,
    RNA,
    Case,
    atoms_only,
    features,
    random_case,
)

from thinsection.errors import BudgetError, InvalidInputError, StructureError
from thinsection.frames import FrameOptions, frame_atoms, token_frame_atoms

ROWS = FrameOptions(impl="rows")
_OFFSETS = {PROTEIN: (0, 1, 2), RNA: (7, 11, 5), DNA: (7, 10, 5)}


def loop_over_tokens(
    case: Case, threshold: float = 25.0
) -> list[tuple[list[int] | None, bool]]:
    """Frame atoms and validity of each token of one sample, equal distances to the lower atom."""
    batch, x, mask = case
    counts, chains = batch["num_atoms_per_token"], batch["asym_id"]
    chain = [int(c) for c, n in zip(chains, counts, strict=True) for _ in range(int(n))]
    frames = []
    for t in range(len(counts)):
        start = int(batch["start_atom_index"][t])
        if not batch["token_mask"][t]:
            frames.append((None, False))
            continue
        if not batch["is_atomized"][t]:
            kind = next(
                k
                for k, f in enumerate(("is_protein", "is_rna", "is_dna"))
                if batch[f][t]
            )
            atoms = [start + offset for offset in _OFFSETS[kind]]
            frames.append((atoms, all(bool(mask[a]) for a in atoms)))
            continue
        near = [
            a
            for a in range(len(chain))
            if chain[a] == chain[start] and mask[a] * mask[start]
        ]
        squares = {a: torch.sum(1e-8 + (x[start] - x[a]) ** 2) ** 0.5 for a in near}
        near.sort(key=lambda a: (float(squares[a]), a))
        if len(near) < 3:
            frames.append((None, False))
            continue
        a, c = near[1], near[2]
        u, v = x[a] - x[start], x[c] - x[start]
        norms = [(1e-8 + torch.sum(w**2)) ** 0.5 for w in (u, v)]
        cosine = torch.einsum("ni,ni->n", u[None], v[None])[0] / (norms[0] * norms[1])
        limits = [math.cos(t * math.pi / 180) for t in (180 - threshold, threshold)]
        frames.append(
            ([a, start, c], bool(limits[0] < cosine) and bool(cosine < limits[1]))
        )
    return frames


@given(
    seed=st.integers(0, 10**6),
    sizes=st.tuples(
        st.integers(1, 25), st.integers(1, 8)
    ),  # many chains of 1, 2 and 3 atoms
    distinct=st.sampled_from([None, 2, 4]),
    dtype=st.sampled_from(
        [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    ),
    search=st.sampled_from(["blocks", "kdtree", "reference"]),
)
@settings(max_examples=120, deadline=None)
def test_frames_equal_a_loop_over_tokens(
    seed: int, sizes: tuple[int, int], distinct: int | None, dtype: torch.dtype, search
) -> None:
    case = random_case(
        seed, num_tokens=sizes[0], num_chains=sizes[1], distinct=distinct, dtype=dtype
    )
    options = FrameOptions(search=search)
    found = frame_atoms(*case, options=options)
    for t, (atoms, valid) in enumerate(loop_over_tokens(case)):
        assert bool(found.valid[t]) == valid, t
        if atoms is not None:
            assert found.indices[:, t].tolist() == atoms, t


@given(
    seed=st.integers(0, 10**6),
    num_tokens=st.integers(2, 30),
    samples=st.sampled_from([(), (1,), (3,)]),
    distinct=st.sampled_from([None, 3]),
    dtype=st.sampled_from(
        [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    ),
)
@settings(max_examples=80, deadline=None)
def test_whole_rows_equal_all_pairs_to_the_bit_ties_and_invalid_frames_too(
    seed: int, num_tokens: int, samples: tuple, distinct: int | None, dtype: torch.dtype
) -> None:
    case = random_case(
        seed, num_tokens=num_tokens + 2, samples=samples, distinct=distinct, dtype=dtype
    )
    if case.x.shape[-2] < 3:
        return
    phi, valid = token_frame_atoms(*case, options=ROWS)
    expected, expected_valid = token_frame_atoms_all_pairs(*case)
    assert torch.equal(valid, expected_valid)
    for ours, theirs in zip(phi, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_a_training_batch_with_samples_equals_each_sample_alone() -> None:
    cases = [
        random_case(seed, num_tokens=20, samples=(3,), padding=0) for seed in (1, 2)
    ]
    num_atoms = max(case.x.shape[-2] for case in cases)
    batch = {
        k: torch.stack([c.batch[k] for c in cases])[:, None] for k in cases[0].batch
    }
    x, mask = torch.zeros(2, 3, num_atoms, 3), torch.zeros(2, 3, num_atoms)
    for i, case in enumerate(cases):
        x[i, :, : case.x.shape[-2]] = case.x
        mask[i, :, : case.x.shape[-2]] = case.atom_mask
    phi, valid = token_frame_atoms(batch, x, mask)
    assert valid.shape == (2, 3, 20) and phi[0].shape == (2, 3, 20, 3)
    for i, case in enumerate(cases):
        expected, expected_valid = token_frame_atoms(*case)
        assert torch.equal(valid[i], expected_valid)
        for ours, theirs in zip(phi, expected, strict=True):
            keep = expected_valid.bool()
            assert torch.equal(ours[i][keep], theirs[keep])


@pytest.mark.parametrize("options", [FrameOptions(), ROWS])
def test_gradients_flow_through_the_coordinates_only_and_equal_all_pairs(
    options,
) -> None:
    case = random_case(5, num_tokens=40, samples=(2,), absent=0.0)
    weights = torch.randn(3, 2, 42, 3, generator=torch.Generator().manual_seed(0))
    gradients = []
    for function, extra in (
        (token_frame_atoms, {"options": options}),
        (token_frame_atoms_all_pairs, {}),
    ):
        x = case.x.clone().requires_grad_()
        phi, valid = function(case.batch, x, case.atom_mask, **extra)
        assert not valid.requires_grad
        keep = valid.bool()[None, ..., None] if options is not ROWS else 1.0
        (torch.stack(phi) * weights * keep).sum().backward()
        gradients.append(x.grad)
    assert gradients[0].abs().sum() > 0
    assert torch.equal(*gradients)


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_than_three_atoms_in_a_chain_or_in_all_give_invalid_finite_frames(
    count,
) -> None:
    alone = atoms_only([[float(i), 0.0, 0.0] for i in range(count)])
    crowd = atoms_only(
        [[float(i), i % 2 * 1.5, 0.0] for i in range(count + 5)], [1] * count + [2] * 5
    )
    for case in (alone, crowd):
        for options in (FrameOptions(), ROWS):
            phi, valid = token_frame_atoms(*case, options=options)
            assert not valid[:count].any()
            assert all(bool(p.isfinite().all()) for p in phi)
    assert token_frame_atoms(*crowd)[1][count:].all()


def test_equal_distances_go_to_the_lower_atom_and_duplicates_count() -> None:
    corners = atoms_only([[0.0, 0, 0], [1, 1, 0], [-1, 1, 0], [-1, -1, 0], [1, -1, 0]])
    assert frame_atoms(*corners).indices[:, 0].tolist() == [1, 0, 2]
    same = atoms_only([[0.0, 0, 0]] * 3)
    frames = frame_atoms(*same)
    assert frames.indices.T.tolist() == [[1, 0, 2], [1, 1, 2], [1, 2, 2]]
    assert frames.valid.tolist() == [
        1,
        1,
        1,
    ]  # u = 0, so cos = 0: the contract calls it valid


@pytest.mark.parametrize(
    ("degrees", "valid"),
    [(24.9, 0), (25.1, 1), (154.9, 1), (155.1, 0), (0, 0), (180, 0)],
)
def test_the_angle_must_be_wide_of_a_line_for_atomised_tokens(
    degrees: float, valid: int
) -> None:
    angle = math.radians(degrees)
    # a at 1 Å, c at 1.5 Å; the far atoms make the chain longer
    case = atoms_only(
        [[0.0, 0, 0], [1, 0, 0], [1.5 * math.cos(angle), 1.5 * math.sin(angle), 0]]
    )
    assert token_frame_atoms(*case)[1][0] == valid


def test_exactly_at_the_threshold_is_invalid_and_threshold_zero_rejects_only_lines() -> (
    None
):
    right = atoms_only([[0.0, 0, 0], [1, 0, 0], [0, 1.5, 0]])
    assert token_frame_atoms(*right, angle_threshold=90.0)[1][0] == 0
    line = atoms_only([[0.0, 0, 0], [1e3, 0, 0], [-2e3, 0, 0]])
    assert token_frame_atoms(*line, angle_threshold=0.0)[1][0] == 0
    assert token_frame_atoms(*right, angle_threshold=0.0)[1][0] == 1


def test_a_collinear_standard_residue_is_valid() -> None:
    x = torch.arange(5.0)[:, None].expand(5, 3)
    phi, valid = token_frame_atoms(features([PROTEIN], [1]), x, torch.ones(5))
    assert valid.tolist() == [1.0] and phi[1][0].tolist() == [1.0, 1.0, 1.0]


def test_a_standard_residue_needs_its_three_atoms_but_no_other() -> None:
    x, batch = torch.rand(25, 3), features([RNA, DNA], [1, 1])
    for atom in range(25):
        mask = torch.ones(25)
        mask[atom] = 0
        valid = token_frame_atoms(batch, x, mask)[1]
        assert valid.tolist() == [atom not in (7, 11, 5), atom - 13 not in (7, 10, 5)]


def test_padding_gives_the_first_atom_and_0() -> None:
    case = random_case(3, padding=4, absent=0.0)
    phi, valid = token_frame_atoms(*case)
    assert not valid[-4:].any()
    assert all(torch.equal(p[-4:], case.x[0].expand(4, 3)) for p in phi)


def test_the_dtype_of_the_mask_follows_the_masks_and_coordinates_keep_theirs() -> None:
    case = random_case(3, dtype=torch.bfloat16)
    phi, valid = token_frame_atoms(*case)
    assert phi[0].dtype == torch.bfloat16 and valid.dtype == torch.float32
    assert (
        token_frame_atoms(case.batch, case.x, case.atom_mask.double())[1].dtype
        == torch.float64
    )


@pytest.mark.parametrize("options", [FrameOptions(), ROWS])
def test_arguments_are_left_as_they_were(options: FrameOptions) -> None:
    case = random_case(9)
    before = [
        case.x.clone(),
        case.atom_mask.clone(),
        *(v.clone() for v in case.batch.values()),
    ]
    token_frame_atoms(*case, options=options)
    after = [case.x, case.atom_mask, *case.batch.values()]
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)


def broken(**changes: torch.Tensor) -> Case:
    case = random_case(4, padding=0)
    return Case(batch={**case.batch, **changes}, x=case.x, atom_mask=case.atom_mask)


def test_bad_batches_are_named() -> None:
    case = random_case(4, padding=0)
    batch, x, mask = case
    hole = batch["token_mask"].clone()
    hole[3] = 0
    with pytest.raises(
        StructureError, match=r"token_mask must be 1 for all .* got a 0 between them"
    ):
        token_frame_atoms(*broken(token_mask=hole))
    with pytest.raises(StructureError, match=r"must add up to the \d+ atoms of x, got"):
        token_frame_atoms(batch, torch.cat((x, x[:1])), torch.cat((mask, mask[:1])))
    with pytest.raises(StructureError, match="start_atom_index must be within"):
        token_frame_atoms(*broken(start_atom_index=batch["start_atom_index"] - 1))
    with pytest.raises(
        StructureError,
        match=r"restype must have the shape of token_mask, \(30, "
        r"32\)",
    ):
        token_frame_atoms(*broken(restype=batch["restype"][:, :21]))
    with pytest.raises(StructureError, match="got no asym_id"):
        token_frame_atoms({k: v for k, v in batch.items() if k != "asym_id"}, x, mask)
    with pytest.raises(
        StructureError, match=r"x must be of shape \(..., N_atom >= 1, 3\)"
    ):
        token_frame_atoms(batch, x[:, :2], mask)
    with pytest.raises(
        StructureError, match=r"x must be float64, float32, bfloat16 or float16, got"
    ):
        token_frame_atoms(batch, x.int(), mask)
    with pytest.raises(StructureError, match="atom_mask must cover"):
        token_frame_atoms(batch, x, mask[:-1])
    with pytest.raises(StructureError, match="atom_mask must broadcast to"):
        token_frame_atoms(batch, x, mask.expand(2, -1))


def test_nan_of_a_present_atom_is_an_error_unless_the_check_is_off() -> None:
    case = random_case(4, absent=0.0)
    x = case.x.clone()
    x[7, 1] = torch.nan
    with pytest.raises(
        StructureError, match=r"x must be finite where atom_mask is 1.*\(7,\)"
    ):
        token_frame_atoms(case.batch, x, case.atom_mask)
    unchecked = FrameOptions(check=False, search="blocks")
    token_frame_atoms(case.batch, x, case.atom_mask, options=unchecked)


def test_options_are_checked_and_budgets_hold() -> None:
    with pytest.raises(
        InvalidInputError, match="impl must be one of chain, rows, got 'row'"
    ):
        FrameOptions(impl="row")  # type: ignore[arg-type]
    tight = {"budget_bytes": 100}
    for impl in ("chain", "rows"):
        with pytest.raises(BudgetError, match="budget_bytes must be"):
            token_frame_atoms(*random_case(1), options=FrameOptions(impl=impl, **tight))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_frames_of_the_cpu() -> None:
    case = random_case(11, num_tokens=400, samples=(2,))
    expected = token_frame_atoms(*case)
    batch = {k: v.cuda() for k, v in case.batch.items()}
    phi, valid = token_frame_atoms(batch, case.x.cuda(), case.atom_mask.cuda())
    assert torch.equal(valid.cpu(), expected[1])
    keep = expected[1].bool()
    for ours, theirs in zip(phi, expected[0], strict=True):
        assert torch.equal(ours.cpu()[keep], theirs[keep])


def test_standard_tokens_alone_need_no_search() -> None:
    case = random_case(1, atom_fraction=0.0, absent=0.0)
    assert ATOM not in (case.batch["is_atomized"] * ATOM).tolist()
    assert token_frame_atoms(*case)[1][:30].all()
