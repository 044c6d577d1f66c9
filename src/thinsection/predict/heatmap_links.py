"""Folders of heatmaps: their names, the model that drew them, and links from an experiment's page.

`train` writes the page before any heatmap exists. So `train` and `heatmap` each write the list of
links from the pictures that lie in the folder of heatmaps: the page never links to a picture that
does not exist.
"""

import json
import os
from pathlib import Path
from urllib.parse import quote

from thinsection.files.atomic import read_json, write_text
from thinsection.types import counted
from thinsection.weights.origin import slug

LINKS_NAME = "heatmaps.js"
PICTURE_END = ".attention.png"  # the picture of a slide that is linked
SCALE_NAME = "scale.json"  # scale of the colours, and the SHA-256 of the model
DRAWN_SUFFIXES = {".png", ".geojson", ".h5"}


def heatmap_folder(grid: Path, model: str) -> Path:
    """Folder of a model's heatmaps below the folder of a tile grid."""
    return grid / f"heatmap_{slug(model)}"


def write_heatmap_links(experiment: Path, heatmaps: Path) -> None:
    """Writes the list of a folder's pictures, by slide id, as addresses from the experiment.

    Memory: 100 bytes a slide.
    """
    links: dict[str, str] = {}
    for path in sorted(heatmaps.glob(f"*{PICTURE_END}")):
        slide_id = path.name.removesuffix(PICTURE_END)
        links[slide_id] = quote(os.path.relpath(path, experiment))
    write_text(experiment / LINKS_NAME, f"const heatmaps = {json.dumps(links)};\n")


def refresh_heatmap_links(model: Path, heatmaps: Path) -> None:
    """Writes the list again if the model lies in an experiment whose page links to this folder.

    Nothing is written where the model was moved, or is older than such lists.
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
        replaced_sum: that of the file which it has replaced, for a folder that records no model.

    Returns:
        Number of removed files; 0 if this model drew them, or no one knows which one did.
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
    # last, so that a killed process is followed by one that removes the others
    (heatmaps / SCALE_NAME).unlink(missing_ok=True)
    return len(paths)


def stale_words(heatmaps: Path, number: int) -> str:
    """Sentence for the user about removed heatmaps."""
    files = counted(number, "heatmap file")
    return f"removed {files} of another model with this name from {heatmaps}"
