"""No IHC without brown, no glass in tissue that fills a field."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import skimage.data
from PIL import Image
from scipy import ndimage
from tests.qc.slides import REAL

from thinsection.qc.tissue import TissueConfig, segment_tissue
from thinsection.slide import open_slide
from thinsection.types import RgbArray

# density of red, green and blue light (Ruifrok and Johnston 2001)
HAEMATOXYLIN = np.array((0.65, 0.70, 0.29))
EOSIN = np.array((0.07, 0.99, 0.11))
DAB = np.array((0.27, 0.57, 0.78))
GLASS = 243.0
MASK_MPP = 8.0
NUM_CROPS = 300
HE_SLIDES = ("CMU-1-Small-Region.svs", "tcga-cr-7395-01a-01-ts1.svs")
HE_MPP = 0.5


def field(
    haematoxylin: float, eosin: float, dab: float, *, glass: bool, seed: int = 0
) -> RgbArray:
    """A picture of 8 µm/px: nuclei, a counterstain and brown cells, with glass or without."""
    rng = np.random.default_rng(seed)
    shape = (160, 200)

    def amount(mean: float, sigma_px: float) -> npt.NDArray[np.float64]:
        noise = ndimage.gaussian_filter(rng.normal(size=shape), sigma_px)
        return mean * np.exp(0.5 * noise / noise.std())

    density = amount(haematoxylin, 0.8)[..., None] * HAEMATOXYLIN
    density += amount(eosin, 1.5)[..., None] * EOSIN
    density += amount(dab, 1.0)[..., None] * DAB
    if glass:
        density[:, :60] = 0.0
    light = GLASS * 10.0**-density + rng.normal(0, 1.5, (*shape, 3))
    return np.clip(light, 0, 255).astype(np.uint8)


def reduced(rgb: RgbArray, mpp: float) -> RgbArray:
    """The picture at the resolution of the tissue mask."""
    image = Image.fromarray(rgb)
    size = [max(1, round(edge * mpp / MASK_MPP)) for edge in image.size]
    return np.asarray(image.resize((size[0], size[1]), Image.Resampling.LANCZOS))


def stain_of(rgb: RgbArray) -> str:
    return segment_tissue(rgb, TissueConfig(), px_um=MASK_MPP)[1]


def fraction_of(rgb: RgbArray) -> float:
    mask, _ = segment_tissue(rgb, TissueConfig(), px_um=MASK_MPP)
    return float(mask.mean())


def fraction_spread(rgb: RgbArray) -> float:
    """How far the tissue fraction moves when all px are up to two grey levels off."""
    steps = (-2, -1, 0, 1, 2)
    moved = [np.clip(rgb.astype(int) + step, 0, 255).astype(np.uint8) for step in steps]
    return float(np.ptp([fraction_of(picture) for picture in moved]))


@pytest.mark.check
@pytest.mark.parametrize("name", HE_SLIDES)
def test_no_crop_of_a_real_slide_of_he_is_called_ihc(name: str) -> None:
    path = Path(REAL).with_name(name)
    if not path.exists():
        pytest.skip(f"{name} is not under THINSECTION_TEST_SLIDES")
    with open_slide(path) as slide:
        width, height = slide.size
        whole = slide.read_region((0, 0), 0, slide.size)
    rng = np.random.default_rng(0)
    stains = []
    for _ in range(NUM_CROPS):
        crop_width, crop_height = rng.integers(256, 1600, 2)
        x = rng.integers(0, width - crop_width)
        y = rng.integers(0, height - crop_height)
        crop = whole[y : y + crop_height, x : x + crop_width]
        stains.append(stain_of(reduced(np.ascontiguousarray(crop), HE_MPP)))
    assert stains.count("IHC") == 0
    assert stains.count("H&E") > 0.8 * NUM_CROPS


@pytest.mark.parametrize("mpp", [0.25, 0.5, 1.0])
def test_the_real_ihc_of_scikit_image_is_called_ihc(mpp: float) -> None:
    assert stain_of(reduced(skimage.data.immunohistochemistry(), mpp)) == "IHC"


@pytest.mark.parametrize("glass", [True, False], ids=["glass", "no glass"])
@pytest.mark.parametrize(
    ("haematoxylin", "eosin", "dab", "allowed"),
    [
        pytest.param(0.25, 0.25, 0.0, {"H&E"}, id="he"),
        pytest.param(0.08, 0.10, 0.0, {"H&E"}, id="pale he"),
        pytest.param(0.45, 0.03, 0.0, {"H&E", "unsure"}, id="purple he"),
        pytest.param(0.05, 0.06, 0.0, {"H&E"}, id="faded he"),
        pytest.param(0.08, 0.45, 0.0, {"H&E"}, id="he rich in eosin"),
        pytest.param(0.30, 0.00, 0.0, {"H&E", "unsure"}, id="haematoxylin only"),
        pytest.param(0.10, 0.00, 0.40, {"IHC"}, id="strong dab"),
        pytest.param(0.10, 0.00, 0.15, {"IHC"}, id="weak dab"),
        pytest.param(0.20, 0.00, 0.05, {"IHC", "unsure"}, id="a trace of dab"),
    ],
)
def test_the_stain_of_generated_fields(
    haematoxylin: float, eosin: float, dab: float, allowed: set[str], glass: bool
) -> None:
    assert stain_of(field(haematoxylin, eosin, dab, glass=glass)) in allowed


@pytest.mark.parametrize("mpp", [0.25, 0.5, 0.75, 1.0])
def test_a_real_field_without_glass_is_all_tissue(mpp: float) -> None:
    picture = reduced(skimage.data.immunohistochemistry(), mpp)
    assert fraction_of(picture) == 1.0
    assert fraction_spread(picture) < 0.02


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dab", [0.0, 0.04, 0.1])
def test_a_generated_ki67_field_without_glass_is_all_tissue(
    dab: float, seed: int
) -> None:
    picture = field(0.12, 0.0, dab, glass=False, seed=seed)
    assert fraction_of(picture) > 0.98
    assert fraction_spread(picture) < 0.02


def test_glass_beside_a_pale_counterstain_is_no_tissue() -> None:
    mask, _ = segment_tissue(
        field(0.12, 0.0, 0.04, glass=True), TissueConfig(), px_um=MASK_MPP
    )
    assert mask[:, 64:].mean() > 0.98
    assert mask[:, :56].mean() < 0.02
