"""Reads files of annotations by their suffix, and masks and tables of boxes (CSV).

Every format gives shapes in level-0 px. A subclass has a name as in QuPath ('Tumor: Invasive'),
also for ASAP's groups within groups. The files are not trusted: XML may have no entities, and
errors name the file and the feature.
"""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.arrays.polygons import mask_outlines
from thinsection.errors import ConfigError, InvalidInputError, rewording
from thinsection.files.tables import open_table
from thinsection.slide.annotation_formats import Shape, box_ring, read_geojson, read_xml
from thinsection.slide.cell_files import refuse_cells, refuse_detections
from thinsection.slide.cohort_table import named_columns
from thinsection.slide.ids import KnownIds
from thinsection.types import MaskFrame, Size

# largest relative difference between the aspect ratios of a mask and of the slide
_ASPECT_TOLERANCE = 0.02
# names of columns, accepted in any capitals and with or without '_'
_BOX_COLUMNS = (
    ("x", "y", "width", "height"),
    ("x", "y", "w", "h"),
    ("xmin", "ymin", "xmax", "ymax"),
    ("x1", "y1", "x2", "y2"),
    ("left", "top", "right", "bottom"),
)
BOX_SUFFIXES = (".csv", ".tsv", ".xlsx", ".parquet")
_CLASS_COLUMNS = ("class", "label", "classification", "name")
_DAMAGE = (
    OSError,
    ValueError,
    TypeError,
    SyntaxError,
    RecursionError,
    csv.Error,
    Image.DecompressionBombError,
)


def read_shapes(path: Path, size_l0: Size, slide_id: str) -> list[Shape]:
    """Reads the shapes of a file by its suffix; from a CSV only the rows of one slide.

    Raises:
        InvalidInputError: the message names the file, the feature and the fault; also a file of
            cells.
    """
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise InvalidInputError(
            f"suffix must be one of {' '.join(_READERS)}, got {str(path)!r}"
        )
    rule = f"regions must be readable {path.suffix}"
    with rewording(rule, path, *_DAMAGE, error=InvalidInputError):
        shapes = list(read(path, size_l0, slide_id))
    refuse_cells(shapes, path)
    return shapes


def read_class_names(path: Path, slide_id: str) -> set[str]:
    """Reads the classes of a file by its suffix, without the outlines of a mask."""
    if _READERS.get(path.suffix.lower()) is _read_mask:
        rule = f"regions must be readable {path.suffix}"
        with rewording(rule, path, *_DAMAGE, error=InvalidInputError):
            labels = np.unique(_mask_values(path)).tolist()
        names = {str(label) for label in labels if label}
        return names if len(names) > 1 else {""}
    shapes = read_shapes(path, (1, 1), slide_id)
    return {shape.class_name for shape in shapes if not shape.ignored}


# boxes and masks


def _read_boxes(path: Path, size_l0: Size, slide_id: str) -> Iterator[Shape]:
    """Yields the boxes of a slide; all boxes of a table without a column of slides."""
    table = open_table(path, may_be_empty=True, error=InvalidInputError)
    rows = table.rows
    if not rows:
        return
    columns = _box_columns(list(table.columns), path)
    names = [_box_slide(row) for row in rows]
    named = KnownIds([slide_id]).match(names, where=repr(str(path)))
    if any(names) and not named:
        similar = KnownIds(names).similar(slide_id)
        if similar:
            raise InvalidInputError(
                f"slide_id must be written as in the cohort, got {similar!r} for {slide_id!r} in "
                f"{str(path)!r}; write both alike"
            )
    for line, row, name in zip(table.lines, rows, names, strict=True):
        if any(names) and name not in named:
            continue
        rule = f"line {line} must have numbers"
        with rewording(rule, path, *_DAMAGE, error=InvalidInputError):
            left, top, right, bottom = (_number(row[name]) for name in columns)
        if _plain_column(columns[2]) in ("width", "w"):
            right += left
            bottom += top
        ring = box_ring(left, top, right, bottom)
        classes = (row[name] for name in _CLASS_COLUMNS if row.get(name))
        yield Shape(
            place=f"line {line}", class_name=next(classes, ""), polygons=[[ring]]
        )


def check_box_slides(path: Path, slide_ids: Sequence[str]) -> None:
    """Refuses a table of boxes that has none of the slides, or does not name the slides.

    Raises:
        ConfigError: the message names the table and the slides in it.
    """
    rule = "boxes must be a readable table"
    with rewording(rule, path, *_DAMAGE, error=ConfigError):
        table = open_table(path, may_be_empty=True, error=ConfigError)
    names = [_box_slide(row) for row in table.rows]
    if not names:
        return
    if not any(names):
        if len(slide_ids) > 1:
            raise ConfigError(
                f"boxes of {len(slide_ids)} slides must have a column slide_id, got none in "
                f"{str(path)!r}"
            )
        return
    known = KnownIds(slide_ids)
    has_none = not any(map(known.find, filter(None, names)))
    # a slide without boxes is accepted, unless a box has nearly its name
    if has_none and (len(slide_ids) > 1 or any(map(known.similar, names))):
        examples = ", ".join(known.words(name) for name in sorted(set(names))[:3])
        raise ConfigError(
            f"boxes must be of the cohort's slides, got only boxes of {examples} in "
            f"{str(path)!r}; the cohort has {', '.join(sorted(slide_ids)[:3])}"
        )


def _number(text: str) -> float:
    """Returns a number; a decimal comma is read as a point."""
    is_decimal_comma = text.count(",") == 1 and "." not in text
    return float(text.replace(",", ".") if is_decimal_comma else text)


def _box_slide(row: Mapping[str, str]) -> str:
    """Returns the slide in a row of a table of boxes; '' if the row does not name a slide."""
    columns = named_columns(row)
    return columns["slide_id"] or columns["slide_path"]


def _box_columns(header: Sequence[str], path: Path) -> Sequence[str]:
    """Returns the four columns of a table of boxes."""
    by_plain = {_plain_column(name): name for name in header}
    for form in _BOX_COLUMNS:
        if by_plain.keys() >= set(form):
            return [by_plain[name] for name in form]
    raise InvalidInputError(
        f"boxes must have columns x,y,width,height or x_min,y_min,x_max,y_max, got {list(header)} "
        f"in {str(path)!r}"
    )


def _plain_column(name: str) -> str:
    return name.strip().lower().replace("_", "")


def _read_mask(path: Path, size_l0: Size, slide_id: str) -> Iterator[Shape]:
    """Yields a shape for the px of each value; the value is its class, or '' if there is one."""
    values = _mask_values(path)
    height, width = values.shape
    aspect = width * size_l0[1] / (height * size_l0[0])
    if abs(aspect - 1) > _ASPECT_TOLERANCE:
        raise InvalidInputError(
            f"mask must cover the whole slide, got {width} x {height} px for {size_l0[0]} x "
            f"{size_l0[1]} in {str(path)!r}"
        )
    frame = MaskFrame(size_th=(width, height), size_l0=size_l0)
    labels = [value for value in np.unique(values).tolist() if value]
    for label in labels:
        outlines = mask_outlines(values == label, frame, least_iou=1.0)
        yield Shape(
            place=f"value {label}",
            class_name=str(label) if len(labels) > 1 else "",
            polygons=list(outlines.geoms),
        )


def _mask_values(path: Path) -> npt.NDArray[np.generic]:
    with Image.open(path) as picture:  # refuses masks above Pillow's limit of px
        if picture.mode not in ("1", "L", "P", "I;16", "I"):
            raise InvalidInputError(
                f"mask must have one channel, got {picture.mode} in {str(path)!r}; "
                "save labels as grey values"
            )
        return np.asarray(picture)


def _geojson(path: Path, size_l0: Size, slide_id: str) -> Iterator[Shape]:
    refuse_detections(path)
    return read_geojson(path)


def _xml(path: Path, size_l0: Size, slide_id: str) -> Iterator[Shape]:
    return read_xml(path)


_READERS: dict[str, Callable[[Path, Size, str], Iterator[Shape]]] = {
    ".geojson": _geojson,
    ".json": _geojson,
    ".xml": _xml,
    ".annotations": _xml,
    **dict.fromkeys(BOX_SUFFIXES, _read_boxes),
    ".png": _read_mask,
    ".tif": _read_mask,
    ".tiff": _read_mask,
    ".bmp": _read_mask,
}
SUFFIXES = tuple(_READERS)
