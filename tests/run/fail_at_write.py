# ruff: noqa: T201
"""Runs three slides in forks of one warm process; from its n-th write on the disk of each fails.

    LD_PRELOAD=failing_disk.so python fail_at_write.py SLIDES OUT ERRNO POINTS [READS]

READS: the slides cannot be read from then on (1), or their reads come short (2).

Prints a line of JSON for each of POINTS places (0: every write): how the failing run ended, what it
said, and the digest of what a resumed run leaves; the first line is of the undisturbed one.
"""

import json
import os
import shutil
import sys
from pathlib import Path

from tests.run.kill_at_rename import SETTINGS, digest, imports_of
from tests.support.warm import import_noted, note_imports

from thinsection.config import replace_flat
from thinsection.errors import OutputError, StoreError
from thinsection.files.atomic import TMP_MARK
from thinsection.run.run import run
from thinsection.stages.config import RunConfig


def attempt(
    slides: str, out: Path, *, fail_at: int, number: int = 0, reads: int = 0
) -> tuple[int, str]:
    """(exit code, what was said) of a fork that runs the job on a disk that fails."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        if fail_at >= 0:
            os.environ |= {
                "FAIL_BELOW": slides if reads else str(out),
                "FAIL_AT": str(fail_at),
            }
            os.environ |= {"FAIL_READS": str(reads)}
            os.environ |= {"FAIL_ERRNO": str(number), "FAIL_COUNT": f"{out}.count"}
        try:
            config = replace_flat(RunConfig(), SETTINGS)
            code, said = run([slides], out=out, config=config).exit_code, ""
        except (OutputError, StoreError) as error:
            code = 4 if isinstance(error, OutputError) else 2
            said = " ".join([str(error), *getattr(error, "__notes__", [])])
        os.environ.pop("FAIL_BELOW", None)
        note_imports(imports_of(out))
        os.write(writer, said.encode())
        os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as told:
        said = told.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


def main(slides: str, out: Path, number: int, points: int, reads: int) -> None:
    reference = out / "reference"
    assert attempt(slides, reference, fail_at=0, reads=reads) == (0, "")
    import_noted(imports_of(reference))
    writes = Path(f"{reference}.count").stat().st_size
    print(json.dumps({"digest": digest(reference), "writes": writes}), flush=True)
    places = {round(1 + i * (writes - 1) / points) for i in range(points)}
    for fail_at in sorted(places) or range(1, writes + 1):
        target = out / f"fail{fail_at}"
        code, said = attempt(
            slides, target, fail_at=fail_at, number=number, reads=reads
        )
        resumed, _ = attempt(slides, target, fail_at=-1)
        left = [
            str(p) for p in target.rglob("*") if TMP_MARK in p.name or ".lock" in p.name
        ]
        found = {
            "at": fail_at,
            "code": code,
            "said": said,
            "resumed": resumed,
            "left": left,
        }
        print(json.dumps(found | {"digest": digest(target)}), flush=True)
        shutil.rmtree(target)


if __name__ == "__main__":
    numbers = map(int, (*sys.argv[3:], 0)[:3])
    main(sys.argv[1], Path(sys.argv[2]), *numbers)
