"""`thinsection qc`: HistoQC's checks and our own, on any number of slides."""

from pathlib import Path
from typing import Annotated, Any

import typer

from thinsection.cli.options import with_config
from thinsection.pipeline.qc_run import QcRunConfig, check_slides, chosen_pipeline

app = typer.Typer()
SLIDES = typer.Argument(help="Slides, folders, or a cohort CSV.")
PIPELINE = typer.Option(help="Write the pipeline as TOML; without slides, only that.")


@app.command("qc")
@with_config(QcRunConfig)
def qc(
    slides: Annotated[list[str] | None, SLIDES] = None,
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("qc"),
    write_pipeline: Annotated[Path | None, PIPELINE] = None,
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
    from rich.console import Console

    from thinsection.cli.progress import RunProgress
    from thinsection.files.atomic import write_text
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
