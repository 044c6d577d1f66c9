"""The house keeps its shape: who may import whom, and what an import costs."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.support.imports import Arrow, arrows_between, circles, modules_below

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINTER = PROJECT["tool"]["importlinter"]
# former names of modules, which hand on names of a room above them with a warning, and no more
FORMER_NAMES = ("thinsection.slide.deid",)
PACKAGES = {
    "thinsection": ROOT / "src" / "thinsection",
    "benchmarks": ROOT / "benchmarks",
    "tests": ROOT / "tests",
    "training": ROOT / "training",
}


def arrows_of(package: str, folder: Path) -> list[Arrow]:
    """Arrows between a package's files, without its face and former names, which hand names on."""
    modules = modules_below(folder, package)
    for name in (package, *FORMER_NAMES):
        modules.pop(name, None)
    return arrows_between(modules)


def floors_of(layers: list[str]) -> dict[str, int]:
    """Floor of each room, of layers from the top to the ground; those side by side share one."""
    floors = {}
    for number, layer in enumerate(reversed(layers)):
        for room in layer.split(" | "):
            floors[room] = number
    return floors


def upward(arrows: list[Arrow], floors: dict[str, int]) -> list[Arrow]:
    """Arrows into a room that is not below their own."""
    wrong = []
    for arrow in arrows:
        source_room = arrow.source.split(".")[1]
        target_room = arrow.target.split(".")[1]
        if source_room != target_room and floors[target_room] >= floors[source_room]:
            wrong.append(arrow)
    return wrong


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs import-linter with the pyproject.toml of a folder that has its package in `src`."""
    pytest.importorskip("importlinter", reason="`make setup` installs import-linter")
    code = "from importlinter.cli import lint_imports_command as main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache", "--no-logo"],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(folder / "src"), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_room_imports_only_from_rooms_below_it_and_every_room_is_in_the_list() -> (
    None
):
    ended = lint_imports(ROOT)
    assert ended.returncode == 0, ended.stdout


def test_import_linter_sees_every_kind_of_upward_import(tmp_path: Path) -> None:
    """In a function, for type checkers, over a third file, between neighbours; and a new room."""
    files = {
        "top/work": "",
        "left/work": "def f():\n    from house.top import work\n",
        "right/work": "if TYPE_CHECKING:\n    from house.left.work import f\n",
        "ground/work": "import house.ground.through\n",
        "ground/through": "from .. import right\n",
        "new/work": "",
    }
    plant(tmp_path / "src" / "house", files)
    (contract,) = LINTER["contracts"]
    assert contract["exhaustive"] is True
    lines = [
        "[tool.importlinter]",
        'root_package = "house"',
        "[[tool.importlinter.contracts]]",
        'name = "rooms"',
        f'type = "{contract["type"]}"',
        'containers = ["house"]',
        "exhaustive = true",
        'layers = ["top", "left | right", "ground"]',
    ]
    (tmp_path / "pyproject.toml").write_text("\n".join(lines))
    for folder in ("", "top", "left", "right", "ground", "new"):
        (tmp_path / "src" / "house" / folder / "__init__.py").touch()
    ended = lint_imports(tmp_path)
    assert ended.returncode == 1, ended.stderr
    assert "house.left.work -> house.top.work" in ended.stdout
    assert "house.right.work -> house.left.work" in ended.stdout
    assert "house.ground.through -> house.right" in ended.stdout
    assert "new" in ended.stdout


def test_no_name_of_a_module_in_a_string_points_upward() -> None:
    """What import-linter does not see: `import_module("a.b")` and the targets of registries."""
    arrows = arrows_of("thinsection", PACKAGES["thinsection"])
    by_name = [arrow for arrow in arrows if arrow.kind != "statement"]
    (contract,) = LINTER["contracts"]
    wrong = upward(by_name, floors_of(contract["layers"]))
    assert not wrong, "\n".join(map(str, wrong))


def test_every_room_has_someone_who_is_asked() -> None:
    """.github/CODEOWNERS has a line for each folder of the package, and none for another."""
    text = (ROOT / ".github" / "CODEOWNERS").read_text()
    owned = {line.split()[0] for line in text.splitlines() if line.startswith("/")}
    rooms = {
        f"/{folder.relative_to(ROOT)}/"
        for folder in PACKAGES["thinsection"].iterdir()
        if (folder / "__init__.py").is_file()
    }
    assert rooms <= owned
    assert all((ROOT / path.lstrip("/")).exists() for path in owned)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_files_import_each_other_in_a_circle(package: str) -> None:
    arrows = arrows_of(package, PACKAGES[package])
    found = circles(arrows)
    assert not found, "\n".join(" <-> ".join(circle) for circle in found)


def test_every_page_of_the_docs_that_a_file_names_is_there() -> None:
    files = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    for folder in ("src", "tests", "benchmarks"):
        files += [f for f in (ROOT / folder).rglob("*") if f.suffix in (".py", ".toml")]
    absent = []
    for file in files:
        for page in re.findall(r"\bdocs/[\w/-]+\.md(?:\.j2)?", file.read_text("utf-8")):
            if not (ROOT / page).is_file():
                absent.append(f"{page} in {file.relative_to(ROOT)}")
    assert not absent


def test_no_file_has_the_address_of_a_package_registry() -> None:
    """Users and their machines say where packages come from."""
    hosts = ("pypi", "pythonhosted", "npmjs", "anaconda", "download.pytorch")
    addresses = re.compile(rf"https?://[\w.-]*(?:{'|'.join(hosts)})\.(?:org|com)")
    files = [f for f in ROOT.iterdir() if f.is_file()]
    for folder in ("src", "tests", "benchmarks", "docs", "examples", ".ci", "conda"):
        files += [f for f in (ROOT / folder).rglob("*") if f.is_file()]
    binary = (".safetensors", ".png", ".jpg", ".pyc", ".npz", ".gz")
    wrong = [
        f"{address} in {file.relative_to(ROOT)}"
        for file in files
        if file.suffix not in binary
        for address in addresses.findall(file.read_text("utf-8", errors="replace"))
    ]
    assert not wrong


def test_rooms_take_only_the_version_from_the_face() -> None:
    """The face hands on names of every room; a room that used them would import upwards."""
    modules = modules_below(PACKAGES["thinsection"], "thinsection")
    del modules["thinsection"]
    wrong = []
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            taken = []
            if isinstance(node, ast.ImportFrom) and node.module == "thinsection":
                taken = [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                taken = [node.attr] if node.value.id == "thinsection" else []
            for attribute in taken:
                inside = f"thinsection.{attribute}" in modules
                if attribute != "__version__" and not inside:
                    wrong.append(f"{name} takes {attribute}")
    assert not wrong, "\n".join(wrong)


def shared_generators(source: str) -> list[str]:
    """Names that a file binds, outside functions, to a generator of random numbers."""
    makers = ("default_rng", "RandomState", "Generator", "Random", "manual_seed")
    names = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        called = getattr(node.value, "func", None)
        maker = getattr(called, "attr", getattr(called, "id", None))
        if maker in makers:
            names += [ast.unparse(target) for target in targets]
    return names


def test_no_test_draws_from_a_generator_that_others_draw_from() -> None:
    """Its numbers would depend on which tests ran before it in the same process."""
    shared = []
    for file in (ROOT / "tests").rglob("*.py"):
        for name in shared_generators(file.read_text()):
            shared.append(f"{name} in {file.relative_to(ROOT)}")
    assert not shared


def test_a_shared_generator_is_seen() -> None:
    source = (
        "RNG = np.random.default_rng(0)\n"
        "DRAW = torch.Generator().manual_seed(0)\n"
        "TYPED: Generator = default_rng(0)\n"
        "PIXELS = np.random.default_rng(0).random(3)\n"
    )
    assert shared_generators(source) == ["RNG", "DRAW", "TYPED"]


def plant(folder: Path, files: dict[str, str]) -> list[Arrow]:
    """Writes these files of a package `house`; returns its arrows."""
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return arrows_of("house", folder)


def test_a_circle_under_type_checking_is_seen(tmp_path: Path) -> None:
    lower = "if TYPE_CHECKING:\n    from house.upper import Upper\n"
    upper = "from house import lower\n"
    arrows = plant(tmp_path, {"lower": lower, "upper": upper})
    assert circles(arrows) == [["house.lower", "house.upper"]]


def test_a_circle_over_three_files_in_functions_is_seen(tmp_path: Path) -> None:
    files = {
        "room/first": "def f():\n    from house.room.second import g\n",
        "room/second": "from . import third\n",
        "room/third": "import house.room.first as first\n",
        "room/beside": "from house.room.first import f\n",
    }
    assert circles(plant(tmp_path, files)) == [
        ["house.room.first", "house.room.second", "house.room.third"]
    ]


def test_a_circle_by_name_is_seen(tmp_path: Path) -> None:
    lower = "from importlib import import_module\nimport_module('house.upper')\n"
    arrows = plant(tmp_path, {"lower": lower, "upper": "import house.lower\n"})
    assert circles(arrows) == [["house.lower", "house.upper"]]


def test_a_registry_that_names_the_files_of_its_subclasses_is_no_circle(
    tmp_path: Path,
) -> None:
    files = {
        "heads/registry": "HEADS = [Entry(target='house.heads.clam:Clam')]\n",
        "heads/clam": "from house.heads.registry import Head\n",
    }
    arrows = plant(tmp_path, files)
    assert [arrow.kind for arrow in arrows] == ["statement", "target"]
    assert circles(arrows) == []


@pytest.mark.parametrize(
    "lower",
    [
        "def f():\n    from house.upper.page import draw\n",
        "def f():\n    import house.upper.page\n",
        "if TYPE_CHECKING:\n    from house.upper import page\n",
        "from importlib import import_module\nimport_module('house.upper.page')\n",
        "import importlib\nimportlib.import_module('house.upper.page').draw()\n",
        "NAMES = {'page': 'house.upper.page:draw'}\n",
        "NAMES = [f'house.upper.{name}' for name in ('page',)]\n",
    ],
    ids=[
        "from in a function",
        "import in a function",
        "for type checkers",
        "import_module",
        "importlib.import_module",
        "a registry's target",
        "an f-string's target",
    ],
)
def test_an_upward_import_is_seen(lower: str, tmp_path: Path) -> None:
    files = {"lower/work": lower, "upper/page": "", "upper/__init__": ""}
    arrows = plant(tmp_path, files)
    wrong = upward(arrows, floors_of(["upper", "lower"]))
    assert [arrow.source for arrow in wrong] == ["house.lower.work"]
    assert upward(arrows, floors_of(["lower", "upper"])) == []
    assert upward(arrows, floors_of(["lower | upper"])) == wrong


def test_a_docstring_that_names_a_module_is_no_import(tmp_path: Path) -> None:
    text = '"""house.upper"""\ndef f():\n    """house.upper"""\n'
    assert plant(tmp_path, {"lower": text, "upper": ""}) == []


def test_import_pulls_in_neither_torch_nor_a_reader_and_is_quick() -> None:
    code = (
        "import sys, time; t = time.process_time(); import thinsection; "
        "print(time.process_time() - t, "
        "[m for m in ('torch', 'openslide', 'tifffile', 'cucim') if m in sys.modules])"
    )
    best = min(_import_seconds(code) for _ in range(3))
    assert best < 0.3


def _import_seconds(code: str) -> float:
    """CPU-seconds of an import, which other work on the machine does not lengthen."""
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    seconds, modules = out.stdout.split(" ", 1)
    assert modules.strip() == "[]"
    return float(seconds)
