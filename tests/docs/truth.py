"""What exists: commands with their options, settings, names of Python, files of the repository."""

import ast
import importlib
import pkgutil
import re
import subprocess
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import typer

import thinsection
from thinsection.cli.app import COMMANDS, build_app

from .pages import ROOT

SOURCES = ROOT / "src" / "thinsection"
# commands whose further words are those of another command
ARRAYS = (("slurm", "script"), ("slurm", "submit"))
_ENDINGS = (".py", ".toml", ".html", ".j2", ".js", ".groovy")


@cache
def commands() -> dict[tuple[str, ...], Any]:
    """Words of each command and group -> the command of typer."""
    found: dict[tuple[str, ...], Any] = {}
    for name in COMMANDS:
        root = typer.main.get_command(build_app([name]))
        for words, command in _below((name,), root.commands[name]):  # type: ignore[attr-defined]
            found[words] = command
    return found


def _below(
    words: tuple[str, ...], command: Any
) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _below((*words, name), inner)


def options_of(words: tuple[str, ...]) -> set[str]:
    """Long and short options of a command; those of `run` too where it makes a job array."""
    names = {"--help"}
    for parameter in commands()[words].params:
        names.update(parameter.opts, parameter.secondary_opts)
    if words in ARRAYS:
        names |= set().union(*map(options_of, commands().keys() - set(ARRAYS)))
    return names


def options_below(words: tuple[str, ...]) -> set[str]:
    """Options of a group of commands and of those below it."""
    below = [name for name in commands() if name[: len(words)] == words]
    return set().union(*map(options_of, below))


@cache
def all_options() -> frozenset[str]:
    """Options of all commands."""
    names = {"--version"}.union(benchmark_options(), *map(options_of, commands()))
    return frozenset(name for name in names if name.startswith("-"))


def command_words(arguments: Sequence[str]) -> tuple[str, ...]:
    """The words at the beginning of a command line that name a command; () if none."""
    words: tuple[str, ...] = ()
    for argument in arguments:
        if (*words, argument) not in commands():
            break
        words = (*words, argument)
    return words


def parse(arguments: Sequence[str]) -> None:
    """Parses a command line without its execution; an error of typer says what is wrong."""
    words = command_words(arguments)
    if not words:
        raise LookupError(f"no command {arguments[:1]}")
    rest = list(arguments[len(words) :])
    if words in ARRAYS:
        inner = rest if command_words(rest) else ["run", *rest]
        parse([*inner, "--executor", "slurm"])
        return
    command = commands()[words]
    if getattr(command, "commands", None):
        is_own = not rest or rest[0].startswith("-")
        if is_own and command.invoke_without_command:
            command.make_context(" ".join(words), rest, resilient_parsing=not rest)
            return
        if " ".join([*words, *rest[:1]]) in plugin_commands():
            return
        raise LookupError(f"{' '.join(words)} has no command {rest[:1]}")
    command.make_context(" ".join(words), rest)


@cache
def tracked() -> tuple[str, ...]:
    """Files of the working tree that are not ignored, and their folders with a slash."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:
        files = listed.stdout.splitlines()
    else:  # an unpacked archive
        files = [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file()]
    folders = {f"{parent}/" for file in files for parent in _parents(file)}
    return tuple(sorted({*files, *folders}))


def _parents(file: str) -> list[str]:
    parts = file.split("/")[:-1]
    return ["/".join(parts[: number + 1]) for number in range(len(parts))]


def is_tracked(path: str) -> bool:
    """Tells if a file or folder of the tree ends with this path."""
    return any(f"/{name}".endswith(f"/{path}") for name in tracked())


@cache
def source_text() -> str:
    """All sources of the package as one text."""
    files = sorted(p for p in SOURCES.rglob("*") if p.suffix in _ENDINGS)
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


@cache
def defined_names() -> frozenset[str]:
    """Functions, classes, fields, attributes, constants and arguments of the package."""
    return frozenset().union(*map(_names_in_file, SOURCES.rglob("*.py")))


def names_in(path: str) -> set[str]:
    """Names that the files of the tree define whose path ends so."""
    files = [name for name in tracked() if f"/{name}".endswith(f"/{path}")]
    return set().union(*(_names_in_file(ROOT / file) for file in files))


@cache
def _nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def _names_in_file(path: Path) -> set[str]:
    names: set[str] = set()
    for node in _nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name):
            names.update([_name_of(node)] if isinstance(node.ctx, ast.Store) else [])
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


def _name_of(node: ast.Attribute | ast.Name) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id


def resolves(dotted: str) -> bool:
    """Tells if a dotted name is a module, or an attribute of a module or class."""
    parts = dotted.split(".")
    value: Any = None
    for number, part in enumerate(parts):
        try:
            value = importlib.import_module(".".join(parts[: number + 1]))
        except ImportError:
            annotated = part in getattr(value, "__dataclass_fields__", {})
            with warnings.catch_warnings():  # a deprecated name is one that exists
                warnings.simplefilter("ignore", DeprecationWarning)
                if not hasattr(value, part) and not annotated:
                    return False
                value = getattr(value, part, None)
    return True


@cache
def entry_points() -> frozenset[str]:
    """Groups of entry points that the package reads."""
    return frozenset(re.findall(r'"(thinsection\.\w+)"', source_text()))


@cache
def rooms() -> frozenset[str]:
    """Names directly below the package."""
    return frozenset(
        module.name for module in pkgutil.iter_modules(thinsection.__path__)
    )


@cache
def setting_names() -> frozenset[str]:
    """Fields of all classes of the package, which include the keys of its TOML files."""
    names: set[str] = set()
    for path in SOURCES.rglob("*.py"):
        for node in _nodes_of(path):
            if isinstance(node, ast.ClassDef):
                named = [
                    line.target for line in node.body if isinstance(line, ast.AnnAssign)
                ]
                names.update(name.id for name in named if isinstance(name, ast.Name))
    return frozenset(names)


@cache
def benchmark_options() -> frozenset[str]:
    """Options of the benchmarks, which are programs of their own."""
    files = (ROOT / "benchmarks").rglob("*.py")
    texts = [path.read_text(encoding="utf-8") for path in files]
    text = "".join(texts)
    read = {"--" + name.replace("_", "-") for name in re.findall(r"args\.(\w+)", text)}
    return frozenset(read.union(re.findall(r"(--[a-z][a-z-]+)(?!\w)", text)))


@cache
def foreign(kind: str) -> frozenset[str]:
    """Names of other programs that pages may mention."""
    table = tomllib.loads(Path(__file__).with_name("foreign.toml").read_text())[kind]
    return frozenset(word for words in table.values() for word in words.split())


@cache
def plugin_commands() -> frozenset[str]:
    """Commands that the example of a plug-in adds."""
    path = ROOT / "examples" / "plugin" / "pyproject.toml"
    points = tomllib.loads(path.read_text(encoding="utf-8"))["project"]["entry-points"]
    return frozenset(f"probe {name}" for name in points["thinsection.probes"])


@cache
def make_targets() -> frozenset[str]:
    """Targets of the Makefile."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    lines = re.findall(r"^([a-z][\w -]*):(?!=)", text, re.MULTILINE)
    return frozenset(word for line in lines for word in line.split())


@cache
def extras() -> frozenset[str]:
    """Optional dependencies of the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return frozenset(project["project"]["optional-dependencies"])
