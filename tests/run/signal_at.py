# ruff: noqa: T201
"""Sends signals to a run at different moments of it, then resumes it.

    python signal_at.py SLIDES OUT SIGNAL,... TIMES [FLAGS ...]

Runs are forks of one warm process that call the `thinsection` command. Prints a line of JSON for
each: how it ended, what it left, and the digest of what a resumed run leaves; the first line is of
the undisturbed one.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import torch  # noqa: F401 - warm
from tests.run.kill_at_rename import digest

import thinsection.run.run  # noqa: F401
from thinsection.cli.main import main as command
from thinsection.files.atomic import TMP_MARK
from thinsection.files.lock import LOCK_NAME

NUMBERS = {"TERM": signal.SIGTERM, "INT": signal.SIGINT, "KILL": signal.SIGKILL}
FLAGS = ("--memory", "256MiB", "--batch-size", "2", "--threads", "1", "--write", "tsv")


def start(slides: str, out: Path, flags: list[str]) -> int:
    """A fork that runs the command, the leader of a process group."""
    child = os.fork()
    if child == 0:
        os.setsid()
        with Path(f"{out}.log").open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.argv = ["thinsection", "run", slides, "--out", str(out), *FLAGS, *flags]
        try:
            command()
        except SystemExit as end:
            os._exit(int(end.code or 0))
        os._exit(0)
    return child


def left_in(out: Path) -> list[str]:
    """Locks and unfinished files."""
    names = [
        p for p in out.rglob("*") if TMP_MARK in p.name or p.name.startswith(LOCK_NAME)
    ]
    return [str(path.relative_to(out)) for path in names]


def wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(
    slides: str, out: Path, signals: list[str], times: int, flags: list[str]
) -> None:
    began = time.monotonic()
    assert wait(start(slides, out / "reference", flags)) == 0
    seconds = time.monotonic() - began
    print(
        json.dumps({"digest": digest(out / "reference"), "seconds": seconds}),
        flush=True,
    )
    for name, index in product(signals, range(times)):
        target = out / f"{name}{index}"
        child = start(slides, target, flags)
        time.sleep(seconds * (index + 0.5) / times)
        os.kill(child, NUMBERS[name])
        began = time.monotonic()
        code = wait(child)
        found = {
            "signal": name,
            "code": code,
            "ended_after_s": round(time.monotonic() - began, 2),
        }
        found |= {"left": left_in(target), "tables": (target / "failed.csv").exists()}
        found |= {"records": len(list(target.glob("records/*/run.json")))}
        resumed = wait(start(slides, target, flags))
        found |= {
            "resumed": resumed,
            "left_then": left_in(target),
            "digest": digest(target),
        }
        said = Path(f"{target}.log").read_text().splitlines()
        found["said"] = [
            line for line in said if "stopped by" in line or "to continue" in line
        ]
        orphans = subprocess.run(
            ["pgrep", "-s", str(child)], capture_output=True, check=False
        )
        print(
            json.dumps(found | {"orphans": orphans.stdout.decode().split()}), flush=True
        )
        shutil.rmtree(target)


if __name__ == "__main__":
    main(
        sys.argv[1],
        Path(sys.argv[2]),
        sys.argv[3].split(","),
        int(sys.argv[4]),
        sys.argv[5:],
    )
