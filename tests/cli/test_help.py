"""What `--help` prints: few lines, each command and option once, one name for one thing."""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import typer
from tests.support.shell import thinsection

from thinsection.cli.app import COMMANDS, DAILY, REPLACED, REPLACED_OPTIONS, build_app
from thinsection.config import flat_fields
from thinsection.errors import ConfigError
from thinsection.stages.config import RunConfig

LONGEST = 70  # lines
# options that had another name in an earlier version
EARLIER = {"--encoders", "--seeds", "--pipeline", "--mem", "--stage"}


def shown(*arguments: str, columns: int = 100) -> list[str]:
    """Lines that a command prints in a terminal of this width."""
    done = thinsection(*arguments, COLUMNS=str(columns))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@cache
def commands() -> dict[str, Any]:
    """Every command and subcommand of click's, by its words: 'run', 'probe linear'."""
    found: dict[str, Any] = {}
    for name in COMMANDS:
        root: Any = typer.main.get_command(build_app([name]))
        command = root.commands[name]
        found[name] = command
        for below, inner in getattr(command, "commands", {}).items():
            found[f"{name} {below}"] = inner
    return found


def options() -> Iterator[tuple[str, Any]]:
    """Every option of every command, with the command's words."""
    for words, command in commands().items():
        for param in command.params:
            if param.param_type_name == "option":
                yield words, param


def flags_in(lines: list[str]) -> Counter[str]:
    """Number of rows per option in a help text."""
    rows = [re.match(r"  (--[a-z0-9-]+)", line) for line in lines]
    return Counter(row[1] for row in rows if row)


@pytest.mark.parametrize(
    "words", ["run", "plan", "qc", "train", "predict", "heatmap", "probe grid"]
)
def test_help_fits_on_a_page_and_its_last_line_leads_to_all_options(words: str) -> None:
    lines = shown(*words.split(), "--help")
    assert len(lines) <= LONGEST
    pattern = rf"`thinsection {words} --help-all` lists all (\d+) options\."
    last = re.fullmatch(pattern, lines[-1].strip())
    assert last, lines[-1]
    every = flags_in(shown(*words.split(), "--help-all"))
    assert sum(every.values()) == int(last[1])


def test_no_help_of_a_command_is_longer_than_a_page() -> None:
    for words, command in commands().items():
        with command.make_context(
            words, [], resilient_parsing=True, terminal_width=98
        ) as context:
            assert len(context.get_help().splitlines()) <= LONGEST, words


def test_help_of_a_run_has_15_to_20_options() -> None:
    assert 15 <= len(flags_in(shown("run", "--help"))) <= 20


def test_help_of_quality_control_shows_how_to_correct_a_check() -> None:
    flags = flags_in(shown("qc", "--help"))
    assert flags["--qc-edits"] == flags["--qc-remove"] == 1
    # the first page of a run leaves them out
    assert not {"--qc-edits", "--qc-remove"} & flags_in(shown("run", "--help")).keys()


def test_help_all_lists_every_setting_once() -> None:
    rows = flags_in(shown("run", "--help-all", columns=200))
    assert set(rows.values()) == {1}
    flags = {
        opt for words, option in options() if words == "run" for opt in option.opts
    }
    for name, (_, field, _) in flat_fields(RunConfig).items():
        declared = field.metadata["flag"] or "--" + name.replace("_", "-")
        first = declared if isinstance(declared, str) else declared[0]
        assert first in rows
        assert first in flags


def test_every_command_stands_under_one_heading() -> None:
    lines = shown("--help")
    assert len(lines) <= LONGEST
    listed = [line.split()[0] for line in lines if re.match(r"  [a-z]+  ", line)]
    assert sorted(listed) == sorted(COMMANDS)
    headings = [command.heading for command in COMMANDS.values()]
    for heading in set(headings):
        assert lines.count(f"{heading}:") == 1
    # the commands of a heading are neighbours
    changes = sum(a != b for a, b in pairwise(headings))
    assert changes + 1 == len(set(headings))
    assert headings.count(DAILY) <= 12


def test_a_line_of_help_is_whole_at_80_columns() -> None:
    lines = shown("--help", columns=80)[1:]
    assert not [line for line in lines if line.endswith("...")]


@pytest.mark.parametrize("name", sorted(REPLACED_OPTIONS))
def test_an_earlier_option_names_the_one_of_today(name: str) -> None:
    for earlier, today in REPLACED_OPTIONS[name].items():
        with pytest.raises(ConfigError, match=f"{earlier}; did you mean {today}\\?"):
            build_app([name, "slides", f"{earlier}=auto"])
        assert today in {
            opt for option in commands()[name].params for opt in option.opts
        }
        assert earlier not in {
            opt for option in commands()[name].params for opt in option.opts
        }


@pytest.mark.parametrize("name", sorted(REPLACED))
def test_an_earlier_command_names_the_one_of_today(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is now thinsection run --until"):
        build_app([name, "slides", "--out", "o"])
    until = REPLACED[name].split()[-1]
    done = thinsection("run", "nowhere.svs", "--until", until, "--out", "o")
    assert "slide must be an existing file" in done.stderr


def test_an_option_has_one_name_in_all_commands() -> None:
    flags_by_text: dict[str, set[str]] = {}
    for _, option in options():
        text = re.sub(r" \[.*", "", option.help or "")
        flags_by_text.setdefault(text, set()).add(option.opts[0])
    several = {text: flags for text, flags in flags_by_text.items() if len(flags) > 1}
    assert several == {}
    names = {opt for _, option in options() for opt in option.opts}
    assert not names & EARLIER


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--qc", {"run", "plan", "segment", "qc"}),
        ("--qc-device", {"run", "plan", "segment", "qc"}),
        ("--aggregate-memory", {"run", "plan", "aggregate"}),
        ("--until", {"run", "plan"}),
    ],
)
def test_commands_share_an_option_by_its_name(flag: str, words: set[str]) -> None:
    assert {name for name, option in options() if flag in option.opts} == words


def test_an_option_explains_itself_in_sentences() -> None:
    for words, option in options():
        text = option.help or ""
        where = f"{words} {option.opts[0]}: {text}"
        sentence = re.sub(r"( \[[^\]]*\])+$", "", text)
        assert re.fullmatch(r"(?s)(\S*µm/px|[A-Z]).*\.", sentence), where
        assert not re.match(r"(Of|What is|Who|Whose|Whether) ", text), where
        assert not re.search(r"(?<![0-9] )\bpx\b(?!_)", text.replace("µm/px", "")), (
            where
        )
        assert not re.search(r"\b(told|takes|none:|None:)", text), where


def test_the_words_of_a_command_begin_with_a_verb() -> None:
    for name, command in COMMANDS.items():
        assert re.match(r"[A-Z][a-z]+,? [a-zA-Z0-9]", command.summary), name
        assert command.summary.endswith("."), name
        assert not command.summary.split()[0].endswith("s"), name


@pytest.mark.parametrize(
    ("probe", "with_encoder"),
    [("slide", False), ("regression", True), ("apd", True), ("linear", True)],
)
def test_a_probe_has_no_flag_that_its_data_do_not_use(
    probe: str, with_encoder: bool
) -> None:
    flags = set(flags_in(shown("probe", probe, "--help-all")))
    of_tiles = {"--layout", "--labels", "--test"}
    assert flags & of_tiles == (of_tiles if probe == "linear" else set())
    assert ("--encoder" in flags) == with_encoder
    assert "--embeddings" in flags
