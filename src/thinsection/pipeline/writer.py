"""Results onto disk, in a thread of its own, so that the encoder does not wait for it."""

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.encode.embed import EmbeddedBatch
from thinsection.files.atomic import atomic_path
from thinsection.neighbors import TileGraph, parse_graph_spec, tile_graph
from thinsection.pipeline.exports import write_extra
from thinsection.pipeline.work import SlideWork
from thinsection.pool import SlideEncoder
from thinsection.report.overview import draw_overview
from thinsection.stages import naming
from thinsection.stages.config import RunConfig
from thinsection.store.slide_embedding import write_slide_embedding
from thinsection.store.tiles_h5 import TilesWriter, read_tiles
from thinsection.stream import StageClock
from thinsection.stream.channel import Channel, ChannelClosed
from thinsection.tiles import TileTable

# batches of embeddings that may wait for the disk: 4 x 256 x 2560 x 4 B = 10 MiB at the largest
_QUEUED = 4


@dataclass(kw_only=True)
class _OpenFile:
    """A tiles file under construction."""

    work: SlideWork
    writer: TilesWriter
    stack: ExitStack
    indices: list[npt.NDArray[np.int64]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Marker: every batch of the slide was handed over."""

    work: SlideWork


@dataclass(frozen=True, kw_only=True)
class Fail:
    """Marker: the slide failed in the stream."""

    work: SlideWork
    stage: str
    error: Exception


class ResultWriter:
    """Takes embedded batches and markers, in order, and leaves finished slides.

    Args:
        config: of the run.
        dim: width of the embeddings; 0 where only the grid is written.
        encoder: name and weights' hash for the attributes.
        slide_encoder: None stops after the tiles file.
        write_tiles: False leaves it at the tissue mask.
        on_end: called with each slide's work, failing stage and error (None when done), in the
            writer's thread.
        clock: busy time goes to 'write_busy' and 'aggregate_busy'.

    Memory: `_QUEUED` batches of embeddings; while one slide is pooled its (N, D) embeddings.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        dim: int,
        encoder: Mapping[str, Any],
        slide_encoder: SlideEncoder | None,
        write_tiles: bool = True,
        on_end: Callable[[SlideWork, str, Exception | None], None],
        clock: StageClock,
    ) -> None:
        self._config, self._dim, self._encoder = config, dim, dict(encoder)
        self._slide_encoder, self._on_end, self._clock = slide_encoder, on_end, clock
        self._write_tiles = write_tiles
        self._channel: Channel[EmbeddedBatch | Finish | Fail] = Channel(_QUEUED)
        self._open: _OpenFile | None = None
        self._given_up: SlideWork | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def put(self, item: EmbeddedBatch | Finish | Fail) -> None:
        """Hands an item over, waiting for room.

        Raises:
            BaseException: whatever broke the writer itself.
        """
        try:
            self._channel.put(item)
        except ChannelClosed:
            raise self._failure or RuntimeError("the writer has ended") from None

    def __enter__(self) -> "ResultWriter":
        self._thread.start()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is None:
            self._channel.finish()
        else:
            self._channel.close()
        self._thread.join()
        self._abandon()
        if exc_type is None and self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while True:
                self._take(self._channel.get())
        except ChannelClosed:
            return
        except BaseException as error:  # noqa: BLE001 - raised again in the run's thread
            self._failure = error
            self._channel.close()

    def _take(self, item: EmbeddedBatch | Finish | Fail) -> None:
        work: SlideWork = item.key if isinstance(item, EmbeddedBatch) else item.work
        if isinstance(item, Fail):
            self._abandon()
            if self._given_up is not work:
                self._on_end(work, item.stage, item.error)
            return
        if self._given_up is work:
            return
        if not self._write_tiles:
            self._on_end(work, "", None)
            return
        try:
            with self._clock.timed("write_busy"):
                opened = self._file_of(work)
                if isinstance(item, EmbeddedBatch):
                    opened.writer.append(item.coords_l0, item.tile_embeddings[0])
                    opened.indices.append(item.indices)
                    return
                self._close(opened)
            if self._slide_encoder is not None:
                with self._clock.timed("aggregate_busy"):
                    self._pool(work, self._slide_encoder)
        except Exception as error:  # noqa: BLE001 - the per-slide boundary of writing
            self._abandon()
            self._given_up = work
            self._on_end(work, work.stage, error)
            return
        self._on_end(work, "", None)

    def _file_of(self, work: SlideWork) -> _OpenFile:
        if self._open is None:
            work.stage = "write"
            stack = ExitStack()
            tmp = stack.enter_context(atomic_path(work.folder / naming.TILES))
            writer = TilesWriter(
                tmp,
                dim=self._dim,
                dtype=self._config.output.embedding_dtype,
                attributes=work.attributes | self._encoder,
            )
            self._open = _OpenFile(work=work, writer=writer, stack=stack)
        return self._open

    def _close(self, opened: _OpenFile) -> None:
        """Completes the tiles file, moves it into place and records the stages."""
        work, writer = opened.work, opened.writer
        table = final_table(work, opened.indices, embedded=bool(self._dim))
        if not self._dim:
            writer.append(table.coords_l0, None)
        for name, values in table.columns.items():
            writer.add_column(name, values)
        if self._config.output.graph and len(table):
            graph = tile_graph_of(table, work, self._config.output.graph)
            writer.add_graph(graph.edge_index, graph.distances, self._config.output.graph)
        with writer:
            pass
        stages = ("tile", "embed") if self._dim else ("tile",)
        for stage in stages:
            work.begin(stage)
        opened.stack.close()  # fsync and rename
        self._open = None
        files = [naming.TILES]
        if self._dim:
            files += write_extra(work.entry, work.folder, self._config.output.write)
        facts: dict[str, Any] = {"num_tiles": len(table), "warnings": "; ".join(work.warnings)}
        if self._config.output.overview and work.tissue is not None:
            draw_overview(
                work.folder / naming.OVERVIEW,
                work.tissue.thumbnail,
                work.tissue.mask,
                table.coords_l0,
                tile_size_l0=table.plan.size_l0,
                size_l0=work.tissue.frame.size_l0,
            )
        work.finish("tile", (naming.TILES,), facts)
        if self._dim:
            work.finish("embed", tuple(files), {**self._encoder, "dim": self._dim})

    def _pool(self, work: SlideWork, slide_encoder: SlideEncoder) -> None:
        work.stage = "aggregate"
        work.begin("aggregate")
        dim = pool_slide(work.folder, slide_encoder)
        facts = {"slide_encoder": slide_encoder.name, "slide_dim": dim}
        work.finish("aggregate", (naming.SLIDE_EMBEDDING,) if dim else (), facts)

    def _abandon(self) -> None:
        """Drops a half-written file."""
        opened, self._open = self._open, None
        if opened is not None:
            with opened.writer:
                pass
            error = OSError("abandoned")
            opened.stack.__exit__(type(error), error, None)


def final_table(
    work: SlideWork, indices: list[npt.NDArray[np.int64]], *, embedded: bool
) -> TileTable:
    """The tiles that went through: those that pixel filters kept, or the whole grid."""
    table = work.table
    assert table is not None
    if not embedded:
        return table
    kept = np.concatenate(indices) if indices else np.empty(0, dtype=np.int64)
    return table.select(kept)


def tile_graph_of(table: TileTable, work: SlideWork, spec: str) -> TileGraph:
    """The spatial graph that the run's setting asks for."""
    wanted = parse_graph_spec(spec)
    mpp = (work.facts["mpp_x"], work.facts["mpp_y"]) if work.facts.get("mpp_x") else None
    return tile_graph(table.coords_l0, k=wanted.k, radius_um=wanted.radius_um, slide_mpp=mpp)


def pool_slide(folder: Path, slide_encoder: SlideEncoder) -> int:
    """Writes slide_embedding.h5 from the folder's tiles.h5.

    Returns:
        D; 0, and no file, for a slide without tiles: no tiles have no embedding.

    Memory: 4 N D bytes and the slide encoder's own bound.
    """
    tiles = read_tiles(folder / naming.TILES)
    target = folder / naming.SLIDE_EMBEDDING
    if tiles.features is None or len(tiles.features) == 0:
        target.unlink(missing_ok=True)
        return 0
    embedding = slide_encoder.encode(
        tiles.features, tiles.coords_l0, tile_px_l0=tiles.tile_px_l0 or 1
    )
    attributes = {
        "name": str(tiles.attributes.get("name", folder.name)),
        "slide_encoder": slide_encoder.name,
        "weights_hash": slide_encoder.weights_hash or "",
        "num_tiles": len(tiles.coords_l0),
    }
    write_slide_embedding(target, embedding, attributes)
    return len(embedding)
