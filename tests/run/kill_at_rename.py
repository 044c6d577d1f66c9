# ruff: noqa: T201
"""Runs the main job in forks of one warm process and kills each at its n-th rename.

    python kill_at_rename.py SLIDE OUT [SETTINGS [EARLIER]]

SETTINGS is a JSON object that replaces those of the main job. EARLIER are the settings of a job
that is done before, undisturbed.
Prints, for each n, the digest of what a resumed run leaves; `reference` is the undisturbed one.
"""

import hashlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

from tests.support.warm import import_noted, note_imports

from thinsection.config import replace_flat
from thinsection.run.run import run
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


def execute(
    slide: str, out: Path, kill_at: int | None, settings: dict[str, object]
) -> int:
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
        config = replace_flat(RunConfig(), settings)
        code = run([slide], out=out, config=config).exit_code
        note_imports(imports_of(out))
        os._exit(code)
    return os.waitpid(child, 0)[1]


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
    if earlier is not None:
        assert execute(slide, out / "reference", None, earlier) == 0
        shutil.copytree(out / "reference", out / "earlier")
    assert execute(slide, out / "reference", None, settings) == 0
    import_noted(imports_of(out / "reference"))
    print("reference", digest(out / "reference"), flush=True)
    for kill_at in range(1, MAX_RENAMES):
        target = out / f"kill{kill_at}"
        if earlier is not None:
            shutil.copytree(out / "earlier", target)
        if execute(slide, target, kill_at, settings) == 0:
            return  # fewer renames than that: every one was tried
        assert execute(slide, target, None, settings) == 0
        print(kill_at, digest(target), flush=True)
        shutil.rmtree(target)
    raise AssertionError("more renames than expected")


if __name__ == "__main__":
    given = json.loads(sys.argv[3]) if len(sys.argv) > 3 else SETTINGS
    done_before = json.loads(sys.argv[4]) if len(sys.argv) > 4 else None
    main(sys.argv[1], Path(sys.argv[2]), given, done_before)
