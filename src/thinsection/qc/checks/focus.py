"""Finds blur by the share of the finest detail.

Defocus takes the finest band of detail first, so that the ratio of its amplitude to that
of the next band falls, whatever the strength of the stain.

Focus is not judged where there is nothing to judge it by: at resolutions at which sharp and blurred
tissue look the same, and in tissue without structures, such as mucin or some necrosis. Structures
the size of a nucleus survive any blur in which tissue is still recognised, so tissue without them
never had any.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product

from thinsection.arrays import Array, ArrayNamespace, filters, morphology
from thinsection.errors import ConfigError
from thinsection.qc.checks.check import Outcome, QcCheck, QcView, area
from thinsection.types import RgbArray, Size

Square = tuple[int, int]  # row and column in a grid of squares

# Percentile of a slide's gray that is glass, or the lightest tissue.
_WHITE_PERCENTILE = 97
# Gray by which glass may lie below that; more where it has no colour.
_GLASS_GRAY = 0.03
_GREY_GLASS_GRAY = 0.09
# Glass without colour differs by less between channels, [0, 1].
_GLASS_COLOUR = 0.03
# Blocks along the edge of a square.
_SQUARE_BLOCKS = 8
# A slide of so few squares is looked at as a whole.
_FEW_SQUARES = 400
# Squares below so many times the limit of blur are suspect: all around are looked at.
_SUSPECT = 1.15
# The sharpest tissue has so many times the least ratio, unless its noise is less than
# that of the glass.
_SHARP_TIMES = 1.5
# µm/px; blur is not visible on coarser images.
_COARSEST_MPP = 1.05
# Px per px of the grid of structures, and sigma on it: structures of 4 to 12 µm at 0.5 µm/px.
_STRUCTURE_PX = 8
_STRUCTURE_SIGMA = 1.5
# Amplitude of these structures, gray in [0, 1], below which focus is not judged. Sharp tissue has
# more than 0.024 and tissue under a Gaussian blur of 4 µm more than 0.004; smooth areas with a
# camera's noise have less than 0.0015.
_LEAST_STRUCTURE = 0.003
# Weight of judged blocks around a block from which it gets its ratio.
_LEAST_WEIGHT = 1e-3
# Share of the tissue from which on a warning says that focus is not judged.
_MUCH_NOT_JUDGED = 0.5


class Focus(QcCheck, kind="focus"):
    """Removes blurred tissue; `<name>_median_ratio` measures how sharp the whole slide is."""

    name: str = "focus"
    # where detail is measured, µm/px; a slide of less is taken as it is
    image_mpp: float = 0.5
    # edge of the blocks in which it is averaged, px of that image, a multiple of 8
    block_px: int = 32
    # gray, [0, 1], added to the coarse band: noise does not decide
    floor: float = 0.006
    # blurred where the ratio is below this share of the slide's 75th percentile (sharp
    # tissue) ...
    relative: float = 0.55
    # ... or below this, for a slide that is blurred as a whole
    min_ratio: float = 0.27
    # smaller blurred areas, and holes in them, do not count
    min_area: str = area("0.004 mm2")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_px <= 0 or self.block_px % _STRUCTURE_PX:
            raise ConfigError(
                f"focus.block_px must be a multiple of {_STRUCTURE_PX}, got {self.block_px}"
            )

    def __call__(self, view: QcView) -> Outcome:
        ns = view.ns
        size, read = view.regions_at(self.image_mpp)
        mpp = view.mpp_th * view.gray.shape[1] / size[0]
        if mpp > _COARSEST_MPP:
            return Outcome(
                warnings=(
                    f"{self.name}: not judged at {mpp:.3g} µm/px, because blur is visible only "
                    "at 1 µm/px or finer",
                )
            )
        glass = _glass_in_tissue(view)
        # a block that glass is part of has a border in it, which is detail of its own
        near_glass = morphology.dilated_by_disk(ns, glass, view.length_px("12 um"))
        candidates = view.mask_use & ~near_glass
        blocks = _Sharpness(self, view, candidates, glass, size=size, read=read)
        ratio_by_block = blocks.measure()
        tissue = view.mask_use & ~glass
        judged = tissue & filters.resized_nearest(ns, blocks.judged, tissue.shape)
        if not bool(judged.any()):
            return Outcome(
                warnings=(f"{self.name}: no tissue whose focus can be measured",)
            )
        # the median removes specks and keeps borders
        smooth = ns.ndimage.median_filter(ratio_by_block, size=3, mode="nearest")
        ratio = filters.resized_nearest(ns, smooth, view.gray.shape)
        measured = ratio[tissue]
        measured = measured[ns.xp.isfinite(measured)]
        usual = self.relative * float(ns.xp.percentile(measured, 75))
        blurred = (ratio < max(self.min_ratio, usual)) & tissue
        least_px = view.area_px(self.min_area)
        blurred = morphology.fill_small(ns, blurred, least_px)
        blurred = morphology.drop_small(ns, blurred, least_px)
        sure = blurred & judged
        # a block that is sharp in part looks sharp
        blurred = morphology.dilated_by_disk(ns, blurred, view.length_px("8 um"))
        blurred &= tissue
        outcome = view.left_regions(view.mask_use & ~blurred, f"{self.name}_removed")
        scores = {
            **outcome.scores,
            f"{self.name}_median_ratio": float(ns.xp.median(measured)),
        }
        share = 1 - int(blocks.judged.sum()) / max(1, int(blocks.measured.sum()))
        warnings = []
        if share > _MUCH_NOT_JUDGED:
            warnings.append(
                f"{self.name}: not judged on {share:.0%} of the tissue, which has no "
                "structures to judge it by"
            )
        return replace(outcome, scores=scores, sure_area=sure, warnings=tuple(warnings))


class _Sharpness:
    """Amplitude of the finest band of detail over that of the next, per block.

    The finest lies between no blur and a Gaussian of 1 px, the next between 1 and 2 px;
    the noise that glass has of both is subtracted. Of a large slide every second square
    of 8 x 8 blocks in both directions is read, then all around those that may be blurred;
    other blocks get a mean of those around them.

    Args:
        check: settings.
        view: the slide.
        candidates: bool (H, W), tissue of which focus is measured.
        glass: bool (H, W), glass inside of tissue.
        size: (width, height) of the slide at the resolution of the check.
        read: reader of parts of it.

    Memory: O(one square + blocks).
    """

    def __init__(
        self,
        check: Focus,
        view: QcView,
        candidates: Array,
        glass: Array,
        *,
        size: Size,
        read: Callable[[int, int, int, int], RgbArray],
    ) -> None:
        ns = view.ns
        self._check = check
        self._ns = ns
        self._size = size
        self._read = read
        width, height = self._size
        shape = (math.ceil(height / check.block_px), math.ceil(width / check.block_px))
        self._bands = ns.xp.zeros((2, *shape), dtype=ns.xp.float32)
        self._structures = ns.xp.zeros(shape, dtype=ns.xp.float32)
        # blocks that were read
        self._read_blocks = ns.xp.zeros(shape, dtype=bool)
        self._candidates = filters.resized_nearest(ns, candidates, shape)
        self._glass = filters.resized_nearest(ns, glass, shape)
        self._gray = filters.resized_nearest(ns, view.gray, shape)

    @property
    def measured(self) -> Array:
        """The blocks of tissue that were read, bool."""
        return self._read_blocks & self._candidates

    @property
    def judged(self) -> Array:
        """The blocks of tissue that were read and have structures to judge focus by, bool."""
        return self.measured & (self._structures >= _LEAST_STRUCTURE)

    def measure(self) -> Array:
        """Ratio per block, float32; infinite far from all blocks that are judged."""
        xp = self._ns.xp
        square_px = _SQUARE_BLOCKS * self._check.block_px
        rows = math.ceil(self._size[1] / square_px)
        columns = math.ceil(self._size[0] / square_px)
        step = 2 if rows * columns > _FEW_SQUARES else 1
        waiting = set(product(range(rows), range(columns)))
        chosen = set(product(range(0, rows, step), range(0, columns, step)))
        while chosen:
            self._read_squares(chosen)
            waiting -= chosen
            tissue = self.judged
            ratio, sharp = self._ratio(tissue)
            chosen = waiting & self._around_suspects(tissue, ratio, sharp)
        sigma = _SQUARE_BLOCKS / 3
        sums = filters.gaussian(self._ns, tissue * ratio, sigma)
        weights = filters.gaussian(self._ns, tissue * xp.float32(1), sigma)
        mean = sums / xp.maximum(weights, _LEAST_WEIGHT)
        mean = xp.where(weights < _LEAST_WEIGHT, xp.float32(xp.inf), mean)
        return xp.where(tissue, ratio, mean)

    def _read_squares(self, squares: Iterable[Square]) -> None:
        """Measures the bands of squares that hold tissue to judge."""
        width, height = self._size
        square_px = _SQUARE_BLOCKS * self._check.block_px
        for row, column in sorted(squares):
            blocks = (
                slice(row * _SQUARE_BLOCKS, (row + 1) * _SQUARE_BLOCKS),
                slice(column * _SQUARE_BLOCKS, (column + 1) * _SQUARE_BLOCKS),
            )
            if not bool(self._candidates[blocks].any()):
                continue
            rgb = self._read(
                column * square_px,
                row * square_px,
                min((column + 1) * square_px, width),
                min((row + 1) * square_px, height),
            )
            square = self._ns.upload(rgb, reason="square")
            gray = filters.gray32_from_rgb(self._ns, square)
            bands = detail_bands(self._ns, gray, self._check.block_px)
            self._bands[:, blocks[0], blocks[1]] = bands
            self._structures[blocks] = structure_amplitude(
                self._ns, gray, self._check.block_px
            )
            self._read_blocks[blocks] = True

    def _ratio(self, tissue: Array) -> tuple[Array, float]:
        """Ratio per block, and that of the slide's sharp tissue."""
        ratio = self._ratio_without(self._read_blocks & self._glass)
        sharp = self._sharp(ratio, tissue)
        if sharp <= _SHARP_TIMES * self._check.min_ratio:
            # this tissue has less noise than the glass
            ratio = self._ratio_without(self._glass & False)
            sharp = self._sharp(ratio, tissue)
        return ratio, sharp

    def _sharp(self, ratio: Array, tissue: Array) -> float:
        if not bool(tissue.any()):
            return 0.0
        return float(self._ns.xp.percentile(ratio[tissue], 75))

    def _ratio_without(self, glass: Array) -> Array:
        """Ratio per block, without the noise of light that blocks of glass have."""
        fine = self._amplitude(self._bands[0], glass)
        coarse = self._amplitude(self._bands[1], glass)
        return fine / (coarse + self._check.floor)

    def _amplitude(self, band: Array, glass: Array) -> Array:
        xp = self._ns.xp
        noise = 0.0
        if bool(glass.any()):
            # the square of the noise of light is as the light
            noise = float(xp.median((band**2 / (self._gray + 0.01))[glass]))
        return xp.sqrt((band**2 - noise * self._gray).clip(0))

    def _around_suspects(
        self, tissue: Array, ratio: Array, sharp: float
    ) -> set[Square]:
        """Squares in and around which most tissue may be blurred."""
        check = self._check
        limit = max(check.min_ratio, _SUSPECT * check.relative * sharp)
        low = tissue & (ratio < limit)
        low_share = filters.block_means(self._ns, low * 1.0, _SQUARE_BLOCKS)
        tissue_share = filters.block_means(self._ns, tissue * 1.0, _SQUARE_BLOCKS)
        suspects = self._ns.xp.argwhere(low_share > tissue_share / 2)
        around = set()
        for row, column in self._ns.download(suspects).tolist():
            for dy, dx in product((-1, 0, 1), repeat=2):
                around.add((row + dy, column + dx))
        return around


def detail_bands(ns: ArrayNamespace, gray: Array, block_px: int) -> Array:
    """Amplitudes of the finest band of detail and the next, float32 (2, blocks, blocks)."""
    once = filters.gaussian(ns, gray, 1.0)
    twice = filters.gaussian(ns, gray, 2.0)
    fine = filters.block_means(ns, abs(gray - once), block_px)
    coarse = filters.block_means(ns, abs(once - twice), block_px)
    return ns.xp.stack([fine, coarse])


def structure_amplitude(ns: ArrayNamespace, gray: Array, block_px: int) -> Array:
    """Amplitude of structures the size of a nucleus, float32 (blocks, blocks).

    `block_px` must be a multiple of 8, the edge of the grid's pixels.
    """
    grid = filters.block_means(ns, gray, _STRUCTURE_PX)
    smooth = filters.gaussian(ns, grid, _STRUCTURE_SIGMA)
    return filters.block_means(ns, abs(grid - smooth), block_px // _STRUCTURE_PX)


def _glass_in_tissue(view: QcView) -> Array:
    """The mask of glass inside of tissue, as in fat: it has no detail to judge."""
    xp = view.ns.xp
    white = float(xp.percentile(view.gray[::4, ::4], _WHITE_PERCENTILE))
    darkness = white - filters.gaussian(view.ns, view.gray, 0.7)
    lowest, highest = filters.extremes(view.ns, view.rgb.transpose(2, 0, 1))
    colour = (highest - lowest) / xp.float32(255)
    # the light of a lamp may vary where there is no colour
    is_grey = filters.gaussian(view.ns, colour, 0.7) < _GLASS_COLOUR
    return darkness < xp.where(is_grey, _GREY_GLASS_GRAY, _GLASS_GRAY)
