"""`load_encoder`: from a name to an encoder that is ready to run; and whether it would load here.

Models that nobody declared here (of timm, a repository, a folder) say their geometry and
normalisation in a config; dimensions come from a forward pass on the meta device.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import psutil
import torch

from thinsection import errors
from thinsection.encode import registry
from thinsection.encode.backbone import (
    CONFIG_NAME,
    Backbone,
    build_backbone,
    pretrained_backbone,
)
from thinsection.encode.encoder import NetworkTileEncoder, TileEncoder
from thinsection.encode.engine import EngineChoice, why_torch
from thinsection.encode.registry import (
    ENCODERS,
    EncoderSpec,
    declared_encoders,
    encoder_spec,
)
from thinsection.errors import require
from thinsection.files.json_text import read_json
from thinsection.types import format_bytes
from thinsection.weights import hub
from thinsection.weights.files import WEIGHTS_FILES, files_of
from thinsection.weights.origin import Origin
from thinsection.weights.placement import (
    is_installed,
    optional_package,
    place,
    resolve_device,
)

PREPROCESSOR_NAME = "preprocessor_config.json"
_PIL_BICUBIC = 3  # transformers writes Pillow's enum


def load_encoder(
    name: str,
    *,
    device: str | torch.device = "auto",
    precision: str = "auto",
    weights: str | Path | None = None,
    pretrained: bool = True,
    allow_remote_code: bool = False,
    seed: int = 0,
    engine: EngineChoice = "auto",
) -> TileEncoder:
    """The encoder of that name, on its device, with its weights.

    Args:
        name: a registry name, `timm:<name>`, `hf:<repo>[@<revision>]`, the path of a checkpoint
            with its config.json, or the name of an encoder that another package brings.
        device, precision: auto, cpu, cuda, cuda:N or mps; auto, fp32, fp16 or bf16.
        weights: in place of the published ones: a file, a folder, or `owner/name@COMMIT`.
        pretrained: False: seeded random weights, no download.
        allow_remote_code: whether code from the hub may run, for the models that need it.
        seed: of the random weights.
        engine: what computes on a CPU: torch, openvino, or auto: openvino where it is installed
            and its answers are PyTorch's; for random weights torch. `encoder.engine` says why not.

    Memory: the weights once, in float32; twice while OpenVINO puts them into its own order.
    Raises UnknownEncoderError, DeviceError, MissingDependencyError; WeightsError: the weights
    cannot be had, may not be used, or do not fit.
    """
    known = name in ENCODERS
    local = Path(name) if not known and Path(name).exists() else None
    own = weights is not None or local is not None
    origin = Origin(own_weights=own, seed=None if pretrained else seed)
    if known and name not in declared_encoders():
        rule = f"engine must be auto or torch for {name!r}, which is another package's"
        require(engine != "openvino", rule, repr(engine))
        options = {"weights": weights, "pretrained": pretrained, "seed": seed}
        brought = ENCODERS.load(name)(**place(device, precision)._asdict(), **options)
        rule, got = (
            f"entry point {name!r} must give a TileEncoder",
            type(brought).__name__,
        )
        require(isinstance(brought, TileEncoder), rule, f"{got}; subclass TileEncoder")
        brought.origin = replace(origin, name=name)
        return cast(TileEncoder, brought)
    spec = find_spec(name)
    placement = place(device, precision, half_precision=spec.half_precision)
    # of a file its stem, unless that says nothing; else the folder's name
    by_stem = local is not None and local.is_file() and local.name not in WEIGHTS_FILES
    origin = replace(origin, name=Path(name).stem if by_stem else spec.name)

    def on_torch() -> NetworkTileEncoder:
        if not pretrained:
            fixed = not local and not name.startswith(registry.HUB_PREFIX)
            random = replace(origin, files=() if fixed else None)
            return NetworkTileEncoder(
                spec, build_backbone(spec, seed=seed), placement, random
            )
        source = local if weights is None else weights
        backbone, read = _pretrained(
            spec, name, source, allow_remote_code=allow_remote_code
        )
        return NetworkTileEncoder(spec, backbone, placement, replace(origin, **read))

    return _on_engine(on_torch, engine, is_random=not pretrained)


def _pretrained(
    spec: EncoderSpec, name: str, source: str | Path | None, *, allow_remote_code: bool
) -> tuple[Backbone, dict[str, Any]]:
    """The network with its weights; their commit, and their files where these alone decide."""
    given = (
        None if source is None else hub.find_weights(source, files=spec.weights_files)
    )
    backbone, path = pretrained_backbone(
        spec, given, allow_remote_code=allow_remote_code
    )
    commit = spec.revision if path is None else None if given else hub.commit_of(path)
    moves = name.startswith(registry.HUB_PREFIX) and str(commit) not in name
    pinned = given or (spec.revision == commit and not moves)
    return backbone, {
        "revision": commit,
        "files": files_of(path) if path and pinned else None,
    }


def _on_engine(
    on_torch: Callable[[], NetworkTileEncoder], engine: EngineChoice, *, is_random: bool
) -> NetworkTileEncoder:
    """The encoder, run by the engine that was asked for; with 'auto' it says what it refused."""
    encoder = on_torch()
    refused = why_torch(engine, encoder.device, is_random=is_random)
    if engine == "torch" or encoder.device.type != "cpu":
        return encoder
    if not refused:
        try:
            check = encoder.to_openvino()
            if check.passes(encoder.precision):
                return encoder
            refused = f"too far from torch: {check}"
        except (
            errors.InvalidInputError,
            errors.StoreError,
            OSError,
            RuntimeError,
        ) as error:
            refused = str(error).splitlines()[0]
        if engine == "openvino":
            got = f"openvino for {encoder.spec.name!r} in {encoder.precision}"
            raise errors.InvalidInputError(
                f"engine must be torch here, got {got}: {refused}"
            )
        encoder = on_torch()  # its weights were let go of
    encoder.engine += f" (not openvino: {refused})"
    return encoder


def find_spec(name: str) -> EncoderSpec:
    """The spec of a name, declared or not; `hf:` reads the repository's config."""
    path = Path(name)
    if name in declared_encoders():
        return encoder_spec(name)
    if name.startswith(registry.TIMM_PREFIX):
        return _timm_spec(name)
    if name.startswith(registry.HUB_PREFIX):
        repo, _, revision = name.removeprefix(registry.HUB_PREFIX).partition("@")
        config = hub.hub_file(repo, (CONFIG_NAME,), revision=revision or None)
        commit = hub.commit_of(config) or revision or None
        if _is_transformers(
            _read_json(config)
        ):  # it says nothing of pixels: another file does
            hub.hub_file(repo, (PREPROCESSOR_NAME,), revision=commit)
        return replace(_folder_spec(name, config), repo=repo, revision=commit)
    if not path.exists():
        return encoder_spec(name)  # raises
    config = (path if path.is_dir() else path.parent) / CONFIG_NAME
    remedy = "name its architecture: load_encoder('uni', weights=...) (--encoder uni --weights ...)"
    rule = f"checkpoint must have a {CONFIG_NAME} beside it"
    require(config.is_file(), rule, f"{name!r}; or {remedy}", error=errors.WeightsError)
    return replace(_folder_spec(config.parent.resolve().name, config), repo=None)


def _timm_spec(name: str) -> EncoderSpec:
    timm, model = optional_package("timm"), name.removeprefix(registry.TIMM_PREFIX)
    if not timm.is_model(model):
        near = difflib.get_close_matches(model, timm.list_models(), n=1, cutoff=0.4)
        hint = f"; did you mean 'timm:{near[0]}'?" if near else ""
        raise errors.UnknownEncoderError(
            f"encoder must be a timm model, got {name!r}{hint}"
        )
    published = timm.get_pretrained_cfg(model)
    return _from_timm(name, model, {}, published.to_dict() if published else {})


def _folder_spec(name: str, config_path: Path) -> EncoderSpec:
    """Spec of a model from its config.json, of timm's form or of transformers'."""
    config = _read_json(config_path)
    if _is_transformers(config):
        return _from_transformers(name, config, config_path.parent)
    rule = "config must be of timm's or transformers' form"
    got = f"{str(config_path)!r} without 'architecture' or 'model_type'"
    require("architecture" in config, rule, got, error=errors.WeightsError)
    options, published = (
        dict(config.get("model_args", {})),
        config.get("pretrained_cfg", {}),
    )
    return _from_timm(name, config["architecture"], options, published)


def _is_transformers(config: Mapping[str, Any]) -> bool:
    return "model_type" in config and "architecture" not in config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = read_json(path)
    except ValueError as error:
        raise errors.WeightsError(
            f"config must be JSON, got {str(path)!r}: {error}"
        ) from error
    is_object = isinstance(loaded, dict)
    require(
        is_object,
        "config must be a JSON object",
        repr(str(path)),
        error=errors.WeightsError,
    )
    return cast(dict[str, Any], loaded)


def _from_timm(
    name: str, model: str, options: Mapping[str, Any], published: Mapping[str, Any]
) -> EncoderSpec:
    input_px = int((published.get("input_size") or (3, 224, 224))[1])
    resize_px = math.floor(input_px / float(published.get("crop_pct") or 1.0))
    hub_id, tag = published.get("hf_hub_id"), published.get("tag")
    if hub_id and hub_id.endswith("/"):
        hub_id += published["architecture"] + (f".{tag}" if tag else "")
    known: dict[str, Any] = {"name": name, "input_px": input_px, "tile_mpp": None}
    known |= {
        "tile_px": resize_px,
        "resize_px": resize_px,
        "weights_files": WEIGHTS_FILES,
    }
    known |= {
        "dim": 0,
        "pooling": "head",
        "source": f"timm {model}",
        "repo": hub_id or None,
    }
    spec = EncoderSpec(
        **known,
        architecture=registry.Architecture(kind="timm", model=model, options=options),
        interpolation="bilinear"
        if published.get("interpolation") == "bilinear"
        else "bicubic",
        mean=_rgb(published.get("mean") or registry.IMAGENET_MEAN),
        std=_rgb(published.get("std") or registry.IMAGENET_STD),
        licence=str(published.get("license") or "unknown"),
    )
    # the dimension and the kind of features that the network really has
    backbone = build_backbone(spec, device="meta").eval()
    with torch.no_grad():
        features = backbone.features(
            torch.empty(1, 3, input_px, input_px, device="meta")
        )
        dim = backbone.head(features).shape[1]
    tokens = features.ndim in (3, 4)
    # half precision: transformers keep a cosine >= 0.9999, batch norm does not
    return replace(
        spec, dim=dim, supports_tokens=tokens, half_precision=features.ndim == 3
    )


def _from_transformers(
    name: str, config: Mapping[str, Any], folder: Path
) -> EncoderSpec:
    path = folder / PREPROCESSOR_NAME
    shown = _read_json(path) if path.is_file() else {}
    said = (
        shown.get("image_mean") and shown.get("image_std") and "hidden_size" in config
    )
    rule = "checkpoint must say its hidden_size, image_mean and image_std in config.json and "
    got = f"{name!r} without; add them as its publisher used them"
    require(said, rule + PREPROCESSOR_NAME, got, error=errors.WeightsError)
    size = shown.get("size", config.get("image_size", 224))
    resize_px = (
        size if isinstance(size, int) else size.get("shortest_edge", size.get("height"))
    )
    crop = (
        shown.get("crop_size", resize_px) if shown.get("do_center_crop") else resize_px
    )
    options = {"runs_own_code": "auto_map" in config}
    known: dict[str, Any] = {
        "name": name,
        "tile_mpp": None,
        "weights_files": WEIGHTS_FILES,
    }
    known |= {"tile_px": int(resize_px), "resize_px": int(resize_px)}
    known |= {"input_px": int(crop if isinstance(crop, int) else crop["height"])}
    return EncoderSpec(
        **known,
        dim=int(config["hidden_size"]),
        architecture=registry.Architecture(
            kind="auto", model=str(folder), options=options
        ),
        interpolation="bicubic"
        if shown.get("resample") == _PIL_BICUBIC
        else "bilinear",
        mean=_rgb(shown["image_mean"]),
        std=_rgb(shown["image_std"]),
        source=f"transformers {config['model_type']}",
    )


def _rgb(values: Any) -> registry.Rgb:
    red, green, blue = map(float, values)
    return red, green, blue


@dataclass(frozen=True, slots=True)
class Check:
    """One condition for loading."""

    name: str  # declared, packages, weights, device or memory
    ok: bool
    detail: str  # what was found, and what to do where it does not hold


def check_encoder(name: str, *, device: str = "auto") -> tuple[Check, ...]:
    """What loading needs, in the order in which it would fail; later ones only if those hold."""
    if name not in declared_encoders() and name in ENCODERS:
        return (_brought(name),)
    try:
        spec = find_spec(name)
    except (errors.MissingDependencyError, errors.WeightsError) as error:
        return (Check("declared", False, str(error)),)
    found = Check("declared", True, f"{spec.source}; licence {spec.licence}")
    if missing := [package for package in spec.needs if not is_installed(package)]:
        detail = f"not installed: {', '.join(missing)}; pip install 'thinsection[hub]'"
        return (found, Check("packages", False, detail))
    packages = Check(
        "packages", True, ", ".join(spec.needs) or "none beyond thinsection's"
    )
    checks = (found, packages, Check("weights", *_weights(spec)))
    try:
        where = resolve_device(device)
    except errors.DeviceError as error:
        return (*checks, Check("device", False, str(error)))
    return (
        *checks,
        Check("device", True, str(where)),
        Check("memory", *_memory(spec, where)),
    )


def _brought(name: str) -> Check:
    try:
        entry = ENCODERS.entry(name)
    except errors.InvalidInputError as error:
        return Check("declared", False, str(error))
    detail = f"brought by another package: {entry.help}"
    if entry.missing:
        detail = f"not installed: {', '.join(entry.missing)}; {entry.remedy}"
    return Check("declared", not entry.missing, detail)


def _weights(spec: EncoderSpec) -> tuple[bool, str]:
    if spec.architecture.kind == "lite0":
        return True, "in the package efficientnet_lite0"
    if spec.repo is None:
        return True, "in the checkpoint's own folder"
    for filename in spec.weights_files:
        if path := hub.cached_file(spec.repo, filename, spec.revision):
            return True, f"cached at {path}"
    constants = hub.hub_library().constants
    page = f"{constants.ENDPOINT}/{spec.repo}"
    fetch = hub.fetch_command(spec.repo, spec.weights_files[0], spec.revision)
    if constants.HF_HUB_OFFLINE:
        return (
            False,
            f"not cached, and HF_HUB_OFFLINE is set; fetch them elsewhere: {fetch}",
        )
    if spec.gated and not hub.has_token():
        return (
            False,
            f"gated: accept the terms at {page}, then set HF_TOKEN or run: hf auth login",
        )
    if not hub.is_reachable(constants.ENDPOINT):
        why = f"not cached, and {constants.ENDPOINT} does not answer"
        return False, f"{why}; fetch elsewhere: {fetch}"
    access = "; the token's account must have been granted access" if spec.gated else ""
    return True, f"would be downloaded from {page}{access}"


def _memory(spec: EncoderSpec, where: torch.device) -> tuple[bool, str]:
    on_cuda = where.type == "cuda"
    free = (
        torch.cuda.mem_get_info(where)[0]
        if on_cuda
        else psutil.virtual_memory().available
    )
    if spec.num_params is None:
        return True, f"{format_bytes(free)} free on {where}"
    needed = 4 * spec.num_params  # float32
    detail = (
        f"weights take {format_bytes(needed)}, {format_bytes(free)} are free on {where}"
    )
    return needed <= free, detail
