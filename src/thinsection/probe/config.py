"""Settings of a probe run; the command line and TOML derive from them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinsection.config import Settings, option, section
from thinsection.encode.engine_choice import EngineChoice
from thinsection.encode.registry import needs_of_encoder
from thinsection.errors import ConfigError
from thinsection.extras import Need
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

    layout: str = option(
        "auto",
        "How DATA is stored on disk. auto recognises it.",
        daily=True,
        choices=layouts,
    )
    labels: Path | None = option(
        None,
        "Annotations with classes (GeoJSON), or a table with slide_id, x, y and label. "
        "[default: the classes of the regions that `run --roi` read]",
        daily=True,
    )
    embeddings: Path | None = option(
        None,
        "File with embeddings for the rows of a manifest, or folder with embeddings for"
        " a table of cases.",
    )
    encoder: str | None = option(
        None, "Tile encoder, if the data are images.", daily=True
    )
    root: Path | None = option(
        None,
        "Folder to which the paths in DATA are relative. [default: the folder of DATA]",
    )
    allow_leakage: bool = option(
        False,
        "Continue even if training and validation sets share patients, slides or "
        "identical rows.",
    )
    test: Path | None = option(
        None,
        "Test set of the same kind, which is scored once. All of DATA is then used for "
        "training.",
        daily=True,
    )
    held_out: Literal["val", "test"] = option(
        "val",
        "Set that is scored, if DATA has splits. With test, the training and validation"
        " sets are both used for training.",
    )
    sample: Literal["case", "slide"] = option(
        "case",
        "Unit of a table of slides: case (the mean of its slides) or slide.",
    )
    max_per_class: int | None = option(
        None,
        "Largest number of rows of a class in the training set and in the validation "
        "set. The rows are sampled with the seed.",
    )


@dataclass(frozen=True, kw_only=True)
class EngineSection:
    """Settings of every probe that may embed images."""

    seed: int | None = option(None, "Seed, in place of the protocol's.", daily=True)
    device: str = option(
        "auto", "Device of the encoder: auto, cpu, cuda or cuda:1.", daily=True
    )
    precision: str = option(
        "auto",
        "Floating-point type in which the encoder computes: auto, fp32, fp16, bf16 or fp8. "
        "Probes use fp32.",
    )
    engine: EngineChoice = option(
        "auto",
        "What runs the encoder. auto: on a CPU OpenVINO, if it is installed and gives the same "
        "embeddings as PyTorch; on a GPU a network compiled for it, if the run is long enough.",
    )
    batch_size: int = option(64, "Images per batch of the encoder.")

    def needs(self) -> Iterator[Need]:
        """Packages of the engine."""
        if self.engine == "openvino":
            yield "--engine openvino", ("openvino",)


@dataclass(frozen=True, kw_only=True)
class ComputeSection(EngineSection):
    """Settings of the computation."""

    protocol: ProtocolName = option(
        "honest",
        "Rules for hyperparameters, folds and metrics. honest selects nothing on the "
        "test set; the others repeat a published suite.",
        daily=True,
    )
    memory: str = option(
        "1GiB", "Memory for the blocks of kNN, few-shot and robustness."
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class ProbeConfig(Settings):
    """Settings of `thinsection probe`."""

    data: DataSection = section(DataSection)
    compute: ComputeSection = section(ComputeSection, "Computation")

    def needs(self) -> Iterator[Need]:
        """Packages of the encoder, and of the page."""
        yield from super().needs()
        if self.data.encoder is not None:
            yield needs_of_encoder(self.data.encoder)
        yield "the page of scores", ("matplotlib",)

    @property
    def protocol(self) -> Protocol:
        """The protocol that is named, with the seed."""
        protocol = get_protocol(self.compute.protocol, seed=self.compute.seed)
        is_tested = self.data.test is not None or self.data.held_out != "val"
        if is_tested and not protocol.inner_folds:
            raise ConfigError(
                f"protocol must not select settings on a test set, got {protocol.name!r}; use "
                "'honest'"
            )
        return protocol

    @property
    def budget_bytes(self) -> int:
        """Memory of a probe that works in blocks."""
        return parse_bytes(self.compute.memory, name="memory")


@dataclass(frozen=True, kw_only=True)
class RobustnessSection:
    """Settings of the robustness probe alone."""

    k: int | None = option(
        None, "Number of neighbours, in place of the published number of the subset."
    )
    choose_k: bool = option(
        False,
        "Use the number of neighbours that predicts the biological class best, which is"
        " an option of PathoROB.",
    )


@dataclass(frozen=True, kw_only=True)
class RobustnessConfig(ProbeConfig):
    """Settings of `thinsection probe robustness`."""

    robustness: RobustnessSection = section(RobustnessSection)


@dataclass(frozen=True, kw_only=True)
class SegmentSection(EngineSection):
    """Settings of the dataset, the encoder and the head."""

    dataset: Literal["pannuke", "monusac", "consep", "bcss"] = option(
        "pannuke", "Data set, which decides how its folder is read.", daily=True
    )
    encoder: str | None = option(
        None,
        "Tile encoder with patch tokens. [default: the default encoder of `thinsection "
        "run`]",
        daily=True,
    )
    geometry: Geometry = option(
        "compatible",
        "Label to which the prediction of a crop is compared. compatible: the whole "
        "label, as the suite does (up to 16 px apart); correct: the label of the crop.",
    )
    epochs: int | None = option(
        None,
        "Number of epochs, in place of the protocol's. The score can then not be "
        "compared with published ones.",
    )
    batch_size: int = option(16, "Images per batch of the encoder.")


@dataclass(frozen=True, kw_only=True)
class CacheSection:
    """Place, memory and precision of the features that are kept."""

    cache_dir: Path | None = option(
        None, "Folder of the feature caches. [default: the user's cache folder]"
    )
    cache_memory: str = option(
        "1GiB", "Memory for the features, whatever their number."
    )
    cache_dtype: Literal["lossless", "fp32", "bf16", "fp16"] = option(
        "lossless",
        "Type of the cached features. lossless uses the smallest type that stores a "
        "chunk exactly.",
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class SegmentConfig(Settings):
    """Settings of `thinsection probe segment`."""

    segment: SegmentSection = section(SegmentSection)
    cache: CacheSection = section(CacheSection)

    def needs(self) -> Iterator[Need]:
        """Packages of the encoder, and of the page."""
        yield from super().needs()
        if self.segment.encoder is not None:
            yield needs_of_encoder(self.segment.encoder)
        yield "the page of scores", ("matplotlib",)
