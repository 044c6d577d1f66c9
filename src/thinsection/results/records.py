"""Records of invocations under `OUT/records/`: settings, versions, counts, resource use.

records/20261121-231430-host-4711/run.json      config, versions, counts, seconds
                                  usage/        see `usage.monitor`
                                  efficiency.html, run.log
                                  logs/, slurm/ of executors
"""

import contextlib
import itertools
import os
import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import thinsection
from thinsection.config import coerce
from thinsection.errors import StoreError
from thinsection.files.atomic import output_errors, parse_json, write_json, write_text
from thinsection.files.urls import without_secrets
from thinsection.store.ledger import check_kinds
from thinsection.types import Document, PlainValues
from thinsection.usage.analysis import Efficiency, analyse
from thinsection.usage.monitor import read_usage
from thinsection.usage.page import efficiency_page

RECORDS = "records"
RECORD_NAME = "run.json"
PAGE_NAME = "efficiency.html"
LOG_NAME = "run.log"
# address of the results' index, seen from a page of a record
_INDEX_ADDRESS = "../../index.html"
# sections that decide where work happens; they do not change results
_PLACE_SECTIONS = ("executor", "stream")
_KINDS = {
    "started": str,
    "command": str,
    "host": str,
    "config": dict[str, object],
    "counts": dict[str, int],
    "models": dict[str, object],
}


@dataclass(frozen=True, repr=False)
class Record:
    """Record of one invocation."""

    folder: Path  # OUT/records/NAME
    document: Document  # content of run.json

    def __repr__(self) -> str:
        return f"Record({self.folder.name!r}: {self.document.get('command', 'no command')})"

    @classmethod
    def read(cls, folder: Path) -> "Record":
        """Reads the record in a folder. Raises StoreError: it is missing or damaged."""
        path = folder / RECORD_NAME
        try:
            text = path.read_text(encoding="utf-8")
            document = coerce(parse_json(text), dict[str, object], RECORD_NAME)
            check_kinds(document, _KINDS, RECORD_NAME)
        except (OSError, ValueError) as error:
            raise StoreError(
                f"record must be readable, got {error} in {str(path)!r}"
            ) from None
        return cls(folder, document)

    @property
    def deciding_settings(self) -> dict[str, object]:
        """Settings that decide the results, by section."""
        config = self.document.get("config", {})
        return {
            name: section
            for name, section in config.items()
            if name not in _PLACE_SECTIONS
        }


def begin_record(out: Path, command: str, config: PlainValues) -> Record:
    """Makes the folder of an invocation that begins now, with its settings and versions."""
    now = datetime.now(UTC)
    host = platform.node()
    name = f"{now:%Y%m%d-%H%M%S}-{host}-{os.getpid()}"
    for number in itertools.count():
        # a second invocation in the same second gets a number
        folder = out / RECORDS / (f"{name}-{number}" if number else name)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    document = {
        "thinsection_version": thinsection.__version__,
        "command": command,
        "started": now.isoformat(timespec="milliseconds"),
        "host": host,
    }
    return update_record(Record(folder, document), {"config": dict(config)})


def log(folder: Path, text: str) -> None:
    """Adds lines with the time (UTC) to a record's `run.log`; safe in any thread or process."""
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}"
    lines = [f"{now} {line}\n" for line in without_secrets(text).splitlines()]
    path = folder / LOG_NAME
    with (
        output_errors(path),
        path.open("a", encoding="utf-8", errors="backslashreplace") as file,
    ):
        file.write("".join(lines))


def update_record(record: Record, facts: PlainValues) -> Record:
    """Adds facts to run.json, such as counts, seconds and models; returns the new record."""
    updated = Record(record.folder, {**record.document, **facts})
    write_json(record.folder / RECORD_NAME, updated.document)
    return updated


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Invocation in progress."""

    folder: Path  # folder of its record
    # counts of results, filled in by the code that does the work
    counts: dict[str, int]


@contextlib.contextmanager
def recording(out: Path, command: str, config: PlainValues) -> Iterator[Recording]:
    """Records an invocation from start to end, with or without an error."""
    began = time.monotonic()
    record = begin_record(out, command, config)
    under_way = Recording(folder=record.folder, counts={})
    try:
        yield under_way
    except BaseException as error:
        # so that the caller sees the error of the work itself
        with contextlib.suppress(OSError):
            reason = str(error) or type(error).__name__
            update_record(record, {"ended_by": reason})
        raise
    seconds = round(time.monotonic() - began, 3)
    update_record(record, {"seconds": seconds, "counts": under_way.counts})


def read_records(out: Path) -> list[Record]:
    """Invocations of a results folder, oldest first; unreadable ones are left out."""
    records = []
    for path in sorted((out / RECORDS).glob(f"*/{RECORD_NAME}")):
        with contextlib.suppress(StoreError):
            records.append(Record.read(path.parent))
    # the names distinguish only seconds and processes
    records.sort(key=lambda record: str(record.document.get("started", "")))
    return records


def versions_of(records: Iterable[Record]) -> tuple[str, ...]:
    """Versions of Thinsection that worked in a folder, the first one first."""
    versions = (str(one.document.get("thinsection_version") or "") for one in records)
    return tuple(dict.fromkeys(filter(None, versions)))


def same_settings(out: Path, record: Record) -> Iterator[Record]:
    """Earlier records with the same settings for the results, newest first."""
    if not record.document["config"]["output"]["resume"]:
        return
    for earlier in reversed(read_records(out)):
        is_same = earlier.deciding_settings == record.deciding_settings
        if is_same and earlier.folder != record.folder:
            yield earlier


def efficiency(out: Path) -> tuple[Efficiency, Path]:
    """Analysis of the newest invocation that finished any slide, and its page.

    Raises StoreError: no invocation did work there, or it did not record its resource use.
    """
    for record in reversed(read_records(out)):
        if record.document.get("counts", {}).get("done"):
            return write_efficiency(record.folder), record.folder / PAGE_NAME
    raise StoreError(
        f"out must contain records of a run that did work, got none in {str(out / RECORDS)!r}"
    )


def write_efficiency(folder: Path) -> Efficiency:
    """Writes a record's efficiency.html and the section 'efficiency' of its run.json.

    Raises StoreError: no process recorded its resource use.
    """
    usages = read_usage(folder)
    if not any(usage.samples for usage in usages):
        raise StoreError(
            f"record of a run must contain usage/*.jsonl, got none in {str(folder)!r}; only runs "
            "record their resource use"
        )
    analysis = analyse(usages)
    write_text(
        folder / PAGE_NAME, efficiency_page(analysis, usages, home=_INDEX_ADDRESS)
    )
    document = asdict(analysis)
    if analysis.next_request is not None:
        document["next_request"]["sbatch"] = list(analysis.next_request.sbatch_lines())
    update_record(Record.read(folder), {"efficiency": document})
    return analysis
