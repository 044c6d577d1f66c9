"""Generator B: slides with artefacts that no check was tuned on; they only report.

Tissue is Voronoi cells with a nucleus each, lumens and fibre bundles between two colours; folds are
splines along which two displaced layers multiply; ink is splatted disc by disc, with streaks.
"""

from collections.abc import Sequence
from itertools import product

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw
from scipy import ndimage
from scipy.interpolate import CubicSpline
from scipy.spatial import cKDTree
from training.artefact_slide import (
    ARTEFACTS,
    INKS,
    ArtefactSlide,
    Light,
    Scene,
    jpeg,
)

from thinsection.types import MaskArray, RgbArray, Size

Points = npt.NDArray[np.float64]  # (N, 2): y, x in px
# sRGB of (matrix, cytoplasm, nucleus), and how far each slide's may lie from it
_PALETTES = {
    "he": ((226, 164, 190), (196, 128, 178), (96, 66, 140)),
    "ihc": ((214, 216, 228), (168, 124, 84), (112, 92, 120)),
    "grey": ((196, 196, 196), (160, 160, 160), (96, 96, 96)),
    "dark": ((120, 62, 96), (92, 48, 92), (40, 24, 62)),
    "faint": ((238, 226, 234), (230, 214, 228), (196, 184, 210)),
    "tiled": ((222, 158, 196), (190, 132, 184), (104, 72, 150)),
}
_MARKERS = {
    "blue": (28, 44, 150),
    "green": (18, 128, 96),
    "red": (206, 24, 44),
    "black": (26, 25, 28),
    "brown": (112, 66, 26),
}
_TILE_PX = 1024  # period of the Voronoi texture


def held_out_slide(
    seed: int,
    *,
    size: Size = (2400, 1800),
    mpp: float = 2.0,
    stain: str | None = None,
    artefacts: Sequence[str] | None = None,
) -> ArtefactSlide:
    """Slide `seed` of generator B; arguments and memory as of `tuning_slide`."""
    scene = _HeldOutScene(seed, size, mpp, stain)
    count = int(scene.rng.integers(0, len(ARTEFACTS)))
    drawn = list(scene.rng.permutation(ARTEFACTS)[:count])
    return scene.slide(drawn if artefacts is None else artefacts)


class _HeldOutScene(Scene):
    stream = 2

    def draw_tissue(self) -> None:
        rng, (height, width) = self.rng, self.shape
        canvas = Image.new("L", (width // 4 + 1, height // 4 + 1), 0)
        pen = ImageDraw.Draw(canvas)
        for _ in range(
            int(rng.integers(1, 5))
        ):  # lobed pieces, some of them cut straight
            middle = rng.uniform(0.15, 0.85, 2) * (width, height) / 4
            t = np.linspace(0, 2 * np.pi, int(rng.choice((5, 24, 90))), endpoint=False)
            lobes = sum(
                rng.normal(0, 0.25 / n) * np.cos(n * t + rng.uniform(0, 6))
                for n in (2, 3, 5, 9)
            )
            radius = (
                min(self.shape)
                / 4
                * rng.uniform(0.18, 0.5)
                * np.clip(1 + lobes, 0.3, 2)
            )
            outline = (
                middle + np.stack([np.cos(t), np.sin(t)], axis=1) * radius[:, None]
            )
            pen.polygon([(float(x), float(y)) for x, y in outline], fill=1)
        whole = canvas.resize(
            (canvas.width * 4, canvas.height * 4), Image.Resampling.NEAREST
        )
        inside = np.asarray(whole, bool)[:height, :width]
        self.masks["tissue"] = inside
        palette = np.array(_PALETTES[self.stain], np.float32) / 255
        spread = (
            0
            if self.stain == "grey"
            else rng.normal(0, self.some(0.01, 0.06), palette.shape)
        )
        palette = np.clip(palette + spread + rng.normal(0, 0.04), 0.03, 0.97)
        texture = self._cells(palette)
        repeats = height // len(texture) + 1, width // len(texture) + 1, 1
        light = np.tile(texture, repeats)[:height, :width]
        thick = 1 + rng.uniform(0.1, 0.4) * (self._waves(400) + 0.5 * self._waves(90))
        light = light ** np.clip(thick, 0.3, 2)[..., None]
        self.light = np.where(inside[..., None], light, 1).astype(np.float32)

    def _cells(self, palette: Light) -> Light:
        """A periodic texture of cells in sheets, glands with lumens, or fat, (px, px, 3)."""
        rng, px = self.rng, _TILE_PX
        diameter = (
            rng.choice((8.0, 11.0, 14.0, 18.0, 24.0, 70.0)) / self.mpp
        )  # the last is fat
        fat = diameter * self.mpp > 50
        middles = rng.uniform(0, px, (int(px**2 / diameter**2), 2))
        around = np.concatenate(
            [middles + np.array(by) for by in product((-px, 0, px), repeat=2)]
        )
        near = np.all((around > -4 * diameter) & (around < px + 4 * diameter), axis=1)
        points = around[near]
        y, x = np.mgrid[:px, :px]
        stretch = np.array((1.0, rng.uniform(0.4, 1.0) if not fat else 1.0))
        places = np.stack([y.ravel(), x.ravel()], axis=1) * stretch
        distance, which = cKDTree(points * stretch).query(places, k=2)
        first, second = distance.reshape(px, px, 2).transpose(2, 0, 1)
        wall = np.clip(1 - (second - first) * self.mpp / (6.0 if fat else 1.2), 0, 1)
        size = rng.uniform(2.2, 3.6) / self.mpp * rng.uniform(0.7, 1.3, len(points))
        nucleus = np.clip(
            (size[which[:, 0]].reshape(px, px) - first) * self.mpp + 0.5, 0, 1
        )
        stroma = np.sin((y + 9 * np.sin(x / px * 2 * np.pi * 3)) / px * 2 * np.pi * 40)
        zone = np.zeros((px, px))
        for ky, kx in rng.integers(-4, 5, (6, 2)):
            zone += np.sin((y * ky + x * kx) / px * 2 * np.pi + rng.uniform(0, 6)) / 1.7
        fibre = (zone > rng.uniform(-0.5, 1.2)) & (not fat)
        body = np.ones(3) if fat else palette[1]
        color = body * (1 - wall[..., None]) + palette[0] * wall[..., None]
        strands = palette[0] * (1 + 0.05 * stroma[..., None])
        color = np.where(fibre[..., None], strands, color)
        seen = nucleus * (0.35 if fat else np.where(fibre, 0.25, 1.0))
        color = color * (1 - seen[..., None]) + palette[2] * seen[..., None]
        return np.asarray(np.clip(color, 0.02, 1), np.float32)

    def _waves(self, length_um: float) -> Light:
        """Bilinear value noise between -1 and 1."""
        step = max(2, int(length_um / self.mpp))
        height, width = (edge // step + 3 for edge in self.shape)
        field = Image.fromarray(
            self.rng.uniform(-1, 1, (height, width)).astype(np.float32)
        )
        large = field.resize((width * step, height * step), Image.Resampling.BILINEAR)
        return np.asarray(large)[: self.shape[0], : self.shape[1]]

    def draw(self, artefact: str) -> None:
        for _ in range(1 + int(self.rng.poisson(0.8)) if artefact != "edge" else 1):
            getattr(self, f"_{artefact}")()

    def _spline(self, length_um: float, *, in_tissue: bool) -> Points:
        """A cubic spline through five knots of a random walk, one point per px at least."""
        heading, step = self.rng.uniform(0, 2 * np.pi), length_um / self.mpp / 4
        turns = np.cumsum(self.rng.normal(0, 0.35, 4)) + heading
        walk = np.cumsum(
            np.stack([np.sin(turns), np.cos(turns)], axis=1) * step, axis=0
        )
        knots = np.concatenate([np.zeros((1, 2)), walk])
        knots += self.centre(in_tissue=in_tissue) - knots[2]
        return np.asarray(
            CubicSpline(np.arange(5), knots)(np.linspace(0, 4, int(4 * step) + 8))
        )

    def _splat(self, points: Points, radii_um: Light) -> Light:
        """Coverage in [0, 1] of discs along points, drawn at half the resolution."""
        canvas = Image.new("L", (self.shape[1] // 2 + 1, self.shape[0] // 2 + 1), 0)
        pen = ImageDraw.Draw(canvas)
        for (y, x), radius in zip(points / 2, radii_um / self.mpp / 2, strict=True):
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)
        large = canvas.resize(
            (canvas.width * 2, canvas.height * 2), Image.Resampling.BILINEAR
        )
        return np.asarray(large, np.float32)[: self.shape[0], : self.shape[1]] / 255

    def _fold(self) -> None:
        rng, width = self.rng, self.some(20, 220)
        path = self._spline(rng.uniform(300, 1500), in_tissue=True)
        taper = np.sin(np.linspace(0.25, np.pi - 0.25, len(path))) ** 0.4
        wobble = np.interp(
            np.arange(len(path)),
            np.arange(0, len(path), 12),
            rng.uniform(0.8, 1.2, len(range(0, len(path), 12))),
        )
        band = self._splat(path, width / 2 * taper * wobble)
        core = ndimage.gaussian_filter(band, self.some(1.5, 9) / self.mpp)
        shifts = [
            tuple((rng.normal(0, 45, 2) / self.mpp).astype(int)) for _ in range(2)
        ]
        layer = np.roll(self.light, shifts[0], axis=(0, 1)) ** rng.uniform(0.5, 1.3)
        if rng.random() < 0.35:  # three layers
            layer = layer * np.roll(self.light, shifts[1], axis=(0, 1)) ** rng.uniform(
                0.3, 1
            )
        soft = ndimage.gaussian_filter(
            layer, (rng.uniform(0, 2.5) / self.mpp,) * 2 + (0,)
        )
        before = self.light
        self.light = before * (1 - core[..., None] * (1 - soft))
        lost = ndimage.uniform_filter(
            (before - self.light).mean(axis=2), max(1, int(32 / self.mpp))
        )
        self.mark("fold", (band > 0.5) & (lost > max(0.04, 0.25 * lost.max())))

    def _blur(self) -> None:
        """A band that loses focus, by two box filters."""
        self.blur_um = self.blur_um or self.rng.uniform(0.5, 4.0)
        path = self._spline(min(self.shape) * self.mpp * 0.8, in_tissue=True)
        radius = min(self.shape) * self.mpp * self.rng.uniform(0.06, 0.16)
        band = ndimage.gaussian_filter(
            self._splat(path, np.full(len(path), radius)), 8 / self.mpp
        )
        soft, edge = (
            self.light,
            max(2, round(self.blur_um / self.mpp * 12**0.5 / 2**0.5)),
        )
        for _ in range(2):
            soft = ndimage.uniform_filter(soft, (edge, edge, 0))
        self.light = self.light * (1 - band[..., None]) + soft * band[..., None]
        self.mark("blur" if self.blur_um >= 1 else "slight_blur", band > 0.5)

    def _bubble(self) -> None:
        """A lens: magnified inside, light lost where its surface is steep."""
        rng, radius = self.rng, self.some(80, 800) / self.mpp
        y, x = np.mgrid[: self.shape[0], : self.shape[1]].astype(np.float32)
        row, column = self.centre(in_tissue=bool(rng.random() < 0.5))
        away = np.hypot(y - row, x - column) / radius
        away *= 1 + 0.05 * np.cos(
            rng.integers(2, 5) * np.arctan2(y - row, x - column) + rng.uniform(0, 6)
        )
        inside = away < 1
        bent = 1 - 0.25 * np.clip(1 - away**2, 0, 1)
        seen = [row + (y - row) * bent, column + (x - column) * bent]
        lens = [
            ndimage.map_coordinates(self.light[..., c], seen, order=1, mode="nearest")
            for c in range(3)
        ]
        steep = np.clip((away - 0.8) / 0.17, 0, 1) ** rng.uniform(1, 4) * rng.uniform(
            0.5, 0.95
        )
        glint = np.exp(-(((away - rng.uniform(0.6, 0.8)) / 0.05) ** 2)) * rng.uniform(
            0, 0.2
        )
        shown = np.stack(lens, axis=2) * (1 - steep[..., None])
        shown += (1 - shown) * glint[..., None]
        self.light = np.where(inside[..., None], shown, self.light).astype(np.float32)
        self.mark("bubble", inside)

    def _pen(self) -> None:
        rng, name = self.rng, str(self.rng.choice(INKS))
        name = "black" if self.stain == "grey" else name
        width = rng.uniform(120, 800)
        path = self._spline(
            width * rng.choice((0.02, 4.0, 12.0)), in_tissue=bool(rng.random() < 0.5)
        )
        if rng.random() < 0.3:
            path = np.concatenate(
                [path, path[0] + path[-1] - path[::-1]]
            )  # a closed loop
        fading = np.clip(
            np.linspace(rng.uniform(0.9, 1.6), rng.uniform(0.5, 1.2), len(path)), 0, 1
        )
        band = self._splat(path, width / 2 * (0.75 + 0.25 * fading))
        offsets = rng.normal(0, width / 3 / self.mpp, (int(rng.integers(0, 9)), 2))
        for offset in offsets:  # bristles that left the glass dry
            dry = self._splat(path + offset, np.full(len(path), rng.uniform(4, 12)))
            band = band * (1 - dry * rng.uniform(0, 0.9))
        band = ndimage.gaussian_filter(band, rng.choice((4.0, 12.0, 30.0)) / self.mpp)
        color = np.array(_MARKERS[name]) / 255 * rng.uniform(0.65, 1.4)
        if name != "black":
            color = color + rng.normal(0, 0.04, 3)
        deep = rng.uniform(0.6, 1.5) * (
            1 + 0.15 * self._waves(60)
        )  # Beer's law in the ink
        self.light = (
            self.light
            * np.clip(color, 0.02, 1).astype(np.float32) ** (band * deep)[..., None]
        )
        for mask in ("pen", f"pen_{name}"):
            self.mark(mask, band > 0.45)

    def _line(self, ends: Points, width_um: float, darkness: float) -> MaskArray:
        path = np.linspace(ends[0], ends[1], 2 * max(self.shape))
        band = self._splat(path, np.full(len(path), width_um / 2))
        self.cover((0.1, 0.1, 0.12), band * darkness)
        return np.asarray(band > 0.3)

    def _coverslip(self) -> None:
        """Two near parallel lines from side to side."""
        axis, at, lean = (
            self.rng.integers(2),
            self.rng.uniform(0.08, 0.92),
            self.rng.normal(0, 0.04),
        )
        ends = np.array([[at - lean, 0.0], [at + lean, 1.0]])
        ends = (ends if axis else ends[:, ::-1]) * self.shape
        gap = self.rng.uniform(20, 60) / self.mpp * np.array((1, 0) if axis else (0, 1))
        for offset, dark in ((0, 0.6), (1, 0.3)):
            width, strength = self.rng.uniform(8, 26), dark * self.rng.uniform(0.5, 1.3)
            self.mark("coverslip", self._line(ends + gap * offset, width, strength))

    def _dust(self) -> None:
        """Fibres, as dark curls, and grains."""
        for _ in range(int(self.rng.integers(2, 12))):
            length = self.rng.choice((10.0, 40.0, 300.0))
            path = self._spline(length, in_tissue=False)
            band = self._splat(path, np.full(len(path), self.rng.uniform(5, 22)))
            self.cover(self.rng.uniform(0.1, 0.5, 3), band * self.rng.uniform(0.4, 1))
            self.mark("dust", band > 0.3)

    def _edge(self) -> None:
        """A slanted corner of the glass, dark gray outside."""
        y, x = np.mgrid[: self.shape[0], : self.shape[1]].astype(np.float32)
        slant, side = self.rng.normal(0, 0.015), self.rng.integers(4)
        ruler = (y, x, self.shape[0] - y, self.shape[1] - x)[side] + slant * (
            x,
            y,
            x,
            y,
        )[side]
        away = ruler * self.mpp - self.rng.uniform(60, 350)
        tone = self.rng.uniform(0.1, 0.8)
        shade = np.where(away < 0, tone, np.clip(0.3 + away / 25, 0, 1))
        self.light *= shade[..., None].astype(np.float32)
        self.mark("edge", shade < 0.9)

    def photograph(self) -> RgbArray:
        """Vignetting, photon noise, and JPEG twice, as of a converted file."""
        rng = self.rng
        glass = np.array((0.94, 0.935, 0.95)) + rng.normal(0, 0.015)
        light = self.light * np.clip(glass, 0, 1).astype(np.float32)
        if self.stain == "tiled":
            stripe = max(8, int(rng.uniform(300, 800) / self.mpp))
            columns = self.shape[1] // stripe + 1
            gains = (1 + rng.uniform(-0.06, 0.03, (columns, 3))).repeat(stripe, axis=0)
            light = light * gains[: self.shape[1]].astype(np.float32)
        photons = self.some(200, 10_000)
        noise = rng.standard_normal(light.shape, dtype=np.float32)
        light = light + noise * np.sqrt(np.clip(light, 0, 1) / photons).astype(
            np.float32
        )
        if self.stain == "grey":
            light[:] = light.mean(axis=2, keepdims=True)
        once = jpeg(light, int(rng.integers(70, 98)))
        return jpeg(once.astype(np.float32) / 255, int(rng.integers(35, 90)))
