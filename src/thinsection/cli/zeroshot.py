"""`thinsection zeroshot`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from thinsection.cli.flags import with_config

app = typer.Typer()


@app.command("zeroshot")
@with_config("thinsection.predict.zeroshot:ZeroshotRunConfig")
def zeroshot_command(
    results: Annotated[
        Path,
        typer.Argument(
            metavar="RESULTS",
            help="Results folder with embeddings of an encoder that has a text tower.",
        ),
    ],
    prompts: Annotated[
        Path,
        typer.Option(
            "--prompts",
            help="TOML file with the classes and their names. The page 'Zero-shot classes' of "
            "the docs has an example.",
        ),
    ],
    config: Any,
) -> None:
    """Score tiles and slides for classes that you describe in words.

    No labels and no training are needed. RESULTS gets a tile table for each slide, with one
    column per class, and scores.csv with one row per slide.

    Exit code: 0 every slide has scores, 3 some have none.

    \b
    Examples:
      thinsection run slides/ --out results --encoder plip --tile-px 224
      thinsection zeroshot results --prompts prompts.toml
    """
    from thinsection.cli.progress import say
    from thinsection.predict.prompts import read_prompts

    # report a wrong file before PyTorch is imported, which takes seconds
    words = read_prompts(prompts)

    from thinsection.predict.zeroshot import zeroshot

    result = zeroshot(results, words, config=config, on_message=say)
    for row in result.rows:
        score = f", score {row.scores[row.predicted]:.4f}" if row.scores else ""
        print(f"{row.slide_id}: {row.predicted or 'no tiles'}{score}")
    for column in result.columns:
        print(f"thinsection heatmap {column} {results}")
    print(result.table)
    is_complete = not result.unread and all(row.scores for row in result.rows)
    raise typer.Exit(0 if is_complete else 3)
