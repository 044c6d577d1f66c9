"""Errors name settings in Python's words, and the command line shows its options in their place."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.settings_types import SETTINGS

import thinsection as ts
from thinsection.config import flag_of, flat_fields
from thinsection.errors import MissingMppError, error_words, with_options
from thinsection.testing.synthetic import ArraySlide, position_pixels

ROOT = Path(ts.__file__).parent
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
# in backticks is a command that the reader may copy
COMMAND = re.compile(r"`[^`]*`")
# options of other programs, of Slurm and pip
OTHERS = ("jobs/dask.py: (squeue --me)",)


def raised_texts(path: Path) -> Iterator[str]:
    """Constant parts of the messages of the errors that a file raises."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and node.exc is not None:
            for part in ast.walk(node.exc):
                if isinstance(part, ast.JoinedStr):
                    values = [getattr(value, "value", "") for value in part.values]
                    yield "".join(v if isinstance(v, str) else "{}" for v in values)
                # with a backtick it may be a part of a command, which the joined text has
                elif isinstance(part, ast.Constant) and "`" not in str(part.value):
                    yield str(part.value)


def test_no_error_outside_the_command_line_names_an_option() -> None:
    num_texts = 0
    named = []
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT)
        if place.parts[0] == "cli":
            continue
        for text in raised_texts(path):
            num_texts += 1
            for flag in FLAG.findall(COMMAND.sub("", text)):
                if not any(flag in other and str(place) in other for other in OTHERS):
                    named.append(f"{place}: {text}")
    assert num_texts > 1000
    assert named == []


def fields_of(config: Any) -> dict[str, Any]:
    """Settings of a configuration, or of a section."""
    flat = {name: field for name, (_, field, _) in flat_fields(config).items()}
    return flat or {field.name: field for field in dataclasses.fields(config)}


@pytest.mark.parametrize(
    ("config", "name"),
    [(config, name) for _, config, _ in SETTINGS for name in fields_of(config)],
)
def test_each_setting_has_the_option_of_its_name(config: Any, name: str) -> None:
    option = flag_of(name, fields_of(config)[name])[0]
    assert with_options(f"got none; pass {name}=...") == f"got none; pass {option}"
    assert with_options(f'a; pass {name}="b"') == f"a; pass {option} b"


def test_python_and_tables_name_the_same_setting() -> None:
    slide = ArraySlide([position_pixels((300, 200))], slide_mpp=None, name="b.tif")
    with pytest.raises(MissingMppError) as raised:
        ts.tile_grid(slide, tile_mpp=0.5)
    assert str(raised.value) == (
        "slide_mpp is missing in 'b.tif'; pass slide_mpp=..., add a slide_mpp column to the "
        'cohort, or use tile_mpp="native"'
    )
    assert error_words(raised.value) == (
        "slide_mpp is missing in 'b.tif'; pass --slide-mpp, add a slide_mpp column to the "
        "cohort, or use --tile-mpp native"
    )
