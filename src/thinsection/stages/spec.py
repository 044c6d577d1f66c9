"""Settings of a run resolved and checked, and its slides, before any slide is opened."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from thinsection.config import keywords_in_errors, replace_flat
from thinsection.encode.registry import check_encoder_name, is_declared_encoder
from thinsection.errors import ConfigError, MissingDependencyError
from thinsection.jobs.executor import ALL_GPUS
from thinsection.machine import visible_gpus
from thinsection.pool.encoder import check_declared_fit, check_slide_encoder
from thinsection.qc.rules import parse_rule
from thinsection.slide.annotations import RegionsConfig
from thinsection.slide.cohort import SlideEntry, load_cohort
from thinsection.slide.cohort_table import parse_mpp
from thinsection.stages.config import ENCODED, EncodeConfig, RunConfig, SlidesConfig
from thinsection.stages.formats import FORMATS
from thinsection.stages.graph import qc_stage, segment_stages
from thinsection.stages.leaves import parse_graph_spec
from thinsection.tiles import load_filters
from thinsection.types import PlainValues

# settings of `EncodeConfig` that are not about how an encoder is loaded
_NOT_OF_LOADING = ("tokens", "device", "batch_size")
# what a caller may pass as slides; entries are taken as they are
Slides = Sequence[str | Path | SlideEntry] | str | Path


def resolve(
    config: RunConfig,
    overrides: PlainValues | None = None,
    *,
    own_encoder: str | None = None,
) -> RunConfig:
    """Settings of a run with the overrides, checked together.

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
    encoding = config.encoding
    for name in encoding.encoders if own_encoder is None else ():
        check_encoder_name(name)
    for name in encoding.slide_encoders:
        check_slide_encoder(name)
    _check_tissue_origins(config)
    if encoding.patients != "none" and not encoding.slide_encoders:
        raise ConfigError(
            "aggregate.patients must be 'none' in a run that ends before slide embeddings, got "
            f"{encoding.patients!r} with output.until={config.output.until!r}"
        )
    return config


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


def _check_tissue_origins(spec: RunConfig) -> None:
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


def cohort_of(
    slides: Slides,
    settings: SlidesConfig,
    regions: RegionsConfig | None = None,
    on_message: Callable[[str], None] = lambda text: None,
) -> tuple[SlideEntry, ...]:
    """Slides of a cohort; slides without a resolution get the one from the settings.

    A command reads the cohort once, and hands its entries on.

    Raises CohortError: no slides; ConfigError: no file of annotations fits these slides.
    """
    named = [slides] if isinstance(slides, str | Path) else slides
    entries = tuple(item for item in named if isinstance(item, SlideEntry))
    if entries and len(entries) == len(named):
        return entries
    mpp = None
    if settings.slide_mpp:
        mpp = parse_mpp(settings.slide_mpp, where="slides.slide_mpp")
    entries = load_cohort(
        [str(item) for item in named],
        slide_mpp=mpp,
        on_message=on_message,
        look=settings.look,
        image=settings.image,
        name_pattern=settings.name_pattern,
        allow_local_urls=settings.allow_local_urls,
    )
    if regions is not None:
        regions.check(entries)
    return entries


def with_all_gpus(config: RunConfig) -> RunConfig:
    """Settings of a run that encodes with a worker on each GPU of this machine.

    They change only if there are several GPUs, and the settings name neither a device, GPUs,
    workers nor an executor. It is for the command line: worker processes import the script of
    their parent, which must be prepared for that.
    """
    executor = config.executor
    chosen = (executor.gpus, executor.scheduler, executor.jobqueue)
    is_chosen = executor.executor != "auto" or executor.workers > 0 or any(chosen)
    on_gpus = config.output.until in ENCODED and config.encode.device == "auto"
    if is_chosen or not on_gpus or len(visible_gpus()) < 2:
        return config
    return replace(config, executor=replace(executor, gpus=ALL_GPUS))


def check_run(spec: RunConfig) -> None:
    """Checks in seconds what would otherwise fail for each slide.

    Raises:
        ConfigError: unknown tile filter, invalid graph, or a rule without checks.
        MissingDependencyError: a format whose package is not installed.
        BudgetError: the memory is below the minimum of the stream.
        InvalidInputError: a slide encoder was trained on tiles of another encoder or size.
    """
    load_filters(spec.tiles.tile_filter)
    segments = segment_stages(spec, None)
    if spec.output.until == "segments" and not segments:
        raise ConfigError("segmenters must name one, got none; pass --segmenter")
    _check_quality_control(spec)
    if spec.output.graph:
        parse_graph_spec(spec.output.graph)
    for name in spec.output.write:
        entry = FORMATS.entry(name)
        if entry.missing:
            raise MissingDependencyError(
                f"--write {name} needs {', '.join(entry.missing)}; {entry.remedy}"
            )
    # tiles that a slide encoder was not trained on, before any weights are loaded
    declared = [name for name in spec.encoding.encoders if is_declared_encoder(name)]
    for slide_encoder in spec.encoding.slide_encoders:
        for tile_encoder in declared:
            check_declared_fit(slide_encoder, tile_encoder, spec.tiles.tile_px)
    batch_size = spec.batch_size(on_gpu=False) if spec.encoding.batch_size else 1
    spec.stream_budget(batch_size)


def _check_quality_control(spec: RunConfig) -> None:
    """Reads rules, pipeline and segmenter, and trains the pixel models that the checks need."""
    # imports the checks and their page, which a run without quality control does not need
    if spec.qc.qc_rules is not None:
        from thinsection.report.verdict import load_rules

        load_rules(spec.qc.qc_rules)
    for rule in spec.qc.qc_fail:
        parse_rule(rule)
    if spec.qc.qc != "off":
        from thinsection.qc import prepare_models

        prepare_models(qc_stage(spec).pipeline)
    elif spec.qc.qc_fail or spec.output.until == "qc":
        raise ConfigError(
            "qc_fail must be combined with --qc, got --qc off; pass --qc auto"
        )
