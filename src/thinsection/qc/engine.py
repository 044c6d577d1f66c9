"""Runs a pipeline on one slide: reads it once, narrows the mask check by check."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy.typing as npt

from thinsection.arrays import Array, ArrayNamespace, get_namespace
from thinsection.arrays.colour import gray32_from_rgb, gray_from_rgb
from thinsection.config import user_cache_dir
from thinsection.qc.checks.by_example import ByExample, trained_model
from thinsection.qc.checks.check import QcCheck, QcView, Score, Strips
from thinsection.qc.checks.pixel_model import probabilities
from thinsection.qc.pipeline import Pipeline, load_pipeline
from thinsection.qc.result import QcResult
from thinsection.qc.scale import Scale, scale_of, suspicions
from thinsection.qc.work_image import read_strips, read_work_images
from thinsection.slide import Slide
from thinsection.types import MaskFrame, RgbArray


def prepare_models(pipeline: Pipeline, *, cache_dir: Path | None = None) -> None:
    """Trains the pipeline's pixel models into the cache, where they are not there yet."""
    for check in _by_example(pipeline):
        trained_model(check, cache_dir or user_cache_dir())


def run_qc(
    slide: Slide,
    pipeline: str | Path | Pipeline = "default",
    *,
    device: str = "cpu",
    cache_dir: Path | None = None,
    slide_mpp: float | None = None,
) -> QcResult:
    """Runs every check of the pipeline on the slide.

    A slide that leaves a check nothing to do gets warnings, not an exception.

    Args:
        slide: to look at.
        pipeline: a preset's name, a TOML file, or what `load_pipeline` made of one.
        device: 'cpu' or 'cuda[:index]'.
        cache_dir: of the pixel models; None is `user_cache_dir()`.
        slide_mpp: µm per level-0 px, in place of what the file says.

    Memory: O(work images + one strip of the level that is read), whatever the slide's size.

    Raises:
        SlideReadError: a region cannot be decoded.
        DeviceError: the device is not there.
        ConfigError: no such pipeline, or a check names examples or templates that cannot be used.
    """
    if not isinstance(pipeline, Pipeline):
        pipeline = load_pipeline(pipeline)
    ns = get_namespace(device)
    scale = scale_of(slide, pipeline, slide_mpp)
    started = time.perf_counter()
    nominal = image_mpps(pipeline)
    edges = [scale.max_edge(slide.size, mpp) for mpp in nominal]
    images = dict(zip(nominal, read_work_images(slide, edges), strict=True))
    seconds = {"read": time.perf_counter() - started}
    cache_dir = cache_dir or user_cache_dir()
    view = _first_view(ns, images, pipeline, scale=scale, slide=slide, cache_dir=cache_dir)
    state = _State(view=view, warnings=[*scale.warnings, *suspicions(images[pipeline.work_mpp])])
    for check in pipeline.checks:
        started = time.perf_counter()
        state.apply(check)
        seconds[check.name] = time.perf_counter() - started
    mask_use = ns.download(state.final_mask())
    rgb = images[pipeline.work_mpp]
    return QcResult(
        mask_use=mask_use,
        frame=MaskFrame(size_th=(rgb.shape[1], rgb.shape[0]), size_l0=slide.size),
        masks={name: ns.download(mask) for name, mask in state.masks.items()},
        scores={**state.scores, "pixels_to_use": float(mask_use.sum())},
        warnings=tuple(state.warnings),
        pipeline=pipeline,
        rgb=rgb,
        mpp_th=view.mpp_th,
        facts=_facts(slide, scale),
        tables=state.tables,
        seconds=seconds,
        crossings=dict(ns.crossings),
    )


@dataclass(slots=True, kw_only=True)
class _State:
    """What grows from check to check."""

    view: QcView
    warnings: list[str]
    scores: dict[str, Score] = field(default_factory=dict)
    masks: dict[str, Array] = field(default_factory=dict)
    tables: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    enforced: list[str] = field(default_factory=list)

    def apply(self, check: QcCheck) -> None:
        outcome = check(self.view)
        for column in outcome.scores.keys() & self.scores.keys():
            self.warnings.append(f"{check.name} writes the column {column} of an earlier check")
        self.scores.update(outcome.scores)
        self.warnings.extend(outcome.warnings)
        self.tables.update(outcome.tables)
        if outcome.touched is not None:
            self.masks[check.name] = outcome.touched
        if outcome.enforce:
            self.enforced.append(check.name)
        if outcome.mask_use is None:
            return
        was_empty = not bool(self.view.mask_use.any())
        self.view = replace(self.view, mask_use=outcome.mask_use)
        if not was_empty and not bool(outcome.mask_use.any()):
            self.warnings.append(f"{check.name} left no tissue: look at its picture")

    def final_mask(self) -> Array:
        """The mask without what the enforced checks found, even where a later check filled it."""
        mask = self.view.mask_use.copy()
        for name in self.enforced:
            mask &= ~self.masks[name]
        return mask


def _first_view(
    ns: ArrayNamespace,
    images: Mapping[float, RgbArray],
    pipeline: Pipeline,
    *,
    scale: Scale,
    slide: Slide,
    cache_dir: Path,
) -> QcView:
    """The view before any check: all px are in use."""
    rgb = ns.upload(images[pipeline.work_mpp])

    def gray_at(nominal_mpp: float) -> Array:
        return gray32_from_rgb(ns, ns.upload(images[nominal_mpp]))

    def strips_at(mpp: float, rows_multiple: int) -> Strips:
        return read_strips(slide, scale.slide_mpp, mpp, rows_multiple)

    @cache  # the first check that asks computes all, as they share features
    def found() -> dict[ByExample, Array]:
        models = {check: trained_model(check, cache_dir) for check in _by_example(pipeline)}
        return probabilities(ns, rgb, models)

    return QcView(
        ns=ns,
        rgb=rgb,
        gray=gray_from_rgb(ns, rgb),
        mask_use=ns.xp.ones(rgb.shape[:2], dtype=bool),
        mpp_th=scale.slide_mpp * max(slide.size) / max(rgb.shape[:2]),
        statistics=pipeline.statistics,
        gray_at=gray_at,
        strips_at=strips_at,
        probability_of=lambda check: found()[check],
    )


def _by_example(pipeline: Pipeline) -> list[ByExample]:
    return [check for check in pipeline.checks if isinstance(check, ByExample)]


def image_mpps(pipeline: Pipeline) -> list[float]:
    """Nominal mpp of the images that checks look at as a whole, the work image's first."""
    wanted = {mpp for check in pipeline.checks for mpp in check.image_mpps}
    return [pipeline.work_mpp, *sorted(wanted - {pipeline.work_mpp})]


def _facts(slide: Slide, scale: Scale) -> dict[str, Score]:
    """What HistoQC writes about the file itself."""
    width, height = slide.size
    mpp = slide.slide_mpp
    comment = slide.properties.get("openslide.comment", "")
    return {
        "base_mag": "NA" if slide.objective_power is None else slide.objective_power,
        "type": slide.vendor or "NA",
        "levels": float(len(slide.levels)),
        "height": float(height),
        "width": float(width),
        "mpp_x": "NA" if mpp is None else mpp[0],
        "mpp_y": "NA" if mpp is None else mpp[1],
        "comment": " ".join(comment.split()),
    }
