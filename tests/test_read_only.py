"""What is only read is only read: another user's folder, which this user cannot write.

Each command runs as a user whom the system does not know, without HOME, on results that belong to
root. The tree of the source is compared before and after by names, sizes and time stamps.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.bad_slides import GOOD, Home, make_home

pytestmark = [pytest.mark.check, pytest.mark.timeout(1200)]

STRANGER = 54321
# a user who may read everything, an interpreter in /root for one, and write nothing of others
AS_STRANGER: tuple[str, ...] = (
    *("setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups"),
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"),
)
if os.getuid():
    AS_STRANGER = ()
elif shutil.which("setpriv") is None:
    pytest.skip("setpriv is not installed", allow_module_level=True)
LABELS = ("--target", "label", "--folds", 2, "--inner-folds", 2, "--epochs", 1)
Arguments = Callable[[Home, Path], list[object]]
READS: dict[str, Arguments] = {
    "train": lambda home, new: [
        *(home.whole, "--labels", home.labels, "--out", new / "e", *LABELS)
    ],
    "predict": lambda home, new: [home.model, home.whole, "--out", new / "p"],
    "predict ": lambda home, new: [
        *(home.model, home.whole, "--out", new / "t", "--labels", home.new_labels)
    ],
    "heatmap": lambda home, new: [
        *(home.model, home.whole, "--out", new / "h", "--top-tiles", 1)
    ],
    "heatmap ": lambda home, new: [
        *("tissue_fraction", home.whole, "--out", new / "c", "--top-tiles", 1)
    ],
    "aggregate": lambda home, new: [
        *(home.whole, "--out", new / "a", "--slide-encoder", "max")
    ],
    "aggregate ": lambda home, new: [
        *(home.whole, "--out", new / "b", "--slide-encoder", "max"),
        *("--patients", "early"),
    ],
    "merge": lambda home, new: [home.whole, "--out", new / "m", "--copy"],
    "verify": lambda home, new: [home.whole],
    "ls": lambda home, new: [home.whole],
    "model show": lambda home, new: [home.model],
    "probe slide": lambda home, new: [
        *(home.labels, "--embeddings", home.whole, "--out", new / "s")
    ],
    "bench": lambda home, new: [home.suite, "--out", new / "u"],
    "run": lambda home, new: [
        *(home.slides / "good0.svs", "--out", new / "r", "--until", "tissue")
    ],
    "qc": lambda home, new: [home.slides / "good0.svs", "--out", new / "q"],
    **{
        f"export {tool}": lambda home, new, tool=tool: [  # type: ignore[misc]
            *(home.whole, "--out", new / f"{tool}.h5ad")
        ]
        for tool in (
            *("anndata", "qupath", "trident", "clam", "stamp", "slide2vec"),
            *("jpeg", "webdataset"),
        )
    },
}


def run_as_stranger(
    arguments: list[object], folder: Path, *, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs Python as a user without a name and without a home; as this user, where not root."""
    root = Path(__file__).parent.parent
    kept = {name: os.environ[name] for name in ("PATH",)}
    variables = {
        **kept,
        "PYTHONPATH": f"{root / 'src'}:{root}",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(folder),
        **(env or {}),
    }
    return subprocess.run(
        [*AS_STRANGER, sys.executable, *map(str, arguments)],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    """Results that only their owner can write; pytest's own folders hide from other users."""
    top = Path(tempfile.mkdtemp(prefix="read_only_"))
    try:
        top.chmod(0o755)
        made = make_home(top)
        for path in [top, *top.rglob("*")]:
            if path.is_dir():
                path.chmod(0o555)
            else:
                path.chmod(0o444)
        yield made
    finally:
        for path in [top, *top.rglob("*")]:
            if path.is_dir():
                path.chmod(0o755)
        shutil.rmtree(top)


@pytest.fixture
def new() -> Iterator[Path]:
    """Folder of the stranger."""
    folder = Path(tempfile.mkdtemp(prefix="stranger_"))
    if os.getuid() == 0:
        os.chown(folder, STRANGER, STRANGER)
    yield folder
    shutil.rmtree(folder)


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time stamp of everything in a folder."""
    entries = [folder, *sorted(folder.rglob("*"))]
    return {str(p): (p.lstat().st_size, p.lstat().st_mtime_ns) for p in entries}


@pytest.mark.parametrize("name", READS)
def test_a_command_reads_another_users_folder_and_leaves_nothing_there(
    name: str, home: Home, new: Path
) -> None:
    top = home.whole.parent
    before = tree(top)
    arguments = READS[name](home, new)
    done = run_as_stranger(["-m", "thinsection", *name.split(), *arguments], new)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == (3 if name == "bench" else 0), done.stdout + done.stderr
    assert tree(top) == before


def test_a_user_without_a_home_keeps_a_cache_that_nobody_else_can_write(
    new: Path,
) -> None:
    code = "from thinsection.config import user_cache_dir as u; print(u())"
    if os.getuid():
        pytest.skip("only root can become a user without a home")
    done = run_as_stranger(["-c", code], new)
    folder = Path(done.stdout.strip())
    assert folder == new / f"thinsection-{STRANGER}"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    folder.symlink_to(new)
    done = run_as_stranger(["-c", code], new)
    assert "must belong to this user" in done.stderr


def test_slides_that_were_good_are_all_there(home: Home, new: Path) -> None:
    """The walk is over folders that have something to write."""
    done = run_as_stranger(
        ["-m", "thinsection", "predict", home.model, home.whole, "--out", new / "p"],
        new,
        env={"HOME": "/nonexistent"},
    )
    assert done.returncode == 0, done.stderr
    (table,) = (new / "p").glob("predictions_*.csv")
    assert all(slide in table.read_text() for slide in GOOD)
