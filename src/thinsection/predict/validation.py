"""Validation of a fixed model on labelled cases that it was not fitted to.

OUT/validation_MODEL/validation.json, index.html   figures with 95 % intervals; their page
                     cases.csv                     truth and prediction of each labelled case;
                                                   `class_at_threshold` is what the figures count

Cases of the training study are left out and named. If all cases are from it, the result
is an internal validation and is called so.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from thinsection.config import as_mapping
from thinsection.errors import DatasetError
from thinsection.evaluation.cases import listed_names
from thinsection.evaluation.labels import Cohort
from thinsection.evaluation.metrics import IndexArray
from thinsection.evaluation.rows import strict
from thinsection.files.atomic import write_json, write_table, write_text
from thinsection.files.tables import path_and_sheet
from thinsection.predict.answering import UNLIKE, Prediction
from thinsection.predict.model_file import ModelCard, versions
from thinsection.predict.pages import validation_page
from thinsection.predict.review import subgroup_tables
from thinsection.predict.tested import Tested
from thinsection.predict.uses import record_use, use_of
from thinsection.predict.validation_figures import SEED, figures
from thinsection.predict.validation_review import (
    beside_training,
    checklist_of,
    copies_of,
    described,
    read_slides,
    read_training_set,
)
from thinsection.report.index import index_address
from thinsection.store.identity import file_sum
from thinsection.store.ledger import SLIDES
from thinsection.types import Document, Json, counted

FEW_INNER_CASES = 50


@dataclass(frozen=True, kw_only=True)
class Locked:
    """Model that is not changed any more."""

    card: ModelCard
    path: Path
    sha256: str  # sha256 of the file


def write_validation(
    out: Path,
    model: Locked,
    cohort: Cohort,
    answered: Sequence[Prediction],
    *,
    table: Path,
    results: Path,
) -> Document:
    """Writes the figures, their page and the table of cases; returns validation.json's content.

    Args:
        out: OUT/validation_MODEL.
        model: the model, whose card has the figures fixed in training.
        cohort: cases with labels.
        answered: predictions of the model for each case, (n,).
        table: file with the labels.
        results: folder of the embeddings.

    Memory: BLOCK_BYTES of weights, and `read_slides`.

    Raises DatasetError: no case is left, or no two times can be compared.
    """
    internal = all(one.seen in ("name", "content") for one in answered)
    members = len(model.card.members)
    left_out = [_why_left_out(one, members if internal else None) for one in answered]
    kept = [i for i, why in enumerate(left_out) if not why]
    if not kept:
        shown = "; ".join(dict.fromkeys(left_out))
        raise DatasetError(
            f"labels must contain cases that can test the model, got none of {len(answered)} "
            f"({shown}); pass cases that are not in its training study"
        )
    scored = cohort.take(kept)
    tested = Tested(
        target=model.card.target,
        cases=scored.cases,
        groups=scored.groups,
        slides=scored.slides,
        fold=_models([answered[i] for i in kept]),
        truth=scored.array,
        answers=np.array([answered[i].answers for i in kept]),
    )
    unscored = [
        *zip(cohort.cases, left_out, strict=True),
        *((name, _new_class_words(label)) for name, label in cohort.new_classes),
    ]
    test_set = read_slides(scored)
    training_set = None
    if not internal:
        training_set = read_training_set(model.path, model.card)
    document: Document = {
        "validation": "internal" if internal else "external",
        **_sources(model, cohort, table),
        "cases": len(kept),
        "slides": sum(map(len, scored.slides)),
        # None: nobody knows whose the cases are
        "patients": tested.groups.total if cohort.unit == "patients" else None,
        "independent": tested.groups.words,
        "unit": tested.groups.unit,
        "units": tested.groups.total,
        "left_out": [{"case": case, "why": why} for case, why in unscored if why],
        **figures(tested, model.card.lock),
        "subgroups": strict(subgroup_tables(scored, tested, seed=SEED)),
        "beside_training": beside_training(
            described(test_set.cohort, test_set.contents.num_tiles.tolist()),
            model.card.data,
        ),
        "copies": copies_of(test_set, training_set, answered, internal=internal),
        "uses": None,
    }
    if not internal:
        folders = [path_and_sheet(table)[0].absolute().parent]
        if (results / SLIDES).is_dir() and results != folders[0]:
            folders.append(results)
        use = use_of(
            test_set.cohort,
            test_set.contents.digests,
            model=model.card.name,
            sha256=model.sha256,
            date=datetime.now(UTC).isoformat(),
        )
        uses = record_use(use, folders)
        document["uses"] = {"number": uses.number, **as_mapping(uses)}
    if len(kept) < len(cohort.cases):
        document["account"].append(
            f"{len(cohort.cases) - len(kept)} of these {counted(len(cohort.cases), 'case')} not "
            f"scored, see the warnings: the test set is {counted(len(kept), 'case')}"
        )
    lock = model.card.lock
    threshold_warnings = []
    if lock is not None and lock.thresholds and lock.inner_cases < FEW_INNER_CASES:
        threshold_warnings.append(
            f"in training the threshold was chosen on only {lock.inner_cases} cases of the folds' "
            "validation sets: other cases could have given a different threshold"
        )
    document["warnings"] = [
        *cohort.warnings,
        *_warnings(cohort, answered, kept),
        *threshold_warnings,
        *document["copies"]["warnings"],
        *use_lines(document),
    ]
    items = checklist_of(model.card, scored, document)
    document["checklist"] = [item._asdict() for item in items]
    lines = _case_lines(model.card, cohort, answered, left_out)
    write_table(out / "cases.csv", lines)
    write_json(out / "validation.json", document)
    page = validation_page(document, tested, home=index_address(out))
    write_text(out / "index.html", page)
    return document


def _sources(model: Locked, cohort: Cohort, table: Path) -> Document:
    """Model, labels and target of a test, and how the labels were read."""
    target = model.card.target
    new_classes = {label for _, label in cohort.new_classes}
    reading = [asdict(one) for one in cohort.reading]
    for row in reading:
        if row["becomes"] in new_classes:
            row["becomes"] = "not used: the model does not have this class"
    return {
        "model": {
            "name": model.card.name,
            "file": model.path.name,
            "sha256": model.sha256,
            "head": model.card.head.head,
            "members": len(model.card.members),
            "training_scores": dict(model.card.scores),
        },
        "labels": {"file": table.name, "sha256": file_sum(path_and_sheet(table)[0])},
        "task": target.kind,
        "task_words": target.kind_words,
        "target": list(cohort.target.columns),
        "positive": target.positive_name or None,
        "positive_words": target.positive_words,
        "order_words": target.order_words,
        "outputs": list(target.names),
        "account": list(cohort.account),
        "reading": reading,
        "versions": versions(),
    }


def _new_class_words(label: str) -> str:
    return f"class {label!r}, which the model does not have"


def use_lines(document: Mapping[str, Json]) -> Iterator[str]:
    """Sentences on the models that were tested on the same cases."""
    uses = document["uses"]
    if uses is None:
        return
    if uses["earlier"]:
        shown = ", ".join(_use_words(one, document["cases"]) for one in uses["earlier"])
        yield (
            f"this is the {nth(uses['number'])} model tested on these cases, after {shown}: "
            "the best of several scores is too high"
        )
    if uses["later"]:
        shown = ", ".join(_use_words(one, document["cases"]) for one in uses["later"])
        yield f"tested on these cases later: {shown}"
    if uses["missing"]:
        yield uses["missing"]


def _use_words(use: Mapping[str, Json], cases: int) -> str:
    """Model and day of another test, and how many cases it shares if not all."""
    shared = use["shared"]
    part = "" if shared == cases else f", {shared} of these {cases} cases"
    return f"{use['model']} ({use['date']}{part})"


def nth(number: int) -> str:
    """1st, 2nd, 3rd, 4th, 11th, ..."""
    teens = 10 <= number % 100 <= 20
    ending = "th" if teens else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _models(scored: Sequence[Prediction]) -> IndexArray:
    """Number (n,) of the models that predicted each case; equal for cases of the same models.

    Cases of a new cohort have all models. A training case has those that were not trained on it, so
    an internal validation compares cases within a fold, as `train` does.
    """
    numbers: dict[tuple[int, ...], int] = {}
    return np.array([numbers.setdefault(one.members, len(numbers)) for one in scored])


def _why_left_out(one: Prediction, members: int | None) -> str:
    """Reason why a case is not scored; '' if it is scored.

    `members`: of an internal validation, models of folds; then a training case is scored by those
    that were not trained on it.
    """
    if members is None and one.seen == "name":
        return "part of the training study"
    if members is None and one.seen == "content":
        return "the embeddings of a training slide with another name"
    if not one.answers:
        return f"no prediction: {one.error}"
    if len(one.members) == members:
        return (
            "part of the training study, and the models of all folds were trained on it"
        )
    return ""


def _warnings(
    cohort: Cohort, answered: Sequence[Prediction], kept: Sequence[int]
) -> list[str]:
    """Messages that a reader must know before the figures."""
    warnings = []
    near = [cohort.cases[i] for i in kept if answered[i].seen == "near"]
    if near:
        warnings.append(
            f"nearly the mean embedding of a training slide: {len(near)} of {len(kept)} cases "
            f"({listed_names(near)}); if they show the same tissue, the scores are too "
            "optimistic"
        )
    unlike = [
        cohort.cases[i]
        for i in kept
        if any(line.startswith(UNLIKE) for line in answered[i].warnings)
    ]
    if unlike:
        warnings.append(
            f"{UNLIKE} cases: {len(unlike)} of {len(kept)} cases ({listed_names(unlike)}); the "
            "mean embedding of a slide is farther from the training cases than that of 99 % of them"
        )
    return warnings


def _cells_at_threshold(card: ModelCard, one: Prediction) -> dict[str, object]:
    """Result of a case at the fixed thresholds; empty cells if it has no prediction.

    For two classes the class; for each of several labels 1 or 0.
    """
    cells: dict[str, object] = {}
    if card.lock is None:
        return cells
    names = card.target.names
    first, second = card.target.positive_first
    for name, threshold in card.lock.thresholds.items():
        positive = None
        if one.answers:
            positive = one.answers[names.index(name)] >= threshold
        if card.target.kind == "binary":
            class_at_threshold = names[first] if positive else names[second]
            cells["class_at_threshold"] = class_at_threshold if one.answers else None
        else:
            flag = None if positive is None else int(positive)
            cells[f"at_threshold_{name}"] = flag
    return cells


def _case_lines(
    card: ModelCard,
    cohort: Cohort,
    answered: Sequence[Prediction],
    left_out: Sequence[str],
) -> list[dict[str, object]]:
    """Rows of cases.csv."""
    lines = []
    for i, one in enumerate(answered):
        line: dict[str, object] = {
            "case_id": cohort.cases[i],
            "patient_id": cohort.patients[i],
            "slides": ";".join(cohort.slides[i]),
            **cohort.target.truth_cells(cohort.values[i]),
            **_cells_at_threshold(card, one),
            **card.target.cells(one.answers),
            "members": len(one.members),
            "left_out": left_out[i],
            "warnings": "; ".join(one.warnings),
        }
        lines.append(line)
    for name, label in cohort.new_classes:
        why = _new_class_words(label)
        lines.append({"case_id": name, "truth": label, "left_out": why})
    return lines
