"""`thinsection doctor` for this machine, and `thinsection models` for encoders."""

import os
import platform
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
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thinsection import __version__
from thinsection.cli.documents import (
    DoctorDocument,
    EncoderRow,
    Finding,
    ModelsCheckDocument,
    ModelsDocument,
    copied,
    print_document,
)
from thinsection.cli.flags import AsJson
from thinsection.errors import InvalidInputError, MissingDependencyError
from thinsection.extras import check_slides, remedy_for
from thinsection.registry import Registry
from thinsection.types import format_bytes

if TYPE_CHECKING:
    from thinsection.encode import EncoderSpec

# registries that other packages may extend; each of them describes its own entries
REGISTRIES = (
    "thinsection.slide.readers:READERS",
    "thinsection.tiles.filters:FILTERS",
    "thinsection.qc.pipeline:CHECKS",
    "thinsection.encode.registry:ENCODERS",
    "thinsection.pool.encoder:SLIDE_ENCODERS",
    "thinsection.stages.formats:FORMATS",
    "thinsection.jobs.executor:EXECUTORS",
    "thinsection.predict.heads.config:HEADS",
    "thinsection.probe.registry:PROBES",
)

EXIT_WOULD_NOT_LOAD = 1
# device files of the drivers for NVIDIA, WSL and AMD
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_ALSO = "also: timm:<name>, hf:<repo>[@<revision>], the path of a checkpoint with its config.json"
_EPILOG = "Examples: thinsection models, thinsection models check uni2_h"
_ENCODER_HELP = (
    "Encoder: a name that `thinsection models` lists, timm:NAME, hf:REPO, or the path of a "
    "checkpoint."
)
_DEVICE_HELP = "Device of the encoder: auto, cpu, cuda or cuda:1."

app = typer.Typer()
models = typer.Typer(
    help="List the tile encoders; check that one can be loaded.", epilog=_EPILOG
)
app.add_typer(models, name="models")


@app.command("doctor")
def doctor(
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder on the disk whose free space is shown. [default: this folder]"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check what works on this machine, and what is missing.

    Lists devices, readers, encoders, executors, formats, probes, caches and free space. For each
    missing part, it prints the command that installs it.

    \b
    Example:
      thinsection doctor --out /data/results
    """
    findings = [*_devices(), *_engines(), *_entries(), *_places(out or Path())]
    if as_json:
        document = DoctorDocument(
            thinsection_version=__version__,
            python_version=platform.python_version(),
            findings=tuple(findings),
        )
        print_document(document)
        return
    table = Table("", "area", "name", "detail")
    for finding in findings:
        mark = Text("ok", "green") if finding.usable else Text("--", "yellow")
        # "thinsection[view]" is plain text, but rich would read the brackets as markup
        table.add_row(mark, finding.area, Text(finding.name), Text(finding.detail))
    Console().print(table)


def _entries() -> Iterator[Finding]:
    """Whether slides can be read, and entries of the registries, whose modules import readers.

    Entries that need the same packages share a line.
    """
    try:
        check_slides()
    except MissingDependencyError as error:
        yield Finding("packages", "slides", False, str(error))
        return
    yield Finding("packages", "slides", True, "every package that reads slides")
    for place in REGISTRIES:
        registry: Registry[object] = resolve_name(place)
        names_by_state: dict[tuple[bool, str], list[str]] = {}
        for entry in registry:
            versions = [_version(package) for package in entry.needs]
            detail = ", ".join(filter(None, versions)) or "needs no package of its own"
            if entry.missing:
                detail = f"needs {', '.join(entry.missing)}: {entry.remedy}"
            state = (not entry.missing, detail)
            names_by_state.setdefault(state, []).append(entry.name)
        for (usable, detail), names in names_by_state.items():
            yield Finding(registry.kind, ", ".join(names), usable, detail)


@cache
def _version(package: str) -> str:
    """Name and version of the distribution of a package; '' if it is not known."""
    with suppress(PackageNotFoundError):
        return f"{package} {version(package)}"
    # a distribution may have another name than its package, such as openslide-python
    for distribution in distributions():
        packages = (distribution.read_text("top_level.txt") or "").split()
        if package in packages:
            return f"{distribution.name} {distribution.version}"
    return ""


def _devices() -> Iterator[Finding]:
    """CPUs and GPUs; PyTorch is imported only if there is a GPU driver."""
    import psutil

    from thinsection.machine import affinity_count, cpu_count

    cpus = f"{cpu_count()} CPUs"
    if cpu_count() < affinity_count():
        cpus += f" of {affinity_count()} by a cgroup's quota"
    free = format_bytes(psutil.virtual_memory().available)
    yield Finding("device", "cpu", True, f"{cpus}, {free} free")
    spec = find_spec("torch")
    torch_file = Path(str(spec and spec.origin))
    build_facts = runpy.run_path(str(torch_file.with_name("version.py")))
    build = f"torch {build_facts['__version__']}"
    is_cpu_build = build_facts["cuda"] is None and build_facts["hip"] is None
    is_linux = sys.platform == "linux"
    no_gpu = Finding("device", "cuda", False, f"{build} sees no GPU; check the driver")
    if is_linux and is_cpu_build:
        remedy = f"{build} is a CPU build; install a CUDA build"
        yield Finding("device", "cuda", False, remedy)
        return
    if is_linux and not any(Path(driver).exists() for driver in _DRIVERS):
        yield no_gpu
        return
    import torch

    for index in range(torch.cuda.device_count()):
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        memory = f"{format_bytes(free_bytes)} of {format_bytes(total_bytes)} free"
        detail = f"{torch.cuda.get_device_name(index)}, {memory}, {build}"
        yield Finding("device", f"cuda:{index}", True, detail)
    if not torch.cuda.is_available():
        yield no_gpu
    if torch.backends.mps.is_available():
        yield Finding("device", "mps", True, build)


def _engines() -> Iterator[Finding]:
    """Engines beside PyTorch."""
    from thinsection.encode.engine_choice import why_not_compiled
    from thinsection.machine import visible_gpus

    engine = _version("openvino")
    remedy = f"not installed, so torch computes on CPUs; {remedy_for(['openvino'])}"
    yield Finding("engine", "openvino", bool(engine), engine or remedy)
    device = "cuda" if visible_gpus() else "cpu"
    reason = why_not_compiled(device)
    can_compile = f"networks can be compiled for {device}"
    yield Finding("engine", "compiled", not reason, reason or can_compile)


def _places(out: Path) -> Iterator[Finding]:
    """Cache and token of the hub, and the disk of the output folder."""
    named = os.environ.get("HF_HOME", "~/.cache/huggingface")
    # Path.expanduser raises an error for a user without a home folder
    hub = Path(os.path.expanduser(named))  # noqa: PTH111
    token = bool(os.environ.get("HF_TOKEN")) or (hub / "token").is_file()
    yield Finding("cache", "HF_HOME", hub.is_dir(), str(hub))
    detail = (
        "found" if token else "none; gated encoders need HF_TOKEN or `hf auth login`"
    )
    yield Finding("hub", "token", token, detail)
    free = shutil.disk_usage(out).free
    yield Finding("disk", str(out.resolve()), free > 0, f"{format_bytes(free)} free")


@models.callback(invoke_without_command=True)
def list_models(context: typer.Context, as_json: AsJson = False) -> None:
    """List the tile encoders with dimension, tile size, licence, needs and origin.

    In a pipe or file each encoder is one line with fields that are separated by tabs.
    """
    if context.invoked_subcommand is not None:
        return
    from thinsection.encode.registry import ENCODERS, declared_encoders
    from thinsection.pool.encoder import SLIDE_ENCODERS

    specs = declared_encoders()
    plugins = {}
    for name in ENCODERS.names()[len(specs) :]:
        plugins[name] = ENCODERS.entry(name).help
    slide_encoders = {entry.name: entry.help for entry in SLIDE_ENCODERS}
    if as_json:
        models_document = ModelsDocument(
            encoders=tuple(copied(EncoderRow, spec) for spec in specs.values()),
            plugins=plugins,
            slide_encoders=slide_encoders,
        )
        print_document(models_document)
        return
    rows = [_row(spec) for spec in specs.values()]
    if sys.stdout.isatty():
        Console().print(_table(rows))
    else:
        print("\t".join(rows[0]))
        for row in rows:
            print("\t".join(row.values()))
    for name, help_line in plugins.items():
        print(f"{name}\tbrought by another package: {help_line}")
    print(_ALSO)
    for name, help_line in slide_encoders.items():
        print(f"slide encoder\t{name}\t{help_line}")


def _row(spec: "EncoderSpec") -> dict[str, str]:
    """Row in the list of encoders, by heading."""
    from thinsection.encode.fingerprint import find_fingerprint

    needs = [package for package in spec.needs if package != "huggingface_hub"]
    fingerprint = find_fingerprint(spec.name)
    return {
        "name": spec.name,
        "dim": str(spec.dim),
        "tile px": str(spec.tile_px),
        "µm/px": "any" if spec.tile_mpp is None else f"{spec.tile_mpp:g}",
        "params": f"{(spec.num_params or 0) / 1e6:.0f} M",
        "licence": spec.licence,
        "needs": ", ".join(needs) or "nothing",
        "from": spec.repo or spec.source.split(";")[0],
        "weights": f"{spec.pin}, gated" if spec.gated else spec.pin,
        "fingerprint": "none" if fingerprint is None else f"by {fingerprint.maker}",
        "revision": spec.revision[:7] if spec.revision else "",
    }


def _table(rows: list[dict[str, str]]) -> Table:
    """Rows for a terminal; names are not shortened, numbers are aligned to the right."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    longest_name = max(len(row["name"]) for row in rows)
    table.add_column("name", no_wrap=True, min_width=longest_name)
    for heading in list(rows[0])[1:]:
        is_number = heading in ("dim", "tile px", "µm/px", "params")
        justify: Literal["right", "left"] = "right" if is_number else "left"
        table.add_column(heading, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    return table


@models.command("check")
def check_loading(
    name: Annotated[
        str,
        typer.Argument(help=_ENCODER_HELP),
    ],
    device: Annotated[str, typer.Option(help=_DEVICE_HELP)] = "auto",
    as_json: AsJson = False,
) -> None:
    """Check that an encoder can be loaded and gives its fingerprint, and give the reason if not.

    If its weights are here and it has a fingerprint, it is loaded and compared: in fp32 with torch,
    and in the precision and engine of a run.

    Exit code: 0 it loads, 1 it does not.

    \b
    Example:
      thinsection models check uni2_h
    """
    from thinsection.encode.check import check_encoder

    checks = check_encoder(name, device=device)
    loads = all(check.ok for check in checks)
    if as_json:
        print_document(ModelsCheckDocument.of(name, checks))
    else:
        console = Console()
        for check in checks:
            mark = " yes" if check.ok else "  no"
            style = "green" if check.ok else "red"
            console.print(mark, style=style, end=f"  {check.name:<11} ")
            console.print(check.detail, markup=False, highlight=False, soft_wrap=True)
        verdict = f"{name} would {'' if loads else 'not '}load here"
        console.print(verdict, style="bold", markup=False, highlight=False)
    if not loads:
        raise typer.Exit(EXIT_WOULD_NOT_LOAD)


@models.command("fingerprint")
def make_fingerprint(  # noqa: PLR0917 - options of a command
    name: Annotated[str, typer.Argument(help=_ENCODER_HELP)],
    tile: Annotated[
        Path | None,
        typer.Option(
            help="Only write the fixed tile to this PNG file, for a script of the authors."
        ),
    ] = None,
    embedding: Annotated[
        Path | None,
        typer.Option(
            help="Embedding of that tile by other code, (D,) in an .npy file. Without it "
            "Thinsection embeds the tile: the fingerprint then only shows later changes."
        ),
    ] = None,
    code: Annotated[
        str,
        typer.Option(help="The other code, with its version or commit."),
    ] = "",
    port: Annotated[
        bool,
        typer.Option(help="The other code is not that of the encoder's authors."),
    ] = False,
    who: Annotated[str, typer.Option(help="Your name and the date.")] = "",
    write: Annotated[
        bool,
        typer.Option(
            help="Keep it for this machine, where each load compares with it."
        ),
    ] = False,
    device: Annotated[str, typer.Option(help=_DEVICE_HELP)] = "auto",
) -> None:
    """Make the fingerprint of an encoder whose weights are here: the embedding of a fixed tile.

    The TOML is printed. It proves the features of the encoder on any other machine.

    Exit code: 0 the encoder agrees with the fingerprint, 1 it does not.

    \b
    Example:
      thinsection models fingerprint uni --tile tile.png
      thinsection models fingerprint uni --embedding uni.npy --code "UNI at 1a2b3c4" > uni.toml
    """
    import numpy as np
    from PIL import Image

    from thinsection.encode.agreement import (
        compare,
        make_fingerprint,
        unnoticed_faults,
    )
    from thinsection.encode.encoder import NetworkTileEncoder
    from thinsection.encode.fingerprint import drawn_tile, fingerprint_paths
    from thinsection.encode.load import load_encoder
    from thinsection.encode.registry import split_input_px
    from thinsection.files.atomic import write_text

    if tile is not None:
        Image.fromarray(drawn_tile()).save(tile, format="PNG")
        return
    if embedding is not None and not code:
        raise InvalidInputError(
            "code must be given with --embedding, got none; name the code that made it, with its "
            'version or commit: --code "UNI at 1a2b3c4"'
        )
    if split_input_px(name)[1] is not None:
        raise InvalidInputError(
            f"name must be without an input size, got {name!r}; "
            "a fingerprint is of the authors' size"
        )
    encoder = load_encoder(
        name,
        device=device,
        precision="fp32",
        engine="torch",
        check_fingerprint=False,
    )
    if not isinstance(encoder, NetworkTileEncoder):
        raise InvalidInputError(
            f"encoder must be one that Thinsection builds, got {name!r} of another package"
        )
    vector = None
    if embedding is not None:
        vector = np.load(embedding, allow_pickle=False)
    fingerprint = make_fingerprint(
        encoder, embedding=vector, code=code, made_by_authors=not port, who=who
    )
    print(fingerprint.to_toml(), end="")
    messages = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    agreement = compare(encoder, fingerprint)
    messages.print(str(agreement))
    unnoticed = unnoticed_faults(encoder)
    if unnoticed:
        messages.print(f"this fingerprint would not notice: {'; '.join(unnoticed)}")
    if write:
        path = fingerprint_paths(encoder.spec.name)[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, fingerprint.to_toml())
        messages.print(f"written to {path}")
    if not agreement.agrees:
        raise typer.Exit(EXIT_WOULD_NOT_LOAD)
