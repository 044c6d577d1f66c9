"""Generator C: artefacts and biology that looks like them, on real tissue; it only reports.

Tissue is light of sections that no training has: two of HistoQC's pictures at 8 µm/px and one of
histolab's at about 2 µm/px; for blur, CMU-1. Pieces are cut from it along torn outlines. All that
lies on the slide adds optical density. The colours of ink are those of real pens, measured on
HistoQC's pictures; a fold lays the tissue on itself along an arc; a bubble refracts what is below
it inside a thin rim; what is out of focus is averaged over a disk.
"""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image
from scipy import ndimage, signal
from tests.qc.slides import REAL, real_slide
from tests.support.held_out_lookalikes import LOOKALIKES
from tests.support.held_out_shapes import Canvas, Field, torn_outline
from training.artefact_slide import STAINS, ArtefactSlide

from thinsection.types import MaskArray, RgbArray, Size

ARTEFACTS = ("fold", "dust", "coverslip", "bubble", "pen", "blur")
PICTURES = REAL.resolve().parents[1] / "pictures"
# Picture, box (left, top, right, bottom) of solid tissue without ink, and µm per pixel.
_SECTIONS = (
    ("histoqc-pen_red.png", (210, 415, 560, 720), 8.0),
    ("histoqc-pen_green.png", (365, 196, 627, 391), 8.0),
    ("tcga-green-pen.png", (500, 0, 754, 631), 2.0),
)
_CMU_1_BOX = (745, 2230, 1320, 2950)
_CMU_1_MPP = 0.5
# µm per pixel of the tissue from which slides are drawn.
_TISSUE_MPP = 4.0
# Smaller pictures show nothing but tissue.
_WHOLE_SLIDE_UM = 2_000
# Density of red, green and blue of real ink: the median over HistoQC's masks by hand, and over
# a blue spot on the picture of green pen. Then the least and most of its depth there.
_INKS = {
    "black": ((2.41, 2.53, 2.81), (0.5, 1.1)),
    "green": ((1.05, 0.30, 0.40), (0.43, 1.9)),
    "red": ((0.16, 1.61, 1.17), (0.5, 1.7)),
    "blue": ((1.66, 1.05, 0.21), (0.3, 1.5)),
}
# Density of haematoxylin, eosin and DAB (Ruifrok and Johnston, 2001).
_HAEMATOXYLIN = (0.65, 0.70, 0.29)
_EOSIN = (0.07, 0.99, 0.11)
_DAB = (0.27, 0.57, 0.78)
# Least and most factor of all density of tissue.
_STRENGTHS = {"faint": (0.25, 0.45), "dark": (1.6, 2.2)}


@dataclass(frozen=True, kw_only=True)
class TissueSlide(ArtefactSlide):
    """A slide that has biology too: kind -> where it is, without artefacts."""

    biology: Mapping[str, MaskArray]

    @property
    def clean(self) -> MaskArray:
        """Tissue without artefacts, and without what looks like them."""
        clean = super().clean
        for where in self.biology.values():
            clean &= ~where
        return clean


def tissue_slide(
    seed: int,
    *,
    size: Size = (1600, 1200),
    mpp: float = 3.0,
    stain: str | None = None,
    artefacts: Sequence[str] | None = None,
) -> TissueSlide:
    """Slide `seed` of generator C; arguments as of `tuning_slide`.

    Three kinds of biology are drawn; successive seeds take turns with the kinds.

    Memory: about 200 bytes per pixel.

    Raises:
        FileNotFoundError: the real slide or the pictures beside its folder are missing.
    """
    rng = np.random.default_rng([seed, 33, 7])
    drawn_stain = str(rng.choice(STAINS))
    stain = stain or drawn_stain
    canvas = Canvas(rng, (size[1], size[0]), mpp, grey=stain == "grey")
    whole = max(size) * mpp > _WHOLE_SLIDE_UM
    if whole:
        draw_pieces(canvas, stain)
        _draw_lookalikes(canvas, seed)
    else:
        _fill_with_tissue(canvas, stain)
    low, high = _STRENGTHS.get(stain, (1, 1))
    canvas.density *= np.float32(rng.uniform(low, high))
    if whole:
        _draw_glass(canvas)
    draws = rng.random(len(ARTEFACTS)) < 0.5
    chosen = [name for name, draw in zip(ARTEFACTS, draws) if draw and name != "blur"]
    blur_um = 0.0
    for name in ARTEFACTS:
        if name not in (chosen if artefacts is None else artefacts):
            continue
        if name == "blur":
            blur_um = _defocus(canvas)
        else:
            most = 2 if name == "coverslip" else 3
            for _ in range(int(rng.integers(1, most + 1))):
                _DRAW[name](canvas)
    artefact = np.zeros(canvas.shape, bool)
    for name, mask in canvas.masks.items():
        if name != "tissue":
            artefact |= mask
    return TissueSlide(
        rgb=photograph(canvas, stain),
        masks=canvas.masks,
        mpp=mpp,
        stain=stain,
        blur_um=blur_um,
        biology={name: where & ~artefact for name, where in canvas.biology.items()},
    )


@cache
def _sections() -> tuple[Field, ...]:
    """Density of each section at `_TISSUE_MPP`, (H, W, 3)."""
    found = []
    for name, box, mpp in _SECTIONS:
        path = PICTURES / name
        if not path.is_file():
            raise FileNotFoundError(
                f"{name} must lie in the folder pictures beside that of the test slides, "
                f"got none in {str(PICTURES)!r}; set THINSECTION_TEST_SLIDES"
            )
        with Image.open(path) as picture:
            section = picture.convert("RGB").crop(box)
        scale = mpp / _TISSUE_MPP
        wanted = (round(section.width * scale), round(section.height * scale))
        resample = Image.Resampling.BICUBIC if scale > 1 else Image.Resampling.BOX
        found.append(_density(np.asarray(section.resize(wanted, resample))))
    return tuple(found)


@cache
def _cmu_1() -> RgbArray:
    """Solid tissue of CMU-1 at 0.5 µm/px."""
    slide = real_slide()
    left, top, right, bottom = _CMU_1_BOX
    return slide.read_region((left, top), 0, (right - left, bottom - top))


def _density(rgb: RgbArray) -> Field:
    """Density against glass of 243, as on the three sections."""
    return -np.log(np.clip(rgb / 243.0, 1 / 255, 1)).astype(np.float32)


def draw_pieces(canvas: Canvas, stain: str) -> None:
    """One to four pieces along torn outlines, compact ones or needle cores, of one section."""
    rng = canvas.rng
    sections = _sections()
    section = sections[int(rng.integers(len(sections)))]
    cores = rng.random() < 0.2
    for _ in range(int(rng.integers(1, 5))):
        middle = rng.uniform(0.2, 0.8, 2) * canvas.shape
        radius = min(canvas.shape) * rng.uniform(0.2, 0.45)
        radius *= 1.5 if cores else 1
        aspect = rng.uniform(0.08, 0.14) if cores else rng.uniform(0.45, 1)
        outline = torn_outline(rng, middle, radius, aspect=aspect, roughness=0.09)
        piece = canvas.polygon(outline)
        for _ in range(int(rng.integers(0, 3))):
            # a tear
            at = middle + rng.normal(0, radius / 3, 2)
            tear = torn_outline(rng, at, radius / 3, aspect=0.12, roughness=0.2)
            piece &= ~canvas.polygon(tear)
        canvas.mark("tissue", piece)
        box = ndimage.find_objects(piece.astype(np.uint8))
        if not box:
            # it lies outside the slide
            continue
        tissue = _cut(canvas, section, canvas.density[box[0]].shape[:2])
        density = _stained(canvas, tissue, stain)
        thickness = 1 + 0.12 * canvas.slow_noise(600)[box[0]]
        soft = canvas.soften(piece, 3)[box[0]][..., None]
        canvas.density[box[0]] *= 1 - soft
        canvas.density[box[0]] += density * thickness[..., None] * soft


def _cut(canvas: Canvas, section: Field, shape: tuple[int, ...]) -> Field:
    """The section turned by any angle, with its mirror images where it ends, (*shape, 3)."""
    rng = canvas.rng
    angle = rng.uniform(0, 2 * math.pi)
    step = canvas.mpp / _TISSUE_MPP * rng.uniform(0.85, 1.15)
    y, x = np.mgrid[: shape[0], : shape[1]].astype(np.float32)
    offset = rng.uniform(0, 500, 2)
    rows = step * (y * math.cos(angle) - x * math.sin(angle)) + offset[0]
    columns = step * (y * math.sin(angle) + x * math.cos(angle)) + offset[1]
    places = np.stack([rows, columns])
    planes = [
        ndimage.map_coordinates(section[..., c], places, order=1, mode="mirror")
        for c in range(3)
    ]
    return np.stack(planes, axis=2)


def _fill_with_tissue(canvas: Canvas, stain: str) -> None:
    """Tissue at the resolution at which it was scanned, mirrored, not interpolated."""
    if canvas.mpp != _CMU_1_MPP:
        raise ValueError(f"mpp must be {_CMU_1_MPP}, got {canvas.mpp}; ask for a slide")
    tissue = _density(_cmu_1())
    for axis in (0, 1):
        if canvas.rng.random() < 0.5:
            tissue = np.flip(tissue, axis)
    height, width = canvas.shape
    down = max(0, height - tissue.shape[0])
    across = max(0, width - tissue.shape[1])
    tissue = np.pad(tissue, ((0, down), (0, across), (0, 0)), "symmetric")
    canvas.density = _stained(canvas, tissue[:height, :width], stain)
    canvas.mark("tissue", np.ones(canvas.shape, bool))


def _stained(canvas: Canvas, density: Field, stain: str) -> Field:
    """The same tissue in another stain, or with other amounts of haematoxylin and eosin."""
    rng = canvas.rng
    vectors = np.array([_HAEMATOXYLIN, _EOSIN])
    vectors = np.vstack([vectors, np.cross(*vectors)])
    amounts = (density @ np.linalg.inv(vectors)).clip(0, None)
    if stain == "ihc":
        height, width = density.shape[:2]
        nests = canvas.slow_noise(150)[:height, :width, None] > rng.uniform(-0.3, 0.6)
        counter = 0.6 * amounts[..., :1] * np.array(_HAEMATOXYLIN)
        brown = amounts[..., 1:2] * nests * np.array(_DAB) * rng.uniform(0.7, 1.5)
        pale = 0.12 * amounts[..., 1:2]
        return np.asarray(counter + brown + pale, np.float32)
    gains = rng.uniform(0.75, 1.25, 3) * (1, 1, 0.5)
    turned = vectors * rng.normal(1, 0.06, vectors.shape)
    return np.asarray(amounts * gains @ turned, np.float32).clip(0, None)


def _draw_lookalikes(canvas: Canvas, seed: int) -> None:
    """Three kinds of biology, where tissue is."""
    names = sorted(LOOKALIKES)
    tissue = canvas.soften(canvas.masks["tissue"], 4)
    for turn in range(3):
        name = names[(3 * seed + turn) % len(names)]
        before = canvas.density
        after, area = LOOKALIKES[name](canvas)
        cover = (area * tissue)[..., None]
        canvas.density = before * (1 - cover) + after * cover
        untouched = cover[..., 0] < 0.1
        for other, where in canvas.biology.items():
            canvas.biology[other] = where & untouched
        canvas.biology[name] = (cover[..., 0] > 0.5) & canvas.masks["tissue"]


def _draw_glass(canvas: Canvas) -> None:
    """Tint, shade, smears of mounting medium: glass."""
    rng = canvas.rng
    canvas.density += rng.uniform(0, 0.04, 3).astype(np.float32)
    y, x = np.mgrid[: canvas.shape[0], : canvas.shape[1]]
    slope = rng.normal(0, 0.015, 2)
    shade = slope[0] * y / canvas.shape[0] + slope[1] * x / canvas.shape[1]
    canvas.density += (shade - shade.min())[..., None].astype(np.float32)
    for _ in range(int(rng.integers(0, 4))):
        arc = canvas.arc(rng.uniform(600, 4_000))
        smear = np.zeros(canvas.shape, np.float32)
        width_um = rng.uniform(100, 500)
        for _ in range(int(rng.integers(3, 12))):
            beside = arc + rng.normal(0, width_um, 2) / canvas.mpp
            smear += canvas.stroke(beside, rng.uniform(20, 200), taper=True)
        smear = canvas.soften(smear, rng.uniform(8, 50))
        canvas.density += (smear * rng.uniform(0.005, 0.03))[..., None]


def _fold(canvas: Canvas) -> None:
    """One or two more layers of the tissue along an arc; sometimes wrinkles beside each other."""
    rng = canvas.rng
    width_um = canvas.draw_log(25, 180)
    arc = canvas.arc(rng.uniform(400, 2_500), inside=canvas.masks["tissue"])
    wrinkles = int(rng.integers(2, 5)) if rng.random() < 0.3 else 1
    apart = rng.normal(0, 1, 2)
    apart *= rng.uniform(1.5, 3) * width_um / canvas.mpp / np.linalg.norm(apart)
    layers = int(rng.integers(1, 3))
    shift = tuple((rng.normal(0, width_um, 2) / canvas.mpp).astype(int))
    upper = np.roll(canvas.density, shift, axis=(0, 1))
    tissue = canvas.masks["tissue"]
    upper *= np.roll(tissue, shift, axis=(0, 1))[..., None]
    for number in range(wrinkles):
        band = canvas.stroke(arc + number * apart, width_um, taper=True) * tissue
        soft = canvas.soften(band > 0.5, rng.uniform(1, 5))
        added = layers * upper * soft[..., None]
        canvas.density += added
        seen = ndimage.uniform_filter(added.mean(axis=2), max(1, int(32 / canvas.mpp)))
        canvas.mark("fold", (band > 0.5) & (seen > 0.04))


def _bubble(canvas: Canvas) -> None:
    """A thin dark rim with a bright line inside it; below it the slide is refracted."""
    rng = canvas.rng
    radius = canvas.draw_log(100, 900) / canvas.mpp
    row, column = rng.uniform(0.05, 0.95, 2) * canvas.shape
    y, x = np.mgrid[: canvas.shape[0], : canvas.shape[1]].astype(np.float32)
    turn = rng.uniform(0, math.pi)
    along = (x - column) * math.cos(turn) + (y - row) * math.sin(turn)
    across = (y - row) * math.cos(turn) - (x - column) * math.sin(turn)
    around = np.arctan2(across, along)
    edge = 1 + rng.uniform(0, 0.1) * np.cos(2 * around + rng.uniform(0, 6))
    edge += rng.uniform(0, 0.06) * np.cos(3 * around + rng.uniform(0, 6))
    away = np.hypot(along, across / rng.uniform(0.65, 1)) / radius / edge
    inside = away < 1
    zoom = rng.uniform(0.7, 0.9) + 0.15 * away**2
    places = np.stack([row + (y - row) * zoom, column + (x - column) * zoom])
    sigma = rng.uniform(2, 8) / canvas.mpp
    for c in range(3):
        plane = canvas.density[..., c]
        seen = ndimage.map_coordinates(plane, places, order=1, mode="nearest")
        seen = ndimage.gaussian_filter(seen, sigma) * rng.uniform(0.85, 1)
        canvas.density[..., c] = np.where(inside, seen, plane)
    depth_um = (1 - away) * radius * canvas.mpp
    rim_um = rng.uniform(10, 40)
    rim = rng.uniform(0.6, 1.8) * np.exp(-((depth_um / rim_um - 0.7) ** 2) * 2)
    rim -= 0.04 * np.exp(-((depth_um / rim_um - 2.4) ** 2) * 4)
    canvas.density += np.where(inside, rim, 0)[..., None].astype(np.float32)
    canvas.mark("bubble", inside)


def _pen(canvas: Canvas) -> None:
    """A stroke, a ring or a dot of a marker: deeper at its border, and dry in streaks."""
    rng = canvas.rng
    names = ("black",) if canvas.grey else tuple(_INKS)
    name = str(rng.choice(names))
    color, depths = _INKS[name]
    width_um = rng.uniform(150, 750)
    shape = rng.choice(("stroke", "ring", "dot"), p=(0.55, 0.25, 0.2))
    if shape == "ring":
        path = canvas.ring(rng.uniform(400, 1_500))
        width_um = min(width_um, 400)
    else:
        length_um = width_um / 4 if shape == "dot" else rng.uniform(1_000, 5_000)
        path = canvas.arc(length_um)
    cover = canvas.stroke(path, width_um) > 0.5
    depth_um = ndimage.distance_transform_edt(cover) * canvas.mpp
    shown = np.clip(depth_um / rng.uniform(5, 40), 0, 1)
    shown *= 1 + rng.uniform(0, 0.5) * np.exp(-((depth_um / 40) ** 2))
    dry = np.zeros(canvas.shape, bool)
    if rng.random() < 0.5 and shape == "stroke":
        for _ in range(int(rng.integers(2, 9))):
            aside = path + rng.normal(0, width_um / 4 / canvas.mpp, 2)
            start = int(rng.uniform(0, 0.8) * len(aside))
            dry |= canvas.stroke(aside[start:], rng.uniform(12, 50)) > 0.5
    shown *= 1 - canvas.soften(dry, 6)
    depth = rng.uniform(*depths) * (1 + 0.1 * canvas.slow_noise(120))
    canvas.density += np.array(color, np.float32) * (shown * depth)[..., None]
    where = cover & ~dry & (shown > 0.4)
    canvas.mark("pen", where)
    canvas.mark(f"pen_{name}", where)


def _dust(canvas: Canvas) -> None:
    """Curled textile fibres with a bright line at their sides, and opaque grains."""
    rng = canvas.rng
    colors = ((0.9, 0.9, 0.85), (1.3, 0.8, 0.3), (0.4, 0.8, 1.1), (0.3, 1.1, 0.7))
    for _ in range(int(rng.integers(1, 5))):
        path = canvas.curl(rng.uniform(250, 2_500))
        width_um = rng.uniform(8, 25)
        fibre = canvas.stroke(path, width_um)
        halo = canvas.soften(fibre > 0.3, 8) * (1 - fibre)
        color = np.array(colors[int(rng.integers(len(colors)))], np.float32)
        canvas.density += (fibre * rng.uniform(0.5, 1.4))[..., None] * color
        canvas.density -= (0.05 * halo)[..., None]
        canvas.mark("dust", fibre > 0.4)
    for _ in range(int(rng.integers(0, 12))):
        middle = rng.uniform(0, 1, 2) * canvas.shape
        radius = rng.uniform(6, 40) / canvas.mpp
        outline = torn_outline(rng, middle, radius, aspect=0.7, roughness=0.3)
        grain = canvas.polygon(outline)
        canvas.density += (grain * rng.uniform(0.6, 2.5))[..., None]
        canvas.mark("dust", grain)


def _coverslip(canvas: Canvas) -> None:
    """The edge of a coverslip: a dark line beside a bright one, chipped, from side to side."""
    rng = canvas.rng
    height, width = canvas.shape
    start, end = rng.uniform(0.05, 0.95) + np.array([0, rng.normal(0, 0.03)])
    t = np.linspace(0, 1, 60)
    place = start + (end - start) * t + rng.normal(0, 0.0006, t.shape)
    path = np.stack([place * height, t * width], axis=1)
    if rng.random() < 0.5:
        path = np.stack([t * height, place * width], axis=1)
    width_um = rng.uniform(12, 40)
    line = canvas.stroke(path, width_um)
    beside = canvas.stroke(path + 1.5 * width_um / canvas.mpp, width_um / 2)
    canvas.density += (line * rng.uniform(0.15, 0.7) - 0.05 * beside)[..., None]
    canvas.mark("coverslip", line > 0.4)


def _defocus(canvas: Canvas) -> float:
    """A strip of the scan out of focus: averaged over a disk. Returns its deviation in µm."""
    rng = canvas.rng
    radius_um = rng.uniform(2.2, 8)
    radius = radius_um / canvas.mpp
    reach = math.ceil(radius)
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    disk = np.clip(radius + 0.5 - np.hypot(y, x), 0, 1)[..., None]
    light = np.exp(-canvas.density)
    around = np.pad(light, ((reach, reach), (reach, reach), (0, 0)), "reflect")
    soft = signal.fftconvolve(around, disk / disk.sum(), mode="valid", axes=(0, 1))
    low = rng.uniform(0.05, 0.5)
    high = low + rng.uniform(0.25, 0.45)
    y, x = np.mgrid[: canvas.shape[0], : canvas.shape[1]]
    ruler = x / canvas.shape[1] + rng.normal(0, 0.08) * y / canvas.shape[0]
    strip = (ruler > low) & (ruler < high)
    share = canvas.soften(strip, 6)[..., None]
    mixed = light * (1 - share) + soft.clip(1e-3, None) * share
    canvas.density = -np.log(mixed).astype(np.float32)
    # deviation of a disk along one axis
    deviation_um = radius_um / 2
    canvas.mark("blur", strip & canvas.masks["tissue"])
    return float(deviation_um)


_DRAW = {
    "fold": _fold,
    "dust": _dust,
    "coverslip": _coverslip,
    "bubble": _bubble,
    "pen": _pen,
}


def photograph(canvas: Canvas, stain: str) -> RgbArray:
    """Lamp, colour fringes, photons, gain of each row, sharpening, and JPEG at half the colour."""
    rng = canvas.rng
    light = np.exp(-canvas.density) * rng.uniform(0.93, 0.98, 3)
    if stain == "tiled":
        edge = int(rng.uniform(350, 900) / canvas.mpp)
        grid = [length // edge + 1 for length in canvas.shape]
        gains = rng.uniform(0.95, 1.02, (*grid, 3))
        gains = gains.repeat(edge, axis=0).repeat(edge, axis=1)
        light *= gains[: canvas.shape[0], : canvas.shape[1]]
    fringe = rng.uniform(-0.35, 0.35, 2)
    light[..., 0] = ndimage.shift(light[..., 0], fringe, order=1, mode="nearest")
    photons = canvas.draw_log(400, 10_000)
    light = rng.poisson(light.clip(0, None) * photons) / photons
    light *= rng.normal(1, 0.002, (len(light), 1, 1))
    amount = rng.uniform(0, 0.5)
    light += amount * (light - ndimage.gaussian_filter(light, (1, 1, 0)))
    if stain == "grey":
        light[:] = light.mean(axis=2, keepdims=True)
    pixels = np.rint(light * 255).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    quality = int(rng.integers(55, 93))
    Image.fromarray(pixels).save(file, "JPEG", quality=quality, subsampling=2)
    with Image.open(file) as picture:
        return np.asarray(picture.convert("RGB"))
