"""Optional packages, imported on first use with an error that says what to install.

timm and transformers import torchvision, and PyPI's wheel of it is built for CUDA: beside torch's
CPU build `import torchvision` stops because `torchvision::nms` was never registered. Nobody here
calls that; so, in a process that asks `optional_package` for one of the two, and there only, two
operators are declared without an implementation where the native library, which is tried first,
does not load (docs/encoders.md).
"""

from functools import cache
from importlib import import_module, util
from types import ModuleType

import torch

from thinsection.errors import MissingDependencyError

_NEED_TORCHVISION = ("timm", "transformers")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def is_installed(package: str) -> bool:
    """Whether the package could be imported, without importing it."""
    return util.find_spec(package) is not None


def optional_package(package: str) -> ModuleType:
    """The imported package, or a MissingDependencyError that says how to get it."""
    if not is_installed(package):
        needed = f"package {package!r} must be installed for this encoder"
        raise MissingDependencyError(f"{needed}; pip install 'thinsection[hub]'")
    # transformers falls back to Pillow without torchvision; timm cannot be imported then
    if package in _NEED_TORCHVISION and (package == "timm" or is_installed("torchvision")):
        importable_torchvision()
    return import_module(package)


@cache
def importable_torchvision() -> torch.library.Library | None:
    """Imports torchvision, declaring two of its operators if its own library does not load.

    The handle keeps the declarations alive (the cache holds it); None where the library loaded.
    """
    try:
        import torchvision

        return None
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        library.define(operator + _SCHEMA)  # type: ignore[no-untyped-call]
    import torchvision  # noqa: F401

    return library
