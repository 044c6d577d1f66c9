"""A U-shaped convolutional net over optical densities on grids of 16 to 256 µm.

Fine grids give borders, wide ones tell a band from a ring. It looks only at px that are
not plain glass: a convolution gathers the px that are asked for, and multiplies once. Its
weights are made by `tests/support/convnet_training.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinsection.arrays import Array, ArrayNamespace, filters

# Grids of squares of 16, 32, ... 256 µm.
GRIDS = 5
# Skip the net where the mean density over 48 µm is lower.
GLASS_DENSITY = 0.03
# Stands for a probability of 1.
WHOLE = 65535

_MODEL = Path(__file__).parent / "models" / "convnet.npz"
# Px of a grid that are convolved at once.
_BLOCK_PX = 1 << 12
# The four px of a square: (row, column).
_QUARTERS = ((0, 0), (0, 1), (1, 0), (1, 1))

Net = Mapping[str, npt.NDArray[np.float32]]  # weights and biases by layer
# P of each class, uint16 (1 + N, 4, classes), and the row of each square, (H / 2, W / 2)
Squares = tuple[Array, Array]


@dataclass(frozen=True, slots=True)
class _Block:
    """Some px of a grid that are asked for."""

    rows: slice  # of the grid's x
    place: Array  # in the grid with its border
    y: Array
    x: Array


@dataclass(frozen=True, slots=True)
class _Grid:
    """The px of a grid that are asked for, with channels of each.

    The grid has a border of one px. Row 0 of `x` stands for all px that are not asked for:
    zeros.
    """

    x: Array  # float32 (1 + N, channels)
    place: Array  # int (N,), in the grid with its border
    row: Array  # int32 ((height + 2) * (width + 2),): row of x by place
    height: int
    width: int

    @classmethod
    def from_mask(cls, ns: ArrayNamespace, asked: Array) -> "_Grid":
        """The px of a mask, without channels."""
        xp = ns.xp
        height, width = asked.shape
        place = xp.flatnonzero(xp.pad(asked, 1))
        row = xp.zeros((height + 2) * (width + 2), dtype=xp.int32)
        row[place] = xp.arange(1, len(place) + 1)
        x = xp.zeros((1, 0), dtype=xp.float32)
        return cls(x=x, place=place, row=row, height=height, width=width)

    def empty(self, ns: ArrayNamespace, num_channels: int) -> Array:
        """Channels of zeros."""
        shape = (1 + len(self.place), num_channels)
        return ns.xp.zeros(shape, dtype=ns.xp.float32)

    def blocks(self) -> Iterator[_Block]:
        """The px, some at a time."""
        for start in range(0, len(self.place), _BLOCK_PX):
            place = self.place[start : start + _BLOCK_PX]
            yield _Block(
                rows=slice(1 + start, 1 + start + len(place)),
                place=place,
                y=place // (self.width + 2) - 1,
                x=place % (self.width + 2) - 1,
            )

    def row_image(self) -> Array:
        """Row of x of each px, (height, width)."""
        with_border = self.row.reshape(self.height + 2, self.width + 2)
        return with_border[1:-1, 1:-1]


@cache
def _own_net() -> Net:
    with np.load(_MODEL, allow_pickle=False) as arrays:
        return {name: arrays[name].astype(np.float32) for name in arrays.files}


def convnet_squares(
    ns: ArrayNamespace, density: list[Array], net: Net | None = None
) -> Squares:
    """P of each class in squares of 2 x 2 px, and the row of each square.

    Plain glass has row 0: zeros.

    Args:
        ns: device.
        density: of red, green and blue, (H, W) at about 8 µm/px.
        net: weights; None: the package's own.

    Memory: 45 bytes a px that is not plain glass, 10 of another.
    """
    xp = ns.xp
    weights = {
        name: ns.upload(value, reason="model")
        for name, value in (net or _own_net()).items()
    }
    grid = _read_squares(ns, density)
    # the caller keeps no reference, so that this frees the densities
    del density
    finer: list[_Grid] = []
    for level in range(GRIDS):
        if level:
            finer.append(grid)
            grid = _halve(ns, grid)
        grid = _convolve(ns, weights, f"down{level}a", grid)
        grid = _convolve(ns, weights, f"down{level}b", grid)
    for level in reversed(range(GRIDS - 1)):
        grid = _widen(ns, weights, f"up{level}", grid, finer.pop())
        if level:
            grid = _convolve(ns, weights, f"join{level}", grid)
    num_classes = len(weights["out_b"]) // 4
    squares = xp.zeros((len(grid.x), 4, num_classes), dtype=xp.uint16)
    for rows, values in _convolve_blocks(ns, weights, "join0", grid):
        logits = values @ weights["out_w"] + weights["out_b"]
        power = xp.exp(logits.clip(-40, 40, out=logits))
        power = power.reshape(-1, num_classes, 4).transpose(0, 2, 1)
        squares[rows] = WHOLE / power.sum(axis=2, keepdims=True) * power + 0.5
    return squares, grid.row_image()


def _read_squares(ns: ArrayNamespace, density: list[Array]) -> _Grid:
    """Squares that are not plain glass, with the densities of their four px."""
    means = [filters.block_means(ns, _pad_to_even(ns, plane), 2) for plane in density]
    mean = sum(means) / 3
    nearby = ns.ndimage.uniform_filter(mean, 3, mode="nearest")
    grid = _Grid.from_mask(ns, nearby > GLASS_DENSITY)
    x = grid.empty(ns, 12)
    for channel, plane in enumerate(density):
        even = _pad_to_even(ns, plane)
        quarters = [even[top::2, left::2].reshape(-1) for top, left in _QUARTERS]
        for block in grid.blocks():
            place = block.y * grid.width + block.x
            values = [quarter[place] for quarter in quarters]
            x[block.rows, 4 * channel : 4 * channel + 4] = ns.xp.stack(values, axis=1)
    return replace(grid, x=x)


def _pad_to_even(ns: ArrayNamespace, plane: Array) -> Array:
    height, width = plane.shape
    if height % 2 == 0 and width % 2 == 0:
        return plane
    return ns.xp.pad(plane, [(0, height % 2), (0, width % 2)], mode="edge")


def _convolve(ns: ArrayNamespace, weights: Net, layer: str, grid: _Grid) -> _Grid:
    """The channels under 3 x 3 weights, at px that are asked for; below 0 is 0."""
    out = grid.empty(ns, weights[f"{layer}_w"].shape[1])
    for rows, values in _convolve_blocks(ns, weights, layer, grid):
        out[rows] = values
    return replace(grid, x=out)


def _convolve_blocks(
    ns: ArrayNamespace, weights: Net, layer: str, grid: _Grid
) -> Iterator[tuple[slice, Array]]:
    """Rows of x, and their new channels."""
    xp = ns.xp
    w = weights[f"{layer}_w"]
    b = weights[f"{layer}_b"]
    row_step = grid.width + 2
    neighbours = []
    for dy in (-1, 0, 1):
        neighbours += [dy * row_step + dx for dx in (-1, 0, 1)]
    offsets = xp.asarray(neighbours)
    for block in grid.blocks():
        near = xp.take(grid.x, grid.row[block.place[:, None] + offsets], axis=0)
        values = near.reshape(len(block.place), -1) @ w
        values += b
        yield block.rows, xp.maximum(values, 0, out=values)


def _halve(ns: ArrayNamespace, grid: _Grid) -> _Grid:
    """The largest of 2 x 2 px per channel; a px is asked for where one of the four is."""
    xp = ns.xp
    rows = grid.row_image()
    rows = xp.pad(rows, [(0, grid.height % 2), (0, grid.width % 2)])
    four = xp.stack([rows[top::2, left::2] for top, left in _QUARTERS], axis=2)
    half = _Grid.from_mask(ns, four.any(axis=2))
    out = half.empty(ns, grid.x.shape[1])
    for block in half.blocks():
        out[block.rows] = xp.take(grid.x, four[block.y, block.x], axis=0).max(axis=1)
    return replace(half, x=out)


def _widen(
    ns: ArrayNamespace, weights: Net, layer: str, wide: _Grid, fine: _Grid
) -> _Grid:
    """Adds a layer of the wide grid's px to the channels of the fine grid, in place."""
    xp = ns.xp
    w = weights[f"{layer}_w"]
    b = weights[f"{layer}_b"]
    for block in fine.blocks():
        place = (block.y // 2 + 1) * (wide.width + 2) + block.x // 2 + 1
        made = xp.take(wide.x, wide.row[place], axis=0) @ w + b
        # of the four px under a wide one each has channels of its own
        made = made.reshape(len(block.place), -1, 4)
        quarter = block.y % 2 * 2 + block.x % 2
        fine.x[block.rows] += made[xp.arange(len(block.place)), :, quarter]
    return fine
