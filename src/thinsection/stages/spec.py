"""Settings of a run resolved and checked, its slides, and the graph of its stages.

Nothing of a slide is read here. `resolve` and `cohort_of` come first, then `check_run`, which makes
the stages; a worker makes them again with its models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from thinsection.config import keywords_in_errors, replace_flat
from thinsection.encode.registry import (
    EncoderIdentity,
    check_encoder_name,
    encoder_spec,
    is_declared_encoder,
)
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.jobs.executor import ALL_GPUS
from thinsection.machine import visible_gpus
from thinsection.pool.encoder import (
    SlideEncoderIdentity,
    check_declared_fit,
    check_fit,
    check_slide_encoder,
)
from thinsection.slide.annotations import RegionsConfig
from thinsection.slide.cohort import SlideEntry, load_cohort
from thinsection.slide.cohort_table import SlidesConfig
from thinsection.stages.config import ENCODED, EncodeConfig, RunConfig
from thinsection.stages.features import FeaturesStage, TokensStage
from thinsection.stages.formats import PLAIN
from thinsection.stages.leaves import (
    FormatStage,
    GraphStage,
    OverviewStage,
    PoolingStage,
    parse_graph_spec,
)
from thinsection.stages.masks import MaskStage, TissueStage
from thinsection.stages.stage import AnyStage
from thinsection.stages.tiles import MeasuresStage, TilesStage
from thinsection.tiles import load_filters
from thinsection.tiles.transforms import StainStatistics
from thinsection.types import PlainValues

if TYPE_CHECKING:
    from thinsection.encode import TileEncoder
    from thinsection.pool import SlideEncoder
    from thinsection.stages.cells import CellCountsStage, CellsStage
    from thinsection.stages.checks import QcStage
    from thinsection.stages.regions import SegmentStage

# settings of `EncodeConfig` that do not say how an encoder is loaded
_SETTINGS_NOT_FOR_LOADING = ("tokens", "device", "batch_size")
# slides as a caller names them: files, folders, URLs or cohort tables; or finished entries
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
        encode = replace(config.encode, encoders=(own_encoder,))
        config = replace(config, encode=encode)
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
        if name in _SETTINGS_NOT_FOR_LOADING or value == default:
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
    chosen = {name: str(origin) for name, origin in origins.items() if origin}
    if len(chosen) > 1:
        pairs = " and ".join(f"{name} {origin!r}" for name, origin in chosen.items())
        raise ConfigError(
            f"{' and '.join(chosen)} exclude each other, because each of them decides what is "
            f"tissue, got {pairs}; drop {'one' if len(chosen) == 2 else 'all but one'} of them"
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
    items = [slides] if isinstance(slides, str | Path) else slides
    entries = tuple(item for item in items if isinstance(item, SlideEntry))
    if entries and len(entries) == len(items):
        return entries
    entries = load_cohort([str(item) for item in items], settings, on_message)
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


def check_run(spec: RunConfig) -> tuple[AnyStage, ...]:
    """Refuses settings, in seconds, that would otherwise fail for each slide.

    Returns:
        The stages of the run that need no model.

    Raises:
        ConfigError: unknown tile filter, invalid graph, a rule without checks, or a reference
            without measures.
        MissingDependencyError: a format whose package is not installed.
        BudgetError: the memory is below the minimum of the stream.
        InvalidInputError: a slide encoder was trained on tiles of another encoder or size.
    """
    load_filters(spec.tiles.tile_filter)
    if spec.output.until == "segments" and not spec.segment.segmenters:
        raise ConfigError("segmenters must name one, got none; pass segmenters=...")
    if spec.qc.qc == "off" and spec.qc.qc_edits:
        raise ConfigError(
            f"qc_edits must be combined with qc, got {spec.qc.qc_edits!r} and qc off; pass "
            'qc="auto"'
        )
    if spec.qc.qc == "off" and (spec.qc.qc_fail or spec.output.until == "qc"):
        raise ConfigError(
            'qc_fail must be combined with qc, got qc off; pass qc="auto"'
        )
    if spec.qc.qc == "off" and spec.qc.qc_remove:
        raise ConfigError(
            'qc_remove must be combined with qc, got qc off; pass qc="auto"'
        )
    if spec.output.measures_reference is not None and not spec.output.measures:
        raise ConfigError(
            "measures_reference must be combined with measures, got it alone; pass measures=True"
        )
    # These are checked even if the run ends before it uses them: a wrong value must not be ignored.
    if spec.output.graph:
        parse_graph_spec(spec.output.graph)
    if spec.qc.qc_rules is not None:
        from thinsection.report.verdict import load_rules

        load_rules(spec.qc.qc_rules)
    segment_stages(spec, None)
    stages = stages_of(spec)
    for stage in stages:
        stage.check_run()
    # refuse tiles that a slide encoder was not trained on, before any weights are loaded
    declared = [
        name.partition("@")[0]
        for name in spec.encoding.encoders
        if is_declared_encoder(name)
    ]
    for slide_encoder in spec.encoding.slide_encoders:
        for tile_encoder in declared:
            check_declared_fit(slide_encoder, tile_encoder, spec.tiles.tile_px)
    batch_size = spec.batch_size(on_gpu=False) if spec.encoding.batch_size else 1
    spec.stream_budget(batch_size)
    return stages


def notes_on_tiles(spec: RunConfig) -> list[str]:
    """A line for each declared encoder that was made for other tiles than those of the run.

    Encoders for any resolution are left out, and so are grids at the slide's own resolution, which
    is not known yet.
    """
    notes = []
    for name in spec.encoding.encoders:
        if not is_declared_encoder(name):
            continue
        encoder = encoder_spec(name)
        for grid in spec.tiles.grids:
            if encoder.tile_mpp is None or grid.mpp is None:
                continue
            is_same_mpp = abs(grid.mpp / encoder.tile_mpp - 1) <= grid.mpp_tolerance
            if is_same_mpp and grid.tile_px == encoder.tile_px:
                continue
            notes.append(
                f"{encoder.name} was made for tiles of {encoder.tile_px} px at "
                f"{encoder.tile_mpp:g} µm/px; yours are {grid.tile_px} px at {grid.mpp:g} µm/px, "
                f"and the network sees {encoder.input_px} px"
            )
    return notes


@dataclass(frozen=True, kw_only=True)
class Models:
    """A run's models; empty if nothing is embedded. Its stages depend on their identities alone."""

    encoders: tuple[EncoderIdentity, ...] = ()
    slide_encoders: tuple[SlideEncoderIdentity, ...] = ()
    # colours that tiles are normalised to; None if normalisation is off
    stain_target: StainStatistics | None = None
    # the models themselves, in the same order, in a process that encodes
    loaded_encoders: tuple[TileEncoder, ...] = ()
    loaded_slide_encoders: tuple[SlideEncoder, ...] = ()


def stages_of(spec: RunConfig, models: Models | None = None) -> tuple[AnyStage, ...]:
    """Every stage of a run up to its last result; each stage follows those that it needs.

    All tile grids share the tissue and the segmentations. Without models these are the stages that
    embed nothing.

    Raises InvalidInputError: a slide encoder accepts none of the encoders' embeddings.
    Raises ConfigError, WeightsError: as `mask_stage` and `segment_stages`.
    """
    models = models or Models()
    mask = mask_stage(spec)
    stages = _with_needs(mask)
    cells: list[CellsStage] = []
    if spec.cells.cells:
        from thinsection.stages.cells import CellsStage

        for source in spec.cells.cells:
            cells.append(CellsStage(config=spec.cells, source=source, mask=mask))
        stages += cells
    ends_early = spec.output.until in ("tissue", "qc")
    if spec.qc.qc != "off":
        stages += _check_stages(spec, mask, has_overview=not ends_early)
    if ends_early:
        return tuple(stages)
    segments: tuple[AnyStage, ...] = ()
    if not spec.segment.tissue_segmenter:
        segments = segment_stages(spec, mask)
    if spec.output.until == "segments":
        return tuple(_appended(stages, segments))
    roi = None
    if spec.regions.roi:
        from thinsection.stages.regions import RegionsStage

        roi = RegionsStage(config=spec.regions, role="roi")
        stages.append(roi)
    stages = _appended(stages, segments)
    embeddings: list[FeaturesStage] = []
    for config in spec.tiles.grids:
        tiles = TilesStage(config=config, mask=mask, segments=segments, roi=roi)
        features, others = _grid_stages(spec, tiles, models)
        counts = _count_stages(tiles, cells)
        stages += [tiles, *counts, *features, *others]
        embeddings += features
    stages += _pooling_stages(embeddings, models)
    return tuple(stages)


def _count_stages(
    tiles: TilesStage, cells: Sequence[CellsStage]
) -> list[CellCountsStage]:
    """Stages that count each kind of cells in the tiles of a grid."""
    if not cells:
        return []
    from thinsection.stages.cells import CellCountsStage

    return [CellCountsStage(tiles=tiles, cells=stage) for stage in cells]


def grids_of(stages: Sequence[AnyStage]) -> tuple[TilesStage, ...]:
    """The tile grids among a run's stages."""
    return tuple(stage for stage in stages if isinstance(stage, TilesStage))


def grid_names(stages: Sequence[AnyStage]) -> tuple[str, ...]:
    """Names of the tile grids among a run's stages."""
    return tuple(stage.grid for stage in grids_of(stages))


def _with_needs(stage: AnyStage) -> list[AnyStage]:
    """The stages that a stage needs, directly or not, and then the stage itself."""
    stages: list[AnyStage] = []
    for need in stage.needs:
        stages = _appended(stages, _with_needs(need))
    return [*stages, stage]


def _appended(stages: Sequence[AnyStage], others: Sequence[AnyStage]) -> list[AnyStage]:
    """The stages, then those of the others that are not among them."""
    return [*stages, *(stage for stage in others if stage not in stages)]


def mask_stage(spec: RunConfig) -> MaskStage:
    """Stage that detects the tissue.

    Quality control uses its preset, or the current content of its file.

    Raises ConfigError: no such pipeline, or its segmenter is unknown or lacks a class.
    Raises WeightsError: the weights of that segmenter are missing.
    """
    # a stage is imported only if the run has it
    reader = spec.slides.reader
    if spec.regions.tissue:
        from thinsection.stages.regions import AnnotatedTissueStage, RegionsStage

        annotations = RegionsStage(config=spec.regions, role="tissue")
        return AnnotatedTissueStage(
            config=spec.tissue, reader=reader, regions=annotations
        )
    if spec.segment.tissue_segmenter:
        from thinsection.stages.regions import SegmentedTissueStage

        (segments,) = segment_stages(spec, None)
        return SegmentedTissueStage(
            config=spec.tissue, reader=reader, segments=segments
        )
    if spec.qc.qc == "off":
        return TissueStage(config=spec.tissue, reader=reader)
    return qc_stage(spec)


def qc_stage(spec: RunConfig) -> QcStage:
    """Stage of a run's quality control; the run must ask for it. Raises as `mask_stage`."""
    from thinsection.qc import load_pipeline
    from thinsection.stages.checks import QcStage

    pipeline = load_pipeline(spec.qc.qc, remove=spec.qc.qc_remove)
    segments = None
    source = pipeline.segmenter
    if source is not None:
        # the pipeline uses classes that are computed inside the default tissue mask
        segments = _segment_stage(
            spec,
            source.name,
            source.weights,
            TissueStage(config=spec.tissue, reader=spec.slides.reader),
        )
        source.refuse_unknown(segments.segmenter.spec.classes)
    return QcStage(
        pipeline=pipeline,
        source=spec.qc.qc,
        reader=spec.slides.reader,
        strict=spec.qc.qc_strict,
        removes=tuple(sorted(set(spec.qc.qc_remove))),
        rules=spec.qc.qc_fail,
        verdict_rules=spec.qc.qc_rules,
        device=spec.qc.qc_device,
        segments=segments,
        edits=spec.qc.qc_edits,
    )


def _check_stages(
    spec: RunConfig, mask: MaskStage, *, has_overview: bool
) -> list[AnyStage]:
    """Stages of the pictures of quality control, which made the mask."""
    from thinsection.stages.checks import QcOverlayStage, QcPicturesStage, QcStage

    assert isinstance(mask, QcStage)
    stages: list[AnyStage] = []
    if spec.qc.qc_pictures:
        stages.append(QcPicturesStage(qc=mask))
    if not (has_overview and spec.output.overview):
        stages.append(QcOverlayStage(qc=mask))
    return stages


def _segment_stage(
    spec: RunConfig, name: str, weights: str | None, mask: MaskStage | None
) -> SegmentStage:
    """Stage of one segmenter, inside `mask`; None segments the whole slide."""
    from thinsection.segment import load_segmenter
    from thinsection.stages.regions import SegmentStage

    segmenter = load_segmenter(
        name,
        weights=weights,
        device=spec.encoding.device,
        trust_code=spec.segment.trust_code,
    )
    return SegmentStage(
        segmenter=segmenter,
        config=spec.segment,
        mask=mask,
        reader=spec.slides.reader,
        stream=spec.stream,
    )


def segment_stages(spec: RunConfig, mask: MaskStage | None) -> tuple[SegmentStage, ...]:
    """One stage per segmenter, inside `mask`; None segments the whole slide.

    A segmenter that quality control runs already is not run a second time.

    Raises ConfigError: unknown segmenter, or two with a class of the same name.
    Raises WeightsError: the weights are missing.
    """
    stages = []
    class_names: list[str] = []
    needs_of_mask = () if mask is None else mask.needs
    for name in spec.segment.segmenters:
        stage = _segment_stage(spec, name, spec.segment.segment_weights, mask)
        class_names += stage.segmenter.spec.classes
        for other in needs_of_mask:
            if isinstance(other, type(stage)) and other.is_same_network(stage):
                stage = other
        stages.append(stage)
    if len(set(class_names)) < len(class_names):
        raise ConfigError(
            "classes of a run's segmenters must have different names, got "
            f"{', '.join(class_names)}"
        )
    return tuple(stages)


def _grid_stages(
    spec: RunConfig, tiles: TilesStage, models: Models
) -> tuple[list[FeaturesStage], list[AnyStage]]:
    """Embeddings of a grid's tiles, and the other stages of the grid, if the run asks for them."""
    output = spec.output
    features: list[FeaturesStage] = []
    others: list[AnyStage] = []
    for encoder in models.encoders:
        stage = FeaturesStage(
            tiles=tiles,
            encoder=encoder.label,
            identity=encoder.provenance,
            dtype=output.embedding_dtype,
            stain=spec.encoding.stain,
            target=models.stain_target,
        )
        features.append(stage)
        if spec.encoding.tokens and encoder.supports_tokens:
            others.append(TokensStage(features=stage))
    measures = None
    if output.measures:
        measures = MeasuresStage(tiles=tiles, reference=output.measures_reference)
        others.append(measures)
    if output.overview:
        others.append(OverviewStage(tiles=tiles))
    if output.graph:
        others.append(GraphStage(tiles=tiles, spec=output.graph))
    for name in output.write:
        columns = None if name in PLAIN else measures
        for stage in features:
            others.append(FormatStage(features=stage, format=name, measures=columns))
    return features, others


def _pooling_stages(
    embeddings: Sequence[FeaturesStage], models: Models
) -> list[PoolingStage]:
    """Stages of each slide encoder, one for each kind of embeddings that it accepts."""
    names = {encoder.label: encoder.name for encoder in models.encoders}
    stages = []
    for slide_encoder in models.slide_encoders:
        refusals: list[InvalidInputError] = []
        for stage in embeddings:
            tiles = stage.tiles.config
            try:
                check_fit(slide_encoder, names[stage.encoder], tiles.tile_px, tiles.mpp)
            except InvalidInputError as error:
                refusals.append(error)
                continue
            stages.append(PoolingStage(features=stage, slide_encoder=slide_encoder))
        if refusals and len(refusals) == len(embeddings):
            raise refusals[0]
    return stages
