"""Every operation of `arrays` against scikit-image, on each device that is there."""

import numpy as np
import pytest
import skimage.morphology
from skimage import color, exposure, filters, measure
from skimage.filters import rank
from tests.arrays.conftest import why_no_gpu

from thinsection.arrays import ArrayNamespace, get_namespace
from thinsection.arrays import filters as ours
from thinsection.arrays import morphology as masks
from thinsection.errors import DeviceError, InvalidInputError

RGB = np.random.default_rng(5).integers(0, 256, (61, 83, 3), dtype=np.uint8)
GRAY = np.random.default_rng(6).random((61, 83))
MASK = np.random.default_rng(7).random((61, 83)) > 0.4
MASK = skimage.morphology.opening(MASK, np.ones((2, 2)))


def same(
    ns: ArrayNamespace, got: object, expected: np.ndarray, rtol: float = 1e-9
) -> None:
    np.testing.assert_allclose(ns.download(got), expected, rtol=rtol, atol=1e-12)


def test_gray_and_yuv_are_scikit_images(ns: ArrayNamespace) -> None:
    rgb = ns.upload(RGB)
    same(ns, ours.gray_from_rgb(ns, rgb), color.rgb2gray(RGB))
    for c, weights in enumerate(ours.YUV):
        yuv = color.convert_colorspace(RGB, "RGB", "YUV")
        same(ns, ours.gray_from_rgb(ns, rgb, weights), yuv[..., c])


def test_gray_in_float32_is_the_same_to_its_precision(ns: ArrayNamespace) -> None:
    gray = ours.gray32_from_rgb(ns, ns.upload(RGB))
    assert gray.dtype == np.float32
    same(ns, gray, color.rgb2gray(RGB).astype(np.float32), rtol=1e-6)


def test_channel_std_is_the_population_std(ns: ArrayNamespace) -> None:
    same(ns, ours.channel_std(ns, ns.upload(RGB)), RGB.std(axis=2))


@pytest.mark.parametrize("stain", ours.STAINS)
def test_stains_are_scikit_images(ns: ArrayNamespace, stain: str) -> None:
    expected = color.separate_stains(RGB, getattr(color, stain))
    densities, unmixing = (ns.upload(table) for table in ours.stain_tables(stain))
    same(ns, ns.xp.maximum(densities[ns.upload(RGB)] @ unmixing, 0), expected)


def test_an_unknown_stain_is_refused() -> None:
    with pytest.raises(
        InvalidInputError, match=r"stain must be one of hed_from_rgb, .*got 'x'"
    ):
        ours.stain_tables("x")


@pytest.mark.parametrize("edge_px", [3, 10])
def test_box_mean_is_the_zero_filled_convolution(
    ns: ArrayNamespace, edge_px: int
) -> None:
    from scipy.signal import convolve2d

    expected = convolve2d(GRAY, np.full((edge_px, edge_px), edge_px**-2.0), mode="same")
    same(ns, ours.box_mean(ns, ns.upload(GRAY), edge_px), expected)


def test_laplacian_and_sobel_are_scikit_images(ns: ArrayNamespace) -> None:
    same(ns, ours.laplacian(ns, ns.upload(GRAY)), filters.laplace(GRAY))
    same(ns, ours.sobel_energy(ns, ns.upload(GRAY)), filters.sobel(GRAY) ** 2)


@pytest.mark.parametrize("sigma_px", [1.5, 7.0, 100.0])
def test_narrow_and_wide_gaussians_are_scikit_images(
    ns: ArrayNamespace, sigma_px: float
) -> None:
    image = np.random.default_rng(8).random((530, 61))
    expected = filters.gaussian(image, sigma=sigma_px)
    same(ns, ours.gaussian(ns, ns.upload(image), sigma_px), expected)


@pytest.mark.parametrize("order", [(1, 1), (2, 0), (0, 2), (0, 1)])
def test_kernels_of_derivatives_are_scipys(
    ns: ArrayNamespace, order: tuple[int, int]
) -> None:
    from scipy import ndimage

    kernels = [ours.gaussian_kernel(2.5, order=n) for n in order]
    got = ours.separable(ns, ns.upload(GRAY), *kernels)
    same(ns, got, ndimage.gaussian_filter(GRAY, 2.5, order=order, mode="nearest"))


@pytest.mark.parametrize("shape", [(31, 40), (122, 166), (1, 1), (61, 40)])
def test_a_gaussian_at_another_shape_is_the_resized_gaussian(
    ns: ArrayNamespace, shape: tuple[int, int]
) -> None:
    whole = ours.gaussian(ns, ns.upload(GRAY), 20.0)
    same(
        ns,
        ours.gaussian(ns, ns.upload(GRAY), 20.0, shape=shape),
        ns.download(ours.resized_nearest(ns, whole, shape)),
    )


def test_box_deviation_is_the_populations_std_under_the_square(
    ns: ArrayNamespace,
) -> None:
    padded = np.pad(GRAY, 3, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (7, 7))
    same(ns, ours.box_deviation(ns, ns.upload(GRAY), 7), windows.std(axis=(2, 3)))


def test_resizing_picks_the_px_under_the_centre(ns: ArrayNamespace) -> None:
    from skimage.transform import resize

    got = ours.resized_nearest(ns, ns.upload(MASK), (31, 40))
    same(ns, got, resize(MASK, (31, 40), order=0))


def test_local_minimum_is_scikit_images_rank_filter(ns: ArrayNamespace) -> None:
    image, disk = RGB[..., 0], skimage.morphology.disk(5)
    same(ns, ours.local_minimum(ns, ns.upload(image), disk), rank.minimum(image, disk))


def test_otsu_is_scikit_images(ns: ArrayNamespace) -> None:
    image = np.concatenate([GRAY.ravel() * 0.3, GRAY.ravel() * 0.2 + 0.7])
    got = ours.otsu_threshold(ns, ns.upload(image))
    assert got == pytest.approx(filters.threshold_otsu(image), rel=1e-12)


def test_otsu_of_one_value_is_that_value(ns: ArrayNamespace) -> None:
    assert ours.otsu_threshold(ns, ns.upload(np.full((4, 5), 0.25))) == 0.25


def test_local_otsu_crosses_to_the_host_and_is_counted(ns: ArrayNamespace) -> None:
    image, disk = RGB[..., 1], skimage.morphology.disk(4)
    same(ns, ours.local_otsu(ns, ns.upload(image), disk), rank.otsu(image, disk))
    assert ns.transfers["local otsu"] == (0 if ns.device == "cpu" else 2)


def test_equalising_is_scikit_images(ns: ArrayNamespace) -> None:
    image = RGB[..., 2]
    same(
        ns,
        ours.equalised(ns, ns.upload(image)),
        exposure.equalize_hist(image),
        rtol=1e-6,
    )


@pytest.mark.parametrize("min_area_px", [2, 9, 40])
def test_small_regions_and_holes_are_those_below_the_area(
    ns: ArrayNamespace, min_area_px: int
) -> None:
    at_most = min_area_px - 1
    dropped = skimage.morphology.remove_small_objects(MASK, max_size=at_most)
    filled = skimage.morphology.remove_small_holes(MASK, max_size=at_most)
    same(ns, masks.drop_small(ns, ns.upload(MASK), min_area_px), dropped)
    same(ns, masks.fill_small(ns, ns.upload(MASK), min_area_px), filled)


def test_an_empty_mask_stays_empty(ns: ArrayNamespace) -> None:
    empty = ns.upload(np.zeros((5, 7), dtype=bool))
    assert not ns.download(masks.drop_small(ns, empty, 3)).any()
    assert len(masks.region_areas(ns, empty)) == 0


@pytest.mark.parametrize("edge_px", [1, 2, 5, 10, 100])
def test_dilation_by_a_square_is_that_of_scipy(
    ns: ArrayNamespace, edge_px: int
) -> None:
    from scipy import ndimage

    expected = ndimage.binary_dilation(MASK, np.ones((edge_px, edge_px)))
    same(ns, masks.dilated_by_square(ns, ns.upload(MASK), edge_px), expected)


@pytest.mark.parametrize("radius_px", [0, 1, 2.5, 7, 70])
def test_dilation_by_a_disk_is_that_of_scipy(
    ns: ArrayNamespace, radius_px: float
) -> None:
    from scipy import ndimage

    few = MASK & (np.random.default_rng(9).random(MASK.shape) > 0.98)
    expected = ndimage.binary_dilation(few, masks.disk_footprint(radius_px))
    same(ns, masks.dilated_by_disk(ns, ns.upload(few), radius_px), expected)


@pytest.mark.parametrize("radius_px", [1, 3, 5])
def test_opening_by_a_disk_is_scikit_images(ns: ArrayNamespace, radius_px: int) -> None:
    solid = masks.dilated_by_square(get_namespace(), MASK, 6)
    expected = skimage.morphology.opening(solid, skimage.morphology.disk(radius_px))
    same(ns, masks.opened_by_disk(ns, ns.upload(solid), radius_px), expected)


def test_regions_are_counted_8_connected(ns: ArrayNamespace) -> None:
    areas = [r.area for r in measure.regionprops(measure.label(MASK, connectivity=2))]
    got = ns.download(masks.region_areas(ns, ns.upload(MASK)))
    assert sorted(got) == sorted(areas)


def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(
        InvalidInputError, match=r"device must be 'cpu', 'cuda' .*, got 'tpu'"
    ):
        get_namespace("tpu")
    if why_no_gpu():
        with pytest.raises(DeviceError, match=r"device 'cuda:7' must have CuPy"):
            get_namespace("cuda:7")


def test_elongated_regions_are_long_for_their_mean_width_bent_or_not(
    ns: ArrayNamespace,
) -> None:
    mask = np.zeros((90, 120), dtype=bool)
    mask[5:9, 5:85] = True  # 4 x 80: length² over area is 20
    mask[20:24, 5:60], mask[20:60, 56:60] = True, True  # bent
    mask[30:50, 5:25] = True  # a square: 1
    mask[80:81, 100:106] = True  # long, but only 6 px
    expected = mask.copy()
    expected[30:50, 5:25], expected[80:81, 100:106] = False, False
    same(ns, masks.keep_elongated(ns, ns.upload(mask), 5.0, 50), expected)
    mask[62:74, 5:95] = True  # 12 x 90: wider than the limit
    same(ns, masks.keep_elongated(ns, ns.upload(mask), 5.0, 50, 10.0), expected)
    none = ns.upload(np.zeros_like(mask))
    assert not ns.download(masks.keep_elongated(ns, none, 5.0, 50)).any()


def test_means_of_blocks_count_only_the_px_inside_the_image(ns: ArrayNamespace) -> None:
    means = ns.download(ours.block_means(ns, ns.upload(GRAY), 32))
    assert means.shape == (2, 3)
    expected = [
        [GRAY[y : y + 32, x : x + 32].mean() for x in (0, 32, 64)] for y in (0, 32)
    ]
    np.testing.assert_allclose(means, expected, rtol=1e-12)


@pytest.mark.parametrize("block_px", [8, 61])
def test_means_of_blocks_of_a_picture_are_those_of_its_channels(
    ns: ArrayNamespace, block_px: int
) -> None:
    picture = RGB.astype(np.float32)
    means = ns.download(ours.block_means(ns, ns.upload(picture), block_px))
    for channel in range(3):
        plane = ns.upload(picture[..., channel])
        same(ns, ours.block_means(ns, plane, block_px), means[..., channel], rtol=1e-6)
