"""`thinsection frames`: the token frames of structure files, as a table."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer()
_HELP = "mmCIF files (.cif, .cif.gz)."
STRUCTURES = typer.Argument(metavar="STRUCTURE...", help=_HELP, exists=True)
OUT = typer.Option("--out", help="Table to write: .parquet or .csv; summary beside it.")
ASSEMBLY = typer.Option(help="Build this biological assembly of each file, e.g. 1.")
ANGLE = typer.Option(help="Degrees from a line; AlphaFold 3's 25 unless given.")
ROWS = typer.Option(help="Search whole rows: the original's choice of equal distances.")


@app.command("frames", no_args_is_help=True)
def frames(
    structures: Annotated[list[Path], STRUCTURES],
    out: Annotated[Path, OUT] = Path("frames.parquet"),
    assembly: Annotated[str | None, ASSEMBLY] = None,
    angle_threshold: Annotated[float | None, ANGLE] = None,
    whole_rows: Annotated[bool, ROWS] = False,
) -> None:
    """Frames of residues, nucleotides and ligand atoms, as AlphaFold 3 defines them.

    Examples:

      thinsection frames 2q2k.cif --out 2q2k.csv

      thinsection frames *.cif.gz --assembly 1 --out frames.parquet
    """
    from thinsection.files.atomic import atomic_path, write_json
    from thinsection.structures import FrameOptions, write_frames
    from thinsection.structures.frames import ANGLE_THRESHOLD

    threshold = ANGLE_THRESHOLD if angle_threshold is None else angle_threshold
    options = FrameOptions(impl="rows" if whole_rows else "chain")
    how: dict[str, Any] = {"angle_threshold": threshold, "options": options}
    with atomic_path(out) as unfinished:
        summaries = write_frames(structures, unfinished, assembly=assembly, **how)
    rows = [asdict(summary) for summary in summaries]
    summary_path = out.with_suffix(".summary.json")
    write_json(summary_path, rows)
    table = Table(*(name.replace("_", " ") for name in rows[0]))
    for row in rows:
        table.add_row(*map(str, row.values()))
    console = Console()
    console.print(table)
    console.print(f"{out}\n{summary_path}", markup=False, highlight=False, soft_wrap=True)
