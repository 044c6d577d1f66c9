"""Makes `import torchvision` work beside a CPU build of torch, for timm and transformers.

PyPI's torchvision wheel is built for CUDA; beside torch's CPU build its compiled operators do not
load, and `import torchvision` stops because `torchvision::nms` was never registered. Nobody here
calls that operator, its declaration is enough. The native library always comes first, so that a
matching pair of builds keeps its own operators.
"""

from functools import cache

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


@cache
def importable_torchvision() -> torch.library.Library | None:
    """Imports torchvision, declaring two of its operators if its own library does not load.

    Returns:
        The handle that keeps the declarations alive (the cache holds it), or None where the native
        library loaded.

    Raises:
        ImportError: torchvision is not installed.
    """
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    else:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in _SCHEMAS:
        library.define(schema)  # type: ignore[no-untyped-call]
    import torchvision  # noqa: F401

    return library
