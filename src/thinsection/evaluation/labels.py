"""Labels joined to stored embeddings: the cases that can train, and why the others cannot."""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinsection.config import nearest
from thinsection.errors import ConfigError, DatasetError
from thinsection.evaluation.cases import (
    CASE_COLUMNS,
    Groups,
    Unit,
    alike_names,
    case_rows,
    group_rows,
    listed_names,
    one_per_case,
    patient_of,
    site_of,
    slides_and_patients,
    spelling_notes,
    take_rows,
)
from thinsection.evaluation.cell_values import (
    ValueReading,
    class_name,
    missing_words,
    ordered_classes,
)
from thinsection.evaluation.embeddings import FeatureFiles, feature_files
from thinsection.evaluation.label_values import (
    LabelCell,
    LabelsConfig,
    LabelValues,
    read_values,
)
from thinsection.evaluation.tables import LabelTable, TextRow, read_label_table
from thinsection.evaluation.target import INTERVALS, Kind, PositiveRule, Target
from thinsection.files.missing_cells import is_missing
from thinsection.files.tables import open_table
from thinsection.results.folder import open_results
from thinsection.slide.ids import KnownIds
from thinsection.store.ledger import SLIDES
from thinsection.types import Floats, counted


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """Cases with their slides and labels; plain values."""

    target: Target
    place: str  # where the embeddings are stored
    cases: tuple[str, ...]  # ids of the cases
    # slide ids of each case, in the order of its `files`
    slides: tuple[tuple[str, ...], ...]
    files: tuple[tuple[str, ...], ...]  # files of embeddings of each case
    # Target values of each case. Classes: the index of the class. Multilabel: 0, 1 or None (blank)
    # for each label. Regression: the value. Survival: event and time.
    values: tuple[tuple[float | None, ...], ...]
    patients: tuple[str, ...]  # patient of each case; a patient may have several cases
    # kind of the ids in `patients`: patients, or cases or slides if the patients are unknown
    unit: Unit
    sites: tuple[str, ...] = ()  # site of each case; () if they are unknown
    subgroup_columns: tuple[str, ...] = ()
    # for each of these columns, the subgroup of each case
    subgroups: tuple[tuple[str, ...], ...] = ()
    covariate_columns: tuple[str, ...] = ()
    # for each case, its numbers in these columns; None where it has none
    covariates: tuple[tuple[float | None, ...], ...] = ()
    unlabelled: int = 0  # number of rows of the table without a label
    without_embeddings: int = 0  # number of labelled rows without embeddings
    # sentences for the user: which rows matched embeddings, which did not, and why
    # notes for the user on cases that were left out, and on what was assumed
    account: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    reading: tuple[ValueReading, ...] = ()  # how each value of the table is read
    questions: tuple[str, ...] = ()  # questions to answer before a model is trained
    # (case, class) of each case whose class the tested model does not have
    new_classes: tuple[tuple[str, str], ...] = ()

    def take(self, rows: Sequence[int]) -> "Cohort":
        """Some of the cases."""
        columns = (
            "cases",
            "slides",
            "files",
            "values",
            "patients",
            "sites",
            "covariates",
        )
        subgroups = tuple(tuple(column[i] for i in rows) for column in self.subgroups)
        return take_rows(self, rows, columns, subgroups=subgroups)

    @property
    def array(self) -> Floats:
        """`values`, (n, T), NaN for blank labels."""
        return np.array(self.values, dtype=np.float64)

    @property
    def covariate_array(self) -> Floats | None:
        """`covariates`, (n, C), NaN where there is no value; None without columns."""
        if not self.covariate_columns:
            return None
        return np.array(self.covariates, dtype=np.float64)

    @property
    def paths(self) -> list[list[Path]]:
        """`files` as paths."""
        return [[Path(file) for file in files] for files in self.files]

    @property
    def groups(self) -> Groups:
        """The patient of each case: the unit of splits and of the bootstrap."""
        return Groups(self.unit, self.patients)

    @property
    def strata(self) -> npt.NDArray[np.int64]:
        """Strata of the cases, see `Target.strata`."""
        return self.target.strata(self.array)


def items_if_several(items: tuple[str, ...]) -> tuple[str, ...]:
    """Slides (or files) of a case if there are several; () if the case id is enough to find it."""
    return items if len(items) > 1 else ()


def read_cohort(data: Path, config: LabelsConfig) -> Cohort:
    """The cases that have both embeddings and labels, with an account of the others.

    A row labels one slide (slide_id), or one case (case_id) with all its slides. The patient of a
    slide comes from the first of these that is known: its patient_id in the table, the cohort of
    the results, its case_id, its barcode. Otherwise the slide counts as a patient of its own.

    Memory: the table, and some 100 bytes a slide.

    Raises DatasetError, ConfigError: no such column, nothing matches, different labels in a case.
    """
    embeddings = feature_files(data, config.features)
    return join_labels(embeddings, known_patients(data), config)


def check_label_table(config: LabelsConfig) -> None:
    """Checks that the label table can be read and has its columns; embeddings are not read.

    Memory: the table. Raises DatasetError, ConfigError: no table, no target, no such column.
    """
    read_labels_of(config, (), {})


def read_labels_of(
    config: LabelsConfig, slides: Collection[str], patient_by_slide: Mapping[str, str]
) -> LabelTable:
    """The table of labels, which has all columns of the settings, see `read_label_table`."""
    if not config.labels:
        raise ConfigError('labels must be set, got none; pass labels="FILE"')
    if not config.target:
        columns = open_table(Path(config.labels)).columns
        raise ConfigError(
            'target must be set, got none; pass target="COLUMN", such as one of '
            f"{', '.join(columns)}"
        )
    if not {*config.target}.isdisjoint(config.times):
        raise ConfigError(
            f"time must be another column than target, got {config.target[0]!r} for both"
        )
    site = (config.site,) if config.site else ()
    columns = (*config.target, *config.times, *site, *config.subgroup)
    return read_label_table(Path(config.labels), columns, slides, patient_by_slide)


def join_labels(
    embeddings: FeatureFiles,
    patient_by_slide: Mapping[str, str],
    config: LabelsConfig,
    trained: Target | None = None,
) -> Cohort:
    """Joins labels to embeddings, see `read_cohort`.

    Args:
        embeddings: files of slides, slides without a file, and the place of both.
        patient_by_slide: slide id -> patient id, for slides whose patient the results know.
        config: the table, and its columns.
        trained: target of the model that is tested on these cases; its classes are used.
    """
    files = embeddings.files
    # slide -> why it has no embeddings; the reasons of damaged slides are reported elsewhere
    reason_without_embeddings = embeddings.lacking | dict.fromkeys(
        embeddings.damaged, "left out"
    )
    place = embeddings.place
    all_slides = {*files, *reason_without_embeddings}
    table = read_labels_of(config, all_slides, patient_by_slide)
    slides_of_rows = table.slides_of_rows(files, patient_by_slide)
    matched = [i for i, slides in enumerate(slides_of_rows) if slides]
    label_values = read_values(table, matched, config, trained)
    label_values, new_rows = _without_new_classes(
        label_values, trained, table.path.name
    )
    rows_of_new_classes = [(table.name(i), name) for i, name in new_rows.items()]
    unlabelled = [i for i in range(len(table.rows)) if i not in label_values.labelled]
    blank_lines = []
    if unlabelled:
        blank = [table.rows[i] for i in unlabelled]
        names = [table.name(i) for i in unlabelled]
        blank_lines.append(missing_words(blank, config.target, names))
    # ids that a row may have meant, for messages; a case_id is usually the patient's
    if table.key == "slide_id":
        ids = KnownIds(all_slides)
    else:
        ids = KnownIds(
            {patient_by_slide.get(slide) or patient_of(slide) for slide in all_slides}
        )
    without_embeddings = [
        table.why_unmatched(i, ids, reason_without_embeddings)
        for i in range(len(table.rows))
        if not slides_of_rows[i] and i in label_values.labelled
    ]
    pairs = [(slide, i) for i in label_values.rows for slide in slides_of_rows[i]]
    used_slides = {slide for slide, _ in pairs}
    slides_of_new_classes = {slide for i in new_rows for slide in slides_of_rows[i]}
    key_noun = table.key.removesuffix("_id")
    lines = [
        f"{counted(len(table.rows), 'row')} in {table.path.name}, matched by "
        f"{table.key_column} to {counted(len(files), 'slide')} in {place}",
        *table.notes,
        *_count_line(without_embeddings, f"labelled {key_noun}", "no embeddings for"),
        *blank_lines,
        *label_values.notes,
        *_count_line(
            [f"{name} ({row})" for row, name in rows_of_new_classes],
            key_noun,
            "left out",
            " of a class that the model does not have",
        ),
        *_count_line(
            sorted({*files} - used_slides - slides_of_new_classes),
            "slide",
            "no label for",
            " with embeddings",
        ),
    ]
    if label_values.problems:
        raise DatasetError("; and ".join(label_values.problems))
    if not pairs:
        raise DatasetError(
            f"labels must match embeddings, got no match; {'; '.join(lines)}"
        )
    rows_by_pair = [table.rows[i] for _, i in pairs]
    slide_rows = list(zip((slide for slide, _ in pairs), rows_by_pair, strict=True))
    where = table.path.name
    cases, groups = _cases_and_patients(slide_rows, patient_by_slide, where)
    cell_by_row = dict(zip(label_values.rows, label_values.cells, strict=True))
    labels = one_per_case(
        [cell_by_row[i] for _, i in pairs], cases, config.columns, where
    )
    target, values, summary = target_and_values(
        label_values.kind, list(labels.values()), config, where, trained
    )
    slides_by_case, patients = slides_and_patients(
        [slide for slide, _ in pairs], cases, groups, where
    )
    slides = [tuple(dict.fromkeys(names)) for names in slides_by_case.values()]
    kind: str = target.kind
    if config.task == "auto":
        kind += " (inferred from its values)"
    use = "training" if trained is None else "testing"
    patient_lines, warnings = _patient_notes(slide_rows, groups)
    sites, site_lines = _sites(slide_rows, cases, config.site, where)
    return Cohort(
        target=target,
        place=place,
        cases=tuple(labels),
        slides=tuple(slides),
        files=tuple(
            tuple(str(files[slide].absolute()) for slide in names) for names in slides
        ),
        values=tuple(
            tuple(None if math.isnan(value) else value for value in row)
            for row in values.tolist()
        ),
        patients=patients,
        unit=groups.unit,
        sites=sites,
        subgroup_columns=config.subgroup,
        subgroups=_subgroups(slide_rows, cases, config.subgroup, where),
        unlabelled=len(unlabelled),
        without_embeddings=len(without_embeddings),
        account=(
            f"{counted(len(used_slides), 'slide')} of {counted(len(labels), 'case')} for {use}",
            *lines,
            *patient_lines,
            *site_lines,
            f"{', '.join(config.columns)}: {kind}: {summary}",
        ),
        warnings=(*label_values.warnings, *warnings),
        reading=label_values.readings,
        questions=label_values.questions,
        new_classes=_cases_of_new_classes(
            table, new_rows, slides_of_rows, patient_by_slide
        ),
    )


def _without_new_classes(
    label_values: LabelValues, trained: Target | None, where: str
) -> tuple[LabelValues, dict[int, str]]:
    """Labels whose class the tested model has; and the class of each other row.

    A class that differs from one of the model's only in capital letters stays in the labels;
    `encode_labels` refuses it.

    Raises DatasetError: the model has the class of no row.
    """
    if trained is None or not trained.exclusive:
        return label_values, {}
    model_classes = {name.casefold() for name in trained.names}
    class_of_new_row: dict[int, str] = {}
    for row, (text,) in zip(label_values.rows, label_values.cells, strict=True):
        if str(text) not in trained.names and str(text).casefold() not in model_classes:
            class_of_new_row[row] = str(text)
    if label_values.rows and len(class_of_new_row) == len(label_values.rows):
        new_classes = dict.fromkeys(class_of_new_row.values())
        raise DatasetError(
            f"label must be one of {', '.join(trained.names)}, got "
            f"{listed_names([repr(name) for name in new_classes])} in {where}"
        )
    kept = [i for i, row in enumerate(label_values.rows) if row not in class_of_new_row]
    kept_labels = replace(
        label_values,
        rows=tuple(label_values.rows[i] for i in kept),
        cells=tuple(label_values.cells[i] for i in kept),
    )
    return kept_labels, class_of_new_row


def _cases_of_new_classes(
    table: LabelTable,
    new_rows: Mapping[int, str],
    slides_of_rows: Sequence[Sequence[str]],
    patient_by_slide: Mapping[str, str],
) -> tuple[tuple[str, str], ...]:
    """(case, class) of each case whose class the model does not have, once for all its slides."""
    if not new_rows:
        return ()
    pairs = [(slide, row) for row in new_rows for slide in slides_of_rows[row]]
    slide_rows = [(slide, table.rows[row]) for slide, row in pairs]
    cases, _ = _cases_and_patients(slide_rows, patient_by_slide, table.path.name)
    classes = [new_rows[row] for _, row in pairs]
    return tuple(dict.fromkeys(zip(cases, classes, strict=True)))


def known_patients(data: Path) -> dict[str, str]:
    """Slide id -> patient_id in the cohort of a results folder; {} for other folders."""
    if not (data / SLIDES).is_dir():
        return {}
    patients = {}
    for slide, ledger in open_results(data).ledgers.items():
        patient = ledger.slide.get("patient_id")
        if patient:
            patients[slide] = str(patient)
    return patients


def _cases_and_patients(
    pairs: Sequence[tuple[str, TextRow]],
    patient_by_slide: Mapping[str, str],
    where: str,
) -> tuple[tuple[str, ...], Groups]:
    """The case and the patient of each pair of a slide and a row."""
    slides = [slide for slide, _ in pairs]
    patients = [
        row.get("patient_id") or patient_by_slide.get(slide, "") for slide, row in pairs
    ]
    cases = [row.get("case_id", "") for _, row in pairs]
    cases_or_patients = [
        case or patient for case, patient in zip(cases, patients, strict=True)
    ]
    groups = group_rows(slides, cases, patients, where=where)
    return case_rows(slides, cases_or_patients), groups


def _patient_notes(
    pairs: Sequence[tuple[str, TextRow]], groups: Groups
) -> tuple[list[str], list[str]]:
    """Sentences on where the patients come from, and warnings if they may be wrong."""
    slides = [slide for slide, _ in pairs]
    columns = [[row.get(name, "") for _, row in pairs] for name in CASE_COLUMNS]
    lines = spelling_notes(slides, *columns)
    num_by_barcode = 0
    unknown = []  # slides whose patient is known neither from a column nor from a barcode
    for (slide, row), patient in zip(pairs, groups.of_row, strict=True):
        if any(row.get(name) for name in CASE_COLUMNS):
            continue
        if patient_of(slide) != slide:
            num_by_barcode += 1
        if slide == patient:
            unknown.append(slide)
    if num_by_barcode:
        lines.append(
            "the table has no case_id: the TCGA, CPTAC or GTEx barcode gives the case of "
            f"{counted(num_by_barcode, 'slide')}"
        )
    warnings = []
    if unknown:
        sentence = (
            f"the patients of {counted(len(unknown), 'slide')} are unknown, so each slide counts "
            "as one patient; add a column case_id if a patient has several slides"
        )
        alike = alike_names(unknown)
        if alike:
            count = sum(map(len, alike))
            shown = listed_names([" and ".join(names[:2]) for names in alike])
            risk = (
                "slides of one patient in training and test would make the score too "
                "optimistic"
            )
            warnings.append(
                f"{sentence}; {count} names begin with the same letters ({shown}): {risk}"
            )
        else:
            lines.append(sentence)
    warnings += _split_barcodes(slides, groups.of_row)
    return lines, warnings


def _split_barcodes(slides: Sequence[str], patients: Sequence[str]) -> list[str]:
    """A warning if the table gives several patients for the slides of one barcode."""
    patients_by_barcode = defaultdict[str, set[str]](set)
    for slide, patient in zip(slides, patients, strict=True):
        if patient_of(slide) != slide:
            patients_by_barcode[patient_of(slide)].add(patient)
    split = [name for name, ids in patients_by_barcode.items() if len(ids) > 1]
    if not split:
        return []
    return [
        f"the table gives several patients for {counted(len(split), 'barcode')} "
        f"({listed_names(split)}): a patient in both training and test makes the score too "
        "optimistic"
    ]


def _sites(
    pairs: Sequence[tuple[str, TextRow]],
    cases: Sequence[str],
    column: str | None,
    where: str,
) -> tuple[tuple[str, ...], list[str]]:
    """The site of each case, and a sentence on its source; () and [] if a site is unknown."""
    if column:
        by_case = one_per_case(
            [[row[column]] for _, row in pairs], cases, (column,), where
        )
        sites = [str(text) for (text,) in by_case.values()]
        blank = [case for case, (text,) in by_case.items() if is_missing(str(text))]
        if blank:
            raise DatasetError(
                f"{column} must name a site for each case, got none for "
                f"{counted(len(blank), 'case')} "
                f"({listed_names(blank)}) in {where!r}"
            )
        source = f"column {column}"
    else:
        by_barcode = {
            case: site_of(slide) for (slide, _), case in zip(pairs, cases, strict=True)
        }
        sites = [*by_barcode.values()]
        source = "tissue source site of TCGA barcodes"
        if not all(sites):
            return (), []
    return tuple(sites), [f"{len(set(sites))} sites ({source})"]


def _subgroups(
    pairs: Sequence[tuple[str, TextRow]],
    cases: Sequence[str],
    columns: Sequence[str],
    where: str,
) -> tuple[tuple[str, ...], ...]:
    """The subgroup of each case, column by column; 'missing' for a missing cell."""
    cells_by_case = one_per_case(
        [[row[column] for column in columns] for _, row in pairs], cases, columns, where
    )
    subgroups = []
    for number in range(len(columns)):
        cells = [str(cells[number]) for cells in cells_by_case.values()]
        subgroups.append(
            tuple("missing" if is_missing(cell) else cell for cell in cells)
        )
    return tuple(subgroups)


def _count_line(
    names: Sequence[str], noun: str, before: str, after: str = ""
) -> list[str]:
    """A line that counts and names rows, such as 'no label for 2 slides: a, b'."""
    if not names:
        return []
    return [f"{before} {counted(len(names), noun)}{after}: {listed_names(names)}"]


def target_and_values(
    kind: Kind,
    cells: Sequence[Sequence[LabelCell]],
    config: LabelsConfig,
    where: str,
    trained: Target | None = None,
) -> tuple[Target, Floats, str]:
    """The target, the values (n, T) of the cases, and a text that summarises the values."""
    columns = config.columns
    if config.positive is not None and kind != "binary":
        raise ConfigError(
            f"positive must be set for two classes only, got {config.positive!r} for a target of "
            f"kind {kind}; leave out positive=..."
        )
    if kind in ("binary", "multiclass", "ordinal"):
        texts = [str(text) for (text,) in cells]
        if trained:
            names, labels = encode_labels(texts, where, trained.names)
            target = replace(trained, columns=columns)
        else:
            target, labels = _class_target(texts, kind, config, where)
        counts = np.bincount(labels, minlength=len(target.names))
        pairs = zip(target.names, counts, strict=True)
        summary = ", ".join(f"{name} {count}" for name, count in pairs)
        if target.order_words:
            summary += f"; order: {target.order_words}"
        elif (
            kind == "multiclass"
            and config.task == "auto"
            and ordered_classes(target.names)
        ):
            summary += "; if the classes have this order, pass --task ordinal"
        if target.positive_words:
            summary += f"; positive class: {target.positive_words}"
        return target, labels[:, None].astype(np.float64), summary
    values = np.array(cells, dtype=np.float64)
    target = Target(kind=kind, columns=columns, names=columns)
    if kind == "multilabel":
        for name, label in zip(columns, values.T, strict=True):
            if trained is None and len(set(label[np.isfinite(label)])) < 2:
                raise DatasetError(
                    f"each label must have cases with 0 and with 1, got one value for {name!r} in "
                    f"{where!r}; leave out target {name}"
                )
        return target, values, label_counts(columns, values)
    if kind == "regression":
        summary = f"{values.min():g} to {values.max():g}, median {np.median(values):g}"
        return target, values, summary
    events, times = values.T
    if not events.any():
        raise DatasetError(
            f"at least one case must have an event, got only censored cases in {where!r}"
        )
    names = tuple(f"interval_{i + 1}" for i in range(INTERVALS))
    target = replace(target, names=("risk",) if kind == "cox" else names)
    return (
        target,
        values,
        f"{events.sum():.0f} events, median time {np.median(times):g}",
    )


def label_counts(names: Sequence[str], values: Floats) -> str:
    """For each label: positive cases of those with a value, and the number of blank cells."""
    is_given = np.isfinite(values)
    shown = []
    for name, positive, count in zip(
        names, (values == 1).sum(axis=0), is_given.sum(axis=0), strict=True
    ):
        blank = len(values) - count
        masked = f" ({blank} blank)" if blank else ""
        shown.append(f"{name} {positive} of {count}{masked}")
    return ", ".join(shown)


def _class_target(
    texts: Sequence[str], kind: Kind, config: LabelsConfig, where: str
) -> tuple[Target, npt.NDArray[np.int64]]:
    """Target and labels (n,) of classes that exclude each other.

    Of two classes the more frequent one is class 0; at a tie, the class of the first case. So
    neither the class names nor the choice of the positive class changes the trained model.
    """
    order: tuple[str, ...] = ()
    if kind == "ordinal":
        order = ordered_classes({class_name(text) for text in texts}) or ()
    names, labels = encode_labels(texts, where, order)
    least = 3 if kind == "ordinal" else 2
    if len(names) < least or (kind == "binary" and len(names) > 2):
        needs = {"binary": "two", "ordinal": "three or more"}.get(kind, "several")
        raise DatasetError(f"{kind} must have {needs} classes, got {names}")
    target = Target(kind=kind, columns=config.columns, names=names)
    if kind != "binary":
        return target, labels
    counts = np.bincount(labels, minlength=2)
    positive, rule = _positive_class(names, counts, config.positive)
    is_tie = counts[0] == counts[1]
    if counts[0] < counts[1] or (is_tie and labels[0] == 1):
        names = names[::-1]
        labels = 1 - labels
    target = replace(target, names=names, positive=positive, positive_by=rule)
    return target, labels


def _positive_class(
    names: Sequence[str], counts: npt.NDArray[np.int64], chosen: str | None
) -> tuple[str, PositiveRule]:
    """The positive class of two classes in alphabetical order, and the rule that chose it.

    Raises ConfigError: the chosen class is neither of them.
    """
    if chosen is not None:
        name = chosen if chosen in names else class_name(chosen)
        if name not in names:
            raise ConfigError(
                f"positive must be one of the classes {', '.join(names)}, got {chosen!r}"
                f"{nearest(chosen, names)}"
            )
        return name, "choice"
    if counts[0] == counts[1]:
        return names[1], "tie"
    return names[int(counts.argmin())], "rarer"


def encode_labels(
    texts: Sequence[str], where: str, class_names: Sequence[str] = ()
) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
    """(class names, labels). A label is the index of its class name.

    The names are `class_names`, if given; otherwise sorted, and as numbers if all are integers.

    Raises DatasetError: a label is missing or is not in `class_names`, or two names differ only in
    capital letters.
    """
    for row, text in enumerate(texts):
        if is_missing(text) and text not in class_names:
            raise DatasetError(
                f"label must not be missing, got {text!r} in row {row} of {where}"
            )
    labels = [text if text in class_names else class_name(text) for text in texts]
    distinct = sorted(set(labels))
    if all(text.removeprefix("-").isdigit() for text in distinct):
        distinct.sort(key=int)
    names = tuple(class_names or distinct)
    for text in distinct:
        if text not in names:
            raise DatasetError(
                f"label must be one of {', '.join(names)}, got {text!r} in {where}"
            )
    by_plain: dict[str, str] = {}
    for name in names:
        other = by_plain.setdefault(name.casefold(), name)
        if other != name:
            raise DatasetError(
                f"class names must differ by more than capital letters, got {other!r} and "
                f"{name!r} in {where}"
            )
    index = {name: i for i, name in enumerate(names)}
    return names, np.array([index[label] for label in labels], dtype=np.int64)
