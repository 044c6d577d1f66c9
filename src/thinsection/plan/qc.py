"""What quality control takes of a process: bounds by the size of the slide.

Peak = process, which may have to train the pixel models, + work images and what a check holds
beside them, by the px of the slide at 4 µm/px (finer where the pipeline's work image is).
Time = start + work images + decoding, as if only level 0 were there.
Fitted to benchmarks/bench_qc.py, which compares; bounds, not predictions.
"""

from thinsection.types import MIB

COARSEST_MPP = 4.0
TRAINING_S = 15.0  # of a process that does not see the cache of pixel models
_PROCESS_BYTES, _BYTES_PER_PX = 384 * MIB, 25
_START_S, _S_PER_PX, _S_PER_L0_PX = 1.0, 3e-7, 1 / 60e6


def qc_peak_bytes(num_px_l0: int, *, slide_mpp: float, work_mpp: float = COARSEST_MPP) -> int:
    """Highest peak of a process, in bytes.

    Args:
        num_px_l0: px of level 0.
        slide_mpp: µm per level-0 px.
        work_mpp: of the finest image that checks look at as a whole.
    """
    return _PROCESS_BYTES + int(_BYTES_PER_PX * _work_px(num_px_l0, slide_mpp, work_mpp))


def qc_seconds(num_px_l0: int, *, slide_mpp: float, work_mpp: float = COARSEST_MPP) -> float:
    """Most CPU-seconds of a slide; arguments as above."""
    work_px = _work_px(num_px_l0, slide_mpp, work_mpp)
    return _START_S + _S_PER_PX * work_px + _S_PER_L0_PX * num_px_l0


def _work_px(num_px_l0: int, slide_mpp: float, work_mpp: float) -> float:
    return num_px_l0 * (slide_mpp / min(work_mpp, COARSEST_MPP)) ** 2
