"""Plots for notebooks, `ts.plot`: tissue, tiles, values and embeddings of a results folder.

Slides are drawn by `report.layers` on their stored picture, so that no slide file is opened. Axes
are matplotlib's, in mm. Each function draws on `ax`, or on a new figure, and returns the axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from thinsection.config import nearest
from thinsection.errors import InvalidInputError, importing
from thinsection.pipeline.folder import Results, one_address
from thinsection.report.layers import Layer, Outline, Tiles, Values, colorize, paint
from thinsection.report.picture import open_picture, picture_files, read_mask
from thinsection.store.tiles_h5 import TilesFile
from thinsection.tiles.table import Column

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["embedding", "heatmap", "tiles", "tissue"]
# largest number of names in a legend
_MAX_NAMES = 12
# principal components that UMAP receives
_UMAP_COMPONENTS = 50
_DOT_AREA = 9.0


def __dir__() -> list[str]:
    """Names for the completion of a notebook."""
    return __all__


def tissue(results: Results, slide_id: str, *, ax: Axes | None = None) -> Axes:
    """Draws the slide with its tissue outlined."""
    return _draw(results, slide_id, [], ax)


def tiles(
    results: Results,
    slide_id: str,
    grid: str | None = None,
    *,
    ax: Axes | None = None,
) -> Axes:
    """Draws the slide with its tissue and the tiles of a grid; `grid` as for `results.tiles`."""
    table = results.tiles(slide_id, grid)
    label = f"{len(table.coords_l0):,} tiles"
    layer = Tiles(table.coords_l0, table.size_l0, label)
    return _draw(results, slide_id, [layer], ax)


def heatmap(
    results: Results,
    slide_id: str,
    values: str | npt.NDArray[np.floating],
    grid: str | None = None,
    *,
    colormap: str = Values.colormap,
    ax: Axes | None = None,
) -> Axes:
    """Draws one number per tile as colour over the slide.

    Args:
        results: a results folder.
        slide_id: one of its slides.
        values: a column of the tile table ('tissue_fraction', 'px_focus'), or (N,) numbers.
        grid: as for `results.tiles`.
        colormap: one of `report.layers.COLORMAPS`.
        ax: axes to draw on.

    Raises:
        InvalidInputError: no such column, or the number of values is not that of the tiles.
    """
    table = results.tiles(slide_id, grid)
    if isinstance(values, str):
        label = values
        numbers = _column(table, values)
    else:
        label = "value"
        numbers = np.asarray(values)
    shape = (len(table.coords_l0),)
    if numbers.shape != shape:
        raise InvalidInputError(f"values must be of shape {shape}, got {numbers.shape}")
    layer = Values(table.coords_l0, table.size_l0, numbers, label, colormap)
    return _draw(results, slide_id, [layer], ax)


def embedding(
    results: Results,
    features: str | None = None,
    *,
    color: str = "slide_id",
    method: Literal["pca", "umap"] = "pca",
    max_tiles: int = 20_000,
    ax: Axes | None = None,
) -> Axes:
    """Draws tile embeddings in two dimensions, one dot per tile.

    Args:
        results: a results folder.
        features: as for `results.tile_embeddings`.
        color: 'slide_id', another cohort column ('label', 'patient_id'), or a column
            of the tile table ('qc_focus', 'tissue_fraction', 'px_focus').
        method: 'pca', or 'umap' of the first 50 principal components, seeded.
        max_tiles: largest number of dots; tiles are sampled evenly over each slide.
        ax: axes to draw on.

    Memory:
        12 max_tiles D bytes.

    Raises:
        InvalidInputError: no such column, or fewer than three tiles.
    """
    rows, colors = _sample_tiles(results, features, color, max_tiles)
    if method == "umap":
        with importing("method 'umap' must have umap-learn", "plot"):
            from umap import UMAP
        components = _principal_components(rows, _UMAP_COMPONENTS)
        points = UMAP(random_state=0, n_jobs=1).fit_transform(components)
        axis = "UMAP"
    else:
        points = _principal_components(rows, 2)
        axis = "principal component"
    ax = _axes(ax)
    _scatter(ax, points, colors, color)
    ax.set(xlabel=f"{axis} 1", ylabel=f"{axis} 2", title=f"{len(points):,} tiles")
    return ax


def _principal_components(
    rows: npt.NDArray[np.float32], count: int
) -> npt.NDArray[np.floating]:
    """First principal components of the rows."""
    centred = rows - rows.mean(axis=0)
    _, vectors = np.linalg.eigh(centred.T @ centred)
    # the last vector belongs to the first component
    return np.asarray(centred @ vectors[:, : -1 - count : -1])


def _scatter(
    ax: Axes,
    points: npt.NDArray[np.floating],
    colors: npt.NDArray[np.generic],
    title: str,
) -> None:
    """Draws a dot per tile: numbers with a colour bar, words with a legend."""
    if colors.dtype.kind == "f" and len(np.unique(colors)) == 1:
        # a number that all tiles share needs no scale and is listed like a word
        colors = np.full(len(colors), f"{colors[0]:.3g}")
    if colors.dtype.kind == "f":
        dots = ax.scatter(
            points[:, 0],
            points[:, 1],
            c=colors,
            cmap="viridis",
            s=_DOT_AREA,
            linewidths=0,
        )
        ax.figure.colorbar(dots, ax=ax, label=title)
        return
    names = np.unique(colors)
    for name in names:
        x, y = points[colors == name].T
        ax.scatter(x, y, label=str(name), s=_DOT_AREA, linewidths=0)
    if len(names) <= _MAX_NAMES:
        ax.legend(markerscale=3, title=title)


def _sample_tiles(
    results: Results, features: str | None, color: str, max_tiles: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.generic]]:
    """Embeddings of sampled tiles of each slide, and the word or number for their colour."""
    address = one_address(results.features, features, "features")
    embeddings = {}
    for slide_id, ledger in results.ledgers.items():
        if address in ledger.stages:
            embeddings[slide_id] = results.embedding_rows(slide_id, address)
    total = sum(len(stored) for stored in embeddings.values())
    if total < 3:
        raise InvalidInputError(
            f"results must contain embeddings of at least 3 tiles, got {total}"
        )
    rows = []
    colors = []
    for slide_id, stored in embeddings.items():
        count = int(np.ceil(len(stored) * min(1.0, max_tiles / total)))
        indices = np.linspace(0, len(stored) - 1, count).round().astype(np.int64)
        rows.append(np.asarray(stored[indices], dtype=np.float32))
        facts = results.ledgers[slide_id].slide
        if color in facts:
            colors.append(np.full(count, str(facts[color])))
        else:
            table = results.tiles(slide_id, address.split("/")[0])
            colors.append(_column(table, color)[indices].astype(np.float64))
    return np.concatenate(rows), np.concatenate(colors)


def _column(table: TilesFile, name: str) -> Column:
    """One column of a tile table."""
    if name not in table.columns:
        names = sorted(table.columns)
        raise InvalidInputError(
            f"column must be one of {', '.join(names)}, got {name!r}{nearest(name, names)}"
        )
    return table.columns[name]


def _axes(ax: Axes | None) -> Axes:
    """Given axes, or those of a new figure."""
    with importing("plots must have matplotlib", "plot"):
        from matplotlib import pyplot
    if ax is not None:
        return ax
    new_ax: Axes
    _, new_ax = pyplot.subplots(layout="constrained")
    return new_ax


def _draw(
    results: Results, slide_id: str, over: Sequence[Layer], ax: Axes | None
) -> Axes:
    """Draws the slide with layers, its tissue's outline, a legend and a colour bar."""
    ledger = results.ledger(slide_id)
    ax = _axes(ax)
    picture = open_picture(ledger)
    layers = list(over)
    for mask_path in picture_files(ledger.path.parent)[1:]:
        layers.append(Outline(read_mask(mask_path), "tissue", width=5.0))
    unit = "mm" if picture.slide_mpp else "level-0 pixels"
    mpp_x, mpp_y = picture.slide_mpp or (1000.0, 1000.0)
    width = picture.size_l0[0] * mpp_x / 1000
    height = picture.size_l0[1] * mpp_y / 1000
    ax.imshow(paint(picture, layers), extent=(0, width, height, 0))
    ax.set(title=slide_id, xlabel=unit, ylabel=unit)
    _add_legend(ax, layers)
    return ax


def _add_legend(ax: Axes, layers: Sequence[Layer]) -> None:
    """Adds a patch per layer, or a colour bar if the layer has values."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.patches import Patch

    patches = []
    for layer in layers:
        if isinstance(layer, Values) and layer.only_value:
            (color,) = colorize(np.zeros(1), layer.colormap) / 255
            words = f"{layer.label}: {layer.only_value}"
            patches.append(Patch(facecolor=color, label=words))
        elif isinstance(layer, Values):
            scale = ScalarMappable(Normalize(*layer.shown_limits), layer.colormap)
            ax.figure.colorbar(
                scale, ax=ax, label=layer.label, alpha=layer.opacity, shrink=0.7
            )
        else:
            edge = [value / 255 for value in layer.color]
            patches.append(Patch(edgecolor=edge, facecolor="none", label=layer.label))
    ax.legend(
        handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False
    )
