"""Quality control of a large slide takes few bytes for each pixel of the work image."""

import math
from pathlib import Path

import pytest

from thinsection.testing import run_and_measure
from thinsection.testing.synthetic import write_he_slide

MPP = 2.0  # µm/px, so that a small file has a large work image; focus is not judged
WORK_MPP = 8.0


def _peak_and_pixels(folder: Path, size: tuple[int, int]) -> tuple[int, float]:
    """Peak memory of quality control in bytes, and pixels of the work image."""
    path = folder / f"{size[0]}.svs"
    write_he_slide(path, size, mpp=MPP)
    measured = run_and_measure(
        "benchmarks.bench_qc",
        "qc_once",
        slide_path=str(path),
        cache_dir=str(folder / "cache"),
        preset="auto",
    )
    assert measured.result["pixels_to_use"] > 0
    return measured.peak_bytes, math.prod(size) * (MPP / WORK_MPP) ** 2


@pytest.mark.check
@pytest.mark.parametrize(
    ("sizes", "most_bytes"),
    [
        # so large that their maps are kept compressed: 19.7 on a machine, and 36.5 with floats and
        # labels
        (((7000, 6000), (11_000, 9000)), 26),
        # up to 2 million pixels maps are not compressed: 35.7 on a busy machine
        (((2800, 2800), (5600, 5600)), 44),
    ],
)
def test_memory_grows_by_few_bytes_for_each_pixel(
    sizes: tuple[tuple[int, int], tuple[int, int]], most_bytes: float, tmp_path: Path
) -> None:
    (small, few), (large, many) = (_peak_and_pixels(tmp_path, size) for size in sizes)
    assert 0 < (large - small) / (many - few) < most_bytes
