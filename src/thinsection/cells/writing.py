"""Writes the table of the cells of a slide: measured, counted, and sorted by blocks of space."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thinsection.cells.batch import CellBatch
from thinsection.cells.ids import RepeatedIds
from thinsection.cells.outlines import MIN_POINTS, Flags, Outlines
from thinsection.cells.place import CellSlide, Placement, PlacementCheck
from thinsection.cells.spill import BLOCK_PX, BlockSpill, block_keys
from thinsection.cells.table import (
    BBOX,
    FACTS_KEY,
    FORMAT,
    MAX_BATCH_ROWS,
    MEASURES,
    SOURCE_PREFIX,
    CellCounts,
    CellTable,
)
from thinsection.errors import InvalidInputError
from thinsection.extras import importing
from thinsection.files.atomic import atomic_path
from thinsection.types import Document, Floats

if TYPE_CHECKING:
    import pyarrow as pa

_CODE = "class_code"  # in the temporary file, in place of the class
_MAX_MEASUREMENTS = 1000
_MAX_CLASSES = 10_000


@dataclass(frozen=True, kw_only=True)
class CellOrigin:
    """File from which cells were read."""

    path: str
    digest: str  # SHA-256 of its bytes
    format: str  # name of its reader


def write_cells(
    path: Path,
    batches: Iterable[CellBatch],
    *,
    name: str,
    slide: CellSlide,
    origin: CellOrigin,
    placement: Placement,
    fit: PlacementCheck,
) -> CellTable:
    """Writes the cells of a file as the table of a slide, atomically.

    Args:
        path: the table, cells/NAME/ID.parquet of a results folder.
        batches: the cells, in the frame of their file.
        name: name of the cells.
        slide: the slide on which they lie.
        origin: their file.
        placement: how the file's coordinates become level-0 px.
        fit: sees all centres, and refuses the file if they do not fit the slide.

    Memory: some 150 MiB, whatever the number of cells.

    Raises:
        InvalidInputError: the file has no cell, or its cells do not lie on the slide.
    """
    with importing("cells", "pyarrow"):
        import pyarrow.parquet as pq
    with (
        atomic_path(path) as tmp,
        BlockSpill(path.parent) as spill,
        RepeatedIds(path.parent) as ids,
    ):
        sorter = _Sorter(spill, ids, slide, placement, fit)
        for batch in batches:
            sorter.add(batch)
        counts = sorter.finish(origin.path)
        facts = {
            "format": FORMAT,
            "name": name,
            "slide_id": slide.slide_id,
            "slide_mpp": list(slide.slide_mpp),
            "size_l0": list(slide.size_l0),
            "source": asdict(origin),
            "placement": asdict(placement),
            "on_tissue": fit.on_tissue,
            "bounds_l0": sorter.bounds.tolist(),
            "block_px": BLOCK_PX,
            "counts": asdict(counts),
            "classes": sorted(sorter.classes),
        }
        schema = _final_schema(spill.schemas, facts, sorter.bounds)
        recode = _alphabetical(list(sorter.classes))
        with pq.ParquetWriter(
            tmp,
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=["class"],
            write_statistics=["x_l0", "y_l0", *(f"bbox.{edge}" for edge in BBOX)],
        ) as writer:
            for rows in spill.batches():
                final = _final_rows(rows, schema, recode, sorted(sorter.classes))
                writer.write_table(final, row_group_size=MAX_BATCH_ROWS)
    return CellTable(path)


class _Sorter:
    """Measures cells, counts those that cannot be used, and hands the others to the spill."""

    def __init__(
        self,
        spill: BlockSpill,
        ids: RepeatedIds,
        slide: CellSlide,
        placement: Placement,
        fit: PlacementCheck,
    ) -> None:
        self._spill = spill
        self._ids = ids
        self._slide = slide
        self._placement = placement
        self._fit = fit
        self._num_read = 0
        self._num_kept = 0
        self._refused: Counter[str] = Counter()
        self._changed: Counter[str] = Counter()
        self._measurements: dict[str, None] = {}
        self.classes: dict[str, int] = {}  # code of each class
        self.bounds = np.array([np.inf, np.inf, -np.inf, -np.inf])

    def add(self, batch: CellBatch) -> None:
        """Takes the cells of one batch."""
        import pyarrow as pa

        self._refused.update(batch.refused)
        self._changed.update(batch.changed)
        first_number = self._num_read
        self._num_read += len(batch) + sum(batch.refused.values())
        if not len(batch):
            return
        numbers = first_number + np.arange(len(batch))
        offset = np.asarray(self._placement.offset_l0)
        scale = self._placement.scale_xy
        outlines = batch.outlines.moved(scale, offset)
        shapes = outlines.shapes(self._slide.slide_mpp)
        centers = shapes.centers
        if batch.centers is not None:
            given = self._placement.centers_l0(batch.centers)
            lacks_outline = outlines.num_points == 0
            centers = np.where(lacks_outline[:, None], given, centers)
        kept = self._usable(outlines, centers)
        if not kept.any():
            return
        outlines = outlines.take(kept)
        centers = centers[kept]
        bounds = outlines.bounds()
        has_points = outlines.num_points > 0
        bounds[~has_points] = np.tile(centers[~has_points], 2)
        self.bounds[:2] = np.minimum(self.bounds[:2], bounds[:, :2].min(axis=0))
        self.bounds[2:] = np.maximum(self.bounds[2:], bounds[:, 2:].max(axis=0))
        columns: dict[str, Any] = {
            "id": self._id_column(batch, numbers, kept),
            "x_l0": pa.array(centers[:, 0]),
            "y_l0": pa.array(centers[:, 1]),
            "geometry": outlines.to_wkb(),
            "bbox": pa.StructArray.from_arrays(
                [pa.array(bounds[:, column]) for column in range(4)], names=list(BBOX)
            ),
            _CODE: pa.array(self._codes(batch)[kept]),
        }
        for measure in MEASURES:
            values = getattr(shapes, measure)[kept].astype(np.float32)
            columns[measure] = pa.array(values, from_pandas=True)
        probability = np.full(len(batch), np.nan, dtype=np.float32)
        if batch.probability is not None:
            probability = batch.probability.astype(np.float32)
        columns["probability"] = pa.array(probability[kept], from_pandas=True)
        if batch.nuclei is None:
            columns["nucleus"] = pa.nulls(len(centers), pa.binary())
        else:
            columns["nucleus"] = (
                _usable_nuclei(batch.nuclei.take(kept)).moved(scale, offset).to_wkb()
            )
        for name, values in batch.measurements.items():
            if name not in self._measurements:
                if len(self._measurements) >= _MAX_MEASUREMENTS:
                    self._changed[f"without measurement {name}"[:80]] += len(batch)
                    continue
                self._measurements[name] = None
            numbers32 = values[kept].astype(np.float32)
            columns[f"{SOURCE_PREFIX}{name}"] = pa.array(numbers32, from_pandas=True)
        self._num_kept += len(centers)
        self._spill.add(pa.record_batch(columns), block_keys(centers))

    def _usable(self, outlines: Outlines, centers: Floats) -> Flags:
        """True for each cell that can be used; counts the others by reason."""
        kept = np.ones(len(outlines), dtype=bool)
        num_points = outlines.num_points
        has_center = np.isfinite(centers).all(axis=1)
        inside = self._slide.holds(centers)
        lacks_outline = (num_points == 0) & ~has_center
        reasons = {
            "without an outline": lacks_outline,
            "with coordinates that are no numbers": ~outlines.are_finite(),
            "of fewer than three points": (num_points > 0) & (num_points < MIN_POINTS),
            "without area": ~has_center,
        }
        for reason, has_fault in reasons.items():
            is_refused = has_fault & kept
            if is_refused.any():
                self._refused[reason] += int(np.count_nonzero(is_refused))
                kept &= ~is_refused
        self._fit.add(centers[kept])
        is_outside = kept & ~inside
        if is_outside.any():
            self._refused["outside the slide"] += int(np.count_nonzero(is_outside))
        return np.asarray(kept & inside)

    def _id_column(self, batch: CellBatch, numbers: Any, kept: Flags) -> "pa.Array":
        """Ids of the kept cells; the number of a cell in the file where it has none."""
        import pyarrow as pa
        import pyarrow.compute as pc

        own_numbers = pa.array(numbers[kept]).cast(pa.string())
        if batch.ids is None:
            return own_numbers
        ids = batch.ids
        if not isinstance(ids, pa.Array):
            ids = pa.array(ids, type=pa.string())
        ids = ids.cast(pa.string()).filter(pa.array(kept))
        self._ids.add(ids)
        return pc.fill_null(ids, own_numbers) if ids.null_count else ids

    def _codes(self, batch: CellBatch) -> Any:
        """Code of the class of each cell, (N,) int32; -1 without a class."""
        import pyarrow as pa

        if batch.classes is None:
            return np.full(len(batch), -1, dtype=np.int32)
        column = batch.classes
        if not isinstance(column, pa.Array):
            column = pa.array(column, type=pa.string())
        if not pa.types.is_dictionary(column.type):
            column = column.cast(pa.string()).dictionary_encode()
        names = column.dictionary.cast(pa.string()).to_pylist()
        codes = [-1]  # the last one, of cells without a class
        for name in reversed(names):
            codes.insert(
                0, self.classes.setdefault(name, len(self.classes)) if name else -1
            )
        if len(self.classes) > _MAX_CLASSES:
            raise InvalidInputError(
                f"classes of cells must be at most {_MAX_CLASSES:,}, got more; name the column "
                "of classes"
            )
        indices = column.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        return np.array(codes, dtype=np.int32)[indices]

    def finish(self, path: str) -> CellCounts:
        """Counts the cells of the whole file.

        Raises InvalidInputError: none can be used, or they do not lie on the slide.
        """
        counts = CellCounts(
            read=self._num_read,
            kept=self._num_kept,
            refused=dict(self._refused.most_common()),
            changed=dict(self._changed.most_common()),
        )
        self._fit.finish(path)
        if not self._num_kept:
            reasons = f" ({counts.sentence()})" if self._num_read else ""
            raise InvalidInputError(
                f"cells must be at least one, got none in {path!r}{reasons}"
            )
        num_repeated = self._ids.count()
        if num_repeated:
            changed = {**counts.changed, "with the id of another cell": num_repeated}
            counts = replace(counts, changed=changed)
        return counts


def _usable_nuclei(nuclei: Outlines) -> Outlines:
    """Nuclei without those that enclose nothing or have no coordinates."""
    usable = (nuclei.num_points >= MIN_POINTS) & nuclei.are_finite()
    counts = nuclei.num_points
    points = nuclei.points[np.repeat(usable, counts)]
    return Outlines.of_counts(points, np.where(usable, counts, 0))


def _alphabetical(classes: Sequence[str]) -> Any:
    """Place in alphabetical order of each class code; the last entry is -1, for no class."""
    places = {name: place for place, name in enumerate(sorted(classes))}
    return np.array([*(places[name] for name in classes), -1], dtype=np.int32)


def _final_schema(
    schemas: "Sequence[pa.Schema]", facts: Document, bounds: Floats
) -> "pa.Schema":
    """Schema of the file: the columns of all batches, and GeoParquet's metadata."""
    import pyarrow as pa

    merged = pa.unify_schemas(list(schemas))
    fields = []
    class_field = pa.field("class", pa.dictionary(pa.int32(), pa.string()))
    for column in merged:
        fields.append(class_field if column.name == _CODE else column)
    covering = {"bbox": {edge: ["bbox", edge] for edge in BBOX}}
    # "crs": null: the coordinates are no places on Earth
    polygons = {"encoding": "WKB", "geometry_types": ["Polygon"], "crs": None}
    geo = {
        "version": "1.1.0",
        "primary_column": "geometry",
        "columns": {
            "geometry": {**polygons, "bbox": bounds.tolist(), "covering": covering},
            "nucleus": polygons,
        },
    }
    metadata = {
        b"geo": json.dumps(geo).encode(),
        FACTS_KEY: json.dumps(facts, ensure_ascii=False).encode(),
    }
    return pa.schema(fields, metadata=metadata)


def _final_rows(
    rows: "pa.Table", schema: "pa.Schema", recode: Any, classes: Sequence[str]
) -> "pa.Table":
    """Rows of the temporary file as rows of the table."""
    import pyarrow as pa

    columns = []
    for column in schema:
        if column.name == "class":
            codes = recode[rows[_CODE].to_numpy()]
            indices = pa.array(codes, mask=codes < 0)
            names = pa.array(classes, type=pa.string())
            columns.append(pa.DictionaryArray.from_arrays(indices, names))
        elif column.name in rows.column_names:
            columns.append(rows[column.name])
        else:
            columns.append(pa.nulls(len(rows), column.type))
    return pa.Table.from_arrays(columns, schema=schema)
