"""Checks that only measure, or leave a picture: contrast, stains, histograms, texture, masks."""

from dataclasses import replace
from pathlib import PurePath
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.arrays import Array, ArrayNamespace, filters
from thinsection.errors import ConfigError, rewording
from thinsection.qc.checks.check import EMPTY_SCORE, Outcome, QcCheck, QcView, Score

_Floats = npt.NDArray[np.float64]
_Indices = npt.NDArray[np.integer]
_TEXTURE = ("contrast", "dissimilarity", "homogeneity", "ASM", "energy", "correlation")


class Contrast(QcCheck, kind="contrast"):
    """Tenengrad, Michelson and RMS contrast of the gray image."""

    name: str = "contrast"
    prefix: str = ""  # put before the column names, with an underscore
    limit_to_mask: bool = True  # False measures the whole image
    invert: bool = (
        False  # takes the gradient outside the mask, gray inside, as HistoQC does
    )

    def __call__(self, view: QcView) -> Outcome:
        inside = view.mask_use if self.limit_to_mask else ...
        where = view.mask_use ^ self.invert if self.limit_to_mask else ...
        energy = float(filters.sobel_energy(view.ns, view.gray)[where].sum())
        gray = view.gray[inside]
        names = [
            _prefixed(self.prefix, f"{s}_contrast")
            for s in ("tenenGrad", "michelson", "rms")
        ]
        if gray.size == 0:
            return _no_tissue(self.name, names)
        highest, lowest = float(gray.max()), float(gray.min())
        tenengrad = energy**0.5 / gray.size  # sqrt(sum of squared gradients) / N
        michelson = (
            (highest - lowest) / (highest + lowest) if highest + lowest > 0 else 0.0
        )
        return Outcome(
            scores=dict(zip(names, (tenengrad, michelson, float(gray.std()))))
        )


class Brightness(QcCheck, kind="brightness"):
    """Mean and population standard deviation of gray or of each channel; -100 and 0 of no px."""

    name: str = "brightness"
    space: Literal["gray", "RGB", "YUV"] = (
        "gray"  # gray is [0, 1], RGB 0 to 255, YUV of [0, 1]
    )
    prefix: str = ""  # put before the column names, with an underscore
    limit_to_mask: bool = True  # False measures the whole image
    invert: bool = False  # True measures outside the mask

    def __call__(self, view: QcView) -> Outcome:
        where = view.mask_use ^ self.invert if self.limit_to_mask else ...
        px = (view.gray if self.space == "gray" else view.rgb)[where]
        stems = ("grayscale",) if self.space == "gray" else ("chan1", "chan2", "chan3")
        suffix = "_YUV" if self.space == "YUV" else ""
        scores: dict[str, Score] = {}
        for c, stem in enumerate(stems):  # one at a time: a third of the memory
            values = (
                filters.gray_from_rgb(view.ns, px, filters.YUV[c]) if suffix else px
            )
            values = px[..., c].astype(float) if self.space == "RGB" else values
            key = _prefixed(self.prefix, f"{stem}_brightness")
            scores[key + suffix] = float(values.mean()) if values.size else EMPTY_SCORE
            scores[f"{key}_std{suffix}"] = float(values.std()) if values.size else 0.0
        return Outcome(scores=scores)


class Stains(QcCheck, kind="stains"):
    """Mean and std of each stain in the mask, clipped to [0, the image's .99 quantile]; drawn."""

    name: str = "stains"
    stain: str = "hed_from_rgb"  # stain set, one of `arrays.filters.STAINS`
    use_mask: bool = True  # False measures the whole image

    def __call__(self, view: QcView) -> Outcome:
        ns, xp = view.ns, view.ns.xp
        names = [
            f"deconv_c{c}_{statistic}"
            for c in range(3)
            for statistic in ("mean", "std")
        ]
        if self.use_mask and not bool(view.mask_use.any()):
            drawn = {
                f"deconv_c{c}": np.zeros(view.rgb.shape[:2], np.uint8) for c in range(3)
            }
            return replace(_no_tissue(self.name, names), tables=drawn)
        found: list[float] = []
        pictures: dict[str, npt.NDArray[Any]] = {}
        densities, unmixing = filters.stain_tables(self.stain)
        for c in range(3):  # one at a time, and by tables: a third of the memory
            tables = [xp.asarray(densities * share) for share in unmixing[:, c]]
            amount = xp.zeros(view.rgb.shape[:2])
            for k, table in enumerate(tables):
                amount += table[view.rgb[..., k]]
            xp.maximum(amount, 0.0, out=amount)
            xp.minimum(amount, xp.quantile(amount, 0.99), out=amount)
            values = amount[view.mask_use] if self.use_mask else amount
            found += [float(values.mean()), float(values.std())]
            low, high = float(values.min()), float(values.max())
            del values
            amount -= low
            amount /= max(high - low, 1e-12)
            amount *= view.mask_use | (not self.use_mask)
            amount *= 255
            pictures[f"deconv_c{c}"] = ns.download(
                xp.rint(amount, out=amount).astype(xp.uint8)
            )
        return Outcome(scores=dict(zip(names, found, strict=True)), tables=pictures)


class Histogram(QcCheck, kind="histogram"):
    """Density histogram of each channel, and its squared distance to those of template images."""

    name: str = "histogram"
    bins: int = 20  # over 0 to 255
    limit_to_mask: bool = True  # False measures the whole image
    templates: tuple[str, ...] = ()  # image files; each adds a column `<stem>_MSE_hist`
    absent: tuple[
        str, ...
    ] = ()  # stems of templates that are not at hand: their columns are NA

    def __call__(self, view: QcView) -> Outcome:
        pixels = (
            view.rgb[view.mask_use] if self.limit_to_mask else view.rgb.reshape(-1, 3)
        )
        own = self._density(view.ns, pixels)
        scores: dict[str, Score] = {f"{stem}_MSE_hist": "NA" for stem in self.absent}
        for path in self.templates:
            rgb = view.ns.upload(read_rgb(path).reshape(-1, 3), reason="template")
            stem = PurePath(path.replace("\\", "/")).stem
            scores[f"{stem}_MSE_hist"] = float(
                ((own - self._density(view.ns, rgb)) ** 2).sum()
            )
        return Outcome(scores=scores, tables={self.name: own})

    @property
    def files(self) -> tuple[str, ...]:
        return self.templates

    def _density(self, ns: ArrayNamespace, rgb: Array) -> _Floats:
        """Density of each channel over 0 to 255, (bins, 3) on the host; zeros without px."""
        counts = [ns.xp.bincount(rgb[:, c], minlength=256) for c in range(3)]
        host = ns.download(ns.xp.stack(counts, axis=1)).astype(np.float64)
        index = np.minimum(
            (np.arange(256) * self.bins) // 255, self.bins - 1
        )  # as numpy's bins
        binned = [np.bincount(index, host[:, c], minlength=self.bins) for c in range(3)]
        total = np.maximum(host.sum(axis=0), 1)
        return np.asarray(np.stack(binned, axis=1) / total / (255 / self.bins))


class Texture(QcCheck, kind="texture"):
    """Mean and std of six co-occurrence measures over random squares; warns where none fits."""

    name: str = "texture"
    prefix: str = ""  # put before the column names, with an underscore
    square_px: int = 32  # edge of a square; its top-left corner lies in the mask
    num_squares: int = 100  # how many
    num_levels: int = 8  # gray levels
    distance_px: int = 5  # between the two px of a pair, along x
    invert: bool = False  # True puts the squares outside the mask
    seed: int = 0  # of their places, which are those of HistoQC's --seed

    def __call__(self, view: QcView) -> Outcome:
        mask = view.ns.download(view.mask_use ^ self.invert)
        places = np.flatnonzero(mask)
        if not len(places):
            where = "outside" if self.invert else "in"
            return Outcome(
                warnings=(f"{self.name}: no px {where} the mask to measure texture at",)
            )
        rng = np.random.RandomState(self.seed)  # HistoQC's: the same squares
        chosen = places[rng.choice(len(places), self.num_squares)]
        rows, columns = np.divmod(chosen, mask.shape[1])
        gray = view.ns.download(view.gray, reason="co-occurrence")
        scores: dict[str, Score] = {}
        for measure, values in self.measured(gray, rows, columns).items():
            column = _prefixed(self.prefix, measure)
            scores |= {
                column: float(values.mean()),
                f"{column}_std": float(values.std()),
            }
        return Outcome(scores=scores)

    def measured(
        self, gray: _Floats, rows: _Indices, columns: _Indices
    ) -> dict[str, _Floats]:
        """Each measure of each square, (squares,), cut at the border; on the host, as skimage.

        Source: Haralick et al., Textural features for image classification, 1973.
        """
        from skimage.feature import (
            graycomatrix,
            graycoprops,
        )  # half a second, for this check only

        edge, limits = self.square_px, np.linspace(0, 1, self.num_levels)
        settings: dict[str, Any] = {"levels": self.num_levels, "symmetric": True}
        counts = []
        for r, c in zip(rows, columns, strict=True):
            # a gray value v lies in level ceil(v * (num_levels - 1))
            square = np.digitize(gray[r : r + edge, c : c + edge], limits, right=True)
            counts.append(
                graycomatrix(square, [self.distance_px], [0], **settings)[:, :, 0, 0]
            )
        stacked = np.stack(counts, axis=2)[
            ..., None
        ]  # squares in the place of distances
        return {name: graycoprops(stacked, name)[:, 0] for name in _TEXTURE}


class CountPieces(QcCheck, kind="count_pieces"):
    """Counts the 8-connected pieces of tissue that are left: their mean and largest area in px."""

    name: str = "tissue_pieces"

    def __call__(self, view: QcView) -> Outcome:
        mask = view.mask_use
        return Outcome(scores=view.region_scores(self.name, mask, float(mask.mean())))


class Equalised(QcCheck, kind="equalised"):
    """Measures nothing; leaves a histogram-equalised gray picture for the report."""

    name: str = "equalised"

    def __call__(self, view: QcView) -> Outcome:
        xp, share = view.ns.xp, filters.equalised(view.ns, view.gray8)
        return Outcome(
            tables={self.name: view.ns.download(xp.rint(share * 255).astype(xp.uint8))}
        )


class SavedMask(QcCheck, kind="saved_mask"):
    """Measures nothing; leaves the mask as it is at that point as a picture."""

    name: str = "saved_mask"
    of: str = ""  # an earlier check, whose mask is left in its place
    geojson: bool = False  # whether `<name>.geojson` has it in level-0 px as well

    def __call__(self, view: QcView) -> Outcome:
        mask = view.touched.get(self.of) if self.of else view.mask_use
        if mask is None:
            return Outcome(
                warnings=(f"{self.name}: no earlier check {self.of!r} left a mask",)
            )
        return Outcome(
            tables={self.name: view.ns.download(mask).astype(np.uint8) * 255}
        )


class SavedMacro(QcCheck, kind="saved_macro"):
    """Measures nothing; leaves the slide's macro picture for the report."""

    name: str = "macro"
    edge_px: int = 500  # of its longer side

    def __call__(self, view: QcView) -> Outcome:
        if (rgb := view.associated("macro")) is None:
            return Outcome(warnings=("the slide has no macro picture",))
        height, width = rgb.shape[:2]
        x, y = (
            max(1, round(self.edge_px * px / max(rgb.shape[:2])))
            for px in (width, height)
        )
        return Outcome(
            tables={self.name: np.asarray(Image.fromarray(rgb).resize((x, y)))}
        )


def read_rgb(path: str) -> npt.NDArray[np.uint8]:
    """A picture file as uint8 (H, W, 3)."""
    rule = "picture must be a readable image file"
    with rewording(rule, path, OSError, error=ConfigError), Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def _prefixed(prefix: str, name: str) -> str:
    return f"{prefix}_{name}" if prefix else name


def _no_tissue(what: str, columns: list[str]) -> Outcome:
    warning = f"no tissue is left to measure {what} in; its columns are -100"
    return Outcome(scores=dict.fromkeys(columns, EMPTY_SCORE), warnings=(warning,))
