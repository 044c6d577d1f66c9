"""The resume ledger: `slides/ID/slide.json` lists the finished stages of a slide.

A stage counts as done if the ledger has its address with the same key, and every file that the
stage wrote exists with its recorded size. The ledger is written last and atomically. A stage is
removed from it before another result replaces the old one. So a kill at any moment leaves either a
finished stage or a stage that is done again.
"""

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Self

from thinsection.config import coerce
from thinsection.errors import StoreError
from thinsection.files.atomic import read_json, write_json
from thinsection.files.sources import RemoteFolder
from thinsection.types import Document, PlainValues, counted

SLIDES = (
    "slides"  # OUT/slides/ID holds the files of a slide that belong to no tile grid
)
LEDGER_NAME = "slide.json"
FAILURE_NAME = "failure.json"  # in the folder of a slide that failed
ELSEWHERE_NAME = ".elsewhere.json"  # in the folder of a slide whose files are at a URL
FORMAT = 2
# cohort columns that are copied into every ledger
OF_COHORTS = ("patient_id", "label", "split")

Kinds = Mapping[str, type]

# Types of the values that other code uses.
_SLIDE_KINDS: Kinds = {
    "slide_id": str,
    "slide_path": str,
    "image": str,
    "reader": str,
    "vendor": str,
    "patient_id": str,
    "label": str,
    "split": str,
    "more": dict[str, str],  # the cohort's other columns
    "width": int,
    "height": int,
    "mpp_x": float,
    "mpp_y": float,
    "levels": tuple[object, ...],
}
_FACT_KINDS: Kinds = {
    "warnings": str,
    "encoder": str,
    "slide_encoder": str,
    "content": str,
    "num_tiles": int,
    "dim": int,
    "slide_dim": int,
    "tissue_fraction": float,
    "threshold": float,
    "plan": dict[str, object],
    "size_l0": tuple[float, ...],
    "mask_mpp": tuple[float, ...],
}


# Fields of `store/identity.py: Identity`, which a ledger stores as `source`.
_SOURCE_FIELDS = frozenset(("source", "samples", "times", "whole"))


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRecord:
    """Result of one stage."""

    key: str  # hash of everything that the result depends on
    files: dict[str, int]  # name, relative to the results folder -> size in bytes
    needs: tuple[str, ...] = ()  # addresses of the stages that it was made from
    # values for a summary: counts, encoder, ...
    facts: Document = field(default_factory=dict)
    # name -> SHA-256 of the file's bytes
    sums: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """Files of a slide that are at the URL of the run; empty if the run writes to no URL."""

    url: str = ""  # URL of the results folder
    files: Mapping[str, int] = field(default_factory=dict)  # name -> bytes
    brought: tuple[str, ...] = ()  # names of files that were downloaded again

    def save(self, folder: Path) -> None:
        """Writes the list of files into the slide's folder."""
        write_json(folder / ELSEWHERE_NAME, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Reads the file of `save`; empty if there is none."""
        path = folder / ELSEWHERE_NAME
        if not path.exists():
            return cls()
        return coerce(read_json(path), cls, ELSEWHERE_NAME)


@dataclass(frozen=True, kw_only=True, repr=False)
class SlideLedger:
    """The finished stages of one slide, and the identity of its file.

    Only the holder of the slide's lock may write it.
    """

    out: Path  # the results folder
    slide_id: str
    # plain values: path, reader, size, mpp, ...
    slide: Document = field(default_factory=dict)
    # `store/identity.py: Identity` of the slide's file
    source: dict[str, str] = field(default_factory=dict)
    # address -> record, sorted by address
    stages: dict[str, StageRecord] = field(default_factory=dict)
    # files that are only at the URL of the run
    elsewhere: Elsewhere = field(default_factory=Elsewhere)
    # reason why the stored ledger cannot be used; '' if it can
    damage: str = field(default="", compare=False)

    def __repr__(self) -> str:
        words = "damaged" if self.damage else counted(len(self.stages), "stage")
        return f"SlideLedger({self.slide_id!r}: {words} in {self.out.name!r})"

    @property
    def path(self) -> Path:
        """`OUT/slides/ID/slide.json`."""
        return self.out / SLIDES / self.slide_id / LEDGER_NAME

    def check(self) -> None:
        """Checks that the stored ledger can be used.

        Raises:
            StoreError: the ledger is damaged.
        """
        if self.damage:
            raise StoreError(
                f"ledger must be readable, got {self.damage}; `thinsection run` on the slide "
                "makes it again"
            )

    def done(self, address: str, key: str) -> bool:
        """True if the stage was finished with this key and its files exist."""
        record = self.stages.get(address)
        return record is not None and record.key == key and self.complete(record)

    def complete(self, record: StageRecord) -> bool:
        """True if every file of a record exists with its recorded size."""
        return all(self._size(name) == size for name, size in record.files.items())

    def _size(self, name: str) -> int | None:
        """Bytes of a file, local or at the URL of the run; None if it is in neither place."""
        # one system call, because a resumed run checks each file of each slide
        with contextlib.suppress(OSError):
            found = Path(self.out, name).stat()
            if stat.S_ISREG(found.st_mode):
                return found.st_size
        return self.elsewhere.files.get(name)

    def with_local_files(self, record: StageRecord) -> "SlideLedger":
        """Downloads files of a record that are only at the URL; returns the new ledger."""
        missing = [
            name
            for name in record.files
            if name in self.elsewhere.files and not (self.out / name).is_file()
        ]
        if not missing:
            return self
        source = RemoteFolder(self.elsewhere.url)
        for name in missing:
            source.get(name, self.out / name)
        brought = (*self.elsewhere.brought, *missing)
        elsewhere = replace(self.elsewhere, brought=brought)
        elsewhere.save(self.path.parent)
        return replace(self, elsewhere=elsewhere)

    def addresses_made_from(self, address: str) -> tuple[str, ...]:
        """Addresses of the stages that were made from this stage, directly or not."""
        made = {address}
        num_before = 0
        while len(made) > num_before:
            num_before = len(made)
            for name, record in self.stages.items():
                if made.intersection(record.needs):
                    made.add(name)
        made.remove(address)
        return tuple(name for name in self.stages if name in made)

    def without(self, addresses: Iterable[str]) -> "SlideLedger":
        """Returns the ledger without these stages."""
        removed = set(addresses)
        kept = {
            name: record for name, record in self.stages.items() if name not in removed
        }
        return replace(self, stages=kept)

    def with_stage(self, address: str, record: StageRecord) -> "SlideLedger":
        """Returns the ledger with a stage."""
        stages = {**self.stages, address: record}
        # sorted by address, whatever the order in which they were done
        return replace(self, stages=dict(sorted(stages.items())))

    def save(self, *, keep_time: bool = False) -> None:
        """Writes slide.json atomically.

        With `keep_time` an existing file keeps its times, because no stage has changed.
        """
        before = self.path.stat() if keep_time and self.path.exists() else None
        document = {
            "format": FORMAT,
            "slide": self.slide,
            "source": self.source,
            "stages": {name: asdict(record) for name, record in self.stages.items()},
        }
        write_json(self.path, document)
        if before is not None:
            os.utime(self.path, ns=(before.st_atime_ns, before.st_mtime_ns))


def load_ledger(out: Path, slide_id: str) -> SlideLedger:
    """Loads the ledger of a slide; an empty ledger if there is none.

    A ledger that cannot be read (written by another version, or edited by hand) counts as empty, so
    that its stages are done again; `damage` names the wrong field.
    """
    empty = SlideLedger(out=out, slide_id=slide_id)
    try:
        document = _read_document(empty.path)
        return replace(
            empty,
            slide=document.slide,
            source=document.source,
            stages=dict(sorted(document.stages.items())),
            elsewhere=Elsewhere.load(empty.path.parent),
        )
    except FileNotFoundError:
        return empty
    except (OSError, ValueError) as error:
        damage = f"{LEDGER_NAME} is damaged: {error}"
        return replace(empty, damage=damage)


@dataclass(frozen=True, kw_only=True)
class _Document:
    """Content of slide.json."""

    format: int
    slide: Document
    source: dict[str, str] = field(default_factory=dict)
    stages: dict[str, StageRecord]


def _read_document(path: Path) -> _Document:
    """Reads and checks slide.json."""
    content = read_json(path)
    if isinstance(content, dict) and content.get("format", FORMAT) != FORMAT:
        raise ValueError(f"format must be {FORMAT}, got {content['format']!r}")
    document = coerce(content, _Document, "document")
    check_kinds(document.slide, _SLIDE_KINDS, "slide")
    unknown = document.source.keys() - _SOURCE_FIELDS
    if unknown:
        raise ValueError(f"source must have known fields, got {sorted(unknown)}")
    for name, record in document.stages.items():
        check_kinds(record.facts, _FACT_KINDS, f"stages.{name}.facts")
        for file in record.files:
            place = PurePosixPath(file)
            if place.is_absolute() or ".." in place.parts or "\0" in file:
                raise ValueError(
                    f"stages.{name}.files must lie in the results folder, got {file!r}"
                )
    return document


def check_kinds(values: PlainValues, kinds: Kinds, where: str) -> None:
    """Raises ConfigError if a value has another type; values may be None or missing."""
    for name, kind in kinds.items():
        if values.get(name) is not None:
            coerce(values[name], kind, f"{where}.{name}")


def load_ledgers(
    out: Path, read: Mapping[str, SlideLedger] | None = None
) -> list[SlideLedger]:
    """Loads the ledgers of all slides of a results folder, in the order of their ids.

    Args:
        out: the results folder.
        read: ledgers that were read before, by slide id; they are not read again.

    Memory: some kB per slide.
    """
    read = read or {}
    names = sorted(path.parent.name for path in (out / SLIDES).glob(f"*/{LEDGER_NAME}"))
    return [read.get(name) or load_ledger(out, name) for name in names]


def stage_key(**parts: object) -> str:
    """Hashes plain values (nested dicts, lists, str, numbers, None).

    8.0 and 8 give the same hash.
    """
    text = json.dumps(_plain(parts), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
