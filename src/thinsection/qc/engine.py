"""Runs a pipeline on one slide, says what was found, of its tiles too, and judges it by rules."""

import math
import operator
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy.typing as npt

from thinsection.arrays import Array, ArrayNamespace, filters, get_namespace
from thinsection.config import nearest, user_cache_dir
from thinsection.errors import ConfigError, require
from thinsection.files.pages import notebook_html
from thinsection.qc.checks.artefact_maps import artefact_maps
from thinsection.qc.checks.by_example import (
    ByExample,
    PixelModel,
    probabilities,
    trained_model,
)
from thinsection.qc.checks.check import Outcome, QcView, Score
from thinsection.qc.pipeline import Pipeline, load_pipeline
from thinsection.qc.tissue import (
    Color,
    Shares,
    TissueMask,
    box_fractions,
    hues,
    overlay,
)
from thinsection.qc.work_image import (
    Scale,
    read_images,
    regions_at,
    scale_of,
    suspicions,
)
from thinsection.slide import Slide
from thinsection.types import CoordsL0, MaskArray, MaskFrame, RgbArray, Size

Seconds = dict[str, float]
_Images = Mapping[float, RgbArray]  # by nominal µm/px, the work image first
_GUARDED_SHARE = 0.5  # of the tissue: a check that takes more of it is not believed
_GLASS_COLOR: Color = (222, 226, 231)
_OPERATORS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
_OPERATORS |= {"==": operator.eq, "!=": operator.ne}
_RULE = re.compile(
    r"\s*([A-Za-z_][\w.]*)\s*(<=|>=|==|!=|<|>)\s*(-?\d+(?:\.\d+)?(?:e-?\d+)?)\s*"
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class QcResult:
    """What quality control says of one slide."""

    mask_use: MaskArray  # bool (H, W), True = tissue that passed every check
    frame: MaskFrame  # where the masks lie on the slide
    masks: Mapping[str, MaskArray]  # by check, what it removed (or filled), bool (H, W)
    scores: Mapping[
        str, Score
    ]  # columns of the slide's row, in the order of the checks
    warnings: tuple[str, ...]  # sentences about the slide
    pipeline: Pipeline  # the pipeline that ran
    rgb: RgbArray  # the work image, uint8 (H, W, 3)
    mpp_th: float  # µm per px of it
    facts: Mapping[str, Score]  # what the file says of itself, for the row
    tables: Mapping[str, npt.NDArray[Any]] = field(
        default_factory=dict
    )  # for the report, by check
    seconds: Seconds = field(default_factory=dict)  # per check, and of reading
    crossings: Mapping[str, int] = field(
        default_factory=dict
    )  # of host and device, by reason
    kept: MaskArray | None = (
        None  # what the guard leaves to tile, where that is not `mask_use`
    )

    @property
    def row(self) -> dict[str, Score]:
        """Facts, scores and warnings by column name; numbers are float, the rest str."""
        return {**self.facts, **self.scores, "warnings": "|".join(self.warnings)}

    @property
    def tissue(self) -> TissueMask:
        """What tiles are laid on: what passed every check, or what the guard kept."""
        mpp, rgb = (self.mpp_th, self.mpp_th), self.rgb
        mask, frame = self.mask_use if self.kept is None else self.kept, self.frame
        stain = str(self.scores.get("stain", ""))
        return TissueMask(
            mask=mask, frame=frame, mask_mpp=mpp, thumbnail=rgb, stain=stain
        )

    @property
    def colors(self) -> dict[str, Color]:
        """A colour per check with a mask: gray for glass, else spread over the hues."""
        glass = {check.name for check in self.pipeline.checks if check.removes_glass}
        others = [name for name in self.masks if name not in glass]
        return dict.fromkeys(self.masks, _GLASS_COLOR) | dict(
            zip(others, hues(len(others)))
        )

    def overlay(self) -> RgbArray:
        """The work image with what each check took tinted, and what is left outlined."""
        colors = self.colors
        return overlay(
            self.rgb, self.mask_use, [(m, colors[n]) for n, m in self.masks.items()]
        )

    def __repr__(self) -> str:
        (height, width), used = (
            self.mask_use.shape,
            f"{self.mask_use.mean():.1%} to use",
        )
        size = f"{width} x {height} px, {self.mpp_th:.4g} µm/px"
        parts = f"{len(self.masks)} masks, {len(self.scores)} scores, {len(self.warnings)} warnings"
        return f"QcResult(pipeline {self.pipeline.name!r}, {size}, {used}, {parts})"

    def _repr_html_(self) -> str:
        took = [
            f"{name}: {mask.mean():.1%}"
            for name, mask in self.masks.items()
            if mask.any()
        ]
        lines = [
            f"to use: {self.mask_use.mean():.1%} of the image",
            *took,
            *self.warnings,
        ]
        return notebook_html(
            self.overlay(), f"Quality control: {self.pipeline.name}", lines
        )


def prepare_models(
    pipeline: Pipeline, *, cache_dir: Path | None = None
) -> dict[Any, PixelModel]:
    """The pipeline's pixel models; those of own examples are trained into the cache, once."""
    checks = [check for check in pipeline.checks if isinstance(check, ByExample)]
    return {
        check: trained_model(check, cache_dir or user_cache_dir()) for check in checks
    }


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
        pipeline: a preset's name, a TOML file, or what `load_pipeline` made of one.
        device: 'cpu' or 'cuda[:index]'.
        cache_dir: of the pixel models; None is `user_cache_dir()`.
        slide_mpp: µm per level-0 px, in place of what the file says.
        strict: no guard: a check that takes most of the tissue, or all of it, has its way.

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
    images = read_images(slide, pipeline, scale)
    read_s = time.perf_counter() - started
    models = partial(prepare_models, pipeline, cache_dir=cache_dir)
    view = _view(ns, slide, scale, images, models)
    left, kept, outcomes, seconds = _narrow(view, pipeline, strict=strict)
    mask_use, rgb, found = (
        ns.download(left),
        images[pipeline.work_mpp],
        outcomes.values(),
    )
    absolute = pipeline.pixels_to_use == "absolute"
    usable = float(mask_use.sum() if absolute else mask_use.mean())
    scores = {column: value for o in found for column, value in o.scores.items()}
    return QcResult(
        mask_use=mask_use,
        frame=MaskFrame(size_th=rgb.shape[1::-1], size_l0=slide.size),
        masks={
            n: ns.download(o.touched)
            for n, o in outcomes.items()
            if o.touched is not None
        },
        scores={**scores, "pixels_to_use": usable},
        warnings=(
            *scale.warnings,
            *suspicions(rgb),
            *(w for o in found for w in o.warnings),
        ),
        pipeline=pipeline,
        rgb=rgb,
        mpp_th=view.mpp_th,
        facts=_facts(slide),
        tables={name: table for o in found for name, table in o.tables.items()},
        seconds={"read": read_s, **seconds},
        crossings=dict(ns.crossings),
        kept=None if kept is left else ns.download(kept),
    )


def _view(
    ns: ArrayNamespace,
    slide: Slide,
    scale: Scale,
    images: _Images,
    models: Callable[[], Any],
) -> QcView:
    """The view before any check: all px are in use."""
    rgb = ns.upload(next(iter(images.values())))
    # the first check that asks computes all, as they share features
    found = cache(lambda: probabilities(ns, rgb, models()))
    mpp_th = _mpp_th(slide.size, rgb.shape[1::-1], scale)
    return QcView(
        ns=ns,
        rgb=rgb,
        gray=filters.gray_from_rgb(ns, rgb),
        mask_use=ns.xp.ones(rgb.shape[:2], dtype=bool),
        mpp_th=mpp_th,
        gray_at=lambda nominal_mpp: filters.gray32_from_rgb(
            ns, ns.upload(images[nominal_mpp])
        ),
        regions_at=partial(regions_at, slide, scale.slide_mpp),
        probability_of=lambda check: found()[check],
        artefact_maps=cache(partial(artefact_maps, ns, rgb, mpp_th)),
        associated=lambda n: (
            slide.associated_image(n) if n in slide.associated_names else None
        ),
    )


def _mpp_th(size_l0: Size, size_th: Size, scale: Scale) -> float:
    """µm per px of the work image: HistoQC's by the long side, else the mean of both sides."""
    if scale.by_long_side:
        return scale.slide_mpp * max(size_l0) / max(size_th)
    area_um2 = math.prod(size_l0) * math.prod(scale.mpp_xy)
    return math.sqrt(area_um2 / math.prod(size_th))


def _narrow(
    view: QcView, pipeline: Pipeline, *, strict: bool
) -> tuple[Array, Array, dict[str, Outcome], Seconds]:
    """The mask that is left, what of it the guard keeps, and of each check answer and seconds."""
    outcomes: dict[str, Outcome] = {}
    seconds: Seconds = {}
    stain, kept, tissue_px = "", view.mask_use, 0
    for planned in pipeline.checks:
        check, started = pipeline.variant(planned, stain), time.perf_counter()
        touched = {
            name: o.touched for name, o in outcomes.items() if o.touched is not None
        }
        written = check.statistics or pipeline.statistics
        name, outcome = (
            check.name,
            check(replace(view, statistics=written, touched=touched)),
        )
        twice = [
            c
            for c in outcome.scores
            if any(c in other.scores for other in outcomes.values())
        ]
        said = [
            f"{name} writes the column {column} of an earlier check" for column in twice
        ]
        left = view.mask_use if outcome.mask_use is None else outcome.mask_use
        before, after = (
            int(view.ns.xp.count_nonzero(m)) for m in (view.mask_use, left)
        )
        most = tissue_px > 0 and before - after > tissue_px * _GUARDED_SHARE
        most |= before > 0 and after == 0
        guards = most and tissue_px > 0 and check.guarded and not strict
        if most:
            said.append(_took_most(name, before - after, tissue_px, kept=guards))
        if guards:
            left = view.mask_use if pipeline.guard else left
        else:
            kept = left if kept is view.mask_use else kept & (left | ~view.mask_use)
        tissue_px = after if check.removes_glass else tissue_px
        warnings = (*said, *outcome.warnings)
        outcomes[name] = replace(outcome, mask_use=None, warnings=warnings)
        view, stain = replace(view, mask_use=left), outcome.stain or stain
        seconds[name] = time.perf_counter() - started
    mask_use, guarded = view.mask_use, kept is not view.mask_use
    for outcome in outcomes.values():
        if outcome.enforce and outcome.touched is not None:  # even if filled since
            mask_use, kept = mask_use & ~outcome.touched, kept & ~outcome.touched
    return mask_use, kept if guarded else mask_use, outcomes, seconds


def _took_most(name: str, px: int, tissue_px: int, *, kept: bool) -> str:
    """The warning of a check that took most of the tissue."""
    share = (
        f"{px / tissue_px:.0%} of the tissue" if px < tissue_px else "all that was left"
    )
    kept_too = f"would take {share}, which is kept: look at its picture, or --qc-strict"
    took = (
        f"took {share}: look at its picture"
        if tissue_px
        else "left no tissue: look at it"
    )
    return f"{name} {kept_too if kept else took}"


def _facts(slide: Slide) -> dict[str, Score]:
    """What HistoQC writes about the file itself."""
    width, height = slide.size
    mpp_x, mpp_y = slide.slide_mpp or ("NA", "NA")
    comments = (
        "openslide.comment",
        "tiff.ImageDescription",
    )  # equal where both readers open it
    comment = next(
        (text for key in comments if (text := slide.properties.get(key))), None
    )
    power = "NA" if slide.objective_power is None else slide.objective_power
    return {
        **{
            "base_mag": power,
            "type": slide.vendor or "NA",
            "levels": float(len(slide.levels)),
        },
        **{
            "height": float(height),
            "width": float(width),
            "mpp_x": mpp_x,
            "mpp_y": mpp_y,
        },
        "comment": re.sub(r"[\r\n]", " ", comment or "NA"),
    }


def tile_qc_columns(
    result: QcResult, coords_l0: CoordsL0, tile_px_l0: int
) -> dict[str, Shares]:
    """Per check, the share of each tile's area that it touched, float32 (N,) in [0, 1].

    Tiles of tile_px_l0 have their top-left corners at coords_l0, (N, 2). Checks that only measure,
    or that fill holes, have no column. Px of the mask that a tile's border cuts count by the part
    inside; area outside the slide counts as untouched.

    Memory: O(H * W + N) for each check.

    Raises InvalidInputError: coords_l0 is not (N, 2), or the tile has no size.
    """
    shaped, got = coords_l0.shape[1:] == (2,), f"{coords_l0.dtype} {coords_l0.shape}"
    require(shaped, "coords_l0 must be int64 of shape (N, 2)", got)
    require(tile_px_l0 > 0, "tile_px_l0 must be > 0", tile_px_l0)
    filling = {check.name for check in result.pipeline.checks if check.fills}
    share_of = partial(box_fractions, frame=result.frame, coords_l0=coords_l0)
    size_l0, masks = (tile_px_l0, tile_px_l0), result.masks.items()
    return {
        name: share_of(m, size_l0=size_l0) for name, m in masks if name not in filling
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class QcRule:
    """A slide fails where a column of its row compares so with a number: `pixels_to_use<1000`."""

    column: str
    symbol: str  # <, <=, >, >=, == or !=
    limit: float

    def __str__(self) -> str:
        return f"{self.column}{self.symbol}{self.limit:g}"

    def holds(self, value: Any) -> Any:
        """Whether it holds for a value of the column, or for which of an array of them."""
        return _OPERATORS[self.symbol](value, self.limit)


def parse_rule(text: str) -> QcRule:
    """The rule of a text such as 'pixels_to_use<1000', or ConfigError."""
    if (match := _RULE.fullmatch(text)) is None:
        raise ConfigError(f"qc rule must read like 'pixels_to_use<1000', got {text!r}")
    return QcRule(column=match[1], symbol=match[2], limit=float(match[3]))


def qc_fail(row: Mapping[str, Score], rule: QcRule | str) -> bool:
    """Whether the rule holds for the row of a `QcResult`; ConfigError without such a number."""
    rule = parse_rule(rule) if isinstance(rule, str) else rule
    if (name := rule.column) not in row:
        raise ConfigError(
            f"qc rule must name a column, got {name!r}{nearest(name, row)}"
        )
    if isinstance(value := row[name], str):
        raise ConfigError(
            f"qc rule must name a column of numbers, got {name!r} = {value!r}"
        )
    return bool(rule.holds(value))
