"""Slide embeddings by CLAM's own modules, on seeded weights: the yardstick of our tests.

    python -m tests.support.clam_embeddings CHECKOUT

CHECKOUT is mahmoodlab/CLAM at `COMMIT`. `tests/pool/authors/clam.npz` is written: the features
that CLAM returns of each variant, in float32 and float64. Nothing of theirs is copied.
"""

import importlib.util
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "pool" / "authors" / "clam.npz"
COMMIT = "53e2409d4a8189c682c173382964a85f114f923c"
NUM_TILES = 300
HIDDEN_DIM = 512
ATTENTION_DIMS = {"small": 256, "big": 384}


class Variant(NamedTuple):
    """A network of CLAM."""

    size: str
    tile_dim: int
    gated: bool
    branches: int  # 1: clam_sb; else clam_mb of as many classes
    dropout: float  # 0: names without a dropout are older CLAM's


VARIANTS = {
    "single": Variant("small", 64, gated=True, branches=1, dropout=0.25),
    "single_plain": Variant("big", 48, gated=False, branches=1, dropout=0.0),
    "single_plain_dropout": Variant("small", 48, gated=False, branches=1, dropout=0.25),
    "multi": Variant("big", 64, gated=True, branches=3, dropout=0.25),
    "multi_plain": Variant("small", 40, gated=False, branches=2, dropout=0.0),
}


def tiles_of(variant: Variant) -> np.ndarray:
    """Tile embeddings (N, D) float32."""
    rng = np.random.default_rng(11)
    tiles = rng.standard_normal((NUM_TILES, variant.tile_dim), dtype=np.float32)
    return tiles * rng.uniform(0.5, 3, (NUM_TILES, 1)).astype(np.float32)


def checkpoint_of(variant: Variant) -> dict[str, Tensor]:
    """Seeded weights under CLAM's names, with its classifiers."""
    hidden = ATTENTION_DIMS[variant.size]
    layers = {"attention_net.0": (HIDDEN_DIM, variant.tile_dim)}
    if variant.gated:
        layers["attention_net.3.attention_a.0"] = (hidden, HIDDEN_DIM)
        layers["attention_net.3.attention_b.0"] = (hidden, HIDDEN_DIM)
        layers["attention_net.3.attention_c"] = (variant.branches, hidden)
    else:
        last = 3 if variant.dropout else 2
        layers["attention_net.3.module.0"] = (hidden, HIDDEN_DIM)
        layers[f"attention_net.3.module.{last}"] = (variant.branches, hidden)
    if variant.branches == 1:
        layers["classifiers"] = (2, HIDDEN_DIM)
    else:
        for branch in range(variant.branches):
            layers[f"classifiers.{branch}"] = (1, HIDDEN_DIM)
    for label in range(max(2, variant.branches)):
        layers[f"instance_classifiers.{label}"] = (2, HIDDEN_DIM)
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for name, (outputs, inputs) in layers.items():
        weight = torch.randn(outputs, inputs, generator=generator)
        weights[f"{name}.weight"] = weight * 2 * inputs**-0.5
        weights[f"{name}.bias"] = 0.05 * torch.randn(outputs, generator=generator)
    return weights


def features_by_clam(variant: Variant, dtype: torch.dtype) -> np.ndarray:
    """`features` (branches x 512,) that CLAM returns, one branch after another."""
    # by its file, because its package imports what its networks do not need
    spec = importlib.util.spec_from_file_location(
        "model_clam", Path(sys.argv[1]) / "models" / "model_clam.py"
    )
    assert spec is not None and spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    network = theirs.CLAM_SB if variant.branches == 1 else theirs.CLAM_MB
    net = network(
        gate=variant.gated,
        size_arg=variant.size,
        dropout=variant.dropout,
        n_classes=max(2, variant.branches),
        embed_dim=variant.tile_dim,
    )
    net.load_state_dict(checkpoint_of(variant), strict=True)
    tiles = torch.from_numpy(tiles_of(variant)).to(dtype)
    with torch.inference_mode():
        results = net.eval().to(dtype)(tiles, return_features=True)[-1]
    return results["features"].flatten().numpy()


if __name__ == "__main__":
    golden = {}
    for each, one in VARIANTS.items():
        golden[f"{each}_float32"] = features_by_clam(one, torch.float32)
        golden[f"{each}_float64"] = features_by_clam(one, torch.float64)
    np.savez(GOLDEN, commit=np.array(COMMIT), **golden)
