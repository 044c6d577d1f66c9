"""Segmentation probe: dense tokens through the feature cache, a MaskTransformer on each fold."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from thinsection.encode import DEFAULT_ENCODER, TileEncoder, load_encoder
from thinsection.errors import ConfigError
from thinsection.probe import statistics as metrics
from thinsection.probe.config import SegmentConfig
from thinsection.probe.intervals import bootstrap_rows
from thinsection.probe.protocol import NANOPATH, Geometry, Protocol, SegmentSettings, get_protocol
from thinsection.probe.result import Examples, ProbeResult
from thinsection.probe.segment.data import SEGMENT_DATASETS, SegmentSet
from thinsection.probe.segment.train import SegmentFit, SegmentTrainer, grid_edge, label_window
from thinsection.store.cache import CacheKey, FeatureCache, Storage, default_root, open_or_write
from thinsection.types import GIB, RgbArray
from thinsection.units import parse_bytes
from thinsection.weights.placement import resolve_device

NUM_EXAMPLES = 4  # images shown beside their prediction


def run_segment_probe(root: Path, config: SegmentConfig) -> ProbeResult:
    """The probe on a dataset's folder, with features from the cache.

    Memory: `cache_memory` + the encoder, then the head (see `SegmentTrainer`) + 65,536 N bytes.
    """
    chosen, cached, device = config.segment, config.cache, config.segment.device
    protocol = get_protocol(chosen.protocol, seed=chosen.seed)
    settings: SegmentSettings = protocol.require("segment")
    if chosen.epochs is not None:
        if chosen.epochs < 1:
            raise ConfigError(f"epochs must be >= 1, got {chosen.epochs}")
        settings = replace(settings, epochs=chosen.epochs)
        protocol = replace(protocol, segment=settings)
    data = SEGMENT_DATASETS[chosen.dataset](root)
    name = chosen.encoder or DEFAULT_ENCODER
    with segment_features(
        data,
        load_encoder(  # not held while training
            name, device=device, precision=chosen.precision, engine=chosen.engine
        ),
        settings,
        root=cached.cache_dir or default_root(),
        budget_bytes=parse_bytes(cached.cache_memory, name="cache_memory"),
        storage=cached.cache_dtype,
        batch_size=chosen.batch_size,
    ) as cache:
        geometry = chosen.geometry
        result = segment_probe(data, cache, protocol=protocol, geometry=geometry, device=device)
        return with_cache_facts(result, cache)


def segment_features(
    data: SegmentSet,
    encoder: TileEncoder,
    settings: SegmentSettings,
    *,
    root: Path,
    budget_bytes: int = GIB,
    storage: Storage = "lossless",
    batch_size: int = 16,
) -> FeatureCache:
    """The dataset's tokens [N, T, D] in the cache of `root`; computed where they are not there yet.

    Memory: a batch of images, the encoder, and the budget.
    """
    tokens = encoder.encode_tokens(centre(data.image(0)[None], settings))
    grid_edge(tokens.shape[1])

    def produce(start: int) -> Iterator[torch.Tensor]:
        for images in data.image_batches(start, batch_size):
            yield encoder.encode_tokens(centre(images, settings))

    preprocessing = {
        **{"image_px": settings.image_px, "crop_px": settings.crop_px},
        **encoder.spec.preprocessing,
        **{"precision": encoder.precision, "device": encoder.device.type},
        "engine": encoder.engine.partition(" (")[0],  # its sums are in an order of their own
    }
    key = CacheKey(
        encoder=encoder.spec.name,
        weights_hash=encoder.weights_hash,
        preprocessing=json.dumps(preprocessing, sort_keys=True),
        data_hash=data.contents_hash(),
        storage=storage,
    )
    shape = (len(data), *tokens.shape[1:])
    return open_or_write(root, key, shape, produce, budget_bytes=budget_bytes)


def centre(images: RgbArray, settings: SegmentSettings) -> RgbArray:
    """The centre crop of (N, H, W, 3); a copy in C order."""
    return np.ascontiguousarray(label_window(images, settings, "correct"))


def segment_probe(
    data: SegmentSet,
    features: FeatureCache,
    *,
    protocol: Protocol = NANOPATH,
    geometry: Geometry = "compatible",
    device: str = "cpu",
) -> ProbeResult:
    """The mean over folds of the weighted per-image Jaccard, with images to look at.

    `features` are a `FeatureCache` of the data's tokens, or what serves as one; `geometry` is
    'compatible' with the suite's numbers, or 'correct' (see `upsampled`); the head is on `device`.

    Memory: what `features` takes + 65,536 N bytes of labels + 24 K² N of counts + the trainer.
    """
    settings: SegmentSettings = protocol.require("segment")
    where, num_classes = resolve_device(device, mps=False), len(data.class_names)
    trainer = SegmentTrainer(features, data.labels(), num_classes, settings, geometry, where)
    fits = [trainer.fit(*fold, seed=protocol.seed + i) for i, fold in enumerate(data.folds)]
    weight = settings.background_weight
    details = _details(data, fits, weight)
    jaccard = np.concatenate([metrics.image_jaccard(fit.counts) for fit in fits])
    weights = np.concatenate([metrics.image_weights(fit.counts, weight) for fit in fits])

    def score(draws: npt.NDArray) -> npt.NDArray[np.float64]:
        return draws @ (weights * jaccard) / (draws @ weights)  # type: ignore[no-any-return]

    n, tokens, dim = features.shape
    facts = {"images": n, "tokens": tokens, "dim": dim, "geometry": geometry}
    return ProbeResult(
        probe="segment",
        dataset=data.name,
        metric="weighted_jaccard",
        score=float(np.mean(details["fold_scores"])),
        interval=bootstrap_rows(
            len(jaccard),
            score,
            seed=protocol.seed,
            groups=data.groups and data.groups.take(np.concatenate([val for _, val in data.folds])),
            unit="images",
        ),
        protocol=protocol,
        details=details,
        facts={**facts, "split_rule": data.split_rule},
        examples=_examples(data, trainer, fits[0]),
        remarks=(f"background everywhere would score {details['all_background_score']:.4f}",),
    )


def _details(data: SegmentSet, fits: list[SegmentFit], weight: float) -> dict[str, Any]:
    counts = [fit.counts for fit in fits]
    background = [metrics.background_score(c, weight) for c in counts]
    per_class = metrics.class_jaccard(np.concatenate(counts).sum(axis=0)).tolist()
    return {
        "fold_scores": [metrics.weighted_jaccard(c, weight) for c in counts],
        "all_background_score": float(np.mean(background)),
        "best_epochs": [fit.best_epoch for fit in fits],
        "class_jaccard_of_all_px": dict(zip(data.class_names, per_class, strict=True)),
        "first_batch_losses": [fit.train_loss_first for fit in fits],
        "train_losses": [fit.train_losses for fit in fits],
        "val_losses": [fit.val_losses for fit in fits],
    }


def _examples(data: SegmentSet, trainer: SegmentTrainer, fit: SegmentFit) -> Examples:
    """Evenly spaced validation images of the first fold, in the frame that is scored."""
    val = data.folds[0][1]
    rows = val[np.linspace(0, len(val) - 1, min(NUM_EXAMPLES, len(val))).astype(np.int64)]
    truth, prediction = map(np.concatenate, zip(*trainer.predict(fit.head, rows), strict=True))
    whole = np.stack([data.image(int(i)) for i in rows])
    images = label_window(whole, trainer.settings, trainer.geometry)
    return Examples(images=images, truth=truth, prediction=prediction, class_names=data.class_names)


def with_cache_facts(result: ProbeResult, cache: FeatureCache) -> ProbeResult:
    """The result with what the cache kept and, for a lossy dtype, what that cost."""
    manifest, loss, remarks = cache.manifest, cache.manifest.loss, result.remarks
    if loss is not None:
        changed = f"{loss.changed} of {loss.values} values changed"
        error = f"largest error {loss.max_abs_error:.3g}"
        remarks += (f"lossy cache ({manifest.key.storage}): {error}, {changed}",)
    facts = {
        **result.facts,
        "encoder": manifest.key.encoder,
        "weights_sha256": manifest.key.weights_hash,
        "engine": json.loads(manifest.key.preprocessing).get("engine", "not recorded"),
        "cache_dtypes": manifest.dtype_rows,
        "cache_bytes": manifest.data_bytes,
        "cache_loss": "none" if loss is None else asdict(loss),
    }
    return replace(result, facts=facts, remarks=remarks)
