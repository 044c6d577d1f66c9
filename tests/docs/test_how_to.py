"""Every script of docs/how-to runs as it stands, in a process and a folder of its own."""

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from .pages import ROOT

SCRIPTS = sorted((ROOT / "docs" / "how-to").glob("*.py"))


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


@pytest.mark.check
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_runs(script: Path, tmp_path: Path) -> None:
    missing = [name for name in sorted(packages_of(script)) if not find_spec(name)]
    if missing:
        pytest.skip(f"{script.name} needs {', '.join(missing)}")
    command = [sys.executable, str(script)]
    process = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
