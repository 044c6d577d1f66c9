"""Finds blur by how much of the finest detail is left.

Defocus weakens the finest band of detail most. Therefore the ratio of its amplitude to that of
the next coarser band falls, however strong the stain is.

Focus is not judged if blurred and sharp tissue look the same: on images that are too coarse, and
in tissue without structures, such as mucin or some necrosis. Structures of the size of a nucleus
remain visible as long as tissue can be recognised, so tissue that shows none has never had any.

Smooth tissue, such as keratin, muscle, nerve or cartilage, has weak structures and no finer detail,
as tissue under a strong blur has. The two differ in their neighbourhood: blurred tissue has the
colour of tissue that is sharp elsewhere on the slide, and smooth tissue has a colour of its own.
So weak structures of a colour that is nowhere sharp are not judged. Smooth tissue may also have the
colour of sharp tissue, as muscle has that of stroma. Then nuclei tell: they absorb red light, and
even under a Gaussian blur of 4 µm they leave more structure in red than tissue without nuclei. And
the neighbourhood tells: blur hardly changes the means over a block of 16 µm. So from block to block
blurred tissue varies as much as the sharp tissue of the slide, and smooth tissue varies far less.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from thinsection.arrays import Array, ArrayNamespace, filters, morphology
from thinsection.arrays.bands import row_bands
from thinsection.errors import ConfigError
from thinsection.machine import give_back_freed_memory
from thinsection.qc.checks.check import Outcome, QcCheck, QcView, area
from thinsection.types import RgbArray, Size

Square = tuple[int, int]  # row and column of a square in the grid of squares

# Percentile of a slide's gray values that is glass, or the lightest tissue.
_WHITE_PERCENTILE = 97
# Glass may be darker than that by this gray value; glass without colour by the second.
_GLASS_GRAY = 0.03
_GREY_GLASS_GRAY = 0.09
# Sigma of the Gaussian that smooths glass, px of the work image, and how far it reaches.
_GLASS_SIGMA = 0.7
_GLASS_REACH = 3
# In glass without colour, channels differ by less than this, [0, 1].
_GLASS_COLOUR = 0.03
# Blocks along the edge of a square.
_SQUARE_BLOCKS = 8
# In slides with at most this number of squares, every square is read.
_FEW_SQUARES = 400
# Squares whose ratio is below the limit times this factor are suspect: all squares around are read.
_SUSPECT = 1.15
# The sharpest tissue has at least this multiple of `min_ratio`; if not, the measured noise exceeds
# that of the tissue, and is not subtracted.
_SHARP_TIMES = 1.5
# On a slide without glass, noise is measured where there are two kinds of blocks, strong and weak:
# the density of the blocks over the logarithm of their detail has a valley that is lower than this
# fraction of the lower of the peaks beside it. On generator C's blurred slides it is at most 0.30,
# and on sharp muscle, where weak blocks show detail, at least 0.46.
_VALLEY = 0.35
# Step of that logarithm, and sigma in steps over which blocks are counted.
_VALLEY_STEP = 0.02
_VALLEY_SIGMA = 10.0
# A valley counts as if so many blocks more were in it, because few blocks have valleys by chance.
_CHANCE_BLOCKS = 4
# Detail, as the product of the two bands over the light, that no picture of 8 bits resolves.
_NO_DETAIL = 1e-9
# Percentile of the weak blocks' finest band that is noise. Half of them would keep some detail that
# is none after the median; the strongest may be a speck.
_NOISE_PERCENTILE = 99.0
# µm/px; on coarser images blur is not visible.
_COARSEST_MPP = 1.05
# Image pixels per pixel of the grid of structures, and sigma on that grid: structures of 4 to 12 µm
# at 0.5 µm/px.
_STRUCTURE_PX = 8
_STRUCTURE_SIGMA = 1.5
# Focus is not judged if these structures have a smaller amplitude, as gray in [0, 1]. Sharp tissue
# has more than 0.024, and tissue under a Gaussian blur of 4 µm more than 0.004; smooth areas with
# the noise of a camera have less than 0.0015.
_LEAST_STRUCTURE = 0.003
# Tissue may be smooth where structures have less than this fraction of the median amplitude of the
# slide's sharp tissue. A Gaussian blur of 2 µm leaves 0.6 of it, one of 4 µm 0.3.
_WEAK_STRUCTURE = 0.75
# Such tissue is not judged if less than this share of the blocks of its colour is sharp.
_LEAST_SHARP_SHARE = 0.15
# Nor is it judged if it shows no nuclei: its density in red, and the amplitude of structures there,
# are below these fractions of the medians of the slide's sharp tissue. A Gaussian blur of 4 µm
# leaves 0.18 of the amplitude or more, and any blur leaves the density.
_BARE_STRUCTURE = 0.1
_BARE_DENSITY = 0.45
# Nor is it judged if the density in red varies from block to block, within some 100 µm, by less
# than this fraction of the median of the slide's sharp tissue. Of drawn muscle and nerve it is
# 0.02 to 0.12; of real tissue under a Gaussian blur of 1 to 8 µm nine tenths have more than 0.55.
_UNIFORM = 0.25
_UNIFORM_SIGMA = 2.5
# A slide with a smaller share of sharp blocks is blurred as a whole: its colours tell nothing.
_SOME_SHARP = 0.1
# Levels of red, green and blue, of 255, that count as one colour, and sigma in blocks over which
# colours are averaged, as single nuclei have no part in the colour of a tissue.
_COLOUR_STEP = 12
_COLOUR_SIGMA = 1.5
# Sigma in blocks over which doubtful blocks decide together.
_DOUBT_SIGMA = 2.0
# Least weight of judged blocks around a block, from which the block gets its ratio.
_LEAST_WEIGHT = 1e-3
# Fraction of tissue that is not judged, above which a warning says so.
_MUCH_NOT_JUDGED = 0.5


class Focus(QcCheck, kind="focus"):
    """Removes blurred tissue; `<name>_median_ratio` measures how sharp the whole slide is."""

    name: str = "focus"
    # resolution at which detail is measured, µm/px; a coarser slide is used as it is
    image_mpp: float = 0.5
    # edge of the blocks over which detail is averaged, px of that image, a multiple of 8
    block_px: int = 32
    # gray, [0, 1], added to the coarse band, so that noise alone does not decide
    floor: float = 0.006
    # tissue is blurred if its ratio is below this fraction of the slide's 75th percentile, which
    # is that of sharp tissue ...
    relative: float = 0.55
    # ... or below this value, for a slide that is blurred as a whole
    min_ratio: float = 0.27
    # smaller blurred areas, and smaller holes in blurred areas, are ignored
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
        mpp = view.mpp_th * view.mask_use.shape[1] / size[0]
        if mpp > _COARSEST_MPP:
            return Outcome(
                unjudged_area=view.mask_use,
                warnings=(
                    f"{self.name}: not judged at {mpp:.3g} µm/px, because blur is visible only "
                    "at 1 µm/px or finer",
                ),
            )
        glass = _glass_in_tissue(view)
        # blocks that are partly glass are left out: the border of the glass counts as detail
        near_glass = morphology.dilated_by_disk(ns, glass, view.length_px("12 um"))
        candidates = view.mask_use & ~near_glass
        blocks = _Sharpness(self, view, candidates, glass, size=size, read=read)
        del near_glass, candidates  # frees memory
        ratio_by_block = blocks.measure()
        give_back_freed_memory()
        tissue = view.mask_use & ~glass
        del glass  # frees memory
        judged_blocks = blocks.judged
        if not bool(_in_blocks(ns, tissue, judged_blocks).any()):
            return Outcome(
                unjudged_area=tissue,
                warnings=(f"{self.name}: no tissue whose focus can be measured",),
            )
        # the median removes specks and keeps borders
        smooth = filters.median_around(ns, ratio_by_block)
        del ratio_by_block
        measured = _finite_values(ns, smooth, tissue)
        usual = self.relative * float(
            ns.xp.percentile(measured, 75, overwrite_input=True)
        )
        median_ratio = float(ns.xp.median(measured, overwrite_input=True))
        del measured
        limit = max(self.min_ratio, usual)
        low_blocks = smooth < limit
        del smooth
        smooth_blocks = blocks.smooth_tissue(low_blocks)
        unjudged_blocks = smooth_blocks | (blocks.measured & ~judged_blocks)
        share = 1 - int(judged_blocks.sum()) / max(1, int(blocks.measured.sum()))
        del blocks  # frees memory
        give_back_freed_memory()
        blurred = _in_blocks(ns, tissue, low_blocks & ~smooth_blocks)
        least_px = view.area_px(self.min_area)
        blurred = morphology.fill_small(ns, blurred, least_px)
        blurred = morphology.drop_small(ns, blurred, least_px)
        sure = _in_blocks(ns, blurred, judged_blocks)
        sure &= tissue
        # a block that is partly blurred looks sharp, so blurred areas are enlarged
        blurred = morphology.dilated_by_disk(ns, blurred, view.length_px("8 um"))
        blurred &= tissue
        blurred = _in_blocks(ns, blurred, ~smooth_blocks)
        outcome = view.left_regions(view.mask_use & ~blurred, f"{self.name}_removed")
        scores = {
            **outcome.scores,
            f"{self.name}_median_ratio": median_ratio,
        }
        warnings = []
        if share > _MUCH_NOT_JUDGED:
            warnings.append(
                f"{self.name}: not judged on {share:.0%} of the tissue, which has no "
                "structures to judge it by"
            )
        tissue &= ~blurred
        return replace(
            outcome,
            scores=scores,
            sure_area=sure,
            unjudged_area=_in_blocks(ns, tissue, unjudged_blocks),
            warnings=tuple(warnings),
        )

    @property
    def share_column(self) -> str:
        return f"{self.name}_removed_percent"


class _Sharpness:
    """Ratio of the amplitudes of the finest band of detail and the next coarser band, per block.

    The finest band lies between no blur and a Gaussian blur of 1 px, the next between 1 and 2 px;
    the noise that blocks without detail show in both is subtracted. In a large slide, every second
    square of 8 x 8 blocks is read in both directions, then all squares around those that may be
    blurred; the remaining blocks get a mean of the blocks around them.

    Args:
        check: settings.
        view: the slide.
        candidates: bool (H, W), tissue whose focus is measured.
        glass: bool (H, W), glass inside of tissue.
        size: (width, height) of the slide at the resolution of the check.
        read: reads a part of the slide at that resolution.

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
        # of the density in red
        self._nuclei = ns.xp.zeros(shape, dtype=ns.xp.float32)
        # densities of red by value, without their sign
        red = ns.xp.maximum(ns.xp.arange(256, dtype=ns.xp.uint8), 1)
        self._red_density = ns.xp.log10(red).astype(ns.xp.float32)
        self._white_red = max(
            1.0, float(ns.xp.percentile(view.rgb[::4, ::4, 0], _WHITE_PERCENTILE))
        )
        # mean red, green and blue of each block
        self._colours = ns.xp.zeros((3, *shape), dtype=ns.xp.uint8)
        # blocks that were read
        self._read_blocks = ns.xp.zeros(shape, dtype=bool)
        self._candidates = filters.resized_nearest(ns, candidates, shape)
        self._glass = filters.resized_nearest(ns, glass, shape)
        self._rgb = filters.resized_nearest(ns, view.rgb, shape)

    @property
    def measured(self) -> Array:
        """The blocks of tissue that were read, bool."""
        return self._read_blocks & self._candidates

    @property
    def judged(self) -> Array:
        """The blocks of tissue that were read and have structures to judge focus by, bool."""
        return self.measured & (self._structures >= _LEAST_STRUCTURE)

    def measure(self) -> Array:
        """Ratio per block; infinite for blocks that are far from all judged ones."""
        xp = self._ns.xp
        square_px = _SQUARE_BLOCKS * self._check.block_px
        rows = math.ceil(self._size[1] / square_px)
        columns = math.ceil(self._size[0] / square_px)
        step = 2 if rows * columns > _FEW_SQUARES else 1
        waiting = set(product(range(rows), range(columns)))
        chosen = set(product(range(0, rows, step), range(0, columns, step)))
        while chosen:
            self._read_squares(chosen)
            # thousands of small arrays were freed between those that are still in use
            give_back_freed_memory()
            waiting -= chosen
            tissue = self.judged
            ratio, sharp = self._ratio(tissue)
            chosen = waiting & self._around_suspects(tissue, ratio, sharp)
        del self._bands  # frees memory
        sigma = _SQUARE_BLOCKS / 3
        ratio *= tissue
        mean = filters.gaussian(self._ns, ratio, sigma)
        weights = filters.gaussian(self._ns, tissue * xp.float32(1), sigma)
        is_far = weights < _LEAST_WEIGHT
        mean /= xp.maximum(weights, _LEAST_WEIGHT, out=weights)
        mean[is_far] = xp.inf
        xp.copyto(mean, ratio, where=tissue)
        return mean

    def smooth_tissue(self, low: Array) -> Array:
        """Blocks with a low ratio that may be smooth tissue in place of blurred tissue, bool.

        Their structures are weak for this slide, and tissue of their colour is nowhere sharp; or
        they show no nuclei; or the tissue around them is more uniform than blur can make it.
        """
        xp = self._ns.xp
        measured = self.measured
        low = low & measured
        sharp = self.judged & ~low
        num_sharp = int(sharp.sum())
        if num_sharp < _SOME_SHARP * int(measured.sum()) or not bool(low.any()):
            return low & False
        usual = float(xp.median(self._structures[sharp], overwrite_input=True))
        weak = low & (self._structures < _WEAK_STRUCTURE * usual)
        doubtful = weak & (self._sharp_share(sharp, measured) < _LEAST_SHARP_SHARE)
        density = -xp.log10(
            xp.maximum(self._colours[0], 1) / xp.float32(self._white_red)
        )
        doubtful |= self._without_nuclei(density, sharp, low)
        usual = xp.median(self._variation(density, sharp)[sharp], overwrite_input=True)
        doubtful |= low & (self._variation(density, low) < _UNIFORM * float(usual))
        # neighbours decide together, and most of a region for its rim, where colours are mixed
        doubt = filters.gaussian(self._ns, doubtful * xp.float32(1), _DOUBT_SIGMA)
        around = filters.gaussian(self._ns, low * xp.float32(1), _DOUBT_SIGMA)
        regions = morphology.mostly(self._ns, low, doubtful, 0.5)
        return regions | low & (2 * doubt > around)

    def _variation(self, density: Array, blocks: Array) -> Array:
        """Standard deviation of the density among some of the blocks around each block."""
        xp = self._ns.xp
        weights = filters.gaussian(self._ns, blocks * xp.float32(1), _UNIFORM_SIGMA)
        xp.maximum(weights, _LEAST_WEIGHT, out=weights)
        mean = filters.gaussian(self._ns, density * blocks, _UNIFORM_SIGMA) / weights
        squares = filters.gaussian(self._ns, density**2 * blocks, _UNIFORM_SIGMA)
        squares /= weights
        return xp.sqrt((squares - mean**2).clip(0))

    def _without_nuclei(self, density: Array, sharp: Array, low: Array) -> Array:
        """Blocks with a low ratio whose structures in red are those of tissue without nuclei."""
        xp = self._ns.xp
        # over the blocks with a low ratio around each, since single blocks of stroma are bare too
        weights = filters.gaussian(self._ns, low * xp.float32(1), _COLOUR_SIGMA)
        bare = low.copy()
        for values, share in (
            (self._nuclei, _BARE_STRUCTURE),
            (density, _BARE_DENSITY),
        ):
            usual = float(xp.median(values[sharp], overwrite_input=True))
            mean = filters.gaussian(self._ns, values * low, _COLOUR_SIGMA)
            bare &= mean < share * usual * weights
        return bare

    def _sharp_share(self, sharp: Array, measured: Array) -> Array:
        """Share of the measured blocks of about the same colour that are sharp, per block."""
        xp = self._ns.xp
        weights = filters.gaussian(self._ns, measured * xp.float32(1), _COLOUR_SIGMA)
        xp.maximum(weights, _LEAST_WEIGHT, out=weights)
        edge = 255 // _COLOUR_STEP + 1
        colour = xp.zeros(measured.shape, dtype=xp.int32)
        for plane in self._colours:
            values = xp.where(measured, plane, xp.float32(0))
            mean = filters.gaussian(self._ns, values, _COLOUR_SIGMA)
            mean /= weights
            mean /= _COLOUR_STEP
            colour *= edge
            colour += mean.clip(0, edge - 1, out=mean).astype(xp.int32)
        tables = []
        for blocks in (sharp, measured):
            table = xp.bincount(colour[blocks], minlength=edge**3)
            table = table.reshape(edge, edge, edge).astype(xp.float32)
            tables.append(_blurred_table(self._ns, table).ravel())
        share = tables[0] / xp.maximum(tables[1], _LEAST_WEIGHT)
        of_block = xp.empty(colour.shape, dtype=share.dtype)
        # an index by int32 is copied as int64, so colours are looked up band by band
        for rows in row_bands(len(colour)):
            of_block[rows.inside] = share[colour[rows.inside]]
        return of_block

    def _read_squares(self, squares: Iterable[Square]) -> None:
        """Measures the bands of those squares that have tissue to judge."""
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
            # planes that lie in one piece are faster than every third value
            planes = self._ns.xp.ascontiguousarray(square.transpose(2, 0, 1))
            gray = filters.gray32_from_rgb(self._ns, planes.transpose(1, 2, 0))
            bands = detail_bands(self._ns, gray, self._check.block_px)
            self._bands[:, blocks[0], blocks[1]] = bands
            self._structures[blocks] = structure_amplitude(
                self._ns, gray, self._check.block_px
            )
            self._nuclei[blocks] = structure_amplitude(
                self._ns, self._red_density.take(planes[0]), self._check.block_px
            )
            colours = square.astype(self._ns.xp.float32)
            means = filters.block_means(self._ns, colours, self._check.block_px)
            self._colours[:, blocks[0], blocks[1]] = means.round().transpose(2, 0, 1)
            self._read_blocks[blocks] = True

    def _ratio(self, tissue: Array) -> tuple[Array, float]:
        """Ratio per block, and the ratio of the slide's sharp tissue."""
        ratio = self._ratio_without(*self._noise_blocks(tissue))
        sharp = self._sharp(ratio, tissue)
        if sharp <= _SHARP_TIMES * self._check.min_ratio:
            # the tissue has less noise than was measured, so nothing is subtracted
            ratio = self._ratio_without(self._glass & False, 50.0)
            sharp = self._sharp(ratio, tissue)
        return ratio, sharp

    def _noise_blocks(self, tissue: Array) -> tuple[Array, float]:
        """Blocks that show little but noise, bool, and a percentile.

        The percentile of the finest band of these blocks is the noise.
        """
        # light tissue that looks like glass has structures
        glass = self._glass & (self._structures < _LEAST_STRUCTURE) & self._read_blocks
        if bool(glass.any()) or not bool(tissue.any()):
            return glass, 50.0
        xp = self._ns.xp
        fine, coarse = self._bands
        light = filters.gray_from_rgb(self._ns, self._rgb) + 0.01
        detail = xp.log(fine * coarse / light + _NO_DETAIL)
        # Noise is in every block, so a block has at least its detail. If the slide has two kinds of
        # blocks with few in between, the weak ones show noise; if not, they show detail.
        valley = _valley(self._ns.download(detail[tissue]))
        return tissue & (detail < valley), _NOISE_PERCENTILE

    def _sharp(self, ratio: Array, tissue: Array) -> float:
        if not bool(tissue.any()):
            return 0.0
        return float(self._ns.xp.percentile(ratio[tissue], 75, overwrite_input=True))

    def _ratio_without(self, noisy: Array, percentile: float) -> Array:
        """Ratio per block, after subtracting the light noise measured in some blocks.

        `percentile` is that of the finest band; of the next one, in which structures are left even
        under strong blur, the median is subtracted.
        """
        xp = self._ns.xp
        noise = [0.0, 0.0]
        if bool(noisy.any()):
            # the variance of light noise is proportional to the light
            light = filters.gray_from_rgb(self._ns, self._rgb[noisy]) + 0.01
            noise = [
                float(xp.percentile(band[noisy] ** 2 / light, share))
                for band, share in zip(self._bands, (percentile, 50.0), strict=True)
            ]
        ratio = xp.empty(noisy.shape)
        for rows in row_bands(len(noisy)):
            light = filters.gray_from_rgb(self._ns, self._rgb[rows.inside])
            fine, coarse = (
                xp.sqrt((band[rows.inside] ** 2 - part * light).clip(0))
                for band, part in zip(self._bands, noise, strict=True)
            )
            ratio[rows.inside] = fine / (coarse + self._check.floor)
        return ratio

    def _around_suspects(
        self, tissue: Array, ratio: Array, sharp: float
    ) -> set[Square]:
        """Squares in which most tissue may be blurred, and the squares around these."""
        check = self._check
        limit = max(check.min_ratio, _SUSPECT * check.relative * sharp)
        low = tissue & (ratio < limit)
        one = self._ns.xp.float32(1)
        low_share = filters.block_means(self._ns, low * one, _SQUARE_BLOCKS)
        tissue_share = filters.block_means(self._ns, tissue * one, _SQUARE_BLOCKS)
        suspects = self._ns.xp.argwhere(low_share > tissue_share / 2)
        around = set()
        for row, column in self._ns.download(suspects).tolist():
            for dy, dx in product((-1, 0, 1), repeat=2):
                around.add((row + dy, column + dx))
        return around


def detail_bands(ns: ArrayNamespace, gray: Array, block_px: int) -> Array:
    """Amplitudes of the finest band and the next, float32 (2, rows, columns) of blocks."""
    once = filters.gaussian(ns, gray, 1.0)
    twice = filters.gaussian(ns, gray, 2.0)
    fine = filters.block_means(ns, abs(gray - once), block_px)
    coarse = filters.block_means(ns, abs(once - twice), block_px)
    return ns.xp.stack([fine, coarse])


def structure_amplitude(ns: ArrayNamespace, gray: Array, block_px: int) -> Array:
    """Amplitude of structures of the size of a nucleus, float32 (rows, columns) of blocks.

    `block_px` must be a multiple of 8, the edge of the grid's pixels.
    """
    grid = filters.block_means(ns, gray, _STRUCTURE_PX)
    smooth = filters.gaussian(ns, grid, _STRUCTURE_SIGMA)
    return filters.block_means(ns, abs(grid - smooth), block_px // _STRUCTURE_PX)


def _valley(values: NDArray[np.floating]) -> float:
    """The value that parts values of two kinds; minus infinity if they are of one kind.

    Args:
        values: (N,), logarithms; N > 0.
    """
    steps = np.floor(values / _VALLEY_STEP).astype(np.int64)
    lowest = int(steps.min())
    kernel = filters.gaussian_kernel(_VALLEY_SIGMA)
    density = np.convolve(np.bincount(steps - lowest), kernel)
    # the highest peaks on both sides of each step
    left = np.maximum.accumulate(density)
    right = np.maximum.accumulate(density[::-1])[::-1]
    peak = np.minimum(left, right)
    by_chance = _CHANCE_BLOCKS * kernel.max()
    depth = (density + by_chance) / np.maximum(peak, 1e-9)
    at = int(depth.argmin())
    if depth[at] > _VALLEY:
        return -math.inf
    return (at - len(kernel) // 2 + lowest + 0.5) * _VALLEY_STEP


def _blurred_table(ns: ArrayNamespace, table: Array) -> Array:
    """A cube under a Gaussian of one step along each axis, mirrored at its borders."""
    kernel = filters.gaussian_kernel(1.0)
    reach = len(kernel) // 2
    steps = np.pad(np.eye(len(table)), ((reach, reach), (0, 0)), mode="symmetric")
    weights = [kernel @ steps[row : row + len(kernel)] for row in range(len(table))]
    matrix = ns.xp.asarray(np.stack(weights), dtype=table.dtype)
    for _ in range(3):
        # the first axis becomes the last
        table = ns.xp.tensordot(table, matrix, axes=(0, 1))
    return table


def _glass_in_tissue(view: QcView) -> Array:
    """The mask of glass inside of tissue, as between fat cells: it has no detail to judge."""
    ns = view.ns
    xp = ns.xp
    sample = filters.gray_from_rgb(ns, view.rgb[::4, ::4])
    white = float(xp.percentile(sample, _WHITE_PERCENTILE))
    glass = xp.empty(view.mask_use.shape, dtype=bool)
    for band in row_bands(len(glass), _GLASS_REACH):
        rgb = view.rgb[band.around]
        gray = filters.gray_from_rgb(ns, rgb)
        darkness = white - filters.gaussian(ns, gray, _GLASS_SIGMA)[band.own]
        planes = xp.ascontiguousarray(rgb.transpose(2, 0, 1))
        lowest, highest = filters.extremes(ns, planes)
        colour = (highest - lowest) / xp.float32(255)
        colour = filters.gaussian(ns, colour, _GLASS_SIGMA)[band.own]
        # the brightness of the lamp may vary, so colourless areas may be darker and still be glass
        limit = xp.where(colour < _GLASS_COLOUR, _GREY_GLASS_GRAY, _GLASS_GRAY)
        glass[band.inside] = darkness < limit
    return glass


def _in_blocks(ns: ArrayNamespace, mask: Array, blocks: Array) -> Array:
    """The pixels of a mask whose block is True, bool, without blocks in the size of the mask."""
    rows = ns.xp.asarray(filters.nearest(blocks.shape[0], mask.shape[0]))
    columns = ns.xp.asarray(filters.nearest(blocks.shape[1], mask.shape[1]))
    inside = ns.xp.empty_like(mask)
    for band in row_bands(len(mask)):
        part = blocks[rows[band.inside, None], columns]
        inside[band.inside] = mask[band.inside] & part
    return inside


def _finite_values(ns: ArrayNamespace, blocks: Array, mask: Array) -> Array:
    """Value of the block of each pixel of a mask, (N,), without infinite ones."""
    rows = ns.xp.asarray(filters.nearest(blocks.shape[0], mask.shape[0]))
    columns = ns.xp.asarray(filters.nearest(blocks.shape[1], mask.shape[1]))
    finite = ns.xp.isfinite(blocks)
    chosen = mask & finite[rows[:, None], columns]
    values = ns.xp.empty(int(chosen.sum()), dtype=blocks.dtype)
    count = 0
    for band in row_bands(len(mask)):
        part = blocks[rows[band.inside, None], columns][chosen[band.inside]]
        values[count : count + part.size] = part
        count += part.size
    return values
