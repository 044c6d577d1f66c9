"""Lists the figures of old code: `python -m benchmarks.stale`.

One line for each JSON in `benchmarks/results/`, the oldest first: its date and commit, the commits
since, and the rooms that its script uses and that have changed since, with the number of commits
that changed each.
"""

import ast
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS
from thinsection import _PUBLIC as PUBLIC

ROOT = Path(__file__).parent.parent
# every benchmark uses them, and they change no figure
_NOT_COUNTED = {"errors", "types", "testing"}


def main() -> None:
    """Prints the table."""
    records = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    age = {record["benchmark"]: _commits_since(record) for record in records}
    for record in sorted(records, key=lambda r: len(age[r["benchmark"]]), reverse=True):
        name = record["benchmark"]
        commits = age[name]
        changed: Counter[str] = Counter()
        for rooms in commits:
            changed.update(rooms & rooms_of(name))
        rooms_changed = ", ".join(f"{room} {n}" for room, n in changed.most_common())
        print(
            f"{record['date']}  {record['commit']:<9}  {len(commits):>5} commits  "
            f"{name:<22} {rooms_changed or 'none of its rooms'}"
        )


def rooms_of(name: str) -> set[str]:
    """Rooms that a benchmark imports, itself or by a file of `benchmarks/` that it imports."""
    rooms: set[str] = set()
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        script = waiting.pop()
        if script in seen:
            continue
        seen.add(script)
        for module in _modules_named_in(ROOT / "benchmarks" / f"{script}.py"):
            package, _, rest = module.partition(".")
            first = rest.partition(".")[0]
            if package == "thinsection" and first:
                rooms.add(first)
            elif package == "benchmarks" and is_script(first):
                waiting.append(first)
    return rooms - _NOT_COUNTED


def is_script(name: str) -> bool:
    """Tells if `benchmarks/` has a file of this name."""
    return bool(name) and (ROOT / "benchmarks" / f"{name}.py").is_file()


def starts_commands(name: str) -> bool:
    """Tells if a benchmark starts `thinsection`, which may use any room."""
    text = (ROOT / "benchmarks" / f"{name}.py").read_text()
    return '"-m", "thinsection"' in text


def _modules_named_in(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, and those of functions that run in another process."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(origin), names=names):
                yield from (f"{origin}.{alias.name}" for alias in names)
            case ast.Constant(value=str(text)) if text.startswith("benchmarks."):
                yield text
            case ast.Attribute(value=ast.Name(id="ts"), attr=attribute):
                yield PUBLIC.get(attribute, "")


def _commits_since(record: dict[str, Any]) -> list[set[str]]:
    """For each commit since that of a JSON, the rooms whose files it changed."""
    span = f"{record['commit']}..HEAD"
    log = subprocess.run(
        ["git", "log", "--format=%x00", "--name-only", span, "--"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    changes = []
    for commit in log.split("\0")[1:]:
        rooms = set()
        for line in commit.split("\n"):
            if line.startswith("src/thinsection/"):
                rooms.add(line.split("/")[2].removesuffix(".py"))
        changes.append(rooms)
    return changes


if __name__ == "__main__":
    main()
