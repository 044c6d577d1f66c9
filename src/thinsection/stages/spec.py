"""Settings of a run as one frozen value, resolved once where they enter.

`resolve` is the last function that reads a `RunConfig`. The code below it takes the `RunSpec`,
which travels to workers as JSON or by pickle, or only the section that it needs.
"""

from dataclasses import asdict, dataclass
from typing import Literal

from thinsection.config import as_mapping, keywords_in_errors, replace_flat
from thinsection.encode.registry import check_encoder_name
from thinsection.errors import ConfigError
from thinsection.jobs.executor import ExecutorConfig
from thinsection.pool.encoder import check_slide_encoder
from thinsection.qc.tissue import TissueConfig
from thinsection.slide.annotations import RegionsConfig
from thinsection.stages.config import (
    CPU_BATCH,
    ENCODED,
    GPU_BATCH,
    EncodeConfig,
    OutputConfig,
    Patients,
    QcConfig,
    RunConfig,
    SegmentConfig,
    SlidesConfig,
)
from thinsection.tiles.budget import MAX_SCRATCH, StreamBudget, StreamConfig
from thinsection.tiles.grid import TilesConfig
from thinsection.tiles.transforms import StainConfig
from thinsection.types import PlainValues, parse_bytes

# settings of `EncodeConfig` that are not about how an encoder is loaded
_NOT_OF_LOADING = ("tokens", "device", "batch_size")


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
    precision: Literal["auto", "fp32", "fp16", "bf16"]
    engine: Literal["auto", "torch", "openvino"]
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


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Everything that a run depends on, checked, in one section per part of the program."""

    slides: SlidesConfig
    tissue: TissueConfig
    regions: RegionsConfig
    qc: QcConfig
    segment: SegmentConfig
    tiles: TilesConfig
    encoding: EncodingSpec
    stream: StreamConfig
    output: OutputConfig
    executor: ExecutorConfig
    settings: PlainValues  # settings as the user gave them, for the record

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


def resolve(
    config: RunConfig,
    overrides: PlainValues | None = None,
    *,
    own_encoder: str | None = None,
) -> RunSpec:
    """Resolves the settings of a run.

    Nothing is read, imported or downloaded; `check_run` does the checks that take seconds.

    Args:
        config: all settings.
        overrides: single settings by name, which replace those of `config`.
        own_encoder: name for an encoder of this process, in place of those of the settings.

    Raises:
        ConfigError: unknown setting, a wrong value, or two sources of the tissue.
        UnknownEncoderError: no such tile encoder or slide encoder.
    """
    if overrides:
        # settings by keyword: the caller knows no sections
        with keywords_in_errors(type(config)):
            plain = resolve(replace_flat(config, overrides), own_encoder=own_encoder)
        return plain
    if own_encoder is not None:
        _check_own_encoder(config)
        config = replace_flat(config, {"encoders": (own_encoder,)})
    encode = config.encode
    slide_encoders: tuple[str, ...] = ()
    if config.output.until == "slide-embeddings":
        slide_encoders = config.aggregate.slide_encoders
    encoding = EncodingSpec(
        stain=config.stain,
        encoders=encode.encoders if config.output.until in ENCODED else (),
        slide_encoders=slide_encoders,
        tokens=encode.tokens,
        weights=encode.weights,
        slide_weights=config.aggregate.slide_weights,
        pretrained=encode.pretrained,
        allow_remote_code=encode.allow_remote_code,
        device=encode.device,
        precision=encode.precision,
        engine=encode.engine,
        batch_size=encode.batch_size,
        seed=encode.seed,
        pooling_bytes=parse_bytes(config.aggregate.aggregate_memory),
        patients=config.aggregate.patients,
    )
    spec = RunSpec(
        slides=config.slides,
        tissue=config.tissue,
        regions=config.regions,
        qc=config.qc,
        segment=config.segment,
        tiles=config.tiles,
        encoding=encoding,
        stream=config.stream,
        output=config.output,
        executor=config.executor,
        settings=as_mapping(config),
    )
    for name in encoding.encoders if own_encoder is None else ():
        check_encoder_name(name)
    for name in slide_encoders:
        check_slide_encoder(name)
    _check_tissue_origins(spec)
    if spec.encoding.patients != "none" and not slide_encoders:
        raise ConfigError(
            "aggregate.patients must be 'none' in a run that ends before slide embeddings, got "
            f"{spec.encoding.patients!r} with output.until={spec.output.until!r}"
        )
    return spec


def _check_own_encoder(config: RunConfig) -> None:
    """Refuses settings about the encoders of a run that has an encoder of this process."""
    for name, default in asdict(EncodeConfig()).items():
        value = getattr(config.encode, name)
        if name in _NOT_OF_LOADING or value == default:
            continue
        raise ConfigError(
            f"encode.{name} must be left out with an encoder of this process, got {value!r}; "
            "set it where the encoder is made"
        )


def _check_tissue_origins(spec: RunSpec) -> None:
    """Allows only one of annotations, a network and quality control to define the tissue."""
    origins: dict[str, str | bool | None] = {
        "regions.tissue": spec.regions.tissue,
        "segment.tissue_segmenter": spec.segment.tissue_segmenter,
        "qc.qc": None if spec.qc.qc == "off" else spec.qc.qc,
    }
    named = {name: str(origin) for name, origin in origins.items() if origin}
    if len(named) > 1:
        pairs = " and ".join(f"{name} {origin!r}" for name, origin in named.items())
        raise ConfigError(
            f"{' and '.join(named)} exclude each other, because each of them decides what is "
            f"tissue, got {pairs}; drop {'one' if len(named) == 2 else 'all but one'} of them"
        )
