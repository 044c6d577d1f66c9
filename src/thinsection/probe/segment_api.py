"""From a dataset's folder to the segmentation probe's result: what the command line runs."""

import dataclasses
from pathlib import Path

from thinsection.encode import DEFAULT_ENCODER, load_encoder
from thinsection.errors import ConfigError
from thinsection.probe.datasets_segment import SEGMENT_DATASETS
from thinsection.probe.protocol import get_protocol
from thinsection.probe.result import ProbeResult
from thinsection.probe.segment import (
    CacheOptions,
    SegmentExamples,
    segment_features,
    segment_probe,
    with_cache_facts,
)
from thinsection.probe.segment_config import SegmentConfig
from thinsection.probe.segment_settings import SegmentSettings
from thinsection.store.cache import default_root
from thinsection.units import parse_bytes


def run_segment_probe(root: Path, config: SegmentConfig) -> tuple[ProbeResult, SegmentExamples]:
    """The probe on a dataset's folder, with features from the cache.

    Memory: `cache_memory` + the encoder, then the head (see `SegmentTrainer`) + 65,536 N bytes.

    Raises:
        DatasetError: the folder does not look as expected; says what was looked for.
        StoreError: the cache is damaged, or its disk is full.
        ConfigError: a setting is not allowed.
        BudgetError: `cache_memory` does not hold one batch.
    """
    chosen = config.segment
    protocol = get_protocol(chosen.protocol, seed=chosen.seed)
    settings: SegmentSettings = protocol.require("segment")
    if chosen.epochs is not None:
        if chosen.epochs < 1:
            raise ConfigError(f"epochs must be >= 1, got {chosen.epochs}")
        settings = dataclasses.replace(settings, epochs=chosen.epochs)
        protocol = dataclasses.replace(protocol, segment=settings)
    data = SEGMENT_DATASETS[chosen.dataset](root)
    encoder = load_encoder(
        chosen.encoder or DEFAULT_ENCODER, device=chosen.device, precision=chosen.precision
    )
    options = CacheOptions(
        root=config.cache.cache_dir or default_root(),
        budget_bytes=parse_bytes(config.cache.cache_memory, name="cache_memory"),
        storage=config.cache.cache_dtype,
        batch_size=chosen.batch_size,
    )
    with segment_features(data, encoder, settings, options) as cache:
        del encoder  # its memory is free while the head trains
        result, examples = segment_probe(
            data, cache, protocol=protocol, geometry=chosen.geometry, device=chosen.device
        )
        return with_cache_facts(result, cache), examples
