"""Reads cells from the shapes of a SpatialData store (Zarr), which are GeoParquet.

Source: SpatialData, `_io/io_shapes.py`: shapes/NAME/shapes.parquet, with the transformations to
each coordinate system in the attributes of the group.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from thinsection.cells.batch import CellBatch
from thinsection.cells.columns import read_parquet_cells
from thinsection.errors import InvalidInputError
from thinsection.files.atomic import read_json
from thinsection.types import Json

SHAPES = "shapes.parquet"


def read_spatialdata_cells(path: Path, named: Mapping[str, str]) -> Iterator[CellBatch]:
    """Yields the cells of the only shapes of a store.

    Memory: as `read_parquet_cells`.

    Raises:
        InvalidInputError: the store has no shapes, or several.
    """
    yield from read_parquet_cells(shapes_folder(path) / SHAPES, named)


def shapes_folder(path: Path) -> Path:
    """Folder of the only shapes of a store.

    Raises:
        InvalidInputError: there are none, or several.
    """
    folders = sorted(file.parent for file in path.glob(f"shapes/*/{SHAPES}"))
    if len(folders) != 1:
        names = ", ".join(folder.name for folder in folders) or "none"
        raise InvalidInputError(
            f"a SpatialData store must have one element of shapes, got {names} in {str(path)!r}; "
            f"name the file of one: {path.name}/shapes/NAME/{SHAPES}"
        )
    return folders[0]


def spatialdata_frame(path: Path) -> str:
    """Frame of the shapes: 'px' where they are as in the store's coordinate system.

    Raises:
        InvalidInputError: they are transformed, so that the user must state their unit.
    """
    folder = shapes_folder(path)
    kinds = {str(one.get("type")) for one in _transformations(folder)}
    if kinds <= {"identity"}:
        return "px"
    raise InvalidInputError(
        f"shapes must be in the coordinates of the slide, got a transformation by "
        f"{', '.join(sorted(kinds))} in {str(folder)!r}; transform them first, or state their unit "
        "as the frame"
    )


def _transformations(folder: Path) -> list[dict[str, Json]]:
    """Transformations of a group, as Zarr of format 3 or 2 keeps them."""
    attributes: Json = {}
    if (folder / "zarr.json").is_file():
        attributes = read_json(folder / "zarr.json").get("attributes", {})
    elif (folder / ".zattrs").is_file():
        attributes = read_json(folder / ".zattrs")
    stated = attributes.get("coordinateTransformations") or []
    return [one for one in stated if isinstance(one, dict)]
