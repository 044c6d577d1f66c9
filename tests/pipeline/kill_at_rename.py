# ruff: noqa: T201
"""Runs the main job in forks of one warm process and kills each at its n-th rename.

    python kill_at_rename.py SLIDE OUT

Prints, for each n, the digest of what a resumed run leaves; `reference` is the undisturbed one.
"""

import hashlib
import os
import shutil
import signal
import sys
from pathlib import Path

from thinsection.config import replace_flat
from thinsection.pipeline.run import run
from thinsection.stages.config import RunConfig

MAX_RENAMES = 40
# small batches that a pixel filter leaves gaps in; every kind of stage
SETTINGS = {
    "memory": "256MiB",
    "batch_size": 2,
    "tile_filter": ["tissue", "contrast"],
    "graph": "knn:4",
    "write": ["tsv"],
    "measures": True,
    "slide_encoders": ["mean", "max"],
}


def execute(slide: str, out: Path, kill_at: int | None) -> int:
    """The exit status of a fork that runs the job, killed at its `kill_at`-th rename."""
    child = os.fork()
    if child == 0:
        seen = 0

        def hook(event: str, args: tuple[object, ...]) -> None:
            nonlocal seen
            if event == "os.rename":
                seen += 1
                if seen == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        os._exit(
            run([slide], out=out, config=replace_flat(RunConfig(), SETTINGS)).exit_code
        )
    return os.waitpid(child, 0)[1]


def digest(folder: Path) -> str:
    """Of every result file, names and bytes."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if (
            path.is_file()
            and "records" not in name.parts
            and not path.name.startswith(".")
        ):
            # what a table says of a slide (done, skipped) tells how often it was run
            total.update(
                str(name).encode()
                + (b"" if path.suffix == ".csv" else path.read_bytes())
            )
    return total.hexdigest()


def main(slide: str, out: Path) -> None:
    assert execute(slide, out / "reference", None) == 0
    print("reference", digest(out / "reference"), flush=True)
    for kill_at in range(1, MAX_RENAMES):
        target = out / f"kill{kill_at}"
        if execute(slide, target, kill_at) == 0:
            return  # fewer renames than that: every one was tried
        assert execute(slide, target, None) == 0
        print(kill_at, digest(target), flush=True)
        shutil.rmtree(target)
    raise AssertionError("more renames than expected")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
