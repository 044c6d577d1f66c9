"""What a results folder holds (`ls`), what a run used (`efficiency`), other formats (`export`)."""

from pathlib import Path
from typing import Annotated

import typer

FolderArgument = Annotated[Path, typer.Argument(help="A results folder.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("ls")(ls)
    app.command("efficiency")(efficiency)
    export = typer.Typer(no_args_is_help=True, help="Write results in other tools' formats.")
    export.command("anndata")(export_anndata)
    app.add_typer(export, name="export")


def ls(folder: FolderArgument) -> None:
    """Show what a results folder holds: grids, embeddings, slide embeddings, invocations.

    Example: thinsection ls results
    """
    from thinsection.pipeline.folder import open_results
    from thinsection.units import format_bytes

    results = open_results(folder)
    width = max([len(row.address) for row in results.folders], default=0)
    print(f"{folder}: {len(results.slides)} slides")
    for row in results.folders:
        facts = [
            f"{row.facts[name]}" for name in ("encoder", "slide_encoder") if row.facts.get(name)
        ]
        facts += [f"dim {row.facts[n]}" for n in ("dim", "slide_dim") if row.facts.get(n)]
        size = format_bytes(row.num_bytes)
        line = (
            f"  {row.address:<{width}}  {row.num_slides:>6} slides  {size:>10}  {', '.join(facts)}"
        )
        print(line.rstrip())
    for slide_id, error in results.failures().items():
        print(f"  failed: {slide_id}: {error}")
    for record in results.records:
        counts = record.document.get("counts")
        told = ", ".join(f"{n} {s}" for s, n in counts.items() if n) if counts else "not finished"
        print(f"  records/{record.folder.name}  {record.document.get('command')}: {told}")


def efficiency(folder: FolderArgument) -> None:
    """Requested against used by the newest invocation that did work, and what to ask for next.

    Example: thinsection efficiency results
    """
    from rich.console import Console
    from rich.table import Table

    from thinsection.pipeline.usage import efficiency as analyse

    analysis, page = analyse(folder)
    console = Console()
    table = Table("resource", "requested", "used", "share")
    for share in analysis.shares:
        part = "" if share.fraction is None else f"{share.fraction:.0%}"
        table.add_row(share.name, share.requested, share.used, part)
    console.print(table)
    for warning in analysis.warnings:
        console.print(f"warning: {warning}", style="bold red", markup=False)
    console.print(analysis.bottleneck, markup=False)
    if analysis.next_request is not None:
        console.print("ask for this next time:")
        for line in analysis.next_request.sbatch_lines():
            console.print(f"  {line}", markup=False)
    console.print(f"page: {page}", markup=False)


def export_anndata(
    folder: FolderArgument,
    out: Annotated[Path, typer.Option(help="The .h5ad file.")],
    features: Annotated[
        str | None, typer.Option(help="Which embeddings, where there are several.")
    ] = None,
) -> None:
    """X = tile embeddings, obsm['spatial'] = coordinates; for scanpy, squidpy and LazySlide.

    Example: thinsection export anndata results --out results/tiles.h5ad
    """
    from thinsection.pipeline.anndata_export import export_anndata as export

    count = export(folder, out, features=features)
    print(f"wrote {count} tiles to {out}")
