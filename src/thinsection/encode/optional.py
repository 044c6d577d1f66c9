"""Optional packages, imported on first use with an error that says what to install."""

from importlib import import_module, util
from types import ModuleType

from thinsection.encode.torchvision_ops import importable_torchvision
from thinsection.errors import MissingDependencyError

# packages that import torchvision, which has to be made importable first
_NEED_TORCHVISION = ("timm", "transformers")


def is_installed(package: str) -> bool:
    """Whether the package could be imported, without importing it."""
    return util.find_spec(package) is not None


def optional_package(package: str) -> ModuleType:
    """The imported package.

    Raises:
        MissingDependencyError: it is not installed; the message says how to get it.
    """
    if not is_installed(package):
        raise MissingDependencyError(
            f"package {package!r} must be installed for this encoder; "
            "pip install 'thinsection[hub]'"
        )
    # transformers falls back to Pillow without torchvision; timm cannot be imported then
    if package in _NEED_TORCHVISION and (package == "timm" or is_installed("torchvision")):
        importable_torchvision()
    return import_module(package)
