"""The resume ledger: `slides/ID/slide.json` says which stages of a slide are done, with what.

A stage counts as done when the ledger names its address with the same key and every file that it
wrote is there with its recorded size. The ledger is written last and atomically, and forgets a
stage before another result takes its place, so a kill at any moment leaves either a finished stage
or one that is done again.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from thinsection.config import coerce
from thinsection.files.atomic import write_json
from thinsection.files.json_text import parse_json, read_json
from thinsection.files.sources import RemoteFolder

SLIDES = "slides"  # OUT/slides/ID: what belongs to a slide and to no tile grid
LEDGER_NAME = "slide.json"
FAILURE_NAME = "failure.json"  # beside it, of a slide that failed
ELSEWHERE_NAME = ".elsewhere.json"  # of a slide whose files were moved to a URL
FORMAT = 2
_OF_SLIDE: dict[str, Any] = {  # what somebody computes with or joins
    **dict.fromkeys(("slide_id", "slide_path", "reader", "vendor"), str),
    **dict.fromkeys(("patient_id", "label", "split"), str),
    **{
        "more": dict[str, str],
        "width": int,
        "height": int,
        "mpp_x": float,
        "mpp_y": float,
    },
    "levels": tuple[Any, ...],
}
_FACTS: dict[str, Any] = {
    **dict.fromkeys(("warnings", "encoder", "slide_encoder", "content"), str),
    **dict.fromkeys(("num_tiles", "dim", "slide_dim"), int),
    **{"tissue_fraction": float, "threshold": float, "plan": dict[str, Any]},
    **dict.fromkeys(("size_l0", "mask_mpp"), tuple[float, ...]),
}


@dataclass(frozen=True, kw_only=True)
class StageRecord:
    """What one stage left."""

    key: str  # hash of everything that its result depends on
    files: dict[str, int]  # name, relative to the results folder -> size in bytes
    needs: tuple[str, ...] = ()  # addresses of the stages that it was made from
    facts: dict[str, Any] = field(
        default_factory=dict
    )  # for a summary: counts, encoder, ...
    sums: dict[str, str] = field(
        default_factory=dict
    )  # name -> SHA-256 of the file's bytes


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """Files of a slide that lie at the URL of the run; empty where the run has none."""

    url: str = ""  # of the results folder
    files: Mapping[str, int] = field(default_factory=dict)  # name -> bytes
    brought: tuple[str, ...] = ()  # names of those that were fetched again

    def save(self, folder: Path) -> None:
        """Writes it beside the slide's ledger."""
        write_json(folder / ELSEWHERE_NAME, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """What `save` wrote; empty where nothing was."""
        text = (
            path.read_text("utf-8")
            if (path := folder / ELSEWHERE_NAME).exists()
            else "{}"
        )
        found: Self = coerce(parse_json(text), cls, ELSEWHERE_NAME)
        return found


@dataclass(frozen=True, kw_only=True)
class SlideLedger:
    """The stages of one slide and its identity. Whoever changes it holds the slide's lock."""

    out: Path  # the results folder
    slide_id: str
    slide: dict[str, Any] = field(
        default_factory=dict
    )  # path, reader, size, mpp, ...: plain
    source: dict[str, str] = field(default_factory=dict)  # the `Identity` of its file
    stages: dict[str, StageRecord] = field(
        default_factory=dict
    )  # by address, first done first
    elsewhere: Elsewhere = field(
        default_factory=Elsewhere
    )  # files at the URL of the run only
    damage: str = field(
        default="", compare=False
    )  # why what was written counts as none

    @property
    def path(self) -> Path:
        """`OUT/slides/ID/slide.json`."""
        return self.out / SLIDES / self.slide_id / LEDGER_NAME

    def done(self, address: str, key: str) -> bool:
        """Whether the stage was finished with this key and its files are there."""
        record = self.stages.get(address)
        return record is not None and record.key == key and self.complete(record)

    def complete(self, record: StageRecord) -> bool:
        """Whether every file of a record is there with its size."""
        paths, there = (
            {name: self.out / name for name in record.files},
            self.elsewhere.files,
        )
        found = {
            n: p.stat().st_size if p.is_file() else there.get(n)
            for n, p in paths.items()
        }
        return found == record.files

    def bring(self, record: StageRecord) -> "SlideLedger":
        """The ledger of a slide whose files of a record are here, fetched where they were not."""
        there = self.elsewhere
        missing = [
            n for n in record.files if n in there.files and not (self.out / n).is_file()
        ]
        if not missing:
            return self
        source = RemoteFolder(there.url)
        for name in missing:
            source.get(name, self.out / name)
        there = replace(there, brought=(*there.brought, *missing))
        there.save(self.path.parent)
        return replace(self, elsewhere=there)

    def derived(self, address: str) -> tuple[str, ...]:
        """Addresses of the recorded stages that were made from this one, and from those."""
        found: set[str] = {address}
        while (
            more := {n for n, r in self.stages.items() if found & set(r.needs)} - found
        ):
            found |= more
        return tuple(name for name in self.stages if name in found - {address})

    def without(self, addresses: Iterable[str]) -> "SlideLedger":
        """The ledger that knows nothing of these stages."""
        gone = set(addresses)
        return replace(
            self, stages={k: r for k, r in self.stages.items() if k not in gone}
        )

    def with_stage(self, address: str, record: StageRecord) -> "SlideLedger":
        """The ledger with a stage added; one that is done again keeps its place."""
        return replace(self, stages={**self.stages, address: record})

    def save(self, *, keep_time: bool = False) -> None:
        """Writes slide.json atomically; `keep_time`: no stage of it is any newer."""
        before = self.path.stat() if keep_time else None
        stages = {name: asdict(record) for name, record in self.stages.items()}
        known = {"format": FORMAT, "slide": self.slide, "source": self.source}
        write_json(self.path, {**known, "stages": stages})
        if before is not None:
            os.utime(self.path, ns=(before.st_atime_ns, before.st_mtime_ns))


def load_ledger(out: Path, slide_id: str) -> SlideLedger:
    """The ledger of a slide; an empty one where there is none.

    One that is not readable (of another version, edited by hand) counts as none: the stages are
    done again; `damage` says which field is not right.
    """
    ledger = SlideLedger(out=out, slide_id=slide_id)
    try:
        document = read_json(ledger.path)
        if isinstance(document, dict) and document.get("format", FORMAT) != FORMAT:
            return ledger
        found = coerce(document, _Document, "document")
        check_kinds(found.slide, _OF_SLIDE, "slide")
        for name, record in found.stages.items():
            check_kinds(record.facts, _FACTS, f"stages.{name}.facts")
        told = {"slide": found.slide, "source": found.source, "stages": found.stages}
        return replace(ledger, elsewhere=Elsewhere.load(ledger.path.parent), **told)
    except FileNotFoundError:
        return ledger
    except (OSError, ValueError) as error:
        return replace(
            ledger, damage=f"{LEDGER_NAME} is damaged and counts as none: {error}"
        )


@dataclass(frozen=True, kw_only=True)
class _Document:
    """What slide.json holds."""

    format: int
    slide: dict[str, Any]
    source: dict[str, str] = field(default_factory=dict)
    stages: dict[str, StageRecord]


def check_kinds(
    values: Mapping[str, Any], kinds: Mapping[str, Any], where: str
) -> None:
    """ConfigError where a value has another type than is due; None and what is absent may be."""
    for name, kind in kinds.items():
        if values.get(name) is not None:
            coerce(values[name], kind, f"{where}.{name}")


def load_ledgers(out: Path) -> list[SlideLedger]:
    """The ledgers of all slides of a results folder, by slide id. Memory: some kB per slide."""
    names = sorted(path.parent.name for path in (out / SLIDES).glob(f"*/{LEDGER_NAME}"))
    return [load_ledger(out, name) for name in names]


def stage_key(**parts: Any) -> str:
    """A short stable hash of plain values (nested dicts, lists, str, numbers, None); 8.0 is 8."""
    text = json.dumps(_plain(parts), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
