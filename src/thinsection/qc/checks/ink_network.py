"""The ink network: the probability of pen ink per pixel of 16 µm, translucent or opaque.

It is one U-shaped convolutional network of the form of the artefact network. Its input is the
optical density relative to the slide's own glass, and the part of it that the slide's own stain
does not explain. A stroke adds nearly the same density wherever it runs, over glass and over any
tissue, and this is what the network was trained to see: on scenes of `training/ink` whose strokes
have any colour and any strength. The file of weights states its data.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinsection.arrays import Array, ArrayNamespace, filters
from thinsection.qc.checks.artefact_network import density_tables
from thinsection.qc.checks.unet import STEP, class_rows, rows_at_once

# Planes of the input: densities of red, green and blue, the logarithm of their mean, and the three
# densities that the slide's usual stain does not explain.
NUM_PLANES = 7
# µm per pixel of the input.
INPUT_MPP = 16.0
MODEL = Path(__file__).parent / "models" / "ink.safetensors"
# Smaller spots are not ink, in µm².
MIN_INK_UM2 = 6400.0
# Above this probability, in 255ths, the network is sure of ink.
SURE = 150

# Index of ink in the two classes of the network.
_INK = 1
# Density at which the logarithm begins to flatten.
_FLOOR = 0.06
# Mean density above which a pixel counts as stained, and the fewest pixels that show a stain.
_STAINED_DENSITY = 0.12
_LEAST_STAINED_PX = 64
_GREY = (1.0, 1.0, 1.0)
# Distance of the rows and columns from which the slide's stain is estimated.
_SAMPLE_STEP = 2


def ink_probability(
    ns: ArrayNamespace,
    rgb: Array,
    *,
    weights: Mapping[str, npt.NDArray[np.float32]] | None = None,
) -> Array:
    """Probability of ink per pixel, in steps of 1/255, uint8 (H, W).

    Args:
        ns: device.
        rgb: uint8 (H, W, 3), of about 16 µm per pixel.
        weights: weights by layer name; None: those of the package.

    Memory: 2 bytes per pixel, 10 MB, and 40 KB per square of 2 x 2 pixels in a row.
    """
    xp = ns.xp
    layers = {
        name: ns.upload(value, reason="model")
        for name, value in (weights or _own_weights()).items()
    }
    rows = class_rows(ns, layers, _squares(ns, rgb))
    found = xp.concatenate([block[_INK] for block in rows])
    height, width = rgb.shape[:2]
    return found[:height, :width]


def _squares(ns: ArrayNamespace, rgb: Array) -> Iterator[Array]:
    """Blocks of rows of the input, float32 (rows, W / 2, 28): squares of 2 x 2 pixels."""
    tables = density_tables(ns, rgb)
    stain = usual_stain(ns, rgb, tables)
    num_rows = rows_at_once(-(-rgb.shape[1] // 2))
    step_px = STEP * 2 * max(1, num_rows // STEP)
    for top in range(0, len(rgb), step_px):
        planes = ink_planes(ns, rgb[top : top + step_px], tables, stain)
        height = planes.shape[0] // 2
        width = planes.shape[1] // 2
        squares = planes.reshape(height, 2, width, 2, NUM_PLANES)
        squares = squares.transpose(0, 2, 4, 1, 3).reshape(height, width, -1)
        for first in range(0, height, num_rows):
            yield squares[first : first + num_rows]


@cache
def _own_weights() -> dict[str, npt.NDArray[np.float32]]:
    from safetensors.numpy import load_file

    return {name: array.astype(np.float32) for name, array in load_file(MODEL).items()}


def usual_stain(ns: ArrayNamespace, rgb: Array, tables: list[Array]) -> Array:
    """Direction of the densities of most stained pixels, of length 1, float32 (3,)."""
    xp = ns.xp
    sample = rgb[::_SAMPLE_STEP, ::_SAMPLE_STEP].reshape(-1, 3)
    densities = xp.stack(
        [table.take(sample[:, c]) for c, table in enumerate(tables)], axis=1
    )
    return stain_of(ns, densities)


def stain_of(ns: ArrayNamespace, densities: Array) -> Array:
    """Direction of most densities (N, 3) that are stained, of length 1, float32 (3,).

    It is that of grey if too few are stained.
    """
    xp = ns.xp
    stained = densities[densities.mean(axis=1) > _STAINED_DENSITY]
    direction = xp.asarray(_GREY, dtype=xp.float32)
    if len(stained) >= _LEAST_STAINED_PX:
        lengths = xp.sqrt((stained**2).sum(axis=1, keepdims=True))
        direction = xp.median(stained / lengths, axis=0)
    return (direction / xp.sqrt((direction**2).sum())).astype(xp.float32)


def ink_planes(
    ns: ArrayNamespace, rgb: Array, tables: list[Array], stain: Array
) -> Array:
    """Input of the network, float32 (H, W, 7); H and W are multiples of 32.

    The last row and column are repeated to reach them.
    """
    xp = ns.xp
    more = [(0, -length % 32) for length in rgb.shape[:2]]
    padded = xp.pad(rgb, [*more, (0, 0)], mode="edge")
    planes = xp.empty((*padded.shape[:2], NUM_PLANES), dtype=xp.float32)
    for channel, table in enumerate(tables):
        planes[..., channel] = table.take(padded[..., channel])
    mean = filters.channel_mean(ns, planes[..., :3])
    planes[..., 3] = xp.log(mean.clip(0, None) / xp.float32(_FLOOR) + 1)
    amount = planes[..., :3] @ stain
    for channel in range(3):
        planes[..., 4 + channel] = planes[..., channel] - amount * stain[channel]
    return planes
