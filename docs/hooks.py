"""What mkdocs writes itself: the reference of the commands, of the settings and of Python's names,
and the pages with figures, filled from the committed JSON of the benchmarks."""

import json
import logging
import os
import re
import runpy
from pathlib import Path
from typing import Any

import jinja2
import typer
from benchmarks.stale import is_script, rooms_of, starts_commands
from examples import real_data
from mkdocs.structure.files import File, Files
from tests.support import surface

from thinsection import _PUBLIC as PUBLIC
from thinsection.cli.app import COMMANDS, build_app
from thinsection.config import dump_toml
from thinsection.stages.config import RunConfig

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LOG = logging.getLogger("mkdocs.hooks")
# pages that became a part of another one: old address -> new one, for links from elsewhere
MOVED = {
    "from_trident.html": "comparison.html#from-trident",
    "from_stamp.html": "comparison.html#from-stamp",
}
# tutorial -> data that it needs, which no build fetches
NEEDS = {"tutorials/real_slide.py": "slide", "tutorials/real_crops.py": "crops"}
# a benchmark that a page names as the source of figures; that of an earlier commit says so itself
_SOURCE = re.compile(r"`(?:benchmarks/results/)?(\w+)(?:\.json)?`(?! of commit)")


def on_config(config: Any) -> None:
    """Leaves tutorials whose real data are not on this machine without their results."""
    for tutorial, name in NEEDS.items():
        slides = os.environ.get(
            "THINSECTION_TEST_SLIDES", ROOT.parent / "shared/slides"
        )
        local = Path(slides)
        if name == "slide" and (local / real_data.SOURCES[name].file).is_file():
            real_data.fetch(name, real_data.default_folder(), local)
        if not real_data.is_there(name, real_data.default_folder()):
            remedy = f"python examples/real_data.py {name}"
            LOG.info("%s shows no results; %s", tutorial, remedy)
            config.plugins["mkdocs-jupyter"].config["execute_ignore"].append(tutorial)


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages; a figure that no benchmark has is an error."""
    for name, text in pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_post_build(config: Any, **_: Any) -> None:
    """Writes a page at each old address that leads to the new one."""
    for old, new in MOVED.items():
        text = f'<!doctype html><meta charset="utf-8"><title>{new}</title>'
        text += f'<meta http-equiv="refresh" content="0; url={new}">'
        text += f'<a href="{new}">This page has moved.</a>\n'
        Path(config["site_dir"], old).write_text(text, encoding="utf-8")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Adds date and commit of its JSON to each benchmark that a page of figures names."""
    if page.file.src_uri == "maintaining.md":
        return markdown
    return with_commits(markdown)


def with_commits(text: str) -> str:
    """`bench_x` becomes `bench_x` (2026-11-22, commit 1a2b3c4)."""
    figures = records()

    def dated(match: re.Match[str]) -> str:
        record = figures.get(match[1])
        if record is None:
            return match[0]
        return f"{match[0]} ({record['date']}, commit {record['commit'][:9]})"

    return _SOURCE.sub(dated, text)


def records() -> dict[str, Any]:
    """Name of a benchmark -> its JSON."""
    paths = sorted(RESULTS.glob("*.json"))
    return {path.stem: json.loads(path.read_text()) for path in paths}


def benchmarks_by_room() -> dict[str, list[str]]:
    """Room -> benchmarks with a JSON that use it; "any" -> those that start commands."""
    by_room: dict[str, list[str]] = {}
    for name in filter(is_script, records()):
        for room in rooms_of(name):
            by_room.setdefault(room, []).append(name)
        if starts_commands(name):
            by_room.setdefault("any", []).append(name)
    return dict(sorted(by_room.items()))


def pages() -> dict[str, str]:
    """Path in the site -> Markdown."""
    found = {
        "reference/commands.md": commands(),
        "reference/settings.md": settings(),
        "reference/python.md": names(),
        "reference/surface.md": surface.page(),
    }
    figures = records()
    licences = runpy.run_path(str(ROOT / "docs" / "licences.py"))["tables"]()
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True)
    for template in sorted((ROOT / "docs").rglob("*.md.j2")):
        text = environment.from_string(template.read_text()).render(
            figures={name: figure["results"] for name, figure in figures.items()},
            made=figures,
            benchmarks_by_room=benchmarks_by_room(),
            licences=licences,
        )
        found[str(template.relative_to(ROOT / "docs").with_suffix(""))] = text
    return found


def commands() -> str:
    """Every command with its flags, as `--help` has them."""
    parts = ["# Commands\n"]
    for name in COMMANDS:
        root = typer.main.get_command(build_app([name]))
        parts += command_of(name, root.commands[name])
    return "\n".join(parts)


def command_of(name: str, command: Any) -> list[str]:
    """A command of typer's, then those below it."""
    context = command.context_class(command, info_name=f"thinsection {name}")
    usage = " ".join(command.collect_usage_pieces(context))
    text = command.help or command.get_short_help_str(200)
    parts = [f"## {name}", markdown_of(text), ""]
    parts += ["```", f"thinsection {name} {usage}", "```", ""]
    rows = [
        (", ".join([*p.opts, *p.secondary_opts]), help_of(p, context))
        for p in command.params
        if p.param_type_name == "option" and p.name != "help" and not p.hidden
    ]
    if rows:
        parts += ["| flag | |", "|---|---|"]
        parts += [f"| `{flags}` | {cell(text)} |" for flags, text in rows] + [""]
    for below, inner in getattr(command, "commands", {}).items():
        parts += command_of(f"{name} {below}", inner)
    return parts


def markdown_of(text: str) -> str:
    """Docstring of a command with its examples as a block of code."""
    # click leaves the lines of a paragraph that begins with \b as they are
    text = text.replace("\b\nExamples:\n", "Examples:\n\n")
    text = text.replace("\b\nExample:\n", "Example:\n\n")
    return text.replace("\n  thinsection ", "\n    thinsection ").replace(
        "\n      --", "\n        --"
    )


def help_of(option: Any, context: Any) -> str:
    """Its help, its choices and its default."""
    record = option.get_help_record(context)
    return record[1] if record else ""


def cell(text: str) -> str:
    """Text that does not break a table."""
    plain = re.sub(r"\s+", " ", text).replace("|", r"\|").replace("<", "&lt;")
    return plain.replace("[", r"\[")  # "[default: x]" is no link


def settings() -> str:
    """Every setting of a run, as `thinsection config` writes it."""
    words = "Every setting of a run with its default: `thinsection config --write run.toml`, then"
    words += " `thinsection run slides/ --config run.toml`. A flag wins over the file."
    return f"# Settings\n\n{words}\n\n```toml\n{dump_toml(RunConfig())}\n```\n"


def names() -> str:
    """What `import thinsection as ts` gives, and the modules that are imported by name."""
    # `plot` is a module of its own name
    found = {
        n: m.removesuffix(f".{n}") if n == "plot" else m for n, m in PUBLIC.items()
    }
    listed = [f"::: {module}.{name}" for name, module in found.items()]
    rooms = [
        name for name in surface.MODULES if name not in ("plot", "errors", "results")
    ]
    # what the functions return; those of a listed module are there already
    returned = [
        place
        for place in surface.RETURNED
        if not place.startswith(("qc.", "slide.Slide", "tiles.Tile"))
        and place != "results.tile_dataset.TileDataset"
    ]
    return "\n\n".join(
        [
            "# Python",
            "`import thinsection as ts` gives these names; the modules below are imported by name. "
            "[Public names](surface.md) is the short list.",
            *listed,
            "## What they return",
            *(f"::: thinsection.{place}" for place in returned),
            "::: thinsection.errors",
            *(f"::: thinsection.{room}" for room in rooms),
        ]
    )
