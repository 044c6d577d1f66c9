"""Specs of encoders by name, including encoders that are not declared here.

For models of timm, a repository or a folder, the config gives geometry and normalisation.
Dimensions come from a forward pass on the meta device.
"""

import difflib
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from thinsection.encode.backbone import (
    CONFIG_NAME,
    build_backbone,
    needs_remote_code,
)
from thinsection.encode.registry import (
    HUB_PREFIX,
    IMAGENET_MEAN,
    IMAGENET_STD,
    TIMM_PREFIX,
    Architecture,
    EncoderSpec,
    Rgb,
    declared_encoders,
    encoder_spec,
    is_brought,
    split_input_px,
    with_input_px,
)
from thinsection.errors import (
    InvalidInputError,
    UnknownEncoderError,
    WeightsError,
    errors_of_others,
)
from thinsection.files.atomic import read_json
from thinsection.types import Document, Json, shortened
from thinsection.weights import hub
from thinsection.weights.files import WEIGHTS_FILES
from thinsection.weights.origin import commit_of
from thinsection.weights.placement import optional_package

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
PREPROCESSOR_NAME = "preprocessor_config.json"
CONFIGS = (CONFIG_NAME, OPEN_CLIP_CONFIG)  # the preferred one first
CLIP_MEAN: Rgb = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Rgb = (0.26862954, 0.26130258, 0.27577711)
# options of timm's maker of models that read files or repositories
_FOREIGN_OPTIONS = frozenset(
    (
        "checkpoint_path",
        "pretrained",
        "pretrained_cfg",
        "pretrained_cfg_overlay",
        "cache_dir",
    )
)
_PIL_BICUBIC = 3  # transformers uses the numbers of Pillow's enum


def find_spec(name: str) -> EncoderSpec:
    """Spec for a name, declared or not; for `hf:` it reads the repository's config.

    'NAME:448px' is the spec for an input of 448 px.

    Raises:
        UnknownEncoderError, MissingDependencyError: no such encoder, or a package is missing.
        WeightsError: the config is incomplete.
        InvalidInputError: the network does not take this input size.
    """
    base, input_px = split_input_px(name)
    if input_px is not None:
        if is_brought(base):
            raise InvalidInputError(
                f"encoder must be named without an input size, got {name!r}, which another package "
                "provides"
            )
        spec = find_spec(base)
        return spec if input_px == spec.input_px else _for_input(spec, input_px, name)
    if name in declared_encoders():
        return encoder_spec(name)
    remedy = "check the name, and the config.json of a checkpoint"
    with errors_of_others("encoder must be one that can be read", name, remedy):
        return _undeclared_spec(name)


def _undeclared_spec(name: str) -> EncoderSpec:
    if name.startswith(TIMM_PREFIX):
        return _timm_spec(name)
    if name.startswith(HUB_PREFIX):
        return _hub_spec(name)
    path = Path(name)
    if not path.exists():
        return encoder_spec(name)  # accepts other tools' names, or raises an error
    folder = path if path.is_dir() else path.parent
    configs = [folder / each for each in CONFIGS if (folder / each).is_file()]
    if not configs:
        raise WeightsError(
            f"checkpoint must have a {CONFIG_NAME} in its folder, got none for {name!r}; add "
            'it, or name the architecture: encoder="uni", weights=...'
        )
    return replace(_folder_spec(folder.resolve().name, configs[0]), repo=None)


def _for_input(spec: EncoderSpec, input_px: int, name: str) -> EncoderSpec:
    """Spec for another input size, if a pass without data shows that the network allows it.

    A position table keeps the size of its weights; timm interpolates it in each pass.
    """
    if needs_remote_code(spec):
        raise InvalidInputError(
            f"encoder must be named without an input size, got {name!r}, whose code is in its "
            "repository"
        )
    resized = with_input_px(spec, input_px)
    candidates = [resized]
    if spec.architecture.kind == "timm":
        options = {**spec.architecture.options, "dynamic_img_size": True}
        architecture = replace(spec.architecture, options=options)
        candidates.insert(0, replace(resized, architecture=architecture))
    for candidate in candidates:
        reason = _why_not(candidate)
        if not reason:
            return candidate
    raise InvalidInputError(
        f"input size of {spec.name!r} must be one that its network takes, got {input_px} px in "
        f"{name!r}: {reason}; its authors use {spec.input_px} px"
    )


def _why_not(spec: EncoderSpec) -> str:
    """Reason why the network does not take its input size; '' if it does."""
    try:
        with errors_of_others("network must take its input", spec.name, ""):
            backbone = build_backbone(spec, device="meta").eval()
            edge = spec.input_px
            with torch.no_grad():
                backbone(torch.empty(1, 3, edge, edge, device="meta"))
    except WeightsError as error:
        return str(error.__cause__ or error).splitlines()[0]
    return ""


def _timm_spec(name: str) -> EncoderSpec:
    timm = optional_package("timm")
    model = name.removeprefix(TIMM_PREFIX)
    if not timm.is_model(model):
        near = difflib.get_close_matches(model, timm.list_models(), n=1, cutoff=0.4)
        hint = f"; did you mean 'timm:{near[0]}'?" if near else ""
        raise UnknownEncoderError(
            f"encoder must be a model of timm, got {name!r}{hint}"
        )
    architecture, _, tag = model.partition(".")
    if tag and model not in timm.list_models(f"{architecture}.*", pretrained=True):
        tags = timm.list_models(f"{architecture}.*", pretrained=True)
        raise UnknownEncoderError(
            f"encoder must be a model of timm with published weights, got {name!r}; timm has "
            f"{shortened(tags)}; random weights are 'timm:{architecture}' with pretrained=False"
        )
    published = timm.get_pretrained_cfg(model)
    return _from_timm(name, model, {}, published.to_dict() if published else {})


def _hub_spec(name: str) -> EncoderSpec:
    """Spec of 'hf:owner/name' or 'hf:owner/name@REVISION', at one commit."""
    repo, _, revision = name.removeprefix(HUB_PREFIX).partition("@")
    config_path = hub.hub_file(repo, CONFIGS, revision=revision or None)
    commit = commit_of(config_path) or revision or None
    if _is_transformers(_read_json(config_path)):
        # another file describes the preprocessing
        hub.hub_file(repo, (PREPROCESSOR_NAME,), revision=commit)
    return replace(_folder_spec(name, config_path), repo=repo, revision=commit)


def _folder_spec(name: str, config_path: Path) -> EncoderSpec:
    """Spec of a model from its config, in the format of timm, transformers or open_clip."""
    config = _read_json(config_path)
    if config_path.name == OPEN_CLIP_CONFIG:
        return _from_open_clip(name, config, str(config_path))
    if _is_transformers(config):
        return _from_transformers(name, config, config_path.parent)
    if "architecture" not in config:
        raise WeightsError(
            f"config must be in the form of timm or transformers, got {str(config_path)!r} "
            "without 'architecture' or 'model_type'"
        )
    options = dict(config.get("model_args", {}))
    published = config.get("pretrained_cfg", {})
    return _from_timm(name, config["architecture"], options, published)


def _is_transformers(config: Document) -> bool:
    return "model_type" in config and "architecture" not in config


def _read_json(path: Path) -> Document:
    try:
        loaded = read_json(path)
    except ValueError as error:
        raise WeightsError(
            f"config must be JSON, got {str(path)!r}: {error}"
        ) from error
    if not isinstance(loaded, dict):
        raise WeightsError(f"config must be a JSON object, got {str(path)!r}")
    return loaded


def _from_timm(
    name: str, model: str, options: Document, published: Document
) -> EncoderSpec:
    """Spec of a timm model with its published config.

    Raises:
        WeightsError: timm declares no such model, or an option names a file or a repository.
    """
    if not isinstance(model, str) or not optional_package("timm").is_model(model):
        raise WeightsError(
            f"architecture must be a model of timm, got {model!r} in {name!r}"
        )
    foreign = sorted(_FOREIGN_OPTIONS & options.keys())
    if foreign:
        raise WeightsError(
            f"model_args must be of the architecture, got {foreign[0]!r} in {name!r}"
        )
    input_px = int((published.get("input_size") or (3, 224, 224))[1])
    resize_px = math.floor(input_px / float(published.get("crop_pct") or 1.0))
    is_bilinear = published.get("interpolation") == "bilinear"
    spec = EncoderSpec(
        name=name,
        dim=0,
        architecture=Architecture(kind="timm", model=model, options=options),
        tile_px=resize_px,
        tile_mpp=None,
        input_px=input_px,
        resize_px=resize_px,
        interpolation="bilinear" if is_bilinear else "bicubic",
        mean=_rgb(published.get("mean") or IMAGENET_MEAN),
        std=_rgb(published.get("std") or IMAGENET_STD),
        pooling="head",
        licence=str(published.get("license") or "unknown"),
        source=f"timm {model}",
        repo=_hub_id(published),
        weights_files=WEIGHTS_FILES,
    )
    # dimension and kind of features of the actual network
    backbone = build_backbone(spec, device="meta").eval()
    with torch.no_grad():
        pixels = torch.empty(1, 3, input_px, input_px, device="meta")
        features = backbone.features(pixels)
        dim = backbone.head(features).shape[1]
    return replace(
        spec,
        dim=dim,
        supports_tokens=features.ndim in (3, 4),
        # transformers keep a cosine >= 0.9999, batch norm does not
        half_precision=features.ndim == 3,
    )


def _hub_id(published: Document) -> str | None:
    """Repository of timm's weights; one that ends in '/' is completed by the model's name."""
    hub_id = published.get("hf_hub_id")
    if not hub_id:
        return None
    if not hub_id.endswith("/"):
        return str(hub_id)
    tag = published.get("tag")
    return f"{hub_id}{published['architecture']}" + (f".{tag}" if tag else "")


def _from_transformers(name: str, config: Document, folder: Path) -> EncoderSpec:
    """Spec of a model in transformers' format, whose folder defines the normalisation of pixels."""
    path = folder / PREPROCESSOR_NAME
    pixels = _read_json(path) if path.is_file() else {}
    is_normalised = pixels.get("image_mean") and pixels.get("image_std")
    is_clip = config["model_type"] == "clip"
    if not is_normalised or not ("hidden_size" in config or is_clip):
        raise WeightsError(
            "checkpoint must state hidden_size, image_mean and image_std in config.json and "
            f"{PREPROCESSOR_NAME}, got {name!r} without them; add the values that its publisher "
            "used"
        )
    size: Json = pixels.get("size", config.get("image_size", 224))
    resize_px: Json = size
    if not isinstance(size, int):
        resize_px = size.get("shortest_edge", size.get("height"))
    crop: Json = resize_px
    if pixels.get("do_center_crop"):
        crop = pixels.get("crop_size", resize_px)
    is_bicubic = pixels.get("resample") == _PIL_BICUBIC
    architecture = Architecture(
        kind="auto",
        model=str(folder),
        options={"runs_own_code": "auto_map" in config},
    )
    dim = config.get("hidden_size", 0)
    if is_clip:
        options = from_transformers_clip(config, str(folder))
        architecture = Architecture(kind="clip", model=name, options=options)
        dim = options["embed_dim"]
    return EncoderSpec(
        name=name,
        dim=int(dim),
        architecture=architecture,
        tile_px=int(resize_px),
        tile_mpp=None,
        input_px=int(crop if isinstance(crop, int) else crop["height"]),
        resize_px=int(resize_px),
        interpolation="bicubic" if is_bicubic else "bilinear",
        mean=_rgb(pixels["image_mean"]),
        std=_rgb(pixels["image_std"]),
        pooling="head" if is_clip else "cls",
        half_precision=True,
        source=f"transformers {config['model_type']}",
        weights_files=(*WEIGHTS_FILES, *OPEN_CLIP_FILES) if is_clip else WEIGHTS_FILES,
    )


def _from_open_clip(name: str, config: Document, source: str) -> EncoderSpec:
    """Spec of a CLIP model in open_clip's format; without its own pixels, those of CLIP."""
    options = from_open_clip(config, source)
    pixels: Document = config.get("preprocess_cfg") or {}
    input_px = options["image_px"]
    is_bilinear = pixels.get("interpolation") == "bilinear"
    return EncoderSpec(
        name=name,
        dim=options["embed_dim"],
        architecture=Architecture(kind="clip", model=name, options=options),
        tile_px=input_px,
        tile_mpp=None,
        input_px=input_px,
        resize_px=input_px,
        interpolation="bilinear" if is_bilinear else "bicubic",
        mean=_rgb(pixels.get("mean") or CLIP_MEAN),
        std=_rgb(pixels.get("std") or CLIP_STD),
        pooling="head",
        half_precision=True,
        source="open_clip",
        weights_files=(*OPEN_CLIP_FILES, *WEIGHTS_FILES),
    )


def _rgb(values: Sequence[float]) -> Rgb:
    red, green, blue = map(float, values)
    return red, green, blue


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
            "register the model as an encoder in a package of your own"
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
            f"{source!r}; register the model as an encoder in a package of your own"
        )
    epsilon = float(config.get("layer_norm_eps", _EPS))
    if epsilon != _EPS:
        raise WeightsError(
            f"layer_norm_eps must be {_EPS}, got {epsilon} in {source!r}; register the "
            "model as an encoder in a package of your own"
        )
    width = int(config["hidden_size"])
    return {
        "width": width,
        "layers": int(config.get("num_hidden_layers", 12)),
        "heads": int(config["num_attention_heads"]),
        "quick_gelu": _ACTIVATIONS[activation],
        "mlp_ratio": int(config["intermediate_size"]) / width,
    }
