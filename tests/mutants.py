# ruff: noqa: T201
"""Changes code a little and asks whether the tests notice: `python -m tests.mutants [--seed 1]`.

A mutant is a module with one change in a function: another operator, number or comparison, a
condition turned round, a call left out. Mutants are drawn at random by the seed. Each runs the
module's tests in a fork of a process that has collected them, until the first one fails. Ends with
exit code 1 where fewer than 85 of 100 are noticed, and prints those that are not.
"""

import argparse
import ast
import gc
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FunctionType
from typing import cast

import pytest

# module -> the tests that must notice a change of it, separated by spaces
TARGETS = {
    "thinsection.evaluation.table_one": "tests/evaluation/test_table_one.py "
    "tests/predict/test_review.py",
    "thinsection.segment.windows": "tests/segment",
    "thinsection.slide.cohort": "tests/slide/test_cohort.py",
    "thinsection.slide.geometry": "tests/slide/test_geometry.py",
    "thinsection.slide.opening": "tests/slide/test_copies.py tests/store/test_identity.py",
    "thinsection.citation.bibtex": "tests/citation/test_references.py",
    "thinsection.exchange.qupath": "tests/exchange/test_qupath.py "
    "tests/exchange/test_own_columns.py",
    "thinsection.results.columns": "tests/results/test_columns.py",
    "thinsection.results.column_files": "tests/results/test_columns.py",
    "thinsection.exchange.peer_import": "tests/exchange/test_peer_import.py",
    "thinsection.qc.edits": "tests/qc/test_edits.py",
}
LEAST_NOTICED = 0.85
MUTANTS = 40  # of a module
MODULE_SECONDS = 900  # then no further mutant of a module is started
MUTANT_SECONDS = 60  # then a mutant counts as noticed: it does not end
OTHER_OPERATOR: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}


def changed(node: ast.AST) -> ast.AST | None:
    """Another node for this one; None where it has no other."""
    match node:
        case ast.Compare(left, [operator, *others], comparators):
            operators = [OTHER_OPERATOR[type(operator)](), *others]
            return ast.Compare(left, operators, comparators)
        case ast.BinOp(left, operator, right) if type(operator) in OTHER_OPERATOR:
            return ast.BinOp(left, OTHER_OPERATOR[type(operator)](), right)
        case ast.BoolOp(operator, values):
            return ast.BoolOp(OTHER_OPERATOR[type(operator)](), values)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            return operand
        case ast.Constant(bool(value)):
            return ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            return ast.Constant(value + 1)
        case ast.If(test, body, orelse):
            return ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.IfExp(test, body, orelse):
            return ast.IfExp(test, orelse, body)
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break():
            return ast.Pass()
    return None


class Change(ast.NodeTransformer):
    """Changes the place with this number, of those that can be changed; counts them all."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.count = 0
        self.description = ""
        self._in_function = False

    def visit(self, node: ast.AST) -> ast.AST:
        """The node, its other, or the node with a change below it."""
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.arguments):
            return node  # messages and defaults
        other = changed(node) if self._in_function else None
        if other is not None:
            self.count += 1
            if self.count == self.number:
                assert isinstance(node, ast.expr | ast.stmt)
                before = ast.unparse(node).partition("\n")[0]
                after = ast.unparse(other).partition("\n")[0]
                self.description = f"{node.lineno}: {before} -> {after}"
                return ast.copy_location(other, node)
        outside = self._in_function
        if isinstance(node, ast.FunctionDef):
            self._in_function = True
            node.body = [
                cast(ast.stmt, self.visit(statement)) for statement in node.body
            ]
        else:
            self.generic_visit(node)
        self._in_function = outside
        return node


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Code of every function inside."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes_in(constant)


def exchange(path: str, mutant: CodeType) -> None:
    """Gives the functions of a file, wherever they are held, the code of the mutant."""
    codes = {(c.co_qualname, c.co_firstlineno): c for c in codes_in(mutant)}
    for function in gc.get_objects():
        if type(function) is FunctionType and function.__code__.co_filename == path:
            old = function.__code__
            new = codes.get((old.co_qualname, old.co_firstlineno))
            if new is not None and new.co_freevars == old.co_freevars:
                function.__code__ = new


class Mutants:
    """Plugin of pytest that tries mutants where the tests would run once."""

    def __init__(self, module: str, seed: int) -> None:
        self.module = module
        self.seed = seed
        self.noticed = 0
        self.unnoticed: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Draws and tries them."""
        path = str(import_module(self.module).__file__)
        source = Path(path).read_text(encoding="utf-8")
        places = Change(0)
        places.visit(ast.parse(source))
        numbers = list(range(1, places.count + 1))
        random.Random(self.seed).shuffle(numbers)
        if not session.items or not self._passes(
            session, path, compile(source, path, "exec")
        ):
            pytest.exit(
                f"the tests of {self.module} must pass as they are", returncode=2
            )
        end = time.monotonic() + MODULE_SECONDS
        for number in numbers[:MUTANTS]:
            if time.monotonic() > end:
                break
            change = Change(number)
            tree = ast.fix_missing_locations(change.visit(ast.parse(source)))
            if self._passes(session, path, compile(tree, path, "exec")):
                self.unnoticed.append(change.description)
            else:
                self.noticed += 1
        return True

    def _passes(self, session: pytest.Session, path: str, mutant: CodeType) -> bool:
        """Whether all tests pass in a fork with this code."""
        child = os.fork()
        if child == 0:
            os.setsid()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            signal.alarm(MUTANT_SECONDS)
            code = 1
            try:
                exchange(path, mutant)
                code = int(_fails(session))
            finally:
                os._exit(code)
        status = os.waitpid(child, 0)[1]
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what its tests have started
        return os.waitstatus_to_exitcode(status) == 0


def _fails(session: pytest.Session) -> bool:
    for item, following in zip_longest(session.items, session.items[1:]):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return True
    return False


def try_module(module: str, tests: str, seed: int) -> Mutants:
    """Draws mutants of a module and runs its tests on each."""
    mutants = Mutants(module, seed)
    with tempfile.TemporaryDirectory() as scratch:
        options = ["-q", "-s", "-m", "not check", "--timeout", "0"]
        code = pytest.main(
            [*options, "--basetemp", scratch, *tests.split()], plugins=[mutants]
        )
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        sys.exit(int(code))
    return mutants


def main() -> None:
    """Tries every module in a process of its own; exits with 1 if the tests of one fail it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="another draw")
    parser.add_argument("modules", nargs="*", help="only these of the list")
    asked = parser.parse_args()
    unknown = set(asked.modules) - set(TARGETS)
    if unknown:
        parser.error(f"modules must be of {', '.join(TARGETS)}, got {sorted(unknown)}")
    too_few = []
    for module in asked.modules or TARGETS:
        child = os.fork()
        if child == 0:
            mutants = try_module(module, TARGETS[module], asked.seed)
            total = mutants.noticed + len(mutants.unnoticed)
            share = mutants.noticed / max(total, 1)
            print(f"\n{module}: {mutants.noticed} of {total} noticed ({share:.0%})")
            print(
                *(f"  not noticed: {line}" for line in mutants.unnoticed),
                sep="\n",
                flush=True,
            )
            os._exit(int(share < LEAST_NOTICED))
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
            too_few.append(module)
    if too_few:
        sys.exit(
            f"tests notice less than {LEAST_NOTICED:.0%} of the mutants of {', '.join(too_few)}"
        )


if __name__ == "__main__":
    main()
