"""Facts for reviewers of a validation: who was tested beside who trained, copies, the checklist."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from thinsection.evaluation.audit import copies_between_patients
from thinsection.evaluation.external import Estimate, difference
from thinsection.evaluation.labels import Cohort
from thinsection.evaluation.leaks import Contents, read_usable
from thinsection.evaluation.table_one import prevalences, table_one
from thinsection.predict.answering import Prediction
from thinsection.predict.model_file import ModelCard
from thinsection.predict.tested import Score
from thinsection.predict.tripod import Item, checklist
from thinsection.probe.result import METRIC_WORDS, strict
from thinsection.types import Json, counted

NO_TRAINING = (
    "the model file does not describe its training cohort; train the model again with this "
    "version to have it"
)


class TestSet(NamedTuple):
    """Scored cases with the slides whose embeddings can be read, and what these contain."""

    cohort: Cohort
    contents: Contents


def read_test_set(cohort: Cohort) -> TestSet:
    """Reads the embeddings of scored cases; slides that cannot be read are left out.

    Memory: see `read_usable`.
    """
    files: dict[str, Path] = {}
    for slides, paths in zip(cohort.slides, cohort.paths, strict=True):
        files.update(zip(slides, paths, strict=True))
    damaged: dict[str, str] = {}
    contents = read_usable(files, damaged.__setitem__)
    slides_of_cases = [
        tuple(slide for slide in slides if slide not in damaged)
        for slides in cohort.slides
    ]
    readable = [i for i, slides in enumerate(slides_of_cases) if slides]
    usable = replace(
        cohort.take(readable),
        slides=tuple(slides_of_cases[i] for i in readable),
        files=tuple(
            tuple(str(files[slide]) for slide in slides_of_cases[i]) for i in readable
        ),
    )
    return TestSet(usable, contents)


def described(cohort: Cohort, tiles_by_slide: Sequence[int]) -> dict[str, Json]:
    """Table 1 and prevalences of a cohort, without ids, as a model file keeps them."""
    description: dict[str, Json] = strict(
        {
            "table_one": asdict(table_one(cohort, tiles_by_slide)),
            "prevalence": prevalences(cohort),
        }
    )
    return description


def beside_training(
    here: Mapping[str, Json], training: Mapping[str, Json]
) -> dict[str, Json]:
    """Table 1 and prevalences of the tested cases beside those of the training cohort.

    Args:
        here: see `described`.
        training: the same of the training cohort; without its parts for older model files.
    """
    if "table_one" not in training:
        return {
            "table_one": here["table_one"],
            "prevalence": _shifts(here["prevalence"], {}),
            "missing": NO_TRAINING,
        }
    own = here["table_one"]
    other = training["table_one"]
    columns = [""]
    for name in own["columns"][1:]:
        columns += [f"{name}, test", f"{name}, training"]
    cells_of_training = {row[0]: row[1:] for row in other["rows"]}
    width = len(own["columns"]) - 1
    rows = []
    for name, *cells in own["rows"]:
        paired = _interleaved(cells, cells_of_training.pop(name, []), width)
        rows.append([name, *paired])
    rows += [
        [name, *_interleaved([], cells, width)]
        for name, cells in cells_of_training.items()
    ]
    return {
        "table_one": {"columns": columns, "rows": rows},
        "prevalence": _shifts(here["prevalence"], training["prevalence"]),
        "missing": "",
    }


def _interleaved(first: Sequence[str], second: Sequence[str], width: int) -> list[str]:
    """Cells of two tables in turn; a dash where a table has none."""
    cells = []
    for place in range(width):
        for table in (first, second):
            cells.append(table[place] if place < len(table) else "–")
    return cells


def _shifts(
    here: Mapping[str, Json], training: Mapping[str, Json]
) -> list[dict[str, Json]]:
    """Share of each class in both cohorts, and the difference with its interval."""
    shifts = []
    for name, own in here.items():
        other = training.get(name)
        row: dict[str, Json] = {
            "name": name,
            "test": own,
            "training": other,
            "difference": None,
        }
        both = [own, other]
        if all(share and share["low"] is not None for share in both):
            ends = difference(Estimate(**own), Estimate(**both[1]))
            row["difference"] = dict(zip(("value", "low", "high"), ends, strict=True))
        shifts.append(row)
    return shifts


def copies_of(
    test_set: TestSet, answered: Sequence[Prediction], *, internal: bool
) -> dict[str, Json]:
    """Copies of slides inside the set, and what is known of copies from the training cohort."""
    pairs, words = copies_between_patients(*test_set)
    names = [slide for slides in test_set.cohort.slides for slide in slides]
    equal = sum(one.seen == "content" for one in answered)
    near = sum(one.seen == "near" for one in answered)
    training = "all cases are from the training study"
    if not internal:
        training = (
            f"{counted(equal, 'case')} with the embeddings of a training slide under another "
            f"name, not used; {counted(near, 'case')} with nearly the mean embedding of one; not "
            "known: rescans and other tiles of training slides, which the model file cannot show"
        )
    return {
        "pairs": [[names[pair.first], names[pair.second]] for pair in pairs],
        "words": words if pairs else "",
        "training": training,
    }


def checklist_of(
    card: ModelCard, cohort: Cohort, document: Mapping[str, Json]
) -> list[Item]:
    """TRIPOD+AI items of an evaluation, filled with what the test knows.

    Args:
        card: the model.
        cohort: the scored cases.
        document: the content of validation.json but for the checklist.
    """
    target = ", ".join(cohort.target.columns)
    kind = document["validation"]
    units = document["independent"]
    events = _event_words(document)
    left_out = counted(len(document["left_out"]), "labelled case")
    columns = ", ".join(table["column"] for table in document["subgroups"])
    scores: Mapping[str, Score] = document["scores"]
    if not scores and document["outcomes"]:
        scores = document["outcomes"][0]["scores"]
    shown = ", ".join(METRIC_WORDS.get(name, name) for name in scores)
    sites = f"{len(set(cohort.sites))} sites" if cohort.sites else ""
    answers = {
        "4": f"evaluation of a finished model: {kind} validation of {card.name}",
        "6a": sites and f"{sites}; setting and location: to be filled by the authors",
        "7": "; ".join(document["account"]),
        "8a": f"{target} as in {document['labels']['file']}; definition and assessment: to be "
        "filled by the authors",
        "9a": "not applicable: no model was developed",
        "9b": f"embeddings of whole-slide images: {card.inputs.encoder}, "
        f"{card.inputs.tile_px} px tiles at {card.inputs.tile_mpp} µm/px",
        "10": f"{events}; justification: to be filled by the authors",
        "11": f"{cohort.unlabelled} rows without a label and {cohort.without_embeddings} without "
        "embeddings are not used; nothing is imputed",
        "12a": f"all scored cases test the model, none is used to fit it; {left_out} not used",
        "12c": "not applicable: no model was developed",
        "12d": f"scores by {columns}" if cohort.sites else "",
        "12e": f"{shown}; 95 % confidence intervals over {units}",
        "12f": _updating_words(document),
        "12g": f"mean of the predictions of the {len(card.members)} models in "
        f"{document['model']['file']} (SHA-256 {document['model']['sha256']})",
        "15": f"{cohort.target.kind}: {', '.join(cohort.target.names)}; thresholds and risk "
        "groups were fixed in training",
        "16": document["beside_training"]["missing"]
        or "Table 1 beside that of the training cohort, and the difference of prevalences",
        "18f": "versions of the software are in validation.json; code of the study: to be filled "
        "by the authors",
        "20a": f"{events}; {left_out} not used, see the list above; flow: to be filled by the "
        "authors",
        "20b": "Table 1" + (f", scores by {columns}" if columns else ""),
        "20c": document["beside_training"]["missing"]
        or "Table 1 and the shares of the classes below it",
        "21": f"{target}: {events}",
        "22": "not applicable: no model was developed; the tested model is that of item 12g",
        "23a": "Scores, calibration, decision curve"
        + (f"; by {columns}" if columns else "; no subgroups were named"),
        "23b": "Scores by site" if cohort.sites else "",
        "24": _updating_words(document),
    }
    return checklist({number: words for number, words in answers.items() if words})


def _event_words(document: Mapping[str, Json]) -> str:
    """Cases, who they are of, and events of each class or of survival."""
    words = f"{counted(document['cases'], 'case')}, {document['independent']}"
    counts = [f"{one['name']} {one['positive']}" for one in document["outcomes"]]
    if document["survival"]:
        counts = [counted(document["survival"]["events"], "event")]
    return f"{words}; {', '.join(counts)}" if counts else words


def _updating_words(document: Mapping[str, Json]) -> str:
    if any(one["recalibration"] for one in document["outcomes"]):
        return (
            "the model was not changed; recalibration is shown beside its calibration"
        )
    return "the model was not changed"
