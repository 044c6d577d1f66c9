"""Reads cells of HoVer-Net: a table `nuc` with a cell for each id, and their magnification.

Source: HoVer-Net, `infer/base.py` and `infer/wsi.py`; TIAToolbox and PathML write the same.
"""

from collections.abc import Iterator
from pathlib import Path

from thinsection.cells.batch import CellBatch
from thinsection.cells.cellvit import add_typed_cell
from thinsection.cells.collect import CellCollector
from thinsection.cells.json_stream import open_json

# first keys of the file
KEYS = ("mag", "nuc")


def read_hovernet_cells(path: Path) -> Iterator[CellBatch]:
    """Yields the cells of a JSON file of HoVer-Net. The class of a cell is its number as text.

    Memory: some 60 MiB, whatever the size of the file.

    Raises:
        ValueError: the text is not JSON; the message has the place.
    """
    collector = CellCollector()
    with open_json(path) as stream:
        for key in stream.members():
            if key != "nuc":
                stream.skip()
                continue
            for cell_id in stream.members():
                add_typed_cell(collector, stream.value(), cell_id, {})
                if collector.is_full:
                    yield collector.take()
    yield collector.take()


def hovernet_frame(path: Path) -> str:
    """Frame of the coordinates: '40x' for px at this magnification, else 'px' of level 0."""
    with open_json(path) as stream:
        for key in stream.members():
            if key == "mag":
                power = stream.value()
                if isinstance(power, int | float) and power > 0:
                    return f"{power:g}x"
            break
    return "px"
