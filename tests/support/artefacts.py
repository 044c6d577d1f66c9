"""Planted artefacts with known truth, to measure what a check finds.

Nothing here is shared with the pictures that the pixel models are trained on: strokes are drawn
as polygons, with fixed pens instead of drawn ones.
"""

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw
from scipy import ndimage

from thinsection.types import MaskArray, RgbArray

# sRGB of a dense layer on white, measured by eye on markers; dark and light of each colour
PENS = {
    "blue": ((30, 48, 132), (58, 92, 190)),
    "green": ((20, 98, 58), (52, 150, 92)),
    "red": ((176, 26, 40), (214, 44, 52)),
    "black": ((22, 22, 24), (46, 46, 50)),
}


def plant_pen(
    rgb: RgbArray, color: str, *, seed: int = 0
) -> tuple[RgbArray, MaskArray]:
    """The picture with pen strokes, and where they are; lengths are px of the picture.

    Args:
        rgb: uint8 (H, W, 3), at the resolution of the check.
        color: of `PENS`.
        seed: of the strokes' places and widths.
    """
    rng = np.random.default_rng(seed)
    height, width = rgb.shape[:2]
    out, truth = rgb.astype(np.float64) / 255, np.zeros((height, width), dtype=bool)
    for shade in PENS[color]:
        band = curved_band((height, width), rng, thickness_px=float(rng.uniform(8, 26)))
        cover = band * rng.uniform(0.88, 0.98)
        ink = np.array(shade) / 255
        out = (
            out * (1 - cover[..., None]) + ink * (0.55 + 0.45 * out) * cover[..., None]
        )
        truth |= band > 0.5
    return _as_uint8(out + rng.normal(0, 0.006, out.shape)), truth


def plant_blur(
    rgb: RgbArray,
    sigma_px: float,
    *,
    area_px: int,
    seed: int = 0,
    where: MaskArray | None = None,
) -> tuple[RgbArray, MaskArray]:
    """The picture out of focus in two discs of area_px px each, and where.

    Args:
        rgb: uint8 (H, W, 3).
        sigma_px: of the Gaussian.
        area_px: of one disc.
        seed: of the discs' places.
        where: centres lie in this mask; None allows any px.
    """
    rng = np.random.default_rng(seed)
    places = np.flatnonzero(np.ones(rgb.shape[:2], bool) if where is None else where)
    y, x = np.mgrid[: rgb.shape[0], : rgb.shape[1]]
    truth = np.zeros(rgb.shape[:2], dtype=bool)
    for place in rng.choice(places, 2):
        row, column = divmod(int(place), rgb.shape[1])
        truth |= (y - row) ** 2 + (x - column) ** 2 < area_px / np.pi
    blurred = ndimage.gaussian_filter(rgb.astype(np.float32), (sigma_px, sigma_px, 0))
    edge = ndimage.gaussian_filter(truth.astype(np.float32), 4.0)[..., None]
    return _as_uint8((rgb * (1 - edge) + blurred * edge) / 255), truth


def plant_fold(
    rgb: RgbArray, *, width_px: float, length_px: float, where: MaskArray, seed: int = 0
) -> tuple[RgbArray, MaskArray]:
    """The picture with a bent band of doubled tissue, and where: light passes two layers.

    Args:
        rgb: uint8 (H, W, 3).
        width_px: of the band.
        length_px: of the band, from end to end.
        where: the band's middle lies in this mask; so does what counts as fold.
        seed: of its place and direction.
    """
    rng = np.random.default_rng(seed)
    row, column = divmod(int(rng.choice(np.flatnonzero(where))), rgb.shape[1])
    angle = rng.uniform(0, np.pi)
    t = np.linspace(-0.5, 0.5, 60)
    bend = 0.08 * np.cos(2 * np.pi * t) * length_px
    xs = column + t * length_px * np.cos(angle) - bend * np.sin(angle)
    ys = row + t * length_px * np.sin(angle) + bend * np.cos(angle)
    band = _band(rgb.shape[:2], xs, ys, width_px)[..., None]
    glass = np.percentile(rgb.reshape(-1, 3), 95, axis=0)
    light = np.clip(rgb / glass, 0, 1)
    second = np.roll(light, (9, 5), axis=(0, 1))  # the layers do not lie cell on cell
    folded = (light * (1 - band) + light * second * band) * glass / 255
    return _as_uint8(folded), (band[..., 0] > 0.5) & where


def curved_band(
    shape: tuple[int, int], rng: np.random.Generator, *, thickness_px: float
) -> npt.NDArray[np.float64]:
    """Coverage in [0, 1] of a bent band across the picture, antialiased."""
    height, width = shape
    t = np.linspace(0, 1, 60)
    start, end = rng.uniform(0.1, 0.9, 2), rng.uniform(0.1, 0.9, 2)
    start[int(rng.integers(2))] = 0.02
    end[int(rng.integers(2))] = 0.98
    bend = 0.08 * np.sin(2 * np.pi * t * rng.uniform(0.5, 1.5) + rng.uniform(0, 6))
    ys = (start[0] + (end[0] - start[0]) * t + bend) * height
    xs = (start[1] + (end[1] - start[1]) * t - bend) * width
    return _band(shape, xs, ys, thickness_px)


def _band(
    shape: tuple[int, int],
    xs: npt.NDArray[np.float64],
    ys: npt.NDArray[np.float64],
    thickness_px: float,
) -> npt.NDArray[np.float64]:
    """Coverage in [0, 1] of a line through the points, antialiased."""
    height, width = shape
    zoom = 2
    canvas = Image.new("L", (width * zoom, height * zoom), 0)
    points = [(float(x) * zoom, float(y) * zoom) for x, y in zip(xs, ys, strict=True)]
    ImageDraw.Draw(canvas).line(
        points, fill=255, width=round(thickness_px * zoom), joint="curve"
    )
    return np.asarray(canvas.reduce(zoom), dtype=np.float64) / 255


def recall_precision(found: MaskArray, truth: MaskArray) -> tuple[float, float]:
    """Share of the truth that was found, and share of the found that is true."""
    hit = int((found & truth).sum())
    return hit / max(1, int(truth.sum())), hit / max(1, int(found.sum()))


def _as_uint8(light: npt.NDArray[np.floating]) -> RgbArray:
    return np.asarray(np.clip(np.rint(light * 255), 0, 255).astype(np.uint8))
