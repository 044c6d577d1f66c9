"""Slides in memory, and the real one, for tests of whole pipelines."""

import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from tests.support.pixel_examples import STAINS, tissue_picture

from thinsection.types import CoordsL0, Level, Mpp, PointL0, RgbArray, Size, TileArray

REAL = (
    Path(
        os.environ.get(
            "THINSECTION_TEST_SLIDES", Path(__file__).parents[3] / "shared" / "slides"
        )
    )
    / "CMU-1-Small-Region.svs"
)
needs_real_slide = pytest.mark.skipif(
    not REAL.exists(), reason=f"{REAL.name} is not under THINSECTION_TEST_SLIDES"
)


@cache
def drawn_tissue(edge_px: int = 900, stain: int = 0) -> npt.NDArray[np.uint8]:
    """(edge_px, edge_px - 140, 3), 0.5 µm/px; drawn once a process, so nobody writes into it."""
    light = tissue_picture(np.random.default_rng(3), edge_px, STAINS[stain])
    picture = np.asarray((light * 255).astype(np.uint8)[:, : edge_px - 140])
    picture.setflags(write=False)
    return picture


class ArraySlide:
    """A slide whose levels are arrays; counts the px that were read."""

    reader = "array"
    associated_names: tuple[str, ...] = ()

    def __init__(
        self,
        levels: Sequence[npt.NDArray[np.uint8]],
        *,
        slide_mpp: Mpp | None = (0.5, 0.5),
        objective_power: float | None = 20.0,
        slide_path: str = "array",
        properties: Mapping[str, str] | None = None,
    ) -> None:
        self._arrays = list(levels)
        self.slide_path = slide_path
        self.slide_mpp = slide_mpp
        self.objective_power = objective_power
        self.vendor: str | None = "generic"
        self.properties: Mapping[str, str] = properties or {}
        width = levels[0].shape[1]
        self.levels = tuple(
            Level(index=n, size=(a.shape[1], a.shape[0]), downsample=width / a.shape[1])
            for n, a in enumerate(levels)
        )
        self.num_read_px = 0

    @property
    def size(self) -> Size:
        return self.levels[0].size

    def read_region(
        self, origin_l0: PointL0, level: int, size: Size, *, out: RgbArray | None = None
    ) -> RgbArray:
        x, y = (round(v / self.levels[level].downsample) for v in origin_l0)
        part = self._arrays[level][y : y + size[1], x : x + size[0]]
        assert part.shape[:2] == size[::-1], "the checks read inside the slide only"
        self.num_read_px += size[0] * size[1]
        return part.copy()

    def read_regions(self, origins_l0: CoordsL0, level: int, *, out: TileArray) -> None:
        raise AssertionError("the checks read strips, not tiles")

    def thumbnail(self, max_size: Size) -> RgbArray:
        raise AssertionError("work images are streamed")

    def associated_image(self, name: str) -> RgbArray:
        raise KeyError(name)

    def close(self) -> None:
        self._arrays.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def real_slide(*, edit: npt.NDArray[np.uint8] | None = None) -> ArraySlide:
    """The real slide by OpenSlide itself, or its frame around edited px."""
    import openslide

    with openslide.OpenSlide(str(REAL)) as slide:
        rgb = np.asarray(slide.read_region((0, 0), 0, slide.dimensions).convert("RGB"))
        mpp = float(slide.properties["openslide.mpp-x"])
    return ArraySlide([rgb if edit is None else edit], slide_mpp=(mpp, mpp))


def reduced(rgb: npt.NDArray[np.uint8], factor: int) -> npt.NDArray[np.uint8]:
    """A coarser level of a pyramid."""
    return np.asarray(Image.fromarray(rgb).reduce(factor))
