"""A U-shaped convolutional net that looks at optical densities on grids of 16 to 256 µm.

Fine grids give borders, wide ones say what a band or a ring is. It looks only at what is not plain
glass: a convolution gathers the px that are asked for, and multiplies once. Its weights are made by
`tests/support/convnet_training.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from thinsection.arrays import Array, ArrayNamespace, filters

GRIDS = 5  # of squares of 16, 32, ... 256 µm
GLASS_DENSITY = 0.03  # below which, over 48 µm, the net is not asked
_MODEL = Path(__file__).parent / "models" / "convnet.npz"
WHOLE = 65535  # P of 1
_BLOCK_PX = 1 << 12  # px of a grid that are convolved at once
Net = Mapping[str, npt.NDArray[Any]]  # weights and biases by layer
Squares = tuple[Array, Array]


class _Grid(NamedTuple):
    """The px that are asked for, of a grid with a border, and what is known of each."""

    x: Array  # float32 (1 + N, channels); the first row is of all that is not asked for: zeros
    at: Array  # int (N,): where they lie
    row: Array  # int32 ((height + 2) * (width + 2),): which row of x is a px's
    height: int
    width: int

    @classmethod
    def of(cls, ns: ArrayNamespace, asked: Array) -> "_Grid":
        """Of a mask; nothing is known yet."""
        at = ns.xp.flatnonzero(ns.xp.pad(asked, 1))
        row = ns.xp.zeros(
            (asked.shape[0] + 2) * (asked.shape[1] + 2), dtype=ns.xp.int32
        )
        row[at] = ns.xp.arange(1, len(at) + 1)
        return cls(ns.xp.zeros((1, 0), dtype=ns.xp.float32), at, row, *asked.shape)

    def blocks(self) -> Iterator[tuple[slice, Array, Array, Array]]:
        """Rows of x, and of their px where they lie: all in one, row, column of the grid."""
        for start in range(0, len(self.at), _BLOCK_PX):
            part = self.at[start : start + _BLOCK_PX]
            y, x = part // (self.width + 2) - 1, part % (self.width + 2) - 1
            yield slice(1 + start, 1 + start + len(part)), part, y, x


@cache
def _net() -> Net:
    with np.load(_MODEL, allow_pickle=False) as arrays:
        return {name: arrays[name].astype(np.float32) for name in arrays.files}


def convnet_squares(
    ns: ArrayNamespace, density: Sequence[Array], net: Net | None = None
) -> Squares:
    """P of each class in squares of 2 x 2 px, uint16 (1 + N, 4, classes), and which is where.

    density: of red, green and blue, (H, W) at about 8 µm/px. Nothing is said of plain glass: the
    first one, zeros. Memory: 45 bytes a px that is not plain glass, 10 of another.
    """
    xp, (height, width) = ns.xp, density[0].shape
    weights = {
        name: ns.upload(value, reason="model")
        for name, value in (net or _net()).items()
    }
    even = partial(xp.pad, pad_width=[(0, height % 2), (0, width % 2)], mode="edge")
    near = sum(filters.block_means(ns, even(plane), 2) for plane in density) / 3
    grid = _Grid.of(
        ns, ns.ndimage.uniform_filter(near, 3, mode="nearest") > GLASS_DENSITY
    )
    x = xp.zeros((1 + len(grid.at), 12), dtype=xp.float32)
    for n, plane in enumerate(map(even, density)):
        some = [plane[top::2, left::2].reshape(-1) for top in (0, 1) for left in (0, 1)]
        for rows, _, down, along in grid.blocks():
            at = down * grid.width + along
            x[rows, 4 * n : 4 * n + 4] = xp.stack(
                [quarter[at] for quarter in some], axis=1
            )
    grid, kept = grid._replace(x=x), list[_Grid]()
    del density, plane, some, x  # the caller has none of them either
    for n in range(GRIDS):
        grid = _halved(ns, grid) if n else grid
        grid = _convolved(
            ns, weights, f"down{n}b", _convolved(ns, weights, f"down{n}a", grid)
        )
        kept.append(grid)
    kept.pop()
    for n in reversed(range(GRIDS - 1)):
        grid = _widened(xp, weights, f"up{n}", grid, kept.pop())
        grid = _convolved(ns, weights, f"join{n}", grid) if n else grid
    classes = len(weights["out_b"]) // 4
    squares = xp.zeros((len(grid.x), 4, classes), dtype=xp.uint16)
    for rows, near in _blocks_convolved(ns, weights, "join0", grid):
        last = near @ weights["out_w"] + weights["out_b"]
        power = xp.exp(last.clip(-40, 40, out=last))
        power = power.reshape(-1, classes, 4).transpose(0, 2, 1)
        squares[rows] = WHOLE / power.sum(axis=2, keepdims=True) * power + 0.5
    return squares, grid.row.reshape(grid.height + 2, grid.width + 2)[1:-1, 1:-1]


def _convolved(ns: ArrayNamespace, weights: Net, layer: str, grid: _Grid) -> _Grid:
    """The planes under 3 x 3 weights, where it is asked for; what is below 0 is 0."""
    out = ns.xp.zeros(
        (len(grid.x), weights[f"{layer}_w"].shape[1]), dtype=ns.xp.float32
    )
    for rows, near in _blocks_convolved(ns, weights, layer, grid):
        out[rows] = near
    return grid._replace(x=out)


def _blocks_convolved(
    ns: ArrayNamespace, weights: Net, layer: str, grid: _Grid
) -> Iterator[tuple[slice, Array]]:
    """Rows of x, and what `_convolved` makes of them."""
    xp, w, b = ns.xp, weights[f"{layer}_w"], weights[f"{layer}_b"]
    around = xp.asarray(
        [dy * (grid.width + 2) + dx for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
    )
    for rows, part, *_ in grid.blocks():
        near = xp.take(grid.x, grid.row[part[:, None] + around], axis=0)
        near = near.reshape(len(part), -1) @ w
        near += b
        yield rows, xp.maximum(near, 0, out=near)


def _halved(ns: ArrayNamespace, grid: _Grid) -> _Grid:
    """The largest of 2 x 2 px, of each channel; a px is asked for where one of the four is."""
    xp, (height, width) = ns.xp, (grid.height, grid.width)
    inner = grid.row.reshape(height + 2, width + 2)[1:-1, 1:-1]
    inner = xp.pad(inner, [(0, height % 2), (0, width % 2)])
    four = xp.stack(
        [inner[top::2, left::2] for top in (0, 1) for left in (0, 1)], axis=2
    )
    half = _Grid.of(ns, four.any(axis=2))
    out = xp.zeros((1 + len(half.at), grid.x.shape[1]), dtype=xp.float32)
    for rows, _, down, along in half.blocks():
        out[rows] = xp.take(grid.x, four[down, along], axis=0).max(axis=1)
    return half._replace(x=out)


def _widened(xp: Any, weights: Net, layer: str, wide: _Grid, fine: _Grid) -> _Grid:
    """The planes of a fine grid, and added to them what a layer makes of the wide one's px."""
    w, b = weights[f"{layer}_w"], weights[f"{layer}_b"]
    for rows, part, down, along in fine.blocks():
        at = (down // 2 + 1) * (wide.width + 2) + along // 2 + 1
        made = xp.take(wide.x, wide.row[at], axis=0) @ w + b
        made = made.reshape(len(part), -1, 4)  # of the four px under a wide one
        fine.x[rows] += made[xp.arange(len(part)), :, down % 2 * 2 + along % 2]
    return fine
