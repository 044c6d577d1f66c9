"""Prompts of a file: each wrong one is answered with the file, the key and what to write."""

from pathlib import Path

import pytest

from thinsection.errors import ConfigError
from thinsection.predict.zeroshot import read_prompts

GOOD = """
templates = ["an image of {}", "{}, H&E"]
[classes]
tumour = ["adenocarcinoma", "malignant glands"]
stroma = ["fibrous stroma"]
"""


def test_a_class_has_every_name_in_every_template(tmp_path: Path) -> None:
    path = tmp_path / "lung words.toml"
    path.write_text(GOOD)
    prompts = read_prompts(path)
    assert prompts.name == "lung-words"
    assert list(prompts.classes) == ["tumour", "stroma"]
    assert prompts.texts("tumour") == [
        "an image of adenocarcinoma",
        "adenocarcinoma, H&E",
        "an image of malignant glands",
        "malignant glands, H&E",
    ]


def test_without_templates_the_names_are_the_prompts(tmp_path: Path) -> None:
    path = tmp_path / "words.toml"
    path.write_text(GOOD.replace("templates", "#"))
    assert read_prompts(path).texts("stroma") == ["fibrous stroma"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[classes]\na = x\n", r"must be TOML, got '.*words\.toml'.*line 2"),
        ("template = ['{}']" + GOOD, r"got 'template'.*did you mean 'templates'"),
        ("[classes]\na = ['x']", "of >= 2 classes, got 1"),
        ("classes = 3", "of >= 2 classes, got 0"),
        ("", "of >= 2 classes, got 0"),
        ("[classes]\na = []\nb = ['x']", r"classes\.a must be a list of at least one"),
        ("[classes]\na = 'x'\nb = ['x']", r"classes\.a must be a list.*got 'x'"),
        ("[classes]\na = [' ']\nb = ['x']", r"classes\.a must have texts.*got ' '"),
        ("[classes]\n'a b' = ['x']\nb = ['x']", "names of letters.*got 'a b'"),
        (GOOD.replace('"{}, H&E"', '"H&E"'), r"templates must have \{\}.*got 'H&E'"),
        (
            GOOD.replace('["an image of {}", "{}, H&E"]', "[]"),
            "templates must be a list",
        ),
    ],
)
def test_a_wrong_file_is_answered(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "words.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_prompts(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_answered(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be an existing file"):
        read_prompts(tmp_path / "none.toml")
