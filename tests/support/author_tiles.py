"""Embeddings of tile encoders by their authors' own modules: small sizes, seeded weights.

`python -m tests.support.author_tiles FOLDER` writes `tests/encode/authors/*.npz` from a folder with
checkouts of MedARC-AI/OpenMidnight, genbio-ai/genbio-pathfm, lilab-stanford/MUSK and
zhihuanglab/iSight under these names with '+' for '/'. einops must be importable; fairscale, which
MUSK only wraps with, is replaced.
"""

import importlib
import json
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinsection.encode.registry import EncoderSpec, encoder_spec
from thinsection.types import Document
from thinsection.weights.placement import optional_package

GOLDEN = Path(__file__).parents[1] / "encode" / "authors"
SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorsCase:
    """A declared encoder in a small size, and whose code judges it."""

    checkout: str
    commit: str
    edge_px: int
    num_patches: int
    # options of the declaration that make it small
    options: Document = field(default_factory=dict)

    def spec(self, name: str) -> EncoderSpec:
        """The declaration in the small size."""
        declared = encoder_spec(name)
        options = {**declared.architecture.options, **self.options}
        return replace(
            declared,
            architecture=replace(declared.architecture, options=options),
            input_px=self.edge_px,
            num_params=None,
        )


CASES = {
    "openmidnight": AuthorsCase(
        checkout="MedARC-AI+OpenMidnight",
        commit="f7d5a64",
        edge_px=28,
        num_patches=4,
        options={
            "img_size": 28,
            "embed_dim": 32,
            "depth": 2,
            "num_heads": 2,
            "mlp_ratio": 5.5,
        },
    ),
    "genbio_pathfm": AuthorsCase(
        checkout="genbio-ai+genbio-pathfm",
        commit="1d65d00",
        edge_px=48,
        num_patches=9,
        options={"width": 64, "depth": 2, "heads": 2},
    ),
    "musk": AuthorsCase(
        checkout="lilab-stanford+MUSK",
        commit="714b666",
        edge_px=32,
        num_patches=4,
        options={"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2},
    ),
    "isight": AuthorsCase(
        checkout="zhihuanglab+iSight",
        commit="1c0005f",
        edge_px=28,
        num_patches=4,
        options={
            "embed_dim": 16,
            "image_px": 28,
            "vision": {"width": 32, "layers": 2, "heads": 2, "quick_gelu": True},
        },
    ),
}


def seeded_pixels(edge_px: int) -> Tensor:
    """Normalised pixels [2, 3, H, W]."""
    rng = np.random.default_rng(SEED)
    return torch.from_numpy(rng.standard_normal((2, 3, edge_px, edge_px), np.float32))


def seeded_state(shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    """Weights of these names and shapes, of which every layer matters."""
    rng = np.random.default_rng(SEED)
    state = {}
    for name in sorted(shapes):
        shape = shapes[name]
        value = rng.standard_normal(shape, np.float32)
        is_scale = name.endswith("gamma") or ("norm" in name or "ln" in name)
        if len(shape) == 1 and is_scale and not name.endswith("bias"):
            value = 1 + 0.2 * value
        elif len(shape) > 1 and "pos" not in name:
            value = value / np.sqrt(np.prod(shape[1:]))
        else:
            value = 0.1 * value
        if name.endswith("periods"):  # of rotary positions
            value = 1 + np.abs(value)
        state[name] = torch.from_numpy(np.asarray(value, np.float32))
    return state


def _openmidnight(pixels: Tensor) -> tuple[Any, Any]:
    vit = importlib.import_module("dinov2.models.vision_transformer")
    net = vit.DinoVisionTransformer(
        img_size=28,
        patch_size=14,
        embed_dim=32,
        depth=2,
        num_heads=2,
        ffn_layer="swiglufused",
        num_register_tokens=4,
        init_values=1.0,
        block_chunks=0,
    )
    return net, lambda: net(pixels)


def _genbio_pathfm(pixels: Tensor) -> tuple[Any, Any]:
    importlib.import_module("torch._dynamo")
    model = importlib.import_module("genbio_pathfm.model")
    net = model.VisionTransformer(
        embed_dim=64,
        depth=2,
        num_heads=2,
        ffn_ratio=4,
        in_chans=1,
        n_storage_tokens=4,
        ffn_layer="swiglu64",
        layerscale_init=1.0e-5,
        qkv_bias=False,
    )
    whole = model.GenBio_PathFM_Inference.__new__(model.GenBio_PathFM_Inference)
    torch.nn.Module.__init__(whole)
    whole.model = net
    return net, lambda: whole(pixels)


def _musk(pixels: Tensor) -> tuple[Any, Any]:
    unchanged = lambda module, *_, **__: module  # noqa: E731
    for name in ("fairscale", "fairscale.nn"):
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(checkpoint_wrapper=unchanged, wrap=unchanged)
    importlib.import_module("timm.models.layers")
    modeling = importlib.import_module("musk.modeling")
    sizes = modeling.EncoderConfig(
        img_size=32,
        patch_size=16,
        vocab_size=50,
        multiway=True,
        layernorm_embedding=False,
        normalize_output=True,
        no_output_layer=True,
        encoder_embed_dim=32,
        encoder_attention_heads=2,
        encoder_ffn_embed_dim=128,
        encoder_layers=2,
    )
    net = modeling.MUSK(sizes)
    call = partial(net, image=pixels, with_head=False, out_norm=False, ms_aug=True)
    return net, lambda: call()[0]


def _isight(pixels: Tensor) -> tuple[Any, Any]:
    transformers = optional_package("transformers")
    tower = {"num_hidden_layers": 2, "num_attention_heads": 2, "projection_dim": 16}
    config = transformers.CLIPConfig(
        vision_config={
            **tower,
            "hidden_size": 32,
            "intermediate_size": 128,
            "image_size": 28,
            "patch_size": 14,
        },
        text_config={
            **tower,
            "hidden_size": 24,
            "intermediate_size": 96,
            "vocab_size": 50,
        },
        projection_dim=16,
    )
    model = importlib.import_module("model.patch_encoder_with_clam")
    made = {
        "AutoConfig": lambda *_, **__: config,
        "AutoModel": lambda *_, **__: transformers.CLIPModel(config),
        "AutoProcessor": lambda *_, **__: None,
    }
    for name, make in made.items():
        vars(model)[name] = SimpleNamespace(from_pretrained=make)
    net = model.CLAM_ViT("small", None, device="cpu")
    seen: list[Tensor] = []
    net.classifiers[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))

    def call() -> Tensor:
        # slides of one tile, whose embedding is what the heads see
        net([tile[None] for tile in pixels], None, None)
        return seen[-1]

    return net, call


def main(folder: Path) -> None:
    """Writes the file of each case."""
    optional_package("timm")
    makers = {
        "openmidnight": _openmidnight,
        "genbio_pathfm": _genbio_pathfm,
        "musk": _musk,
        "isight": _isight,
    }
    for name, case in CASES.items():
        sys.path.insert(0, str(folder / case.checkout))
        net, call = makers[name](seeded_pixels(case.edge_px))
        shapes = {key: list(x.shape) for key, x in net.state_dict().items()}
        net.load_state_dict(seeded_state(shapes), strict=True)
        net.eval()
        with torch.no_grad():
            embedding = call().numpy()
        np.savez_compressed(
            GOLDEN / f"{name}.npz",
            embedding=embedding,
            shapes=json.dumps(shapes),
            commit=case.commit,
        )
        sys.path.pop(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
