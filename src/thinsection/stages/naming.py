"""The attributes of tiles that other tools look for, and the facts of a slide."""

from typing import Any

import thinsection
from thinsection.slide import Slide
from thinsection.slide.cohort import SlideEntry
from thinsection.slide.geometry import nominal_power
from thinsection.tiles import TileTable


def tile_attributes(
    entry: SlideEntry, slide: Slide, table: TileTable, *, overlap: int
) -> dict[str, Any]:
    """Attributes of /coords: TRIDENT's and CLAM's names first, then our own.

    `target_magnification` is the nominal power of the tile's mpp (0.5 µm/px: 20), because that is
    what their readers expect, and `level0_magnification` is such that TRIDENT reads exactly the px
    that a tile covers. Without an mpp both are the objective's power, or 0 where nobody knows it.
    """
    plan = table.plan
    power = nominal_power(plan.tile_mpp) if plan.tile_mpp else slide.objective_power or 0.0
    attributes: dict[str, Any] = {
        "name": entry.slide_id,
        "patch_size": plan.tile_px,
        "patch_size_level0": plan.size_l0[0],
        "level0_magnification": power * plan.size_l0[0] / plan.tile_px,
        "target_magnification": power,
        "overlap": overlap,
        "level0_width": slide.size[0],
        "level0_height": slide.size[1],
        "patch_level": plan.level,
        "downsample": plan.downsample,
        "thinsection_version": thinsection.__version__,
        "tile_size_l0": list(plan.size_l0),
        "stride_l0": list(plan.stride_l0),
    }
    if plan.tile_mpp is not None:
        attributes["tile_mpp"] = plan.tile_mpp
    if slide.slide_mpp is not None:
        attributes["slide_mpp"] = list(slide.slide_mpp)
    return attributes


def slide_facts(entry: SlideEntry, slide: Slide) -> dict[str, Any]:
    """What slide.json and the summary say of a slide."""
    mpp = slide.slide_mpp
    return {
        "slide_id": entry.slide_id,
        "slide_path": entry.slide_path,
        "reader": slide.reader,
        "width": slide.size[0],
        "height": slide.size[1],
        "levels": [
            {"size": list(level.size), "downsample": level.downsample} for level in slide.levels
        ],
        "mpp_x": mpp[0] if mpp else None,
        "mpp_y": mpp[1] if mpp else None,
        "objective_power": slide.objective_power,
        "vendor": slide.vendor,
        "patient_id": entry.patient_id,
        "label": entry.label,
        "split": entry.split,
    }
