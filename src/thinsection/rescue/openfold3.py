"""OpenFold3's work on all pairs of atoms replaced by ours while a block runs."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

from thinsection.errors import MissingDependencyError, RescueError
from thinsection.rescue import openfold3_pairs as pairs
from thinsection.structures.frames import FrameOptions

_Function = Callable[..., Any]
VERSIONS = ("0.4.5", "0.5.0")  # whose functions were compared with ours
_BOND = "x, batch, eps"
# home, name, parameters of the original; ours
_TARGETS: list[tuple[str, str, str, _Function]] = [
    (
        *("openfold3.core.utils.atomize_utils", "get_token_frame_atoms"),
        "batch, x, atom_mask, angle_threshold=25.0, eps=1e-08, inf=1000000000.0",
        pairs.token_frames,
    ),
    (
        *("openfold3.core.metrics.sample_ranking", "compute_has_clash"),
        "asym_id, atom_positions_predicted, atom_mask, is_polymer, threshold=1.1, "
        "violation_abs=100, violation_frac=0.5",
        pairs.has_clash,
    ),
    (
        *("openfold3.core.loss.diffusion", "smooth_lddt_loss"),
        *("x, batch, loss_token_mask, eps", pairs.smooth_lddt_loss),
    ),
    ("openfold3.core.loss.diffusion", "bond_loss", _BOND, pairs.bond_loss),
    ("openfold3.core.loss.diffusion", "bond_loss_sparse", _BOND, pairs.bond_loss),
    (
        *("openfold3.core.metrics.quality", "get_full_complex_lddt"),
        "asym_id, intra_filter_atomized, pred_coords, gt_coords, all_atom_mask, eps=1e-10",
        pairs.complex_lddt,
    ),
    (
        *("openfold3.core.metrics.quality", "interface_steric_clash"),
        "pred_protein, pred_substrate, all_atom_mask_protein, all_atom_mask_substrate, "
        "threshold=1.1, eps=1e-10",
        pairs.interface_clash,
    ),
    (  # the last: 0.4.5 has other bins
        *("openfold3.core.loss.confidence", "all_atom_plddt_loss"),
        *("batch, x, logits, no_bins, bin_min, bin_max, eps, kwargs", pairs.plddt_loss),
    ),
]


@contextmanager
def openfold3(options: FrameOptions | None = None) -> Iterator[None]:
    """OpenFold3's work on all pairs of atoms, in O(N_atom) memory, inside the installed package.

    Frames of tokens, clashes, the losses of pLDDT, smooth lDDT and bonds, the lDDT of a complex.

    Every module of openfold3 that holds an original function gets ours, also one that is imported
    within the block; all get the original back. Process-wide, not for concurrent use by threads.
    FrameOptions(impl='rows') keeps the original's choice among equal distances; its budget_bytes
    bounds each search. 0.4.5, whose lDDT has other bins, keeps its own lDDT.

    Raises:
        MissingDependencyError: openfold3 is not installed.
        RescueError: another version or signature than was compared, or already replaced; or a block
            that ends without one call of ours.
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
        raise RescueError(f"one of {names} must be called within the block, got no call")


def _recognised(options: FrameOptions, calls: list[str]) -> list[tuple[str, _Function, _Function]]:
    """Names, originals of a version that we know and ours, or the errors of `openfold3`."""
    try:
        installed = version("openfold3")
    except PackageNotFoundError:
        raise MissingDependencyError("rescue.openfold3 needs openfold3, which is absent") from None
    if installed not in VERSIONS:
        rule = f"openfold3 must be of version {' or '.join(VERSIONS)}"
        raise RescueError(f"{rule}, got {installed}; nothing was replaced")
    swaps = []
    for home, name, parameters, ours in _TARGETS[: -1 if installed == "0.4.5" else None]:
        function = getattr(importlib.import_module(home), name, None)
        if function is None or function.__module__ != home:
            raise RescueError(f"{home}.{name} must be the original function, got {function!r}")
        signature = inspect.signature(function)
        known = ((p.name, p.default) for p in signature.parameters.values())
        got = ", ".join(n if d is inspect.Parameter.empty else f"{n}={d}" for n, d in known)
        if got != parameters:
            raise RescueError(f"{name} must take ({parameters}), got ({got}); nothing was replaced")
        swaps.append((name, function, _bound(ours, signature, options, calls)))
    return swaps


def _bound(
    ours: _Function, signature: inspect.Signature, options: FrameOptions, calls: list[str]
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
        if place.partition(".")[0] == "openfold3" and getattr(module, name, None) is old:
            setattr(module, name, new)
