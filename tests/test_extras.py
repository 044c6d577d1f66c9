"""Packages that read slides are asked for by name and version, before they are imported."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from thinsection import extras
from thinsection.errors import MissingDependencyError
from thinsection.registry import Entry, lazy_names

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SLIDES = PROJECT["optional-dependencies"]["slides"]
EXTRAS = PROJECT["optional-dependencies"]
# packages without a line of their own: what brings them is a line
BROUGHT_BY = {"tokenizers": "transformers", "torchvision": "timm"}
# opens in a child, since the answer is kept for a process
OPENS = """
import thinsection
try:
    thinsection.open_slide("no.svs")
except ImportError as error:
    print(type(error).__name__, error)
except OSError as error:
    print("opened:", error)
"""


def write_distribution(folder: Path, name: str, version: str, *lines: str) -> None:
    """Metadata of an installed package, found before that of this environment's."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    text = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(text + "".join(f"{line}\n" for line in lines))


def write_ours(folder: Path, requirements: list[str]) -> None:
    """Our own metadata with these packages in the extra, and others beside them."""
    lines = [f"Requires-Dist: {line}; extra == 'slides'" for line in requirements]
    others = ("never-asked>=1", "never-asked>=1; extra == 'view'")
    lines += [f"Requires-Dist: {line}" for line in others]
    write_distribution(folder, "thinsection", "0.1.0", *lines)


def child(code: str, folder: Path, *arguments: str) -> str:
    """Standard output and errors of a process that sees the folder's packages first."""
    paths = [str(folder), str(ROOT / "src")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
    )
    return done.stdout + done.stderr


def test_every_line_of_the_extra_has_the_form_that_is_read() -> None:
    for line in SLIDES:
        assert re.fullmatch(r"[\w.-]+>=\d[\d.]*", line), line
    names = [line.partition(">=")[0] for line in SLIDES]
    assert len(set(names)) == len(names)


def test_what_is_installed_here_will_do(tmp_path: Path) -> None:
    write_ours(tmp_path, SLIDES)
    assert child(OPENS, tmp_path).startswith("opened:")


def test_old_and_missing_packages_are_named_with_what_is_needed(tmp_path: Path) -> None:
    lines = ["tifffile>=2025.1", "pillow>=11", "not-there>=2", "nor-this>=3"]
    write_ours(tmp_path, lines)
    write_distribution(tmp_path, "tifffile", "2023.2.28")
    assert child(OPENS, tmp_path).strip() == (
        "MissingDependencyError packages that read slides must be installed, got tifffile "
        "2023.2.28 (needs >=2025.1), no not-there, nor-this; pip install 'thinsection[slides]', "
        "best in an environment of its own with Python 3.11 or newer"
    )


def test_many_missing_packages_are_counted(tmp_path: Path) -> None:
    write_ours(tmp_path, [f"not-there-{number}>=1" for number in range(5)])
    found = child(OPENS, tmp_path)
    assert "got no not-there-0, not-there-1, not-there-2 and 2 more; pip" in found


@pytest.mark.parametrize("is_there", [False, True])
def test_the_library_of_openslide_may_come_from_conda(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There no package is named openslide-bin, and the library lies in the environment."""
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(extras, "_metadata", fake_metadata)
    if is_there:
        (tmp_path / "lib").mkdir()
        (tmp_path / "lib" / "libopenslide.so.1").touch()
    problem = extras.slides_problem.__wrapped__()
    assert problem == ("no other" if is_there else "no openslide-bin, other")


def fake_metadata(name: str) -> str:
    if name != "thinsection":
        return ""
    lines = ("openslide-bin>=4.0.0.8", "other>=1")
    return "".join(f"Requires-Dist: {line}; extra == 'slides'\n" for line in lines)


@pytest.mark.parametrize(
    ("version", "least", "will_do"),
    [
        ("2.6.0+cpu", "2.6", True),
        ("2.10.0", "2.6", True),
        ("2.5.1", "2.6", False),
        ("2025.1.10", "2025.1", True),
        ("4.0.0.8", "4.0.0.8", True),
        ("4.0.0", "4.0.0.8", False),
        ("3.0.0rc1", "3.0", True),
    ],
)
def test_versions_are_compared_by_number(
    version: str, least: str, will_do: bool, tmp_path: Path
) -> None:
    write_ours(tmp_path, [f"some-reader>={least}"])
    write_distribution(tmp_path, "some-reader", version)
    assert child(OPENS, tmp_path).startswith("opened:") == will_do


COMMAND = "from thinsection.cli.main import main\nmain()\n"


@pytest.mark.parametrize(
    ("arguments", "needs_slides"),
    [
        (("--help",), False),
        (("--version",), False),
        (("rescue", "--help"), False),
        (("skill",), False),
        (("frames", "--help"), False),
        (("run", "--help"), True),
        (("ls", "results"), True),
        (("models",), True),
        (("probe", "results"), True),
    ],
)
def test_only_commands_that_read_slides_ask_for_them(
    arguments: tuple[str, ...], needs_slides: bool, tmp_path: Path
) -> None:
    write_ours(tmp_path, ["h5py>=99"])
    found = child(COMMAND, tmp_path, *arguments)
    assert ("pip install 'thinsection[slides]'" in found) == needs_slides
    if needs_slides:
        h5py = distribution("h5py").version
        assert f"got h5py {h5py} (needs >=99);" in found
        assert "Traceback" not in found


def test_doctor_says_that_slides_cannot_be_read(tmp_path: Path) -> None:
    write_ours(tmp_path, ["h5py>=99"])
    found = child(COMMAND, tmp_path, "doctor", "--json")
    assert '"slides"' in found and "(needs >=99)" in found
    # no reader is listed as usable
    assert "simplejpeg" not in found


def test_a_room_without_the_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `from thinsection.encode import embed_tiles` in a rescue's environment."""

    def missing(name: str) -> object:
        raise ModuleNotFoundError("No module named 'h5py'", name="h5py")

    monkeypatch.setattr("thinsection.registry.import_module", missing)
    get_name = lazy_names("thinsection.encode", {"embed": "embed_tiles"})
    monkeypatch.setattr("thinsection.extras.slides_problem", lambda: "no h5py")
    with pytest.raises(MissingDependencyError, match="got no h5py; pip install"):
        get_name("embed_tiles")
    monkeypatch.setattr("thinsection.extras.slides_problem", lambda: "")
    with pytest.raises(ModuleNotFoundError, match="No module named 'h5py'"):
        get_name("embed_tiles")


def names_of(extra: str) -> set[str]:
    """Names of an extra's own lines, without those of the extras that it contains."""
    names = {canonicalize_name(Requirement(line).name) for line in EXTRAS[extra]}
    return names - {"thinsection"}


def test_there_are_five_extras_and_one_for_developers() -> None:
    assert set(EXTRAS) == {"slides", "hub", "cluster", "view", "all", "dev"}
    assert set(extras.EXTRAS) == {"slides", "hub", "cluster", "view"}
    for extra in ("hub", "cluster", "view"):
        assert "thinsection[slides]" in EXTRAS[extra]
    assert "thinsection[slides,hub,cluster,view]" in EXTRAS["all"]


@pytest.mark.parametrize("extra", ["slides", "hub", "cluster", "view"])
def test_the_table_of_packages_is_that_of_the_project(extra: str) -> None:
    """The import names of an extra's lines, as the installed packages state them."""
    installed = packages_distributions()
    base = {canonicalize_name(Requirement(x).name) for x in PROJECT["dependencies"]}
    named = set()
    for package in extras.EXTRAS[extra]:
        if package in BROUGHT_BY:
            assert canonicalize_name(BROUGHT_BY[package]) in names_of(extra)
            assert package in needed_by(BROUGHT_BY[package])
            continue
        if package not in installed:
            pytest.skip(f"{package} is not installed")
        named.add(canonicalize_name(installed[package][0]))
    assert named == names_of(extra) - base


def needed_by(name: str) -> set[str]:
    """Names of the packages that a package requires."""
    lines = distribution(name).requires or []
    return {canonicalize_name(Requirement(line).name) for line in lines}


@pytest.mark.parametrize("package", [*extras._PIP_NAMES])
def test_names_for_pip_are_those_of_the_installed_packages(package: str) -> None:
    installed = packages_distributions()
    if package not in installed:
        pytest.skip(f"{package} is not installed")
    name = canonicalize_name(installed[package][0])
    assert canonicalize_name(extras._PIP_NAMES[package]) == name


@pytest.mark.parametrize(
    ("packages", "remedy"),
    [
        (["timm"], "pip install 'thinsection[hub]'"),
        (["pyarrow", "zarr"], "pip install 'thinsection[view]'"),
        (["pyarrow", "ray"], "pip install 'thinsection[view,cluster]'"),
        (["gemmi"], "pip install gemmi"),
        (["umap", "gemmi"], "pip install 'thinsection[view]' gemmi"),
        (["dask_cuda"], "pip install dask-cuda"),
    ],
)
def test_a_remedy_names_the_extra_or_else_the_package(
    packages: list[str], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "slides_problem", lambda: "")
    assert extras.remedy_for(packages) == remedy


def test_where_slides_are_not_read_a_remedy_names_the_packages_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An extra would raise the versions of the tool beside which a rescue runs."""
    monkeypatch.setattr(extras, "slides_problem", lambda: "no h5py")
    assert extras.remedy_for(["umap", "gemmi"]) == "pip install umap-learn gemmi"


def test_packages_that_are_missing_are_named_with_their_purpose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extras, "slides_problem", lambda: "")
    extras.require_packages("tables", "json", "csv")
    monkeypatch.setattr(extras, "is_installed", lambda package: package == "pandas")
    message = (
        "^pandas, pyarrow must be installed for tables, got no pyarrow; "
        r"pip install 'thinsection\[view\]'$"
    )
    with pytest.raises(MissingDependencyError, match=message):
        extras.require_packages("tables", "pandas", "pyarrow")
    message = (
        "^pandas, pyarrow must be installed for tables and ray, pyarrow for jobs, got no "
        r"pyarrow, ray; pip install 'thinsection\[view,cluster\]'$"
    )
    needs = {"tables": ("pandas", "pyarrow"), "none": (), "jobs": ("ray", "pyarrow")}
    with pytest.raises(MissingDependencyError, match=message):
        extras.check_needs(needs.items())
    entry = Entry(name="b", help="", target="json:loads", needs=("pandas", "pyarrow"))
    assert entry.missing == ("pyarrow",)
    assert entry.remedy == "pip install 'thinsection[view]'"
    with pytest.raises(MissingDependencyError, match="for 'b', got no pyarrow"):
        entry.load()


def test_a_package_that_is_there_and_cannot_be_imported_is_named() -> None:
    message = "^json must be importable for tables, got libgomp.so.1: none; pip install"
    with (
        pytest.raises(MissingDependencyError, match=message),
        extras.importing("tables", "json"),
    ):
        raise ImportError("libgomp.so.1: none")
