"""How does a run scale? 1 against 2 processes on 8 slides, the executor's cost per slide, and a
simulation of up to 512 workers on 100,000 slides with the measured costs.

The two processes work on one output folder and share the slides through its locks alone. Each is
kept on one core: free to roam, a single process uses 1.4 cores here, decoding beside encoding.
"""

import heapq
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import harness

NUM_SLIDES = 8
SIZE, SMOKE_SIZE = (8000, 7000), (900, 700)
WORKERS = (1, 8, 64, 512)
SIMULATED_SLIDES = 100_000
SLIDES_PER_TASK = 16

_PROCESS = """
import os, sys, torch
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(sys.argv[4])]})
torch.set_num_threads(1)
from thinsection.run.process import SlideProcessor
from thinsection.run.models import load_models
from thinsection.slide.cohort import load_cohort
from thinsection.stages.config import RunConfig
from thinsection.stages.spec import stages_of
from thinsection.stages.spec import resolve
from pathlib import Path
slides, out, first = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
settings = {"decode_threads": 1, "precision": "fp32"}
spec = resolve(RunConfig(), settings)
models = load_models(spec.encoding)
entries = load_cohort([slides])
print("ready", flush=True); sys.stdin.readline()
stages = stages_of(spec, models)
processor = SlideProcessor(out=out, spec=spec, models=models, stages=stages)
processor.process(entries[first:] + entries[:first])
"""


_BARE = """
import os, sys, torch
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(sys.argv[2])]})
torch.set_num_threads(1)
from thinsection.stages.config import RunConfig
from thinsection.stages.spec import resolve
from thinsection.run.models import load_models
(encoder,) = load_models(resolve(RunConfig(), {"until": "embeddings"}).encoding).loaded_encoders
tiles = torch.randint(0, 256, (32, 256, 256, 3), dtype=torch.uint8)
encoder.encode(tiles)
print("ready", flush=True); sys.stdin.readline()
for _ in range(int(sys.argv[1])):
    encoder.encode(tiles)
"""


def wall_seconds(slides: Path, out: Path, processes: int) -> float:
    """Time of the work alone: every process is loaded and waits for the start."""
    firsts = [number * NUM_SLIDES // processes for number in range(processes)]
    return started_together(
        _PROCESS, [[str(slides), str(out), str(first)] for first in firsts]
    )


def bare_speedup(batches: int) -> float:
    """What two cores of this machine give two processes that only encode: no run can give more."""
    one = started_together(_BARE, [[str(batches)]])
    return 2 * one / started_together(_BARE, [[str(batches)], [str(batches)]])


def started_together(code: str, arguments: list[list[str]]) -> float:
    """Seconds from the start of processes, each on a core of its own, to the end of the last."""
    children = []
    for number, given in enumerate(arguments):
        command = [sys.executable, "-c", code, *given, str(number)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        children.append(subprocess.Popen(command, **pipes))  # type: ignore[call-overload]
    for child in children:
        child.stdout.readline()
    start = time.perf_counter()
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    if any(child.wait() for child in children):
        raise RuntimeError("a process failed")
    return time.perf_counter() - start


def executor_seconds_per_task(out: Path, num_tasks: int) -> float:
    """What a task costs beside its work: tasks that do nothing, through our executor on two
    workers, from the first report to the last."""
    from tests.support.faults import IdleTask

    from thinsection.jobs.execute import execute
    from thinsection.jobs.executor import ExecutorConfig
    from thinsection.slide.cohort import SlideEntry
    from thinsection.stages.config import RunConfig
    from thinsection.stages.spec import resolve

    config = RunConfig(
        executor=ExecutorConfig(executor="dask", workers=2, threads=1, chunk_slides=1)
    )
    spec = resolve(config, {"until": "embeddings"})
    out.mkdir()
    times: list[float] = []
    execute(
        [SlideEntry(slide_id=f"s{i}", slide_path="none") for i in range(num_tasks)],
        IdleTask(out=out, record=out / "record", spec=spec),
        spec.executor,
        folder=out,
        on_report=lambda report: times.append(time.perf_counter()),
    )
    return (times[-1] - times[0]) / (len(times) - 1)


def simulate(
    workers: int, *, slide_s: float, dispatch_s: float, start_s: float
) -> dict[str, float]:
    """A scheduler that hands out tasks one after the other, `dispatch_s` each, to idle workers."""
    tasks = -(-SIMULATED_SLIDES // SLIDES_PER_TASK)
    free = [start_s] * workers  # when each worker is idle next
    dispatcher = 0.0
    for _ in range(tasks):
        begin = max(heapq.heappop(free), dispatcher)
        dispatcher = begin + dispatch_s
        heapq.heappush(free, begin + dispatch_s + SLIDES_PER_TASK * slide_s)
    wall = max(free)
    ideal = SIMULATED_SLIDES * slide_s / workers
    return {
        "hours": wall / 3600,
        "speedup": SIMULATED_SLIDES * slide_s / wall,
        "of_ideal": ideal / wall,
    }


def main() -> None:
    """Measures, then simulates."""
    args = harness.arguments(__doc__ or "")
    from thinsection.testing.synthetic import write_he_slide

    with tempfile.TemporaryDirectory() as folder:
        slides = Path(folder) / "slides"
        slides.mkdir()
        for seed in range(NUM_SLIDES):
            size = SMOKE_SIZE if args.smoke else SIZE
            write_he_slide(slides / f"s{seed}.tiff", size, seed=seed)
        load = os.getloadavg()[0]
        one = wall_seconds(slides, Path(folder) / "one", 1)
        two = wall_seconds(slides, Path(folder) / "two", 2)
        bare = bare_speedup(2 if args.smoke else 15)
        dispatch = executor_seconds_per_task(
            Path(folder) / "idle", 20 if args.smoke else 300
        )
    slide_s = one / NUM_SLIDES
    costs: dict[str, Any] = {
        "slide_s": slide_s,
        "dispatch_s": dispatch,
        "start_s": 10.0,
    }
    results = {
        "one_process_s": one,
        "two_processes_s": two,
        "speedup": one / two,
        "speedup_of_two_bare_encoders": bare,
        "of_two_bare_encoders": one / two / bare,
        "load_before": load,
        "executor_s_per_slide_in_tasks_of_one": dispatch,
        "executor_s_per_slide_in_tasks_of_16": dispatch / SLIDES_PER_TASK,
        "simulated": {str(n): simulate(n, **costs) for n in WORKERS},
        # the scheduler hands out 1/dispatch tasks a second, a worker takes one per task's time
        "saturates_at_workers": SLIDES_PER_TASK * slide_s / dispatch,
    }
    harness.finish("bench_scaling", results, args)


if __name__ == "__main__":
    main()
