"""Layers over a slide: outlines, tiles with their values, colours of embeddings, graphs."""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinsection.cells.table import PREFIX
from thinsection.errors import StoreError, rewording
from thinsection.files.atomic import read_json
from thinsection.report.stored import (
    NOT_JUDGED,
    MaskOutline,
    outline_files,
    outlines_of_masks,
)
from thinsection.report.values import (
    COLORMAP_OF_KIND,
    column_words,
    map_colors,
    shown_values,
    value_kind,
    value_words,
)
from thinsection.results.folder import Results
from thinsection.slide.annotation_formats import class_name_of, features_of
from thinsection.store.geojson import Feature
from thinsection.store.hdf5 import open_h5, read_values
from thinsection.store.ledger import SLIDES
from thinsection.store.tile_tables import OWN_COLUMN, TILES, EmbeddingRows
from thinsection.store.tiles_h5 import TilesFile, read_tiles
from thinsection.tiles.categories import CLASS_COLORS, Categories, complete_colors
from thinsection.tiles.table import Column
from thinsection.types import Json
from thinsection.view.cells import count_in_squares, outlines_in_square

# rows for fitting the components, and rows that are projected at a time
_FIT_ROWS = 8192
_BLOCK_ROWS = 4096
# components for clustering; the first three become colours
_COMPONENTS = 32

Scores = npt.NDArray[np.float32]
# outlines of the checks and of tissue have names of ours; other classes are the user's words
_OWN_OUTLINES = ("tissue", "qc_")
# group of the columns that the caller has stored
OWN_COLUMNS = "columns"
# beginning of the folder's name -> words for it
_FOLDERS = {
    "heatmap_": "Heatmap",
    "zeroshot_": "Zero-shot",
    "features_": "Embeddings",
    "segment_": "Classes",
    "qc_": "Quality control",
    "roi_": "Regions",
    PREFIX: "Cells",
}
_TILE_FOLDERS = {
    "tiles": "Tiles, their tissue and checks",
    "measures": "Tiles, measures",
    OWN_COLUMNS: "Your columns",
}
# kinds of layers whose tiles have values, and the data type in the response
_DTYPES = {
    "grid": "u1",
    "values": "<f4",
    "colours": "u1",
    "classes": "u1",
    "categories": "<u2",
    "edges": "<i4",
}
# number of a tile without a category
NO_CATEGORY = 65535
# colour of outlines if the class has none
_GRAY = (90, 90, 90)
# kinds of layers that show a column of a tile table
_COLUMN_KINDS = ("values", "categories")
# reads the values of a file's tiles
_Values = Callable[[TilesFile], npt.NDArray[np.generic]]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer; `read` returns the data to draw.

    For 'outlines' this is JSON, a list of GeoJSON geometries. All other kinds are little-endian: 5
    uint32 (N, tile width and height, stride x and y in level-0 px), int32 (N, 2) corners, then of
    'values' float32 (N,), 'colours' uint8 (N, 3), 'classes' uint8 (N,), 'edges' int32 (E, 2) rows,
    'categories' uint16 (N,), places in `names`, 65535 for none, of 'cells' float32 (N,) numbers of
    cells. `read_part` returns the outlines of the cells in a square, see `view.cells`.
    """

    group: str
    name: str
    kind: str
    color: str = ""
    # of 'values' and 'classes': kind of the values, their unit in words, and the colours
    scale: str = ""
    colors: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  # of 'categories' and 'cells', a name for each colour
    map: tuple[str, ...] = ()  # of 'cells': colours of their density
    is_empty: bool = False  # it shows nothing on this slide
    is_shown_only: bool = False  # outlines of a check that leaves the tissue
    read: Callable[[], bytes]
    # of 'cells': takes column and row of a square
    read_part: Callable[[int, int], bytes] | None = None

    @property
    def words(self) -> str:
        """Name in plain words."""
        words = layer_words(self.group, self.name, self.kind)
        return f"{words}, only shown" if self.is_shown_only else words

    @property
    def key(self) -> str:
        """Name in an address of the viewer; a column's is unique in its grid."""
        is_column = self.kind in _COLUMN_KINDS
        group = self.group.partition("/")[0] if is_column else self.group
        return f"{group}/{self.name}"


def layers_of(
    results: Results, slide_id: str, clusters: int, budget_bytes: int
) -> Iterator[Layer]:
    """Layers of a slide in a results folder.

    Memory:
        The text of outlines from files, a tissue mask, and a column of a slide's tiles, 4 bytes
        per tile.
    """
    ledger = results.ledgers[slide_id]
    stages = ledger.stages
    for address in stages:
        group = address.removeprefix(f"{SLIDES}/")
        files = outline_files(ledger, address)
        for path in files:
            yield from outline_layers(path, group)
        if not files:
            for outline in outlines_of_masks(ledger, address):
                yield _mask_layer(group, outline)
    yield from _cell_layers(results, slide_id)
    for address in stages:
        if address.endswith(f"/{TILES}"):
            grid = address.partition("/")[0]
            yield from _grid_layers(results, slide_id, grid)
    for address in results.features:
        if address in stages:
            path = results.file(slide_id, address)
            yield from _embedding_layers(address, path, clusters, budget_bytes)


def _cell_layers(results: Results, slide_id: str) -> Iterator[Layer]:
    """Layer for each table of cells of a slide; only its facts are read now."""
    for name in results.cell_names(slide_id):
        table = results.cells(slide_id, name)
        yield Layer(
            group=f"{PREFIX}{name}",
            name="outlines",
            kind="cells",
            colors=complete_colors(table.classes, {}),
            names=table.classes,
            map=map_colors(COLORMAP_OF_KIND["amount"]),
            read=partial(count_in_squares, table),
            read_part=partial(outlines_in_square, table),
        )


def _grid_layers(results: Results, slide_id: str, grid: str) -> Iterator[Layer]:
    """Layers for the tiles of a grid, their graphs, and the columns of their tables."""
    tables = results.tile_tables(slide_id, grid)
    tiles_path = tables[0].path
    yield _tile_layer(grid, "tiles", "grid", tiles_path, lambda tiles: np.empty(0))
    for address in results.ledgers[slide_id].stages:
        if address.startswith(f"{grid}/graph_"):
            graph_path = results.file(slide_id, address)
            name = address.partition("/")[2]
            yield _tile_layer(grid, name, "edges", tiles_path, _edges_of(graph_path))
    for table in tables:
        empty: set[str] = set()
        categories: dict[str, Categories] = {}
        # a damaged table is reported when one of its layers is drawn
        with contextlib.suppress(StoreError):
            categories = table.categories()
            empty = table.empty_columns()
        group = table.address
        if group.startswith(f"{grid}/{OWN_COLUMN}"):
            group = f"{grid}/{OWN_COLUMNS}"
        for column in table.columns:
            label = table.label(column)
            if column in categories:
                layer = _tile_layer(
                    group, label, "categories", table.path, _codes_of(column)
                )
                yield replace(
                    layer,
                    is_empty=column in empty,
                    colors=categories[column].colors,
                    names=categories[column].names,
                )
                continue
            layer = _tile_layer(group, label, "values", table.path, _column_of(column))
            kind = value_kind(column)
            yield replace(
                layer,
                is_empty=column in empty,
                scale=kind,
                colors=map_colors(COLORMAP_OF_KIND[kind]),
            )


def _embedding_layers(
    address: str, path: Path, clusters: int, budget_bytes: int
) -> Iterator[Layer]:
    """Layers for the principal components and the clusters of a slide's embeddings."""
    rows = EmbeddingRows(path)

    def colours(tiles: TilesFile) -> npt.NDArray[np.float64]:
        return component_colours(component_scores(rows, budget_bytes))

    def classes(tiles: TilesFile) -> npt.NDArray[np.int64]:
        return tile_clusters(component_scores(rows, budget_bytes), clusters)

    yield _tile_layer(address, "principal components", "colours", path, colours)
    layer = _tile_layer(address, f"{clusters} clusters", "classes", path, classes)
    yield replace(layer, colors=CLASS_COLORS)


def _tile_layer(group: str, name: str, kind: str, path: Path, values: _Values) -> Layer:
    """Layer with the tiles of a file; nothing is read before it is drawn."""

    def read() -> bytes:
        tiles = read_tiles(path, embeddings=False)
        stride = np.ravel(tiles.attributes.get("stride_l0", tiles.size_l0))
        head = np.array([len(tiles.coords_l0), *tiles.size_l0, *stride], dtype="<u4")
        corners = tiles.coords_l0.astype("<i4")
        drawn = values(tiles).astype(_DTYPES[kind])
        return head.tobytes() + corners.tobytes() + drawn.tobytes()

    return Layer(group=group, name=name, kind=kind, read=read)


def _column_of(name: str) -> _Values:
    def column(tiles: TilesFile) -> Column:
        return np.asarray(shown_values(name, tiles.columns[name]))

    return column


def _codes_of(name: str) -> _Values:
    """Places of the tiles' categories; -1 becomes 65535."""

    def codes(tiles: TilesFile) -> Column:
        values = tiles.columns[name]
        return np.where(values < 0, NO_CATEGORY, values)

    return codes


def _edges_of(path: Path) -> _Values:
    """Reads (E, 2) rows of the tiles, each pair once; none for a slide without tiles."""

    def edges(tiles: TilesFile) -> npt.NDArray[np.generic]:
        with open_h5(path) as file:
            if not len(file):
                return np.empty((0, 2))
            pairs = read_values(file, "edge_index", path)
        return np.asarray(pairs[:, pairs[0] < pairs[1]].T)

    return edges


def outline_layers(path: Path, group: str) -> Iterator[Layer]:
    """Layer for each class of a GeoJSON file.

    Raises:
        StoreError: the file is not readable.
    """
    damages = (OSError, ValueError, AttributeError, KeyError, TypeError)
    with rewording("outlines must be GeoJSON", path, *damages, error=StoreError):
        features = list(features_of(read_json(path), path))
        layers = list(_feature_layers(features, group))
    yield from layers


def _mask_layer(group: str, outline: MaskOutline) -> Layer:
    """Layer for a stored mask; its outline is made when it is drawn."""

    def read() -> bytes:
        shapes = [feature["geometry"] for feature in outline.features()]
        return json.dumps(shapes).encode()

    return Layer(
        group=group,
        name=outline.name,
        kind="outlines",
        color=_css_color(*outline.color),
        is_shown_only=outline.is_shown_only,
        read=read,
    )


def _css_color(red: float, green: float, blue: float) -> str:
    return f"#{int(red) & 255:02x}{int(green) & 255:02x}{int(blue) & 255:02x}"


def _feature_layers(features: Sequence[Feature], group: str) -> Iterator[Layer]:
    """Layer for each class of annotations."""
    colors: dict[str, str] = {}
    shapes: dict[str, list[Json]] = {}
    for feature in features:
        geometry: Json = feature
        if feature.get("type") == "Feature" or "geometry" in feature:
            geometry = feature.get("geometry")
        if not geometry:  # RFC 7946, 3.2: an object that has no place
            continue
        properties = feature.get("properties") or {}
        kind = properties.get("classification") or {}
        name = class_name_of(properties) or str(properties.get("name") or "annotation")
        color = kind.get("color") if isinstance(kind, dict) else None
        red, green, blue = color or properties.get("color") or _GRAY
        colors.setdefault(name, _css_color(red, green, blue))
        shapes.setdefault(name, []).append(geometry)
    for name, color in colors.items():
        corners = [
            shape.get("coordinates") or shape.get("geometries")
            for shape in shapes[name]
        ]
        # the text takes less memory than the geometries
        text = json.dumps(shapes[name]).encode()
        yield Layer(
            group=group,
            name=name,
            kind="outlines",
            color=color,
            is_empty=not any(corners),
            read=partial(bytes, text),
        )


def component_scores(rows: EmbeddingRows, budget_bytes: int) -> Scores:
    """First principal components (N, up to 32) of embeddings, with a fixed sign for each one.

    They are fitted to up to 8192 rows, spread evenly.

    Memory:
        12 D bytes per fitted row (a small budget lowers their number), 8 D² for their products,
        16 KiB D per block, 128 N.
    """
    num_rows, dim = rows.shape
    affordable = max(256, budget_bytes // (12 * dim))
    num_fit = int(min(_FIT_ROWS, num_rows, affordable))
    fit_indices = np.linspace(0, num_rows - 1, num_fit).astype(np.int64)
    sample = rows[fit_indices].astype(np.float32)
    mean = sample.mean(axis=0) if num_fit else np.zeros(dim, dtype=np.float32)
    sample -= mean
    _, vectors = np.linalg.eigh(sample.T @ sample)
    axes = vectors[:, ::-1][:, :_COMPONENTS].astype(np.float32)
    largest = np.abs(axes).argmax(axis=0)
    axes *= np.sign(axes[largest, np.arange(axes.shape[1])])
    scores = [np.empty((0, axes.shape[1]), dtype=np.float32)]
    for start in range(0, num_rows, _BLOCK_ROWS):
        block = rows[start : start + _BLOCK_ROWS].astype(np.float32)
        scores.append((block - mean) @ axes)
    return np.concatenate(scores)


def component_colours(scores: Scores) -> npt.NDArray[np.float64]:
    """First three components as red, green and blue; percentiles 1 and 99 become 0 and 255."""
    first = np.zeros((len(scores), 3), dtype=np.float32)
    first[:, : scores.shape[1]] = scores[:, :3]
    low, high = np.percentile(first, (1, 99), axis=0) if len(first) else (0, 1)
    span = np.where(high > low, high - low, 1.0)
    return np.asarray(np.clip((first - low) / span * 255, 0, 255))


def tile_clusters(scores: Scores, count: int) -> npt.NDArray[np.int64]:
    """Clusters the scores by seeded k-means; the largest cluster is 0."""
    from scipy.cluster.vq import kmeans, vq  # slow to import

    if len(scores) <= count:
        return np.arange(len(scores))
    centres, _ = kmeans(scores, count, iter=5, seed=0)
    labels, _ = vq(scores, centres)
    by_size = np.argsort(-np.bincount(labels), kind="stable")
    return np.asarray(np.argsort(by_size)[labels])


def layer_words(group: str, name: str, kind: str) -> str:
    """Name of a layer in words: 'Out of focus' of 'qc_focus', 'Score, tumor' of a heatmap."""
    if kind == "categories":
        return name
    if kind == "values":
        folder, _, column = name.rpartition(":")
        if folder and column.startswith("score_"):
            return f"Score, {column.removeprefix('score_')}"
        if column == "attention":
            return _capitalised(value_words(column))
        if folder.startswith(PREFIX):
            return _capitalised(column_words(column))
        return _check_words(column)
    if kind == "outlines" and not group.startswith(_OWN_OUTLINES):
        return name
    if kind == "edges":
        return "Graph, " + name.removeprefix("graph_").replace("-", " ")
    if kind in ("colours", "classes", "grid", "cells"):
        return _capitalised(name)
    if name.endswith(NOT_JUDGED):
        return _capitalised(name.replace("_", " "))
    # a check's outline has the name of its column without the prefix
    return _check_words(f"qc_{name}" if name.isidentifier() else name)


def group_words(group: str) -> str:
    """Name of a group of layers in words: 'Heatmap, grade' of '256px_0.5mpp/heatmap_grade'."""
    grid, _, folder = group.rpartition("/")
    if grid and folder in _TILE_FOLDERS:
        return _TILE_FOLDERS[folder]
    if grid and folder.startswith(PREFIX):
        return f"Tiles, cells of {folder.removeprefix(PREFIX)}"
    for prefix, words in _FOLDERS.items():
        if folder.startswith(prefix):
            return f"{words}, {folder.removeprefix(prefix)}"
    tiles = re.match(r"(\d+)px_([\d.]+)mpp", folder)
    if tiles:
        return f"Tiles, {tiles[1]} px at {tiles[2]} µm/px"
    return _capitalised(folder.replace("_", " "))


def _check_words(name: str) -> str:
    """Name of a check or a column, without its unit."""
    is_identifier = re.fullmatch(r"\w+", name) is not None
    if not is_identifier:
        return name
    return _capitalised(column_words(name).removesuffix(", fraction"))


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]
