"""The house keeps its shape: who may import whom, and what an import costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "thinsection"
# a room imports only from rooms above it in this list; loose modules first
ROOMS = (
    *("slide", "arrays", "qc", "tiles", "stream", "attention", "encode", "aggregate"),
    *("neighbors", "rescue", "store", "probe", "plan", "report", "run", "cli"),
)
LOOSE = {"errors", "types", "units", "config"}
MAX_LINES = 400


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "thinsection" and len(parts) > 1:
                rooms.add(parts[1])
    return rooms


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_from_rooms_above_it(room: str) -> None:
    assert (PACKAGE / room).is_dir(), room
    allowed = set(ROOMS[: ROOMS.index(room) + 1]) | LOOSE | {"__version__"}
    allowed |= {"testing"} if room == "cli" else set()  # `thinsection demo` generates a slide
    for path in sorted((PACKAGE / room).rglob("*.py")):
        upwards = imported_rooms(path) & (set(ROOMS) | {"testing"}) - allowed
        assert not upwards, f"{path.relative_to(PACKAGE)} imports {sorted(upwards)}"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.name)
def test_no_file_is_longer_than_the_house_allows(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES, path


def test_import_pulls_in_neither_torch_nor_a_reader_and_is_quick() -> None:
    code = (
        "import sys, time; t = time.perf_counter(); import thinsection; "
        "print(time.perf_counter() - t, "
        "[m for m in ('torch', 'openslide', 'tifffile', 'cucim') if m in sys.modules])"
    )
    best = min(_import_seconds(code) for _ in range(3))
    assert best < 0.3


def _import_seconds(code: str) -> float:
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, modules = out.stdout.split(" ", 1)
    assert modules.strip() == "[]"
    return float(seconds)
