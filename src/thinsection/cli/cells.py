"""`thinsection cells check`: judges the cells that another tool segmented."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinsection.cli.documents import (
    CellsCheckDocument,
    CheckedCells,
    UnreadCells,
    print_document,
)
from thinsection.cli.flags import EXIT_SOME_LEFT_OUT, AsJson, message_console
from thinsection.errors import ThinsectionError, error_words

if TYPE_CHECKING:
    from thinsection.cells.check import CellsFindings

app = typer.Typer()
cells = typer.Typer(
    no_args_is_help=True, help="Check the cells that another tool segmented."
)
app.add_typer(cells, name="cells")


@cells.command("check", no_args_is_help=True)
def check(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Files of cells: GeoJSON, JSON of CellViT or HoVer-Net, Parquet, SpatialData, "
            "label images (TIFF, OME-Zarr), or a table in a results folder.",
            show_default=False,
        ),
    ],
    *,
    slide: Annotated[
        str | None,
        typer.Option(
            help="Slide of the cells. Cells on glass and outside the slide are then counted too, "
            "and the picture shows its pixels. With one file only."
        ),
    ] = None,
    frame: Annotated[
        str | None,
        typer.Option(
            help="Unit of the coordinates: um, the µm of one pixel such as 0.5, or a magnification "
            "such as 20x. [default: the unit that the format states, else pixels of level 0]"
        ),
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(
            help="Column of a Parquet file, such as class=cell_type. Meanings: id, class, "
            "geometry, x, y, probability. Repeat the option for several."
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="Write a picture (PNG) of twenty doubtful cells. With one file only."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Count cells that are doubled, cut at seams, self-crossing, of absurd size or on glass.

    Doubled: another cell covers more than a fifth of the smaller one. Cut: a straight side at a
    seam of the tiles in which the tool worked; the distance and the place of the seams are shown.

    Exit code: 0 every file could be read, 3 some could not.

    \b
    Examples:
      thinsection cells check cells.geojson --picture doubtful.png
      thinsection cells check cells.json --slide a.svs --json
    """
    from thinsection.errors import ConfigError
    from thinsection.extras import require_packages

    require_packages("cells", "pyarrow")

    if len(files) > 1 and (slide is not None or picture is not None):
        raise ConfigError(
            f"--slide and --picture must be of one file of cells, got {len(files)} files; check "
            "them one by one"
        )
    console = message_console(as_json=as_json)
    checked = []
    failures = []
    for file in files:
        try:
            findings = _check(file, slide, frame, tuple(columns or ()), picture)
        except ThinsectionError as error:
            failures.append(UnreadCells(file=str(file), error=error_words(error)))
            console.print(f"{file}: {error_words(error)}", markup=False, soft_wrap=True)
            continue
        checked.append(CheckedCells.of(findings))
        if not as_json:
            print(f"{file}:")
            for line in findings.lines:
                print(f"  {line}")
    if as_json:
        document = CellsCheckDocument(files=tuple(checked), failures=tuple(failures))
        print_document(document)
    if failures:
        raise typer.Exit(EXIT_SOME_LEFT_OUT)


def _check(
    file: Path,
    slide_path: str | None,
    frame: str | None,
    columns: tuple[str, ...],
    picture: Path | None,
) -> "CellsFindings":
    """Checks one file, with its slide if there is one, and writes the picture."""
    from thinsection.cells.check import check_cells
    from thinsection.cells.check_picture import save_examples
    from thinsection.cells.place import cell_slide
    from thinsection.qc.tissue import tissue_mask
    from thinsection.slide import open_slide

    if slide_path is None:
        findings, around = check_cells(file, frame=frame, columns=columns)
        if picture is not None:
            save_examples(picture, around, None)
        return findings
    with open_slide(slide_path) as slide:
        findings, around = check_cells(
            file,
            frame=frame,
            columns=columns,
            slide=cell_slide(slide),
            tissue=tissue_mask(slide),
        )
        if picture is not None:
            save_examples(picture, around, slide)
    return findings
