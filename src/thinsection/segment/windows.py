"""Windows of a network over a slide: their places, and bands that fit into memory."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinsection.errors import BudgetError
from thinsection.qc.own_tissue import Tissue
from thinsection.qc.tissue import box_fractions
from thinsection.segment.spec import SegmenterSpec
from thinsection.slide import Slide
from thinsection.slide.geometry import ReadPlan, plan_read
from thinsection.tiles.grid import mask_and_frame
from thinsection.types import CoordsL0, Size, format_bytes

Starts = npt.NDArray[np.int64]  # (n,), px of the map
Places = npt.NDArray[np.int64]  # (N, 2): x, y of windows, px of the map
Band = tuple[int, int]  # [first, last) of columns, px of the map


@dataclass(frozen=True, kw_only=True)
class WindowGrid:
    """Windows of a network over a slide; `size` and `x`, `y` are px at its resolution."""

    plan: ReadPlan
    size: Size  # (width, height) of the map
    scale: tuple[float, float]  # level-0 px per px of the map, (x, y)
    column_starts: Starts
    row_starts: Starts

    @classmethod
    def cover(cls, slide: Slide, spec: SegmenterSpec) -> "WindowGrid":
        """Covers a slide with windows; the last ones end with it, and a small slide is centred."""
        plan = plan_read(
            slide.levels,
            slide.slide_mpp,
            tile_px=spec.px,
            tile_mpp=spec.mpp,
            slide=slide.slide_path,
        )
        scale_x = plan.size_lv[0] * plan.downsample / spec.px
        scale_y = plan.size_lv[1] * plan.downsample / spec.px
        width = max(1, round(slide.size[0] / scale_x))
        height = max(1, round(slide.size[1] / scale_y))
        step = spec.px - round(spec.overlap * spec.px)
        return cls(
            plan=plan,
            size=(width, height),
            scale=(scale_x, scale_y),
            column_starts=_window_starts(width, spec.px, step),
            row_starts=_window_starts(height, spec.px, step),
        )

    def bands(self, memory: int, num_outputs: int) -> list[Band]:
        """Ranges [first, last) of columns whose strip fits into the memory."""
        px = self.plan.tile_px
        width = self.size[0]
        column_bytes = 4 * (num_outputs + 1) * px
        fit = memory // column_bytes
        if width <= max(fit, px):
            return [(0, width)]
        if fit < 2 * px:
            raise BudgetError(
                f"segment_memory must be >= {format_bytes(2 * px * column_bytes)}, "
                f"got {format_bytes(memory)}"
            )
        return [(x, min(x + fit, width)) for x in range(0, width, fit)]

    def places(self, tissue: Tissue, band: Band) -> Places:
        """Windows (N, 2) that touch the tissue and the band, row by row."""
        first, last = band
        x = self.column_starts
        x = x[(x < last) & (x + self.plan.tile_px > first)]
        places = np.stack(np.meshgrid(x, self.row_starts), axis=-1).reshape(-1, 2)
        mask, frame = mask_and_frame(tissue)
        coords_l0 = self.coords_l0(places)
        shares = box_fractions(mask, frame, coords_l0, self.plan.size_l0)
        return np.asarray(places[shares > 0])

    def coords_l0(self, places: Places) -> CoordsL0:
        """Top-left corners of windows in level-0 px."""
        return np.asarray(np.rint(places.reshape(-1, 2) * self.scale), dtype=np.int64)


def _window_starts(length: int, px: int, step: int) -> Starts:
    """Starts of windows along one axis."""
    if length <= px:
        return np.array([(length - px) // 2])
    starts = np.arange(0, length - px + step, step)
    return np.unique(np.minimum(starts, length - px))
