"""Links from the page of an experiment to the heatmaps that are drawn: `heatmaps.js` beside it.

The page is written by `train`, pictures appear later, by `heatmap`: each writes the list anew from
what lies in the folder of the heatmaps, so that the page links to pictures that exist.
"""

import json
import os
from pathlib import Path
from urllib.parse import quote

from thinsection.files.atomic import write_text
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
    links = dict[str, str]()
    for path in sorted(heatmaps.glob(f"*{PICTURE_END}")):
        slide_id = path.name.removesuffix(PICTURE_END)
        links[slide_id] = quote(os.path.relpath(path, experiment))
    write_text(experiment / LINKS_NAME, f"const heatmaps = {json.dumps(links)};\n")


def refresh_heatmap_links(model: Path, heatmaps: Path) -> None:
    """Writes the list anew if a model lies in the experiment whose page links to this folder."""
    experiment = model.absolute().parent
    try:
        text = (experiment / "experiment.json").read_text(encoding="utf-8")
        linked = json.loads(text)["heatmaps"]
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ):  # the model was moved or is older
        return
    if (
        isinstance(linked, str)
        and (experiment / linked).resolve() == heatmaps.resolve()
    ):
        write_heatmap_links(experiment, heatmaps)
