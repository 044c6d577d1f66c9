"""Runs the checks of a pipeline on one slide."""

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from thinsection.arrays import Array, ArrayNamespace, filters, get_namespace
from thinsection.config import user_cache_dir
from thinsection.qc.checks.artefact_maps import artefact_maps
from thinsection.qc.checks.by_example import ByExample, trained_model
from thinsection.qc.checks.check import (
    Outcome,
    QcCheck,
    QcView,
    ReportTable,
    Score,
)
from thinsection.qc.checks.pixel_model import PixelModel, probabilities
from thinsection.qc.pipeline import Pipeline, load_pipeline
from thinsection.qc.result import QcResult
from thinsection.qc.work_image import (
    Scale,
    read_images,
    regions_at,
    scale_of,
    suspicions,
)
from thinsection.slide import Slide
from thinsection.types import MaskFrame, RgbArray, Size

Models = dict[ByExample, PixelModel]

# Share of the tissue; a check that takes more of it is not believed.
_GUARDED_SHARE = 0.5
# Properties with the file's comment; they are equal where both readers open it.
_COMMENTS = ("openslide.comment", "tiff.ImageDescription")


def prepare_models(pipeline: Pipeline, *, cache_dir: Path | None = None) -> Models:
    """The pipeline's pixel models; those of own examples are trained into the cache, once."""
    models = {}
    for check in pipeline.checks:
        if isinstance(check, ByExample):
            models[check] = trained_model(check, cache_dir or user_cache_dir())
    return models


def run_qc(
    slide: Slide,
    pipeline: str | Path | Pipeline = "auto",
    *,
    device: str = "cpu",
    cache_dir: Path | None = None,
    slide_mpp: float | None = None,
    strict: bool = False,
) -> QcResult:
    """Runs every check of the pipeline on the slide; one without tissue gets warnings, no error.

    Args:
        slide: opened.
        pipeline: a preset's name, a TOML file, or the result of `load_pipeline`.
        device: 'cpu' or 'cuda[:index]'.
        cache_dir: of the pixel models; None is `user_cache_dir()`.
        slide_mpp: µm per level-0 px, in place of the file's own.
        strict: no guard: a check that takes most of the tissue, or all of it, has its way.

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
    images = read_images(slide, pipeline, scale)
    read_s = time.perf_counter() - started
    models = partial(prepare_models, pipeline, cache_dir=cache_dir)
    view = _make_view(ns, slide, scale, images, models)
    narrowing = _Narrowing(view, pipeline, strict=strict)
    for check in pipeline.checks:
        narrowing.apply(check)
    left, kept = narrowing.final_masks()
    mask_use = ns.download(left)
    rgb = images[pipeline.work_mpp]
    masks = {}
    scores: dict[str, Score] = {}
    warnings = [*scale.warnings, *suspicions(rgb)]
    tables: dict[str, ReportTable] = {}
    for name, outcome in narrowing.outcomes.items():
        if outcome.touched is not None:
            masks[name] = ns.download(outcome.touched)
        scores.update(outcome.scores)
        warnings += outcome.warnings
        tables.update(outcome.tables)
    is_absolute = pipeline.pixels_to_use == "absolute"
    scores["pixels_to_use"] = float(mask_use.sum() if is_absolute else mask_use.mean())
    return QcResult(
        mask_use=mask_use,
        frame=MaskFrame(size_th=rgb.shape[1::-1], size_l0=slide.size),
        masks=masks,
        scores=scores,
        warnings=tuple(warnings),
        pipeline=pipeline,
        rgb=rgb,
        mpp_th=view.mpp_th,
        facts=_read_facts(slide),
        tables=tables,
        seconds={"read": read_s, **narrowing.seconds},
        crossings=dict(ns.crossings),
        kept=None if kept is None else ns.download(kept),
    )


def _make_view(
    ns: ArrayNamespace,
    slide: Slide,
    scale: Scale,
    images: Mapping[float, RgbArray],
    models: Callable[[], Models],
) -> QcView:
    """The view before any check: all px are in use. The first image is the work image."""
    rgb = ns.upload(next(iter(images.values())))
    mpp_th = _work_px_um(slide.size, rgb.shape[1::-1], scale)

    @cache
    def all_probabilities() -> dict[ByExample, Array]:
        # the first check that asks computes all, as they share features
        return probabilities(ns, rgb, models())

    def gray_at(nominal_mpp: float) -> Array:
        return filters.gray32_from_rgb(ns, ns.upload(images[nominal_mpp]))

    def probability_of(check: ByExample) -> Array:
        return all_probabilities()[check]

    def associated(name: str) -> RgbArray | None:
        if name not in slide.associated_names:
            return None
        return slide.associated_image(name)

    return QcView(
        ns=ns,
        rgb=rgb,
        gray=filters.gray_from_rgb(ns, rgb),
        mask_use=ns.xp.ones(rgb.shape[:2], dtype=bool),
        mpp_th=mpp_th,
        gray_at=gray_at,
        regions_at=partial(regions_at, slide, scale.slide_mpp),
        probability_of=probability_of,
        artefact_maps=cache(partial(artefact_maps, ns, rgb, mpp_th)),
        associated=associated,
    )


def _work_px_um(size_l0: Size, size_th: Size, scale: Scale) -> float:
    """µm per px of the work image: HistoQC's by the long side, else the mean of both."""
    if scale.by_long_side:
        return scale.slide_mpp * max(size_l0) / max(size_th)
    area_um2 = math.prod(size_l0) * math.prod(scale.mpp_xy)
    return math.sqrt(area_um2 / math.prod(size_th))


class _Narrowing:
    """The mask while checks narrow it one after the other."""

    def __init__(self, view: QcView, pipeline: Pipeline, *, strict: bool) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self.seconds: dict[str, float] = {}
        self._view = view
        self._pipeline = pipeline
        self._strict = strict
        self._stain = ""
        # tissue that the last check for glass left; 0 before it
        self._tissue_px = 0
        # the mask as if guarded checks had taken nothing; None while it is the view's
        self._kept: Array | None = None

    def apply(self, planned: QcCheck) -> None:
        """Runs a check and narrows the mask, unless the guard keeps the tissue."""
        started = time.perf_counter()
        check = self._pipeline.variant(planned, self._stain)
        before = self._view.mask_use
        outcome = check(self._view_for(check))
        warnings = self._repeated_columns(check.name, outcome)
        left = before if outcome.mask_use is None else outcome.mask_use
        num_before = int(self._view.ns.xp.count_nonzero(before))
        num_left = int(self._view.ns.xp.count_nonzero(left))
        num_taken = num_before - num_left
        took_tissue = 0 < self._tissue_px * _GUARDED_SHARE < num_taken
        took_most = took_tissue or (num_before > 0 and num_left == 0)
        can_guard = self._tissue_px > 0 and check.guarded and not self._strict
        is_guarded = took_most and can_guard
        if took_most:
            warnings.append(
                _took_most(check.name, num_taken, self._tissue_px, kept=is_guarded)
            )
        if is_guarded and self._pipeline.guard:
            left = before
        elif is_guarded and self._kept is None:
            self._kept = before
        elif not is_guarded and self._kept is not None:
            self._kept = self._kept & (left | ~before)
        if check.removes_glass:
            self._tissue_px = num_left
        self.outcomes[check.name] = replace(
            outcome, mask_use=None, warnings=(*warnings, *outcome.warnings)
        )
        self._view = replace(self._view, mask_use=left)
        self._stain = outcome.stain or self._stain
        self.seconds[check.name] = time.perf_counter() - started

    def _view_for(self, check: QcCheck) -> QcView:
        touched = {
            name: outcome.touched
            for name, outcome in self.outcomes.items()
            if outcome.touched is not None
        }
        statistics = check.statistics or self._pipeline.statistics
        return replace(self._view, statistics=statistics, touched=touched)

    def _repeated_columns(self, name: str, outcome: Outcome) -> list[str]:
        """Warnings of columns that an earlier check wrote."""
        warnings = []
        for column in outcome.scores:
            if any(column in earlier.scores for earlier in self.outcomes.values()):
                warnings.append(
                    f"{name} writes the column {column} of an earlier check"
                )
        return warnings

    def final_masks(self) -> tuple[Array, Array | None]:
        """The mask, and the tissue that the guard kept, where it is another.

        A check that enforces its mask takes it again, also where a later one filled it.
        """
        left = self._view.mask_use
        kept = self._kept
        for outcome in self.outcomes.values():
            if not outcome.enforce or outcome.touched is None:
                continue
            left = left & ~outcome.touched
            if kept is not None:
                kept = kept & ~outcome.touched
        return left, kept


def _took_most(name: str, num_px: int, tissue_px: int, *, kept: bool) -> str:
    """The warning of a check that took most of the tissue."""
    share = "all that was left"
    if num_px < tissue_px:
        share = f"{num_px / tissue_px:.0%} of the tissue"
    if kept:
        return (
            f"{name} would take {share}, which is kept: look at its picture, "
            "or --qc-strict"
        )
    if tissue_px:
        return f"{name} took {share}: look at its picture"
    return f"{name} left no tissue: look at it"


def _read_facts(slide: Slide) -> dict[str, Score]:
    """The file's own metadata, as HistoQC writes them."""
    width, height = slide.size
    mpp_x: Score = "NA"
    mpp_y: Score = "NA"
    if slide.slide_mpp is not None:
        mpp_x, mpp_y = slide.slide_mpp
    power = slide.objective_power
    comment = "NA"
    for key in _COMMENTS:
        if slide.properties.get(key):
            comment = slide.properties[key]
            break
    return {
        "base_mag": "NA" if power is None else power,
        "type": slide.vendor or "NA",
        "levels": float(len(slide.levels)),
        "height": float(height),
        "width": float(width),
        "mpp_x": mpp_x,
        "mpp_y": mpp_y,
        "comment": re.sub(r"[\r\n]", " ", comment),
    }
