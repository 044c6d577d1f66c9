"""What is here: `thinsection doctor` on this machine, `thinsection models` on encoders."""

import dataclasses
import json
import os
import runpy
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thinsection.registry import Entry, Registry
from thinsection.types import format_bytes

if TYPE_CHECKING:
    from thinsection.encode import EncoderSpec

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
_NAME = typer.Argument(help="A name of the list, timm:<name>, hf:<repo>, a path.")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")]

EXIT_WOULD_NOT_LOAD = 1
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA, Windows' Linux, AMD
_ALSO = "also: timm:<name>, hf:<repo>[@<revision>], the path of a checkpoint with its config.json"
_EPILOG = (
    "Examples: thinsection models; models check uni; models check timm:resnet50 --json"
)

app = typer.Typer()
models = typer.Typer(
    help="List the encoders; say whether one would load here.", epilog=_EPILOG
)
app.add_typer(models, name="models")


@app.command("doctor")
def doctor(
    out: Annotated[
        Path | None, typer.Option(help="Look at this folder's disk.")
    ] = None,
) -> None:
    """Show devices, readers, encoders, executors, formats, probes, caches and free space.

    Example: thinsection doctor --out /data/results
    """
    table = Table("", "area", "name", "detail")
    for findings in (_devices(), _entries(), _places(out or Path())):
        for area, name, usable, detail in findings:
            mark = Text("ok", "green") if usable else Text("--", "yellow")
            # "thinsection[export]" is text: rich would take the brackets for markup
            table.add_row(mark, area, Text(name), Text(detail))
    Console().print(table)


def _entries() -> Iterator[Finding]:
    """What the registries hold; entries that need the same packages share a line."""
    for place in REGISTRIES:
        registry: Registry[object] = resolve_name(place)
        alike: dict[tuple[bool, str], list[str]] = {}
        for entry in registry:
            alike.setdefault((not entry.missing, _detail(entry)), []).append(entry.name)
        for (usable, detail), names in alike.items():
            yield registry.kind, ", ".join(names), usable, detail


def _detail(entry: Entry) -> str:
    """Versions of what an entry needs, or what to do."""
    if entry.missing:
        return f"needs {', '.join(entry.missing)}: {entry.remedy}"
    found = ", ".join(filter(None, map(_version, entry.needs)))
    return found or "needs no package of its own"


@cache
def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return f"{package} {version(package)}"
    named = (
        d
        for d in distributions()
        if package in (d.read_text("top_level.txt") or "").split()
    )
    return next(
        (f"{d.name} {d.version}" for d in named), ""
    )  # of another name: openslide-python


def _devices() -> Iterator[Finding]:
    """The CPUs; and GPUs, for which PyTorch is imported only where there is a driver of one."""
    import psutil

    from thinsection.machine import affinity_count, cpu_count

    memory = format_bytes(psutil.virtual_memory().available)
    cut = f" of {affinity_count()} by a cgroup's quota" * (
        cpu_count() < affinity_count()
    )
    yield "device", "cpu", True, f"{cpu_count()} CPUs{cut}, {memory} free"
    spec = find_spec("torch")
    told = runpy.run_path(str(Path(str(spec and spec.origin)).with_name("version.py")))
    build = f"torch {told['__version__']}"
    if told["cuda"] is None and told["hip"] is None and sys.platform == "linux":
        yield "device", "cuda", False, f"{build} is a CPU build; install a CUDA build"
        return
    if sys.platform == "linux" and not any(map(os.path.exists, _DRIVERS)):
        yield "device", "cuda", False, f"{build} sees no GPU; check the driver"
        return
    import torch

    for index in range(torch.cuda.device_count()):
        free, total = map(format_bytes, torch.cuda.mem_get_info(index))
        detail = f"{torch.cuda.get_device_name(index)}, {free} of {total} free, {build}"
        yield "device", f"cuda:{index}", True, detail
    if not torch.cuda.is_available():
        yield "device", "cuda", False, f"{build} sees no GPU; check the driver"
    if torch.backends.mps.is_available():
        yield "device", "mps", True, build
    engine = _version("openvino")
    remedy = (
        "not installed, so torch computes on CPUs; pip install 'thinsection[openvino]'"
    )
    yield "engine", "openvino", bool(engine), engine or remedy


def _places(out: Path) -> Iterator[Finding]:
    hub = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    token = bool(os.environ.get("HF_TOKEN")) or (hub / "token").is_file()
    yield "cache", "HF_HOME", hub.is_dir(), str(hub)
    detail = (
        "found" if token else "none; gated encoders need HF_TOKEN or `hf auth login`"
    )
    yield "cache", "hub token", token, detail
    free = shutil.disk_usage(out).free
    yield "disk", str(out.resolve()), free > 0, f"{format_bytes(free)} free"


@models.callback(invoke_without_command=True)
def list_models(context: typer.Context, as_json: AsJson = False) -> None:
    """List the encoders: dimension, tiles, licence, what they need, where they come from.

    Into a pipe or file: one line an encoder, fields apart by tabs, nothing shortened.
    """
    if context.invoked_subcommand is not None:
        return
    from thinsection.encode.registry import ENCODERS, declared_encoders
    from thinsection.pool.encoder import SLIDE_ENCODERS

    specs = declared_encoders()
    others = {
        e.name: e.help for e in map(ENCODERS.entry, ENCODERS.names()[len(specs) :])
    }
    slide = {entry.name: entry.help for entry in SLIDE_ENCODERS}
    if as_json:
        declared = [dataclasses.asdict(spec) for spec in specs.values()]
        for plain, spec in zip(declared, specs.values()):
            plain["architecture"]["options"] = dict(spec.architecture.options)
            plain["needs"] = list(spec.needs)
        found = {"encoders": declared, "plugins": others, "slide_encoders": slide}
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    rows, lines = [_row(spec) for spec in specs.values()], list[list[str]]()
    if sys.stdout.isatty():
        Console().print(_table(rows))
    else:
        lines = [[*rows[0]], *([*row.values()] for row in rows)]
    lines += [
        [name, f"brought by another package: {line}"] for name, line in others.items()
    ]
    lines += [[_ALSO], *(["slide encoder", *item] for item in slide.items())]
    print(*map("\t".join, lines), sep="\n")


def _row(spec: "EncoderSpec") -> dict[str, str]:
    """What the list tells of an encoder, by heading."""
    packages = [p for p in spec.needs if p != "huggingface_hub"]
    pinned = spec.revision[:7] if spec.revision else "no commit known"
    return {
        "name": spec.name,
        "dim": str(spec.dim),
        "tile px": str(spec.tile_px),
        "µm/px": "any" if spec.tile_mpp is None else f"{spec.tile_mpp:g}",
        "params": f"{(spec.num_params or 0) / 1e6:.0f} M",
        "licence": spec.licence,
        "needs": ", ".join(packages + ["token (gated)"] * spec.gated) or "nothing",
        "from": spec.repo or spec.source.split(";")[0],
        "revision": pinned if spec.repo else "the package's",
    }


def _table(rows: list[dict[str, str]]) -> Table:
    """The rows for a terminal: names whole, numbers to the right."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(
        "name", no_wrap=True, min_width=max(len(row["name"]) for row in rows)
    )
    for heading in [*rows[0]][1:]:
        number = heading in ("dim", "tile px", "µm/px", "params")
        table.add_column(
            heading, justify="right" if number else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*row.values())
    return table


@models.command()
def check(
    name: Annotated[str, _NAME],
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """Say whether an encoder would load here, and why not. Exit code 1 if it would not."""
    from thinsection.encode.load import check_encoder

    checks, console = check_encoder(name, device=device), Console()
    loads = all(c.ok for c in checks)
    if as_json:
        shown = [dataclasses.asdict(c) for c in checks]
        print(json.dumps({"name": name, "loads": loads, "checks": shown}, indent=2))
    else:
        for c in checks:
            mark, style = ("yes", "green") if c.ok else ("no", "red")
            console.print(f"{mark:>4}", style=style, end=f"  {c.name:<9} ")
            console.print(c.detail, markup=False, highlight=False, soft_wrap=True)
        verdict = f"{name} would {'' if loads else 'not '}load here"
        console.print(verdict, style="bold", markup=False, highlight=False)
    if not loads:
        raise typer.Exit(EXIT_WOULD_NOT_LOAD)
