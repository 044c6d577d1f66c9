"""What must not stand on both sides of a split, and data that cannot be scored at all."""

import csv
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.probe.make import blobs, write_tiles_h5

from thinsection.config import replace_flat
from thinsection.errors import ConfigError, DatasetError, InvalidInputError
from thinsection.evaluation.cases import Groups
from thinsection.probe import CaseSet, TileSet, knn_probe, make_split, slide_probe
from thinsection.probe.config import ProbeConfig
from thinsection.probe.data.cases import load_cases
from thinsection.probe.data.load import load_tiles
from thinsection.probe.protocol import NANOPATH
from thinsection.probe.registry import tileset


def patients(root: Path, columns: list[str], *, split: str = "", n: int = 40) -> Path:
    """A table of patients with a random embedding and an arbitrary label each, 10 tiles a patient.

    `split` 'tile' puts tiles of a patient on both sides, 'patient' keeps them together.
    """
    rng = np.random.default_rng(0)
    of_tile = np.repeat(np.arange(n), 10)
    x = rng.normal(size=(n, 8))[of_tile] + 0.01 * rng.normal(size=(10 * n, 8))
    np.save(root / "x.npy", x.astype(np.float32))
    labels = rng.integers(0, 2, n)[of_tile]
    sides = {"tile": rng.random(10 * n) < 0.3, "patient": of_tile % 3 == 0}
    known = {
        "case_id": [f"p{i}" for i in of_tile],
        "slide_id": [f"s{i}" for i in of_tile],
        "barcode": [f"TCGA-AB-{i:04}-01Z-00-DX{t % 2}" for t, i in enumerate(of_tile)],
    }
    table = root / "tiles.csv"
    with table.open("w", newline="") as file:
        header = ["slide_id" if c == "barcode" else c for c in columns]
        rows = csv.writer(file)
        rows.writerow(["row", "label", *header, *(["split"] if split else [])])
        for i, label in enumerate(labels):
            side = [["train", "val"][int(sides[split][i])]] if split else []
            rows.writerow([i, "ab"[label], *(known[c][i] for c in columns), *side])
    return table


def load(table: Path, **changes: Any) -> TileSet:
    given = {"embeddings": table.parent / "x.npy", **changes}
    return load_tiles(table, replace_flat(ProbeConfig(), given))


@pytest.mark.parametrize(
    ("column", "named"),
    [
        ("case_id", r"got 39 patients \('p0', 'p1', 'p10', \.\.\.\) in 'tiles'"),
        ("slide_id", r"got 39 slides \('s0', 's1', 's10', \.\.\.\)"),
        (
            "barcode",
            r"got 39 patients \('TCGA-AB-0000', 'TCGA-AB-0001', .*\), \d\d slides \('TCGA-AB",
        ),
    ],
)
def test_a_split_that_parts_a_patient_is_refused_by_name(
    column: str, named: str, tmp_path: Path
) -> None:
    table = patients(tmp_path, [column], split="tile")
    with pytest.raises(DatasetError, match=named):
        load(table)
    leaky = load(table, allow_leakage=True)
    result = knn_probe(leaky, protocol=NANOPATH)
    assert result.score > 0.99  # what the check is there for
    assert (
        "the score is too optimistic; --allow-leakage accepts this"
        in result.facts["leakage"]
    )


@pytest.mark.parametrize("column", ["case_id", "slide_id", "barcode"])
@pytest.mark.parametrize("split", ["", "patient"])
def test_split_by_patient_the_same_table_is_at_chance_and_its_interval_covers_it(
    split: str, column: str, tmp_path: Path
) -> None:
    result = knn_probe(
        load(patients(tmp_path, [column], split=split)), protocol=NANOPATH
    )
    assert result.facts["leakage"].startswith("training and validation set share no ")
    assert result.interval is not None
    assert result.interval.low < 0.5 < result.interval.high
    assert result.interval.unit == ("slides" if column == "slide_id" else "patients")
    assert result.interval.units in (13, 14)


def test_without_patients_and_slides_the_page_says_that_nobody_knows(
    tmp_path: Path,
) -> None:
    data = load(patients(tmp_path, [], split="patient"))
    assert "their patients and slides are unknown" in data.facts["leakage"]


def test_identical_rows_on_both_sides_are_refused() -> None:
    data = blobs()
    val = data.val.embeddings.copy()
    val[[3, 7]] = data.train.embeddings[[5, 0]]
    again = dataclasses.replace(data, val=make_split(val, data.val.labels))
    with pytest.raises(
        DatasetError, match=r"slide or row, got 2 identical rows \('3', '7'\) in 'b"
    ):
        knn_probe(again, protocol=NANOPATH)
    allowed = knn_probe(
        dataclasses.replace(again, allow_leakage=True), protocol=NANOPATH
    )
    assert "2 identical rows" in allowed.facts["leakage"]


def test_folds_that_share_a_patient_or_a_vector_are_refused() -> None:
    rng = np.random.default_rng(0)
    known: dict[str, Any] = {
        "name": "c",
        "class_names": ("a", "b"),
        "labels": np.arange(30) % 2,
    }
    known |= {"ids": tuple(f"c{i}" for i in range(30))}
    fold = (np.arange(20), np.arange(20, 30))
    x = rng.normal(size=(30, 4)).astype(np.float32)
    owners = Groups("patients", tuple(f"p{i % 25}" for i in range(30)))
    with pytest.raises(
        DatasetError, match=r"got 5 patients \('p0', 'p1', 'p2', \.\.\.\) in 'c'"
    ):
        slide_probe(
            CaseSet(**known, vectors=x, folds=(fold,), groups=owners), protocol=NANOPATH
        )
    drawn = slide_probe(CaseSet(**known, vectors=x, groups=owners), protocol=NANOPATH)
    assert drawn.interval is not None
    assert (drawn.interval.unit, drawn.interval.units) == ("patients", 25)
    x[25] = x[3]
    with pytest.raises(DatasetError, match=r"got 1 identical cases \('c25'\)"):
        slide_probe(CaseSet(**known, vectors=x, folds=(fold,)), protocol=NANOPATH)


def test_a_case_that_was_rounded_to_float16_is_refused_and_a_near_one_is_named() -> (
    None
):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 8)).astype(np.float32)
    known: dict[str, Any] = {"name": "c", "class_names": ("a", "b")}
    known |= {"labels": np.arange(30) % 2, "ids": tuple(f"c{i}" for i in range(30))}
    fold = (np.arange(20), np.arange(20, 30))
    x[25] = x[3].astype(np.float16)
    with pytest.raises(DatasetError, match=r"got 1 identical cases \('c25'\)"):
        slide_probe(CaseSet(**known, vectors=x, folds=(fold,)), protocol=NANOPATH)
    x[25] = x[3] * 1.003
    result = slide_probe(CaseSet(**known, vectors=x, folds=(fold,)), protocol=NANOPATH)
    assert result.facts["leakage"].endswith(
        "1 pair of cases with nearly the same mean embedding ('c3' and 'c25')"
    )


def slides(root: Path, rows: list[str], header: str) -> ProbeConfig:
    rng = np.random.default_rng(0)
    for row in rows:
        name = row.split(",")[0]
        tiles = rng.normal(size=(3, 4)).astype(np.float32)
        write_tiles_h5(root / "feats" / f"{name}.h5", np.zeros((3, 2)), tiles)
    (root / "cases.csv").write_text("\n".join([header, *rows]))
    return replace_flat(ProbeConfig(), {"embeddings": root / "feats"})


def test_slides_of_a_tcga_patient_are_one_case_and_blank_cases_are_not(
    tmp_path: Path,
) -> None:
    names = [f"TCGA-AB-000{i // 2}-01Z-00-DX{i % 2}" for i in range(6)]
    config = slides(
        tmp_path, [f"{n},{'ab'[i // 4]}" for i, n in enumerate(names)], "slide_id,label"
    )
    cases = load_cases(tmp_path / "cases.csv", config)
    assert cases.ids == ("TCGA-AB-0000", "TCGA-AB-0001", "TCGA-AB-0002")
    assert cases.groups is not None
    assert cases.groups.unit == "patients"
    config = slides(
        tmp_path, ["s0,,a", "s1,,b", "s2,p,a", "s3,p,a"], "slide_id,case_id,label"
    )
    assert load_cases(tmp_path / "cases.csv", config).ids == ("s0", "s1", "p")


def test_slides_with_labels_of_their_own_stay_apart_and_keep_their_patient(
    tmp_path: Path,
) -> None:
    rows = [f"s{i},p{i // 2},{'ab'[i % 2]}" for i in range(8)]
    config = slides(tmp_path, rows, "slide_id,case_id,label")
    with pytest.raises(
        DatasetError, match=r"got 'a' and 'b' for 'p0' .*; or pass sample=.slide."
    ):
        load_cases(tmp_path / "cases.csv", config)
    cases = load_cases(
        tmp_path / "cases.csv", replace_flat(config, {"sample": "slide"})
    )
    assert cases.ids == tuple(f"s{i}" for i in range(8))
    assert cases.shared_patients == ("p0", "p0", "p1", "p1", "p2", "p2", "p3", "p3")


def test_one_slide_under_two_cases_is_refused_in_a_table_of_cases(
    tmp_path: Path,
) -> None:
    config = slides(tmp_path, ["s0,p,a", "s0,q,b"], "slide_id,case_id,label")
    with pytest.raises(
        DatasetError, match="a slide must belong to one case, got 'p' and 'q' for 's0'"
    ):
        load_cases(tmp_path / "cases.csv", config)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.ones((60, 4)), "must differ between rows, got 60 equal rows"),
        (
            np.eye(60, 4),
            r"must not be zero, got only zeros in 56 of 60 rows \('4', '5', '6', \.\.\.\)",
        ),
    ],
)
def test_constant_and_zero_embeddings_are_refused(x: np.ndarray, message: str) -> None:
    split = make_split(x, np.arange(60) % 2)
    data = TileSet(
        name="x", class_names=("a", "b"), train=split, val=blobs(dim=4, classes=2).val
    )
    with pytest.raises(InvalidInputError, match=message):
        knn_probe(data, protocol=NANOPATH)


def test_validation_of_one_class_is_refused() -> None:
    data = blobs(classes=2)
    only = data.val.labels == 1
    val = make_split(data.val.embeddings[only], data.val.labels[only])
    with pytest.raises(
        DatasetError, match="at least two classes, got only 'class 1' in 'blobs'"
    ):
        knn_probe(dataclasses.replace(data, val=val), protocol=NANOPATH)


@pytest.mark.parametrize(
    ("train_rows", "protocol", "message"),
    [
        (30, "nanopath", "must have >= 16 training rows"),
        (150, "eva", "must define the knn probe"),
    ],
)
def test_a_tile_set_that_cannot_have_all_three_probes_has_none(
    train_rows: int, protocol: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(*args: object, **given: object) -> None:
        raise AssertionError("a head was trained")

    monkeypatch.setattr("thinsection.probe.probes.tiles.train_head", trained)
    config = replace_flat(ProbeConfig(), {"protocol": protocol, "device": "cpu"})
    with pytest.raises((DatasetError, ValueError), match=message):
        tileset(blobs(n_train=train_rows), config)


def test_another_cohort_is_looked_at_once_and_all_of_the_data_trains(
    tmp_path: Path,
) -> None:
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
    own = patients(tmp_path / "own", ["slide_id"], split="patient")
    other = patients(tmp_path / "other", ["slide_id"], n=12)
    x = np.load(other.parent / "x.npy") + 3
    np.save(other.parent / "x.npy", x)
    other.write_text(other.read_text().replace(",s", ",other"))
    for table in (own, other):  # each beside its own embeddings
        lines = table.read_text().splitlines()
        rows = [f"{line},x.npy" for line in lines[1:]]
        table.write_text("\n".join([f"{lines[0]},path", *rows]))
    honest = replace_flat(ProbeConfig(), {"test": other})
    data = load_tiles(own, honest)
    assert (len(data.train), len(data.val)) == (400, 120)
    assert (
        data.facts["split_rule"]
        == "all rows are in the training set, all rows of 'tiles' are scored"
    )
    with pytest.raises(
        ConfigError, match="must not select settings on a test set, got 'nanopath'"
    ):
        load_tiles(own, replace_flat(honest, {"protocol": "nanopath"}))
    with pytest.raises(DatasetError, match="got 40 slides"):
        load_tiles(own, replace_flat(ProbeConfig(), {"test": own}))


def test_test_rows_are_scored_where_that_is_asked_for(tmp_path: Path) -> None:
    splits = ("train", "val", "test")
    rows = [f"s{i},{'ab'[i % 2]},{splits[i % 3]}" for i in range(12)]
    config = slides(tmp_path, rows, "slide_id,label,split")
    assert len(load_cases(tmp_path / "cases.csv", config).ids) == 8
    cases = load_cases(
        tmp_path / "cases.csv", replace_flat(config, {"held_out": "test"})
    )
    assert cases.folds is not None
    ((train, test),) = cases.folds
    assert (len(train), [cases.ids[i] for i in test]) == (8, ["s2", "s5", "s8", "s11"])
