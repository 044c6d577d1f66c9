"""The tile grid of a slide, and what the stream makes of its tiles: embeddings, token grids."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from thinsection.config import from_mapping
from thinsection.errors import BudgetError
from thinsection.files.atomic import atomic_path, link_or_copy
from thinsection.slide.geometry import ReadPlan
from thinsection.slide.resize import resample_filter
from thinsection.stages.labels import grid_label, join_label, variant
from thinsection.stages.masks import QcStage, TissueStage
from thinsection.stages.regions import ROI_SHARE, RegionsStage, SegmentStage
from thinsection.stages.stage import Output, Reads, SlideWork, Stage
from thinsection.store.tile_tables import EmbeddingRows
from thinsection.store.tiles_h5 import (
    TilesFile,
    TilesWriter,
    open_h5,
    read_tiles,
    stored_dataset,
)
from thinsection.stream.tile_stream import MAX_SCRATCH, read_bytes
from thinsection.tiles import TileTable, load_filters, tile_grid
from thinsection.tiles.filters import MASK_FILTER, kept_by_rules
from thinsection.tiles.grid import TilesConfig
from thinsection.tiles.transforms import StainConfig, StainLook
from thinsection.types import CoordsL0, format_bytes

_KNOWN = 1024  # rows of embeddings that are copied at once


@dataclass(frozen=True, kw_only=True)
class TilesStage(Stage):
    """`GRID/tiles/ID.h5`; value: the `TileTable`.

    With pixel filters the grid is what they keep: the stage is fed by the stream then, which reads
    the `candidates` and hands the kept ones to `write`.
    """

    title: ClassVar[str] = "tile"

    config: TilesConfig
    mask: TissueStage | QcStage  # its value says where the tissue is
    segments: tuple[SegmentStage, ...] = ()  # whose classes' shares are columns
    roi: RegionsStage | None = None  # in which tiles lie

    @property
    def needs(self) -> tuple[TissueStage | QcStage | SegmentStage | RegionsStage, ...]:
        return (self.mask, *self.segments, *([self.roi] if self.roi else []))

    @property
    def reads(self) -> Reads:
        return "tiles" if load_filters(self.config.tile_filter) else "slide"

    @property
    def grid(self) -> str:
        """Folder of all that belongs to this grid: '256px_0.5mpp'."""
        named = (f"seg-{stage.label}" for stage in self.segments)
        roi = self.roi.label if self.roi else ""
        return grid_label(self.config, join_label(self.mask.label, *named, roi))

    @property
    def address(self) -> str:
        return f"{self.grid}/tiles"

    @property
    def settings(self) -> Mapping[str, Any]:
        return {
            "tiles": asdict(self.config) | {"tile_mpp": self.config.mpp}
        }  # '0.50' is '0.5'

    def candidates(self, work: SlideWork) -> TileTable:
        """The tiles that hold enough tissue, before any pixel filter.

        BudgetError where one tile takes more pixels of the slide's levels than a worker may hold.
        """
        assert work.slide is not None
        found, masked = work.value(self.mask), MASK_FILTER in self.config.tile_filter
        table = tile_grid(work.slide, self.config, tissue=found if masked else None)
        if not masked:
            fraction = found.fractions(table.coords_l0, table.plan.size_l0)
            table = table.with_columns({"tissue_fraction": fraction})
        for stage in self.needs:
            table = table.with_columns(stage.tile_columns(work, table))
        if self.roi:
            least = max(self.config.min_tissue_fraction, 1e-30)
            table = table.select(table.columns[ROI_SHARE] >= least)
        table = table.select(kept_by_rules(table, self.config.tile_filter))
        if read_bytes(table.plan) > MAX_SCRATCH:
            rule = f"one tile must be read from at most {format_bytes(MAX_SCRATCH)}"
            remedy = (
                "the slide lacks pyramid levels near this tile_mpp: ask for a finer one"
            )
            raise BudgetError(f"{rule}, got {table.plan.size_lv} px; {remedy}")
        return table

    def write(self, work: SlideWork, table: TileTable) -> Output:
        """Writes the final table."""
        warning = ""
        if len(table) == 0:
            tissue = work.value(self.mask).mask.any()
            warning = "no tile holds enough tissue" if tissue else "no tissue was found"
        elif self.config.resample == "fast" and work.slide and not work.slide.reduced:
            warning = "resampled exactly: its segments are no JPEG that the tiff reader decodes"
        name = self.file(work.entry.slide_id)
        write_columns(work.path(name), table.coords_l0, table.columns, work.attributes)
        facts = {"num_tiles": len(table), "warnings": warning}
        facts |= {"plan": asdict(table.plan), "tile_mpp": table.plan.tile_mpp}
        return Output(files=(name,), facts=facts, value=table)

    def load(self, work: SlideWork) -> TileTable:
        """The stored grid."""
        stored = read_tiles(work.path(self.file(work.entry.slide_id)))
        plan = from_mapping(ReadPlan, work.ledger.stages[self.address].facts["plan"])
        return TileTable(coords_l0=stored.coords_l0, plan=plan, columns=stored.columns)


def write_columns(
    path: Path,
    coords_l0: CoordsL0,
    columns: Mapping[str, npt.NDArray],
    said: Mapping[str, Any],
) -> None:
    """Writes a per-tile table with what is said of it, atomically."""
    with atomic_path(path) as tmp, TilesWriter(tmp, dim=0, attributes=said) as writer:
        writer.append(coords_l0, None)
        for name, values in columns.items():
            writer.add_column(name, values)


@dataclass(frozen=True, kw_only=True)
class FeaturesStage(Stage):
    """`GRID/features_ENCODER/ID.h5`: `features` (N, D) and `coords` (N, 2).

    Embeddings depend on pixels, tile grid and encoder, and on nothing else.
    """

    title: ClassVar[str] = "embed"
    reads = "tiles"

    tiles: TilesStage
    encoder: str  # its label, as part of the folder's name
    identity: Mapping[str, Any]  # `TileEncoder.provenance`; see `deciding`
    dtype: str = "float32"  # of the stored embeddings
    stain: StainConfig = field(
        default_factory=StainConfig
    )  # normalisation before the encoder
    target: StainLook | None = None  # the look that it aims at

    @property
    def label(self) -> str:
        """Name of the embeddings: encoder, stored type, stain normalisation."""
        named = [self.encoder, "" if self.dtype == "float32" else self.dtype]
        if self.target is not None:
            named += [
                self.stain.stain_norm,
                variant(self.stain, leave_out=("stain_norm",)),
            ]
        return join_label(*named)

    @property
    def address(self) -> str:
        return f"{self.tiles.grid}/features_{self.label}"

    @property
    def settings(self) -> Mapping[str, Any]:
        stain = None if self.target is None else [asdict(self.stain), repr(self.target)]
        resample = resample_filter(self.tiles.config.resample)
        of_tiles = {"resample": resample, "stain": stain}
        return {"encoder": deciding(self.identity), "dtype": self.dtype, **of_tiles}

    @property
    def attributes(self) -> dict[str, str]:
        """What the file says of its encoder."""
        named = {"encoder" if k == "name" else k: v for k, v in self.identity.items()}
        return {**named, "resample": resample_filter(self.tiles.config.resample)}

    def content(self, work: SlideWork, table: TileTable, *, rows: bool = False) -> str:
        """Hash of what the embeddings depend on: pixels, tiles, encoder; not of how the tiles came
        to be. Stain normalisation looks at the tissue, so that counts where it is on.

        Of one row, `rows`, that is all but which tiles there are.
        """
        tissue = None if self.target is None else self.tiles.mask.key(work.source)
        parts = [
            work.source,
            self.tiles.mask.reader,
            tissue,
            asdict(table.plan),
            self.settings,
        ]
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode())
        if not rows:
            digest.update(np.ascontiguousarray(table.coords_l0).tobytes())
        return digest.hexdigest()[:24]

    def reuse(self, work: SlideWork, table: TileTable) -> Output | None:
        """Takes the file of the same tiles under another grid's name; None where there is none."""
        content = self.content(work, table)
        for address, record in work.ledger.stages.items():
            same = record.facts.get("content") == content and address != self.address
            if same and work.ledger.complete(record):
                work.ledger = work.ledger.bring(record)
                name, (source, *_) = self.file(work.entry.slide_id), record.files
                with atomic_path(work.path(name)) as tmp:
                    link_or_copy(work.path(source), tmp)
                return Output(files=(name,), facts=record.facts)
        return None

    def known_rows(self, work: SlideWork, table: TileTable) -> "KnownRows | None":
        """Embeddings of some of the tiles in a file of other tiles, the one that has the most.

        Memory: 200 bytes a tile of the table and of each file.
        """
        content = self.content(work, table, rows=True)
        records = [
            r for r in work.ledger.stages.values() if r.facts.get("rows") == content
        ]
        paths = [path for rows, path in work.kept if rows == content]
        paths += [
            work.path(name)
            for r in records
            if work.ledger.complete(r)
            for name in r.files
        ]
        found = (KnownRows.of(path, table.coords_l0) for path in paths)
        return min(found, key=lambda known: known.lacking.sum(), default=None)

    def load(self, work: SlideWork) -> TilesFile:
        """The stored embeddings. Memory: 4 N D bytes."""
        return read_tiles(work.path(self.file(work.entry.slide_id)))


def deciding(identity: Mapping[str, Any]) -> dict[str, Any]:
    """What of an encoder's identity decides a result: the hash sees every weight, and the revision
    that brought them is for the record; so is the engine, which sums in an order of its own."""
    return {
        k: value for k, value in identity.items() if k not in ("revision", "engine")
    }


@dataclass(kw_only=True, eq=False)
class KnownRows:
    """Embeddings that a file has of some tiles of a table; the others come from the encoder.

    Memory: 32 bytes a tile, and `_KNOWN` rows of embeddings at a time.
    """

    path: Path
    rows: npt.NDArray[np.int64]  # (N,) of the file; -1 where the tile is not in it
    coords_l0: CoordsL0  # (N, 2) of all tiles
    done: int = 0  # tiles of the table that are written

    @classmethod
    def of(cls, path: Path, coords_l0: CoordsL0) -> "KnownRows":
        """What a file of embeddings has of the tiles at these corners."""
        with open_h5(path) as file:
            stored = stored_dataset(file, "coords", path)[...].tolist()
        there = {tuple(place): row for row, place in enumerate(stored)}
        rows = [there.get(tuple(place), -1) for place in coords_l0.tolist()]
        return cls(path=path, rows=np.array(rows, dtype=np.int64), coords_l0=coords_l0)

    @property
    def lacking(self) -> npt.NDArray[np.bool_]:
        """Which tiles, (N,), the encoder is to see."""
        return np.asarray(self.rows < 0)

    def until(self, place: int) -> Iterator[tuple[CoordsL0, npt.NDArray]]:
        """What is known of the tiles before a place that are not written yet."""
        stored = EmbeddingRows(self.path)
        for start in range(self.done, place, _KNOWN):
            part = slice(start, min(place, start + _KNOWN))
            yield self.coords_l0[part], stored[self.rows[part]]
        self.done = max(self.done, place)


def unknown_tiles(
    work: SlideWork, stages: Sequence[FeaturesStage], table: TileTable
) -> TileTable:
    """The tiles that an encoder is to see; embeddings of the others are taken from their files."""
    found = [known for stage in stages if (known := stage.known_rows(work, table))]
    if len(found) < len(stages):
        return table
    lacking = np.any([known.lacking for known in found], axis=0)
    for stage, known in zip(stages, found):
        known.rows[lacking] = -1
        work.taken[stage.address] = known
    return table.select(lacking)


@dataclass(frozen=True, kw_only=True)
class TokensStage(Stage):
    """`GRID/tokens_ENCODER/ID.h5`: `tokens` (N, T, C) in float16 and `coords` (N, 2)."""

    title: ClassVar[str] = "tokens"
    reads = "tiles"

    features: FeaturesStage  # of the same encoder: both come from one forward pass

    @property
    def address(self) -> str:
        return f"{self.features.tiles.grid}/tokens_{self.features.label}"

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.features.settings

    @property
    def needs(self) -> tuple[Stage, ...]:
        return (self.features.tiles,)


class OpenResult:
    """The file of a stage that the stream feeds, while it grows; it appears whole or not at all.

    Memory: one batch.
    """

    def __init__(self, work: SlideWork, stage: FeaturesStage | TokensStage) -> None:
        self.stage, self._work = stage, work
        self._features = stage if isinstance(stage, FeaturesStage) else stage.features
        self._name = stage.file(work.entry.slide_id)
        self._known: KnownRows | None = work.taken.get(stage.address)
        self._stack = ExitStack()
        self._tmp = self._stack.enter_context(atomic_path(work.path(self._name)))
        self._writer: TilesWriter | None = None

    def append(self, coords_l0: CoordsL0, values: npt.NDArray[np.floating]) -> None:
        """Adds the embeddings (b, D) or tokens (b, T, C) of some tiles, after those before them
        that are known."""
        known, writer = self._known, self._open(values.shape[1:])
        if known is None:
            writer.append(coords_l0, values)
            return
        ahead = np.flatnonzero(known.lacking[known.done :])[: len(values)] + known.done
        for run in np.split(
            np.arange(len(values)), np.flatnonzero(np.diff(ahead) > 1) + 1
        ):
            for block in known.until(int(ahead[run[0]])):
                writer.append(*block)
            writer.append(coords_l0[run], values[run])
            known.done = int(ahead[run[-1]]) + 1

    def close(self, empty_shape: tuple[int, ...]) -> Output:
        """Puts the file in its place; `empty_shape` is of a row, for a slide without tiles."""
        work, features = self._work, self._features
        writer = self._open(empty_shape)
        for block in self._known.until(len(self._known.rows)) if self._known else ():
            writer.append(*block)
        writer.close()
        work.begin(self.stage)
        self._stack.close()  # fsync and rename
        facts: dict[str, Any] = {"dim": writer.shape[-1], **features.attributes}
        facts["warnings"] = "; ".join(work.warnings)
        if self.stage is features:
            table = work.value(features.tiles)
            rows = features.content(work, table, rows=True)
            facts |= {"content": features.content(work, table), "rows": rows}
        return Output(files=(self._name,), facts=facts)

    def abandon(self) -> None:
        """Drops what was written."""
        if self._writer is not None:
            with suppress(OSError, RuntimeError):  # of a disk that is full
                self._writer.close()
        self._stack.__exit__(OSError, OSError("abandoned"), None)

    def _open(self, shape: tuple[int, ...]) -> TilesWriter:
        if self._writer is None:
            features, how = self._features, {"dataset": "tokens", "dtype": "float16"}
            if self.stage is features:
                how = {"dtype": features.dtype}
            attributes = self._work.attributes | features.attributes
            self._writer = TilesWriter(
                self._tmp, dim=shape, attributes=attributes, **how
            )
        return self._writer
