"""Generator A: slides with artefacts on which checks are tuned and pixel models are trained.

Tissue is noise fields of several scales with nuclei splatted on; artefacts are bands around
polylines (distance transforms), discs and ramps; stains are optical densities of drawn vectors.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from thinsection.types import RgbArray, Size
from training.artefact_slide import (
    ARTEFACTS,
    INKS,
    ArtefactSlide,
    Light,
    Scene,
    jpeg,
)

_HAEMATOXYLIN, _EOSIN, _DAB = (0.65, 0.70, 0.29), (0.10, 0.98, 0.20), (0.27, 0.57, 0.78)
_BLOOD = (0.15, 0.80, 0.60)
_STRENGTH = {"dark": (1.5, 4.0), "faint": (0.22, 0.4), "grey": (0.5, 2.5)}
_INK_LIGHT = {  # transmitted by a dense layer, lowest and highest
    "blue": ((0.02, 0.08, 0.35), (0.30, 0.45, 0.85)),
    "green": ((0.02, 0.28, 0.15), (0.35, 0.72, 0.60)),
    "red": ((0.55, 0.02, 0.05), (0.95, 0.30, 0.35)),
    "black": ((0.02, 0.02, 0.02), (0.40, 0.40, 0.40)),
    "brown": ((0.30, 0.14, 0.02), (0.60, 0.38, 0.16)),
}
# texture -> nuclei per 1000 µm², share of fat, length of fibres over width, share of epithelium
_TEXTURES = {
    **{"dense": (3.5, 0.0, 1.5, 0.6), "fatty": (0.6, 0.6, 2.0, 0.1)},
    **{"stroma": (1.2, 0.05, 6.0, 0.2), "lymphoid": (8.0, 0.0, 1.0, 0.2)},
}


def tuning_slide(
    seed: int,
    *,
    size: Size = (2400, 1800),
    mpp: float = 2.0,
    stain: str | None = None,
    artefacts: Sequence[str] | None = None,
    base: RgbArray | None = None,
) -> ArtefactSlide:
    """Slide `seed` of generator A; a stain or artefacts that are not given are drawn.

    Args:
        size: (width, height) in px of `mpp`.
        base: a real picture of H&E at `mpp`, mirrored to that size, in place of generated tissue.
        artefacts: of `ARTEFACTS`; None draws each with a chance of one half.

    Memory: about 60 bytes per px.
    """
    scene = TuningScene(seed, size, mpp, stain if base is None else "he")
    scene.base = base
    drawn = [name for name in ARTEFACTS if scene.rng.random() < 0.5]
    return scene.slide(drawn if artefacts is None else artefacts)


class TuningScene(Scene):
    """Scene of generator A; the scenes of the training draw with other bounds."""

    stream = 1
    base: RgbArray | None = None
    # µm, lowest and highest
    pen_um: tuple[float, float] = (90, 700)
    bubble_um: tuple[float, float] = (100, 700)
    fold_um: tuple[float, float] = (30, 180)

    def draw_tissue(self) -> None:
        if self.base is None:
            self._invent_tissue()
            return
        height, width = self.shape
        more = (0, height - len(self.base)), (0, width - self.base.shape[1]), (0, 0)
        picture = np.pad(
            self.base, [(low, max(0, high)) for low, high in more], "symmetric"
        )
        light = picture[:height, :width] / np.percentile(self.base, 99, axis=(0, 1))
        self.light = np.clip(light, 0.004, 1).astype(np.float32)
        seen = ndimage.uniform_filter(
            1 - self.light.mean(axis=2), max(1, int(24 / self.mpp))
        )
        self.masks["tissue"] = seen > 0.06

    def _invent_tissue(self) -> None:
        rng = self.rng
        span = min(self.shape) * self.mpp
        outline = self.noise(span / 8) + 0.25 * self.noise(span / 40)
        empty = rng.uniform(0.25, 0.6) if rng.random() < 0.8 else rng.uniform(0.7, 0.99)
        outline -= np.float32(np.quantile(outline, empty))
        solid = self.masks["tissue"] = outline > 0.04
        name = str(rng.choice(list(_TEXTURES)))
        per_area, fat, stretch, epithelium = _TEXTURES[name]
        density = np.clip(outline * 12, 0, 1) * (1 + 0.12 * self.noise(90))
        glands = (
            np.clip(1.5 - np.abs(self.noise(self.some(40, 160))) * 3, 0, 1) * epithelium
        )
        fibres = self.noise(4, stretch) * 0.18 + self.noise(14, stretch) * 0.12
        matrix = density * np.clip(1 + fibres - 0.5 * glands, 0.1, None)
        strips = np.clip(
            1.2 - np.abs(self.noise(self.some(60, 200))) * rng.uniform(4, 20), 0, 1
        )
        cellular = glands + strips * rng.uniform(0, 2.5) * (rng.random() < 0.5)
        nuclei = self._nuclei(per_area, cellular, solid) * density
        fine = self.mpp < 1.5  # what only a fine image shows
        if fine:
            matrix *= 1 + 0.35 * self.noise(0.6) + 0.3 * self.noise(1.5, stretch)
            matrix *= np.clip(np.abs(self.noise(9, stretch)) * 12 - 0.3, 0, 1)  # clefts
            nuclei *= 1 + 0.3 * self.noise(0.6)
        fatty = (
            self.noise(300) > np.quantile(rng.standard_normal(400), 1 - fat)
            if fat
            else solid & 0
        )
        walls = np.abs(self.noise(35)) < 0.16
        holes = (fatty & ~walls) | (self.noise(25) > 2.6)
        seen = ndimage.gaussian_filter(
            np.where(holes, 0.02, 1).astype(np.float32), (0.4 if fine else 2) / self.mpp
        )
        low, high = _STRENGTH.get(self.stain, (0.6, 2.0))
        strength = self.some(low, high)
        first, second = self._vectors()
        brown = (
            np.clip(self.noise(120) * 2 + rng.uniform(-2, 3), 0, 1)
            if self.stain == "ihc"
            else 0
        )
        optical = np.multiply.outer(nuclei * 1.5 + glands * density * 0.25, first)
        eosin = matrix * (0.12 if self.stain == "ihc" else 0.42)
        optical += np.multiply.outer(eosin, second)
        blood = (
            (self.noise(self.some(20, 80)) > rng.uniform(1.6, 3))
            * matrix
            * rng.uniform(0.5, 1.6)
        )
        if self.stain not in ("ihc", "grey"):
            optical += np.multiply.outer(blood, self._vary(_BLOOD))
        browned = (
            self.some(0.4, 1.8) * brown * (density * rng.uniform(0.6, 1) + 0.5 * nuclei)
        )
        optical += np.multiply.outer(browned, self._vary(_DAB))
        self.light = np.exp(-optical * (strength * seen)[..., None]).astype(np.float32)
        if self.stain == "dark":
            self.light *= np.asarray(
                rng.uniform(0.6, 0.85) * rng.uniform(0.93, 1, 3), np.float32
            )

    def _vary(self, vector: tuple[float, float, float], by: float = 0.12) -> Light:
        moved = np.clip(np.array(vector) + self.rng.normal(0, by / 2, 3), 0.02, None)
        return np.asarray(
            moved / np.linalg.norm(moved) * self.rng.uniform(0.8, 1.3), np.float32
        )

    def _vectors(self) -> tuple[Light, Light]:
        """Optical densities of nuclei and matrix."""
        if self.stain == "grey":
            return np.full(3, 0.5, np.float32), np.full(3, 0.4, np.float32)
        second = _HAEMATOXYLIN if self.stain == "ihc" else _EOSIN
        first, second_vector = self._vary(_HAEMATOXYLIN), self._vary(second)
        purple = self.rng.uniform(0, 0.7) * (
            self.rng.random() < 0.6
        )  # eosin is rarely alone
        return first, second_vector * (1 - purple) + first * purple

    def _nuclei(
        self, per_area: float, glands: Light, where: npt.NDArray[np.bool_]
    ) -> Light:
        """Nuclei of about 7 µm, clustered in glands, [0, 1]."""
        chance = (
            per_area * self.mpp**2 / 1000 * (0.4 + 1.6 * glands + 0.3 * self.noise(60))
        )
        spots = (self.rng.random(self.shape, dtype=np.float32) < chance) & where
        sigma = self.rng.uniform(1.8, 3.0) / self.mpp
        spread = ndimage.gaussian_filter(spots.astype(np.float32), sigma)
        filled = spread * (2 * np.pi * sigma**2 + 1) - 0.3
        sharp = (
            5.0 if self.mpp < 1.5 else 1.0
        )  # the border of a nucleus is half a µm wide
        return np.asarray(np.clip((filled - 0.2) * sharp + 0.2, 0, 1))

    def draw(self, artefact: str) -> None:
        times = (
            int(self.rng.integers(1, 4))
            if artefact in ("fold", "pen", "blur", "bubble")
            else 1
        )
        for _ in range(times):
            getattr(self, f"_{artefact}")()

    def _path(
        self, in_tissue: bool, length_um: float, bend: float
    ) -> npt.NDArray[np.float64]:
        """Points (N, 2) of a bent line through a px."""
        angle, t = self.rng.uniform(0, 2 * np.pi), np.linspace(-0.5, 0.5, 200)
        length = length_um / self.mpp
        side = (
            bend * length * np.cos(2 * np.pi * t * self.rng.uniform(0.4, 1.4) + angle)
        )
        along = np.array([np.sin(angle), np.cos(angle)])
        across = along[::-1] * (1, -1)
        return (
            self.centre(in_tissue=in_tissue)
            + np.outer(t * length, along)
            + np.outer(side, across)
        )

    def _distance(self, path: npt.NDArray[np.float64]) -> Light:
        """µm from each px to a line, on a grid of 8 µm at most."""
        step = max(1, int(8 / self.mpp))
        height, width = (edge // step + 2 for edge in self.shape)
        line = np.ones((height, width), bool)
        fine = [
            np.interp(np.linspace(0, 199, 4000), np.arange(200), path[:, c])
            for c in (0, 1)
        ]
        rows, columns = (np.rint(values / step).astype(int) for values in fine)
        inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
        if not inside.any():
            return np.full(self.shape, 1e6, np.float32)
        line[rows[inside], columns[inside]] = False
        return self.stretched(
            ndimage.distance_transform_edt(line).astype(np.float32), step
        ) * (step * self.mpp)

    def _fold(self) -> None:
        width, rng = self.some(*self.fold_um), self.rng
        distance = self._distance(
            self._path(True, width * rng.uniform(5, 14), rng.uniform(0, 0.15))
        )
        distance = distance * (1 + 0.12 * self.noise(width))
        inside = np.clip((width / 2 - distance) / (4 + 0.05 * width) + 0.5, 0, 1)
        rim = np.exp(-(((distance - width / 2) / (4 + width / 14)) ** 2)) * rng.uniform(
            0, 0.5
        )
        optical = -np.log(np.clip(self.light, 0.01, 1))
        dy, dx = (rng.integers(10, 60, 2) / self.mpp).astype(int)
        second = np.roll(optical, (dy, dx), axis=(0, 1)) * rng.uniform(0.7, 1.6)
        added = (second * inside[..., None] + optical * rim[..., None]) * rng.uniform(
            0.8, 1.1
        )
        self.light = np.exp(-optical - added)
        seen = ndimage.uniform_filter(added.mean(axis=2), max(1, int(40 / self.mpp)))
        band = (inside > 0.5) & self.masks["tissue"]
        usual = float(np.median(seen[band])) if band.any() else 0.0
        self.mark("fold", band & (seen > max(0.05, 0.4 * usual)))

    def _blur(self) -> None:
        self.blur_um = self.blur_um or self.some(0.25, 4.0)  # 0.5 to 8 px at 0.5 µm/px
        span = min(self.shape) * self.mpp
        radius = span * self.rng.uniform(0.08, 0.25)
        y, x = np.ogrid[: self.shape[0], : self.shape[1]]
        row, column = self.centre(in_tissue=True)
        distance = (
            np.hypot(y - row, x - column)
            * self.mpp
            * (1 + 0.15 * self.noise(span / 12))
        )
        inside = np.clip((radius - distance) / 12 + 0.5, 0, 1)[..., None].astype(
            np.float32
        )
        sigma = self.blur_um / self.mpp
        soft = ndimage.gaussian_filter(self.light, (sigma, sigma, 0))
        self.light = self.light * (1 - inside) + soft * inside
        self.mark("blur" if self.blur_um >= 1 else "slight_blur", inside[..., 0] > 0.5)

    def _bubble(self) -> None:
        rng, radius = self.rng, self.some(*self.bubble_um)
        y, x = np.ogrid[: self.shape[0], : self.shape[1]]
        row, column = self.centre(in_tissue=bool(rng.random() < 0.5))
        dy, dx, flat = (
            (y - row) * self.mpp,
            (x - column) * self.mpp,
            rng.uniform(0.8, 1.25),
        )
        distance = np.hypot(dy * flat, dx / flat).astype(np.float32)
        rim = rng.uniform(8, 30)
        dark = np.exp(-(((distance - radius) / rim) ** 2)) * rng.uniform(0.35, 0.85)
        bright = np.exp(-(((distance - radius + 2.2 * rim) / rim) ** 2)) * rng.uniform(
            0.05, 0.3
        )
        inside = distance < radius + rim
        tone = np.asarray(rng.uniform(0.94, 1.04, 3), np.float32)
        self.light = np.where(
            inside[..., None], self.light ** rng.uniform(0.7, 1) * tone, self.light
        )
        self.light = self.light * (1 - dark[..., None]) + bright[..., None] * (
            1 - self.light
        )
        self.mark("bubble", inside)

    def _pen(self) -> None:
        rng, name = self.rng, str(self.rng.choice(INKS))
        name = "black" if self.stain == "grey" else name
        ink = rng.uniform(*_INK_LIGHT[name])
        if name == "black":
            ink = ink.mean() * (
                1 + rng.uniform(-0.3, 0.3) * np.array((1, 0, -1))
            )  # warm or cold
        width, kind = self.some(*self.pen_um), rng.choice(("line", "ring", "dot"))
        path = self._path(bool(rng.random() < 0.5), width * rng.uniform(3, 12), 0.15)
        if kind == "ring":
            t, middle = np.linspace(0, rng.uniform(5, 6.6), 200), path[100]
            radii = width * rng.uniform(1, 4, 2) / self.mpp
            path = middle + np.stack(
                [radii[0] * np.sin(t), radii[1] * np.cos(t)], axis=1
            )
        elif kind == "dot":
            path = np.repeat(path[100:101], 200, axis=0)
        distance = self._distance(path) * (1 + 0.12 * self.noise(60))
        soft = self.some(6, 60) * (width > 200) + 6
        opacity = np.clip((width / 2 - distance) / soft + 0.5, 0, 1)
        streaks = self.noise(self.some(5, 25), self.some(6, 20))
        if (dry := rng.random()) < 0.4:  # thin lines without ink
            thin = np.abs(streaks) * rng.uniform(0.1, 0.6)
            opacity = opacity * np.clip(rng.uniform(0.85, 1.2) - thin, 0.03, 1)
        elif dry < 0.65:  # a dry pen leaves ink in lines only
            opacity = opacity * np.clip(streaks * 2 + rng.uniform(-0.3, 2), 0.02, 1)
        self.cover(ink, opacity * rng.uniform(0.75, 1))
        for mask in ("pen", f"pen_{self.ink_class(name, ink)}"):
            self.mark(mask, opacity > 0.5)

    def ink_class(self, name: str, light: npt.NDArray[np.float64]) -> str:
        """Class of an ink that was drawn by the bounds of a name."""
        return name

    def _coverslip(self) -> None:
        angle = self.rng.choice((0, np.pi / 2)) + self.rng.normal(0, 0.08)
        y, x = np.ogrid[: self.shape[0], : self.shape[1]]
        row, column = self.centre(in_tissue=False)
        distance = ((x - column) * np.cos(angle) + (y - row) * np.sin(angle)) * self.mpp
        width = self.rng.uniform(6, 20)
        dark = np.exp(-((distance / width) ** 2)) * self.rng.uniform(0.25, 0.75)
        self.cover((0, 0, 0), dark.astype(np.float32))
        self.mark("coverslip", np.abs(distance) < 1.2 * width)

    def _dust(self) -> None:
        seen = np.zeros(self.shape, np.float32)
        y, x = np.ogrid[: self.shape[0], : self.shape[1]]
        for _ in range(int(self.rng.integers(3, 30))):
            row, column = self.centre(in_tissue=bool(self.rng.random() < 0.2))
            distance = (
                np.hypot(y - row, (x - column) * self.rng.uniform(0.6, 1.6)) * self.mpp
            )
            soft = np.clip((self.some(8, 40) - distance) / self.some(4, 12) + 0.5, 0, 1)
            seen = np.maximum(seen, soft * self.rng.uniform(0.3, 1))
        self.cover(np.repeat(self.rng.uniform(0.05, 0.4), 3), seen)
        self.mark("dust", seen > 0.2)

    def _edge(self) -> None:
        """The slide's own edge along a side: a dark band, then gray."""
        width = self.some(40, 300)
        side = int(self.rng.integers(4))
        ramp = np.arange(self.shape[side % 2])[:: 1 if side < 2 else -1] * self.mpp
        tone, soft = self.rng.uniform(0.05, 0.7), self.some(30, 300)
        shade = np.clip(tone + (ramp - width) / soft, tone, 1).astype(np.float32)
        shade = np.broadcast_to(
            shade[:, None] if side % 2 == 0 else shade[None], self.shape
        )
        self.cover(self.rng.uniform(0, 0.06, 3), 1 - shade)
        self.mark("edge", shade < 0.9)

    def photograph(self) -> RgbArray:
        rng = self.rng
        gain = np.repeat(rng.uniform(0.88, 0.99), 3) * rng.uniform(0.97, 1.0, 3)
        if self.stain == "tiled":
            tile = max(8, int(self.some(250, 700) / self.mpp))
            rows, columns = (edge // tile + 1 for edge in self.shape)
            gains = rng.uniform(0.94, 1.02, (rows, columns, 1)) * rng.uniform(
                0.98, 1.02, (rows, columns, 3)
            )
            whole = gains.repeat(tile, axis=0).repeat(tile, axis=1)
            self.light *= whole[: self.shape[0], : self.shape[1]].astype(np.float32)
        light = self.light * gain.astype(np.float32)
        light += rng.standard_normal(light.shape, dtype=np.float32) * rng.uniform(
            0, 0.015
        )
        if self.stain == "grey":
            light[:] = light.mean(axis=2, keepdims=True)
        return jpeg(light, int(rng.integers(30, 96)))
