"""Fewer rows: at most so many of each class and split, drawn with a seed, kept in their order."""

import dataclasses
from typing import overload

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.probe.examples import Labels, Split, TileSet
from thinsection.probe.image_sets import ImagePart, ImageSet


@overload
def at_most_per_class(data: TileSet, most: int, *, seed: int) -> TileSet: ...
@overload
def at_most_per_class(data: ImageSet, most: int, *, seed: int) -> ImageSet: ...
def at_most_per_class(data: TileSet | ImageSet, most: int, *, seed: int) -> TileSet | ImageSet:
    """The set with at most `most` rows of each class in train and in val; the facts say so.

    Raises:
        InvalidInputError: most < 1.
    """
    if most < 1:
        raise InvalidInputError(f"max_per_class must be >= 1, got {most}")
    facts = {**data.facts, "max_per_class": most}
    if isinstance(data, TileSet):
        splits = [_rows(s, draw_rows(s.labels, most, seed=seed)) for s in (data.train, data.val)]
        return dataclasses.replace(data, train=splits[0], val=splits[1], facts=facts)
    parts = [_images(p, draw_rows(p.labels, most, seed=seed)) for p in (data.train, data.val)]
    return dataclasses.replace(data, train=parts[0], val=parts[1], facts=facts)


def draw_rows(labels: Labels, most: int, *, seed: int) -> npt.NDArray[np.int64]:
    """Sorted indices of at most `most` rows of each class."""
    rng = np.random.default_rng(seed)
    kept = []
    for c in np.unique(labels):
        rows = np.flatnonzero(labels == c)
        kept.append(rng.choice(rows, most, replace=False) if len(rows) > most else rows)
    return np.sort(np.concatenate(kept))


def _rows(split: Split, rows: npt.NDArray[np.int64]) -> Split:
    return Split(
        embeddings=split.embeddings[rows],
        labels=split.labels[rows],
        ids=tuple(split.ids[i] for i in rows),
    )


def _images(part: ImagePart, rows: npt.NDArray[np.int64]) -> ImagePart:
    return ImagePart(images=tuple(part.images[i] for i in rows), labels=part.labels[rows])
