"""What a probe run needs to know; the command line and TOML derive from it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinsection.config import option, section

LayoutName = Literal["auto", "tiles", "manifest", "folder", "bracs", "breakhis", "mhist", "pcam"]
ProtocolName = Literal["nanopath", "eva", "pathobench"]


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Where labels and embeddings are."""

    layout: LayoutName = option("auto", "how DATA is laid out on disk")
    labels: Path | None = option(
        None, "GeoJSON of labelled regions, or CSV slide_id,x,y,label, for tile embeddings"
    )
    embeddings: Path | None = option(
        None, "embeddings: a file for a manifest's rows, a folder of slides for a case table"
    )
    encoder: str | None = option(None, "tile encoder, where DATA holds images")
    max_per_class: int | None = option(
        None, "at most so many rows of a class in train and in val, drawn with the seed"
    )


@dataclass(frozen=True, kw_only=True)
class ComputeSection:
    """How it is computed."""

    protocol: ProtocolName = option("nanopath", "frozen hyper-parameters, folds and metrics")
    seed: int | None = option(None, "base seed instead of the protocol's")
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    precision: str = option("auto", "of the encoder: auto, fp32, fp16 or bf16 (probes are fp32)")
    memory: str = option("1GiB", "memory of the blocks of kNN, few-shot and robustness")
    batch_size: int = option(64, "images a batch of the encoder")


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """Settings of `thinsection probe`."""

    data: DataSection = section(DataSection)
    compute: ComputeSection = section(ComputeSection)
