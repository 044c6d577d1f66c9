"""Replacing earlier results: experiments, validations, and the heatmaps of a model.

An earlier result records its inputs and settings. If those of the new result are the same, the
result may be written again; else the user names another folder, or passes `--overwrite`.

Heatmaps of another model with the same name are removed. `train` writes its page before any heatmap
exists. So both `train` and `heatmap` write the list of links, from the pictures that exist at that
moment: the page never links to a missing picture.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from thinsection.errors import ConfigError, InvalidInputError
from thinsection.evaluation.label_values import LabelsConfig
from thinsection.evaluation.labels import Cohort
from thinsection.evaluation.target import Target
from thinsection.files.atomic import parse_json, read_json, write_text
from thinsection.files.tables import path_and_sheet
from thinsection.predict.folds import Study
from thinsection.predict.tested import EXPERIMENT_NAME
from thinsection.store.identity import file_sum
from thinsection.types import Document, counted
from thinsection.weights.origin import slug

REMEDY = 'pass another out="...", or overwrite=True to replace it'
# Settings that are not compared. Two set time and memory. The effect of the others, which is the
# folds, is compared instead.
NEUTRAL = {"checkpoint_s", "memory", "allow_leakage", "splits"}
# sections of `TrainConfig` that are compared; "cross" is cross-validation
SECTIONS = ("head", "fit", "cross")
MAX_SHOWN = 3  # differences that a message names
LINKS_NAME = "heatmaps.js"
PICTURE_END = ".attention.png"  # the picture of a slide that is linked
SCALE_NAME = "scale.json"  # scale of the colours, and the SHA-256 of the model
DRAWN_SUFFIXES = {".png", ".geojson", ".h5"}


def check_experiment(out: Path, study: Study, settings: Document) -> None:
    """Raises InvalidInputError: `out` holds a model with other labels, embeddings or settings.

    Args:
        out: folder of the experiment.
        study: training study: cases, labels and folds of the new training.
        settings: `TrainConfig` of the new training, as a mapping.
    """
    if not (out / "model.safetensors").is_file():
        return
    try:
        earlier_settings = read_json(out / EXPERIMENT_NAME)["settings"]
    except FileNotFoundError:
        return  # the training was killed while it wrote its results
    except (OSError, ValueError, KeyError, TypeError):
        earlier_settings = {}
    if not isinstance(earlier_settings, dict):
        earlier_settings = {}
    changes = _changed_data(out, study) + _changed_settings(earlier_settings, settings)
    if not changes:
        return
    shown = ", ".join(changes[:MAX_SHOWN])
    if len(changes) > MAX_SHOWN:
        shown += f" and {counted(len(changes) - MAX_SHOWN, 'other difference')}"
    raise InvalidInputError(
        f"out must be a new folder or have the same labels and settings, got a model with other "
        f"ones in {str(out)!r} ({shown}); {REMEDY}"
    )


def _changed_data(out: Path, study: Study) -> list[str]:
    """Differences between the data of `study` and of the experiment in `out`, in words."""
    try:
        earlier = Study.load(out)
    except (OSError, ValueError, ConfigError):
        return ["its cohort.json is not readable"]
    old = earlier.cohort
    new = study.cohort
    changes = []
    if _without_class_order(old.target) != _without_class_order(new.target):
        before = f"{', '.join(old.target.columns)} ({old.target.kind})"
        after = f"{', '.join(new.target.columns)} ({new.target.kind})"
        words = f"target {before}, now {after}"
        changes.append(words if before != after else "other classes")
    elif (old.cases, old.slides, old.patients) != (new.cases, new.slides, new.patients):
        changes.append(
            f"{counted(len(old.cases), 'case')}, now {len(new.cases)}"
            if len(old.cases) != len(new.cases)
            else "other cases or slides"
        )
    elif _labels(old) != _labels(new):
        pairs = zip(_labels(old), _labels(new), strict=True)
        number = sum(before != after for before, after in pairs)
        changes.append(f"other labels of {counted(number, 'case')}")
    else:
        if (old.covariate_columns, old.covariates) != (
            new.covariate_columns,
            new.covariates,
        ):
            changes.append("other covariates")
        if earlier.digests != study.digests:
            changes.append("other embeddings")
        if earlier.parts != study.parts:
            changes.append("other folds")
        if _sites_and_subgroups(earlier) != _sites_and_subgroups(study):
            changes.append("other sites or subgroups")
    if old.target.positive_name != new.target.positive_name:
        changes.append(
            f"positive class {old.target.positive_name}, now {new.target.positive_name}"
        )
    # the comparison of targets ignores the order of two classes, so it is compared here
    elif not changes and old.target.names != new.target.names:
        changes.append("another order of the classes")
    return changes


def _without_class_order(target: Target) -> Target:
    """The target with sorted class names and no positive class.

    So a comparison of two binary targets ignores the order of their classes and the positive class.
    """
    if target.kind != "binary":
        return target
    names = tuple(sorted(target.names))
    return replace(target, names=names, positive="", positive_by="")


def _labels(cohort: Cohort) -> list[str] | tuple[tuple[float | None, ...], ...]:
    """Class of each case; the values of each case if the target has no exclusive classes."""
    if not cohort.target.exclusive:
        return cohort.values
    return [cohort.target.names[int(value)] for (value,) in cohort.array]


def _sites_and_subgroups(study: Study) -> tuple[object, ...]:
    """Sites and subgroups of the cases: tables of the page are made of them."""
    cohort = study.cohort
    return cohort.sites, cohort.subgroup_columns, cohort.subgroups


def _changed_settings(earlier: Document, settings: Document) -> list[str]:
    """Settings of training that differ, as 'epochs 5, now 10'."""
    plain = parse_json(json.dumps(settings))
    changes = []
    for section in SECTIONS:
        before = earlier.get(section, {})
        for name, value in plain[section].items():
            if name not in NEUTRAL and before.get(name) != value:
                words = before.get(name, "not recorded")
                changes.append(f"{name} {words}, now {value}")
    return changes


def check_validation(folder: Path, model_sum: str, labels: LabelsConfig) -> None:
    """Raises InvalidInputError: `folder` holds the test of another model, table or target.

    Args:
        folder: OUT/validation_MODEL.
        model_sum: sha256 of the model's file.
        labels: the table and its columns; a missing table is refused later, when it is read.
    """
    path = folder / "validation.json"
    if labels.labels is None:
        return
    table, _ = path_and_sheet(labels.labels)
    if not table.is_file() or not path.is_file():
        return
    changes = []
    try:
        document = read_json(path)
        if document["model"]["sha256"] != model_sum:
            changes.append("another model")
        if document["labels"]["sha256"] != file_sum(table):
            changes.append("other labels")
        if document["target"] != [*labels.columns]:
            changes.append("another target")
    except (OSError, ValueError, KeyError, TypeError):
        changes.append("a validation.json that is not readable")
    if changes:
        raise InvalidInputError(
            "out must be a new folder or have a validation of the same model and labels, got "
            f"{' and '.join(changes)} in {str(folder)!r}; {REMEDY}"
        )


def heatmap_folder(grid: Path, model: str) -> Path:
    """Folder of a model's heatmaps below the folder of a tile grid."""
    return grid / f"heatmap_{slug(model)}"


def write_heatmap_links(experiment: Path, heatmaps: Path) -> None:
    """Writes a relative URL (from the experiment) of each picture in the folder, by slide id.

    Memory: 100 bytes a slide.
    """
    links: dict[str, str] = {}
    for path in sorted(heatmaps.glob(f"*{PICTURE_END}")):
        slide_id = path.name.removesuffix(PICTURE_END)
        links[slide_id] = quote(os.path.relpath(path, experiment))
    write_text(experiment / LINKS_NAME, f"const heatmaps = {json.dumps(links)};\n")


def refresh_heatmap_links(model: Path, heatmaps: Path) -> None:
    """Writes the list again if the model lies in an experiment whose page links to this folder.

    Nothing is written if the model was moved, or was trained by a version without this list.
    """
    experiment = model.absolute().parent
    try:
        linked = read_json(experiment / "experiment.json")["heatmaps"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if not isinstance(linked, str):
        return
    if (experiment / linked).resolve() == heatmaps.resolve():
        write_heatmap_links(experiment, heatmaps)


def remove_stale_heatmaps(
    heatmaps: Path, model_sum: str, *, replaced_sum: str = ""
) -> int:
    """Removes the heatmaps of a folder that another model of the same name drew.

    Args:
        heatmaps: GRID/heatmap_MODEL.
        model_sum: SHA-256 of the model's file.
        replaced_sum: SHA-256 of the model file that was overwritten. It is taken to have drawn the
            heatmaps if the folder does not record which model did.

    Returns:
        Number of removed files; 0 if this model drew them, or if nothing tells which model did.
    """
    try:
        drawn_by = read_json(heatmaps / SCALE_NAME).get("model", "")
    except (OSError, ValueError, AttributeError, RecursionError):
        drawn_by = ""
    drawn_by = drawn_by or replaced_sum
    if not heatmaps.is_dir() or drawn_by in ("", model_sum):
        return 0
    paths = [path for path in heatmaps.iterdir() if path.suffix in DRAWN_SUFFIXES]
    for path in paths:
        path.unlink()
    # removed last: if the process is killed before, this file still names the old model, and the
    # next call removes the rest
    (heatmaps / SCALE_NAME).unlink(missing_ok=True)
    return len(paths)


def stale_words(heatmaps: Path, number: int) -> str:
    """Sentence for the user about removed heatmaps."""
    files = counted(number, "heatmap file")
    return f"removed {files} of another model with this name from {heatmaps}"
