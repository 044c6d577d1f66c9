"""`thinsection aggregate`: slide embeddings from tile embeddings that are there."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("aggregate")(aggregate)


def aggregate(  # noqa: PLR0917 - typer passes by name
    folder: Annotated[Path, typer.Argument(help="A run's folder, or features of TRIDENT or CLAM.")],
    out: Annotated[Path | None, typer.Option(help="Other output folder.")] = None,
    slide_encoder: Annotated[str, typer.Option(help="mean, max, abmil, titan, gigapath.")] = "",
    slide_weights: Annotated[
        str | None, typer.Option(help="Its local weights or hub repo.")
    ] = None,
    tile_px_l0: Annotated[
        int | None, typer.Option(help="Tile edge in level-0 px where files do not say.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    memory: Annotated[str, typer.Option(help="Memory of the slide encoder's attention.")] = "",
) -> None:
    """Pool tile embeddings into one embedding per slide.

    Examples:

        thinsection aggregate results --slide-encoder max

        thinsection aggregate trident_features/ --slide-encoder titan --out titan
    """
    from thinsection.aggregate import load_slide_encoder
    from thinsection.cli.progress import describe
    from thinsection.errors import StoreError
    from thinsection.run.aggregate_folder import aggregate_files, find_tiles
    from thinsection.run.api import EXIT_SOME_FAILED
    from thinsection.run.config import AggregateConfig
    from thinsection.units import parse_bytes

    defaults = AggregateConfig()
    if not folder.exists():
        raise StoreError(f"folder must exist, got {str(folder)!r}")
    sources = find_tiles(folder, out)
    encoder = load_slide_encoder(
        slide_encoder or defaults.slide_encoder,
        weights=slide_weights,
        device=device,
        budget_bytes=parse_bytes(memory or defaults.aggregate_memory, name="memory"),
    )
    failed = 0
    for result in aggregate_files(sources, encoder, tile_px_l0=tile_px_l0):
        print(describe(result), flush=True)
        failed += result.status == "failed"
    print(f"{len(sources) - failed} of {len(sources)} slides have an embedding of {encoder.name}")
    raise typer.Exit(EXIT_SOME_FAILED if failed else 0)
