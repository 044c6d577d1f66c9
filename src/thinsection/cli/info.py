"""`thinsection info`: what a slide file holds, and what of it is shown."""

from typing import Annotated

import typer

from thinsection.cli.documents import (
    InfoDocument,
    PictureInfo,
    SlideInfo,
    UnopenedFile,
    print_document,
)
from thinsection.cli.flags import EXIT_SOME_LEFT_OUT, AsJson, Reader
from thinsection.errors import ThinsectionError, error_words
from thinsection.types import counted, format_mpp

app = typer.Typer()


@app.command("info", no_args_is_help=True)
def info(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...", help="Slide files or URLs.", show_default=False
        ),
    ],
    *,
    reader: Reader = "auto",
    image: Annotated[
        str | None,
        typer.Option(
            help="Image of each file to show: its name, or its number in the list."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the images, levels and resolution of slide files.

    A file may hold several images: areas, focal planes, a macro, a label. The list says which one
    `thinsection run` reads, and why. `run --image` chooses another one.

    Exit code: 0 all files opened, 3 some did not.

    \b
    Example:
      thinsection info a.svs b.ome.tif
    """
    # imports the readers
    from thinsection.files.urls import hide_secret
    from thinsection.slide import open_slide
    from thinsection.slide.readers import AUTO, check_packages_for

    if reader == AUTO:
        check_packages_for(files)
    slides = []
    failures = []
    for file in map(hide_secret, files):
        try:
            with open_slide(file, reader=reader, image=image) as slide:
                slides.append(SlideInfo.of(slide, file))
        except ThinsectionError as error:
            failures.append(UnopenedFile(slide_path=file, error=error_words(error)))
    document = InfoDocument(slides=tuple(slides), failures=tuple(failures))
    if as_json:
        print_document(document)
    else:
        texts = [_text(each) for each in document.slides]
        texts += [f"{each.slide_path}: {each.error}" for each in document.failures]
        print("\n\n".join(texts))
    if failures:
        raise typer.Exit(EXIT_SOME_LEFT_OUT)


def _text(slide: SlideInfo) -> str:
    """Returns the information on one file, as lines."""
    mpp = _mpp_words(slide.mpp_x, slide.mpp_y)
    source = f" ({slide.mpp_source})" if slide.mpp_source else ""
    lines = [
        slide.slide_path,
        f"  size        {slide.width} x {slide.height} px",
        f"  resolution  {mpp}{source}",
        f"  reader      {slide.choice or slide.reader}",
    ]
    if slide.objective_power is not None:
        lines.append(f"  objective   {slide.objective_power:g}x")
    if slide.vendor is not None:
        lines.append(f"  vendor      {slide.vendor}")
    for index, level in enumerate(slide.levels):
        name = "levels" if index == 0 else ""
        lines.append(
            f"  {name:<12}{index}: {level.width} x {level.height} px, "
            f"downsample {level.downsample:.6g}"
        )
    for index, picture in enumerate(slide.pictures):
        name = "images" if index == 0 else ""
        lines.append(f"  {name:<12}{_picture_words(picture)}")
    if len(slide.pictures) > 1:
        lines.append(f"  {'':<12}* is the slide; --image chooses another image")
    for index, note in enumerate(slide.notes):
        lines.append(f"  {'notes' if index == 0 else '':<12}{note}")
    return "\n".join(lines)


def _picture_words(picture: PictureInfo) -> str:
    """Returns one line on a picture."""
    mark = "*" if picture.is_shown else " "
    name = f" {picture.name!r}" if picture.name else ""
    parts = [f"{picture.width} x {picture.height} px"]
    if picture.mpp_x is not None:
        parts.append(_mpp_words(picture.mpp_x, picture.mpp_y))
    if picture.num_levels > 1:
        parts.append(counted(picture.num_levels, "level"))
    parts.append(picture.rule)
    return f"{picture.number}{mark} {picture.role}{name}: {', '.join(parts)}"


def _mpp_words(mpp_x: float | None, mpp_y: float | None) -> str:
    if mpp_x is None or mpp_y is None:
        return format_mpp(None)
    return format_mpp((mpp_x, mpp_y))
