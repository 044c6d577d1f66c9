"""The reader against Thinsection's contract for readers: `pytest examples/plugin`."""

# --8<-- [start:contract]
import json
import os
from pathlib import Path
from typing import ClassVar

import numpy as np

from thinsection.testing.slide_contract import SlideContract
from thinsection.testing.synthetic import PyramidKind, position_pixels
from thinsection.types import RgbArray, Size


class TestNpyPyramid(SlideContract):
    """Every test of the contract, on pyramids that `write` makes."""

    reader = "npy"
    name = "a.npypyramid"
    usual = PyramidKind(compression=None)
    kinds: ClassVar[dict[str, PyramidKind]] = {
        "usual": usual,
        "one-level": PyramidKind(compression=None, downsamples=(1,)),
        "gap-in-levels": PyramidKind(compression=None, downsamples=(1, 2, 4)),
        "no-mpp": PyramidKind(compression=None, mpp=None),
        "mpp-x-y": PyramidKind(compression=None, mpp=(0.25, 0.5)),
    }
    reports_damage = False  # a .npy file has no checksum

    def write(self, path: Path, size: Size, kind: PyramidKind) -> list[RgbArray]:
        """Writes a pyramid whose pixels are a function of x and y, and returns its levels."""
        path.mkdir()
        finest = position_pixels(size)
        levels = []
        for index, step in enumerate(kind.downsamples):
            level = finest[::step, ::step][: size[1] // step, : size[0] // step]
            np.save(path / f"{index}.npy", level)
            levels.append(level)
        (path / "slide.json").write_text(json.dumps({"mpp": kind.mpp}))
        return levels

    def cut(self, path: Path) -> None:
        """Leaves three quarters of level 0."""
        os.truncate(path / "0.npy", (path / "0.npy").stat().st_size * 3 // 4)


# --8<-- [end:contract]
