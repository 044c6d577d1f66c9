"""A U-shaped convolutional network that runs over a picture from top to bottom, row by row.

Each layer keeps the rows that the next one still needs, so memory grows with the width of a picture
and not with its height, and no row is computed twice. Layers are named as in the files of weights:
`down<level>a` and `down<level>b` on the way to coarser grids, `up<level>` and `join<level>` on the
way back, and `out`.
"""

from collections import deque
from collections.abc import Iterator, Mapping

from thinsection.arrays import Array, ArrayNamespace

# Number of coarser grids: a picture has a multiple of 2 ** this number of rows and columns.
LEVELS = 4
STEP = 1 << LEVELS
# Squares around a place that affect its result: 77 for the convolutions, rounded up to steps.
HALO = 6 * STEP
# Number of squares that are convolved at a time.
_BLOCK_SQUARES = 1 << 13

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
        yield _probabilities(ns, layers, values)


def _probabilities(ns: ArrayNamespace, layers: Weights, values: Array) -> Array:
    """Probabilities by the last layer, in steps of 1/255, uint8 (classes, 2 rows, 2 W)."""
    xp = ns.xp
    # logits, and then their powers in the same memory
    power = values @ layers["out.weight"]
    power += layers["out.bias"]
    xp.exp(power.clip(-40, 40, out=power), out=power)
    # (row, column, class, y, x) to (class, row, column, y, x), whose sum over classes is fast
    power = power.reshape(*power.shape[:2], -1, 2, 2).transpose(2, 0, 1, 3, 4)
    power = xp.ascontiguousarray(power)
    power *= 255 / power.sum(axis=0)
    power += 0.5
    # to (class, row, y, column, x)
    shown = power.astype(xp.uint8).transpose(0, 1, 3, 2, 4)
    return shown.reshape(len(shown), -1, 2 * values.shape[1])


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
    xp = ns.xp
    # the last two rows; a row of zeros is above the first and below the last
    held = None
    for block in rows:
        if held is None:
            held = xp.zeros_like(block[:1])
        x = xp.concatenate([held, block])
        held = x[-2:].copy()
        if len(x) > 2:
            yield _convolved_inside(ns, layers, name, x)
    if held is not None:
        x = xp.concatenate([held, xp.zeros_like(held[:1])])
        yield _convolved_inside(ns, layers, name, x)


def _convolved_inside(
    ns: ArrayNamespace, layers: Weights, name: str, x: Array
) -> Array:
    """Result for all rows but the first and the last."""
    xp = ns.xp
    num_rows, width, count = x.shape
    bias = layers[f"{name}.bias"]
    # weights for the row above, the same row and the row below
    weights = layers[f"{name}.weight"].reshape(3, 3 * count, -1)
    # each pixel together with its left and right neighbours
    near = xp.empty((num_rows, width, 3 * count), dtype=xp.float32)
    near[:, :1, :count] = 0
    near[:, -1:, 2 * count :] = 0
    near[:, :, count : 2 * count] = x
    near[:, 1:, :count] = x[:, :-1]
    near[:, :-1, 2 * count :] = x[:, 1:]
    height = num_rows - 2
    total = xp.broadcast_to(bias, (height, width, bias.size)).copy()
    for shift in range(3):
        total += near[shift : shift + height] @ weights[shift]
    return xp.maximum(total, 0, out=total)


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
