"""End of a run, with or without an error: tables, record, pages, and the summary for the caller."""

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from thinsection.files.atomic import output_errors
from thinsection.files.urls import is_url
from thinsection.jobs.task import Report
from thinsection.report.index import write_index
from thinsection.results.records import Record, log, update_record, write_efficiency
from thinsection.results.tables import write_tables
from thinsection.run.task import ENDS, RunTask, ended_slides
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.spec import stages_of
from thinsection.stages.stage import AnyStage
from thinsection.store.ledger import SlideLedger
from thinsection.store.outcome import KnownSlide, SlideResult, Status, known_slides
from thinsection.types import counted

if TYPE_CHECKING:
    from thinsection.jobs.slurm import Collected

EXIT_OK = 0
EXIT_SOME_FAILED = 3


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Results of a run."""

    out: Path | str  # the results folder, or its URL
    record: Path  # folder of the invocation's record
    results: tuple[SlideResult, ...]  # one per slide, in the order of the cohort
    stage_seconds: dict[str, float]  # seconds at work and waiting, by stage
    seconds: float  # wall-clock time
    allow_empty: bool = False  # True counts a slide without any tile as a success
    # slides of the folder whose files have the same content, each group by slide id
    equal_slides: tuple[tuple[str, ...], ...] = ()
    # slides that are used though quality control gives them the verdict 'exclude', and why
    unusable: tuple[tuple[str, str], ...] = ()
    # one per patient, in a run that makes their embeddings
    patients: tuple[SlideResult, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Number of slides by status: done, skipped, empty, excluded, failed."""
        counted = Counter(result.status for result in self.results)
        return {status: counted[status] for status in get_args(Status)}

    @property
    def exit_code(self) -> int:
        """0 if each slide and patient has its result, 3 if some failed, are empty or unusable."""
        counts = self.counts
        if any(patient.status == "failed" for patient in self.patients):
            return EXIT_SOME_FAILED
        if counts["failed"] or (counts["empty"] and not self.allow_empty):
            return EXIT_SOME_FAILED
        if self.unusable:
            return EXIT_SOME_FAILED
        return EXIT_OK

    def __repr__(self) -> str:
        counts = ", ".join(f"{n} {status}" for status, n in self.counts.items() if n)
        return f"<RunSummary {str(self.out)!r}: {counts or 'no slides'} in {self.seconds:.1f} s>"

    def _repr_html_(self) -> str:
        folder = ""
        if not is_url(str(self.out)):
            from thinsection.results.folder import open_results

            folder = open_results(self.out)._repr_html_()
        return f"<p>{html.escape(repr(self))}</p>{folder}"


def finish_run(
    task: RunTask,
    entries: Sequence[SlideEntry],
    report: Report[SlideResult],
    stages: Sequence[AnyStage],
    ledgers: Mapping[str, SlideLedger] | None = None,
) -> RunSummary:
    """Writes the tables, the record, its efficiency page, and the QC page if there was QC.

    The report merges all chunks; for a batch job, some entries may not be in it yet. `stages` are
    those that need no model. `ledgers` of finished slides, by slide id, are not read again.
    """
    record = Record.read(task.record)
    begun = datetime.fromisoformat(record.document["started"])
    seconds = (datetime.now(UTC) - begun).total_seconds()
    slides = known_slides(task.out, ledgers)
    waiting = _not_ended(entries, report.results)
    equal_slides = write_tables(task.out, slides, waiting)
    unusable = write_run_tables(task.out, slides, stages)
    of_this_run = {result.slide_id for result in report.results}
    summary = RunSummary(
        out=task.out,
        record=task.record,
        results=report.results,
        stage_seconds=dict(sorted(report.stage_seconds.items())),
        seconds=seconds,
        allow_empty=task.spec.output.allow_empty,
        equal_slides=tuple(equal_slides),
        unusable=tuple(item for item in unusable.items() if item[0] in of_this_run),
    )
    stage_seconds = {
        name: round(spent, 3) for name, spent in summary.stage_seconds.items()
    }
    facts = {
        "seconds": round(seconds, 3),
        "counts": summary.counts,
        "models": dict(report.facts),
        "stage_seconds": stage_seconds,
    }
    update_record(record, facts)
    if summary.counts["done"]:
        write_efficiency(task.record)
    log(task.record, f"ended: {summary!r}")
    write_index(task.out)
    return summary


def finish_arrays(collected: "Collected") -> RunSummary:
    """Ends a run whose slides were done by array tasks; some of these may still wait or run."""
    task = collected.task
    assert isinstance(task, RunTask)
    results = [
        collected.results[name]
        for name in collected.entries
        if name in collected.results
    ]
    report = Report(
        results=tuple(results),
        stage_seconds=collected.stage_seconds,
        facts=collected.facts,
    )
    entries = list(collected.entries.values())
    return finish_run(task, entries, report, stages_of(task.spec))


def write_run_tables(
    out: Path, slides: Sequence[KnownSlide], stages: Sequence[AnyStage]
) -> dict[str, str]:
    """Writes the tables of measures and of quality control that a run's settings ask for.

    Returns:
        Slides that a stage finds unusable, and why.
    """
    unusable: dict[str, str] = {}
    # tables of tiles become columns in those of the mask, which comes first among the stages
    for stage in reversed(stages):
        unusable |= stage.write_tables(out, slides)
    return unusable


def end_early(
    task: RunTask,
    entries: Sequence[SlideEntry],
    report: Report[SlideResult],
    error: BaseException,
) -> None:
    """Writes tables of the finished slides, if the disk has room, and adds a note on how to resume.

    Unreported slides are taken from the notes of their processes in the record.
    """
    ended = dict(ended_slides(task.record))
    for result in report.results:
        ended[result.slide_id] = result
    results = [ended[entry.slide_id] for entry in entries if entry.slide_id in ended]
    num_done = sum(result.status in ENDS for result in results)
    reason = str(error) or type(error).__name__
    tables = f"tables are in {task.out}"
    try:
        with output_errors(task.out):
            waiting = _not_ended(entries, results)
            write_tables(task.out, known_slides(task.out), waiting)
            update_record(Record.read(task.record), {"ended_by": reason})
            log(
                task.record, f"ended early: {reason}; {counted(num_done, 'slide')} done"
            )
            write_index(task.out, draw_thumbnails=False)
    except OSError as failure:
        tables = f"the tables could not be written ({failure})"
    error.add_note(
        f"{num_done} of {counted(len(entries), 'slide')} done, {tables}; they are kept: run the "
        "same command again to continue"
    )


def _not_ended(
    entries: Sequence[SlideEntry], results: Sequence[SlideResult]
) -> list[SlideEntry]:
    """Slides of an invocation that have no result yet."""
    ended = {result.slide_id for result in results}
    return [entry for entry in entries if entry.slide_id not in ended]
