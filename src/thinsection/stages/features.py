"""Embeddings and token grids of a slide's tiles, and the files that the stream fills with them."""

import hashlib
import json
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np

from thinsection.errors import InvalidInputError, StoreError
from thinsection.files.atomic import atomic_path, link_or_copy
from thinsection.slide.resize import resample_filter
from thinsection.stages.labels import join_label, variant
from thinsection.stages.stage import (
    AnyStage,
    EncoderOutput,
    GridTiles,
    Output,
    Reads,
    SlideWork,
    Stage,
    TileWriter,
    path_before_edit,
)
from thinsection.stages.tiles import TilesStage
from thinsection.store.tile_tables import Block, EmbeddingRows
from thinsection.store.tiles_h5 import EmbeddedTiles, TilesWriter, read_embedded_tiles
from thinsection.tiles import TileTable
from thinsection.tiles.stream import EmbeddedBatch
from thinsection.tiles.transforms import StainConfig, StainStatistics
from thinsection.types import PlainValues


def features_label(encoder: str, *, dtype: str, stain: StainConfig | None) -> str:
    """Name of embeddings: encoder, stored type, stain normalisation (None if it is off)."""
    parts = [encoder]
    if dtype != "float32":
        parts.append(dtype)
    if stain is not None:
        parts.append(stain.stain_norm)
        parts.append(variant(stain, leave_out=("stain_norm",)))
    return join_label(*parts)


@dataclass(frozen=True, kw_only=True)
class FeaturesStage(Stage[EmbeddedTiles]):
    """`GRID/features_ENCODER/ID.h5`: `features` (N, D) and `coords` (N, 2).

    Embeddings depend on pixels, tile grid and encoder, and on nothing else.
    """

    title: ClassVar[str] = "embed"
    reads: ClassVar[Reads] = "tiles"

    tiles: TilesStage
    encoder: str  # label of the encoder, part of the folder's name
    identity: PlainValues  # `EncoderIdentity.provenance`; see `result_fields`
    dtype: str = "float32"  # type of the stored embeddings
    # normalisation before the encoder
    stain: StainConfig = field(default_factory=StainConfig)
    target: StainStatistics | None = None  # colours that stain normalisation aims at

    @property
    def label(self) -> str:
        """Name of the embeddings: encoder, stored type, stain normalisation."""
        stain = None if self.target is None else self.stain
        return features_label(self.encoder, dtype=self.dtype, stain=stain)

    @cached_property
    def address(self) -> str:
        return f"{self.tiles.grid}/features_{self.label}"

    @cached_property
    def settings(self) -> PlainValues:
        stain = None
        if self.target is not None:
            stain = [asdict(self.stain), repr(self.target)]
        return {
            "encoder": result_fields(self.identity),
            "dtype": self.dtype,
            "resample": resample_filter(self.tiles.config.resample),
            "stain": stain,
        }

    @property
    def attributes(self) -> dict[str, object]:
        """Attributes of the file that name its encoder."""
        attributes = {
            "encoder" if name == "name" else name: value
            for name, value in self.identity.items()
        }
        attributes["resample"] = resample_filter(self.tiles.config.resample)
        return attributes

    def content(self, work: SlideWork, table: TileTable) -> str:
        """Hash of all that the embeddings depend on: pixels, tiles and encoder.

        It does not depend on how the tiles were chosen. The exception is stain normalisation, which
        estimates the stains from the tissue.
        """
        digest = self._row_digest(work, table)
        digest.update(np.ascontiguousarray(table.coords_l0).tobytes())
        return digest.hexdigest()[:24]

    def row_content(self, work: SlideWork, table: TileTable) -> str:
        """Hash of all that one row depends on: that of `content` without the list of tiles."""
        return self._row_digest(work, table).hexdigest()[:24]

    def _row_digest(self, work: SlideWork, table: TileTable) -> "hashlib._Hash":
        mask = self.tiles.mask
        parts = [
            work.source.key,
            mask.settings["reader"],
            None if self.target is None else mask.key(work.source),
            asdict(table.plan),
            self.settings,
        ]
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.sha256(text.encode())

    def reuse(self, work: SlideWork, table: TileTable) -> Output[EmbeddedTiles] | None:
        """Reuses the file of the same tiles under another grid's name; None if there is none."""
        content = self.content(work, table)
        for address, record in work.ledger.stages.items():
            if address == self.address or record.facts.get("content") != content:
                continue
            if not work.ledger.complete(record):
                continue
            work.ledger = work.ledger.with_local_files(record)
            name = self.file(work.entry.slide_id)
            source = next(iter(record.files))
            EmbeddingRows(work.path(source)).check()
            with atomic_path(work.path(name)) as tmp:
                link_or_copy(work.path(source), tmp)
            return Output(files=(name,), facts=record.facts)
        return None

    def stored_embedding_files(self, work: SlideWork, table: TileTable) -> list[Path]:
        """Files with embeddings from the same pixels and settings; their tiles may differ."""
        content = self.row_content(work, table)
        paths = [
            path
            for path, settings_hash in work.embeddings_before_edit.items()
            if settings_hash == content
        ]
        # of an edit in an earlier run
        own_path = work.path(self.file(work.entry.slide_id))
        path = path_before_edit(own_path, content)
        if path.is_file() and path not in paths:
            # no run can repair a damaged one, so its tiles are encoded again
            with suppress(StoreError, InvalidInputError):
                EmbeddingRows(path).check()
                paths.append(path)
        for record in work.ledger.stages.values():
            if record.facts.get("rows") == content and work.ledger.complete(record):
                paths += [work.path(name) for name in record.files]
        return paths

    @property
    def encoder_output(self) -> EncoderOutput:
        return self.encoder, "embeddings"

    def open(self, tiles: GridTiles) -> "EmbeddingsWriter":
        return EmbeddingsWriter(self, self, tiles)

    def load(self, work: SlideWork) -> EmbeddedTiles:
        """The stored embeddings. Memory: 4 N D bytes."""
        return read_embedded_tiles(work.path(self.file(work.entry.slide_id)))


def result_fields(identity: PlainValues) -> PlainValues:
    """The fields of an encoder's identity that decide a result; a change there runs stages again.

    Other fields are only recorded. The revision of the weights is one, since the hash covers every
    weight. So are the engine, although engines differ in the last bits, the comparison with the
    fingerprint, and the sample of embeddings of a caller's encoder.
    """
    return {
        name: value
        for name, value in identity.items()
        if name not in ("revision", "engine", "fingerprint", "sample")
    }


@dataclass(frozen=True, kw_only=True)
class TokensStage(Stage[None]):
    """`GRID/tokens_ENCODER/ID.h5`: `tokens` (N, T, C) in float16 and `coords` (N, 2)."""

    title: ClassVar[str] = "tokens"
    reads: ClassVar[Reads] = "tiles"

    features: FeaturesStage  # features of the same encoder, from the same forward pass

    @cached_property
    def address(self) -> str:
        return f"{self.features.tiles.grid}/tokens_{self.features.label}"

    @cached_property
    def settings(self) -> PlainValues:
        return self.features.settings

    @property
    def needs(self) -> tuple[AnyStage, ...]:
        return (self.features.tiles,)

    @property
    def encoder_output(self) -> EncoderOutput:
        return self.features.encoder, "tokens"

    def open(self, tiles: GridTiles) -> "EmbeddingsWriter":
        return EmbeddingsWriter(self, self.features, tiles)


class EmbeddingsWriter(TileWriter):
    """File of embeddings or tokens, filled by the stream; it appears complete or not at all.

    Args:
        stage: stage that the file belongs to.
        features: stage of the embeddings from the same forward pass; for embeddings `stage` itself.
        tiles: tiles of the slide.

    Memory: one batch.
    """

    def __init__(
        self,
        stage: "FeaturesStage | TokensStage",
        features: FeaturesStage,
        tiles: GridTiles,
    ) -> None:
        self._stage = stage
        self._features = features
        self._tiles = tiles
        self._notes = list(tiles.notes)
        self._merger = tiles.stored_rows.get(stage.address)
        self._name = stage.file(tiles.work.entry.slide_id)
        self._stack = ExitStack()
        self._writer: TilesWriter | None = None

    def append(self, batch: EmbeddedBatch[GridTiles]) -> None:
        """Adds the embeddings (b, D) or tokens (b, T, C) of the encoder's next tiles."""
        self._notes += [note for note in batch.notes if note not in self._notes]
        label, result = self._stage.encoder_output
        parts = batch.tokens if result == "tokens" else batch.tile_embeddings
        values = parts[label]
        writer = self._open_writer(values.shape[1:])
        if self._merger is None:
            writer.append(batch.coords_l0, values)
        else:
            _append_blocks(writer, self._merger.add(batch.coords_l0, values))

    def finish(self) -> Output[None]:
        """Moves the finished file to its place; a slide without tiles gets an empty one."""
        work = self._tiles.work
        features = self._features
        writer = self._open_writer((self._tiles.dims[features.encoder],))
        if self._merger is not None:
            _append_blocks(writer, self._merger.remaining())
        writer.close()
        self._stack.close()  # fsync and rename
        facts: dict[str, object] = {"dim": writer.shape[-1], **features.attributes}
        facts["warnings"] = "; ".join(self._notes)
        if self._stage is features:
            table = work.value(features.tiles)
            facts["content"] = features.content(work, table)
            facts["rows"] = features.row_content(work, table)
        return Output(files=(self._name,), facts=facts)

    def abandon(self) -> None:
        """Deletes the incomplete file."""
        if self._writer is None:
            return
        with suppress(OSError, RuntimeError):  # a full disk may refuse this, too
            self._writer.close()
        self._stack.__exit__(OSError, OSError("abandoned"), None)

    def _open_writer(self, shape: tuple[int, ...]) -> TilesWriter:
        if self._writer is None:
            path = self._tiles.work.path(self._name)
            is_features = self._stage is self._features
            self._writer = TilesWriter(
                self._stack.enter_context(atomic_path(path)),
                dim=shape,
                dataset="features" if is_features else "tokens",
                dtype=self._features.dtype if is_features else "float16",
                attributes=dict(self._tiles.attributes) | self._features.attributes,
            )
        return self._writer


def _append_blocks(writer: TilesWriter, blocks: Iterable[Block]) -> None:
    for coords_l0, values in blocks:
        writer.append(coords_l0, values)
