"""Values for what a slide is on its way through a process.

    ClaimedSlide    under its lock; nothing was opened
    PreparedSlide   its grid is laid, and what the stream is to feed is known
    FinishedSlide   its end, well or not

The one object that changes on the way is the `SlideWork` that they hold.
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
    times: str  # `file_times` before anything was read; '' where they do not count
    # whether the stored ledger lacks something of the slide's file or of its row in the cohort
    ledger_is_old: bool = False

    @property
    def entry(self) -> SlideEntry:
        """Row of the cohort."""
        return self.work.entry


@dataclass(frozen=True, kw_only=True)
class PreparedSlide:
    """A slide whose grid is laid, and what the stream is to feed of it.

    Decode workers, the encoders' thread and the sink see this one value.
    """

    claimed: ClaimedSlide
    slide: Slide | None = None  # None where it was not opened
    table: TileTable | None = (
        None  # of the grid, or its candidates before pixel filters
    )
    attributes: PlainValues = field(default_factory=dict)  # of its tiles' files
    streamed: tuple[AnyStage, ...] = ()  # stages that its tiles feed
    warnings: tuple[str, ...] = ()  # on how its tiles were changed
    known_rows: Mapping[str, KnownRows] = field(default_factory=dict)  # by address
    measures: TileMeasures | None = None  # filled while tiles are decoded
    whole_sum: WholeSum | None = None  # while nobody has read every byte of its file

    @property
    def work(self) -> SlideWork:
        """Ledger and values; for the thread that owns them."""
        return self.claimed.work

    @property
    def entry(self) -> SlideEntry:
        """Row of the cohort."""
        return self.claimed.entry

    def fetched(self) -> dict[str, int]:
        """Bytes and requests of a slide by URL; none of a file.

        Its fingerprint counts twice: it is taken before the slide is read and after.
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
class FinishedSlide:
    """The end of a slide on its way through a process."""

    entry: SlideEntry
    facts: PlainValues = field(default_factory=dict)  # of a slide that is done
    error: Exception | None = None  # of a slide that failed
    stage: str = ""  # where it failed
