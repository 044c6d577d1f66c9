"""Filters on either device, with scikit-image's definitions and borders."""

import numpy as np

from thinsection.arrays.namespace import Array, ArrayNamespace

_WIDE_RADIUS_PX = 24  # from here on a Gaussian is faster as blocks of a matrix product
_BLOCK_PX = 256


def box_mean(ns: ArrayNamespace, image: Array, edge_px: int) -> Array:
    """Mean over a square of edge_px px, with zeros outside the image.

    An even square reaches one px further up and left, as a full convolution cut to the middle.
    """
    return ns.ndimage.uniform_filter(image, size=edge_px, mode="constant", cval=0.0)


def laplacian(ns: ArrayNamespace, image: Array) -> Array:
    """4 times the px minus its four neighbours; the border is mirrored."""
    return -ns.ndimage.laplace(image, mode="reflect")


def sobel_energy(ns: ArrayNamespace, image: Array) -> Array:
    """Squared gradient magnitude, mean over both axes, of kernels whose weights sum to 1."""
    along = [ns.ndimage.sobel(image, axis=axis, mode="reflect") / 4.0 for axis in (0, 1)]
    return (along[0] ** 2 + along[1] ** 2) / 2.0


def gaussian(ns: ArrayNamespace, image: Array, sigma_px: float) -> Array:
    """Gaussian blur, cut at 4 sigma; the border px goes on outside.

    Memory: O(H * W); a wide Gaussian adds one block of (256 + 8 sigma) rows.
    """
    radius = int(4.0 * sigma_px + 0.5)
    if radius < _WIDE_RADIUS_PX:
        return ns.ndimage.gaussian_filter(image, sigma_px, mode="nearest", truncate=4.0)
    offsets = np.arange(-radius, radius + 1)
    kernel = np.exp(-0.5 * (offsets / sigma_px) ** 2)
    weights = ns.xp.asarray(kernel / kernel.sum(), dtype=image.dtype)
    return _wide_along_rows(ns, _wide_along_rows(ns, image, weights).T, weights).T


def _wide_along_rows(ns: ArrayNamespace, image: Array, weights: Array) -> Array:
    """Convolution along axis 0, each block of rows one product with a banded matrix."""
    xp, height, radius = ns.xp, image.shape[0], len(weights) // 2
    band = xp.zeros((_BLOCK_PX, _BLOCK_PX + 2 * radius), dtype=image.dtype)
    rows = xp.arange(_BLOCK_PX)[:, None]
    band[rows, rows + xp.arange(len(weights))[None, :]] = weights
    out = xp.empty(image.shape, dtype=image.dtype)
    for top in range(0, height, _BLOCK_PX):
        count = min(_BLOCK_PX, height - top)
        taken = xp.clip(xp.arange(top - radius, top + count + radius), 0, height - 1)
        out[top : top + count] = band[:count, : count + 2 * radius] @ image[taken]
    return out


def local_minimum(ns: ArrayNamespace, image: Array, footprint: Array) -> Array:
    """Least value under the footprint, of px inside the image only."""
    return ns.ndimage.minimum_filter(image, footprint=ns.xp.asarray(footprint), mode="nearest")


def resized_nearest(ns: ArrayNamespace, image: Array, shape: tuple[int, int]) -> Array:
    """The image at another shape, each px the one under its centre."""
    rows, columns = (
        ns.xp.clip(
            ns.xp.floor((ns.xp.arange(new) + 0.5) * (old / new)).astype(ns.xp.int64), 0, old - 1
        )
        for old, new in zip(image.shape[:2], shape)
    )
    return image[rows[:, None], columns[None, :]]


def ridges(ns: ArrayNamespace, image: Array, sigma_px: float) -> tuple[Array, Array]:
    """Eigenvalues of the Hessian at one scale, times sigma², by size: |low| <= |high|."""
    second = [
        ns.ndimage.gaussian_filter(image, sigma_px, order=order, mode="nearest")
        for order in ((2, 0), (1, 1), (0, 2))
    ]
    mean = (second[0] + second[2]) / 2.0
    spread = ns.xp.sqrt(((second[0] - second[2]) / 2.0) ** 2 + second[1] ** 2)
    one, two = (mean + spread) * sigma_px**2, (mean - spread) * sigma_px**2
    swap = ns.xp.abs(one) > ns.xp.abs(two)
    return ns.xp.where(swap, two, one), ns.xp.where(swap, one, two)


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
