"""From settings to the graph of stages that a run asks for."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, get_args

from thinsection.errors import ConfigError, InvalidInputError
from thinsection.qc import Pipeline
from thinsection.stages.config import RunConfig
from thinsection.stages.features import FeaturesStage, TokensStage
from thinsection.stages.leaves import FormatStage, GraphStage, OverviewStage, PoolingStage
from thinsection.stages.masks import QcStage, TissueStage
from thinsection.stages.stage import Stage
from thinsection.stages.tiles import TilesStage
from thinsection.tiles.transforms import StainLook

if TYPE_CHECKING:
    from thinsection.encode import TileEncoder
    from thinsection.pool import SlideEncoder

Goal = Literal["tissue", "qc", "tile", "embed", "aggregate"]  # the last stage of a run
GOALS: tuple[Goal, ...] = get_args(Goal)


def stages_of(
    config: RunConfig,
    goal: Goal,
    *,
    pipeline: Pipeline | None = None,
    encoders: Sequence["TileEncoder"] = (),
    slide_encoders: Sequence["SlideEncoder"] = (),
    target: StainLook | None = None,
) -> tuple[Stage, ...]:
    """Every stage of a run, each after what it needs.

    Args:
        config: of the run.
        goal: the last stage.
        pipeline: of quality control; None where it is off.
        encoders: loaded; none for goals that embed nothing.
        slide_encoders: loaded.
        target: of stain normalisation; None where it is off.

    Raises:
        InvalidInputError: a slide encoder takes none of the encoders' embeddings.
    """
    mask = mask_stage(config, pipeline)
    if goal in ("tissue", "qc"):
        return (mask,)
    tiles, output = TilesStage(config=config.tiles, mask=mask), config.output
    of_grid = partial(FeaturesStage, tiles=tiles, stain=config.stain, target=target)
    features = [
        of_grid(encoder=e.label, identity=e.identity, dtype=output.embedding_dtype)
        for e in encoders
    ]
    stages: list[Stage] = [mask, tiles, *features]
    if config.encode.tokens:
        pairs = zip(features, encoders)
        stages += [TokensStage(features=f) for f, e in pairs if e.spec.supports_tokens]
    if output.overview:
        stages.append(OverviewStage(tiles=tiles))
    if output.graph:
        stages.append(GraphStage(tiles=tiles, spec=output.graph))
    stages += [FormatStage(features=f, format=name) for name in output.write for f in features]
    return (*stages, *_pooling(config, features, encoders, slide_encoders))


def mask_stage(config: RunConfig, pipeline: Pipeline | None) -> TissueStage | QcStage:
    """What says where the tissue is."""
    reader, qc = config.slides.reader, config.qc
    if pipeline is None:
        return TissueStage(config=config.tissue, reader=reader)
    return QcStage(
        pipeline=pipeline, source=qc.qc, rules=qc.qc_fail, reader=reader, device=qc.qc_device
    )


def _pooling(
    config: RunConfig,
    features: Sequence[FeaturesStage],
    encoders: Sequence["TileEncoder"],
    slide_encoders: Sequence["SlideEncoder"],
) -> Iterator[PoolingStage]:
    """Each slide encoder over the embeddings that it takes."""
    from thinsection.pool import check_fit

    px, mpp = config.tiles.tile_px, config.tiles.mpp
    for slide_encoder in slide_encoders:
        refused: list[InvalidInputError] = []
        for stage, encoder in zip(features, encoders):
            try:
                fit = check_fit(slide_encoder, encoder.spec.name, px, mpp)
            except InvalidInputError as error:
                refused.append(error)
                continue
            yield PoolingStage(features=stage, slide_encoder=slide_encoder, warnings=tuple(fit))
        if len(refused) == len(features):
            raise refused[0]


def check_goal(goal: str) -> Goal:
    """The goal.

    Raises:
        ConfigError: no such goal.
    """
    found = next((known for known in GOALS if known == goal), None)
    if found is None:
        raise ConfigError(f"stage must be one of {', '.join(GOALS)}, got {goal!r}")
    return found
