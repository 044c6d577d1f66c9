"""Settings of a run and of pooling alone; the command line, TOML and the plan derive from these."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinsection.config import option, section
from thinsection.encode.registry import our_name, our_slide_encoder
from thinsection.errors import ConfigError
from thinsection.jobs.executor import ExecutorConfig
from thinsection.qc.tissue import TissueConfig
from thinsection.segment.segmenter import SegmentConfig
from thinsection.slide.annotations import RegionsConfig
from thinsection.slide.cohort_table import path_columns
from thinsection.slide.look import Look
from thinsection.slide.readers import AUTO, reader_choices
from thinsection.stages.formats import FORMATS
from thinsection.store.identity import FingerprintMode
from thinsection.stream.budget import StreamConfig
from thinsection.tiles.grid import TilesConfig
from thinsection.tiles.transforms import StainConfig
from thinsection.types import parse_bytes

# results of a run, in the order in which they are made
LastResult = Literal[
    "tissue", "qc", "segments", "tiles", "embeddings", "slide-embeddings"
]
TILED = ("tiles", "embeddings", "slide-embeddings")  # with a tile grid
ENCODED = ("embeddings", "slide-embeddings")  # with encoders
CPU_BATCH = 32  # tiles
GPU_BATCH = 256  # tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidesConfig:
    """Settings of opening slides."""

    reader: str = option(
        AUTO,
        "'auto' takes the fastest that agrees with OpenSlide's px.",
        choices=reader_choices,
    )
    fingerprint: FingerprintMode = option(
        "times",
        "How a slide's file is known again; times: size, samples and time stamps, every byte where "
        "only the time differs; full: every byte; samples: size and 8 samples.",
    )
    slide_mpp: str | None = option(
        None, "µm/px of level 0 where files lack it: 0.25, 0.25x0.26."
    )
    channels: str | None = option(
        None,
        "One to three channels, shown as RGB, of files with more or 16 bit: 'DAPI,CD3', '0,2'.",
    )
    channel_range: str = option(
        ",".join(f"{share:g}" for share in Look().percentiles),
        "Percentiles of a channel's px that become 0 and 255.",
    )
    icc: bool = option(False, "Convert px by the file's ICC profile to sRGB.")
    name_pattern: str | None = option(
        None,
        "Regular expression whose named groups, found in a slide's path, are columns of every "
        r"table: '(?P<cohort>[^/]+)/(?P<case_id>TCGA-\w\w-\w{4})'.",
    )

    def __post_init__(self) -> None:
        _ = self.look  # refuses impossible channels and percentiles
        if self.name_pattern is not None:
            path_columns(self.name_pattern, "")

    @property
    def look(self) -> Look | None:
        """Channels and profile that turn pixels into RGB; None leaves the pixels as they are."""
        if self.channels is None and not self.icc:
            return None
        parts = [part.strip() for part in (self.channels or "").split(",")]
        names = tuple(part for part in parts if part)
        try:
            low, high = map(float, self.channel_range.split(","))
        except ValueError:
            raise ConfigError(
                "slides.channel_range must be two percentiles such as '1,99', "
                f"got {self.channel_range!r}"
            ) from None
        return Look(channels=names, percentiles=(low, high), icc=self.icc)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeConfig:
    """Tile encoders, and the devices that they run on."""

    encoders: tuple[str, ...] = option(
        ("efficientnet_lite0",),
        "Tile encoder; repeat for several, each tile is read once for all: a name of "
        "`thinsection models`, timm:NAME, hf:REPO, a file.",
        flag="--encoder",
    )
    tokens: bool = option(
        False, "Also store the dense token grid of encoders that have one."
    )
    weights: str | None = option(
        None, "Local weights of the encoder: safetensors, or safe .pth."
    )
    pretrained: bool = option(
        True, "Load weights; --no-pretrained takes seeded random ones."
    )
    allow_remote_code: bool = option(False, "Let a hub repository run its own code.")
    device: str = option("auto", "auto, cpu, cuda, cuda:1 or mps.")
    precision: Literal["auto", "fp32", "fp16", "bf16"] = option(
        "auto", "Encoder's arithmetic."
    )
    engine: Literal["auto", "torch", "openvino"] = option(
        "auto",
        "What computes on a CPU; auto: openvino if it is installed and agrees with torch.",
    )
    batch_size: int = option(0, "Tiles per batch; 0: 32 on a CPU, 256 on a GPU.")
    seed: int = option(0, "Seed of random weights.")

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
                f"encode.weights must go with one encoder, got {count}; "
                "run them one after the other into the same --out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregateConfig:
    """Slide encoders that pool the tile embeddings."""

    slide_encoders: tuple[str, ...] = option(
        ("mean",),
        "Slide encoder; repeat for several: mean, max, abmil, titan, gigapath, another's. "
        "gigapath:cls and gigapath:mean-11 take its class token and a layer.",
        flag="--slide-encoder",
    )
    slide_weights: str | None = option(
        None, "The slide encoder's weights: local, or on the hub."
    )
    aggregate_memory: str = option("1GiB", "Memory of the slide encoder's attention.")

    def __post_init__(self) -> None:
        our_names = tuple(map(our_slide_encoder, self.slide_encoders))
        object.__setattr__(self, "slide_encoders", our_names)


@dataclass(frozen=True, slots=True, kw_only=True)
class QcConfig:
    """Quality control inside a run."""

    qc: str = option(
        "off",
        "QC of the tiles: off, auto, histoqc-default (-light, -ihc, ...), or a .toml file.",
    )
    qc_fail: tuple[str, ...] = option(
        (), "Leave out slides by rule: 'pixels_to_use<1000'; repeat."
    )
    qc_rules: Path | None = option(
        None, "TOML of the page's verdicts in place of the ready rules."
    )
    qc_strict: bool = option(
        False, "Let a check take most of a slide's tissue, as HistoQC does."
    )
    qc_device: str = option("cpu", "Where the checks are computed: cpu or cuda.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """Last result of a run, further files, and how existing files are treated."""

    until: LastResult = option("slide-embeddings", "Last result of the run.")
    write: tuple[str, ...] = option(
        (), "Further formats; repeat.", choices=FORMATS.names
    )
    embedding_dtype: Literal["float32", "float16"] = option(
        "float32", "Type of stored embeddings."
    )
    graph: str | None = option(
        None, "Spatial graph of the tiles: knn:8 or radius:100 (µm)."
    )
    measures: bool = option(
        False,
        "Per tile colours, extremes, focus and stains; per slide stain vectors, distance.",
    )
    measures_reference: Path | None = option(
        None,
        "Results folder whose slides are the usual; without one, those of the run.",
    )
    overview: bool = option(
        True, "One PNG per slide: thumbnail, tissue outline, tiles."
    )
    allow_empty: bool = option(
        False, "Exit with 0 although slides end without any tile."
    )
    resume: bool = option(True, "Skip what is done with the same settings and input.")
    overwrite: bool = option(
        False, "Replace results of another slide file, and all made of them."
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run, by section."""

    slides: SlidesConfig = section(SlidesConfig)
    tissue: TissueConfig = section(TissueConfig)
    regions: RegionsConfig = section(RegionsConfig)
    qc: QcConfig = section(QcConfig)
    segment: SegmentConfig = section(SegmentConfig)
    tiles: TilesConfig = section(TilesConfig)
    stain: StainConfig = section(StainConfig)
    encode: EncodeConfig = section(EncodeConfig)
    aggregate: AggregateConfig = section(AggregateConfig)
    stream: StreamConfig = section(StreamConfig)
    output: OutputConfig = section(OutputConfig)
    executor: ExecutorConfig = section(ExecutorConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """Slide encoder for stored tile embeddings, and facts that their files may lack."""

    slide_encoder: str = option(
        "mean",
        "mean, max, abmil, titan, gigapath (gigapath:cls, gigapath:mean-11), or an entry point's.",
    )
    features: str | None = option(
        None, "Only these embeddings: GRID/features_NAME, or a part."
    )
    slide_weights: str | None = option(
        None, "The slide encoder's weights: local, or on the hub."
    )
    tile_px_l0: int | None = option(
        None, "Tile edge in level-0 px where files do not say."
    )
    stride_l0: int | None = option(
        None,
        "Step between tiles in level-0 px where files do not say and tiles overlap.",
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:1.")
    aggregate_memory: str = option(
        AggregateConfig().aggregate_memory, "Memory of the encoder's attention."
    )

    def __post_init__(self) -> None:
        parse_bytes(self.aggregate_memory, name="pooling.aggregate_memory")


@dataclass(frozen=True, kw_only=True)
class AggregateRunConfig:
    """All settings of `thinsection aggregate`, by section."""

    pooling: PoolingConfig = section(PoolingConfig)
    executor: ExecutorConfig = section(ExecutorConfig)
