"""Biology that looks like artefacts, drawn over real tissue by rules that no training used.

Shapes are splines, polygons and discs of Pillow; colours are of light, laid over the tissue or
multiplied with it. The tissue is that of CMU-1, which no network of the package has seen. All of it
is tissue, so whatever quality control removes there is lost.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter
from scipy import ndimage
from scipy.interpolate import CubicSpline
from tests.qc.slides import real_slide

from thinsection.types import MaskArray, RgbArray

# µm per pixel of the pictures.
MPP = 2.0
_Light = npt.NDArray[np.float64]  # (H, W, 3), in [0, 1]
_Layer = npt.NDArray[np.float64]  # (H, W), coverage in [0, 1]


def base_picture() -> RgbArray:
    """CMU-1 at 2 µm/px, with its mirror images: 1.6 x 3 mm."""
    slide = real_slide()
    whole = slide.read_region((0, 0), 0, slide.size)
    small = np.asarray(Image.fromarray(whole).reduce(4))
    # without the glass on the side that is mirrored
    part = small[:, : int(0.72 * small.shape[1])]
    row = np.concatenate([part, part[:, ::-1]], axis=1)
    return np.concatenate([row, row[::-1]])


def picture_with(name: str, seed: int) -> tuple[RgbArray, MaskArray]:
    """The tissue with one kind of biology, and where it is drawn."""
    rng = np.random.default_rng([seed, sorted(BIOLOGY).index(name), 77])
    light = base_picture() / 255.0
    solid = solid_tissue(light)
    changed, where = BIOLOGY[name](light, rng)
    where = where * solid
    changed = light * (1 - solid[..., None]) + changed * solid[..., None]
    image = Image.fromarray(np.rint(changed.clip(0, 1) * 255).astype(np.uint8))
    return np.asarray(image), where > 0.5


def solid_tissue(light: _Light) -> _Layer:
    """The tissue with its lumens, [0, 1]; biology is drawn only there."""
    dark = ndimage.uniform_filter(light.mean(axis=2), 9) < 0.87
    solid = ndimage.binary_opening(ndimage.binary_fill_holes(dark), iterations=12)
    return np.asarray(solid, np.float64)


def _places(light: _Light, rng: np.random.Generator, count: int) -> list[list[float]]:
    """Pixels (x, y) of the tissue."""
    places = np.argwhere(solid_tissue(light) > 0)[:, ::-1]
    return [[float(v) for v in places[n]] for n in rng.integers(0, len(places), count)]


def _canvas(light: _Light) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("L", (light.shape[1], light.shape[0]), 0)
    return image, ImageDraw.Draw(image)


def _layer(image: Image.Image, blur_um: float) -> _Layer:
    soft = image.filter(ImageFilter.GaussianBlur(blur_um / MPP))
    return np.asarray(soft, np.float64) / 255


def _spline_layer(light: _Light, rng: np.random.Generator, width_um: float) -> _Layer:
    """A bent band through the picture."""
    image, pen = _canvas(light)
    knots = np.array(_places(light, rng, 4))
    knots = knots[np.argsort(knots[:, 1])]
    path = CubicSpline(np.arange(4), knots)(np.linspace(0, 3, 400))
    for n, (x, y) in enumerate(path):
        radius = width_um / MPP / 2 * (0.8 + 0.3 * np.sin(n / 23))
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)
    return _layer(image, 3)


def _polygon_layer(
    light: _Light, rng: np.random.Generator, radius_um: float, count: int
) -> _Layer:
    """Lobed polygons."""
    image, pen = _canvas(light)
    for middle in _places(light, rng, count):
        t = np.linspace(0, 2 * np.pi, 40, endpoint=False)
        lobes = 1 + 0.25 * np.cos(3 * t + rng.uniform(0, 6)) * rng.uniform(0, 1)
        lobes += 0.12 * np.cos(7 * t + rng.uniform(0, 6))
        radius = radius_um / MPP * rng.uniform(0.7, 1.3) * lobes
        ring = (
            np.array(middle)
            + np.stack([np.cos(t), np.sin(t)], axis=1) * radius[:, None]
        )
        pen.polygon([(float(x), float(y)) for x, y in ring], fill=255)
    return _layer(image, 5)


def _discs(
    light: _Light,
    rng: np.random.Generator,
    inside: _Layer,
    *,
    radius_um: float,
    per_mm2: float,
) -> _Layer:
    """Small discs in an area: nuclei, or grains."""
    image, pen = _canvas(light)
    places = np.argwhere(inside > 0.5)
    count = int(len(places) * (MPP / 1000) ** 2 * per_mm2)
    for y, x in places[rng.integers(0, len(places), count)]:
        radius = radius_um / MPP * rng.uniform(0.7, 1.4)
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)
    return _layer(image, 1)


def _over(light: _Light, layer: _Layer, rgb: tuple[int, int, int]) -> _Light:
    cover = layer[..., None]
    return light * (1 - cover) + np.divide(rgb, 255.0) * cover


def _times(light: _Light, layer: _Layer, rgb: tuple[int, int, int]) -> _Light:
    return light * (1 - layer[..., None] * (1 - np.divide(rgb, 255.0)))


def _lymphoid(light: _Light, rng: np.random.Generator) -> tuple[_Light, _Layer]:
    band = _spline_layer(light, rng, rng.uniform(120, 260))
    pale = _over(light, 0.8 * band, (206, 180, 214))
    nuclei = _discs(light, rng, band, radius_um=4, per_mm2=11_000)
    return _over(pale, 0.85 * nuclei, (84, 58, 132)), band


def _overstained(light: _Light, rng: np.random.Generator) -> tuple[_Light, _Layer]:
    zone = _polygon_layer(light, rng, 600, 2)
    strong = light ** rng.uniform(1.5, 2.2)
    return light * (1 - zone[..., None]) + strong * zone[..., None], zone


def _alcian_mucin(light: _Light, rng: np.random.Generator) -> tuple[_Light, _Layer]:
    lakes = _polygon_layer(light, rng, 130, 14)
    return _over(light, 0.85 * lakes, (96, 164, 196)), lakes


def _pale_mucin(light: _Light, rng: np.random.Generator) -> tuple[_Light, _Layer]:
    lakes = _polygon_layer(light, rng, 220, 7)
    return _over(light, 0.9 * lakes, (206, 208, 226)), lakes


def _necrosis(light: _Light, rng: np.random.Generator) -> tuple[_Light, _Layer]:
    area = _polygon_layer(light, rng, 420, 3)
    return _over(light, 0.93 * area, (218, 150, 178)), area


def _vessels(light: _Light, rng: np.random.Generator) -> tuple[_Light, _Layer]:
    lumens = _polygon_layer(light, rng, 55, 30)
    return _over(light, 0.92 * lumens, (190, 44, 62)), lumens


def _haemorrhage(light: _Light, rng: np.random.Generator) -> tuple[_Light, _Layer]:
    area = _polygon_layer(light, rng, 380, 3)
    cells = _discs(light, rng, area, radius_um=4, per_mm2=16_000)
    return _over(light, 0.8 * cells, (204, 66, 84)), area


def _melanin(light: _Light, rng: np.random.Generator) -> tuple[_Light, _Layer]:
    nests = _polygon_layer(light, rng, 110, 14)
    grains = _discs(light, rng, nests, radius_um=7, per_mm2=3_000)
    return _over(light, 0.9 * grains, (74, 46, 28)), nests


def _anthracosis(light: _Light, rng: np.random.Generator) -> tuple[_Light, _Layer]:
    clumps = _polygon_layer(light, rng, 90, 14)
    grains = _discs(light, rng, clumps, radius_um=6, per_mm2=3_500)
    return _over(light, 0.95 * grains, (26, 24, 24)), clumps


def _dab(light: _Light, rng: np.random.Generator) -> tuple[_Light, _Layer]:
    nests = _polygon_layer(light, rng, 150, 12)
    return _times(light, 0.9 * nests, (166, 112, 66)), nests


def _keratin(light: _Light, rng: np.random.Generator) -> tuple[_Light, _Layer]:
    band = _spline_layer(light, rng, rng.uniform(100, 240))
    y, x = np.mgrid[: light.shape[0], : light.shape[1]]
    layers = 0.75 + 0.2 * np.sin((y + 20 * np.sin(x / 60)) / 4)
    return _over(light, band * layers, (226, 128, 130)), band


def _fat(light: _Light, rng: np.random.Generator) -> tuple[_Light, _Layer]:
    area = _polygon_layer(light, rng, 450, 3)
    image, pen = _canvas(light)
    step = 34
    for top in range(0, light.shape[0], step):
        for left in range(0, light.shape[1], step):
            x = left + rng.normal(0, 4)
            y = top + rng.normal(0, 4)
            pen.ellipse((x, y, x + step - 3, y + step - 3), fill=255)
    holes = _layer(image, 1.5) * area
    return _over(light, holes, (243, 242, 245)), area


BIOLOGY: dict[str, Callable[[_Light, np.random.Generator], tuple[_Light, _Layer]]] = {
    "lymphoid band": _lymphoid,
    "over-stained zone": _overstained,
    "Alcian mucin": _alcian_mucin,
    "pale mucin": _pale_mucin,
    "necrosis": _necrosis,
    "congested vessels": _vessels,
    "haemorrhage": _haemorrhage,
    "melanin": _melanin,
    "anthracosis": _anthracosis,
    "DAB": _dab,
    "keratin": _keratin,
    "fat": _fat,
}
