"""What the generators of slides with artefacts promise to those who tune and report on them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from thinsection.slide import open_slide
from thinsection.testing.artefact_slide import ARTEFACTS, ArtefactSlide
from thinsection.testing.held_out_slide import held_out_slide
from thinsection.testing.tuning_slide import tuning_slide

Generator = Callable[..., ArtefactSlide]
SIZE = (420, 330)
both = pytest.mark.parametrize("generator", [tuning_slide, held_out_slide])


@both
def test_a_seed_is_a_slide(generator: Generator) -> None:
    first, again, other = (generator(seed, size=SIZE, mpp=8.0) for seed in (3, 3, 4))
    assert np.array_equal(first.rgb, again.rgb)
    assert not np.array_equal(first.rgb, other.rgb)


@both
def test_every_artefact_is_drawn_and_marked(generator: Generator) -> None:
    slide = generator(1, size=SIZE, mpp=8.0, stain="he", artefacts=ARTEFACTS)
    names = {"slight_blur" if name == "blur" and slide.blur_um < 1 else name for name in ARTEFACTS}
    assert names | {"tissue"} <= set(slide.masks)
    assert all(mask.shape == slide.rgb.shape[:2] == SIZE[::-1] for mask in slide.masks.values())
    assert 0 < slide.clean.mean() < slide.masks["tissue"].mean()


@both
def test_a_slide_without_artefacts_is_clean(generator: Generator) -> None:
    slide = generator(2, size=SIZE, mpp=8.0, artefacts=())
    assert np.array_equal(slide.clean, slide.masks["tissue"])


def test_what_is_written_is_a_slide_of_that_resolution(tmp_path: Path) -> None:
    slide = tuning_slide(5, size=SIZE, mpp=4.0)
    slide.write(tmp_path / "a.tif", (1, 4))
    with open_slide(tmp_path / "a.tif") as written:
        assert (written.size, written.slide_mpp) == (SIZE, pytest.approx((4.0, 4.0)))
        px = written.read_region((0, 0), 0, SIZE).astype(int)
    assert np.abs(px - slide.rgb).mean() < 12
