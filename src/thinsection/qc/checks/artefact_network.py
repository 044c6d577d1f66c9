"""The artefact network: the probabilities of tissue, glass, fold, ink, bubble and dirt per pixel.

It is the mean of several U-shaped convolutional networks. Their input is the optical density
relative to the slide's own glass, and they combine grids of 16 to 256 µm. They run row by row,
with the arrays of the device: importing torch would take two CPU-seconds and 200 MB, more than
all other quality control. `training/` has the script that makes the file of weights, and the
file states the data that it was made from.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinsection.arrays import Array, ArrayNamespace, filters
from thinsection.arrays.bands import Band, row_bands
from thinsection.arrays.packed import packed_rows
from thinsection.qc.checks.unet import HALO, STEP, class_rows, rows_at_once, split

INKS = ("blue", "green", "red", "black", "brown")
CLASSES = (
    "glass",
    "tissue",
    "fold",
    "bubble",
    "coverslip",
    "dust",
    "edge",
    "pen_blue",
    "pen_green",
    "pen_red",
    "pen_black",
    "pen_brown",
)
# Planes of the input: densities of red, green and blue, and the logarithm of their mean.
NUM_PLANES = 4
# µm per pixel of the input.
INPUT_MPP = 8.0
MODEL = Path(__file__).parent / "models" / "artefacts.safetensors"

_WHITE_PERCENTILE = 97
# Darker pixel values are treated as this value.
_DARKEST = 4
# Density at which the logarithm begins to flatten.
_FLOOR = 0.06
# Number of coarser grids: windows begin and end at multiples of 2 ** this number of squares, which
# are 2 x 2 pixels each.
_LEVELS = 4
_STEP = 1 << _LEVELS
# Squares around a window that affect its result: 77 for the convolutions, rounded up to steps.
_HALO = 6 * _STEP
# Number of squares in a window with its surroundings.
_WINDOW_SQUARES = 1 << 19
# The same number for windows that are cut to a part of the picture.
_CUT_SQUARES = 1 << 18
# Number of squares that are convolved at a time.
_BLOCK_SQUARES = 1 << 13
# A window in which no pixel reaches this density is only glass.
_GLASS_DENSITY = 0.02
# Tissue in haematoxylin and eosin is purple, and no ink is. In purple, green is the densest
# channel; red has at least the first fraction of its density, and red and blue both have less by at
# least the second. Pixels below the third density are too pale to have a hue.
_PURPLE_RED = 0.45
_PURPLE_GAP = 0.2
_PURPLE_DENSITY = 0.45
# Ink is taken for tissue if this fraction of it, in blocks of so many pixels and around them, is
# purple.
_HUE_BLOCK_PX = 4
_PURPLE_SHARE = 0.5
# Least density of green in tissue with any of these stains.
_STAINED_DENSITY = 0.15
# Ink increases the usual density of tissue by at least this value.
_LEAST_INK_DENSITY = 0.1
_USUAL_PERCENTILE = 75
# Distance of the rows and columns that are sampled to find the glass and the tissue beside ink.
_SAMPLE_STEP = 4

Weights = Mapping[str, Array]


@cache
def _own_weights() -> dict[str, npt.NDArray[np.float32]]:
    from safetensors.numpy import load_file

    return {name: array.astype(np.float32) for name, array in load_file(MODEL).items()}


def artefact_maps(
    ns: ArrayNamespace,
    rgb: Array,
    mpp_th: float,
    *,
    weights: Mapping[str, npt.NDArray[np.float32]] | None = None,
) -> Mapping[str, Array]:
    """Probability of each class per pixel, in steps of 1/255, uint8 (H, W).

    Args:
        ns: device.
        rgb: uint8 (H, W, 3).
        mpp_th: µm per pixel of `rgb`.
        weights: weights by network number and layer name; None: those of the package.

    Memory: the compressed maps, 1 to 3 bytes per pixel, and 60 KB per square of 16 µm in a row.
    """
    networks = _networks(ns, weights or _own_weights())
    blocks = _map_rows(ns, rgb, _factor(mpp_th), networks)
    return packed_rows(ns, CLASSES, rgb.shape[:2], blocks)


def _map_rows(
    ns: ArrayNamespace, rgb: Array, factor: int, networks: Sequence[Weights]
) -> Iterator[Array]:
    """Rows of the maps from top to bottom, uint8 (classes, rows, W)."""
    height, width = rgb.shape[:2]
    tables = density_tables(ns, rgb)
    end = 0
    for run in _dense_runs(ns, rgb, tables, factor):
        yield from _glass_rows(ns, run.inside.start - end, width)
        squares = split(_squares(ns, rgb[run.around], tables, factor), len(networks))
        each = [class_rows(ns, *pair) for pair in zip(networks, squares, strict=True)]
        # position of the block's first row in `run.around`
        top = 0
        for parts in zip(*each, strict=True):
            rows = _mean(ns, parts)
            if factor > 1:
                rows = rows.repeat(factor, axis=1).repeat(factor, axis=2)
            first = max(run.own.start - top, 0)
            last = max(run.own.stop - top, 0)
            top += rows.shape[1]
            yield rows[:, first:last, :width]
        end = run.inside.stop
    yield from _glass_rows(ns, height - end, width)


def _dense_runs(
    ns: ArrayNamespace, rgb: Array, tables: list[Array], factor: int
) -> Iterator[Band]:
    """Rows of a picture that lie near others which are not only glass, as few bands."""
    height = len(rgb)
    step_px = STEP * 2 * factor
    reach = HALO // STEP
    dense = np.zeros(-(-height // step_px), dtype=bool)
    for step in range(len(dense)):
        rows = rgb[step * step_px : (step + 1) * step_px]
        density = sum(
            table.take(rows[..., channel]) for channel, table in enumerate(tables)
        )
        if float(density.max()) >= 3 * _GLASS_DENSITY:
            dense[max(0, step - reach) : step + reach + 1] = True
    borders = np.flatnonzero(np.diff(dense, prepend=False, append=False)) * step_px
    for start, end in borders.reshape(-1, 2).tolist():
        first = max(0, start - HALO * 2 * factor)
        stop = min(height, end)
        yield Band(
            inside=slice(start, stop),
            around=slice(first, min(height, stop + HALO * 2 * factor)),
            own=slice(start - first, stop - first),
        )


def _glass_rows(ns: ArrayNamespace, num_rows: int, width: int) -> Iterator[Array]:
    """Rows of the maps where a picture shows only glass."""
    for band in row_bands(num_rows):
        count = band.inside.stop - band.inside.start
        rows = ns.xp.zeros((len(CLASSES), count, width), dtype=ns.xp.uint8)
        rows[CLASSES.index("glass")] = 255
        yield rows


def _squares(
    ns: ArrayNamespace, rgb: Array, tables: list[Array], factor: int
) -> Iterator[Array]:
    """Blocks of rows of the networks' input, float32 (rows, W, 16): squares of 2 x 2 px."""
    num_rows = rows_at_once(-(-rgb.shape[1] // (2 * factor)))
    step_px = STEP * 2 * factor * max(1, num_rows // STEP)
    for top in range(0, len(rgb), step_px):
        planes = input_planes(ns, rgb[top : top + step_px], tables, factor)
        # (H, W, C) to (H / 2, W / 2, 4 C): the four pixels of a square, plane by plane
        height = planes.shape[0] // 2
        width = planes.shape[1] // 2
        squares = planes.reshape(height, 2, width, 2, NUM_PLANES)
        squares = squares.transpose(0, 2, 4, 1, 3).reshape(height, width, -1)
        for first in range(0, height, num_rows):
            yield squares[first : first + num_rows]


def _mean(ns: ArrayNamespace, parts: Sequence[Array]) -> Array:
    """Rounded mean of arrays of uint8."""
    total = ns.xp.full(parts[0].shape, len(parts) // 2, dtype=ns.xp.uint16)
    for part in parts:
        total += part
    total //= len(parts)
    return total.astype(ns.xp.uint8)


def ink_of(maps: Mapping[str, Array]) -> Array:
    """Pixels where all ink colours together have a probability above a half, bool (H, W)."""
    return ink_sum(maps) > 127


def ink_sum(maps: Mapping[str, Array]) -> Array:
    """Sum of the probabilities of all ink colours, in 255ths, uint16 (H, W)."""
    first, *others = INKS
    total = maps[f"pen_{first}"].astype("uint16")
    for ink in others:
        total += maps[f"pen_{ink}"]
    return total


def ink_within(ns: ArrayNamespace, rgb: Array, mpp_th: float, area: Array) -> Array:
    """`ink_of` inside an area, bool (H, W); False outside of it.

    Each window is cut to its part of the area, so this is faster than `artefact_maps`. The choice
    of windows changes a probability by rounding only, at most 1/255.

    Memory: 2 bytes per pixel, 300 bytes per square of 16 µm of one window (about 260,000 squares),
        and 12 MB.
    """
    out = ns.xp.zeros(area.shape, dtype=bool)
    factor = _factor(mpp_th)
    tables = density_tables(ns, rgb)
    networks = _networks(ns, _own_weights())
    height, width = area.shape
    for all_rows, all_columns in _windows((height, width), factor, _CUT_SQUARES):
        wanted = area[all_rows.inside, all_columns.inside]
        if not bool(wanted.any()):
            continue
        rows = _cut(ns, all_rows, wanted.any(axis=1), height, factor)
        columns = _cut(ns, all_columns, wanted.any(axis=0), width, factor)
        around = rgb[rows.around, columns.around]
        p = _mean_probabilities(ns, networks, around, tables, factor)
        if p is None:
            continue
        _paste(out, ink_of(dict(zip(CLASSES, p))), rows, columns, factor)
        del p  # frees memory before the next window
    return out & area


def _factor(mpp_th: float) -> int:
    """Picture pixels along the edge of one input pixel of the network."""
    return max(1, round(INPUT_MPP / mpp_th))


def _networks(
    ns: ArrayNamespace, weights: Mapping[str, npt.NDArray[np.float32]]
) -> list[Weights]:
    """The layers of each network."""
    networks: dict[str, dict[str, Array]] = {}
    for name, value in weights.items():
        number, _, layer = name.partition(".")
        networks.setdefault(number, {})[layer] = ns.upload(value, reason="model")
    return list(networks.values())


def density_tables(ns: ArrayNamespace, rgb: Array) -> list[Array]:
    """Density of each value of red, green and blue, relative to glass, float32 (256,) each."""
    return [table.clip(-0.1, 4) for table in _full_tables(ns, rgb, _DARKEST)]


def _full_tables(ns: ArrayNamespace, rgb: Array, darkest: int) -> list[Array]:
    xp = ns.xp
    tables = []
    for channel in range(3):
        plane = rgb[::_SAMPLE_STEP, ::_SAMPLE_STEP, channel]
        white = max(float(xp.percentile(plane, _WHITE_PERCENTILE)), 60.0)
        table = -xp.log(xp.maximum(xp.arange(256), darkest) / white)
        tables.append(table.astype(xp.float32))
    return tables


def without_stain(ns: ArrayNamespace, ink: Array, rgb: Array) -> Array:
    """The mask of ink, bool (H, W), without purple pixels that are stained tissue.

    Networks mistake dark tissue without texture for ink, as their training data had none. Ink over
    tissue may be purple too, but it is darker than the tissue beside it, and that tissue is larger.
    """
    if not bool(ink.any()):
        return ink
    tables = _full_tables(ns, rgb, 1)
    colors = _densities(ns, rgb[ink], tables)
    purple = is_purple(colors)
    step = _SAMPLE_STEP
    beside = _densities(ns, rgb[::step, ::step][~ink[::step, ::step]], tables)
    stained = beside[is_stained(beside, _STAINED_DENSITY), 1]
    num_purple = int(purple.sum())
    if not num_purple:
        return ink
    if num_purple <= stained.size * step**2:
        usual = float(ns.xp.percentile(stained, _USUAL_PERCENTILE))
        if float(ns.xp.median(colors[purple, 1])) > usual + _LEAST_INK_DENSITY:
            return ink
    purple_ink = ink.copy()
    purple_ink[ink] = purple
    near_purple, near = (
        filters.gaussian(ns, _shares_of_blocks(ns, mask), 1.0)
        for mask in (purple_ink, ink)
    )
    is_tissue = near_purple >= _PURPLE_SHARE * near
    is_tissue = is_tissue.repeat(_HUE_BLOCK_PX, 0).repeat(_HUE_BLOCK_PX, 1)
    height, width = ink.shape
    return ink & ~is_tissue[:height, :width]


def _shares_of_blocks(ns: ArrayNamespace, mask: Array) -> Array:
    """Share of True pixels in each block of `_HUE_BLOCK_PX`, float32, band by band."""
    parts = []
    for band in row_bands(-(-len(mask) // _HUE_BLOCK_PX)):
        first = band.inside.start * _HUE_BLOCK_PX
        rows = mask[first : band.inside.stop * _HUE_BLOCK_PX]
        rows = rows.astype(ns.xp.float32)
        parts.append(filters.block_means(ns, rows, _HUE_BLOCK_PX))
    return ns.xp.concatenate(parts)


def _densities(ns: ArrayNamespace, colors: Array, tables: list[Array]) -> Array:
    """Densities (N, 3) of colours (N, 3), float32."""
    return ns.xp.stack(
        [table.take(colors[:, c]) for c, table in enumerate(tables)], axis=1
    )


def is_purple(densities: Array) -> Array:
    """True for densities (N, 3) of red, green and blue whose hue no ink has, bool (N,)."""
    is_mixed = densities[:, 0] > _PURPLE_RED * densities[:, 1]
    return is_stained(densities, _PURPLE_DENSITY) & is_mixed


def is_stained(densities: Array, least: float) -> Array:
    """True if green is by far the densest channel and exceeds `least`, bool (N,)."""
    red, green, blue = densities.T
    most = (1 - _PURPLE_GAP) * green
    return (green > least) & (red < most) & (blue < most)


def input_planes(
    ns: ArrayNamespace, rgb: Array, tables: list[Array], factor: int
) -> Array:
    """Densities and the logarithm of their mean, float32 (H, W, 4), for blocks of pixels.

    H and W are multiples of 32; the last row and column are repeated to reach them.
    """
    xp = ns.xp
    shape = [-(-length // (factor * 2 * _STEP)) * 2 * _STEP for length in rgb.shape[:2]]
    planes = xp.empty((*shape, NUM_PLANES), dtype=xp.float32)
    for channel, table in enumerate(tables):
        plane = table.take(rgb[..., channel])
        if factor > 1:
            plane = filters.block_means(ns, plane, factor)
        more = [(0, wanted - length) for wanted, length in zip(shape, plane.shape)]
        planes[..., channel] = xp.pad(plane, more, mode="edge")
    mean = filters.channel_mean(ns, planes[..., :3])
    planes[..., 3] = xp.log(mean.clip(0, None) / xp.float32(_FLOOR) + 1)
    return planes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """A part of an image along one axis, in pixels of the image."""

    inside: slice
    # the part with its surroundings
    around: slice
    # position of `inside` in `around`
    own: slice


def _windows(
    shape: tuple[int, int], factor: int, most_squares: int
) -> Iterator[tuple[_Window, _Window]]:
    """Yields rows and columns of equal windows of about `most_squares`, surroundings included."""
    height, width = shape
    for rows in _axis_windows(height, width, factor, most_squares):
        for columns in _axis_windows(width, height, factor, most_squares):
            yield rows, columns


def _axis_windows(
    length: int, other_length: int, factor: int, most_squares: int
) -> Iterator[_Window]:
    """Yields equal parts of an axis, which begin at multiples of the step."""
    squares = length / (2 * factor)
    count = 1
    if squares * other_length / (2 * factor) > most_squares:
        count = math.ceil(squares / (math.sqrt(most_squares) - 2 * _HALO))
    step_px = _STEP * 2 * factor
    part_px = math.ceil(length / (count * step_px)) * step_px
    for start in range(0, length, part_px):
        yield _with_halo(start, min(start + part_px, length), length, factor)


def _with_halo(start: int, stop: int, length: int, factor: int) -> _Window:
    halo_px = _HALO * 2 * factor
    first = max(0, start - halo_px)
    return _Window(
        inside=slice(start, stop),
        around=slice(first, min(length, stop + halo_px)),
        own=slice(start - first, stop - first),
    )


def _paste(
    plane: Array, small: Array, rows: _Window, columns: _Window, factor: int
) -> None:
    """Writes a window's result, without its surroundings, into a plane of image pixels."""
    large = small
    if factor > 1:
        large = small.repeat(factor, axis=0).repeat(factor, axis=1)
    plane[rows.inside, columns.inside] = large[rows.own, columns.own]


def _cut(
    ns: ArrayNamespace, window: _Window, wanted: Array, length: int, factor: int
) -> _Window:
    """The smallest part of a window, in whole steps, with all True values of `wanted` (length,)."""
    places = ns.xp.flatnonzero(wanted)
    step_px = _STEP * 2 * factor
    start = window.inside.start + int(places[0]) // step_px * step_px
    stop = window.inside.start + math.ceil((int(places[-1]) + 1) / step_px) * step_px
    return _with_halo(start, min(stop, window.inside.stop), length, factor)


def _mean_probabilities(
    ns: ArrayNamespace,
    networks: list[Weights],
    rgb: Array,
    tables: list[Array],
    factor: int,
) -> Array | None:
    """Probability of each class in steps of 1/255, uint8 (classes, H, W), per block of pixels.

    None if the part shows only glass.
    """
    xp = ns.xp
    planes = input_planes(ns, rgb, tables, factor)
    # the plane of logarithms is 0 for glass and grows with the density
    if float(planes[..., 3].max()) < math.log(_GLASS_DENSITY / _FLOOR + 1):
        return None
    # (H, W, C) to (H / 2, W / 2, 4 C): the four pixels of a square, plane by plane
    height = planes.shape[0] // 2
    width = planes.shape[1] // 2
    squares = planes.reshape(height, 2, width, 2, NUM_PLANES).transpose(0, 2, 4, 1, 3)
    squares = squares.reshape(height, width, 4 * NUM_PLANES)
    del planes
    total = xp.zeros((len(CLASSES), 2 * height, 2 * width), dtype=xp.uint16)
    for layers in networks:
        for rows, p in _probabilities(ns, layers, squares):
            total[:, rows] += p
    total += len(networks) // 2
    total //= len(networks)
    return total.astype(xp.uint8)


def _probabilities(
    ns: ArrayNamespace, layers: Weights, squares: Array
) -> Iterator[tuple[slice, Array]]:
    """Runs one network; yields rows and their probabilities * 255, uint8 (classes, rows, W)."""
    xp = ns.xp
    width = 2 * squares.shape[1]
    x = squares
    finer = []
    for level in range(_LEVELS + 1):
        if level:
            finer.append(x)
            num_rows, num_columns, count = x.shape
            # maximum of 2 x 2 pixels per channel
            x = x.reshape(num_rows // 2, 2, num_columns // 2, 2, count)
            x = x.max(axis=(1, 3))
        x = _convolved(ns, layers, f"down{level}a", x)
        x = _convolved(ns, layers, f"down{level}b", x)
    for level in reversed(range(1, _LEVELS)):
        x = _convolved(ns, layers, f"join{level}", _joined(ns, layers, level, finer, x))
    joined = _joined(ns, layers, 0, finer, x)
    for rows, values in _convolved_rows(ns, layers, "join0", joined):
        logits = values @ layers["out.weight"] + layers["out.bias"]
        power = xp.exp(logits.clip(-40, 40, out=logits))
        power = power.reshape(*power.shape[:2], len(CLASSES), 2, 2)
        power *= 255 / power.sum(axis=2, keepdims=True)
        # (row, column, class, y, x) to (class, row, y, column, x)
        shown = (power + 0.5).astype(xp.uint8).transpose(2, 0, 3, 1, 4)
        pixels = slice(2 * rows.start, 2 * rows.stop)
        yield pixels, shown.reshape(len(CLASSES), -1, width)


def _joined(
    ns: ArrayNamespace, layers: Weights, level: int, finer: list[Array], wide: Array
) -> Array:
    """Adds a layer on the coarser grid to the finer one."""
    x = finer.pop()
    made = wide @ layers[f"up{level}.weight"] + layers[f"up{level}.bias"]
    height, width, count = made.shape
    squares = x.reshape(height, 2, width, 2, count)
    squares += made[:, None, :, None]
    return x


def _convolved(ns: ArrayNamespace, layers: Weights, name: str, x: Array) -> Array:
    """Convolves channels (H, W, C) with 3 x 3 weights; negative results become 0."""
    count = layers[f"{name}.bias"].size
    out = ns.xp.empty((*x.shape[:2], count), dtype=ns.xp.float32)
    for rows, values in _convolved_rows(ns, layers, name, x):
        out[rows] = values
    return out


def _convolved_rows(
    ns: ArrayNamespace, layers: Weights, name: str, x: Array
) -> Iterator[tuple[slice, Array]]:
    """Yields the result of `_convolved` in groups of rows."""
    xp = ns.xp
    height, width, count = x.shape
    # weights for the row above, the same row and the row below
    weights = layers[f"{name}.weight"].reshape(3, 3 * count, -1)
    bias = layers[f"{name}.bias"]
    num_rows = max(1, _BLOCK_SQUARES // width)
    # each pixel together with its left and right neighbours
    near = xp.zeros((num_rows + 2, width, 3 * count), dtype=xp.float32)
    for start in range(0, height, num_rows):
        stop = min(start + num_rows, height)
        first = max(start - 1, 0)
        last = min(stop + 1, height)
        rows = near[first - start + 1 : last - start + 1]
        rows[:, :, count : 2 * count] = x[first:last]
        rows[:, 1:, :count] = x[first:last, :-1]
        rows[:, :-1, 2 * count :] = x[first:last, 1:]
        # rows outside the image are 0; those above the first row have not been written yet
        near[last - start + 1 :] = 0
        total = xp.broadcast_to(bias, (stop - start, width, bias.size)).copy()
        for shift in range(3):
            total += near[shift : shift + stop - start] @ weights[shift]
        yield slice(start, stop), xp.maximum(total, 0, out=total)
