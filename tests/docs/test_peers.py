"""The page "From other tools" names only options, commands and settings that these tools have.

`peers.json` has the names that stand in the sources of each tool, with the commit
(`tests/support/peer_parsers.py`). A change of the page is compared with these names. Where
THINSECTION_PEERS names a folder with clones, the file is compared with them, too.
"""

import ast
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tests.support.peer_parsers import FACTS, READERS, facts_in

from .figures import Table, tables_of
from .pages import SHELL, arguments_of, blocks_of, links_of, text_of
from .truth import foreign

PAGE = "docs/comparison.md"
PEERS: dict[str, Any] = json.loads(FACTS.read_text(encoding="utf-8"))
PROGRAMS: dict[str, dict[str, Any]] = {
    name: program
    for peer in PEERS.values()
    for name, program in peer["programs"].items()
}
_OPTION = re.compile(r"(?<![\w-])(--[A-Za-z][\w-]*)(?:[ =](\w[\w-]*))?")


def program_of(words: list[str]) -> tuple[str, list[str]]:
    """Name of the program of a command line, and the words after it."""
    if words[:2] == ["python", "-m"]:
        words = words[2:]
    elif words[0] == "python":
        words = words[1:]
    pair = " ".join(words[:2])
    if pair in PROGRAMS:
        return pair, words[2:]
    return words[0], words[1:]


def problems_of(command: str) -> list[str]:
    """What a command of another tool names that its parser does not know."""
    name, words = program_of(arguments_of(command))
    program = PROGRAMS.get(name)
    if program is None:
        return [f"no program {name}"]
    options: dict[str, list[str]] = program["options"]
    problems = []
    for word, following in zip(words, [*words[1:], ""]):
        if word.startswith("-"):
            if word not in options:
                problems.append(f"{name} has no option {word}")
            elif options[word] and following not in options[word]:
                problems.append(f"{name} {word} cannot be {following}")
        elif "settings" in program:
            key, equals, _ = word.partition("=")
            if not equals or key not in program["settings"]:
                problems.append(f"{name} has no setting {key}")
    commands = program.get("commands")
    if commands and not set(words) & set(commands):
        problems.append(f"{name} has no command in {words}")
    missing = [option for option in program["required"] if option not in words]
    return problems + [f"{name} needs {option}" for option in missing]


def foreign_commands() -> list[str]:
    """Command lines of the page that are not ours."""
    return [
        command
        for block in blocks_of(PAGE)
        if block.language in SHELL
        for command in block.commands()
        if not command.startswith("thinsection ")
    ]


def test_each_command_is_one_that_its_tool_parses() -> None:
    commands = foreign_commands()
    programs = {program_of(arguments_of(command))[0] for command in commands}
    assert len(commands) >= 11
    assert programs >= {
        "run_batch_of_slides.py",
        "slide2vec",
        "tessellate_extract_features",
        "stamp",
        "lazyslide feature",
        "tiatoolbox deep-feature-extractor",
        "create_patches_fp.py",
        "histoqc",
    }
    for command in commands:
        assert problems_of(command) == [], command


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("python -m slide2vec.main --config-file a.yaml", "no program slide2vec.main"),
        ("slide2vec --config-file a.yaml", "slide2vec has no option --config-file"),
        (
            "python run_batch_of_slides.py --task al --wsi_dir a --job_dir b",
            "run_batch_of_slides.py --task cannot be al",
        ),
        (
            "python run_batch_of_slides.py --task all --wsi_dir a",
            "run_batch_of_slides.py needs --job_dir",
        ),
        (
            "python run_batch_of_slides.py --wsi_dir a --job_dir b --patch_encoder uni",
            "run_batch_of_slides.py --patch_encoder cannot be uni",
        ),
        ("stamp --config a.yaml knead", "stamp has no command in"),
        ("python -m histoqc -c v2.2 a.svs", "histoqc -c cannot be v2.2"),
        ("lazyslide feature a.svs --modell uni", "lazyslide feature has no option"),
        ("tessellate_extract_features slides=a", "has no setting slides"),
    ],
)
def test_a_wrong_command_is_noticed(command: str, problem: str) -> None:
    assert any(problem in sentence for sentence in problems_of(command))


def table_of(head: str) -> Table:
    """The table of the page whose first column has this head."""
    (table,) = [t for t in tables_of(PAGE) if t.header[0] == head]
    return table


def problems_of_options(peer: str, cell: str) -> list[str]:
    """Options in a cell, with their values, that no program of a tool has."""
    options: dict[str, set[str]] = {}
    for program in PEERS[peer]["programs"].values():
        for name, choices in program["options"].items():
            options.setdefault(name, set()).update(choices)
    problems = []
    for span in re.findall(r"`([^`]+)`", cell):
        for name, value in _OPTION.findall(span):
            if name not in options:
                problems.append(f"no option {name}")
            elif value and options[name] and value not in options[name]:
                problems.append(f"{name} cannot be {value}")
    return problems


@pytest.mark.parametrize("peer", ["TRIDENT", "CLAM"])
def test_each_option_of_a_table_is_one_of_the_tool(peer: str) -> None:
    rows = table_of(peer).rows
    assert len(rows) > 10
    for row in rows:
        assert problems_of_options(peer, row[0]) == [], row[0]


def test_a_wrong_option_of_a_table_is_noticed() -> None:
    assert problems_of_options("TRIDENT", "`--out`") == ["no option --out"]
    found = problems_of_options("TRIDENT", "`--segmenter sam`")
    assert found == ["--segmenter cannot be sam"]
    assert problems_of_options("CLAM", "`--B`, `--lr`") == []


def test_the_commands_and_settings_of_stamp_are_its_own() -> None:
    stamp = PEERS["STAMP"]
    names = [*stamp["settings"], *stamp["models"], "stamp"]
    names += stamp["programs"]["stamp"]["commands"]
    for row in table_of("STAMP").rows:
        words = re.findall(r"[a-z]\w+", " ".join(re.findall(r"`([^`]+)`", row[0])))
        assert words
        assert [word for word in words if word not in names] == []


def test_the_names_of_tridents_encoders_are_its_own() -> None:
    encoders = PROGRAMS["run_batch_of_slides.py"]["options"]["--patch_encoder"]
    for row in table_of("encoder of TRIDENT").rows:
        for name in re.findall(r"`([^`]+)`", row[0]):
            assert name in encoders


def keys_of(settings: dict[str, Any], above: str = "") -> list[str]:
    """Dotted keys of nested settings."""
    keys = []
    for key, value in settings.items():
        keys.append(above + key)
        if isinstance(value, dict):
            keys += keys_of(value, f"{above}{key}.")
    return keys


def test_the_configuration_of_slide2vec_has_its_settings() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    (block,) = [block for block in blocks_of(PAGE) if block.language == "yaml"]
    settings = yaml.safe_load(block.text)
    keys = keys_of(settings)
    assert "tiling.params.requested_spacing_um" in keys
    assert [k for k in keys if k not in PEERS["slide2vec"]["settings"]] == []
    assert settings["model"]["name"] in PEERS["slide2vec"]["models"]


def test_the_functions_of_lazyslide_take_these_arguments() -> None:
    (block,) = [block for block in blocks_of(PAGE) if block.language == "python"]
    functions = PEERS["LazySlide"]["functions"]
    checked = 0
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr not in functions:
                assert node.func.attr == "open_wsi"  # of wsidata
                continue
            parameters = functions[node.func.attr]
            assert len(node.args) <= len(parameters)
            assert {k.arg for k in node.keywords} <= set(parameters)
            checked += 1
    assert checked == 3


def test_the_page_names_the_commit_of_each_tool() -> None:
    links = links_of(text_of(PAGE))
    for peer in PEERS.values():
        place = f"https://github.com/{peer['repository']}/tree/{peer['commit'][:7]}"
        assert place in links


def test_names_of_these_tools_on_other_pages_are_their_own() -> None:
    """`foreign.toml` lists their options that pages may name."""
    known = {name for program in PROGRAMS.values() for name in program["options"]}
    listed = {name for name in foreign("options") if "_" in name}
    assert listed <= known | {"--no_auto_skip"}


def test_the_facts_are_those_of_the_clones() -> None:
    folder = os.environ.get("THINSECTION_PEERS")
    if not folder:
        pytest.skip("THINSECTION_PEERS names no folder with clones of the tools")
    found = facts_in(Path(folder))
    assert found, f"{folder} has none of {sorted(READERS)}"
    for name, facts in found.items():
        if facts["commit"] == PEERS[name]["commit"]:
            assert facts == PEERS[name], name
