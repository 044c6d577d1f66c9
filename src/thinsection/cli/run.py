"""`thinsection run`, its stages, `qc`, `aggregate`, `demo`; before them `plan` and `config`."""

import subprocess
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from thinsection.cli.main import with_config
from thinsection.stages.config import AggregateRunConfig, RunConfig
from thinsection.stages.spec import RunSpec, resolve

app = typer.Typer()
_SLIDES = typer.Argument(
    help="Slide files, folders, URLs or cohort CSVs.", show_default=False
)
_OUT = typer.Option(
    "--out", help="Results folder, or URL (s3://, ...).", show_default=False
)
SlidesArgument = Annotated[list[str], _SLIDES]
Slurm = Annotated[bool, typer.Option("--slurm", help="Print #SBATCH lines too.")]

_QC_SLIDES = typer.Argument(help="Slides, folders, or a cohort CSV.")
_PIPELINE = typer.Option(help="Write the pipeline as TOML; without slides, only that.")

_STAGES = {  # command -> the last stage that it runs, and its help
    "run": (
        "aggregate",
        "Everything: tissue, tiles, tile embeddings, slide embedding.",
    ),
    "tissue": (
        "tissue",
        "Find the tissue of each slide: PNG mask and GeoJSON polygons.",
    ),
    "segment": (
        "segment",
        "Name what each px is by a network: labels, outlines, shares.",
    ),
    "tile": (
        "tile",
        "Lay the tile grid of each slide: GRID/tiles/ID.h5 with coordinates.",
    ),
    "embed": ("embed", "Embed the tiles of each slide: GRID/features_ENCODER/ID.h5."),
}
_EXAMPLES = """

Other settings, encoders and slide encoders lie beside each other in one results folder: nothing is
replaced unless --overwrite says so, and nothing is computed twice.

Examples:

    thinsection {name} slide.svs --out results

    thinsection {name} slides/ more.csv --out results --tile-px 512 --tile-mpp 0.5

    thinsection {name} slides/ --out results --config run.toml --memory 1GiB
"""
_DEMO_SIZE = (6000, 5000)  # px; a biopsy at 20x, about 200 tiles
_LOOK_AT = {  # what lies where, relative to the results folder
    "index.html": "the run as a page: open it in a browser, look here first",
    "{grid}/overviews/{id}.png": "the slide, its tissue outlined, its tiles",
    "{grid}/features_{encoder}/{id}.h5": "coords (N, 2) and features (N, D), as TRIDENT has them",
    "{grid}/slide_features_mean-{encoder}/{id}.h5": "features (D,), the slide embedding",
    "slides/{id}/tissue.geojson": "tissue polygons; drag it onto the slide in QuPath",
    "summary.csv": "a row per slide and tile grid",
}


def _add(name: str, stage: str, summary: str) -> None:
    @app.command(name, help=summary + _EXAMPLES.format(name=name))
    @with_config(RunConfig)
    def command(
        slides: SlidesArgument, out: Annotated[str, _OUT], config: Any = None
    ) -> None:
        raise typer.Exit(_run_and_report(slides, out, config, stage))


for _name, (_stage, _summary) in _STAGES.items():
    _add(_name, _stage, _summary)


def _run_and_report(slides: list[str], out: str, config: Any, stage: str) -> int:
    """Runs with progress, prints where the results are, and gives the exit code."""
    from thinsection.slide.cohort import load_cohort

    num_slides = len(
        load_cohort(slides)
    )  # a wrong path or name is said before what is slow
    resolve(config, stage)  # a wrong name is said before torch is imported

    from thinsection.cli.progress import RunProgress
    from thinsection.pipeline.run import run

    console = Console()
    progress = RunProgress(console, num_slides=num_slides)
    told: dict[str, Any] = {"on_event": progress, "on_message": progress.say}
    with progress.bar:
        summary = run(slides, out=out, config=config, stage=stage, **told)
    counts = summary.counts
    line = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    where = f"{out}/index.html, summary.csv"
    console.print(
        f"{line} in {summary.seconds:.1f} s -> {where}", highlight=False, markup=False
    )
    if counts["empty"]:
        hint = "look at their overviews; --allow-empty takes it"
        console.print(
            f"{counts['empty']} without any tile: {hint}", style="red", highlight=False
        )
    if counts["failed"]:
        console.print(f"see {out}/failed.csv", highlight=False, markup=False)
    return summary.exit_code


@app.command("qc")
@with_config("thinsection.pipeline.qc_run:QcRunConfig")
def qc(
    slides: Annotated[list[str] | None, _QC_SLIDES] = None,
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("qc"),
    write_pipeline: Annotated[Path | None, _PIPELINE] = None,
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

    pipeline, notes = chosen_pipeline(config)
    for note in notes:
        print(f"note: {note}")
    if write_pipeline is not None:
        write_text(write_pipeline, dump_pipeline(pipeline))
        print(f"pipeline {pipeline.name!r}: {write_pipeline}")
        if not slides:
            return

    progress = RunProgress(Console(), num_slides=len(load_cohort(slides or [])))
    told: dict[str, Any] = {"on_event": progress, "on_message": progress.say}
    with progress.bar:
        summary = check_slides(slides or [], out=out, config=config, **told)
    for slide_id, rule in summary.failing:
        print(f"{slide_id}: fails {rule}")
    count, failed = len(summary.results), summary.num_failed
    print(f"{count - failed} of {count} slides done; look at {summary.page}")
    raise typer.Exit(3 if failed else 0)


@app.command("aggregate")
@with_config(AggregateRunConfig)
def aggregate(
    folder: Annotated[
        Path, typer.Argument(help="A results folder, or features of others.")
    ],
    out: Annotated[Path | None, typer.Option(help="Other output folder.")] = None,
    config: Any = None,
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

    tell = {"on_result": lambda result: say(describe(result)), "on_message": say}
    results = aggregate_folder(folder, out=out, config=config, **tell)
    failed = sum(result.status == "failed" for result in results)
    name = config.pooling.slide_encoder
    print(
        f"{len(results) - failed} of {len(results)} slides have an embedding of {name}"
    )
    raise typer.Exit(EXIT_SOME_FAILED if failed else 0)


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
    results, config = out / "results", RunConfig()
    print("loading the encoder and reading the slide", flush=True)
    exit_code = _run_and_report([str(slide)], str(results), config, "aggregate")
    names = {
        "id": slide.stem,
        "grid": "256px_0.5mpp",
        "encoder": config.encode.encoders[0],
    }
    print("\nopen these:")
    for template, what in _LOOK_AT.items():
        path = results / template.format(**names)
        if path.exists():
            print(f"  {path}\n      {what}")
    print(f"\nall of it: thinsection ls {results}")
    raise typer.Exit(exit_code)


@app.command("plan")
@with_config(RunConfig)
def plan(slides: SlidesArgument, slurm: Slurm = False, config: Any = None) -> None:
    """Predict peak memory and time from headers and thumbnails; no tile is decoded.

    Example: thinsection plan slides/ --gpu a40 --encoder uni2_h --slurm
    """
    from thinsection.slide.cohort import load_cohort

    load_cohort(slides)  # a wrong path or name is said before what is slow
    spec = resolve(config, "aggregate")  # refuses wrong names before torch is imported

    from thinsection.planning.cost import MARGIN
    from thinsection.planning.plan import plan as predict
    from thinsection.types import format_bytes

    found = predict(
        slides, config=config, on_message=lambda text: typer.echo(text, err=True)
    )
    memory, time, console = found.memory, found.time, Console()
    table = Table("part", "host memory", "GPU memory")
    for name in dict.fromkeys((*memory.host, *memory.gpu)):
        parts = (memory.host.get(name), memory.gpu.get(name))
        table.add_row(name, *("" if p is None else format_bytes(p) for p in parts))
    peaks = (
        format_bytes(memory.host_bytes),
        format_bytes(memory.gpu_bytes) if memory.gpu else "",
    )
    table.add_row(f"peak, margin {MARGIN - 1:.0%}", *peaks, style="bold")
    console.print(table)
    total = (
        f"{len(found.slides)} slides, {sum(s.num_tiles for s in found.slides)} tiles"
    )
    steps = f"start {time.start_s:.0f}, tissue {time.prepare_s:.0f}, decode {time.decode_s:.0f}"
    encode = f"encode {time.encode_s:.0f} {'GPU' if found.gpu else 'CPU'}-s"
    console.print(f"{total}: {time.wall_s:.0f} s ({steps}, {encode})", highlight=False)
    for name, reason in found.unreadable.items():
        console.print(f"{name} does not open: {reason}", style="yellow", markup=False)
    for warning in found.warnings:
        console.print(f"warning: {warning}", style="bold red", markup=False)
    if slurm:
        _show_request(slides, spec, memory.gpu_bytes)


def _show_request(slides: list[str], spec: RunSpec, gpu_bytes: int) -> None:
    """Prints what `thinsection slurm script` would write for the same, and where it fits."""
    from thinsection.jobs.executor import Rung, make_chunks
    from thinsection.jobs.request import SINFO, fitting_nodes, resource_directives
    from thinsection.planning.cost import GPUS
    from thinsection.planning.job import run_request
    from thinsection.stages.request import cohort_of

    entries = cohort_of(slides, spec.slides, spec.regions)
    chunks = make_chunks(entries, spec.executor)
    found = run_request(chunks, spec)
    for line in (f"for each of {len(chunks)} array tasks", *found.lines()):
        typer.echo(f"# {line}")
    first = spec.executor.at(Rung())
    for directive in resource_directives(found.request, first):
        typer.echo(f"#SBATCH {directive}")
    named = [part for part in (first.gres or "").split(":")[1:] if not part.isdigit()]
    try:
        how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 30}
        listed = subprocess.run(SINFO, check=True, **how).stdout
    except (OSError, subprocess.SubprocessError):
        typer.echo("# sinfo does not answer here: no word on partitions")
        return

    def suits(name: str) -> bool:
        card = GPUS.get(name)
        return (
            name in (*named, "")
            if named
            else card is None or gpu_bytes <= card.memory_bytes
        )

    fitting = fitting_nodes(listed, found.request, suits=suits)
    for line in fitting or ["no partition has a node that this fits"]:
        typer.echo(f"# {line}")


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
    from thinsection.errors import ConfigError, require
    from thinsection.files.atomic import write_text

    text = dump_toml(
        from_mapping(RunConfig, read_toml(config)) if config else RunConfig()
    )
    if write is None:
        print(text, end="")
        return
    got = f"{str(write)!r}; it exists"
    require(not write.exists(), "write must name a new file", got, error=ConfigError)
    write_text(write, text)
    print(f"wrote {write}")
