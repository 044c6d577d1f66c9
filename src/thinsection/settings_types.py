"""Settings that functions take as keywords, as type checkers and editors see them.

Written by `python -m tests.settings_types` from the fields of the configurations, which have the
defaults and the help. A setting that a function takes as a parameter of its own is left out.
"""

from pathlib import Path
from typing import Literal, TypeAlias, TypedDict

Text: TypeAlias = str | Path  # a path stands for its text
Texts: TypeAlias = list[str] | list[Path] | tuple[str | Path, ...]


class RunSettings(TypedDict, total=False):
    """Settings of `run` and `plan`: `RunConfig` has defaults and help."""

    reader: Text
    fingerprint: Literal["times", "full", "samples"]
    slide_mpp: Text | float | None
    image: Text | None
    channels: Text | None
    channel_range: Text
    icc: bool
    name_pattern: Text | None
    allow_local_urls: bool
    mask_mpp: float
    min_speck_um2: float
    min_hole_um2: float
    black_level: int
    tissue: Text | None
    roi: Text | None
    include_class: Texts
    exclude_class: Texts
    mend_regions: bool
    cells: Texts
    cells_frame: Text | None
    cells_columns: Texts
    qc: Text
    qc_fail: Texts
    qc_remove: Texts
    qc_rules: Text | None
    qc_strict: bool
    qc_edits: Text | None
    qc_device: Text
    qc_pictures: bool
    segmenters: Texts
    segment_weights: Text | None
    trust_code: Texts
    segment_mpp: float
    segment_memory: Text
    tissue_segmenter: bool
    tile_px: int
    tile_mpp: Text | float | list[Text | float] | tuple[Text | float, ...]
    mpp_tolerance: float
    resample: Literal["exact", "fast"]
    overlap: int
    region_px: int
    min_tissue_fraction: float
    tile_filter: Texts
    edge: Literal["drop", "pad"]
    stain_norm: Literal["none", "macenko", "reinhard"]
    stain_reference: Text | None
    stain_mpp: float
    stain_places: int
    encoders: Texts
    tokens: bool
    weights: Text | None
    pretrained: bool
    allow_remote_code: bool
    device: Text
    precision: Literal["auto", "fp32", "fp16", "bf16", "fp8"]
    engine: Literal["auto", "torch", "openvino", "compiled"]
    batch_size: int
    seed: int
    slide_encoders: Texts
    slide_weights: Text | None
    aggregate_memory: Text
    patients: Literal["none", "late", "early"]
    memory: Text
    decode_threads: int
    prefetch_slides: int
    until: Literal[
        "tissue", "qc", "segments", "tiles", "embeddings", "slide-embeddings"
    ]
    write: Texts
    embedding_dtype: Literal["float32", "float16"]
    graph: Text | None
    measures: bool
    measures_reference: Text | None
    overview: bool
    allow_empty: bool
    resume: bool
    overwrite: bool
    workers: int
    threads: int
    worker_memory: Text | None
    chunk_slides: int
    retries: int
    scheduler: Text | None
    gpus: Text | None
    jobqueue: Text | None
    partition: Text | None
    account: Text | None
    gres: Text | None
    walltime: Text | None
    gpu: Text | None
    job_cpus: int
    job_memory: Text | None
    directive: Texts
    queue: Literal["wait", "submit", "script"]


class TilesSettings(TypedDict, total=False):
    """Settings of `tile_grid`: `TilesConfig` has defaults and help."""

    tile_px: int
    tile_mpp: Text | float | list[Text | float] | tuple[Text | float, ...]
    mpp_tolerance: float
    resample: Literal["exact", "fast"]
    overlap: int
    region_px: int
    min_tissue_fraction: float
    tile_filter: Texts
    edge: Literal["drop", "pad"]


class TrainSettings(TypedDict, total=False):
    """Settings of `train`: `TrainConfig` has defaults and help."""

    labels: Text | None
    target: Texts
    time: Text | Texts | None
    read: Texts
    drop_unusable: bool
    task: Literal[
        "auto",
        "binary",
        "multiclass",
        "ordinal",
        "multilabel",
        "regression",
        "cox",
        "discrete",
    ]
    positive: Text | None
    site: Text | None
    subgroup: Texts
    covariate: Texts
    features: Text | None
    head: Text
    hidden_dim: int
    attention_dim: int
    dropout: float
    num_layers: int
    num_heads: int
    instances: int
    instance_weight: float
    subtyping: bool
    epochs: int
    patience: int
    lr: float
    weight_decay: float
    bag_size: int
    starts: int
    batch_cases: int
    class_weights: bool
    seed: int
    device: Text
    precision: Literal["auto", "fp32", "bf16"]
    checkpoint_s: float
    folds: int
    inner_folds: int
    repeats: int
    fold_unit: Literal["patient", "site", "each-site"]
    allow_leakage: bool
    splits: Text | None
    search: Texts
    memory: Text
    executor: Text
    workers: int
    threads: int
    worker_memory: Text | None
    chunk_slides: int
    retries: int
    scheduler: Text | None
    gpus: Text | None
    jobqueue: Text | None
    partition: Text | None
    account: Text | None
    gres: Text | None
    walltime: Text | None
    gpu: Text | None
    job_cpus: int
    job_memory: Text | None
    directive: Texts
    queue: Literal["wait", "submit", "script"]


class PredictSettings(TypedDict, total=False):
    """Settings of `predict`: `PredictRunConfig` has defaults and help."""

    device: Text
    features: Text | None
    covariate_table: Text | None
    labels: Text | None
    target: Texts
    time: Text | Texts | None
    read: Texts
    drop_unusable: bool
    site: Text | None
    subgroup: Texts
    memory: Text
    decode_threads: int
    prefetch_slides: int
    executor: Text
    workers: int
    threads: int
    worker_memory: Text | None
    chunk_slides: int
    retries: int
    scheduler: Text | None
    gpus: Text | None
    jobqueue: Text | None
    partition: Text | None
    account: Text | None
    gres: Text | None
    walltime: Text | None
    gpu: Text | None
    job_cpus: int
    job_memory: Text | None
    directive: Texts
    queue: Literal["wait", "submit", "script"]


class HeatmapSettings(TypedDict, total=False):
    """Settings of `heatmap`: `HeatmapRunConfig` has defaults and help."""

    device: Text
    features: Text | None
    covariate_table: Text | None
    labels: Text | None
    target: Texts
    time: Text | Texts | None
    read: Texts
    drop_unusable: bool
    site: Text | None
    subgroup: Texts
    memory: Text
    decode_threads: int
    prefetch_slides: int
    executor: Text
    workers: int
    threads: int
    worker_memory: Text | None
    chunk_slides: int
    retries: int
    scheduler: Text | None
    gpus: Text | None
    jobqueue: Text | None
    partition: Text | None
    account: Text | None
    gres: Text | None
    walltime: Text | None
    gpu: Text | None
    job_cpus: int
    job_memory: Text | None
    directive: Texts
    queue: Literal["wait", "submit", "script"]
    positive: Text | None
    top_tiles: int
    grid: Text | None
    scale: Literal["slide", "cohort"]
    clip: float
    geojson: bool


class ZeroshotSettings(TypedDict, total=False):
    """Settings of `zeroshot`: `ZeroshotRunConfig` has defaults and help."""

    top_k: int
    features: Text | None
    weights: Text | None
    tokenizer: Text | None
    device: Text


class ViewSettings(TypedDict, total=False):
    """Settings of `view`: `ViewConfig` has defaults and help."""

    port: int
    memory: Text
    annotations: Text | None
    clusters: int
    at: Text | None
    show_label: bool
    reader: Text
    fingerprint: Literal["times", "full", "samples"]
    slide_mpp: Text | float | None
    image: Text | None
    channels: Text | None
    channel_range: Text
    icc: bool
    name_pattern: Text | None
    allow_local_urls: bool
