"""Comparison of an encoder's embedding of the drawn tile with its fingerprint.

Where they differ, the usual faults are tried one by one: the embedding is computed again with each
of them, and the fault that gives the fingerprint's embedding is the reason. A fault that gives the
fingerprint's embedding to within the tolerance is proved; any other reason is not stated.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from thinsection.config import from_mapping, user_cache_dir
from thinsection.encode.base import TileEncoder
from thinsection.encode.encoder import NetworkTileEncoder
from thinsection.encode.fingerprint import (
    TILE_SHA256,
    Fingerprint,
    Maker,
    Vector,
    drawn_tile,
    encoded_vector,
    find_fingerprint,
)
from thinsection.encode.registry import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    EncoderSpec,
    Interpolation,
    declared_encoders,
)
from thinsection.encode.specs import CLIP_MEAN, CLIP_STD
from thinsection.errors import ConfigError, WeightsError
from thinsection.files.atomic import read_json, write_json
from thinsection.machine import cpu_model
from thinsection.types import RgbArray
from thinsection.weights.origin import installed_version

# Largest difference of two embeddings by one rule, as a share of the embedding's range. Measured on
# trained EfficientNet-Lite0 and seeded vision transformers, see docs/validation/encoders.md:
# OpenVINO stays below 2e-6 in fp32, the smallest usual fault (interpolation) is above 2e-3; bf16
# stays below 0.06. FP8 stays below 0.07; its faults are looked for in fp32, before the rounding.
TOLERANCE = {"fp32": 5e-4, "fp16": 0.02, "bf16": 0.1, "fp8": 0.2}
# packages that may change an embedding
_PACKAGES = ("timm", "transformers", "torch")
_STATED_VERSION = re.compile(rf"\b({'|'.join(_PACKAGES)})[ =]+(\d[\w.+]*\w)")
_NORMALISATIONS = {
    "ImageNet's mean and std": (IMAGENET_MEAN, IMAGENET_STD),
    "mean and std of 0.5": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "CLIP's mean and std": (CLIP_MEAN, CLIP_STD),
    "no mean and std": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}
_POOLINGS = {
    "cls": "the class token",
    "mean": "the mean of the patch tokens",
    "cls_mean": "the class token with the mean of the patch tokens",
    "head": "the network's own pooling",
}
_RESAMPLING = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Result of one comparison with a fingerprint."""

    cosine: float
    difference: float  # largest difference, as a share of the fingerprint's range
    precision: str
    engine: str
    maker: str  # whose code made the fingerprint
    # True if the embedding agrees with Pillow's resize, which differs from torch's by a grey level
    is_pillow: bool = False
    # what explains a disagreement; '' if the embeddings agree
    reason: str = ""

    @property
    def agrees(self) -> bool:
        """True if the embedding is the fingerprint's, within the tolerance of the precision."""
        return not self.reason

    def __str__(self) -> str:
        verb = "agree" if self.agrees else "do not agree"
        resize = " with Pillow's resize" if self.is_pillow else ""
        figures = (
            f"{self.cosine:.4f} (largest difference {self.difference:.1e} of the range{resize}, "
            f"{self.precision}, {self.engine})"
        )
        line = f"embeddings {verb} with {self.maker}: {figures}"
        return line if self.agrees else f"{line}; {self.reason}"


@dataclass(frozen=True)
class _Fault:
    """A rule of preprocessing that gives other embeddings."""

    name: str
    tile: RgbArray
    spec: EncoderSpec


def prove(encoder: TileEncoder) -> None:
    """Compares a loaded encoder with its fingerprint, and records the result in the encoder.

    The comparison is computed once for these weights, versions and this machine.

    Raises:
        WeightsError: the embeddings do not agree.
    """
    if not isinstance(encoder, NetworkTileEncoder) or encoder.origin.seed is not None:
        return
    fingerprint = find_fingerprint(encoder.spec.name)
    if fingerprint is None:
        return
    declared = declared_encoders().get(encoder.spec.name)
    if declared is not None and declared.input_px != encoder.spec.input_px:
        encoder.fingerprint = "none of this input size"
        return
    if fingerprint.weights != encoder.weights_hash:
        encoder.fingerprint = "none of these weights"
        return
    agreement = _known_agreement(encoder, fingerprint)
    if not agreement.agrees:
        raise WeightsError(
            f"encoder {encoder.spec.name!r} must give the embedding of its fingerprint, got: "
            f"{agreement}"
        )
    encoder.fingerprint = str(agreement)


def _known_agreement(
    encoder: NetworkTileEncoder, fingerprint: Fingerprint
) -> Agreement:
    parts = [
        fingerprint.to_toml(),
        encoder.identity,
        encoder.spec.pooling,
        str(encoder.spec.architecture),
        encoder.engine,
        encoder.device.type,
        cpu_model(),
        [installed_version(name) for name in ("thinsection", *_PACKAGES)],
    ]
    digest = sha256(json.dumps(parts).encode()).hexdigest()[:32]
    path = user_cache_dir() / "agreements" / f"{digest}.json"
    with suppress(OSError, ValueError, ConfigError):
        return from_mapping(Agreement, read_json(path))
    agreement = compare(encoder, fingerprint)
    if agreement.agrees:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, asdict(agreement))
    return agreement


def make_fingerprint(
    encoder: NetworkTileEncoder,
    *,
    embedding: Vector | None = None,
    code: str = "",
    made_by_authors: bool = True,
    who: str = "",
) -> Fingerprint:
    """Fingerprint of a loaded encoder.

    Args:
        encoder: encoder whose weights are named; it computes the embedding if none is given.
        embedding: embedding of the drawn tile by other code, (D,).
        code: that code, with its version or commit, and the versions of its packages if they
            matter: "model card, timm 1.0.31".
        made_by_authors: True if it is the code of the encoder's authors.
        who: person and date.
    """
    if embedding is None:
        vector = encoder.encode(drawn_tile()[None])[0].cpu().numpy()
        code = f"thinsection {installed_version('thinsection')}"
    else:
        vector = embedding
    versions = [each for each in _installed() if not each.endswith(" ")]
    if embedding is not None:
        # those of the other code, as far as it is said; the ones here are not its own
        versions = [match[0] for match in _STATED_VERSION.finditer(code)]
    made_by: Maker = "authors" if made_by_authors else "port"
    return Fingerprint(
        encoder=encoder.spec.name,
        made_by="thinsection" if embedding is None else made_by,
        code=code,
        who=who,
        weights=encoder.weights_hash,
        repo=encoder.spec.repo or "",
        revision=encoder.origin.revision or "",
        versions=", ".join(versions),
        preprocessing=json.dumps(encoder.spec.preprocessing),
        pooling=encoder.spec.pooling,
        tile=TILE_SHA256,
        embedding=encoded_vector(vector),
    )


def compare(encoder: NetworkTileEncoder, fingerprint: Fingerprint) -> Agreement:
    """Comparison of the encoder's embedding of the drawn tile with the fingerprint's."""
    expected = torch.from_numpy(fingerprint.vector.copy()).double()
    tolerance = TOLERANCE[encoder.precision]
    figures = []
    for tile in _both_resizes(drawn_tile(), encoder.spec):
        figures.append(distance(_embedding(encoder, tile), expected))
        if figures[-1][1] <= tolerance:
            break
    cosine, difference = figures[-1]
    reason = ""
    if difference > tolerance:
        cosine, difference = figures[0]
        reason = _reason(encoder, fingerprint, expected)
    return Agreement(
        cosine=cosine,
        difference=difference,
        precision=encoder.precision,
        engine=encoder.engine,
        maker=fingerprint.maker,
        is_pillow=len(figures) > 1 and not reason,
        reason=reason,
    )


def unnoticed_faults(encoder: NetworkTileEncoder) -> list[str]:
    """Usual faults that change the embedding by less than the tolerance.

    A fingerprint cannot notice them: a network with random weights hardly sees its input.
    """
    tile = drawn_tile()
    embedding = _embedding(encoder, tile)
    names = []
    for fault in _usual_faults(encoder.spec, tile):
        wrong = _answers(encoder, fault.tile, fault.spec)[0]
        if distance(wrong, embedding)[1] <= TOLERANCE[encoder.precision]:
            names.append(fault.name)
    return names


def distance(embedding: Tensor, expected: Tensor) -> tuple[float, float]:
    """Cosine, and largest difference as a share of the range; 0 and 1 for other lengths."""
    if embedding.shape != expected.shape:
        return 0.0, 1.0
    value_range = (expected.max() - expected.min()).clamp_min(1e-12)
    difference = (embedding - expected).abs().max() / value_range
    cosine = F.cosine_similarity(embedding, expected, dim=0)
    return float(cosine.nan_to_num(0.0)), float(difference.nan_to_num(1.0))


def _embedding(encoder: NetworkTileEncoder, tile: RgbArray) -> Tensor:
    return encoder.encode(tile[None])[0].double().cpu()


def _both_resizes(tile: RgbArray, spec: EncoderSpec) -> Iterator[RgbArray]:
    """The tile for torch's resize, and the tile that Pillow resizes, as most authors' code does.

    The two differ by a grey level. They are the same by their rules, so both count.
    """
    yield tile
    if spec.resize_px is not None and spec.resize_px != len(tile):
        edges = (spec.resize_px, spec.resize_px)
        picture = Image.fromarray(tile)
        yield np.asarray(picture.resize(edges, _RESAMPLING[spec.interpolation]))


def _reason(
    encoder: NetworkTileEncoder, fingerprint: Fingerprint, expected: Tensor
) -> str:
    """Fault that explains a difference, or the versions that differ; one line."""
    spec = encoder.spec
    tile = drawn_tile()
    candidates = [_Fault("", tile, spec)]
    recorded = _recorded_spec(spec, fingerprint)
    if recorded != spec:
        candidates.append(_Fault(_changes(spec, recorded), tile, recorded))
    candidates += _usual_faults(spec, tile)
    for fault in candidates:
        pooling = _fitting_pooling(encoder, fault, expected)
        if pooling is None:
            continue
        facts = [fault.name]
        if pooling != spec.pooling:
            declared = _POOLINGS[spec.pooling]
            facts.append(f"{_POOLINGS[pooling]} in place of {declared}")
        return f"they would with {' and '.join(filter(None, facts))}"
    if fingerprint.pooling != spec.pooling:
        return f"its pooling is {fingerprint.pooling!r}, here it is {spec.pooling!r}"
    differences = []
    stated = _STATED_VERSION.findall(fingerprint.versions)
    for name, theirs in stated:
        ours = installed_version(name)
        if theirs != ours:
            differences.append(f"{name} {theirs} there and {ours} here")
    if differences:
        return f"no usual fault explains it; versions differ: {', '.join(differences)}"
    if not stated:
        code = fingerprint.code
        return f"no usual fault explains it; compare versions of packages with {code!r}"
    return "no usual fault explains it; check the architecture and its options"


def _installed() -> list[str]:
    """Packages that may change an embedding, with their versions."""
    return [f"{name} {installed_version(name)}" for name in _PACKAGES]


def _recorded_spec(spec: EncoderSpec, fingerprint: Fingerprint) -> EncoderSpec:
    """Spec with the preprocessing that the fingerprint records, for this network's input."""
    try:
        recorded = json.loads(fingerprint.preprocessing)
        return replace(
            spec,
            resize_px=recorded["resize_px"],
            interpolation=recorded["interpolation"],
            mean=tuple(recorded["mean"]),
            std=tuple(recorded["std"]),
        )
    except (ValueError, KeyError, TypeError):
        return spec


def _changes(spec: EncoderSpec, recorded: EncoderSpec) -> str:
    """Fields of the preprocessing that differ, in words."""
    theirs = recorded.preprocessing
    changes = []
    for name, value in spec.preprocessing.items():
        if theirs[name] != value:
            changes.append(f"{name} {theirs[name]} in place of {value}")
    return " and ".join(changes)


def _usual_faults(spec: EncoderSpec, tile: RgbArray) -> Iterator[_Fault]:
    """Rules of preprocessing that people mix up with the declared one."""
    for name, (mean, std) in _NORMALISATIONS.items():
        if (mean, std) != (spec.mean, spec.std):
            yield _Fault(name, tile, replace(spec, mean=mean, std=std))
    unscaled = replace(
        spec,
        mean=_scaled(spec.mean, 1 / 255),
        std=_scaled(spec.std, 1 / 255),
    )
    yield _Fault("pixels of 0 to 255, not of 0 to 1", tile, unscaled)
    yield _Fault("colours in the order blue, green, red", tile[..., ::-1].copy(), spec)
    if spec.resize_px is None:
        resized = replace(spec, resize_px=spec.input_px)
        yield _Fault(f"a resize to {spec.input_px} px", tile, resized)
        return
    other: Interpolation = "bicubic"
    if spec.interpolation == "bicubic":
        other = "bilinear"
    interpolated = replace(spec, interpolation=other)
    yield _Fault(f"{other} interpolation", tile, interpolated)
    yield _Fault("a resize without antialias", _aliased(tile, spec), spec)
    yield _Fault("a crop without resize", tile, replace(spec, resize_px=None))
    # the habit of ImageNet: 256 px, of which 224 px are seen
    larger_px = spec.input_px * 8 // 7
    for resize_px in (spec.input_px, larger_px):
        if resize_px != spec.resize_px:
            name = f"a resize to {resize_px} px"
            yield _Fault(name, tile, replace(spec, resize_px=resize_px))


def _scaled(
    values: tuple[float, float, float], factor: float
) -> tuple[float, float, float]:
    red, green, blue = values
    return red * factor, green * factor, blue * factor


def _aliased(tile: RgbArray, spec: EncoderSpec) -> RgbArray:
    """Tile resized without antialias."""
    assert spec.resize_px is not None
    pixels = torch.from_numpy(tile).permute(2, 0, 1)[None].float()
    edges = (spec.resize_px, spec.resize_px)
    resized = F.interpolate(
        pixels, size=edges, mode=spec.interpolation, align_corners=False
    )
    rounded = resized[0].permute(1, 2, 0).clamp(0, 255).round()
    return np.asarray(rounded.numpy(), dtype=np.uint8)


def _fitting_pooling(
    encoder: NetworkTileEncoder, fault: _Fault, expected: Tensor
) -> str | None:
    """Pooling that gives the expected embedding under a fault; None if none does."""
    tolerance = TOLERANCE[encoder.precision]
    for tile in _both_resizes(fault.tile, fault.spec):
        answers = _answers(encoder, tile, fault.spec)
        for pooling, vector in _other_poolings(encoder.spec, *answers):
            if distance(vector, expected)[1] <= tolerance:
                return pooling
    return None


def _answers(
    encoder: NetworkTileEncoder, tile: RgbArray, spec: EncoderSpec
) -> tuple[Tensor, Tensor]:
    """Embedding (D,) and tokens (T, C) of a tile under the preprocessing of `spec`."""
    embeddings, tokens = encoder.encode_as(tile[None], spec)
    return embeddings[0].double().cpu(), tokens[0].double().cpu()


def _other_poolings(
    spec: EncoderSpec, pooled: Tensor, tokens: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Embedding under each pooling that can be had from the network's answers."""
    yield spec.pooling, pooled
    mean = tokens.mean(dim=0)
    width = tokens.shape[1]
    if spec.pooling != "mean":
        yield "mean", mean
    if spec.pooling == "cls":
        yield "cls_mean", torch.cat([pooled, mean])
    if spec.pooling == "cls_mean":
        yield "cls", pooled[:width]
