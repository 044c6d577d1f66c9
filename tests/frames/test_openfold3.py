"""The replacement goes into every module that holds the original, and out again."""

import importlib
import importlib.util
import sys
import unittest
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from tests.frames.all_pairs import token_frame_atoms_all_pairs
from tests.frames.batches import random_case

from thinsection.errors import MissingDependencyError, RescueError
from thinsection.frames import FrameOptions, openfold3

_ORIGINAL = """
from tests.frames.all_pairs import token_frame_atoms_all_pairs as plain

def get_token_frame_atoms(batch, x, atom_mask, angle_threshold=25.0, eps=1e-8, inf={inf}):
    CALLS.append(1)
    return plain(batch, x, atom_mask, angle_threshold, eps, inf)

CALLS = []
"""
# the other functions that are replaced; as the first, but for their bodies
_OTHERS = {
    "metrics/sample_ranking": "def compute_has_clash(asym_id, atom_positions_predicted, atom_mask, "
    "is_polymer, threshold=1.1, violation_abs=100, violation_frac=0.5): ...\n",
    "loss/diffusion": "def bond_loss(x, batch, eps): ...\n"
    "def bond_loss_sparse(x, batch, eps): ...\n"
    "def smooth_lddt_loss(x, batch, loss_token_mask, eps): ...\n",
    "metrics/quality": "def get_full_complex_lddt(asym_id, intra_filter_atomized, pred_coords, "
    "gt_coords, all_atom_mask, eps=1e-10): ...\ndef interface_steric_clash(pred_protein, "
    "pred_substrate, all_atom_mask_protein, all_atom_mask_substrate, threshold=1.1, "
    "eps=1e-10): ...\n",
    "loss/confidence": "def all_atom_plddt_loss(batch, x, logits, no_bins, bin_min, bin_max, eps, "
    "**kwargs): ...\n",
}
_USER = "from openfold3.core.utils.atomize_utils import get_token_frame_atoms\n"


def _installed() -> str | None:
    try:
        return version("openfold3")
    except PackageNotFoundError:
        return None


def write_package(root: Path, *, number: str = "0.5.0", inf: str = "1e9") -> None:
    """A package with the real one's paths, signature and imports, but another body."""
    utils = root / "openfold3" / "core" / "utils"
    utils.mkdir(parents=True)
    for folder in (utils, utils.parent, utils.parent.parent):
        (folder / "__init__.py").write_text("")
    (utils / "atomize_utils.py").write_text(_ORIGINAL.format(inf=inf))
    for name, text in _OTHERS.items():
        other = utils.parent / f"{name}.py"
        other.parent.mkdir(exist_ok=True)
        (other.parent / "__init__.py").write_text("")
        other.write_text(text)
    (utils.parent / "early.py").write_text(_USER)
    (utils.parent / "late.py").write_text(_USER)
    facts = root / f"openfold3-{number}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: openfold3\nVersion: {number}\n"
    )


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is searched before any installed openfold3, whose modules are set aside."""
    aside = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "openfold3"}
    for name in aside:
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [n for n in sys.modules if n.partition(".")[0] == "openfold3"]:
        del sys.modules[name]
    sys.modules.update(aside)


def test_modules_imported_before_and_within_the_block_use_ours_and_get_the_original_back(
    root: Path,
) -> None:
    write_package(root)
    import openfold3.core.utils.atomize_utils as home
    from openfold3.core import early

    original, case = home.get_token_frame_atoms, random_case(3)
    with openfold3(FrameOptions(impl="rows")):
        from openfold3.core import late

        replaced = {m.get_token_frame_atoms for m in (home, early, late)}
        assert len(replaced) == 1 and original not in replaced
        phi, valid = early.get_token_frame_atoms(
            batch=case.batch, x=case.x, atom_mask=case.atom_mask
        )
        assert home.CALLS == []
    assert {m.get_token_frame_atoms for m in (home, early, late)} == {original}
    expected, expected_valid = token_frame_atoms_all_pairs(*case)
    assert torch.equal(valid, expected_valid)
    for ours, theirs in zip(phi, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_the_original_comes_back_after_an_exception(root: Path) -> None:
    write_package(root)
    import openfold3.core.utils.atomize_utils as home

    original = home.get_token_frame_atoms
    with pytest.raises(KeyError, match="boom"), openfold3():
        raise KeyError("boom")
    assert home.get_token_frame_atoms is original


def test_a_second_rescue_within_the_first_is_refused(root: Path) -> None:
    write_package(root)
    import openfold3.core.utils.atomize_utils as home

    with openfold3(), pytest.raises(RescueError, match="must be the original function"):
        home.get_token_frame_atoms(*random_case(3))
        with openfold3():
            pass


def test_a_block_that_calls_nothing_of_ours_is_an_error(root: Path) -> None:
    write_package(root)
    unused = pytest.raises(
        RescueError,
        match=r"compute_has_clash, .* must be called within the block",
    )
    with unused, openfold3():
        pass


def test_another_version_is_refused(root: Path) -> None:
    write_package(root, number="0.9.1")
    with (
        pytest.raises(RescueError, match=r"version 0\.4\.5 or 0\.5\.0, got 0\.9\.1"),
        openfold3(),
    ):
        pass


def test_another_signature_is_refused(root: Path) -> None:
    write_package(root, inf="1e6")
    with (
        pytest.raises(RescueError, match=r"got \(batch, .*inf=1000000.0\)"),
        openfold3(),
    ):
        pass


@pytest.mark.skipif(_installed() is not None, reason="openfold3 is installed here")
def test_without_openfold3_the_error_says_so() -> None:
    with pytest.raises(MissingDependencyError, match="needs openfold3"), openfold3():
        pass


needs_openfold3 = pytest.mark.skipif(
    _installed() is None,
    reason="needs openfold3 (pip install --no-deps openfold3==0.5.0)",
)


@pytest.fixture
def without_biotite(monkeypatch: pytest.MonkeyPatch) -> None:
    """What OpenFold3's modules import and these functions do not use is stood in for."""
    absent = [
        n for n in ("biotite", "ml_collections") if importlib.util.find_spec(n) is None
    ]
    featurization = "openfold3.core.data.primitives.featurization.structure"
    also = ("biotite.structure", featurization) if "biotite" in absent else ()
    for name in (*absent, *also):
        monkeypatch.setitem(sys.modules, name, mock.MagicMock())


@needs_openfold3
@pytest.mark.usefixtures("without_biotite")
def test_the_installed_package_is_rescued_and_gives_the_same() -> None:
    import openfold3.core.utils.atomize_utils as home

    case = random_case(8, num_tokens=60)
    expected, expected_valid = home.get_token_frame_atoms(*case)
    original = home.get_token_frame_atoms
    with openfold3():
        assert home.get_token_frame_atoms is not original
        phi, valid = home.get_token_frame_atoms(*case)
    assert home.get_token_frame_atoms is original
    assert torch.equal(valid, expected_valid)
    keep = valid.bool()
    for ours, theirs in zip(phi, expected, strict=True):
        assert torch.equal(ours[keep], theirs[keep])


@needs_openfold3
@pytest.mark.usefixtures("without_biotite")
@pytest.mark.parametrize("impl", ["chain", "rows"])
def test_openfold3s_own_frame_tests_pass_with_ours(
    impl: Literal["chain", "rows"],
) -> None:
    """They come with its wheel."""
    theirs = importlib.import_module("openfold3.tests.test_atomize_utils")
    cases = unittest.defaultTestLoader.loadTestsFromTestCase(
        theirs.TestGetTokenFrameAtom
    )
    with openfold3(FrameOptions(impl=impl)):
        result = cases.run(unittest.TestResult())
    assert result.testsRun == 4
    assert not result.failures and not result.errors, result.failures + result.errors


def clash_arguments(chain_atoms: int, *, seed: int) -> tuple[torch.Tensor, ...]:
    """Chains 3, 5, 8 and 9, the last no polymer, near each other in a box; atoms absent."""
    generator = torch.Generator().manual_seed(seed)
    asym_id = torch.tensor([3, 5, 8, 9]).repeat_interleave(chain_atoms)[
        : 4 * chain_atoms - 7
    ]
    atoms = len(asym_id)
    sides = torch.tensor([8.0, 25.0, 60.0])[:, None, None]
    positions = torch.rand(3, atoms, 3, generator=generator) * sides
    mask = torch.rand(atoms, generator=generator) < 0.9
    return asym_id, positions, mask, asym_id != 9


@needs_openfold3
@pytest.mark.usefixtures("without_biotite")
@pytest.mark.parametrize("chain_atoms", [2, 12, 300])
def test_clashes_are_the_originals(chain_atoms: int) -> None:
    home = importlib.import_module("openfold3.core.metrics.sample_ranking")
    for seed in range(4):
        arguments = clash_arguments(chain_atoms, seed=seed)
        for limits in (
            {},
            {"violation_abs": 3},
            {"violation_frac": 0.01, "threshold": 2.5},
        ):
            wanted = home.compute_has_clash(*arguments, **limits)
            with openfold3(FrameOptions(budget_bytes=8192)):
                got = home.compute_has_clash(*arguments, **limits)
            assert torch.equal(got, wanted), (seed, limits)


def plddt_arguments(num_tokens: int, *, samples: int, seed: int) -> dict[str, Any]:
    """A batch of one, with samples; positions some 2 Å from the truth."""
    batch, truth, resolved = random_case(seed, num_tokens=num_tokens)
    generator = torch.Generator().manual_seed(seed)
    batch = {key: value[None, None] for key, value in batch.items()}
    truth = torch.rand(truth.shape, generator=generator) * 60
    ground = {
        "atom_positions": truth[None, None],
        "atom_resolved_mask": resolved[None, None],
    }
    moved = truth + 2 * torch.randn(1, samples, *truth.shape, generator=generator)
    logits = torch.randn(1, samples, len(truth), 50, generator=generator)
    bins = {"no_bins": 50, "bin_min": 0.0, "bin_max": 1.0, "eps": 1e-10}
    return {
        "batch": {**batch, "ground_truth": ground},
        "x": moved,
        "logits": logits,
        **bins,
    }


@needs_openfold3
@pytest.mark.usefixtures("without_biotite")
@pytest.mark.parametrize("num_tokens", [3, 40, 150])
def test_the_loss_of_plddt_and_its_gradient_are_the_originals_to_the_bit(
    num_tokens: int,
) -> None:
    home = importlib.import_module("openfold3.core.loss.confidence")
    arguments = plddt_arguments(num_tokens, samples=2, seed=num_tokens)
    logits = arguments["logits"].requires_grad_()
    wanted = home.all_atom_plddt_loss(**arguments)
    (slope,) = torch.autograd.grad(wanted.sum(), logits)
    with openfold3(FrameOptions(budget_bytes=1 << 16)):
        got = home.all_atom_plddt_loss(**arguments)
    assert torch.equal(got, wanted)
    assert torch.equal(torch.autograd.grad(got.sum(), logits)[0], slope)


def diffusion_arguments(num_tokens: int, *, samples: int, seed: int) -> dict[str, Any]:
    """Positions near a truth, ligands bonded to polymers, atoms and tokens left out of the loss."""
    given = plddt_arguments(num_tokens, samples=samples, seed=seed)
    batch, generator = given["batch"], torch.Generator().manual_seed(seed + 1)
    batch["is_ligand"] = batch["is_atomized"]
    tokens = batch["token_mask"].shape[-1]
    bonds = torch.rand(1, 1, tokens, tokens, generator=generator) < 0.2
    batch["token_bonds"] = bonds.float()
    kept = torch.rand(1, 1, tokens, generator=generator) < 0.8
    return {
        "x": given["x"],
        "batch": batch,
        "loss_token_mask": kept.float(),
        "eps": 1e-8,
    }


@needs_openfold3
@pytest.mark.usefixtures("without_biotite")
@pytest.mark.parametrize("name", ["smooth_lddt_loss", "bond_loss", "bond_loss_sparse"])
@pytest.mark.parametrize("num_tokens", [3, 40, 120])
def test_losses_of_diffusion_and_their_gradients_are_the_originals(
    name: str, num_tokens: int
) -> None:
    home = importlib.import_module("openfold3.core.loss.diffusion")
    arguments = diffusion_arguments(num_tokens, samples=2, seed=num_tokens)
    if name != "smooth_lddt_loss":
        del arguments["loss_token_mask"]
    x = arguments["x"].requires_grad_()
    wanted = getattr(home, name)(**arguments)
    (slope,) = torch.autograd.grad((wanted * torch.tensor([1.0, 3.0])).sum(), x)
    with openfold3(FrameOptions(budget_bytes=1 << 16)):
        got = getattr(home, name)(**arguments)
    torch.testing.assert_close(got, wanted, rtol=2e-6, atol=1e-7)
    ours = torch.autograd.grad((got * torch.tensor([1.0, 3.0])).sum(), x)[0]
    torch.testing.assert_close(
        ours, slope, rtol=1e-4, atol=1e-6 * float(slope.abs().max() + 1e-9)
    )
    if num_tokens > 3:
        assert slope.abs().max() > 0


@needs_openfold3
@pytest.mark.usefixtures("without_biotite")
@pytest.mark.filterwarnings("ignore:In CPU autocast")  # of OpenFold3, on a CPU
def test_openfold3s_own_diffusion_tests_pass_but_for_one_line_about_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its last line wants two losses to differ that are equal but for float32's rounding."""
    theirs = importlib.import_module("openfold3.tests.test_diffusion_loss")
    sizes = SimpleNamespace(eps=5e-4, batch_size=2, n_res=22)  # without ml_collections
    monkeypatch.setattr(theirs, "consts", sizes)
    cases = unittest.defaultTestLoader.loadTestsFromTestCase(theirs.TestDiffusionLoss)
    torch.manual_seed(0)
    with openfold3():
        result = cases.run(unittest.TestResult())
    assert result.testsRun >= 5
    assert not result.errors
    ((test, report),) = result.failures
    assert test.id().endswith(".test_smooth_lddt_loss")
    assert "assert torch.all(torch.not_equal(loss_masked, loss))" in report


@needs_openfold3
@pytest.mark.usefixtures("without_biotite")
def test_the_smooth_lddt_of_that_test_is_nearer_to_float64_than_the_original() -> None:
    home = importlib.import_module("openfold3.core.loss.diffusion")
    theirs = importlib.import_module("openfold3.tests.test_diffusion_loss")
    torch.manual_seed(0)
    batch = theirs.TestDiffusionLoss().setup_features()
    moved = theirs.centre_random_augmentation(
        xl=batch["ground_truth"]["atom_positions"].repeat((1, 2, 1, 1)),
        atom_mask=batch["ground_truth"]["atom_resolved_mask"],
    )
    wide_batch = theirs.tensor_tree_map(lambda x: x.double(), batch)
    losses: dict[str, list[torch.Tensor]] = {"original": [], "ours": [], "float64": []}
    for num_tokens in (10, 2):
        mask = torch.zeros_like(batch["is_protein"])
        mask[..., :num_tokens] = 1
        given = {"x": moved, "batch": batch, "loss_token_mask": mask, "eps": 1e-8}
        wide = given | {"x": moved.double(), "batch": wide_batch}
        losses["original"].append(home.smooth_lddt_loss(**given).double())
        losses["float64"].append(home.smooth_lddt_loss(**wide))
        with openfold3():
            losses["ours"].append(home.smooth_lddt_loss(**given).double())
    apart = {name: (of[0] - of[1]).abs().max() for name, of in losses.items()}
    assert apart["float64"] <= 1e-7
    assert apart["ours"] <= 1.2e-7
    error = {
        name: (torch.stack(of) - torch.stack(losses["float64"])).abs().max()
        for name, of in losses.items()
    }
    assert error["ours"] < error["original"] <= 1e-6


@needs_openfold3
@pytest.mark.usefixtures("without_biotite")
def test_a_gradient_of_the_gradient_of_the_smooth_lddt_is_refused() -> None:
    home = importlib.import_module("openfold3.core.loss.diffusion")
    arguments = diffusion_arguments(12, samples=1, seed=1)
    x = arguments["x"].requires_grad_()
    with openfold3():
        loss = home.smooth_lddt_loss(**arguments).sum()
    with pytest.raises(
        RescueError, match=r"differentiated only once .*create_graph=True"
    ):
        torch.autograd.grad(loss, x, create_graph=True)


@needs_openfold3
@pytest.mark.usefixtures("without_biotite")
@pytest.mark.parametrize("num_atoms", [1, 30, 400])
def test_metrics_of_a_complex_are_the_originals(num_atoms: int) -> None:
    home = importlib.import_module("openfold3.core.metrics.quality")
    generator = torch.Generator().manual_seed(num_atoms)
    truth = torch.rand(2, num_atoms, 3, generator=generator) * 40
    moved = truth + 2 * torch.randn(truth.shape, generator=generator)
    mask, kept = (torch.rand(2, 2, num_atoms, generator=generator) < 0.8).float()
    chain = torch.randint(3, (2, num_atoms), generator=generator)
    lddt = (chain, kept, moved, truth, mask)
    clash = (moved, truth[:, ::2], mask, kept[:, ::2])
    wanted = home.get_full_complex_lddt(*lddt)["lddt_intra_complex"]
    overlap = home.interface_steric_clash(*clash, threshold=2.5)
    with openfold3(FrameOptions(budget_bytes=1 << 16)):
        got = home.get_full_complex_lddt(*lddt)["lddt_intra_complex"]
        found = home.interface_steric_clash(*clash, threshold=2.5)
    for ours, theirs in ((got, wanted), (found, overlap)):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-8)
