"""Patho-Bench tasks and case CSVs, with small embedding files."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from tests.probe.make import write_tiles_h5

from thinsection.config import replace_flat
from thinsection.errors import DatasetError
from thinsection.probe import ProbeConfig
from thinsection.probe.data.cases import load_case_table, load_cases, load_survival
from thinsection.probe.protocol import NANOPATH, PATHOBENCH


def pathobench(embeddings: Path) -> ProbeConfig:
    return replace_flat(
        ProbeConfig(), {"protocol": "pathobench", "embeddings": embeddings}
    )


def task(root: Path, *, folds: int, sealed: int = 0) -> Path:
    """A task of 12 cases (case 0 has two slides), `sealed` of which are test in every fold."""
    root.mkdir(parents=True, exist_ok=True)
    names = [f"fold_{f}" for f in range(folds)]
    lines = ["\t".join(["case_id", "slide_id", "er", "os_event", "os_days", *names])]
    for i in range(12):
        held_out = [i < sealed or (folds > 1 and i % folds == f) for f in range(folds)]
        parts = ["test" if out else "train" for out in held_out]
        for slide in [f"s{i}.svs", f"s{i}b.svs"] if i == 0 else [f"s{i}.svs"]:
            lines.append(
                "\t".join(
                    [f"c{i}", slide, str(i // 6), str(i % 2), str(100 + i), *parts]
                )
            )
    (root / "k=all.tsv").write_text("\n".join(lines))
    (root / "config.yaml").write_text(
        "task_col: er\nsample_col: case_id\nlabel_dict:\n  0: negative\n  1: positive\n"
    )
    for i in range(12):
        write_tiles_h5(
            root / "feats" / f"s{i}.h5", np.zeros((2, 2)), np.full((2, 3), i, "f4")
        )
    write_tiles_h5(
        root / "feats" / "s0b.h5", np.zeros((1, 2)), np.full((1, 3), 8.0, "f4")
    )
    return root


@pytest.mark.parametrize(
    "ids",
    [
        ["a'"],
        ["'a'"],
        ["a, b"],
        ["[a"],
        ["a", "b'"],
        ["a, b", "it's", 'say "x"'],
    ],
)
def test_ids_of_slides_are_read_as_they_are_written(
    ids: list[str], tmp_path: Path
) -> None:
    """Several are written as Python writes a list, one as it is."""
    cell = ids[0] if len(ids) == 1 else repr(ids)
    with (tmp_path / "l.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [("slide_id", "case_id", "label"), (cell, "c", "0"), ("z", "d", "1")]
        )
    table = load_case_table(
        tmp_path / "l.csv", NANOPATH, ProbeConfig().data, survival=False
    )
    assert table.slides == (tuple(ids), ("z",))


def test_pathobench_folds_are_the_files_and_cases_are_means_of_slides(
    tmp_path: Path,
) -> None:
    root = task(tmp_path / "bc" / "er", folds=3)
    cases = load_cases(root, pathobench(root / "feats"))
    assert cases.class_names == ("negative", "positive")
    assert cases.ids == tuple(f"c{i}" for i in range(12))
    np.testing.assert_array_equal(cases.vectors[:, 0], [4, *range(1, 12)])
    assert cases.folds is not None
    for f, (train, val) in enumerate(cases.folds):
        np.testing.assert_array_equal(val, np.arange(f, 12, 3))
        assert sorted([*train, *val]) == list(range(12))


def test_nanopath_takes_only_the_training_rows_of_the_first_fold(
    tmp_path: Path,
) -> None:
    root = task(tmp_path / "t", folds=3)
    table = load_case_table(root, NANOPATH, survival=False)
    assert table.ids == tuple(f"c{i}" for i in range(12) if i % 3)
    assert table.folds is None


@pytest.mark.parametrize("folds", [1, 3])
def test_a_sealed_test_is_never_looked_at_by_nanopath(
    tmp_path: Path, folds: int
) -> None:
    root = task(tmp_path / "t", folds=folds, sealed=2)
    for i in range(2):
        (root / "feats" / f"s{i}.h5").unlink()
    table = load_case_table(root, NANOPATH, survival=False)
    assert not {"c0", "c1"} & set(table.ids)
    assert table.facts["sealed_rows_dropped"] >= 3  # case 0 has two slides
    own = replace_flat(pathobench(root / "feats"), {"protocol": "nanopath"})
    assert load_cases(root, own).ids == table.ids


def test_the_one_official_split_is_what_pathobench_scores(tmp_path: Path) -> None:
    root = task(tmp_path / "t", folds=1, sealed=4)
    cases = load_cases(root, pathobench(root / "feats"))
    ((train, test),) = cases.folds or ()
    assert [cases.ids[i] for i in test] == ["c0", "c1", "c2", "c3"]
    assert len(train) == 8
    assert cases.facts["split_rule"] == "1 fold of the file"


CASES = [f"c{i}" for i in range(6)]
FOLDED = [
    {"train": CASES[2:], "val": CASES[:2]},
    {"train": CASES[:4], "val": CASES[4:]},
]


def test_a_survival_list_of_nanopath_brings_its_folds(tmp_path: Path) -> None:
    slides = [["a0", "a1"], *([f"s{i}"] for i in range(1, 6))]
    path = tmp_path / "cptac_pda_os.json"
    follow_up = {"events": [1, 0, 1, 0, 1, 1], "days": [9.0, 8.5, 7.0, 6.0, 5.0, 4.0]}
    task = {"case_ids": CASES, "case_slides": slides, **follow_up, "folds": FOLDED}
    path.write_text(json.dumps({"source": "here", "held_out_case_ids": ["x"], **task}))
    table = load_case_table(path, NANOPATH, survival=True)
    assert table.ids == tuple(CASES)
    assert table.slides[0] == ("a0", "a1")
    assert [(t.tolist(), v.tolist()) for t, v in table.folds or ()] == [
        ([2, 3, 4, 5], [0, 1]),
        ([0, 1, 2, 3], [4, 5]),
    ]


def test_a_slide_list_of_nanopath_pools_train_and_val_and_leaves_test_shut(
    tmp_path: Path,
) -> None:
    parts = {
        split: {"case_ids": [ids], "slides": [f"s{ids}"], "labels": [ids % 2]}
        for ids, split in enumerate(("train", "val", "test"))
    }
    (tmp_path / "surgen.json").write_text(json.dumps(parts))
    table = load_case_table(tmp_path / "surgen.json", NANOPATH, survival=False)
    assert table.slides == (("s0",), ("s1",))
    assert [r["label"] for r in table.rows] == ["0", "1"]


def test_survival_columns_are_read(tmp_path: Path) -> None:
    root = task(tmp_path / "t", folds=3)
    (root / "config.yaml").write_text("task_col: os\nsample_col: case_id\n")
    cases = load_survival(root, pathobench(root / "feats"))
    np.testing.assert_array_equal(cases.event, np.arange(12) % 2 == 1)
    np.testing.assert_array_equal(cases.time, 100 + np.arange(12))


def test_a_case_with_two_labels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text("case_id,slide_id,label\nc,a,0\nc,b,1\n")
    with pytest.raises(
        DatasetError, match="same in all rows of a case, got '0' and '1' for 'c'"
    ):
        load_case_table(tmp_path / "l.csv", NANOPATH, survival=False)


def test_a_csv_of_slides_makes_each_a_case_and_drops_test(tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text(
        "slide_id,label,split\na,x,train\nb,y,val\nz,y,test\n"
    )
    table = load_case_table(tmp_path / "l.csv", NANOPATH, survival=False)
    assert table.ids == ("a", "b")


def test_a_csv_of_test_slides_alone_leaves_no_case(tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text("slide_id,label,split\nz,y,test\n")
    with pytest.raises(DatasetError, match="must have training cases, got none in 'l'"):
        load_case_table(tmp_path / "l.csv", NANOPATH, survival=False)


def test_a_label_outside_the_tasks_names_is_refused(tmp_path: Path) -> None:
    root = task(tmp_path / "t", folds=3)
    (root / "config.yaml").write_text("task_col: er\nlabel_dict:\n  0: negative\n")
    with pytest.raises(DatasetError, match="label must be one of negative, got '1'"):
        load_cases(root, pathobench(root / "feats"))


def test_a_folder_that_is_no_task_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(
        DatasetError, match=r"an empty folder .*searched for k=all.tsv, config.yaml"
    ):
        load_case_table(tmp_path, PATHOBENCH, survival=False)


def test_an_event_that_is_no_flag_is_refused(tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text("slide_id,event,time\na,maybe,3\n")
    with pytest.raises(DatasetError, match="event must be 0 or 1, got 'maybe' in 'l'"):
        load_survival(tmp_path / "l.csv", ProbeConfig())


def test_a_case_of_two_patients_is_refused_and_one_of_several_slides_is_not(
    tmp_path: Path,
) -> None:
    root = task(tmp_path / "t", folds=1)
    config = root / "config.yaml"
    config.write_text(config.read_text().replace("case_id", "specimen"))
    data = ProbeConfig().data
    lines = ["specimen slide_id patient_id er fold_0"]
    lines += ["a s0 p 0 train", "a s1 p 0 train", "b s2 q 1 test"]

    def slides(lines: list[str]) -> tuple[tuple[str, ...], ...]:
        text = "\n".join("\t".join(line.split()) for line in lines)
        (root / "k=all.tsv").write_text(text)
        return load_case_table(root, PATHOBENCH, data, survival=False).slides

    assert slides(lines) == (("s0", "s1"), ("s2",))
    without = [" ".join(np.delete(line.split(), 2)) for line in lines]
    assert slides(without) == (("s0", "s1"), ("s2",))
    with pytest.raises(DatasetError, match="one patient, got 'p' and 'q' for 'a'"):
        slides([line.replace("s1 p", "s1 q") for line in lines])
