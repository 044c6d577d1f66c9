"""Predictions: fold scores again from slide files, refusals, resume, cases, warnings."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from tests.predict.lesions import Trained
from typer.testing import CliRunner

import thinsection as ts
from thinsection.cli.app import build_app
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.predict.heads.pooled import AbmilHead
from thinsection.predict.model_file import load_model, save_model
from thinsection.predict.predicting import predict


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_training_slides_from_their_files_get_the_scores_of_the_folds(
    trained: Trained, tmp_path: Path
) -> None:
    found = ts.predict(trained.model, trained.slides, out=tmp_path / "again")
    answers = {row.name: np.array(row.answers) for row in found.rows}
    assert answers.keys() == trained.held_out.keys()
    for slide_id, wanted in trained.held_out.items():
        np.testing.assert_allclose(answers[slide_id], wanted, atol=1e-6)
    rows = table(found.table)
    assert [row["members"] for row in rows] == ["1"] * 8
    assert all("folds that did not train on it" in row["warnings"] for row in rows)
    assert {row["prediction"] for row in rows} == {"low", "high"}


def test_a_new_slide_is_asked_of_all_members_and_gets_their_spread(
    trained: Trained, tmp_path: Path
) -> None:
    slide = tmp_path / "new.tif"
    shutil.copy(trained.slides[1], slide)
    (row,) = predict(trained.model, slide, out=tmp_path / "out").rows
    assert row.members == (0, 1) and len(row.spread) == 2 and row.spread[0] > 0
    assert row.warnings == ()
    model = load_model(trained.model)
    assert row.distance < model.card.threshold


def test_a_second_run_answers_from_what_is_there_and_another_model_does_not(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "results"
    shutil.copytree(trained.results, out)
    first = predict(trained.model, out)
    before = first.table.read_bytes()
    asked: list[str] = []
    from thinsection.predict import answering

    through = answering.through
    monkeypatch.setattr(
        answering, "through", lambda *a, **k: asked.append("bag") or through(*a, **k)
    )
    assert predict(trained.model, out).rows == first.rows
    assert first.table.read_bytes() == before and not asked
    (out / "predictions_grade" / "case0-low.json").unlink()
    assert predict(trained.model, out).rows == first.rows and len(asked) == 1
    model = load_model(trained.model)
    warm = tuple(replace(m, temperature=4.0) for m in model.card.members)
    save_model(
        tmp_path / "warm.safetensors",
        replace(model, card=replace(model.card, members=warm)),
    )
    assert predict(tmp_path / "warm.safetensors", out).rows != first.rows
    assert len(asked) == 9


@pytest.mark.parametrize(
    "executor", ["pool", pytest.param("dask", marks=pytest.mark.check)]
)
def test_every_executor_gives_the_same_table(
    trained: Trained, tmp_path: Path, executor: str
) -> None:
    tables = []
    for name in ("inline", executor):
        out = tmp_path / name
        shutil.copytree(trained.results, out)
        settings = {} if name == "inline" else {"executor": executor, "workers": 2}
        tables.append(predict(trained.model, out, **settings).table.read_bytes())
    assert tables[0] == tables[1]


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        (
            "encoder",
            "uni2_h",
            "encoder must be 'efficientnet_lite0' as in the model, got 'uni2_h'",
        ),
        (
            "weights_hash",
            "0" * 64,
            r"weights of the encoder must be '\w+' as in the model",
        ),
        ("patch_size", 512, "tile_px must be 256 as in the model, got 512"),
        (
            "target_magnification",
            40.0,
            r"tile_mpp must be 0.5 as in the model, got 0.25 in",
        ),
        ("preprocessing", "{}", r"preprocessing must be .+ as in the model"),
        (
            "precision",
            "bf16",
            "precision of the encoder must be 'fp32' as in the model, got 'bf16'",
        ),
    ],
)
def test_embeddings_of_another_kind_are_refused_by_name(
    trained: Trained, tmp_path: Path, attribute: str, value: object, message: str
) -> None:
    out = tmp_path / "results"
    shutil.copytree(trained.results, out)
    for path in out.glob("*/features_*/*.h5"):
        with h5py.File(path, "r+") as file:
            for place in (file, file["coords"], file["features"]):
                if attribute in place.attrs:
                    place.attrs[attribute] = value
    with pytest.raises(InvalidInputError, match=message):
        predict(trained.model, out)


def test_another_commit_of_the_encoder_is_refused(
    trained: Trained, tmp_path: Path
) -> None:
    model = load_model(trained.model)
    of_commit = replace(model.card.inputs, revision="a" * 40)
    path = tmp_path / "m.safetensors"
    save_model(path, replace(model, card=replace(model.card, inputs=of_commit)))
    out = tmp_path / "results"
    shutil.copytree(trained.results, out)
    for file_path in out.glob("*/features_*/*.h5"):
        with h5py.File(file_path, "r+") as file:
            file.attrs["revision"] = "b" * 40
    with pytest.raises(
        InvalidInputError, match=f"commit of the encoder must .* got '{'b' * 40}'"
    ):
        predict(path, out)


def test_one_slide_of_another_kind_is_a_row_with_its_error(
    trained: Trained, tmp_path: Path
) -> None:
    out = tmp_path / "results"
    shutil.copytree(trained.results, out)
    (path,) = out.glob("*/features_*/case2-low.h5")
    with h5py.File(path, "r+") as file:
        for place in (file, file["coords"]):
            place.attrs["patch_size"] = 512
    found = predict(trained.model, out)
    rows = {row["slide_id"]: row for row in table(found.table)}
    assert (
        "tile_px must be 256 as in the model, got 512 in 'case2-low'"
        in rows["case2-low"]["warnings"]
    )
    assert rows["case2-low"]["p_high"] == "" and rows["case2-high"]["p_high"] != ""


def test_a_bag_that_its_head_must_read_whole_keeps_the_memory(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_blocks = predict(trained.model, trained.results, out=tmp_path / "a")
    small = predict(trained.model, trained.results, out=tmp_path / "b", memory="1KiB")
    assert [row.answers for row in small.rows] == [
        row.answers for row in in_blocks.rows
    ]
    monkeypatch.setattr(AbmilHead, "reads_blocks", False)
    refused = predict(trained.model, trained.results, out=tmp_path / "c", memory="1KiB")
    for row in refused.rows:
        assert row.answers == ()
        assert "memory must be >=" in row.error and "got 1.0 KiB" in row.error
    whole = predict(trained.model, trained.results, out=tmp_path / "d", memory="64MiB")
    assert [row.answers for row in whole.rows] == [
        row.answers for row in in_blocks.rows
    ]


def test_slides_without_the_runs_settings_are_refused(
    trained: Trained, tmp_path: Path
) -> None:
    model = load_model(trained.model)
    path = tmp_path / "m.safetensors"
    card = replace(model.card, inputs=replace(model.card.inputs, run={}))
    save_model(path, replace(model, card=card))
    with pytest.raises(
        ConfigError, match="a model must record the run that made its embeddings"
    ):
        predict(path, trained.slides, out=tmp_path / "out")
    with pytest.raises(
        InvalidInputError, match="out must be set when slides are passed"
    ):
        predict(trained.model, trained.slides)


def test_slides_of_a_case_are_one_bag_beside_their_own_rows(
    trained: Trained, tmp_path: Path
) -> None:
    slides = [
        tmp_path / name for name in ("TCGA-AB-1234-01.tif", "TCGA-AB-1234-02.tif")
    ]
    for path, source in zip(slides, trained.slides[:2], strict=True):
        shutil.copy(source, path)
    found = predict(trained.model, slides, out=tmp_path / "out")
    assert [(r.level, r.case_id) for r in found.rows] == [
        ("slide", "TCGA-AB-1234"),
        ("slide", "TCGA-AB-1234"),
        ("case", "TCGA-AB-1234"),
    ]
    low, high, case = (row.answers[1] for row in found.rows)
    assert low < 0.5 < high and low < case


def test_what_is_unlike_the_training_set_and_what_quality_control_says_is_warned_of(
    trained: Trained, tmp_path: Path, he_slide: Path
) -> None:
    model = load_model(trained.model)
    path = tmp_path / "qc.safetensors"
    run = json.loads(json.dumps(model.card.inputs.run))
    run["qc"]["qc"] = "histoqc-light"
    save_model(
        path,
        replace(
            model, card=replace(model.card, inputs=replace(model.card.inputs, run=run))
        ),
    )
    (tmp_path / "broken.svs").write_bytes(b"no slide")
    found = predict(path, [he_slide, tmp_path / "broken.svs"], out=tmp_path / "out")
    rows = {row["slide_id"]: row for row in table(found.table)}
    assert "unlike the training cases (distance" in rows["he"]["warnings"]
    assert (
        "no reader opens" in rows["broken"]["warnings"] and not rows["broken"]["p_high"]
    )
    (tmp_path / "out" / "slides").is_dir()


def test_the_commands_say_what_they_did_and_show_the_card(
    trained: Trained, tmp_path: Path
) -> None:
    out, runner = tmp_path / "results", CliRunner()
    shutil.copytree(trained.results, out)
    done = runner.invoke(
        build_app(["predict"]), ["predict", str(trained.model), str(out)]
    )
    assert done.exit_code == 0, done.output
    assert f"8 of 8 predicted -> {out / 'predictions_grade.csv'}" in done.output
    card = tmp_path / "card.md"
    shown = runner.invoke(
        build_app(["model"]), ["model", "show", str(trained.model), "--out", str(card)]
    )
    assert "For research use only" in shown.output and card.read_text() == shown.output
    assert (
        "efficientnet_lite0" in shown.output and "256 px at 0.5 µm/px" in shown.output
    )
