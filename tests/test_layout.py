"""The house keeps its shape: who may import whom, and what an import costs."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "thinsection"
# a room imports only from rooms above it in this list; loose modules first
ROOMS = (
    *(
        "files",
        "weights",
        "arrays",
        "slide",
        "qc",
        "tiles",
        "stream",
        "attention",
        "encode",
    ),
    "segment",
    *(
        "pool",
        "neighbors",
        "structures",
        "rescue",
        "store",
        "usage",
        "report",
        "jobs",
        "stages",
    ),
    *("planning", "pipeline", "evaluation", "probe", "predict", "view", "cli"),
)
GROUND = ("errors", "types", "config", "registry", "machine")
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def type_checking_nodes(tree: ast.AST) -> set[int]:
    """Ids of what stands under `if TYPE_CHECKING:`: it is not imported when the program runs."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped |= {id(inner) for inner in ast.walk(node)}
    return skipped


def imported_modules(path: Path, *, typing_too: bool) -> set[str]:
    """Modules of the package that a file imports, anywhere in it: inside functions too."""
    tree = ast.parse(path.read_text())
    skipped = set() if typing_too else type_checking_nodes(tree)
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [
                n for a in node.names if (n := f"{node.module}.{a.name}") in MODULES
            ]
            names = names if len(names) == len(node.names) else [*names, node.module]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        found |= {name for name in names if name.split(".")[0] == "thinsection"}
    return found


def test_a_room_imports_only_from_rooms_above_it() -> None:
    """Imports inside functions and for type checkers count."""
    wrong = []
    for path in FILES:
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if room in ("__init__", "__main__", "testing"):
            continue
        order = [*GROUND, *ROOMS]
        assert room in order, f"{path} lies in no room of the list"
        # ground-floor modules import each other downwards too
        allowed = set(order[: order.index(room) + 1])
        allowed |= (
            {"testing"} if room == "cli" else set()
        )  # `thinsection demo` makes a slide
        for name in sorted(imported_modules(path, typing_too=True)):
            used = [*name.split("."), ""][1]
            if used and used not in allowed and name != "thinsection.__version__":
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions count; a face (`__init__`) stands for all that it hands on."""
    arrows = {
        name: {m for m in imported_modules(path, typing_too=False) if m in MODULES}
        - {name}
        for name, path in MODULES.items()
    }
    done: set[str] = set()
    trail: list[str] = []

    def visit(name: str) -> None:
        if name in trail:
            raise AssertionError(
                "circle: " + " -> ".join([*trail[trail.index(name) :], name])
            )
        if name in done:
            return
        trail.append(name)
        for other in sorted(arrows[name]):
            visit(other)
        trail.pop()
        done.add(name)

    for name in sorted(arrows):
        visit(name)


def test_import_pulls_in_neither_torch_nor_a_reader_and_is_quick() -> None:
    code = (
        "import sys, time; t = time.perf_counter(); import thinsection; "
        "print(time.perf_counter() - t, "
        "[m for m in ('torch', 'openslide', 'tifffile', 'cucim') if m in sys.modules])"
    )
    best = min(_import_seconds(code) for _ in range(3))
    assert best < 0.3


def _import_seconds(code: str) -> float:
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    seconds, modules = out.stdout.split(" ", 1)
    assert modules.strip() == "[]"
    return float(seconds)
