"""Names that tests replace by `monkeypatch` exist, so that a renamed one is found here.

`monkeypatch.setattr` refuses a name that does not exist, but only when its test runs, and many of
these are marked `check`.
"""

import ast
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
BENCHMARKS = TESTS.parent / "benchmarks"
PACKAGE = "thinsection"
METHODS = ("setattr", "delattr")


@dataclass(frozen=True)
class Patch:
    """A name that a test replaces, with the object that has it, both as text."""

    file: str
    line: int
    owner: str  # dotted name: 'thinsection.encode.check.hub'
    name: str


def find_patches(source: str, file: str) -> Iterator[Patch]:
    """Yields the replaced names whose owner is imported at a known name.

    An owner that is a local value, such as a fixture, and a call with `raising` are left out.
    """
    tree = ast.parse(source)
    imported = _imported_names(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not _is_patching(node):
            continue
        target = node.args[0]
        if isinstance(target, ast.Constant):
            owner, _, name = str(target.value).rpartition(".")
        elif len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            first, dot, rest = ast.unparse(target).partition(".")
            owner = imported.get(first, "") + dot + rest
            name = str(node.args[1].value)
        else:
            continue
        if owner.startswith(PACKAGE):
            yield Patch(file, node.lineno, owner, name)


def _is_patching(node: ast.Call) -> bool:
    is_method = isinstance(node.func, ast.Attribute) and node.func.attr in METHODS
    may_be_missing = any(keyword.arg == "raising" for keyword in node.keywords)
    return is_method and bool(node.args) and not may_be_missing


def _imported_names(tree: ast.Module) -> dict[str, str]:
    """Dotted names of what a file imports anywhere, by the names that it gives to them."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
    return names


def resolve(dotted: str) -> object:
    """Returns the module or object with a dotted name; AttributeError: there is none."""
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError:
        owner, _, name = dotted.rpartition(".")
        return getattr(resolve(owner), name)


def find_stale(patches: Iterator[Patch]) -> list[str]:
    """Describes each patch whose name does not exist."""
    stale = []
    for patch in patches:
        try:
            exists = hasattr(resolve(patch.owner), patch.name)
        except AttributeError:
            exists = False
        if not exists:
            stale.append(f"{patch.file}:{patch.line}: {patch.owner}.{patch.name}")
    return stale


def test_replaced_names_exist() -> None:
    patches: list[Patch] = []
    for path in sorted([*TESTS.rglob("*.py"), *BENCHMARKS.rglob("*.py")]):
        if path != Path(__file__):
            file = str(path.relative_to(TESTS.parent))
            patches += find_patches(path.read_text(encoding="utf-8"), file)
    assert len(patches) > 50
    assert find_stale(iter(patches)) == []


@pytest.mark.parametrize(
    "call",
    [
        "monkeypatch.setattr('thinsection.config.read_tolm', None)",
        "monkeypatch.setattr('thinsection.no_such_room.name', None)",
        "monkeypatch.setattr(config, 'read_tolm', None)",
        "monkeypatch.delattr(config.Path, 'read_tolm')",
        "monkeypatch.setattr(RunConfig, 'read_tolm', None)",
    ],
)
def test_a_planted_name_is_found(call: str) -> None:
    imports = "from thinsection import config\nfrom thinsection.stages.config import RunConfig\n"
    (stale,) = find_stale(find_patches(f"{imports}{call}\n", "planted.py"))
    assert stale.startswith("planted.py:3: thinsection.")


def test_a_name_that_exists_or_may_be_missing_is_not_reported() -> None:
    source = (
        "from thinsection import config\n"
        "monkeypatch.setattr(config, 'read_toml', None)\n"
        "monkeypatch.setattr(config, 'read_tolm', None, raising=False)\n"
        "monkeypatch.setattr(fixture, 'read_tolm', None)\n"
    )
    assert len(list(find_patches(source, "kept.py"))) == 1
    assert find_stale(find_patches(source, "kept.py")) == []
