"""The artefact network: tissue, glass, a fold, ink, a bubble or dirt, at each pixel.

The mean of U-shaped convolutional networks over optical densities against the slide's own glass, on
grids of 16 to 256 µm. They run in windows on the device's arrays: importing torch would take two
CPU-seconds and 200 MB, more than all of quality control. `training/` has the script that makes the
file of weights, and the file records what it was made from.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinsection.arrays import Array, ArrayNamespace, filters

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
# Planes of its input: density of red, green and blue, and the logarithm of their mean.
NUM_PLANES = 4
# µm per pixel of its input.
INPUT_MPP = 8.0
MODEL = Path(__file__).parent / "models" / "artefacts.safetensors"

_WHITE_PERCENTILE = 97
# Values below are as dark as this one.
_DARKEST = 4
# Density that the logarithm starts from.
_FLOOR = 0.06
# Levels below the first: windows begin and end at multiples of this many squares of 2 x 2 pixels.
_LEVELS = 4
_STEP = 1 << _LEVELS
# Squares beyond a window that decide what is in it: 77 by the convolutions, and up to a step.
_HALO = 6 * _STEP
# Squares of a window with its halo.
_WINDOW_SQUARES = 1 << 19
# The same limit where windows are cut to a part of the picture.
_CUT_SQUARES = 1 << 18
# Squares that are convolved at once.
_BLOCK_SQUARES = 1 << 13
# Windows of glass alone: no pixel has this density.
_GLASS_DENSITY = 0.02
# Tissue in haematoxylin and eosin is purple, and no ink is: green is the densest channel, red has
# this share of its density, and red and blue have this share less. Paler pixels have no hue.
_PURPLE_RED = 0.45
_PURPLE_GAP = 0.2
_PURPLE_DENSITY = 0.45
# Ink of blocks of so many px, in and around which it has this share, is tissue.
_HUE_BLOCK_PX = 4
_PURPLE_SHARE = 0.5
# Of green, in tissue with any of these stains.
_STAINED_DENSITY = 0.15
# Ink adds at least this to what most tissue has.
_LEAST_INK_DENSITY = 0.1
_USUAL_PERCENTILE = 75
# Every so many rows and columns are looked at for the glass, and for the tissue beside ink.
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
    """Probability of each class at each pixel, in steps of 1/255, uint8 (H, W).

    Args:
        ns: device.
        rgb: uint8 (H, W, 3).
        mpp_th: µm per px of it.
        weights: by number of a network and name of a layer; None: the package's own.

    Memory: 12 bytes per pixel, 300 bytes per square of 16 µm of one window (about 500,000 squares),
        and 12 MB.
    """
    height, width = rgb.shape[:2]
    out = ns.xp.zeros((len(CLASSES), height, width), dtype=ns.xp.uint8)
    out[CLASSES.index("glass")] = 255
    factor = _factor(mpp_th)
    tables = density_tables(ns, rgb)
    networks = _networks(ns, weights or _own_weights())
    for rows, columns in _windows((height, width), factor, _WINDOW_SQUARES):
        part = rgb[rows.around, columns.around]
        p = _mean_probabilities(ns, networks, part, tables, factor)
        if p is None:
            continue
        # class by class: all at once would be a second copy of the maps
        for small, plane in zip(p, out):
            _paste(plane, small, rows, columns, factor)
        del p, small  # before the next window is computed
    return dict(zip(CLASSES, out))


def ink_of(maps: Mapping[str, Array]) -> Array:
    """Where ink, of all colours together, has more than half of the probability, bool (H, W)."""
    return sum(maps[f"pen_{ink}"].astype("uint16") for ink in INKS) > 127


def ink_within(ns: ArrayNamespace, rgb: Array, mpp_th: float, area: Array) -> Array:
    """`ink_of` of a picture's `artefact_maps` inside an area, bool (H, W); False outside.

    A window is cut to what it has of the area, so this is faster than all maps. Windows change a
    probability by rounding, at most 1/255.

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
        del p  # before the next window is computed
    return out & area


def _factor(mpp_th: float) -> int:
    """Pixels of a picture along one of the network's input."""
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
    """Density of each value of red, green and blue against the glass, float32 (256,) each."""
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
    """The mask of ink, bool (H, W), without purple that is stained tissue.

    Dark tissue without texture, which no training had, looks like ink to a network. Ink over tissue
    may be purple too, but it is darker than the tissue beside it, and there is more of that.
    """
    if not bool(ink.any()):
        return ink
    tables = _full_tables(ns, rgb, 1)
    colors = _densities(ns, rgb[ink], tables)
    purple = is_purple(colors)
    step = _SAMPLE_STEP
    beside = _densities(ns, rgb[::step, ::step][~ink[::step, ::step]], tables)
    stained = beside[_is_stained(beside, _STAINED_DENSITY), 1]
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
        filters.gaussian(ns, filters.block_means(ns, mask, _HUE_BLOCK_PX), 1.0)
        for mask in (purple_ink.astype(ns.xp.float32), ink.astype(ns.xp.float32))
    )
    is_tissue = near_purple >= _PURPLE_SHARE * near
    is_tissue = is_tissue.repeat(_HUE_BLOCK_PX, 0).repeat(_HUE_BLOCK_PX, 1)
    height, width = ink.shape
    return ink & ~is_tissue[:height, :width]


def _densities(ns: ArrayNamespace, colors: Array, tables: list[Array]) -> Array:
    """Densities of colours (N, 3), float32 (N, 3)."""
    return ns.xp.stack([table[colors[:, c]] for c, table in enumerate(tables)], axis=1)


def is_purple(densities: Array) -> Array:
    """Which colours no ink has, bool (N,), by densities of red, green and blue (N, 3)."""
    is_mixed = densities[:, 0] > _PURPLE_RED * densities[:, 1]
    return _is_stained(densities, _PURPLE_DENSITY) & is_mixed


def _is_stained(densities: Array, least: float) -> Array:
    """Where green is the densest channel by far, and at least so dense, bool (N,)."""
    red, green, blue = densities.T
    most = (1 - _PURPLE_GAP) * green
    return (green > least) & (red < most) & (blue < most)


def input_planes(
    ns: ArrayNamespace, rgb: Array, tables: list[Array], factor: int
) -> Array:
    """Densities and the logarithm of their mean, float32 (H, W, 4), over blocks of pixels.

    H and W are multiples of 32: the last row and column are repeated.
    """
    xp = ns.xp
    shape = [-(-length // (factor * 2 * _STEP)) * 2 * _STEP for length in rgb.shape[:2]]
    planes = xp.empty((*shape, NUM_PLANES), dtype=xp.float32)
    for channel, table in enumerate(tables):
        plane = table[rgb[..., channel]]
        if factor > 1:
            plane = filters.block_means(ns, plane, factor)
        more = [(0, wanted - length) for wanted, length in zip(shape, plane.shape)]
        planes[..., channel] = xp.pad(plane, more, mode="edge")
    mean = planes[..., :3].mean(axis=2)
    planes[..., 3] = xp.log(mean.clip(0, None) / xp.float32(_FLOOR) + 1)
    return planes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """A part of an image along one axis, in its pixels."""

    inside: slice
    # with its surroundings
    around: slice
    # place of `inside` in `around`
    own: slice


def _windows(
    shape: tuple[int, int], factor: int, most_squares: int
) -> Iterator[tuple[_Window, _Window]]:
    """Rows and columns of equal windows, of about `most_squares` with their surroundings."""
    height, width = shape
    for rows in _axis_windows(height, width, factor, most_squares):
        for columns in _axis_windows(width, height, factor, most_squares):
            yield rows, columns


def _axis_windows(
    length: int, other_length: int, factor: int, most_squares: int
) -> Iterator[_Window]:
    """Equal parts of an axis, which begin at multiples of the step."""
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
    """Writes what a window has of its own, over blocks of pixels, into a plane of pixels."""
    large = small
    if factor > 1:
        large = small.repeat(factor, axis=0).repeat(factor, axis=1)
    plane[rows.inside, columns.inside] = large[rows.own, columns.own]


def _cut(
    ns: ArrayNamespace, window: _Window, wanted: Array, length: int, factor: int
) -> _Window:
    """The part of a window that has all that is wanted, bool (its length,), some of it True."""
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
    """Probability of each class in steps of 1/255, uint8 (classes, H, W), over blocks of pixels.

    None if the part shows only glass.
    """
    xp = ns.xp
    planes = input_planes(ns, rgb, tables, factor)
    # the logarithm's plane is 0 of glass and grows with the density
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
    """By one network: some rows of pixels at a time, and P in 255ths, uint8 (classes, rows, W)."""
    xp = ns.xp
    width = 2 * squares.shape[1]
    x = squares
    finer = []
    for level in range(_LEVELS + 1):
        if level:
            finer.append(x)
            num_rows, num_columns, count = x.shape
            # the largest of 2 x 2 pixels per channel
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
    """Adds a layer of the wider grid to the finer one."""
    x = finer.pop()
    made = wide @ layers[f"up{level}.weight"] + layers[f"up{level}.bias"]
    height, width, count = made.shape
    squares = x.reshape(height, 2, width, 2, count)
    squares += made[:, None, :, None]
    return x


def _convolved(ns: ArrayNamespace, layers: Weights, name: str, x: Array) -> Array:
    """The channels (H, W, C) under 3 x 3 weights; below 0 is 0."""
    count = layers[f"{name}.bias"].size
    out = ns.xp.empty((*x.shape[:2], count), dtype=ns.xp.float32)
    for rows, values in _convolved_rows(ns, layers, name, x):
        out[rows] = values
    return out


def _convolved_rows(
    ns: ArrayNamespace, layers: Weights, name: str, x: Array
) -> Iterator[tuple[slice, Array]]:
    """Some rows of the result at a time."""
    xp = ns.xp
    height, width, count = x.shape
    # of the rows above, here and below
    weights = layers[f"{name}.weight"].reshape(3, 3 * count, -1)
    bias = layers[f"{name}.bias"]
    num_rows = max(1, _BLOCK_SQUARES // width)
    # each pixel with those on its left and right
    near = xp.zeros((num_rows + 2, width, 3 * count), dtype=xp.float32)
    for start in range(0, height, num_rows):
        stop = min(start + num_rows, height)
        first = max(start - 1, 0)
        last = min(stop + 1, height)
        rows = near[first - start + 1 : last - start + 1]
        rows[:, :, count : 2 * count] = x[first:last]
        rows[:, 1:, :count] = x[first:last, :-1]
        rows[:, :-1, 2 * count :] = x[first:last, 1:]
        # beyond the last row is nothing; beyond the first, nothing was written yet
        near[last - start + 1 :] = 0
        total = xp.broadcast_to(bias, (stop - start, width, bias.size)).copy()
        for shift in range(3):
            total += near[shift : shift + stop - start] @ weights[shift]
        yield slice(start, stop), xp.maximum(total, 0, out=total)
