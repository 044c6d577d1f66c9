"""Printed dots of a frame are found by their rows; cores, cells and single dots are not print."""

import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest
from scipy import ndimage
from scipy.spatial import cKDTree

from thinsection.arrays import get_namespace
from thinsection.qc.checks.printed_dots import find_printed_dots
from thinsection.qc.tissue import TissueConfig, segment_tissue
from thinsection.types import MaskArray, RgbArray

Points = npt.NDArray[np.float64]
SIZE_UM = (5200, 6400)  # height, width


def frame(step_um: float) -> Points:
    """Centres of two or three staggered rows along each side, and of a group in one corner, µm."""
    centres = []
    for row, along in enumerate((1000, 1000 + step_um / 2, 1000)):
        across = 400 + row * step_um * 0.866
        for x in np.arange(along, 5400, step_um):
            centres.append((across, x))
            # one side lacks each third dot of its middle row
            if row != 1 or len(centres) % 3:
                centres.append((SIZE_UM[0] - across, x))
        for y in np.arange(along, 4200, step_um):
            centres.append((y, across))
            centres.append((y, SIZE_UM[1] - across))
    for row in range(2):
        for column in range(2):
            centres.append((400 + row * step_um, 400 + column * step_um))
    return np.array(centres)


def disks(centres: Points, diameter_um: float, px_um: float) -> npt.NDArray[np.float64]:
    """Share of each px that disks cover, (H, W); edges are one px wide."""
    covered = np.zeros([round(length / px_um) for length in SIZE_UM])
    radius = diameter_um / 2 / px_um
    reach = int(radius) + 2
    rows, columns = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    for y, x in centres / px_um:
        top = int(y) - reach
        left = int(x) - reach
        away = np.hypot(rows + int(y) + 0.5 - y, columns + int(x) + 0.5 - x)
        own = np.s_[top : top + len(rows), left : left + len(rows)]
        covered[own] = np.maximum(covered[own], (radius + 0.5 - away).clip(0, 1))
    return covered


def on_glass(
    layers: list[tuple[npt.NDArray[np.float64], tuple[int, int, int]]], *, seed: int
) -> RgbArray:
    """Layers on the glass of a dim lamp, each with its shares and its colour."""
    rng = np.random.default_rng(seed)
    image = np.full((*layers[0][0].shape, 3), (176, 178, 174), dtype=float)
    for share, color in layers:
        image = image * (1 - share[..., None]) + share[..., None] * color
    image = ndimage.gaussian_filter(image, (0.4, 0.4, 0))
    image += rng.normal(0, 1, image.shape)
    return np.asarray(image.clip(0, 255).astype(np.uint8))


def section(px_um: float) -> npt.NDArray[np.float64]:
    """A section inside of the frame, that lies on a part of its left side."""
    height, width = (round(length / px_um) for length in SIZE_UM)
    y, x = np.mgrid[:height, :width] * px_um
    inside = np.hypot((y - 2600) / 1500, (x - 2400) / 2200) < 1
    return np.asarray(inside.astype(float))


def iou(mask: MaskArray, truth: MaskArray) -> float:
    return float((mask & truth).sum() / (mask | truth).sum())


BLUE_GREY = (126, 122, 142)
PINK = (130, 70, 120)


@pytest.mark.parametrize(("diameter_um", "step_um"), [(105.0, 145.0), (85.0, 125.0)])
@pytest.mark.parametrize("px_um", [8.0, 14.2, 20.0])
def test_the_printed_dots_of_a_frame_are_no_tissue(
    px_um: float, diameter_um: float, step_um: float
) -> None:
    dots = disks(frame(step_um), diameter_um, px_um)
    tissue = section(px_um)
    layers = [(dots, BLUE_GREY), (tissue, PINK)]
    image = on_glass(layers, seed=round(px_um))
    mask, _ = segment_tissue(image, TissueConfig(), px_um=px_um)
    assert iou(mask, tissue > 0) > 0.96
    # the same without dots: they cost next to nothing
    bare, _ = segment_tissue(on_glass(layers[1:], seed=1), TissueConfig(), px_um=px_um)
    assert iou(mask, tissue > 0) > iou(bare, tissue > 0) - 0.02


@pytest.mark.parametrize(("diameter_um", "step_um"), [(600, 800), (250, 400)])
def test_the_cores_of_an_array_are_kept(diameter_um: float, step_um: float) -> None:
    """As regular as print, in rows of the same steps, but wider."""
    y, x = np.meshgrid(
        np.arange(500, SIZE_UM[0] - 400, step_um),
        np.arange(500, SIZE_UM[1] - 400, step_um),
    )
    centres = np.stack([y.ravel(), x.ravel()], axis=1).astype(float)
    cores = disks(centres, diameter_um, 16.0)
    image = on_glass([(cores, PINK)], seed=2)
    mask, _ = segment_tissue(image, TissueConfig(), px_um=16.0)
    assert iou(mask, cores > 0.5) > 0.8


def line(num_dots: int, *, step_um: float = 145.0) -> Points:
    """Centres of dots in a row that is a little tilted, µm."""
    along = np.arange(num_dots) * step_um
    return np.stack([2000 + 0.1 * along, 600 + along], axis=1)


def wavering(centres: Points) -> Points:
    """The same with steps that differ by 49 µm from each to the next."""
    moved = centres.copy()
    moved[::2, 1] += 24.5
    return moved


def ring(num_dots: int) -> Points:
    """Centres on a circle, with the steps of a row."""
    radius = 145 / 2 / np.sin(np.pi / num_dots)
    angle = 2 * np.pi * np.arange(num_dots) / num_dots
    return np.stack([2600 + radius * np.sin(angle), 3200 + radius * np.cos(angle)], 1)


def scattered(num_dots: int) -> Points:
    """Centres that lie apart by at least 130 µm."""
    rng = np.random.default_rng(5)
    centres: list[npt.NDArray[np.float64]] = []
    for place in rng.uniform(300, 4800, (20 * num_dots, 2)):
        if all(np.hypot(*(place - other)) > 130 for other in centres):
            centres.append(place)
    return np.array(centres[:num_dots])


def found(
    centres: Points, diameter_um: float = 105.0, px_um: float = 16.0
) -> MaskArray:
    return found_in(disks(centres, diameter_um, px_um), px_um)


def found_in(shares: npt.NDArray[np.float64], px_um: float = 16.0) -> MaskArray:
    """Print among pale shapes, with a section in the lowest fifth of the picture."""
    density = ndimage.uniform_filter(0.2 * shares.astype(np.float32), 3)
    density[-(len(density) // 5) :] = 0.2
    cpu = get_namespace("cpu")
    return np.asarray(find_printed_dots(cpu, density, density > 0.03, px_um))


@pytest.mark.parametrize(
    ("centres", "is_print"),
    [
        (line(10), True),
        (line(24)[:, ::-1].copy(), True),
        (line(9), False),
        (line(12, step_um=400), False),
        (line(18, step_um=180), True),
        (wavering(line(18, step_um=180)), False),
        (ring(40), False),
        (scattered(300), False),
        (line(0), False),
    ],
)
def test_print_is_a_straight_row_of_at_least_ten_equal_steps(
    centres: Points, is_print: bool
) -> None:
    mask = found(centres)
    assert mask.any() == is_print
    if is_print:
        shown = disks(centres, 105.0, 16.0) > 0.5
        assert (mask & shown).sum() == shown.sum()
        assert mask.sum() < 3 * shown.sum()


@pytest.mark.parametrize(
    ("diameter_um", "px_um"), [(30.0, 4.0), (210.0, 16.0), (100.0, 50.0)]
)
def test_dots_that_are_too_small_too_large_or_too_coarse_are_no_print(
    diameter_um: float, px_um: float
) -> None:
    step_um = 2 * diameter_um
    assert not found(line(12, step_um=step_um), diameter_um, px_um).any()


def test_bars_in_a_row_are_no_print() -> None:
    bars = disks(line(24), 60.0, 16.0)
    bars = np.max([np.roll(bars, shift, axis=0) for shift in range(8)], axis=0)
    assert not found_in(bars).any()


@pytest.mark.parametrize("length", [4, 3])
def test_a_row_of_four_is_print_only_where_there_is_a_row_of_ten(length: int) -> None:
    short = line(length) + np.array((1500.0, 0.0))
    place = disks(short, 105.0, 16.0) > 0.5
    assert not found(short).any()
    mask = found(np.concatenate([line(12), short]))
    assert mask[place].all() == (length == 4)
    # of another size
    mask = found_in(disks(short, 165.0, 16.0) + disks(line(12), 90.0, 16.0))
    assert mask.any()
    assert not mask[place].any()


def test_dots_beside_a_row_are_print_and_dots_far_from_it_are_not() -> None:
    row = line(12)
    beside = row[2:4] + np.array((200.0, 0.0))
    far = row[2:4] + np.array((700.0, 0.0))
    mask = found(np.concatenate([row, beside, far]))
    near_shown = disks(beside, 105.0, 16.0) > 0.5
    far_shown = disks(far, 105.0, 16.0) > 0.5
    assert mask[near_shown].all()
    assert not mask[far_shown].any()


def fibres(
    px_um: float, step_um: float, gap_um: float, seed: int
) -> npt.NDArray[np.float64]:
    """Density of packed cells of a nearly regular lattice, with pale gaps, (H, W)."""
    rng = np.random.default_rng(seed)
    shape = [round(length / 1.5 / px_um) for length in SIZE_UM]
    rows, columns = np.mgrid[: shape[0] + 8, : shape[1] + 8] - 4.0
    centres = np.stack([rows * 0.866, columns + 0.5 * (rows % 2)], axis=2)
    centres = centres.reshape(-1, 2) * step_um
    centres += rng.normal(0, 0.05 * step_um, centres.shape)
    y, x = np.mgrid[: shape[0], : shape[1]] * px_um
    distance, nearest = cKDTree(centres).query(np.stack([y, x], axis=2), k=2)
    inner = (distance[..., 1] - distance[..., 0] - gap_um) / 2 / px_um
    tone = rng.normal(1, 0.1, len(centres))[nearest[..., 0]]
    return np.asarray(0.05 + 0.45 * (inner + 0.5).clip(0, 1) * tone)


def stained(density: npt.NDArray[np.float64], seed: int) -> RgbArray:
    """The picture of a density, in the colours of H&E."""
    light = 243 * np.exp(-density[..., None] * np.array((0.45, 1.3, 0.6)))
    light += np.random.default_rng(seed).normal(0, 2, light.shape)
    return np.asarray(light.clip(0, 255).astype(np.uint8))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("px_um", "step_um", "gap_um"),
    [(8.0, 150.0, 36.0), (12.0, 100.0, 20.0), (14.0, 110.0, 24.0)],
)
def test_fibres_in_rows_are_no_print(
    px_um: float, step_um: float, gap_um: float, seed: int
) -> None:
    density = fibres(px_um, step_um, gap_um, seed)
    y, x = np.mgrid[: density.shape[0], : density.shape[1]]
    middle = np.array(density.shape) / 2
    tissue = np.hypot(y - middle[0], x - middle[1]) < 0.9 * middle.min()
    density[~tissue] = 0
    density = ndimage.gaussian_filter(density, 0.5)
    image = stained(density, seed)
    mask, _ = segment_tissue(image, TissueConfig(), px_um=px_um)
    assert mask[tissue].mean() > 0.99


def test_dots_are_print_only_on_glass() -> None:
    """The same rows on glass, in tissue, and half of each."""
    rows = np.concatenate([line(24), line(24) + np.array((125.0, 72.0))])
    dots = disks(rows, 105.0, 16.0)
    density = ndimage.uniform_filter(0.2 * dots, 3).astype(np.float32)
    density[-60:] = 0.2
    cpu = get_namespace("cpu")
    stain = density > 0.03
    bare = np.asarray(find_printed_dots(cpu, density, stain, 16.0))
    assert bare[dots > 0.5].all()
    all_tissue = np.ones_like(stain)
    assert not find_printed_dots(cpu, density, all_tissue, 16.0).any()
    # tissue covers the right part of the rows, and the left part is long enough
    stain[:, 170:] = True
    half = np.asarray(find_printed_dots(cpu, density, stain, 16.0))
    shown = dots > 0.5
    assert half[:, :140][shown[:, :140]].all()
    assert not half[:, 195:].any()


def test_what_is_most_of_a_slide_is_no_print() -> None:
    """Round pieces of tissue on glass, in rows and as wide as dots; then beside a section."""
    y, x = np.mgrid[500:4700:300, 500:5900:300]
    pieces = disks(np.stack([y.ravel(), x.ravel()], axis=1) * 1.0, 150.0, 16.0)
    density = ndimage.uniform_filter(0.2 * pieces, 3).astype(np.float32)
    cpu = get_namespace("cpu")
    assert not find_printed_dots(cpu, density, density > 0.03, 16.0).any()
    some = density.copy()
    some[60:] = 0
    assert not find_printed_dots(cpu, some, some > 0.03, 16.0).any()
    some[130:, 50:350] = 0.2
    mask = np.asarray(find_printed_dots(cpu, some, some > 0.03, 16.0))
    assert mask[:60][pieces[:60] > 0.5].all()
    assert not mask[130:].any()


def test_the_memory_for_dots_grows_with_their_number() -> None:
    """Frames of three staggered rows, one below the other; then four times as many."""
    own = np.zeros((60, 144), dtype=np.float32)
    for row in range(3):
        for x in range(4 + 6 * (row % 2), 140, 12):
            own[11 + 10 * row : 19 + 10 * row, x : x + 6] = 0.2
            own[12 + 10 * row : 18 + 10 * row, x - 1 : x + 7] = 0.2

    def peak_bytes(times: int) -> int:
        density = np.tile(own, (times, times))
        tracemalloc.start()
        find_printed_dots(get_namespace("cpu"), density, density > 0.03, 12.0)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    few = peak_bytes(6)
    many = peak_bytes(12)
    assert many < 4.2 * few
    # 19 bytes per px, and 35 where all steps are continued at once
    assert many < 25 * 12**2 * own.size
