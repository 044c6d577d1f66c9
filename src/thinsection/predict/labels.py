"""Labels joined to stored embeddings: which cases train, on what, and why the others do not."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy.special import expit, softmax

from thinsection.config import option
from thinsection.errors import ConfigError, require
from thinsection.pipeline.folder import one_address, open_results
from thinsection.probe.data import files as stored
from thinsection.probe.data.files import TextRow, check
from thinsection.probe.groups import CASE_COLUMNS, group_rows, patient_of
from thinsection.stages.stage import ledger_facts
from thinsection.store.ledger import SLIDES

Kind = Literal["binary", "multiclass", "multilabel", "regression", "cox", "discrete"]
TaskName = Literal["auto", "binary", "multiclass", "multilabel", "regression", "cox", "discrete"]
Floats = npt.NDArray[np.float64]
Found = tuple[dict[str, Path], dict[str, str], str]  # what `feature_files` gives
INTERVALS = 4  # of time in 'discrete', with equally many events each
MOST_CLASSES = 10  # different numbers that are taken for classes
_SHOWN = 3  # names in a line of the account
_HOMES = ("h5_files", "pt_files", "tile_embeddings")  # of embeddings: CLAM's, slide2vec's
_NAMES = {"PATIENT": "case_id", "FILENAME": "slide_id"}  # STAMP's columns
_FLAGS = dict.fromkeys(("1", "1.0", "true", "yes"), 1.0)
_FLAGS |= dict.fromkeys(("0", "0.0", "false", "no"), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelsConfig:
    """What is learnt, and from which embeddings."""

    labels: Path | None = option(None, "CSV, TSV or Parquet: slide_id or case_id, and the target")
    target: tuple[str, ...] = option((), "column that is learnt; repeat for several labels")
    time: str | None = option(None, "column of the time to the event or the end; target: the event")
    task: TaskName = option("auto", "what the target is; auto: by its values, and it is said")
    features: str | None = option(None, "embeddings, where RESULTS has several: NAME or GRID/NAME")

    @property
    def columns(self) -> tuple[str, ...]:
        """Of the table: what is learnt, and the time."""
        return (*self.target, *filter(None, [self.time]))


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

    def answers(self, logits: npt.NDArray[np.floating]) -> Floats:
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

    def risk(self, answers: Floats) -> Floats:
        """One number (n,) that is higher the earlier the event: minus the mean interval."""
        return answers[:, 0] if self.kind == "cox" else -answers @ np.arange(len(self.names))

    def cells(self, answers: Sequence[float]) -> dict[str, Any]:
        """Answers (K,) as cells of a table, empty ones for (): the class or risk, then each."""
        said, first = np.array([answers]), dict[str, Any]()
        if self.exclusive:
            first["prediction"] = self.names[int(said.argmax())] if said.size else None
        elif self.kind == "discrete":
            first["risk"] = float(self.risk(said)[0]) if said.size else None
        begin = "" if self.kind in ("cox", "regression") else "p_"
        return first | self.named(begin, answers)

    def named(self, begin: str, values: Sequence[float]) -> dict[str, Any]:
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
    values: tuple[tuple[float, ...], ...]  # class; 0 or 1 a label; value; or event and time
    account: tuple[str, ...] = ()  # what matched, what did not, and why

    @property
    def array(self) -> Floats:
        """`values`, (n, T)."""
        return np.array(self.values, dtype=np.float64)

    @property
    def paths(self) -> list[list[Path]]:
        """`files`."""
        return [[Path(file) for file in files] for files in self.files]

    @property
    def strata(self) -> npt.NDArray[np.int64]:
        """What folds hold alike: class, event, a value's quarter, how many labels a case has."""
        values = self.array
        if self.target.kind == "regression":
            return np.searchsorted(np.quantile(values, (0.25, 0.5, 0.75)), values[:, 0])
        many = self.target.kind == "multilabel"
        return (values.sum(axis=1) if many else values[:, 0]).astype(np.int64)


def several(items: tuple[str, ...]) -> tuple[str, ...]:
    """Slides (or files) of a case that has several; of another its case says all."""
    return items if len(items) > 1 else ()


def feature_files(data: Path, features: str | None = None) -> Found:
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
    folder, suffixes = home or stored.features_folder(data, "features"), stored.EMBEDDING_SUFFIXES
    check(folder.is_dir(), "data must be a folder", repr(str(folder)))
    files = sorted(p for p in folder.iterdir() if p.suffix.lower() in suffixes)
    got = f"none of {', '.join(suffixes)} in {str(folder)!r}; run `thinsection embed`"
    check(files, "data must hold embeddings", got)
    return {p.stem: p for p in files}, {}, folder.name


def read_cohort(data: Path, config: LabelsConfig) -> Cohort:
    """The cases that have both embeddings and labels, with an account of the others.

    A row says of a slide (slide_id), or of a case (case_id) whose slides are those that the
    results' cohort, else a TCGA barcode, else the slide's very name gives it.

    Memory: the table, and some 100 bytes a slide.

    Raises DatasetError, ConfigError: no such column, nothing matches, different labels in a case.
    """
    rule, got = "labels and target must be given", "none; pass --labels FILE --target COLUMN"
    require(config.labels and config.target, rule, got, error=ConfigError)
    path, columns = Path(config.labels or ""), config.columns
    rows = [{_NAMES.get(k, k): v for k, v in r.items()} for r in stored.read_rows(path, columns)]
    case_column = next((name for name in CASE_COLUMNS if name in rows[0]), "")
    key = "slide_id" if "slide_id" in rows[0] else case_column
    found = f"{', '.join(rows[0])} in {str(path)!r}"
    check(key, "labels must have the column slide_id or case_id", found)
    files, lacking, place = feature_files(data, config.features)
    slides_of = _slides_by(key, data, files)
    pairs, missing, blank = list[tuple[str, TextRow]](), list[str](), list[str]()
    for row in rows:
        bare = Path(row[key]).stem  # tables often keep the suffix of a file
        name = bare if row[key] not in slides_of and bare in slides_of else row[key]
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
    of_row = group_rows(used, cases, where=path.name).of_row
    texts, slides = _by_case(pairs, of_row, columns, path.name)
    target, values, spread = _learnt([*texts.values()], config, path.name)
    kind = f"{target.kind}{' (by its values)' * (config.task == 'auto')}"
    told = [f"{len(set(used))} slides of {len(texts)} cases train", *lines]
    known: dict[str, Any] = {"target": target, "place": place, "cases": tuple(texts)}
    known["slides"] = tuple(map(tuple, slides.values()))
    known["values"] = tuple(map(tuple, values.tolist()))
    paths = tuple(tuple(str(files[s].absolute()) for s in own) for own in slides.values())
    account = (*told, f"{', '.join(columns)}: {kind}: {spread}")
    return Cohort(**known, files=paths, account=account)


def _by_case(
    pairs: Sequence[tuple[str, TextRow]], cases: Sequence[str], columns: Sequence[str], where: str
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Case -> its label's texts, which all of its rows have, and case -> its slides."""
    texts, slides = dict[str, list[str]](), defaultdict[str, list[str]](list)
    for (slide, row), case in zip(pairs, cases, strict=True):
        own = [row[c] for c in columns]
        first = texts.setdefault(case, own)
        got = f"{first} and {own} for {case!r} in {where!r}"
        check(first == own, "slides of a case must have the same label", got)
        slides[case] += [slide] * (slide not in slides[case])
    return texts, slides


def _slides_by(key: str, data: Path, files: dict[str, Path]) -> dict[str, list[str]]:
    """Slides by what a row's key names: themselves, or their case."""
    if key == "slide_id":
        return {slide: [slide] for slide in files}
    told = open_results(data).ledgers if (data / SLIDES).is_dir() else {}
    of_case = defaultdict(list)
    for slide in files:
        patient = told[slide].slide.get("patient_id") if slide in told else None
        of_case[str(patient or patient_of(slide))].append(slide)
    return of_case


def _listed(names: Sequence[str], what: str) -> list[str]:
    more = ", ..." if len(names) > _SHOWN else ""
    return [f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{more}"] if names else []


def _learnt(
    texts: Sequence[Sequence[str]], config: LabelsConfig, where: str
) -> tuple[Target, Floats, str]:
    """The target, the values (n, T) of the cases, and how these are spread, in words."""
    kind = config.task if config.task != "auto" else _kind(texts, config)
    survival, columns = kind in ("cox", "discrete"), config.columns
    right = len(config.target) == 1 or kind == "multilabel"
    rule = f"{kind} must have {'one target and --time' if survival else 'one target, no --time'}"
    require(right and survival == bool(config.time), rule, columns, error=ConfigError)
    target = Target(kind=kind, columns=columns, names=columns)
    if target.exclusive:
        names, labels = stored.encode_labels([text for (text,) in texts], where)
        need = len(names) == 2 if kind == "binary" else len(names) >= 2
        check(need, f"{kind} must have {'two' if kind == 'binary' else 'several'} classes", names)
        counts = zip(names, np.bincount(labels), strict=True)
        spread = ", ".join(f"{name} {count}" for name, count in counts)
        return replace(target, names=names), labels[:, None].astype(np.float64), spread
    flags = [kind == "multilabel" or (survival and c == config.target[0]) for c in columns]
    numbers = [[_number(*cell, where) for cell in zip(row, columns, flags)] for row in texts]
    values = np.array(numbers, dtype=np.float64)
    sums, middle = values.sum(axis=0), np.median(values, axis=0)
    if kind == "multilabel":
        return target, values, ", ".join(f"{n} {count:.0f}" for n, count in zip(columns, sums))
    if kind == "regression":
        target = replace(target, center=float(values.mean()), spread=float(values.std()) or 1.0)
        return target, values, f"{values.min():g} to {values.max():g}, median {middle[0]:g}"
    events, times, words = values[:, 0] == 1, values[:, 1], f"{sums[0]:.0f} events, median time"
    check(events.any(), "event must be seen in some case", f"only censored cases in {where!r}")
    check(times.min() > 0, "time must be > 0", f"{times.min()} in {where!r}")
    if kind == "cox":
        return replace(target, names=("risk",)), values, f"{words} {middle[1]:g}"
    cuts = np.quantile(times[events], np.linspace(0, 1, INTERVALS + 1)[1:-1])
    edges = tuple(np.unique(cuts).tolist())
    names = (*(f"<= {e:g}" for e in edges), f"> {edges[-1]:g}")
    return replace(target, names=names, edges=edges), values, f"{words} {middle[1]:g}"


def _kind(texts: Sequence[Sequence[str]], config: LabelsConfig) -> Kind:
    """By the columns and the values: two are classes, many numbers are a measure."""
    if config.time or len(config.target) > 1:
        return "cox" if config.time else "multilabel"
    values = {text for (text,) in texts}
    try:
        numbers = {float(value) for value in values}
    except ValueError:
        numbers = set()
    if len(numbers) > MOST_CLASSES or any(number % 1 for number in numbers):
        return "regression"
    return "binary" if len(values) == 2 else "multiclass"


def _number(text: str, column: str, flag: bool, where: str) -> float:
    found = f"{text!r} in {where!r}"
    if flag:
        check(text.lower() in _FLAGS, f"{column} must be 0 or 1", found)
        return _FLAGS[text.lower()]
    try:
        value = float(text)
    except ValueError:
        value = np.nan
    check(np.isfinite(value), f"{column} must be a number", found)
    return value
