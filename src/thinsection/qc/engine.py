"""Runs a pipeline on one slide: reads it once, narrows the mask check by check."""

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from thinsection.arrays import Array, ArrayNamespace, get_namespace
from thinsection.arrays.colour import gray32_from_rgb, gray_from_rgb
from thinsection.config import user_cache_dir
from thinsection.qc.checks.by_example import ByExample, trained_model
from thinsection.qc.checks.check import Outcome, QcView, Score, Strips
from thinsection.qc.checks.pixel_model import probabilities
from thinsection.qc.pipeline import Pipeline, load_pipeline
from thinsection.qc.result import QcResult
from thinsection.qc.work_image import read_strips, read_work_images, scale_of, suspicions
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
    ns, scale = get_namespace(device), scale_of(slide, pipeline, slide_mpp)
    started = time.perf_counter()
    images = _images(slide, pipeline, scale.work_mpp)
    seconds = {"read": time.perf_counter() - started}
    folder = cache_dir or user_cache_dir()
    view = _view(ns, slide, pipeline, images, slide_mpp=scale.slide_mpp, cache_dir=folder)
    rgb = images[pipeline.work_mpp]
    outcomes: dict[str, Outcome] = {}
    scores: dict[str, Score] = {}
    warnings = [*scale.warnings, *suspicions(rgb)]
    for check in pipeline.checks:
        started = time.perf_counter()
        outcome = check(view)
        warnings += _warnings(check.name, outcome, scores, view)
        scores.update(outcome.scores)
        if outcome.mask_use is not None:
            view = replace(view, mask_use=outcome.mask_use)
        outcomes[check.name] = replace(outcome, mask_use=None)
        seconds[check.name] = time.perf_counter() - started
    touched = {name: o.touched for name, o in outcomes.items() if o.touched is not None}
    for name in [name for name, outcome in outcomes.items() if outcome.enforce]:
        view = replace(view, mask_use=view.mask_use & ~touched[name])  # even if filled since
    mask_use = ns.download(view.mask_use)
    return QcResult(
        mask_use=mask_use,
        frame=MaskFrame(size_th=rgb.shape[1::-1], size_l0=slide.size),
        masks={name: ns.download(mask) for name, mask in touched.items()},
        scores={**scores, "pixels_to_use": float(mask_use.sum())},
        warnings=tuple(warnings),
        pipeline=pipeline,
        rgb=rgb,
        mpp_th=view.mpp_th,
        facts=_facts(slide),
        tables={name: table for o in outcomes.values() for name, table in o.tables.items()},
        seconds=seconds,
        crossings=dict(ns.crossings),
    )


def _images(slide: Slide, pipeline: Pipeline, mpp_l0: float) -> dict[float, RgbArray]:
    """Nominal mpp -> image, with the longer edge rounded half to even, at least 1 px."""
    mpps = image_mpps(pipeline)
    edges = [max(1, int(np.rint(max(slide.size) * mpp_l0 / mpp))) for mpp in mpps]
    return dict(zip(mpps, read_work_images(slide, edges), strict=True))


def _warnings(name: str, outcome: Outcome, scores: Mapping[str, Score], view: QcView) -> list[str]:
    """What there is to say of one check's outcome, beside its own warnings."""
    columns = outcome.scores.keys() & scores.keys()
    twice = [f"{name} writes the column {column} of an earlier check" for column in columns]
    left = view.mask_use if outcome.mask_use is None else outcome.mask_use
    emptied = bool(view.mask_use.any()) and not bool(left.any())
    last = [f"{name} left no tissue: look at its picture"] if emptied else []
    return [*twice, *outcome.warnings, *last]


def _view(
    ns: ArrayNamespace,
    slide: Slide,
    pipeline: Pipeline,
    images: Mapping[float, RgbArray],
    *,
    slide_mpp: float,
    cache_dir: Path,
) -> QcView:
    """The view before any check: all px are in use."""
    rgb = ns.upload(images[pipeline.work_mpp])

    def strips_at(mpp: float, rows_multiple: int) -> Strips:
        return read_strips(slide, slide_mpp, mpp, rows_multiple)

    @cache  # the first check that asks computes all, as they share features
    def found() -> dict[ByExample, Array]:
        models = {check: trained_model(check, cache_dir) for check in _by_example(pipeline)}
        return probabilities(ns, rgb, models)

    return QcView(
        ns=ns,
        rgb=rgb,
        gray=gray_from_rgb(ns, rgb),
        mask_use=ns.xp.ones(rgb.shape[:2], dtype=bool),
        mpp_th=slide_mpp * max(slide.size) / max(rgb.shape[:2]),
        statistics=pipeline.statistics,
        gray_at=lambda nominal_mpp: gray32_from_rgb(ns, ns.upload(images[nominal_mpp])),
        strips_at=strips_at,
        probability_of=lambda check: found()[check],
    )


def _by_example(pipeline: Pipeline) -> list[ByExample]:
    return [check for check in pipeline.checks if isinstance(check, ByExample)]


def image_mpps(pipeline: Pipeline) -> list[float]:
    """Nominal mpp of the images that checks look at as a whole, the work image's first."""
    wanted = {mpp for check in pipeline.checks for mpp in check.image_mpps}
    return [pipeline.work_mpp, *sorted(wanted - {pipeline.work_mpp})]


def _facts(slide: Slide) -> dict[str, Score]:
    """What HistoQC writes about the file itself."""
    width, height = slide.size
    mpp_x, mpp_y = slide.slide_mpp or ("NA", "NA")
    return {
        "base_mag": "NA" if slide.objective_power is None else slide.objective_power,
        "type": slide.vendor or "NA",
        "levels": float(len(slide.levels)),
        "height": float(height),
        "width": float(width),
        "mpp_x": mpp_x,
        "mpp_y": mpp_y,
        "comment": " ".join(slide.properties.get("openslide.comment", "").split()),
    }
