"""Runs a pipeline on one slide: reads it once, narrows the mask check by check."""

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from thinsection.arrays import Array, ArrayNamespace, filters, get_namespace
from thinsection.config import user_cache_dir
from thinsection.qc.checks.by_example import ByExample, PixelModel, probabilities, trained_model
from thinsection.qc.checks.check import Outcome, QcView, Score
from thinsection.qc.pipeline import Pipeline, load_pipeline
from thinsection.qc.result import QcResult
from thinsection.qc.work_image import read_strips, read_work_images, scale_of, suspicions
from thinsection.slide import Slide
from thinsection.types import MaskFrame, RgbArray


def prepare_models(pipeline: Pipeline, *, cache_dir: Path | None = None) -> None:
    """Trains the pipeline's pixel models into the cache, where they are not there yet."""
    _models(pipeline, cache_dir or user_cache_dir())


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
    left, outcomes, took = _narrowed(view, pipeline)
    mask_use, rgb = ns.download(left), images[pipeline.work_mpp]
    scores = {column: value for o in outcomes.values() for column, value in o.scores.items()}
    said = [warning for o in outcomes.values() for warning in o.warnings]
    touched = {name: o.touched for name, o in outcomes.items() if o.touched is not None}
    return QcResult(
        mask_use=mask_use,
        frame=MaskFrame(size_th=rgb.shape[1::-1], size_l0=slide.size),
        masks={name: ns.download(mask) for name, mask in touched.items()},
        scores={**scores, "pixels_to_use": float(mask_use.sum())},
        warnings=(*scale.warnings, *suspicions(rgb), *said),
        pipeline=pipeline,
        rgb=rgb,
        mpp_th=view.mpp_th,
        facts=_facts(slide),
        tables={name: table for o in outcomes.values() for name, table in o.tables.items()},
        seconds=seconds | took,
        crossings=dict(ns.crossings),
    )


def _images(slide: Slide, pipeline: Pipeline, mpp_l0: float) -> dict[float, RgbArray]:
    """Nominal mpp -> image, with the longer edge rounded half to even, at least 1 px."""
    mpps = pipeline.image_mpps
    edges = [max(1, int(np.rint(max(slide.size) * mpp_l0 / mpp))) for mpp in mpps]
    return dict(zip(mpps, read_work_images(slide, edges), strict=True))


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

    @cache  # the first check that asks computes all, as they share features
    def found() -> dict[ByExample, Array]:
        return probabilities(ns, rgb, _models(pipeline, cache_dir))

    return QcView(
        ns=ns,
        rgb=rgb,
        gray=filters.gray_from_rgb(ns, rgb),
        mask_use=ns.xp.ones(rgb.shape[:2], dtype=bool),
        mpp_th=slide_mpp * max(slide.size) / max(rgb.shape[:2]),
        statistics=pipeline.statistics,
        gray_at=lambda nominal_mpp: filters.gray32_from_rgb(ns, ns.upload(images[nominal_mpp])),
        strips_at=partial(read_strips, slide, slide_mpp),
        probability_of=lambda check: found()[check],
    )


def _models(pipeline: Pipeline, cache_dir: Path) -> dict[ByExample, PixelModel]:
    checks = [check for check in pipeline.checks if isinstance(check, ByExample)]
    return {check: trained_model(check, cache_dir) for check in checks}


def _narrowed(
    view: QcView, pipeline: Pipeline
) -> tuple[Array, dict[str, Outcome], dict[str, float]]:
    """The mask that is left, what each check answered (with all warnings), and its seconds."""
    outcomes: dict[str, Outcome] = {}
    seconds: dict[str, float] = {}
    columns: set[str] = set()
    for check in pipeline.checks:
        name, started = check.name, time.perf_counter()
        outcome = check(view)
        twice = [column for column in outcome.scores if column in columns]
        columns |= outcome.scores.keys()
        said = [f"{name} writes the column {column} of an earlier check" for column in twice]
        left = view.mask_use if outcome.mask_use is None else outcome.mask_use
        emptied = bool(view.mask_use.any()) and not bool(left.any())
        last = [f"{name} left no tissue: look at its picture"] if emptied else []
        warnings = (*said, *outcome.warnings, *last)
        outcomes[name] = replace(outcome, mask_use=None, warnings=warnings)
        view = replace(view, mask_use=left)
        seconds[name] = time.perf_counter() - started
    mask_use = view.mask_use
    for outcome in outcomes.values():
        if outcome.enforce and outcome.touched is not None:
            mask_use = mask_use & ~outcome.touched  # even if filled since
    return mask_use, outcomes, seconds


def _facts(slide: Slide) -> dict[str, Score]:
    """What HistoQC writes about the file itself."""
    width, height = slide.size
    mpp_x, mpp_y = slide.slide_mpp or ("NA", "NA")
    return {
        "base_mag": "NA" if slide.objective_power is None else slide.objective_power,
        "type": slide.vendor or "NA",
        "levels": float(len(slide.levels)),
        **{"height": float(height), "width": float(width), "mpp_x": mpp_x, "mpp_y": mpp_y},
        "comment": " ".join(slide.properties.get("openslide.comment", "").split()),
    }
