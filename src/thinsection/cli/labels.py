"""`thinsection labels` and `audit`: checks of labels and cohort before training."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinsection.cli.documents import AuditDocument, LabelsDocument, print_document
from thinsection.cli.flags import EXIT_SOME_LEFT_OUT, AsJson, with_config

if TYPE_CHECKING:
    from thinsection.evaluation.label_report import LabelReport

app = typer.Typer()
_MOST_LINES = 25  # largest number of values of a column that are printed


@app.command("labels")
@with_config(
    "thinsection.predict.config:LabelsRunConfig",
    without=("labels", "site", "subgroup", "positive"),
)
def labels_command(
    table: Annotated[
        Path,
        typer.Argument(
            help="Table of labels: CSV, TSV, Excel (book.xlsx, or book.xlsx#Sheet2) or Parquet."
        ),
    ],
    results: Annotated[
        Path | None,
        typer.Argument(
            help="Results folder. Only the rows of its slides are then read. [default: all rows]",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the rows that can be used to this CSV or TSV, and each change to "
            "NAME_log.csv beside it."
        ),
    ] = None,
    as_json: AsJson = False,
    config: Any = None,
) -> None:
    """Show how a table of labels is read, and what a model would be trained on.

    Each value is listed with its count and how it is read: as a class, missing, an event, censored
    or a number.
    `train` and `predict` read the table in the same way.

    Exit code: 0 the labels can be used, 2 a value must be corrected first; the message names its
    rows.

    \b
    Examples:
      thinsection labels labels.csv --target subtype
      thinsection labels clinical.tsv --target vital_status --time days_to_death \\
          --time days_to_last_follow_up --out clean.csv
    """
    from thinsection.errors import DatasetError
    from thinsection.evaluation.label_report import read_label_report, write_clean_table

    report = read_label_report(replace(config.columns, labels=table), results)
    if as_json:
        print_document(LabelsDocument.of(report))
    else:
        for line in _lines(report):
            print(line)
    faults = [*report.values.problems, *report.values.questions]
    if faults:
        raise DatasetError("; and ".join(faults))
    if out is not None:
        log = write_clean_table(report, out)
        if not as_json:
            print(out)
            print(log)


def _lines(report: "LabelReport") -> list[str]:
    """Lines of the report: notes, a table of values, and the labels for training."""
    table = report.table
    lines = [f"{table.path.name}: {len(table.rows)} rows by {table.key_column}"]
    lines += [f"  {note}" for note in table.notes]
    readings = report.values.readings
    for column in dict.fromkeys(one.column for one in readings):
        rows = [("value", "rows", "reading", "becomes")]
        rows += [
            (one.value or "(empty)", str(one.count), one.reading, one.becomes)
            for one in readings
            if one.column == column
        ]
        num_more = len(rows) - 1 - _MOST_LINES
        del rows[_MOST_LINES + 1 :]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines += ["", column]
        for value, count, reading, becomes in rows:
            cells = (
                value.ljust(widths[0]),
                count.rjust(widths[1]),
                reading.ljust(widths[2]),
                becomes,
            )
            lines.append(("  " + "  ".join(cells)).rstrip())
        if num_more > 0:
            lines.append(f"  ... {num_more} more values")
    lines.append("")
    lines += report.values.notes
    lines += [f"warning: {warning}" for warning in report.values.warnings]
    lines.append(f"task {report.summary}")
    return lines


@app.command("audit")
@with_config("thinsection.evaluation.audit:AuditConfig")
def audit_command(
    data: Annotated[
        Path,
        typer.Argument(
            metavar="RESULTS",
            help="Results folder, or a folder with features of TRIDENT, CLAM, STAMP or slide2vec.",
        ),
    ],
    as_json: AsJson = False,
    config: Any = None,
) -> None:
    """Find leaks and site effects in labels and embeddings, before training.

    It names sites that are associated with the target, copies of slides under other names, ids
    of one patient in two spellings, and columns that equal the target. It also lists what
    it cannot check.

    Exit code: 0 every slide could be read, 3 slides with damaged files were left out.

    \b
    Example:
      thinsection audit results --labels labels.csv --target subtype --site hospital
    """
    from thinsection.evaluation.audit import audit_features

    findings = audit_features(data, config.labels)
    if as_json:
        print_document(AuditDocument.of(findings))
    else:
        for line in findings.lines:
            typer.echo(line)
    raise typer.Exit(EXIT_SOME_LEFT_OUT if findings.left_out else 0)
