"""What a batch job of a run asks for: what the plan predicts, where no flag says it."""

import math
from collections.abc import Sequence
from pathlib import Path

from thinsection.errors import BudgetError, CohortError, ConfigError, ThinsectionError
from thinsection.files.sources import is_url
from thinsection.jobs.request import (
    DEFAULT,
    LEAST_TIME_S,
    MEMORY_MARGIN,
    TIME_MARGIN,
    JobRequest,
    Numbers,
    all_given,
    job_request,
    with_margins,
)
from thinsection.planning.cost import SlideSize
from thinsection.planning.plan import (
    ENCODING_STAGES,
    Planner,
    planned_gpu,
    planner,
    slide_sizes,
)
from thinsection.qc import Pipeline
from thinsection.qc.work_image import scale_of
from thinsection.slide import open_slide
from thinsection.slide.cohort import SlideEntry
from thinsection.slide.geometry import mean_mpp
from thinsection.stages.config import RunConfig
from thinsection.types import MIB
from thinsection.units import format_bytes

MAX_OPENED = 64  # headers that a submission opens at most: seconds, not minutes
_MIN_GPU_CPUS, _MAX_GPU_CPUS = 2, 16
# quality control: process, which may have to train pixel models, + work images and what a check
# holds beside them, by the px of the slide at 4 µm/px (finer where the pipeline's image is); bounds
# that were fitted to benchmarks/bench_qc.py, which compares
COARSEST_MPP = 4.0
TRAINING_S = 15.0  # of a process that does not see the cache of pixel models
_PROCESS_BYTES, _BYTES_PER_PX = 384 * MIB, 25
_START_S, _S_PER_PX, _S_PER_L0_PX = 1.0, 3e-7, 1 / 60e6


def run_request(
    chunks: Sequence[Sequence[SlideEntry]], config: RunConfig, *, stage: str = "aggregate"
) -> JobRequest:
    """What each job of a run over one of these chunks should ask for.

    All get the same, so it is planned for the hungriest imaginable: as many slides as the largest
    chunk has, as if they were the largest of up to `MAX_OPENED` whose headers and thumbnails are
    opened, evenly over the cohort by file size. A flag always wins; where all are given nothing is
    opened. Without a prediction the defaults are taken and `warning` says why.

    Raises:
        ConfigError: unknown GPU or setting.
        BudgetError: `--memory` does not hold the stream's least.
    """
    wanted = stage in ENCODING_STAGES and planned_gpu(config) is not None
    numbers: Numbers = {"gpus": (1 if wanted else 0, "the settings name one")}
    warning = ""
    if not all_given(config.executor):
        try:
            numbers |= _predicted(chunks, config, stage)
        except (ConfigError, BudgetError):
            raise
        except ThinsectionError as error:
            warning = f"no prediction, so defaults are asked for: {error}"
    return job_request(config.executor, numbers, warning=warning)


def _predicted(chunks: Sequence[Sequence[SlideEntry]], config: RunConfig, stage: str) -> Numbers:
    opened = sample_entries([entry for chunk in chunks for entry in chunk])
    if not opened:
        raise CohortError(
            "no slide is a local file; those by URL are not opened before the job runs"
        )
    sizes, unreadable = slide_sizes(opened, config)
    if not sizes:
        raise CohortError(f"no slide opens, got {next(iter(unreadable.values()))}")
    by = planner(config, stage=stage)
    count = max(len(chunk) for chunk in chunks)
    ranked = sorted(sizes, key=lambda size: size.num_tiles, reverse=True)
    largest = (ranked * math.ceil(count / len(ranked)))[:count]
    cpus, why = config.executor.job_cpus, ""
    if not cpus:
        cpus, why = _cpus(by, largest)
    memory = by.memory(largest, cpus=cpus).host_bytes
    seconds = by.time(largest, cpus=cpus).wall_s
    asked, wall = with_margins(memory, seconds)
    on = f"on the {by.gpu.name}" if by.gpu else "at this machine's rates"
    slides = f"{count} slides" if count > 1 else "1 slide"
    return {
        "cpus": (cpus, why),
        "memory_bytes": (
            asked,
            f"predicted peak {format_bytes(memory)}, +{MEMORY_MARGIN - 1:.0%}",
        ),
        "walltime_s": (
            wall,
            f"predicted {seconds:.0f} s {on} for {slides} as large as the largest of "
            f"{len(sizes)} opened, +{TIME_MARGIN - 1:.0%}, at least {LEAST_TIME_S} s",
        ),
    }


def sample_entries(entries: Sequence[SlideEntry]) -> list[SlideEntry]:
    """At most `MAX_OPENED` local slides, evenly over their file sizes, the largest among them."""
    local = [e for e in entries if not is_url(e.slide_path) and Path(e.slide_path).is_file()]
    if len(local) <= MAX_OPENED:
        return local
    ranked = sorted(local, key=lambda e: Path(e.slide_path).stat().st_size, reverse=True)
    return [ranked[i * (len(ranked) - 1) // (MAX_OPENED - 1)] for i in range(MAX_OPENED)]


def _cpus(by: Planner, slides: Sequence[SlideSize]) -> tuple[int, str]:
    """As many as keep a GPU fed; on a CPU any number will do, so the default."""
    time = by.time(slides, cpus=1)
    if by.gpu is None or not time.encode_s:
        return DEFAULT.cpus, "default"
    host_s = time.prepare_s + time.decode_s
    cpus = min(max(_MIN_GPU_CPUS, math.ceil(host_s / time.encode_s) + 1), _MAX_GPU_CPUS)
    return cpus, (
        f"decoding takes {host_s:.0f} CPU-s, the {by.gpu.name} encodes in {time.encode_s:.0f} s; "
        f"one more, {_MIN_GPU_CPUS} to {_MAX_GPU_CPUS}"
    )


def qc_request(
    chunks: Sequence[Sequence[SlideEntry]], config: RunConfig, pipeline: Pipeline
) -> JobRequest:
    """One CPU, and memory and time for as many slides as the largest chunk has.

    All as if they were the largest of up to 64 whose headers are opened, evenly over the cohort by
    file size. A flag always wins; where all are given, or nothing opens, no bound is taken.

    Args:
        chunks: the slides of each job.
        config: of the run.
        pipeline: its checks.
    """
    if all_given(config.executor):
        return job_request(config.executor)
    sizes, error = [], "no slide is a local file"
    for entry in sample_entries([entry for chunk in chunks for entry in chunk]):
        try:
            sizes.append(_qc_bounds(entry, config.slides.reader, pipeline))
        except (ThinsectionError, OSError) as problem:
            error = str(problem)
    if not sizes:
        return job_request(config.executor, warning=f"defaults are asked for: {error}")
    memory = max(size[0] for size in sizes)
    count = max(len(chunk) for chunk in chunks)
    seconds = TRAINING_S + count * max(size[1] for size in sizes)
    asked, wall = with_margins(memory, seconds)
    largest = f"the largest of {len(sizes)} opened"
    return job_request(
        config.executor,
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


def _qc_bounds(entry: SlideEntry, reader: str, pipeline: Pipeline) -> tuple[int, float]:
    """Bytes and seconds of one slide, from its header."""
    with open_slide(entry.slide_path, reader=reader, slide_mpp=entry.slide_mpp) as slide:
        mpp = scale_of(slide, pipeline, mean_mpp(entry.slide_mpp)).slide_mpp
        num_px = math.prod(slide.size)
    work_mpp = min(COARSEST_MPP, *pipeline.image_mpps)
    sizes = {"slide_mpp": mpp, "work_mpp": work_mpp}
    return qc_peak_bytes(num_px, **sizes), qc_seconds(num_px, **sizes)


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
