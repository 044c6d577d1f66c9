"""Files into files: `thinsection convert` and `deid` write slides anew, `frames` tables."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from thinsection.errors import InvalidInputError, ThinsectionError

app = typer.Typer()
SLIDES = typer.Argument(metavar="SLIDE...", help="Slide files.", show_default=False)
OUT = typer.Option("--out", help="Folder for what is written.")
TO = typer.Option(help="Format: ome-tiff.")
QUALITY = typer.Option(help="JPEG quality of what has to be encoded.")
READER = typer.Option(help="Reader, as of `run`.")
MPP = typer.Option(help="µm/px, where the slide does not say it.")
CHECK = typer.Option("--check", help="Only list what may identify somebody; exit code 3 if any.")
OVERWRITE = typer.Option("--overwrite", help="Replace files that are there.")
_HELP = "mmCIF files (.cif, .cif.gz)."
STRUCTURES = typer.Argument(metavar="STRUCTURE...", help=_HELP, exists=True)
TABLE = typer.Option("--out", help="Table to write: .parquet or .csv; summary beside it.")
ASSEMBLY = typer.Option(help="Build this biological assembly of each file, e.g. 1.")
ANGLE = typer.Option(help="Degrees from a line; AlphaFold 3's 25 unless given.")
ROWS = typer.Option(help="Search whole rows: the original's choice of equal distances.")


@app.command("convert", no_args_is_help=True)
def convert(
    slides: Annotated[list[Path], SLIDES],
    *,
    to: Annotated[str, TO] = "ome-tiff",
    out: Annotated[Path, OUT] = Path(),
    quality: Annotated[int, QUALITY] = 90,
    reader: Annotated[str, READER] = "auto",
    slide_mpp: Annotated[float | None, MPP] = None,
    overwrite: Annotated[bool, OVERWRITE] = False,
) -> None:
    """Write slides as pyramidal OME-TIFF; a TIFF's segments are copied, not decoded.

    Example: thinsection convert a.svs b.ndpi --to ome-tiff --out converted
    """
    from thinsection.slide.convert import FORMATS
    from thinsection.slide.convert import convert as write

    if to not in FORMATS:
        raise InvalidInputError(f"to must be one of: {', '.join(FORMATS)}; got {to!r}")
    mpp = None if slide_mpp is None else (slide_mpp, slide_mpp)

    def one(slide: Path) -> str:
        stem = slide.name.removesuffix(slide.suffix).removesuffix(".ome")
        target = out / f"{stem}{FORMATS[to]}"
        write(slide, target, reader=reader, slide_mpp=mpp, quality=quality, overwrite=overwrite)
        return str(target)

    _each(slides, one)


@app.command("deid", no_args_is_help=True)
def deid(
    slides: Annotated[list[Path], SLIDES],
    out: Annotated[Path | None, OUT] = None,
    check: Annotated[bool, CHECK] = False,
    overwrite: Annotated[bool, OVERWRITE] = False,
) -> None:
    """Write TIFF slides without label, macro and what else may identify; image data is copied.

    The names of the files stay as they are: rename them where they tell something.

    Examples:

      thinsection deid --check *.svs

      thinsection deid *.svs --out shared
    """
    from thinsection.slide.convert import deidentify, identifying

    if out is None and not check:
        raise InvalidInputError("out must be a folder, got none; pass --out DIR, or --check")
    found: list[str] = []  # as slides are checked

    def one(slide: Path) -> str:
        if check or out is None:
            found.extend(told := identifying(slide))
            return "".join(f"\n  {line}" for line in told) or "nothing was found"
        told = deidentify(slide, target := out / slide.name, overwrite=overwrite)
        return "".join([str(target), *(f"\n  without {line}" for line in told)])

    _each(slides, one, found)


def _each(slides: Sequence[Path], one: Callable[[Path], str], found: Sequence[str] = ()) -> None:
    """Says what was done for each slide; exit code 3 if one failed, or was found to identify."""
    console, failed = Console(stderr=True), False
    for slide in slides:
        try:
            print(f"{slide}: {one(slide)}")
        except (ThinsectionError, OSError) as error:
            failed = True
            console.print(f"{slide}: {error}", style="bold red", markup=False, soft_wrap=True)
    if failed or found:
        from thinsection.pipeline.run import EXIT_SOME_FAILED

        raise typer.Exit(EXIT_SOME_FAILED)


@app.command("frames", no_args_is_help=True)
def frames(
    structures: Annotated[list[Path], STRUCTURES],
    out: Annotated[Path, TABLE] = Path("frames.parquet"),
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
        rows = [*map(asdict, write_frames(structures, unfinished, assembly=assembly, **how))]
    write_json(summary := out.with_suffix(".summary.json"), rows)
    table, console = Table(*(name.replace("_", " ") for name in rows[0])), Console()
    for row in rows:
        table.add_row(*map(str, row.values()))
    console.print(table)
    console.print(f"{out}\n{summary}", markup=False, highlight=False, soft_wrap=True)
