"""Plots for notebooks, `ts.plot`: tissue, tiles, values and embeddings.

They take a results folder, whose stored pictures they draw on, or an opened slide with its tissue
or tiles. Axes are matplotlib's, in mm. Each function draws on `ax`, or on a new figure, and returns
the axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.extras import importing, require_packages
from thinsection.qc.own_tissue import AnyTissue, as_tissue
from thinsection.report.draw import legend_colors
from thinsection.report.layers import Classes, Layer, Outline, Tiles, Values, paint
from thinsection.report.tile_layers import ClassColors, TileValues
from thinsection.report.values import (
    COLORMAP_OF_KIND,
    Limits,
    ValueKind,
)
from thinsection.results.folder import Results
from thinsection.results.scene import (
    Scene,
    as_results,
    column_of,
    scene_of,
    tiles_of,
    values_of_tiles,
)
from thinsection.slide import Slide
from thinsection.store.tiles_h5 import TilesFile
from thinsection.tiles import TileTable
from thinsection.tiles.categories import CLASS_COLORS
from thinsection.tiles.grid import mask_and_frame

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


def tissue(
    source: Results | Slide, shown: str | AnyTissue, *, ax: Axes | None = None
) -> Axes:
    """Draws a slide with its tissue outlined.

    Args:
        source: a results folder, or an opened slide.
        shown: id of one of the folder's slides; of an opened slide its tissue, as for `tile_grid`.
        ax: axes to draw on.
    """
    scene = scene_of(source, shown)
    if isinstance(source, Slide):
        mask, _ = mask_and_frame(as_tissue(source, shown))
        scene = replace(scene, masks=(mask,))
    return _draw(scene, [], ax)


def tiles(
    source: Results | Slide,
    shown: str | TileTable | TilesFile,
    grid: str | None = None,
    *,
    ax: Axes | None = None,
) -> Axes:
    """Draws a slide with the tiles of a grid, and with its tissue if it is known.

    Args:
        source: a results folder, or an opened slide.
        shown: id of one of the folder's slides; of an opened slide its tiles, from `tile_grid` or
            `results.tiles`.
        grid: as for `results.tiles`.
        ax: axes to draw on.
    """
    if isinstance(source, Results):
        grid = source.choose_grid(grid)
    scene = scene_of(source, shown, grid)
    drawn = tiles_of(source, shown, grid)
    label = f"{len(drawn.coords_l0):,} tiles"
    return _draw(scene, [Tiles(drawn.coords_l0, drawn.size_l0, label)], ax)


def heatmap(
    source: Results | Slide,
    shown: str | TileTable | TilesFile,
    values: str | TileValues,
    grid: str | None = None,
    *,
    kind: ValueKind | None = None,
    limits: Limits | None = None,
    colors: ClassColors | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draws a number or a category per tile as colour over the slide.

    `ts.write_heatmap` writes the same picture to a file.

    Args:
        source: a results folder, or an opened slide.
        shown: id of one of the folder's slides; of an opened slide its tiles.
        values: a column of the tile table ('tissue_fraction', 'px_focus'), or (N,) numbers, words
            or a pandas Categorical.
        grid: as for `results.tiles`.
        kind: of numbers: 'signed' (blue against, red for, 0 is nothing), 'amount' (from 0) or
            'measure' (any range); None decides by the column and the values.
        limits: of numbers: values of the first and last colour; None takes those of the values.
        colors: of categories: a colour by name, such as {"tumour": "#d55e00"}.
        ax: axes to draw on.

    Raises:
        InvalidInputError: no such column, or the number of values is not that of the tiles.
    """
    if isinstance(source, Results):
        grid = source.choose_grid(grid)
    shown_values = values_of_tiles(
        source, shown, values, grid, kind=kind, limits=limits, colors=colors
    )
    return _draw(scene_of(source, shown, grid), [shown_values.layer], ax)


def embedding(
    source: Results | npt.NDArray[np.floating],
    features: str | None = None,
    *,
    color: str | npt.NDArray[np.generic] = "slide_id",
    method: Literal["pca", "umap"] = "pca",
    max_tiles: int = 20_000,
    ax: Axes | None = None,
) -> Axes:
    """Draws tile embeddings in two dimensions, one dot per tile.

    Args:
        source: a results folder, or embeddings (N, D).
        features: as for `results.tile_embeddings`.
        color: 'slide_id', another cohort column ('label', 'patient_id'), or a column
            of the tile table ('qc_focus', 'tissue_fraction', 'px_focus', or one of yours). For
            embeddings (N, D), a word or number for each of them, (N,).
        method: 'pca', or 'umap' of the first 50 principal components, seeded.
        max_tiles: largest number of dots; tiles are sampled evenly over each slide.
        ax: axes to draw on.

    Memory:
        12 max_tiles D bytes.

    Raises:
        InvalidInputError: no such column, or fewer than three tiles.
    """
    title = "color"
    if method == "umap":
        require_packages("method 'umap'", "umap")
    color_of: dict[str, str] = {}  # colours of categories, by name
    if isinstance(source, np.ndarray):
        rows, colors = _sample_rows(source, color, max_tiles)
    else:
        if not isinstance(color, str):
            raise InvalidInputError(
                "color must be the name of a column for a results folder, got "
                f"{type(color).__name__}; pass embeddings (N, D) with it"
            )
        title = color
        rows, colors, color_of = _sample_tiles(
            as_results(source), features, title, max_tiles
        )
    if method == "umap":
        with importing("method 'umap'", "umap"):
            from umap import UMAP
        components = _principal_components(rows, _UMAP_COMPONENTS)
        points = UMAP(random_state=0, n_jobs=1).fit_transform(components)
        axis = "UMAP"
    else:
        points = _principal_components(rows, 2)
        axis = "principal component"
    ax = _axes(ax)
    _scatter(ax, points, colors, title, color_of)
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
    color_of: Mapping[str, str],
) -> None:
    """Draws a dot per tile: numbers with a colour bar, words with a legend.

    `color_of` has the colours of words that have their own.
    """
    if colors.dtype.kind == "f" and len(np.unique(colors)) == 1:
        # a number that all tiles share needs no scale and is listed like a word
        colors = np.full(len(colors), f"{colors[0]:.3g}")
    if colors.dtype.kind == "f":
        dots = ax.scatter(
            points[:, 0],
            points[:, 1],
            c=colors,
            cmap=COLORMAP_OF_KIND["measure"],
            s=_DOT_AREA,
            linewidths=0,
        )
        ax.figure.colorbar(dots, ax=ax, label=title)
        return
    names = np.unique(colors)
    for number, name in enumerate(names):
        x, y = points[colors == name].T
        color = CLASS_COLORS[number % len(CLASS_COLORS)]
        color = color_of.get(str(name), color)
        ax.scatter(x, y, label=str(name), s=_DOT_AREA, linewidths=0, color=color)
    if len(names) <= _MAX_NAMES:
        ax.legend(markerscale=3, title=title)


def _sample_rows(
    embeddings: npt.NDArray[np.floating], color: object, max_tiles: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.generic]]:
    """Evenly sampled rows of embeddings, with their words or numbers."""
    if embeddings.ndim != 2 or len(embeddings) < 3:
        raise InvalidInputError(
            f"embeddings must be (N, D) with N >= 3, got {embeddings.shape}"
        )
    colors = np.full(len(embeddings), "tiles") if isinstance(color, str) else color
    colors = np.asarray(colors)
    if colors.shape != (len(embeddings),):
        raise InvalidInputError(
            f"color must be of shape ({len(embeddings)},), got {colors.shape}"
        )
    if colors.dtype.kind not in "fiu":
        colors = colors.astype(str)
    elif colors.dtype.kind != "f":
        colors = colors.astype(np.float64)
    count = min(len(embeddings), max_tiles)
    places = np.linspace(0, len(embeddings) - 1, count).round().astype(np.int64)
    return np.asarray(embeddings[places], dtype=np.float32), colors[places]


def _sample_tiles(
    results: Results, features: str | None, color: str, max_tiles: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.generic], dict[str, str]]:
    """Embeddings of sampled tiles of each slide, the word or number for their colour, and colours.

    The colours are those of the words, if the column has categories.
    """
    address = results.choose_features(features)
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
    colors: list[npt.NDArray[np.generic]] = []
    color_of: dict[str, str] = {}
    for slide_id, stored in embeddings.items():
        count = int(np.ceil(len(stored) * min(1.0, max_tiles / total)))
        indices = np.linspace(0, len(stored) - 1, count).round().astype(np.int64)
        rows.append(np.asarray(stored[indices], dtype=np.float32))
        facts = results.ledgers[slide_id].slide
        if color in facts:
            colors.append(np.full(count, str(facts[color])))
        else:
            table = results.tiles(slide_id, address.split("/")[0])
            values = column_of(table.columns, color)[indices]
            if color in table.categories:
                words = table.categories[color].labels(values)
                colors.append(np.where(words == "", "none", words))
                color_of = table.categories[color].color_by_name | color_of
            else:
                colors.append(values.astype(np.float64))
    return np.concatenate(rows), np.concatenate(colors), color_of


def _axes(ax: Axes | None) -> Axes:
    """Given axes, or those of a new figure."""
    with importing("plots", "matplotlib"):
        from matplotlib import pyplot
    if ax is not None:
        return ax
    new_ax: Axes
    _, new_ax = pyplot.subplots(layout="constrained")
    return new_ax


def _draw(scene: Scene, over: Sequence[Layer], ax: Axes | None) -> Axes:
    """Draws the slide with layers, its tissue's outline, a legend and a colour bar."""
    ax = _axes(ax)
    picture = scene.picture
    layers = list(over)
    for mask in scene.masks:
        layers.append(Outline(mask, "tissue", width=5.0))
    unit = "mm" if picture.slide_mpp else "level-0 pixels"
    mpp_x, mpp_y = picture.slide_mpp or (1000.0, 1000.0)
    width = picture.size_l0[0] * mpp_x / 1000
    height = picture.size_l0[1] * mpp_y / 1000
    ax.imshow(paint(picture, layers), extent=(0, width, height, 0))
    ax.set(title=scene.title, xlabel=unit, ylabel=unit)
    _add_legend(ax, layers)
    return ax


def _add_legend(ax: Axes, layers: Sequence[Layer]) -> None:
    """Adds a patch per layer, or a colour bar if the layer has values."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.patches import Patch

    patches = []
    has_bar = False
    for layer in layers:
        if isinstance(layer, Classes):
            for swatch in layer.swatches:
                color = [value / 255 for value in swatch.color]
                patches.append(
                    Patch(facecolor=color, alpha=swatch.opacity, label=swatch.label)
                )
        elif isinstance(layer, Values) and layer.only_value:
            color = [value / 255 for value in legend_colors(layer, 1)[0]]
            words = f"{layer.label}: {layer.only_value}"
            patches.append(Patch(facecolor=color, label=words))
        elif isinstance(layer, Values):
            shown = np.array(legend_colors(layer, 256)) / 255
            scale = ScalarMappable(
                Normalize(*layer.shown_limits), ListedColormap(shown)
            )
            ax.figure.colorbar(scale, ax=ax, label=layer.label, shrink=0.7)
            has_bar = True
        else:
            edge = [value / 255 for value in layer.color]
            patches.append(Patch(edgecolor=edge, facecolor="none", label=layer.label))
    # in a small figure a legend beside the axes would cover the colour bar
    corner = "lower left" if has_bar else "upper left"
    ax.legend(handles=patches, loc=corner, bbox_to_anchor=(1.0, 1.0), frameon=False)
