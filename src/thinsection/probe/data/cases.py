"""Tables of cases: which slides, labels or follow-ups, folds; then the vectors of their slides.

A Patho-Bench task is a folder with `k=all.tsv` (case_id, slide_id, fold_0 ..., the label columns)
and `config.yaml` (task_col, sample_col, label_dict; `<task>_event` and `<task>_days` for survival).
Any other table, or a list of nanopath's: slide_id, optional case_id, split and fold_0 ..., and
`label`, or `event` and `time`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import ConfigError, DatasetError, importing, require, rewording
from thinsection.evaluation import embeddings, tables
from thinsection.evaluation.cases import (
    CASE_COLUMNS,
    Groups,
    case_rows,
    spelling_notes,
    table_groups,
)
from thinsection.evaluation.embeddings import Embeddings
from thinsection.evaluation.labels import drop_missing, encode_labels, read_number
from thinsection.evaluation.metrics import Fold
from thinsection.evaluation.parts import PATHOBENCH_TABLE
from thinsection.evaluation.tables import TEST, TRAIN, TextRow, check, split_name
from thinsection.probe.config import DataSection, ProbeConfig
from thinsection.probe.data.sets import CaseSet, SurvivalSet
from thinsection.probe.protocol import Protocol

PATHOBENCH_CONFIG = "config.yaml"
PANDA = {"image_id", "isup_grade"}  # columns of its table

ReadEmbeddings = Callable[[Path], Embeddings]  # a file to (N, D)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseTable:
    """Cases before their embeddings are read; `ids` are in order of appearance."""

    name: str
    ids: tuple[str, ...]
    slides: tuple[tuple[str, ...], ...]  # of each case
    rows: tuple[TextRow, ...]  # the first of each case
    columns: tuple[str, ...]  # of the label, or of the event and the time
    label_names: Mapping[str, str] = field(
        default_factory=dict
    )  # of label values, where known
    groups: Groups  # the patients of the cases
    folds: tuple[Fold, ...] | None = None  # of the file
    facts: dict[str, Any] = field(default_factory=dict)


def load_case_table(
    path: Path, protocol: Protocol, data: DataSection | None = None, *, survival: bool
) -> CaseTable:
    """A Patho-Bench task folder, or a table whose `sample` ('case', 'slide') has a vector each."""
    data = data or DataSection()
    got = (
        f"{str(data.test)!r}; list it in the table as split test, with --held-out test"
    )
    require(data.test is None, "test must be a cohort of tiles", got, error=ConfigError)
    if path.is_dir():
        return _pathobench(path, protocol, survival=survival)
    columns, listed = (
        ("event", "time") if survival else ("label",),
        tables.read_rows(path, ()),
    )
    if (
        listed[0].keys() >= PANDA
    ):  # without the labels that PANDA's winners found noisy, as in eva
        kept = [r for r in listed if r.get("noise_ratio_10", "0") in ("0", "0.0")]
        listed = [{"slide_id": r["image_id"], "label": r["isup_grade"]} for r in kept]
    tables.require_columns(listed[0], ("slide_id", *columns), path)
    rows = tables.open_rows(listed, str(path), data.held_out)
    if data.held_out == TEST:
        rule = "table must have a split with test rows"
        check("split" in rows[0], rule, f"none in {path.name!r}")
        rows = [{**r, "fold_test": r["split"]} for r in rows]
    facts = {"table": path.name, "split_rule": "the protocol's folds"}
    key = "slide_id" if data.sample == "slide" else ""
    return _grouped(rows, key, columns, name=path.stem, facts=facts)


def _pathobench(root: Path, protocol: Protocol, *, survival: bool) -> CaseTable:
    """The cases of a task with its folds, its official split where it has one.

    Without `file_folds` only what trains in the first fold: the rest is a sealed test then.
    """
    table, config_path = root / PATHOBENCH_TABLE, root / PATHOBENCH_CONFIG
    if not (table.is_file() and config_path.is_file()):
        raise tables.unexpected(
            root, "a Patho-Bench task", [PATHOBENCH_TABLE, PATHOBENCH_CONFIG]
        )
    with importing("Patho-Bench tasks need PyYAML", "probe"):
        import yaml
    with rewording(
        "config must be YAML", config_path, OSError, yaml.YAMLError, error=DatasetError
    ):
        config = yaml.safe_load(config_path.read_text(encoding="utf-8"))
    found, where = f"{config!r} in {str(config_path)!r}", str(table)
    check(isinstance(config, dict), "config must be a mapping", found)
    task = config.get("task_col")
    found = f"{task!r} in {str(config_path)!r}"
    check(isinstance(task, str), "config must have a text task_col", found)
    columns = (f"{task}_event", f"{task}_days") if survival else (str(task),)
    key = str(config.get("sample_col") or "case_id")
    rows = tables.read_rows(table, (key, "slide_id", *columns))
    first = next((c for c in rows[0] if c.startswith("fold_")), "")
    check(first, "table must have fold_* columns", f"{list(rows[0])} in {where!r}")
    trains = [r for r in rows if r[first] and split_name(r[first], where) == TRAIN]
    kept = rows if protocol.file_folds else trains
    label_dict = {} if survival else config.get("label_dict") or {}
    rule = f"training rows of {first}, then the protocol's folds"
    facts = {
        "task": task,
        "split_rule": rule,
        "sealed_rows_dropped": len(rows) - len(kept),
    }
    known: dict[str, Any] = {"name": f"{root.parent.name}/{root.name}", "facts": facts}
    known["label_names"] = {str(k): str(v) for k, v in label_dict.items()}
    return _grouped(kept, key, columns, folded=protocol.file_folds, **known)


def _grouped(
    rows: Sequence[TextRow],
    key: str,
    columns: tuple[str, ...],
    folded: bool = True,
    **known: Any,
) -> CaseTable:
    """One entry per case (or value of `key`), with folds; its rows must agree on both and label."""
    name = known["name"]
    check(rows, "table must leave cases to train on", f"none in {name!r}")
    rows, missing = drop_missing(rows, columns, key or "slide_id")
    check(rows, "table must leave cases with labels", f"none in {name!r}")
    known["facts"] |= {"missing": missing[0]} if missing else {}
    listed = [
        {**row, "slide_id": s} for row in rows for s in _slide_ids(row["slide_id"])
    ]
    whose = table_groups(listed, repr(name))
    assert whose is not None  # there are slides
    named = [
        next(filter(None, (row.get(c) for c in (key, *CASE_COLUMNS))), "")
        for row in listed
    ]
    notes = spelling_notes(whose.slide_ids, named)
    known["facts"] |= {"ids": notes[0]} if notes else {}
    patients, slides = dict[str, str](), dict[str, list[str]]()  # of the cases
    first: dict[str, TextRow] = {}
    fold_columns = [c for c in rows[0] if c.startswith("fold_")]
    cases = case_rows(whose.slide_ids, named)
    for row, patient, case in zip(listed, whose.of_row, cases, strict=True):
        patients.setdefault(case, patient)
        slides.setdefault(case, []).append(row["slide_id"])
        known_row = first.setdefault(case, row)
        for c in (*columns, *fold_columns):
            found = f"{known_row[c]!r} and {row[c]!r} for {case!r} in {name!r}"
            rule = f"{c} must be the same in all rows of a case"
            check(known_row[c] == row[c], rule, f"{found}; or pass --sample slide")
    used = fold_columns if folded else []
    folds = tuple(_file_fold([*first.values()], c, name) for c in used) or None
    if folds:
        known["facts"]["split_rule"] = (
            f"the file's {len(folds)} fold{'s' * (len(folds) > 1)}"
        )
    known |= {"ids": tuple(first), "rows": tuple(first.values())}
    known |= {
        "slides": tuple(map(tuple, slides.values())),
        "columns": columns,
        "folds": folds,
    }
    return CaseTable(groups=Groups(whose.unit, tuple(patients.values())), **known)


def _file_fold(rows: Sequence[TextRow], column: str, name: str) -> Fold:
    """The fold's training rows, and its held-out rows."""
    training = np.array([split_name(r[column], name) == TRAIN for r in rows])
    found = f"{training.sum()} train of {len(rows)} in {name!r}"
    check(
        {*training} == {True, False},
        f"{column} must hold train and held-out rows",
        found,
    )
    return np.flatnonzero(training), np.flatnonzero(~training)


def _slide_ids(text: str) -> list[str]:
    """One id, or a list written as "['a', 'b']" (Patho-Bench writes both)."""
    inner = text.strip().removeprefix("[").removesuffix("]")
    return [part.strip().strip("'\"") for part in inner.split(",") if part.strip()]


def load_cases(path: Path, config: ProbeConfig) -> CaseSet:
    """Labelled cases of a Patho-Bench task folder or a table slide_id, label[, case_id].

    Memory: one slide's embeddings + 4 n D.
    """
    table = load_case_table(path, config.protocol, config.data, survival=False)
    known, values = table.label_names, [r[table.columns[0]] for r in table.rows]
    # pandas writes whole numbers of a column with gaps as '1.0'
    texts = [known.get(v) or known.get(v.removesuffix(".0"), v) for v in values]
    names, labels = encode_labels(texts, repr(table.name), tuple(known.values()))
    return CaseSet(class_names=names, labels=labels, **_common(table, config))


def load_survival(path: Path, config: ProbeConfig) -> SurvivalSet:
    """Cases with event and time; memory as of `load_cases`."""
    table = load_case_table(path, config.protocol, config.data, survival=True)
    event_column, time_column = table.columns
    events = [
        read_number(r[event_column], event_column, table.name, flag=True)
        for r in table.rows
    ]
    times = [read_number(r[time_column], time_column, table.name) for r in table.rows]
    event = np.array(events) == 1
    time = np.array(times)
    return SurvivalSet(event=event, time=time, **_common(table, config))


def _common(table: CaseTable, config: ProbeConfig) -> dict[str, Any]:
    """What labelled and survival cases share."""
    folder = config.data.embeddings
    if folder is None or not folder.is_dir():
        remedy = "pass --embeddings DIR (a run's output, or TRIDENT's feature folder)"
        raise ConfigError(
            f"embeddings must be a folder of slides, got {folder}; {remedy}"
        )
    by_slide = embeddings.slide_files(
        folder, [s for slides in table.slides for s in slides]
    )
    of_case = tuple(tuple(by_slide[s] for s in slides) for slides in table.slides)
    shared = {name: getattr(table, name) for name in ("name", "ids", "folds", "groups")}
    shared["facts"] = {
        **table.facts,
        **embeddings.encoder_facts(next(iter(by_slide.values()))),
    }
    shared["allow_leakage"] = config.data.allow_leakage
    return {
        **shared,
        "files": of_case,
        "vectors": mean_vectors(of_case, embeddings.read_embeddings),
    }


def mean_vectors(
    files_of_case: Sequence[Sequence[Path]], read: ReadEmbeddings
) -> Embeddings:
    """Mean of tile embeddings per slide, then mean of slides per case, (n, D).

    Memory: one slide's embeddings + 4 n D.
    """
    vectors: list[npt.NDArray[np.float64]] = []
    for slides in files_of_case:
        require(slides, "each case must have a slide", "a case without any")
        means: list[npt.NDArray[np.float64]] = []
        for path in slides:
            tiles, none = read(path), f"none in {str(path)!r}"
            require(len(tiles), "a slide must have tile embeddings", none)
            means.append(tiles.mean(axis=0, dtype=np.float64))
        vectors.append(np.mean(means, axis=0))
        dim, first_dim = len(vectors[-1]), len(vectors[0])
        found = (
            f"{dim} after {first_dim} in {str(slides[0])!r}; were two encoders mixed?"
        )
        require(dim == first_dim, "embeddings must have the same D", found)
    return np.stack(vectors).astype(np.float32)
