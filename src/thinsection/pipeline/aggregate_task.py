"""`aggregate_run`: the tiles files of a folder through a slide encoder, by any executor."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from thinsection.config import nearest
from thinsection.errors import StoreError, UnknownEncoderError
from thinsection.jobs.execute import execute
from thinsection.jobs.task import Report, Task
from thinsection.pipeline.aggregate_folder import TilesSource, aggregate_files, find_tiles
from thinsection.pipeline.results import SlideResult
from thinsection.pipeline.run_task import LOST_STAGE, set_threads
from thinsection.pool import SlideEncoder, load_slide_encoder, slide_encoder_names
from thinsection.stages.config import AggregateRunConfig, PoolingConfig
from thinsection.units import parse_bytes


@dataclass(frozen=True, kw_only=True)
class AggregateTask(Task[TilesSource, SlideResult]):
    """See `Task`: some tiles files in one process, which loads the slide encoder once.

    Attributes:
        pooling: the slide encoder and its settings.
        threads: CPU threads of torch; 0 leaves them.
    """

    kind: ClassVar[str] = "aggregate"
    entry_type: ClassVar[type[Any]] = TilesSource
    result_type: ClassVar[type[Any]] = SlideResult

    pooling: PoolingConfig
    threads: int = 0

    def __call__(
        self, entries: Sequence[TilesSource], *, on_event: Callable[[Any], None]
    ) -> Report[SlideResult]:
        """See `Task.__call__`."""
        set_threads(self.threads)
        encoder = loaded_encoder(self.pooling)
        results = aggregate_files(entries, encoder, tile_px_l0=self.pooling.tile_px_l0)
        return Report(results=tuple(results))

    def on_worker(self, *, threads: int, monitored: bool) -> Self:
        """See `Task.on_worker`; aggregation is not monitored."""
        return replace(self, threads=threads)

    def lost(self, entry: TilesSource, reason: str) -> SlideResult:
        """See `Task.lost`."""
        return SlideResult(
            slide_id=entry.slide_id,
            slide_path=str(entry.path),
            status="failed",
            stage=LOST_STAGE,
            error=reason,
        )


def aggregate_run(
    folder: Path,
    *,
    out: Path | None = None,
    config: AggregateRunConfig | None = None,
    on_result: Callable[[SlideResult], None] = lambda result: None,
    on_message: Callable[[str], None] = lambda text: None,
) -> list[SlideResult]:
    """Pools every tiles file below a folder; what is done with the same settings is skipped.

    Args:
        folder: of a run, or of TRIDENT's or CLAM's features; or one file.
        out: other output folder; on a shared file system for workers of other nodes.
        config: all settings.
        on_result: told of each slide as it ends.
        on_message: lines for the person who waits.

    Returns:
        One result per file, in the order of `find_tiles`.

    Memory: in each worker that of `aggregate_files`; here a result per file.

    Raises:
        ThinsectionError: bad settings, no files, or the cluster; a bad file is a failed result.
    """
    config = config or AggregateRunConfig()
    if not folder.exists():
        raise StoreError(f"folder must exist, got {str(folder)!r}")
    name = config.pooling.slide_encoder
    if name not in slide_encoder_names():  # before any worker starts
        raise UnknownEncoderError(
            f"unknown slide encoder {name!r}{nearest(name, slide_encoder_names())}"
        )
    folder, out = folder.absolute(), out and out.absolute()
    sources = find_tiles(folder, out)
    results: dict[str, SlideResult] = {}

    def take(report: Report[SlideResult]) -> None:
        for result in report.results:
            results[result.slide_path] = result
            on_result(result)

    execute(
        sources,
        AggregateTask(pooling=config.pooling, threads=config.executor.threads),
        config.executor,
        folder=out or (folder.parent if folder.is_file() else folder),
        on_report=take,
        on_message=on_message,
    )
    return [results[str(source.path)] for source in sources]


@functools.lru_cache(maxsize=1)
def loaded_encoder(pooling: PoolingConfig) -> SlideEncoder:
    """The slide encoder, loaded once per process and settings."""
    return load_slide_encoder(
        pooling.slide_encoder,
        weights=pooling.slide_weights,
        device=pooling.device,
        budget_bytes=parse_bytes(pooling.memory, name="memory"),
    )
