"""Specs of models that nobody declared here: any timm name, any repository or folder with a config.

What their own configuration says of geometry and normalisation is taken over; what they do not say
(licence, µm/px) stays open. Dimensions come from a forward pass on the meta device.
"""

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from thinsection.encode.backbone import build_backbone
from thinsection.encode.spec import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Architecture,
    EncoderSpec,
    Rgb,
)
from thinsection.errors import UnknownEncoderError, WeightsError
from thinsection.weights.files import WEIGHTS_FILES
from thinsection.weights.packages import optional_package

PREPROCESSOR_NAME = "preprocessor_config.json"
_PIL_BICUBIC = 3  # transformers writes Pillow's enum


def timm_spec(name: str) -> EncoderSpec:
    """Spec of a timm model by its timm name.

    Raises:
        MissingDependencyError: timm is not installed.
        UnknownEncoderError: timm has no model of that name; the nearest is named.
    """
    timm = optional_package("timm")
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=1, cutoff=0.4)
        hint = f"; did you mean 'timm:{near[0]}'?" if near else ""
        raise UnknownEncoderError(f"encoder must be a timm model, got 'timm:{name}'{hint}")
    published = timm.get_pretrained_cfg(name)
    spec = _from_timm_config(f"timm:{name}", name, {}, published.to_dict() if published else {})
    return _measured(spec)


def folder_spec(name: str, config_path: Path) -> EncoderSpec:
    """Spec of a model from its `config.json`, of timm's or of transformers' form.

    Args:
        name: what the encoder is to be called.
        config_path: the config.json; transformers' preprocessor_config.json is read beside it.

    Raises:
        WeightsError: the file is of neither form.
    """
    config = _read_json(config_path)
    if "architecture" in config:
        options = dict(config.get("model_args", {}))
        return _measured(
            _from_timm_config(
                name, config["architecture"], options, config.get("pretrained_cfg", {})
            )
        )
    if "model_type" in config:
        return _from_transformers_config(name, config, config_path.parent)
    raise WeightsError(
        f"config must be of timm's or transformers' form, got {str(config_path)!r} "
        "without 'architecture' or 'model_type'"
    )


def is_transformers_config(config_path: Path) -> bool:
    """Whether a config.json is of transformers' form rather than timm's."""
    config = _read_json(config_path)
    return "model_type" in config and "architecture" not in config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise WeightsError(f"config must be JSON, got {str(path)!r}: {error}") from error
    if not isinstance(loaded, dict):
        raise WeightsError(f"config must be a JSON object, got {str(path)!r}")
    return loaded


def _from_timm_config(
    name: str, model: str, options: Mapping[str, Any], published: Mapping[str, Any]
) -> EncoderSpec:
    input_px = int((published.get("input_size") or (3, 224, 224))[1])
    resize_px = math.floor(input_px / float(published.get("crop_pct") or 1.0))
    hub_id = published.get("hf_hub_id")
    if hub_id and hub_id.endswith("/"):
        tag = published.get("tag")
        hub_id += f"{published['architecture']}.{tag}" if tag else published["architecture"]
    return EncoderSpec(
        name=name,
        dim=0,
        architecture=Architecture(kind="timm", model=model, options=options),
        tile_px=resize_px,
        tile_mpp=None,
        input_px=input_px,
        resize_px=resize_px,
        interpolation="bilinear" if published.get("interpolation") == "bilinear" else "bicubic",
        mean=_rgb(published.get("mean"), IMAGENET_MEAN),
        std=_rgb(published.get("std"), IMAGENET_STD),
        pooling="head",
        licence=str(published.get("license") or "unknown"),
        source=f"timm {model}",
        repo=hub_id or None,
        weights_files=WEIGHTS_FILES,
    )


def _from_transformers_config(name: str, config: Mapping[str, Any], folder: Path) -> EncoderSpec:
    path = folder / PREPROCESSOR_NAME
    shown = _read_json(path) if path.is_file() else {}
    if not shown.get("image_mean") or not shown.get("image_std") or "hidden_size" not in config:
        raise WeightsError(
            "checkpoint must say its hidden_size, image_mean and image_std in config.json and "
            f"{PREPROCESSOR_NAME}, got {name!r} without; add them as its publisher used them"
        )
    size = shown.get("size", config.get("image_size", 224))
    resize_px = size if isinstance(size, int) else size.get("shortest_edge", size.get("height"))
    crop = shown.get("crop_size", resize_px) if shown.get("do_center_crop") else resize_px
    input_px = crop if isinstance(crop, int) else crop["height"]
    return EncoderSpec(
        name=name,
        dim=int(config["hidden_size"]),
        architecture=Architecture(
            kind="auto", model=str(folder), options={"runs_own_code": "auto_map" in config}
        ),
        tile_px=int(resize_px),
        tile_mpp=None,
        input_px=int(input_px),
        resize_px=int(resize_px),
        interpolation="bicubic" if shown.get("resample") == _PIL_BICUBIC else "bilinear",
        mean=_rgb(shown["image_mean"], IMAGENET_MEAN),
        std=_rgb(shown["image_std"], IMAGENET_STD),
        source=f"transformers {config['model_type']}",
        weights_files=WEIGHTS_FILES,
    )


def _rgb(values: Any, default: Rgb) -> Rgb:
    if values is None:
        return default
    red, green, blue = (float(v) for v in values)
    return (red, green, blue)


def _measured(spec: EncoderSpec) -> EncoderSpec:
    """The spec with the dimension and the kind of features that the network really has."""
    backbone = build_backbone(spec, device="meta").eval()
    with torch.no_grad():
        pixels = torch.empty(1, 3, spec.input_px, spec.input_px, device="meta")
        features = backbone.features(pixels)
        dim = backbone.head(features).shape[1]
    return dataclasses.replace(
        spec,
        dim=dim,
        supports_tokens=features.ndim in (3, 4),
        half_precision=features.ndim == 3,  # transformers keep a cosine >= 0.9999, batch norm not
    )
