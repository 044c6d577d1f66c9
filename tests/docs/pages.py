"""Reads the pages of the documentation: blocks of code, spans of code, links, marks of examples.

A comment before a block says why it is not executed as it stands. The site does not show it:

    <!-- example: needs a Slurm cluster -->
    <!-- example: "uni2_h" needs a token; "--check" exits with 3 -->

The first form is about the whole block, the second about its lines that contain the quoted text.
"""

import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHELL = ("bash", "console")
# guide for coding agents, which `thinsection skill` prints
SKILL = "src/thinsection/cli/SKILL.md"
_FENCE = re.compile(r"^```(\w*)\s*$")
_MARK = re.compile(r"^<!-- example: (.+) -->$")
_QUOTED = re.compile(r'^"([^"]+)" (.+)$')
_SPAN = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_EXIT = re.compile(r"exits with (\d+)")
_INCLUDE = re.compile(r'^--8<-- "([\w/.-]+\.(?:py|nf|toml)):(\w+)"$', re.MULTILINE)


@dataclass(frozen=True)
class Mark:
    """Reason why an example is only parsed; `text` names the lines, '' the whole block."""

    text: str
    reason: str

    @property
    def exit_code(self) -> int | None:
        """Exit code of a command that is executed and does not end with 0."""
        match = _EXIT.search(self.reason)
        return int(match[1]) if match else None


@dataclass(frozen=True)
class Block:
    """A fenced block of code, with the line of its fence."""

    page: str
    line: int
    language: str
    text: str
    marks: tuple[Mark, ...]

    def mark_of(self, code: str) -> Mark | None:
        """The mark that a line of code has, or that the whole block has."""
        for mark in self.marks:
            if mark.text in code:
                return mark
        return None

    def commands(self) -> list[str]:
        """Lines of a shell, without prompts and comments; continued lines are joined."""
        joined = self.text.replace("\\\n", " ")
        lines = [line.strip().removeprefix("$ ") for line in joined.splitlines()]
        return [line for line in lines if line and not line.startswith("#")]


def arguments_of(command: str) -> list[str]:
    """Words of a command line, without its comment and the file of its output."""
    words = shlex.split(command, comments=True)
    return words[: words.index(">")] if ">" in words else words


def output_of(command: str) -> str | None:
    """File to which a command line sends its output; None for the screen."""
    words = shlex.split(command, comments=True)
    return words[words.index(">") + 1] if ">" in words else None


def page_paths() -> list[str]:
    """Pages of the documentation, relative to the repository, in a fixed order."""
    docs = ROOT / "docs"
    found = [*docs.rglob("*.md"), *docs.rglob("*.md.j2")]
    # pages of changes name what was there in their version
    shown = sorted(_relative(path) for path in found if path.parent != docs / "changes")
    return ["README.md", "CONTRIBUTING.md", SKILL, *shown]


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def text_of(page: str) -> str:
    """Text of a page, with included scripts; of the change log only what is newest."""
    text = _INCLUDE.sub(_section, (ROOT / page).read_text(encoding="utf-8"))
    if page == "CHANGELOG.md":
        heads = [match.start() for match in re.finditer(r"^## ", text, re.MULTILINE)]
        return text[: heads[1]] if len(heads) > 1 else text
    return text


def _section(include: re.Match[str]) -> str:
    """Part of a file of docs/ or of the repository between its marks, as the site shows it."""
    path = ROOT / "docs" / include[1]
    if not path.is_file():
        path = ROOT / include[1]
    script = path.read_text(encoding="utf-8")
    marked = script.split(f"[start:{include[2]}]\n")[1].split("--8<-- [end")[0]
    # the last line has the sign of a comment before the mark
    return marked.rpartition("\n")[0]


def blocks_of(page: str) -> list[Block]:
    """Fenced blocks of a page, in order."""
    return blocks_in(text_of(page), page)


def blocks_in(text: str, page: str) -> list[Block]:
    """Fenced blocks of a text, each with the marks of the comment before it."""
    blocks = []
    marks: tuple[Mark, ...] = ()
    start = 0
    language = ""
    lines: list[str] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        fence = _FENCE.match(line)
        if lines is not None:
            if fence and not fence[1]:
                block = Block(page, start, language, "\n".join(lines) + "\n", marks)
                blocks.append(block)
                lines = None
                marks = ()
            else:
                lines.append(line)
        elif fence:
            start = number
            language = fence[1]
            lines = []
        elif comment := _MARK.match(line.strip()):
            marks = _marks_in(comment[1])
        elif line.strip():
            marks = ()
    return blocks


def _marks_in(comment: str) -> tuple[Mark, ...]:
    marks = []
    for part in comment.split("; "):
        quoted = _QUOTED.match(part)
        marks.append(Mark(quoted[1], quoted[2]) if quoted else Mark("", part))
    return tuple(marks)


def prose_of(text: str) -> str:
    """Text without its fenced blocks and comments; line numbers stay."""
    kept = []
    inside = False
    for line in re.sub(r"<!--.*?-->", "", text).splitlines():
        if line.startswith("```"):
            inside = not inside
            kept.append("")
        else:
            kept.append("" if inside else line)
    return "\n".join(kept)


def spans_of(text: str) -> list[str]:
    """Spans of code in the prose of a text."""
    return [re.sub(r"\s+", " ", span) for span in _SPAN.findall(prose_of(text))]


def links_of(text: str) -> list[str]:
    """Targets of the links in the prose of a text."""
    return _LINK.findall(prose_of(text))
