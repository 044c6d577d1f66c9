"""The resume ledger: `slide.json` says which stages of a slide are done, with what, from what.

A stage counts as done when the ledger names it with the same key and every file that it wrote is
there with its recorded size. The ledger itself is written last and atomically, so a kill at any
moment leaves either a finished stage or one that is done again.
"""

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from thinsection.errors import StoreError
from thinsection.files.atomic import write_json
from thinsection.files.sources import FsspecSource, is_url

LEDGER_NAME = "slide.json"
ELSEWHERE_NAME = ".elsewhere.json"  # name -> bytes of files that were moved to a URL
FORMAT = 1
_SAMPLE_BYTES = 16 * 1024
_SAMPLES = 8


@dataclass(frozen=True, kw_only=True)
class StageRecord:
    """What one stage left.

    Attributes:
        key: hash of everything that its result depends on.
        files: file name -> size in bytes, relative to the slide's folder.
        facts: what a summary tells of it (counts, seconds, encoder, ...).
    """

    key: str
    files: dict[str, int]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SlideLedger:
    """The stages of one slide and its identity.

    Attributes:
        folder: DIR/<slide_id>.
        slide: slide_id, path, reader, size, mpp, ...: plain values.
        stages: by name, in order.
        elsewhere: name -> bytes of files that are not here but at the URL of the run.
    """

    folder: Path
    slide: dict[str, Any] = field(default_factory=dict)
    stages: dict[str, StageRecord] = field(default_factory=dict)
    elsewhere: dict[str, int] = field(default_factory=dict)

    def done(self, stage: str, key: str) -> bool:
        """Whether the stage was finished with this key and its files are there."""
        record = self.stages.get(stage)
        return record is not None and record.key == key and self._files_present(record)

    def with_stage(self, stage: str, record: StageRecord) -> "SlideLedger":
        """The ledger with a stage added; stages that came after it are forgotten if it changed."""
        kept = dict(self.stages)
        old = kept.pop(stage, None)
        if old is not None and old.key != record.key:
            kept = {name: r for name, r in kept.items() if name in self._before(stage)}
        return replace(self, stages={**kept, stage: record})

    def save(self) -> None:
        """Writes slide.json atomically."""
        stages = {
            name: {"key": r.key, "files": r.files, "facts": r.facts}
            for name, r in self.stages.items()
        }
        document = {"format": FORMAT, "slide": self.slide, "stages": stages}
        write_json(self.folder / LEDGER_NAME, document)

    def _before(self, stage: str) -> set[str]:
        names = list(self.stages)
        return set(names[: names.index(stage)])

    def _files_present(self, record: StageRecord) -> bool:
        for name, size in record.files.items():
            path = self.folder / name
            found = path.stat().st_size if path.is_file() else self.elsewhere.get(name)
            if found != size:
                return False
        return True


def load_ledger(folder: Path) -> SlideLedger:
    """The ledger of a slide's folder; an empty one where there is none.

    A ledger that is not readable (written by another version, edited by hand) counts as none: the
    stages are done again and nothing wrong is taken over.
    """
    try:
        document = json.loads((folder / LEDGER_NAME).read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            return SlideLedger(folder=folder)
        stages = {name: StageRecord(**record) for name, record in document["stages"].items()}
        return SlideLedger(
            folder=folder, slide=document["slide"], stages=stages, elsewhere=_elsewhere(folder)
        )
    except (FileNotFoundError, json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError):
        return SlideLedger(folder=folder)


def _elsewhere(folder: Path) -> dict[str, int]:
    try:
        found: dict[str, int] = json.loads((folder / ELSEWHERE_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found


def stage_key(**parts: Any) -> str:
    """A short stable hash of plain values (nested dicts, lists, str, numbers, None)."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def fingerprint(path: Path | str) -> str:
    """Identity of a slide file: its size and a hash of 8 samples of 16 KiB spread over it.

    Not its name nor its time stamp, so that a copied or touched slide stays the same one. Files
    beside it that belong to it (`a/` for `a.mrxs`, other .dcm files) count by name and size.

    Memory: one sample.

    Raises:
        StoreError: the file cannot be read.
    """
    digest = hashlib.sha256()
    if is_url(str(path)):
        return _remote_fingerprint(str(path))
    path = Path(path)
    try:
        size = path.stat().st_size
        digest.update(str(size).encode())
        with path.open("rb") as file:
            for index in range(_SAMPLES):
                file.seek(max(0, (size - _SAMPLE_BYTES) * index // (_SAMPLES - 1)))
                digest.update(file.read(_SAMPLE_BYTES))
        for companion in _companions(path):
            digest.update(f"{companion.name}:{companion.stat().st_size}".encode())
    except OSError as error:
        raise StoreError(f"slide must be readable, got {error} in {str(path)!r}") from None
    return digest.hexdigest()[:24]


def fingerprint_reads(size: int) -> tuple[int, int]:
    """(bytes, requests) that the fingerprint of a file of so many bytes takes."""
    return _SAMPLES * min(_SAMPLE_BYTES, size), _SAMPLES


def _remote_fingerprint(url: str) -> str:
    """The same as of a local copy, by range requests."""
    digest = hashlib.sha256()
    try:
        source = FsspecSource(url)
        digest.update(str(source.size).encode())
        for index in range(_SAMPLES):
            start = max(0, (source.size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
            digest.update(source.read_at(start, min(_SAMPLE_BYTES, source.size - start)))
    except OSError as error:  # SlideOpenError and SlideReadError are
        raise StoreError(f"slide must be readable, got {error}") from None
    return digest.hexdigest()[:24]


def _companions(path: Path) -> list[Path]:
    folder = path.with_suffix("")
    if path.suffix.lower() == ".mrxs" and folder.is_dir():
        return sorted(p for p in folder.iterdir() if p.is_file())
    if path.suffix.lower() == ".dcm":
        return sorted(p for p in path.parent.glob("*.dcm") if p != path)
    return []
