"""What each invocation leaves under `OUT/records/`: settings, versions, counts, what was used.

records/20261121-231430-host-4711/run.json      config, versions, counts, seconds
                                  usage/        see `usage.monitor`
                                  efficiency.html
                                  logs/, slurm/ of executors
"""

import contextlib
import datetime
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import thinsection
from thinsection.errors import StoreError
from thinsection.files.atomic import write_json

RECORDS = "records"
RECORD_NAME = "run.json"


@dataclass(frozen=True, kw_only=True)
class Record:
    """One invocation.

    Attributes:
        folder: OUT/records/NAME.
        document: of run.json.
    """

    folder: Path
    document: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "Record":
        """The record of a folder.

        Raises:
            StoreError: it is missing or damaged.
        """
        path = folder / RECORD_NAME
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StoreError(f"record must be readable, got {error} in {str(path)!r}") from None
        if not isinstance(document, dict):
            raise StoreError(f"record must be a JSON object, got {str(path)!r}")
        return cls(folder=folder, document=document)

    def seconds_since(self) -> float:
        """Wall-clock seconds since the invocation began."""
        started = datetime.datetime.fromisoformat(self.document["started"])
        return (datetime.datetime.now(datetime.UTC) - started).total_seconds()

    @property
    def worked(self) -> bool:
        """Whether it finished any slide, rather than found all of them done."""
        return bool(self.document.get("counts", {}).get("done"))


def begin_record(out: Path, command: str, config: Mapping[str, Any]) -> Record:
    """Makes the folder of an invocation that begins now, and says with what."""
    now = datetime.datetime.now(datetime.UTC)
    stamp = now.strftime("%Y%m%d-%H%M%S")
    for attempt in range(1000):  # two invocations of one process within a second
        last = f"-{attempt}" if attempt else ""
        folder = out / RECORDS / f"{stamp}-{platform.node()}-{os.getpid()}{last}"
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            continue
    record = Record(
        folder=folder,
        document={
            "thinsection_version": thinsection.__version__,
            "command": command,
            "started": now.isoformat(timespec="milliseconds"),
            "host": platform.node(),
            "config": dict(config),
        },
    )
    write_json(folder / RECORD_NAME, record.document)
    return record


def end_record(record: Record, facts: Mapping[str, Any]) -> Record:
    """Adds to run.json what came of it: counts, seconds, models."""
    ended = Record(folder=record.folder, document={**record.document, **facts})
    write_json(record.folder / RECORD_NAME, ended.document)
    return ended


def read_records(out: Path) -> list[Record]:
    """The invocations of a results folder, oldest first; unreadable ones are left out."""
    found = []
    for path in sorted((Path(out) / RECORDS).glob(f"*/{RECORD_NAME}")):
        with contextlib.suppress(StoreError):
            found.append(Record.read(path.parent))
    # names tell seconds and processes only
    return sorted(found, key=lambda record: str(record.document.get("started", "")))


def last_record(out: Path) -> Record:
    """The newest invocation that did work.

    Raises:
        StoreError: there is none.
    """
    worked = [record for record in read_records(out) if record.worked]
    if not worked:
        raise StoreError(
            f"out must hold records of a run that did work, got none in {str(out / RECORDS)!r}"
        )
    return worked[-1]
