"""Generator C marks what it draws, and draws the same from the same seed."""

import numpy as np
import pytest
from scipy import ndimage
from tests.qc.slides import needs_real_slide
from tests.support.held_out_lookalikes import LOOKALIKES
from tests.support.held_out_tissue import PICTURES, TissueSlide, tissue_slide

pytestmark = [
    needs_real_slide,
    pytest.mark.skipif(
        not PICTURES.is_dir(), reason="no pictures beside THINSECTION_TEST_SLIDES"
    ),
]
SIZE = (640, 480)


def drawn(seed: int, *artefacts: str) -> TissueSlide:
    return tissue_slide(seed, size=SIZE, mpp=4.0, stain="he", artefacts=artefacts)


def test_a_seed_gives_one_slide() -> None:
    first = drawn(3, "pen", "fold")
    second = drawn(3, "pen", "fold")
    assert first.rgb.tobytes() == second.rgb.tobytes()
    assert first.masks.keys() == second.masks.keys()
    assert all((first.masks[k] == second.masks[k]).all() for k in first.masks)
    assert (first.rgb != drawn(4, "pen", "fold").rgb).mean() > 0.5


@pytest.mark.parametrize("artefact", ["pen", "fold", "dust", "bubble", "coverslip"])
def test_an_artefact_changes_the_slide_where_it_is_marked(artefact: str) -> None:
    for seed in (5, 6, 7):
        with_it = drawn(seed, artefact)
        without = drawn(seed)
        assert (with_it.masks["tissue"] == without.masks["tissue"]).all()
        change = smooth(with_it) - smooth(without)
        mask = with_it.masks[artefact]
        far = ~ndimage.binary_dilation(mask, iterations=10)
        # the camera's noise and colours differ slightly: it is another photograph
        lamp = np.median(change[far], axis=0)
        differs = np.abs(change - lamp).max(axis=2) > 24
        assert differs[far].mean() < 0.002
        if artefact != "bubble":
            # the inside of a bubble on glass looks like glass
            assert differs[mask].mean() > 0.4


def smooth(slide: TissueSlide) -> np.ndarray:
    return ndimage.uniform_filter(slide.rgb.astype(np.float32), (3, 3, 0))


def test_every_kind_of_biology_is_drawn_as_tissue_and_without_artefacts() -> None:
    kinds = set()
    for seed in range(5):
        slide = drawn(seed, "pen", "bubble")
        kinds |= slide.biology.keys()
        for where in slide.biology.values():
            assert not (where & ~slide.masks["tissue"]).any()
            assert not (where & slide.masks["pen"]).any()
            assert not (where & slide.clean).any()
    assert kinds == set(LOOKALIKES)


def test_blur_is_a_strip_of_less_detail_at_the_resolution_of_the_scan() -> None:
    slide = tissue_slide(8, size=(900, 700), mpp=0.5, stain="he", artefacts=("blur",))
    assert slide.masks["tissue"].all()
    assert 1.1 <= slide.blur_um <= 4
    grey = slide.rgb.astype(np.float32).mean(axis=2)
    grey = ndimage.gaussian_filter(grey, 1)
    detail = np.abs(ndimage.laplace(grey))
    inside = ndimage.binary_erosion(slide.masks["blur"], iterations=20)
    outside = ~ndimage.binary_dilation(slide.masks["blur"], iterations=20)
    assert detail[inside].mean() < 0.6 * detail[outside].mean()
