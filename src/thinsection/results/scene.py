"""Slide and tiles that a picture shows: of an opened slide, or of a results folder's slide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thinsection.config import nearest
from thinsection.errors import InvalidInputError
from thinsection.report.layers import TileLayer, Values
from thinsection.report.picture import Picture, slide_picture
from thinsection.report.stored import QC_FILE, open_picture, picture_files, read_tissue
from thinsection.report.tile_layers import ClassColors, TileValues, tile_layer
from thinsection.report.values import (
    Limits,
    ValueKind,
    shown_values,
    value_kind,
    value_words,
)
from thinsection.results.folder import Results
from thinsection.slide import Slide
from thinsection.slide.same_slide import check_same_slide
from thinsection.store.ledger import SlideLedger
from thinsection.store.tile_tables import TILES
from thinsection.store.tiles_h5 import TilesFile
from thinsection.tiles import TileTable
from thinsection.tiles.table import Column
from thinsection.types import MaskArray


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Picture of a slide, its title, and masks to outline."""

    title: str
    picture: Picture
    masks: tuple[MaskArray, ...] = ()


def as_results(source: object) -> Results:
    """The results folder. Raises InvalidInputError: it is something else."""
    if isinstance(source, Results):
        return source
    raise InvalidInputError(
        "source must be a results folder, an opened slide or an array, got "
        f"{source!r}; pass thinsection.open_results(folder) or thinsection.open_slide(path)"
    )


def scene_of(source: Results | Slide, shown: object, grid: str | None = None) -> Scene:
    """Picture of an opened slide, or of a results folder's slide with the tissue of a grid."""
    if isinstance(source, Slide):
        picture = Picture(
            rgb=slide_picture(source), size_l0=source.size, slide_mpp=source.slide_mpp
        )
        return Scene(title=Path(source.slide_path).stem, picture=picture)
    ledger = as_results(source).ledger(check_id(shown))
    files = _mask_files(ledger, grid) or picture_files(ledger.path.parent)[1:]
    masks = tuple(map(read_tissue, files))
    return Scene(title=ledger.slide_id, picture=open_picture(ledger), masks=masks)


def _mask_files(ledger: SlideLedger, grid: str | None) -> tuple[Path, ...]:
    """File with the mask on which a grid was laid; none if the grid or the file is not there."""
    tiles = ledger.stages.get(f"{grid}/{TILES}")
    for need in tiles.needs if tiles else ():
        for name in ledger.stages[need].files if need in ledger.stages else ():
            path = ledger.out / name
            is_mask = path.name.startswith("tissue") and path.suffix == ".png"
            if (is_mask or path.name == QC_FILE) and path.is_file():
                return (path,)
    return ()


def check_id(shown: object) -> str:
    """The id of a slide. Raises InvalidInputError: it is something else."""
    if not isinstance(shown, str):
        raise InvalidInputError(
            "shown must be the id of a slide of the results folder, got "
            f"{type(shown).__name__}; for other tiles pass the opened slide first: "
            "ts.plot.tiles(slide, tiles)"
        )
    return shown


def tiles_of(source: object, shown: object, grid: str | None) -> TileTable | TilesFile:
    """Tiles of an opened slide, or of a results folder's slide."""
    if isinstance(source, Results):
        return source.tiles(check_id(shown), grid)
    if not isinstance(source, Slide):
        as_results(source)
    assert isinstance(source, Slide)
    if not isinstance(shown, TileTable | TilesFile):
        form = repr(shown) if isinstance(shown, str) else type(shown).__name__
        raise InvalidInputError(
            f"shown must be the tiles of the slide, got {form}; pass the result of tile_grid "
            "or of results.tiles, and not only its coords_l0"
        )
    check_same_slide(source, shown)
    return shown


def column_of(columns: Mapping[str, Column], name: str) -> Column:
    """One column of a tile table."""
    if name not in columns:
        names = sorted(columns)
        raise InvalidInputError(
            f"column must be one of {', '.join(names)}, got {name!r}{nearest(name, names)}"
        )
    return columns[name]


@dataclass(frozen=True, kw_only=True)
class ShownValues:
    """Values of the tiles of a slide, as a layer over its picture."""

    layer: TileLayer
    column: str  # name of the column; 'value' for an array


def values_of_tiles(
    source: Results | Slide,
    shown: object,
    values: str | TileValues,
    grid: str | None,
    *,
    kind: ValueKind | None = None,
    limits: Limits | None = None,
    colors: ClassColors | None = None,
    label: str | None = None,
) -> ShownValues:
    """One value per tile of a slide; arguments as of `ts.plot.heatmap` and `ts.write_heatmap`.

    Raises:
        InvalidInputError: no such column, or the number of values is not that of the tiles.
    """
    drawn = tiles_of(source, shown, grid)
    column = "value" if label is None else label
    is_column = isinstance(values, str)
    if isinstance(values, str):
        column = values
        stored = column_of(drawn.columns, values)
        categories = drawn.categories if isinstance(drawn, TilesFile) else {}
        named = categories.get(values)
        if named is not None:
            values = named.labels(stored)
            colors = {**named.color_by_name, **(colors or {})}
        else:
            values = shown_values(column, stored)
            kind = kind or value_kind(column)
        label = label or value_words(column)
    layer = tile_layer(
        drawn.coords_l0,
        drawn.size_l0,
        values,
        label=label or column,
        kind=kind,
        limits=limits,
        colors=colors,
    )
    if isinstance(layer, Values) and not is_column and np.isinf(layer.values).any():
        row = int(np.flatnonzero(np.isinf(layer.values))[0])
        raise InvalidInputError(
            "values must be finite, or NaN for a tile without a value, got "
            f"{layer.values[row]} for tile {row}"
        )
    return ShownValues(layer=layer, column=column)
