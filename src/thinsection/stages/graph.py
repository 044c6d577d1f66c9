"""Makes the graph of stages from a resolved run; each stage follows those that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thinsection.encode.registry import EncoderIdentity
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.pool.encoder import SlideEncoderIdentity, check_fit
from thinsection.stages.config import RunConfig
from thinsection.stages.features import FeaturesStage, TokensStage
from thinsection.stages.formats import PLAIN
from thinsection.stages.leaves import (
    FormatStage,
    GraphStage,
    OverviewStage,
    PoolingStage,
)
from thinsection.stages.masks import MaskStage, TissueStage
from thinsection.stages.stage import AnyStage
from thinsection.stages.tiles import MeasuresStage, TilesStage
from thinsection.tiles.transforms import StainLook

if TYPE_CHECKING:
    from thinsection.encode import TileEncoder
    from thinsection.pool import SlideEncoder
    from thinsection.stages.checks import QcStage
    from thinsection.stages.regions import SegmentStage


@dataclass(frozen=True, kw_only=True)
class Models:
    """A run's models; empty if nothing is embedded. Its stages depend on their identities alone."""

    encoders: tuple[EncoderIdentity, ...] = ()
    slide_encoders: tuple[SlideEncoderIdentity, ...] = ()
    # colours that tiles are normalised to; None if normalisation is off
    stain_target: StainLook | None = None
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
        stages += [tiles, *features, *others]
        embeddings += features
    stages += _pooling_stages(embeddings, models)
    return tuple(stages)


def grids_of(stages: Sequence[AnyStage]) -> tuple[TilesStage, ...]:
    """The tile grids among a run's stages."""
    return tuple(stage for stage in stages if isinstance(stage, TilesStage))


def grid_names(stages: Sequence[AnyStage]) -> tuple[str, ...]:
    """Names of the tile grids among a run's stages."""
    return tuple(stage.grid for stage in grids_of(stages))


def _with_needs(stage: AnyStage) -> list[AnyStage]:
    """A stage after all stages from whose results it is made."""
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
    # what a run does not ask for is not imported
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

    pipeline = load_pipeline(spec.qc.qc)
    segments = None
    source = pipeline.segmenter
    if source is not None:
        # the classes that the pipeline takes, inside the default tissue mask
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
        rules=spec.qc.qc_fail,
        device=spec.qc.qc_device,
        segments=segments,
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

    A segmenter whose classes quality control has taken already is not run a second time.

    Raises ConfigError: unknown segmenter, or two with a class of the same name.
    Raises WeightsError: the weights are missing.
    """
    stages = []
    class_names: list[str] = []
    taken = () if mask is None else mask.needs
    for name in spec.segment.segmenters:
        stage = _segment_stage(spec, name, spec.segment.segment_weights, mask)
        class_names += stage.segmenter.spec.classes
        for other in taken:
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
        measures = MeasuresStage(tiles=tiles)
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
