"""Slide embeddings from tiles files that are there already: ours, TRIDENT's or CLAM's."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from thinsection.errors import StoreError, ThinsectionError
from thinsection.files.lock import LOCK_NAME, hold
from thinsection.pipeline.results import SlideResult
from thinsection.pool import SlideEncoder, check_fit
from thinsection.slide.geometry import nominal_mpp
from thinsection.stages import naming
from thinsection.stages.keys import aggregate_key
from thinsection.store.ledger import SlideLedger, StageRecord, load_ledger
from thinsection.store.slide_embedding import read_slide_embedding, write_slide_embedding
from thinsection.store.tiles_h5 import TilesFile, read_tiles


@dataclass(frozen=True, slots=True)
class TilesSource:
    """One tiles file and where its slide embedding goes."""

    slide_id: str
    path: Path
    target: Path


def find_tiles(folder: Path, out: Path | None = None) -> list[TilesSource]:
    """The tiles files below a folder.

    `<slide_id>/tiles.h5` of a run keeps its slide embedding beside it; flat `*.h5` files of
    TRIDENT or CLAM get `<out or folder>/slide_embeddings/<slide_id>.h5`.

    Raises:
        StoreError: there is none; says what was looked for.
    """
    if folder.is_file():
        folder, files = folder.parent, [folder]
    else:
        files = sorted(path for path in folder.rglob("*.h5") if not path.name.startswith("."))
    found = []
    for path in files:
        if path.name == naming.TILES:
            slide_id = path.parent.name
            base = out / slide_id if out else path.parent
            found.append(TilesSource(slide_id, path, base / naming.SLIDE_EMBEDDING))
        elif path.name != naming.SLIDE_EMBEDDING and path.parent.name != "slide_embeddings":
            base = (out or folder) / "slide_embeddings"
            found.append(TilesSource(path.stem, path, base / path.name))
    if not found:
        raise StoreError(
            f"folder must hold <slide_id>/tiles.h5 of thinsection, or *.h5 features of TRIDENT or "
            f"CLAM, got none below {str(folder)!r}; run `thinsection embed` first"
        )
    return found


def aggregate_files(
    sources: Sequence[TilesSource], slide_encoder: SlideEncoder, *, tile_px_l0: int | None = None
) -> Iterator[SlideResult]:
    """Pools each file; a bad one is a failed result and stops no other.

    Args:
        sources: from `find_tiles`.
        slide_encoder: loaded.
        tile_px_l0: edge of a tile in level-0 px where a file does not say.

    Memory: one slide's embeddings, 4 N D bytes, and the slide encoder's own bound.
    """
    for source in sources:
        try:
            yield _aggregate(source, slide_encoder, tile_px_l0)
        except (ThinsectionError, OSError) as error:
            message = f"{type(error).__name__}: {error}"
            yield SlideResult(
                slide_id=source.slide_id,
                slide_path=str(source.path),
                status="failed",
                stage="aggregate",
                error=message,
            )


def _aggregate(
    source: TilesSource, slide_encoder: SlideEncoder, tile_px_l0: int | None
) -> SlideResult:
    tiles = read_tiles(source.path)
    if tiles.features is None or len(tiles.features) == 0:
        raise StoreError(
            f"tiles file must hold embeddings, got none in {str(source.path)!r}; "
            "run `thinsection embed` first"
        )
    edge = tiles.tile_px_l0 or tile_px_l0
    if edge is None:
        raise StoreError(
            f"tile_px_l0 is missing in {str(source.path)!r}; pass --tile-px-l0 (512 for 512 px "
            "tiles of a 20x slide)"
        )
    identity = [slide_encoder.name, slide_encoder.weights_hash]
    key = aggregate_key(_content_key(tiles), identity)
    ledger = load_ledger(source.path.parent)
    if "embed" in ledger.stages:  # a folder of ours: `run` knows the result by the same key
        key = aggregate_key(ledger.stages["embed"].key, identity)
    facts = {
        "num_tiles": len(tiles.coords_l0),
        "warnings": "; ".join(fit_warnings(tiles, slide_encoder)),
    }
    done = _embedded_already(source.target, key)
    if not done:
        with hold(_lock_path(source)):  # another process may have been at it
            done = _embedded_already(source.target, key)
            if not done:
                _replace(source, tiles, slide_encoder, tile_px_l0=edge, key=key)
    return SlideResult(
        slide_id=source.slide_id,
        slide_path=str(source.path),
        status="skipped" if done else "done",
        facts=facts,
    )


def _lock_path(source: TilesSource) -> Path:
    """A run's lock of the slide in a folder of ours; elsewhere one per file."""
    folder = source.target.parent
    ours = folder == source.path.parent
    return folder / (LOCK_NAME if ours else f"{LOCK_NAME}-{source.slide_id}")


def _replace(
    source: TilesSource, tiles: TilesFile, slide_encoder: SlideEncoder, *, tile_px_l0: int, key: str
) -> None:
    """Writes the slide embedding; a ledger beside it forgets the old one first."""
    assert tiles.features is not None
    embedding = slide_encoder.encode(tiles.features, tiles.coords_l0, tile_px_l0=tile_px_l0)
    folder = source.target.parent
    ledger = load_ledger(folder) if source.path.parent == folder else SlideLedger(folder=folder)
    if "aggregate" in ledger.stages:
        stages = {name: r for name, r in ledger.stages.items() if name != "aggregate"}
        ledger = replace(ledger, stages=stages)
        ledger.save()
    attributes = {
        "name": source.slide_id,
        "slide_encoder": slide_encoder.name,
        "weights_hash": slide_encoder.weights_hash or "",
        "num_tiles": len(tiles.coords_l0),
        "key": key,
    }
    write_slide_embedding(source.target, embedding, attributes)
    if ledger.stages:
        facts = {"slide_encoder": slide_encoder.name, "slide_dim": len(embedding)}
        files = {source.target.name: source.target.stat().st_size}
        ledger.with_stage("aggregate", StageRecord(key=key, files=files, facts=facts)).save()


def fit_warnings(tiles: TilesFile, slide_encoder: SlideEncoder) -> tuple[str, ...]:
    """What does not fit between the tiles and the slide encoder.

    Raises:
        InvalidInputError: the embeddings are of a tile encoder that it does not take.
    """
    attributes = tiles.attributes
    mpp, power = attributes.get("tile_mpp"), attributes.get("target_magnification")
    if mpp is None and power:  # TRIDENT's files say the power only
        mpp = nominal_mpp(float(power))
    px, name = attributes.get("patch_size"), attributes.get("encoder")
    return check_fit(
        slide_encoder,
        None if name is None else str(name),
        None if px is None else int(px),
        None if mpp is None else float(mpp),
    )


def _content_key(tiles: TilesFile) -> str:
    digest = hashlib.sha256()
    for array in (tiles.features, tiles.coords_l0):
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()


def _embedded_already(target: Path, key: str) -> bool:
    try:
        return bool(read_slide_embedding(target).attributes.get("key") == key)
    except StoreError:
        return False
