"""Texture of the work image by gray-level co-occurrence, in many small squares at once."""

from dataclasses import dataclass

import numpy as np

from thinsection.arrays import Array, ArrayNamespace
from thinsection.qc.view import Outcome, QcView, Score

_MEASURES = ("contrast", "dissimilarity", "homogeneity", "ASM", "energy", "correlation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Texture:
    """Co-occurrence measures, mean and std over random squares.

    Attributes:
        name: of the check.
        prefix: put before the column names, with an underscore.
        square_px: edge of a square; its top-left corner lies in the mask.
        num_squares: how many.
        num_levels: gray levels.
        distance_px: between the two px of a pair, along x.
        invert: True puts the squares outside the mask.
        seed: of their places.
    """

    name: str = "texture"
    prefix: str = ""
    square_px: int = 32
    num_squares: int = 100
    num_levels: int = 8
    distance_px: int = 5
    invert: bool = False
    seed: int = 0


def texture(view: QcView, params: Texture) -> Outcome:
    """Mean and std of six measures; a warning if there is no place for a square."""
    mask = view.ns.download(~view.mask_use if params.invert else view.mask_use)
    places = np.flatnonzero(mask)
    if not len(places):
        where = "outside" if params.invert else "in"
        return Outcome(warnings=(f"{params.name}: no px {where} the mask to measure texture at",))
    rng = np.random.default_rng(params.seed)
    rows, columns = np.divmod(rng.choice(places, params.num_squares), mask.shape[1])
    pairs = pair_counts(view.ns, view.gray, rows, columns, params)
    scores: dict[str, Score] = {}
    for name, values in cooccurrence_measures(view.ns, pairs).items():
        column = f"{params.prefix}_{name}" if params.prefix else name
        scores[column] = float(values.mean())
        scores[f"{column}_std"] = float(values.std())
    return Outcome(scores=scores)


def pair_counts(
    ns: ArrayNamespace, gray: Array, rows: np.ndarray, columns: np.ndarray, params: Texture
) -> Array:
    """Symmetric co-occurrence counts of each square, (squares, levels, levels).

    Squares are cut at the image's border. A gray value v lies in level ceil(v * (levels - 1)).

    Memory: O(squares * square_px²).
    """
    xp, levels, edge = ns.xp, params.num_levels, params.square_px
    level = xp.digitize(gray, xp.linspace(0, 1, levels), right=True)
    offsets = xp.arange(edge)
    y = (xp.asarray(rows)[:, None] + offsets)[:, :, None]
    x = (xp.asarray(columns)[:, None] + offsets[: edge - params.distance_px])[:, None, :]
    inside = (y < gray.shape[0]) & (x + params.distance_px < gray.shape[1])
    y = xp.minimum(y, gray.shape[0] - 1)
    left = level[y, xp.minimum(x, gray.shape[1] - 1)]
    right = level[y, xp.minimum(x + params.distance_px, gray.shape[1] - 1)]
    square = xp.arange(len(rows))[:, None, None] * levels * levels
    size = len(rows) * levels * levels
    flat = (square + left * levels + right)[inside]
    counts = xp.bincount(flat, minlength=size).reshape(len(rows), levels, levels)
    return counts + counts.transpose(0, 2, 1)


def cooccurrence_measures(ns: ArrayNamespace, counts: Array) -> dict[str, Array]:
    """Six measures of each matrix, (squares,), as scikit-image's `graycoprops` defines them.

    Source: Haralick et al., Textural features for image classification, 1973.
    """
    xp = ns.xp
    total = counts.sum(axis=(1, 2), keepdims=True)
    p = counts / xp.maximum(total, 1)
    level = xp.arange(counts.shape[1])
    i, j = level[:, None], level[None, :]
    energy = (p**2).sum(axis=(1, 2))
    mean_i, mean_j = ((p * k).sum(axis=(1, 2), keepdims=True) for k in (i, j))
    std_i = xp.sqrt((p * (i - mean_i) ** 2).sum(axis=(1, 2)))
    std_j = xp.sqrt((p * (j - mean_j) ** 2).sum(axis=(1, 2)))
    covariance = (p * (i - mean_i) * (j - mean_j)).sum(axis=(1, 2))
    flat = (std_i < 1e-15) | (std_j < 1e-15)
    values = (
        (p * (i - j) ** 2).sum(axis=(1, 2)),
        (p * abs(i - j)).sum(axis=(1, 2)),
        (p / (1 + (i - j) ** 2)).sum(axis=(1, 2)),
        energy,
        xp.sqrt(energy),
        xp.where(flat, 1.0, covariance / xp.where(flat, 1.0, std_i * std_j)),
    )
    return dict(zip(_MEASURES, values, strict=True))
