"""What an array task of quality control asks Slurm for: bounds by the largest slide, or flags."""

import math
from collections.abc import Sequence

from thinsection.errors import ThinsectionError
from thinsection.jobs.executor import ExecutorConfig
from thinsection.jobs.request import (
    LEAST_TIME_S,
    MEMORY_MARGIN,
    TIME_MARGIN,
    JobRequest,
    all_given,
    job_request,
    with_margins,
)
from thinsection.pipeline.qc_batch import QcSettings
from thinsection.plan.qc import COARSEST_MPP, TRAINING_S, qc_peak_bytes, qc_seconds
from thinsection.plan.request import sample_entries
from thinsection.qc.engine import image_mpps
from thinsection.qc.scale import scale_of
from thinsection.slide import open_slide
from thinsection.slide.cohort import SlideEntry
from thinsection.slide.geometry import mean_mpp
from thinsection.units import format_bytes


def qc_request(
    chunks: Sequence[Sequence[SlideEntry]], settings: QcSettings, config: ExecutorConfig
) -> JobRequest:
    """One CPU, and memory and time for as many slides as the largest chunk has.

    All as if they were the largest of up to 64 whose headers are opened, evenly over the cohort by
    file size. A flag always wins; where all are given, or nothing opens, no bound is taken.

    Args:
        chunks: the slides of each job.
        settings: of the checks.
        config: of the executor.
    """
    if all_given(config):
        return job_request(config)
    sizes, error = [], "no slide is a local file"
    for entry in sample_entries([entry for chunk in chunks for entry in chunk]):
        try:
            sizes.append(_bounds(entry, settings))
        except (ThinsectionError, OSError) as problem:
            error = str(problem)
    if not sizes:
        return job_request(config, warning=f"defaults are asked for: {error}")
    memory = max(size[0] for size in sizes)
    count = max(len(chunk) for chunk in chunks)
    seconds = TRAINING_S + count * max(size[1] for size in sizes)
    asked, wall = with_margins(memory, seconds)
    largest = f"the largest of {len(sizes)} opened"
    return job_request(
        config,
        {
            "cpus": (1, "the checks use one"),
            "memory_bytes": (
                asked,
                f"at most {format_bytes(memory)} for {largest}, +{MEMORY_MARGIN - 1:.0%}",
            ),
            "walltime_s": (
                wall,
                f"at most {math.ceil(seconds)} s for {count} slides as large as {largest}, "
                f"+{TIME_MARGIN - 1:.0%}, at least {LEAST_TIME_S} s",
            ),
        },
    )


def _bounds(entry: SlideEntry, settings: QcSettings) -> tuple[int, float]:
    """Bytes and seconds of one slide, from its header."""
    with open_slide(entry.slide_path, reader=settings.reader, slide_mpp=entry.slide_mpp) as slide:
        mpp = scale_of(slide, settings.pipeline, mean_mpp(entry.slide_mpp)).slide_mpp
        num_px = math.prod(slide.size)
    work_mpp = min(COARSEST_MPP, *image_mpps(settings.pipeline))
    sizes = {"slide_mpp": mpp, "work_mpp": work_mpp}
    return qc_peak_bytes(num_px, **sizes), qc_seconds(num_px, **sizes)
