"""Former name of `thinsection.deid`."""

import warnings
from importlib import import_module


def __getattr__(name: str) -> object:
    if name not in ("Report", "deidentify", "deidentify_dicom", "examine"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"thinsection.slide.deid is now thinsection.deid; import {name} from there",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(import_module("thinsection.deid"), name)
