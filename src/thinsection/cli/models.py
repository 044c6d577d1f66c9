"""`thinsection models`: every encoder that is known, and whether one of them would load here."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from thinsection.encode import EncoderSpec

EXIT_WOULD_NOT_LOAD = 1

_EPILOG = (
    "Examples: [cyan]thinsection models[/]   [cyan]thinsection models check uni[/]   "
    "[cyan]thinsection models check timm:resnet50 --json[/]"
)


def register(app: typer.Typer) -> None:
    """Adds `models` and `models check`."""
    models = typer.Typer(
        help="List the tile encoders; say whether one would load here.",
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
    """List the tile encoders: dimension, tiles, licence, what they need, where they come from."""
    if context.invoked_subcommand is not None:
        return
    from thinsection.encode.registry import declared_encoders, plugin_encoders

    specs = declared_encoders()
    plugins = {name: point.value for name, point in plugin_encoders().items() if name not in specs}
    if as_json:
        declared = [_as_json(spec) for spec in specs.values()]
        print(json.dumps({"encoders": declared, "plugins": plugins}, indent=2))
        return
    console = Console()
    console.print(_table(list(specs.values())))
    for name, value in plugins.items():
        console.print(f"{name}: brought by another package ({value})", highlight=False)
    console.print(
        "also: timm:<name>, hf:<repo>[@<revision>], the path of a checkpoint with its config.json",
        markup=False,
        highlight=False,
    )


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
            console.print(c.detail, markup=False, highlight=False)
        verdict = "would load here" if loads else "would not load here"
        console.print(f"{name} {verdict}", style="bold", markup=False, highlight=False)
    if not loads:
        raise typer.Exit(EXIT_WOULD_NOT_LOAD)


def _as_json(spec: "EncoderSpec") -> dict[str, Any]:
    plain = dataclasses.asdict(spec)
    plain["architecture"]["options"] = dict(spec.architecture.options)
    return plain


def _table(specs: "list[EncoderSpec]") -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("name", "dim", "tile px", "µm/px", "params", "licence", "needs", "from"):
        right = heading in ("dim", "tile px", "µm/px", "params")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for spec in specs:
        packages = [p for p in spec.needs if p != "huggingface_hub"]
        table.add_row(
            spec.name,
            str(spec.dim),
            str(spec.tile_px),
            "any" if spec.tile_mpp is None else f"{spec.tile_mpp:g}",
            f"{(spec.num_params or 0) / 1e6:.0f} M",
            spec.licence,
            ", ".join(packages + (["token (gated)"] if spec.gated else [])) or "nothing",
            spec.repo or spec.source.split(";")[0],
        )
    return table
