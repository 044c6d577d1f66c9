"""Labels joined to stored embeddings: which cases train, on what, and why the others do not."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import expit, softmax

from thinsection.config import option
from thinsection.errors import ConfigError, require
from thinsection.pipeline.folder import one_address, open_results
from thinsection.probe.data.files import (
    EMBEDDING_SUFFIXES,
    TextRow,
    check,
    encode_labels,
    features_folder,
    read_rows,
)
from thinsection.probe.groups import CASE_COLUMNS, group_rows, patient_of
from thinsection.stages.stage import ledger_facts
from thinsection.store.ledger import SLIDES

Kind = Literal["binary", "multiclass", "multilabel", "regression", "cox", "discrete"]
TaskName = Literal["auto", "binary", "multiclass", "multilabel", "regression", "cox", "discrete"]
Texts = Sequence[tuple[str, ...]]
INTERVALS = 4  # of time in 'discrete', with equally many events each
MOST_CLASSES = 10  # different numbers that are taken for classes
_SHOWN = 3  # names in a line of the account
_HOMES = ("h5_files", "pt_files", "tile_embeddings")  # of embeddings: CLAM's, slide2vec's
_NAMES = {"PATIENT": "case_id", "FILENAME": "slide_id"}  # STAMP's columns
_YES, _NO = ("1", "1.0", "true", "yes"), ("0", "0.0", "false", "no")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelsConfig:
    """What is learnt, and from which embeddings."""

    labels: Path | None = option(None, "CSV, TSV or Parquet: slide_id or case_id, and the target")
    target: tuple[str, ...] = option((), "column that is learnt; repeat for several labels")
    time: str | None = option(None, "column of the time to the event or the end; target: the event")
    task: TaskName = option("auto", "what the target is; auto: by its values, and it is said")
    features: str | None = option(None, "embeddings, where RESULTS has several: NAME or GRID/NAME")


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a head's outputs mean."""

    kind: Kind
    columns: tuple[str, ...]  # of the table: one, several labels, or event and time
    names: tuple[str, ...]  # of the outputs: classes, labels, the value, the risk, intervals
    edges: tuple[float, ...] = ()  # between the intervals of time
    center: float = 0.0  # a value is learnt as (value - center) / spread
    spread: float = 1.0

    @property
    def exclusive(self) -> bool:
        """Whether a case is of one class."""
        return self.kind in ("binary", "multiclass")

    def answers(self, logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
        """What logits (n, K) say, (n, K), column by column as `names`.

        Probabilities of classes or labels; the value; the log risk; of 'discrete' the probability
        that the event is in an interval.
        """
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

    def risk(self, answers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """One number (n,) that is higher the earlier the event: minus the mean interval."""
        return answers[:, 0] if self.kind == "cox" else -answers @ np.arange(len(self.names))


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """Cases with their slides and labels; plain values."""

    target: Target
    place: str  # of the embeddings
    cases: tuple[str, ...]
    slides: tuple[tuple[str, ...], ...]  # of each case, as `files`
    files: tuple[tuple[str, ...], ...]
    values: tuple[tuple[float, ...], ...]  # class; 0 or 1 a label; value; or event and time
    account: tuple[str, ...] = ()  # what matched, what did not, and why

    @property
    def array(self) -> npt.NDArray[np.float64]:
        """`values`, (n, T)."""
        return np.array(self.values, dtype=np.float64)

    @property
    def strata(self) -> npt.NDArray[np.int64]:
        """What folds hold alike: class, event, a value's quarter, how many labels a case has."""
        values = self.array
        if self.target.kind == "regression":
            return np.searchsorted(np.quantile(values, (0.25, 0.5, 0.75)), values[:, 0])
        many = self.target.kind == "multilabel"
        return (values.sum(axis=1) if many else values[:, 0]).astype(np.int64)


def feature_files(
    data: Path, features: str | None = None
) -> tuple[dict[str, Path], dict[str, str], str]:
    """Slide id -> file of embeddings, slide id -> why it has none, and where they were found.

    Of a results folder what its ledgers know; else a folder of files of ours, TRIDENT, CLAM (its
    feat_dir), STAMP (its feature_dir) or slide2vec (its output).

    Raises DatasetError, StoreError, InvalidInputError: none; or several, and none is named.
    """
    if (data / SLIDES).is_dir():
        results = open_results(data)
        known = (*results.features, *results.slide_features) if features else results.features
        address = one_address(known or results.slide_features, features, "features")
        made = {s: lg for s, lg in results.ledgers.items() if address in lg.stages}
        empty = [s for s, lg in made.items() if ledger_facts(lg, lg.stages).get("num_tiles") == 0]
        found = {s: data / next(iter(lg.stages[address].files)) for s, lg in made.items()}
        lacking = dict.fromkeys(empty, "no tiles") | results.failures()
        return {s: p for s, p in found.items() if s not in empty}, lacking, address
    home = next((data / n for n in _HOMES if (data / n).is_dir()), None)
    folder = home or features_folder(data, "features")
    check(folder.is_dir(), "data must be a folder", repr(str(folder)))
    files = sorted(p for p in folder.iterdir() if p.suffix.lower() in EMBEDDING_SUFFIXES)
    got = f"none of {', '.join(EMBEDDING_SUFFIXES)} in {str(folder)!r}; run `thinsection embed`"
    check(files, "data must hold embeddings", got)
    return {p.stem: p for p in files}, {}, folder.name


def read_cohort(data: Path, config: LabelsConfig) -> Cohort:
    """The cases that have both embeddings and labels, with an account of the others.

    A row says of a slide (slide_id), or of a case (case_id) whose slides are those that the
    results' cohort, else a TCGA barcode, else the slide's very name gives it.

    Memory: the table, and some 100 bytes a slide.

    Raises:
        DatasetError: no such column, nothing matches, a case with different labels.
        ConfigError: no labels or target named.
    """
    rule, got = "labels and target must be given", "none; pass --labels FILE --target COLUMN"
    require(config.labels and config.target, rule, got, error=ConfigError)
    path, columns = Path(config.labels or ""), (*config.target, *filter(None, [config.time]))
    rows = [{_NAMES.get(k, k): v for k, v in row.items()} for row in read_rows(path, columns)]
    case_column = next((name for name in CASE_COLUMNS if name in rows[0]), "")
    key = "slide_id" if "slide_id" in rows[0] else case_column
    found = f"{', '.join(rows[0])} in {str(path)!r}"
    check(key, "labels must have the column slide_id or case_id", found)
    files, lacking, place = feature_files(data, config.features)
    slides_of = _slides_by(key, data, files)
    pairs, missing, blank = list[tuple[str, TextRow]](), list[str](), list[str]()
    for row in rows:
        name = _bare(row[key], slides_of)
        if not all(row[c] for c in columns):
            blank.append(name)
        elif name not in slides_of:
            missing.append(f"{name} ({lacking[name]})" if name in lacking else name)
        else:
            pairs += [(slide, row) for slide in slides_of[name]]
    used = [slide for slide, _ in pairs]
    coded = 0 if case_column else sum(patient_of(slide) != slide for slide in used)
    lines = [
        f"{len(rows)} rows of {path.name} by {key}, {len(files)} slides in {place}",
        *[f"no case_id: the case of {coded} slides is their TCGA barcode's"] * (coded > 0),
        *_listed(missing, "labelled, without embeddings"),
        *_listed(blank, f"without {' or '.join(columns)}"),
        *_listed(sorted(files.keys() - {*used}), "with embeddings, not labelled"),
    ]
    check(pairs, "labels must match embeddings", "; ".join(["none", *lines]))
    cases = [row[case_column] for _, row in pairs] if case_column else ()
    groups = group_rows(used, cases, where=path.name)
    of_case = _by_case(pairs, groups.of_row, columns, path.name)
    texts = [tuple(next(iter(own.values()))[c] for c in columns) for own in of_case.values()]
    target, values = _learnt(texts, config, path.name)
    kind = f"{target.kind}{' (by its values)' * (config.task == 'auto')}"
    told = [f"{len(set(used))} slides of {len(of_case)} cases train", *lines]
    return Cohort(
        target=target,
        place=place,
        cases=tuple(of_case),
        slides=tuple(tuple(own) for own in of_case.values()),
        files=tuple(tuple(str(files[s].absolute()) for s in own) for own in of_case.values()),
        values=values,
        account=(*told, f"{', '.join(columns)}: {kind}: {_spread(target, values)}"),
    )


def _by_case(
    pairs: Sequence[tuple[str, TextRow]], cases: Sequence[str], columns: Sequence[str], where: str
) -> dict[str, dict[str, TextRow]]:
    """Case -> slide -> row, all rows of a case with the same label."""
    found: dict[str, dict[str, TextRow]] = defaultdict(dict)
    for (slide, row), case in zip(pairs, cases, strict=True):
        first = next(iter(found[case].values()), row)
        labels = [[one[c] for c in columns] for one in (first, row)]
        got = f"{labels[0]} and {labels[1]} for {case!r} in {where!r}"
        check(labels[0] == labels[1], "slides of a case must have the same label", got)
        found[case][slide] = row
    return found


def _slides_by(key: str, data: Path, files: dict[str, Path]) -> dict[str, list[str]]:
    """Slides by what a row's key names: themselves, or their case."""
    if key == "slide_id":
        return {slide: [slide] for slide in files}
    told = open_results(data).ledgers if (data / SLIDES).is_dir() else {}
    of_case = defaultdict(list)
    for slide in files:
        patient = told[slide].slide.get("patient_id") if slide in told else None
        of_case[str(patient or patient_of(slide))].append(slide)
    return dict(of_case)


def _bare(name: str, known: dict[str, list[str]]) -> str:
    """The name, without a suffix of a file where only that is known: tables often keep it."""
    return name if name in known or Path(name).stem not in known else Path(name).stem


def _listed(names: Sequence[str], what: str) -> list[str]:
    more = ", ..." if len(names) > _SHOWN else ""
    return [f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{more}"] if names else []


def _learnt(
    texts: Texts, config: LabelsConfig, where: str
) -> tuple[Target, tuple[tuple[float, ...], ...]]:
    """The target, and the value of each case."""
    kind = config.task if config.task != "auto" else _kind(texts, config)
    columns = (*config.target, *filter(None, [config.time]))
    survival = kind in ("cox", "discrete")
    right = len(config.target) == 1 or kind == "multilabel"
    rule = f"{kind} must have {'one target and --time' if survival else 'one target, no --time'}"
    require(right and survival == bool(config.time), rule, columns, error=ConfigError)
    if kind in ("binary", "multiclass"):
        names, labels = encode_labels([text for (text,) in texts], where)
        need = len(names) == 2 if kind == "binary" else len(names) >= 2
        check(need, f"{kind} must have {'two' if kind == 'binary' else 'several'} classes", names)
        return Target(kind=kind, columns=columns, names=names), tuple((float(c),) for c in labels)
    flags = [kind == "multilabel" or (survival and c == config.target[0]) for c in columns]
    rows = tuple(
        tuple(
            _number(text, c, flag, where) for text, c, flag in zip(row, columns, flags, strict=True)
        )
        for row in texts
    )
    values, known = np.array(rows), Target(kind=kind, columns=columns, names=columns)
    if kind == "multilabel":
        return known, rows
    if kind == "regression":
        spread = float(values.std()) or 1.0
        return replace(known, center=float(values.mean()), spread=spread), rows
    events, times = values[:, 0] == 1, values[:, 1]
    check(events.any(), "event must be seen in some case", f"only censored cases in {where!r}")
    check(times.min() > 0, "time must be > 0", f"{times.min()} in {where!r}")
    if kind == "cox":
        return replace(known, names=("risk",)), rows
    share = np.linspace(0, 1, INTERVALS + 1)[1:-1]
    edges = tuple(float(e) for e in np.unique(np.quantile(times[events], share)))
    names = (*(f"<= {e:g}" for e in edges), f"> {edges[-1]:g}")
    return replace(known, names=names, edges=edges), rows


def _kind(texts: Texts, config: LabelsConfig) -> Kind:
    """By the columns and the values: two are classes, many numbers are a measure."""
    if config.time:
        return "cox"
    if len(config.target) > 1:
        return "multilabel"
    values = {text for (text,) in texts}
    try:
        numbers = {float(value) for value in values}
    except ValueError:
        return "binary" if len(values) == 2 else "multiclass"
    if len(numbers) > MOST_CLASSES or any(number % 1 for number in numbers):
        return "regression"
    return "binary" if len(values) == 2 else "multiclass"


def _number(text: str, column: str, flag: bool, where: str) -> float:
    found, word = f"{text!r} in {where!r}", text.lower()
    if flag:
        check(word in (*_YES, *_NO), f"{column} must be 0 or 1", found)
        return float(word in _YES)
    try:
        value = float(text)
    except ValueError:
        value = np.nan
    check(np.isfinite(value), f"{column} must be a number", found)
    return value


def _spread(target: Target, values: tuple[tuple[float, ...], ...]) -> str:
    """How the labels are spread over cases."""
    array = np.array(values)
    if target.kind in ("binary", "multiclass"):
        counts = Counter(array[:, 0].astype(int).tolist())
        return ", ".join(f"{name} {counts[c]}" for c, name in enumerate(target.names))
    if target.kind == "multilabel":
        sums = array.sum(axis=0).astype(int)
        return ", ".join(f"{n} {c}" for n, c in zip(target.names, sums, strict=True))
    if target.kind == "regression":
        return f"{array.min():g} to {array.max():g}, median {np.median(array):g}"
    return f"{int(array[:, 0].sum())} events, median time {np.median(array[:, 1]):g}"
