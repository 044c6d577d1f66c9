"""`thinsection models`: every encoder that is known, and whether one of them would load here."""

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from thinsection.encode import EncoderSpec

EXIT_WOULD_NOT_LOAD = 1

_HEADINGS = (
    *("name", "dim", "tile px", "µm/px", "params", "licence", "needs", "from", "revision"),
)
_NUMBERS = ("dim", "tile px", "µm/px", "params")
_ALSO = "also: timm:<name>, hf:<repo>[@<revision>], the path of a checkpoint with its config.json"
_EPILOG = (
    "Examples: [cyan]thinsection models[/]   [cyan]thinsection models check uni[/]   "
    "[cyan]thinsection models check timm:resnet50 --json[/]"
)


def register(app: typer.Typer) -> None:
    """Adds `models` and `models check`."""
    models = typer.Typer(
        help="List the encoders; say whether one would load here.",
        epilog=_EPILOG,
        rich_markup_mode="rich",
    )
    models.callback(invoke_without_command=True)(list_models)
    models.command("check")(check)
    app.add_typer(models, name="models")


def list_models(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
) -> None:
    """List the encoders: dimension, tiles, licence, what they need, where they come from.

    Into a pipe or file: one line an encoder, fields apart by tabs, nothing shortened.
    """
    if context.invoked_subcommand is not None:
        return
    from thinsection.encode.registry import ENCODERS, declared_encoders
    from thinsection.pool.encoder import SLIDE_ENCODERS

    specs = declared_encoders()
    others = {e.name: e.help for e in map(ENCODERS.entry, ENCODERS.names()[len(specs) :])}
    slide = {entry.name: entry.help for entry in SLIDE_ENCODERS}
    if as_json:
        declared = [_as_json(spec) for spec in specs.values()]
        found = {"encoders": declared, "plugins": others, "slide_encoders": slide}
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    rows = [_row(spec) for spec in specs.values()]
    if sys.stdout.isatty():
        Console().print(_table(rows))
    else:
        print(*("\t".join(row) for row in (_HEADINGS, *rows)), sep="\n")
    for name, line in others.items():
        print(f"{name}\tbrought by another package: {line}")
    print(_ALSO)
    for name, line in slide.items():
        print(f"slide encoder\t{name}\t{line}")


def check(
    name: Annotated[
        str, typer.Argument(help="A name of the list, timm:<name>, hf:<repo>, a path.")
    ],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
) -> None:
    """Say whether an encoder would load here, and why not. Exit code 1 if it would not."""
    from thinsection.encode.check import check_encoder

    checks = check_encoder(name, device=device)
    loads = all(c.ok for c in checks)
    if as_json:
        shown = [dataclasses.asdict(c) for c in checks]
        print(json.dumps({"name": name, "loads": loads, "checks": shown}, indent=2))
    else:
        console = Console()
        for c in checks:
            mark, style = ("yes", "green") if c.ok else ("no", "red")
            console.print(f"{mark:>4}", style=style, end=f"  {c.name:<9} ")
            console.print(c.detail, markup=False, highlight=False, soft_wrap=True)
        verdict = "would load here" if loads else "would not load here"
        console.print(f"{name} {verdict}", style="bold", markup=False, highlight=False)
    if not loads:
        raise typer.Exit(EXIT_WOULD_NOT_LOAD)


def _as_json(spec: "EncoderSpec") -> dict[str, Any]:
    plain = dataclasses.asdict(spec)
    plain["architecture"]["options"] = dict(spec.architecture.options)
    return plain | {"needs": list(spec.needs)}


def _row(spec: "EncoderSpec") -> tuple[str, ...]:
    packages = [p for p in spec.needs if p != "huggingface_hub"]
    pinned = spec.revision[:7] if spec.revision else "no commit known"
    return (
        spec.name,
        str(spec.dim),
        str(spec.tile_px),
        "any" if spec.tile_mpp is None else f"{spec.tile_mpp:g}",
        f"{(spec.num_params or 0) / 1e6:.0f} M",
        spec.licence,
        ", ".join(packages + (["token (gated)"] if spec.gated else [])) or "nothing",
        spec.repo or spec.source.split(";")[0],
        pinned if spec.repo else "the package's",
    )


def _table(rows: list[tuple[str, ...]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for place, heading in enumerate(_HEADINGS):
        is_name = place == 0
        longest = max(len(row[place]) for row in rows)
        table.add_column(
            heading,
            justify="right" if heading in _NUMBERS else "left",
            overflow="fold",
            no_wrap=is_name,
            min_width=longest if is_name else None,
        )
    for row in rows:
        table.add_row(*row)
    return table
