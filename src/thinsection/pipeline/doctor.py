"""What this machine offers: devices, readers, encoders, caches, room; what is missing and how to
get it."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from thinsection.slide import available_readers
from thinsection.stream import cpu_count
from thinsection.units import format_bytes

# optional package -> (what it is for, how to install it)
OPTIONAL = {
    "timm": ("encoders of the timm family", "pip install 'thinsection[hub]'"),
    "transformers": ("encoders of the hf family", "pip install 'thinsection[hub]'"),
    "pyarrow": ("--write parquet", "pip install 'thinsection[export]'"),
    "zarr": ("--write zarr", "pip install 'thinsection[export]'"),
    "anndata": ("export anndata", "pip install 'thinsection[export]'"),
    "scikit-survival": ("probe survival", "pip install 'thinsection[probe]'"),
    "gemmi": ("frames", "pip install 'thinsection[structures]'"),
    "distributed": ("--executor dask", "pip install 'thinsection[cluster]'"),
    "fsspec": ("slides by URL", "pip install 'thinsection[cloud]'"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        area: device, reader, package, cache or disk.
        name: what was looked at.
        ok: whether it is usable.
        detail: version, size, or what to do.
    """

    area: str
    name: str
    ok: bool
    detail: str


def examine(out: Path | None = None) -> list[Finding]:
    """Everything that was found, in the order of the report.

    Args:
        out: folder whose disk is looked at; the current one by default.
    """
    return [*_devices(), *_readers(), *_packages(), *_places(out or Path())]


def _devices() -> Iterator[Finding]:
    import torch

    memory = psutil.virtual_memory()
    yield Finding(
        "device",
        "cpu",
        True,
        f"{cpu_count()} CPUs, {format_bytes(memory.available)} free",
    )
    build = f"torch {torch.__version__}"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            detail = f"{name}, {format_bytes(free)} of {format_bytes(total)} free, {build}"
            yield Finding("device", f"cuda:{index}", True, detail)
    elif torch.version.cuda is None:
        yield Finding("device", "cuda", False, f"{build} is a CPU build; install a CUDA build")
    else:
        yield Finding("device", "cuda", False, f"{build} sees no GPU; check the driver")
    if torch.backends.mps.is_available():
        yield Finding("device", "mps", True, build)


def _readers() -> Iterator[Finding]:
    for status in available_readers():
        yield Finding("reader", status.name, status.available, status.detail)


def _packages() -> Iterator[Finding]:
    for name, (purpose, remedy) in OPTIONAL.items():
        try:
            yield Finding("package", name, True, f"{version(name)}, for {purpose}")
        except PackageNotFoundError:
            yield Finding("package", name, False, f"for {purpose}: {remedy}")


def _places(out: Path) -> Iterator[Finding]:
    hub = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    token = bool(os.environ.get("HF_TOKEN")) or (hub / "token").is_file()
    yield Finding("cache", "HF_HOME", hub.is_dir(), str(hub))
    detail = "found" if token else "none; gated encoders need HF_TOKEN or `hf auth login`"
    yield Finding("cache", "hub token", token, detail)
    free = shutil.disk_usage(out).free
    yield Finding("disk", str(out.resolve()), free > 0, f"{format_bytes(free)} free")
