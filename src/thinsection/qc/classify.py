"""What the pixel models of a pipeline say, from one pass over the work image."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from thinsection.arrays import Array, ArrayNamespace
from thinsection.qc.by_example import ByExample
from thinsection.qc.pixel_features import REACH_PX, pixel_features
from thinsection.qc.pixel_model import PixelModel, predict

_BAND_PX = 1 << 20  # of the image at once: a band and its features take some 100 MB


@dataclass(slots=True, kw_only=True)
class PixelClassifiers:
    """P of each check's model; the first one asked for computes all, as they share features.

    Attributes:
        ns: where arrays live.
        rgb: uint8 (H, W, 3).
        checks: that may be asked for.
        load: the trained model of a check.
    """

    ns: ArrayNamespace
    rgb: Array
    checks: Sequence[ByExample]
    load: Callable[[ByExample], PixelModel]
    _found: dict[ByExample, Array] = field(default_factory=dict, init=False)

    def __call__(self, check: ByExample) -> Array:
        """P of each px, float32 (H, W)."""
        if not self._found:
            models = {check: self.load(check) for check in self.checks}
            self._found = probabilities(self.ns, self.rgb, models)
        return self._found[check]


def probabilities(
    ns: ArrayNamespace, rgb: Array, models: Mapping[ByExample, PixelModel]
) -> dict[ByExample, Array]:
    """P of each px by each model, float32 (H, W).

    Bands of rows are taken one after the other, each with the rows beyond it that its features
    look at, so that the result is that of the whole image.

    Memory: O(H * W * models + features of a band of about a million px).
    """
    height, width = rgb.shape[:2]
    rows = max(REACH_PX, _BAND_PX // width)
    names = tuple(dict.fromkeys(name for check in models for name in check.features))
    found = {check: ns.xp.empty((height, width), dtype=ns.xp.float32) for check in models}
    for top in range(0, height, rows):
        bottom = min(height, top + rows)
        low, high = max(0, top - REACH_PX), min(height, bottom + REACH_PX)
        features = pixel_features(ns, rgb[low:high], names)
        for check, model in models.items():
            planes = [plane for name in check.features for plane in features[name]]
            inside = [plane[top - low : bottom - low] for plane in planes]
            found[check][top:bottom] = predict(ns, model, inside)
    return found
