"""Slide embeddings from stored tile embeddings, in folders of our results, TRIDENT or CLAM."""

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from thinsection.config import as_mapping
from thinsection.errors import StoreError, slide_boundary
from thinsection.files.atomic import output_errors
from thinsection.files.lock import LOCK_NAME, find_unfinished_files, hold, sweep_slide
from thinsection.jobs.execute import execute
from thinsection.jobs.task import OnEvent, Report, Task
from thinsection.pool import SlideEncoder, TileLayout, load_slide_encoder
from thinsection.pool.encoder import (
    BLOCK_ROWS,
    check_slide_encoder,
    pools_by_torch,
    slide_encoder_identity,
)
from thinsection.report.index import write_index
from thinsection.results.folder import open_results
from thinsection.results.records import recording
from thinsection.results.tables import write_tables
from thinsection.run.task import set_threads
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.config import AggregateRunConfig, PoolingConfig
from thinsection.stages.features import result_fields
from thinsection.stages.leaves import (
    PoolingStage,
    compatibility_warnings,
    pool_tiles,
    tile_layout,
)
from thinsection.stages.stage import Reads, SlideWork, Stage
from thinsection.store.hdf5 import open_h5
from thinsection.store.identity import Source
from thinsection.store.ledger import SLIDES, load_ledger
from thinsection.store.outcome import LOST_STAGE, SlideResult, known_slides
from thinsection.store.tile_tables import EmbeddingRows
from thinsection.store.tiles_h5 import (
    TilesFile,
    read_slide_embedding,
    read_tiles,
)
from thinsection.types import CoordsL0, Document, counted, parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FeaturesFile:
    """File with the tile embeddings of one slide."""

    slide_id: str
    path: Path  # HDF5 file
    out: Path  # slide embeddings are written to `OUT/slide_features_NAME/ID.h5`
    # results folder in whose ledger the slide embedding is recorded; None for files of other tools,
    # or if slide embeddings go to another folder
    results: Path | None = None

    def succeeded(
        self, status: Literal["done", "skipped"], facts: Document
    ) -> SlideResult:
        """Result of a slide that has its embedding."""
        return SlideResult(
            slide_id=self.slide_id,
            slide_path=str(self.path),
            status=status,
            facts=facts,
        )

    def failed(self, stage: str, error: str) -> SlideResult:
        """Result of a slide without an embedding."""
        return SlideResult(
            slide_id=self.slide_id,
            slide_path=str(self.path),
            status="failed",
            stage=stage,
            error=error,
        )


@dataclass(frozen=True, kw_only=True)
class PoolingTask(Task[FeaturesFile, SlideResult]):
    """See `Task`: pools some features files in one process, which loads the slide encoder once."""

    kind: ClassVar[str] = "aggregate"
    entry_type: ClassVar[type] = FeaturesFile
    result_type: ClassVar[type] = SlideResult

    pooling: PoolingConfig

    def __call__(
        self, entries: Sequence[FeaturesFile], *, on_event: OnEvent
    ) -> Report[SlideResult]:
        """See `Task.__call__`; a bad file gives a failed result.

        Memory: as `pool_tiles`, for one slide at a time.
        """
        set_threads(self.threads, torch_too=pools_by_torch(self.pooling.slide_encoder))
        encoder = loaded_encoder(self.pooling)
        results = []
        reasons: dict[str, str] = {}
        for file in entries:
            result = None
            # catches the errors of one slide; `result` is then None
            with slide_boundary(file.slide_id, reasons.__setitem__):
                if file.results is not None:
                    result = _pool_recorded(file, file.results, encoder)
                else:
                    result = _pool_foreign(file, encoder, self.pooling)
            if result is None:
                result = file.failed(PoolingStage.title, reasons[file.slide_id])
            results.append(result)
        return Report(results=tuple(results))

    def lost(self, entry: FeaturesFile, reason: str) -> SlideResult:
        """See `Task.lost`."""
        return entry.failed(LOST_STAGE, reason)


def aggregate_folder(
    folder: Path,
    *,
    out: Path | None = None,
    config: AggregateRunConfig | None = None,
    on_result: Callable[[SlideResult], None] = lambda result: None,
    on_message: Callable[[str], None] = lambda text: None,
) -> list[SlideResult]:
    """Pools every features file of a folder; returns a result per file, also for finished ones.

    In a results folder the embeddings of every grid and encoder are pooled (or those that
    `pooling.features` names), into `GRID/slide_features_NAME/`. For other folders (TRIDENT's,
    CLAM's) or one file, results go to `slide_features_NAME/` beside them, or below `out`, which
    workers on other nodes must be able to read. `on_result` is called as each slide ends.

    Memory: in each worker a block of embeddings for mean and max, 8 D bytes for each of at most
    8,192 tiles; else one slide's embeddings, 4 N D bytes, and the slide encoder's own limit.
    `thinsection plan --command aggregate` predicts the peak.

    Raises ThinsectionError: bad settings, no files, or the cluster; a bad file only fails itself.
    """
    config = config or AggregateRunConfig()
    config.check_packages()
    if not folder.exists():
        raise StoreError(f"folder must exist, got {str(folder)!r}")
    check_slide_encoder(config.pooling.slide_encoder)  # before any worker starts
    folder = folder.absolute()
    if out is not None:
        out = out.absolute()
    files = find_features(folder, out=out, wanted=config.pooling.features)
    results: dict[Path, SlideResult] = {}

    def take_report(report: Report[SlideResult]) -> None:
        for result in report.results:
            results[Path(result.slide_path)] = result
            on_result(result)

    input_folder = folder.parent if folder.is_file() else folder
    record_folder = files[0].results or out or input_folder
    task = PoolingTask(pooling=config.pooling, threads=config.executor.threads)
    try:
        with (
            output_errors(record_folder),
            recording(record_folder, "aggregate", as_mapping(config)) as record,
        ):
            execute(
                files,
                task,
                config.executor,
                folder=record.folder,
                on_report=take_report,
                on_message=on_message,
            )
            all_results = [results[file.path] for file in files]
            for result in _damaged_slides(folder):
                on_result(result)
                all_results.append(result)
            for status in ("done", "skipped"):
                count = sum(result.status == status for result in all_results)
                record.counts[status] = count
    except BaseException as error:
        error.add_note(
            f"{len(results)} of {counted(len(files), 'slide')} done; run the same command again to "
            "continue"
        )
        raise
    if files[0].results is not None:
        write_tables(files[0].results, known_slides(files[0].results))
        write_index(files[0].results)
    return all_results


def _damaged_slides(folder: Path) -> list[SlideResult]:
    """Slides of a results folder whose ledger is damaged, so that their results are unknown."""
    if not (folder / SLIDES).is_dir():
        return []
    return [
        SlideResult(
            slide_id=slide_id,
            slide_path="",
            status="failed",
            stage="ledger",
            error=ledger.damage,
        )
        for slide_id, ledger in open_results(folder).ledgers.items()
        if ledger.damage
    ]


def find_features(
    folder: Path, *, out: Path | None = None, wanted: str | None = None
) -> list[FeaturesFile]:
    """Features files of a folder, see `aggregate_folder`; `wanted` is part of an address.

    Raises StoreError: there are none; the message names the patterns.
    """
    if (folder / SLIDES).is_dir():
        return _recorded_features(folder, out, wanted)
    files_folder = folder.parent if folder.is_file() else folder
    default_out = files_folder
    if files_folder.name.startswith("features_"):
        default_out = files_folder.parent
    paths = [folder] if folder.is_file() else sorted(folder.rglob("*.h5"))
    files = [
        FeaturesFile(slide_id=path.stem, path=path, out=out or default_out)
        for path in paths
        if not path.name.startswith(".")
        and not path.parent.name.startswith(("slide_features", "patient_features"))
    ]
    if not files:
        raise StoreError(
            "folder must contain GRID/features_ENCODER/*.h5 of a run, or *.h5 features of "
            f"TRIDENT or CLAM, got none below {str(folder)!r}; run `thinsection run` first"
        )
    return files


def _recorded_features(
    folder: Path, out: Path | None, wanted: str | None
) -> list[FeaturesFile]:
    """Features files that the ledgers of a results folder list."""
    results = open_results(folder)
    addresses = [name for name in results.features if wanted is None or wanted in name]
    files = []
    for slide_id, address in product(results.slides, addresses):
        if address not in results.ledgers[slide_id].stages:
            continue
        grid = address.split("/")[0]
        file = FeaturesFile(
            slide_id=slide_id,
            path=results.file(slide_id, address),
            out=(out or folder) / grid,
            results=None if out else folder,
        )
        files.append(file)
    if not files:
        addresses = list(results.features)
        option = f" for features {wanted!r}" if wanted else ""
        raise StoreError(
            f"results folder must contain embeddings, got {addresses or 'none'}{option} in "
            f"{str(folder)!r}; run `thinsection run` first"
        )
    return files


@dataclass(frozen=True, kw_only=True)
class RecordedStage(Stage[None]):
    """A finished stage of which only the ledger entry is known, and not the settings.

    A new stage can have it in `needs`, to use the result of an earlier run.
    """

    title: ClassVar[str] = "recorded"

    reads: ClassVar[Reads] = "store"

    recorded_address: str
    recorded_key: str

    @property
    def address(self) -> str:
        return self.recorded_address

    def key_from(self, input_keys: Sequence[str], source: Source) -> str:
        """The key that the ledger has."""
        return self.recorded_key


def _pool_recorded(
    file: FeaturesFile, results: Path, slide_encoder: SlideEncoder
) -> SlideResult:
    """Pools a file of a results folder with the stage that a run uses, in the slide's ledger."""
    lock = results / SLIDES / file.slide_id / LOCK_NAME
    with hold(lock):
        ledger = load_ledger(results, file.slide_id)
        address = str(file.path.parent.relative_to(results))
        if address not in ledger.stages:
            raise StoreError(
                f"embeddings must be recorded in the ledger of {file.slide_id!r}, got "
                f"{address!r}, which it does not list; run `thinsection run` again"
            )
        features = RecordedStage(
            recorded_address=address, recorded_key=ledger.stages[address].key
        )
        # the embeddings are read once, where they are pooled
        tiles = read_tiles(file.path, embeddings=False)
        warnings = compatibility_warnings(tiles, slide_encoder, file.path)
        stage = PoolingStage(
            features=features,
            slide_encoder=slide_encoder_identity(slide_encoder),
        )
        sweep_slide(
            file.slide_id, lock.parent, find_unfinished_files([results / stage.address])
        )
        facts = {**ledger.slide, **_facts(tiles, warnings)}
        entry = SlideEntry(slide_id=file.slide_id, slide_path=str(file.path))
        work = SlideWork(
            entry=entry,
            out=results,
            # the slide file is not known, and not needed: the recorded key stands for it
            source=Source(key=""),
            ledger=ledger,
            stages=(stage,),
            slide_encoders={slide_encoder.name: slide_encoder},
        )
        if work.is_done(stage):
            EmbeddingRows(file.path).check()
            for name in work.ledger.stages[stage.address].files:
                read_slide_embedding(work.path(name))  # raises if the file is damaged
            return file.succeeded("skipped", facts)
        work.missing = [stage]
        work.check_stale()
        work.perform(stage)
    return file.succeeded("done", facts)


def _pool_foreign(
    file: FeaturesFile, encoder: SlideEncoder, pooling: PoolingConfig
) -> SlideResult:
    """Pools a file of another tool; the key is stored in the slide embedding itself."""
    tiles = read_tiles(file.path, embeddings=False)
    with open_h5(file.path) as opened:
        has_features = "features" in opened
    if not has_features or not len(tiles):
        raise StoreError(
            f"features file must contain embeddings, got none in {str(file.path)!r}; run "
            "`thinsection run` first"
        )
    layout = layout_of(tiles, file, pooling)
    facts = _facts(tiles, compatibility_warnings(tiles, encoder, file.path))
    name = encoder.label(file.path.parent.name.removeprefix("features_"))
    folder = file.out / f"slide_features_{name}"
    target = folder / f"{file.slide_id}.h5"
    rows = EmbeddingRows(file.path)
    key = content_key(rows, tiles.coords_l0, encoder, layout)
    # another process may have pooled it meanwhile
    with hold(folder / f"{LOCK_NAME}-{file.slide_id}"):
        for unfinished in find_unfinished_files([folder]).get(file.slide_id, []):
            unfinished.unlink(missing_ok=True)
        # raised if there is no slide embedding yet
        with contextlib.suppress(StoreError):
            if read_slide_embedding(target).attributes.get("key") == key:
                return file.succeeded("skipped", facts)
        pool_tiles(file.path, encoder, target, layout, key=key)
    return file.succeeded("done", facts)


def layout_of(
    tiles: TilesFile, file: FeaturesFile, pooling: PoolingConfig
) -> TileLayout:
    """Layout of a file's tiles; see `tile_layout`."""
    return tile_layout(
        tiles, file.path, tile_px_l0=pooling.tile_px_l0, stride_l0=pooling.stride_l0
    )


def _facts(tiles: TilesFile, warnings: Sequence[str]) -> Document:
    return {"num_tiles": len(tiles.coords_l0), "warnings": "; ".join(warnings)}


def content_key(
    rows: EmbeddingRows,
    coords_l0: CoordsL0,
    slide_encoder: SlideEncoder,
    layout: TileLayout,
) -> str:
    """Hash of all that the slide embedding depends on: encoder, layout, embeddings, coordinates.

    Memory: a block of rows.
    """
    deciding_values = {
        "slide_encoder": result_fields(slide_encoder.identity),
        "size_l0": layout.size_l0,
        "stride_l0": layout.stride_l0,
    }
    digest = hashlib.sha256(json.dumps(deciding_values, sort_keys=True).encode())
    for array in chain(rows.blocks(BLOCK_ROWS), [coords_l0]):
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()


@functools.lru_cache(maxsize=1)
def loaded_encoder(pooling: PoolingConfig) -> SlideEncoder:
    """Slide encoder, loaded once per process and settings."""
    return load_slide_encoder(
        pooling.slide_encoder,
        weights=pooling.slide_weights,
        device=pooling.device,
        budget_bytes=parse_bytes(pooling.aggregate_memory, name="aggregate_memory"),
    )
