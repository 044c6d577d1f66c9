"""A U-shaped convolutional network that runs over a picture from top to bottom, row by row.

Each layer keeps the rows that the next one still needs, so memory grows with the width of a picture
and not with its height, and no row is computed twice. Layers are named as in the files of weights:
`down<level>a` and `down<level>b` on the way to coarser grids, `up<level>` and `join<level>` on the
way back, and `out`.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import product

from thinsection.arrays import Array, ArrayNamespace

# Number of coarser grids: a picture has a multiple of 2 ** this number of rows and columns.
LEVELS = 4
STEP = 1 << LEVELS
# Squares around a place that affect its result: 77 for the convolutions, rounded up to steps.
HALO = 6 * STEP
# Number of squares that are convolved at a time.
_BLOCK_SQUARES = 1 << 13
# Number of squares whose probabilities are computed at a time: their planes fit into a cache.
_SHOWN_SQUARES = 1 << 11

Weights = Mapping[str, Array]
Rows = Iterator[Array]  # blocks of rows of a grid, float32 (rows, W, channels)


def class_rows(ns: ArrayNamespace, layers: Weights, squares: Rows) -> Rows:
    """Runs a network; yields blocks of rows of its result, uint8 (classes, rows, 2 W).

    Values are the probabilities of the classes in steps of 1/255. All pictures of one shape that
    come in the same blocks give the same blocks.

    Args:
        ns: device.
        layers: weights by name.
        squares: input, a multiple of 16 rows: squares of 2 x 2 pixels, plane by plane.

    Memory: about 20 KB per square of a row, and 10 MB.
    """
    for values in _level(ns, layers, 0, squares):
        num_rows = max(1, _SHOWN_SQUARES // values.shape[1])
        for first in range(0, len(values), num_rows):
            yield _probabilities(ns, layers, values[first : first + num_rows])


def _probabilities(ns: ArrayNamespace, layers: Weights, values: Array) -> Array:
    """Probabilities by the last layer, in steps of 1/255, uint8 (classes, 2 rows, 2 W)."""
    xp = ns.xp
    # logits, and then their powers in the same memory
    power = values @ layers["out.weight"]
    power += layers["out.bias"]
    xp.exp(power.clip(-40, 40, out=power), out=power)
    # (row, column, class, y, x) to (class, y, x, row, column): sums and copies of planes are fast
    height, width = power.shape[:2]
    planes = xp.ascontiguousarray(power.reshape(height * width, -1).T)
    planes = planes.reshape(-1, 4, height * width)
    planes *= 255 / planes.sum(axis=0)
    planes += 0.5
    squares = planes.astype(xp.uint8).reshape(-1, 2, 2, height, width)
    shown = xp.empty((len(squares), 2 * height, 2 * width), dtype=xp.uint8)
    for y, x in product((0, 1), repeat=2):
        shown[:, y::2, x::2] = squares[:, y, x]
    return shown


def rows_at_once(width: int) -> int:
    """Rows of so many squares that fill a block, at least 1."""
    return max(1, _BLOCK_SQUARES // width)


def split(rows: Rows, count: int) -> list[Rows]:
    """Iterators over the same blocks; a block is dropped when the last of them has passed it.

    `itertools.tee` would keep 57 blocks more.
    """
    waiting: list[deque[Array]] = [deque() for _ in range(count)]

    def blocks(own: deque[Array]) -> Rows:
        while True:
            if not own:
                block = next(rows, None)
                if block is None:
                    return
                for queue in waiting:
                    queue.append(block)
            yield own.popleft()

    return [blocks(own) for own in waiting]


def _level(ns: ArrayNamespace, layers: Weights, level: int, rows: Rows) -> Rows:
    """Rows of a grid after its convolutions and all that comes from coarser grids."""
    rows = _convolved(ns, layers, f"down{level}a", rows)
    rows = _convolved(ns, layers, f"down{level}b", rows)
    if level == LEVELS:
        return rows
    # blocks of the second iterator wait until the coarser rows are there
    rows, finer = split(rows, 2)
    coarser = _level(ns, layers, level + 1, _pooled(ns, rows))
    joined = _joined(ns, layers, level, finer, coarser)
    return _convolved(ns, layers, f"join{level}", joined)


def _convolved(ns: ArrayNamespace, layers: Weights, name: str, rows: Rows) -> Rows:
    """Convolves with 3 x 3 weights; outside of the picture is 0, and negative results become 0."""
    # the last two rows; a row of zeros is above the first and below the last
    held = None
    for block in rows:
        if held is None:
            held = ns.xp.zeros_like(block[:1])
        x = _with_borders(ns, held, block)
        held = x[-2:, 1:-1].copy()
        if len(x) > 2:
            yield _convolved_inside(ns, layers, name, x)
    if held is not None:
        x = _with_borders(ns, held, ns.xp.zeros_like(held[:1]))
        yield _convolved_inside(ns, layers, name, x)


def _with_borders(ns: ArrayNamespace, upper: Array, lower: Array) -> Array:
    """Rows of two blocks with a column of zeros on either side, (rows, W + 2, channels)."""
    num_upper, width, count = upper.shape
    x = ns.xp.empty((num_upper + len(lower), width + 2, count), dtype=ns.xp.float32)
    x[:, 0] = 0
    x[:, -1] = 0
    x[:num_upper, 1:-1] = upper
    x[num_upper:, 1:-1] = lower
    return x


def _convolved_inside(
    ns: ArrayNamespace, layers: Weights, name: str, x: Array
) -> Array:
    """Result for all rows but the first and the last of (rows, W + 2, channels)."""
    xp = ns.xp
    num_rows, num_columns, count = x.shape
    bias = layers[f"{name}.bias"]
    # weights for the row above, the same row and the row below
    weights = layers[f"{name}.weight"].reshape(3, 3 * count, -1)
    # each pixel together with its left and right neighbours, which lie side by side in memory
    near = xp.lib.stride_tricks.as_strided(
        x, (num_rows, num_columns - 2, 3 * count), x.strides
    )
    near = xp.ascontiguousarray(near)
    height = num_rows - 2
    total = near[:height] @ weights[0]
    # over whole rows NumPy adds and compares four times as fast as pixel by pixel
    lines = total.reshape(height, -1)
    lines += xp.tile(bias, num_columns - 2)
    part = xp.empty_like(total)
    for shift in (1, 2):
        xp.matmul(near[shift : shift + height], weights[shift], out=part)
        total += part
    xp.maximum(lines, xp.zeros_like(lines[0]), out=lines)
    return total


def _pooled(ns: ArrayNamespace, rows: Rows) -> Rows:
    """Maximum of 2 x 2 pixels per channel."""
    held = None
    for block in rows:
        x = block if held is None else ns.xp.concatenate([held, block])
        height = len(x) // 2
        held = x[2 * height :]
        if height:
            # pair by pair, because NumPy's reduction along short axes is slow
            pairs = ns.xp.maximum(x[: 2 * height : 2], x[1 : 2 * height : 2])
            yield ns.xp.maximum(pairs[:, ::2], pairs[:, 1::2])


def _joined(
    ns: ArrayNamespace, layers: Weights, level: int, finer: Rows, coarser: Rows
) -> Rows:
    """Adds a layer on the coarser grid to the finer one."""
    held: list[Array] = []
    for block in coarser:
        made = block @ layers[f"up{level}.weight"] + layers[f"up{level}.bias"]
        height, width, count = made.shape
        while sum(len(part) for part in held) < 2 * height:
            held.append(next(finer))
        # a copy, as the blocks are not this iterator's alone
        rows = ns.xp.concatenate(held)
        held = [rows[2 * height :].copy()]
        rows = rows[: 2 * height]
        squares = rows.reshape(height, 2, width, 2, count)
        squares += made[:, None, :, None]
        yield rows
