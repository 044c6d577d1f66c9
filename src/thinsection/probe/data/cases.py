"""Tables of cases: which slides, labels or follow-ups, folds; then the vectors of their slides.

A Patho-Bench task is a folder with `k=all.tsv` (case_id, slide_id, fold_0 ..., the label columns)
and `config.yaml` (task_col, sample_col, label_dict; `<task>_event` and `<task>_days` for survival).
Any other table, or a list of nanopath's: slide_id, optional case_id, split and fold_0 ..., and
`label`, or `event` and `time`.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import (
    ConfigError,
    DatasetError,
    InvalidInputError,
    rewording,
    slide_boundary,
)
from thinsection.evaluation import embeddings, tables
from thinsection.evaluation.cases import (
    CASE_COLUMNS,
    Groups,
    case_rows,
    one_per_case,
    slides_and_patients,
    spelling_notes,
    table_groups,
    take_rows,
)
from thinsection.evaluation.cell_values import missing_words, read_number
from thinsection.evaluation.embeddings import Embeddings
from thinsection.evaluation.labels import encode_labels
from thinsection.evaluation.metrics import Flags, FloatVector, Fold
from thinsection.evaluation.parts import PATHOBENCH_TABLE
from thinsection.evaluation.tables import TEST, TRAIN, VAL, TextRow, split_name
from thinsection.extras import importing
from thinsection.files.missing_cells import is_missing
from thinsection.probe.config import DataSection, ProbeConfig
from thinsection.probe.data.sets import CaseSet, SurvivalSet, left_out_fact
from thinsection.probe.protocol import Protocol
from thinsection.types import Json, counted

PATHOBENCH_CONFIG = "config.yaml"
PANDA = {"image_id", "isup_grade"}  # columns of its table

# an id in a list: in quotes of one kind, or without
_LISTED_ID = re.compile(r"""\s*(?:'([^']*)'|"([^"]*)"|([^,]+))""")

ReadEmbeddings = Callable[[Path], npt.NDArray[np.floating]]  # a file to (N, D)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseTable:
    """Cases before their embeddings are read; `ids` are in order of appearance."""

    name: str
    ids: tuple[str, ...]
    slides: tuple[tuple[str, ...], ...]  # of each case
    rows: tuple[TextRow, ...]  # of each case: its cells of `columns` and `fold_columns`
    columns: tuple[str, ...]  # of the label, or of the event and the time
    fold_columns: tuple[str, ...] = ()
    # of label values, where known
    label_names: Mapping[str, str] = field(default_factory=dict)
    groups: Groups  # the patients of the cases
    facts: dict[str, Json] = field(default_factory=dict)

    def of_slides(self, usable: Collection[str]) -> "CaseTable":
        """Cases with these slides alone; a case that has none of them goes."""
        slides = tuple(
            tuple(slide for slide in of_case if slide in usable)
            for of_case in self.slides
        )
        kept = [number for number, of_case in enumerate(slides) if of_case]
        columns = ("ids", "slides", "rows", "groups")
        return take_rows(replace(self, slides=slides), kept, columns)

    @property
    def folds(self) -> tuple[Fold, ...] | None:
        """Folds of the file, which hold out both val and test; None where it has none."""
        return (
            tables.column_folds(self.rows, self.fold_columns, repr(self.name)) or None
        )


def load_case_table(
    path: Path, protocol: Protocol, data: DataSection | None = None, *, survival: bool
) -> CaseTable:
    """A Patho-Bench task folder, or a table whose `sample` ('case', 'slide') has a vector each."""
    data = data or DataSection()
    if data.test is not None:
        raise ConfigError(
            f"test must be a set of tiles, got {str(data.test)!r}; give its cases the split "
            'test in the table, and pass held_out="test"'
        )
    if path.is_dir():
        return _pathobench(path, protocol, survival=survival)
    columns = ("event", "time") if survival else ("label",)
    listed = tables.read_rows(path, ())
    if listed[0].keys() >= PANDA:
        # without the labels that PANDA's winners found noisy, as in eva
        clean = [r for r in listed if r.get("noise_ratio_10", "0") in ("0", "0.0")]
        listed = [{"slide_id": r["image_id"], "label": r["isup_grade"]} for r in clean]
    tables.require_columns(listed[0], ("slide_id", *columns), path)
    rows = tables.open_rows(listed, str(path), data.held_out)
    if data.held_out == TEST:
        if "split" not in rows[0]:
            raise DatasetError(
                f"table must have a split column with test rows, got none in {path.name!r}"
            )
        rows = [{**row, "fold_test": row["split"]} for row in rows]
    return _grouped(
        rows,
        columns,
        name=path.stem,
        key="slide_id" if data.sample == "slide" else "",
        facts={"table": path.name, "split_rule": "the folds of the protocol"},
    )


def _pathobench(root: Path, protocol: Protocol, *, survival: bool) -> CaseTable:
    """The cases of a task with its folds, its official split where it has one.

    Without `file_folds` only what trains in the first fold: the rest is a sealed test then.
    """
    table = root / PATHOBENCH_TABLE
    config_path = root / PATHOBENCH_CONFIG
    if not (table.is_file() and config_path.is_file()):
        raise tables.unexpected(
            root, "a Patho-Bench task", [PATHOBENCH_TABLE, PATHOBENCH_CONFIG]
        )
    with importing("Patho-Bench tasks", "yaml"):
        import yaml
    with rewording(
        "config must be YAML", config_path, OSError, yaml.YAMLError, error=DatasetError
    ):
        config = yaml.safe_load(config_path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise DatasetError(
            f"config must be a mapping, got {config!r} in {str(config_path)!r}"
        )
    task = config.get("task_col")
    if not isinstance(task, str):
        raise DatasetError(
            f"config must have a text task_col, got {task!r} in {str(config_path)!r}"
        )
    columns = (f"{task}_event", f"{task}_days") if survival else (task,)
    key = str(config.get("sample_col") or "case_id")
    where = str(table)
    rows = tables.read_rows(table, (key, "slide_id", *columns))
    first_fold = next((c for c in rows[0] if c.startswith("fold_")), "")
    if not first_fold:
        raise DatasetError(
            f"table must have fold_* columns, got {list(rows[0])} in {where!r}"
        )
    kept = rows
    if not protocol.file_folds:
        kept = [
            row
            for row in rows
            if row[first_fold] and split_name(row[first_fold], where) == TRAIN
        ]
    label_names: dict[object, object] = {}
    if not survival:
        label_names = config.get("label_dict") or {}
    return _grouped(
        kept,
        columns,
        name=f"{root.parent.name}/{root.name}",
        key=key,
        folded=protocol.file_folds,
        label_names={str(value): str(name) for value, name in label_names.items()},
        facts={
            "task": task,
            "split_rule": f"training rows of {first_fold}, then the protocol's folds",
            "sealed_rows_dropped": len(rows) - len(kept),
        },
    )


def _grouped(
    rows: Sequence[TextRow],
    columns: tuple[str, ...],
    *,
    name: str,
    key: str,
    facts: Mapping[str, Json],
    folded: bool = True,
    label_names: Mapping[str, str] | None = None,
) -> CaseTable:
    """One entry per case (or value of `key`), with folds; its rows must agree on both and label."""
    if not rows:
        raise DatasetError(f"table must have training cases, got none in {name!r}")
    all_rows = rows
    rows = [row for row in all_rows if not any(is_missing(row[c]) for c in columns)]
    if not rows:
        raise DatasetError(f"table must have cases with labels, got none in {name!r}")
    facts = {**facts}
    if len(rows) < len(all_rows):
        without = [r for r in all_rows if any(is_missing(r[c]) for c in columns)]
        ids = [row.get(key or "slide_id", "") for row in without]
        facts["missing"] = missing_words(without, columns, ids)
    by_slide: list[TextRow] = []
    for row in rows:
        by_slide += [{**row, "slide_id": s} for s in _slide_ids(row["slide_id"])]
    if not by_slide:
        raise DatasetError(
            f"slide_id must name the slides of a case, got none in {name!r}"
        )
    groups = table_groups(by_slide, repr(name))
    assert groups is not None  # there are slides
    named_cases = []
    for row in by_slide:
        cells = [row.get(column) for column in (key, *CASE_COLUMNS)]
        named_cases.append(next(filter(None, cells), ""))
    notes = spelling_notes(groups.slide_ids, named_cases)
    if notes:
        facts["ids"] = notes[0]
    cases = case_rows(groups.slide_ids, named_cases)
    fold_columns = tuple(c for c in rows[0] if folded and c.startswith("fold_"))
    names = (*columns, *fold_columns)
    cells_by_case = one_per_case(
        [[row[column] for column in names] for row in by_slide],
        cases,
        names,
        name,
        '; or pass sample="slide"',
    )
    slides_by_case, patients = slides_and_patients(
        [row["slide_id"] for row in by_slide], cases, groups, name
    )
    case_list = []
    for case_cells in cells_by_case.values():
        case_row = dict(zip(names, case_cells, strict=True))
        for column in fold_columns:
            is_train = split_name(case_row[column], repr(name)) == TRAIN
            case_row[column] = TRAIN if is_train else VAL
        case_list.append(case_row)
    table = CaseTable(
        name=name,
        ids=tuple(cells_by_case),
        slides=tuple(map(tuple, slides_by_case.values())),
        rows=tuple(case_list),
        columns=columns,
        fold_columns=fold_columns,
        label_names=label_names or {},
        groups=Groups(groups.unit, patients),
        facts=facts,
    )
    if table.folds:
        facts["split_rule"] = f"{counted(len(table.folds), 'fold')} of the file"
    return table


def _slide_ids(text: str) -> list[str]:
    """One id, or a list written as "['a', 'b']" (Patho-Bench writes both)."""
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return [text] if text else []
    parts = ["".join(groups).strip() for groups in _LISTED_ID.findall(text[1:-1])]
    return [part for part in parts if part]


def load_cases(path: Path, config: ProbeConfig) -> CaseSet:
    """Labelled cases of a Patho-Bench task folder or a table slide_id, label[, case_id].

    Memory: one slide's embeddings + 4 n D.
    """
    listed = load_case_table(path, config.protocol, config.data, survival=False)

    table, fields = _read_vectors(listed, config)
    label_names = table.label_names
    texts = []
    for row in table.rows:
        value = row[table.columns[0]]
        # pandas writes whole numbers of a column with gaps as '1.0'
        whole = value.removesuffix(".0")
        texts.append(label_names.get(value) or label_names.get(whole, value))
    where = repr(table.name)
    names, labels = encode_labels(texts, where, tuple(label_names.values()))
    return CaseSet(class_names=names, labels=labels, **fields)


def load_survival(path: Path, config: ProbeConfig) -> SurvivalSet:
    """Cases with event and time; memory as of `load_cases`."""
    listed = load_case_table(path, config.protocol, config.data, survival=True)
    _follow_ups(listed)  # a wrong cell is named before files are read
    table, fields = _read_vectors(listed, config)
    event, time = _follow_ups(table)
    return SurvivalSet(event=event, time=time, **fields)


def _follow_ups(
    table: CaseTable,
) -> tuple[Flags, FloatVector]:
    """Event and time (n,) of each case."""
    event_column, time_column = table.columns
    events = []
    times = []
    for row in table.rows:
        cell = row[event_column]
        events.append(read_number(cell, event_column, table.name, flag=True))
        times.append(read_number(row[time_column], time_column, table.name))
    return np.array(events) == 1, np.array(times)


def _read_vectors(
    table: CaseTable, config: ProbeConfig
) -> tuple[CaseTable, dict[str, Any]]:
    """The cases that have embeddings, and the fields of their set but for labels.

    A slide without embeddings that can be used is left out. Memory: one slide's embeddings + 8 D
    for each slide.
    """
    folder = config.data.embeddings
    if folder is None or not folder.is_dir():
        raise ConfigError(
            f"embeddings must be a folder of slides, got {folder}; pass embeddings=DIR "
            "(results of a run, or TRIDENT's feature folder)"
        )
    left_out: dict[str, str] = {}
    slide_ids = [*chain.from_iterable(table.slides)]
    files = embeddings.slide_files(folder, slide_ids, left_out.__setitem__)
    means: dict[Path, FloatVector] = {}
    for slide, file in files.items():
        with slide_boundary(slide, left_out.__setitem__):
            means[file] = _mean_of_tiles(file, embeddings.read_embeddings(file))
    if not means:
        reasons = "; ".join(f"{slide}: {why}" for slide, why in left_out.items())
        raise DatasetError(
            f"a slide must have embeddings that can be used, got {reasons}"
        )
    table = table.of_slides({slide for slide, file in files.items() if file in means})
    files_of_case = tuple(
        tuple(files[slide] for slide in slides) for slides in table.slides
    )
    facts = {
        **table.facts,
        **left_out_fact(left_out),
        **embeddings.encoder_facts(files_of_case[0][0]),
    }
    fields = {
        "name": table.name,
        "ids": table.ids,
        "vectors": mean_vectors(files_of_case, lambda file: means[file][None]),
        "files": files_of_case,
        "folds": table.folds,
        "groups": table.groups,
        "allow_leakage": config.data.allow_leakage,
        "facts": facts,
    }
    return table, fields


def _mean_of_tiles(path: Path, tiles: npt.NDArray[np.floating]) -> FloatVector:
    """Mean (D,) of the embeddings of a slide."""
    if not len(tiles):
        raise InvalidInputError(
            f"a slide must have tile embeddings, got none in {str(path)!r}"
        )
    mean: FloatVector = tiles.mean(axis=0, dtype=np.float64)
    embeddings.check_finite(mean[None], [path.stem])
    return mean


def mean_vectors(
    files_of_case: Sequence[Sequence[Path]], read: ReadEmbeddings
) -> Embeddings:
    """Mean of tile embeddings per slide, then mean of slides per case, (n, D).

    Memory: one slide's embeddings + 4 n D.
    """
    vectors: list[FloatVector] = []
    for slides in files_of_case:
        if not slides:
            raise InvalidInputError(
                "each case must have a slide, got a case without one"
            )
        means: list[FloatVector] = []
        for path in slides:
            means.append(_mean_of_tiles(path, read(path)))
        vector = np.mean(means, axis=0)
        if vectors and len(vector) != len(vectors[0]):
            raise InvalidInputError(
                f"embeddings must have the same number of channels, got {len(vector)} after "
                f"{len(vectors[0])} in {str(slides[0])!r}; use the embeddings of one encoder"
            )
        vectors.append(vector)
    return np.stack(vectors).astype(np.float32)
