"""Uses of a test set: the models that were tested on the same cases before.

FOLDER/model_tests/MODEL-SET.json   one file for each model and set, see `Use`

FOLDER is the folder of the label table, and also the results folder of the embeddings. So a test
in another output folder, or with a copy of the table, finds the earlier tests. The files contain
hashes and no ids. A set is recognised by the hashes of its cases (embeddings and label), even if
only a part of it was tested. With embeddings of another encoder it is recognised by the hash of all
slide names and labels.
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
# share of common cases of the smaller set from which two sets count as the same
LEAST_SHARED = 0.5


@dataclass(frozen=True, kw_only=True)
class Use:
    """One model tested on one set."""

    model: str
    sha256: str  # hash of the model's file
    date: str  # in UTC
    names: str  # hash of the names of all slides, with their labels
    marks: tuple[str, ...]  # hash of each case's embeddings and label, sorted

    @property
    def file_name(self) -> str:
        """Name of the file that stores it; each model and set has its own."""
        return f"{self.sha256[:MARK_LENGTH]}-{_mark(*self.marks)}.json"

    def shared(self, other: "Use") -> int:
        """Number of cases in both sets; 0 if the sets do not count as the same."""
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
    shared: int  # number of cases that it shares with this test


@dataclass(frozen=True, kw_only=True)
class Uses:
    """Place of this test among those of other models on the same cases."""

    earlier: tuple[OtherUse, ...] = ()
    later: tuple[OtherUse, ...] = ()  # if this test is repeated
    recorded_in: tuple[str, ...] = ()  # names of the folders with the records
    missing: str = ""  # reason why the records are not complete

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
        sha256: hash of the model's file.
        date: now, in UTC.
    """
    remaining_digests = iter(digests)
    marks = []
    names = []
    for slides, values in zip(cohort.slides, cohort.values, strict=True):
        cells = cohort.target.truth_cells(values).values()
        truth = [str(cell) for cell in cells]
        contents = sorted(next(remaining_digests) for _ in slides)
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
    stored_uses, unreadable = _read_uses(folders)
    same_use = [one for one in stored_uses if one.file_name == use.file_name]
    use = min([*same_use, use], key=lambda one: one.date)
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
    other_uses = []
    models = {use.sha256}
    for one in sorted(stored_uses, key=lambda one: (one.date, one.model)):
        if one.sha256 not in models and use.shared(one):
            models.add(one.sha256)
            other_uses.append(one)
    return Uses(
        earlier=tuple(_words(one, use) for one in other_uses if one.date < use.date),
        later=tuple(_words(one, use) for one in other_uses if one.date >= use.date),
        recorded_in=tuple(recorded),
        missing="; ".join(missing),
    )


def _read_uses(folders: Sequence[Path]) -> tuple[list[Use], list[str]]:
    """Uses of all sets, and the names of files that cannot be read."""
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
    # anybody may have written the file, so remove control characters of a terminal
    model = "".join(c for c in other.model if c.isprintable())
    return OtherUse(
        model=model,
        sha256=other.sha256,
        date=other.date[:10],
        shared=use.shared(other),
    )


def _mark(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:MARK_LENGTH]
