"""Runs the checks of a pipeline on one slide."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinsection.arrays import Array, ArrayNamespace, filters, get_namespace
from thinsection.arrays.packed import PackedArrays, packed_arrays
from thinsection.config import user_cache_dir
from thinsection.errors import ConfigError, InvalidInputError, naming_part
from thinsection.machine import give_back_freed_memory
from thinsection.qc.checks.artefact_network import artefact_maps, ink_of
from thinsection.qc.checks.by_example import ExampleCheck, trained_forests
from thinsection.qc.checks.check import (
    Outcome,
    PenInk,
    QcCheck,
    QcView,
    ReportTable,
    Score,
    check_mask,
)
from thinsection.qc.checks.forest import Forest, probabilities
from thinsection.qc.checks.pen_ink import find_pen_ink
from thinsection.qc.pipeline import Pipeline, load_pipeline
from thinsection.qc.result import QcResult, unjudged_shares
from thinsection.qc.segmenter_classes import ClassMap, class_areas
from thinsection.qc.work_image import (
    Scale,
    image_warnings,
    read_images,
    regions_at,
    scale_of,
)
from thinsection.slide import Slide
from thinsection.types import MaskArray, MaskFrame, RgbArray

Models = dict[ExampleCheck, Forest]

# A check that removes more than this share of the tissue is taken to be wrong.
_MAX_REMOVED_SHARE = 0.5
# Properties that contain the comment of the file: by OpenSlide, and by the TIFF reader.
_COMMENTS = ("openslide.comment", "tiff.ImageDescription")


def prepare_models(
    pipeline: Pipeline, *, cache_dir: str | Path | None = None
) -> Models:
    """Loads the forest of each check that learns from example masks (`ExampleCheck`).

    A forest is trained once and kept in the cache.
    """
    checks = []
    for check in pipeline.checks:
        if isinstance(check, ExampleCheck) and not check.absent:
            checks.append(check)
    return trained_forests(checks, Path(cache_dir) if cache_dir else user_cache_dir())


def run_qc(
    slide: Slide,
    pipeline: str | Path | Pipeline = "auto",
    *,
    device: str = "cpu",
    cache_dir: str | Path | None = None,
    slide_mpp: float | None = None,
    strict: bool = False,
    segmentation: ClassMap | None = None,
) -> QcResult:
    """Runs every check of the pipeline on the slide.

    A slide without tissue gives a result with warnings, not an error.

    Args:
        slide: an opened slide.
        pipeline: name of a preset, path of a TOML file, or result of `load_pipeline`.
        device: 'cpu' or 'cuda[:index]'.
        cache_dir: folder of the trained forests; None is `user_cache_dir()`.
        slide_mpp: µm per level-0 px, to replace the value of the file.
        strict: apply every check, even one that removes most of the tissue or all of it.
        segmentation: result of `segment` for this slide; a pipeline with a table `[segmenter]`
            needs it, and other pipelines refuse it.

    Memory: O(work images + one strip of the level that is read), for any size of slide.

    Raises:
        SlideReadError: a region cannot be decoded.
        DeviceError: the device does not exist.
        ConfigError: there is no such pipeline, or its examples or templates cannot be used. The
            segmentation is missing or lacks a class of the pipeline, or the pipeline takes none.
        InvalidInputError: the segmentation belongs to another slide.
    """
    if not isinstance(pipeline, Pipeline):
        pipeline = load_pipeline(pipeline)
    _check_segmentation(pipeline, segmentation)
    ns = get_namespace(device)
    scale = scale_of(slide, pipeline, slide_mpp)
    started = time.perf_counter()
    images = read_images(slide, pipeline, scale)
    read_s = time.perf_counter() - started
    work_image = images[pipeline.work_mpp]
    height, width = work_image.shape[:2]
    # `_th` (thumbnail) stands for the work image
    frame = MaskFrame(size_th=(width, height), size_l0=slide.size)
    areas = {}
    if pipeline.segmenter is not None and segmentation is not None:
        areas = class_areas(
            pipeline.segmenter, segmentation, size_l0=slide.size, frame=frame
        )
    view = _make_view(
        ns,
        slide,
        scale,
        images=images,
        work_image=work_image,
        areas=areas,
        # called only if an `ExampleCheck` asks for its probabilities
        get_models=partial(prepare_models, pipeline, cache_dir=cache_dir),
    )
    runner = _CheckRunner(view, pipeline, strict=strict)
    for check in pipeline.checks:
        runner.run(check)
        # what one check has freed would lie beside what the next one needs
        give_back_freed_memory()
    device_mask_use, device_mask_for_tiles = runner.final_masks()
    mask_use = ns.download(device_mask_use)
    mask_for_tiles = None
    if device_mask_for_tiles is not None:
        mask_for_tiles = ns.download(device_mask_for_tiles)
    scores: dict[str, Score] = {}
    warnings = [*scale.warnings, *image_warnings(work_image)]
    if runner.not_judged:
        warnings.append(
            f"{', '.join(runner.not_judged)}: not judged at {view.mpp_th:.3g} µm/px, because the "
            "picture is too coarse"
        )
    tables: dict[str, ReportTable] = {}
    for outcome in runner.outcomes.values():
        scores.update(outcome.scores)
        warnings += outcome.warnings
        tables.update(outcome.tables)
    masks = PackedArrays()
    for name, area in runner.areas.items():
        masks[name] = ns.download(area)
    tissue = mask_use if mask_for_tiles is None else mask_for_tiles
    unjudged = PackedArrays()
    for name, area in runner.unjudged_areas.items():
        open_area = ns.download(area) & tissue
        if name in masks:
            open_area &= ~masks[name]
        unjudged[name] = open_area
    scores |= unjudged_shares(unjudged, tissue)
    if pipeline.pixels_to_use == "absolute":
        scores["pixels_to_use"] = float(mask_use.sum())
    else:
        scores["pixels_to_use"] = float(mask_use.mean())
    return QcResult(
        mask_use=mask_use,
        frame=frame,
        masks=masks,
        scores=scores,
        warnings=tuple(warnings),
        pipeline=pipeline,
        rgb=work_image,
        mpp_th=view.mpp_th,
        facts=_read_facts(slide),
        tables=tables,
        seconds={"read": read_s, **runner.seconds},
        transfers=dict(ns.transfers),
        mask_kept=mask_for_tiles,
        unjudged=unjudged,
        overruled=tuple(sorted(runner.overruled)),
    )


def _check_segmentation(pipeline: Pipeline, segmentation: ClassMap | None) -> None:
    """Raises ConfigError: a segmentation is needed and missing, or given and not taken."""
    if pipeline.segmenter is None:
        if segmentation is not None:
            raise ConfigError(
                f"segmentation must be left out with the pipeline {pipeline.name!r}, which "
                "takes no classes, got one; add a table [segmenter.classes] to the pipeline"
            )
    elif segmentation is None:
        raise ConfigError(
            f"segmentation must be given with the pipeline {pipeline.name!r}, which takes "
            f"classes of {pipeline.segmenter.name!r}, got None; pass the result of `segment`"
        )


def _make_view(
    ns: ArrayNamespace,
    slide: Slide,
    scale: Scale,
    *,
    images: Mapping[float, RgbArray],
    work_image: RgbArray,
    areas: Mapping[str, MaskArray],
    get_models: Callable[[], Models],
) -> QcView:
    """Makes the view for the first check, with all pixels in use."""
    rgb = ns.upload(work_image)
    height, width = work_image.shape[:2]
    # HistoQC computes the resolution from the long side alone
    mpp_th = scale.slide_mpp * max(slide.size) / max(width, height)
    if not scale.by_long_side:
        area_um2 = math.prod(slide.size) * math.prod(scale.mpp_xy)
        mpp_th = math.sqrt(area_um2 / (width * height))

    @cache
    def all_probabilities() -> dict[ExampleCheck, npt.NDArray[np.float32]]:
        # the forests of all checks share their features, so the first call computes all of them
        return probabilities(work_image, get_models())

    def gray_at(nominal_mpp: float) -> Array:
        return filters.gray32_from_rgb(ns, ns.upload(images[nominal_mpp]))

    def probability_of(check: ExampleCheck) -> Array:
        return ns.upload(all_probabilities()[check])

    maps = cache(partial(artefact_maps, ns, rgb, mpp_th))

    @cache
    def pen_areas() -> Mapping[str, Array]:
        found = find_pen_ink(work_image, mpp_th, lambda: ns.download(ink_of(maps())))
        areas = packed_arrays(ns)
        areas["ink"] = ns.upload(found.ink)
        areas["unjudged"] = ns.upload(found.unjudged)
        del found  # frees memory
        give_back_freed_memory()
        return areas

    def pen_ink() -> PenInk:
        areas = pen_areas()
        return PenInk(ink=areas["ink"], unjudged=areas["unjudged"])

    def associated(name: str) -> RgbArray | None:
        if name not in slide.associated_names:
            return None
        return slide.associated_image(name)

    return QcView(
        ns=ns,
        rgb=rgb,
        mask_use=ns.xp.ones(rgb.shape[:2], dtype=bool),
        mpp_th=mpp_th,
        gray_at=gray_at,
        regions_at=partial(regions_at, slide, scale.slide_mpp),
        probability_of=probability_of,
        artefact_maps=maps,
        pen_ink=pen_ink,
        associated=associated,
        class_areas={name: ns.upload(area) for name, area in areas.items()},
    )


class _CheckRunner:
    """Runs one check after the other; each check narrows the mask that the next check gets.

    A check that would remove most of the tissue, or all remaining pixels, is taken to be wrong: it
    is overruled, and only its `Outcome.sure_area` is removed. Tiles may then cover the rest of the
    area that the check found. With `strict` no check is overruled.

    The pipeline's `guard` decides which mask later checks get after a check was overruled:

        guard on    the mask from before the overruled check, without its sure area
        guard off   the mask without the whole area that the overruled check found, so that later
                    checks measure the same as in HistoQC. Tiles are placed on a second mask,
                    from which overruled checks remove only their sure area.
    """

    def __init__(self, view: QcView, pipeline: Pipeline, *, strict: bool) -> None:
        # without their areas
        self.outcomes: dict[str, Outcome] = {}
        # by check, pixels that it found or filled; checks that only measure have none
        self.areas = packed_arrays(view.ns)
        self.seconds: dict[str, float] = {}
        # checks for which the work image is too coarse
        self.not_judged: list[str] = []
        # by check, pixels that it could not judge; checks that judge all pixels have none
        self.unjudged_areas = packed_arrays(view.ns)
        self._view = view
        self._pipeline = pipeline
        self._strict = strict
        self._stain = ""
        # tissue pixels after the last check that removes glass; 0 until such a check has run
        self._tissue_px = 0
        # the second mask, if the guard is off and a check was overruled
        self._mask_for_tiles: Array | None = None
        # checks of which only the sure area is removed
        self.overruled: set[str] = set()
        self._sure_areas = packed_arrays(view.ns)

    def run(self, check: QcCheck) -> None:
        """Runs a check and narrows the mask; an overruled check removes only its sure area."""
        if self._view.mpp_th > check.coarsest_mpp:
            self.not_judged.append(check.name)
            self.unjudged_areas[check.name] = self._view.mask_use
            return
        started = time.perf_counter()
        # An earlier check may have found which stain the slide has. The pipeline may have other
        # settings for that stain.
        check = self._pipeline.variant(check, self._stain)
        earlier_columns: set[str] = set()
        for earlier in self.outcomes.values():
            earlier_columns |= earlier.scores.keys()
        view = replace(
            self._view,
            # form in which shares are written
            statistics=check.statistics or self._pipeline.statistics,
            affected_areas=self.areas,
            check=type(check).__name__,
        )
        with naming_part("qc check", check.kind, check):
            outcome = check(view)
            _check_outcome(check, outcome, view)
            outcome = replace(outcome, scores=_plain_scores(check, outcome.scores))
        if not check.removes:
            outcome = replace(outcome, mask_use=None, enforce=False)
        warnings = [
            f"{check.name} writes the column {column} of an earlier check"
            for column in outcome.scores
            if column in earlier_columns
        ]
        mask_before = self._view.mask_use
        mask_after = mask_before if outcome.mask_use is None else outcome.mask_use
        mask_sure = mask_before
        if outcome.sure_area is not None:
            mask_sure = mask_before & ~outcome.sure_area
        num_before = self._count(mask_before)
        num_left = self._count(mask_after)
        num_sure_left = self._count(mask_sure)
        limit = self._tissue_px * _MAX_REMOVED_SHARE
        removes_all = num_before > 0 and num_left == 0
        removes_most = 0 < limit < num_before - num_left
        is_overruled = False
        if removes_all or removes_most:
            # not overruled: a check before tissue is found, or one that is sure of its whole area
            can_overrule = self._tissue_px > 0 and not self._strict
            is_overruled = can_overrule and num_sure_left > num_left
            warnings.append(
                _removal_warning(
                    check.name,
                    num_before - num_left,
                    num_before - num_sure_left,
                    self._tissue_px,
                    is_overruled=is_overruled,
                )
            )
            if is_overruled:
                self.overruled.add(check.name)
        self._narrow_masks(mask_after, mask_sure, is_overruled=is_overruled)
        if check.removes_glass:
            self._tissue_px = num_left
        for areas, area in (
            (self.areas, outcome.affected_area),
            (self._sure_areas, outcome.sure_area),
            (self.unjudged_areas, outcome.unjudged_area),
        ):
            if area is not None:
                areas[check.name] = area
        # the view holds the mask; dropping the arrays from the outcome frees memory
        self.outcomes[check.name] = replace(
            outcome,
            mask_use=None,
            affected_area=None,
            sure_area=None,
            unjudged_area=None,
            warnings=(*warnings, *outcome.warnings),
        )
        self._stain = outcome.stain or self._stain
        self.seconds[check.name] = time.perf_counter() - started

    def _count(self, mask: Array) -> int:
        return int(self._view.ns.xp.count_nonzero(mask))

    def _narrow_masks(
        self, mask_after: Array, mask_sure: Array, *, is_overruled: bool
    ) -> None:
        """Sets the mask for the next check; narrows the second mask for tiles if it exists.

        Args:
            mask_after: mask of the view without all that the check removes.
            mask_sure: mask of the view without the check's sure area.
            is_overruled: True if only the sure area is removed.
        """
        mask_before = self._view.mask_use
        if is_overruled and self._pipeline.guard:
            self._view = replace(self._view, mask_use=mask_sure)
            return
        # Guard off: the second mask begins at the first overruled check. From then on it loses what
        # each check removes; of an overruled check only the sure area.
        if is_overruled and self._mask_for_tiles is None:
            self._mask_for_tiles = mask_before
        if self._mask_for_tiles is not None:
            removed = mask_before & ~(mask_sure if is_overruled else mask_after)
            self._mask_for_tiles = self._mask_for_tiles & ~removed
        self._view = replace(self._view, mask_use=mask_after)

    def final_masks(self) -> tuple[Array, Array | None]:
        """Returns the mask after all checks, and the second mask for tiles; None if they agree.

        At the end, the area of each check that enforces its mask is removed again, since a later
        check may have added it back. Of an overruled check only the sure area is removed.
        """
        mask_use = self._view.mask_use
        mask_for_tiles = self._mask_for_tiles
        for name, outcome in self.outcomes.items():
            if not outcome.enforce:
                continue
            area_for_checks = self.areas.get(name)
            area_for_tiles = area_for_checks
            if name in self.overruled:
                area_for_tiles = self._sure_areas.get(name)
            if self._pipeline.guard:
                area_for_checks = area_for_tiles
            if area_for_checks is not None:
                mask_use = mask_use & ~area_for_checks
            if mask_for_tiles is not None and area_for_tiles is not None:
                mask_for_tiles = mask_for_tiles & ~area_for_tiles
        return mask_use, mask_for_tiles


def _check_outcome(check: QcCheck, outcome: object, view: QcView) -> None:
    """Refuses what is no outcome for this view: checks come from other packages, too.

    Raises InvalidInputError: names the class, the array and the remedy.
    """
    place = type(check).__name__
    if not isinstance(outcome, Outcome):
        raise InvalidInputError(
            f"{place} must return an Outcome, got {type(outcome).__name__}; return "
            "view.left(mask, self.name), or Outcome(...)"
        )
    for name in ("mask_use", "affected_area", "sure_area", "unjudged_area"):
        area = getattr(outcome, name)
        if area is not None:
            check_mask(name, area, view)


def _plain_scores(check: QcCheck, scores: Mapping[str, Score]) -> dict[str, Score]:
    """Scores as plain numbers and texts, such as a ledger holds them.

    Raises InvalidInputError: an array, or a number that is not finite.
    """
    plain: dict[str, Score] = {}
    for name, score in scores.items():
        # scalars of NumPy and torch, and arrays of one number without a dimension
        is_scalar = getattr(score, "shape", None) == () and hasattr(score, "item")
        value: object = score.item() if is_scalar else score  # type: ignore[union-attr]
        is_number = isinstance(value, int | float) and math.isfinite(value)
        if value is not None and not is_number and not isinstance(value, str):
            shown = value if isinstance(value, int | float) else type(value).__name__
            raise InvalidInputError(
                f"scores of {type(check).__name__} must be finite numbers or texts, got "
                f"{shown} for {name!r}; write 'NA' for no value"
            )
        plain[name] = value  # type: ignore[assignment]
    return plain


def _removal_warning(
    name: str,
    num_found: int,
    num_sure: int,
    tissue_px: int,
    *,
    is_overruled: bool,
) -> str:
    """Warning about a check that finds an artefact on most of the tissue."""
    if num_found < tissue_px:
        share = f"{num_found / tissue_px:.0%} of the tissue"
    else:
        share = "all remaining tissue"
    if is_overruled and num_sure == 0:
        return (
            f"{name} would remove {share} and was ignored: look at its outline in the viewer, "
            "or pass --qc-strict to apply it"
        )
    if is_overruled:
        return (
            f"{name} would remove {share}, and removed only the "
            f"{num_sure / tissue_px:.0%} where it is sure: look at its outline in the "
            "viewer, or pass --qc-strict to apply it"
        )
    if tissue_px == 0:
        return f"{name} left no tissue: look at its outline in the viewer"
    return f"{name} removed {share}: look at its outline in the viewer"


def _read_facts(slide: Slide) -> dict[str, Score]:
    """Metadata of the file, under the names that HistoQC gives them."""
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
