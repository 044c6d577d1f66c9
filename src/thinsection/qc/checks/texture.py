"""Texture of the work image by gray-level co-occurrence, in many small squares."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from thinsection.qc.checks.check import Outcome, QcCheck, QcView, Score

_MEASURES = ("contrast", "dissimilarity", "homogeneity", "ASM", "energy", "correlation")
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Texture(QcCheck):
    """Mean and std of six co-occurrence measures over random squares; warns if there is no place.

    Attributes:
        prefix: put before the column names, with an underscore.
        square_px: edge of a square; its top-left corner lies in the mask.
        num_squares: how many.
        num_levels: gray levels.
        distance_px: between the two px of a pair, along x.
        invert: True puts the squares outside the mask.
        seed: of their places.
    """

    kind: ClassVar[str] = "texture"
    name: str = "texture"
    prefix: str = ""
    square_px: int = 32
    num_squares: int = 100
    num_levels: int = 8
    distance_px: int = 5
    invert: bool = False
    seed: int = 0

    def __call__(self, view: QcView) -> Outcome:
        mask = view.ns.download(~view.mask_use if self.invert else view.mask_use)
        places = np.flatnonzero(mask)
        if not len(places):
            where = "outside" if self.invert else "in"
            return Outcome(warnings=(f"{self.name}: no px {where} the mask to measure texture at",))
        rng = np.random.default_rng(self.seed)
        rows, columns = np.divmod(rng.choice(places, self.num_squares), mask.shape[1])
        gray = view.ns.download(view.gray, reason="co-occurrence")
        scores: dict[str, Score] = {}
        for measure, values in self.measured(gray, rows, columns).items():
            column = f"{self.prefix}_{measure}" if self.prefix else measure
            scores[column] = float(values.mean())
            scores[f"{column}_std"] = float(values.std())
        return Outcome(scores=scores)

    def measured(
        self, gray: _Floats, rows: npt.NDArray[np.integer], columns: npt.NDArray[np.integer]
    ) -> dict[str, _Floats]:
        """Each measure of each square, (squares,); squares are cut at the image's border.

        A gray value v lies in level ceil(v * (num_levels - 1)). On the host: cuCIM has no
        counterpart.

        Source: Haralick et al., Textural features for image classification, 1973.
        """
        from skimage.feature import graycomatrix, graycoprops  # half a second, for this check only

        edge, limits = self.square_px, np.linspace(0, 1, self.num_levels)
        settings: dict[str, Any] = {"levels": self.num_levels, "symmetric": True}
        counts = []
        for r, c in zip(rows, columns, strict=True):
            square = np.digitize(gray[r : r + edge, c : c + edge], limits, right=True)
            counts.append(graycomatrix(square, [self.distance_px], [0], **settings)[:, :, 0, 0])
        stacked = np.stack(counts, axis=2)[..., None]  # squares in the place of distances
        return {name: graycoprops(stacked, name)[:, 0] for name in _MEASURES}
