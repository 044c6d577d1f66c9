"""`thinsection qc`: HistoQC's checks and our own, on any number of slides."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("qc")(qc)


def qc(  # noqa: PLR0917 - typer passes by name
    slides: Annotated[
        list[str] | None, typer.Argument(help="Slides, folders, or a cohort CSV.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("qc"),
    pipeline: Annotated[
        str, typer.Option(help="default, extended, light, ihc, clinical, v2.1, or a .toml file.")
    ] = "default",
    from_histoqc: Annotated[
        Path | None, typer.Option(help="Take the pipeline from HistoQC's config.ini.")
    ] = None,
    write_pipeline: Annotated[
        Path | None, typer.Option(help="Write the pipeline as TOML; without slides, only that.")
    ] = None,
    write: Annotated[
        list[str] | None, typer.Option(help="Further outputs: histoqc (results.tsv, pictures).")
    ] = None,
    qc_fail: Annotated[
        list[str] | None, typer.Option(help="A slide fails where this holds: pixels_to_use<1000.")
    ] = None,
    slide_mpp: Annotated[str, typer.Option(help="µm/px where files do not say: 0.25.")] = "",
    reader: Annotated[str, typer.Option(help="auto, openslide, tiff, cucim or image.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda[:index].")] = "cpu",
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    resume: Annotated[bool, typer.Option(help="Keep what is finished.")] = True,
) -> None:
    """Check slides for pen, blur, folds, air, dirt; write masks, scores and a contact sheet.

    Exit code: 0 all slides done, 3 some failed.

    Examples:

        thinsection qc slides/ --out qc --workers 4

        thinsection qc slides/ --out qc --pipeline extended --qc-fail "pixels_to_use<1000"

        thinsection qc slides/ --out qc --from-histoqc config.ini --write histoqc
    """
    from thinsection.errors import ConfigError
    from thinsection.qc import load_pipeline, parse_rule
    from thinsection.qc.from_histoqc import pipeline_from_ini
    from thinsection.qc.pipeline import dump_pipeline
    from thinsection.run.cohort import load_cohort, parse_mpp
    from thinsection.run.qc_batch import QcSettings, qc_slides, write_tables
    from thinsection.store.atomic import write_text

    unknown = sorted(set(write or ()) - {"histoqc"})
    if unknown:
        raise ConfigError(f"write must be histoqc, got {unknown[0]!r}")
    rules = [parse_rule(text) for text in qc_fail or ()]
    if from_histoqc:
        chosen, notes = pipeline_from_ini(from_histoqc)
        print("\n".join(f"note: {note}" for note in notes), end="\n" if notes else "")
    else:
        chosen = load_pipeline(pipeline)
    if write_pipeline is not None:
        write_text(write_pipeline, dump_pipeline(chosen))
        print(f"pipeline {chosen.name!r}: {write_pipeline}")
        if not slides:
            return
    mpp = parse_mpp(slide_mpp, where="--slide-mpp") if slide_mpp else None
    entries = load_cohort(slides or [], slide_mpp=mpp)
    settings = QcSettings(
        pipeline=chosen, device=device, workers=workers, reader=reader, resume=resume
    )
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    reports = []
    for report in qc_slides(entries, out, settings):
        reports.append(report)
        print(_describe(report.slide_id, report.status, report.error or report.row), flush=True)
    headers = {
        "start_time": started,
        "pipeline": " ".join(f"{c.kind}:{c.name}" for c in chosen.checks),
        "outdir": str(out.resolve()),
        "config_file": str(from_histoqc or pipeline),
        "command_line_args": " ".join(sys.argv[1:]),
    }
    order = {entry.slide_id: n for n, entry in enumerate(entries)}
    rows = [r.row for r in sorted(reports, key=lambda r: order[r.slide_id])]
    failed_by_rule = write_tables(
        rows, out, rules=rules, histoqc_headers=headers if "histoqc" in (write or ()) else None
    )
    failed = sum(report.status == "failed" for report in reports)
    for slide_id, rule in failed_by_rule:
        print(f"{slide_id}: fails {rule}")
    print(f"{len(rows) - failed} of {len(rows)} slides done; look at {out / 'qc.html'}")
    raise typer.Exit(3 if failed else 0)


def _describe(slide_id: str, status: str, outcome: object) -> str:
    if isinstance(outcome, str):
        return f"{slide_id}: {status}: {outcome}"
    assert isinstance(outcome, dict)
    warnings = outcome.get("warnings")
    note = f" ({warnings})" if warnings else ""
    return f"{slide_id}: {status}, {outcome['pixels_to_use']:.0f} px to use{note}"
