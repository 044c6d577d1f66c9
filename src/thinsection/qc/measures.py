"""Checks that only measure: contrast, brightness, stains, histograms."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.arrays import Array, ArrayNamespace, colour, filters
from thinsection.errors import ConfigError
from thinsection.qc.view import EMPTY_SCORE, Outcome, QcView, Score

_NO_TISSUE = "no tissue is left to measure {what} in; its columns are -100"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """Tenengrad, Michelson and RMS contrast of the gray image.

    Attributes:
        name: of the check.
        prefix: put before the column names, with an underscore.
        limit_to_mask: False measures the whole image.
        invert: True takes the gradient outside the mask (gray values stay those of the mask, as
            HistoQC has it).
    """

    name: str = "contrast"
    prefix: str = ""
    limit_to_mask: bool = True
    invert: bool = False


def contrast(view: QcView, params: Contrast) -> Outcome:
    """tenenGrad = sqrt(sum of squared gradients) / N; Michelson; RMS."""
    energy, gray = filters.sobel_energy(view.ns, view.gray), view.gray
    if params.limit_to_mask:
        energy = energy[~view.mask_use if params.invert else view.mask_use]
        gray = gray[view.mask_use]
    names = [
        _prefixed(params.prefix, n)
        for n in ("tenenGrad_contrast", "michelson_contrast", "rms_contrast")
    ]
    if gray.size == 0:
        return Outcome(
            scores=dict.fromkeys(names, EMPTY_SCORE),
            warnings=(_NO_TISSUE.format(what=params.name),),
        )
    highest, lowest = float(gray.max()), float(gray.min())
    tenengrad = float(energy.sum()) ** 0.5 / gray.size
    michelson = (highest - lowest) / (highest + lowest) if highest + lowest > 0 else 0.0
    return Outcome(scores=dict(zip(names, (tenengrad, michelson, float(gray.std())))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Brightness:
    """Mean and standard deviation of gray or of each channel.

    Attributes:
        name: of the check.
        space: 'gray' [0, 1], 'RGB' 0 to 255, or 'YUV' of [0, 1].
        prefix: put before the column names, with an underscore.
        limit_to_mask: False measures the whole image.
        invert: True measures outside the mask.
    """

    name: str = "brightness"
    space: Literal["gray", "RGB", "YUV"] = "gray"
    prefix: str = ""
    limit_to_mask: bool = True
    invert: bool = False


def brightness(view: QcView, params: Brightness) -> Outcome:
    """Mean and population std of each channel in the mask; -100 and 0 if it is empty."""
    scores: dict[str, Score] = {}
    mask = ~view.mask_use if params.invert else view.mask_use
    for stem, suffix, channel in _channels(view, params.space):
        values = channel[mask] if params.limit_to_mask else channel
        empty = values.size == 0
        key = _prefixed(params.prefix, f"{stem}_brightness")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stains:
    """Amount of each stain in the mask.

    Attributes:
        name: of the check.
        stain: stain set, one of `arrays.colour.STAINS`.
        use_mask: False measures the whole image.
    """

    name: str = "stains"
    stain: str = "hed_from_rgb"
    use_mask: bool = True


def stains(view: QcView, params: Stains) -> Outcome:
    """Mean and std of each stain, clipped to [0, the image's .99 quantile]."""
    if params.use_mask and not bool(view.mask_use.any()):
        keys = [f"deconv_c{c}_{stat}" for c in range(3) for stat in ("mean", "std")]
        return Outcome(
            scores=dict.fromkeys(keys, EMPTY_SCORE),
            warnings=(_NO_TISSUE.format(what=params.name),),
        )
    scores: dict[str, Score] = {}
    amounts = colour.stains_from_rgb(view.ns, view.rgb, params.stain)
    for c in range(3):
        amount = amounts[..., c]
        clipped = view.ns.xp.clip(amount, 0.0, view.ns.xp.quantile(amount, 0.99))
        values = clipped[view.mask_use] if params.use_mask else clipped
        scores[f"deconv_c{c}_mean"] = float(values.mean())
        scores[f"deconv_c{c}_std"] = float(values.std())
    return Outcome(scores=scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Density histogram of each channel, and its distance to template images' histograms.

    Attributes:
        name: of the check.
        bins: over 0 to 255.
        limit_to_mask: False measures the whole image.
        templates: image files; each adds a column `<stem>_MSE_hist`. HistoQC's four templates are
            not ours to ship: name your own, or those of an installed HistoQC.
    """

    name: str = "histogram"
    bins: int = 20
    limit_to_mask: bool = True
    templates: tuple[str, ...] = ()


def histogram(view: QcView, params: Histogram) -> Outcome:
    """Sum of squared differences between densities, per template; the histogram as a table."""
    mask = view.mask_use if params.limit_to_mask else view.ns.xp.ones_like(view.mask_use)
    own = density_histogram(view.ns, view.rgb[mask], params.bins)
    scores: dict[str, Score] = {}
    for path in params.templates:
        rgb = read_rgb(path).reshape(-1, 3)
        other = density_histogram(view.ns, view.ns.upload(rgb, reason="template"), params.bins)
        stem = path.replace("\\", "/").rsplit("/", 1)[-1].rsplit(".", 1)[0]
        scores[f"{stem}_MSE_hist"] = float(((own - other) ** 2).sum())
    return Outcome(scores=scores, tables={params.name: own})


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
