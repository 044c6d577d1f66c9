"""Checks that only measure: contrast, brightness, stains, histograms."""

from dataclasses import dataclass
from pathlib import PurePath
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.arrays import Array, ArrayNamespace, colour, filters
from thinsection.errors import ConfigError
from thinsection.qc.checks.check import EMPTY_SCORE, Outcome, QcCheck, QcView, Score


@dataclass(frozen=True, kw_only=True)
class Contrast(QcCheck):
    """Tenengrad, Michelson and RMS contrast of the gray image.

    tenenGrad = sqrt(sum of squared gradients) / N.

    Attributes:
        prefix: put before the column names, with an underscore.
        limit_to_mask: False measures the whole image.
        invert: True takes the gradient outside the mask (gray values stay those of the mask, as
            HistoQC has it).
    """

    kind: ClassVar[str] = "contrast"
    name: str = "contrast"
    prefix: str = ""
    limit_to_mask: bool = True
    invert: bool = False

    def __call__(self, view: QcView) -> Outcome:
        energy, gray = filters.sobel_energy(view.ns, view.gray), view.gray
        if self.limit_to_mask:
            energy = energy[~view.mask_use if self.invert else view.mask_use]
            gray = gray[view.mask_use]
        stems = ("tenenGrad", "michelson", "rms")
        names = [_prefixed(self.prefix, f"{stem}_contrast") for stem in stems]
        if gray.size == 0:
            return _no_tissue(self.name, names)
        highest, lowest = float(gray.max()), float(gray.min())
        tenengrad = float(energy.sum()) ** 0.5 / gray.size
        michelson = (highest - lowest) / (highest + lowest) if highest + lowest > 0 else 0.0
        return Outcome(scores=dict(zip(names, (tenengrad, michelson, float(gray.std())))))


@dataclass(frozen=True, kw_only=True)
class Brightness(QcCheck):
    """Mean and population standard deviation of gray or of each channel; -100 and 0 of no px.

    Attributes:
        space: 'gray' [0, 1], 'RGB' 0 to 255, or 'YUV' of [0, 1].
        prefix: put before the column names, with an underscore.
        limit_to_mask: False measures the whole image.
        invert: True measures outside the mask.
    """

    kind: ClassVar[str] = "brightness"
    name: str = "brightness"
    space: Literal["gray", "RGB", "YUV"] = "gray"
    prefix: str = ""
    limit_to_mask: bool = True
    invert: bool = False

    def __call__(self, view: QcView) -> Outcome:
        scores: dict[str, Score] = {}
        mask = ~view.mask_use if self.invert else view.mask_use
        for stem, suffix, channel in _channels(view, self.space):
            values = channel[mask] if self.limit_to_mask else channel
            empty = values.size == 0
            key = _prefixed(self.prefix, f"{stem}_brightness")
            scores[key + suffix] = EMPTY_SCORE if empty else float(values.mean())
            scores[f"{key}_std{suffix}"] = 0.0 if empty else float(values.std())
        return Outcome(scores=scores)


def _channels(view: QcView, space: str) -> list[tuple[str, str, Array]]:
    """(stem, suffix, channel) of each channel of a colour space."""
    if space == "gray":
        return [("grayscale", "", view.gray)]
    if space == "RGB":
        image = view.rgb.astype(view.ns.xp.float64)
        return [(f"chan{c + 1}", "", image[..., c]) for c in range(3)]
    image = colour.yuv_from_rgb(view.ns, view.rgb)
    return [(f"chan{c + 1}", f"_{space}", image[..., c]) for c in range(3)]


@dataclass(frozen=True, kw_only=True)
class Stains(QcCheck):
    """Mean and std of each stain in the mask, clipped to [0, the image's .99 quantile].

    Attributes:
        stain: stain set, one of `arrays.colour.STAINS`.
        use_mask: False measures the whole image.
    """

    kind: ClassVar[str] = "stains"
    name: str = "stains"
    stain: str = "hed_from_rgb"
    use_mask: bool = True

    def __call__(self, view: QcView) -> Outcome:
        if self.use_mask and not bool(view.mask_use.any()):
            names = [f"deconv_c{c}_{stat}" for c in range(3) for stat in ("mean", "std")]
            return _no_tissue(self.name, names)
        scores: dict[str, Score] = {}
        amounts = colour.stains_from_rgb(view.ns, view.rgb, self.stain)
        for c in range(3):
            amount = amounts[..., c]
            clipped = view.ns.xp.clip(amount, 0.0, view.ns.xp.quantile(amount, 0.99))
            values = clipped[view.mask_use] if self.use_mask else clipped
            scores[f"deconv_c{c}_mean"] = float(values.mean())
            scores[f"deconv_c{c}_std"] = float(values.std())
        return Outcome(scores=scores)


@dataclass(frozen=True, kw_only=True)
class Histogram(QcCheck):
    """Density histogram of each channel, and its squared distance to template images' histograms.

    Attributes:
        bins: over 0 to 255.
        limit_to_mask: False measures the whole image.
        templates: image files; each adds a column `<stem>_MSE_hist`. HistoQC's four templates are
            not ours to ship: name your own, or those of an installed HistoQC.
    """

    kind: ClassVar[str] = "histogram"
    name: str = "histogram"
    bins: int = 20
    limit_to_mask: bool = True
    templates: tuple[str, ...] = ()

    def __call__(self, view: QcView) -> Outcome:
        mask = view.mask_use if self.limit_to_mask else view.ns.xp.ones_like(view.mask_use)
        own = density_histogram(view.ns, view.rgb[mask], self.bins)
        scores: dict[str, Score] = {}
        for path in self.templates:
            rgb = view.ns.upload(read_rgb(path).reshape(-1, 3), reason="template")
            other = density_histogram(view.ns, rgb, self.bins)
            stem = PurePath(path.replace("\\", "/")).stem
            scores[f"{stem}_MSE_hist"] = float(((own - other) ** 2).sum())
        return Outcome(scores=scores, tables={self.name: own})

    @property
    def files(self) -> tuple[str, ...]:
        return self.templates


def density_histogram(ns: ArrayNamespace, rgb: Array, bins: int) -> npt.NDArray[np.float64]:
    """Density of each channel over 0 to 255, (bins, 3) on the host; zeros without px."""
    counts = ns.xp.stack([ns.xp.bincount(rgb[:, c], minlength=256) for c in range(3)], axis=1)
    host = ns.download(counts).astype(np.float64)
    # numpy's rule: bins are half open, the last one closed
    index = np.minimum((np.arange(256) * bins) // 255, bins - 1)
    binned = np.stack([np.bincount(index, host[:, c], minlength=bins) for c in range(3)], axis=1)
    total = host.sum(axis=0)
    return np.asarray(binned / np.where(total > 0, total, 1) / (255 / bins))


def read_rgb(path: str) -> npt.NDArray[np.uint8]:
    """A picture file as uint8 (H, W, 3)."""
    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except OSError as error:
        raise ConfigError(f"picture must be a readable image file, got {path!r}: {error}") from None


def _prefixed(prefix: str, name: str) -> str:
    return f"{prefix}_{name}" if prefix else name


def _no_tissue(what: str, columns: list[str]) -> Outcome:
    return Outcome(
        scores=dict.fromkeys(columns, EMPTY_SCORE),
        warnings=(f"no tissue is left to measure {what} in; its columns are -100",),
    )
