"""Checks that only measure, or leave a picture: contrast, stains, histograms, texture, masks."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePath
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.arrays import Array, ArrayNamespace, filters
from thinsection.arrays.bands import row_bands
from thinsection.errors import ConfigError, rewording
from thinsection.qc.checks.check import (
    EMPTY_SCORE,
    Outcome,
    QcCheck,
    QcView,
    ReportTable,
    Score,
)

_Floats = npt.NDArray[np.float64]
_Indices = npt.NDArray[np.integer]
_TEXTURE = ("contrast", "dissimilarity", "homogeneity", "ASM", "energy", "correlation")


class Contrast(QcCheck, kind="contrast", marks=False):
    """Measures Tenengrad, Michelson and RMS contrast of the grey image."""

    name: str = "contrast"
    # put before the column names, with an underscore
    prefix: str = ""
    # False measures the whole image
    limit_to_mask: bool = True
    # True measures the gradient outside the mask, and gray values inside, as HistoQC does
    invert: bool = False

    def __call__(self, view: QcView) -> Outcome:
        energy = 0.0
        for band in row_bands(len(view.rgb), 1):
            gray = filters.gray_from_rgb(view.ns, view.rgb[band.around])
            part = filters.sobel_energy(view.ns, gray)[band.own]
            if self.limit_to_mask:
                part = part[view.mask_use[band.inside] ^ self.invert]
            energy += float(part.sum())
        mask = view.mask_use if self.limit_to_mask else None
        gray = _Moments.of(lambda rows: _gray_values(view, mask, rows), len(view.rgb))
        tenengrad_column = _prefixed(self.prefix, "tenenGrad_contrast")
        michelson_column = _prefixed(self.prefix, "michelson_contrast")
        rms_column = _prefixed(self.prefix, "rms_contrast")
        if gray.count == 0:
            columns = [tenengrad_column, michelson_column, rms_column]
            return _no_tissue(self.name, columns)
        michelson = 0.0
        if gray.highest + gray.lowest > 0:
            michelson = (gray.highest - gray.lowest) / (gray.highest + gray.lowest)
        scores: dict[str, Score] = {
            # sqrt(sum of squared gradients) / N
            tenengrad_column: energy**0.5 / gray.count,
            michelson_column: michelson,
            rms_column: gray.deviation,
        }
        return Outcome(scores=scores)


class Brightness(QcCheck, kind="brightness", marks=False):
    """Measures mean and standard deviation of grey or each channel; -100 and 0 without tissue."""

    name: str = "brightness"
    # gray is [0, 1], RGB 0 to 255, YUV of [0, 1]
    space: Literal["gray", "RGB", "YUV"] = "gray"
    # put before the column names, with an underscore
    prefix: str = ""
    # False measures the whole image
    limit_to_mask: bool = True
    # True measures outside the mask
    invert: bool = False

    def __call__(self, view: QcView) -> Outcome:
        mask = view.mask_use ^ self.invert if self.limit_to_mask else None
        stems = ("grayscale",) if self.space == "gray" else ("chan1", "chan2", "chan3")
        suffix = "_YUV" if self.space == "YUV" else ""
        scores: dict[str, Score] = {}
        for channel, stem in enumerate(stems):
            get_values = partial(self._values, view, mask, channel)
            moments = _Moments.of(get_values, len(view.rgb))
            column = _prefixed(self.prefix, f"{stem}_brightness")
            scores[column + suffix] = moments.mean if moments.count else EMPTY_SCORE
            scores[f"{column}_std{suffix}"] = moments.deviation
        return Outcome(scores=scores)

    def _values(
        self, view: QcView, mask: Array | None, channel: int, rows: slice
    ) -> Array:
        """Values of a channel in some rows, float64 (N,)."""
        if self.space == "gray":
            return _gray_values(view, mask, rows)
        if self.space == "RGB":
            return _inside(view.rgb[..., channel], mask, rows).astype(float)
        rgb = _inside(view.rgb, mask, rows)
        return filters.gray_from_rgb(view.ns, rgb, filters.YUV[channel])


class Stains(QcCheck, kind="stains", marks=False):
    """Measures mean and standard deviation of each stain in the mask, and draws each stain."""

    name: str = "stains"
    # stain set, one of `arrays.filters.STAINS`
    stain: str = "hed_from_rgb"
    # False measures the whole image
    use_mask: bool = True

    def __call__(self, view: QcView) -> Outcome:
        if self.use_mask and not bool(view.mask_use.any()):
            columns = []
            for stain in range(3):
                columns += [f"deconv_c{stain}_mean", f"deconv_c{stain}_std"]
            black = np.zeros(view.rgb.shape[:2], np.uint8)
            tables = {f"deconv_c{stain}": black for stain in range(3)}
            return replace(_no_tissue(self.name, columns), tables=tables)
        scores: dict[str, Score] = {}
        pictures: dict[str, ReportTable] = {}
        # one stain at a time takes a third of the memory
        for stain in range(3):
            moments, picture = self._measured(view, stain)
            scores[f"deconv_c{stain}_mean"] = moments.mean
            scores[f"deconv_c{stain}_std"] = moments.deviation
            pictures[f"deconv_c{stain}"] = picture
        return Outcome(scores=scores, tables=pictures)

    def _measured(self, view: QcView, stain: int) -> tuple["_Moments", ReportTable]:
        """Moments of the amounts of a stain, and the amounts as a picture."""
        amount = self._amounts(view, stain)
        mask = view.mask_use if self.use_mask else None
        moments = _Moments.of(partial(_inside, amount, mask), len(amount))
        picture = self._draw(view, amount, moments.lowest, moments.highest)
        return moments, picture

    def _amounts(self, view: QcView, stain: int) -> Array:
        """Amount of a stain at each pixel, float64 (H, W), by tables of channel values."""
        xp = view.ns.xp
        densities, unmixing = filters.stain_tables(self.stain)
        amount = xp.zeros(view.rgb.shape[:2])
        tables = [xp.asarray(densities * weight) for weight in unmixing[:, stain]]
        for band in row_bands(len(amount)):
            for channel, table in enumerate(tables):
                amount[band.inside] += table.take(view.rgb[band.inside, :, channel])
        xp.maximum(amount, 0.0, out=amount)
        xp.minimum(amount, _high_quantile(view.ns, amount, 0.99), out=amount)
        return amount

    def _draw(
        self, view: QcView, amount: Array, low: float, high: float
    ) -> ReportTable:
        """The amounts as a picture."""
        xp = view.ns.xp
        picture = xp.empty(amount.shape, dtype=xp.uint8)
        for band in row_bands(len(amount)):
            part = amount[band.inside] - low
            part /= max(high - low, 1e-12)
            if self.use_mask:
                part *= view.mask_use[band.inside]
            part *= 255
            picture[band.inside] = xp.rint(part).astype(xp.uint8)
        return view.ns.download(picture)


class Histogram(QcCheck, kind="histogram", marks=False):
    """Measures the histogram of each channel, and its distance to those of template pictures."""

    name: str = "histogram"
    # number of bins from 0 to 255
    bins: int = 20
    # False measures the whole image
    limit_to_mask: bool = True
    # image files; each adds a column `<stem>_MSE_hist`
    templates: tuple[str, ...] = ()
    # templates whose files are missing: their columns are NA
    absent: tuple[str, ...] = ()

    def __call__(self, view: QcView) -> Outcome:
        mask = view.mask_use if self.limit_to_mask else None
        bands = row_bands(len(view.rgb))
        own = self._density(
            view.ns, (_inside(view.rgb, mask, band.inside) for band in bands)
        )
        scores: dict[str, Score] = {template_column(name): "NA" for name in self.absent}
        for path in self.templates:
            rgb = view.ns.upload(read_rgb(path).reshape(-1, 3), reason="template")
            difference = own - self._density(view.ns, [rgb])
            scores[template_column(path)] = float((difference**2).sum())
        return Outcome(scores=scores, tables={self.name: own})

    @property
    def files(self) -> tuple[str, ...]:
        return self.templates

    def _density(self, ns: ArrayNamespace, parts: Iterable[Array]) -> _Floats:
        """Density of each channel from 0 to 255, (bins, 3) on the host; zeros without px.

        `parts` are the px, uint8 (N, 3) each.
        """
        total = ns.xp.zeros((256, 3), dtype=ns.xp.int64)
        for rgb in parts:
            for channel in range(3):
                total[:, channel] += ns.xp.bincount(rgb[:, channel], minlength=256)
        counts = ns.download(total).astype(np.float64)
        # NumPy's bins: the last one holds its upper edge
        bin_of_value = np.minimum((np.arange(256) * self.bins) // 255, self.bins - 1)
        binned = [
            np.bincount(bin_of_value, counts[:, c], minlength=self.bins)
            for c in range(3)
        ]
        total = np.maximum(counts.sum(axis=0), 1)
        return np.asarray(np.stack(binned, axis=1) / total / (255 / self.bins))


class Texture(QcCheck, kind="texture", marks=False):
    """Measures co-occurrence of grey values over random squares; warns if there is no square."""

    name: str = "texture"
    # put before the column names, with an underscore
    prefix: str = ""
    # edge of a square; its top-left corner lies in the mask
    square_px: int = 32
    num_squares: int = 100
    # number of gray levels
    num_levels: int = 8
    # distance between the two px of a pair, along x
    distance_px: int = 5
    # True puts the squares outside the mask
    invert: bool = False
    # seed for the positions of the squares; HistoQC's --seed gives the same positions
    seed: int = 0

    def __call__(self, view: QcView) -> Outcome:
        mask = view.ns.download(view.mask_use ^ self.invert)
        places = np.flatnonzero(mask)
        if not len(places):
            side = "outside" if self.invert else "in"
            return Outcome(
                warnings=(
                    f"{self.name}: no pixels {side} the mask whose texture can be measured",
                )
            )
        # HistoQC's generator gives the same squares
        rng = np.random.RandomState(self.seed)
        chosen = places[rng.choice(len(places), self.num_squares)]
        rows, columns = np.divmod(chosen, mask.shape[1])
        gray = view.ns.download(view.gray, reason="co-occurrence")
        scores: dict[str, Score] = {}
        for measure, values in self.measured(gray, rows, columns).items():
            column = _prefixed(self.prefix, measure)
            scores[column] = float(values.mean())
            scores[f"{column}_std"] = float(values.std())
        return Outcome(scores=scores)

    def measured(
        self, gray: _Floats, rows: _Indices, columns: _Indices
    ) -> dict[str, _Floats]:
        """Measures squares, which the border may cut: an array (squares,) by measure, on the host.

        Source: Haralick et al., Textural features for image classification, 1973.
        """
        # imported here, because it takes half a second and only this check needs it
        from skimage.feature import graycomatrix, graycoprops

        edge = self.square_px
        limits = np.linspace(0, 1, self.num_levels)
        counts = []
        for row, column in zip(rows, columns, strict=True):
            # a gray value v lies in level ceil(v * (num_levels - 1))
            square = gray[row : row + edge, column : column + edge]
            levels = np.digitize(square, limits, right=True)
            pairs = graycomatrix(
                levels,
                [self.distance_px],
                [0],
                levels=self.num_levels,
                symmetric=True,
            )
            counts.append(pairs[:, :, 0, 0])
        # the axis for distances holds the squares
        stacked = np.stack(counts, axis=2)[..., None]
        return {name: graycoprops(stacked, name)[:, 0] for name in _TEXTURE}


class CountPieces(QcCheck, kind="count_pieces", marks=False):
    """Counts the pieces of tissue that are left, with their mean and largest area in pixels."""

    name: str = "tissue_pieces"

    def __call__(self, view: QcView) -> Outcome:
        mask = view.mask_use
        return Outcome(scores=view.region_scores(self.name, mask, float(mask.mean())))


class Equalised(QcCheck, kind="equalised", marks=False):
    """Measures nothing; writes a grey picture with an equalised histogram."""

    name: str = "equalised"

    def __call__(self, view: QcView) -> Outcome:
        xp = view.ns.xp
        share = filters.equalised(view.ns, view.gray8)
        picture = xp.rint(share * 255).astype(xp.uint8)
        return Outcome(tables={self.name: view.ns.download(picture)})


class SavedMask(QcCheck, kind="saved_mask", marks=False):
    """Measures nothing; writes the mask at this point as a picture."""

    name: str = "saved_mask"
    # name of an earlier check, whose affected area is written; '' writes the current mask
    of: str = ""
    # True also writes `<name>.geojson`, in level-0 px
    geojson: bool = False

    def __call__(self, view: QcView) -> Outcome:
        mask = view.affected_areas.get(self.of) if self.of else view.mask_use
        if mask is None:
            return Outcome(
                warnings=(f"{self.name}: no earlier check {self.of!r} made a mask",)
            )
        picture = view.ns.download(mask).astype(np.uint8) * 255
        return Outcome(tables={self.name: picture})


class SavedMacro(QcCheck, kind="saved_macro", marks=False):
    """Measures nothing; writes the slide's macro picture."""

    name: str = "macro"
    # length of the picture's longer side
    edge_px: int = 500

    def __call__(self, view: QcView) -> Outcome:
        rgb = view.associated("macro")
        if rgb is None:
            return Outcome(warnings=("the slide has no macro picture",))
        height, width = rgb.shape[:2]
        longer = max(height, width)
        new_width = max(1, round(self.edge_px * width / longer))
        new_height = max(1, round(self.edge_px * height / longer))
        picture = Image.fromarray(rgb).resize((new_width, new_height))
        return Outcome(tables={self.name: np.asarray(picture)})


def read_rgb(path: str) -> npt.NDArray[np.uint8]:
    """Reads a picture file as uint8 (H, W, 3)."""
    rule = "picture must be a readable image file"
    with rewording(rule, path, OSError, error=ConfigError), Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def template_column(path: str) -> str:
    """Column of the distance to a template picture."""
    stem = PurePath(path.replace("\\", "/")).stem
    return f"{stem}_MSE_hist"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moments:
    """Number, mean, standard deviation and range of values; zeros without values."""

    count: int = 0
    mean: float = 0.0
    deviation: float = 0.0
    lowest: float = 0.0
    highest: float = 0.0

    @classmethod
    def of(cls, get_values: Callable[[slice], Array], num_rows: int) -> "_Moments":
        """Moments of the values of a picture, which come from some rows at a time."""
        count = 0
        total = 0.0
        lowest = math.inf
        highest = -math.inf
        for band in row_bands(num_rows):
            values = get_values(band.inside)
            if values.size:
                count += values.size
                total += float(values.sum())
                lowest = min(lowest, float(values.min()))
                highest = max(highest, float(values.max()))
        if count == 0:
            return cls()
        mean = total / count
        squares = 0.0
        for band in row_bands(num_rows):
            difference = get_values(band.inside) - mean
            squares += float((difference * difference).sum())
        deviation = math.sqrt(squares / count)
        return cls(
            count=count,
            mean=mean,
            deviation=deviation,
            lowest=lowest,
            highest=highest,
        )


def _inside(values: Array, mask: Array | None, rows: slice) -> Array:
    """Values of some rows in a mask, (N, ...); without a mask all of them."""
    part = values[rows]
    if mask is None:
        return part.reshape(-1, *values.shape[2:])
    if part.ndim == 2:
        return part[mask[rows]]
    # pixels by their number: NumPy is slow where a mask has fewer axes than the values
    places = mask[rows].ravel().nonzero()[0]
    return part.reshape(-1, *values.shape[2:]).take(places, axis=0)


def _gray_values(view: QcView, mask: Array | None, rows: slice) -> Array:
    """Gray values of some rows in a mask, float64 (N,)."""
    return filters.gray_from_rgb(view.ns, _inside(view.rgb, mask, rows))


def _high_quantile(ns: ArrayNamespace, values: Array, share: float) -> float:
    """Quantile of many values, (H, W), near the upper end, as of `numpy.quantile`.

    Memory: the values above the quantile, twice.
    """
    xp = ns.xp
    count = math.prod(values.shape)
    position = share * (count - 1)
    floor = math.floor(position)
    num_above = count - floor
    top = xp.empty(0)
    for band in row_bands(len(values)):
        part = values[band.inside].ravel()
        if top.size == num_above:
            # smaller values are not among the highest
            part = part[part > top.min()]
        top = xp.concatenate([top, part])
        if top.size > num_above:
            top = xp.partition(top, top.size - num_above)[-num_above:]
    top = xp.sort(top)
    low = float(top[0])
    difference = float(top[min(1, len(top) - 1)]) - low
    part = position - floor
    # NumPy interpolates from the nearer end
    if part < 0.5:
        return float(low + difference * part)
    return float(low + difference - difference * (1 - part))


def _prefixed(prefix: str, name: str) -> str:
    return f"{prefix}_{name}" if prefix else name


def _no_tissue(check: str, columns: list[str]) -> Outcome:
    return Outcome(
        scores=dict.fromkeys(columns, EMPTY_SCORE),
        warnings=(
            f"{check} measured nothing, because no tissue is left; its columns are -100",
        ),
    )
