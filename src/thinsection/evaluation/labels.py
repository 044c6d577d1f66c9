"""Labels joined to stored embeddings: which cases train, on what, and why the others do not."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from thinsection.config import nearest, option
from thinsection.errors import ConfigError, DatasetError
from thinsection.evaluation.cases import (
    CASE_COLUMNS,
    Groups,
    Unit,
    alike_names,
    case_rows,
    group_rows,
    listed_names,
    patient_of,
    plain_id,
    site_of,
    spelling_notes,
)
from thinsection.evaluation.embeddings import FeatureFiles, feature_files
from thinsection.evaluation.tables import TextRow, read_rows, require_columns
from thinsection.pipeline.folder import open_results
from thinsection.store.ledger import SLIDES
from thinsection.types import counted

Kind = Literal["binary", "multiclass", "multilabel", "regression", "cox", "discrete"]
TaskName = Literal[
    "auto", "binary", "multiclass", "multilabel", "regression", "cox", "discrete"
]
PositiveRule = Literal["", "choice", "rarer", "tie"]
Floats = npt.NDArray[np.float64]
INTERVALS = 4  # of time in 'discrete', with equally many training events each
MOST_CLASSES = 10  # different numbers that are taken for classes
# names of the column slide_id in tables of cohorts and of other tools, in any capitals
SLIDE_ALIASES = (
    "slide",
    "sample_id",
    "filename",
    "slide_path",
    "image_path",
    "wsi",
)
# words for "no value" in a cell of a label, a time or a site, in any capitals
MISSING = frozenset(
    {
        "",
        "na",
        "n/a",
        "#n/a",
        "nan",
        "null",
        "unknown",
        "[unknown]",
        "not available",
        "[not available]",
        "not reported",
        "[not applicable]",
    }
)
_STAMPS_PATIENT = "PATIENT"  # its one column for case and patient
# why a class is the positive one, by `Target.positive_by`
_POSITIVE_WORDS = {
    "choice": "chosen with --positive",
    "rarer": "the rarer class in training; --positive chooses another",
    "tie": (
        "the last in alphabetical order, as both classes are equally frequent in training; "
        "--positive chooses another"
    ),
    "": (
        "the last in alphabetical order, as in all models of earlier versions; train the model "
        "again to choose with --positive"
    ),
}
_FLAGS = {
    "1": 1.0,
    "1.0": 1.0,
    "true": 1.0,
    "yes": 1.0,
    "0": 0.0,
    "0.0": 0.0,
    "false": 0.0,
    "no": 0.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelsConfig:
    """Settings that say what is learnt, and from which embeddings."""

    labels: Path | None = option(
        None,
        "Table (CSV, TSV or Parquet) with the column slide_id or case_id, and the "
        "target. [required]",
        daily=True,
    )
    target: tuple[str, ...] = option(
        (),
        "Column to predict; repeat the option for several labels. [required]",
        daily=True,
    )
    time: str | None = option(
        None,
        "Survival: column with the time to the event or to the end of follow-up. "
        "--target is then the event (0 or 1).",
        daily=True,
    )
    task: TaskName = option(
        "auto",
        "Kind of target. auto decides by the values and prints its choice. cox and "
        "discrete are survival; discrete predicts four time intervals.",
        daily=True,
    )
    positive: str | None = option(
        None,
        "Class that counts as positive. [default: the rarer of two classes]",
        daily=True,
    )
    site: str | None = option(
        None,
        "Column with the hospital or centre. [default: the site in TCGA barcodes]",
        daily=True,
    )
    subgroup: tuple[str, ...] = option(
        (),
        "Column for whose values the page has separate scores; repeat the option for "
        "several.",
    )
    features: str | None = option(
        None,
        "Embeddings to use, if the folder has several: 256px_0.5mpp/features_uni2_h, or a "
        "unique part of this name, such as uni2_h.",
        daily=True,
    )

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the table that are learnt: the target, and the time."""
        if self.time:
            return (*self.target, self.time)
        return self.target


@dataclass(frozen=True, kw_only=True)
class Target:
    """Meaning of a head's outputs."""

    kind: Kind
    columns: tuple[str, ...]  # of the table: one, several labels, or event and time
    # of the outputs: classes, labels, the value, the risk, intervals
    names: tuple[str, ...]
    # of two classes the one that sensitivity, curves and thresholds are about; '' in files of
    # earlier versions, where it is the second name
    positive: str = ""
    positive_by: PositiveRule = ""  # how it was chosen
    # of the training cases of one fold, see `fitted`
    edges: tuple[float, ...] = ()  # between the intervals of time
    center: float = 0.0  # a value is learnt as (value - center) / spread
    spread: float = 1.0

    @property
    def exclusive(self) -> bool:
        """True where a case is of one class."""
        return self.kind in ("binary", "multiclass")

    @property
    def positive_index(self) -> int:
        """Number of the positive class of two."""
        return self.names.index(self.positive) if self.positive else 1

    @property
    def positive_first(self) -> tuple[int, int]:
        """Numbers of two classes, the positive one first."""
        return self.positive_index, 1 - self.positive_index

    @property
    def positive_words(self) -> str:
        """The positive class of two, and why it is this one; '' for other targets."""
        if self.kind != "binary":
            return ""
        return (
            f"{self.names[self.positive_index]} ({_POSITIVE_WORDS[self.positive_by]})"
        )

    def fitted(self, values: Floats) -> "Target":
        """The target with centre, spread and edges of training cases, values (n, T)."""
        if self.kind == "regression":
            center = float(values.mean())
            spread = float(values.std()) or 1.0
            return replace(self, center=center, spread=spread)
        if self.kind == "discrete":
            times = values[values[:, 0] == 1, 1]
            if len(times) == 0:
                rule = "training cases of each fold must have an event"
                raise DatasetError(
                    f"{rule}, got none in {counted(len(values), 'case')}"
                )
            cuts = np.linspace(0, 1, INTERVALS + 1)[1:-1]
            return replace(self, edges=tuple(np.quantile(times, cuts).tolist()))
        return self

    def strata(self, values: Floats) -> npt.NDArray[np.int64]:
        """Strata of folds (n,): class, event, a value's quarter, number of labels."""
        if self.kind == "regression":
            return np.searchsorted(np.quantile(values, (0.25, 0.5, 0.75)), values[:, 0])
        if self.kind == "multilabel":
            return np.asarray(values.sum(axis=1), dtype=np.int64)
        return np.asarray(values[:, 0], dtype=np.int64)

    def answers(self, logits: npt.NDArray[np.floating]) -> Floats:
        """Answers (n, K) of logits (n, K), column by column as `names`.

        Probabilities of classes or labels; the value; the log risk; of 'discrete' the probability
        that the event is in an interval.
        """
        from scipy.special import expit, softmax  # `--help` must not wait for it

        z = np.asarray(logits, dtype=np.float64)
        if self.exclusive:
            return np.asarray(softmax(z, axis=1))
        if self.kind == "multilabel":
            return np.asarray(expit(z))
        if self.kind == "discrete":
            hazard = np.concatenate([expit(z[:, :-1]), np.ones((len(z), 1))], axis=1)
            before = np.cumprod(np.c_[np.ones(len(z)), 1 - hazard[:, :-1]], axis=1)
            return np.asarray(before * hazard)
        return self.center + self.spread * z

    def risk(self, answers: Floats) -> Floats:
        """One number (n,) that is higher the earlier the event: minus the mean interval."""
        if self.kind == "cox":
            return answers[:, 0]
        return np.asarray(-answers @ np.arange(len(self.names)))

    def truth_cells(self, values: Sequence[float]) -> dict[str, str | float]:
        """True values (T,) of a case as cells of a table: its class, else one a column."""
        if self.exclusive:
            return {"truth": self.names[int(values[0])]}
        pairs = zip(self.columns, values, strict=True)
        return {f"truth_{column}": value for column, value in pairs}

    def cells(self, answers: Sequence[float]) -> dict[str, str | float | None]:
        """Answers (K,) as cells of a table, empty ones for (): the class or risk, then each."""
        row = np.array([answers])
        cells: dict[str, str | float | None] = {}
        if self.exclusive:
            cells["prediction"] = self.names[int(row.argmax())] if row.size else None
        elif self.kind == "discrete":
            cells["risk"] = float(self.risk(row)[0]) if row.size else None
        begin = "" if self.kind in ("cox", "regression") else "p_"
        return cells | self.named(begin, answers)

    def named(self, begin: str, values: Sequence[float]) -> dict[str, float | None]:
        """A cell for each output, its name with `begin` before it; empty ones for ()."""
        cells: Sequence[float | None] = values or [None for _ in self.names]
        return {begin + name: cell for name, cell in zip(self.names, cells)}


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """Cases with their slides and labels; plain values."""

    target: Target
    place: str  # of the embeddings
    cases: tuple[str, ...]
    slides: tuple[tuple[str, ...], ...]  # of each case, as `files`
    files: tuple[tuple[str, ...], ...]
    # of each case: class; 0 or 1 a label; value; or event and time
    values: tuple[tuple[float, ...], ...]
    patients: tuple[str, ...]  # of each case; one may have several cases
    unit: Unit  # what `patients` are, as far as anybody knows
    sites: tuple[str, ...] = ()  # of each case; () where nobody knows
    subgroup_columns: tuple[str, ...] = ()
    subgroups: tuple[tuple[str, ...], ...] = ()  # of each column, of each case
    unlabelled: int = 0  # rows of the table without a label
    without_embeddings: int = 0  # labelled rows without embeddings
    account: tuple[str, ...] = ()  # what matched, what did not, and why
    warnings: tuple[str, ...] = ()

    @property
    def array(self) -> Floats:
        """`values`, (n, T)."""
        return np.array(self.values, dtype=np.float64)

    @property
    def paths(self) -> list[list[Path]]:
        """`files` as paths."""
        return [[Path(file) for file in files] for files in self.files]

    @property
    def groups(self) -> Groups:
        """The patients of the cases, as what is resampled."""
        return Groups(self.unit, self.patients)

    @property
    def strata(self) -> npt.NDArray[np.int64]:
        """Strata of the cases, see `Target.strata`."""
        return self.target.strata(self.array)


def several(items: tuple[str, ...]) -> tuple[str, ...]:
    """Slides (or files) of a case that has several; () of one slide, which its case tells."""
    return items if len(items) > 1 else ()


def read_cohort(data: Path, config: LabelsConfig) -> Cohort:
    """The cases that have both embeddings and labels, with an account of the others.

    A row is of a slide (slide_id), or of a case (case_id) with all its slides. The patient of a
    slide is its patient_id, else what the results' cohort says, else its case_id, else that of a
    barcode, else the slide itself.

    Memory: the table, and some 100 bytes a slide.

    Raises DatasetError, ConfigError: no such column, nothing matches, different labels in a case.
    """
    embeddings = feature_files(data, config.features)
    return join_labels(embeddings, known_patients(data), config)


def check_label_table(config: LabelsConfig) -> None:
    """Checks that the label table can be read and has its columns; embeddings are not read.

    Memory: the table. Raises DatasetError, ConfigError: no table, no target, no such column.
    """
    _read_label_rows(_label_table(config), config, ())


def join_labels(
    embeddings: FeatureFiles,
    owners: Mapping[str, str],
    config: LabelsConfig,
    trained: Target | None = None,
) -> Cohort:
    """Joins labels to embeddings, see `read_cohort`.

    Args:
        embeddings: files of slides, slides without a file, and the place of both.
        owners: slide id -> patient, as far as the results know it.
        config: the table, and its columns.
        trained: the target of a model that is tested on these cases: its classes are taken.
    """
    table = _label_table(config)
    files, lacking, place = embeddings
    rows, key = _read_label_rows(table, config, {*files, *lacking})
    labelled, blank = drop_missing(rows, config.columns, key)
    slides_by_key = _slides_by_key(key, files, owners)
    pairs, missing = _match(labelled, key, slides_by_key, lacking)
    used = [slide for slide, _ in pairs]
    lines = [
        f"{counted(len(rows), 'row')} in {table.name}, matched by {key} to "
        f"{counted(len(files), 'slide')} in {place}",
        *_count_line(
            missing, f"labelled {key.removesuffix('_id')}", "no embeddings for"
        ),
        *blank,
        *_count_line(
            sorted({*files} - {*used}), "slide", "no label for", " with embeddings"
        ),
    ]
    if not pairs:
        raise DatasetError(
            f"labels must match embeddings, got no match; {'; '.join(lines)}"
        )

    cases, groups = _owners_of(pairs, owners, table.name)
    texts = _one_per_case(pairs, cases, config.columns, table.name)
    target, values, spread = _learnt([*texts.values()], config, table.name, trained)
    slides, patients = _slides_and_patients(used, cases, groups, table.name)
    kind = f"{target.kind}{' (by its values)' * (config.task == 'auto')}"
    use = "training" if trained is None else "testing"
    owner_lines, warnings = _owner_notes(pairs, groups)
    sites, site_lines = _sites(pairs, cases, config.site, table.name)
    return Cohort(
        target=target,
        place=place,
        cases=tuple(texts),
        slides=tuple(map(tuple, slides.values())),
        files=tuple(_absolute_files(names, files) for names in slides.values()),
        values=tuple(tuple(row) for row in values.tolist()),
        patients=tuple(patients.values()),
        unit=groups.unit,
        sites=sites,
        subgroup_columns=config.subgroup,
        subgroups=_subgroups(pairs, cases, config.subgroup, table.name),
        unlabelled=len(rows) - len(labelled),
        without_embeddings=len(missing),
        account=(
            f"{counted(len(set(used)), 'slide')} of {counted(len(texts), 'case')} for {use}",
            *lines,
            *owner_lines,
            *site_lines,
            f"{', '.join(config.columns)}: {kind}: {spread}",
        ),
        warnings=tuple(warnings),
    )


def _absolute_files(
    slides: Sequence[str], files: Mapping[str, Path]
) -> tuple[str, ...]:
    return tuple(str(files[slide].absolute()) for slide in slides)


def _label_table(config: LabelsConfig) -> Path:
    """Path of the label table. Raises ConfigError: there is none, or no target is set."""
    if not config.labels or not config.target:
        raise ConfigError(
            "labels and target must be set, got neither; pass --labels FILE --target COLUMN"
        )
    table = Path(config.labels)
    if not table.is_file():
        raise ConfigError(f"labels must be an existing file, got {str(table)!r}")
    return table


def _read_label_rows(
    table: Path, config: LabelsConfig, slides: Collection[str]
) -> tuple[list[TextRow], str]:
    """Rows under our names of columns, and the column that names a slide or a case."""
    rows = read_rows(table, config.columns)
    if config.site:
        require_columns(rows[0], (config.site,), table)
    require_columns(rows[0], config.subgroup, table)
    aliases = {
        "slide_id": _slide_column(rows, slides),
        "case_id": _STAMPS_PATIENT if _STAMPS_PATIENT in rows[0] else "",
    }
    renamed: list[TextRow] = []
    for row in rows:
        more = {
            name: row[alias]
            for name, alias in aliases.items()
            if alias and name not in row
        }
        renamed.append({**row, **more})
    keys = [name for name in ("slide_id", *CASE_COLUMNS) if name in renamed[0]]
    if not keys:
        raise DatasetError(
            f"labels must have the column slide_id or case_id, got {', '.join(rows[0])} in "
            f"{str(table)!r}; slide_id may also be called {', '.join(SLIDE_ALIASES)}"
        )
    return renamed, keys[0]


def _slide_column(rows: Sequence[TextRow], slides: Collection[str]) -> str:
    """Column that names slides under another name than slide_id; '' if there is none.

    Beside a case column it must contain a slide, as `slide` may be the number of a slide.
    """
    by_lower_name = {name.lower(): name for name in rows[0]}
    columns = [by_lower_name[a] for a in SLIDE_ALIASES if a in by_lower_name]
    for column in columns:
        if any(_slide_named(row[column], slides) is not None for row in rows):
            return column
    has_case = any(name in rows[0] for name in (*CASE_COLUMNS, _STAMPS_PATIENT))
    return "" if has_case or not columns else columns[0]


def _slide_named(text: str, names: Collection[str]) -> str | None:
    """The name that a cell stands for: as written, or without folder and suffix; else None."""
    path = Path(text)
    for candidate in (text, path.name, path.stem):
        if candidate in names:
            return candidate
    return None


def is_missing(text: str) -> bool:
    """True for a cell that holds no value, see `MISSING`."""
    return text.strip().lower() in MISSING


def drop_missing(
    rows: Sequence[TextRow], columns: Sequence[str], key: str
) -> tuple[list[TextRow], list[str]]:
    """Rows with a value in every column, and a sentence that counts and names the others."""
    kept: list[TextRow] = []
    names: list[str] = []
    words: Counter[str] = Counter()
    for row in rows:
        missing = [row[column] for column in columns if is_missing(row[column])]
        if missing:
            names.append(row.get(key, ""))
            words.update(missing)
        else:
            kept.append(row)
    counts = [f"{word!r} {count}" for word, count in words.most_common() if word]
    written = f" ({', '.join(counts)})" if counts else ""
    return kept, _count_line(names, "row", f"no {' or '.join(columns)} in", written)


def known_patients(data: Path) -> dict[str, str]:
    """Slide id -> patient_id, as the cohort of a results folder has it; {} of other folders."""
    if not (data / SLIDES).is_dir():
        return {}
    patients = {}
    for slide, ledger in open_results(data).ledgers.items():
        patient = ledger.slide.get("patient_id")
        if patient:
            patients[slide] = str(patient)
    return patients


def _slides_by_key(
    key: str, files: Mapping[str, Path], owners: Mapping[str, str]
) -> dict[str, list[str]]:
    """Slides by what a row's key names: themselves, or their patient."""
    if key == "slide_id":
        return {slide: [slide] for slide in files}
    by_patient = defaultdict[str, list[str]](list)
    for slide in files:
        by_patient[owners.get(slide) or patient_of(slide)].append(slide)
    return by_patient


def _match(
    rows: Sequence[TextRow],
    key: str,
    slides_by_key: Mapping[str, Sequence[str]],
    lacking: Mapping[str, str],
) -> tuple[list[tuple[str, TextRow]], list[str]]:
    """Each slide with its row, and the names that have no embeddings, with the reason."""
    pairs: list[tuple[str, TextRow]] = []
    missing: list[str] = []
    spellings = {plain_id(name): name for name in slides_by_key}
    for row in rows:
        name = _slide_named(row[key], slides_by_key)
        if name is not None:
            pairs += [(slide, row) for slide in slides_by_key[name]]
            continue
        bare = _slide_named(row[key], lacking)
        similar = spellings.get(plain_id(Path(row[key]).stem))
        similar = similar or spellings.get(plain_id(row[key]))
        if bare is not None:
            missing.append(f"{bare} ({lacking[bare]})")
        elif similar is not None:
            missing.append(f"{row[key]} (did you mean {similar}?)")
        else:
            missing.append(row[key])
    return pairs, missing


def _owners_of(
    pairs: Sequence[tuple[str, TextRow]], owners: Mapping[str, str], where: str
) -> tuple[tuple[str, ...], Groups]:
    """The case and the patient of each pair of slide and row."""
    slides = [slide for slide, _ in pairs]
    patients = [row.get("patient_id") or owners.get(slide, "") for slide, row in pairs]
    cases = [row.get("case_id", "") for _, row in pairs]
    owners_of_rows = [
        case or patient for case, patient in zip(cases, patients, strict=True)
    ]
    groups = group_rows(slides, cases, patients, where=where)
    return case_rows(slides, owners_of_rows), groups


def _one_per_case(
    pairs: Sequence[tuple[str, TextRow]],
    cases: Sequence[str],
    columns: Sequence[str],
    where: str,
) -> dict[str, list[str]]:
    """Case -> its cells of some columns, which are the same in all of its rows."""
    texts: dict[str, list[str]] = {}
    for (_, row), case in zip(pairs, cases, strict=True):
        cells = [row[column] for column in columns]
        first = texts.setdefault(case, cells)
        if first != cells:
            raise DatasetError(
                f"slides of a case must have the same {', '.join(columns)}, "
                f"got {first} and {cells} for {case!r} in {where!r}"
            )
    return texts


def _slides_and_patients(
    slides: Sequence[str], cases: Sequence[str], groups: Groups, where: str
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Case -> its slides, each once, and case -> its patient."""
    slides_by_case = defaultdict[str, list[str]](list)
    patient_by_case: dict[str, str] = {}
    for slide, case, patient in zip(slides, cases, groups.of_row, strict=True):
        if slide not in slides_by_case[case]:
            slides_by_case[case].append(slide)
        first = patient_by_case.setdefault(case, patient)
        if first != patient:
            raise DatasetError(
                f"a case must belong to one patient, got {first!r} and {patient!r} for {case!r} "
                f"in {where!r}"
            )
    return slides_by_case, patient_by_case


def _owner_notes(
    pairs: Sequence[tuple[str, TextRow]], groups: Groups
) -> tuple[list[str], list[str]]:
    """Sentences on how patients were known, and warnings where they may be wrong."""
    slides = [slide for slide, _ in pairs]
    columns = [[row.get(name, "") for _, row in pairs] for name in CASE_COLUMNS]
    lines = spelling_notes(slides, *columns)
    num_by_barcode = 0
    unknown = []  # slides that neither a column nor a barcode gives to a patient
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
            remedy = (
                "slides of one patient in training and test would make the score too "
                "optimistic"
            )
            warnings.append(
                f"{sentence}; {count} names begin with the same letters ({shown}): {remedy}"
            )
        else:
            lines.append(sentence)
    warnings += _split_barcodes(slides, groups.of_row)
    return lines, warnings


def _split_barcodes(slides: Sequence[str], patients: Sequence[str]) -> list[str]:
    """A warning where the slides of one barcode are said to be of several patients."""
    patients_by_barcode = defaultdict[str, set[str]](set)
    for slide, patient in zip(slides, patients, strict=True):
        if patient_of(slide) != slide:
            patients_by_barcode[patient_of(slide)].add(patient)
    split = [name for name, owners in patients_by_barcode.items() if len(owners) > 1]
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
    """The site of each case, and a sentence on where it is from; () where nobody knows."""
    if column:
        by_case = _one_per_case(pairs, cases, (column,), where)
        sites = [text for (text,) in by_case.values()]
        blank = [case for case, (text,) in by_case.items() if is_missing(text)]
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
    """The subgroup of each case, column by column; 'missing' where the cell is."""
    cells_by_case = _one_per_case(pairs, cases, columns, where)
    subgroups = []
    for place in range(len(columns)):
        cells = [cells[place] for cells in cells_by_case.values()]
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


def _learnt(
    texts: Sequence[Sequence[str]],
    config: LabelsConfig,
    where: str,
    trained: Target | None = None,
) -> tuple[Target, Floats, str]:
    """The target, the values (n, T) of the cases, and how these are spread, in words."""
    kind = config.task if config.task != "auto" else _kind(texts, config)
    columns = config.columns
    survival = kind in ("cox", "discrete")
    one_target = len(config.target) == 1 or kind == "multilabel"
    if config.positive is not None and kind != "binary":
        raise ConfigError(
            f"positive must go with two classes, got {config.positive!r} for a target of kind "
            f"{kind}; leave --positive out"
        )
    if not one_target or survival != bool(config.time):
        needs = "one target and --time" if survival else "one target, no --time"
        raise ConfigError(f"{kind} must have {needs}, got {columns}")
    if kind in ("binary", "multiclass"):
        cells = [text for (text,) in texts]
        if trained:
            names, labels = encode_labels(cells, where, trained.names)
            target = replace(trained, columns=columns)
        else:
            target, labels = _class_target(cells, kind, config, where)
        counts = np.bincount(labels, minlength=len(target.names))
        pairs = zip(target.names, counts, strict=True)
        spread = ", ".join(f"{name} {count}" for name, count in pairs)
        if target.positive_words:
            spread += f"; positive class: {target.positive_words}"
        return target, labels[:, None].astype(np.float64), spread
    flagged = {*columns} if kind == "multilabel" else set[str]()
    if survival:
        flagged = {config.target[0]}
    numbers = []
    for row in texts:
        cells = zip(row, columns, strict=True)
        numbers.append([read_number(t, c, where, flag=c in flagged) for t, c in cells])
    values = np.array(numbers, dtype=np.float64)
    target = Target(kind=kind, columns=columns, names=columns)
    if kind == "multilabel":
        sums = zip(columns, values.sum(axis=0), strict=True)
        return target, values, ", ".join(f"{n} {count:.0f}" for n, count in sums)
    if kind == "regression":
        middle = f"{values.min():g} to {values.max():g}, median {np.median(values):g}"
        return target, values, middle
    events, times = values.T
    if not events.any():
        raise DatasetError(
            f"at least one case must have an event, got only censored cases in {where!r}"
        )
    if times.min() <= 0:
        raise DatasetError(f"time must be > 0, got {times.min()} in {where!r}")
    names = tuple(f"interval_{i + 1}" for i in range(INTERVALS))
    target = replace(target, names=("risk",) if kind == "cox" else names)
    return (
        target,
        values,
        f"{events.sum():.0f} events, median time {np.median(times):g}",
    )


def _class_target(
    texts: Sequence[str], kind: Kind, config: LabelsConfig, where: str
) -> tuple[Target, npt.NDArray[np.int64]]:
    """Target and labels (n,) of classes that exclude each other.

    Of two classes the commoner comes first, of equally frequent ones that of the first case, so
    that a model depends neither on the words of the table nor on the positive class.
    """
    names, labels = encode_labels(texts, where)
    if len(names) < 2 or (kind == "binary" and len(names) > 2):
        needs = "two" if kind == "binary" else "several"
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
    """The positive class of two in alphabetical order, and the rule that made it so.

    Raises ConfigError: the chosen one is none of them.
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


def class_name(text: str) -> str:
    """A label's text; whole numbers without '.0', so that 1 and 1.0 are one class."""
    try:
        number = float(text)
    except ValueError:
        return text
    return str(int(number)) if number.is_integer() else text


def encode_labels(
    texts: Sequence[str], where: str, class_names: Sequence[str] = ()
) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
    """(class names, labels): names sorted, as numbers where all are; labels are their ranks.

    Raises DatasetError: a label is missing, is none of `class_names`, or two differ in capitals.
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


def _kind(texts: Sequence[Sequence[str]], config: LabelsConfig) -> Kind:
    """The kind by the columns and the values: two are classes, many numbers are a measure."""
    if config.time or len(config.target) > 1:
        return "cox" if config.time else "multilabel"
    values = {class_name(text) for (text,) in texts}
    try:
        numbers = {float(value) for value in values}
    except ValueError:
        numbers = set()
    if len(numbers) > MOST_CLASSES or any(number % 1 for number in numbers):
        return "regression"
    return "binary" if len(values) == 2 else "multiclass"


def read_number(text: str, column: str, where: str, *, flag: bool = False) -> float:
    """The number of a cell; of a flag 0 or 1, also true, false, yes, no.

    Raises DatasetError: it is none, or not finite.
    """
    if flag:
        if text.lower() not in _FLAGS:
            raise DatasetError(f"{column} must be 0 or 1, got {text!r} in {where!r}")
        return _FLAGS[text.lower()]
    try:
        value = float(text)
    except ValueError:
        value = np.nan
    if not np.isfinite(value):
        raise DatasetError(f"{column} must be a number, got {text!r} in {where!r}")
    return value
