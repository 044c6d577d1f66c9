"""Plots for notebooks, `ts.plot`: tissue, tiles, values and embeddings of a results folder.

Slides are drawn by `report.draw` on their stored picture, so that no slide file is opened; axes are
matplotlib's, in mm. Each function draws on `ax`, or on a new figure, and gives the axes back.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from thinsection.config import nearest
from thinsection.errors import importing, require
from thinsection.pipeline.folder import Results, one_address
from thinsection.report import draw
from thinsection.store.tiles_h5 import TilesFile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_NAMES = 12  # that a legend lists
_UMAP_COMPONENTS = 50  # principal components that UMAP sees


def tissue(results: Results, slide_id: str, *, ax: "Axes | None" = None) -> "Axes":
    """The slide with its tissue outlined."""
    return _draw(results, slide_id, [], ax)


def tiles(
    results: Results,
    slide_id: str,
    grid: str | None = None,
    *,
    ax: "Axes | None" = None,
) -> "Axes":
    """The slide with its tissue and the tiles of a grid; `grid` as of `results.tiles`."""
    table = results.tiles(slide_id, grid)
    layer = draw.Tiles(
        table.coords_l0, table.size_l0, f"{len(table.coords_l0):,} tiles"
    )
    return _draw(results, slide_id, [layer], ax)


def heatmap(
    results: Results,
    slide_id: str,
    values: str | npt.NDArray[np.floating],
    grid: str | None = None,
    *,
    colormap: str = draw.Values.colormap,
    ax: "Axes | None" = None,
) -> "Axes":
    """A number per tile as colour over the slide.

    `values` is a column of the tile table ('tissue_fraction', 'px_focus'), or (N,) numbers; `grid`
    as of `results.tiles`; `colormap` of `report.draw.COLORMAPS`.

    Raises InvalidInputError: no such column, or another number of values than tiles.
    """
    table = results.tiles(slide_id, grid)
    numbers = _column(table, values) if isinstance(values, str) else np.asarray(values)
    shape = (len(table.coords_l0),)
    require(
        numbers.shape == shape, f"values must be of shape {shape}", str(numbers.shape)
    )
    label = values if isinstance(values, str) else "value"
    layer = draw.Values(table.coords_l0, table.size_l0, numbers, label, colormap)
    return _draw(results, slide_id, [layer], ax)


def embedding(
    results: Results,
    features: str | None = None,
    *,
    color: str = "slide_id",
    method: Literal["pca", "umap"] = "pca",
    max_tiles: int = 20_000,
    ax: "Axes | None" = None,
) -> "Axes":
    """Tile embeddings in two dimensions, a dot a tile.

    Args:
        features: as of `results.tile_embeddings`.
        color: 'slide_id', what else the cohort says of a slide ('label', 'patient_id'), or a column
            of the tile table ('qc_focus', 'tissue_fraction', 'px_focus').
        method: 'pca', or 'umap' of the first 50 principal components, seeded.
        max_tiles: as many are taken, evenly over the tiles of each slide.

    Memory: 12 max_tiles D bytes.

    Raises InvalidInputError: no such column, or fewer than three tiles.
    """
    rows, colors = _sampled(results, features, color, max_tiles)
    centred = rows - rows.mean(axis=0)
    _, vectors = np.linalg.eigh(
        centred.T @ centred
    )  # the last one is the first component
    points = (
        centred @ vectors[:, : -1 - (_UMAP_COMPONENTS if method == "umap" else 2) : -1]
    )
    if method == "umap":
        with importing("method 'umap' must have umap-learn", "plot"):
            from umap import UMAP
        points = UMAP(random_state=0, n_jobs=1).fit_transform(points)
    ax = _axes(ax)
    dots: dict[str, Any] = {"s": 9.0, "linewidths": 0}
    if colors.dtype.kind == "f" and len(np.unique(colors)) == 1:
        # a number that all tiles share has no scale; it is named like a word
        colors = np.full(len(colors), f"{colors[0]:.3g}")
    if colors.dtype.kind == "f":
        drawn = ax.scatter(points[:, 0], points[:, 1], c=colors, cmap="viridis", **dots)
        ax.figure.colorbar(drawn, ax=ax, label=color)
    else:
        for name in (names := np.unique(colors)):
            ax.scatter(*points[colors == name].T, label=str(name), **dots)
        if len(names) <= _MOST_NAMES:
            ax.legend(markerscale=3, title=color)
    axis = "UMAP" if method == "umap" else "principal component"
    ax.set(xlabel=f"{axis} 1", ylabel=f"{axis} 2", title=f"{len(points):,} tiles")
    return ax


def _sampled(
    results: Results, features: str | None, color: str, max_tiles: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[Any]]:
    """Some embeddings of each slide, and what colours each."""
    address, said = one_address(results.features, features, "features"), results.ledgers
    known = [slide_id for slide_id, ledger in said.items() if address in ledger.stages]
    sets = {slide_id: results.embedding_rows(slide_id, address) for slide_id in known}
    total = sum(map(len, sets.values()))
    require(total > 2, "results must hold embeddings of 3 tiles or more", str(total))
    drawn, colors = [], []
    for slide_id, stored in sets.items():
        count = int(np.ceil(len(stored) * min(1.0, max_tiles / total)))
        picked = np.linspace(0, len(stored) - 1, count).round().astype(np.int64)
        drawn.append(np.asarray(stored[picked], dtype=np.float32))
        if color in said[slide_id].slide:
            colors.append(np.full(count, str(said[slide_id].slide[color])))
        else:
            table = results.tiles(slide_id, address.split("/")[0])
            colors.append(_column(table, color)[picked].astype(np.float64))
    return np.concatenate(drawn), np.concatenate(colors)


def _column(table: TilesFile, name: str) -> npt.NDArray[Any]:
    known = sorted(table.columns)
    got = f"{name!r}{nearest(name, known)}"
    require(name in known, f"column must be one of {', '.join(known)}", got)
    return table.columns[name]


def _axes(ax: "Axes | None") -> "Axes":
    with importing("plots must have matplotlib", "plot"):
        from matplotlib import pyplot
    return pyplot.subplots(layout="constrained")[1] if ax is None else ax


def _draw(
    results: Results, slide_id: str, over: Sequence[draw.Layer], ax: "Axes | None"
) -> "Axes":
    """The slide with layers and its tissue's outline, a legend and a colour bar."""
    ledger, ax, layers = results.ledger(slide_id), _axes(ax), [*over]
    picture, files = draw.open_picture(ledger), draw.picture_files(ledger.path.parent)
    layers += [
        draw.Outline(draw.read_mask(path), "tissue", width=5.0) for path in files[1:]
    ]
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.patches import Patch

    mpp = picture.slide_mpp or (1000.0, 1000.0)
    width, height = (px * um / 1000 for px, um in zip(picture.size_l0, mpp))
    unit, signs = "mm" if picture.slide_mpp else "px of level 0", []
    ax.imshow(draw.paint(picture, layers), extent=(0, width, height, 0))
    ax.set(title=slide_id, xlabel=unit, ylabel=unit)
    for layer in layers:
        if isinstance(layer, draw.Values) and layer.only_value:
            (color,) = draw.colorize(np.zeros(1), layer.colormap) / 255
            words = f"{layer.label}: {layer.only_value}"
            signs.append(Patch(facecolor=color, label=words))
        elif isinstance(layer, draw.Values):
            scale = ScalarMappable(Normalize(*layer.shown_limits), layer.colormap)
            ax.figure.colorbar(
                scale, ax=ax, label=layer.label, alpha=layer.opacity, shrink=0.7
            )
        else:
            edge = [value / 255 for value in layer.color]
            signs.append(Patch(edgecolor=edge, facecolor="none", label=layer.label))
    ax.legend(handles=signs, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return ax
