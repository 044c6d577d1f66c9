"""OpenFold3's all-pairs search for frame atoms replaced by ours while a block runs."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from thinsection.errors import MissingDependencyError, RescueError
from thinsection.structures.frames import FrameOptions, token_frame_atoms

VERSIONS = ("0.4.5", "0.5.0")  # whose function was compared with ours
MODULE = "openfold3.core.utils.atomize_utils"
NAME = "get_token_frame_atoms"
_PARAMETERS = {
    **dict.fromkeys(("batch", "x", "atom_mask"), inspect.Parameter.empty),
    **{"angle_threshold": 25.0, "eps": 1e-8, "inf": 1e9},
}


@contextmanager
def openfold3(options: FrameOptions | None = None) -> Iterator[None]:
    """Frame atoms in O(N_atom) memory inside the installed OpenFold3, until the block ends.

    Every module of openfold3 that holds the original function gets ours, also one that is imported
    within the block; all get the original back. Process-wide, not for concurrent use by threads.
    FrameOptions(impl='rows') keeps the original's choice among equal distances.

    Raises:
        MissingDependencyError: openfold3 is not installed.
        RescueError: another version or signature than was compared, or already replaced.
    """
    original = _recognised()
    ours = partial(token_frame_atoms, options=options or FrameOptions())
    try:
        _swap(original, ours)
        yield
    finally:
        _swap(ours, original)


def _recognised() -> Callable[..., Any]:
    """The original function of a version that we know, or the errors of `openfold3`."""
    try:
        installed = version("openfold3")
    except PackageNotFoundError:
        raise MissingDependencyError("rescue.openfold3 needs openfold3, which is absent") from None
    if installed not in VERSIONS:
        rule = f"openfold3 must be of version {' or '.join(VERSIONS)}"
        raise RescueError(f"{rule}, got {installed}; nothing was replaced")
    function = getattr(importlib.import_module(MODULE), NAME, None)
    if function is None or function.__module__ != MODULE:
        raise RescueError(f"{MODULE}.{NAME} must be the original function, got {function!r}")
    signature = inspect.signature(function)
    if {p.name: p.default for p in signature.parameters.values()} != _PARAMETERS:
        rule = f"{NAME} must take ({', '.join(_PARAMETERS)}) with the known defaults"
        raise RescueError(f"{rule}, got {signature}; nothing was replaced")
    return function  # type: ignore[no-any-return]


def _swap(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "openfold3" and getattr(module, NAME, None) is old:
            setattr(module, NAME, new)
