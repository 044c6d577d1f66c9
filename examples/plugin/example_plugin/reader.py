"""A reader: a folder `NAME.npypyramid` with one NumPy file per level.

NAME.npypyramid/
    0.npy, 1.npy, ...   uint8 (H, W, 3), level 0 first
    slide.json          {"mpp": [0.25, 0.25]}, or {"mpp": null}
"""

# --8<-- [start:reader]
import json
from pathlib import Path

import numpy as np

from thinsection.errors import SlideOpenError
from thinsection.slide import Slide
from thinsection.types import Level, Mpp, RgbArray


class NpyPyramid(Slide):
    """NumPy pyramids: a folder of one .npy file per level."""

    reader = "npy"  # the name of the entry point
    suffixes = (".npypyramid",)  # found in folders, and tried by `auto`
    folders = True  # a slide is a folder with that suffix
    needs = (
        "numpy",
    )  # packages that it imports; `thinsection doctor` names a missing one

    def __init__(self, path: str, *, slide_mpp: Mpp | None = None) -> None:
        """Opens the folder; the pixels stay on disk until they are read."""
        folder = Path(path)
        files = sorted(folder.glob("*.npy"), key=lambda file: int(file.stem))
        if not files:
            raise SlideOpenError(f"npy: folder must hold 0.npy, got none in {path!r}")
        self._arrays = [np.load(file, mmap_mode="r") for file in files]
        height, width, _ = self._arrays[0].shape
        levels = []
        for index, array in enumerate(self._arrays):
            rows, columns, _ = array.shape
            downsample = (width / columns + height / rows) / 2
            levels.append(
                Level(
                    index=index,
                    size=(columns, rows),
                    downsample=downsample,
                    segment=None,
                )
            )
        if slide_mpp is None:
            stated = json.loads((folder / "slide.json").read_text())["mpp"]
            slide_mpp = None if stated is None else (float(stated[0]), float(stated[1]))
        super().__init__(path, levels, slide_mpp=slide_mpp)

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        """Fills `out` (height, width, 3) with pixels that all lie inside the level."""
        x, y = origin_lv
        height, width = out.shape[:2]
        out[:] = self._arrays[level][y : y + height, x : x + width]


# --8<-- [end:reader]
