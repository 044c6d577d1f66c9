"""Tile embeddings, and dense token grids: stages that the stream feeds."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from thinsection.files.atomic import atomic_path
from thinsection.stages.labels import join_label, variant
from thinsection.stages.stage import Output, SlideWork, Stage
from thinsection.stages.tiles import TilesStage
from thinsection.store.tiles_h5 import TilesFile, TilesWriter, read_tiles
from thinsection.tiles import TileTable
from thinsection.tiles.transforms import StainConfig, StainLook
from thinsection.types import CoordsL0


@dataclass(frozen=True, kw_only=True)
class FeaturesStage(Stage):
    """`GRID/features_ENCODER/ID.h5`: `features` (N, D) and `coords` (N, 2).

    Embeddings depend on pixels, tile grid and encoder, and on nothing else.
    """

    title: ClassVar[str] = "embed"
    reads = "tiles"

    tiles: TilesStage
    encoder: str  # its label, as part of the folder's name
    identity: Mapping[str, Any]  # `TileEncoder.identity`: what of it decides a result
    dtype: str = "float32"  # of the stored embeddings
    stain: StainConfig = field(default_factory=StainConfig)  # normalisation before the encoder
    target: StainLook | None = None  # the look that it aims at

    @property
    def label(self) -> str:
        """Name of the embeddings: encoder, stored type, stain normalisation."""
        dtype = "" if self.dtype == "float32" else self.dtype
        if self.target is None:
            return join_label(self.encoder, dtype)
        rest = variant(self.stain, leave_out=("stain_norm",))
        return join_label(self.encoder, dtype, self.stain.stain_norm, rest)

    @property
    def address(self) -> str:
        return f"{self.tiles.grid}/features_{self.label}"

    @property
    def settings(self) -> Mapping[str, Any]:
        stain = None if self.target is None else [asdict(self.stain), repr(self.target)]
        return {"encoder": deciding(self.identity), "dtype": self.dtype, "stain": stain}

    @property
    def attributes(self) -> dict[str, str]:
        """What the file says of its encoder."""
        return {"encoder" if k == "name" else k: v for k, v in self.identity.items()}

    def content(self, work: SlideWork, table: TileTable) -> str:
        """Hash of what the embeddings depend on: pixels, tiles, encoder; not of how the tiles came
        to be. Stain normalisation looks at the tissue, so that counts where it is on."""
        tissue = None if self.target is None else self.tiles.mask.key(work.source)
        parts = [work.source, self.tiles.mask.reader, tissue, asdict(table.plan), self.settings]
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode())
        digest.update(np.ascontiguousarray(table.coords_l0).tobytes())
        return digest.hexdigest()[:24]

    def reuse(self, work: SlideWork, table: TileTable) -> Output | None:
        """Takes the file of the same tiles under another grid's name; None where there is none."""
        content = self.content(work, table)
        for address, record in work.ledger.stages.items():
            same = record.facts.get("content") == content and address != self.address
            if not (same and work.ledger.complete(record)):
                continue
            work.ledger = work.ledger.bring(record)
            source = work.path(next(iter(record.files)))
            name = self.file(work.entry.slide_id)
            with atomic_path(work.path(name)) as tmp:
                try:
                    os.link(source, tmp)
                except OSError:  # a file system without hard links
                    shutil.copyfile(source, tmp)
            return Output(files=(name,), facts=record.facts)
        return None

    def load(self, work: SlideWork) -> TilesFile:
        """The stored embeddings. Memory: 4 N D bytes."""
        return read_tiles(work.path(self.file(work.entry.slide_id)))


def deciding(identity: Mapping[str, Any]) -> dict[str, Any]:
    """What of an encoder's identity decides a result: the hash sees every weight, and the revision
    that brought them is for the record."""
    return {name: value for name, value in identity.items() if name != "revision"}


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
        self._stack = ExitStack()
        self._tmp = self._stack.enter_context(atomic_path(work.path(self._name)))
        self._writer: TilesWriter | None = None

    def append(self, coords_l0: CoordsL0, values: npt.NDArray[np.floating]) -> None:
        """Adds the embeddings (b, D) or tokens (b, T, C) of some tiles."""
        self._open(values.shape[1:]).append(coords_l0, values)

    def close(self, empty_shape: tuple[int, ...]) -> Output:
        """Puts the file in its place; `empty_shape` is of a row, for a slide without tiles."""
        work, features = self._work, self._features
        writer = self._open(empty_shape)
        writer.close()
        work.begin(self.stage)
        self._stack.close()  # fsync and rename
        facts: dict[str, Any] = {"dim": writer.shape[-1], **features.attributes}
        facts["warnings"] = "; ".join(work.warnings)
        if self.stage is features:
            facts["content"] = features.content(work, work.value(features.tiles))
        return Output(files=(self._name,), facts=facts)

    def abandon(self) -> None:
        """Drops what was written."""
        if self._writer is not None:
            self._writer.close()
        self._stack.__exit__(OSError, OSError("abandoned"), None)

    def _open(self, shape: tuple[int, ...]) -> TilesWriter:
        if self._writer is None:
            features, embeds = self._features, self.stage is self._features
            self._writer = TilesWriter(
                self._tmp,
                dim=shape,
                dataset="features" if embeds else "tokens",
                dtype=features.dtype if embeds else "float16",
                attributes=self._work.attributes | features.attributes,
            )
        return self._writer
