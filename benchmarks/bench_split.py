"""Would a run on several GPUs end sooner if several workers shared the tiles of one slide?

A simulation of the wall time with the chunks of `jobs/backend.py: weighted_chunks`. Slides have a
log-normal number of tiles, at most a glass full. Their files have as many bytes as tiles, times a
log-normal factor, because the driver orders slides by bytes and does not know the tiles. Three ways
are compared:

    in order       one slide at a time to the next free worker, in the order of the cohort
    largest first  the chunks of a run
    split          slides with more than a share of the tiles are cut into ranges of tiles before
                   the run starts, as if the tiles were known. Each range opens the slide again;
                   joining the ranges costs nothing. The best of several shares counts

A real run does not know the tiles, so it gains less than `split`. `lower_bound` is all work divided
by the workers: no way is faster.
"""

import heapq
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from benchmarks import harness
from thinsection.jobs.backend import weighted_chunks

WORKERS = 7
NUM_SLIDES = (8, 30, 100, 1000)
MEDIAN_TILES = 8000
MOST_TILES = 25 * 75 / 0.128**2  # tiles of 128 µm on a glass of 25 x 75 mm
# standard deviations of the log of tiles: resections of one kind; biopsies and resections
SPREADS = {"one kind": 0.7, "mixed": 1.1}
BYTES_SPREAD = 0.25
# largest range of a split: all tiles divided by the workers and by one of these
RANGES_PER_WORKER = (1, 2, 4)
TILES_PER_S = {
    "slow network, 100 tiles/s": 100.0,
    "fast network, 1,000 tiles/s": 1000.0,
}
START_S = 20.0  # a worker imports torch and loads the weights
OPEN_S = 2.0  # a slide is opened and its tissue found; a range reads the mask again
Floats = npt.NDArray[np.float64]


def main() -> None:
    """Measures each spread, number of slides and speed; writes the means over the draws."""
    args = harness.arguments(__doc__.splitlines()[0])
    draws = 5 if args.smoke else 300
    rows = [
        row(spread, num_slides, speed, draws)
        for spread in SPREADS
        for num_slides in NUM_SLIDES
        for speed in TILES_PER_S
    ]
    results = {
        "workers": WORKERS,
        "median_tiles": MEDIAN_TILES,
        "bytes_spread": BYTES_SPREAD,
        "draws": draws,
        "rows": rows,
    }
    harness.finish("bench_split", results, args)


def row(spread: str, num_slides: int, speed: str, draws: int) -> dict[str, object]:
    """Means over the draws for one cohort size: seconds, and what each way saves."""
    rng = np.random.default_rng(num_slides)
    seconds: dict[str, list[float]] = {}
    for _ in range(draws):
        drawn = MEDIAN_TILES * rng.lognormal(0.0, SPREADS[spread], num_slides)
        tiles = np.minimum(drawn, MOST_TILES)
        file_bytes = tiles * rng.lognormal(0.0, BYTES_SPREAD, num_slides)
        for way, value in wall_times(tiles, file_bytes, TILES_PER_S[speed]).items():
            seconds.setdefault(way, []).append(value)
    mean = {way: float(np.mean(values)) for way, values in seconds.items()}
    check(seconds)
    saved = [
        first - split
        for first, split in zip(seconds["largest first"], seconds["split"], strict=True)
    ]
    return {
        "spread": spread,
        "slides": num_slides,
        "speed": speed,
        "mean_s": {way: round(value, 1) for way, value in mean.items()},
        "largest_first_saves_percent": percent(mean["in order"], mean["largest first"]),
        "split_saves_percent": percent(mean["largest first"], mean["split"]),
        "split_saves_s": round(float(np.mean(saved)), 1),
        "split_saves_s_at_most": round(float(np.max(saved)), 1),
    }


def check(seconds: dict[str, list[float]]) -> None:
    """Raises AssertionError where a way is faster than all work on all workers."""
    for way, values in seconds.items():
        assert np.all(np.array(values) >= np.array(seconds["lower_bound"]) - 1e-6), way


def percent(before: float, after: float) -> float:
    """Share of the time before that is saved, in percent."""
    return round(100 * (before - after) / before, 1)


def wall_times(
    tiles: Floats, file_bytes: Floats, tiles_per_s: float
) -> dict[str, float]:
    """Seconds of each way for one cohort."""
    slide_s = tiles / tiles_per_s + OPEN_S
    indices = range(len(tiles))
    by_bytes = weighted_chunks(indices, file_bytes.tolist(), WORKERS)
    in_order = [[float(value)] for value in slide_s]
    first = [[float(slide_s[index]) for index in chunk] for chunk in by_bytes]
    first_s = makespan(first)
    split_s = [split_time(tiles, tiles_per_s, number) for number in RANGES_PER_WORKER]
    return {
        "in order": makespan(in_order),
        "largest first": first_s,
        "split": min(first_s, *split_s),
        "lower_bound": START_S + float(slide_s.sum()) / WORKERS,
    }


def split_time(tiles: Floats, tiles_per_s: float, ranges_per_worker: int) -> float:
    """Seconds of a run whose slides are cut into ranges."""
    parts = ranges(tiles, float(tiles.sum()) / (WORKERS * ranges_per_worker))
    part_s = [part / tiles_per_s + OPEN_S for part in parts]
    by_tiles = weighted_chunks(range(len(parts)), parts, WORKERS)
    return makespan([[part_s[index] for index in chunk] for chunk in by_tiles])


def ranges(tiles: Floats, share: float) -> list[float]:
    """Tiles of each range; a slide with at most a share of the tiles is one range."""
    parts: list[float] = []
    for value in tiles.tolist():
        number = math.ceil(value / share)
        parts += [value / number] * number
    return parts


def makespan(chunks: Sequence[Sequence[float]]) -> float:
    """Seconds until the last worker ends, if each free worker takes the next chunk."""
    free_at = [START_S] * WORKERS
    heapq.heapify(free_at)
    for chunk in chunks:
        heapq.heappush(free_at, heapq.heappop(free_at) + sum(chunk))
    return max(free_at)


if __name__ == "__main__":
    main()
