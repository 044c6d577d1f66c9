"""Training: it finds what is there and nothing else, and ends in the same bytes however."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from tests.predict.planted import planted, write_embeddings

from thinsection.errors import ConfigError, InvalidInputError
from thinsection.evaluation.cases import Groups
from thinsection.evaluation.label_values import LabelsConfig
from thinsection.evaluation.labels import read_cohort
from thinsection.evaluation.parts import FoldSettings, make_parts
from thinsection.evaluation.target import Target
from thinsection.files.atomic import read_table
from thinsection.predict import folds, tested
from thinsection.predict.bags import Bags, StoredBag
from thinsection.predict.config import FitConfig, FoldsConfig, TrainConfig
from thinsection.predict.experiment import train
from thinsection.predict.folds import FoldJob, Study, bytes_at_work, read_fold
from thinsection.predict.heads.config import BLOCK_ROWS, HEADS, HeadConfig
from thinsection.predict.model_file import load_model
from thinsection.predict.predicting import predict
from thinsection.predict.training import (
    AdamW,
    Trainer,
    cox_loss,
    discrete_loss,
    targets_of,
    with_recipe,
)
from thinsection.store.hdf5 import add_dataset, read_values

SMALL = HeadConfig(hidden_dim=32, attention_dim=16)
FIT = FitConfig(epochs=16, patience=10, lr=3e-3, device="cpu")


def config_for(
    root: Path, *, head: HeadConfig = SMALL, fit: FitConfig = FIT, **labels: object
) -> TrainConfig:
    own = {"labels": root / "labels.csv", "target": ("label",), **labels}
    return TrainConfig(
        labels=LabelsConfig(**own), head=head, fit=fit, cross=FoldsConfig(folds=3)
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("head", ["abmil", "clam_sb"])
def test_a_class_that_one_percent_of_tiles_carries_is_found(
    tmp_path: Path, head: str
) -> None:
    root = planted(tmp_path / "f", cases=48)
    own = replace(SMALL, head=head, instances=2)  # of which a bag has not more
    found = train(root, out=tmp_path / "e", config=config_for(root, head=own))
    assert found["value"] >= 0.95
    assert (tmp_path / "e" / "index.html").read_text().count("<figure>") >= 5


@pytest.mark.check
def test_permuted_labels_are_at_chance(tmp_path: Path) -> None:
    held = 0
    for seed in range(4):
        root = planted(tmp_path / f"f{seed}", cases=36, seed=seed, permuted=True)
        fit = replace(FIT, epochs=4)
        low, high = train(
            root, out=tmp_path / f"e{seed}", config=config_for(root, fit=fit)
        )["interval"]
        held += low <= 0.5 <= high
    assert held >= 3


def test_predicting_the_training_slides_again_gives_the_scores_of_the_folds(
    tmp_path: Path,
) -> None:
    root = planted(tmp_path / "f", cases=24)
    train(root, out=tmp_path / "e", config=config_for(root))
    told = {
        r["slide_id"]: float(r["p_tumour"])
        for r in read_table(tmp_path / "e" / "predictions.csv")
    }
    again = predict(tmp_path / "e" / "model.safetensors", root, out=tmp_path / "p")
    rows = {r["slide_id"]: float(r["p_tumour"]) for r in read_table(again.table)}
    assert rows.keys() == told.keys()
    np.testing.assert_allclose([rows[s] for s in told], list(told.values()), atol=1e-6)


def files_of(out: Path) -> dict[str, bytes]:
    names = (
        "model.safetensors",
        "predictions.csv",
        *(f"folds/fold{i}-0.safetensors" for i in range(3)),
    )
    return {name: (out / name).read_bytes() for name in names}


@pytest.mark.check
def test_a_killed_training_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    root = planted(tmp_path / "f", cases=18, tiles=(200, 300))
    config = config_for(root, fit=replace(FIT, epochs=8, checkpoint_s=0.0))
    train(root, out=tmp_path / "whole" / "e", config=config)
    out = tmp_path / "killed" / "e"
    flags = f"{root} --labels {root}/labels.csv --target label --folds 3 --hidden-dim 32 --epochs 8"
    flags += " --attention-dim 16 --lr 3e-3 --patience 10 --device cpu"
    flags += f" --checkpoint-s 0 --out {out}"
    command = [sys.executable, "-m", "thinsection", "train", *flags.split()]
    for kill in range(2):
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        folder = out / "folds" / f"fold{kill}-0"
        while child.poll() is None and not (folder / "checkpoint.safetensors").exists():
            time.sleep(0.002)
        child.kill()
        child.wait()
    assert not (out / "experiment.json").exists()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert files_of(out) == files_of(tmp_path / "whole" / "e")


def test_folds_of_other_embeddings_of_the_same_size_are_trained_again(
    tmp_path: Path,
) -> None:
    root = planted(tmp_path / "f", cases=18, tiles=(200, 300))
    config = config_for(root, fit=replace(FIT, epochs=2))
    train(root, out=tmp_path / "e", config=config)
    before = files_of(tmp_path / "e")
    for path in sorted(root.rglob("*.h5")):
        with h5py.File(path, "r+") as file:
            features = read_values(file, "features", path)
            del file["features"]
            add_dataset(file, "features", features[:, ::-1])
    with pytest.raises(InvalidInputError, match="other embeddings"):
        train(root, out=tmp_path / "e", config=config)
    train(root, out=tmp_path / "e", config=config, overwrite=True)
    after = files_of(tmp_path / "e")
    assert all(after[name] != before[name] for name in before)


def test_a_model_of_other_labels_or_settings_is_replaced_only_on_request(
    tmp_path: Path,
) -> None:
    root = planted(tmp_path / "f", cases=18, tiles=(20, 30))
    config = config_for(root, head=HeadConfig(head="linear"))
    config = replace(config, fit=replace(FIT, epochs=2))
    out = tmp_path / "e"
    train(root, out=out, config=config)
    before = files_of(out)
    train(root, out=out, config=config)
    assert files_of(out) == before
    longer = replace(config, fit=replace(FIT, epochs=3))
    with pytest.raises(
        InvalidInputError, match=r"\(epochs 2, now 3\); pass another out="
    ):
        train(root, out=out, config=longer)
    text = (root / "labels.csv").read_text()
    turned = text.replace("s000,normal", "s000,tumour")
    (root / "labels.csv").write_text(turned)
    with pytest.raises(InvalidInputError, match="other labels of 1 case"):
        train(root, out=out, config=config)
    assert files_of(out) == before
    heatmaps = root / "256px_0.5mpp" / "heatmap_e"
    heatmaps.mkdir(parents=True)
    (heatmaps / "s000.attention.png").write_text("of the old model")
    train(root, out=out, config=config, overwrite=True)
    assert files_of(out) != before
    assert not [*heatmaps.iterdir()]


def test_a_bag_budget_and_workers_change_no_byte(tmp_path: Path) -> None:
    root = planted(tmp_path / "f", cases=18, tiles=(200, 300))
    config = config_for(root, fit=replace(FIT, epochs=3, bag_size=64))
    train(root, out=tmp_path / "a" / "e", config=config)
    other = replace(
        config,
        cross=replace(config.cross, memory="1MiB"),
        executor=replace(config.executor, executor="pool", workers=2, threads=1),
    )
    messages: list[str] = []
    train(root, out=tmp_path / "b" / "e", config=other, on_message=messages.append)
    assert files_of(tmp_path / "a" / "e") == files_of(tmp_path / "b" / "e")
    (said,) = [line for line in messages if "the floor is" in line]
    assert said.startswith("--memory 1MiB is below what training takes")


def test_the_memory_of_training_is_that_of_blocks_unless_bags_are_held(
    tmp_path: Path,
) -> None:
    sizes = (300, 2 * BLOCK_ROWS + 5)
    for number, count in enumerate(sizes):
        write_embeddings(tmp_path / f"s{number}.h5", np.ones((count, 16)))
    files = [[tmp_path / "s0.h5"], [tmp_path / "s1.h5"]]
    whole = 9 * files[1][0].stat().st_size

    def at_work(head: str, bag_size: int) -> int:
        job = FoldJob(
            fold=0,
            setting=0,
            head=HeadConfig(head=head),
            fit=FitConfig(bag_size=bag_size),
        )
        return bytes_at_work(files, [job])

    for head in HEADS.names():
        reads_whole = head in ("transmil", "transformer")
        blocks = whole if reads_whole else 9 * 4 * 16 * BLOCK_ROWS
        assert at_work(head, bag_size=64) == blocks, head
        assert at_work(head, bag_size=0) == whole
    assert at_work("abmil", bag_size=5000) == 9 * 4 * 16 * 5000
    # a second slide, whose rows are not read alone, for they are compressed
    packed = tmp_path / "packed.h5"
    with h5py.File(packed, "w") as file:
        values = np.ones((20, 16), np.float32)
        file.create_dataset("features", data=values, compression="gzip")
    files[1].append(packed)
    whole += 9 * packed.stat().st_size
    assert at_work("abmil", bag_size=64) == whole


@pytest.mark.parametrize("head", ["dsmil", "transmil"])
def test_only_heads_that_hold_bags_read_test_cases_whole(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    read = StoredBag.read
    monkeypatch.setattr(
        StoredBag, "read", lambda *a, **k: reads.append(1) or read(*a, **k)
    )
    root = planted(tmp_path / "f", cases=12, tiles=(20, 30))
    config = config_for(root, fit=replace(FIT, epochs=1, starts=1))
    config = replace(config, head=replace(config.head, head=head))
    train(root, out=tmp_path / "e", config=config)
    assert bool(reads) == (head == "transmil")


def test_slides_of_a_case_are_one_bag_and_have_rows_of_their_own(
    tmp_path: Path,
) -> None:
    root = planted(tmp_path / "f", cases=24)
    rows = (root / "labels.csv").read_text().splitlines()[1:]
    pairs = [
        f"{row.split(',')[0]},p{i // 4 * 2 + i % 2},{row.split(',')[1]}"
        for i, row in enumerate(rows)
    ]
    (root / "labels.csv").write_text(
        "\n".join(["slide_id,case_id,label", *pairs]) + "\n"
    )
    train(root, out=tmp_path / "e", config=config_for(root, fit=replace(FIT, epochs=2)))
    told = read_table(tmp_path / "e" / "predictions.csv")
    assert [sum(r["level"] == level for r in told) for level in ("case", "slide")] == [
        12,
        24,
    ]
    again = predict(tmp_path / "e" / "model.safetensors", root, out=tmp_path / "p")
    mine = {r["slide_id"]: float(r["p_tumour"]) for r in told if r["level"] == "slide"}
    assert len(mine) == 24
    assert again.table.exists()


def survival_cohort(root: Path) -> Path:
    rng = np.random.default_rng(0)
    root.mkdir()
    rows = ["slide_id,dead,days"]
    for i in range(40):
        risk = rng.normal()
        write_embeddings(
            root / f"s{i:02}.h5", rng.normal(size=(60, 8)) + risk * np.eye(8)[0]
        )
        time_to = float(np.exp(4 - 2 * risk + 0.1 * rng.normal()))
        rows.append(f"s{i:02},{int(rng.random() < 0.8)},{time_to:.3f}")
    (root / "labels.csv").write_text("\n".join(rows) + "\n")
    return root


@pytest.mark.parametrize(
    ("task", "head"), [("cox", "linear"), ("discrete", "abmil"), ("cox", "dsmil")]
)
def test_survival_is_learnt_and_its_page_has_the_log_rank_test(
    tmp_path: Path, task: str, head: str
) -> None:
    root = survival_cohort(tmp_path / "f")
    fit = replace(FIT, epochs=20, lr=1e-2)
    given = {"target": ("dead",), "time": "days", "task": task}
    config = config_for(root, head=replace(SMALL, head=head), fit=fit, **given)
    found = train(root, out=tmp_path / "e", config=config)
    assert found["metric"] == "c_index"
    assert found["value"] > 0.8
    page = (tmp_path / "e" / "index.html").read_text()
    assert "Hazard ratio of higher against lower risk" in page
    assert "no interval, as the folds depend on each other" in page


def test_values_and_several_labels_are_learnt(tmp_path: Path) -> None:
    rng, root = np.random.default_rng(0), tmp_path / "f"
    root.mkdir()
    rows = ["slide_id,a,b,age"]
    for i in range(40):
        z = rng.normal(size=2)
        write_embeddings(
            root / f"s{i:02}.h5", rng.normal(size=(50, 8)) + z @ np.eye(8)[:2]
        )
        rows.append(f"s{i:02},{int(z[0] > 0)},{int(z[1] > 0)},{50 + 10 * z[0]:.3f}")
    (root / "labels.csv").write_text("\n".join(rows) + "\n")
    head, fit = HeadConfig(head="linear"), replace(FIT, epochs=30, lr=1e-2)
    value = train(
        root,
        out=tmp_path / "v",
        config=config_for(root, head=head, fit=fit, target=("age",)),
    )
    assert (value["task"], value["metric"]) == ("regression", "pearson")
    assert value["value"] > 0.9
    answers = [float(r["age"]) for r in read_table(tmp_path / "v" / "predictions.csv")]
    assert 45 < np.mean(answers) < 55
    both = train(
        root,
        out=tmp_path / "m",
        config=config_for(root, head=head, fit=fit, target=("a", "b")),
    )
    assert both["task"] == "multilabel"
    assert both["value"] > 0.9


def test_scale_is_of_each_folds_training_cases_and_folds_are_drawn_again(
    tmp_path: Path,
) -> None:
    root, rng = tmp_path / "f", np.random.default_rng(0)
    root.mkdir()
    values = 10 + rng.normal(size=24)
    values[0] = 13.0  # moves the centre of every fold that trains on it
    rows = ["slide_id,age"]
    for i, value in enumerate(values):
        write_embeddings(root / f"s{i:02}.h5", rng.normal(size=(8, 6)))
        rows.append(f"s{i:02},{value}")
    (root / "labels.csv").write_text("\n".join(rows) + "\n")
    fit = replace(FIT, epochs=2)
    config = config_for(root, head=HeadConfig(head="linear"), fit=fit, target=("age",))
    config = replace(config, cross=replace(config.cross, repeats=2))
    document = train(root, out=tmp_path / "e", config=config)
    assert [fold["repeat"] for fold in document["folds"]] == [0, 0, 0, 1, 1, 1]
    assert any("drawn 2 times, seed 0" in line for line in document["account"])
    study = Study.load(tmp_path / "e")
    members = load_model(tmp_path / "e" / "model.safetensors").card.members
    for fold, (part, member) in enumerate(zip(study.parts, members, strict=True)):
        result = read_fold(tmp_path / "e", f"fold{fold}-0")
        assert result is not None
        own = values[list(part.train)]
        assert result.target.center == pytest.approx(own.mean())
        assert result.target.spread == pytest.approx(own.std())
        assert member.target == result.target
        if 0 in part.test:
            assert result.target.center < 12


@pytest.mark.check
def test_the_search_takes_the_best_inner_loss_of_each_fold(tmp_path: Path) -> None:
    root = planted(tmp_path / "f", cases=24)
    config = config_for(root)
    search = replace(config, cross=replace(config.cross, search=("lr=1e-7,3e-3",)))
    found = train(root, out=tmp_path / "e", config=search)
    assert found["heads"] == ["fold0-1", "fold1-1", "fold2-1"]
    losses = [read_fold(tmp_path / "e", f"fold0-{i}").stop_loss for i in range(2)]  # type: ignore[union-attr]
    assert losses[1] < losses[0]
    wrong = replace(config, cross=replace(config.cross, search=("lt=1",)))
    with pytest.raises(ConfigError, match="got 'lt=1'; known: bag_size, dropout, lr"):
        train(root, out=tmp_path / "w", config=wrong)


def test_two_experiments_are_compared_case_by_case(tmp_path: Path) -> None:
    root = planted(tmp_path / "f", cases=36)
    train(
        root,
        out=tmp_path / "a",
        config=config_for(root, fit=replace(FIT, epochs=1, lr=1e-6)),
    )
    found = train(
        root, out=tmp_path / "b", config=config_for(root), against=[tmp_path / "a"]
    )
    assert found["against"][0]["cases"] == 36
    assert found["against"][0]["value"] > 0.1
    assert found["against"][0]["by"].startswith("DeLong, pairs of the same fold")
    assert found["against"][0]["p_holm"] == found["against"][0]["p_value"]
    assert found["experiments"] == 2
    page = (tmp_path / "b" / "index.html").read_text()
    assert "Against other experiments" in page
    assert "The folder has 2 experiments" in page
    assert json.loads((tmp_path / "b" / "experiment.json").read_text()) == found


def twice_tested(rng: np.random.Generator, gain: float) -> tested.Tested:
    """Thirty cases, each tested by two repeats of three folds."""
    truth = np.arange(30) % 2
    cases = tuple(f"c{i:02}" for i in range(30))
    positive = np.concatenate([truth * gain + rng.normal(size=30) for _ in range(2)])
    share = 1 / (1 + np.exp(-positive))
    return tested.Tested(
        target=Target(kind="binary", columns=("class",), names=("a", "b")),
        cases=cases * 2,
        groups=Groups("patients", cases * 2),
        slides=tuple((case,) for case in cases * 2),
        fold=np.concatenate([np.arange(30) // 10, 3 + np.arange(30) // 10]),
        truth=np.tile(truth, 2)[:, None].astype(float),
        answers=np.stack([1 - share, share], axis=1),
    )


def test_experiments_with_repeats_are_compared_by_all_of_them() -> None:
    """One repeat of three folds is better by far; in whatever order they come."""
    rng = np.random.default_rng(4)
    mine = twice_tested(rng, 1.0)
    theirs = twice_tested(rng, 0.0)
    found = tested.difference(mine, theirs)
    assert found["cases"] == 30
    assert found["value"] == pytest.approx(mine.score() - theirs.score())
    backwards = tested.difference(mine.take(np.arange(60)[::-1]), theirs)
    assert backwards["value"] == pytest.approx(found["value"])
    assert backwards["p_value"] == pytest.approx(found["p_value"])
    once = tested.difference(mine.take(np.arange(30)), theirs)
    first = mine.take(np.arange(30)).score()
    assert once["value"] == pytest.approx(first - theirs.score())


def test_a_loss_that_is_not_finite_is_said(tmp_path: Path) -> None:
    root = planted(tmp_path / "f", cases=12)
    with pytest.raises(
        InvalidInputError, match=r"loss must stay finite, got .* lower lr="
    ):
        train(
            root, out=tmp_path / "e", config=config_for(root, fit=replace(FIT, lr=1e30))
        )


def test_the_losses_of_survival_are_those_of_the_papers() -> None:
    risk, y = (
        torch.tensor([0.3, -1.0, 0.7]),
        torch.tensor([[1.0, 2.0], [0.0, 5.0], [1.0, 1.0]]),
    )
    by_hand = -(0.3 - np.log(np.exp(0.3) + np.exp(-1.0)))
    by_hand -= 0.7 - np.log(np.exp(risk.numpy()).sum())
    assert float(cox_loss(risk, y)) == pytest.approx(by_hand / 2, rel=1e-6)
    logits = torch.tensor([0.2, -0.5, 1.0])
    h = 1 / (1 + np.exp(-logits.numpy().astype(float)))
    seen = -np.log((1 - h[0]) * h[1])
    left = -np.log((1 - h[0]) * (1 - h[1]))
    assert float(discrete_loss(logits, torch.tensor([1.0, 1.0]))) == pytest.approx(
        seen, rel=1e-6
    )
    assert float(discrete_loss(logits, torch.tensor([0.0, 1.0]))) == pytest.approx(
        left, rel=1e-6
    )
    target = Target(
        kind="discrete", columns=("e", "t"), names=("a", "b", "c"), edges=(2.0, 4.0)
    )
    rows = targets_of(target, np.array([[1.0, 2.0], [0.0, 9.0]]))
    np.testing.assert_array_equal(rows.numpy(), [[1, 0], [0, 2]])


def test_cox_by_slopes_has_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    root = survival_cohort(tmp_path / "f")
    labels = LabelsConfig(labels=root / "labels.csv", target=("dead",), time="days")
    fit = replace(FIT, batch_cases=30, epochs=1, lr=1e-12, starts=1)
    trainer, bags = trainer_for(root, labels, fit)
    part = trainer.part
    cohort = trainer.cohort
    trainer.run(HeadConfig(head="linear"), tmp_path / "c", "")
    rows = list(part.train)
    logits = torch.stack(
        [trainer.head(torch.from_numpy(bags.read(i).features)).logits for i in rows]
    )
    expected = torch.autograd.grad(
        cox_loss(logits[:, 0], trainer.y[rows]), trainer.head.classifier.weight
    )
    torch.testing.assert_close(
        trainer.head.classifier.weight.grad, expected[0], rtol=1e-4, atol=1e-6
    )
    assert Study(cohort=cohort, parts=(part,)).parts[0] == part


def test_the_model_says_what_it_was_trained_on(tmp_path: Path) -> None:
    root = planted(tmp_path / "f", cases=12)
    train(
        root,
        out=tmp_path / "grade",
        config=config_for(root, fit=replace(FIT, epochs=1)),
    )
    card = load_model(tmp_path / "grade" / "model.safetensors").card
    assert (card.name, len(card.members), card.inputs.dim) == ("grade", 3, 16)
    assert "12 slides of 12 cases for training" in card.data["account"]
    # of each case the marks of s001 and of s1, its plain name, and that of its embeddings
    assert sum(len(member.held_out) for member in card.members) == 36
    assert len(card.trained) == 36


def trainer_for(
    root: Path, labels: LabelsConfig, fit: FitConfig
) -> tuple[Trainer, Bags]:
    cohort = read_cohort(root, labels)
    part = make_parts(cohort, FoldSettings(folds=3, inner=3, seed=0))[0][0]
    bags = Bags([[Path(f) for f in files] for files in cohort.files])
    return Trainer(bags, cohort, part, fold=0, fit=fit), bags


def test_a_head_that_has_not_learnt_starts_again_from_other_weights(
    tmp_path: Path,
) -> None:
    root = planted(tmp_path / "f", cases=36)
    labels = LabelsConfig(labels=root / "labels.csv", target=("label",))
    trainer, _ = trainer_for(root, labels, replace(FIT, epochs=2, lr=1e-9, starts=3))
    trainer.run(SMALL, tmp_path / "c", "")
    inner = [loss for _, loss in trainer.losses]
    assert trainer.starts == [0, 2, 4]
    assert len({round(loss, 4) for loss in inner}) == 3  # one of each start
    # the head is that of the best start
    assert trainer._inner_loss() == pytest.approx(min(inner), abs=1e-6)
    learnt, _ = trainer_for(root, labels, replace(FIT, starts=3))
    learnt.run(SMALL, tmp_path / "d", "")
    assert learnt.starts == [0]
    assert len(learnt.losses) <= FIT.epochs


def over_after(trainer: Trainer, losses: list[tuple[float, float]]) -> bool:
    """True if a start with these losses is over, in shares of a constant prediction's."""
    train, inner = trainer._constant
    trainer.losses = [(a * train, b * inner) for a, b in losses]
    trainer.starts = [0]
    return trainer._start_is_over()


def test_a_start_ends_early_only_where_nothing_more_is_learnt(tmp_path: Path) -> None:
    root = planted(tmp_path / "f", cases=18, tiles=(20, 30))
    labels = LabelsConfig(labels=root / "labels.csv", target=("label",))
    trainer, _ = trainer_for(
        root, labels, replace(FIT, epochs=50, patience=20, starts=1)
    )
    at_chance = [(1.0, 1.0)] * 19
    assert not over_after(trainer, at_chance)
    assert over_after(trainer, [*at_chance, (1.0, 1.0), (1.0, 1.0)])
    # the training cases are known by heart, and the validation loss is flat
    assert not over_after(trainer, [(0.9, 0.8), (0.01, 0.7), (0.01, 0.7)])
    assert over_after(trainer, [(0.9, 0.8), *[(0.01, 0.7)] * 4])
    # it still falls
    assert not over_after(trainer, [(0.01, 0.7 - 0.02 * i) for i in range(12)])
    # small falls count together
    slow = [(1.0, 1.0 - 0.002 * i) for i in range(30)]
    assert not over_after(trainer, slow)
    assert over_after(trainer, [*slow, *[slow[-1]] * 20])
    # the training loss is low, and that of the validation cases is worse than a guess
    assert over_after(trainer, [(0.8, 1.0), *[(0.4, 1.2)] * 3])
    assert not over_after(trainer, [(0.8, 1.0), *[(0.4, 0.99)] * 3])
    assert over_after(trainer, [(1.0 - i / 100, 1.0 - i / 100) for i in range(50)])


@pytest.mark.parametrize("task", ["classes", "cox"])
def test_cases_learnt_by_heart_take_few_epochs(tmp_path: Path, task: str) -> None:
    """Embeddings without any signal, in more channels than cases."""
    rng = np.random.default_rng(0)
    root = tmp_path / "f"
    root.mkdir()
    rows = ["slide_id,label,dead,days"]
    for i in range(24):
        write_embeddings(root / f"s{i:02}.h5", rng.normal(size=(6, 256)))
        rows.append(f"s{i:02},{'ab'[i % 2]},{int(i % 3 > 0)},{rng.integers(1, 99)}")
    (root / "labels.csv").write_text("\n".join(rows) + "\n")
    labels = LabelsConfig(labels=root / "labels.csv", target=("label",))
    if task == "cox":
        labels = LabelsConfig(
            labels=root / "labels.csv", target=("dead",), time="days", task="cox"
        )
    fit = replace(FIT, epochs=100, patience=40, starts=1)
    trainer, _ = trainer_for(root, labels, fit)
    trainer.run(replace(SMALL, dropout=0.0), tmp_path / "c", "")
    assert len(trainer.losses) <= 40
    train, inner = trainer.losses[-1]
    constant = trainer._constant
    too_much = train < 0.5 * constant.train and inner > constant.inner
    assert train < 0.02 * constant.train or too_much


def test_a_training_that_ends_in_its_second_start_goes_on_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = planted(tmp_path / "f", cases=18, tiles=(20, 30), permuted=True)
    labels = LabelsConfig(labels=root / "labels.csv", target=("label",))
    fit = replace(FIT, epochs=3, lr=1e-5, starts=3, checkpoint_s=0.0)
    whole, _ = trainer_for(root, labels, fit)
    whole.run(SMALL, tmp_path / "whole", "key")
    killed, _ = trainer_for(root, labels, fit)
    epoch_of = killed._epoch

    def killed_in_epoch_5(epoch: int) -> float:
        if epoch == 5:
            raise KeyboardInterrupt
        return epoch_of(epoch)

    monkeypatch.setattr(killed, "_epoch", killed_in_epoch_5)
    with pytest.raises(KeyboardInterrupt):
        killed.run(SMALL, tmp_path / "killed", "key")
    resumed, _ = trainer_for(root, labels, fit)
    resumed.run(SMALL, tmp_path / "killed", "key")
    assert resumed.starts == whole.starts == [0, 3, 6]
    assert resumed.losses == whole.losses
    for name, value in whole.head.state_dict().items():
        assert torch.equal(value, resumed.head.state_dict()[name])


def test_the_constant_prediction_is_that_of_the_training_cases(tmp_path: Path) -> None:
    root = planted(tmp_path / "f", cases=30, tiles=(20, 30))
    rows = (root / "labels.csv").read_text().splitlines()
    rows[2:13:2] = [row.replace("tumour", "normal") for row in rows[2:13:2]]
    (root / "labels.csv").write_text("\n".join(rows) + "\n")
    labels = LabelsConfig(labels=root / "labels.csv", target=("label",))
    trainer, _ = trainer_for(root, labels, replace(FIT, starts=1))
    share = float(np.mean(trainer.cohort.array[list(trainer.part.train), 0]))
    inner = float(np.mean(trainer.cohort.array[list(trainer.part.stop), 0]))
    assert share < 0.45
    expected = -inner * np.log(share) - (1 - inner) * np.log(1 - share)
    assert trainer._constant.inner == pytest.approx(expected, rel=1e-4)
    cox = survival_cohort(tmp_path / "s")
    labels = LabelsConfig(labels=cox / "labels.csv", target=("dead",), time="days")
    trainer, _ = trainer_for(cox, labels, replace(FIT, starts=1))
    stop = list(trainer.part.stop)
    expected = float(cox_loss(torch.zeros(len(stop)), trainer.y[stop]))
    assert trainer._constant.inner == pytest.approx(expected, rel=1e-6)


def test_a_head_is_trained_by_its_own_recipe_unless_told_otherwise() -> None:
    recipe = HEADS.load("dsmil").recipe
    own = with_recipe(FitConfig(), "dsmil")
    assert (own.lr, own.epochs, own.patience, own.starts) == (
        recipe.lr,
        recipe.epochs,
        recipe.patience,
        recipe.starts,
    )
    chosen = with_recipe(FitConfig(lr=3e-5, epochs=7), "dsmil")
    assert (chosen.lr, chosen.epochs, chosen.patience) == (3e-5, 7, recipe.patience)


@pytest.mark.check
def test_the_default_recipe_finds_one_tile_in_a_hundred(tmp_path: Path) -> None:
    """Sixty cases, 1 % of the tiles carry the class: every fold finds them."""
    root = planted(tmp_path / "planted", cases=60, tiles=(100, 200), seed=5, shift=10)
    config = TrainConfig(
        labels=LabelsConfig(labels=root / "labels.csv", target=("label",)),
        head=HeadConfig(hidden_dim=32, attention_dim=16),
        fit=FitConfig(device="cpu"),
        cross=FoldsConfig(folds=2),
    )
    result = train(root, out=tmp_path / "experiment", config=config)
    assert min(fold["score"] for fold in result["folds"]) >= 0.95


def test_our_optimiser_has_the_bytes_of_the_fused_one_of_torch() -> None:
    weights = [torch.randn(37, 5), torch.randn(3), torch.randn(4)]
    ours = [torch.nn.Parameter(weight.clone()) for weight in weights]
    theirs = [torch.nn.Parameter(weight.clone()) for weight in weights]
    own = AdamW(ours, lr=3e-3, weight_decay=0.1)
    reference = torch.optim.AdamW(theirs, 3e-3, weight_decay=0.1, fused=True)
    for step in range(6):
        # the third has no gradient at first, as an unused part of a head
        used = 3 if step > 2 else 2
        slopes = [torch.randn_like(weight) for weight in weights[:used]]
        for optimizer, parameters in ((own, ours), (reference, theirs)):
            optimizer.zero_grad()
            for parameter, slope in zip(parameters, slopes, strict=False):
                parameter.grad = slope.clone()
            optimizer.step()
        if step == 4:
            stored = own.states
            own = AdamW(ours, lr=3e-3, weight_decay=0.1)
            own.load_states(stored)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


def step_errors(*, fused: bool) -> torch.Tensor:
    """Errors of AdamW's second step, relative to the same step in float64, in parts of 1e-8."""
    generator = torch.Generator().manual_seed(0)
    slopes = torch.randn(2, 10_000, generator=generator).exp()

    def steps(dtype: torch.dtype, *, fused: bool) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.zeros(10_000, dtype=dtype))
        own = AdamW([weight], lr=1e-3, weight_decay=0.0)
        if not fused:
            own = torch.optim.AdamW([weight], 1e-3, weight_decay=0.0)
        for slope in slopes:
            weight.data.zero_()
            weight.grad = slope.to(dtype)
            own.step()
        return weight.detach().double()

    exact = steps(torch.float64, fused=False)
    return (steps(torch.float32, fused=fused) / exact - 1).abs() * 1e8


def test_a_step_is_nearer_to_the_exact_one_than_that_of_plain_adamw() -> None:
    own = step_errors(fused=True)
    plain = step_errors(fused=False)
    assert own.mean() <= plain.mean()
    assert own.max() <= plain.max()


def test_a_step_has_the_same_bytes_on_any_number_of_threads() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(100_003, generator=generator)
    slope = torch.randn(100_003, generator=generator)
    before = torch.get_num_threads()
    weights = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            weight = torch.nn.Parameter(start.clone())
            own = AdamW([weight], lr=3e-3, weight_decay=0.1)
            for _ in range(3):
                weight.grad = slope.clone()
                own.step()
            weights.append(weight.detach())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


def test_small_cases_are_trained_on_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = planted(tmp_path / "f", cases=12, tiles=(20, 30))
    config = TrainConfig(
        labels=LabelsConfig(labels=root / "labels.csv", target=("label",)),
        head=SMALL,
        fit=FitConfig(epochs=1, device="cpu"),
        cross=FoldsConfig(folds=2, inner_folds=2),
        executor=replace(TrainConfig().executor, threads=2),
    )
    before = torch.get_num_threads()
    try:
        train(root, out=tmp_path / "small", config=config)
        assert torch.get_num_threads() == 1
        monkeypatch.setattr(folds, "ONE_THREAD_BYTES", 0)
        train(root, out=tmp_path / "large", config=config)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
