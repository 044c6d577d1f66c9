"""Results of small slides, whole and with one damaged slide of each kind, and what uses them."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from tests.support.two_towers import write_clip

import thinsection as ts
from thinsection.config import replace_flat
from thinsection.predict.config import TrainConfig
from thinsection.predict.experiment import train
from thinsection.store.hdf5 import CHECKSUM
from thinsection.testing.synthetic import write_he_slide

GRID = "32px_2mpp"
GOOD = tuple(f"good{number}" for number in range(12))
TRAINED = GOOD[:8]  # on which the model was trained
FITTED = {"folds": 2, "inner_folds": 2, "epochs": 1, "bag_size": 8}


def features_of(out: Path, slide: str) -> Path:
    (folder,) = out.glob(f"{GRID}/features_*")
    return folder / f"{slide}.h5"


def emptied(out: Path, slide: str) -> None:
    features_of(out, slide).write_bytes(b"")


def cut(out: Path, slide: str) -> None:
    path = features_of(out, slide)
    path.write_bytes(path.read_bytes()[:-2000])


def others_values(out: Path, slide: str) -> None:
    """Rows in another order, whose checksum is that of the first order."""
    with h5py.File(features_of(out, slide), "r+") as file:
        file["features"][:] = file["features"][:][::-1]  # type: ignore[index]


def no_coords(out: Path, slide: str) -> None:
    with h5py.File(features_of(out, slide), "r+") as file:
        del file["coords"]


def no_features(out: Path, slide: str) -> None:
    with h5py.File(features_of(out, slide), "r+") as file:
        del file["features"]


def not_finite(out: Path, slide: str) -> None:
    with h5py.File(features_of(out, slide), "r+") as file:
        values = file["features"][:]  # type: ignore[index]
        values[1, 2] = np.nan
        file["features"][:] = values  # type: ignore[index]
        del file["features"].attrs[CHECKSUM]


def removed(out: Path, slide: str) -> None:
    features_of(out, slide).unlink()


def damaged_ledger(out: Path, slide: str) -> None:
    """One byte is another one."""
    path = out / "slides" / slide / "slide.json"
    path.write_bytes(path.read_bytes().replace(b'"stages"', b'"stagez"'))


def damaged_tiles(out: Path, slide: str) -> None:
    path = out / GRID / "tiles" / f"{slide}.h5"
    with h5py.File(path, "r+") as file:
        file["coords"][:] = file["coords"][:][::-1]  # type: ignore[index]


DAMAGES: dict[str, Callable[[Path, str], None]] = {
    "emptied": emptied,
    "cut": cut,
    "others": others_values,
    "nocoords": no_coords,
    "nofeatures": no_features,
    "nan": not_finite,
    "removed": removed,
    "ledger": damaged_ledger,
    "tiles": damaged_tiles,
}


@dataclass(frozen=True)
class Home:
    """What the commands are called with."""

    slides: Path  # good slides, an empty one, a cut one and a text
    cohort: Path  # good slides, and rows that lead nowhere
    whole: Path  # results of all slides, undamaged
    bad: Path  # the same with one damaged slide of each kind
    model: Path
    labels: Path
    prompts: Path
    suite: Path
    new_labels: Path  # of the slides on which the model was not trained


def make_home(top: Path) -> Home:
    """Everything below an empty folder; half a minute."""
    write_clip(top / "small_clip")
    slides = top / "all"
    slides.mkdir()
    names = (*GOOD, *DAMAGES)
    for seed, name in enumerate(names):
        write_he_slide(
            slides / f"{name}.svs", (1100, 800), seed=seed, downsamples=(1, 4)
        )
    whole = top / "whole"
    ts.run(
        [slides],
        out=whole,
        encoders=(str(top / "small_clip"),),
        tile_px=32,
        tile_mpp="2",
        device="cpu",
        precision="fp32",
    )
    labels = top / "labels.csv"
    rows = [f"{name},{'ab'[number % 2]}" for number, name in enumerate(names)]
    labels.write_text("\n".join(["slide_id,label", *rows]) + "\n")
    bad = top / "bad"
    shutil.copytree(whole, bad)
    for name, damage in DAMAGES.items():
        damage(bad, name)
    prompts = top / "words.toml"
    prompts.write_text('[classes]\na = ["tumour"]\nb = ["stroma"]\n')
    suite = top / "suite.toml"
    suite.write_text(
        '[encoders.clip]\nencoder = "clip"\n[[tasks]]\nname = "grade"\nprobes = ["slide"]\n'
        f'data = "{labels}"\nembeddings = "{bad}"\n'
    )
    some_labels = top / "some.csv"
    some_labels.write_text("\n".join(["slide_id,label", *rows[: len(TRAINED)]]) + "\n")
    new_labels = top / "new.csv"
    new_labels.write_text("\n".join(["slide_id,label", *rows[len(TRAINED) :]]) + "\n")
    config = replace_flat(
        TrainConfig(), {"labels": some_labels, "target": ("label",), **FITTED}
    )
    train(whole, out=top / "model", config=config)
    some = top / "some"
    some.mkdir()
    for name in ("good0", "good1"):
        shutil.copy(slides / f"{name}.svs", some)
    data = (slides / "good2.svs").read_bytes()
    (some / "cut.svs").write_bytes(data[: len(data) // 3])
    (some / "empty.svs").write_bytes(b"")
    (some / "text.svs").write_text("no slide")
    cohort = top / "cohort.csv"
    rows = [
        f"{some / 'good0.svs'},good0",
        f"{some / 'good1.svs'},good1",
        f"{some / 'absent.svs'},absent",
        f"{some / 'empty.svs'},empty",
        f"{some / 'text.svs'},text",
    ]
    cohort.write_text("\n".join(["slide_path,slide_id", *rows]) + "\n")
    return Home(
        slides=some,
        cohort=cohort,
        whole=whole,
        bad=bad,
        model=top / "model" / "model.safetensors",
        labels=labels,
        prompts=prompts,
        suite=suite,
        new_labels=new_labels,
    )
