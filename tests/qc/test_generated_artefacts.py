"""What the generators of slides with artefacts promise to those who tune and report on them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.support.held_out_slide import held_out_slide
from training.artefact_slide import ARTEFACTS, STAINS, ArtefactSlide
from training.tuning_slide import tuning_slide

from thinsection.qc import Pipeline, QcResult, run_qc
from thinsection.qc.checks.artefacts import Bubbles, Folds, Ink
from thinsection.slide import open_slide

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
    names = {
        "slight_blur" if name == "blur" and slide.blur_um < 1 else name
        for name in ARTEFACTS
    }
    assert names | {"tissue"} <= set(slide.masks)
    assert all(
        mask.shape == slide.rgb.shape[:2] == SIZE[::-1] for mask in slide.masks.values()
    )
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


# Most of these folds are wider than 110 µm and not sure enough, so the largest width is raised.
CHECKS = {"pen": Ink(), "bubble": Bubbles(), "fold": Folds(max_width="1 mm")}


@pytest.fixture(scope="module")
def looked_at() -> dict[str, list[tuple[ArtefactSlide, QcResult]]]:
    """Slides that nothing was tuned on, and what the checks say of them."""
    pipeline = Pipeline(
        name="artefacts", work_from="mpp", checks=tuple(CHECKS.values())
    )
    firsts = {"tuning": (tuning_slide, 10_100), "held out": (held_out_slide, 100)}
    found: dict[str, list[tuple[ArtefactSlide, QcResult]]] = {}
    for name, (generator, first) in firsts.items():
        drawn = [
            generator(
                first + n,
                size=(600, 450),
                mpp=8.0,
                stain=stain,
                artefacts=tuple(CHECKS),
            )
            for n, stain in enumerate(STAINS)
        ]
        found[name] = [(slide, run_qc(slide.open(), pipeline)) for slide in drawn]
    return found


def pooled(
    pairs: list[tuple[ArtefactSlide, QcResult]], artefact: str
) -> tuple[float, float]:
    """Recall and precision over slides; px of other artefacts say nothing."""
    hits = true = found = 0
    for slide, result in pairs:
        valid = np.ones_like(result.mask_use)
        for other in set(CHECKS) - {artefact}:
            valid &= ~slide.masks[other]
        if artefact == "fold":
            valid &= slide.masks["tissue"]
        mask = result.masks[CHECKS[artefact].name] & valid
        truth = slide.masks[artefact] & valid
        hits, true, found = (
            hits + (mask & truth).sum(),
            true + truth.sum(),
            found + mask.sum(),
        )
    return hits / true, hits / found


@pytest.mark.parametrize("generator", ["tuning", "held out"])
def test_artefacts_of_unseen_slides_of_every_stain_are_found(
    generator: str, looked_at: dict[str, list[tuple[ArtefactSlide, QcResult]]]
) -> None:
    """Recall and precision, lowest; B's black strokes over dark tissue are what pen misses."""
    lowest = {"pen": (0.8, 0.5), "bubble": (0.6, 0.8)}
    if generator == "held out":  # most of A's short folds are missed
        lowest["fold"] = (0.25, 0.6)
    for artefact, bounds in lowest.items():
        found = pooled(looked_at[generator], artefact)
        assert found[0] >= bounds[0], (artefact, found)
        assert found[1] >= bounds[1], (artefact, found)
