"""Result of quality control on one slide: masks, scores, and columns of its tiles."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from thinsection.arrays.packed import PackedArrays
from thinsection.arrays.polygons import Window, rasterised, window_of
from thinsection.errors import InvalidInputError
from thinsection.files.pages import notebook_html
from thinsection.qc.checks.check import (
    EMPTY_SCORE,
    UNJUDGED,
    ReportTable,
    Score,
    share_of,
)
from thinsection.qc.edits import (
    EDITED_AREAS,
    ROLE,
    EditMasks,
    QcEdit,
    check_names,
    edit_masks,
)
from thinsection.qc.pipeline import Pipeline, Usable
from thinsection.qc.tissue import (
    UNJUDGED_COLOR,
    Color,
    Shares,
    TissueMask,
    box_fractions,
    diagonal_stripes,
    hues,
    overlay,
)
from thinsection.types import CoordsL0, MaskArray, MaskFrame, RgbArray, Size, counted

_GLASS_COLOR: Color = (222, 226, 231)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class QcResult:
    """Result of quality control on one slide."""

    mask_use: MaskArray  # bool (H, W), True = tissue that passed every check
    frame: MaskFrame  # place of the masks on the slide
    # by check, pixels that it removed (or filled), bool (H, W)
    masks: Mapping[str, MaskArray]
    # columns of the slide's row, in the order of the checks
    scores: Mapping[str, Score]
    # sentences about the slide
    warnings: tuple[str, ...]
    # the pipeline that ran
    pipeline: Pipeline
    # the work image, uint8 (H, W, 3)
    rgb: RgbArray
    # µm per px of it
    mpp_th: float
    # the file's own metadata, for the row
    facts: Mapping[str, Score]
    # for the report, by check
    tables: Mapping[str, ReportTable] = field(default_factory=dict)
    # per check, and of reading
    seconds: dict[str, float] = field(default_factory=dict)
    # copies between host and device, by reason
    transfers: Mapping[str, int] = field(default_factory=dict)
    # mask without the overruled checks, for tiles; None if it is `mask_use`
    mask_kept: MaskArray | None = None
    # by check, tissue that it could not judge, bool (H, W); a check that judges all has none
    unjudged: Mapping[str, MaskArray] = field(default_factory=dict)
    # checks that the guard overruled
    overruled: tuple[str, ...] = ()
    # corrections of a person, which `mask_use`, `mask_kept` and `masks` contain
    edits: tuple[QcEdit, ...] = ()
    # the answers of the checks before these corrections; None without corrections
    checked: QcResult | None = None
    # True if it was read back: `rgb` comes from a smaller picture, and tables may be missing
    is_stored: bool = False

    @property
    def row(self) -> dict[str, Score]:
        """Facts, scores, area and warnings by column name; numbers are float, others str."""
        frame = self.frame
        area = usable_mm2(
            self.facts,
            self.scores,
            self.pipeline.pixels_to_use,
            frame.size_l0,
            frame.size_th,
        )
        row = {**self.facts, **self.scores, **area}
        return row | {"warnings": "|".join(self.warnings)}

    @property
    def tissue(self) -> TissueMask:
        """The mask that tiles are laid on: it passed every check, or the guard kept it."""
        return TissueMask(
            mask=self.mask_use if self.mask_kept is None else self.mask_kept,
            frame=self.frame,
            mask_mpp=(self.mpp_th, self.mpp_th),
            thumbnail=self.rgb,
            stain=str(self.scores.get("stain", "")),
        )

    @property
    def shown(self) -> frozenset[str]:
        """Names of the checks that only show what they found, and remove nothing."""
        checks = self.pipeline.checks
        return frozenset(check.name for check in checks if not check.removes)

    @property
    def unjudged_tissue(self) -> MaskArray:
        """Tissue that at least one check could not judge, bool (H, W)."""
        return _any_of(self.unjudged, self.tissue.mask)

    @property
    def editable_checks(self) -> list[str]:
        """Checks that a person can correct: those that mark areas, or could not judge some."""
        allowed = self.pipeline.editable_checks
        names = dict.fromkeys((*self.masks, *self.unjudged))
        return [name for name in names if name in allowed]

    def with_edits(self, edits: Sequence[QcEdit]) -> QcResult:
        """The result with corrections of a person, in place of those that it has.

        The guard does not overrule a correction. Columns with a check's share follow the
        correction; all other columns are those of the checks.

        Memory: a mask for each check and each class of corrections.

        Raises:
            InvalidInputError: a correction is about a check that marks no areas.
        """
        checked = self.checked or self
        if not edits:
            return checked
        names = checked.editable_checks
        left_out = set(checked.pipeline.editable_checks) - set(names)
        for edit in edits:
            if edit.check in left_out:
                raise InvalidInputError(
                    f"{ROLE} must be about checks that ran, got {edit.class_name!r} of "
                    f"{edit.file!r}, but {edit.check!r} was left out; draw 'keep' or 'remove' "
                    "without its name"
                )
        check_names(edits, names)
        edited = _with_edited_masks(checked, edits)
        warnings = _edit_warnings(checked, edited)
        warnings.append(_overlap_warning(checked, edits))
        if checked.tissue.mask.any() and not edited.tissue.mask.any():
            warnings.append("all tissue was removed by hand")
        return replace(
            edited,
            scores=_edited_scores(checked, edited),
            warnings=(*checked.warnings, *filter(None, warnings)),
        )

    @property
    def colors(self) -> dict[str, Color]:
        """A colour per check with a mask: gray for glass, else spread over the hues."""
        glass = {check.name for check in self.pipeline.checks if check.removes_glass}
        others = [name for name in self.masks if name not in glass]
        colors = dict.fromkeys(self.masks, _GLASS_COLOR)
        colors.update(zip(others, hues(len(others))))
        return colors

    def overlay(self) -> RgbArray:
        """The work image, tinted by the checks' masks, with the remaining tissue outlined.

        Stripes mark tissue that at least one check did not judge.
        """
        colors = self.colors
        # each mask is unpacked when it is its turn
        tints = ((mask, colors[name]) for name, mask in self.masks.items())
        shown = [(self.masks[n], colors[n]) for n in self.masks if n in self.shown]
        stripes = self.unjudged_tissue & diagonal_stripes(self.mask_use.shape)
        return overlay(
            self.rgb, self.mask_use, tints, shown=[*shown, (stripes, UNJUDGED_COLOR)]
        )

    def __repr__(self) -> str:
        height, width = self.mask_use.shape
        return (
            f"QcResult(pipeline {self.pipeline.name!r}, {width} x {height} px, "
            f"{self.mpp_th:.4g} µm/px, {self.mask_use.mean():.1%} to use, "
            f"{len(self.masks)} masks, {len(self.scores)} scores, "
            f"{len(self.warnings)} warnings)"
        )

    def _repr_html_(self) -> str:
        lines = [f"to use: {self.mask_use.mean():.1%} of the image"]
        for name, mask in self.masks.items():
            if mask.any():
                only = " (only shown)" * (name in self.shown)
                lines.append(f"{name}{only}: {mask.mean():.1%}")
        if self.unjudged_tissue.any():
            lines.append(f"not judged by a check: {self.unjudged_tissue.mean():.1%}")
        lines += self.warnings
        title = f"Quality control: {self.pipeline.name}"
        return notebook_html(self.overlay(), title, lines)


def _with_edited_masks(checked: QcResult, edits: Sequence[QcEdit]) -> QcResult:
    """The result with corrected masks, and the columns of the checks."""
    areas = edit_masks(edits, checked.frame)
    back = areas.kept("") | _given_back(checked, areas)
    gone = areas.removed(*areas.remove)
    mask_kept = checked.mask_kept
    if mask_kept is not None:
        mask_kept = (mask_kept | back) & ~gone
    edited = replace(
        checked,
        mask_use=(checked.mask_use | back) & ~gone,
        mask_kept=mask_kept,
        masks=_edited_masks(checked, areas),
        edits=tuple(edits),
        checked=checked,
    )
    return replace(edited, unjudged=_edited_unjudged(checked, areas, edited))


def _edited_unjudged(
    checked: QcResult, areas: EditMasks, edited: QcResult
) -> dict[str, MaskArray]:
    """Tissue that a check judged neither itself nor by a correction that names it.

    The class 'keep' names all checks. Tissue that 'keep CHECK' gives back was removed before the
    later checks ran, so these have not judged it.
    """
    came_back = edited.tissue.mask & ~checked.tissue.mask
    # tissue that the corrections of the checks so far have given back
    unseen = np.zeros_like(came_back)
    unjudged = {}
    for check in checked.pipeline.checks:
        name = check.name
        if name in checked.unjudged:
            judged = areas.kept("", name) | areas.removed("", name)
            mask = (checked.unjudged[name] | unseen) & ~judged
            unjudged[name] = mask & edited.tissue.mask
        if name in areas.keep and name in checked.masks:
            unseen |= areas.kept(name) & checked.masks[name] & came_back
    return unjudged


def _edit_warnings(checked: QcResult, edited: QcResult) -> list[str]:
    """Sentences about corrections that have no effect, or not the wanted one; alike ones joined.

    Memory: some masks.
    """
    by_class: dict[str, list[QcEdit]] = {}
    for edit in edited.edits:
        by_class.setdefault(edit.class_name, []).append(edit)
    areas = edit_masks(edited.edits, checked.frame)
    gone = areas.removed(*areas.remove)
    num_areas: Counter[tuple[str, str]] = Counter()
    for class_name, edits in by_class.items():
        effective = _effective_pixels(checked, edits[0])
        for edit in edits:
            window = window_of(edit.area, checked.frame)
            inside = rasterised(edit.area, checked.frame, window)
            faults = "change{s} nothing"
            if (inside & effective[window]).any():
                # another warning says where areas to remove overlap it
                wanted = inside & ~gone[window]
                faults = _held_words(
                    checked, edited, edit, areas, wanted=wanted, window=window
                )
            if faults:
                place = f"of class {class_name!r} in {edit.file or 'the corrections'}"
                num_areas[place, faults] += 1
    warnings = []
    for (place, faults), number in num_areas.items():
        areas_words = "an area" if number == 1 else counted(number, "area")
        verb = faults.format(s="s" if number == 1 else "")
        warnings.append(f"{areas_words} {place} {verb}")
    return warnings


def _effective_pixels(checked: QcResult, edit: QcEdit) -> MaskArray:
    """Pixels of which a correction of this class changes a mask, or what counts as judged."""
    tissue = checked.tissue.mask
    names = [edit.check] if edit.check else checked.editable_checks
    unjudged = [edit.check] if edit.check else list(checked.unjudged)
    if edit.action == "remove":
        effective = tissue.copy()
        if edit.check:
            effective |= ~checked.masks.get(edit.check, np.zeros_like(tissue))
    else:
        effective = np.zeros_like(tissue) if edit.check else ~tissue
        for name in names:
            if name in checked.masks:
                effective |= checked.masks[name]
    for name in unjudged:
        if name in checked.unjudged:
            effective |= checked.unjudged[name]
    return effective


def _held_words(
    checked: QcResult,
    edited: QcResult,
    edit: QcEdit,
    areas: EditMasks,
    *,
    wanted: MaskArray,
    window: Window,
) -> str:
    """Words on the checks that hold back all tissue which 'keep CHECK' would give back, or ''."""
    removing = _removing_checks(checked)
    if edit.action != "keep" or edit.check not in removing:
        return ""
    wanted = wanted & checked.masks[edit.check][window] & ~checked.tissue.mask[window]
    if not wanted.any() or (wanted & edited.tissue.mask[window]).any():
        return ""
    holding = []
    for name in removing:
        kept = areas.kept("", name)[window]
        if name != edit.check and (wanted & checked.masks[name][window] & ~kept).any():
            holding.append(name)
    if not holding:
        return ""
    return (
        f"give{{s}} no tissue back, because {' and '.join(holding)} remove"
        f"{'s' if len(holding) == 1 else ''} it too; the class 'keep' overrules all checks"
    )


def _overlap_warning(checked: QcResult, edits: Sequence[QcEdit]) -> str:
    """A sentence about areas to keep and to remove that share pixels; '' if none do."""
    areas = edit_masks(edits, checked.frame)
    classes: dict[str, None] = {}
    for kept, keep_mask in areas.keep.items():
        for removed, remove_mask in areas.remove.items():
            if (keep_mask & remove_mask).any():
                pair = (f"keep {kept}".strip(), f"remove {removed}".strip())
                classes |= dict.fromkeys(pair)
    if not classes:
        return ""
    names = ", ".join(sorted(map(repr, classes)))
    return f"areas of the classes {names} overlap; there 'remove' wins"


def _removing_checks(checked: QcResult) -> list[str]:
    """Checks that remove what they mark: neither overruled, nor only shown."""
    names = [name for name in checked.editable_checks if name in checked.masks]
    apart = checked.shown.union(checked.overruled)
    return [name for name in names if name not in apart]


def _edited_masks(checked: QcResult, areas: EditMasks) -> PackedArrays:
    """Areas of the checks with the corrections about them, and with those about all checks."""
    masks = PackedArrays()
    masks.update(checked.masks)
    for name in checked.editable_checks:
        if name in masks:
            masks[name] = masks[name] & ~areas.kept("", name) | areas.removed(name)
        elif name in areas.remove:
            masks[name] = areas.removed(name)
    return masks


def _given_back(checked: QcResult, areas: EditMasks) -> MaskArray:
    """Pixels that only one check removes, in the areas where a person keeps what it removes."""
    removing = _removing_checks(checked)
    back = np.zeros_like(checked.mask_use)
    for name in areas.keep:
        if name not in checked.masks:
            continue
        marked = areas.kept(name) & checked.masks[name]
        for other in removing:
            if other != name:
                marked &= ~checked.masks[other] | areas.kept(other)
        back |= marked
    return back


def _edited_scores(checked: QcResult, edited: QcResult) -> dict[str, Score]:
    """Columns of the slide after corrections."""
    areas = edit_masks(edited.edits, checked.frame)
    scores = {**checked.scores, **_edited_shares(checked, areas)}
    scores |= unjudged_shares(edited.unjudged, edited.tissue.mask)
    usable = edited.mask_use
    is_count = edited.pipeline.pixels_to_use == "absolute"
    scores["pixels_to_use"] = float(usable.sum() if is_count else usable.mean())
    scores[EDITED_AREAS] = float(len(edited.edits))
    return scores


def _edited_shares(checked: QcResult, areas: EditMasks) -> dict[str, Score]:
    """Columns with the shares that the corrections change.

    The share of a check is that of the tissue that the earlier checks leave: the part that the
    check's corrected area takes. It is computed from the masks before and after the correction,
    and replaces the stored share where the two differ.
    """
    before = _shares_of(checked, EditMasks(keep={}, remove={}, frame=checked.frame))
    shares: dict[str, Score] = {}
    for column, share in _shares_of(checked, areas).items():
        if share != before[column]:
            shares[column] = share
    return shares


def _shares_of(checked: QcResult, areas: EditMasks) -> dict[str, Score]:
    """Share of each check that removes or shows, by column, from the stored masks."""
    pipeline = checked.pipeline
    masks = _edited_masks(checked, areas)
    editable = checked.editable_checks
    by_others = np.zeros_like(checked.mask_use)
    for name in _removing_checks(checked):
        by_others |= checked.masks[name]
    tissue = np.ones_like(checked.mask_use)
    shares: dict[str, Score] = {}
    for listed in pipeline.checks:
        check = pipeline.variant(listed, str(checked.scores.get("stain", "")))
        name = check.name
        mask = masks.get(name, np.zeros_like(tissue))
        if check.fills:
            tissue |= mask
            continue
        if name not in editable:
            continue
        left = tissue & ~mask
        column = check.share_column
        # a check that was not run has no column, until a person marks an area in its place
        if column in checked.scores or name not in checked.masks:
            shares[column] = share_of(
                int(np.count_nonzero(left)),
                int(np.count_nonzero(tissue)),
                tissue.size,
                check.statistics or pipeline.statistics,
            )
        removed = mask
        if name in checked.shown:
            removed = areas.removed(name)
        elif name in checked.overruled and pipeline.guard:
            # only the part of which the check is sure: what is gone, and no other check removes
            removed = mask & ~checked.mask_use & ~by_others | areas.removed(name)
        tissue &= ~removed
    return shares


def tile_qc_columns(
    result: QcResult, coords_l0: CoordsL0, tile_px_l0: int
) -> dict[str, Shares]:
    """Per check, the share of each tile's area that it touched, float32 (N,) in [0, 1].

    `unjudged` is the share of the tile that at least one check did not judge.

    Tiles of tile_px_l0 have their top-left corners at coords_l0, (N, 2). Checks that only
    measure, or that fill holes, have no column. Px of the mask that a tile's border cuts
    count by the part inside; area outside the slide counts as untouched.

    Memory: O(H * W + N) for each check.

    Raises:
        InvalidInputError: coords_l0 is not (N, 2), or the tile has no size.
    """
    if coords_l0.shape[1:] != (2,):
        raise InvalidInputError(
            "coords_l0 must be int64 of shape (N, 2), "
            f"got {coords_l0.dtype} {coords_l0.shape}"
        )
    if tile_px_l0 <= 0:
        raise InvalidInputError(f"tile_px_l0 must be > 0, got {tile_px_l0}")
    size_l0 = (tile_px_l0, tile_px_l0)
    filling = {check.name for check in result.pipeline.checks if check.fills}
    shares = {
        name: box_fractions(mask, result.frame, coords_l0, size_l0)
        for name, mask in result.masks.items()
        if name not in filling
    }
    if result.unjudged:
        area = result.unjudged_tissue
        shares[UNJUDGED] = box_fractions(area, result.frame, coords_l0, size_l0)
    return shares


def usable_mm2(
    facts: Mapping[str, object],
    scores: Mapping[str, object],
    form: Usable,
    size_l0: Size,
    size_th: Size,
) -> dict[str, Score]:
    """Column with the area of the usable tissue; {} if the resolution or the tissue is unknown.

    Args:
        facts: the file's metadata.
        scores: columns of the checks.
        form: form of `pixels_to_use`, by the pipeline: pixels of the work image, or their share.
        size_l0: (width, height) of the slide in level-0 px.
        size_th: (width, height) of the work image.
    """
    usable = scores.get("pixels_to_use")
    sizes_um = []
    for name, size in zip(("mpp_x", "mpp_y"), size_l0):
        mpp = facts.get(name)
        if not isinstance(mpp, int | float) or not 0 < mpp < math.inf:
            return {}
        sizes_um.append(mpp * size)
    if not isinstance(usable, int | float):
        return {}
    unit_mm2 = sizes_um[0] * sizes_um[1] / 1e6
    if form == "absolute":
        unit_mm2 /= size_th[0] * size_th[1]
    return {"usable_mm2": round(float(usable) * unit_mm2, 6)}


def unjudged_shares(
    unjudged: Mapping[str, MaskArray], tissue: MaskArray
) -> dict[str, Score]:
    """Columns of a slide's row: the share of the tissue that each check could not judge, and any.

    There are none if every check judges all tissue.
    """
    if not unjudged:
        return {}
    counts = {f"{name}_": int(area.sum()) for name, area in unjudged.items()}
    counts[""] = int(_any_of(unjudged, tissue).sum())
    num_px = int(tissue.sum())
    return {
        f"{name}{UNJUDGED}_percent": count / num_px if num_px else EMPTY_SCORE
        for name, count in counts.items()
    }


def _any_of(areas: Mapping[str, MaskArray], tissue: MaskArray) -> MaskArray:
    """Pixels of the tissue that are in at least one area."""
    union = np.zeros_like(tissue)
    for area in areas.values():
        union |= area
    return union & tissue
