"""`thinsection run`, its stages, `qc`, `aggregate`, `demo`, and `config` for their settings."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from thinsection.cli.flags import with_config
from thinsection.errors import ConfigError
from thinsection.stages.config import AggregateRunConfig, RunConfig
from thinsection.stages.spec import resolve

app = typer.Typer()
SlidesArgument = Annotated[
    list[str],
    typer.Argument(
        help="Slide files, folders, URLs or cohort CSVs.", show_default=False
    ),
]
Out = Annotated[
    str,
    typer.Option(
        "--out", help="Results folder, or URL (s3://, ...).", show_default=False
    ),
]

_EXAMPLES = """

Other settings, encoders and slide encoders lie beside each other in one results folder: nothing is
replaced unless --overwrite says so, and nothing is computed twice.

Examples:

    thinsection {name} slide.svs --out results

    thinsection {name} slides/ more.csv --out results --tile-px 512 --tile-mpp 0.5

    thinsection {name} slides/ --out results --config run.toml --memory 1GiB
"""
# edge in pixels; a biopsy at 20x, about 200 tiles
_DEMO_SIZE = (6000, 5000)
# path in the results folder -> description, for files that the user should open
_DEMO_FILES = {
    "index.html": "the run as a page: open it in a browser, look here first",
    "{grid}/overviews/{id}.png": "the slide, its tissue outlined, its tiles",
    "{grid}/features_{encoder}/{id}.h5": "coords (N, 2) and features (N, D), as TRIDENT has them",
    "{grid}/slide_features_mean-{encoder}/{id}.h5": "features (D,), the slide embedding",
    "slides/{id}/tissue.geojson": "tissue polygons; drag it onto the slide in QuPath",
    "summary.csv": "a row per slide and tile grid",
}


def _help(name: str, summary: str) -> str:
    """Help of a command that runs slides up to a stage."""
    return summary + _EXAMPLES.format(name=name)


@app.command(
    "run",
    help=_help("run", "Everything: tissue, tiles, tile embeddings, slide embedding."),
)
@with_config(RunConfig)
def run_all(slides: SlidesArgument, out: Out, *, config: RunConfig) -> None:
    raise typer.Exit(_run_and_report(slides, out, config, "aggregate"))


@app.command(
    "tissue",
    help=_help(
        "tissue", "Find the tissue of each slide: PNG mask and GeoJSON polygons."
    ),
)
@with_config(RunConfig)
def run_tissue(slides: SlidesArgument, out: Out, *, config: RunConfig) -> None:
    raise typer.Exit(_run_and_report(slides, out, config, "tissue"))


@app.command(
    "segment",
    help=_help(
        "segment", "Name what each px is by a network: labels, outlines, shares."
    ),
)
@with_config(RunConfig)
def run_segment(slides: SlidesArgument, out: Out, *, config: RunConfig) -> None:
    raise typer.Exit(_run_and_report(slides, out, config, "segment"))


@app.command(
    "tile",
    help=_help(
        "tile", "Lay the tile grid of each slide: GRID/tiles/ID.h5 with coordinates."
    ),
)
@with_config(RunConfig)
def run_tile(slides: SlidesArgument, out: Out, *, config: RunConfig) -> None:
    raise typer.Exit(_run_and_report(slides, out, config, "tile"))


@app.command(
    "embed",
    help=_help("embed", "Embed the tiles of each slide: GRID/features_ENCODER/ID.h5."),
)
@with_config(RunConfig)
def run_embed(slides: SlidesArgument, out: Out, *, config: RunConfig) -> None:
    raise typer.Exit(_run_and_report(slides, out, config, "embed"))


def _run_and_report(slides: list[str], out: str, config: RunConfig, stage: str) -> int:
    """Runs with a progress bar, prints the path of the results, and returns the exit code."""
    from thinsection.slide.cohort import load_cohort

    # report a wrong path or name before slow work
    num_slides = len(load_cohort(slides))
    resolve(config, stage)

    from thinsection.cli.progress import RunProgress
    from thinsection.pipeline.run import run

    console = Console(highlight=False)
    progress = RunProgress(console, num_slides=num_slides)
    with progress.bar:
        summary = run(
            slides,
            out=out,
            config=config,
            stage=stage,
            on_event=progress,
            on_message=progress.say,
        )
    counts = summary.counts
    ends = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    console.print(
        f"{ends} in {summary.seconds:.1f} s -> {out}/index.html, summary.csv",
        markup=False,
    )
    if counts["empty"]:
        hint = "look at their overviews; --allow-empty takes it"
        console.print(f"{counts['empty']} without any tile: {hint}", style="red")
    if counts["failed"]:
        console.print(f"see {out}/failed.csv", markup=False)
    return summary.exit_code


@app.command("qc")
@with_config("thinsection.pipeline.qc_run:QcRunConfig")
def qc(
    slides: Annotated[
        list[str] | None, typer.Argument(help="Slides, folders, or a cohort CSV.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("qc"),
    write_pipeline: Annotated[
        Path | None,
        typer.Option(help="Write the pipeline as TOML; without slides, only that."),
    ] = None,
    config: Any = None,
) -> None:
    """Check slides for pen, blur, folds, air, dirt; write masks, scores and a contact sheet.

    Exit code: 0 all slides done, 3 some failed.

    Examples:

        thinsection qc slides/ --out qc --workers 4

        thinsection qc slides/ --out qc --executor slurm --job-cpus 1 --walltime 01:00:00

        thinsection qc slides/ --out qc --qc-fail "pixels_to_use<1000"

        thinsection qc slides/ --out qc --from-histoqc config.ini --write histoqc
    """
    from thinsection.cli.progress import RunProgress
    from thinsection.files.atomic import write_text
    from thinsection.pipeline.qc_run import check_slides, chosen_pipeline
    from thinsection.qc.pipeline import dump_pipeline
    from thinsection.slide.cohort import load_cohort

    slides = slides or []
    pipeline, notes = chosen_pipeline(config)
    for note in notes:
        print(f"note: {note}")
    if write_pipeline is not None:
        write_text(write_pipeline, dump_pipeline(pipeline))
        print(f"pipeline {pipeline.name!r}: {write_pipeline}")
        if not slides:
            return

    progress = RunProgress(Console(), num_slides=len(load_cohort(slides)))
    with progress.bar:
        summary = check_slides(
            slides, out=out, config=config, on_event=progress, on_message=progress.say
        )
    for slide_id, rule in summary.failing:
        print(f"{slide_id}: fails {rule}")
    num_slides = len(summary.results)
    num_done = num_slides - summary.num_failed
    print(f"{num_done} of {num_slides} slides done; look at {summary.page}")
    raise typer.Exit(3 if summary.num_failed else 0)


@app.command("aggregate")
@with_config(AggregateRunConfig)
def aggregate(
    folder: Annotated[
        Path, typer.Argument(help="A results folder, or features of others.")
    ],
    out: Annotated[Path | None, typer.Option(help="Other output folder.")] = None,
    *,
    config: AggregateRunConfig,
) -> None:
    """Pool tile embeddings that are there into one embedding per slide.

    Exit code 0: every slide has its embedding; 3: some failed.

    Examples:

        thinsection aggregate results --slide-encoder max

        thinsection aggregate trident/20x_512px/features_conch_v15 --slide-encoder titan

        thinsection aggregate results --slide-encoder titan --executor dask --workers 4
    """
    from thinsection.cli.progress import say
    from thinsection.pipeline.ending import EXIT_SOME_FAILED
    from thinsection.pipeline.pooling import aggregate_folder
    from thinsection.pipeline.results import describe

    results = aggregate_folder(
        folder,
        out=out,
        config=config,
        on_result=lambda result: say(describe(result)),
        on_message=say,
    )
    num_failed = sum(result.status == "failed" for result in results)
    num_done = len(results) - num_failed
    name = config.pooling.slide_encoder
    print(f"{num_done} of {len(results)} slides have an embedding of {name}")
    raise typer.Exit(EXIT_SOME_FAILED if num_failed else 0)


@app.command("demo")
def demo(
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("demo"),
    slide: Annotated[
        Path | None, typer.Option(help="Your slide; else one is generated.")
    ] = None,
) -> None:
    """Run the main job on one slide and name the files to look at.

    Example: thinsection demo --out demo --slide my.svs
    """
    from thinsection.testing.synthetic import write_he_slide

    if slide is None:
        slide = out / "generated.svs"
        if not slide.exists():
            print(f"generating an H&E-like slide: {slide}", flush=True)
            out.mkdir(parents=True, exist_ok=True)
            write_he_slide(slide, _DEMO_SIZE, seed=7)
    results = out / "results"
    config = RunConfig()
    print("loading the encoder and reading the slide", flush=True)
    exit_code = _run_and_report([str(slide)], str(results), config, "aggregate")
    print("\nopen these:")
    for template, description in _DEMO_FILES.items():
        path = results / template.format(
            id=slide.stem, grid="256px_0.5mpp", encoder=config.encode.encoders[0]
        )
        if path.exists():
            print(f"  {path}\n      {description}")
    print(f"\nall of it: thinsection ls {results}")
    raise typer.Exit(exit_code)


@app.command("config")
def show_config(
    write: Annotated[Path | None, typer.Option(help="Write to this new file.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="Start from this TOML file, checked.")
    ] = None,
) -> None:
    """Show every setting of `thinsection run` as commented TOML.

    Example: thinsection config --write run.toml
    """
    from thinsection.config import dump_toml, from_mapping, read_toml
    from thinsection.files.atomic import write_text

    settings = from_mapping(RunConfig, read_toml(config)) if config else RunConfig()
    text = dump_toml(settings)
    if write is None:
        print(text, end="")
        return
    if write.exists():
        raise ConfigError(f"write must name a new file, got {str(write)!r}; it exists")
    write_text(write, text)
    print(f"wrote {write}")
