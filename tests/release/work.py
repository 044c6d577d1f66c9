"""What an installed package must do in an environment with an extra, and the words it says."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.data import write_inputs
from tests.docs.names import problems_of_command
from tests.docs.pages import SHELL, arguments_of, blocks_of

import thinsection
from thinsection.cli.app import COMMANDS
from thinsection.extras import EXTRAS

from .environments import Environment

NO_EXTRA = ""
ALL = "all"
CHOICES = (NO_EXTRA, *EXTRAS, ALL)
TIMEOUT_S = 600
STAND_IN = Path(__file__).parents[1] / "rescue" / "stand_in_stamp.py"
# a model of another tool, which a rescue recognises; no reader may be imported
GUEST = """
import sys
import torch
from stand_in_stamp import DIM, model

generator = torch.Generator().manual_seed(0)
x = torch.randn(1, 300, DIM, generator=generator)
coords = torch.rand(1, 300, 2, generator=generator) * 20_000
with torch.inference_mode():
    model()(x, coords)
assert "PIL" not in sys.modules and "h5py" not in sys.modules
"""
HUB = """
import thinsection as ts
encoder = ts.load_encoder("kaiko_vits16", pretrained=False, device="cpu")
with ts.open_slide("slide.svs") as slide:
    tiles = ts.tile_grid(slide, tile_px=256, tile_mpp=0.5)
    embeddings, tiles = ts.embed_tiles(slide, tiles, encoder)
assert embeddings.shape == (len(tiles.coords_l0), 384), embeddings.shape
import huggingface_hub, onnxruntime, segmentation_models_pytorch, transformers
"""
FROM_URL = """
from pathlib import Path
import s3fs
import thinsection as ts
with ts.open_slide(Path("slide.svs").resolve().as_uri()) as slide:
    assert min(slide.size) > 0
"""
VIEW = """
import matplotlib
matplotlib.use("agg")
import thinsection as ts
from urllib.request import urlopen
with ts.view("results", port=0) as viewer:
    page = urlopen(viewer.url).read()
    library = urlopen(viewer.url + "static/openseadragon.min.js").read()
assert b"<html" in page and b"OpenSeadragon" in library
results = ts.open_results("results")
assert len(results.table()) == 1
ts.plot.embedding(results, color="tissue_fraction", method="umap")
"""


@dataclass(frozen=True)
class Step:
    """A command line, and how it must end."""

    name: str
    words: tuple[str, ...]
    returncode: int = 0
    says: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of a step; `problem` is empty if it ended as it must."""

    name: str
    seconds: float
    problem: str


def steps_of(extra: str) -> Iterator[Step]:
    """Steps of an environment, in order, in a folder of `write_folder`."""
    yield Step("version", ("thinsection", "--version"), says=thinsection.__version__)
    yield _ours("doctor --json", says="thinsection_version")
    if extra in (NO_EXTRA, ALL):
        yield from _helps(extra)
    if extra == NO_EXTRA:
        rescue = ("thinsection", "rescue", "stamp", "--", "guest.py")
        yield Step("rescue", rescue, says="rescued Model: 2 attention layers")
    if extra in ("slides", ALL):
        yield _ours("demo --out demo", says="open these:")
        yield _ours("run cohort.csv --out trained", says="12 done")
        yield _ours(
            "train trained --labels labels.csv --target grade --epochs 2 --out model"
        )
        yield Step("page", ("test", "-s", "model/index.html"))
    if extra in ("hub", ALL):
        yield _ours("run slide.svs --out engine --engine openvino", says="1 done")
        yield _python("encoder of the hub", HUB)
    if extra in ("cluster", ALL):
        yield _ours(
            "run slide.svs slide2.svs --until tiles --executor dask --workers 2 --out dask",
            says="2 done",
        )
        yield _ours(
            "run slide.svs slide2.svs --until tiles --executor ray --workers 2 --out ray",
            says="2 done",
        )
        yield _python("slide by URL", FROM_URL)
    if extra in ("view", ALL):
        yield _ours(
            "run slide.svs --out results --write parquet --write zarr", says="1 done"
        )
        yield _ours("export anndata results --out tiles.h5ad")
        yield _python("viewer and UMAP", VIEW)
    if extra == ALL:
        yield _ours("frames structure.cif --out frames.csv")
        yield from _readme()


def write_folder(folder: Path) -> None:
    """Writes what the steps find: slides, tables and a structure file."""
    folder.mkdir(parents=True)
    write_inputs(folder)
    shutil.copy(STAND_IN, folder)
    (folder / "guest.py").write_text(GUEST, encoding="utf-8")


def take(
    step: Step, environment: Environment, folder: Path, *, timeout_s: float = TIMEOUT_S
) -> Outcome:
    """Runs a step in the folder, as in a shell in which the environment is active."""
    variables = environment.variables | {
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    program = shutil.which(step.words[0], path=variables["PATH"])
    start = time.monotonic()
    try:
        ended = subprocess.run(
            [str(program), *step.words[1:]],
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return Outcome(step.name, timeout_s, f"must end within {timeout_s:g} s")
    seconds = time.monotonic() - start
    output = ended.stdout + ended.stderr
    problem = ""
    if ended.returncode != step.returncode:
        problem = (
            f"ended with {ended.returncode}, not {step.returncode}: {output[-1500:]}"
        )
    elif step.says not in output:
        problem = f"must say {step.says!r}, got {output[-1500:]}"
    return Outcome(step.name, round(seconds, 1), problem)


def _ours(command: str, *, says: str = "") -> Step:
    return Step(command, ("thinsection", *command.split()), says=says)


def _python(name: str, code: str) -> Step:
    return Step(name, ("python", "-c", code))


def _helps(extra: str) -> Iterator[Step]:
    """`--help` of every command; without an extra, those that read slides name it."""
    for name, command in COMMANDS.items():
        words = ("thinsection", name, "--help")
        if command.needs_slides and extra == NO_EXTRA:
            remedy = "pip install 'thinsection[slides]'"
            yield Step(f"{name} --help", words, returncode=2, says=remedy)
        else:
            yield Step(f"{name} --help", words, says=f"Usage: thinsection {name}")


def _readme() -> Iterator[Step]:
    """The commands and Python blocks of the README, but for those that its marks leave out."""
    yield Step("README: no results yet", ("rm", "-r", "results"))
    for block in blocks_of("README.md"):
        if block.language in SHELL:
            for command in block.commands():
                mark = block.mark_of(command)
                if not command.startswith("thinsection ") or mark is not None:
                    continue
                assert not problems_of_command(command)
                yield Step(f"README: {command}", tuple(arguments_of(command)))
        elif block.language == "python" and block.mark_of(block.text) is None:
            yield _python(f"README:{block.line}", block.text)
