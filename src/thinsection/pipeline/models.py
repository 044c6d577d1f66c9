"""What a process loads once for all its slides: encoders, the QC pipeline, the stain target."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thinsection.qc import Pipeline, load_pipeline
from thinsection.stages.config import RunConfig
from thinsection.stages.request import Goal
from thinsection.tiles.transforms import StainLook, stain_target
from thinsection.units import parse_bytes

if TYPE_CHECKING:
    from thinsection.encode import TileEncoder
    from thinsection.pool import SlideEncoder

ENCODING = ("embed", "aggregate")


@dataclass(frozen=True, kw_only=True)
class Models:
    """Loaded networks and settings; empty for goals that do not use them.

    Attributes:
        encoders, slide_encoders: loaded.
        pipeline: of quality control; None where it is off.
        stain_target: what tiles are normalised to; None where that is off.
    """

    encoders: tuple["TileEncoder", ...] = ()
    slide_encoders: tuple["SlideEncoder", ...] = ()
    pipeline: Pipeline | None = None
    stain_target: StainLook | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether an encoder computes elsewhere than on the CPU."""
        return any(encoder.device.type != "cpu" for encoder in self.encoders)

    @property
    def allocate(self) -> Mapping[str, Any]:
        """Arguments of the stream that make its buffers as the encoders' devices like them."""
        if not self.encoders:
            return {}
        from thinsection.encode.embed import pinned_allocator

        return {"allocate": pinned_allocator(self.encoders)}

    @property
    def identities(self) -> dict[str, Any]:
        """What of them decides a result, by label."""
        tiles = {encoder.label: encoder.identity for encoder in self.encoders}
        return tiles | {encoder.name: encoder.identity for encoder in self.slide_encoders}


def pipeline_of(config: RunConfig) -> Pipeline | None:
    """The checks of a run as its preset or file says them now; None where QC is off."""
    return None if config.qc.qc == "off" else load_pipeline(config.qc.qc)


def load_models(config: RunConfig, goal: Goal) -> Models:
    """Loads what a run up to a goal needs; on a CPU this process then keeps freed memory."""
    pipeline = pipeline_of(config)
    if goal not in ENCODING:
        return Models(pipeline=pipeline)
    from thinsection.encode import load_encoder  # torch: goals before it start without
    from thinsection.encode.memory import keep_freed_memory
    from thinsection.pool import load_slide_encoder

    options = config.encode
    encoders = tuple(
        load_encoder(
            name,
            device=options.device,
            precision=options.precision,
            weights=options.weights,
            pretrained=options.pretrained,
            allow_remote_code=options.allow_remote_code,
            seed=options.seed,
        )
        for name in options.encoders
    )
    if any(encoder.device.type == "cpu" for encoder in encoders):
        keep_freed_memory()
    pooling = config.aggregate.slide_encoders if goal == "aggregate" else ()
    slide_encoders = tuple(
        load_slide_encoder(
            name,
            weights=config.aggregate.slide_weights,
            device=options.device,
            budget_bytes=parse_bytes(config.aggregate.aggregate_memory),
        )
        for name in pooling
    )
    return Models(
        encoders=encoders,
        slide_encoders=slide_encoders,
        pipeline=pipeline,
        stain_target=None if config.stain.stain_norm == "none" else stain_target(config.stain),
    )
