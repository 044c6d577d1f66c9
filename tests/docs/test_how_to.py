"""Every script of docs/how-to runs as it stands, in a folder of its own, in another process."""

import ast
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.support.warm_python import warm_python

from .pages import ROOT

SCRIPTS = sorted((ROOT / "docs" / "how-to").glob("*.py"))
# runs scripts one after the other, each in a new folder of its name
ONE_AFTER_THE_OTHER = """
import os, runpy, sys
from pathlib import Path

top = Path.cwd()
for script in map(Path, sys.argv[1:]):
    (top / script.stem).mkdir()
    os.chdir(top / script.stem)
    sys.argv = [str(script)]
    runpy.run_path(str(script), run_name="__main__")
"""


def packages_of(script: Path) -> set[str]:
    """Packages that a script imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "find_spec":
            names.add(ast.literal_eval(node.args[0]))
    return names


def grouped() -> list[list[Path]]:
    """Scripts that run in one process: each alone, and those that draw a UMAP together.

    What a UMAP compiles takes 15 CPU-seconds, once for a process.
    """
    drawing = [path for path in SCRIPTS if 'method="umap"' in path.read_text("utf-8")]
    return [
        *([drawing] if drawing else []),
        *([path] for path in SCRIPTS if path not in drawing),
    ]


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    with warm_python() as program:
        yield program


@pytest.mark.check
@pytest.mark.parametrize(
    "scripts", grouped(), ids=lambda paths: " ".join(path.stem for path in paths)
)
def test_a_script_runs(scripts: list[Path], tmp_path: Path, python: str) -> None:
    packages = {name for script in scripts for name in packages_of(script)}
    missing = [name for name in sorted(packages) if not find_spec(name)]
    if missing:
        names = " and ".join(script.name for script in scripts)
        pytest.skip(f"{names} needs {', '.join(missing)}")
    ended = subprocess.run(
        [python, "-c", ONE_AFTER_THE_OTHER, *map(str, scripts)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
