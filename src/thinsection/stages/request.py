"""From settings to the graph of stages that a run asks for."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinsection.errors import (
    ConfigError,
    InvalidInputError,
    MissingDependencyError,
    require,
)
from thinsection.qc import load_pipeline, prepare_models
from thinsection.qc.engine import parse_rule
from thinsection.report.verdict import load_rules
from thinsection.segment import load_segmenter
from thinsection.slide.cohort import SlideEntry, load_cohort, parse_mpp
from thinsection.stages import leaves, regions
from thinsection.stages.config import (
    Goal,
    RunConfig,
    batch_size_of,
    budget_of,
    check_encoder_names,
)
from thinsection.stages.formats import FORMATS, PLAIN
from thinsection.stages.masks import QcStage, TissueStage
from thinsection.stages.stage import Stage
from thinsection.stages.tiles import FeaturesStage, TilesStage, TokensStage
from thinsection.tiles import load_filters
from thinsection.tiles.transforms import StainLook

if TYPE_CHECKING:
    from thinsection.encode import TileEncoder
    from thinsection.pool import SlideEncoder


def cohort_of(
    slides: Sequence[str | Path],
    config: RunConfig,
    on_message: Callable[[str], None] = lambda text: None,
) -> tuple[SlideEntry, ...]:
    """`load_cohort` with the resolution that the settings give to slides without one."""
    given = config.slides.slide_mpp
    mpp = parse_mpp(given, where="slides.slide_mpp") if given else None
    how: dict[str, Any] = {
        "look": config.slides.look,
        "name_pattern": config.slides.name_pattern,
    }
    entries = load_cohort(slides, slide_mpp=mpp, on_message=on_message, **how)
    config.regions.check(entries)
    if config.regions.tissue:
        mask_stage(config)  # says what does not go together
    return entries


def check_settings(config: RunConfig, goal: Goal) -> None:
    """Finds out in seconds what would else fail slide by slide.

    Raises:
        UnknownEncoderError: no such encoder.
        ConfigError: unknown tile filter, a graph that is not one, a rule without checks.
        MissingDependencyError: a format whose package is not installed.
        BudgetError: the memory does not hold the stream's least.
    """
    check_encoder_names(config, goal)
    load_filters(config.tiles.tile_filter)
    named = segment_stages(config, None)
    rule = "goal 'segment' must have a segmenter"
    require(
        named or goal != "segment", rule, "none; pass --segmenter", error=ConfigError
    )
    load_rules(config.qc.qc_rules)
    for rule in config.qc.qc_fail:
        parse_rule(rule)
    if config.qc.qc != "off":
        prepare_models(load_pipeline(config.qc.qc))
    elif config.qc.qc_fail or goal == "qc":
        raise ConfigError("qc_fail must go with --qc, got --qc off; pass --qc auto")
    if config.output.graph:
        leaves.parse_graph_spec(config.output.graph)
    for entry in map(FORMATS.entry, config.output.write):
        if entry.missing:
            needs = f"--write {entry.name} needs {', '.join(entry.missing)}"
            raise MissingDependencyError(f"{needs}; {entry.remedy}")
    budget_of(
        config, batch_size_of(config, on_gpu=False) if config.encode.batch_size else 1
    )


@dataclass(frozen=True, kw_only=True)
class Models:
    """What a process loads once for all its slides; empty for goals that embed nothing."""

    encoders: tuple["TileEncoder", ...] = ()
    slide_encoders: tuple["SlideEncoder", ...] = ()
    stain_target: StainLook | None = (
        None  # what tiles are normalised to; None where that is off
    )

    @property
    def identities(self) -> dict[str, Any]:
        """What made a result, by label."""
        tiles = {encoder.label: encoder.provenance for encoder in self.encoders}
        return tiles | {
            encoder.name: encoder.identity for encoder in self.slide_encoders
        }


def stages_of(config: RunConfig, goal: Goal, models: Models) -> tuple[Stage, ...]:
    """Every stage of a run up to a goal, each after what it needs.

    Raises InvalidInputError: a slide encoder takes none of the encoders' embeddings.
    """
    mask = mask_stage(config)
    first: list[Stage] = [*mask.needs, mask]
    if goal in ("tissue", "qc"):
        return tuple(first)
    by_network = isinstance(mask, regions.SegmentedTissueStage)
    segments = () if by_network else segment_stages(config, mask)
    roi = (
        regions.RegionsStage(config=config.regions, role="roi")
        if config.regions.roi
        else None
    )
    if goal == "segment":
        return (*first, *segments)
    tiles = TilesStage(config=config.tiles, mask=mask, segments=segments, roi=roi)
    first, output = [*first, *([roi] if roi else [])], config.output
    how: dict[str, Any] = {
        "target": models.stain_target,
        "dtype": output.embedding_dtype,
    }
    of_grid = partial(FeaturesStage, tiles=tiles, stain=config.stain, **how)
    features = [
        of_grid(encoder=e.label, identity=e.provenance) for e in models.encoders
    ]
    stages: list[Stage] = [*first, *segments, tiles, *features]
    if config.encode.tokens:
        pairs = zip(features, models.encoders)
        stages += [TokensStage(features=f) for f, e in pairs if e.spec.supports_tokens]
    measures = leaves.MeasuresStage(tiles=tiles) if output.measures else None
    stages += [measures] if measures else []
    if output.overview:
        stages.append(leaves.OverviewStage(tiles=tiles))
    if output.graph:
        stages.append(leaves.GraphStage(tiles=tiles, spec=output.graph))
    for name in output.write:
        known = None if name in PLAIN else measures
        stages += [
            leaves.FormatStage(features=f, format=name, measures=known)
            for f in features
        ]
    return (*stages, *_pooling(config, features, models))


def mask_stage(config: RunConfig) -> TissueStage | QcStage:
    """What says where the tissue is; quality control by its preset or file as that is now."""
    reader, qc, network = (
        config.slides.reader,
        config.qc,
        config.segment.tissue_segmenter,
    )
    origins = {"tissue": config.regions.tissue, "tissue_segmenter": network}
    given = [name for name, wanted in origins.items() if wanted]
    rule = f"{' and '.join(given)} must go without qc and each other"
    got = f"{qc.qc!r}; pass --qc off"
    require(
        len(given) + (qc.qc != "off") < 2 or not given, rule, got, error=ConfigError
    )
    if config.regions.tissue:
        drawn = regions.RegionsStage(config=config.regions, role="tissue")
        return regions.DrawnTissueStage(
            config=config.tissue, reader=reader, regions=drawn
        )
    if network:
        (segments,) = segment_stages(config, None)
        return regions.SegmentedTissueStage(
            config=config.tissue, reader=reader, segments=segments
        )
    if qc.qc == "off":
        return TissueStage(config=config.tissue, reader=reader)
    how: dict[str, Any] = {
        "strict": qc.qc_strict,
        "rules": qc.qc_fail,
        "device": qc.qc_device,
    }
    return QcStage(pipeline=load_pipeline(qc.qc), source=qc.qc, reader=reader, **how)


def segment_stages(
    config: RunConfig, mask: TissueStage | QcStage | None
) -> tuple[regions.SegmentStage, ...]:
    """A stage for each segmenter; `mask` says where they look, None: everywhere.

    Raises ConfigError: no such one, or two with a class of one name; WeightsError: no weights.
    """
    wanted, reader, stream = config.segment, config.slides.reader, config.stream
    load = partial(
        load_segmenter, weights=wanted.segment_weights, device=config.encode.device
    )
    found = list(map(load, wanted.segmenters))
    names = [name for one in found for name in one.spec.classes]
    rule = "classes of a run's segmenters must have different names"
    require(len(set(names)) == len(names), rule, ", ".join(names), error=ConfigError)
    of_run = partial(
        regions.SegmentStage, config=wanted, mask=mask, reader=reader, stream=stream
    )
    return tuple(of_run(segmenter=one) for one in found)


def _pooling(
    config: RunConfig, features: Sequence[FeaturesStage], models: Models
) -> Iterator[leaves.PoolingStage]:
    """Each slide encoder over the embeddings that it takes."""
    from thinsection.pool import check_fit

    px, mpp = config.tiles.tile_px, config.tiles.mpp
    for slide_encoder in models.slide_encoders:
        refused: list[InvalidInputError] = []
        for stage, encoder in zip(features, models.encoders):
            try:
                fit = check_fit(slide_encoder, encoder.spec.name, px, mpp)
            except InvalidInputError as error:
                refused.append(error)
                continue
            yield leaves.PoolingStage(
                features=stage, slide_encoder=slide_encoder, warnings=fit
            )
        if len(refused) == len(features):
            raise refused[0]
