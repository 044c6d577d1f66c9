"""Reads cells of CellViT: cells.json with outlines, cell_detection.json with centres.

Source: CellViT and CellViT++, `inference/cell_detection.py`: a table with `type_map`, which names
the classes, and `cells`, each with centroid, contour, type and type_prob. Points are x, y.
"""

from collections.abc import Iterator
from pathlib import Path

from thinsection.cells.batch import CellBatch
from thinsection.cells.collect import CellCollector, number_or_nan
from thinsection.cells.json_stream import open_json
from thinsection.types import Json

# first keys of the file
KEYS = ("wsi_metadata", "processed_patches", "type_map", "cells")


def read_cellvit_cells(path: Path) -> Iterator[CellBatch]:
    """Yields the cells of a JSON file of CellViT.

    Memory: some 60 MiB, whatever the size of the file.

    Raises:
        ValueError: the text is not JSON; the message has the place.
    """
    collector = CellCollector()
    class_names: dict[str, str] = {}
    with open_json(path) as stream:
        for key in stream.members():
            if key == "type_map":
                class_names = class_names_of(stream.value())
            elif key == "cells":
                for _ in stream.items():
                    add_typed_cell(collector, stream.value(), None, class_names)
                    if collector.is_full:
                        yield collector.take()
            else:
                stream.skip()
    yield collector.take()


def class_names_of(type_map: Json) -> dict[str, str]:
    """Class name by the number of a type, as text."""
    if not isinstance(type_map, dict):
        return {}
    return {str(number): str(name) for name, number in type_map.items()}


def add_typed_cell(
    collector: CellCollector, cell: Json, cell_id: str | None, names: dict[str, str]
) -> None:
    """Adds a cell with `contour`, `centroid`, `type` and `type_prob`, as HoVer-Net named them."""
    if not isinstance(cell, dict):
        collector.refused["that are no tables"] += 1
        return
    contour = cell.get("contour")
    center = cell.get("centroid")
    if not isinstance(contour, list):
        contour = None
    if not isinstance(center, list) or len(center) < 2:
        center = None
    kind = cell.get("type")
    class_name = None if kind is None else names.get(str(kind), str(kind))
    collector.add(
        contour,
        cell_id=cell_id,
        class_name=class_name,
        center=None if center is None else (center[0], center[1]),
        probability=number_or_nan(cell.get("type_prob")),
    )
