"""Facts of the environment that explain a slow run."""

import os
import sys
from pathlib import Path
from typing import Any


def environment_facts(*, gpus_visible: int) -> dict[str, Any]:
    """gpus_visible, torch_cuda_build (None before torch was loaded), and where the cache lies."""
    torch = sys.modules.get("torch")
    cache = model_cache()
    return {
        "gpus_visible": gpus_visible,
        "torch_cuda_build": torch.version.cuda is not None if torch is not None else None,
        "cache": str(cache),
        "cache_filesystem": filesystem_of(cache),
    }


def model_cache() -> Path:
    """The folder from which hub weights are read."""
    home = os.environ.get("HF_HOME")
    return Path(home) if home else Path.home() / ".cache" / "huggingface"


def filesystem_of(path: Path, mounts: str | None = None) -> str:
    """Type of the file system that holds a path; '' where the system does not say.

    Args:
        path: need not exist.
        mounts: text of /proc/mounts; None reads it.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/mounts").read_text()
        except OSError:
            return ""
    best, kind = -1, ""
    target = path.resolve()
    for line in mounts.splitlines():
        parts = line.split()
        if len(parts) < 3:
            continue
        point = Path(parts[1].replace("\\040", " "))
        if (point == target or point in target.parents) and len(point.parts) >= best:
            best, kind = len(point.parts), parts[2]
    return kind
