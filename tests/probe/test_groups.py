"""Groups of rows: patients, else slides; what must not be shared between train and validation."""

import pytest

from thinsection.errors import DatasetError
from thinsection.evaluation.cases import group_rows, table_groups

SLIDES = (
    "TCGA-3C-AALI-01Z-00-DX1.F6E9",
    "tcga-3c-aali-01A-01-TS1",
    "TCGA-3C-AALIX",
    "mine",
)


def test_a_row_is_of_its_case_else_of_the_barcodes_patient_else_of_its_slide() -> None:
    groups = group_rows(SLIDES, where="table")
    assert groups.of_row == ("TCGA-3C-AALI", "TCGA-3C-AALI", "TCGA-3C-AALIX", "mine")
    assert groups.unit == "patients"
    named = group_rows(SLIDES, ("a", "a", "b", ""), where="table")
    assert named.of_row == ("a", "a", "b", "mine")
    assert group_rows(("s0", "s1", "s0"), where="table").unit == "slides"


def test_blank_case_ids_are_never_one_case() -> None:
    rows = [{"slide_id": f"s{i}", "case_id": "" if i else "p"} for i in range(3)]
    groups = table_groups(rows, "labels.csv")
    assert groups is not None
    assert groups.of_row == ("p", "s1", "s2")
    with pytest.raises(
        DatasetError, match=r"a case_id or a slide_id, got neither in row 1 of l"
    ):
        table_groups([{"case_id": "p"}, {"case_id": ""}], "labels.csv")


def test_one_slide_under_two_cases_is_refused() -> None:
    rows = [{"slide_id": "s", "case_id": case} for case in ("p", "q")]
    with pytest.raises(
        DatasetError, match=r"to one case, got 'p' and 'q' for 's' in labels\.csv"
    ):
        table_groups(rows, "labels.csv")


def test_a_table_without_slides_and_cases_has_no_groups() -> None:
    assert table_groups([{"label": "a"}], "labels.csv") is None
