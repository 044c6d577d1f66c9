"""The monitor of a run: a thread that writes what the process tree uses to a file, once a second.

The file has a header line (who, limits, facts), a line per sample (values in the order of
`SAMPLE_FIELDS`) and a last line with the stage seconds. It is appended to, so that a killed run
leaves its timeline; a torn last line is ignored by `read_usage`.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from thinsection.usage.model import SAMPLE_FIELDS, ProcessUsage, Requested, Sample
from thinsection.usage.monitor_facts import environment_facts
from thinsection.usage.monitor_limits import read_limits
from thinsection.usage.monitor_sample import GpuSampler, TreeSampler

USAGE_FOLDER = "usage"
_INTERVAL_S = 1.0


class ResourceMonitor:
    """Records a process tree while the block runs: `with ResourceMonitor(out): ...`.

    Args:
        out: output folder of the run; the record is `out/usage/HOST-PID-TIME.jsonl`.
        facts: settings that explain the record, beside what is found in the environment.
        stage_seconds: asked when the block ends.
        interval_s: seconds between two looks.

    Memory: constant; about 100 bytes of file per sample.
    """

    def __init__(
        self,
        out: Path,
        *,
        facts: Mapping[str, Any] | None = None,
        stage_seconds: Callable[[], Mapping[str, float]] = dict,
        interval_s: float = _INTERVAL_S,
    ) -> None:
        self._host, self._pid, self._started = socket.gethostname(), os.getpid(), time.time()
        name = f"{self._host}-{self._pid}-{int(self._started * 1000)}.jsonl"
        self.path = Path(out) / USAGE_FOLDER / name
        self._facts, self._stage_seconds = dict(facts or {}), stage_seconds
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._begin = time.perf_counter()
        self._gpu = GpuSampler()
        self._sampler = TreeSampler(gpu=self._gpu)
        self._file: TextIO = self.path.open("w", encoding="utf-8", buffering=1)
        facts = environment_facts(gpus_visible=self._gpu.count) | self._facts
        header = {"host": self._host, "pid": self._pid, "started": self._started}
        self._write(header | {"requested": asdict(read_limits()), "facts": facts})
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        try:
            self._look()
            self._write({"stage_seconds": dict(self._stage_seconds())})
        finally:
            self._gpu.close()
            self._file.close()

    def _run(self) -> None:
        self._look()
        while not self._stop.wait(self._interval_s):
            self._look()

    def _look(self) -> None:
        sample = self._sampler.sample(time.perf_counter() - self._begin)
        self._write([getattr(sample, name) for name in SAMPLE_FIELDS])

    def _write(self, value: Any) -> None:
        self._file.write(json.dumps(value, separators=(",", ":")) + "\n")


def read_usage(out: Path) -> list[ProcessUsage]:
    """The records of an output folder, oldest first; unreadable headers are left out."""
    usages = []
    for path in sorted((Path(out) / USAGE_FOLDER).glob("*.jsonl")):
        usage = _parse(path.read_text(encoding="utf-8").splitlines())
        if usage is not None:
            usages.append(usage)
    return sorted(usages, key=lambda usage: usage.started)


def _parse(lines: list[str]) -> ProcessUsage | None:
    values = []
    for line in lines:
        with contextlib.suppress(ValueError):  # the torn last line of a killed process
            values.append(json.loads(line))
    if not values or not isinstance(values[0], dict) or "requested" not in values[0]:
        return None
    header, rows = values[0], values[1:]
    samples = [Sample(**dict(zip(SAMPLE_FIELDS, row))) for row in rows if isinstance(row, list)]
    ends = [row for row in rows if isinstance(row, dict)]
    return ProcessUsage(
        host=header["host"],
        pid=header["pid"],
        started=header["started"],
        requested=Requested(**header["requested"]),
        samples=tuple(samples),
        stage_seconds=ends[-1].get("stage_seconds", {}) if ends else {},
        facts=header.get("facts", {}),
    )
