"""Values for the states of a slide in a process.

    ClaimedSlide    under its lock, not opened
    PreparedSlide   with one of its grids laid; the stages that the stream feeds are known
    SlideEnd        ended, with or without an error

Only the `SlideWork` inside these values changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from thinsection.slide import Slide
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.measures import TileMeasures
from thinsection.stages.reuse import KnownRows
from thinsection.stages.stage import AnyStage, SlideWork
from thinsection.store.identity import WholeSum, fingerprint_reads
from thinsection.tiles import TileTable
from thinsection.types import PlainValues


@dataclass(frozen=True, kw_only=True)
class ClaimedSlide:
    """A slide under its lock, before it is opened."""

    work: SlideWork
    times: str  # `file_times` before anything was read; '' if times are not compared
    # True if the stored ledger lacks facts of the slide's file or of its cohort row
    ledger_is_old: bool = False

    @property
    def entry(self) -> SlideEntry:
        """Row of the cohort."""
        return self.work.entry


@dataclass(frozen=True, kw_only=True)
class PreparedSlide:
    """Slide with one of its grids, and all that the stream must make from it.

    Decode workers, the encoders' thread and the sink share this value. A slide with several grids
    to read is several of these, which follow each other and share the opened slide.
    """

    claimed: ClaimedSlide
    slide: Slide | None = None  # None if it was not opened
    # the grid, or its candidates before pixel filters
    table: TileTable | None = None
    # attributes of its tile files
    attributes: PlainValues = field(default_factory=dict)
    # stages whose results are made from its tiles
    streamed_stages: tuple[AnyStage, ...] = ()
    warnings: tuple[str, ...] = ()  # warnings about how its tiles were changed
    # key: address of a stage
    known_rows: Mapping[str, KnownRows] = field(default_factory=dict)
    measures: TileMeasures | None = None  # filled while tiles are decoded
    whole_sum: WholeSum | None = None  # None once the complete file has been hashed
    # tiles to read of all grids, for the first grid; None for the others
    num_tiles_of_slide: int | None = None
    is_last: bool = True  # True if nothing of the slide follows

    @property
    def work(self) -> SlideWork:
        """Ledger and values; only for the thread that owns them."""
        return self.claimed.work

    @property
    def entry(self) -> SlideEntry:
        """Row of the cohort."""
        return self.claimed.entry

    def fetched(self) -> dict[str, int]:
        """Bytes and requests for a slide read from a URL; zero for a local file.

        The fingerprint counts twice, since it is taken before and after the slide is read. The
        look that finds what an earlier run has done is not counted.
        """
        remote = None if self.slide is None else self.slide.source
        if remote is None:
            return {}
        sampled, requests = fingerprint_reads(remote.size)
        return {
            "fetched_bytes": remote.fetched_bytes + 2 * sampled,
            "file_bytes": remote.size,
            "requests": remote.requests + 2 * requests,
        }


@dataclass(frozen=True, kw_only=True)
class SlideEnd:
    """Result of a slide in a process."""

    entry: SlideEntry
    facts: PlainValues = field(default_factory=dict)  # facts of a slide that is done
    error: Exception | None = None  # error of a slide that failed
    stage: str = ""  # stage that failed
