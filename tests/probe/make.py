"""Small labelled data whose classes overlap, so that a wrong rule changes predictions."""

import numpy as np

from thinsection.probe.examples import TileSet, make_split


def blobs(
    n_train: int = 150, n_val: int = 90, *, dim: int = 12, classes: int = 3, seed: int = 0
) -> TileSet:
    """Gaussian classes, unequal in size, off the origin, far enough apart to be learnt."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(classes, dim)) * 0.9 + 3.0
    share = np.arange(1, classes + 1) + 1.0

    def part(n: int) -> tuple[np.ndarray, np.ndarray]:
        labels = rng.choice(classes, n, p=share / share.sum())
        labels[:classes] = np.arange(classes)
        return (centres[labels] + rng.normal(size=(n, dim))).astype(np.float32), labels

    names = tuple(f"class {c}" for c in range(classes))
    train, val = make_split(*part(n_train)), make_split(*part(n_val))
    return TileSet(name="blobs", class_names=names, train=train, val=val)
