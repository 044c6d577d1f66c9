"""`thinsection merge`: joins results folders."""

from pathlib import Path
from typing import Annotated

import typer

from thinsection.cli.documents import MergeDocument, print_document
from thinsection.cli.screen import EXIT_SOME_LEFT_OUT, AsJson, message_console
from thinsection.types import format_bytes

app = typer.Typer()


@app.command("merge")
def merge(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Results folders, or a folder that contains results folders.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Folder of the merged results; it may exist.", show_default=False
        ),
    ],
    copy: Annotated[
        bool, typer.Option(help="Copy files, in place of hard links to them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Join results folders into one, in which each finished slide is once.

    Files are linked, so that they need no further space. A slide that several folders have is taken
    once; if its results differ, nothing is changed and the message names it. Unfinished and failed
    slides are left out. The same command again continues. Tables and pages are made again.

    Exit code: 0 every slide is there, 2 the folders disagree, 3 some slides were left out.

    \b
    Examples:
      thinsection merge results_a results_b --out all
      thinsection merge parts/ --out all --copy
    """
    from thinsection.run.merge import merge_results

    console = message_console(as_json=as_json)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    summary = merge_results(folders, out=out, copy=copy, on_message=say)
    for slide in summary.slides:
        if slide.status == "left-out":
            say(f"{slide.slide_id}: left out of {slide.source}: {slide.reason}")
    counts = summary.counts
    ends = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    size = format_bytes(summary.num_bytes)
    say(f"{ends}; {summary.num_files} files, {size} -> {out}/index.html, summary.csv")
    if as_json:
        print_document(MergeDocument.of(summary))
    if counts["left-out"]:
        raise typer.Exit(EXIT_SOME_LEFT_OUT)
