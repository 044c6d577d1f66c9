"""HTML pages of an experiment and of a validation, with their pictures embedded."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.evaluation.calibration import ECE_BINS
from thinsection.evaluation.curves import Band
from thinsection.evaluation.intervals import Sampling
from thinsection.evaluation.metrics import MIN_OF_BIN, weighted_ranks
from thinsection.evaluation.plots import (
    Columns,
    Picture,
    Words,
    bin_words,
    color_of,
    draw_band,
    draw_calibration,
    draw_confusion,
    draw_decision,
    draw_frequencies,
    draw_groups,
    draw_picture,
    draw_precision,
    draw_risks,
    draw_roc,
    draw_values,
    units_words,
)
from thinsection.evaluation.rows import (
    METRIC_WORDS,
    Predictions,
    Risks,
    Values,
)
from thinsection.files.pages import data_uri, render_page
from thinsection.predict.replacing import LINKS_NAME
from thinsection.predict.tested import Score, Tested, outcome_columns
from thinsection.report.index import viewer_place
from thinsection.report.stored import thumbnail_file
from thinsection.tiles.categories import CLASS_COLORS
from thinsection.types import Document, Floats, Json, counted, rounded

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORST = 12  # number of cases on the page
THUMBNAIL_PX = 200
# threshold probabilities for which the page shows the net benefit
SHOWN_THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
CALL_WORDS = {
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "ppv": "positive predictive value (PPV)",
    "npv": "negative predictive value (NPV)",
    "accuracy": "accuracy",
}
# explanations of values that come from a model file, by kind of target
_FIXED_WORDS = {
    "binary": "The threshold and the temperature come from the model file.",
    "multilabel": "Thresholds and temperature come from the model file.",
    "multiclass": "The temperature comes from the model file.",
    "ordinal": "The temperature comes from the model file.",
    "cox": "The cut of the risk groups and the baseline hazard come from the model file.",
    "discrete": "The cut of the risk groups and the temperature come from the model file.",
}


def experiment_page(
    document: Mapping[str, Json],
    tested: Tested,
    slides: Path,
    *,
    home: str | None = None,
) -> str:
    """The page of an experiment as HTML, pictures embedded; heatmaps.js adds links to heatmaps.

    Args:
        document: the content of experiment.json.
        tested: out-of-fold predictions.
        slides: folder `slides` of the results, with pictures of the slides.
        home: address of the results' index as seen from the page, if there is an index.

    Raises MissingDependencyError: matplotlib is not installed.
    """
    heatmaps = Path(document["heatmaps"])
    values = {
        "against": [],
        "experiments": 1,
        **document,
        "facts": _facts(document, tested),
        "metric": METRIC_WORDS.get(tested.metric, tested.metric),
        "scores": _score_rows(document["scores"], document["cases"]),
        "unit": tested.groups.unit,
        "unit_words": tested.groups.words,
        "ends": document["interval"],
        "scores_note": _scores_note(tested),
        "labels": [
            label | {"scores": _score_rows(label["scores"], label["cases"])}
            for label in document["labels"]
        ],
        "pictures": [
            picture.for_page() for picture in _experiment_pictures(document, tested)
        ],
        "worst": list(_worst_cases(tested, slides)),
        "copies": _copy_pairs(document, slides),
        "worst_words": _worst_words(tested),
        "number": partial(rounded, rows=len(set(tested.cases))),
        "interval": partial(interval_words, cases=len(set(tested.cases))),
        "counted": counted,
        "links": LINKS_NAME,
        "home": home,
        # key of this heatmap's layer in the viewer; the folder is GRID/heatmap_NAME
        "heatmap_layer": "/".join(heatmaps.parts[-2:]) + ":attention",
    }
    return render_page("thinsection.predict", "experiment.html.j2", **values)


def _score_rows(scores: Mapping[str, Json], cases: int) -> list[tuple[str, Json]]:
    """Name of each metric, and its score with as many digits as the number of cases allows.

    An absolute error has the unit of the target, so it keeps three digits.
    """

    def words(name: str, value: float | None) -> str:
        if value is None:
            return "none"
        if name != "mae":
            return rounded(value, cases)
        return np.format_float_positional(value, precision=3, fractional=False)

    rows = []
    for name, score in scores.items():
        shown = {key: words(name, score[key]) for key in ("value", "low", "high")}
        rows.append((METRIC_WORDS.get(name, name), {**score, **shown}))
    return rows


def _scores_note(tested: Tested) -> str:
    """Explains what the classification metrics count, and why there is no calibration error."""
    if not isinstance(tested.rows()[0], Predictions):
        return ""
    sentences = []
    if "balanced_accuracy" in tested.scorers:
        sentences.append("Balanced accuracy is that of the most probable class.")
    if "ece" not in tested.scorers:
        sentences.append(
            f"There is no expected calibration error: its {ECE_BINS} bins need {MIN_OF_BIN} "
            "cases each."
        )
    return " ".join(sentences)


def _copy_pairs(
    document: Mapping[str, Json], slides: Path
) -> list[list[tuple[str, str | None]]]:
    """Names and pictures of the first pairs of slides that look like copies of each other."""
    pairs = document["audit"]["copied_slides"][:WORST]
    return [[(name, _picture(slides / name)) for name in pair] for pair in pairs]


def _picture(slide: Path) -> str | None:
    """Address of the small picture in a slide's folder; None if there is none."""
    path = thumbnail_file(slide)
    return None if path is None else data_uri(Image.open(path), THUMBNAIL_PX)


def _facts(document: Mapping[str, Json], tested: Tested) -> list[tuple[str, str]]:
    """Cases, target, head and date of the experiment, as pairs of a name and a value."""
    facts = [
        ("cases", tested.groups.of_cases(document["cases"])),
        ("target", document["target"]),
        ("task", tested.target.kind_words),
    ]
    if document["positive_words"]:
        facts.append(("positive class", document["positive_words"]))
    if document["order_words"]:
        facts.append(("order of the classes", document["order_words"]))
    return [*facts, ("head", document["head"]), ("date", document["date"])]


def _experiment_pictures(document: Mapping[str, Json], tested: Tested) -> list[Picture]:
    first = tested.rows()[0]
    drawn = []
    if isinstance(first, Predictions):
        if tested.target.exclusive:
            drawn.append(draw_picture("confusion", first, _draw_confusion))
        columns = outcome_columns(tested)
        curves = Columns(
            columns, tested.sampling, ordered=tested.target.kind == "ordinal"
        )
        drawn.append(draw_picture("roc", curves, draw_roc))
        drawn.append(draw_picture("pr", curves, draw_precision))
        drawn.append(draw_picture("calibration", curves, draw_calibration))
        drawn.append(draw_picture("decision", curves, draw_decision))
    elif isinstance(first, Risks):
        draw = partial(draw_risks, time_name=tested.target.time_words)
        drawn.append(draw_picture("survival", first, draw))
    elif isinstance(first, Values):
        pair = (tested.truth[:, 0], tested.answers[:, 0])
        drawn.append(draw_picture("values", pair, draw_values))
    return [*drawn, draw_picture("folds", document, _draw_folds)]


def _draw_confusion(axes: "Axes", rows: Predictions) -> Words:
    title, caption = draw_confusion(axes, rows)
    return title, f"{caption} Predicted: the most probable class."


def _draw_folds(axes: "Axes", document: Mapping[str, Json]) -> Words:
    scores = [fold["score"] for fold in document["folds"]]
    heights = [np.nan if score is None else score for score in scores]
    if document["interval"]:
        low, high = document["interval"]
        axes.axhspan(low, high, color=CLASS_COLORS[4], alpha=0.25, linewidth=0)
    axes.axhline(document["value"], color=CLASS_COLORS[0], linewidth=1.2)
    places = range(1, len(heights) + 1)
    axes.plot(places, heights, "o", color=CLASS_COLORS[5])
    words = METRIC_WORDS.get(document["metric"], document["metric"])
    axes.set(xlabel="fold", ylabel=words, xticks=places)
    return (
        "Score by fold",
        "Points: score of the test cases of a fold, without an interval. Line: score of all "
        "cases; band: its 95 % confidence interval, as at the top.",
    )


def _is_wrong(tested: Tested) -> npt.NDArray[np.bool_]:
    """(n,) True for cases whose most probable class is not the true one."""
    predicted = tested.answers.argmax(axis=1)
    return np.asarray(predicted != tested.truth[:, 0].astype(np.int64))


def _worst_words(tested: Tested) -> str:
    """Sentences that explain which cases are shown, and in which order."""
    count = len(tested.cases)
    noun = "case" if len(set(tested.cases)) == count else "prediction"
    shown = f"All {count} {noun}s" if count <= WORST else f"{WORST} of {count} {noun}s"
    if not tested.target.exclusive:
        order = "the largest errors first"
        if tested.target.kind in ("cox", "discrete"):
            order = "those whose order by risk is farthest from that by time first"
        return f"{shown}, {order}."
    wrong = int(_is_wrong(tested).sum())
    right = "the least certain first"
    if not wrong:
        return f"No {noun} is wrong. {shown}, {right}."
    if wrong >= min(count, WORST):
        return f"{wrong} of {count} {noun}s are wrong. {shown}, worst first."
    verb = "is" if wrong == 1 else "are"
    return (
        f"{wrong} of {count} {noun}s {verb} wrong. {shown}: first the wrong ones, the worst "
        f"first, then right ones, {right}."
    )


def _probability_words(probability: float) -> str:
    """Probability with two decimals, but never 0.00 or 1.00."""
    if probability < 0.005:
        return "< 0.01"
    return "> 0.99" if probability >= 0.995 else f"{probability:.2f}"


def _worst_cases(tested: Tested, slides: Path) -> Iterator[dict[str, object]]:
    """Cases whose predictions are farthest from the truth; wrongly classified cases come first."""
    target = tested.target
    order = np.argsort(-_errors(tested), kind="stable")
    if target.exclusive:
        is_wrong = _is_wrong(tested)
        order = np.concatenate([order[is_wrong[order]], order[~is_wrong[order]]])
    for i in order[:WORST]:
        slide = tested.slides[i][0]
        if target.exclusive:
            truth = target.names[int(tested.truth[i, 0])]
        else:
            pairs = zip(target.columns, tested.truth[i], strict=True)
            truth = ", ".join(
                f"{column} {'blank' if np.isnan(value) else f'{value:g}'}"
                for column, value in pairs
            )
        answers = [f"{value:.3g}" for value in tested.answers[i]]
        predicted = None
        if target.exclusive:
            answers = [_probability_words(value) for value in tested.answers[i]]
            predicted = target.names[int(tested.answers[i].argmax())]
        yield {
            "case": tested.cases[i],
            "slide": slide,
            "place": viewer_place(slide),
            "truth": truth,
            "predicted": predicted,
            "answers": dict(zip(target.names, answers, strict=True)),
            "picture": _picture(slides / slide),
        }


def _errors(tested: Tested) -> Floats:
    """Distance of the prediction from the truth for each case, (n,)."""
    target = tested.target
    truth = tested.truth
    answers = tested.answers
    if target.exclusive:
        right = answers[np.arange(len(truth)), truth[:, 0].astype(np.int64)]
        return 1 - right
    if target.kind in ("multilabel", "regression"):
        return np.asarray(np.nanmean(np.abs(answers - truth), axis=1))
    # cases with the event only: difference between their rank by risk and their rank by time
    once = np.ones((1, len(truth)))
    by_time = weighted_ranks(truth[:, 1], once)[0]
    by_risk = weighted_ranks(-target.risk(answers), once)[0]
    late = by_time - by_risk
    return np.where(truth[:, 0] == 1, np.abs(late), -1.0)


def validation_page(
    document: Mapping[str, Json], tested: Tested, *, home: str | None = None
) -> str:
    """The page of a validation as HTML.

    Args:
        document: the content of validation.json.
        tested: the scored cases.
        home: address of the results' index as seen from the page, if there is an index.

    Raises MissingDependencyError: matplotlib is not installed.
    """
    pictures = [
        picture.for_page() for picture in _validation_pictures(document, tested)
    ]
    return render_page(
        "thinsection.predict",
        "validation.html.j2",
        document=document,
        home=home,
        pictures=pictures,
        metric_words=METRIC_WORDS,
        fixed_words=_FIXED_WORDS.get(
            document["task"], "The model file was not changed."
        ),
        time_name=_time_name(document),
        call_words=CALL_WORDS,
        net_benefit=_net_benefit_rows,
        counted=counted,
        number=partial(number_words, cases=document["cases"]),
        interval=partial(interval_words, cases=document["cases"]),
        signed=partial(rounded, rows=document["cases"], sign="+"),
    )


def _time_name(document: Mapping[str, Json]) -> str:
    """Column of the label table that has the survival times."""
    return ", ".join(document["target"][1:]) if document["survival"] else ""


def number_words(value: float | None, cases: int) -> str:
    """Number with as many decimals as the number of cases allows; a dash if there is no number."""
    return "–" if value is None else rounded(value, cases)


def interval_words(score: Score, cases: int) -> str:
    """95 % confidence interval, or the reason why there is none."""
    if score["low"] is None or score["high"] is None:
        return f"none: {score.get('missing') or 'no value'}"
    return f"{rounded(score['low'], cases)} to {rounded(score['high'], cases)}"


def _net_benefit_rows(curve: Mapping[str, Json]) -> list[Document]:
    """Rows of a decision curve for a few thresholds, as far as some case reaches them."""
    rows = []
    for place, threshold in enumerate(curve["thresholds"]):
        if round(threshold, 2) in SHOWN_THRESHOLDS:
            rows.append({name: values[place] for name, values in curve.items()})
    return rows


def _validation_pictures(document: Mapping[str, Json], tested: Tested) -> list[Picture]:
    curves = Columns(
        outcome_columns(tested),
        Sampling.of_rows(tested.groups, fold=tested.fold),
        ordered=tested.target.kind == "ordinal",
    )
    drawn = []
    if curves.columns:
        drawn.append(draw_picture("roc", curves, draw_roc))
        drawn.append(draw_picture("pr", curves, draw_precision))
        draw = partial(_calibration, columns=curves)
        drawn.append(draw_picture("calibration", document["outcomes"], draw))
        drawn.append(draw_picture("decision", curves, draw_decision))
    if document["task"] == "regression":
        pair = (tested.truth[:, 0], tested.answers[:, 0])
        drawn.append(draw_picture("values", pair, draw_values))
    survival = document["survival"]
    if survival and survival["groups"]:
        draw_survival = partial(
            _survival,
            time_name=_time_name(document),
            independent=document["independent"],
        )
        drawn.append(draw_picture("survival", survival, draw_survival))
    if survival and survival["calibration"]:
        draw_bins = partial(
            _survival_calibration,
            time_name=_time_name(document),
            unit=document["unit"],
        )
        bins = survival["calibration"]
        drawn.append(draw_picture("calibration", bins, draw_bins))
    return drawn


def _calibration(axes: "Axes", outcomes: Sequence[Json], *, columns: Columns) -> Words:
    for i, outcome in enumerate(outcomes):
        color = color_of(i)
        smooth = outcome["smooth_calibration"]
        if smooth is not None:
            draw_band(axes, _smooth_band(smooth), outcome["name"], color)
        if smooth is not None and len(outcomes) > 1:
            continue  # points of several classes would hide each other
        label = outcome["name"] if smooth is None else None
        band = _band(outcome["calibration_curve"])
        form = "o-" if smooth is None else "o"
        draw_frequencies(axes, band, color=color, label=label, form=form)
    axes.plot([0, 1], [0, 1], color="#999999", linestyle=":", linewidth=1)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    after = outcomes[0]["recalibration"] if len(outcomes) == 1 else None
    if after and after["smooth_calibration"]:
        band = _smooth_band(after["smooth_calibration"])
        axes.plot(
            band.x,
            band.y,
            color=color_of(1),
            linestyle="--",
            linewidth=1.6,
            label="after recalibration",
        )
    axes.set(xlabel="predicted probability", ylabel="observed frequency")
    caption = (
        "Line and band: logistic regression on a restricted cubic spline, with its pointwise 95 % "
        f"confidence interval (cluster sandwich, {units_words(columns)}). On the dotted line "
        "predicted probabilities equal observed frequencies."
    )
    if len(outcomes) == 1:
        caption += (
            " Points: groups of equally many cases with 95 % confidence intervals"
            f"{bin_words(columns)}."
        )
    if after:
        caption += " Dashed: after recalibration, each case by a fit to other cases."
    return "Calibration", caption


def _smooth_band(smooth: Mapping[str, Json]) -> Band:
    return Band(
        x=np.array(smooth["predicted"]),
        y=np.array(smooth["observed"]),
        low=np.array(smooth["low"]),
        high=np.array(smooth["high"]),
    )


def _band(bins: Sequence[Json]) -> Band:
    """Bins of the document as arrays, in which None becomes NaN."""
    observed = {
        name: np.array([one["observed"][name] for one in bins], dtype=np.float64)
        for name in ("value", "low", "high")
    }
    return Band(
        x=np.array([one["predicted"] for one in bins]),
        y=observed["value"],
        low=observed["low"],
        high=observed["high"],
    )


def _survival(
    axes: "Axes", survival: Mapping[str, Json], *, time_name: str, independent: str
) -> Words:
    draw_groups(axes, survival["groups"], survival["ticks"], time_name=time_name)
    caption = (
        "Kaplan-Meier curves with pointwise log-log 95 % confidence intervals over "
        f"{independent}. The groups are split at the median out-of-fold risk in training. The "
        "numbers of cases at risk are below the curves."
    )
    return "Survival by risk group", caption


def _survival_calibration(
    axes: "Axes", calibration: Mapping[str, Json], *, time_name: str, unit: str
) -> Words:
    draw_frequencies(axes, _band(calibration["bins"]), color=CLASS_COLORS[0])
    axes.set(xlabel="predicted survival", ylabel="observed survival (Kaplan-Meier)")
    caption = (
        f"At time {calibration['time']:g} ({time_name}), in bins of equally many cases. Bars: 95 % "
        f"confidence intervals over the {unit} of a bin, where they can be computed. On the dotted "
        "line predicted survival equals observed survival."
    )
    return "Calibration of survival", caption
