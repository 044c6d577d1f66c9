"""Shapes and fields of generator C: torn outlines, arcs, curls, strokes and slow noise."""

import math

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw
from scipy import ndimage

from thinsection.types import MaskArray

Field = npt.NDArray[np.float32]  # (H, W) or (H, W, 3)
Path = npt.NDArray[np.float64]  # (N, 2): y, x in px


def torn_outline(
    rng: np.random.Generator,
    middle: npt.NDArray[np.float64],
    radius: float,
    *,
    aspect: float,
    roughness: float,
) -> Path:
    """A closed outline whose edges were halved and displaced again and again; px.

    Args:
        middle: y, x.
        radius: half of its length.
        aspect: its breadth over its length.
        roughness: deviation of a displacement over the length of the edge.
    """
    corners = int(rng.integers(6, 11))
    t = np.linspace(0, 2 * math.pi, corners, endpoint=False)
    t = t + rng.normal(0, 0.25, corners) / corners
    lengths = rng.uniform(0.8, 1.15, corners)
    points = np.stack([aspect * np.sin(t) * lengths, np.cos(t) * lengths], axis=1)
    turn = rng.uniform(0, math.pi)
    rotation = [[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]]
    points = points @ np.array(rotation) * radius + middle
    for _ in range(6):
        edges = np.roll(points, -1, axis=0) - points
        normals = np.stack([-edges[:, 1], edges[:, 0]], axis=1)
        # a thin shape is torn less deep
        moved = rng.normal(0, roughness * min(1, 2 * aspect), (len(points), 1))
        halves = points + edges / 2 + normals * moved
        points = np.stack([points, halves], axis=1).reshape(-1, 2)
    return points


class Canvas:
    """A slide that is being drawn: its density, and where everything lies. Lengths are µm."""

    def __init__(
        self,
        rng: np.random.Generator,
        shape: tuple[int, int],
        mpp: float,
        *,
        grey: bool,
    ) -> None:
        self.rng = rng
        self.shape = shape
        self.mpp = mpp
        # the stain is grey, and so is the ink
        self.grey = grey
        self.density: Field = np.zeros((*shape, 3), np.float32)
        self.masks: dict[str, MaskArray] = {}
        self.biology: dict[str, MaskArray] = {}

    def mark(self, name: str, where: MaskArray) -> None:
        """Adds pixels to a mask."""
        self.masks[name] = self.masks[name] | where if name in self.masks else where

    def draw_log(self, low: float, high: float) -> float:
        """A number between two bounds, even in its logarithm."""
        return float(np.exp(self.rng.uniform(math.log(low), math.log(high))))

    def polygon(self, outline: Path) -> MaskArray:
        """Pixels inside an outline."""
        image = Image.new("L", (self.shape[1], self.shape[0]), 0)
        corners = [(float(x), float(y)) for y, x in outline]
        ImageDraw.Draw(image).polygon(corners, fill=1)
        return np.asarray(image) > 0

    def stroke(self, path: Path, width_um: float, *, taper: bool = False) -> Field:
        """Coverage in [0, 1] of a band along a path, drawn at twice the resolution.

        Args:
            taper: its ends are pointed.
        """
        zoom = 2
        margin = width_um / self.mpp / 2 + 2
        shape = np.array(self.shape)
        low = np.floor(path.min(axis=0) - margin).clip(0, shape).astype(int)
        high = np.ceil(path.max(axis=0) + margin).clip(0, shape).astype(int)
        cover = np.zeros(self.shape, np.float32)
        if (high <= low).any():
            return cover
        height, width = (high - low) * zoom
        image = Image.new("L", (int(width), int(height)), 0)
        pen = ImageDraw.Draw(image)
        points = [(float(x), float(y)) for y, x in (path - low) * zoom]
        half = width_um / self.mpp / 2 * zoom
        widths = np.full(len(points), half)
        if taper:
            widths *= np.sin(np.linspace(0.1, math.pi - 0.1, len(points))) ** 0.5
        for start, end, radius in zip(points[:-1], points[1:], widths[:-1]):
            pen.line((start, end), fill=255, width=max(1, round(2 * radius)))
        for (x, y), radius in zip(points, widths):
            if radius >= 1:
                pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)
        band = np.asarray(image.reduce(zoom), np.float32) / 255
        cover[low[0] : high[0], low[1] : high[1]] = band
        return cover

    def ring(self, radius_um: float) -> Path:
        """Points about a place, drawn by hand: closed, or nearly."""
        rng = self.rng
        t = np.linspace(0, 2 * math.pi * rng.uniform(0.7, 1.05), 160)
        away = radius_um / self.mpp * (1 + 0.12 * np.cos(2 * t + rng.uniform(0, 6)))
        away = away * (1 + 0.05 * np.cos(3 * t + rng.uniform(0, 6)))
        points = np.stack([0.8 * away * np.sin(t), away * np.cos(t)], axis=1)
        return points + rng.uniform(0.25, 0.75, 2) * self.shape

    def arc(self, length_um: float, *, inside: MaskArray | None = None) -> Path:
        """Points of an arc of a circle with a slight wave, about a place (of a mask)."""
        rng = self.rng
        bend = rng.uniform(0.05, 1.6)
        t = np.linspace(-0.5, 0.5, 80)
        radius = length_um / bend / self.mpp
        y = radius * (np.cos(bend * t) - 1)
        y += 0.01 * length_um / self.mpp * np.sin(12 * t + rng.uniform(0, 6))
        x = radius * np.sin(bend * t)
        turn = rng.uniform(0, 2 * math.pi)
        rows = y * math.cos(turn) - x * math.sin(turn)
        columns = y * math.sin(turn) + x * math.cos(turn)
        return np.stack([rows, columns], axis=1) + self.place(inside)

    def curl(self, length_um: float) -> Path:
        """A path whose curvature wanders, as a fibre lies; one point for 10 µm."""
        rng = self.rng
        steps = max(4, int(length_um / 10))
        kernel = 0.93 ** np.arange(60)
        curvature = np.convolve(rng.normal(0, 0.03, steps), kernel)[:steps]
        heading = np.cumsum(curvature) + rng.uniform(0, 6)
        moves = np.stack([np.sin(heading), np.cos(heading)], axis=1) * 10 / self.mpp
        return np.asarray(np.cumsum(moves, axis=0)) + self.place(None)

    def place(self, inside: MaskArray | None) -> npt.NDArray[np.float64]:
        """A pixel (y, x), of the mask where it has any."""
        spots = np.argwhere(inside[::4, ::4]) if inside is not None else ()
        if len(spots):
            return spots[int(self.rng.integers(len(spots)))] * 4.0
        return self.rng.uniform(0.05, 0.95, 2) * self.shape

    def soften(self, mask: MaskArray | Field, sigma_um: float) -> Field:
        """A mask with soft borders."""
        return ndimage.gaussian_filter(mask.astype(np.float32), sigma_um / self.mpp)

    def slow_noise(self, length_um: float) -> Field:
        """Cubic interpolation of normal values that lie `length_um` apart."""
        step = max(1.0, length_um / self.mpp)
        grid = [math.ceil(length / step) + 3 for length in self.shape]
        values = self.rng.normal(0, 1, grid).astype(np.float32)
        wanted = (round(grid[1] * step), round(grid[0] * step))
        image = Image.fromarray(values).resize(wanted, Image.Resampling.BICUBIC)
        return np.asarray(image)[: self.shape[0], : self.shape[1]]

    def patches(self, radius_um: float, count: int) -> Field:
        """Torn patches on the tissue, with borders of 8 µm, [0, 1]."""
        found = np.zeros(self.shape, bool)
        for _ in range(count):
            radius = self.draw_log(0.7, 1.4) * radius_um / self.mpp
            middle = self.place(self.masks["tissue"])
            aspect = self.rng.uniform(0.5, 1)
            outline = torn_outline(
                self.rng, middle, radius, aspect=aspect, roughness=0.12
            )
            found |= self.polygon(outline)
        return self.soften(found, 8)

    def grains(self, area: Field, radius_um: float, per_mm2: float) -> Field:
        """Coverage of round grains in an area: each is a Gaussian of its size."""
        rows, columns = np.nonzero(area > 0.5)
        count = int(len(rows) * (self.mpp / 1_000) ** 2 * per_mm2)
        points = np.zeros(self.shape, np.float32)
        if count:
            chosen = self.rng.integers(0, len(rows), count)
            weights = self.rng.uniform(0.6, 1.4, count)
            np.add.at(points, (rows[chosen], columns[chosen]), weights)
        sigma = max(radius_um / 1.5 / self.mpp, 0.35)
        # the middle of one grain is 1
        return np.clip(
            ndimage.gaussian_filter(points, sigma) * 2 * math.pi * sigma**2, 0, 1.2
        )
