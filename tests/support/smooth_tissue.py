"""Smooth tissue, drawn in a picture of real tissue: no fine detail, although it is in focus."""

import math

import numpy as np
import numpy.typing as npt
from scipy import ndimage
from scipy.spatial import cKDTree

from thinsection.types import MaskArray, RgbArray

KINDS = ("keratin", "muscle", "nerve", "cartilage", "mucin")
_GLASS = 243.0
_NOISE = 1.5
_Field = npt.NDArray[np.float64]


def with_smooth_tissue(
    rgb: RgbArray, where: MaskArray, kind: str, seed: int, *, mpp: float = 0.5
) -> RgbArray:
    """The picture with one kind of smooth tissue in an area; a camera's noise is on it.

    Args:
        rgb: uint8 (H, W, 3).
        where: bool (H, W).
        kind: one of `KINDS`.
        seed: of the layers' place and of the noise.
        mpp: µm per pixel.
    """
    rng = np.random.default_rng(seed)
    density = _density(kind, where.shape, mpp, rng)
    density = ndimage.gaussian_filter(density, (0.8, 0.8, 0))
    light = _GLASS * np.exp(-density) + rng.normal(0, _NOISE, density.shape)
    cover = ndimage.gaussian_filter(where.astype(np.float32), 1.0)[..., None]
    mixed = rgb * (1 - cover) + light * cover
    return np.asarray(mixed.clip(0, 255).round().astype(np.uint8))


def muscle_picture(
    seed: int, *, shape: tuple[int, int] = (640, 800), mpp: float = 0.5
) -> RgbArray:
    """Skeletal muscle cut across, up to every border: smooth fibres with light gaps between them.

    Args:
        seed: of the fibres, the nuclei and the noise.
        shape: (height, width).
        mpp: µm per pixel.
    """
    rng = np.random.default_rng(seed)
    places = np.stack(np.mgrid[: shape[0], : shape[1]], axis=2) * mpp
    extent = np.array(shape) * mpp
    num_fibres = int(extent.prod() / 50**2)
    centres = cKDTree(rng.uniform(0, 1, (num_fibres, 2)) * extent)
    away, fibre = centres.query(places, k=2)
    strength = rng.uniform(0.8, 1.1, num_fibres)[fibre[..., 0]]
    density = strength[..., None] * (0.14, 0.7, 0.32)
    density[away[..., 1] - away[..., 0] < 4] = 0.03
    nuclei = cKDTree(rng.uniform(0, 1, (3 * num_fibres, 2)) * extent)
    away, _ = nuclei.query(places)
    density[away < 2.5] = (0.8, 0.9, 0.4)
    density = ndimage.gaussian_filter(density, (0.7, 0.7, 0))
    light = _GLASS * np.exp(-density) + rng.normal(0, 1, density.shape)
    return np.asarray(light.clip(0, 255).round().astype(np.uint8))


def _density(
    kind: str, shape: tuple[int, ...], mpp: float, rng: np.random.Generator
) -> _Field:
    """Optical density of red, green and blue, (H, W, 3)."""
    y, x = np.mgrid[: shape[0], : shape[1]] * mpp
    turn = rng.uniform(0, math.pi)
    across = y * math.cos(turn) - x * math.sin(turn)
    across += 10 * _slow_noise(rng, shape, 150 / mpp)
    if kind == "keratin":
        wave = across / rng.uniform(9, 14) * 2 * math.pi
        layers = 0.75 + 0.2 * np.sin(wave + 1.5 * _slow_noise(rng, shape, 40 / mpp))
        return layers[..., None] * (0.08, 0.56, 0.4)
    if kind == "muscle":
        fibres = 0.85 + 0.12 * np.sin(across / 22 * 2 * math.pi)
        fibres += 0.05 * _slow_noise(rng, shape, 12 / mpp)
        return fibres[..., None] * (0.14, 0.7, 0.32)
    if kind == "nerve":
        along = x * math.cos(turn) + y * math.sin(turn)
        wavy = across + 6 * np.sin(along / 40 * 2 * math.pi)
        fibres = 0.6 + 0.1 * np.sin(wavy / 12 * 2 * math.pi)
        fibres += 0.05 * _slow_noise(rng, shape, 10 / mpp)
        return fibres[..., None] * (0.18, 0.55, 0.3)
    if kind == "mucin":
        strings = 0.5 + 0.12 * np.abs(_slow_noise(rng, shape, 18 / mpp))
        return strings[..., None] * (0.3, 0.32, 0.15)
    matrix = 0.7 + 0.06 * _slow_noise(rng, shape, 60 / mpp)
    density = matrix[..., None] * (0.45, 0.5, 0.2)
    for _ in range(int(math.prod(shape) * (mpp / 60) ** 2)):
        row, column = rng.uniform(0, np.array(shape) * mpp)
        # a cell with its clear space reaches 9 µm far
        top, left = int(max(row - 9, 0) / mpp), int(max(column - 9, 0) / mpp)
        near = np.s_[top : int((row + 9) / mpp) + 2, left : int((column + 9) / mpp) + 2]
        away_um = np.hypot(y[near] - row, x[near] - column)[..., None]
        density[near] *= 1 - 0.8 * np.clip((9 - away_um) / 2, 0, 1)
        density[near] += np.clip(3.5 - away_um, 0, 1) * (0.8, 0.9, 0.4)
    return density


def _slow_noise(
    rng: np.random.Generator, shape: tuple[int, ...], step_px: float
) -> _Field:
    """Noise with waves of about a step, of deviation 1."""
    grid = rng.normal(size=[int(length / step_px) + 4 for length in shape])
    noise = ndimage.zoom(grid, step_px, order=3)[: shape[0], : shape[1]]
    return np.asarray(noise / noise.std())
