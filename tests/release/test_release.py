"""What a release uploads is complete and honest, and works in an environment with nothing else."""

import hashlib
import http.server
import io
import shutil
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import thinsection

from . import __main__ as command
from .artefacts import (
    ROOT,
    STATIC,
    VIEWER_FILES,
    Artefacts,
    build,
    checksums_of,
    copy_tree,
    problems,
    problems_of_classifiers,
    problems_of_version,
    wheel_of_sdist,
)
from .environments import Environment, link
from .work import CHOICES, Step, steps_of, take, write_folder

# builds artefacts and starts a hundred processes
pytestmark = [pytest.mark.check, pytest.mark.timeout(900)]
TOOLS = ("twine", "check_wheel_contents")


def test_the_artefacts_are_fit_for_an_upload(artefacts: Artefacts) -> None:
    missing = [name for name in TOOLS if find_spec(name) is None]
    if missing:
        pytest.skip(f"`make setup` installs {', '.join(missing)}")
    assert problems(artefacts, tags=[f"v{thinsection.__version__}", "other"]) == []


def test_a_wheel_without_the_viewers_library_is_refused(
    artefacts: Artefacts, tmp_path: Path
) -> None:
    if find_spec("twine") is None:
        pytest.skip("`make setup` installs twine")
    poor = tmp_path / artefacts.wheel.name
    with zipfile.ZipFile(artefacts.wheel) as whole, zipfile.ZipFile(poor, "w") as part:
        for member in whole.infolist():
            if not member.filename.endswith("openseadragon.min.js"):
                part.writestr(member, whole.read(member))
    found = problems(replace(artefacts, wheel=poor), tags=[])
    assert any("wheel must hold openseadragon.min.js" in line for line in found)


def test_a_wheel_of_the_sdist_needs_no_network_and_holds_the_same_files(
    artefacts: Artefacts, tmp_path: Path
) -> None:
    wheel = wheel_of_sdist(artefacts.sdist, tmp_path)
    assert checksums_of(wheel) == checksums_of(artefacts.wheel)


def test_a_build_of_a_clone_without_network_fails_and_says_why(
    tree: Path, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="which the viewer needs, must be fetched"):
        build(tree, tmp_path, network=False)
    assert not list(tmp_path.glob("*.whl"))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """A registry of npm on this machine; tarballs by path."""
    tarballs: dict[str, bytes] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = tarballs.get(self.path)
            self.send_response(200 if data is not None else 404)
            self.end_headers()
            self.wfile.write(data or b"")

        def log_message(self, *_arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}/"
        monkeypatch.setenv("npm_config_registry", address)
        yield tarballs
        server.shutdown()
        thread.join()


def test_a_clone_fetches_the_library_and_refuses_another_file(
    registry: dict[str, bytes], tmp_path: Path
) -> None:
    """The true tarball is not here; one of our files passes if the hook expects its hash."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        package = "package/build/openseadragon/openseadragon.min.js"
        archive.add(ROOT / STATIC / VIEWER_FILES[0], package)
        archive.add(ROOT / STATIC / VIEWER_FILES[1], "package/LICENSE.txt")
    registry["/openseadragon/-/openseadragon-6.1.1.tgz"] = buffer.getvalue()
    clone = tmp_path / "clone"
    copy_tree(clone)
    with pytest.raises(RuntimeError, match=r"OpenSeadragon 6.1.1 must have SHA-256"):
        build(clone, tmp_path / "refused", network=True)
    assert not (clone / STATIC / VIEWER_FILES[0]).exists()
    hook = clone / ".ci" / "openseadragon.py"
    text = hook.read_text()
    true_hash = text.partition('SHA256 = "')[2].partition('"')[0]
    ours = hashlib.sha256(buffer.getvalue()).hexdigest()
    hook.write_text(text.replace(true_hash, ours))
    built = build(clone, tmp_path / "built", network=True)
    names = checksums_of(built.wheel)
    assert f"thinsection/view/static/{VIEWER_FILES[0]}" in names


@pytest.mark.parametrize(
    ("version", "tags", "problem"),
    [
        (thinsection.__version__, [], None),
        (thinsection.__version__, [f"v{thinsection.__version__}"], None),
        (thinsection.__version__, ["v99.0"], "tag must be"),
        ("99.0", ["v99.0"], "version must be"),
    ],
)
def test_the_version_is_that_of_the_code_and_of_the_tag(
    version: str, tags: list[str], problem: str | None
) -> None:
    found = " ".join(problems_of_version(version, tags))
    assert (problem in found) if problem else not found


@pytest.mark.parametrize(
    ("minors", "other", "problem"),
    [
        ([10, 11, 12], "Typing :: Typed", None),
        ([10, 11], "Typing :: Type", "must be a classifier"),
        ([10, 12], "Typing :: Typed", "must name Python from 3.10 on"),
        ([11, 12], "Typing :: Typed", "must name Python from 3.10 on"),
    ],
)
def test_classifiers_exist_and_leave_out_no_python(
    minors: list[int], other: str, problem: str | None
) -> None:
    names = [f"Programming Language :: Python :: 3.{minor}" for minor in minors]
    found = " ".join(problems_of_classifiers([*names, other], ">=3.10"))
    assert (problem in found) if problem else not found


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs") / "work"
    write_folder(folder)
    return folder


@pytest.mark.parametrize("extra", [extra for extra in CHOICES if extra != "all"])
def test_an_environment_with_one_extra_does_its_work(
    extra: str, artefacts: Artefacts, inputs: Path, tmp_path: Path
) -> None:
    """The environment has links to the packages that the extra asks for, and no others."""
    environment = link(artefacts.wheel, extra, tmp_path / "environment")
    work = tmp_path / "work"
    shutil.copytree(inputs, work)
    for step in steps_of(extra):
        outcome = take(step, environment, work)
        assert not outcome.problem, f"{step.words}: {outcome.problem}"
    for package in ("pytest", "hypothesis", *(["PIL", "h5py"] if not extra else [])):
        absent = Step("absent", ("python", "-c", f"import {package}"), returncode=1)
        outcome = take(absent, environment, work)
        assert not outcome.problem, f"{package} is in the environment"


def test_a_step_that_ends_otherwise_is_in_the_table(tmp_path: Path) -> None:
    environment = Environment(Path(shutil.which("python") or "").parent.parent, "")
    steps = [
        Step("says", ("python", "-c", "print('a')"), says="b"),
        Step("ends", ("python", "-c", "raise SystemExit(3)")),
        Step("well", ("python", "-c", "print('a')"), says="a"),
    ]
    outcomes = tuple(take(step, environment, tmp_path) for step in steps)
    slow = Step("slow", ("python", "-c", "import time; time.sleep(60)"))
    assert "within 0.2 s" in take(slow, environment, tmp_path, timeout_s=0.2).problem
    cells = [
        command.Cell("3.11", "wheel", "none", 1, 2.0, outcomes),
        command.Cell("3.12", "wheel", "none", 1, 2.0, outcomes[2:]),
    ]
    assert "ended with 3, not 0" in outcomes[1].problem
    assert "must say 'b', got a" in command.line_of(cells[0])
    table = command.table_of(cells)
    assert "| 3.11 | wheel | 1/3 |" in table and "| 3.12 | wheel | 1/1 |" in table
