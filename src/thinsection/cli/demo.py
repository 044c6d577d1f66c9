"""`thinsection demo`: the main job on one slide, generated or yours, and where to look."""

from pathlib import Path
from typing import Annotated

import typer

_DEMO_SIZE = (6000, 5000)  # px; a biopsy at 20x, about 200 tiles
_LOOK_AT = {
    "overview.png": "thumbnail, tissue outline and tiles in one picture",
    "tiles.h5": "coords (N, 2) and features (N, D); TRIDENT and CLAM readers open it",
    "slide_embedding.h5": "features (D,), the slide embedding",
    "tissue.geojson": "tissue polygons; drag it onto the slide in QuPath",
    "slide.json": "what was done, with which settings",
}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("demo")(demo)


def demo(
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("demo"),
    slide: Annotated[Path | None, typer.Option(help="Your slide; else one is generated.")] = None,
) -> None:
    """Run the main job on one slide and name the files to look at.

    Example: thinsection demo --out demo --slide my.svs
    """
    from rich.console import Console

    from thinsection.cli.progress import RunProgress
    from thinsection.pipeline.api import run
    from thinsection.stages.config import RunConfig
    from thinsection.testing.synthetic import write_he_slide

    console = Console()
    if slide is None:
        slide = out / "generated.svs"
        if not slide.exists():
            console.print(f"generating an H&E-like slide: {slide}")
            out.mkdir(parents=True, exist_ok=True)
            write_he_slide(slide, _DEMO_SIZE, seed=7)
    results = out / "results"
    progress = RunProgress(console, num_slides=1)
    with progress.live():
        summary = run([slide], out=results, config=RunConfig(), on_event=progress)
    for result in summary.results:
        console.print(f"\nresults of {result.slide_id} ({summary.seconds:.1f} s):", highlight=False)
        for name, what in _LOOK_AT.items():
            path = results / result.slide_id / name
            if path.exists():
                console.print(f"  {path}  [dim]{what}[/]", highlight=False, soft_wrap=True)
    console.print(f"  {results / 'summary.csv'}  [dim]a row per slide[/]", highlight=False)
    raise typer.Exit(summary.exit_code)
