"""The default tissue mask: on planted tissue, any stain, and what is on glass but no tissue."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage, spatial
from tests.qc.slides import ArraySlide
from tests.qc.views import view_of
from training.tuning_slide import tuning_slide

from thinsection.arrays import bands
from thinsection.arrays.filters import otsu_level
from thinsection.errors import InvalidInputError
from thinsection.qc.checks.artefact_network import CLASSES
from thinsection.qc.checks.check import COARSEST_MPP, QcCheck
from thinsection.qc.checks.tissue import Tissue
from thinsection.qc.pipeline import load_pipeline
from thinsection.qc.tissue import (
    TissueConfig,
    segment_tissue,
    tissue_mask,
)
from thinsection.qc.work_image import resolution_of, work_size
from thinsection.types import Size

PINK, WHITE, BLACK = (200, 120, 170), (243, 242, 244), (5, 4, 6)


def canvas(color: tuple[int, int, int], *, seed: int = 0) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(0, 2, (150, 200, 3))
    return np.clip(np.array(color) + noise, 0, 255).astype(np.uint8)


def iou(mask: np.ndarray, truth: np.ndarray) -> float:
    return float((mask & truth).sum() / (mask | truth).sum())


def test_planted_tissue_is_found_to_within_its_border() -> None:
    image, truth = canvas(WHITE), np.zeros((150, 200), dtype=bool)
    truth[40:110, 30:150] = True
    image[truth] = canvas(PINK)[truth]
    mask, _ = segment_tissue(image, TissueConfig(), px_um=8.0)
    assert iou(mask, truth) > 0.98


def test_an_empty_slide_has_no_tissue() -> None:
    mask, stain = segment_tissue(canvas(WHITE), TissueConfig(), px_um=8.0)
    assert not mask.any()
    assert stain == ""


def test_a_slide_full_of_tissue_is_all_tissue() -> None:
    image = canvas(PINK)
    image[:, 100:] = canvas((120, 60, 150), seed=1)[:, 100:]
    mask, _ = segment_tissue(image, TissueConfig(), px_um=8.0)
    assert mask.all()


def test_black_borders_are_not_tissue() -> None:
    image = canvas(WHITE)
    image[:, :40] = BLACK
    image[60:120, 100:180] = canvas(PINK)[60:120, 100:180]
    mask, _ = segment_tissue(image, TissueConfig(), px_um=8.0)
    assert not mask[:, :38].any()
    assert mask[65:115, 105:175].all()


def test_specks_go_and_small_holes_close_by_area_in_um2() -> None:
    image = canvas(WHITE)
    image[20:120, 20:160] = canvas(PINK)[20:120, 20:160]
    image[60:68, 60:68] = WHITE  # 64 px: 4096 µm²
    image[80:100, 100:130] = WHITE  # 600 px: 38,400 µm²
    image[135:145, 180:190] = PINK  # 100 px: 6,400 µm²
    mask, _ = segment_tissue(image, TissueConfig(), px_um=8.0)
    assert mask[60:68, 60:68].all()
    assert not mask[85:95, 105:125].any()
    assert not mask[135:145, 180:190].any()


@pytest.mark.parametrize("counts", [np.zeros(256), np.eye(1, 256, 7)[0]])
def test_otsu_of_nothing_or_of_one_value_is_a_number(counts: np.ndarray) -> None:
    assert np.isfinite(otsu_level(counts, np.arange(256)))


def test_work_images_keep_the_resolution_of_each_axis() -> None:
    assert work_size((80_000, 40_000), (0.25, 0.5), 8.0) == (2500, 2500)
    assert work_size((100, 50), (16.0, 16.0), 8.0) == (100, 50)


def test_a_slide_without_a_resolution_gets_a_bounded_work_image() -> None:
    wide = ArraySlide(
        [np.zeros((3, 9000, 3), np.uint8)], slide_mpp=None, objective_power=None
    )
    assumed = resolution_of(wide, 8.0, wide.slide_mpp)
    assert work_size(wide.size, assumed, 8.0) == (2048, 1)
    of_20x = ArraySlide([np.zeros((3, 9000, 3), np.uint8)], slide_mpp=None)
    assert resolution_of(of_20x, 8.0, of_20x.slide_mpp) == (0.5, 0.5)


def test_a_mask_resolution_must_be_positive() -> None:
    with pytest.raises(InvalidInputError, match="mask_mpp"):
        TissueConfig(mask_mpp=0)


@pytest.mark.parametrize(
    ("stain", "least", "called"),
    [
        *[("he", 0.95, "H&E"), ("ihc", 0.90, "IHC"), ("grey", 0.90, "grey")],
        *[("dark", 0.90, "dark"), ("faint", 0.90, "H&E"), ("tiled", 0.90, "H&E")],
    ],
)
def test_tissue_of_every_stain_is_found_and_the_stain_is_said(
    stain: str, least: float, called: str
) -> None:
    slide = tuning_slide(103, size=(2400, 1800), mpp=2.0, stain=stain, artefacts=())
    found = tissue_mask(slide.open())
    small = Image.fromarray(slide.masks["tissue"].astype(np.uint8) * 255)
    truth = np.asarray(small.resize(found.mask.shape[::-1], Image.Resampling.BOX)) > 127
    assert iou(found.mask, truth) >= least
    assert (truth & ~found.mask).sum() / truth.sum() <= 0.03
    assert found.stain == called


def test_what_lies_on_glass_is_no_tissue() -> None:
    """The slide's edge and large strokes of ink; black ink over tissue is missed by parts."""
    artefacts = ("bubble", "coverslip", "pen", "dust", "edge")
    for seed in (8, 10):
        slide = tuning_slide(
            seed, size=(2400, 1800), mpp=2.0, stain="he", artefacts=artefacts
        )
        found = tissue_mask(slide.open()).mask

        def resized(mask: np.ndarray, shape: Size = found.shape[::-1]) -> np.ndarray:
            image = Image.fromarray(mask.astype(np.uint8) * 255)
            return np.asarray(image.resize(shape, Image.Resampling.BOX)) > 0

        edge = resized(slide.masks["edge"]) & ~resized(slide.masks["tissue"])
        assert edge.any()
        assert (found & edge).sum() < 0.1 * edge.sum()
    pen = resized(slide.masks["pen"])
    assert pen.sum() > 0.1 * pen.size
    assert (found & pen).sum() < 0.25 * pen.sum()


def test_the_border_of_tissue_is_found_on_a_coarse_picture() -> None:
    """Small pieces at 64 µm/px: one more pixel all around each would be half of their area."""
    y, x = np.mgrid[:150, :200] % 25
    truth = np.hypot(y - 12, x - 12) < 6
    share = ndimage.uniform_filter(truth.astype(float), 2)[..., None]
    image = canvas(WHITE) * (1 - share) + canvas(PINK, seed=1) * share
    mask = segment_tissue(image.astype(np.uint8), TissueConfig(), px_um=64.0)[0]
    assert iou(mask, share[..., 0] > 0.5) > 0.75


@pytest.mark.parametrize(("px_um", "radius"), [(40.0, 6.5), (64.0, 7.0)])
def test_the_cores_of_an_array_stay_apart_on_a_coarse_picture(
    px_um: float, radius: float
) -> None:
    y, x = np.mgrid[:150, :200] % 20
    truth = np.hypot(y - 10, x - 10) < radius
    share = ndimage.uniform_filter(truth.astype(float), 2)[..., None]
    image = canvas(WHITE) * (1 - share) + canvas(PINK, seed=1) * share
    mask = segment_tissue(image.astype(np.uint8), TissueConfig(), px_um=px_um)[0]
    assert iou(mask, share[..., 0] > 0.5) > 0.82


@pytest.mark.parametrize("seed", [3, 4])
def test_the_grid_of_the_fields_of_a_camera_is_no_net_of_fat(seed: int) -> None:
    """Each field is a little darker and yellower along its upper side, by its own amount."""
    height, width = (11, 30)
    y, x = np.mgrid[:300, :400]
    # every second column of fields lies half a field lower
    row = y + (x // width) % 2 * (height // 2)
    rng = np.random.default_rng(seed)
    of_field = rng.uniform(1.6, 7.2, (60, 40))[row // height, x // width]
    line = np.where(row % height < 2, of_field, 0) * rng.uniform(0.6, 1.4, y.shape)
    image = 242 - line[..., None] * (0.8, 0.8, 1.6)
    image += rng.normal(0, 0.7, image.shape)
    truth = np.hypot(y - 150, x - 200) < 60
    image[truth] = np.array(PINK) + rng.normal(0, 6, (truth.sum(), 3))
    picture = image.clip(0, 255).astype(np.uint8)
    mask, _ = segment_tissue(picture, TissueConfig(), px_um=32.0)
    assert iou(mask, truth) > 0.95


def test_pale_tissue_that_is_lighter_than_the_glass_in_one_colour_is_found() -> None:
    """Pink cores on the grey glass of a dim lamp; glass as light, but without colour, is none."""
    image = canvas((226, 224, 230))
    truth = np.zeros((150, 200), dtype=bool)
    truth[40:110, 30:100] = True
    image[truth] = canvas((246, 200, 226), seed=1)[truth]
    image[40:110, 130:170] = canvas((234, 232, 238), seed=2)[40:110, 130:170]
    mask = segment_tissue(image, TissueConfig(), px_um=16.0)[0]
    assert iou(mask, truth) > 0.95


@pytest.mark.parametrize("share", [0.2, 0.35])
def test_pale_tissue_is_not_taken_for_uneven_glass(share: float) -> None:
    """As pale as the glass, but coloured, on a fifth and on a third of the slide."""
    image = canvas((243, 238, 242))
    truth = np.zeros((150, 200), dtype=bool)
    truth[20:130, 10 : 10 + round(share * 200 * 150 / 110)] = True
    image[truth] = canvas((238, 217, 233), seed=1)[truth]
    mask = segment_tissue(image, TissueConfig(), px_um=16.0)[0]
    assert iou(mask, truth) > 0.9


def with_tissue(grey_tissue: bool) -> tuple[np.ndarray, np.ndarray]:
    """Glass with a piece of tissue, pink or grey, and its place."""
    image = canvas(WHITE)
    truth = np.zeros((150, 200), dtype=bool)
    truth[20:110, 20:90] = True
    image[truth] = canvas((150, 150, 150) if grey_tissue else PINK, seed=1)[truth]
    return image, truth


@pytest.mark.parametrize("px_um", [8.0, 32.0])
@pytest.mark.parametrize(
    ("color", "place"),
    [
        ((215, 214, 216), np.s_[40:70, 110:190]),  # a streak on glass
        ((217, 216, 218), np.s_[100:130, 60:180]),  # one that touches the tissue
        ((12, 12, 12), np.s_[0:150, 180:190]),  # the edge of a coverslip
    ],
)
def test_grey_matter_on_the_glass_of_coloured_tissue_is_no_tissue(
    color: tuple[int, int, int], place: tuple[slice, slice], px_um: float
) -> None:
    """Streaks and shadows of a slide with pink tissue; as grey, they could be tissue."""
    for grey_tissue in (False, True):
        image, truth = with_tissue(grey_tissue)
        streak = np.zeros_like(truth)
        streak[place] = True
        streak &= ~truth
        # the coverslip's edge is not flat, so that it is no shade of the slide's edge
        image[streak] = canvas(color, seed=2)[streak]
        if max(color) < 100:
            image[::2, 182:188] = 90
        mask, _ = segment_tissue(image, TissueConfig(), px_um=px_um)
        inner = ndimage.binary_erosion(streak, iterations=2)
        if grey_tissue:
            assert (mask & truth).sum() > 0.95 * truth.sum()
        else:
            assert iou(mask, truth) > 0.93
            assert (mask & inner).sum() < 0.08 * inner.sum()
    if max(color) > 100:
        # of the streak beside tissue, a part is taken for its blurred rim
        assert (mask & inner).sum() > 0.3 * inner.sum()


def test_grey_pixels_as_dense_as_the_tissue_are_kept() -> None:
    """Carbon in tissue, and an island of it beside the tissue."""
    image, truth = with_tissue(grey_tissue=False)
    carbon = np.zeros_like(truth)
    carbon[40:80, 40:75] = True
    carbon[60:100, 88:110] = True
    image[carbon] = canvas((70, 70, 70), seed=2)[carbon]
    mask, _ = segment_tissue(image, TissueConfig(), px_um=8.0)
    assert iou(mask, truth | carbon) > 0.95


def test_a_few_dense_pixels_do_not_make_faint_tissue_grey_matter() -> None:
    """Pale grey tissue on a slide with one small blue stroke."""
    image = canvas((243, 242, 243))
    truth = np.zeros((150, 200), dtype=bool)
    truth[20:130, 20:150] = True
    mottled = np.random.default_rng(1).normal(218, 9, (150, 200, 1)).clip(0, 255)
    image[truth] = mottled.repeat(3, axis=2).astype(np.uint8)[truth]
    image[5:15, 160:190] = (60, 60, 190)
    mask, _ = segment_tissue(image, TissueConfig(), px_um=8.0)
    assert (mask & truth).sum() > 0.95 * truth.sum()


def cells(share: float, *, seed: int, linked: bool = False) -> np.ndarray:
    """Cells of 16 µm on glass, at 8 µm/px; `linked`: and lines from cell to cell, as in fat."""
    rng = np.random.default_rng(seed)
    shape = (300, 400)
    places = np.zeros(shape, dtype=bool)
    num_cells = round(share * places.size / 4)
    rows = rng.integers(0, shape[0] - 2, num_cells)
    columns = rng.integers(0, shape[1] - 2, num_cells)
    for down, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
        places[rows + down, columns + right] = True
    if linked:
        places[::25] = True
        places[:, ::25] = True
    image = rng.normal(242, 1.5, (*shape, 3))
    image[places] = np.array((165, 120, 180)) + rng.normal(0, 5, (places.sum(), 3))
    return image.clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("share", [0.03, 0.053, 0.1])
def test_the_tissue_of_a_smear_is_kept_and_not_judged(share: float) -> None:
    view = view_of(cells(share, seed=1))
    outcome = Tissue()(view)
    assert outcome.mask_use is not None
    assert outcome.unjudged_area is not None
    assert np.array_equal(outcome.unjudged_area, outcome.mask_use)
    assert outcome.mask_use.mean() > 2 * share
    assert "smear" in outcome.warnings[-1]


def touching_cells(seed: int) -> np.ndarray:
    """Cells of 16 to 32 µm at 8 µm/px: many alone, and three chains as one piece."""
    rng = np.random.default_rng(seed)
    shape = (400, 500)
    rows, columns = np.mgrid[: shape[0], : shape[1]]
    centres = rng.integers(5, np.array(shape) - 5, (2500, 2)).tolist()
    # a beam on two posts, none of which reaches the border
    for column in range(90, 410, 3):
        centres.append([200 + rng.integers(-1, 2), column])
    for branch in (110, 390):
        for row in range(80, 320, 3):
            centres.append([row, branch + rng.integers(-1, 2)])
    places = np.zeros(shape, dtype=bool)
    for row, column in centres:
        radius = rng.uniform(1.0, 1.6)
        places |= (rows - row) ** 2 + (columns - column) ** 2 <= radius**2
    image = rng.normal(242, 1.5, (*shape, 3))
    image[places] = np.array((165, 120, 180)) + rng.normal(0, 5, (places.sum(), 3))
    return image.clip(0, 255).astype(np.uint8)


def net_of_fat(seed: int, *, cell_um: float) -> np.ndarray:
    """Membranes of 10 µm between fat cells, at 8 µm/px, on glass."""
    rng = np.random.default_rng(seed)
    shape = (300, 400)
    num_cells = int(shape[0] * shape[1] * (8 / cell_um) ** 2)
    places = rng.uniform(0, shape, (num_cells, 2))
    points = np.argwhere(np.ones(shape, dtype=bool))
    away, _ = spatial.cKDTree(places).query(points, k=2)
    membrane = (1 - (away[:, 1] - away[:, 0]) * 0.8).clip(0, 1).reshape(shape)
    inside = np.zeros(shape)
    inside[40:-40, 40:-40] = 1
    density = (ndimage.gaussian_filter(membrane, 0.6) * inside)[..., None]
    image = rng.normal(242, 1.5, (*shape, 3)) * (1 - density)
    image += density * np.array((190, 130, 180))
    return image.clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("seed", [4, 5])
def test_cells_that_touch_are_a_smear_too(seed: int) -> None:
    outcome = Tissue()(view_of(touching_cells(seed)))
    assert outcome.unjudged_area is not None
    assert "smear" in outcome.warnings[-1]


@pytest.mark.parametrize(
    "image",
    [
        cells(0.05, seed=2, linked=True),
        net_of_fat(6, cell_um=100),
        net_of_fat(7, cell_um=200),
        canvas(WHITE),
        with_tissue(False)[0],
    ],
)
def test_fat_tissue_and_empty_glass_are_judged(image: np.ndarray) -> None:
    outcome = Tissue()(view_of(image))
    assert outcome.unjudged_area is None
    assert not any("smear" in warning for warning in outcome.warnings)


def test_a_run_without_quality_control_says_that_a_smear_was_not_judged() -> None:
    tissue = with_tissue(False)[0]
    for image, is_smear in ((cells(0.05, seed=3), True), (tissue, False)):
        slide = ArraySlide([image], slide_mpp=(8.0, 8.0), objective_power=None)
        found = tissue_mask(slide)
        assert found.tissue_fraction > 0.1
        assert ("smear" in found.warning) is is_smear


def thin_cores(width_um: float, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two wavy cores of 2.2 mm at 8 µm/px on glass, and their place."""
    rng = np.random.default_rng(seed)
    shape = (200, 340)
    rows, columns = np.mgrid[: shape[0], : shape[1]]
    places = np.zeros(shape, dtype=bool)
    for centre in (60, 140):
        middle = centre + 12 * np.sin(columns / 40 + rng.uniform(0, 6))
        places |= abs(rows - middle) < width_um / 16
    places &= (columns > 30) & (columns < 310)
    image = rng.normal(242, 1.5, (*shape, 3))
    texture = 30 * ndimage.gaussian_filter(rng.normal(size=shape), 1.2)[..., None]
    image[places] = (np.array((190, 125, 175)) + texture)[places]
    image = ndimage.gaussian_filter(image, (0.6, 0.6, 0))
    return image.clip(0, 255).astype(np.uint8), places


@pytest.mark.parametrize("width_um", [40.0, 56.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_share_of_cores_that_are_too_thin_is_not_judged(
    width_um: float, seed: int
) -> None:
    image, places = thin_cores(width_um, seed=seed)
    outcome = Tissue()(view_of(image))
    assert outcome.mask_use is not None
    assert outcome.mask_use.sum() < 0.5 * places.sum()
    assert "thinner than 80 µm" in outcome.warnings[-1]
    slide = ArraySlide([image], slide_mpp=(8.0, 8.0), objective_power=None)
    assert "thinner than 80 µm" in tissue_mask(slide).warning


@pytest.mark.parametrize("seed", [1, 2])
def test_thick_cores_and_thin_strands_beside_tissue_are_judged(seed: int) -> None:
    image, places = thin_cores(120.0, seed=seed)
    outcome = Tissue()(view_of(image))
    assert outcome.mask_use is not None
    assert iou(outcome.mask_use, places) > 0.8
    assert not outcome.warnings
    image, _ = thin_cores(40.0, seed=seed)
    rng = np.random.default_rng(seed)
    image[20:180, 120:220] = rng.normal(PINK, 6, (160, 100, 3)).clip(0, 255)
    outcome = Tissue()(view_of(image))
    assert not any("thinner" in warning for warning in outcome.warnings)


@pytest.mark.parametrize("seed", [1, 2])
def test_thin_cores_that_the_artefact_network_adds_are_judged(seed: int) -> None:
    image, places = thin_cores(40.0, seed=seed)
    view = view_of(image)
    check = load_pipeline("auto").checks[0]
    maps = {name: np.zeros(places.shape, np.uint8) for name in CLASSES}
    nothing_added = check(replace(view, artefact_maps=lambda: maps))
    assert "thinner than 80 µm" in nothing_added.warnings[-1]
    added = maps | {"tissue": places.astype(np.uint8) * 230}
    outcome = check(replace(view, artefact_maps=lambda: added))
    assert outcome.mask_use is not None
    assert iou(outcome.mask_use, places) > 0.9
    assert not any("thinner" in warning for warning in outcome.warnings)
    assert outcome.unjudged_area is None


def on_clipped_glass(seed: int, *, px_um: float) -> tuple[np.ndarray, np.ndarray]:
    """A section of 12 x 9 mm on glass that is clipped to pure white, and its place."""
    rng = np.random.default_rng(seed)
    height, width = round(12_000 / px_um), round(16_000 / px_um)
    rows, columns = np.mgrid[:height, :width]
    angle = np.arctan2(rows - height / 2, columns - width / 2)
    radius = 1 + 0.12 * np.sin(3 * angle + rng.uniform(0, 6))
    across = (columns - width / 2) / (0.37 * width)
    down = (rows - height / 2) / (0.37 * height)
    place = np.hypot(across, down) < radius
    image = np.full((height, width, 3), 262.0)
    image[place] = (rng.normal(0, 12, (height, width, 1)) + PINK)[place]
    image = ndimage.gaussian_filter(image, (0.5, 0.5, 0))
    return image.clip(0, 255).round().astype(np.uint8), place


@pytest.mark.parametrize("px_um", [24.0, 60.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_glass_that_is_clipped_to_white_keeps_the_rim_of_the_tissue(
    seed: int, px_um: float
) -> None:
    image, place = on_clipped_glass(seed, px_um=px_um)
    assert (image == 255).all(axis=2).mean() > 0.4
    mask, _ = segment_tissue(image, TissueConfig(), px_um=px_um)
    assert iou(mask, place) > 0.97
    # white that was not scanned, beside dim glass, is no tissue either
    scanned = np.full_like(place, True)
    scanned[:, : place.shape[1] // 8] = False
    scanned[: place.shape[0] // 8] = False
    dim = np.where(scanned[..., None], np.minimum(image, 235), 255).astype(np.uint8)
    mask, _ = segment_tissue(dim, TissueConfig(), px_um=px_um)
    assert iou(mask, place & scanned) > 0.97


@pytest.mark.parametrize("film", [(238, 224, 240), (232, 226, 236)])
@pytest.mark.parametrize("px_um", [16.0, 60.0])
def test_a_smooth_film_beside_tissue_is_no_tissue_and_pale_tissue_is(
    px_um: float, film: tuple[int, int, int]
) -> None:
    rng = np.random.default_rng(round(px_um))
    image = rng.normal(0, 1, (200, 300, 3)) + WHITE
    tissue = np.zeros(image.shape[:2], dtype=bool)
    tissue[30:170, 40:140] = True
    smeared = np.zeros_like(tissue)
    smeared[60:140, 140:170] = True
    pale = np.zeros_like(tissue)
    pale[30:170, 210:270] = True
    texture = rng.normal(0, 12, (*tissue.shape, 1))
    image[tissue] = (np.array((150, 70, 130)) + texture)[tissue]
    image[smeared] = (rng.normal(0, 1, image.shape) + film)[smeared]
    image[pale] = (0.7 * texture + film)[pale]
    rgb = ndimage.gaussian_filter(image, (0.5, 0.5, 0)).clip(0, 255).astype(np.uint8)
    mask, _ = segment_tissue(rgb, TissueConfig(), px_um=px_um)
    assert iou(mask, tissue | pale) > 0.95
    assert mask[smeared].mean() < 0.15


def framed(side: int, *, crossed: bool) -> tuple[np.ndarray, np.ndarray]:
    """A slide of 12 x 9 mm at 16 µm/px with a frame along one side, and its tissue."""
    rng = np.random.default_rng(side)
    image = rng.normal(0, 2, (560, 750, 3)) + WHITE
    tissue = np.zeros(image.shape[:2], dtype=bool)
    tissue[200:360, 250:500] = True
    frame = np.zeros_like(tissue)
    along_rows = side in (0, 1)
    across, along = np.ogrid[: image.shape[0], : image.shape[1]]
    if not along_rows:
        along, across = across, along
    # tilted by 5 px, with a brown band and a line
    depth = 60 + along // 130
    frame |= (across < depth - 20) | (abs(across - depth) < 2)
    if side in (1, 3):
        frame = frame[::-1, ::-1].copy()
    image[frame] = np.array((190, 170, 130)) + rng.normal(0, 4, (frame.sum(), 3))
    if crossed:
        tissue[:, 300:400] = True
    image[tissue] = np.array(PINK) + rng.normal(0, 6, (tissue.sum(), 3))
    return image.clip(0, 255).astype(np.uint8), tissue


@pytest.mark.parametrize("side", range(4))
def test_the_frame_of_a_slide_along_any_side_is_no_tissue(side: int) -> None:
    image, tissue = framed(side, crossed=False)
    mask, _ = segment_tissue(image, TissueConfig(), px_um=16.0)
    assert iou(mask, tissue) > 0.93


@pytest.mark.parametrize("side", [0, 1])
def test_tissue_that_crosses_the_frame_is_kept(side: int) -> None:
    image, tissue = framed(side, crossed=True)
    mask, _ = segment_tissue(image, TissueConfig(), px_um=16.0)
    assert mask[tissue].mean() > 0.97
    assert mask[~tissue].mean() < 0.05


def test_a_straight_edge_of_tissue_along_a_side_is_kept() -> None:
    """In a field of 3 mm, and where the band is deeper than a frame."""
    field = canvas(WHITE)
    field[:40] = canvas(PINK)[:40]
    assert segment_tissue(field, TissueConfig(), px_um=16.0)[0][:38].all()
    image, _ = framed(0, crossed=False)
    image[:200] = np.array(PINK, dtype=np.uint8)
    image[:200, ::3] -= 20
    assert segment_tissue(image, TissueConfig(), px_um=16.0)[0][:190].all()


def test_a_small_pale_piece_is_dirt_only_beside_dense_tissue() -> None:
    pale = np.full((40, 40, 3), (225, 212, 227))
    for color, is_tissue in ((PINK, False), ((225, 212, 227), True)):
        rng = np.random.default_rng(2)
        image = rng.normal(0, 1, (300, 400, 3)) + WHITE
        image[100:250, 200:350] = np.array(color) + rng.normal(0, 3, (150, 150, 3))
        image[20:60, 20:60] = pale + rng.normal(0, 1.5, pale.shape)
        shown = image.clip(0, 255).astype(np.uint8)
        mask, _ = segment_tissue(shown, TissueConfig(), px_um=16.0)
        assert mask[110:240, 210:340].all()
        assert mask[25:55, 25:55].any() == is_tissue


def test_the_edge_of_a_coverslip_is_no_tissue() -> None:
    image = canvas(WHITE)
    image[:, 60:63] //= 2
    assert not segment_tissue(image, TissueConfig(), px_um=8.0)[0].any()
    image[90:140, 100:180] = canvas(PINK)[90:140, 100:180]
    mask, _ = segment_tissue(image, TissueConfig(), px_um=8.0)
    assert mask[95:135, 105:175].all()
    assert not mask[:, 50:75].any()


def test_a_small_pale_piece_on_a_large_glass_is_kept() -> None:
    image = canvas((238, 236, 240))
    image[60:85, 90:125] = np.array((205, 208, 224)) + np.random.default_rng(1).normal(
        0, 6, (25, 35, 1)
    )
    image[66:74, 100:110] = (150, 110, 80)
    mask, stain = segment_tissue(image, TissueConfig(), px_um=8.0)
    assert mask[64:81, 94:121].mean() > 0.95
    assert mask.sum() < 1.4 * 25 * 35
    assert stain == "IHC"


def test_a_mask_is_the_same_every_time_and_at_another_resolution() -> None:
    slide = tuning_slide(3, size=(1200, 900), mpp=4.0, stain="he", artefacts=())
    first, again = (tissue_mask(slide.open()).mask for _ in range(2))
    np.testing.assert_array_equal(first, again)
    coarse = tissue_mask(slide.open(), TissueConfig(mask_mpp=16.0)).mask
    large = coarse.repeat(2, axis=0).repeat(2, axis=1)[
        : first.shape[0], : first.shape[1]
    ]
    assert (large & first).sum() / (large | first).sum() > 0.93


def test_auto_adds_what_the_artefact_network_is_sure_is_tissue_and_removes_glass() -> (
    None
):
    view = view_of(canvas(WHITE))
    check = load_pipeline("auto").checks[0]
    shape = view.mask_use.shape
    maps = {name: np.zeros(shape, np.uint8) for name in CLASSES}
    maps["tissue"][10:60, 10:60] = 230
    maps["tissue"][80:130, 10:60] = 190
    maps["glass"][40:60, 10:60] = 130
    mask = check(replace(view, artefact_maps=lambda: maps)).mask_use
    expected = np.zeros(shape, bool)
    expected[10:40, 10:60] = True
    assert np.array_equal(mask, expected)


@pytest.mark.parametrize(
    ("color", "mpp", "check"),
    [
        (WHITE, COARSEST_MPP + 1, load_pipeline("auto").checks[0]),
        # a field that tissue fills
        (PINK, 8.0, load_pipeline("auto").checks[0]),
        (WHITE, 8.0, Tissue()),
    ],
)
def test_the_artefact_network_is_not_asked_where_it_cannot_judge_or_need_not(
    color: tuple[int, int, int], mpp: float, check: QcCheck
) -> None:
    def fail() -> dict[str, np.ndarray]:
        raise AssertionError("asked")

    view = view_of(canvas(color), mpp_th=mpp)
    mask = check(replace(view, artefact_maps=fail)).mask_use
    assert mask is not None
    assert bool(mask.any()) == (color == PINK)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_tissue_is_the_same_in_bands_of_any_height(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slide = tuning_slide(seed, size=(1100, 700), mpp=8.0)
    found = []
    for rows in (32, 10_000):
        monkeypatch.setattr(bands, "BAND_ROWS", rows)
        found.append(segment_tissue(slide.rgb, TissueConfig(), px_um=8.0))
    (in_bands, stain), (whole, whole_stain) = found
    assert 0 < in_bands.sum() < in_bands.size
    assert np.array_equal(in_bands, whole)
    assert stain == whole_stain != ""
