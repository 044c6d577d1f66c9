"""How much ink is removed, and how much tissue with it?

Strokes of seven colours, a quarter, half and all of a dense pen, on real tissue in five stains
(`tests/support/planted_ink.py`) and on pictures of other stains that others publish
(`real_grounds.toml`; THINSECTION_TEST_GROUNDS names their folder): those of role "ground", whose
results with other seeds were seen before, and others on which no ink was planted before; HistoQC's
pictures of real pen with masks by hand; biology that looks like ink; smooth dark tissue of
generator B; and no ink at all. Shares are pooled over pictures.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
from PIL import Image
from tests.qc.slides import REAL
from tests.support.held_out_biology import BIOLOGY, MPP, picture_with
from tests.support.held_out_slide import held_out_slide
from tests.support.held_out_tissue import PICTURES
from tests.support.planted_ink import (
    INKS,
    STAINS,
    STRENGTHS,
    InkedTissue,
    inked_picture,
    inked_tissue,
)
from training.tuning_slide import tuning_slide

from benchmarks.bench_artefacts import real_pen
from benchmarks.harness import arguments, finish
from benchmarks.real_grounds import Ground, grounds_folder, read_table
from thinsection.qc.checks.pen_ink import find_pen_ink
from thinsection.types import MaskArray, RgbArray

# docs/validation/qc.md.j2: which seeds are for what; smaller ones judged former rules.
FIRST_SEED = 92_000
GROUNDS_SEED = 95_000
PX_UM = 8.0
# Of at most 16 µm/px and without ink. As they are, they chose the rule of the tissue's colours.
NEW_GROUNDS = ("kidney-he", "kidney-ihc", "tiatoolbox", "frame-ihc", "cores-he")
# Pixels of a slide of 20,000 x 16,000 px and 0.5 µm/px at 8 µm/px.
LARGE_PX = (1250, 1000)

Find = Callable[[RgbArray], MaskArray]


def main() -> None:
    """Judges the ink of a run without quality control, which is that of `auto` too."""
    args = arguments(__doc__ or "")
    seeds = {"grounds": GROUNDS_SEED, "others": FIRST_SEED}
    results: dict[str, object] = {"first seeds": seeds}
    if REAL.is_file() and PICTURES.is_dir():
        results["real pen"] = real_pen("auto", PICTURES)
        results["planted"] = judged(planted(smoke=args.smoke))
        results["biology removed"] = biology_removed(1 if args.smoke else 2)
    else:
        results["not run"] = "pen and tissue: THINSECTION_TEST_SLIDES has none"
    if grounds_folder() is None:
        results["grounds not run"] = "THINSECTION_TEST_GROUNDS names no folder"
    else:
        table = read_table()
        known = [ground for ground in table if ground.role == "ground"]
        new = [ground for ground in table if ground.name in NEW_GROUNDS]
        results["grounds"] = judged(on_grounds(known, GROUNDS_SEED, smoke=args.smoke))
        results["new grounds"] = judged(on_grounds(new, FIRST_SEED, smoke=args.smoke))
    results["dark tissue removed"] = dark_tissue_removed(1 if args.smoke else 8)
    results["without ink"] = without_ink(1 if args.smoke else 8)
    finish("bench_ink", results, args)


def find(rgb: RgbArray) -> MaskArray:
    """Ink of a picture at 8 µm/px."""
    return np.asarray(find_pen_ink(rgb, PX_UM).ink)


def planted(*, smoke: bool) -> Iterator[tuple[tuple[str, str, float], InkedTissue]]:
    """Pictures of every second case of stain, colour and strength."""
    cases = list(product(STAINS, INKS, STRENGTHS))
    for number, (stain, color, strength) in enumerate(cases[:: 29 if smoke else 2]):
        seed = FIRST_SEED + number
        drawn = inked_tissue(seed, stain=stain, color=color, strength=strength)
        yield (stain, color, strength), drawn


def on_grounds(
    grounds: list[Ground], first_seed: int, *, smoke: bool
) -> Iterator[tuple[tuple[str, str, float], InkedTissue]]:
    """Pictures of each ground; every eighth case of colour and strength."""
    folder = grounds_folder()
    assert folder is not None
    cases = list(product(grounds, INKS, STRENGTHS))
    for number, (ground, color, strength) in enumerate(cases[:: 29 if smoke else 8]):
        rgb = ground.read(folder)
        seed = first_seed + number
        drawn = inked_picture(rgb, ground.mpp, seed, color=color, strength=strength)
        yield (ground.name, color, strength), drawn


def judged(
    pictures: Iterator[tuple[tuple[str, str, float], InkedTissue]],
) -> dict[str, dict[str, float]]:
    """Shares of ink on tissue, and of clean tissue, by stain, colour and strength."""
    counts: defaultdict[str, np.ndarray] = defaultdict(lambda: np.zeros(5))
    for (stain, color, strength), drawn in pictures:
        found = find_pen_ink(drawn.rgb, PX_UM)
        counted = (
            np.count_nonzero(found.ink & drawn.ink),
            np.count_nonzero(found.unjudged & drawn.ink),
            np.count_nonzero(drawn.ink),
            np.count_nonzero(found.ink & drawn.clean),
            np.count_nonzero(drawn.clean),
        )
        for name in ("all", stain, color, f"{strength}", f"{color} {strength}"):
            counts[name] += counted
    return {
        name: {
            "ink removed": round(float(found / max(1, true)), 3),
            "ink not judged": round(float(unjudged / max(1, true)), 3),
            "clean tissue removed": round(float(lost / max(1, clean)), 4),
        }
        for name, (found, unjudged, true, lost, clean) in counts.items()
    }


def biology_removed(times: int) -> dict[str, float]:
    """Share of each kind of biology that is taken for ink, over `times` pictures."""
    removed = {}
    factor = round(PX_UM / MPP)
    for name in sorted(BIOLOGY):
        found = 0
        total = 0
        for seed in range(FIRST_SEED, FIRST_SEED + times):
            picture, where = picture_with(name, seed)
            rgb = np.asarray(Image.fromarray(picture).reduce(factor))
            small = Image.fromarray(where.astype(np.uint8) * 255).reduce(factor)
            is_biology = np.asarray(small) > 127
            found += np.count_nonzero(find(rgb) & is_biology)
            total += np.count_nonzero(is_biology)
        removed[name] = round(found / max(1, total), 4)
    return removed


def dark_tissue_removed(times: int) -> float:
    """Share of the clean tissue of generator B's dark slides that is taken for ink."""
    lost = 0
    total = 0
    for seed in range(FIRST_SEED, FIRST_SEED + times):
        slide = held_out_slide(seed, size=(600, 450), mpp=PX_UM, stain="dark")
        lost += np.count_nonzero(find(slide.rgb) & slide.clean)
        total += np.count_nonzero(slide.clean)
    return round(lost / total, 4)


def without_ink(times: int) -> dict[str, float]:
    """CPU-seconds of the search on slides without ink, and the tissue that it takes for ink."""
    seconds = []
    lost = []
    for seed in range(FIRST_SEED, FIRST_SEED + times):
        slide = tuning_slide(seed, size=LARGE_PX, mpp=PX_UM, stain="he", artefacts=())
        started = time.process_time()
        ink = find(slide.rgb)
        seconds.append(time.process_time() - started)
        tissue = slide.masks["tissue"]
        lost.append(np.count_nonzero(ink & tissue) / np.count_nonzero(tissue))
    return {
        "cpu_s, median": round(float(np.median(seconds)), 2),
        "cpu_s, most": round(max(seconds), 2),
        "tissue lost, mean": round(float(np.mean(lost)), 4),
        "tissue lost, most": round(max(lost), 4),
    }


if __name__ == "__main__":
    main()
