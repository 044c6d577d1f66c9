"""Scenes of the training: tissue of three kinds, biology that looks like artefacts, artefacts.

Tissue is generator A's, or the layout of a real section in invented stains, or real light. Folds
are layers of the tissue itself, mirrored at a bent line. Smears, shades and tints of the mounting
medium lie on the glass and are no class of their own.
"""

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from thinsection.types import RgbArray, Size
from training.artefact_slide import ArtefactSlide, Light
from training.lookalikes import LOOKALIKES
from training.real_tissue import REGIONS, Layout
from training.tuning_slide import TuningScene

_BLOOD = (0.18, 0.82, 0.55)
# Artefacts in the order in which they are drawn, and the chance of each.
_CHANCES = {
    "fold": 0.6,
    "bubble": 0.4,
    "coverslip": 0.3,
    "pen": 0.5,
    "dust": 0.4,
    "edge": 0.25,
}


def training_slide(
    seed: int,
    *,
    size: Size,
    mpp: float,
    layouts: list[Layout],
    pictures: tuple[RgbArray, ...],
) -> ArtefactSlide:
    """Slide `seed` of the training; its masks `like_<name>` are look-alikes, which are tissue.

    Args:
        seed: of all that is drawn.
        size: (width, height) in pixels of `mpp`.
        mpp: µm per pixel.
        layouts: real sections at 4 µm/px.
        pictures: real light at about 4 µm/px.

    Memory: about 80 bytes per pixel.
    """
    scene = TrainingScene(seed, size, mpp, None)
    scene.layouts = layouts
    scene.pictures = pictures
    chosen = [name for name, chance in _CHANCES.items() if scene.rng.random() < chance]
    return scene.slide(chosen)


class TrainingScene(TuningScene):
    """See `training_slide`."""

    stream = 4
    layouts: list[Layout]
    pictures: tuple[RgbArray, ...]
    pen_um = (60, 1800)
    bubble_um = (60, 2200)
    fold_um = (18, 220)

    def draw_tissue(self) -> None:
        kind = self.rng.choice(("invented", "layout", "picture"), p=(0.35, 0.47, 0.18))
        if kind == "invented" or not self.layouts:
            super().draw_tissue()
        elif kind == "layout":
            self._stain_layout()
        else:
            self._cut_picture()
        self._smear_glass()
        for name in LOOKALIKES:
            if self.rng.random() < 0.16 and self.masks["tissue"].any():
                self.mark(f"like_{name}", LOOKALIKES[name](self))

    def _stain_layout(self) -> None:
        """A part of a real section, turned and scaled, in stains of its own."""
        rng = self.rng
        weights = (
            np.array([layout.nuclei.size for layout in self.layouts], float) ** 0.5
        )
        layout = self.layouts[rng.choice(len(weights), p=weights / weights.sum())]
        nuclei, regions = self._part_of(layout)
        solid = regions > 0
        self.masks["tissue"] = solid
        first, second = self._vectors()
        amounts = {
            "stroma": self.some(0.2, 0.8),
            "epithelium": self.some(0.12, 0.6),
            "fat": 0.0,
            "blood": self.some(0.05, 0.4),
            "necrosis": self.some(0.25, 0.8),
            "fluid": self.some(0.03, 0.2),
        }
        amount = np.array([amounts.get(name, 0.0) for name in REGIONS], np.float32)
        matrix = ndimage.gaussian_filter(amount[regions], 4 / self.mpp)
        strands = self.noise(4, self.some(1, 5)) * 0.15 + self.noise(25, 2) * 0.12
        is_stroma = regions == REGIONS.index("stroma")
        matrix *= np.where(is_stroma, 1 + strands, 1 + 0.1 * self.noise(5)).clip(0.05)
        walls = np.clip(1.3 - np.abs(self.noise(self.some(25, 45))) / 0.14, 0, 1)
        is_fat = regions == REGIONS.index("fat")
        matrix = np.where(is_fat, walls * self.some(0.15, 0.5), matrix)
        nuclear = nuclei * self.some(0.7, 2.2) * np.where(is_fat, 0.5, 1)
        optical = np.multiply.outer(nuclear, first)
        optical += np.multiply.outer(matrix, second)
        is_blood = (regions == REGIONS.index("blood")).astype(np.float32)
        blood = ndimage.gaussian_filter(is_blood, 6 / self.mpp) * self.some(0.3, 1.8)
        if self.stain not in ("ihc", "grey"):
            optical += np.multiply.outer(blood, self._vary(_BLOOD))
        thick = 1 + 0.12 * self.noise(400) + 0.06 * self.noise(60)
        strength = {"dark": (1.5, 3.5), "faint": (0.25, 0.5)}.get(
            self.stain, (0.6, 1.9)
        )
        optical *= (self.some(*strength) * thick.clip(0.4))[..., None]
        self.light = np.exp(-optical).astype(np.float32)

    def _part_of(self, layout: Layout) -> tuple[Light, npt.NDArray[np.uint8]]:
        """Nuclei and regions of a part that has tissue; borders are warped a little."""
        rng = self.rng
        height, width = self.shape
        zoom = self.some(0.7, 1.6) * self.mpp / 4.0
        rows, columns = layout.regions.shape
        turn = rng.uniform(0, 2 * np.pi)
        y, x = np.mgrid[:height, :width].astype(np.float32)
        y = (y - height / 2) * zoom + 3 * self.noise(25)
        x = (x - width / 2) * zoom + 3 * self.noise(25)
        if rng.random() < 0.5:
            x = -x
        for _ in range(12):
            middle = rng.uniform(0.05, 0.95, 2) * (rows, columns)
            from_y = middle[0] + y * np.cos(turn) - x * np.sin(turn)
            from_x = middle[1] + y * np.sin(turn) + x * np.cos(turn)
            # at the border of a small section, its mirror image
            places = [_mirrored(from_y, rows), _mirrored(from_x, columns)]
            if rows * columns > 4_000_000:
                places = [from_y, from_x]
            regions = ndimage.map_coordinates(layout.regions, places, order=0)
            if (regions > 0).mean() > rng.uniform(0.1, 0.5):
                break
        nuclei = ndimage.map_coordinates(layout.nuclei, places, order=1)
        return np.asarray(nuclei, np.float32), np.asarray(regions)

    def _cut_picture(self) -> None:
        """Real light, mirrored to the size of the scene, cut into pieces on glass."""
        rng = self.rng
        picture = self.pictures[rng.integers(len(self.pictures))]
        height, width = self.shape
        light = picture / np.percentile(picture, 99, axis=(0, 1))
        density = _restained(-np.log(light.clip(0.01, 1)), rng)
        zoom = self.some(0.6, 1.8)
        y, x = np.mgrid[:height, :width].astype(np.float32)
        turn = rng.uniform(0, 2 * np.pi)
        from_y = (y * np.cos(turn) - x * np.sin(turn)) * zoom
        from_x = (y * np.sin(turn) + x * np.cos(turn)) * zoom
        places = [
            _mirrored(from_y, picture.shape[0]),
            _mirrored(from_x, picture.shape[1]),
        ]
        planes = [
            ndimage.map_coordinates(density[..., c], places, order=1) for c in range(3)
        ]
        whole = np.stack(planes, axis=2)
        outline = self.noise(self.some(300, 900)) + 0.2 * self.noise(60)
        piece = outline > np.quantile(outline, rng.uniform(0.02, 0.6))
        soft = ndimage.gaussian_filter(piece.astype(np.float32), 8 / self.mpp)
        seen = ndimage.uniform_filter(whole.mean(axis=2), max(1, int(24 / self.mpp)))
        self.masks["tissue"] = piece & (seen > 0.05)
        self.light = np.exp(-whole * soft[..., None]).astype(np.float32)

    def _smear_glass(self) -> None:
        """Haze, streaks, shades and tints that lie on the glass."""
        rng = self.rng
        haze: Light = np.zeros(self.shape, np.float32)
        if rng.random() < 0.35:
            along = self.some(1, 12)
            streaks = self.noise(self.some(15, 150), along)
            haze = (streaks - rng.uniform(-0.3, 1.5)).clip(0, 2) * self.some(0.02, 0.12)
        if rng.random() < 0.25:
            # beside the edge of the coverslip, or of a drop of medium
            side = self.noise(self.some(500, 3000))
            edge = (side * self.some(2, 40) + rng.normal(0, 1)).clip(0, 1)
            haze = haze + edge * self.some(0.02, 0.12)
        if not haze.any():
            return
        tint = self._vary((0.5, 0.65, 0.55), 0.4)
        if self.stain == "grey":
            tint[:] = tint.mean()
        self.light *= np.exp(-np.multiply.outer(haze, tint))

    def draw(self, artefact: str) -> None:
        if artefact == "fold" and self.rng.random() < 0.75:
            self._mirror_folds()
        elif artefact == "dust" and self.rng.random() < 0.6:
            self._fibre()
        elif artefact == "bubble" and self.rng.random() < 0.5:
            self._uneven_bubbles()
        else:
            super().draw(artefact)

    def ink_class(self, name: str, light: npt.NDArray[np.float64]) -> str:
        """The colour that an ink shows, which may be another than the name of its bounds."""
        red, green, blue = (float(value) for value in light)
        if name == "black" or max(light) - min(light) < 0.1:
            return "black"
        if green > max(red, blue):
            return "green"
        if blue > red:
            return "blue"
        return "brown" if red < 0.62 and green > blue + 0.04 else "red"

    def _mirror_folds(self) -> None:
        """One fold, or wrinkles side by side."""
        rng = self.rng
        if not self.masks["tissue"].any():
            return
        count = 1 if rng.random() < 0.55 else int(rng.integers(2, 7))
        width = self.some(*self.fold_um)
        if count > 1:
            width = min(width, 70.0)
        length = width * rng.uniform(6, 30)
        path = self._path(True, length, rng.uniform(0, 0.25))
        along = path[-1] - path[0]
        normal = along[::-1] * (1, -1) / (np.linalg.norm(along) + 1e-6)
        layers = 3 if rng.random() < 0.7 else 2
        tears = rng.random() < 0.2
        for number in range(count):
            shift = number * width * rng.uniform(1.2, 4) / self.mpp
            self._mirror_fold(
                path + normal * shift,
                width * rng.uniform(0.7, 1.3),
                layers=layers,
                tears=tears,
            )

    def _mirror_fold(
        self, path: npt.NDArray[np.float64], width: float, *, layers: int, tears: bool
    ) -> None:
        """A band in which the tissue lies in two or three layers, the second mirrored."""
        rng = self.rng
        step = max(1, int(4 / self.mpp))
        height, width_px = self.shape
        rows = height // step + 1
        columns = width_px // step + 1
        steps = np.linspace(0, len(path) - 1, 3000)
        fine = np.stack(
            [np.interp(steps, np.arange(len(path)), path[:, c]) for c in (0, 1)], axis=1
        )
        grid = np.rint(fine / step).astype(int)
        inside = (grid >= 0).all(axis=1) & (grid < (rows, columns)).all(axis=1)
        if inside.sum() < 10:
            return
        place = np.full((rows, columns), -1, np.int64)
        place[grid[inside, 0], grid[inside, 1]] = np.flatnonzero(inside)
        away, nearest = ndimage.distance_transform_edt(place < 0, return_indices=True)
        # only pixels near the line are changed
        reach = np.argwhere(away * step * self.mpp < width)
        (top, left), (bottom, right) = reach.min(axis=0), reach.max(axis=0) + 1
        part = np.s_[top * step : bottom * step, left * step : right * step]
        y, x = np.mgrid[part].astype(np.float64)
        y, x = y[:height, :width_px], x[:height, :width_px]
        keep = (y < height) & (x < width_px)
        shape = (int(keep[:, 0].sum()), int(keep[0].sum()))
        y, x = y[: shape[0], : shape[1]], x[: shape[0], : shape[1]]
        part = np.s_[
            top * step : top * step + shape[0], left * step : left * step + shape[1]
        ]
        at = place[nearest[0], nearest[1]]
        at = at[(y // step).astype(int), (x // step).astype(int)]
        tangent = np.gradient(fine, axis=0)
        tangent /= np.linalg.norm(tangent, axis=1, keepdims=True) + 1e-9
        normal = np.stack([tangent[:, 1], -tangent[:, 0]], axis=1)[at]
        side = (y - fine[at, 0]) * normal[..., 0] + (x - fine[at, 1]) * normal[..., 1]
        side_um = side * self.mpp
        t = at / len(fine)
        # px beyond the ends of the line lie beside no fold
        beyond = np.hypot(y - fine[at, 0], x - fine[at, 1]) > np.abs(side) + 3
        taper = np.sin(np.pi * t.clip(0.02, 0.98)) ** rng.uniform(0.2, 0.8)
        rough = 1 + 0.15 * self.noise(width)[part]
        half = width / 2 * taper * rough
        soft_um = self.some(3, 14)
        band = ((half - np.abs(side_um)) / soft_um + 0.5).clip(0, 1) * ~beyond
        density = -np.log(self.light.clip(0.004, 1))
        added = np.zeros((*shape, 3), np.float32)
        # µm of blur: the layers lie above the plane of focus
        blur = rng.uniform(0, 10) / self.mpp
        mirrored = [y - 2 * side * normal[..., 0], x - 2 * side * normal[..., 1]]
        shifted = [
            y + width / self.mpp * normal[..., 0],
            x + width / self.mpp * normal[..., 1],
        ]
        for places in (mirrored, shifted)[: layers - 1]:
            amount = rng.uniform(0.7, 1.15)
            for c in range(3):
                layer = ndimage.map_coordinates(
                    density[..., c], places, order=1, mode="nearest"
                )
                added[..., c] += amount * ndimage.gaussian_filter(layer, blur)
        rim = np.exp(-(((np.abs(side_um) - half) / (3 + width / 20)) ** 2)) * ~beyond
        added += density[part] * (rim * rng.uniform(0, 0.4))[..., None]
        added *= np.maximum(band, 0.3 * rim)[..., None]
        if tears:
            # beside the fold, tissue is pulled away
            gap_um = rng.uniform(0.15, 0.6) * width
            gap = ((side_um - half) > 0) & (side_um - half < gap_um * taper) & ~beyond
            density[part] *= (
                1
                - 0.97
                * ndimage.gaussian_filter(gap.astype(np.float32), 3 / self.mpp)[
                    ..., None
                ]
            )
            self.masks["tissue"][part] &= ~gap
        density[part] += added
        before = self.light[part].mean(axis=2)
        self.light[part] = np.exp(-density[part])
        lost = added.mean(axis=2)
        own = (density[part] - added).mean(axis=2)
        near = max(1, int(30 / self.mpp))
        gain = ndimage.uniform_filter(lost * (band > 0.5), near)
        base = ndimage.uniform_filter(own * (band > 0.5), near)
        seen = (gain > 0.4 * base) & (before > 0)
        dense = ndimage.uniform_filter((own > 0.04).astype(np.float32), near) > 0.35
        inside = np.zeros(self.shape, bool)
        inside[part] = band > 0.5
        visible = np.zeros(self.shape, bool)
        visible[part] = seen & dense
        self.mark("fold", inside & visible & self.masks["tissue"])
        # layers of fat and of glass show no fold
        self.mark("unsure", inside & ~visible)

    def _uneven_bubbles(self) -> None:
        """Bubbles that are not round, with rims that are dark on one side, alone or in groups."""
        rng = self.rng
        count = 1 if rng.random() < 0.6 else int(rng.integers(2, 7))
        middle = self.centre(in_tissue=bool(rng.random() < 0.5))
        radius = self.some(*self.bubble_um)
        if count > 1:
            radius = min(radius, 500.0)
        y, x = np.ogrid[: self.shape[0], : self.shape[1]]
        for _ in range(count):
            size = radius * rng.uniform(0.4, 1)
            away = rng.normal(0, 1.5 * radius / self.mpp, 2) * (count > 1)
            row, column = middle + away
            dy = (y - row) * self.mpp
            dx = (x - column) * self.mpp
            angle = np.arctan2(dy, dx).astype(np.float32)
            round_ = 1 + rng.uniform(0, 0.2) * np.cos(2 * angle + rng.uniform(0, 6))
            round_ += rng.uniform(0, 0.08) * np.cos(3 * angle + rng.uniform(0, 6))
            round_ += rng.uniform(0, 0.05) * np.cos(5 * angle + rng.uniform(0, 6))
            distance = np.hypot(dy, dx).astype(np.float32) / round_
            rim = min(self.some(5, 40), size / 3)
            turned = np.cos(angle - rng.uniform(0, 2 * np.pi))
            dark = 1 - rng.uniform(0, 0.8) * (0.5 + 0.5 * turned)
            dark = dark * rng.uniform(0.3, 0.95)
            # the outer side of a rim is sharp, its inner side fades
            inner = np.exp(-np.maximum(size - distance, 0) / rim)
            shade = np.where(distance < size, inner, 0) * dark
            shade = ndimage.gaussian_filter(shade.astype(np.float32), 3 / self.mpp)
            glint = np.exp(-(((distance - size + 2.5 * rim) / rim) ** 2))
            glint = glint * rng.uniform(0, 0.4) * (0.5 - 0.5 * turned)
            self.light *= 1 - shade[..., None]
            self.light += (1 - self.light) * glint[..., None]
            self.light = self.light.astype(np.float32)
            self.mark("bubble", np.asarray(distance < size))

    def _fibre(self) -> None:
        """Textile fibres and hairs: thin bent lines, dark or coloured."""
        rng = self.rng
        for _ in range(int(rng.integers(1, 5))):
            width = self.some(10, 36)
            path = self._path(
                bool(rng.random() < 0.4), self.some(200, 2500), rng.uniform(0, 0.4)
            )
            distance = self._fine_distance(path)
            opacity = ((width / 2 - distance) / 5 + 0.5).clip(0, 1)
            opacity *= rng.uniform(0.4, 1)
            tone = rng.uniform(0.05, 0.5)
            colour = np.clip(tone + rng.normal(0, 0.12, 3) * (rng.random() < 0.6), 0, 1)
            self.cover(colour, opacity)
            self.mark("dust", opacity > 0.2)

    def _fine_distance(self, path: npt.NDArray[np.float64]) -> Light:
        """µm from each pixel to a line, exact."""
        line = np.ones(self.shape, bool)
        steps = np.linspace(0, len(path) - 1, 6000)
        points = [
            np.rint(np.interp(steps, np.arange(len(path)), path[:, c])).astype(int)
            for c in (0, 1)
        ]
        inside = (points[0] >= 0) & (points[0] < self.shape[0])
        inside &= (points[1] >= 0) & (points[1] < self.shape[1])
        if not inside.any():
            return np.full(self.shape, 1e6, np.float32)
        line[points[0][inside], points[1][inside]] = False
        return np.asarray(ndimage.distance_transform_edt(line) * self.mpp, np.float32)


def _mirrored(place: Light, length: int) -> Light:
    """Places beyond a picture, mirrored into it."""
    around = np.mod(place, 2 * (length - 1))
    return np.asarray(np.where(around > length - 1, 2 * (length - 1) - around, around))


def _restained(density: Light, rng: np.random.Generator) -> Light:
    """The tissue as it is, or grey, or pale or dense, or with other stains."""
    match rng.integers(5):
        case 0:
            density = np.repeat(density.mean(axis=2, keepdims=True), 3, axis=2)
        case 1:
            # brown and blue change places
            density = density[..., ::-1]
        case 2:
            density = density @ (np.eye(3) + rng.uniform(0, 0.4, (3, 3)))
    density = density * np.exp(rng.uniform(np.log(0.3), np.log(2.2)))
    return np.asarray(density, np.float32)
