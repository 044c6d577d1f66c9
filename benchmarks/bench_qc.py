"""What does the default QC preset cost: CPU-seconds and memory, with levels and without?

Against OpenSlide's thumbnail of the same file, which decodes a whole level; and 8 slides through
2 workers against 1. Masks are compared before anything is timed. HistoQC's `blurry` takes all
tissue of the generated slide, so that nothing is left to measure: the preset is timed without it
as well.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tests.support.pixel_examples import pen_examples

from benchmarks.harness import arguments, finish
from thinsection.qc import Pipeline, load_pipeline, prepare_models, run_qc
from thinsection.qc.checks.by_example import ExampleCheck
from thinsection.slide import open_slide
from thinsection.testing import run_and_measure

FULL, SMOKE = (20_000, 16_000), (3_000, 2_400)
TIMES = 3


def qc_once(
    slide_path: str, cache_dir: str, preset: str, without: str = ""
) -> dict[str, Any]:
    """Runs a preset on one slide, without one kind of check; models are in the cache."""
    pipeline = load_pipeline(preset)
    checks = tuple(check for check in pipeline.checks if check.kind != without)
    with open_slide(slide_path) as slide:
        result = run_qc(
            slide, replace(pipeline, checks=checks), cache_dir=Path(cache_dir)
        )
    seconds = {name: round(value, 4) for name, value in result.seconds.items()}
    return {"pixels_to_use": result.scores["pixels_to_use"], "seconds": seconds}


def whole_level(slide_path: str, max_edge: int) -> list[int]:
    """OpenSlide's own thumbnail: the level is decoded whole."""
    import openslide

    with openslide.OpenSlide(slide_path) as slide:
        return list(slide.get_thumbnail((max_edge, max_edge)).size)


def train_once(cache_dir: str) -> None:
    """Trains a forest on 160,000 px of 16 pictures, which are made before."""
    folder = Path(cache_dir) / "examples"
    pictures = [str(path) for path in sorted(folder.glob("rgb*.png"))]
    masks = [str(path) for path in sorted(folder.glob("mask*.png"))]
    own = ExampleCheck(
        example_images=tuple(pictures),
        example_masks=tuple(masks),
        samples_per_example=10_000,
    )
    prepare_models(Pipeline(name="own", checks=(own,)), cache_dir=Path(cache_dir))


def write_examples(folder: Path) -> None:
    """Generated examples of pen."""
    folder.mkdir(parents=True)
    for n, (rgb, mask) in enumerate(pen_examples(0)):
        Image.fromarray(rgb).save(folder / f"rgb{n:02d}.png")
        Image.fromarray(mask).save(folder / f"mask{n:02d}.png")


def load_batch(**_: Any) -> Any:
    """What `thinsection qc` has imported before it starts."""
    from thinsection.run import qc_run

    return qc_run


def batch(qc_run: Any, *, folder: str, workers: int, num_slides: int) -> int:
    """QC of one slide under several names."""
    from thinsection.jobs.executor import ExecutorConfig

    root = Path(folder)
    slides = root / "slides"
    slides.mkdir(exist_ok=True)
    for n in range(num_slides):
        if not (slides / f"s{n}.svs").exists():
            (slides / f"s{n}.svs").hardlink_to(root / "slide.svs")
    executor = ExecutorConfig(workers=0 if workers == 1 else workers)
    with tempfile.TemporaryDirectory(dir=root) as out:
        config = qc_run.QcRunConfig(executor=executor)
        summary = qc_run.check_slides([slides], out=Path(out), config=config)
    return sum(result.status == "done" for result in summary.results)


def main() -> None:
    """Measures at 20,000 x 16,000 px; `--smoke` at 3,000 x 2,400."""
    args = arguments(__doc__ or "")
    size = SMOKE if args.smoke else FULL
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        cache = str(root / "cache")
        write_examples(Path(cache) / "examples")
        training = measured("train_once", times=1, cache_dir=cache)
        results: dict[str, Any] = {"size": size, "training": training}
        results["0.5 um/px"] = one_resolution(root, cache, size, smoke=args.smoke)
        num_slides, times = (2, 1) if args.smoke else (8, 5)
        results["workers"] = compare_workers(root, num_slides=num_slides, times=times)
    finish("bench_qc", results, args)


def one_resolution(
    root: Path, cache: str, size: tuple[int, int], *, smoke: bool, mpp: float = 0.5
) -> dict[str, Any]:
    """Default preset with levels and without, and OpenSlide's thumbnail without.

    At 0.5 µm/px the work images have four times the px that they have at 0.25.
    """
    from thinsection.run.cost import QcSize
    from thinsection.testing.synthetic import write_he_slide

    with_levels, flat = root / "slide.svs", root / "flat.svs"
    write_he_slide(with_levels, size, mpp=mpp)
    write_he_slide(flat, size, mpp=mpp, downsamples=(1,))
    check_readers_agree(with_levels, Path(cache))
    times = 1 if smoke else TIMES
    edge = round(
        max(size) * mpp / 4.0
    )  # 2.5x, the larger of the preset's two work images
    most = QcSize(num_px_l0=size[0] * size[1], slide_mpp=mpp, maps=True)
    return {
        "bounds that Slurm jobs ask for": {
            "peak_mb": round(most.peak_bytes / 1e6),
            "cpu_seconds": most.most_s,
        },
        "default, levels": measured(
            "qc_once",
            times=times,
            slide_path=str(with_levels),
            cache_dir=cache,
            preset="histoqc-default",
        ),
        "default without blurry, levels": measured(
            "qc_once",
            times=times,
            slide_path=str(with_levels),
            cache_dir=cache,
            preset="histoqc-default",
            without="blurry",
        ),
        "default, level 0 only": measured(
            "qc_once",
            times=times,
            slide_path=str(flat),
            cache_dir=cache,
            preset="histoqc-default",
        ),
        "auto, levels": measured(
            "qc_once",
            times=times,
            slide_path=str(with_levels),
            cache_dir=cache,
            preset="auto",
        ),
        "openslide thumbnail, level 0 only": measured(
            "whole_level", times=1, slide_path=str(flat), max_edge=edge
        ),
    }


def check_readers_agree(path: Path, cache: Path) -> None:
    """The fast reader gives the mask that OpenSlide's px give."""
    default = load_pipeline("histoqc-default")
    mapping = Pipeline(name="check", checks=default.checks[2:8])
    masks = []
    for reader in ("auto", "openslide"):
        with open_slide(path, reader=reader) as slide:
            masks.append(run_qc(slide, mapping, cache_dir=cache).mask_use)
    union = int((masks[0] | masks[1]).sum())
    iou = int((masks[0] & masks[1]).sum()) / max(union, 1)
    if union == 0 or iou < 0.995:
        raise AssertionError(
            f"IoU of masks by two readers must be >= .995, got {iou} of {union}"
        )


def compare_workers(root: Path, *, num_slides: int, times: int) -> dict[str, Any]:
    """Wall-clock time of one process against two workers, their start included, in turns.

    Each in a fresh process; other jobs on the machine lower the ratio.
    """
    wall: dict[int, list[float]] = {1: [], 2: []}
    for workers in (1, 2) * times:
        kwargs = {"folder": str(root), "num_slides": num_slides}
        run = run_and_measure(
            "benchmarks.bench_qc",
            "batch",
            setup="load_batch",
            workers=workers,
            **kwargs,
        )
        wall[workers].append(run.seconds)
        if run.result != num_slides:
            raise AssertionError(f"slides done must be {num_slides}, got {run.result}")
    ratios = [one / two for one, two in zip(wall[1], wall[2], strict=True)]
    return {
        "num_slides": num_slides,
        "times": times,
        "wall_s": {
            workers: round(float(np.median(s)), 3) for workers, s in wall.items()
        },
        "ratio": round(float(np.median(ratios)), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def measured(function: str, *, times: int, **kwargs: Any) -> dict[str, Any]:
    """Median CPU-seconds and highest peak of fresh processes, and the last one's result."""
    runs = [
        run_and_measure("benchmarks.bench_qc", function, **kwargs) for _ in range(times)
    ]
    cpu = [run.cpu_seconds for run in runs]
    return {
        "cpu_seconds": round(float(np.median(cpu)), 3),
        "cpu_seconds_range": [round(min(cpu), 3), round(max(cpu), 3)],
        "wall_seconds": round(float(np.median([run.seconds for run in runs])), 3),
        "peak_mb": round(max(run.peak_bytes for run in runs) / 1e6),
        "beyond_imports_mb": round(max(run.growth_bytes for run in runs) / 1e6),
        "times": times,
        "result": runs[-1].result,
    }


if __name__ == "__main__":
    main()
