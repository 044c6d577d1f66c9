# ruff: noqa: T201
"""Runs the main job in forks of one warm process, and resumes what a kill at each rename leaves.

    python kill_at_rename.py SLIDE OUT [SETTINGS [EARLIER]]

SETTINGS is a JSON object that replaces those of the main job. EARLIER are the settings of a job
that is done before, undisturbed.
One run is stopped before each of its renames, where its folder is copied: SIGSTOP stops all threads
where SIGKILL would end them, so the copy is what a kill leaves. One more run is really killed.
Prints, for each n, the digest of what a resumed run leaves; `reference` is the undisturbed one.
"""

import hashlib
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from tests.support.warm import import_noted, note_imports

from thinsection.config import replace_flat
from thinsection.run.run import run
from thinsection.stages.config import RunConfig

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


def start(
    slide: str, out: Path, settings: dict[str, object], at_rename: Callable[[int], None]
) -> int:
    """A fork that runs the job, and calls `at_rename` with the number of each rename before it."""
    child = os.fork()
    if child == 0:
        seen = 0

        def hook(event: str, args: tuple[object, ...]) -> None:
            nonlocal seen
            if event == "os.rename":
                seen += 1
                at_rename(seen)

        sys.addaudithook(hook)
        config = replace_flat(RunConfig(), settings)
        code = run([slide], out=out, config=config).exit_code
        note_imports(imports_of(out))
        os._exit(code)
    return child


def execute(
    slide: str, out: Path, settings: dict[str, object], kill_at: int | None = None
) -> int:
    """The exit status of a fork that runs the job, killed at its `kill_at`-th rename."""

    def kill(number: int) -> None:
        if number == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    return os.waitpid(start(slide, out, settings, kill), 0)[1]


def copies_at_renames(slide: str, out: Path, settings: dict[str, object]) -> list[Path]:
    """Copies of the folder as it was before each rename of a fork that runs the job."""

    def stop(number: int) -> None:
        # the thread that renames stops before it returns from this call
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    child = start(slide, out, settings, stop)
    copies: list[Path] = []
    while os.WIFSTOPPED(status := os.waitpid(child, os.WUNTRACED)[1]):
        copies.append(out.with_name(f"kill{len(copies) + 1}"))
        if out.exists():
            shutil.copytree(out, copies[-1])
        os.kill(child, signal.SIGCONT)
    assert status == 0
    return copies


def imports_of(out: Path) -> Path:
    """File in which the fork of this output folder noted what it imported."""
    return out.with_suffix(".imports")


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
            total.update(str(name).encode() + content_of(path))
    return total.hexdigest()


def content_of(path: Path) -> bytes:
    """Bytes of a file; of a ledger its entries, because a resumed run may add them in any order."""
    if path.name == "slide.json":
        return json.dumps(json.loads(path.read_bytes()), sort_keys=True).encode()
    # what a table says of a slide (done, skipped) tells how often it was run
    return b"" if path.suffix == ".csv" else path.read_bytes()


def main(
    slide: str,
    out: Path,
    settings: dict[str, object],
    earlier: dict[str, object] | None,
) -> None:
    stopped, killed = out / "stopped", out / "killed"
    if earlier is not None:
        assert execute(slide, out / "reference", earlier) == 0
        for folder in (stopped, killed):
            shutil.copytree(out / "reference", folder)
    assert execute(slide, out / "reference", settings) == 0
    import_noted(imports_of(out / "reference"))
    print("reference", digest(out / "reference"), flush=True)
    copies = copies_at_renames(slide, stopped, settings)
    assert digest(stopped) == digest(out / "reference")
    middle = len(copies) // 2
    assert os.WTERMSIG(execute(slide, killed, settings, middle)) == signal.SIGKILL
    # the lock of a folder names its process, which has ended
    for target in (*copies, killed):
        assert execute(slide, target, settings) == 0
        print(target.name, digest(target), flush=True)
        shutil.rmtree(target)


if __name__ == "__main__":
    given = json.loads(sys.argv[3]) if len(sys.argv) > 3 else SETTINGS
    done_before = json.loads(sys.argv[4]) if len(sys.argv) > 4 else None
    main(sys.argv[1], Path(sys.argv[2]), given, done_before)
