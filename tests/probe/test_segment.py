"""The segmentation probe: the head, its loss and metric, and the cache that changes no bit."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import jaccard_score
from tests.support.segmentation import MAKERS, RamFeatures, StubEncoder, settings
from typer.testing import CliRunner

from thinsection.cli.app import build_app
from thinsection.config import as_mapping
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.evaluation.metrics import (
    background_score,
    image_counts,
    image_jaccard,
    image_weights,
    weighted_jaccard,
)
from thinsection.probe import EVA, NANOPATH, Protocol
from thinsection.probe.protocol import SegmentSettings
from thinsection.probe.segment.data import SEGMENT_DATASETS, SegmentSet
from thinsection.probe.segment.probe import (
    MaskTransformer,
    centre,
    dice_loss,
    initial_head,
    label_window,
    segment_features,
    segment_probe,
    upsampled,
    with_cache_facts,
)

SMALL_BUDGET = (
    9 * 4 * 196 * 24 // 2
)  # two batches of two and a little: the cache stays on disk


def protocol(**changes: Any) -> Protocol:
    return dataclasses.replace(NANOPATH, segment=settings(**changes))


def in_ram(data: SegmentSet) -> torch.Tensor:
    """The plain way: a list of batches, concatenated."""
    encoder = StubEncoder()
    chunks = [
        encoder.encode_tokens(centre(b, settings())) for b in data.image_batches(0, 16)
    ]
    return torch.cat(chunks)


def options(root: Path, **changes: Any) -> dict[str, Any]:
    return {"root": root, "budget_bytes": SMALL_BUDGET, **changes}


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_the_cache_changes_no_bit_of_losses_and_scores_where_the_head_learns(
    name: str, tmp_path: Path
) -> None:
    data = SEGMENT_DATASETS[name](MAKERS[name](tmp_path / "data"))
    chosen = protocol(epochs=8, batch_size=2, lr=1e-2)
    plain = segment_probe(data, RamFeatures(in_ram(data)), protocol=chosen)
    with segment_features(
        data, StubEncoder(), settings(), **options(tmp_path)
    ) as cache:
        assert cache.manifest.dtype_rows == {"fp32": len(data)}
        cached = segment_probe(data, cache, protocol=chosen)
        assert not cache.in_ram
        assert cache.prefetch >= 1
    assert cached.details == plain.details  # every loss of every epoch, to the bit
    assert (cached.score, cached.interval) == (plain.score, plain.interval)
    assert plain.examples is not None
    assert cached.examples is not None
    assert np.array_equal(plain.examples.prediction, cached.examples.prediction)
    for first, losses in zip(
        plain.details["first_batch_losses"], plain.details["train_losses"]
    ):
        assert min(losses) < 0.8 * first
    assert plain.score > plain.details["all_background_score"] + 0.1


def test_a_forced_float16_cache_is_the_float16_way_and_says_what_it_lost(
    tmp_path: Path,
) -> None:
    data = SEGMENT_DATASETS["consep"](MAKERS["consep"](tmp_path / "data"))
    chosen = protocol(epochs=2, batch_size=2)
    plain = segment_probe(data, RamFeatures(in_ram(data)), protocol=chosen)
    half = segment_probe(data, RamFeatures(in_ram(data).half()), protocol=chosen)
    lossy = options(tmp_path, storage="fp16")
    with segment_features(data, StubEncoder(), settings(), **lossy) as cache:
        found = segment_probe(data, cache, protocol=chosen)
        facts = with_cache_facts(found, cache).facts
    assert found.details == half.details
    assert found.details["train_losses"] != plain.details["train_losses"]
    assert facts["cache_dtypes"] == {"fp16": 6}
    assert facts["engine"] == StubEncoder().engine
    assert 0 < facts["cache_loss"]["max_abs_error"] < 2.0**-11


def test_a_second_probe_does_not_run_the_encoder_again_and_other_weights_do(
    tmp_path: Path,
) -> None:
    data = SEGMENT_DATASETS["consep"](MAKERS["consep"](tmp_path / "data"))
    calls = []
    for seed in (0, 0, 1):
        encoder = StubEncoder(seed=seed)
        segment_features(
            data, encoder, settings(), **options(tmp_path, batch_size=2)
        ).close()
        calls.append(encoder.calls)
    assert calls == [4, 1, 4]  # one image tells the shape


def test_the_head_has_the_published_number_of_parameters() -> None:
    for dim, classes in ((384, 6), (1024, 5)):
        with torch.device("meta"):
            head = MaskTransformer(dim, classes, SegmentSettings())
        count = sum(p.numel() for p in head.parameters())
        assert count == 768 * dim + 15_357_696 + 770 * classes


def test_the_protocol_is_the_published_one() -> None:
    s = SegmentSettings()
    assert (s.lr, s.weight_decay, s.epochs, s.batch_size, s.folds) == (
        1e-3,
        1e-4,
        30,
        64,
        3,
    )
    assert (s.image_px, s.crop_px, s.width, s.blocks, s.heads, s.mlp) == (
        256,
        224,
        768,
        2,
        8,
        3072,
    )
    assert as_mapping(NANOPATH)["segment"]["background_weight"] == 16.0
    with pytest.raises(ConfigError, match="must define the segment probe, got 'eva'"):
        EVA.require("segment", SegmentSettings)


def test_the_head_is_the_formula_in_float64() -> None:
    head = initial_head(24, 3, settings(), torch.Generator().manual_seed(0)).double()
    tokens = torch.randn(2, 16, 24, dtype=torch.float64)
    assert torch.allclose(head(tokens), plain_head(head, tokens), atol=1e-10)


def plain_head(head: MaskTransformer, tokens: torch.Tensor) -> torch.Tensor:
    """The head written out: explicit softmax attention, explicit norms."""

    def norm(x: torch.Tensor, layer: torch.nn.LayerNorm) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return centred / scale * layer.weight + layer.bias

    x = head.project(tokens)
    x = torch.cat([x, head.class_tokens.repeat(len(x), 1, 1)], dim=1)
    for block in head.blocks:
        q, k, v = block.qkv(norm(x, block.norm_attention)).chunk(3, dim=-1)
        parts = []
        for h in range(4):
            cut = slice(8 * h, 8 * h + 8)
            weights = (q[..., cut] @ k[..., cut].transpose(1, 2) / 8**0.5).softmax(-1)
            parts.append(weights @ v[..., cut])
        x = x + block.out(torch.cat(parts, dim=-1))
        up = block.up(norm(x, block.norm_mlp))
        x = x + block.down(up * 0.5 * (1 + torch.erf(up / 2**0.5)))
    x = norm(x, head.norm)
    patches, classes = (
        x[:, :-3] @ head.patch_projection,
        x[:, -3:] @ head.class_projection,
    )
    cosine = torch.einsum("btc,bkc->btk", patches, classes)
    cosine = cosine / patches.norm(dim=-1)[..., None] / classes.norm(dim=-1)[:, None]
    return norm(cosine, head.norm_scores).permute(0, 2, 1).reshape(2, 3, 4, 4)


def test_weights_come_from_the_generator_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    heads = [
        initial_head(24, 3, settings(), torch.Generator().manual_seed(s))
        for s in (1, 1, 2)
    ]
    assert torch.equal(torch.get_rng_state(), state)
    a, b, c = (h.patch_projection.detach() for h in heads)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert float(a.std()) == pytest.approx(32**-0.5, rel=0.1)
    assert float(heads[0].project.weight.detach().std()) == pytest.approx(0.02, rel=0.2)
    assert heads[0].project.weight.abs().max() <= 2.0


def test_the_dice_loss_is_its_formula() -> None:
    rng = np.random.default_rng(0)
    scores, labels = (
        rng.normal(size=(3, 4, 5, 7)),
        rng.integers(0, 3, (3, 5, 7)),
    )  # class 3 absent
    p = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    terms = []
    for c in range(4):
        truth = labels == c
        overlap, total = (p[:, c] * truth).sum(), p[:, c].sum() + truth.sum()
        terms.append((2 * overlap + 1) / (total + 1))
    got = dice_loss(torch.from_numpy(scores), torch.from_numpy(labels), 1.0)
    assert float(got) == pytest.approx(1 - np.mean(terms), abs=1e-12)


def test_the_score_is_scikit_learns_jaccard_per_image_and_the_weights_are_the_rule() -> (
    None
):
    rng = np.random.default_rng(0)
    truth, guess = rng.integers(0, 4, (10, 6, 9)), rng.integers(0, 5, (10, 6, 9))
    truth[:3] = 0
    guess[0] = 0
    counts = image_counts(truth, guess, 5)
    want = [
        jaccard_score(
            t.ravel(),
            g.ravel(),
            average="macro",
            zero_division=0,
            labels=np.union1d(t, g),
        )
        for t, g in zip(truth, guess)
    ]
    assert np.allclose(image_jaccard(counts), want, atol=1e-12)
    assert image_weights(counts, 16.0).tolist() == [1.0] * 3 + [16 * 0.3] * 7
    assert image_weights(counts[3:], 16.0).tolist() == [1.0] * 7
    score = (sum(want[:3]) + 4.8 * sum(want[3:])) / (3 + 7 * 4.8)
    assert weighted_jaccard(counts, 16.0) == pytest.approx(score)
    background = image_counts(truth, np.zeros_like(truth), 5)
    assert background_score(counts, 16.0) == weighted_jaccard(background, 16.0)


def test_correct_geometry_holds_the_crop_against_its_own_label(tmp_path: Path) -> None:
    labels = np.arange(256 * 256, dtype=np.uint32).reshape(1, 256, 256).astype(np.uint8)
    scores = torch.zeros(1, 2, 14, 14)
    assert upsampled(scores, settings(), "compatible").shape == (1, 2, 256, 256)
    assert upsampled(scores, settings(), "correct").shape == (1, 2, 224, 224)
    assert label_window(labels, settings(), "compatible") is labels
    window = label_window(labels, settings(), "correct")
    assert np.array_equal(window, labels[:, 16:240, 16:240])
    data = SEGMENT_DATASETS["consep"](MAKERS["consep"](tmp_path))
    chosen, tokens = (
        protocol(epochs=8, batch_size=2, lr=1e-2),
        RamFeatures(in_ram(data)),
    )
    both = [
        segment_probe(data, tokens, protocol=chosen, geometry=g)
        for g in ("compatible", "correct")
    ]
    assert both[1].score > both[0].score  # the displacement costs px at every edge
    assert both[1].examples is not None
    assert both[1].examples.prediction.shape[1:] == (224, 224)
    assert both[1].facts["geometry"] == "correct"


def test_features_that_blow_up_stop_the_training(tmp_path: Path) -> None:
    data = SEGMENT_DATASETS["consep"](MAKERS["consep"](tmp_path))
    tokens = in_ram(data)
    tokens[:] = torch.nan
    with pytest.raises(
        InvalidInputError, match="loss must stay finite, got nan in epoch 1"
    ):
        segment_probe(data, RamFeatures(tokens), protocol=protocol(epochs=1))


def test_nan_tokens_are_refused_before_they_are_cached(tmp_path: Path) -> None:
    data = SEGMENT_DATASETS["consep"](MAKERS["consep"](tmp_path / "data"))
    encoder = StubEncoder()
    encoder.projection[0, 0] = torch.nan
    with pytest.raises(
        InvalidInputError, match="features must be finite, got nan in row 0"
    ):
        segment_features(data, encoder, settings(), **options(tmp_path))


@pytest.mark.check
def test_the_default_encoder_is_probed_from_the_shell(tmp_path: Path) -> None:
    root = MAKERS["consep"](tmp_path / "consep", 3)
    arguments = [
        "probe",
        "segment",
        root,
        "--dataset",
        "consep",
        "--out",
        tmp_path / "out",
    ]
    arguments += [
        "--cache-dir",
        tmp_path / "cache",
        "--cache-memory",
        "64MiB",
        "--device",
        "cpu",
    ]
    arguments += ["--epochs", 1]
    app = build_app(["probe"])
    printed = []
    for more in ([], ["--cache-dtype", "fp16"]):
        done = CliRunner().invoke(app, [*map(str, arguments), *more])
        assert done.exception is None, done.exception
        printed.append(done.output)
    assert "background everywhere would score" in printed[0]
    assert "lossy cache (fp16): largest error" in printed[1]
    result = json.loads((tmp_path / "out" / "segment.json").read_text())
    assert result["protocol"]["segment"]["epochs"] == 1
    assert result["data"]["tokens"] == 49
    page = (tmp_path / "out" / "segment.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert (
        (tmp_path / "out" / "segment_examples.png").read_bytes().startswith(b"\x89PNG")
    )
