"""Tile encoders that need code of ours or names of others, against their authors' own modules.

The embeddings of `authors/` were made by `tests.support.author_tiles`, with small sizes and seeded
weights; each file names the commit of the authors' code.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.author_tiles import CASES, GOLDEN, seeded_pixels, seeded_state

from thinsection.encode.backbone import pretrained_backbone
from thinsection.errors import WeightsError
from thinsection.extras import is_installed


def authors_weights(name: str) -> dict[str, torch.Tensor]:
    """The weights that the authors' module had, under its names."""
    shapes = json.loads(str(np.load(GOLDEN / f"{name}.npz")["shapes"]))
    return seeded_state(shapes)


@pytest.mark.parametrize("name", CASES)
def test_the_authors_checkpoint_gives_the_authors_embedding(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    spec = case.spec(name)
    if not is_installed("timm") and "timm" in spec.needs:
        pytest.skip("needs timm")
    golden = np.load(GOLDEN / f"{name}.npz")
    assert str(golden["commit"]) == case.commit
    path = tmp_path / "weights.pth"
    torch.save({"model_state_dict": authors_weights(name), "epoch": 3}, path)
    backbone = pretrained_backbone(spec, path).eval()
    pixels = seeded_pixels(case.edge_px)
    with torch.no_grad():
        embedding, tokens = backbone(pixels)
        first, _ = backbone(pixels[:1])
    expected = golden["embedding"]
    largest = np.abs(expected).max()
    assert embedding.shape == expected.shape
    np.testing.assert_allclose(embedding.numpy(), expected, atol=3e-6 * largest)
    assert tokens.shape[1] == case.num_patches
    # the yardstick is not degenerate, and a tile does not see the other
    assert np.ptp(expected, axis=0).min() > 0 and np.ptp(expected) > largest / 2
    np.testing.assert_allclose(first.numpy(), expected[:1], atol=3e-6 * largest)


@pytest.mark.parametrize("name", ["openmidnight", "musk"])
def test_a_position_table_of_another_size_is_refused(name: str, tmp_path: Path) -> None:
    spec = CASES[name].spec(name)
    weights = authors_weights(name)
    table = next(key for key in weights if "pos" in key and not key.endswith("bias"))
    rows = weights[table]
    dim = 0 if rows.ndim == 2 else 1
    weights[table] = torch.cat([rows, rows.narrow(dim, 0, 5)], dim=dim)
    path = tmp_path / "weights.pth"
    torch.save(weights, path)
    with pytest.raises(WeightsError, match="misshapen"):
        pretrained_backbone(spec, path)
