"""A checkpoint of CLAM pools as CLAM does; its own module is the yardstick."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.clam_embeddings import (
    COMMIT,
    GOLDEN,
    VARIANTS,
    checkpoint_of,
    tiles_of,
)

from thinsection.errors import InvalidInputError, WeightsError
from thinsection.pool import AbmilSlideEncoder, load_slide_encoder

# of the largest absolute value, as in test_authors.py
TOLERANCE = 3e-6
COORDS = np.stack([np.arange(300) % 20, np.arange(300) // 20], 1) * 512


def load_checkpoint(path: Path, weights: dict[str, torch.Tensor]) -> AbmilSlideEncoder:
    torch.save(weights, path)
    encoder = load_slide_encoder("abmil", weights=path, device="cpu")
    assert isinstance(encoder, AbmilSlideEncoder)
    return encoder


@pytest.mark.parametrize("name", VARIANTS)
def test_the_slide_embedding_is_the_features_that_clam_returns(
    name: str, tmp_path: Path
) -> None:
    golden = np.load(GOLDEN)
    assert str(golden["commit"]) == COMMIT
    exact = golden[f"{name}_float64"]
    variant = VARIANTS[name]
    encoder = load_checkpoint(tmp_path / "s_0_checkpoint.pt", checkpoint_of(variant))
    assert encoder.dim == 512 * variant.branches
    embedding = encoder.encode(tiles_of(variant), COORDS, tile_px_l0=512)
    largest = np.abs(exact).max()
    assert np.abs(embedding - exact).max() <= TOLERANCE * largest
    # weights decide: the plain mean of the hidden features is another one
    weights = checkpoint_of(variant)
    hidden = torch.from_numpy(tiles_of(variant)) @ weights["attention_net.0.weight"].T
    hidden = (hidden + weights["attention_net.0.bias"]).relu()
    mean = hidden.mean(0).repeat(variant.branches).numpy()
    assert np.abs(mean - exact).max() > 0.05 * largest


def test_names_of_older_clam_and_of_several_cards_are_the_same_network(
    tmp_path: Path,
) -> None:
    variant = VARIANTS["single"]
    weights = checkpoint_of(variant)
    same = load_checkpoint(tmp_path / "now.pt", weights)
    older = {
        name.replace("attention_net.3.", "attention_net.2."): value
        for name, value in weights.items()
    }
    cards = {
        name.replace("attention_net.", "attention_net.module."): value
        for name, value in weights.items()
    }
    loss = {"instance_loss_fn.labels": torch.arange(2)}
    for number, other in enumerate((older, cards, weights | loss)):
        encoder = load_checkpoint(tmp_path / f"{number}.pt", other)
        assert encoder.weights_hash == same.weights_hash


def test_a_missing_a_strange_and_a_misshapen_weight_are_named(tmp_path: Path) -> None:
    weights = checkpoint_of(VARIANTS["single"])
    lacking = {name: x for name, x in weights.items() if "attention_c.bias" not in name}
    with pytest.raises(WeightsError, match=r"1 missing .0\.attention\.w\.bias"):
        load_checkpoint(tmp_path / "a.pt", lacking)
    # CHIEF has these names too, but sums other tiles
    strange = {"att_head.weight": torch.ones(2, 512)}
    with pytest.raises(WeightsError, match=r"1 unexpected .0\.att_head\.weight"):
        load_checkpoint(tmp_path / "b.pt", weights | strange)
    misshapen = {"attention_net.3.attention_b.0.bias": torch.ones(3)}
    with pytest.raises(WeightsError, match=r"1 misshapen .0\.attention\.U\.bias"):
        load_checkpoint(tmp_path / "c.pt", weights | misshapen)
    pooled = {"fc.0.weight": torch.ones(4, 8), "classifier.weight": torch.ones(2, 4)}
    with pytest.raises(WeightsError, match="a checkpoint of CLAM or MIL-Lab"):
        load_checkpoint(tmp_path / "d.pt", pooled)
    encoder = load_checkpoint(tmp_path / "e.pt", weights)
    with pytest.raises(InvalidInputError, match="64"):
        encoder.encode(tiles_of(VARIANTS["multi_plain"]), COORDS, tile_px_l0=512)
