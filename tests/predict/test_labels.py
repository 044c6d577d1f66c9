"""Labels find their embeddings, or the account says why not; splits of other tools are read."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.predict.planted import write_embeddings

from thinsection.errors import ConfigError, DatasetError, InvalidInputError
from thinsection.evaluation.label_values import LabelsConfig
from thinsection.evaluation.labels import read_cohort
from thinsection.evaluation.parts import FoldSettings, make_parts
from thinsection.evaluation.tables import SLIDE_ALIASES
from thinsection.evaluation.target import Target
from thinsection.slide.cohort_table import _ALIASES


def cohort_of(root: Path, table: str, names: list[str], **config: object):
    for name in names:
        write_embeddings(root / f"{name}.h5", np.ones((2, 3)))
    path = root / "table.csv"
    path.write_text(table)
    target = config.pop("target", ("label",))
    return read_cohort(root, LabelsConfig(labels=path, target=target, **config))  # type: ignore[arg-type]


def test_the_account_says_what_matched_and_why_the_rest_did_not(tmp_path: Path) -> None:
    table = "slide_id,case_id,label\na.svs,p1,x\nb,p1,x\nc,p2,y\nd,p3,y\ne,p4,\n"
    cohort = cohort_of(tmp_path, table, ["a", "b", "c", "e", "f"])
    assert cohort.cases == ("p1", "p2")
    assert cohort.slides == (("a", "b"), ("c",))
    told = "\n".join(cohort.account)
    assert "3 slides of 2 cases for training" in told
    assert "no embeddings for 1 labelled slide: d" in told
    assert "no label in 1 row: e" in told
    assert "no label for 2 slides with embeddings: e, f" in told
    assert "binary (inferred from its values): x 1, y 1" in told


def test_barcodes_give_the_case_and_it_is_said(tmp_path: Path) -> None:
    names = [
        "TCGA-AA-0001-01Z-00-DX1.abc",
        "TCGA-AA-0001-01Z-00-DX2.def",
        "TCGA-AA-0002-01Z",
    ]
    rows = "\n".join(
        f"{name},{label}" for name, label in zip(names, "xxy", strict=True)
    )
    cohort = cohort_of(tmp_path, f"slide_id,label\n{rows}\n", names)
    assert cohort.cases == ("TCGA-AA-0001", "TCGA-AA-0002")
    assert any("TCGA, CPTAC or GTEx barcode" in line for line in cohort.account)
    by_case = tmp_path / "cases.tsv"
    by_case.write_text(
        "PATIENT\tlabel\nTCGA-AA-0001\tx\nTCGA-AA-0002\ty\n"
    )  # STAMP's column
    again = read_cohort(tmp_path, LabelsConfig(labels=by_case, target=("label",)))
    assert again.slides == cohort.slides


@pytest.mark.parametrize(
    ("values", "kind"),
    [("0 1 1 0", "binary"), ("a b c a", "multiclass"), ("0.5 1.25 2 3", "regression")],
)
def test_the_values_say_what_the_task_is(
    tmp_path: Path, values: str, kind: str
) -> None:
    rows = "\n".join(f"s{i},{v}" for i, v in enumerate(values.split()))
    cohort = cohort_of(
        tmp_path, f"slide_id,label\n{rows}\n", [f"s{i}" for i in range(4)]
    )
    assert cohort.target.kind == kind


def test_survival_and_several_labels(tmp_path: Path) -> None:
    table = (
        "slide_id,dead,days,msi\ns0,1,10,yes\ns1,0,20,no\ns2,true,30,1\ns3,False,40,0\n"
    )
    names = ["s0", "s1", "s2", "s3"]
    cox = cohort_of(tmp_path, table, names, target=("dead",), time="days")
    assert (cox.target.kind, cox.values[1]) == ("cox", (0.0, 20.0))
    both = cohort_of(tmp_path, table, names, target=("dead", "msi"))
    assert (both.target.kind, both.values[2]) == ("multilabel", (1.0, 1.0))
    split = cohort_of(
        tmp_path, table, names, target=("dead",), time="days", task="discrete"
    )
    assert split.target.names == tuple(f"interval_{i}" for i in range(1, 5))
    assert split.target.fitted(split.array).edges == (15.0, 20.0, 25.0)


def test_what_cannot_be_learnt_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        DatasetError,
        match="label must be the same in all rows of a case, got 'x' and 'y' for 'p'",
    ):
        cohort_of(tmp_path, "slide_id,case_id,label\na,p,x\nb,p,y\n", ["a", "b"])
    with pytest.raises(
        DatasetError, match="labels must match embeddings, got no match; 1 row in"
    ):
        cohort_of(tmp_path, "slide_id,label\nz,x\n", ["a"])
    with pytest.raises(ConfigError, match="cox must have one target and a time"):
        cohort_of(tmp_path, "slide_id,label\na,1\n", ["a"], task="cox")


def test_answers_of_each_kind() -> None:
    z = np.array([[0.0, 0.0], [2.0, -2.0]])
    known = {"columns": ("a",), "names": ("x", "y")}
    np.testing.assert_allclose(Target(kind="binary", **known).answers(z)[0], 0.5)
    np.testing.assert_allclose(
        Target(kind="multilabel", **known).answers(z)[1, 0], 0.880797, 1e-5
    )
    discrete = Target(kind="discrete", **known)
    np.testing.assert_allclose(discrete.answers(z).sum(axis=1), 1)
    early, late = discrete.risk(discrete.answers(np.array([[3.0, 0], [-3.0, 0]])))
    assert early > late
    value = Target(
        kind="regression", columns=("a",), names=("a",), center=5.0, spread=2.0
    )
    np.testing.assert_allclose(value.answers(np.array([[1.0]])), 7)


def test_folds_keep_classes_alike_and_test_each_case_once(tmp_path: Path) -> None:
    rows = "\n".join(f"s{i:02},{'xy'[i % 3 == 0]}" for i in range(45))
    cohort = cohort_of(
        tmp_path, f"slide_id,label\n{rows}\n", [f"s{i:02}" for i in range(45)]
    )
    parts, _ = make_parts(cohort, FoldSettings(folds=5, inner=4, seed=0))
    assert sorted(i for part in parts for i in part.test) == list(range(45))
    for part in parts:
        sides = (*part.train, *part.stop, *part.test)
        assert sorted(sides) == list(range(45))
        assert [
            sum(cohort.strata[list(s)]) for s in (part.train, part.stop, part.test)
        ] == [
            9,
            3,
            3,
        ]
    with pytest.raises(InvalidInputError, match="class 'y'"):
        make_parts(cohort, FoldSettings(folds=16, inner=4, seed=0))


def test_split_files_of_other_tools_are_read(tmp_path: Path) -> None:
    names = [f"s{i}" for i in range(6)]
    rows = "\n".join(f"{n},{'xy'[i % 2]}" for i, n in enumerate(names))
    cohort = cohort_of(tmp_path, f"slide_id,label\n{rows}\n", names)
    clam = tmp_path / "clam"
    clam.mkdir()
    (clam / "splits_0.csv").write_text(",train,val,test\n0,s0,s2,s4\n1,s1,s3,s5\n")
    (clam / "splits_0_bool.csv").write_text(",train,val,test\ns0,True,False,False\n")
    bench = tmp_path / "k=all.tsv"
    lines = [f"{n}\t{n}\t{'train' if i < 4 else 'test'}" for i, n in enumerate(names)]
    bench.write_text("\n".join(["case_id\tslide_id\tfold_0", *lines]) + "\n")
    nano = tmp_path / "nano.json"
    sides = {"train": {"slide_ids": names[:4]}, "val": {"slide_ids": names[4:]}}
    nano.write_text(json.dumps(sides))
    (part,), _ = make_parts(cohort, FoldSettings(folds=9, inner=2, seed=0), clam)
    assert (part.train, part.stop, part.test) == ((0, 1), (2, 3), (4, 5))
    for path in (bench, nano):
        (part,), _ = make_parts(cohort, FoldSettings(folds=9, inner=2, seed=0), path)
        assert part.test == (4, 5)
        assert sorted((*part.train, *part.stop)) == [0, 1, 2, 3]


def test_a_case_on_two_sides_is_refused(tmp_path: Path) -> None:
    table = "slide_id,case_id,label\na,p,x\nb,p,x\nc,q,y\n"
    cohort = cohort_of(tmp_path, table, ["a", "b", "c"])
    (tmp_path / "split.csv").write_text("slide_id,split\na,train\nb,test\nc,train\n")
    with pytest.raises(DatasetError, match="one side of a split, got 'p'"):
        make_parts(
            cohort, FoldSettings(folds=2, inner=2, seed=0), tmp_path / "split.csv"
        )


def test_whole_numbers_are_one_class_however_they_are_written(tmp_path: Path) -> None:
    values = ["0", "0.0", "1", "1.0", "00", "1"]
    rows = "\n".join(f"s{i}x,{v}" for i, v in enumerate(values))
    names = [f"s{i}x" for i in range(6)]
    cohort = cohort_of(tmp_path, f"slide_id,label\n{rows}\n", names)
    assert (cohort.target.kind, cohort.target.names) == ("binary", ("0", "1"))
    assert cohort.array[:, 0].tolist() == [0, 0, 1, 1, 0, 1]


def test_words_for_no_value_are_counted_and_no_class(tmp_path: Path) -> None:
    values = ["x", "y", "NaN", "N/A", "NA", "unknown", "Unknown", "", "[Not Available]"]
    rows = "\n".join(f"s{i}x,{v}" for i, v in enumerate(values))
    names = [f"s{i}x" for i in range(len(values))]
    cohort = cohort_of(tmp_path, f"slide_id,label\n{rows}\n", names)
    assert cohort.target.names == ("x", "y")
    (line,) = [line for line in cohort.account if "no label in" in line]
    assert line.startswith(
        "no label in 7 rows ('NaN' 1, 'N/A' 1, 'NA' 1, 'unknown' 1, 'Unknown' 1,"
    )
    assert line.endswith(": s2x, s3x, s4x, ...")


def test_classes_that_differ_in_capitals_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DatasetError, match="more than capital letters, got 'MSI' and 'msi'"
    ):
        cohort_of(tmp_path, "slide_id,label\na,MSI\nb,msi\nc,MSS\n", ["a", "b", "c"])


def test_centre_scale_and_edges_are_of_the_cases_that_are_given() -> None:
    value = Target(kind="regression", columns=("a",), names=("a",))
    fitted = value.fitted(np.array([[1.0], [3.0]]))
    assert (fitted.center, fitted.spread) == (2.0, 1.0)
    time = Target(kind="discrete", columns=("e", "t"), names=("1", "2", "3", "4"))
    rows = np.array([[1, 1.0], [1, 2], [0, 500], [1, 3], [1, 4], [1, 5]])
    assert time.fitted(rows).edges == (2.0, 3.0, 4.0)


def test_the_site_is_a_column_or_the_tissue_source_site(tmp_path: Path) -> None:
    names = [f"TCGA-{'AB'[i % 2]}0-000{i}-01Z-00-DX1" for i in range(4)]
    rows = [f"{n},{'xy'[i // 2]},h{i % 3}" for i, n in enumerate(names)]
    table = "\n".join(["slide_id,label,hospital", *rows]) + "\n"
    cohort = cohort_of(tmp_path, table, names)
    assert cohort.sites == ("TCGA-A0", "TCGA-B0", "TCGA-A0", "TCGA-B0")
    assert "2 sites (tissue source site of TCGA barcodes)" in cohort.account
    own = cohort_of(tmp_path, table, names, site="hospital")
    assert own.sites == ("h0", "h1", "h2", "h0")
    gap = table.replace(",h1", ",")
    with pytest.raises(
        DatasetError, match="hospital must name a site for each case, got none for 1"
    ):
        cohort_of(tmp_path, gap, names, site="hospital")


def test_a_slides_column_has_the_names_that_a_cohort_table_accepts() -> None:
    in_cohorts = {"slide_path", *_ALIASES["slide_path"], *_ALIASES["slide_id"]}
    assert set(SLIDE_ALIASES) == in_cohorts


@pytest.mark.parametrize(
    "header", ["slide", "Filename", "wsi", "FILENAME", "sample_id"]
)
def test_slides_may_stand_under_the_names_of_cohort_tables(
    tmp_path: Path, header: str
) -> None:
    table = f"{header},case_id,label\nx/a.svs,p1,x\nb.ndpi,p2,y\nC.svs,p3,y\n"
    cohort = cohort_of(tmp_path, table, ["a", "b", "c"])
    assert cohort.slides == (("a",), ("b",))
    assert any("slide: C.svs (did you mean c?)" in line for line in cohort.account)


def test_a_number_of_a_slide_is_not_its_name(tmp_path: Path) -> None:
    table = "slide,case_id,label\n1,a,x\n1,b,y\n"
    cohort = cohort_of(tmp_path, table, ["a", "b"])
    assert cohort.slides == (("a",), ("b",))


def test_a_table_that_names_no_slide_says_which_names_are_read(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="may also be called slide, sample_id, "):
        cohort_of(tmp_path, "name,label\na,x\nb,y\n", ["a", "b"])
