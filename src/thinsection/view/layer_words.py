"""Names of layers and of their groups in plain words. Addresses keep the identifiers."""

import re

from thinsection.report.column_words import column_words
from thinsection.report.values import value_words

# outlines of the checks and of tissue have names of ours; other classes are the user's words
_OWN_OUTLINES = ("tissue", "qc_")
# beginning of the folder's name -> words for it
_FOLDERS = {
    "heatmap_": "Heatmap",
    "zeroshot_": "Zero-shot",
    "features_": "Embeddings",
    "segment_": "Classes",
    "qc_": "Quality control",
    "roi_": "Regions",
}
_TILE_FOLDERS = {
    "tiles": "Tiles, their tissue and checks",
    "measures": "Tiles, measures",
}


def layer_words(group: str, name: str, kind: str) -> str:
    """Name of a layer in words: 'Pen, blue' of 'qc_pen_blue', 'Score, tumor' of a heatmap."""
    if kind == "values":
        folder, _, column = name.rpartition(":")
        if folder and column.startswith("score_"):
            return f"Score, {column.removeprefix('score_')}"
        if column == "attention":
            return _capitalised(value_words(column))
        return _check_words(column)
    if kind == "outlines" and not group.startswith(_OWN_OUTLINES):
        return name
    if kind == "edges":
        return "Graph, " + name.removeprefix("graph_").replace("-", " ")
    if kind in ("colours", "classes", "grid"):
        return _capitalised(name)
    # a check's outline has the name of its column without the prefix
    return _check_words(f"qc_{name}" if name.isidentifier() else name)


def group_words(group: str) -> str:
    """Name of a group of layers in words: 'Heatmap, grade' of '256px_0.5mpp/heatmap_grade'."""
    grid, _, folder = group.rpartition("/")
    if grid and folder in _TILE_FOLDERS:
        return _TILE_FOLDERS[folder]
    for prefix, words in _FOLDERS.items():
        if folder.startswith(prefix):
            return f"{words}, {folder.removeprefix(prefix)}"
    tiles = re.match(r"(\d+)px_([\d.]+)mpp", folder)
    if tiles:
        return f"Tiles, {tiles[1]} px at {tiles[2]} µm/px"
    return _capitalised(folder.replace("_", " "))


def _check_words(name: str) -> str:
    """Name of a check or a column, without its unit."""
    pen = re.fullmatch(r"(?:qc_)?pen_(\w+)", name)
    if pen:
        return f"Pen, {pen[1]}"
    is_identifier = re.fullmatch(r"\w+", name) is not None
    if not is_identifier:
        return name
    return _capitalised(column_words(name).removesuffix(", fraction"))


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]
