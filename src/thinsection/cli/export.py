"""`thinsection export`: results in the formats of other ecosystems."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    export = typer.Typer(no_args_is_help=True, help="Write results in other tools' formats.")
    export.command("anndata")(anndata_command)
    app.add_typer(export, name="export")


def anndata_command(
    folder: Annotated[Path, typer.Argument(help="Output folder of a run.")],
    out: Annotated[Path, typer.Option(help="The .h5ad file.")],
) -> None:
    """X = tile embeddings, obsm['spatial'] = coordinates; for scanpy, squidpy and LazySlide.

    Example: thinsection export anndata results --out results/tiles.h5ad
    """
    from thinsection.errors import StoreError
    from thinsection.pipeline.anndata_export import export_anndata

    if not folder.is_dir():
        raise StoreError(f"folder must be a run's output, got {str(folder)!r}")
    count = export_anndata(folder, out)
    print(f"wrote {count} tiles to {out}")
