"""Any values per tile as a picture of a slide in a file: PNG, SVG, OME-TIFF, or GeoJSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thinsection.errors import InvalidInputError
from thinsection.report.draw import write_drawing
from thinsection.report.layers import Classes
from thinsection.report.painted import write_painted
from thinsection.report.svg import write_svg
from thinsection.report.tile_layers import ClassColors, TileValues
from thinsection.report.values import Limits, ValueKind
from thinsection.results.folder import Results, open_results
from thinsection.results.scene import Scene, ShownValues, scene_of, values_of_tiles
from thinsection.results.tiled_slide import tiled_slide
from thinsection.slide import Slide
from thinsection.store.geojson import (
    tile_features,
    write_features,
    write_tiles_geojson,
)
from thinsection.store.tiles_h5 import TilesFile
from thinsection.tiles import TileTable

_DIGITS = 6  # significant digits of a measurement


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What is written, and where."""

    path: Path
    source: Results | Slide
    shown: str | TileTable | TilesFile
    grid: str | None
    values: ShownValues
    mpp: float | None

    @property
    def scene(self) -> Scene:
        """The slide's picture, which is read or made now."""
        return scene_of(self.source, self.shown, self.grid)


def write_heatmap(
    path: str | Path,
    source: Results | Slide | str | Path,
    shown: str | TileTable | TilesFile,
    values: str | TileValues,
    grid: str | None = None,
    *,
    kind: ValueKind | None = None,
    limits: Limits | None = None,
    colors: ClassColors | None = None,
    label: str | None = None,
    mpp: float | None = None,
) -> Path:
    """Writes a number or a category per tile as a picture of the slide; returns its path.

    The end of the path decides the format. Colours and limits are those of `ts.plot.heatmap`.

    - `.png`: at most 1600 pixels, with legend and scale bar.
    - `.svg`: one rectangle per tile, in mm, with its value as title.
    - `.ome.tif`: a pyramid of the slide with the colours over it, and its µm/px.
    - `.geojson`: tile objects for QuPath, in level-0 pixels. A number is a measurement, and a
      category is the class.

    Args:
        path: the file; an existing one is replaced.
        source: a results folder or its path, or an opened slide.
        shown: id of one of the folder's slides; of an opened slide its tiles.
        values: a column of the tile table, or (N,) numbers of NumPy or torch, words or a pandas
            Categorical, in the order of the tiles. A tile with NaN or None has no colour; infinity
            is refused.
        grid: as for `results.tiles`.
        kind: of numbers: 'signed' (blue against, red for, 0 is nothing), 'amount' (from 0) or
            'measure' (any range); None decides by the column and the values.
        limits: of numbers: values of the first and last colour, the same for several slides; None
            takes those of the values.
        colors: of categories: a colour by name, such as {"tumour": "#d55e00"}. Classes
            that the slide lacks may have one, so that one palette serves several slides.
        label: name of the values in the legend and in GeoJSON; None takes the column's.
        mpp: of an OME-TIFF: its resolution in µm/px; None gives a tile 32 pixels.

    Memory:
        The picture of at most 1600 pixels, and 200 bytes per tile. For `.ome.tif` 30 MiB, and
        30 MiB per CPU, in place of the picture, whatever the size of the slide.

    Raises:
        InvalidInputError: another end of the path, no such column, another number of values, or an
            infinite one.
        SlideOpenError: an OME-TIFF of a results folder needs the slide's file.

    Examples:
        >>> count = len(results.tiles("a").coords_l0)
        >>> ts.write_heatmap("a.png", results, "a", np.linspace(0, 1, count)).name
        'a.png'
        >>> ts.write_heatmap("a.geojson", results, "a", ["tumour"] * count).name
        'a.geojson'
    """
    target = Path(path)
    write = _writer(target)
    if mpp is not None and write is not _write_ome_tiff:
        raise InvalidInputError(
            f"mpp must be left out but for .ome.tif, got {mpp:g} for {target.name!r}"
        )
    if isinstance(source, str | Path):
        source = open_results(source)
    if isinstance(source, Results):
        grid = source.choose_grid(grid)
    shown_values = values_of_tiles(
        source,
        shown,
        values,
        grid,
        kind=kind,
        limits=limits,
        colors=colors,
        label=label,
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    write(
        _Request(
            path=target,
            source=source,
            shown=shown,
            grid=grid,
            values=shown_values,
            mpp=mpp,
        )
    )
    return target


def _writer(path: Path) -> Callable[[_Request], None]:
    """The function that writes files with this ending."""
    name = path.name.lower()
    for ending, write in _WRITERS.items():
        if name.endswith(ending) and name != ending:
            return write
    raise InvalidInputError(
        f"path must end in {', '.join(_WRITERS)}, got {str(path)!r}; the ending decides the format"
    )


def _write_png(request: _Request) -> None:
    scene = request.scene
    layer = request.values.layer
    caption = _caption(scene, request.values)
    write_drawing(request.path, scene.picture, [layer], caption=caption)


def _write_svg(request: _Request) -> None:
    scene = request.scene
    layer = request.values.layer
    caption = _caption(scene, request.values)
    write_svg(request.path, scene.picture, layer, caption=caption)


def _write_ome_tiff(request: _Request) -> None:
    source = request.source
    if isinstance(source, Slide):
        write_painted(request.path, source, request.values.layer, mpp=request.mpp)
        return
    assert request.grid is not None
    ledger = source.ledger(str(request.shown))
    with tiled_slide(source, ledger, request.grid).open() as slide:
        write_painted(request.path, slide, request.values.layer, mpp=request.mpp)


def _write_geojson(request: _Request) -> None:
    """Tiles with their values as measurements and colours, or with their classes."""
    layer = request.values.layer
    column = request.values.column
    attributes = {"tile_size_l0": list(layer.tile_size_l0)}
    if isinstance(layer, Classes):
        table = TilesFile(
            coords_l0=layer.coords_l0,
            features=None,
            attributes=attributes,
            columns={column: layer.codes},
            categories={column: layer.categories},
        )
        write_tiles_geojson(request.path, table)
        return
    rows = layer.tile_rgba.tolist()
    is_known = np.isfinite(layer.values)
    colors = [
        (red, green, blue) if known else None
        for (red, green, blue, _), known in zip(rows, is_known, strict=True)
    ]
    table = TilesFile(
        coords_l0=layer.coords_l0,
        features=None,
        attributes=attributes,
        columns={column: layer.values},
    )
    features = tile_features(table, "tile", digits=_DIGITS, colors=colors)
    write_features(request.path, features, in_lines=True)


def _caption(scene: Scene, values: ShownValues) -> str:
    """Slide, and what its values are."""
    parts = [scene.title]
    if isinstance(values.layer, Classes):
        parts.append(values.layer.label)
    return " | ".join(parts)


_WRITERS: dict[str, Callable[[_Request], None]] = {
    ".png": _write_png,
    ".svg": _write_svg,
    ".ome.tif": _write_ome_tiff,
    ".ome.tiff": _write_ome_tiff,
    ".geojson": _write_geojson,
}
