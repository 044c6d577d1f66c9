"""Biology that looks like an artefact, painted over tissue; its label stays tissue.

Each function changes the light of a scene inside some of its tissue and returns where. Colours are
optical densities of red, green and blue.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from thinsection.types import MaskArray
from training.artefact_slide import Light, Scene

_BLOOD = (0.18, 0.82, 0.55)
_EOSIN = (0.10, 0.95, 0.30)
_HAEMATOXYLIN = (0.65, 0.70, 0.29)
_DAB = (0.27, 0.57, 0.78)
_MELANIN = (0.45, 0.62, 0.72)
_ALCIAN = (0.85, 0.35, 0.18)
_CARBON = (0.58, 0.58, 0.58)
_KERATIN = (0.18, 0.75, 0.50)

Colour = tuple[float, float, float]


def lymphoid(scene: Scene) -> MaskArray:
    """Follicles or bands of lymphocytes: dense, blue, granular."""
    rng = scene.rng
    where = _band(scene, 40, 320) if rng.random() < 0.5 else _blobs(scene, 80, 600)
    strength = scene.some(0.5, 2.2)
    grains = _grains(scene, rng.uniform(0.3, 0.8))
    density = _colour(scene, _HAEMATOXYLIN) * (strength * grains)[..., None]
    return _replace(scene, where, density, kept=rng.uniform(0.1, 0.6))


def overstained(scene: Scene) -> MaskArray:
    """A zone of more stain, or of more of one stain."""
    rng = scene.rng
    where = _zone(scene)
    gain = np.exp(rng.uniform(0.25, 0.9) + rng.normal(0, 0.12, 3)).astype(np.float32)
    density = -np.log(scene.light.clip(0.004, 1)) * gain
    return _replace(scene, where, density, kept=0)


def mucin(scene: Scene) -> MaskArray:
    """Lakes or goblets of mucin: smooth, of Alcian blue, pale grey-blue or clear."""
    rng = scene.rng
    where = _blobs(scene, 20, 700)
    kind = rng.random()
    if kind < 0.5:
        colour = _colour(scene, _ALCIAN) * scene.some(0.25, 1.4)
    elif kind < 0.8:
        colour = _colour(scene, (0.5, 0.5, 0.3)) * scene.some(0.08, 0.35)
    else:
        # periodic acid-Schiff
        colour = _colour(scene, (0.25, 0.9, 0.45)) * scene.some(0.3, 1.4)
    smooth = 1 + 0.2 * scene.noise(scene.some(15, 120))
    density = colour * smooth.clip(0.2, None)[..., None]
    return _replace(scene, where, density, kept=rng.uniform(0, 0.25))


def necrosis(scene: Scene) -> MaskArray:
    """Pink or grey areas without structure, some with dust of nuclei at their rim."""
    rng = scene.rng
    where = _blobs(scene, 150, 1200)
    colour = _colour(scene, _EOSIN) * scene.some(0.2, 1.2)
    if rng.random() < 0.3:
        colour = colour * 0.4 + _colour(scene, _HAEMATOXYLIN) * scene.some(0.15, 0.7)
    smooth = 1 + 0.12 * scene.noise(60) + 0.05 * scene.noise(4)
    density = colour * smooth.clip(0.3, None)[..., None]
    if rng.random() < 0.5:
        dust = _grains(scene, 0.9) * (np.abs(where - 0.5) < 0.3)
        density += _colour(scene, _HAEMATOXYLIN) * (0.8 * dust)[..., None]
    return _replace(scene, where, density, kept=rng.uniform(0, 0.2))


def vessels(scene: Scene) -> MaskArray:
    """Vessels full of blood: round, oblong or branching, dense red or orange."""
    rng = scene.rng
    is_branched = rng.random() < 0.25
    where = _branches(scene, 10, 90) if is_branched else _blobs(scene, 20, 250)
    colour = _colour(scene, _BLOOD, 0.2) * scene.some(0.4, 2.2)
    colour = colour + _colour(scene, _EOSIN) * scene.some(0.03, 0.3)
    clots = 1 + 0.2 * scene.noise(8) + 0.15 * scene.noise(40)
    density = colour * clots.clip(0.3, None)[..., None]
    return _replace(scene, where, density, kept=rng.uniform(0, 0.2))


def haemorrhage(scene: Scene) -> MaskArray:
    """Blood that runs into tissue without a border."""
    rng = scene.rng
    where = _zone(scene) * np.clip(0.75 + 0.5 * scene.noise(scene.some(30, 200)), 0, 1)
    colour = _colour(scene, _BLOOD, 0.2) * scene.some(0.4, 1.8)
    density = colour * (1 + 0.2 * scene.noise(10)).clip(0.2, None)[..., None]
    return _replace(scene, where, density, kept=rng.uniform(0.2, 0.9))


def melanin(scene: Scene) -> MaskArray:
    """Brown to black pigment, in grains, clumps or sheets."""
    return _pigment(scene, _MELANIN, scene.some(0.8, 4.0))


def anthracosis(scene: Scene) -> MaskArray:
    """Coal dust: black grains and clumps."""
    return _pigment(scene, _CARBON, scene.some(1.0, 5.0))


def dab(scene: Scene) -> MaskArray:
    """Brown immunostain of nests, membranes or single cells."""
    rng = scene.rng
    kind = rng.random()
    if kind < 0.4:
        where = _blobs(scene, 30, 400)
    elif kind < 0.7:
        where = _band(scene, 20, 160)
    else:
        where = _zone(scene) * _grains(scene, rng.uniform(0.3, 0.8)).clip(0, 1)
    colour = _colour(scene, _DAB, 0.2) * scene.some(0.3, 2.6)
    grain = (0.7 + 0.5 * _grains(scene, 0.5)).astype(np.float32)
    return _replace(scene, where, colour * grain[..., None], kept=rng.uniform(0.2, 0.8))


def fat(scene: Scene) -> MaskArray:
    """Fat: holes of glass between thin walls."""
    rng = scene.rng
    where = _blobs(scene, 300, 1500)
    cell = scene.some(25, 60)
    walls = np.clip(1.3 - np.abs(scene.noise(cell)) / rng.uniform(0.1, 0.2), 0, 1)
    wall = _colour(scene, _EOSIN) * scene.some(0.15, 0.7)
    return _replace(scene, where, wall * walls[..., None], kept=0)


def keratin(scene: Scene) -> MaskArray:
    """Lamellae of keratin: dense orange to pink bands in parallel layers, or pearls."""
    rng = scene.rng
    shape = _band if rng.random() < 0.6 else _blobs
    where = shape(scene, 40, 300)
    layers = 1 + 0.2 * np.sin(scene.noise(scene.some(60, 200)) * scene.some(6, 30))
    layers += 0.2 * scene.noise(6, 4)
    colour = _colour(scene, _KERATIN, 0.15) * scene.some(0.3, 1.2)
    return _replace(scene, where, colour * layers[..., None], kept=rng.uniform(0, 0.3))


def calcium(scene: Scene) -> MaskArray:
    """Calcifications: small dark blue to purple chunks with hard borders."""
    where = (_blobs(scene, 15, 120) > 0.5).astype(np.float32)
    colour = _colour(scene, (0.6, 0.75, 0.45)) * scene.some(0.8, 3.0)
    rough = (1 + 0.4 * scene.noise(10)).clip(0.2, None)
    return _replace(scene, where, colour * rough[..., None], kept=0.2)


def fibres(scene: Scene) -> MaskArray:
    """Muscle, tendon or collagen: dense parallel strands, with clefts of glass between them."""
    rng = scene.rng
    where = _zone(scene)
    strands = scene.noise(scene.some(5, 16), scene.some(3, 10))
    colour = _colour(scene, _EOSIN, 0.2) * scene.some(0.35, 1.6)
    if rng.random() < 0.15:
        # of trichrome
        colour = _colour(scene, (0.7, 0.55, 0.25), 0.15) * scene.some(0.3, 1.0)
    thick = (1 + 0.5 * strands).clip(0.05, None)
    if rng.random() < 0.5:
        thick = thick * np.clip(rng.uniform(1.0, 2.5) + strands, 0.05, 1)
    return _replace(scene, where, colour * thick[..., None], kept=rng.uniform(0, 0.3))


def gland_lumens(scene: Scene) -> MaskArray:
    """Ducts: a ring of dense epithelium around a pale lumen, which looks like a bubble's rim."""
    rng = scene.rng
    core = _blobs(scene, 50, 350)
    rim = np.exp(-(((core - 0.5) / rng.uniform(0.1, 0.3)) ** 2))
    colour = _colour(scene, _HAEMATOXYLIN) * scene.some(0.4, 1.5)
    rough = (0.8 + 0.3 * _grains(scene, 0.5)) * rim
    density = colour * rough[..., None] + _colour(scene, _EOSIN) * 0.06
    inside = np.clip(core + rim, 0, 1)
    return _replace(scene, inside, density, kept=0)


LOOKALIKES: dict[str, Callable[[Scene], MaskArray]] = {
    "lymphoid": lymphoid,
    "overstained": overstained,
    "mucin": mucin,
    "necrosis": necrosis,
    "vessels": vessels,
    "haemorrhage": haemorrhage,
    "melanin": melanin,
    "anthracosis": anthracosis,
    "dab": dab,
    "fat": fat,
    "keratin": keratin,
    "calcium": calcium,
    "fibres": fibres,
    "gland_lumens": gland_lumens,
}


def _pigment(scene: Scene, colour: Colour, strength: float) -> MaskArray:
    rng = scene.rng
    zone = _zone(scene)
    clumps = scene.noise(scene.some(4, 30)) + 0.6 * scene.noise(scene.some(30, 200))
    amount = np.clip((clumps - rng.uniform(0.2, 1.6)) * rng.uniform(1, 3), 0, 1)
    density = _colour(scene, colour) * strength * (amount * zone)[..., None]
    before = -np.log(scene.light.clip(0.004, 1))
    solid = scene.masks["tissue"].astype(np.float32)
    scene.light = np.exp(-before - density * solid[..., None]).astype(np.float32)
    near = ndimage.uniform_filter(amount * zone * solid, max(1, int(40 / scene.mpp)))
    return np.asarray((near > 0.05) & scene.masks["tissue"])


def _replace(
    scene: Scene, where: Light, density: npt.ArrayLike, *, kept: float
) -> MaskArray:
    """Puts tissue of another density in the place of some, of which a share is kept."""
    before = -np.log(scene.light.clip(0.004, 1))
    weight = (where * scene.masks["tissue"])[..., None].astype(np.float32)
    inside = before * kept + np.asarray(density, np.float32)
    after = before * (1 - weight) + inside * weight
    scene.light = np.exp(-after).astype(np.float32)
    return np.asarray(weight[..., 0] > 0.5)


def _colour(scene: Scene, colour: Colour, spread: float = 0.1) -> Light:
    """Density of a stain near this one; in a slide without colour, grey."""
    moved = np.array(colour) * np.exp(scene.rng.normal(0, spread, 3))
    if scene.stain == "grey":
        moved[:] = moved.mean()
    return np.asarray(moved / np.linalg.norm(moved) * 1.5, np.float32)


def _grains(scene: Scene, contrast: float) -> Light:
    """Nuclei that lie close: noise of their own size around 1."""
    fine = scene.noise(3.0) + 0.5 * scene.noise(9.0)
    return np.asarray((1 + contrast * fine).clip(0, None), np.float32)


def _blobs(scene: Scene, low_um: float, high_um: float) -> Light:
    """Round or lobed areas of such a radius, [0, 1]; most of them at one place."""
    rng = scene.rng
    y, x = np.ogrid[: scene.shape[0], : scene.shape[1]]
    found = np.zeros(scene.shape, np.float32)
    radius_um = scene.some(low_um, high_um)
    warp = 1 + rng.uniform(0.05, 0.3) * scene.noise(radius_um / 2)
    warp += rng.uniform(0.02, 0.2) * scene.noise(radius_um / 8 + 4)
    hard = scene.some(4, 40)
    count = 1 + int(rng.integers(0, 1 + max(1, int(400 / radius_um)))) * 3
    middle = scene.centre(in_tissue=True)
    for number in range(min(count, 40)):
        spread = 0.0 if number == 0 else 3 * radius_um / scene.mpp
        row, column = middle + rng.normal(0, 1, 2) * spread
        flat = rng.uniform(0.6, 1.6)
        size = radius_um * rng.uniform(0.5, 1.2)
        away = np.hypot((y - row) * flat, (x - column) / flat) * scene.mpp
        found = np.maximum(found, ((size - away * warp) / hard + 0.5).clip(0, 1))
    return found.astype(np.float32)


def _band(scene: Scene, low_um: float, high_um: float) -> Light:
    """A band of such a width, as of a layer of cells: between two levels of a wide noise."""
    rng = scene.rng
    width = scene.some(low_um, high_um)
    field = scene.noise(scene.some(3, 12) * width / 2)
    slope = np.hypot(*np.gradient(field)) / scene.mpp
    level = rng.normal(0, 0.6)
    away = np.abs(field - level) / (slope + 2e-4)
    varied = width * (1 + 0.3 * scene.noise(width) + 0.15 * scene.noise(width / 4 + 4))
    band = ((varied / 2 - away) / scene.some(3, 20) + 0.5).clip(0, 1)
    # a layer ends somewhere
    part = (scene.noise(scene.some(300, 1500)) * 4 + rng.uniform(-1, 3)).clip(0, 1)
    return np.asarray(band * part, np.float32)


def _zone(scene: Scene) -> Light:
    """A large part of the scene with a soft or a straight, hard border."""
    rng = scene.rng
    if rng.random() < 0.25:
        y, x = np.mgrid[: scene.shape[0], : scene.shape[1]]
        row, column = scene.centre(in_tissue=True)
        angle = rng.uniform(0, 2 * np.pi)
        across = (x - column) * np.cos(angle) + (y - row) * np.sin(angle)
        across = across * scene.mpp + rng.uniform(0, 40) * scene.noise(60)
        hard = scene.some(6, 400)
        return np.asarray((across / hard + 0.5).clip(0, 1), np.float32)
    field = scene.noise(scene.some(150, 900))
    return np.asarray(
        ((field - rng.uniform(-0.5, 1.2)) * rng.uniform(1.5, 15)).clip(0, 1), np.float32
    )


def _branches(scene: Scene, low_um: float, high_um: float) -> Light:
    """Crossing bands of such a width."""
    width_um = scene.some(low_um, high_um / 2)
    found = np.zeros(scene.shape, np.float32)
    for _ in range(int(scene.rng.integers(1, 4))):
        field = scene.noise(scene.some(4, 12) * width_um)
        slope = np.hypot(*np.gradient(field)) / scene.mpp
        away = np.abs(field) / (slope + 2e-4)
        found = np.maximum(found, ((width_um / 2 - away) / 6 + 0.5).clip(0, 1))
    part = (scene.noise(scene.some(200, 800)) * 4).clip(0, 1)
    return np.asarray(found * part, np.float32)
