"""The linear probe against AdamW written out in float64, its seeds and its selection."""

import dataclasses

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from tests.probe.make import blobs

from thinsection.errors import ConfigError, DeviceError, InvalidInputError
from thinsection.probe.data.sets import TileSet, make_split
from thinsection.probe.probes.tiles import initial_head, linear_probe, train_head
from thinsection.probe.protocol import EVA, NANOPATH, PATHOBENCH, LinearSettings

SETTINGS = dataclasses.replace(NANOPATH.linear, epochs=25)
QUICK = dataclasses.replace(NANOPATH, linear=SETTINGS)


def plain_epochs(
    data: TileSet, settings: LinearSettings, lr: float, seed: int
) -> list[np.ndarray]:
    """Validation logits after each epoch: softmax regression and AdamW in float64."""
    generator = torch.Generator().manual_seed(seed)
    x, y = data.train.embeddings.astype(np.float64), data.train.labels
    start = initial_head(data.num_classes, x.shape[1], generator)
    params = [p.numpy().astype(np.float64) for p in start]
    first, second = ([np.zeros_like(p) for p in params] for _ in range(2))
    step, logits = 0, []
    for _ in range(settings.epochs or 0):
        order = torch.randperm(len(x), generator=generator).numpy()
        for i in range(0, len(x), settings.batch_size):
            rows = order[i : i + settings.batch_size]
            z = x[rows] @ params[0].T + params[1]
            p = np.exp(z - z.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            p[np.arange(len(rows)), y[rows]] -= 1
            grads = [p.T @ x[rows] / len(rows), p.mean(axis=0)]
            step += 1
            for j, g in enumerate(grads):
                params[j] *= 1 - lr * settings.weight_decay
                first[j] = 0.9 * first[j] + 0.1 * g
                second[j] = 0.999 * second[j] + 0.001 * g * g
                down = np.sqrt(second[j] / (1 - 0.999**step)) + 1e-8
                params[j] -= lr * first[j] / (1 - 0.9**step) / down
        logits.append(data.val.embeddings.astype(np.float64) @ params[0].T + params[1])
    return logits


@pytest.mark.parametrize("lr", [1e-2, 1e-3])
def test_every_epoch_scores_as_adamw_in_float64_does(lr: float) -> None:
    data = blobs(n_train=203)  # the last batch is partial
    head = train_head(data, SETTINGS, lr=lr, seed=7)
    logits = plain_epochs(data, SETTINGS, lr, seed=7)
    plain = [
        f1_score(data.val.labels, z.argmax(axis=1), average="macro") for z in logits
    ]
    np.testing.assert_allclose(head.scores, plain, atol=1e-12)
    np.testing.assert_array_equal(
        head.prediction, logits[head.epoch - 1].argmax(axis=1)
    )
    ours = data.val.embeddings @ head.weight.T + head.bias
    np.testing.assert_allclose(ours, logits[head.epoch - 1], atol=2e-4)
    assert head.losses[-1] < 0.7 * head.losses[0]


def test_the_score_is_the_best_over_rate_and_epoch_and_the_first_of_equals() -> None:
    data = blobs()
    result = linear_probe(data, protocol=QUICK)
    heads = [
        train_head(data, SETTINGS, lr=lr, seed=NANOPATH.seed + i)
        for i, lr in enumerate(SETTINGS.lrs)
    ]
    assert result.score == max(max(h.scores) for h in heads)
    best = next(h for h in heads if h.score == result.score)
    assert result.details["best_lr"] == best.lr
    assert result.details["best_epoch"] == 1 + best.scores.index(result.score)
    assert result.predictions is not None
    assert result.score == pytest.approx(
        f1_score(data.val.labels, result.predictions.prediction, average="macro")
    )


def test_the_same_seed_gives_the_same_bits_and_another_does_not() -> None:
    data = blobs()
    a, b, c = (train_head(data, SETTINGS, lr=1e-3, seed=s) for s in (1, 1, 2))
    assert a.weight.tobytes() == b.weight.tobytes()
    assert a.losses == b.losses
    assert a.weight.tobytes() != c.weight.tobytes()


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    linear_probe(blobs(), protocol=QUICK)
    assert torch.equal(before, torch.random.get_rng_state())


def test_eva_counts_steps_and_scores_balanced_accuracy() -> None:
    data = blobs(n_train=600, n_val=60)
    settings = dataclasses.replace(EVA.linear, max_steps=10, patience=None)
    head = train_head(data, settings, lr=3e-4, seed=0)
    assert len(head.scores) == 4
    assert EVA.linear is not None
    assert EVA.linear.metric == "balanced_accuracy"


def test_eva_ends_after_a_fifth_of_its_epochs_without_a_better_score() -> None:
    data = blobs(n_train=600, n_val=60)  # 3 steps an epoch
    whole = dataclasses.replace(EVA.linear, max_steps=150, patience=None)
    everything = train_head(data, whole, lr=3e-4, seed=0)
    assert len(everything.scores) == 50
    for share, patience in ((0.05, 3), (0.2, 10)):
        settings = dataclasses.replace(whole, patience=share)
        head = train_head(data, settings, lr=3e-4, seed=0)
        best = -1.0
        waited = 0
        for epochs, score in enumerate(everything.scores, start=1):  # noqa: B007
            waited = 0 if score > best else waited + 1
            best = max(best, score)
            if waited == patience:
                break
        assert head.scores == everything.scores[:epochs]
        assert head.score == best
    assert len(head.scores) < 50  # it ended early at least once


@pytest.mark.parametrize(
    ("rows", "patience"),
    [
        (268, 1250),  # BACH
        (100_000, 7),  # CRC
        (262_144, 3),  # PatchCamelyon
        (2_175, 278),  # MHIST
        (3_657, 167),  # BRACS
        (1_132, 500),  # BreaKHis
        (15_303, 42),  # Gleason
        (6_270, 100),  # UniToPatho
    ],
)
def test_the_share_gives_the_patience_of_each_of_evas_configurations(
    rows: int, patience: int
) -> None:
    linear = EVA.linear
    assert linear is not None
    assert linear.max_steps is not None
    per_epoch = -(-rows // linear.batch_size)
    assert linear.patience_epochs(linear.max_steps / per_epoch) == patience


def test_a_protocol_without_the_probe_says_which_have_it() -> None:
    with pytest.raises(
        ConfigError,
        match=r"linear probe, got 'pathobench'; use 'honest' or 'nanopath' or 'e",
    ):
        linear_probe(blobs(), protocol=PATHOBENCH)


def test_a_loss_that_overflows_is_refused() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-3e38, 3e38, (40, 3)).astype(np.float32)
    train, val = make_split(x, np.arange(40) % 2), make_split(x / 2, np.arange(40) % 2)
    data = TileSet(name="huge", class_names=("a", "b"), train=train, val=val)
    with pytest.raises(InvalidInputError, match="training loss must stay finite"):
        linear_probe(data, protocol=QUICK)


def test_an_absent_device_is_refused() -> None:
    with pytest.raises(DeviceError, match="got 'cuda:99'"):
        linear_probe(blobs(), protocol=QUICK, device="cuda:99")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_predicts_as_the_cpu_does() -> None:
    data = blobs()
    cpu, gpu = (
        train_head(data, SETTINGS, lr=1e-3, seed=0, device=d) for d in ("cpu", "cuda")
    )
    np.testing.assert_array_equal(cpu.prediction, gpu.prediction)
