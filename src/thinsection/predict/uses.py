"""Uses of a test set: the models that were tested on the same cases before.

FOLDER/model_tests/MODEL-SET.json   one file for each model and set, see `Use`

FOLDER is that of the label table and, for embeddings in a results folder, that folder too. So a
test in another output folder, or with a copy of the table, finds the tests before it. The files
hold hashes and no ids. A set is known again by the hashes of its cases (embeddings and label), also
where only a part of it was tested; and, for embeddings of another encoder, by the hash of all slide
names and labels.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thinsection.config import as_mapping, from_mapping
from thinsection.evaluation.labels import Cohort
from thinsection.files.atomic import read_json, write_json
from thinsection.slide.ids import plain_id

FOLDER = "model_tests"
MARK_LENGTH = 16  # hexadecimal digits of a hash
LEAST_SHARED = 0.5  # of the cases of the smaller set: the sets count as one


@dataclass(frozen=True, kw_only=True)
class Use:
    """One model tested on one set."""

    model: str
    sha256: str  # of the model's file
    date: str  # UTC
    names: str  # hash of the names of all slides, with their labels
    marks: tuple[str, ...]  # hash of each case's embeddings and label, sorted

    @property
    def file_name(self) -> str:
        """Name of the file that stores it: another for another model or set."""
        return f"{self.sha256[:MARK_LENGTH]}-{_mark(*self.marks)}.json"

    def shared(self, other: "Use") -> int:
        """Cases of this set that the other one has too; 0 if the sets only touch."""
        if self.names == other.names:
            return len(self.marks)
        both = len({*self.marks} & {*other.marks})
        smaller = min(len(self.marks), len(other.marks))
        return both if both >= LEAST_SHARED * smaller else 0


@dataclass(frozen=True, kw_only=True)
class OtherUse:
    """Test of another model on the same cases."""

    model: str
    sha256: str
    date: str  # day
    shared: int  # of the cases of this test


@dataclass(frozen=True, kw_only=True)
class Uses:
    """Place of this test among those of other models on the same cases."""

    earlier: tuple[OtherUse, ...] = ()
    later: tuple[OtherUse, ...] = ()  # if this test is repeated
    recorded_in: tuple[str, ...] = ()  # names of the folders that keep the memory
    missing: str = ""  # why the memory is not complete

    @property
    def number(self) -> int:
        """1 for the first model that was tested on these cases."""
        return len(self.earlier) + 1


def use_of(
    cohort: Cohort, digests: Sequence[str], *, model: str, sha256: str, date: str
) -> Use:
    """Use of a set by a model.

    Args:
        cohort: the scored cases.
        digests: `content_digest` of the slides, case after case.
        model: name of the model.
        sha256: of the model's file.
        date: now, in UTC.
    """
    left = iter(digests)
    marks = []
    names = []
    for slides, values in zip(cohort.slides, cohort.values, strict=True):
        cells = cohort.target.truth_cells(values).values()
        truth = [str(cell) for cell in cells]
        contents = sorted(next(left) for _ in slides)
        marks.append(_mark(*contents, *truth))
        names += [_mark(plain_id(slide), *truth) for slide in slides]
    return Use(
        model=model,
        sha256=sha256,
        date=date,
        names=_mark(*sorted(names)),
        marks=tuple(sorted(marks)),
    )


def record_use(use: Use, folders: Sequence[Path]) -> Uses:
    """Records a use in each folder that can be written, and finds the others.

    The same model on the same set keeps its first date. Nothing fails if no folder can be written:
    `missing` says so.
    """
    known, unreadable = _read_uses(folders)
    own = [one for one in known if one.file_name == use.file_name]
    use = min([*own, use], key=lambda one: one.date)
    recorded = []
    for folder in folders:
        path = folder / FOLDER / use.file_name
        try:
            if not path.exists():
                write_json(path, as_mapping(use))
            recorded.append(folder.name)
        except OSError:
            continue
    missing = []
    if not recorded:
        shown = " and ".join(dict.fromkeys(str(folder.name) for folder in folders))
        missing.append(
            f"this test could not be recorded, as the folder {shown} cannot be written: a later "
            "test on these cases will not know of it"
        )
    if unreadable:
        missing.append(f"records that cannot be read: {', '.join(unreadable)}")
    # the first use of these cases by each other model
    others = []
    models = {use.sha256}
    for one in sorted(known, key=lambda one: (one.date, one.model)):
        if one.sha256 not in models and use.shared(one):
            models.add(one.sha256)
            others.append(one)
    return Uses(
        earlier=tuple(_words(one, use) for one in others if one.date < use.date),
        later=tuple(_words(one, use) for one in others if one.date >= use.date),
        recorded_in=tuple(recorded),
        missing="; ".join(missing),
    )


def _read_uses(folders: Sequence[Path]) -> tuple[list[Use], list[str]]:
    """Uses of all sets, and the names of files that are none."""
    uses: dict[str, Use] = {}
    unreadable = []
    for folder in folders:
        for path in sorted((folder / FOLDER).glob("*.json")):
            try:
                uses[path.name] = from_mapping(Use, read_json(path))
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                unreadable.append(path.name)
    return [*uses.values()], unreadable


def _words(other: Use, use: Use) -> OtherUse:
    # the file may be of anybody: no control characters of a terminal
    model = "".join(c for c in other.model if c.isprintable())
    return OtherUse(
        model=model,
        sha256=other.sha256,
        date=other.date[:10],
        shared=use.shared(other),
    )


def _mark(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:MARK_LENGTH]
