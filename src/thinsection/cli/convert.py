"""Commands that write new files: `convert` and `deid` for slides, `frames` for tables."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thinsection.cli.flags import EXIT_SOME_LEFT_OUT, Reader
from thinsection.errors import InvalidInputError, ThinsectionError, with_options

if TYPE_CHECKING:
    from thinsection.deid import Report

# name of an input, and its job, which returns the text to print
Job = tuple[str, Callable[[], str]]

app = typer.Typer()
SlidesArgument = Annotated[
    list[Path],
    typer.Argument(metavar="SLIDE...", help="Slide files.", show_default=False),
]
_OUT = typer.Option("--out", help="Folder for the new files.")
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")]


@app.command("convert", no_args_is_help=True)
def convert(
    slides: SlidesArgument,
    *,
    to: Annotated[
        str, typer.Option(help="Format of the new files: ome-tiff.")
    ] = "ome-tiff",
    out: Annotated[Path, _OUT] = Path(),
    quality: Annotated[
        int,
        typer.Option(
            help="JPEG quality of pixels that cannot be copied, from 1 to 100."
        ),
    ] = 90,
    reader: Reader = "auto",
    slide_mpp: Annotated[
        float | None,
        typer.Option(
            help="µm/px of level 0, such as 0.25, in place of the value in the file."
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            help="Image of each file to convert: its name or number, as `thinsection info` "
            "lists them. It is part of the new file's name."
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Convert slides to pyramidal OME-TIFF.

    The compressed pixels of a TIFF are copied without loss. Other formats are encoded as JPEG.
    By default the slide image of each file is converted; --image chooses another image.

    Exit code: 0 all slides converted, 3 some failed.

    \b
    Examples:
      thinsection convert a.svs b.ndpi --out converted
      thinsection convert glass.ome.tif --image 2 --out converted
    """
    from thinsection.slide.convert import FORMATS
    from thinsection.slide.convert import convert as write
    from thinsection.slide.ids import is_unsafe
    from thinsection.slide.readers import AUTO, check_packages_for

    if to not in FORMATS:
        raise InvalidInputError(f"to must be one of: {', '.join(FORMATS)}; got {to!r}")
    mpp = None if slide_mpp is None else (slide_mpp, slide_mpp)

    if image is not None and is_unsafe(f"slide-{image}"):
        raise InvalidInputError(
            f"image must name a file, got {image!r}; choose the picture by its number"
        )
    console = Console(stderr=True)

    def convert_one(slide: Path) -> str:
        stem = slide.name.removesuffix(slide.suffix).removesuffix(".ome")
        if image is not None:
            stem = f"{stem}-{image}"
        target = out / f"{stem}{FORMATS[to]}"
        notes: list[str] = []
        write(
            slide,
            target,
            reader=reader,
            slide_mpp=mpp,
            image=image,
            quality=quality,
            overwrite=overwrite,
            on_message=notes.append,
        )
        for note in notes:
            text = f"{slide}: {note}"
            console.print(text, style="yellow", markup=False, soft_wrap=True)
        return str(target)

    if reader == AUTO:
        check_packages_for(slides)
    _run_each([(str(slide), partial(convert_one, slide)) for slide in slides])


@app.command("deid", no_args_is_help=True)
def deid(
    slides: SlidesArgument,
    out: Annotated[Path | None, _OUT] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Only report what would be removed and kept. The exit code is 3 if something "
            "would be removed.",
        ),
    ] = False,
    sheets: Annotated[
        Path | None,
        typer.Option(
            help="Folder for contact sheets (PNG), which show every image of a copy. "
            "[default: OUT/contact-sheets]"
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Copy Aperio, TIFF, NDPI and DICOM slides without label, macro image, dates and other text.

    Pixels are copied without loss. The report lists what was removed, what was kept, and what was
    not examined. File names are kept: rename files whose name identifies a patient. Pass all DICOM
    files of a study in one command.

    Look at the contact sheet of each copy before you share it.

    \b
    Examples:
      thinsection deid --check *.svs
      thinsection deid *.svs *.ndpi --out shared
    """
    if out is None and not check:
        raise InvalidInputError(
            "out must be a folder, got none; pass --out DIR, or --check"
        )
    from thinsection.deid import deidentify, deidentify_dicom, examine, split_by_kind

    target = None if check else out
    sheet_folder = None
    if target is not None:
        sheet_folder = sheets or target / "contact-sheets"
    removed: list[str] = []  # filled while slides are examined

    def described(report: "Report") -> str:
        removed.extend(report.removed)
        return "".join(f"\n  {line}" for line in report.lines())

    def deid_one(slide: Path) -> str:
        if target is None or sheet_folder is None:
            return described(examine(slide))
        report = deidentify(
            slide,
            target / slide.name,
            sheet=sheet_folder / f"{slide.name}.png",
            overwrite=overwrite,
        )
        return described(report)

    def deid_study() -> str:
        # all DICOM files together, because they refer to each other
        reports = deidentify_dicom(
            dicom,
            target,
            sheet=None if sheet_folder is None else sheet_folder / "dicom.png",
            overwrite=overwrite,
        )
        lines = [f"\n{slide}:{described(one)}" for slide, one in reports.items()]
        return "".join(lines)

    others, dicom = split_by_kind(slides)
    jobs: list[Job] = [(str(slide), partial(deid_one, slide)) for slide in others]
    if dicom:
        jobs.append((f"{len(dicom)} DICOM files", deid_study))
    _run_each(jobs, identifying=removed if check else ())


def _run_each(jobs: Sequence[Job], identifying: Sequence[str] = ()) -> None:
    """Runs the jobs and prints a line for each slide; exit code 3 if one failed.

    Args:
        jobs: work for each slide.
        identifying: identifying content that the jobs found; exit code 3 if there is any.
    """
    console = Console(stderr=True)
    failed = False
    for name, work in jobs:
        try:
            print(f"{name}: {work()}")
        except (ThinsectionError, OSError) as error:
            failed = True
            console.print(
                f"{name}: {with_options(str(error))}",
                style="bold red",
                markup=False,
                soft_wrap=True,
            )
    if failed or identifying:
        raise typer.Exit(EXIT_SOME_LEFT_OUT)


@app.command("frames", no_args_is_help=True)
def frames(
    structures: Annotated[
        list[Path],
        typer.Argument(
            metavar="STRUCTURE...", help="mmCIF files (.cif, .cif.gz).", exists=True
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            help="Table to write (.parquet or .csv). A summary is written beside it.",
        ),
    ] = Path("frames.parquet"),
    assembly: Annotated[
        str | None,
        typer.Option(
            help="Biological assembly to build, such as 1. [default: the deposited structure]"
        ),
    ] = None,
    angle_threshold: Annotated[
        float | None,
        typer.Option(
            help="Leave out a frame whose atoms are within this angle of a straight line, in "
            "degrees. [default: 25, as in AlphaFold 3]"
        ),
    ] = None,
    whole_rows: Annotated[
        bool,
        typer.Option(
            help="Search all atoms for neighbours, so that ties between equal distances are broken "
            "as in AlphaFold 3."
        ),
    ] = False,
) -> None:
    """Compute the frames of residues, nucleotides and ligand atoms, as AlphaFold 3 defines them.

    \b
    Examples:
      thinsection frames 2q2k.cif --out 2q2k.csv
      thinsection frames *.cif.gz --assembly 1 --out frames.parquet
    """
    from thinsection.files.atomic import atomic_path, write_json
    from thinsection.frames import FrameOptions, write_frames
    from thinsection.frames.token_frames import ANGLE_THRESHOLD

    with atomic_path(out) as unfinished:
        summaries = write_frames(
            structures,
            unfinished,
            assembly=assembly,
            angle_threshold=(
                ANGLE_THRESHOLD if angle_threshold is None else angle_threshold
            ),
            options=FrameOptions(impl="rows" if whole_rows else "chain"),
        )
        rows = [asdict(summary_row) for summary_row in summaries]
    summary = out.with_suffix(".summary.json")
    write_json(summary, rows)
    columns = [name for name in rows[0] if name != "notes"]
    table = Table(*(name.replace("_", " ") for name in columns))
    for row in rows:
        table.add_row(*(Text(str(row[name])) for name in columns))
    console = Console()
    console.print(table)
    for row in rows:
        if row["notes"]:
            note = f"{row['structure']}: {row['notes']}"
            console.print(note, style="yellow", markup=False, soft_wrap=True)
    console.print(f"{out}\n{summary}", markup=False, highlight=False, soft_wrap=True)
