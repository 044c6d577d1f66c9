"""Facts for reviewers of a validation: who was tested beside who trained, copies, the checklist."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from thinsection.errors import ThinsectionError, WeightsError, rewording
from thinsection.evaluation.audit import copies_between_patients, reader_of
from thinsection.evaluation.cases import listed_names
from thinsection.evaluation.external import Estimate, difference
from thinsection.evaluation.labels import Cohort
from thinsection.evaluation.leaks import Labelled, read_usable
from thinsection.evaluation.rows import METRIC_WORDS, strict
from thinsection.evaluation.table_one import prevalences, table_one
from thinsection.predict.answering import Prediction
from thinsection.predict.folds import Study
from thinsection.predict.model_file import ModelCard, content_mark
from thinsection.predict.review import Item, checklist, shared_answers
from thinsection.predict.tested import Score
from thinsection.types import Document, Json, counted

NO_TRAINING = (
    "the model file does not describe its training cohort; train the model again with this "
    "version to have it"
)

# figures that training fixed, by kind of target
_FIXED = {
    "binary": "; the threshold was fixed in training",
    "multilabel": "; thresholds were fixed in training",
    "cox": "; risk groups were fixed in training",
    "discrete": "; risk groups were fixed in training",
}


def read_training_set(model: Path, card: ModelCard) -> Labelled | None:
    """Training cohort of a model whose experiment folder and embeddings are at hand, else None.

    Args:
        model: file of the model, in the folder of its experiment.
        card: header of the model; the folder must be of the cases that it was trained on.

    Memory: see `read_usable`.
    """
    try:
        study = Study.load(model.parent)
    except (OSError, ValueError, KeyError, ThinsectionError):
        return None
    trained = {*card.trained}
    marks = {content_mark(digest) for digest in study.digests}
    files = [path for paths in study.cohort.paths for path in paths]
    if not marks <= trained or not all(path.is_file() for path in files):
        return None
    return read_slides(study.cohort)


def read_slides(cohort: Cohort) -> Labelled:
    """Reads the embeddings of cases; slides that cannot be read are left out.

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
    return Labelled(usable, contents, damaged)


def described(cohort: Cohort, tiles_by_slide: Sequence[int]) -> Document:
    """Table 1 and prevalences of a cohort, without ids, as a model file keeps them."""
    description: Document = strict(
        {
            "table_one": asdict(table_one(cohort, tiles_by_slide)),
            "prevalence": prevalences(cohort),
        }
    )
    return description


def beside_training(here: Mapping[str, Json], training: Mapping[str, Json]) -> Document:
    """Table 1 and prevalences of the tested cases beside those of the training cohort.

    Args:
        here: see `described`.
        training: the same of the training cohort; without its parts for older model files.

    Raises WeightsError: what the model file says of its training cohort is damaged.
    """
    if "table_one" not in training:
        return {
            "table_one": here["table_one"],
            "prevalence": _shifts(here["prevalence"], {}),
            "missing": NO_TRAINING,
        }
    rule = "the model file must describe its training cohort as `train` does"
    errors = (KeyError, TypeError, ValueError, AttributeError, IndexError)
    with rewording(rule, training, *errors, error=WeightsError):
        return _side_by_side(here, training)


def _side_by_side(here: Mapping[str, Json], training: Mapping[str, Json]) -> Document:
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


def _shifts(here: Mapping[str, Json], training: Mapping[str, Json]) -> list[Document]:
    """Share of each class in both cohorts, and the difference with its interval."""
    shifts = []
    for name, own in here.items():
        other = training.get(name)
        row: Document = {
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


def _joined(test_set: Labelled, training: Labelled) -> Labelled:
    """Cases of both cohorts as one, whose patients are never the same."""
    first = test_set.cohort
    second = training.cohort
    cohort = replace(
        first,
        cases=(*first.cases, *second.cases),
        slides=(*first.slides, *second.slides),
        files=(*first.files, *second.files),
        values=(*first.values, *second.values),
        patients=(
            *(f"test {patient}" for patient in first.patients),
            *(f"training {patient}" for patient in second.patients),
        ),
    )
    return Labelled(cohort, test_set.contents.joined(training.contents), {})


def copies_of(
    test_set: Labelled,
    training_set: Labelled | None,
    answered: Sequence[Prediction],
    *,
    internal: bool,
) -> Document:
    """Copies of slides inside the set and from the training cohort, as far as they are known.

    Args:
        test_set: the scored cases.
        training_set: the training cohort, if it is at hand.
        answered: predictions of all labelled cases.
        internal: True if all cases are from the training study.
    """
    joined = test_set
    if training_set is not None and not internal:
        joined = _joined(test_set, training_set)
    names = [slide for slides in joined.cohort.slides for slide in slides]
    num_test = sum(map(len, test_set.cohort.slides))
    inside = []
    across = []
    for pair in copies_between_patients(
        joined.cohort, joined.contents, reader_of(joined.cohort)
    )[0]:
        pair_names = [names[pair.first], names[pair.second]]
        if pair.second < num_test:
            inside.append(pair_names)
        elif pair.first < num_test:
            across.append(pair_names)
    equal = sum(one.seen == "content" for one in answered)
    near = sum(one.seen == "near" for one in answered)
    training = "all cases are from the training study"
    if not internal:
        training = (
            f"{counted(equal, 'case')} with the embeddings of a training slide under another "
            f"name, not used; {counted(near, 'case')} with nearly the mean embedding of one; "
        )
        if training_set is None:
            training += (
                "not known: rescans and other tiles of training slides, as the embeddings of the "
                "training cohort are not at hand"
            )
        else:
            training += (
                f"{counted(len(across), 'pair')} that look like rescans or other tiles"
            )
    return {
        "pairs": inside,
        "pairs_with_training": across,
        "training": training,
        "warnings": [
            *_pair_words(inside, "slides of different patients in the test set", ""),
            *_pair_words(
                across,
                "a test slide and a training slide",
                "; the scores are too optimistic",
            ),
        ],
    }


def _pair_words(pairs: Sequence[Sequence[str]], kind: str, end: str) -> list[str]:
    if not pairs:
        return []
    shown = listed_names([f"{first!r} and {second!r}" for first, second in pairs])
    number = counted(len(pairs), "pair")
    return [
        f"{number} of {kind} look like copies ({shown}): rescans, other tiles or another scale{end}"
    ]


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
    events = f"{counted(document['cases'], 'case')} of {document['units']} {document['unit']}"
    counts = [f"{one['name']} {one['positive']}" for one in document["outcomes"]]
    if document["survival"]:
        counts = [counted(document["survival"]["events"], "event")]
    if counts:
        events += f"; {', '.join(counts)}"
    left_out = counted(len(document["left_out"]), "labelled case")
    columns = ", ".join(table["column"] for table in document["subgroups"])
    scores: Mapping[str, Score] = document["scores"]
    if not scores and document["outcomes"]:
        scores = document["outcomes"][0]["scores"]
    shown = ", ".join(METRIC_WORDS.get(name, name) for name in scores)
    updating = "the model was not changed"
    if any(one["recalibration"] for one in document["outcomes"]):
        updating += "; recalibration is shown beside its calibration"
    inputs = card.inputs
    embeddings = (
        f"{inputs.level} embeddings of {inputs.encoder or 'an unknown encoder'}"
    )
    if inputs.tile_px:
        embeddings += f", tiles of {inputs.tile_px} px"
    if inputs.tile_mpp:
        embeddings += f" at {inputs.tile_mpp} µm/px"
    beside = "Table 1 beside that of the training cohort"
    shares = ""
    if document["beside_training"]["prevalence"]:
        shares = ", and the difference of the shares of the classes below it"
    shared = shared_answers(cohort, document["account"])
    answers = shared | {
        "4": f"evaluation of a finished model: {kind} validation of {card.name}",
        "8a": f"{target} as in {document['labels']['file']}; definition and assessment: to be "
        "filled by the authors",
        "9a": "not applicable: no model was developed",
        "9b": embeddings,
        "10": f"{events}; justification: to be filled by the authors",
        "12a": f"all scored cases test the model, none is used to fit it; {left_out} not used",
        "12c": "not applicable: no model was developed",
        "12d": "scores by site" if cohort.sites else "",
        "12e": f"{shown}; 95 % confidence intervals over {units}",
        "12f": updating,
        "12g": f"mean of the predictions of the {len(card.members)} models in "
        f"{document['model']['file']} (SHA-256 {document['model']['sha256']})",
        "15": shared["15"] + _FIXED.get(cohort.target.kind, ""),
        "16": document["beside_training"]["missing"] or f"{beside}{shares}",
        "18f": "versions of the software are in validation.json; code of the study: to be filled "
        "by the authors",
        "20a": f"{events}; {left_out} not used, see the list above; flow: to be filled by the "
        "authors",
        "20b": "Table 1" + (f", scores by {columns}" if columns else ""),
        "20c": document["beside_training"]["missing"] or f"{beside}{shares}",
        "21": f"{target}: {events}",
        "22": "not applicable: no model was developed; the tested model is that of item 12g",
        "23a": (
            "Scores, calibration, decision curve" if document["outcomes"] else "Scores"
        )
        + (", calibration, risk groups" if document["survival"] else "")
        + (f"; by {columns}" if columns else "; no subgroups were named"),
        "24": updating,
    }
    return checklist(answers)
