"""A clinical table trains and tests a model, and the page and the JSON say how it was read."""

import json
from pathlib import Path

import numpy as np
import openpyxl
import pytest
from tests.predict.planted import write_embeddings

from thinsection.errors import DatasetError
from thinsection.evaluation.label_values import LabelsConfig
from thinsection.predict.config import FitConfig, FoldsConfig, TrainConfig
from thinsection.predict.experiment import train
from thinsection.predict.heads.config import HeadConfig
from thinsection.predict.predicting import predict

TIMES = ("days_to_death", "days_to_last_follow_up")


def embeddings(root: Path, names: list[str]) -> Path:
    root.mkdir()
    rng = np.random.default_rng(4)
    for name in names:
        write_embeddings(root / f"{name}.h5", rng.normal(size=(12, 8)))
    return root


def config_of(labels: LabelsConfig) -> TrainConfig:
    return TrainConfig(
        labels=labels,
        head=HeadConfig(head="linear"),
        fit=FitConfig(epochs=2, device="cpu"),
        cross=FoldsConfig(folds=2, inner_folds=2),
    )


def gdc_table(path: Path, names: list[str]) -> Path:
    """Dead and alive cases in turn; one dead at day 0, one of unknown status."""
    lines = ["case_submitter_id\tvital_status\tdays_to_death\tdays_to_last_follow_up"]
    for i, name in enumerate(names):
        days = 0 if i == 2 else 100 + 7 * i
        cells = ("Dead", days, 90) if i % 2 == 0 else ("Alive", "'--", days)
        if i == 5:
            cells = ("Not Reported", "'--", "'--")
        lines.append("\t".join(map(str, (name, *cells))))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_gdc_table_trains_and_tests_a_survival_model(tmp_path: Path) -> None:
    names = [f"TCGA-ZZ-A{i:03}" for i in range(24)]
    root = embeddings(tmp_path / "f", [f"{name}-01Z-00-DX1" for name in names])
    table = gdc_table(tmp_path / "clinical.tsv", names)
    labels = LabelsConfig(labels=table, target=("vital_status",), time=TIMES)
    document = train(root, out=tmp_path / "e", config=config_of(labels))
    assert document["cases"] == 23
    stored = json.loads((tmp_path / "e" / "experiment.json").read_text())["reading"]
    assert {
        "column": "vital_status",
        "value": "Not Reported",
        "count": 1,
        "reading": "missing",
        "becomes": "",
    } in stored
    page = (tmp_path / "e" / "index.html").read_text()
    row = page[page.index("<td>Not Reported</td>") :].split("</tr>")[0]
    assert "<td>missing</td>" in row
    # new cases by the names of the columns in training
    others = [f"TCGA-YY-B{i:03}" for i in range(12)]
    new = embeddings(tmp_path / "new", [f"{name}-01Z-00-DX1" for name in others])
    tested = predict(
        tmp_path / "e" / "model.safetensors",
        new,
        out=tmp_path / "p",
        labels=gdc_table(tmp_path / "new.tsv", others),
    ).validation
    assert tested is not None
    assert tested["cases"] == 11
    assert any(one["value"] == "Dead" for one in tested["reading"])


def test_a_class_of_one_case_stops_training_and_no_test(tmp_path: Path) -> None:
    names = [f"s{i:02}" for i in range(13)]
    root = embeddings(tmp_path / "f", names)
    words = [("low", "high")[i % 2] for i in range(12)]
    rows = [
        f"{name},{word}" for name, word in zip(names, [*words, "hihg"], strict=True)
    ]
    table = tmp_path / "labels.csv"
    table.write_text("\n".join(["slide_id,grade", *rows]) + "\n")
    labels = LabelsConfig(labels=table, target=("grade",))
    with pytest.raises(DatasetError, match=r"got 1 of 'hihg' in line 14 \(s12\)"):
        train(root, out=tmp_path / "e", config=config_of(labels))
    corrected = LabelsConfig(labels=table, target=("grade",), read=("hihg=high",))
    train(root, out=tmp_path / "e", config=config_of(corrected))
    book = openpyxl.Workbook()
    book.active.append(["nothing"])
    sheet = book.create_sheet("new cases")
    for row in (("slide_id", "grade"), ("n1", "low"), ("n2", "low"), ("n3", "high")):
        sheet.append(row)
    book.save(tmp_path / "few.xlsx")
    few = tmp_path / "few.xlsx#new cases"
    new = embeddings(tmp_path / "new", ["n1", "n2", "n3"])
    tested = predict(
        tmp_path / "e" / "model.safetensors", new, out=tmp_path / "p", labels=few
    ).validation
    assert tested is not None
    assert tested["cases"] == 3
