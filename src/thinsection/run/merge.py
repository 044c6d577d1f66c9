"""Joins results folders into one: `thinsection merge A B --out ALL`.

Files of finished slides are linked, or copied, and a slide's ledger is written after its files. So
a merge that was interrupted leaves complete slides, and the same command continues. Tables and
pages are made again from the contents of the merged folder.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from thinsection.config import from_mapping
from thinsection.errors import StoreError, ThinsectionError
from thinsection.files.atomic import (
    atomic_path,
    link_or_copy,
    output_errors,
    read_json,
    write_json,
)
from thinsection.files.lock import LOCK_NAME, hold
from thinsection.files.urls import is_url
from thinsection.report.index import write_index
from thinsection.results.choice import recorded_grids
from thinsection.results.records import (
    Record,
    begin_record,
    log,
    read_records,
    update_record,
)
from thinsection.results.tables import write_tables
from thinsection.run.ending import write_run_tables
from thinsection.run.merge_plan import (
    MergePlan,
    Part,
    PlannedSlide,
    SettingsGroup,
    SourceFolder,
    plan_merge,
    settings_groups,
)
from thinsection.run.run import check_folder
from thinsection.run.task import ended_slides, write_ended
from thinsection.slide.ids import SlideFile
from thinsection.stages.config import RunConfig
from thinsection.stages.spec import resolve, stages_of
from thinsection.store.identity import file_sum
from thinsection.store.ledger import SLIDES, StageRecord, load_ledger
from thinsection.store.outcome import SlideResult, failure_path, known_slides
from thinsection.store.slide_ids import add_slide_ids
from thinsection.types import counted

OnMessage = Callable[[str], None]
MergeStatus = Literal["taken", "kept", "left-out"]


@dataclass(frozen=True, kw_only=True)
class MergedSlide:
    """Outcome of one slide in a merge."""

    slide_id: str
    # 'kept': the merged folder had all its results before; 'left-out': no folder has finished it
    status: MergeStatus
    source: str  # folder from which the slide was taken, or where it is unfinished
    reason: str = ""  # why the slide was left out


@dataclass(frozen=True, kw_only=True)
class MergeSummary:
    """Outcome of a merge."""

    out: Path
    slides: tuple[MergedSlide, ...]
    num_files: int  # files that were linked or copied
    num_bytes: int  # their size

    @property
    def counts(self) -> dict[str, int]:
        """Number of slides by status: taken, kept, left-out."""
        counted = Counter(slide.status for slide in self.slides)
        return {status: counted[status] for status in get_args(MergeStatus)}


def merge_results(
    folders: Sequence[str | Path],
    *,
    out: str | Path,
    copy: bool = False,
    on_message: OnMessage = lambda text: None,
) -> MergeSummary:
    """Joins results folders into one, in which each finished slide appears once.

    A slide that several folders have is taken once if its file and its results are the same.
    Results with other settings lie in other folders, and all are taken. Unfinished and failed
    slides are left out. The folders stay as they are.

    Args:
        folders: results folders; a folder that contains results folders stands for all of them.
        out: folder of the merged results, which may exist.
        copy: True copies files, in place of hard links to them.
        on_message: receives notes on slides and settings that differ.

    Memory: some kB per slide of all folders.

    Raises:
        StoreError: a folder has no results, or two folders disagree about a slide; nothing is
            changed then.
        OutputError: `out` cannot be written; the same call continues.
    """
    target = Path(out)
    sources = [SourceFolder.read(folder) for folder in _distinct(folders, target)]
    existing = SourceFolder.read(target) if (target / SLIDES).is_dir() else None
    plan = plan_merge(sources, existing)
    for note in plan.notes:
        on_message(note)
    with output_errors(target):
        target = check_folder(target)
        summary = _place_slides(plan, sources, target, copy=copy, on_wait=on_message)
        for slide_id, (source, _) in plan.unfinished.items():
            has_result = bool(load_ledger(target, slide_id).stages)
            if slide_id in source.failures and not has_result:
                _copy_failure(source, slide_id, target)
        specs = _write_records(sources, plan, target, on_message)
        _write_tables(target, specs, on_message)
    return summary


def _distinct(folders: Sequence[str | Path], out: Path) -> list[Path]:
    """Folders without repetitions. Raises StoreError: a URL, or the merged folder itself."""
    by_place: dict[Path, Path] = {}
    for folder in folders:
        if is_url(str(folder)):
            raise StoreError(
                f"folder must be a local folder, got {str(folder)!r}; copy it here first"
            )
        places = [Path(folder)]
        if places[0].is_dir() and not (places[0] / SLIDES).is_dir():
            # It stands for all results folders in it, since a command line cannot hold a long list.
            below = sorted(places[0].iterdir())
            places = [path for path in below if (path / SLIDES).is_dir()] or places
        for place in places:
            by_place.setdefault(place.resolve(), place)
    if is_url(str(out)):
        raise StoreError(f"out must be a local folder, got {str(out)!r}")
    if out.resolve() in by_place:
        raise StoreError(
            f"out must be another folder than those that are merged, got {str(out)!r}"
        )
    if not by_place:
        raise StoreError("folders must name at least one results folder, got none")
    return list(by_place.values())


def _place_slides(
    plan: MergePlan,
    sources: Sequence[SourceFolder],
    out: Path,
    *,
    copy: bool,
    on_wait: OnMessage,
) -> MergeSummary:
    """Places the files and the ledger of each slide."""
    file_by_id: dict[str, SlideFile] = {}
    for source in reversed(sources):
        file_by_id.update(source.file_by_id)
    planned = {slide.slide_id for slide in plan.slides} | set(plan.unfinished)
    add_slide_ids(
        out, {name: file_by_id[name] for name in planned if name in file_by_id}
    )
    slides = []
    num_files = 0
    num_bytes = 0
    for slide in plan.slides:
        if slide.parts:
            files = _place_slide(slide, out, copy=copy, on_wait=on_wait)
            num_files += len(files)
            num_bytes += sum(files.values())
        origins = [str(part.source.folder) for part in slide.parts]
        slides.append(
            MergedSlide(
                slide_id=slide.slide_id,
                status="taken" if slide.parts else "kept",
                source=origins[0] if origins else str(out),
            )
        )
    for slide_id, (source, reason) in plan.unfinished.items():
        slides.append(
            MergedSlide(
                slide_id=slide_id,
                status="left-out",
                source=str(source.folder),
                reason=reason,
            )
        )
    slides.sort(key=lambda slide: slide.slide_id)
    return MergeSummary(
        out=out, slides=tuple(slides), num_files=num_files, num_bytes=num_bytes
    )


def _place_slide(
    slide: PlannedSlide, out: Path, *, copy: bool, on_wait: OnMessage
) -> dict[str, int]:
    """Places the files of a slide, then its ledger; returns the names and sizes of the files."""
    placed: dict[str, int] = {}
    slide_id = slide.slide_id
    with hold(out / SLIDES / slide_id / LOCK_NAME, on_wait=on_wait):
        ledger = load_ledger(out, slide_id)
        for part in slide.parts:
            source_ledger = part.source.ledgers[slide_id]
            if not ledger.stages:
                facts = dict(source_ledger.slide)
                path = str(facts.get("slide_path") or "")
                facts["slide_path"] = _whole_path(part.source, slide_id, path)
                ledger = replace(ledger, slide=facts, source=source_ledger.source)
            for address in part.addresses:
                record = source_ledger.stages[address]
                for name, size in record.files.items():
                    if _place_file(part, out, name, record, copy=copy):
                        placed[name] = size
                ledger = ledger.with_stage(address, record)
        ledger.save()
        failure = slide.parts[0].source.failures.get(slide_id)
        if failure is None:
            failure_path(out, slide_id).unlink(missing_ok=True)
        else:  # excluded by a rule of quality control
            _copy_failure(slide.parts[0].source, slide_id, out)
    return placed


def _whole_path(source: SourceFolder, slide_id: str, path: str) -> str:
    """Path of a slide; one that was relative to the run's folder becomes absolute."""
    listed = source.file_by_id.get(slide_id)
    is_relative = path and not is_url(path) and not Path(path).is_absolute()
    return listed.file if is_relative and listed is not None else path


def _place_file(
    part: Part, out: Path, name: str, record: StageRecord, *, copy: bool
) -> bool:
    """Links or copies a file; False if an earlier merge has placed it.

    Raises StoreError: the merged folder has another file of this name.
    """
    source = (part.source.folder / name).resolve()
    target = out / name
    if target.exists():
        same = target.stat().st_size == record.files[name]
        if not same or file_sum(target) != file_sum(source):
            raise StoreError(
                f"out must not have another file of this name, got {str(target)!r}; remove it, "
                "or merge into another folder"
            )
        return False
    with atomic_path(target) as tmp:
        link_or_copy(source, tmp, copy=copy)
    return True


def _copy_failure(source: SourceFolder, slide_id: str, out: Path) -> None:
    document = read_json(failure_path(source.folder, slide_id))
    entry = document["entry"]  # `read_failure` has checked it
    entry["slide_path"] = _whole_path(source, slide_id, str(entry["slide_path"]))
    write_json(failure_path(out, slide_id), document)


def _write_records(
    sources: Sequence[SourceFolder], plan: MergePlan, out: Path, on_message: OnMessage
) -> list[RunConfig]:
    """Writes one record for each kind of settings; returns the settings that can be read.

    A later run into the merged folder finds there which slides are done with its settings.
    """
    slide_ids = {slide.slide_id for slide in plan.slides}
    existing_records = read_records(out)
    specs = []
    for group in settings_groups(sources):
        settings = group.newest.deciding_settings
        recorded_ids: set[str] = set()
        for record in existing_records:
            if record.deciding_settings == settings:
                recorded_ids.update(ended_slides(record.folder))
        new_results = [
            result
            for slide_id, result in group.results(slide_ids).items()
            if slide_id not in recorded_ids
        ]
        if new_results:
            _write_record(group, new_results, out)
        try:
            config = from_mapping(RunConfig, group.newest.document["config"])
            specs.append(resolve(config))
        except (ThinsectionError, KeyError) as error:
            on_message(f"note: the tables of one run are not written: {error}")
    return specs


def _write_record(
    group: SettingsGroup, results: Sequence[SlideResult], out: Path
) -> None:
    """Writes the record of the slides that were taken from runs with the same settings."""
    newest = group.newest.document
    record = begin_record(out, "merge", newest.get("config", {}))
    write_ended(record.folder, results)
    origins = [
        {
            "record": str(source.folder),
            "command": source.document.get("command"),
            "started": source.document.get("started"),
            "host": source.document.get("host"),
            "seconds": source.document.get("seconds"),
            "thinsection_version": source.document.get("thinsection_version"),
        }
        for source in group.records
    ]
    log(record.folder, f"merged {counted(len(results), 'slide')}")
    facts = {
        "counts": {"merged": len(results)},
        "models": newest.get("models", {}),
        "grids": list(recorded_grids(group.newest) or ()),
        "merged_from": origins,
    }
    update_record(Record.read(record.folder), facts)


def _write_tables(out: Path, specs: Sequence[RunConfig], on_message: OnMessage) -> None:
    """Makes summary.csv, failed.csv, the tables of measures and checks, and the pages."""
    slides = known_slides(out)
    for ids in write_tables(out, slides):
        names = ", ".join(map(repr, ids))
        on_message(
            f"warning: {names} have the same content; check whether they are one slide"
        )
    for spec in specs:
        try:
            write_run_tables(out, slides, stages_of(spec))
        except ThinsectionError as error:
            on_message(f"note: the tables of one run are not written: {error}")
    write_index(out)
