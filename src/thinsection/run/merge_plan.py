"""Plan of a merge: each finished slide of the folders once, or an error that names the conflicts.

Ledgers and records are read, each file is compared with its checksum, and nothing is written.
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from thinsection.errors import StoreError
from thinsection.files.lock import LOCK_NAME, is_held
from thinsection.results.records import Record, read_records
from thinsection.run.task import ended_slides
from thinsection.slide.ids import SlideFile
from thinsection.store.identity import file_sum
from thinsection.store.ledger import SLIDES, SlideLedger, StageRecord, load_ledgers
from thinsection.store.outcome import SlideResult, read_failure
from thinsection.store.slide_ids import read_slide_ids
from thinsection.types import Document, counted

# facts of a stage that tell which model made it; they must be equal for all slides of a folder
_MODEL_FACTS = (
    "encoder",
    "dim",
    "weights_hash",
    "precision",
    "preprocessing",
    "slide_encoder",
    "slide_dim",
)
# number of conflicts that the error lists
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class SourceFolder:
    """Results folder that is merged, as it is on disk."""

    folder: Path
    ledgers: Mapping[str, SlideLedger]  # by slide id
    failures: Mapping[str, SlideResult]  # by slide id
    file_by_id: Mapping[str, SlideFile]  # by slide id
    records: tuple[Record, ...]

    @classmethod
    def read(cls, folder: Path) -> "SourceFolder":
        """Reads a results folder. Raises StoreError: not such a folder, or damaged ids."""
        slides = folder / SLIDES
        if not slides.is_dir():
            raise StoreError(
                f"folder must be a results folder that contains {SLIDES}/, got {str(folder)!r}"
            )
        failures = {}
        for path in sorted(slides.iterdir()):
            failure = read_failure(folder, path.name) if path.is_dir() else None
            if failure is not None:
                failures[path.name] = failure
        return cls(
            folder=folder,
            ledgers={ledger.slide_id: ledger for ledger in load_ledgers(folder)},
            failures=failures,
            file_by_id=read_slide_ids(folder),
            records=tuple(read_records(folder)),
        )

    @functools.cached_property
    def ended(self) -> frozenset[str] | None:
        """Slides that a run has finished; None if the results come from another tool."""
        if any(record.document.get("command") == "import" for record in self.records):
            return None
        names: set[str] = set()
        for record in self.records:
            names.update(ended_slides(record.folder))
        return frozenset(names)

    def why_unfinished(self, slide_id: str) -> str:
        """Reason why a slide's results cannot be taken; '' if they are complete."""
        if is_held(self.folder / SLIDES / slide_id / LOCK_NAME):
            return "a process is working on it"
        failure = self.failures.get(slide_id)
        is_excluded = failure is not None and failure.status == "excluded"
        if failure is not None and not is_excluded:
            return f"failed ({failure.stage}): {failure.error}"
        ledger = self.ledgers.get(slide_id)
        if ledger is None or not ledger.stages:
            return (
                ledger.damage if ledger is not None and ledger.damage else "no result"
            )
        for record in ledger.stages.values():
            for name, size in record.files.items():
                if not is_inside(name):
                    return f"{name!r} is not a name inside the folder"
                path = self.folder / name
                if not path.is_file() or path.stat().st_size != size:
                    return f"{name} is missing or incomplete"
                if name in record.sums and file_sum(path) != record.sums[name]:
                    return f"{name} has other bytes than were written"
        if self.ended is not None and slide_id not in self.ended and not is_excluded:
            return "its run did not finish; run the same command again there"
        return ""


def is_inside(name: str) -> bool:
    """True if a recorded name cannot leave its folder."""
    path = PurePath(name)
    return not path.is_absolute() and ".." not in path.parts


@dataclass(frozen=True, kw_only=True)
class Part:
    """Stages of a slide that are taken from one folder."""

    source: SourceFolder
    addresses: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PlannedSlide:
    """Slide of the merged folder."""

    slide_id: str
    parts: tuple[Part, ...]  # empty if the merged folder has everything already


@dataclass(frozen=True, kw_only=True)
class MergePlan:
    """Stages to take from each folder, and the slides that are left out."""

    slides: tuple[PlannedSlide, ...]
    unfinished: Mapping[str, tuple[SourceFolder, str]]  # slide id -> folder and reason
    notes: tuple[str, ...] = field(default=())


def plan_merge(
    sources: Sequence[SourceFolder], target: SourceFolder | None
) -> MergePlan:
    """Plans the merge; `target` is the merged folder if it exists.

    Memory: some kB per slide of all folders.

    Raises StoreError: two folders hold different slides or results under one name.
    """
    slide_ids: dict[str, None] = {}
    for source in sources:
        slide_ids |= dict.fromkeys([*source.ledgers, *source.failures])
    slides = []
    unfinished: dict[str, tuple[SourceFolder, str]] = {}
    conflicts = []
    for slide_id in sorted(slide_ids):
        holders = []
        for source in sources:
            if slide_id in source.ledgers or slide_id in source.failures:
                reason = source.why_unfinished(slide_id)
                if not reason:
                    holders.append(source)
                elif slide_id not in unfinished:
                    unfinished[slide_id] = (source, reason)
        if not holders:
            continue
        unfinished.pop(slide_id, None)
        if target is not None and slide_id in target.ledgers:
            holders.insert(0, target)
        conflicts += list(_conflicts(slide_id, holders))
        slides.append(
            PlannedSlide(slide_id=slide_id, parts=_parts(slide_id, holders, target))
        )
    conflicts += list(_model_conflicts(slides, target))
    if conflicts:
        shown = "; ".join(conflicts[:_SHOWN])
        more = len(conflicts) - _SHOWN
        tail = f"; and {more} more" if more > 0 else ""
        raise StoreError(
            f"folders must agree on every slide, got {counted(len(conflicts), 'conflict')}: "
            f"{shown}{tail}; merge without one of the folders, or into another out=...: nothing "
            "was changed"
        )
    return MergePlan(
        slides=tuple(slides),
        unfinished=unfinished,
        notes=(*_cohort_notes(slides), *_address_notes(slides, target)),
    )


def _parts(
    slide_id: str, holders: Sequence[SourceFolder], target: SourceFolder | None
) -> tuple[Part, ...]:
    """Stages to take from each folder; the first folder that has a stage gives it."""
    taken: set[str] = set()
    parts = []
    for source in holders:
        addresses = source.ledgers[slide_id].stages
        new = tuple(address for address in addresses if address not in taken)
        taken.update(new)
        if new and source is not target:
            parts.append(Part(source=source, addresses=new))
    return tuple(parts)


def _conflicts(slide_id: str, holders: Sequence[SourceFolder]) -> Iterator[str]:
    """Sentences on different slides or results under one name."""
    for number, source in enumerate(holders[1:], start=1):
        for earlier in holders[:number]:
            problem = _difference(earlier.ledgers[slide_id], source.ledgers[slide_id])
            if problem:
                yield f"{slide_id!r} {problem} in {earlier.folder} and {source.folder}"
                break


def _difference(first: SlideLedger, other: SlideLedger) -> str:
    """Conflict between two ledgers of one slide id, in words; '' if there is none."""
    for name in ("samples", "whole"):
        has_both = first.source.get(name) and other.source.get(name)
        if has_both and first.source[name] != other.source[name]:
            return "is another slide file"
    for address, record in first.stages.items():
        other_record = other.stages.get(address)
        if other_record is None:
            continue
        if other_record.key != record.key:
            return f"has {address} by other settings, weights or versions"
        if other_record.files != record.files or other_record.sums != record.sums:
            return f"has other files of {address}"
    return ""


def _model_conflicts(
    slides: Sequence[PlannedSlide], target: SourceFolder | None
) -> Iterator[str]:
    """Sentences on folders of results that different models have made."""
    stages: list[tuple[SourceFolder, str, StageRecord]] = []
    if target is not None:
        for ledger in target.ledgers.values():
            stages += [(target, *stage) for stage in ledger.stages.items()]
    for slide in slides:
        for part in slide.parts:
            records = part.source.ledgers[slide.slide_id].stages
            stages += [(part.source, name, records[name]) for name in part.addresses]
    first_by_address: dict[str, tuple[Document, SourceFolder]] = {}
    reported: set[tuple[str, Path]] = set()
    for source, address, record in stages:
        facts = {name: record.facts.get(name) for name in _MODEL_FACTS}
        first, first_source = first_by_address.setdefault(address, (facts, source))
        if first == facts or (address, source.folder) in reported:
            continue
        reported.add((address, source.folder))
        (name, *_) = [name for name in _MODEL_FACTS if first[name] != facts[name]]
        yield (
            f"{address} has another {name} in {source.folder} than in "
            f"{first_source.folder}"
        )


def _cohort_notes(slides: Sequence[PlannedSlide]) -> Iterator[str]:
    """Notes on slides whose cohort columns differ between folders."""
    for slide in slides:
        if len(slide.parts) < 2:
            continue
        first = slide.parts[0].source
        cohort = first.ledgers[slide.slide_id].slide
        for part in slide.parts[1:]:
            source = part.source
            other = source.ledgers[slide.slide_id].slide
            for name in ("patient_id", "label", "split"):
                if cohort.get(name) and other.get(name) not in (None, cohort[name]):
                    yield (
                        f"note: {slide.slide_id!r} keeps {name} {cohort[name]!r} of "
                        f"{first.folder}, and not {other[name]!r} of {source.folder}"
                    )


def _address_notes(
    slides: Sequence[PlannedSlide], target: SourceFolder | None
) -> Iterator[str]:
    """Notes on folders of results that not every slide has."""
    counts: dict[str, int] = {}
    for slide in slides:
        addresses: dict[str, None] = {}
        if target is not None and slide.slide_id in target.ledgers:
            addresses |= dict.fromkeys(target.ledgers[slide.slide_id].stages)
        for part in slide.parts:
            addresses |= dict.fromkeys(part.addresses)
        for address in addresses:
            counts[address] = counts.get(address, 0) + 1
    for address, count in sorted(counts.items()):
        if count < len(slides):
            yield f"note: {count} of {counted(len(slides), 'slide')} have {address}"


@dataclass(frozen=True, kw_only=True)
class SettingsGroup:
    """Records of the folders with the same settings for the results."""

    records: tuple[Record, ...]

    @property
    def newest(self) -> Record:
        """Record whose settings and models the merged record repeats."""
        with_models = [r for r in self.records if r.document.get("models")]
        return max(with_models or self.records, key=_started)

    def results(self, slide_ids: set[str]) -> dict[str, SlideResult]:
        """Results of these slides, from the notes of the runs."""
        results: dict[str, SlideResult] = {}
        for record in self.records:
            for slide_id, result in ended_slides(record.folder).items():
                if slide_id in slide_ids:
                    results.setdefault(slide_id, result)
        return results


def _started(record: Record) -> str:
    return str(record.document.get("started", ""))


def settings_groups(sources: Sequence[SourceFolder]) -> list[SettingsGroup]:
    """Records of runs by their settings, oldest first."""
    groups: dict[str, list[Record]] = {}
    for source in sources:
        for record in source.records:
            # records of other commands have other sections
            if "output" in record.document.get("config", {}):
                key = json.dumps(record.deciding_settings, sort_keys=True)
                groups.setdefault(key, []).append(record)
    listed = [SettingsGroup(records=tuple(records)) for records in groups.values()]
    return sorted(listed, key=lambda group: _started(group.newest))
