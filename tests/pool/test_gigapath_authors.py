"""GigaPath against its authors' own modules, where a folder of them is named.

THINSECTION_TEST_GIGAPATH is a checkout of prov-gigapath/prov-gigapath (commit 09d8e87); einops must
be installed. Their flash attention, which needs a GPU, is replaced by a plain softmax.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.plain_flash import plain_attention

from thinsection.pool import GigaPathSlideEncoder, LoadOptions, patient_embedding
from thinsection.pool.gigapath import GigaPathFlashSlideEncoder

SOURCE = os.environ.get("THINSECTION_TEST_GIGAPATH", "")
pytestmark = [
    pytest.mark.skipif(
        not SOURCE,
        reason="THINSECTION_TEST_GIGAPATH names no checkout of prov-gigapath",
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("einops") is None, reason="einops is not installed"
    ),
    pytest.mark.filterwarnings("ignore"),  # theirs
]
GRID = 130  # of their position table; 1000 takes 3 GB, and its entries are the same


@pytest.fixture(
    scope="module", params=[GigaPathSlideEncoder, GigaPathFlashSlideEncoder]
)
def encoder_class(request: pytest.FixtureRequest) -> type[GigaPathSlideEncoder]:
    encoder: type[GigaPathSlideEncoder] = request.param
    return encoder


@pytest.fixture(scope="module")
def weights(encoder_class: type[GigaPathSlideEncoder]) -> dict[str, torch.Tensor]:
    return encoder_class.random_weights(seed=1)


@pytest.fixture(scope="module")
def theirs(
    encoder_class: type[GigaPathSlideEncoder], weights: dict[str, torch.Tensor]
) -> Iterator[Any]:
    """Their network with our seeded weights."""
    before = dict(sys.modules)
    unchanged: Any = lambda module, *_, **__: module  # noqa: E731
    stand_ins: dict[str, dict[str, Any]] = {
        "timm": {},
        "timm.models": {},
        "timm.models.registry": {"register_model": unchanged},
        "timm.models.layers": {"drop_path": unchanged},
        "fairscale": {},
        "fairscale.nn": {"checkpoint_wrapper": unchanged, "wrap": unchanged},
    }
    for name, attributes in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        sys.modules[name] = module
    paths = [SOURCE, str(Path(SOURCE) / "gigapath")]
    sys.path[:0] = paths
    try:
        encoder = importlib.import_module("gigapath.slide_encoder")
        name = "torchscale.component.multihead_attention"
        vars(importlib.import_module(name))["flash_attn_func"] = plain_attention
        # they write NumPy integers as text, and evaluate it
        with np.printoptions(legacy="1.25"):
            # `gigapath_slide_enc12l768d`, and the `...384d` of Flash, are this with two sizes
            sizes = encoder_class.published_sizes
            net = encoder.LongNetViT(
                in_chans=sizes.tile_dim,
                embed_dim=sizes.dim,
                depth=12,
                mlp_ratio=4,
                slide_ngrids=GRID,
                norm_layer=partial(torch.nn.LayerNorm, eps=1e-6),
            )
        missing, unexpected = net.load_state_dict(weights, strict=False)
        assert not missing and not unexpected
        yield net.eval()
    finally:
        for path in paths:
            sys.path.remove(path)
        for name in set(sys.modules) - set(before):
            del sys.modules[name]
        sys.modules.update(before)


@pytest.mark.parametrize("tokens", ["mean", "cls"])
def test_every_output_is_theirs_at_every_magnification(
    theirs: Any,
    encoder_class: type[GigaPathSlideEncoder],
    weights: dict[str, torch.Tensor],
    tokens: str,
) -> None:
    rng = np.random.default_rng(0)
    cells = rng.permutation(GRID**2)[:200]
    cells = np.stack([cells % GRID, cells // GRID], axis=1)
    tiles = rng.standard_normal(
        (200, encoder_class.published_sizes.tile_dim), dtype=np.float32
    )

    def ours(output: str) -> GigaPathSlideEncoder:
        options = LoadOptions(device="cpu", output=output)
        return encoder_class.from_state_dict(weights, options=options)

    embeddings = []
    for edge in (256, 512):
        coords = cells * edge + edge // 3
        theirs.tile_size = edge  # as TRIDENT sets it
        theirs.global_pool = tokens == "mean"
        batch = torch.from_numpy(tiles)[None], torch.from_numpy(coords)[None]
        with torch.inference_mode():
            layers = torch.cat(theirs(*batch, all_layer_embed=True)).numpy()
            final = theirs(*batch)[0][0].numpy()
        encoder = ours(tokens)
        got = encoder.encode_layers(tiles, coords, tile_px_l0=edge)
        assert np.abs(got - layers).max() <= 1e-5
        embedding = encoder.encode(tiles, coords, tile_px_l0=edge)
        assert np.abs(embedding - layers[-1]).max() <= 1e-5
        two = ours(f"{tokens}-5-11").encode(tiles, coords, tile_px_l0=edge)
        assert np.abs(two - layers[[5, 11]].ravel()).max() <= 1e-5
        last = ours(f"{tokens}-final").encode(tiles, coords, tile_px_l0=edge)
        assert np.abs(last - final).max() <= 1e-5
        early = patient_embedding(
            [(tiles, coords)], slide_encoder=encoder, tile_px_l0=edge, fusion="early"
        )
        np.testing.assert_array_equal(early, embedding)
        embeddings.append(embedding)
    np.testing.assert_array_equal(embeddings[0], embeddings[1])
