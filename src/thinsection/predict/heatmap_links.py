"""Links from the page of an experiment to the heatmaps that are drawn: `heatmaps.js` beside it.

`train` writes the page before any heatmap exists. So `train` and `heatmap` each write the list of
links from the pictures that lie in the folder of heatmaps: the page never links to a picture that
does not exist.
"""

import json
import os
from pathlib import Path
from urllib.parse import quote

from thinsection.files.atomic import write_text
from thinsection.files.json_text import read_json
from thinsection.weights.origin import slug

LINKS_NAME = "heatmaps.js"
PICTURE_END = ".attention.png"  # the picture of a slide that is linked


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
