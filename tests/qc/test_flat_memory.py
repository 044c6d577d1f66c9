"""Quality control of a large slide takes few bytes for each pixel of the work image."""

import math
from pathlib import Path

import pytest

from thinsection.testing import run_and_measure
from thinsection.testing.synthetic import write_he_slide

MPP = 2.0  # µm/px, so that a small file has a large work image; focus is not judged
WORK_MPP = 8.0


@pytest.mark.check
def test_memory_grows_by_at_most_26_bytes_for_each_pixel(tmp_path: Path) -> None:
    """It grew by 19.7 bytes on a machine, and by 36.5 with floats and labels.

    Both pictures are so large that their maps are kept compressed.
    """
    peaks = []
    pixels = []
    for name, size in (("small", (7000, 6000)), ("large", (11_000, 9000))):
        path = tmp_path / f"{name}.svs"
        write_he_slide(path, size, mpp=MPP)
        measured = run_and_measure(
            "benchmarks.bench_qc",
            "qc_once",
            slide_path=str(path),
            cache_dir=str(tmp_path / "cache"),
            preset="auto",
        )
        assert measured.result["pixels_to_use"] > 0
        peaks.append(measured.peak_bytes)
        pixels.append(math.prod(size) * (MPP / WORK_MPP) ** 2)
    growth = (peaks[1] - peaks[0]) / (pixels[1] - pixels[0])
    assert 0 < growth < 26
