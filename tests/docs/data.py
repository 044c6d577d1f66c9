"""Small data under the names that the pages use: slides, tables, results, a model.

A page finds all of them in its folder, so that it works as pasted from top to bottom.
"""

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from tests.frames.structures import small_structure
from tests.support.shell import thinsection

from thinsection.testing.synthetic import write_he_slide

NUM_SLIDES = 12  # two are the test set; a probe of slides needs five of each class
_NUM_TEXTURES = 4  # a texture takes a second to make
# names of a reader's own files and folders
INPUTS = frozenset(
    re.findall(
        r"\S+",
        """slides new_slides external annotations results probe predicted tested slide.svs
        slide2.svs cohort.csv labels.csv external.csv cases.csv slides.csv tiles.csv own.csv
        other_hospital.csv regions.geojson embeddings.npy model.safetensors structure.cif""",
    )
)


def write_inputs(folder: Path) -> None:
    """Writes what a reader has before the first command: slides and tables."""
    slides = [f"s{number}" for number in range(1, NUM_SLIDES + 1)]
    new = [f"n{number}" for number in range(1, 3)]
    others = [f"e{number}" for number in range(1, 7)]
    for number, slide in enumerate([*slides, *new, *others]):
        home = {"s": "slides", "n": "new_slides", "e": "external"}[slide[0]]
        path = folder / home / f"{slide}.svs"
        path.parent.mkdir(exist_ok=True)
        size = (1100 + 16 * number, 800)
        write_he_slide(path, size, seed=number % _NUM_TEXTURES, downsamples=(1, 4))
    shutil.copy(folder / "slides" / "s1.svs", folder / "slide.svs")
    shutil.copy(folder / "slides" / "s2.svs", folder / "slide2.svs")
    _write_tables(folder, slides)
    _write_rows(folder / "external.csv", [_labels(slide) for slide in others])
    (folder / "annotations").mkdir()
    for slide in slides:
        outlines = _collection([_half(slide, "Tissue", 0), _half(slide, "Tumor", 1)])
        (folder / "annotations" / f"{slide}.geojson").write_text(outlines)
    halves = [
        _half(slide, name, x) for slide in slides for x, name in enumerate(_CLASSES)
    ]
    (folder / "regions.geojson").write_text(_collection(halves))
    cells = [_cell(name, x) for x in (100, 400) for name in _CLASSES]
    (folder / "cells.geojson").write_text(_collection(cells))
    small_structure().make_mmcif_document().write_file(str(folder / "structure.cif"))


_CLASSES = ("stroma", "tumour")


def _labels(slide: str) -> dict[str, object]:
    number = int(slide[1:])
    return {
        "slide_id": slide,
        "case_id": f"c{number}",
        "patient_id": f"p{number}",
        "hospital": ("north", "south")[number // 2 % 2],
        "subtype": ("luad", "lusc")[number % 2],
        "grade": ("low", "high")[number % 2],
    }


def _write_tables(folder: Path, slides: list[str]) -> None:
    labels = [_labels(slide) for slide in slides]
    _write_rows(folder / "labels.csv", labels)
    paths = [
        {"slide_id": s, "slide_path": f"slides/{s}.svs", "patient_id": s}
        for s in slides
    ]
    _write_rows(folder / "cohort.csv", paths)
    named = [
        {
            **row,
            "label": row["subtype"],
            "split": "test" if number >= NUM_SLIDES - 2 else "train",
        }
        for number, row in enumerate(labels)
    ]
    _write_rows(folder / "slides.csv", named)
    times = [
        {"slide_id": slide, "event": number % 2, "time": 10 + 7 * number % 40}
        for number, slide in enumerate(slides)
    ]
    _write_rows(folder / "cases.csv", times)
    rng = np.random.default_rng(0)
    rows = [
        {
            "label": _CLASSES[row % 2],
            "row": row,
            "embeddings": "embeddings.npy",
            "split": ("train", "val", "test")[row // 4 % 3],
            "case_id": f"c{row // 4}",
        }
        for row in range(120)
    ]
    _write_rows(folder / "tiles.csv", rows)
    for row in rows:
        del row["split"]
    _write_rows(folder / "own.csv", rows[:80])
    _write_rows(folder / "other_hospital.csv", rows[80:])
    points = rng.normal(size=(120, 16)).astype(np.float32) + np.arange(120)[:, None] % 2
    np.save(folder / "embeddings.npy", points)


def _write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _half(slide: str, name: str, column: int) -> dict[str, Any]:
    """The left (0) or right (1) half of a slide as a region with a class."""
    x = 550 * column
    corners = [[x, 0], [x + 548, 0], [x + 548, 800], [x, 800], [x, 0]]
    return {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": [corners]},
        "properties": {"classification": {"name": name}, "slide_id": slide},
    }


def _cell(name: str, x: int) -> dict[str, Any]:
    """A square detection as QuPath exports it, in another row for each class."""
    y = 100 + 60 * _CLASSES.index(name)
    corners = [[x, y], [x + 20, y], [x + 20, y + 24], [x, y + 24], [x, y]]
    return {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": [corners]},
        "properties": {"objectType": "detection", "classification": {"name": name}},
    }


def _collection(features: list[dict[str, Any]]) -> str:
    return json.dumps({"type": "FeatureCollection", "features": features})


def write_results(folder: Path) -> None:
    """Writes what the README's commands make: results, and a model trained on them."""
    run("run", "cohort.csv", "--out", "results", "--measures")
    grade = ("--target", "grade", "--out", "results/experiments/grade")
    run("train", "results", "--labels", "labels.csv", *grade, "--epochs", "2")
    model = folder / "results" / "experiments" / "grade" / "model.safetensors"
    shutil.copy(model, folder / "model.safetensors")
    run("plan", "slides/")  # measures this machine once, for all pages


def run(*arguments: str) -> None:
    """Runs a command in the current folder; it must end well."""
    ended = thinsection(*arguments)
    assert ended.returncode == 0, ended.stdout + ended.stderr
