"""Replaces OpenFold3's computations over all pairs of atoms by ours while a block runs."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from thinsection.errors import MissingDependencyError, RescueError
from thinsection.frames.openfold3_pairs import (
    bond_loss,
    complex_lddt,
    has_clash,
    interface_clash,
    plddt_loss,
    smooth_lddt_loss,
)
from thinsection.frames.token_frames import FrameOptions, token_frame_atoms

VERSIONS = ("0.4.5", "0.5.0")  # versions whose functions were compared with ours
Function = Callable[..., object]


@dataclass(frozen=True, slots=True)
class _Target:
    """A function of OpenFold3, and our replacement."""

    module: str
    name: str
    parameters: str  # parameters of the original, with their defaults
    replacement: Function  # takes `options`, and the original's arguments by name
    versions: tuple[str, ...] = VERSIONS


_TARGETS = (
    _Target(
        "openfold3.core.utils.atomize_utils",
        "get_token_frame_atoms",
        "batch, x, atom_mask, angle_threshold=25.0, eps=1e-08, inf=1000000000.0",
        token_frame_atoms,
    ),
    _Target(
        "openfold3.core.metrics.sample_ranking",
        "compute_has_clash",
        "asym_id, atom_positions_predicted, atom_mask, is_polymer, threshold=1.1, "
        "violation_abs=100, violation_frac=0.5",
        has_clash,
    ),
    _Target(
        "openfold3.core.loss.diffusion",
        "smooth_lddt_loss",
        "x, batch, loss_token_mask, eps",
        smooth_lddt_loss,
    ),
    _Target("openfold3.core.loss.diffusion", "bond_loss", "x, batch, eps", bond_loss),
    _Target(
        "openfold3.core.loss.diffusion",
        "bond_loss_sparse",
        "x, batch, eps",
        bond_loss,
    ),
    _Target(
        "openfold3.core.metrics.quality",
        "get_full_complex_lddt",
        "asym_id, intra_filter_atomized, pred_coords, gt_coords, all_atom_mask, eps=1e-10",
        complex_lddt,
    ),
    _Target(
        "openfold3.core.metrics.quality",
        "interface_steric_clash",
        "pred_protein, pred_substrate, all_atom_mask_protein, all_atom_mask_substrate, "
        "threshold=1.1, eps=1e-10",
        interface_clash,
    ),
    _Target(
        "openfold3.core.loss.confidence",
        "all_atom_plddt_loss",
        "batch, x, logits, no_bins, bin_min, bin_max, eps, kwargs",
        plddt_loss,
        versions=("0.5.0",),  # the bins of 0.4.5 differ
    ),
)


# name of a function, the original function, and our function with its options
_Swap = tuple[str, Function, Function]


@contextmanager
def openfold3(options: FrameOptions | None = None) -> Iterator[None]:
    """Replaces OpenFold3's computations over all pairs of atoms by ours in O(N_atom) memory.

    Replaced are token frames, clashes, the losses for pLDDT, smooth lDDT and bonds, and the lDDT of
    a complex. Every openfold3 module that holds an original function gets ours, also modules that
    are imported within the block; after the block all get the original back. This affects the whole
    process, so threads must not use it concurrently. FrameOptions(impl='rows') chooses among equal
    distances as the original does; its budget_bytes limits each search. For 0.4.5, whose lDDT has
    other bins, its own lDDT is kept.

    Raises MissingDependencyError: openfold3 is not installed; RescueError: version or signature
        were not compared, functions are replaced already, or the block made no call of our
        functions.
    """
    calls: list[str] = []
    swaps = _recognised_swaps(options or FrameOptions(), calls)
    try:
        for name, original, ours in swaps:
            _replace_everywhere(name, original, ours)
        yield
    finally:
        for name, original, ours in swaps:
            _replace_everywhere(name, ours, original)
    if not calls:
        names = ", ".join(name for name, _, _ in swaps)
        raise RescueError(
            f"one of {names} must be called within the block, got no call"
        )


def _recognised_swaps(options: FrameOptions, calls: list[str]) -> list[_Swap]:
    """Replacements for the installed version. Raises the errors of `openfold3` if it is unknown."""
    try:
        installed = version("openfold3")
    except PackageNotFoundError:
        raise MissingDependencyError(
            "openfold3 must be installed for its rescue, got no openfold3; "
            f"pip install openfold3=={VERSIONS[-1]}"
        ) from None
    if installed not in VERSIONS:
        raise RescueError(
            f"openfold3 must be of version {' or '.join(VERSIONS)}, got {installed}; "
            "nothing was replaced"
        )
    swaps = []
    for target in _TARGETS:
        if installed in target.versions:
            original = _original(target)
            replacement = _bound(target, inspect.signature(original), options, calls)
            swaps.append((target.name, original, replacement))
    return swaps


def _original(target: _Target) -> Function:
    """The original function. Raises RescueError: replaced already, or its parameters differ."""
    module = importlib.import_module(target.module)
    function: Function | None = getattr(module, target.name, None)
    if function is None or function.__module__ != target.module:
        raise RescueError(
            f"{target.module}.{target.name} must be the original function, got {function!r}"
        )
    texts = []
    for parameter in inspect.signature(function).parameters.values():
        has_default = parameter.default is not inspect.Parameter.empty
        texts.append(parameter.name + (f"={parameter.default}" if has_default else ""))
    parameters = ", ".join(texts)
    if parameters != target.parameters:
        raise RescueError(
            f"{target.name} must have the parameters ({target.parameters}), got ({parameters}); "
            "nothing was replaced"
        )
    return function


def _bound(
    target: _Target,
    signature: inspect.Signature,
    options: FrameOptions,
    calls: list[str],
) -> Function:
    """Our function with its options set, so that it is called like the original."""

    def call(*args: object, **kwargs: object) -> object:
        calls.append(target.name)
        arguments = signature.bind(*args, **kwargs)
        arguments.apply_defaults()
        return target.replacement(options=options, **arguments.arguments)

    return call


def _replace_everywhere(name: str, old: Function, new: Function) -> None:
    """Put `new` in place of `old` in every openfold3 module that holds it."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != "openfold3":
            continue
        if getattr(module, name, None) is old:
            setattr(module, name, new)
