"""Slides for every test: the real one where it is, small generated ones everywhere."""

import os
import random
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from tests.support import debian
from tests.support.slurm_node import slurm_node

from thinsection.testing.synthetic import write_he_slide

REAL_SLIDES = Path(
    os.environ.get(
        "THINSECTION_TEST_SLIDES", Path(__file__).parents[2] / "shared" / "slides"
    )
)

# fixtures that start a cluster or a browser
STARTED_PROGRAMS = {"on_slurm", "dask_cluster", "local_ray", "chromium"}

# words in a file of tests of which some are marked `check`
CHECK_WORDS = re.compile("|".join(["mark\\.check", *sorted(STARTED_PROGRAMS)]))

# an example may take long where other work shares the machine: no time limit for each
hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")


def pytest_configure(config: pytest.Config) -> None:
    """Once, before any test is collected: of several processes, by the one that starts them."""
    if os.environ.get("THINSECTION_INSTALL_SLURM") == "1" and not hasattr(
        config, "workerinput"
    ):
        debian.install()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files without checks where checks alone run: imports of all take a minute."""
    if config.option.markexpr != "check" or collection_path.suffix != ".py":
        return None
    return None if may_have_checks(collection_path) else True


def may_have_checks(path: Path) -> bool:
    """True if a file has a word without which none of its tests is marked `check`."""
    return CHECK_WORDS.search(path.read_text(encoding="utf-8")) is not None


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as `check` what starts a cluster or a browser, so that nobody forgets it.

    Refuses a test whose id has an address in memory: two processes would have other tests. Refuses
    a check in a file that `pytest_ignore_collect` takes for one without checks.
    """
    searched: dict[Path, bool] = {}
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"id of a test must be stable, got {item.nodeid}")
        if STARTED_PROGRAMS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.check)
        if item.get_closest_marker("check") is None:
            continue
        if item.path not in searched:
            searched[item.path] = may_have_checks(item.path)
        if not searched[item.path]:
            words = CHECK_WORDS.pattern
            raise pytest.UsageError(
                f"{item.path} has a check, so it must match {words}"
            )


@pytest.hookimpl(tryfirst=True)  # before fixtures draw
def pytest_runtest_setup() -> None:
    """Seeds the global generators, so that a test's numbers do not depend on earlier tests."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def real_slide() -> Path:
    """A real Aperio slide of 2220 x 2967 px, 20x."""
    path = REAL_SLIDES / "CMU-1-Small-Region.svs"
    if not path.is_file():
        pytest.skip(f"no real slide at {path}; set THINSECTION_TEST_SLIDES")
    return path


@pytest.fixture(scope="session")
def he_slide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated slide of 1800 x 1300 px with tissue, about 15 tiles."""
    path = tmp_path_factory.mktemp("he") / "he.svs"
    write_he_slide(path, (1800, 1300), seed=3, downsamples=(1, 4))
    return path


@pytest.fixture(scope="session")
def slide_folder(tmp_path_factory: pytest.TempPathFactory, he_slide: Path) -> Path:
    """A folder with two good slides, a truncated one, an empty one, and text called .svs."""
    folder = tmp_path_factory.mktemp("slides")
    shutil.copy(he_slide, folder / "good.svs")
    write_he_slide(folder / "other.svs", (1300, 1700), seed=5, downsamples=(1,))
    data = he_slide.read_bytes()
    (folder / "truncated.svs").write_bytes(data[: len(data) // 2])
    (folder / "empty.svs").write_bytes(b"")
    (folder / "text.svs").write_text("not a slide")
    return folder


@pytest.fixture(scope="session")
def bucket() -> Iterator[Any]:
    """A local S3 server with a bucket 'slides', as an fsspec file system.

    One for the session: fsspec keeps its clients, and they keep the server's address.
    """
    server = pytest.importorskip("moto.server", reason="moto is not installed")
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    moto = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    moto.start()
    _, port = moto.get_host_and_port()
    names = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        fs = s3fs.S3FileSystem(skip_instance_cache=True)
        fs.mkdir("slides")
        yield fs
        moto.stop()


@pytest.fixture(scope="session")
def slurm() -> Iterator[dict[str, str]]:
    """One Slurm of one node for all tests that ask for it."""
    with slurm_node() as environment:
        yield {**environment, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


@pytest.fixture
def on_slurm(slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Its commands are found as on a login node."""
    for name in ("SLURM_CONF", "PYTHONPATH"):
        monkeypatch.setenv(name, slurm[name])
    return slurm
