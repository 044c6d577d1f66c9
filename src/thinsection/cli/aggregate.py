"""`thinsection aggregate`: slide embeddings from tile embeddings that are there."""

from pathlib import Path
from typing import Annotated, Any

import typer

from thinsection.cli.options import with_config


def register(app: typer.Typer) -> None:
    """Adds the command."""
    from thinsection.stages.config import AggregateRunConfig

    app.command("aggregate")(with_config(AggregateRunConfig)(aggregate))


def aggregate(
    folder: Annotated[Path, typer.Argument(help="A run's folder, or features of TRIDENT or CLAM.")],
    out: Annotated[Path | None, typer.Option(help="Other output folder.")] = None,
    config: Any = None,
) -> None:
    """Pool tile embeddings into one embedding per slide.

    Exit code 0: every slide has its embedding; 3: some failed.

    Examples:

        thinsection aggregate results --slide-encoder max

        thinsection aggregate trident_features/ --slide-encoder titan --out titan

        thinsection aggregate results --slide-encoder titan --executor dask --workers 4
    """
    from thinsection.cli.progress import describe
    from thinsection.pipeline.aggregate_task import aggregate_run
    from thinsection.pipeline.api import EXIT_SOME_FAILED

    results = aggregate_run(
        folder,
        out=out,
        config=config,
        on_result=lambda result: print(describe(result), flush=True),
        on_message=lambda text: print(text, flush=True),
    )
    failed = sum(result.status == "failed" for result in results)
    name = config.pooling.slide_encoder
    print(f"{len(results) - failed} of {len(results)} slides have an embedding of {name}")
    raise typer.Exit(EXIT_SOME_FAILED if failed else 0)
