"""`thinsection run`, `segment`, `qc`, `aggregate`, `demo`, and `config` for a run's settings."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinsection.cli.flags import (
    AsJson,
    Level,
    Quiet,
    SlidesArgument,
    Verbose,
    chosen_level,
    count_words,
    message_console,
    with_config,
)
from thinsection.config import replace_flat
from thinsection.errors import ConfigError
from thinsection.slide.cohort_table import SlidesConfig
from thinsection.stages.config import (
    AggregateRunConfig,
    RunConfig,
)
from thinsection.types import counted

if TYPE_CHECKING:
    from thinsection.cli.progress import RunProgress
    from thinsection.slide.annotations import RegionsConfig
    from thinsection.slide.cohort import SlideEntry

app = typer.Typer()
Out = Annotated[
    str,
    typer.Option(
        "--out",
        help="Results folder, or its URL (s3://, ...).",
        show_default=False,
    ),
]

# edge in pixels; a biopsy at 20x, about 200 tiles
_DEMO_SIZE = (6000, 5000)
# path in the results folder -> description, for files that the user should open
_DEMO_FILES = {
    "index.html": "the run as a page: open it in a browser, look here first",
    "{grid}/overviews/{id}.jpg": "the slide, its tissue outlined, its tiles",
    "{grid}/features_{encoder}/{id}.h5": "coords (N, 2) and features (N, D), as TRIDENT has them",
    "{grid}/slide_features_mean-{encoder}/{id}.h5": "features (D,), the slide embedding",
    "slides/{id}/tissue.png": "the tissue mask; `thinsection export qupath` writes its outlines",
    "summary.csv": "a row per slide and tile grid",
}


@app.command("run")
@with_config(RunConfig)
def run_slides(
    slides: SlidesArgument,
    out: Out,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    *,
    config: RunConfig,
) -> None:
    """Turn slides into tissue masks, tiles, tile embeddings and slide embeddings.

    OUT gets a page (index.html), a table (summary.csv) and a folder for each kind of result.
    The same command again computes only what is missing. Other settings and encoders get folders
    of their own, so nothing is overwritten.

    Exit code: 0 done, 2 wrong settings, 3 slides failed or lack usable tissue, 4 cannot write OUT.

    \b
    Examples:
      thinsection run slides/ --out results
      thinsection run cohort.csv --out results --encoder uni2_h --tile-px 224 --qc auto
      thinsection run slides/ --out results --until tiles
    """
    from thinsection.stages.spec import with_all_gpus

    level = chosen_level(quiet=quiet, verbose=verbose)
    config = with_all_gpus(config)
    raise typer.Exit(_run_and_report(slides, out, config, level, as_json=as_json))


# settings that `segment` does not have: it sets `until` itself, and makes no later results
_NOT_OF_SEGMENT = (
    "until",
    "roi",
    "tiles",
    "stain",
    "encode",
    "aggregate",
    "memory",
    "write",
)


@app.command("segment")
@with_config(RunConfig, without=_NOT_OF_SEGMENT)
def segment_slides(
    slides: SlidesArgument,
    out: Out,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    *,
    config: RunConfig,
) -> None:
    """Assign a class to every pixel of the slides with a network: epithelium, stroma, ...

    OUT gets the class of each pixel, the outlines of the classes, and the share of each class.

    Exit code: 0 all slides done, 3 some failed.

    \b
    Example:
      thinsection segment slides/ --out results --segmenter lavlab-shell
    """
    config = replace_flat(config, {"until": "segments"})
    level = chosen_level(quiet=quiet, verbose=verbose)
    raise typer.Exit(_run_and_report(slides, out, config, level, as_json=as_json))


def _cohort_and_progress(
    slides: list[str],
    settings: SlidesConfig,
    regions: "RegionsConfig | None",
    level: Level,
    *,
    as_json: bool = False,
) -> "tuple[tuple[SlideEntry, ...], RunProgress]":
    """Slides of the arguments, and their progress bar, which has printed notes on the cohort."""
    from thinsection.cli.progress import RunProgress
    from thinsection.stages.spec import cohort_of

    messages: list[str] = []
    entries = cohort_of(slides, settings, regions, messages.append)
    console = message_console(as_json=as_json)
    progress = RunProgress(console, len(entries), level=level)
    for message in messages:
        progress.say(message)
    return entries, progress


def _run_and_report(
    slides: list[str],
    out: str,
    config: RunConfig,
    level: Level = "usual",
    *,
    as_json: bool = False,
) -> int:
    """Runs with a progress bar, prints the path of the results, and returns the exit code."""
    from thinsection.stages.spec import resolve

    # a wrong path or name is said before slow work
    resolve(config)
    entries, progress = _cohort_and_progress(
        slides, config.slides, config.regions, level, as_json=as_json
    )
    console = progress.bar.console

    from thinsection.run.run import run

    with progress.bar:
        summary = run(
            entries,
            out=out,
            config=config,
            on_event=progress,
            on_message=progress.say,
        )
    progress.say_skipped()
    counts = summary.counts
    if level != "quiet":
        console.print(
            f"{count_words(counts)} in {summary.seconds:.1f} s -> {out}/index.html, summary.csv",
            markup=False,
        )
    if counts["empty"]:
        console.print(
            f"{counted(counts['empty'], 'slide')} without any tile: look at the tissue in "
            f"{out}/index.html; --allow-empty accepts such slides",
            style="red",
            markup=False,
        )
    if counts["failed"]:
        console.print(f"see {out}/failed.csv", markup=False)
    for slide_id, why in summary.unusable:
        console.print(_unusable_line(slide_id, why), style="red", markup=False)
    if as_json:
        # imports pydantic, which takes a tenth of the time of a run with nothing to do
        from thinsection.cli.documents import RunDocument, print_document

        print_document(RunDocument.of(summary))
    return summary.exit_code


@app.command("qc")
@with_config("thinsection.run.qc_run:QcRunConfig")
def qc(
    slides: Annotated[
        list[str] | None,
        typer.Argument(help="Slide files, folders, URLs, or cohort tables (CSV)."),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            help="Results folder. Use that of `thinsection run` if you will run the slides later."
        ),
    ] = Path("qc"),
    write_pipeline: Annotated[
        Path | None,
        typer.Option(
            help="Write the pipeline of checks to this TOML file, to edit it. Without slides, only "
            "this file is written."
        ),
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    *,
    config: Any = None,
) -> None:
    """Check slides for pen, blur, folds, bubbles and dirt.

    OUT gets a page with a picture and a verdict for each slide, a table of the measures, and a mask
    of the usable tissue. `thinsection run --qc` with the same --out uses these masks.

    Exit code: 0 all slides done, 3 some slides failed, or have the verdict 'exclude' although no
    rule of --qc-fail excludes them.

    \b
    Examples:
      thinsection qc slides/ --out results --workers 4
      thinsection qc slides/ --out results --qc histoqc-light
      thinsection qc slides/ --out results --from-histoqc config.ini --write histoqc
    """
    from thinsection.files.atomic import write_text
    from thinsection.qc.histoqc_pictures import notes_on_absent
    from thinsection.qc.pipeline import dump_pipeline
    from thinsection.run.qc_run import check_slides, chosen_pipeline

    slides = slides or []
    level = chosen_level(quiet=quiet, verbose=verbose)
    pipeline = chosen_pipeline(config)
    if write_pipeline is not None:
        write_text(write_pipeline, dump_pipeline(pipeline))
        print(f"pipeline {pipeline.name!r}: {write_pipeline}")
        if not slides:
            for note in notes_on_absent(pipeline.checks):
                print(f"note: {note}")
            return

    entries, progress = _cohort_and_progress(slides, config.slides, None, level)
    with progress.bar:
        summary = check_slides(
            entries, out=out, config=config, on_event=progress, on_message=progress.say
        )
    progress.say_skipped()
    for slide_id, rule in summary.failing:
        print(f"{slide_id}: fails {rule}")
    num_slides = len(summary.results)
    num_done = num_slides - summary.num_failed
    if level != "quiet":
        print(f"{num_done} of {num_slides} slides done; look at {summary.page}")
    for slide_id, why in summary.unusable:
        print(_unusable_line(slide_id, why))
    raise typer.Exit(3 if summary.num_failed or summary.unusable else 0)


def _unusable_line(slide_id: str, why: str) -> str:
    """Line about a slide with the verdict 'exclude' that no rule excludes."""
    return f"{slide_id}: quality control advises to exclude it: {why}"


@app.command("aggregate")
@with_config(AggregateRunConfig)
def aggregate(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Results folder, or a folder with features of TRIDENT, CLAM, ..."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the slide embeddings. [default: the folder of the tile embeddings]"
        ),
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    *,
    config: AggregateRunConfig,
) -> None:
    """Pool stored tile embeddings into one embedding for each slide, and for each patient.

    Slides are not read again. The same command again pools only what is missing.

    Exit code: 0 every slide has its embedding, 3 some failed.

    \b
    Examples:
      thinsection aggregate results --slide-encoder max
      thinsection aggregate trident/20x_512px/features_conch_v15 --slide-encoder titan
      thinsection aggregate results --slide-encoder mean --patients late
    """
    from thinsection.cli.progress import RunProgress
    from thinsection.run.ending import EXIT_SOME_FAILED
    from thinsection.run.pooling import aggregate_folder, loaded_encoder
    from thinsection.store.outcome import SlideResult, describe, slides_done

    level = chosen_level(quiet=quiet, verbose=verbose)
    # its lines without its bar
    progress = RunProgress(message_console(as_json=False), 0, level=level)
    results = aggregate_folder(
        folder,
        out=out,
        config=config,
        on_result=progress.say_result,
        on_message=progress.say,
    )
    progress.say_skipped()
    num_failed = sum(result.status == "failed" for result in results)
    name = config.pooling.slide_encoder
    if level != "quiet":
        print(f"{slides_done(results)} have an embedding of {name}")
    if config.pooling.patients != "none":
        from thinsection.run.patients import write_patients

        def say_failed(result: SlideResult) -> None:
            if result.status == "failed":
                progress.say(describe(result))

        patients = write_patients(
            folder,
            loaded_encoder(config.pooling),
            pooling=config.pooling,
            out=out,
            on_result=say_failed,
            on_message=progress.say,
        )
        if level != "quiet":
            print(f"{slides_done(patients, 'patients')} have an embedding of {name}")
        num_failed += sum(result.status == "failed" for result in patients)
    raise typer.Exit(EXIT_SOME_FAILED if num_failed else 0)


@app.command("demo")
def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for the slide and its results.")
    ] = Path("demo"),
    slide: Annotated[
        Path | None,
        typer.Option(
            help="A slide of your own. [default: a generated one]", show_default=False
        ),
    ] = None,
) -> None:
    """Run everything on one slide, and list the files to look at.

    \b
    Example:
      thinsection demo --out demo
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
    exit_code = _run_and_report([str(slide)], str(results), config)
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
    write: Annotated[
        Path | None,
        typer.Option(help="Write the settings to this new file, not to the screen."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Check this TOML file and start from its settings."),
    ] = None,
) -> None:
    """Print every setting of `thinsection run` as TOML, with its default and its meaning.

    Edit the file and pass it on: thinsection run slides/ --out results --config run.toml

    \b
    Example:
      thinsection config --write run.toml
    """
    from thinsection.config import config_of_file, dump_toml
    from thinsection.files.atomic import write_text

    settings = config_of_file(RunConfig, config) if config else RunConfig()
    text = dump_toml(settings)
    if write is None:
        print(text, end="")
        return
    if write.exists():
        raise ConfigError(f"write must name a new file, got {str(write)!r}; it exists")
    write_text(write, text)
    print(f"wrote {write}")
