"""Labelled and survival cases with the mean vectors of their slides.

From a Patho-Bench task folder, or a CSV: slide_id, optional case_id, and `label`, or `event` and
`time`; optional `split`, whose test rows are dropped (train and val are pooled, then folded).
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from thinsection.errors import DatasetError
from thinsection.probe.case_tables import CaseTable, group_cases
from thinsection.probe.cases import CaseSet, SurvivalSet, mean_vectors
from thinsection.probe.datasets_pathobench import load_pathobench
from thinsection.probe.embedding_files import read_embeddings
from thinsection.probe.protocol import Protocol
from thinsection.probe.tables import TEST, encode_labels, read_table, split_name


def load_case_table(path: Path, protocol: Protocol, *, survival: bool) -> CaseTable:
    """A Patho-Bench task folder, or a CSV.

    Raises:
        DatasetError: neither, or a column is missing.
    """
    if path.is_dir():
        return load_pathobench(path, protocol, survival=survival)
    wanted = ("event", "time") if survival else ("label",)
    rows = read_table(path, ("slide_id", *wanted))
    if "split" in rows[0]:
        rows = [r for r in rows if split_name(r["split"], str(path)) != TEST]
    key = "case_id" if "case_id" in rows[0] else "slide_id"
    facts = {"table": path.name, "split_rule": "the protocol's folds"}
    return group_cases(path.stem, rows, key, wanted, facts=facts)


def labelled_cases(table: CaseTable, folder: Path) -> CaseSet:
    """The cases with the mean vectors of their slides.

    Memory: one slide's embeddings + 4 n D.
    """
    texts = [_label_text(r[table.columns[0]], table.label_names) for r in table.rows]
    if table.label_names:
        names = tuple(table.label_names.values())
        unknown = sorted(set(texts) - set(names))
        if unknown:
            raise DatasetError(
                f"label must be one of {', '.join(names)}, got {unknown[0]!r} in {table.name!r}"
            )
        labels = np.array([names.index(t) for t in texts], dtype=np.int64)
    else:
        names, labels = encode_labels(texts, table.name)
    return CaseSet(
        name=table.name,
        class_names=names,
        ids=table.ids,
        labels=labels,
        vectors=mean_vectors(table.files(folder), read_embeddings),
        folds=table.folds,
        facts=table.facts,
    )


def survival_cases(table: CaseTable, folder: Path) -> SurvivalSet:
    """The cases with their follow-up and the mean vectors of their slides.

    Memory: one slide's embeddings + 4 n D.
    """
    event_column, time_column = table.columns
    try:
        event = np.array([_flag(r[event_column]) for r in table.rows])
        time = np.array([float(r[time_column]) for r in table.rows])
    except ValueError as error:
        raise DatasetError(
            f"{event_column} must be 0 or 1 and {time_column} a number, got {error} in "
            f"{table.name!r}"
        ) from error
    return SurvivalSet(
        name=table.name,
        ids=table.ids,
        event=event,
        time=time,
        vectors=mean_vectors(table.files(folder), read_embeddings),
        folds=table.folds,
        facts=table.facts,
    )


def _label_text(value: str, names: Mapping[str, str]) -> str:
    """What a label value stands for; pandas writes whole numbers of a column with gaps as '1.0'."""
    return names.get(value) or names.get(value.removesuffix(".0"), value)


def _flag(text: str) -> bool:
    words = {"1": True, "0": False, "true": True, "false": False, "1.0": True, "0.0": False}
    if text.lower() not in words:
        raise ValueError(repr(text))
    return words[text.lower()]
