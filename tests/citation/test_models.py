"""What is said of models, validations and probes is what their files hold."""

import csv
from pathlib import Path

import numpy as np
import pytest
from tests.predict.planted import planted

import thinsection as ts
from thinsection.citation import Citation, cite
from thinsection.errors import StoreError, WeightsError
from thinsection.files.atomic import read_json, write_json
from thinsection.predict.model_file import read_card

INTERVAL = ("delong1988comparing", "obuchowski1997clustered", "newcombe2006effect")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 24 cases in `model/`, tested on 14 others in `new/validation_model`."""
    home = tmp_path_factory.mktemp("study")
    train = planted(home / "train", cases=24, tiles=(20, 30), seed=1)
    ts.train(
        train,
        labels=str(train / "labels.csv"),
        target=("label",),
        out=home / "model",
        head="clam_mb",
        folds=2,
        repeats=2,
        epochs=1,
        starts=1,
        hidden_dim=8,
        attention_dim=4,
        seed=7,
    )
    new = planted(home / "new", cases=14, tiles=(20, 30), seed=2)
    for path in sorted(new.glob("s*.h5")):
        path.rename(path.with_name(f"n{path.name[1:]}"))
    table = new / "labels.csv"
    table.write_text(table.read_text().replace("\ns", "\nn"))
    ts.predict(home / "model" / "model.safetensors", new, labels=str(table))
    return home


def keys_of(citation: Citation) -> set[str]:
    return {one.key for one in citation.references}


def test_a_trained_model_says_cases_folds_seed_and_scores(study: Path) -> None:
    document = read_json(study / "model" / "experiment.json")
    citation = cite(study / "model")
    text = citation.text
    assert (
        "The head clam_mb (Lu et al. 2021) was trained to predict label (binary) on 24 cases"
        in text
    )
    assert (
        "by 2 repeats of 2-fold cross-validation (the cases of a patient are in one fold)"
        in text
    )
    assert "weight decay 0.001 and seed 7; in each fold one of 5 parts" in text
    score = document["scores"]["auroc"]
    ends = f"{score['low']:.2f} to {score['high']:.2f}"
    assert f"AUROC {score['value']:.2f} (95 % confidence interval {ends})" in text
    temperature = document["temperature"]
    assert (f"temperature of {temperature:.2f} (Guo" in text) == (temperature != 1)
    assert {"lu2021clam", *INTERVAL, "boyd2013auprc"} <= keys_of(citation)
    assert citation.account.versions == (ts.__version__,)
    assert "the encoder of the embeddings that the model takes" in citation.unknown


def test_a_model_file_says_what_its_header_has(study: Path) -> None:
    path = study / "model" / "model.safetensors"
    card = read_card(path)
    text = cite(path).text
    assert f"The model model ({len(card.members)} members of the head clam_mb" in text
    assert "predicts label (binary)" in text
    assert f"AUROC {card.scores['auroc']}" in text
    assert f"made with {ts.__version__}" in text


def test_a_validation_says_the_model_the_cases_and_those_left_out(study: Path) -> None:
    folder = study / "new" / "validation_model"
    document = read_json(folder / "validation.json")
    citation = cite(folder)
    text = citation.text
    assert (
        f"(SHA-256 {document['model']['sha256'][:12]}, head clam_mb (Lu et al. 2021))"
        in text
    )
    assert "tested without change in an external validation on 14 cases" in text
    assert "with 14 slides; it is reported by TRIPOD+AI (Collins et al. 2024)" in text
    assert {"collins2024tripod", "lu2021clam"} <= keys_of(citation)
    document["left_out"] = [{"case": name, "why": "seen"} for name in ("x", "y")]
    assert document["outcomes"][0]["recalibration"]
    document["survival"] = {"at_times": []}
    write_json(folder / "copy" / "validation.json", document)
    copied = cite(folder / "copy")
    assert "2 cases left out: seen." in copied.text
    assert {
        "cox1958two",
        "vancalster2019calibration",
        "uno2007evaluating",
        "graf1999assessment",
    } <= keys_of(copied)
    assert "uno2007evaluating" not in keys_of(citation)
    document["outcomes"][0]["recalibration"] = None
    write_json(folder / "copy" / "validation.json", document)
    assert "cox1958two" in keys_of(citation) - keys_of(cite(folder / "copy"))


def test_a_results_folder_has_its_validations_and_experiments_too(
    study: Path, two_encoders: Path, tmp_path: Path
) -> None:
    (tmp_path / "both" / "experiments").mkdir(parents=True)
    for name, home in (
        ("experiments/m", "model"),
        ("validation_m", "new/validation_model"),
    ):
        source = study / home
        target = tmp_path / "both" / name
        target.mkdir()
        for path in source.glob("*.json"):
            (target / path.name).write_bytes(path.read_bytes())
    sentences = cite(tmp_path / "both").account.sentences
    assert any(one.startswith("The head clam_mb") for one in sentences)
    assert any(one.startswith("The model model (SHA-256") for one in sentences)
    assert sum(one.startswith("Scores: ") for one in sentences) == 2


def probe(path: Path, **changes: object) -> Path:
    """A probe's result, as `thinsection probe` writes it."""
    document = {
        "probe": "survival",
        "dataset": "cohort",
        "metric": "c_index",
        "score": 0.7,
        "interval": {
            "low": 0.6,
            "high": 0.8,
            "missing": "",
            "units": 50,
            "method": "x",
        },
        "protocol": {"name": "pathobench"},
        "data": {"encoder": "uni2_h", "precision": "bf16"},
    }
    write_json(path, document | changes)
    return path


def test_two_probes_of_a_grid_are_told_and_other_json_is_not(tmp_path: Path) -> None:
    probe(tmp_path / "job_a" / "survival.json")
    probe(
        tmp_path / "job_b" / "apd.json",
        probe="apd",
        metric="apd",
        score=None,
        protocol={"name": "mine"},
        data={"encoder": "hf:lab/model"},
    )
    write_json(tmp_path / "job_b" / "job.json", {"key": "x"})
    (tmp_path / "job_b" / "broken.json").write_text("{")
    with pytest.raises(StoreError, match="path must contain results"):
        cite(tmp_path)
    (tmp_path / "probes.csv").write_text("job\n")
    citation = cite(tmp_path)
    assert (
        "The probe survival (Cox 1972) by the protocol pathobench (Zhang et al. 2025) was run on "
        "cohort for embeddings of uni2_h (Chen et al. 2024; Mahmood Lab): Harrell's c-index 0.70 "
        "(95 % confidence interval 0.60 to 0.80) (Harrell et al. 1982;" in citation.text
    )
    assert "average performance drop without a value" in citation.text
    assert set(citation.unknown) == {
        "the version of Thinsection that ran the probe survival",
        "the version of Thinsection that ran the probe apd",
        "the reference of the protocol mine",
        "the reference of the tile encoder hf:lab/model",
    }
    assert keys_of(citation) >= {"komen2025pathorob", "chen2024uni", "mahmoodlab_uni2h"}
    assert "protocol: mine (reference not known)" in citation.text


def test_a_probe_of_rows_names_no_encoder(tmp_path: Path) -> None:
    path = probe(
        tmp_path / "knn.json", probe="knn", data={}, interval=None, metric="macro_f1"
    )
    citation = cite(path.parent)
    assert "macro F1 0.70 (no interval: the record has none)" in citation.text
    assert "the encoder of the embeddings of cohort" in citation.unknown
    assert "lam2023f1" not in keys_of(citation)


def test_the_scores_of_a_table_agree_with_those_that_are_printed(study: Path) -> None:
    """AUROC of the pairs in cases.csv, counted here, is the one that is printed."""
    folder = study / "new" / "validation_model"
    with (folder / "cases.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 14
    value = read_json(folder / "validation.json")["scores"]["auroc"]["value"]
    positive = np.array([row["truth"] == "tumour" for row in rows])
    risk = np.array([float(row["p_tumour"]) for row in rows])
    pairs = risk[positive][:, None] - risk[~positive][None]
    plain = float(np.mean((pairs > 0) + 0.5 * (pairs == 0)))
    assert value == pytest.approx(plain)
    assert f"AUROC {plain:.2f}" in cite(folder).text


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"no model")
    with pytest.raises(WeightsError, match=r"model must be a file of"):
        cite(tmp_path / "x.safetensors")
