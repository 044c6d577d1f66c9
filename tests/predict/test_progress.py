"""Progress of training and prediction: folds and predictions on one line, and silence if asked."""

from pathlib import Path

import pytest
from tests.predict.lesions import Trained
from tests.predict.planted import planted

import thinsection as ts
from thinsection.evaluation.label_values import LabelsConfig
from thinsection.predict.config import FitConfig, FoldsConfig, TrainConfig
from thinsection.predict.folds import FoldDone
from thinsection.predict.heads.config import HeadConfig
from thinsection.run import progress as module
from thinsection.run.progress import Line, Progress


class Shown:
    """A screen that keeps its texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def show(self, line: Line, *, is_last: bool) -> None:
        self.texts.append(line.text)


def config_of(root: Path) -> TrainConfig:
    return TrainConfig(
        labels=LabelsConfig(labels=root / "labels.csv", target=("label",)),
        head=HeadConfig(hidden_dim=8, attention_dim=4),
        fit=FitConfig(epochs=1, device="cpu"),
        cross=FoldsConfig(folds=3, search=("lr=1e-3,1e-4",)),
    )


def test_folds_and_predictions_are_counted(tmp_path: Path) -> None:
    root = planted(tmp_path / "features", cases=12, tiles=(20, 30))
    shown = Shown()
    settings = config_of(root)
    ts.train(root, out=tmp_path / "e", config=settings, on_event=Progress(shown))
    assert shown.texts[0] == "0/6 folds"
    assert shown.texts[-1].startswith("6/6 folds, ")
    assert len(shown.texts) == 8  # the first, one for each fold and setting, the last
    # again: nothing is trained, and all folds are there
    again = Shown()
    ts.train(root, out=tmp_path / "e", config=settings, on_event=Progress(again))
    assert again.texts[-1].startswith("6/6 folds, ")
    predicted = Shown()
    model = tmp_path / "e" / "model.safetensors"
    ts.predict(model, root, out=tmp_path / "p", on_event=Progress(predicted))
    assert predicted.texts[0] == "0/12 predictions"
    assert predicted.texts[-1].startswith("12/12 predictions, ")


def test_a_listener_gets_each_fold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook too, where nothing is then shown."""
    monkeypatch.setattr(module, "in_notebook", lambda: True)
    monkeypatch.setattr(module, "progress", lambda: pytest.fail("shown"))
    root = planted(tmp_path / "features", cases=12, tiles=(20, 30))
    folds: list[FoldDone] = []
    ts.train(root, out=tmp_path / "e", config=config_of(root), on_event=folds.append)
    assert len(folds) == len({fold.name for fold in folds}) == 6


def test_a_notebook_shows_embedding_and_predictions_on_one_line(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Shown()
    monkeypatch.setattr(module, "in_notebook", lambda: True)
    monkeypatch.setattr(module, "progress", lambda: Progress(shown))
    ts.predict(trained.model, trained.slides[:2], out=tmp_path / "p")
    assert shown.texts[0] == "0/2 slides"
    begun = shown.texts.index("0/2 predictions")
    assert shown.texts[begun - 1].startswith("2/2 slides, ")
    assert shown.texts[-1].startswith("2/2 predictions, ")
