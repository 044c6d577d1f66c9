"""Files that run in other tools' environments: they import what the package alone requires.

They are the files that `thinsection rescue` can reach by imports, in functions too. ruff checks
their syntax for Python 3.10; here the names are checked, and the imports.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tests.support.imports import arrows_between, modules_below

ROOT = Path(__file__).parent.parent
BASE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
# rooms that users import, and the commands that need no slides
STARTS = (
    "thinsection.attention",
    "thinsection.frames",
    "thinsection.rescue",
    "thinsection.neighbors",
    "thinsection.structures",
    "thinsection.deprecations",
    "thinsection.extras",
    "thinsection.cli.main",
    "thinsection.cli.app",
    "thinsection.cli.rescue",
)
# imported where they are needed, with a message where they are missing; pyarrow and gemmi are the
# extra `structures`
ON_DEMAND = {"gemmi", "pyarrow", "torchvision", "triton"}
# names of the standard library that Python 3.10 does not have
NEW_IN_3_11 = {
    "asyncio": {"TaskGroup", "timeout"},
    "contextlib": {"chdir"},
    "datetime": {"UTC"},
    "enum": {"StrEnum", "ReprEnum", "verify"},
    "hashlib": {"file_digest"},
    "itertools": {"batched"},
    "tomllib": {"*"},
    "typing": {
        "LiteralString",
        "Never",
        "NotRequired",
        "Required",
        "Self",
        "TypeVarTuple",
        "Unpack",
        "assert_never",
        "assert_type",
        "dataclass_transform",
        "override",
        "reveal_type",
    },
}
NEW_METHODS = {"add_note"}


def closure() -> dict[str, Path]:
    """Every file that the starts reach, by statements and by calls that import."""
    modules = modules_below(ROOT / "src" / "thinsection", "thinsection")
    del modules["thinsection"]
    targets: dict[str, set[str]] = {name: set() for name in modules}
    for arrow in arrows_between(modules):
        if arrow.kind != "target":
            targets[arrow.source].add(arrow.target)
    waiting = [
        name for name in modules for start in STARTS if f"{name}.".startswith(start)
    ]
    reached = {}
    while waiting:
        name = waiting.pop()
        if name in modules and name not in reached:
            reached[name] = modules[name]
            # a module brings the folders that it lies in
            waiting += [*targets[name], name.rpartition(".")[0]]
    return reached


CLOSURE = closure()


def run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs, but for those behind TYPE_CHECKING or a version of Python."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and is_guard(node.test):
            continue
        yield node
        yield from run_time_nodes(node)


def is_guard(test: ast.expr) -> bool:
    text = ast.unparse(test)
    return text == "TYPE_CHECKING" or text.startswith("sys.version_info")


def not_in_3_10(source: str) -> list[str]:
    """Names of newer Pythons that a source uses; SyntaxError for syntax of newer ones."""
    found = []
    for node in run_time_nodes(ast.parse(source, feature_version=(3, 10))):
        if isinstance(node, ast.Import):
            names = [(alias.name, "*") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "", alias.name) for alias in node.names]
            names.append((node.module or "", "*"))
        elif isinstance(node, ast.Attribute):
            names = [(ast.unparse(node.value), node.attr)]
            if node.attr in NEW_METHODS and not is_ours(node):
                found.append(f"{node.attr} in line {node.lineno}")
        else:
            continue
        for module, name in names:
            if name in NEW_IN_3_11.get(module, ()):
                found.append(f"{module} {name}")
    return found


def is_ours(node: ast.Attribute) -> bool:
    return ast.unparse(node.value) == "errors"


def test_the_closure_is_small_and_holds_no_reader() -> None:
    rooms = {name.split(".")[1] for name in CLOSURE}
    assert rooms == {
        "attention",
        "cli",
        "config",
        "deprecations",
        "errors",
        "extras",
        "files",
        "frames",
        "machine",
        "neighbors",
        "rescue",
        "structures",
        "types",
        "weights",
    }
    assert "thinsection.attention.chunked" in CLOSURE


@pytest.mark.parametrize("name", sorted(CLOSURE))
def test_a_file_runs_with_python_3_10(name: str) -> None:
    assert not not_in_3_10(CLOSURE[name].read_text())


@pytest.mark.parametrize(
    "source",
    [
        "import tomllib",
        "from typing import Any, Self",
        "import datetime\nnow = datetime.UTC",
        "def f(e):\n    e.add_note('x')",
        "if x:\n    from enum import StrEnum",
    ],
)
def test_what_python_3_10_does_not_have_is_noticed(source: str) -> None:
    assert not_in_3_10(source)
    guarded = "\n".join(f"    {line}" for line in source.splitlines())
    assert not not_in_3_10(f"if TYPE_CHECKING:\n{guarded}")


def test_new_syntax_is_noticed() -> None:
    with pytest.raises(SyntaxError):
        not_in_3_10("try:\n    f()\nexcept* ValueError:\n    pass")


def test_only_packages_that_the_package_alone_requires_are_imported() -> None:
    required = {Requirement(line).name.replace("-", "_") for line in BASE}
    foreign = set()
    for name, path in CLOSURE.items():
        for node in run_time_nodes(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules = [node.module]
            for module in modules:
                root = module.partition(".")[0]
                if root not in {*sys.stdlib_module_names, "thinsection", *required}:
                    foreign.add((root, name))
    assert {root for root, _ in foreign} <= ON_DEMAND, sorted(foreign)
