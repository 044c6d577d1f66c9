"""Commands of the peers for bench_rescue_commands: their inputs, and where their output lies."""

import csv
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import torch
from tests.rescue.hub_folder import write_titan
from tests.support.author_embeddings import seeded_tiles

from benchmarks.titan_inputs import tissue_cells
from thinsection.pool import GigaPathSlideEncoder
from thinsection.pool.gigapath import LongNetConfig
from thinsection.testing.synthetic import write_he_slide
from thinsection.weights.placement import optional_package

# commit of TITAN that slide2vec 7.1.4 and Mussel 1.5.0 ask for
REVISION = "dac6773d9961cfc75503440676ff157a2c6e8d2e"
TITAN = "MahmoodLab/TITAN"
GIGAPATH = "prov-gigapath/prov-gigapath"
TILE_PX = 512
ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "benchmarks" / "peer_programs"
FLASH = "AssertionError"  # of prov-gigapath without FlashAttention


def tool_python(tool: str) -> str:
    """Interpreter of a tool's environment."""
    environments = Path(os.environ["THINSECTION_TEST_PEER_ENVIRONMENTS"])
    return str(environments / tool / "bin" / "python")


@dataclass(frozen=True, kw_only=True)
class PeerCommand:
    """A command of another tool."""

    rescue: str  # titan, gigapath or stamp
    tool: str  # folder of its environment; '' runs in this one
    # (folder of all inputs, folder of this command) -> words of the command
    prepare: Callable[[Path, Path], list[str]]
    output_file: str
    # the command whose result is that of float32; '' where this one computes in float32
    reference: str = ""
    # largest difference, in units of the largest value, of a command in float32
    tolerance: float = 1e-5
    stops_with: str = ""  # with what the command stops as it is

    @property
    def python(self) -> str:
        """Interpreter of the environment."""
        return tool_python(self.tool) if self.tool else sys.executable

    @property
    def search(self) -> list[Path]:
        """Folders that Python searches for packages beside the installed ones."""
        # the hub's stand-in and the peers' programs import `tests` and `benchmarks`; thinsection is
        # the installed one, as its users have it
        folders = [ROOT] if self.tool else [ROOT, ROOT / "src"]
        if self.rescue == "gigapath":
            source = Path(os.environ["THINSECTION_TEST_GIGAPATH"])
            folders += [source, source / "gigapath"]
        return folders

    def start(self, words: list[str]) -> list[str]:
        """The first word as the shell needs it."""
        if words[0].endswith(".py"):
            return [self.python, words[0]]
        return [str(Path(self.python).parent / words[0])]

    def output(self, place: Path) -> Path:
        """File that the command writes."""
        return place / self.output_file

    def read(self, place: Path) -> np.ndarray:
        """Slide embedding, or prediction, of the command."""
        path = self.output(place)
        if path.suffix == ".npy":
            return np.load(path).astype(np.float64)
        if path.suffix == ".csv":
            with path.open() as file:
                rows = list(csv.DictReader(file))
            names = ("LABEL_a", "LABEL_b")
            return np.array([float(row[name]) for row in rows for name in names])
        with h5py.File(path) as file:
            return np.asarray(file["features"], np.float64).ravel()


def write_inputs(folder: Path, num_tiles: int, rescues: set[str]) -> None:
    """A slide, tile embeddings of the channels of TITAN and GigaPath, and the hub's cache."""
    write_he_slide(folder / "s.svs", (1500, 1200), mpp=0.5, seed=3, downsamples=(1,))
    write_tiles(folder / "tiles_768.h5", num_tiles, 768)
    titan = cached_model(folder, TITAN)
    write_titan(titan, dim=768, num_blocks=2)
    write_tokenizer(titan)
    if "gigapath" in rescues:
        write_tiles(folder / "tiles_1536.h5", num_tiles, 1536)
        gigapath = cached_model(folder, GIGAPATH)
        gigapath.mkdir(parents=True)
        weights = GigaPathSlideEncoder.random_weights(LongNetConfig(), seed=0)
        torch.save({"model": weights}, gigapath / "slide_encoder.pth")


def write_tiles(path: Path, num_tiles: int, dim: int) -> None:
    """Features file of the layout of TRIDENT, which Mussel reads too."""
    with h5py.File(path, "w") as file:
        file["features"] = seeded_tiles(num_tiles, dim)
        file["coords"] = tissue_cells(num_tiles) * TILE_PX
        for name, value in {
            "patch_size": TILE_PX,
            "patch_size_level0": TILE_PX,
            "patch_level": 0,
            "level0_magnification": 20,
            "target_magnification": 20,
            "mpp": 0.5,
            "overlap": 0,
        }.items():
            file["coords"].attrs[name] = value


def cached_folder(folder: Path, name: str) -> Path:
    """Folder of a model's files in the hub's cache."""
    model = f"models--{name.replace('/', '--')}"
    return folder / "hf" / "hub" / model / "snapshots" / REVISION


def cached_model(folder: Path, name: str) -> Path:
    """The same, of a model whose newest commit is `REVISION`."""
    files = cached_folder(folder, name)
    refs = files.parents[1] / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(REVISION)
    return files


def write_tokenizer(folder: Path) -> None:
    """A tokenizer, which LazySlide loads and its slide encoder does not use."""
    tokenizers = optional_package("tokenizers")
    words = tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def program(name: str, *words: str) -> Callable[[Path, Path], list[str]]:
    """Words of a program of `peer_programs`; FOLDER and PLACE stand for the folders."""

    def prepare(folder: Path, place: Path) -> list[str]:
        named = {"FOLDER": str(folder), "PLACE": str(place)}
        filled = [word.format_map(named) for word in words]
        return [str(PROGRAMS / name), *filled]

    return prepare


def trident(
    encoder: str, dim: int, tile_encoder: str
) -> Callable[[Path, Path], list[str]]:
    """TRIDENT's script on a job whose tile embeddings exist."""

    def prepare(folder: Path, place: Path) -> list[str]:
        slides = place / "slides"
        slides.mkdir()
        (slides / "s.svs").symlink_to(folder / "s.svs")
        tiles = place / "job" / "20x_512px_0px_overlap" / f"features_{tile_encoder}"
        tiles.mkdir(parents=True)
        (tiles / "s.h5").symlink_to(folder / f"tiles_{dim}.h5")
        source = place / "TRIDENT"
        ignore = shutil.ignore_patterns(".git")
        shutil.copytree(os.environ["THINSECTION_TEST_TRIDENT"], source, ignore=ignore)
        if encoder == "gigapath":
            # where TRIDENT's users name weights of their own
            weights = cached_folder(folder, GIGAPATH) / "slide_encoder.pth"
            registry = source / "trident" / "slide_encoder_models" / "local_ckpts.json"
            registry.write_text(json.dumps({encoder: str(weights)}))
        words = f"--task feat --slide_encoder {encoder} --wsi_dir slides --job_dir job"
        words += " --mag 20 --patch_size 512 --gpus -1 --max_workers 0"
        return [str(source / "run_batch_of_slides.py"), *words.split()]

    return prepare


def mussel(folder: Path, place: Path) -> list[str]:
    """Mussel's command on a features file."""
    words = "aggregate_slide_features slide_model_type=TITAN_SLIDE use_gpu=false "
    words += f"patch_features_h5_path={folder}/tiles_768.h5 output_h5_path=out.h5"
    return words.split()


def stamp(folder: Path, place: Path) -> list[str]:
    """`stamp deploy` of a model that STAMP's `train` has made of small slides."""
    from benchmarks.stamp_inputs import write_stamp_job

    write_stamp_job(folder, place, python=tool_python("stamp"))
    return ["stamp", "--config", "config.yaml", "deploy"]


TRIDENT_OUT = "job/20x_512px_0px_overlap/slide_features_{}/s.h5"
COMMANDS: dict[str, PeerCommand] = {
    "transformers titan": PeerCommand(
        rescue="titan",
        prepare=program(
            "transformers_titan.py", "{FOLDER}/tiles_768.h5", "{PLACE}/out.npy"
        ),
        output_file="out.npy",
        tool="",
    ),
    "TRIDENT titan": PeerCommand(
        rescue="titan",
        tool="trident",
        prepare=trident("titan", 768, "conch_v15"),
        output_file=TRIDENT_OUT.format("titan"),
        reference="transformers titan",
    ),
    "Mussel titan": PeerCommand(
        rescue="titan",
        tool="mussel",
        prepare=mussel,
        output_file="out.h5",
        reference="transformers titan",
    ),
    "slide2vec titan": PeerCommand(
        rescue="titan",
        tool="slide2vec",
        prepare=program(
            "slide2vec_slide.py", "titan", "{FOLDER}/tiles_768.h5", "{PLACE}/out.npy"
        ),
        output_file="out.npy",
    ),
    "LazySlide titan": PeerCommand(
        rescue="titan",
        tool="lazyslide",
        prepare=program(
            "lazyslide_titan.py",
            "{FOLDER}/s.svs",
            "{FOLDER}/tiles_768.h5",
            "{PLACE}/out.npy",
        ),
        output_file="out.npy",
    ),
    "STAMP deploy": PeerCommand(
        rescue="stamp",
        tool="stamp",
        prepare=stamp,
        output_file="predictions/patient-preds.csv",
    ),
    "slide2vec gigapath": PeerCommand(
        rescue="gigapath",
        tool="slide2vec",
        prepare=program(
            "slide2vec_slide.py",
            "gigapath-slide",
            "{FOLDER}/tiles_1536.h5",
            "{PLACE}/out.npy",
        ),
        output_file="out.npy",
        stops_with=FLASH,
    ),
    "TRIDENT gigapath": PeerCommand(
        rescue="gigapath",
        tool="trident",
        prepare=trident("gigapath", 1536, "gigapath"),
        output_file=TRIDENT_OUT.format("gigapath"),
        # bfloat16 by autocast, as `rescue.gigapath` allows it
        tolerance=0.03,
        stops_with="flash_attn",
    ),
}
