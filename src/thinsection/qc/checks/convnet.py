"""A U-shaped convolutional net that looks at optical densities on grids of 16 to 256 µm.

Fine grids give borders, wide ones say what a band or a ring is. It looks only at what is not plain
glass: a convolution gathers the px that are asked for, and multiplies once. Its weights are made by
`tests/support/convnet_training.py`.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from thinsection.arrays import Array, ArrayNamespace

GRIDS = 5  # of squares of 16, 32, ... 256 µm
GLASS_DENSITY = 0.03  # below which, over 48 µm, the net is not asked
_MODEL = Path(__file__).parent / "models" / "convnet.npz"
_BLOCK_PX = 1 << 12  # px of a grid that are convolved at once
Net = Mapping[str, npt.NDArray[Any]]  # weights and biases by layer


class _Grid(NamedTuple):
    """Planes, flat with a border of zeros, and the px that are asked for: indices into them."""

    x: Array  # float32 ((height + 2) * (width + 2), channels)
    at: Array  # int (N,)
    height: int
    width: int

    @classmethod
    def of(cls, ns: ArrayNamespace, planes: Array, asked: Array) -> "_Grid":
        flat = ns.xp.pad(planes, ((1, 1), (1, 1), (0, 0))).reshape(-1, planes.shape[2])
        return cls(flat, ns.xp.flatnonzero(ns.xp.pad(asked, 1)), *asked.shape)

    def blocks(self) -> Iterator[tuple[Array, Array, Array]]:
        """Some of `at`, and their rows and columns without the border."""
        for start in range(0, len(self.at), _BLOCK_PX):
            part = self.at[start : start + _BLOCK_PX]
            yield part, part // (self.width + 2) - 1, part % (self.width + 2) - 1

    def plane(self, flat: Array) -> Array:
        return flat.reshape(self.height + 2, self.width + 2, -1)[1:-1, 1:-1]


@cache
def _net() -> Net:
    with np.load(_MODEL, allow_pickle=False) as arrays:
        return {name: arrays[name].astype(np.float32) for name in arrays.files}


def convnet_squares(ns: ArrayNamespace, density: Array, net: Net | None = None) -> Array:
    """P of each class in squares of 2 x 2 px, float16 (H / 2, W / 2, 4, classes).

    density: (H, W, 3) at about 8 µm/px. Nothing is said of plain glass: zeros.
    Memory: 70 bytes a px that is not plain glass, 40 of another.
    """
    xp, (height, width) = ns.xp, density.shape[:2]
    weights = {name: ns.upload(value, reason="model") for name, value in (net or _net()).items()}
    even = xp.pad(density, [(0, height % 2), (0, width % 2), (0, 0)], mode="edge")
    parts = [even[top::2, left::2] for top in (0, 1) for left in (0, 1)]
    planes = xp.stack(parts, axis=-1).reshape(*parts[0].shape[:2], 12).astype(xp.float32)
    near = ns.ndimage.uniform_filter(planes.mean(axis=2), 3, mode="nearest")
    grid, kept = _Grid.of(ns, planes, near > GLASS_DENSITY), list[_Grid]()
    for n in range(GRIDS):
        grid = _halved(ns, grid) if n else grid
        grid = _convolved(ns, weights, f"down{n}b", _convolved(ns, weights, f"down{n}a", grid))
        kept.append(grid)
    kept.pop()
    for n in reversed(range(GRIDS - 1)):
        grid = _widened(xp, weights, f"up{n}", grid, kept.pop())
        grid = _convolved(ns, weights, f"join{n}", grid)
    classes = len(weights["out_b"]) // 4
    squares = xp.zeros((grid.height * grid.width, 4, classes), dtype=xp.float16)
    for part, row, column in grid.blocks():
        last = xp.take(grid.x, part, axis=0) @ weights["out_w"] + weights["out_b"]
        power = xp.exp(last.clip(-40, 40, out=last))
        power = power.reshape(len(part), classes, 4).transpose(0, 2, 1)
        squares[row * grid.width + column] = power / power.sum(axis=2, keepdims=True)
    return squares.reshape(grid.height, grid.width, 4, classes)


def _convolved(ns: ArrayNamespace, weights: Net, layer: str, grid: _Grid) -> _Grid:
    """The planes under 3 x 3 weights, where it is asked for; what is below 0 is 0."""
    xp, w, b = ns.xp, weights[f"{layer}_w"], weights[f"{layer}_b"]
    around = xp.asarray([dy * (grid.width + 2) + dx for dy in (-1, 0, 1) for dx in (-1, 0, 1)])
    out = xp.zeros((len(grid.x), w.shape[1]), dtype=xp.float32)
    for part, *_ in grid.blocks():
        near = xp.take(grid.x, part[:, None] + around, axis=0).reshape(len(part), -1) @ w
        near += b
        out[part] = xp.maximum(near, 0, out=near)
    return grid._replace(x=out)


def _halved(ns: ArrayNamespace, grid: _Grid) -> _Grid:
    """The largest of 2 x 2 px, of each channel; a px is asked for where one of the four is."""
    xp, asked = ns.xp, ns.xp.zeros((len(grid.x), 1), dtype=bool)
    asked[grid.at] = True

    def largest(flat: Array) -> Array:
        plane = xp.pad(grid.plane(flat), [(0, grid.height % 2), (0, grid.width % 2), (0, 0)])
        rows = xp.maximum(plane[::2], plane[1::2])
        return xp.maximum(rows[:, ::2], rows[:, 1::2])

    return _Grid.of(ns, largest(grid.x), largest(asked)[..., 0])


def _widened(xp: Any, weights: Net, layer: str, wide: _Grid, fine: _Grid) -> _Grid:
    """The planes of a fine grid, and added to them what a layer makes of the wide one's px."""
    w, b = weights[f"{layer}_w"], weights[f"{layer}_b"]
    for part, row, column in fine.blocks():
        over = xp.take(wide.x, (row // 2 + 1) * (wide.width + 2) + column // 2 + 1, axis=0)
        made = (over @ w + b).reshape(len(part), -1, 4)  # of the four px under a wide one
        fine.x[part] += made[xp.arange(len(part)), :, row % 2 * 2 + column % 2]
    return fine
