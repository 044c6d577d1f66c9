"""A random forest over features of pixels, with HistoQC's features and HistoQC's training.

The trees are kept as plain arrays, without pickle, and scikit-learn walks through them. A forest
runs on the CPU.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from thinsection.errors import ConfigError, InvalidInputError
from thinsection.machine import cpu_count
from thinsection.types import MaskArray, RgbArray

K = TypeVar("K")
Example = tuple[RgbArray, MaskArray]  # a picture, and the mask of the pixels to find
_Floats = npt.NDArray[np.float64]

_FRANGI_SIGMAS = (1.0, 3.0, 5.0, 7.0, 9.0)
_FRANGI_BETA = 0.5
_FRANGI_GAMMA = 15.0
# Largest distance of a px on which a feature depends: 4 times Frangi's widest sigma, and 2 px for
# two differences.
_REACH_PX = 38
# Pixels of a band, the part of an image that is processed at once: with its features it takes some
# 70 MB.
_BAND_PX = 1 << 19
# HistoQC's number, scikit-learn's default.
_NUM_TREES = 100
# Arrays of `Forest` that have one value per node.
_NODE_ARRAYS = ("left", "right", "feature", "threshold", "share")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Trees, one after the other in arrays of nodes; children are counted from the tree's start.

    Memory: 25 bytes per node.
    """

    # names of the features; their planes, in this order, are the columns that nodes compare
    features: tuple[str, ...]
    starts: npt.NDArray[np.int64]  # (trees + 1,), first node of each tree, and the end
    left: npt.NDArray[np.int32]  # (nodes,), child of pixels <= threshold; -1: a leaf
    right: npt.NDArray[np.int32]  # (nodes,)
    feature: npt.NDArray[np.int8]  # (nodes,), column that is compared; -2 in a leaf
    threshold: npt.NDArray[np.float64]  # (nodes,)
    # (nodes,), of the training pixels of the node, the share of those to find
    share: npt.NDArray[np.float64]


def _rgb(rgb: RgbArray, gray: _Floats) -> list[npt.NDArray[Any]]:
    return [rgb[..., c] for c in range(3)]


def _laplace(rgb: RgbArray, gray: _Floats) -> list[npt.NDArray[Any]]:
    from skimage.filters import laplace

    return [laplace(gray, ksize=3)]


def _frangi(rgb: RgbArray, gray: _Floats) -> list[npt.NDArray[Any]]:
    """Largest response over the scales to a dark line.

    scikit-image 0.19 defines it, the version that HistoQC requires: second differences of a blurred
    image. Later versions use derivatives of the Gaussian, with other results.

    Source: Frangi et al., Multiscale vessel enhancement filtering, 1998.
    """
    from scipy import ndimage

    best = np.zeros_like(gray)
    for sigma in _FRANGI_SIGMAS:
        blurred = ndimage.gaussian_filter(1.0 - gray, sigma, mode="reflect")
        along_y, along_x = np.gradient(blurred)
        yy = np.gradient(along_y, axis=0) * sigma**2
        xy = np.gradient(along_x, axis=0) * sigma**2
        xx = np.gradient(along_x, axis=1) * sigma**2
        mean = (xx + yy) / 2
        spread = np.sqrt(4 * xy**2 + (xx - yy) ** 2) / 2
        high = mean + spread
        low = mean - spread
        # the eigenvalue that is larger in size is across the line
        is_high = np.abs(high) > np.abs(low)
        across = np.where(is_high, high, low)
        along = np.where(is_high, low, high)
        size = np.abs(across)
        size[size == 0] = 1e-10
        line = np.exp(-((along / size) ** 2) / (2 * _FRANGI_BETA**2))
        strength = 1 - np.exp(-(along**2 + across**2) / (2 * _FRANGI_GAMMA**2))
        np.maximum(best, np.where(across > 0, 0.0, line * strength), out=best)
    return [best]


def _gaussian(rgb: RgbArray, gray: _Floats) -> list[npt.NDArray[Any]]:
    from skimage.filters import gaussian

    return [gaussian(gray, sigma=1)]


def _median(rgb: RgbArray, gray: _Floats) -> list[npt.NDArray[Any]]:
    from skimage.filters import median
    from skimage.morphology import disk

    return [median(gray, disk(3))]


# HistoQC's name -> planes (H, W) of a picture, by its RGB and its luma in [0, 1]
_FEATURES: dict[str, Callable[[RgbArray, _Floats], list[npt.NDArray[Any]]]] = {
    "rgb": _rgb,
    "laplace": _laplace,
    "frangi": _frangi,
    "gaussian": _gaussian,
    "median": _median,
}


def check_features(names: Iterable[str]) -> None:
    """Raises ConfigError: a name is not the name of a feature."""
    for name in names:
        if name not in _FEATURES:
            raise ConfigError(
                f"features must be from {', '.join(_FEATURES)}, got {name!r}"
            )


def pixel_features(rgb: RgbArray, name: str) -> npt.NDArray[np.float32]:
    """Values of a feature, (H, W, planes), for a picture uint8 (H, W, 3).

    Memory: some 130 bytes per pixel for 'frangi', less for the others.
    """
    from skimage.color import rgb2gray

    check_features([name])
    return np.stack(_FEATURES[name](rgb, rgb2gray(rgb)), axis=2, dtype=np.float32)


def train(
    examples: Sequence[Example],
    features: tuple[str, ...],
    *,
    seed: int,
    samples_per_example: float = 0.0,
    rng: np.random.RandomState | None = None,
) -> Forest:
    """Trains a forest on pixels of examples, on all CPUs; the same inputs give the same forest.

    Parameters are those of HistoQC, which are scikit-learn's defaults.

    Args:
        examples: pictures with masks.
        features: names of `pixel_features`.
        seed: decides the pixels that are drawn.
        samples_per_example: pixels that are drawn from each example, with replacement; up to 1, as
            a share of its pixels; 0 takes each pixel once.
        rng: generator for the trees, which is left as it is after `advance`; None starts one with
            the seed.

    Memory: O(pixels of the examples * features), and 25 bytes per node.

    Raises:
        InvalidInputError: the taken pixels are all of one class.
    """
    from sklearn.ensemble import RandomForestClassifier

    rng = np.random.RandomState(seed) if rng is None else rng
    columns = []
    labels = []
    for rgb, mask in examples:
        x = np.concatenate([_matrix(rgb, name) for name in features], axis=1)
        y = mask.ravel()
        drawn = _draw_samples(rng, len(y), seed, samples_per_example)
        columns.append(x[drawn])
        labels.append(y[drawn])
    y = np.concatenate(labels)
    for side, is_absent in (("inside", not y.any()), ("outside", y.all())):
        if is_absent:
            raise InvalidInputError(
                f"examples must have pixels of both classes, got none {side} the masks"
            )
    # each tree draws its seed from the generator
    forest = RandomForestClassifier(_NUM_TREES, random_state=rng, n_jobs=cpu_count())
    forest.fit(np.concatenate(columns), y)
    return _as_arrays(features, [tree.tree_ for tree in forest.estimators_])


def advance(
    rng: np.random.RandomState,
    examples: Sequence[Example],
    *,
    seed: int,
    samples_per_example: float,
) -> None:
    """Draws what `train` draws, without training."""
    for _, mask in examples:
        _draw_samples(rng, mask.size, seed, samples_per_example)
    for _ in range(_NUM_TREES):
        rng.randint(np.iinfo(np.int32).max)


def _draw_samples(
    rng: np.random.RandomState, num_px: int, seed: int, samples_per_example: float
) -> slice | npt.NDArray[np.int64]:
    """Places of the pixels of an example that are taken."""
    if samples_per_example == 0:
        return slice(None)
    number = samples_per_example
    if number <= 1:
        number *= num_px
    # HistoQC seeds its generator again for each example
    rng.seed(seed)
    return rng.choice(num_px, size=int(number))


def _matrix(rgb: RgbArray, name: str) -> npt.NDArray[np.float32]:
    """Values of a feature, (pixels, planes)."""
    values = pixel_features(rgb, name)
    return values.reshape(-1, values.shape[2])


def _as_arrays(features: tuple[str, ...], trees: Sequence[Any]) -> Forest:
    counts = [tree.node_count for tree in trees]
    # (nodes, 2): of both classes, as counts or as shares
    values = np.concatenate([tree.value[:, 0, :] for tree in trees])
    return Forest(
        features=features,
        starts=np.cumsum([0, *counts]),
        left=np.concatenate([tree.children_left for tree in trees]).astype(np.int32),
        right=np.concatenate([tree.children_right for tree in trees]).astype(np.int32),
        feature=np.concatenate([tree.feature for tree in trees]).astype(np.int8),
        threshold=np.concatenate([tree.threshold for tree in trees]),
        share=values[:, 1] / values.sum(axis=1),
    )


def probabilities(
    rgb: RgbArray, forests: Mapping[K, Forest]
) -> dict[K, npt.NDArray[np.float32]]:
    """Probability of each pixel by each forest, (H, W), in one pass over the picture.

    Each band of rows is processed with the rows around it on which its features depend, so there
    are no seams between bands.

    Memory: O(H * W * forests + features of a band of about half a million pixels).
    """
    height, width = rgb.shape[:2]
    band_rows = max(_REACH_PX, _BAND_PX // width)
    names: dict[str, None] = {}
    for forest in forests.values():
        names |= dict.fromkeys(forest.features)
    result = {key: np.empty((height, width), dtype=np.float32) for key in forests}
    for top in range(0, height, band_rows):
        bottom = min(height, top + band_rows)
        low = max(0, top - _REACH_PX)
        high = min(height, bottom + _REACH_PX)
        values = {}
        for name in names:
            of_band = pixel_features(rgb[low:high], name)[top - low : bottom - low]
            values[name] = of_band.reshape(-1, of_band.shape[2])
        for key, forest in forests.items():
            x = np.concatenate([values[name] for name in forest.features], axis=1)
            result[key][top:bottom] = predict(forest, x).reshape(-1, width)
    return result


def predict(forest: Forest, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Mean share over the trees, (pixels,), of pixels with these features, (pixels, features).

    Memory: 24 bytes per pixel, and 80 bytes per node of one tree.
    """
    total = np.zeros(len(x))
    for nodes, tree in zip(_node_slices(forest), _trees(forest, x.shape[1])):
        total += forest.share[nodes][tree.apply(x)]
    return total / (len(forest.starts) - 1)


def _node_slices(forest: Forest) -> Iterator[slice]:
    for start, end in zip(forest.starts[:-1], forest.starts[1:]):
        yield slice(start, end)


def _trees(forest: Forest, num_columns: int) -> Iterator[Any]:
    """The trees as scikit-learn walks through them, one after the other."""
    from sklearn.tree import DecisionTreeClassifier

    # a small tree has the layout of a node in the installed version
    pattern = DecisionTreeClassifier().fit(np.eye(2, num_columns), [0, 1]).tree_
    layout = pattern.__getstate__()["nodes"].dtype
    for nodes in _node_slices(forest):
        count = nodes.stop - nodes.start
        table = np.zeros(count, dtype=layout)
        table["left_child"] = forest.left[nodes]
        table["right_child"] = forest.right[nodes]
        table["feature"] = forest.feature[nodes]
        table["threshold"] = forest.threshold[nodes]
        tree = type(pattern)(num_columns, np.array([2], dtype=np.intp), 1)
        state = {
            # scikit-learn needs these two to walk on a path, not to apply the tree
            "max_depth": 0,
            "values": np.zeros((count, 1, 2)),
            "node_count": count,
            "nodes": table,
        }
        tree.__setstate__(state)
        yield tree


def save_forest(path: Path, forest: Forest) -> None:
    """Writes the arrays of a forest as .npz, no pickle."""
    arrays = {name: getattr(forest, name) for name in ("starts", *_NODE_ARRAYS)}
    with path.open("wb") as file:
        np.savez(file, features=forest.features, **arrays)


def load_forest(path: Path) -> Forest | None:
    """Reads the forest of a file; None if the file is missing, incomplete, or has no trees."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            forest = Forest(
                features=tuple(arrays["features"].tolist()),
                **{name: arrays[name] for name in ("starts", *_NODE_ARRAYS)},
            )
            return forest if _has_trees(forest) else None
    except (OSError, KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile):
        return None


def _has_trees(forest: Forest) -> bool:
    """True if each path through the nodes stays in its tree and ends.

    scikit-learn checks neither.
    """
    sizes = np.diff(forest.starts)
    count = len(forest.left)
    if any(len(getattr(forest, name)) != count for name in _NODE_ARRAYS):
        return False
    if len(sizes) == 0 or sizes.min() < 1 or forest.starts[0] != 0:
        return False
    if forest.starts[-1] != count:
        return False
    place = np.arange(count) - np.repeat(forest.starts[:-1], sizes)
    end = np.repeat(sizes, sizes)
    is_leaf = forest.left == -1
    goes_on = np.ones(count, dtype=bool)
    for child in (forest.left, forest.right):
        goes_on &= (child > place) & (child < end)
    num_columns = sum(3 if name == "rgb" else 1 for name in forest.features)
    goes_on &= (forest.feature >= 0) & (forest.feature < num_columns)
    return bool((is_leaf | goes_on).all())
