"""`thinsection doctor`: what this machine offers, what is missing, and how to get it."""

import os
import shutil
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Annotated

import typer

from thinsection.registry import Entry, Registry
from thinsection.units import format_bytes

# what other packages may add to; each registry says itself what its entries are
REGISTRIES = (
    "thinsection.slide.readers:READERS",
    "thinsection.tiles.filters:FILTERS",
    "thinsection.qc.pipeline:CHECKS",
    "thinsection.encode.registry:ENCODERS",
    "thinsection.pool.encoder:SLIDE_ENCODERS",
    "thinsection.stages.formats:FORMATS",
    "thinsection.jobs.executor:EXECUTORS",
    "thinsection.probe.registry:PROBES",
)
Finding = tuple[str, str, bool, str]  # area, name, usable, version or remedy


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("doctor")(doctor)


def doctor(
    out: Annotated[Path | None, typer.Option(help="Look at this folder's disk.")] = None,
) -> None:
    """Show devices, readers, encoders, executors, formats, probes, caches and free space.

    Example: thinsection doctor --out /data/results
    """
    from rich.console import Console
    from rich.table import Table

    table = Table("", "area", "name", "detail")
    for area, name, usable, detail in examine(out or Path()):
        table.add_row("[green]ok[/]" if usable else "[yellow]--[/]", area, name, detail)
    Console().print(table)


def examine(out: Path) -> Iterator[Finding]:
    """Everything that was found, in the order of the report."""
    yield from _devices()
    for place in REGISTRIES:
        module, _, name = place.partition(":")
        registry: Registry[object] = getattr(import_module(module), name)
        alike: dict[tuple[bool, str], list[str]] = {}  # entries that need the same packages
        for entry in registry:
            alike.setdefault((not entry.missing, _detail(entry)), []).append(entry.name)
        for (usable, detail), names in alike.items():
            yield registry.kind, ", ".join(names), usable, detail
    yield from _places(out)


def _detail(entry: Entry) -> str:
    """Versions of what an entry needs, or what to do."""
    if entry.missing:
        return f"needs {', '.join(entry.missing)}: {entry.remedy}"
    found = ", ".join(filter(None, map(_version, entry.needs)))
    return found or "needs no package of its own"


def _version(package: str) -> str:
    for distribution in packages_distributions().get(package, ()):
        try:
            return f"{distribution} {version(distribution)}"
        except PackageNotFoundError:
            continue
    return ""


def _devices() -> Iterator[Finding]:
    import psutil
    import torch

    from thinsection.stream import cpu_count

    memory = format_bytes(psutil.virtual_memory().available)
    yield "device", "cpu", True, f"{cpu_count()} CPUs, {memory} free"
    build = f"torch {torch.__version__}"
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        detail = f"{name}, {format_bytes(free)} of {format_bytes(total)} free, {build}"
        yield "device", f"cuda:{index}", True, detail
    if torch.version.cuda is None:
        yield "device", "cuda", False, f"{build} is a CPU build; install a CUDA build"
    elif not torch.cuda.is_available():
        yield "device", "cuda", False, f"{build} sees no GPU; check the driver"
    if torch.backends.mps.is_available():
        yield "device", "mps", True, build


def _places(out: Path) -> Iterator[Finding]:
    hub = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    token = bool(os.environ.get("HF_TOKEN")) or (hub / "token").is_file()
    yield "cache", "HF_HOME", hub.is_dir(), str(hub)
    detail = "found" if token else "none; gated encoders need HF_TOKEN or `hf auth login`"
    yield "cache", "hub token", token, detail
    free = shutil.disk_usage(out).free
    yield "disk", str(out.resolve()), free > 0, f"{format_bytes(free)} free"
