"""Sizes of a CLIP model from its config, in the form of open_clip or of transformers."""

from collections.abc import Collection

from thinsection.errors import WeightsError
from thinsection.types import Document, Json

OPEN_CLIP_CONFIG = "open_clip_config.json"
# names of its weights, before those of other models
OPEN_CLIP_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
_HEAD_WIDTH = 64
_ACTIVATIONS = {"quick_gelu": True, "gelu": False}
_MODEL_KEYS = {"embed_dim", "vision_cfg", "text_cfg", "quick_gelu"}
_VISION_KEYS = {
    "image_size",
    "patch_size",
    "layers",
    "width",
    "head_width",
    "mlp_ratio",
}
_TEXT_KEYS = {"context_length", "vocab_size", "width", "heads", "layers"}
_EPS = 1e-5


def from_open_clip(config: Document, source: str) -> Document:
    """Fields of `towers.ClipConfig` from the content of open_clip_config.json.

    Raises WeightsError: a part is missing, or it is another architecture than a plain CLIP's.
    """
    model: Document = config.get("model_cfg") or {}
    vision: Document = model.get("vision_cfg") or {}
    text: Document = model.get("text_cfg") or {}
    _check_keys(model, _MODEL_KEYS, source)
    _check_keys(vision, _VISION_KEYS, f"{source}: vision_cfg")
    _check_keys(text, _TEXT_KEYS, f"{source}: text_cfg")
    quick_gelu = bool(model.get("quick_gelu", False))
    width = int(vision["width"])
    return {
        "embed_dim": int(model["embed_dim"]),
        "patch_px": int(vision["patch_size"]),
        "image_px": int(vision["image_size"]),
        "vision": {
            "width": width,
            "layers": int(vision["layers"]),
            "heads": width // int(vision.get("head_width", _HEAD_WIDTH)),
            "quick_gelu": quick_gelu,
            "mlp_ratio": float(vision.get("mlp_ratio", 4.0)),
        },
        "text": {
            "width": int(text["width"]),
            "layers": int(text["layers"]),
            "heads": int(text["heads"]),
            "quick_gelu": quick_gelu,
        },
        "context": int(text["context_length"]),
        "vocabulary": int(text["vocab_size"]),
    }


def _check_keys(table: Document, known: Collection[str], source: str) -> None:
    """Raises WeightsError: a key is missing, or one asks for what is not built here."""
    optional = {"quick_gelu", "head_width", "mlp_ratio"}
    missing = sorted(key for key in known if key not in table and key not in optional)
    asked = sorted(key for key in table if key not in known and table[key])
    if missing or asked:
        raise WeightsError(
            f"config must describe a plain CLIP with {', '.join(sorted(known))}, got "
            f"{'no ' + missing[0] if missing else asked[0]} in {source!r}; "
            "register the model as an encoder of a package of yours"
        )


def from_transformers_clip(config: Document, source: str) -> Document:
    """Fields of `towers.ClipConfig` from the config.json of transformers' CLIPModel.

    Raises WeightsError: it has another activation or epsilon.
    """
    # a config leaves out what is transformers' default
    vision = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
    vision |= config.get("vision_config") or {}
    text = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    text |= config.get("text_config") or {}
    return {
        "embed_dim": int(config.get("projection_dim", 512)),
        "patch_px": int(vision.get("patch_size", 32)),
        "image_px": int(vision.get("image_size", 224)),
        "vision": _transformer(vision, source),
        "text": _transformer(text, source),
        "context": int(text.get("max_position_embeddings", 77)),
        "vocabulary": int(text.get("vocab_size", 49408)),
    }


def _transformer(config: dict[str, Json], source: str) -> Document:
    activation = str(config.get("hidden_act", "quick_gelu"))
    if activation not in _ACTIVATIONS:
        raise WeightsError(
            f"hidden_act must be one of {', '.join(_ACTIVATIONS)}, got {activation!r} in "
            f"{source!r}; register the model as an encoder of a package of yours"
        )
    epsilon = float(config.get("layer_norm_eps", _EPS))
    if epsilon != _EPS:
        raise WeightsError(
            f"layer_norm_eps must be {_EPS}, got {epsilon} in {source!r}; register the "
            "model as an encoder of a package of yours"
        )
    width = int(config["hidden_size"])
    return {
        "width": width,
        "layers": int(config.get("num_hidden_layers", 12)),
        "heads": int(config["num_attention_heads"]),
        "quick_gelu": _ACTIVATIONS[activation],
        "mlp_ratio": int(config["intermediate_size"]) / width,
    }
