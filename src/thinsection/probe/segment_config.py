"""What a segmentation probe needs to know; the command line and TOML derive from it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinsection.config import option, section
from thinsection.probe.segment_settings import Geometry

DatasetName = Literal["pannuke", "monusac", "consep"]
CacheDtype = Literal["lossless", "fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class SegmentSection:
    """What is probed, and how."""

    dataset: DatasetName = option("pannuke", "layout of the dataset's folder")
    encoder: str | None = option(
        None, "tile encoder with patch tokens (see `thinsection models`); none: the default one"
    )
    protocol: Literal["nanopath"] = option("nanopath", "frozen hyper-parameters, folds and metric")
    geometry: Geometry = option(
        "compatible",
        "compatible: the crop's prediction is scored against the whole label, as the suite does "
        "(up to 16 px apart); correct: against the label of the crop",
    )
    seed: int | None = option(None, "base seed instead of the protocol's")
    epochs: int | None = option(
        None, "epochs instead of the protocol's; the score is then not comparable with others'"
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    precision: str = option("auto", "of the encoder: auto, fp32, fp16 or bf16 (the head is fp32)")
    batch_size: int = option(16, "images a batch of the encoder")


@dataclass(frozen=True, kw_only=True)
class CacheSection:
    """Where features are kept."""

    cache_dir: Path | None = option(None, "folder of caches; none: the user's cache folder")
    cache_memory: str = option("1GiB", "memory of the features, whatever their number")
    cache_dtype: CacheDtype = option(
        "lossless", "lossless: the narrowest exact one of each chunk; another one is forced"
    )


@dataclass(frozen=True, kw_only=True)
class SegmentConfig:
    """Settings of `thinsection probe segment`."""

    segment: SegmentSection = section(SegmentSection)
    cache: CacheSection = section(CacheSection)
