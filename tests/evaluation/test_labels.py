"""Targets and labels as values: strata, answers, cells, classes, and who owns a slide."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from thinsection.errors import ConfigError, DatasetError
from thinsection.evaluation.cell_values import class_name, read_number
from thinsection.evaluation.embeddings import FeatureFiles
from thinsection.evaluation.label_values import LabelsConfig
from thinsection.evaluation.labels import (
    Cohort,
    encode_labels,
    items_if_several,
    join_labels,
)
from thinsection.evaluation.target import Target
from thinsection.files.missing_cells import is_missing

BINARY = Target(kind="binary", columns=("y",), names=("no", "yes"))
SEVERAL = Target(kind="multilabel", columns=("a", "b"), names=("a", "b"))
VALUE = Target(kind="regression", columns=("x",), names=("x",))
RISK = Target(kind="cox", columns=("event", "time"), names=("risk",))
TIME = Target(kind="discrete", columns=("event", "time"), names=("1", "2", "3"))


# what is learnt


def test_only_classes_that_exclude_each_other_are_exclusive() -> None:
    exclusive = [
        target.exclusive
        for target in (BINARY, replace(BINARY, kind="multiclass"), SEVERAL, RISK)
    ]
    assert exclusive == [True, True, False, False]


def test_the_scale_of_a_constant_value_is_1() -> None:
    fitted = VALUE.fitted(np.full((4, 1), 3.0))
    assert (fitted.center, fitted.spread) == (3.0, 1.0)


def test_a_target_without_a_scale_is_fitted_as_it_is() -> None:
    assert BINARY.fitted(np.array([[0.0], [1.0]])) is BINARY


def test_intervals_of_time_need_an_event() -> None:
    with pytest.raises(DatasetError, match="must have an event, got none in 2 cases"):
        TIME.fitted(np.array([[0.0, 5.0], [0.0, 6.0]]))


def test_strata_of_values_are_their_quarters() -> None:
    values = np.arange(8, dtype=float)[::-1, None]
    assert VALUE.strata(values).tolist() == [3, 3, 2, 2, 1, 1, 0, 0]


def test_strata_of_several_labels_are_the_rarest_value_of_one() -> None:
    values = np.array([[0.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    assert SEVERAL.strata(values).tolist() == [1, 0, 0, 0]
    blank = np.nan
    values = np.array([[0.0, 0.0], [0.0, blank], [1.0, blank], [0.0, 0.0], [blank, 1]])
    assert SEVERAL.strata(values).tolist() == [0, 0, 1, 0, 0]
    one_value = np.array([[0.0, 1.0], [1.0, 1.0], [1.0, blank]])
    assert SEVERAL.strata(one_value).tolist() == [1, 0, 0]


def test_strata_of_classes_and_survival_are_the_first_column() -> None:
    assert BINARY.strata(np.array([[1.0], [0.0]])).tolist() == [1, 0]
    assert RISK.strata(np.array([[1.0, 9.0], [0.0, 8.0]])).tolist() == [1, 0]


# answers of a head


def test_probabilities_of_classes_are_the_softmax_of_logits() -> None:
    logits = np.log([[1.0, 3.0], [2.0, 2.0]])
    np.testing.assert_allclose(BINARY.answers(logits), [[0.25, 0.75], [0.5, 0.5]])


def test_labels_have_a_probability_each() -> None:
    np.testing.assert_allclose(
        SEVERAL.answers(np.array([[0.0, math.log(3)]])), [[0.5, 0.75]]
    )


def test_a_hazard_counts_for_those_who_are_left_and_the_last_interval_takes_all() -> (
    None
):
    """Of all, a quarter have the event in the first interval, half of the others in the second."""
    logits = np.array([[-math.log(3), 0.0, -50.0]])
    np.testing.assert_allclose(TIME.answers(logits), [[0.25, 0.375, 0.375]])


def test_risks_and_values_are_taken_as_they_are() -> None:
    logits = np.array([[2.0], [-1.0]])
    np.testing.assert_array_equal(RISK.answers(logits), logits)
    scaled = replace(VALUE, center=10.0, spread=3.0)
    np.testing.assert_array_equal(scaled.answers(logits), [[16.0], [7.0]])


def test_the_risk_of_intervals_is_minus_their_mean() -> None:
    answers = np.array([[1.0, 0.0, 0.0], [0.25, 0.25, 0.5], [0.0, 0.0, 1.0]])
    assert TIME.risk(answers).tolist() == [0.0, -1.25, -2.0]


def test_the_risk_of_a_log_risk_is_itself() -> None:
    assert RISK.risk(np.array([[2.0], [-1.0]])).tolist() == [2.0, -1.0]


# cells of a table


@pytest.mark.parametrize(
    ("target", "answers", "cells"),
    [
        (BINARY, (0.25, 0.75), {"prediction": "yes", "p_no": 0.25, "p_yes": 0.75}),
        (BINARY, (), {"prediction": None, "p_no": None, "p_yes": None}),
        (SEVERAL, (0.25, 0.5), {"p_a": 0.25, "p_b": 0.5}),
        (VALUE, (4.0,), {"x": 4.0}),
        (VALUE, (), {"x": None}),
        (RISK, (1.5,), {"risk": 1.5}),
        (
            TIME,
            (0.25, 0.25, 0.5),
            {"risk": -1.25, "p_1": 0.25, "p_2": 0.25, "p_3": 0.5},
        ),
        (TIME, (), {"risk": None, "p_1": None, "p_2": None, "p_3": None}),
    ],
)
def test_answers_stand_in_cells_by_their_names(
    target: Target, answers: tuple[float, ...], cells: dict[str, object]
) -> None:
    assert target.cells(answers) == cells


def test_slides_of_a_case_are_listed_where_there_are_several() -> None:
    assert items_if_several(("a", "b")) == ("a", "b")
    assert items_if_several(("a",)) == ()
    assert items_if_several(()) == ()


# cells of labels


@pytest.mark.parametrize(
    "text", ["", " ", "NA", " n/a ", "NaN", "[Unknown]", "null", "None", "'--"]
)
def test_words_for_no_value_are_missing_in_any_capitals(text: str) -> None:
    assert is_missing(text)


@pytest.mark.parametrize("text", ["0", "no", "+", "not detected", "a"])
def test_other_words_are_values(text: str) -> None:
    assert not is_missing(text)


@pytest.mark.parametrize(
    ("text", "name"), [("1.0", "1"), ("-2.00", "-2"), ("1.5", "1.5"), ("x", "x")]
)
def test_a_whole_number_is_a_class_without_its_point(text: str, name: str) -> None:
    assert class_name(text) == name


def test_numbers_are_classes_in_the_order_of_numbers() -> None:
    names, labels = encode_labels(["10", "9", "-1", "9.0"], "here")
    assert names == ("-1", "9", "10")
    assert labels.tolist() == [2, 1, 0, 1]


def test_words_are_classes_in_the_order_of_the_alphabet() -> None:
    texts = ["10", *"jihgfedcb", "a"]
    names, labels = encode_labels(texts, "here")
    assert names == ("10", *"abcdefghij")
    assert labels.tolist() == [0, *range(10, 1, -1), 1]


def test_classes_that_are_given_keep_their_order_and_their_words() -> None:
    names, labels = encode_labels(["NA", "1.0", "NA"], "here", ("NA", "1.0", "more"))
    assert names == ("NA", "1.0", "more")
    assert labels.tolist() == [0, 1, 0]


def test_a_label_that_is_none_of_the_classes_is_refused() -> None:
    with pytest.raises(DatasetError, match="must be one of a, b, got 'c' in here"):
        encode_labels(["a", "c"], "here", ("a", "b"))


def test_a_missing_label_is_refused_with_its_row() -> None:
    with pytest.raises(DatasetError, match="got 'NA' in row 1 of here"):
        encode_labels(["a", "NA"], "here")


def test_a_flag_is_a_word_or_a_number() -> None:
    words = ["1", "1.0", "True", "YES", "0", "0.0", "false", "no"]
    assert [read_number(word, "x", "here", flag=True) for word in words] == [
        *[1.0] * 4,
        *[0.0] * 4,
    ]
    with pytest.raises(DatasetError, match="x must be 0 or 1, got '2' in 'here'"):
        read_number("2", "x", "here", flag=True)


@pytest.mark.parametrize("text", ["x", "nan", "inf"])
def test_a_number_is_finite(text: str) -> None:
    assert read_number("-2.5", "x", "here") == -2.5
    with pytest.raises(DatasetError, match=f"x must be a number, got '{text}'"):
        read_number(text, "x", "here")


# labels joined to embeddings that nobody reads


def joined(
    folder: Path, rows: list[str], *, header: str = "slide_id,label", **settings: object
) -> Cohort:
    """A cohort of all slides of a table."""
    table = folder / "table.csv"
    table.write_text("\n".join([header, *rows]) + "\n")
    slides = list(dict.fromkeys(row.partition(",")[0] for row in rows))
    files = {slide: folder / f"{slide}.h5" for slide in slides}
    target = settings.pop("target", ("label",))
    config = LabelsConfig(labels=table, target=target, **settings)  # type: ignore[arg-type]
    return join_labels(FeatureFiles(files, {}, "here"), {}, config)


def test_slides_that_begin_alike_and_that_nobody_owns_are_warned_about(
    tmp_path: Path,
) -> None:
    cohort = joined(tmp_path, ["P1_A,x", "P1_B,y", "P2_A,x", "Q,y"])
    assert cohort.warnings == (
        "the patients of 4 slides are unknown, so each slide counts as one patient; "
        "add a column case_id if a patient has several slides; 2 names begin with the "
        "same letters (P1_A and P1_B): slides of one patient in training and test would "
        "make the score too optimistic",
    )


def test_slides_that_nobody_owns_are_told_of_where_no_name_begins_alike(
    tmp_path: Path,
) -> None:
    cohort = joined(tmp_path, ["P1_A,x", "P2_A,y"])
    assert cohort.warnings == ()
    assert (
        "the patients of 2 slides are unknown, so each slide counts as one patient; "
        "add a column case_id if a patient has several slides"
    ) in cohort.account


def test_slides_with_a_column_or_a_barcode_have_an_owner(tmp_path: Path) -> None:
    rows = ["TCGA-AA-0001-01Z,,x", "TCGA-AA-0002-01Z,,y", "P1_A,p,x", "P1_B,q,y"]
    cohort = joined(tmp_path, rows, header="slide_id,case_id,label")
    assert cohort.warnings == ()
    assert cohort.account[2] == (
        "the table has no case_id: the TCGA, CPTAC or GTEx barcode gives the case of 2 slides"
    )
    assert not any("are unknown" in line for line in cohort.account)


def test_a_barcode_of_several_patients_is_warned_about(tmp_path: Path) -> None:
    rows = [
        "TCGA-AA-0001-01Z,p,x",
        "TCGA-AA-0001-02Z,q,y",
        "TCGA-AA-0002-01Z,r,y",
        "TCGA-AA-0002-02Z,r,y",
    ]
    cohort = joined(tmp_path, rows, header="slide_id,case_id,label")
    assert cohort.warnings == (
        "the table gives several patients for 1 barcode (TCGA-AA-0001): a patient in both "
        "training and test makes the score too optimistic",
    )


def test_slides_without_barcodes_may_be_of_any_patients(tmp_path: Path) -> None:
    rows = ["a,p,x", "b,q,y"]
    cohort = joined(tmp_path, rows, header="slide_id,case_id,label")
    assert cohort.warnings == ()


def test_a_case_of_two_patients_is_refused(tmp_path: Path) -> None:
    rows = ["a,c,p,x", "b,c,q,x", "d,e,r,y"]
    with pytest.raises(DatasetError, match="one patient, got 'p' and 'q' for 'c'"):
        joined(tmp_path, rows, header="slide_id,case_id,patient_id,label")


def test_a_slide_of_two_rows_is_one_slide_of_its_case(tmp_path: Path) -> None:
    cohort = joined(tmp_path, ["a,x", "a,x", "b,y"])
    assert cohort.slides == (("a",), ("b",))
    assert cohort.account[0] == "2 slides of 2 cases for training"


def test_subgroups_are_those_of_the_cells_or_missing(tmp_path: Path) -> None:
    rows = ["a,x,F,NA", "b,y,,2"]
    cohort = joined(
        tmp_path, rows, header="slide_id,label,sex,stage", subgroup=("stage", "sex")
    )
    assert cohort.subgroups == (("missing", "2"), ("F", "missing"))


def test_a_site_that_one_barcode_lacks_is_known_of_none(tmp_path: Path) -> None:
    cohort = joined(tmp_path, ["TCGA-AA-0001-01Z,x", "other,y"])
    assert cohort.sites == ()


# the kind of a target


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ("0 1", "binary"),
        ("x y", "binary"),
        ("1 2 3", "multiclass"),
        ("1 2 3 4 5 6 7 8 9 10", "multiclass"),
        ("1 2 3 4 5 6 7 8 9 10 11", "regression"),
        ("0.5 1", "regression"),
        ("0.5 x", "binary"),
    ],
)
def test_few_whole_numbers_and_words_are_classes_and_other_numbers_are_not(
    tmp_path: Path, values: str, kind: str
) -> None:
    rows = [f"s{i}x,{value}" for i, value in enumerate(values.split())]
    cohort = joined(tmp_path, rows)
    assert cohort.target.kind == kind
    assert f"{kind} (inferred from its values)" in cohort.account[-1]


@pytest.mark.parametrize(
    ("task", "values", "sentence"),
    [
        ("binary", "x x", r"binary must have two classes, got \('x',\)"),
        ("multiclass", "x x", r"multiclass must have several classes, got \('x',\)"),
        ("binary", "x y z", "binary must have two classes, got"),
    ],
)
def test_too_few_or_too_many_classes_are_refused(
    tmp_path: Path, task: str, values: str, sentence: str
) -> None:
    rows = [f"s{i}x,{value}" for i, value in enumerate(values.split())]
    with pytest.raises(DatasetError, match=sentence):
        joined(tmp_path, rows, task=task)


def test_two_classes_may_be_learnt_as_several(tmp_path: Path) -> None:
    cohort = joined(tmp_path, ["ax,x", "bx,y", "cx,y"], task="multiclass")
    assert cohort.target.names == ("x", "y")
    assert cohort.account[-1] == "label: multiclass: x 1, y 2"


def survival(folder: Path, rows: list[str], **settings: object) -> Cohort:
    return joined(
        folder,
        rows,
        header="slide_id,dead,days",
        target=("dead",),
        time="days",
        **settings,
    )


def test_survival_is_summed_up_by_its_events_and_median_time(tmp_path: Path) -> None:
    cohort = survival(tmp_path, ["a,1,10", "b,no,20", "c,yes,50"])
    assert cohort.values == ((1.0, 10.0), (0.0, 20.0), (1.0, 50.0))
    assert cohort.account[-1] == (
        "dead, days: cox (inferred from its values): 2 events, median time 20"
    )
    assert cohort.target.names == ("risk",)


def test_survival_without_an_event_or_with_a_negative_time_is_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(DatasetError, match="got only censored cases"):
        survival(tmp_path, ["a,0,10", "b,0,20"])
    with pytest.raises(
        DatasetError,
        match=r"days must be >= 0, got a negative time, '-3' \(1\), in line 3 \(b\) of .*drop_unus",
    ):
        survival(tmp_path, ["a,1,10", "b,0,-3"])
    cohort = survival(tmp_path, ["a,1,10", "b,0,-3", "c,1,0"], drop_unusable=True)
    assert cohort.values == ((1.0, 10.0), (1.0, 0.0))


def test_a_time_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DatasetError,
        match=r"got a time that is no number, 'yes' \(1\), in line 2 \(a\)",
    ):
        survival(tmp_path, ["a,1,yes", "b,0,20"])


def test_only_survival_has_a_time(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="binary must have one target, no time, got"):
        survival(tmp_path, ["a,1,10", "b,0,20"], task="binary")


def test_labels_are_summed_up_by_their_counts(tmp_path: Path) -> None:
    cohort = joined(
        tmp_path,
        ["ax,1,0", "bx,no,yes", "cx,NA,yes"],
        header="slide_id,msi,kras",
        target=("msi", "kras"),
    )
    assert cohort.account[-1] == (
        "msi, kras: multilabel (inferred from its values): msi 1 of 2 (1 blank), kras 2 of 3"
    )


def test_a_label_with_one_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="got one value for 'msi'"):
        joined(
            tmp_path,
            ["ax,1,0", "bx,1,yes", "cx,,1"],
            header="slide_id,msi,kras",
            target=("msi", "kras"),
        )


def test_values_are_summed_up_by_their_range(tmp_path: Path) -> None:
    cohort = joined(tmp_path, ["ax,0.5", "bx,2", "cx,8"])
    assert cohort.account[-1].endswith(
        "regression (inferred from its values): 0.5 to 8, median 2"
    )


def test_nothing_to_learn_is_refused(tmp_path: Path) -> None:
    nothing = FeatureFiles({}, {}, "here")
    with pytest.raises(ConfigError, match="labels must be set, got none"):
        join_labels(nothing, {}, LabelsConfig(target=("x",)))
    table = tmp_path / "x.csv"
    table.write_text("slide_id,grade\na,1\n")
    with pytest.raises(ConfigError, match="such as one of slide_id, grade"):
        join_labels(nothing, {}, LabelsConfig(labels=table))
    both = LabelsConfig(labels=table, target=("grade",), time="grade")
    with pytest.raises(ConfigError, match="another column than target, got 'grade'"):
        join_labels(nothing, {}, both)
