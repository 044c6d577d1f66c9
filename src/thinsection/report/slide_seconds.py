"""Seconds that each slide took, from the notes that processes leave in the records."""

import contextlib
import json
from pathlib import Path

from thinsection.config import coerce
from thinsection.files.atomic import parse_json, read_json, write_text

# what was read so far, so that a record is not read again by each later command
SECONDS = "records/seconds.json"
_LOGS = "*/ended/*.jsonl"

# seconds by slide, by the name of the record
SecondsByRecord = dict[str, dict[str, float]]


def slide_seconds(out: Path) -> dict[str, float]:
    """Seconds by slide; a newer invocation takes precedence over an older one.

    Only notes that were added since the last call are read. If notes were removed, all are read.

    Memory:
        About 100 bytes per slide.
    """
    read_until: dict[str, int] = {}
    found: SecondsByRecord = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        document = read_json(out / SECONDS)
        seconds = coerce(document["seconds"], SecondsByRecord, "seconds")
        read_until = coerce(document["logs"], dict[str, int], "logs")
        found = seconds
    logs: dict[str, Path] = {}
    for path in sorted((out / "records").glob(_LOGS)):
        logs[str(path.relative_to(out))] = path
    sizes = {name: path.stat().st_size for name, path in logs.items()}
    if any(sizes.get(name, -1) < end for name, end in read_until.items()):
        read_until = {}
        found = {}
    ends = dict(read_until)
    for name, path in logs.items():
        start = read_until.get(name, 0)
        if sizes[name] > start:
            notes, ends[name] = _new_notes(path, start)
            found.setdefault(path.parts[-3], {}).update(notes)
    # names of records begin with their time, so the last one is the newest
    record_of: dict[str, str] = {}
    newest: dict[str, float] = {}
    for record in sorted(found):
        newest |= found[record]
        record_of |= dict.fromkeys(found[record], record)
    if ends != read_until:
        seconds = {}
        for slide_id, record in record_of.items():
            seconds.setdefault(record, {})[slide_id] = newest[slide_id]
        write_text(out / SECONDS, json.dumps({"logs": ends, "seconds": seconds}))
    return newest


def _new_notes(path: Path, start: int) -> tuple[dict[str, float], int]:
    """Seconds by slide in the lines of a log from a position on, and the end of the last line."""
    seconds: dict[str, float] = {}
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):  # its process was killed, or still writes
                break
            start += len(line)
            # a line that was damaged is left out
            with contextlib.suppress(ValueError, AttributeError, KeyError, TypeError):
                result = parse_json(line.decode(errors="replace"))
                if result.get("seconds"):
                    seconds[result["slide_id"]] = result["seconds"]
    return seconds, start
