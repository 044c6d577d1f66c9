"""A small CLIP model of transformers with seeded weights, and a tokenizer of a few words."""

import json
from pathlib import Path
from typing import Any

import torch

from thinsection.weights.placement import importable_torchvision, optional_package

WORDS = [
    "an",
    "image",
    "of",
    "tumour",
    "stroma",
    "gland",
    "necrosis",
    "dense",
    "loose",
    "pink",
]
PIXELS = {
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
    "resample": 3,
    "size": {"shortest_edge": 32},
    "do_center_crop": True,
    "crop_size": {"height": 32, "width": 32},
}
CONTEXT = 12


def write_tokenizer(path: Path) -> None:
    """Writes a tokenizer whose end token has the highest id, as CLIP's has."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: number for number, word in enumerate(["<pad>", *WORDS])}
    vocabulary["<start>"] = len(vocabulary)
    vocabulary["<end>"] = len(vocabulary)
    tokenizer: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(name, vocabulary[name]) for name in ("<start>", "<end>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=ends
    )
    tokenizer.save(str(path))


def small_clip(seed: int = 0) -> Any:
    """transformers' CLIPModel of 2 x 2 layers with seeded weights."""
    importable_torchvision()
    transformers = optional_package("transformers")
    config = transformers.CLIPConfig(
        projection_dim=24,
        text_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": len(WORDS) + 3,
            "max_position_embeddings": CONTEXT,
            "eos_token_id": len(WORDS) + 2,
            "bos_token_id": len(WORDS) + 1,
            "pad_token_id": 0,
        },
        vision_config={
            "hidden_size": 40,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 5,
            "image_size": 32,
            "patch_size": 8,
        },
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.CLIPModel(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def write_clip(folder: Path, seed: int = 0) -> Any:
    """Writes the folder of a small CLIP model; returns the model."""
    model = small_clip(seed)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    write_tokenizer(folder / "tokenizer.json")
    return model
