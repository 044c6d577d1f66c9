"""`thinsection demo`: the main job on one slide, generated or yours, and where to look."""

from pathlib import Path
from typing import Annotated

import typer

_DEMO_SIZE = (6000, 5000)  # px; a biopsy at 20x, about 200 tiles
_LOOK_AT = {  # what lies where, relative to the results folder
    "{grid}/overviews/{id}.png": "thumbnail, tissue outline and tiles in one picture: look here",
    "{grid}/features_{encoder}/{id}.h5": "coords (N, 2) and features (N, D), as TRIDENT has them",
    "{grid}/slide_features_mean-{encoder}/{id}.h5": "features (D,), the slide embedding",
    "slides/{id}/tissue.geojson": "tissue polygons; drag it onto the slide in QuPath",
    "summary.csv": "a row per slide and tile grid",
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
    from thinsection.cli.run import run_and_report
    from thinsection.stages.config import RunConfig
    from thinsection.testing.synthetic import write_he_slide

    if slide is None:
        slide = out / "generated.svs"
        if not slide.exists():
            print(f"generating an H&E-like slide: {slide}", flush=True)
            out.mkdir(parents=True, exist_ok=True)
            write_he_slide(slide, _DEMO_SIZE, seed=7)
    results = out / "results"
    print("loading the encoder and reading the slide", flush=True)
    config = RunConfig()
    summary = run_and_report([str(slide)], str(results), config, "aggregate")
    names = {"id": slide.stem, "grid": "256px_0.5mpp", "encoder": config.encode.encoders[0]}
    print("\nopen these:")
    for template, what in _LOOK_AT.items():
        path = results / template.format(**names)
        if path.exists():
            print(f"  {path}\n      {what}")
    print(f"\nall of it: thinsection ls {results}")
    raise typer.Exit(summary.exit_code)
