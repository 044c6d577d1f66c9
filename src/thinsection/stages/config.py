"""Settings of a run and of pooling alone; the command line, TOML and the plan derive from these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinsection.cells.config import CellsConfig
from thinsection.config import Settings, option, section
from thinsection.encode.engine_choice import EngineChoice
from thinsection.encode.registry import needs_of_encoder, our_name, our_slide_encoder
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.extras import Need
from thinsection.jobs.executor import ExecutorConfig
from thinsection.pool.encoder import needs_of_slide_encoder
from thinsection.qc.tissue import TissueConfig
from thinsection.slide.annotations import RegionsConfig, absolute_source
from thinsection.slide.cohort_table import SlidesConfig
from thinsection.stages.formats import FORMATS
from thinsection.tiles.budget import MAX_SCRATCH, StreamBudget, StreamConfig
from thinsection.tiles.grid import TilesConfig
from thinsection.tiles.transforms import StainConfig
from thinsection.types import parse_bytes
from thinsection.weights.precision import PrecisionChoice

# results of a run, in the order in which they are made
LastResult = Literal[
    "tissue", "qc", "segments", "tiles", "embeddings", "slide-embeddings"
]
TILED = ("tiles", "embeddings", "slide-embeddings")  # with a tile grid
ENCODED = ("embeddings", "slide-embeddings")  # with encoders
CPU_BATCH = 32  # tiles
GPU_BATCH = 256  # tiles
AUTO_DEVICE = "auto"  # value of a device that is chosen when the work begins


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeConfig:
    """Tile encoders, and the devices that they run on."""

    encoders: tuple[str, ...] = option(
        ("efficientnet_lite0",),
        "Tile encoder: a name in `thinsection models`, timm:NAME, hf:REPO (Hugging Face), "
        "or a checkpoint file; repeat the option for several.",
        daily=True,
        flag="--encoder",
    )
    tokens: bool = option(
        False, "Also store the grid of patch tokens, for encoders that have one."
    )
    weights: str | None = option(
        None,
        "Local weights of the encoder (.safetensors or .pth), in place of a download.",
    )
    pretrained: bool = option(
        True,
        "Load trained weights. --no-pretrained uses random weights, to test a setup "
        "without a download.",
    )
    allow_remote_code: bool = option(
        False,
        "Run code from the encoder's repository on the Hugging Face hub. Use it only "
        "for repositories that you trust.",
    )
    device: str = option(
        "auto",
        "Device of the encoders: auto, cpu, cuda or cuda:1. auto uses a GPU if there is "
        "one.",
        daily=True,
    )
    precision: PrecisionChoice = option(
        "auto",
        "Floating-point type in which the encoder computes. auto uses half precision on"
        " a GPU if the encoder allows it. fp8 is for vision transformers on GPUs that have it, "
        "and changes the embeddings more.",
    )
    engine: EngineChoice = option(
        "auto",
        "What runs the encoder. auto: on a CPU OpenVINO, if it is installed and gives the same "
        "embeddings as PyTorch; on a GPU a network compiled for it, if the run is long enough.",
    )
    batch_size: int = option(
        0,
        "Tiles per batch; 0 means 32 on a CPU and 256 on a GPU. Lower it if the GPU "
        "runs out of memory.",
    )
    seed: int = option(0, "Seed of the random weights of --no-pretrained.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "encoders", tuple(map(our_name, self.encoders)))
        if self.batch_size < 0:
            raise ConfigError(f"encode.batch_size must be >= 0, got {self.batch_size}")
        count = len(self.encoders)
        if count == 0 or len(set(self.encoders)) < count:
            raise ConfigError(
                f"encode.encoders must be different names, got {self.encoders}"
            )
        if self.weights is not None and count > 1:
            raise ConfigError(
                f"encode.weights must be combined with exactly one encoder, got {count}; run "
                "them one after the other with the same out=..."
            )


# whether, and how, slides of a patient become one embedding
Patients = Literal["none", "late", "early"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregateConfig:
    """Slide encoders that pool the tile embeddings."""

    slide_encoders: tuple[str, ...] = option(
        ("mean",),
        "Slide encoder that pools the tile embeddings, such as mean, titan or prism "
        "(`thinsection models` lists all), or gigapath:mean-11 (mean of tiles after its layer "
        "11); repeat the option for several.",
        daily=True,
        flag="--slide-encoder",
    )
    slide_weights: str | None = option(
        None,
        "Weights of the slide encoder: a local file, or a repository on the Hugging "
        "Face hub. For abmil, a model of `thinsection train`.",
    )
    aggregate_memory: str = option(
        "1GiB", "Memory for the attention of the slide encoder."
    )
    patients: Patients = option(
        "none",
        "Embedding of each patient of the cohort, from all slides. late: the mean of the "
        "slide embeddings; early: all tiles as one slide.",
    )

    def __post_init__(self) -> None:
        our_names = tuple(map(our_slide_encoder, self.slide_encoders))
        object.__setattr__(self, "slide_encoders", our_names)


@dataclass(frozen=True, slots=True, kw_only=True)
class QcConfig:
    """Quality control inside a run."""

    qc: str = option(
        "off",
        "Quality control: off, auto, histoqc-NAME (default, light, ihc, clinical, "
        "first, v2.1), or a .toml file of checks and segmenters.",
        daily=True,
    )
    qc_fail: tuple[str, ...] = option(
        (),
        "Rule that makes a slide fail quality control, such as 'pixels_to_use<1000'. A "
        "run leaves such slides out; repeat the option for several.",
    )
    qc_remove: tuple[str, ...] = option(
        (),
        "Check that removes what it finds from the tissue, although it is only shown by "
        "default: folds or dust. Both are experimental. Repeat the option for several.",
    )
    qc_rules: Path | None = option(
        None,
        "TOML file with the rules for the verdicts on the QC page, in place of the "
        "built-in rules.",
    )
    qc_strict: bool = option(
        False,
        "Follow a check even if it removes most of a slide's tissue, as HistoQC does. "
        "By default such a check only warns.",
    )
    qc_edits: str | None = option(
        None,
        "Apply your corrections of the checks, drawn in QuPath: a folder with SLIDE_ID.geojson, "
        "a file for one slide, or a column of the cohort table. Stored corrections stay without "
        "this option; none drops them.",
    )
    qc_device: str = option(
        "cpu",
        "Device of the checks: cpu, cuda or auto. auto measures both on a slide, once per machine, "
        "and uses the GPU if it needs at most half of the time.",
    )
    qc_pictures: bool = option(
        False,
        "Also write PNG files: the mask of each check, the pictures of HistoQC's checks, "
        "and the small picture that the checks read. A finished slide is checked again.",
    )

    def __post_init__(self) -> None:
        # a worker may have another current folder
        object.__setattr__(self, "qc_edits", absolute_source(self.qc_edits))


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentConfig:
    """Settings of the networks that segment slides."""

    segmenters: tuple[str, ...] = option(
        (),
        "Network that classifies every pixel: lavlab-shell, hest-tissue, grandqc-tissue, "
        "grandqc-artefacts or a .toml file; repeat the option for several.",
        daily=True,
        flag="--segmenter",
    )
    segment_weights: str | None = option(
        None,
        "Local weights of the segmenter (.onnx, .pth, ...), in place of a download.",
    )
    trust_code: tuple[str, ...] = option(
        (),
        "Python file of yours that may run, if the .toml file of the segmenter names a class in "
        "it, such as my_net:Net for my_net.py. Repeat the option for several.",
    )
    segment_mpp: float = option(
        4.0, "Resolution in µm/px at which outlines and class shares are computed."
    )
    segment_memory: str = option(
        "512MiB", "Memory for the part of the slide that is segmented at a time."
    )
    tissue_segmenter: bool = option(
        False,
        "Use the classes of the segmenter as the tissue mask, in place of the detector.",
    )

    def __post_init__(self) -> None:
        files = tuple(str(Path(file).resolve()) for file in self.trust_code)
        object.__setattr__(
            self, "trust_code", files
        )  # a worker may have another folder
        count = len(self.segmenters)
        if self.segment_weights and count != 1:
            raise ConfigError(
                "segment.segment_weights must be combined with exactly one segmenter, got "
                f"{count}"
            )
        if self.tissue_segmenter and count != 1:
            raise ConfigError(
                "segment.tissue_segmenter must be combined with exactly one segmenter, got "
                f"{count}"
            )

    def needs(self) -> Iterator[Need]:
        """Packages of the networks that are named; a TOML file says its own when it is read."""
        from thinsection.segment.spec import SEGMENTERS

        for name in self.segmenters:
            if name in SEGMENTERS:
                yield f"segmenter {name!r}", SEGMENTERS.entry(name).needs
        if self.segment_mpp <= 0:
            raise InvalidInputError(
                f"segment.segment_mpp must be > 0, got {self.segment_mpp}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """Last result of a run, further files, and how existing files are treated."""

    until: LastResult = option(
        "slide-embeddings", "Last result to compute.", daily=True
    )
    write: tuple[str, ...] = option(
        (),
        "Also write the tile embeddings in this format; repeat the option for several.",
        daily=True,
        choices=FORMATS.names,
    )
    embedding_dtype: Literal["float32", "float16"] = option(
        "float32", "Type of the stored embeddings. float16 halves their size."
    )
    graph: str | None = option(
        None,
        "Also write a graph of neighbouring tiles: knn:8 (the 8 nearest) or radius:100 "
        "(all within 100 µm).",
    )
    measures: bool = option(
        False,
        "Also measure the colours, focus and stains of each tile, and the stain vectors"
        " of each slide.",
    )
    measures_reference: Path | None = option(
        None,
        "Results folder with the slides to which the measures are compared. [default: "
        "the slides of this run]",
    )
    overview: bool = option(
        True, "Draw a picture of each slide with the tissue outline and the tiles."
    )
    allow_empty: bool = option(
        False, "Exit with code 0 even if some slides have no tile."
    )
    resume: bool = option(
        True,
        "Skip results that are complete with the same settings and slide. --no-resume "
        "computes everything again.",
    )
    overwrite: bool = option(
        False,
        "Replace the results of slide files that have changed, and everything computed "
        "from them.",
    )

    def needs(self) -> Iterator[Need]:
        """Packages of the formats."""
        for name in self.write:
            yield f"--write {name}", FORMATS.entry(name).needs


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingSpec:
    """Models that turn tiles into embeddings, how they are loaded, and their device."""

    stain: StainConfig  # stain normalisation before the encoders
    encoders: tuple[str, ...]  # empty for a run that embeds nothing
    slide_encoders: tuple[str, ...]  # empty for a run that ends before them
    tokens: bool  # True also stores dense token grids
    weights: str | None
    slide_weights: str | None
    pretrained: bool
    allow_remote_code: bool
    device: str
    precision: PrecisionChoice
    engine: EngineChoice
    batch_size: int  # tiles; 0 takes the device's default
    seed: int
    pooling_bytes: int  # memory for a slide encoder's attention
    patients: Patients  # embedding of each patient of the cohort

    @property
    def named_files(self) -> tuple[str, ...]:
        """Names of models, weights and references; each of them may be the path of a file."""
        names = [*self.encoders, self.weights, self.slide_weights]
        names.append(self.stain.stain_reference)
        return tuple(name for name in names if name)


@dataclass(frozen=True, kw_only=True, repr=False)
class RunConfig(Settings):
    """All settings of a run, by section.

    `spec.resolve` checks them together. They travel to workers as JSON or by pickle. Each part of
    the program takes the section that it needs.
    """

    slides: SlidesConfig = section(SlidesConfig, "Slides and tissue")
    tissue: TissueConfig = section(TissueConfig, "Slides and tissue")
    regions: RegionsConfig = section(RegionsConfig, "Slides and tissue")
    cells: CellsConfig = section(CellsConfig, "Slides and tissue")
    qc: QcConfig = section(QcConfig, "Quality control and segmentation")
    segment: SegmentConfig = section(SegmentConfig, "Quality control and segmentation")
    tiles: TilesConfig = section(TilesConfig, "Tiles")
    stain: StainConfig = section(StainConfig, "Tiles")
    encode: EncodeConfig = section(EncodeConfig, "Encoders")
    aggregate: AggregateConfig = section(AggregateConfig, "Encoders")
    stream: StreamConfig = section(StreamConfig, "Memory and workers")
    output: OutputConfig = section(OutputConfig, "Results")
    executor: ExecutorConfig = section(ExecutorConfig, "Memory and workers")

    @property
    def encoding(self) -> EncodingSpec:
        """Models of the run, without those that come after its last result."""
        encode = self.encode
        aggregate = self.aggregate
        until = self.output.until
        pools = until == "slide-embeddings"
        return EncodingSpec(
            stain=self.stain,
            encoders=encode.encoders if until in ENCODED else (),
            slide_encoders=aggregate.slide_encoders if pools else (),
            tokens=encode.tokens,
            weights=encode.weights,
            slide_weights=aggregate.slide_weights,
            pretrained=encode.pretrained,
            allow_remote_code=encode.allow_remote_code,
            device=encode.device,
            precision=encode.precision,
            engine=encode.engine,
            batch_size=encode.batch_size,
            seed=encode.seed,
            pooling_bytes=parse_bytes(aggregate.aggregate_memory),
            patients=aggregate.patients,
        )

    def needs(self) -> Iterator[Need]:
        """Packages of the sections, and of the models that the run comes to."""
        yield from super().needs()
        encoding = self.encoding
        from_hub = encoding.pretrained and encoding.weights is None
        for name in encoding.encoders:
            yield needs_of_encoder(name, from_hub=from_hub)
        if encoding.encoders and encoding.engine == "openvino":
            yield "--engine openvino", ("openvino",)
        for name in encoding.slide_encoders:
            published = encoding.pretrained and encoding.slide_weights is None
            yield needs_of_slide_encoder(name, from_hub=published)

    def batch_size(self, *, on_gpu: bool) -> int:
        """Tiles per batch: the requested number, or the device's default, limited by the memory."""
        if self.encoding.batch_size:
            return self.encoding.batch_size
        largest = self.stream.largest_batch(
            tile_px=self.tiles.tile_px, tile_bytes=MAX_SCRATCH
        )
        return min(GPU_BATCH if on_gpu else CPU_BATCH, largest)

    def stream_budget(self, batch_size: int) -> StreamBudget:
        """Buffers of the stream. Raises BudgetError: there is no memory for three batches."""
        return self.stream.budget(
            batch_size, tile_px=self.tiles.tile_px, tile_bytes=MAX_SCRATCH
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """Slide encoder for stored tile embeddings, and facts that their files may lack."""

    slide_encoder: str = option(
        "mean",
        "Slide encoder that pools the tile embeddings, such as mean, titan or prism "
        "(`thinsection models` lists all), or gigapath:mean-11 (mean of tiles after its layer "
        "11).",
        daily=True,
    )
    features: str | None = option(
        None,
        "Tile embeddings to pool, if the folder has several, such as "
        "256px_0.5mpp/features_uni2_h, features_uni2_h or uni2_h.",
        daily=True,
    )
    slide_weights: str | None = option(
        None,
        "Weights of the slide encoder: a local file, or a repository on the Hugging "
        "Face hub. For abmil, a model of `thinsection train`.",
    )
    tile_px_l0: int | None = option(
        None, "Edge of a tile in pixels of level 0, for files that do not state it."
    )
    stride_l0: int | None = option(
        None,
        "Step between tiles in pixels of level 0, for files that do not state it and "
        "have tiles that overlap.",
    )
    device: str = option(
        "auto", "Device of the slide encoder: auto, cpu, cuda or cuda:1.", daily=True
    )
    aggregate_memory: str = option(
        AggregateConfig().aggregate_memory,
        "Memory for the attention of the slide encoder.",
    )
    patients: Patients = option(
        AggregateConfig().patients,
        "Embedding of each patient, from all slides. late: the mean of the slide "
        "embeddings; early: all tiles as one slide.",
        daily=True,
    )
    cohort: str | None = option(
        None,
        "Table with the patient (case_id or patient_id) of each slide (slide_id or "
        "slide_path), for folders that do not state it.",
    )

    def __post_init__(self) -> None:
        parse_bytes(self.aggregate_memory, name="pooling.aggregate_memory")

    def needs(self) -> Iterator[Need]:
        """Packages of the slide encoder."""
        published = self.slide_weights is None
        yield needs_of_slide_encoder(self.slide_encoder, from_hub=published)


@dataclass(frozen=True, kw_only=True, repr=False)
class AggregateRunConfig(Settings):
    """All settings of `thinsection aggregate`, by section."""

    pooling: PoolingConfig = section(PoolingConfig, "Slide encoder")
    executor: ExecutorConfig = section(ExecutorConfig, "Workers and clusters")
