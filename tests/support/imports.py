"""Arrows between files: what a file imports, in a statement or by name.

Three kinds of arrow are read from a file's syntax tree, wherever they stand in it (at the top, in
a function, under TYPE_CHECKING):

- statement: `import a.b`, `from a.b import c`, `from . import c`;
- call: `import_module("a.b")`, `__import__("a.b")`, `find_spec("a.b")`;
- target: any other string that names a module, `"a.b"` or `"a.b:Class"`, and every f-string
  whose beginning names a package, `f"a.b.{name}"`. Docstrings are not read.

A target is how a registry names its entries. It may not point upwards, as it is an import that
is carried out later. It is not counted in circles: a registry that stands beside its abstract
class names the file of a subclass, which imports the abstract class, and that is the purpose of
a registry.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["statement", "call", "target"]
_IMPORTING_CALLS = ("import_module", "__import__", "find_spec")
_TARGET = re.compile(r"[A-Za-z_]\w*(\.\w+)*(:\w+)?\.?")


@dataclass(frozen=True, slots=True, order=True)
class Arrow:
    """One import: `source` needs `target`; both are dotted names of modules."""

    source: str
    target: str
    kind: Kind
    line: int

    def __str__(self) -> str:
        return f"{self.source} -> {self.target} ({self.kind} in line {self.line})"


def modules_below(folder: Path, name: str) -> dict[str, Path]:
    """Files of a package by dotted name; `name` is that of the folder."""
    modules = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [name, *path.relative_to(folder).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        modules[".".join(parts)] = path
    return modules


def arrows_between(modules: Mapping[str, Path]) -> list[Arrow]:
    """Every arrow from one of these modules to another of them."""
    arrows = set()
    for source, path in modules.items():
        for arrow in _arrows_from(source, path, modules.keys()):
            if arrow.target != source:
                arrows.add(arrow)
    return sorted(arrows)


def circles(arrows: list[Arrow]) -> list[list[str]]:
    """Groups of modules each of which reaches every other one of its group; targets left out."""
    targets_of: dict[str, set[str]] = {}
    for arrow in arrows:
        if arrow.kind != "target":
            targets_of.setdefault(arrow.source, set()).add(arrow.target)
    reached_from = {name: _reached(name, targets_of) for name in targets_of}
    groups = set()
    for name, reached in reached_from.items():
        if name in reached:
            back = {other for other in reached if name in reached_from.get(other, ())}
            groups.add(tuple(sorted(back)))
    return [list(group) for group in sorted(groups)]


def _reached(start: str, targets_of: Mapping[str, Set[str]]) -> set[str]:
    """Modules at the end of a path of one or more arrows that begins at `start`."""
    reached: set[str] = set()
    waiting = list(targets_of[start])
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting.extend(targets_of.get(name, ()))
    return reached


def _arrows_from(source: str, path: Path, modules: Set[str]) -> Iterator[Arrow]:
    tree = ast.parse(path.read_text())
    skipped = _docstrings(tree)
    package = source if path.name == "__init__.py" else source.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in modules:
                    yield Arrow(source, alias.name, "statement", node.lineno)
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(node, package)
            for alias in node.names:
                submodule = f"{origin}.{alias.name}"
                name = submodule if submodule in modules else origin
                if name in modules:
                    yield Arrow(source, name, "statement", node.lineno)
        elif isinstance(node, ast.Call) and _is_importing(node):
            argument = node.args[0]
            name = _module_named_by(_fixed_text(argument), modules)
            if name is not None and isinstance(argument, ast.Constant):
                skipped.add(id(argument))
                yield Arrow(source, name, "call", node.lineno)
        elif id(node) not in skipped:
            name = _module_named_by(_fixed_text(node), modules)
            if name is not None:
                assert isinstance(node, ast.expr)
                yield Arrow(source, name, "target", node.lineno)


def _origin(node: ast.ImportFrom, package: str) -> str:
    """Absolute name of the module that a `from` statement reads."""
    if node.level == 0:
        return node.module or ""
    parts = package.split(".")
    parts = parts[: len(parts) - node.level + 1]
    if node.module:
        parts.append(node.module)
    return ".".join(parts)


def _is_importing(node: ast.Call) -> bool:
    function = ast.unparse(node.func).rpartition(".")[2]
    return function in _IMPORTING_CALLS and len(node.args) > 0


def _fixed_text(node: ast.AST) -> str:
    """Text of a string, or of an f-string up to its first brace; else empty."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ""


def _module_named_by(text: str, modules: Set[str]) -> str | None:
    """Module of `modules` that "a.b", "a.b:Class" or the beginning "a.b." names."""
    if "." not in text or not _TARGET.fullmatch(text):
        return None
    name = text.partition(":")[0].rstrip(".")
    return name if name in modules else None


def _docstrings(tree: ast.AST) -> set[int]:
    """Ids of the nodes that are docstrings or other strings that stand alone."""
    alone = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            alone.add(id(node.value))
    return alone
