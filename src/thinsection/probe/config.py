"""Settings of a probe run; the command line and TOML derive from them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinsection.config import option, section
from thinsection.errors import ConfigError
from thinsection.probe.protocol import Geometry, Protocol, get_protocol
from thinsection.types import parse_bytes

ProtocolName = Literal["honest", "nanopath", "eva", "pathobench"]


def layouts() -> tuple[str, ...]:
    """Layouts of labelled data on disk: docs/probes.md tells what each looks for."""
    from thinsection.probe.data.images import LAYOUTS  # with image readers

    return ("auto", "tiles", "manifest", *LAYOUTS)


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Places of labels and embeddings."""

    layout: str = option("auto", "how DATA is laid out on disk", choices=layouts)
    labels: Path | None = option(
        None,
        "GeoJSON of labelled regions, or a table slide_id,x,y,label; none: drawn classes",
    )
    embeddings: Path | None = option(
        None,
        "embeddings: a file for a manifest's rows, a folder of slides for a case table",
    )
    encoder: str | None = option(None, "tile encoder, where DATA holds images")
    root: Path | None = option(
        None, "folder of the paths in a manifest or list; none: its own"
    )
    allow_leakage: bool = option(
        False,
        "go on where train and validation share patients, slides or identical rows",
    )
    test: Path | None = option(
        None,
        "another cohort, named as DATA is, that is looked at once: all of DATA then trains",
    )
    held_out: Literal["val", "test"] = option(
        "val",
        "rows of a table's split that are scored; with test, train and val both train",
    )
    sample: Literal["case", "slide"] = option(
        "case",
        "of a table of slides: a case is the mean of its slides, or each slide stands alone",
    )
    max_per_class: int | None = option(
        None, "at most so many rows of a class in train and in val, drawn with the seed"
    )


@dataclass(frozen=True, kw_only=True)
class EngineSection:
    """Settings of every probe that may embed images."""

    seed: int | None = option(None, "base seed instead of the protocol's")
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    precision: str = option(
        "auto", "of the encoder: auto, fp32, fp16 or bf16 (probes are fp32)"
    )
    engine: Literal["auto", "torch", "openvino"] = option(
        "auto", "of the encoder on a CPU: auto, torch or openvino"
    )
    batch_size: int = option(64, "images a batch of the encoder")


@dataclass(frozen=True, kw_only=True)
class ComputeSection(EngineSection):
    """Settings of the computation."""

    protocol: ProtocolName = option(
        "honest", "frozen hyper-parameters, folds and metrics"
    )
    memory: str = option("1GiB", "memory of the blocks of kNN, few-shot and robustness")


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """Settings of `thinsection probe`."""

    data: DataSection = section(DataSection)
    compute: ComputeSection = section(ComputeSection)

    @property
    def protocol(self) -> Protocol:
        """The protocol that is named, with the seed."""
        protocol = get_protocol(self.compute.protocol, seed=self.compute.seed)
        is_tested = self.data.test is not None or self.data.held_out != "val"
        if is_tested and not protocol.inner_folds:
            raise ConfigError(
                "protocol must select nothing on a test set, "
                f"got {protocol.name!r}; use 'honest'"
            )
        return protocol

    @property
    def budget_bytes(self) -> int:
        """Memory of a probe that works in blocks."""
        return parse_bytes(self.compute.memory, name="memory")


@dataclass(frozen=True, kw_only=True)
class RobustnessSection:
    """Settings of the robustness probe alone."""

    k: int | None = option(None, "neighbours, instead of the subset's published number")
    choose_k: bool = option(
        False, "the k whose vote names biology best, as PathoROB can choose it"
    )


@dataclass(frozen=True, kw_only=True)
class RobustnessConfig(ProbeConfig):
    """Settings of `thinsection probe robustness`."""

    robustness: RobustnessSection = section(RobustnessSection)


@dataclass(frozen=True, kw_only=True)
class SegmentSection(EngineSection):
    """Settings of the dataset, the encoder and the head."""

    dataset: Literal["pannuke", "monusac", "consep", "bcss"] = option(
        "pannuke", "layout of the dataset's folder"
    )
    encoder: str | None = option(
        None,
        "tile encoder with patch tokens (see `thinsection models`); none: the default one",
    )
    geometry: Geometry = option(
        "compatible",
        "compatible: the crop's prediction is scored against the whole label, as the suite does "
        "(up to 16 px apart); correct: against the label of the crop",
    )
    epochs: int | None = option(
        None,
        "epochs instead of the protocol's; the score is then not comparable with others'",
    )
    batch_size: int = option(16, "images a batch of the encoder")


@dataclass(frozen=True, kw_only=True)
class CacheSection:
    """Place, memory and precision of the features that are kept."""

    cache_dir: Path | None = option(
        None, "folder of caches; none: the user's cache folder"
    )
    cache_memory: str = option("1GiB", "memory of the features, whatever their number")
    cache_dtype: Literal["lossless", "fp32", "bf16", "fp16"] = option(
        "lossless",
        "lossless: the narrowest exact one of each chunk; another one is forced",
    )


@dataclass(frozen=True, kw_only=True)
class SegmentConfig:
    """Settings of `thinsection probe segment`."""

    segment: SegmentSection = section(SegmentSection)
    cache: CacheSection = section(CacheSection)
