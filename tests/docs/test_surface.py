"""The public surface does not shrink; methods of the main classes have examples that run."""

import ast
import doctest
import inspect
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.surface import (
    MODULES,
    PROMISED,
    RETURNED,
    Public,
    class_of,
    lost,
    members_of,
    module_of,
    names_of,
    page,
    public_names,
)

import thinsection as ts
from thinsection.testing.synthetic import write_he_slide

from .pages import ROOT

# each public method and property of these has an example
SHOWN = ("IndexedTiles", "Results", "Slide", "TileDataset", "TileLoader", "TileTable")


def test_no_promised_name_or_parameter_is_lost() -> None:
    """A name that goes must warn for a release; then `python -m tests.support.surface`."""
    promised = PROMISED.read_text(encoding="utf-8").splitlines()
    assert len(promised) > 200
    assert lost(promised, public_names()) == []


def changed(before: str, now: str | None) -> list[str]:
    names = []
    if now is not None:
        name, _, listed = now.removesuffix(")").partition("(")
        names.append(
            Public(name, tuple(part for part in listed.split(", ") if part), "")
        )
    return lost([before], names)


@pytest.mark.parametrize(
    ("before", "now", "sentence"),
    [
        ("Results.tiles(a)", None, "Results.tiles is gone"),
        ("thinsection.gone(a)", None, "thinsection.gone is gone"),
        ("x.f(a, b=)", "x.f(a)", "x.f: b is gone"),
        ("x.f(a, *, b=)", "x.f(a, *, c=)", "x.f: b is gone"),
        ("x.f(a, b)", "x.f(b, a)", "x.f: a is no longer argument 1"),
        ("x.f(a, b=)", "x.f(a, *, b=)", "x.f: b is no longer argument 2"),
        ("x.f(a)", "x.f(a, b)", "x.f: b must be given"),
        ("x.f(a, b=)", "x.f(a, b)", "x.f: b must be given"),
        ("x.f(a, *, b=)", "x.f(a, *, b)", "x.f: b must be given"),
    ],
)
def test_a_loss_is_noticed(before: str, now: str | None, sentence: str) -> None:
    assert sentence in changed(before, now)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("x.f(a, b=)", "x.f(a, b=, c=, *, d=)"),
        ("x.f(a, *, b=)", "x.f(a, b=)"),
        ("x.f(a, b)", "x.f(a, b=)"),
        ("x.f(a, *, b=)", "x.f(a, **settings)"),
        ("thinsection.neighbors.tile_graph(a)", None),  # works and warns
    ],
)
def test_what_still_fits_is_no_loss(before: str, now: str | None) -> None:
    assert changed(before, now) == []


def test_the_page_has_every_name_with_its_first_sentence() -> None:
    text = page()
    for public in public_names():
        assert f"`{public.name.rpartition('.')[2]}" in text
    assert "## thinsection\n" in text and "## Results\n" in text
    nameless = [p.name for p in public_names() if p.parameters and not p.words]
    assert nameless == []


@pytest.fixture(scope="module")
def examples_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two slides, a table of labels, and results with tiles, embeddings and slide embeddings."""
    folder = tmp_path_factory.mktemp("examples")
    for name, seed in (("a", 3), ("b", 5)):
        write_he_slide(folder / f"{name}.svs", (1300, 1000), seed=seed)
    (folder / "labels.csv").write_text("slide_id,grade\na,high\nb,low\n")
    ts.run(
        [folder / "a.svs", folder / "b.svs"],
        out=folder / "results",
        pretrained=False,
        slide_encoders=("mean",),
        tile_px=128,
        engine="torch",
        memory="512MiB",
    )
    return folder


def examples() -> list[doctest.DocTest]:
    """Docstrings with examples: public functions, and methods of the returned classes."""
    subjects: dict[str, Any] = {}
    for name in ts.__all__:
        subjects[f"thinsection.{name}"] = getattr(ts, name)
    for module in MODULES:
        for name in names_of(module_of(module)):
            subjects[f"{module}.{name}"] = getattr(module_of(module), name)
    for place in RETURNED:
        kind = class_of(place)
        subjects[kind.__name__] = kind
        for name in members_of(kind):
            subjects[f"{kind.__name__}.{name}"] = inspect.getattr_static(kind, name)
    found = []
    for name, subject in subjects.items():
        if inspect.ismodule(subject) or not getattr(subject, "__doc__", None):
            continue
        home = str(getattr(subject, "__module__", "thinsection"))
        if not home.startswith("thinsection"):
            continue  # another name of a class of NumPy
        text = inspect.cleandoc(subject.__doc__)
        if ">>>" in text:
            parser = doctest.DocTestParser()
            found.append(parser.get_doctest(text, {}, name, None, 0))
    return found


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_an_example_gives_what_it_says(
    example: doctest.DocTest, examples_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from thinsection import attention

    monkeypatch.chdir(examples_folder)
    results = ts.open_results("results")
    with ts.open_slide("a.svs") as slide:
        tiles = ts.tile_grid(slide, tile_px=128)
        names = {name: getattr(attention, name) for name in attention.__all__}
        names |= {"ts": ts, "np": np, "torch": torch, "pickle": pickle}
        names |= {"results": results, "slide": slide, "tiles": tiles}
        if "dataset" in (example.docstring or ""):
            names["dataset"] = ts.TileDataset(results, shuffle=False)
        example.globs = names
        said: list[str] = []
        runner = doctest.DocTestRunner(
            optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        )
        outcome = runner.run(example, out=said.append)
    skipped = "+SKIP" in (example.docstring or "")  # needs a package that is not here
    assert (outcome.attempted or skipped) and not outcome.failed, "".join(said)


@pytest.mark.parametrize(
    "place", [p for p in RETURNED if p.rpartition(".")[2] in SHOWN]
)
def test_each_method_of_the_main_classes_has_an_example(place: str) -> None:
    kind = class_of(place)
    without = []
    for name in members_of(kind):
        value = inspect.getattr_static(kind, name)
        if ">>>" not in (value.__doc__ or ""):
            without.append(name)
    assert without == [], f"{kind.__name__}: add an example to each of these"


def test_examples_stand_below_the_word_that_the_site_knows() -> None:
    """Elsewhere mkdocstrings shows the prompts as quotation marks of Markdown."""
    misplaced = []
    for path in (ROOT / "src" / "thinsection").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                before = (ast.get_docstring(node) or "").partition(">>>")
                if before[1] and not before[0].endswith("Examples:\n    "):
                    misplaced.append(f"{path.name}: {getattr(node, 'name', '')}")
    assert misplaced == []
