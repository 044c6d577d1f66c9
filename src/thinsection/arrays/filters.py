"""Filters on either device, with scikit-image's definitions and borders."""

import numpy as np

from thinsection.arrays.convolution import gaussian_kernel, nearest, separable
from thinsection.arrays.namespace import Array, ArrayNamespace


def box_mean(ns: ArrayNamespace, image: Array, edge_px: int) -> Array:
    """Mean over a square of edge_px px, with zeros outside the image.

    An even square reaches one px further up and left, as a full convolution cut to the middle.
    """
    return ns.ndimage.uniform_filter(image, size=edge_px, mode="constant", cval=0.0)


def laplacian(ns: ArrayNamespace, image: Array) -> Array:
    """4 times the px minus its four neighbours; the border px goes on outside."""
    out = 4 * image
    for to, of in ((out, image), (out.T, image.T)):
        to[1:] -= of[:-1]
        to[0] -= of[0]
        to[:-1] -= of[1:]
        to[-1] -= of[-1]
    return out


def sobel_energy(ns: ArrayNamespace, image: Array) -> Array:
    """Squared gradient magnitude, mean over both axes, of kernels whose weights sum to 1."""
    padded = ns.xp.pad(image, 1, mode="edge")
    down = padded[2:] - padded[:-2]
    down = (down[:, :-2] + down[:, 2:]) + 2 * down[:, 1:-1]
    along = padded[:, 2:] - padded[:, :-2]
    along = (along[:-2] + along[2:]) + 2 * along[1:-1]
    return (down * down + along * along) / 32.0


def gaussian(
    ns: ArrayNamespace, image: Array, sigma_px: float, *, shape: tuple[int, int] | None = None
) -> Array:
    """Gaussian blur, cut at 4 sigma; the border px goes on outside.

    Args:
        ns: where arrays live.
        image: float (H, W).
        sigma_px: of the Gaussian.
        shape: computes only the px that `resized_nearest` to this shape takes; None all.

    Memory: O(H * W).
    """
    kernel = gaussian_kernel(sigma_px)
    return separable(ns, image, kernel, kernel, shape=shape)


def box_deviation(ns: ArrayNamespace, image: Array, edge_px: int) -> Array:
    """Standard deviation over a square of odd edge; the border px goes on outside."""
    kernel = np.full(edge_px, 1 / edge_px)
    mean = separable(ns, image, kernel, kernel)
    variance = separable(ns, image * image, kernel, kernel)
    variance -= mean * mean
    return ns.xp.sqrt(ns.xp.maximum(variance, 0))


def local_minimum(ns: ArrayNamespace, image: Array, footprint: Array) -> Array:
    """Least value under the footprint, of px inside the image only."""
    return ns.ndimage.minimum_filter(image, footprint=ns.xp.asarray(footprint), mode="nearest")


def resized_nearest(ns: ArrayNamespace, image: Array, shape: tuple[int, int]) -> Array:
    """The image at another shape, each px the one under its centre."""
    rows, columns = (ns.xp.asarray(nearest(*edges)) for edges in zip(image.shape, shape))
    return image[rows[:, None], columns[None, :]]


def ridges(ns: ArrayNamespace, image: Array, sigma_px: float) -> tuple[Array, Array]:
    """Eigenvalues of the Hessian at one scale, times sigma², by size: |low| <= |high|."""
    none, first, second = (gaussian_kernel(sigma_px, order=order) for order in range(3))
    mean = separable(ns, image, second, none)
    half = separable(ns, image, none, second)
    mixed = separable(ns, image, first, first)
    mean, half = (mean + half) * (sigma_px**2 / 2), (mean - half) * (sigma_px**2 / 2)
    mixed *= sigma_px**2
    spread = ns.xp.copysign(ns.xp.sqrt(half * half + mixed * mixed), mean)
    return mean - spread, mean + spread


def otsu_threshold(ns: ArrayNamespace, image: Array, *, bins: int = 256) -> float:
    """The level that parts the image's histogram with the largest variance between both sides.

    An image of one value gives that value.
    """
    lowest, highest = float(image.min()), float(image.max())
    if lowest == highest:
        return lowest
    counts, edges = ns.xp.histogram(image, bins=bins, range=(lowest, highest))
    counts = ns.download(counts, reason="otsu histogram").astype(np.float64)
    edges = ns.download(edges, reason="otsu histogram")
    centers = (edges[:-1] + edges[1:]) / 2.0
    below, above = np.cumsum(counts), np.cumsum(counts[::-1])[::-1]
    mean_below = np.cumsum(counts * centers) / below
    mean_above = (np.cumsum((counts * centers)[::-1]) / above[::-1])[::-1]
    between = below[:-1] * above[1:] * (mean_below[:-1] - mean_above[1:]) ** 2
    return float(centers[int(np.argmax(between))])


def local_otsu(ns: ArrayNamespace, image: Array, footprint: Array) -> Array:
    """Otsu's level under the footprint around each px, of uint8 (H, W).

    Runs on the host: neither cupyx nor cuCIM has a counterpart, so the image crosses twice.
    """
    from skimage.filters import rank

    host = rank.otsu(ns.download(image, reason="local otsu"), footprint)
    return ns.upload(host, reason="local otsu")


def equalised(ns: ArrayNamespace, image: Array) -> Array:
    """Share of px at or below each px's value, float64 (H, W), of uint8 (H, W)."""
    counts = ns.xp.bincount(image.ravel(), minlength=256)
    return (ns.xp.cumsum(counts) / image.size)[image]
