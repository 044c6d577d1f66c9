"""Tables in the public forms of GDC, cBioPortal, TCGA's biotabs, REDCap and Excel.

Each is written by hand, with the right reading of each value beside it. No patient is real.
"""

from pathlib import Path

import numpy as np
import openpyxl
import pytest
from tests.support.units import units

from thinsection.errors import ConfigError, DatasetError
from thinsection.evaluation.label_report import (
    LabelReport,
    read_label_report,
    write_clean_table,
)
from thinsection.evaluation.label_values import LabelsConfig
from thinsection.evaluation.survival import concordance, hazard_ratio
from thinsection.files.missing_cells import is_missing
from thinsection.files.tables import open_table


def report_of(path: Path, content: str | bytes, **settings: object) -> LabelReport:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_label_report(LabelsConfig(labels=path, **settings), None)  # type: ignore[arg-type]


def readings_of(report: LabelReport, column: str) -> dict[str, tuple[int, str, str]]:
    return {
        one.value: (one.count, one.reading, one.becomes)
        for one in report.values.readings
        if one.column == column
    }


def used_rows(report: LabelReport) -> dict[str, tuple[str | float, ...]]:
    values = report.values
    names = [report.table.name(i) for i in values.rows]
    return dict(zip(names, values.cells, strict=True))


GDC = """case_id\tcase_submitter_id\tvital_status\tdays_to_death\tdays_to_last_follow_up\tajcc_stage
0f1a2b3c-0000-4000-8000-000000000001\tTCGA-ZZ-A001\tDead\t812\t800\tStage I
0f1a2b3c-0000-4000-8000-000000000002\tTCGA-ZZ-A002\tAlive\t'--\t1204\tStage II
0f1a2b3c-0000-4000-8000-000000000003\tTCGA-ZZ-A003\tNot Reported\t'--\t'--\t'--
0f1a2b3c-0000-4000-8000-000000000004\tTCGA-ZZ-A004\tDead\t0\t'--\tStage I
0f1a2b3c-0000-4000-8000-000000000005\tTCGA-ZZ-A005\tAlive\t'--\t0\tStage II
"""


def test_gdc_survival_has_the_time_of_death_or_of_the_last_contact(
    tmp_path: Path,
) -> None:
    for times in (
        ("days_to_death", "days_to_last_follow_up"),
        ("days_to_last_follow_up", "days_to_death"),
    ):
        report = report_of(
            tmp_path / "gdc.tsv", GDC, target=("vital_status",), time=times
        )
        assert report.table.key_column == "case_submitter_id"
        assert used_rows(report) == {
            "TCGA-ZZ-A001": (1.0, 812.0),
            "TCGA-ZZ-A002": (0.0, 1204.0),
            "TCGA-ZZ-A004": (1.0, 0.0),
            "TCGA-ZZ-A005": (0.0, 0.0),
        }
        assert report.values.problems == ()
    assert readings_of(report, "vital_status") == {
        "Dead": (2, "event", "1"),
        "Alive": (2, "censored", "0"),
        "Not Reported": (1, "missing", ""),
    }
    assert readings_of(report, "days_to_death")["'--"] == (3, "missing", "")


def test_gdc_classes_do_not_include_its_sign_for_no_value(tmp_path: Path) -> None:
    report = report_of(tmp_path / "gdc.tsv", GDC, target=("ajcc_stage",))
    assert report.values.kind == "binary"
    assert readings_of(report, "ajcc_stage") == {
        "Stage I": (2, "class", "Stage I"),
        "Stage II": (2, "class", "Stage II"),
        "'--": (1, "missing", ""),
    }


def test_one_column_of_times_that_no_censored_case_fills_is_asked_back(
    tmp_path: Path,
) -> None:
    report = report_of(
        tmp_path / "gdc.tsv", GDC, target=("vital_status",), time="days_to_death"
    )
    (problem,) = report.values.problems
    assert "line 3 (TCGA-ZZ-A002), line 6 (TCGA-ZZ-A005)" in problem
    assert "no censored case has a time: pass time=... again" in problem


CBIOPORTAL = """#Patient Identifier\tOverall Survival Status\tOverall Survival (Months)\tDFS\tType
#Identifier\tStatus of life\tMonths of life\tStatus of disease\tSubtype
#STRING\tSTRING\tNUMBER\tSTRING\tSTRING
#1\t1\t1\t1\t1
PATIENT_ID\tOS_STATUS\tOS_MONTHS\tDFS_STATUS\tSUBTYPE
P-01\t1:DECEASED\t12.5\t1:Recurred/Progressed\tLumA
P-02\t0:LIVING\t40\t0:DiseaseFree\tLumB
P-03\t0:LIVING\t[Not Available]\t\tNA
P-04\t1:DECEASED\t7.25\t0:DiseaseFree\tLumA
P-05\t\t\t1:Recurred/Progressed\tLumB
"""


def test_cbioportal_numbers_its_events_and_has_rows_above_its_header(
    tmp_path: Path,
) -> None:
    report = report_of(
        tmp_path / "data_clinical_patient.txt",
        CBIOPORTAL,
        target=("OS_STATUS",),
        time="OS_MONTHS",
        drop_unusable=True,
    )
    assert report.table.lines[0] == 6
    assert used_rows(report) == {
        "P-01": (1.0, 12.5),
        "P-02": (0.0, 40.0),
        "P-04": (1.0, 7.25),
    }
    assert readings_of(report, "OS_STATUS") == {
        "1:DECEASED": (2, "event", "1"),
        "0:LIVING": (2, "censored", "0"),
        "": (1, "missing", ""),
    }
    assert readings_of(report, "OS_MONTHS")["[Not Available]"] == (1, "missing", "")
    (note,) = report.values.notes
    assert "left out by --drop-unusable, no time ('[Not Available]' (1))" in note
    assert "line 8 (P-03)" in note


def test_cbioportal_columns_may_be_asked_for_by_their_long_names(
    tmp_path: Path,
) -> None:
    report = report_of(
        tmp_path / "patients.txt",
        CBIOPORTAL,
        target=("Overall Survival Status",),
        time="Overall Survival (Months)",
        drop_unusable=True,
    )
    assert len(report.values.rows) == 3


def test_cbioportal_disease_free_is_censored(tmp_path: Path) -> None:
    text = CBIOPORTAL.replace("[Not Available]", "33").replace(
        "P-05\t\t\t", "P-05\t\t9\t"
    )
    report = report_of(
        tmp_path / "p.txt", text, target=("DFS_STATUS",), time="OS_MONTHS"
    )
    assert [cells[0] for cells in report.values.cells] == [1.0, 0.0, 0.0, 1.0]


BIOTAB = "\n".join(
    "\t".join(cells)
    for cells in (
        (
            "bcr_patient_uuid",
            "bcr_patient_barcode",
            "gender",
            "death_days_to",
            "last_contact_days_to",
            "vital_status",
            "er_status_by_ihc",
        ),
        (
            "bcr_patient_uuid",
            "bcr_patient_barcode",
            "gender",
            "days_to_death",
            "days_to_last_followup",
            "vital_status",
            "breast_carcinoma_estrogen_receptor_status",
        ),
        (
            "CDE_ID:",
            "CDE_ID:2003301",
            "CDE_ID:2200604",
            "CDE_ID:3165475",
            "CDE_ID:3008273",
            "CDE_ID:5",
            "CDE_ID:2957359",
        ),
        (
            "AA00-1",
            "TCGA-ZZ-B001",
            "FEMALE",
            "[Not Applicable]",
            "320",
            "Alive",
            "Positive",
        ),
        (
            "AA00-2",
            "TCGA-ZZ-B002",
            "FEMALE",
            "116",
            "[Not Available]",
            "Dead",
            "Negative",
        ),
        (
            "AA00-3",
            "TCGA-ZZ-B003",
            "MALE",
            "[Not Applicable]",
            "88",
            "Alive",
            "[Not Evaluated]",
        ),
        (
            "AA00-4",
            "TCGA-ZZ-B004",
            "FEMALE",
            "[Not Applicable]",
            "[Discrepancy]",
            "Alive",
            "Negative",
        ),
        ("AA00-5", "TCGA-ZZ-B005", "FEMALE", "90", "[Completed]", "Dead", "Positive"),
    )
)


def test_a_biotab_has_three_header_rows_and_words_in_brackets(tmp_path: Path) -> None:
    report = report_of(tmp_path / "b.txt", BIOTAB, target=("er_status_by_ihc",))
    assert report.table.key_column == "bcr_patient_barcode"
    assert readings_of(report, "er_status_by_ihc") == {
        "Positive": (2, "class", "Positive"),
        "Negative": (2, "class", "Negative"),
        "[Not Evaluated]": (1, "missing", ""),
    }


def test_a_biotab_is_read_by_the_names_of_its_second_row(tmp_path: Path) -> None:
    report = report_of(
        tmp_path / "b.txt",
        BIOTAB,
        target=("vital_status",),
        time=("days_to_death", "days_to_last_followup"),
    )
    (problem,) = report.values.problems
    assert "line 7 (TCGA-ZZ-B004)" in problem and "drop_unusable=True" in problem
    assert used_rows(report) == {
        "TCGA-ZZ-B001": (0.0, 320.0),
        "TCGA-ZZ-B002": (1.0, 116.0),
        "TCGA-ZZ-B003": (0.0, 88.0),
        "TCGA-ZZ-B005": (1.0, 90.0),
    }


def test_redcaps_raw_export_has_codes_and_blank_rows_of_events(tmp_path: Path) -> None:
    text = (
        "record_id,redcap_event_name,dead,fu_days,her2___1\n"
        "7,baseline_arm_1,,,1\n7,followup_arm_1,1,340,\n"
        "8,baseline_arm_1,,,0\n8,followup_arm_1,0,20,\n"
        "9,baseline_arm_1,,,0\n9,followup_arm_1,-9,500,\n"
    )
    report = report_of(
        tmp_path / "r.csv",
        text,
        target=("dead",),
        time="fu_days",
        read=("-9=missing",),
    )
    assert used_rows(report) == {"7": (1.0, 340.0), "8": (0.0, 20.0)}
    assert readings_of(report, "dead")["-9"] == (1, "missing", "")
    unread = report_of(tmp_path / "r.csv", text, target=("dead",), time="fu_days")
    (problem,) = unread.values.problems
    assert "'-9' (1) in line 7 (9)" in problem and 'read="VALUE=event"' in problem


def test_redcaps_label_export_has_labels_as_names_and_words(tmp_path: Path) -> None:
    text = (
        '"Record ID","Vital status at last contact","Follow-up (days)","HER2? (choice=Yes)"\n'
        "7,Deceased,340,Checked\n8,Alive,20,Unchecked\n9,Lost to follow-up,35,Unchecked\n"
        "10,Prefer not to say,3,Checked\n"
    )
    report = report_of(
        tmp_path / "r.csv",
        text,
        target=("Vital status at last contact",),
        time="Follow-up (days)",
    )
    assert used_rows(report) == {
        "7": (1.0, 340.0),
        "8": (0.0, 20.0),
        "9": (0.0, 35.0),
    }
    flags = report_of(
        tmp_path / "r.csv",
        text,
        target=("HER2? (choice=Yes)",),
        task="multilabel",
    )
    assert [cells for (cells,) in flags.values.cells] == [1.0, 0.0, 0.0, 1.0]


def test_excel_writes_errors_numbers_and_decimal_commas(tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    sheet = book.active
    for row in (
        ["Patient ID", "TMB", "Grade"],
        [1007.0, 3.5, 1],
        [1008, "#DIV/0!", 2],
        [1009, 12, "#VALUE!"],
        [1010, 0.25, 1],
        [1011, 7, 2.0],
    ):
        sheet.append(row)
    book.save(tmp_path / "w.xlsx")
    settings = {"labels": tmp_path / "w.xlsx"}
    tmb = read_label_report(LabelsConfig(**settings, target=("TMB",)), None)  # type: ignore[arg-type]
    assert used_rows(tmb) == {
        "1007": (3.5,),
        "1009": (12.0,),
        "1010": (0.25,),
        "1011": (7.0,),
    }
    grade = read_label_report(LabelsConfig(**settings, target=("Grade",)), None)  # type: ignore[arg-type]
    assert readings_of(grade, "Grade") == {
        "1": (2, "class", "1"),
        "2": (2, "class", "2"),
        "#VALUE!": (1, "missing", ""),
    }


def test_a_german_excel_has_semicolons_commas_and_windows_letters(
    tmp_path: Path,
) -> None:
    text = (
        "Patient;Größe (cm);Status\n"
        "P1;1,5;verstorben\nP2;2,25;lebt\nP3;k.A.;lebt\nP4;1.250,5;unbekannt\n"
    )
    report = report_of(
        tmp_path / "g.csv", text.encode("cp1252"), target=("Größe (cm)",)
    )
    assert used_rows(report) == {"P1": (1.5,), "P2": (2.25,), "P4": (1250.5,)}
    events = report_of(
        tmp_path / "g.csv",
        text.encode("cp1252"),
        target=("Status",),
        time="Größe (cm)",
        drop_unusable=True,
    )
    assert used_rows(events) == {"P1": (1.0, 1.5), "P2": (0.0, 2.25)}


def test_months_are_converted_to_the_days_of_the_first_column(tmp_path: Path) -> None:
    text = "case_id,dead,days_to_death,followup_months\nA,1,100,\nB,0,,12\nC,0,,2\n"
    report = report_of(
        tmp_path / "m.csv",
        text,
        target=("dead",),
        time=("days_to_death", "followup_months"),
    )
    assert used_rows(report)["B"] == (0.0, pytest.approx(365.25))
    assert any("multiplied by 30.4375" in note for note in report.values.notes)


# what is asked back


def test_a_limit_among_numbers_names_its_rows(tmp_path: Path) -> None:
    rows = [f"P{i},{i + 0.5}" for i in range(12)]
    text = "\n".join(["case_id,psa", *rows, "Q,<5", "R,NA"]) + "\n"
    report = report_of(tmp_path / "p.csv", text, target=("psa",))
    (problem,) = report.values.problems
    assert "got a limit, and no number, '<5' (1), in line 14 (Q)" in problem
    assert readings_of(report, "psa")["<5"] == (1, "limit", "")
    assert (
        len(
            report_of(
                tmp_path / "p.csv", text, target=("psa",), drop_unusable=True
            ).values.rows
        )
        == 12
    )
    read = report_of(tmp_path / "p.csv", text, target=("psa",), read=("<5=5",))
    assert used_rows(read)["Q"] == (5.0,)


def test_a_code_among_numbers_is_asked_back_and_may_be_confirmed(
    tmp_path: Path,
) -> None:
    rows = [f"P{i},{i}" for i in range(15)]
    text = "\n".join(["case_id,nodes", *rows, "Q,999"]) + "\n"
    report = report_of(tmp_path / "p.csv", text, target=("nodes",))
    (problem,) = report.values.problems
    assert "got 999 among 0 to 14 in line 17 (Q)" in problem
    for reading, count in (("999=missing", 15), ("999=number", 16)):
        read = report_of(tmp_path / "p.csv", text, target=("nodes",), read=(reading,))
        assert read.values.problems == ()
        assert len(read.values.rows) == count


def test_commas_that_may_mean_two_things_are_asked_back(tmp_path: Path) -> None:
    rows = [f'P{i},"{i + 1},{i + 100}"' for i in range(40)]
    text = "\n".join(["case_id,cells", *rows]) + "\n"
    report = report_of(tmp_path / "p.csv", text, target=("cells",))
    (problem,) = report.values.problems
    assert "a comma that may be a decimal one or one between thousands" in problem


def test_forty_numbers_with_decimal_commas_are_numbers(tmp_path: Path) -> None:
    rows = [f'P{i},"{i},5"' for i in range(40)]
    text = "\n".join(["case_id,size", *rows]) + "\n"
    report = report_of(tmp_path / "p.csv", text, target=("size",))
    assert (report.values.kind, report.values.cells[3]) == ("regression", (3.5,))


def test_a_word_among_many_numbers_is_asked_back(tmp_path: Path) -> None:
    rows = [f"P{i},{i}" for i in range(20)]
    text = "\n".join(["case_id,age", *rows, "Q,old"]) + "\n"
    report = report_of(tmp_path / "p.csv", text, target=("age",))
    (problem,) = report.values.problems
    assert "got no number, 'old' (1), in line 22 (Q)" in problem


def test_a_class_of_one_case_is_asked_back_before_training(tmp_path: Path) -> None:
    text = "case_id,t\nA,x\nB,x\nC,y\nD,y\nE,yy\n"
    report = report_of(tmp_path / "p.csv", text, target=("t",))
    (question,) = report.values.questions
    assert "got 1 of 'yy' in line 6 (E)" in question
    joined = report_of(tmp_path / "p.csv", text, target=("t",), read=("YY=y",))
    assert joined.values.questions == ()
    assert joined.summary == "binary: 5 rows of 5: x 2, y 3"


def test_words_for_no_value_are_classes_where_a_reading_says_so(tmp_path: Path) -> None:
    text = "case_id,mets\nA,None\nB,None\nC,Liver\nD,Liver\nE,NA\n"
    report = report_of(tmp_path / "p.csv", text, target=("mets",), read=("none=class",))
    assert readings_of(report, "mets") == {
        "None": (2, "class", "None"),
        "Liver": (2, "class", "Liver"),
        "NA": (1, "missing", ""),
    }


def test_a_minus_beside_a_plus_is_a_class(tmp_path: Path) -> None:
    text = "case_id,er\nA,+\nB,-\nC,+\nD,-\nE,?\n"
    report = report_of(tmp_path / "p.csv", text, target=("er",))
    assert report.summary == "binary: 4 rows of 5: + 2, - 2"
    alone = report_of(tmp_path / "p.csv", "case_id,er\nA,x\nB,-\nC,y\n", target=("er",))
    assert len(alone.values.rows) == 2


def test_events_of_1_and_2_are_asked_back(tmp_path: Path) -> None:
    text = "case_id,status,time\nA,1,5\nB,2,6\nC,2,7\n"
    settings = {"target": ("status",), "time": "time"}
    report = report_of(tmp_path / "p.csv", text, **settings)
    (problem,) = report.values.problems
    assert 'read="2=event" and read="1=censored"' in problem
    read = report_of(
        tmp_path / "p.csv", text, **settings, read=("2=event", "1=censored")
    )
    assert [cells[0] for cells in read.values.cells] == [0.0, 1.0, 1.0]


def test_a_number_that_contradicts_its_word_is_no_event(tmp_path: Path) -> None:
    text = "case_id,os,time\nA,0:DECEASED,5\nB,1:DECEASED,6\n"
    report = report_of(tmp_path / "p.csv", text, target=("os",), time="time")
    assert "'0:DECEASED' (1) in line 2 (A)" in report.values.problems[0]


# the clean table


def test_the_clean_table_is_read_back_as_the_same_labels(tmp_path: Path) -> None:
    report = report_of(
        tmp_path / "gdc.tsv",
        GDC,
        target=("vital_status",),
        time=("days_to_death", "days_to_last_follow_up"),
    )
    clean = tmp_path / "clean.csv"
    log = write_clean_table(report, clean)
    again = read_label_report(
        LabelsConfig(labels=clean, target=("vital_status",), time="time"), None
    )
    assert used_rows(again) == used_rows(report)
    lines = open_table(log).rows
    assert {
        "line": "4",
        "id": "TCGA-ZZ-A003",
        "column": "vital_status",
        "value": "Not Reported",
        "reading": "missing",
        "becomes": "",
    } in lines
    with pytest.raises(ValueError, match=r"out must end in .csv or .tsv"):
        write_clean_table(report, tmp_path / "clean.xlsx")


def test_a_table_without_the_column_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="did you mean 'vital_status'"):
        report_of(tmp_path / "gdc.tsv", GDC, target=("vital_statsu",))


def test_a_reading_of_a_value_that_no_row_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="read must name a value of ajcc_stage, got 'stage iii'"
    ):
        report_of(
            tmp_path / "g.tsv", GDC, target=("ajcc_stage",), read=("Stage III=class",)
        )


@pytest.mark.parametrize(
    "text",
    [
        "not evaluable",
        "Not Reported/Unknown",
        "data not available",
        "could not be determined",
        "n/k",
        "-- not done --",
        "[Completed]",
        "#NAME?",
        "#WERT!",
        "k.A.",
        "value missing",
        "(null)",
        "None reported",
    ],
)
def test_words_that_say_no_value_and_nothing_else_are_missing(text: str) -> None:
    assert is_missing(text)


@pytest.mark.parametrize(
    "text",
    [
        "not detected",
        "Not identified",
        "unknown primary",
        "No evidence of disease",
        "never",
        "not given",
        "tested",
        "no",
        "Not Hispanic or Latino",
        "3+",
        "#1",
        "NX",
        "non-smoker",
        "none/mild",
    ],
)
def test_findings_are_classes(text: str) -> None:
    assert not is_missing(text)


def test_lifelines_takes_the_events_and_times_that_are_read(tmp_path: Path) -> None:
    """A time of 0 counts in its Cox regression and c-index, as in ours."""
    pandas = pytest.importorskip("pandas")
    lifelines = pytest.importorskip("lifelines")
    rng = np.random.default_rng(2)
    rows = [
        f"P{i},{('Alive', 'Dead')[i % 3 == 0]},{0 if i in (3, 4) else rng.integers(1, 90)}"
        for i in range(30)
    ]
    text = "\n".join(["case_id,vital_status,days", *rows, "Q,Dead,-1"]) + "\n"
    report = report_of(
        tmp_path / "s.csv",
        text,
        target=("vital_status",),
        time="days",
        drop_unusable=True,
    )
    event, time = np.array(report.values.cells, dtype=np.float64).T
    assert (time == 0).sum() == 2
    risk = rng.normal(size=30)
    table = pandas.DataFrame({"risk": risk, "event": event, "time": time})
    judge = lifelines.CoxPHFitter().fit(table, "time", "event")
    ours = hazard_ratio(event == 1, time, risk, units(30))
    assert ours is not None
    assert ours.value == pytest.approx(judge.hazard_ratios_["risk"], abs=1e-6)
    c_index = concordance(event == 1, time, risk)(np.ones((1, 30)))
    theirs = lifelines.utils.concordance_index(time, -risk, event)
    assert c_index[0] == pytest.approx(theirs)


def test_dates_are_no_times_and_are_named_once(tmp_path: Path) -> None:
    rows = [f"P{i},{i % 2},2020-01-{i + 1:02}" for i in range(20)]
    text = "\n".join(["case_id,dead,seen", *rows]) + "\n"
    report = report_of(tmp_path / "d.csv", text, target=("dead",), time="seen")
    (problem,) = report.values.problems
    assert "a time that is no number, '2020-01-01' (1), " in problem
    assert (
        "line 4 (P2), ... (20 rows)" in problem and "pass time=... again" not in problem
    )
