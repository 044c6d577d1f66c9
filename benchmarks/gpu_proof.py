"""Does every GPU path agree with the CPU, and how fast is it? `make gpu-proof`, under 8 minutes.

`python -m benchmarks.gpu_proof [--smoke] [--out FILE] [--only STEP,STEP]`: checks first, then
rates; JSON after each step, a table at the end. `--only` takes steps anew, such as those for which
no time was left, and keeps the others of the JSON.

The steps share one process while all goes well. One that fails or takes too long ends that process,
as a broken CUDA context answers nothing more, and a new one goes on with the next step. `--smoke`
goes through all of them on the CPU with tiny sizes.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import harness

NAME = "benchmarks.gpu_proof"
# seconds of all steps, and of one, which is ended when it takes longer
LIMITS_S = (460.0, 150)
# the same for --smoke: a shared machine may be slow, and its figures say nothing
SMOKE_LIMITS_S = (3600.0, 1200)
Step = Callable[[str, bool], dict[str, Any]]


def steps() -> dict[str, Step]:
    """By name, in order: what is cheap and decides whether the rest means anything comes first."""
    from benchmarks import gpu_checks, gpu_fp8, gpu_rates

    return {**gpu_checks.STEPS, **gpu_fp8.CHECKS, **gpu_rates.STEPS}


def main(known: Callable[[], dict[str, Step]] = steps, module: str = NAME) -> None:
    """The driver; with --steps one of its processes, which run `module`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--smoke", action="store_true", help="on the CPU, tiny sizes, for CI"
    )
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    parser.add_argument("--only", default="", help="names of steps, with commas")
    parser.add_argument("--steps", default="", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps:
        work(known(), args.steps.split(","), args.out, args.until, smoke=args.smoke)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = (
            args.out
            or (Path(folder) if args.smoke else harness.RESULTS) / "gpu_proof.json"
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        # compiled networks of one step are those of the next, and of no other run
        os.environ["XDG_CACHE_HOME"] = folder
        chosen = [name for name in args.only.split(",") if name]
        unknown = set(chosen) - set(known())
        if unknown:
            sys.exit(f"--only must name steps, got {', '.join(sorted(unknown))}")
        earlier = json.loads(out.read_text())["results"] if chosen else {}
        document = drive(
            chosen or list(known()), out, module, smoke=args.smoke, earlier=earlier
        )
    print(table(document))
    failed = [name for name, row in document["results"].items() if "error" in row]
    if failed:
        sys.exit(f"steps failed: {', '.join(failed)}")


def drive(
    left: list[str], out: Path, module: str, *, smoke: bool, earlier: dict[str, Any]
) -> dict[str, Any]:
    """Runs steps in as few processes as they let live; what the JSON then says.

    Rows of `earlier` stay where they are not taken anew.
    """
    total_s, step_s = SMOKE_LIMITS_S if smoke else LIMITS_S
    until = time.time() + total_s
    document: dict[str, Any] = {
        "benchmark": "gpu_proof",
        "smoke": smoke,
        **harness.environment(),
    }
    kept = {name: row for name, row in earlier.items() if name not in left}
    document |= {"device": "", "results": kept}
    write(out, document)
    while left:
        options = ["--steps", ",".join(left), "--out", str(out), "--until", str(until)]
        command = [sys.executable, "-m", module, *options]
        child = subprocess.run(
            [*command, *["--smoke"] * smoke],
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        document = json.loads(out.read_text())
        done = document["results"]
        if (
            child.returncode and left[0] not in done
        ):  # it died before it could say anything
            done[left[0]] = {"error": f"no process: {child.stderr[-1000:]}"}
        for name in left:
            if done.get(name) == {"running": True}:
                code = child.returncode
                why = (
                    f"longer than {step_s} s"
                    if code == -signal.SIGALRM
                    else f"exit code {code}"
                )
                done[name] = {"error": f"{why}: {child.stderr[-1000:]}"}
        write(out, document)
        left = [name for name in left if name not in done]
    return document


def work(
    known: dict[str, Step], names: list[str], out: Path, until: float, *, smoke: bool
) -> None:
    """One process: the steps up to the first that fails."""
    device = device_of(smoke=smoke)
    _, step_s = SMOKE_LIMITS_S if smoke else LIMITS_S
    document = json.loads(out.read_text())
    document["device"] = described(device)
    for name in names:
        left = int(until - time.time())
        if left < 1:
            document["results"][name] = {"left_out": "no time was left"}
            write(out, document)
            continue
        document["results"][name] = {"running": True}
        write(out, document)
        signal.alarm(min(step_s, left))  # without a handler it ends the process
        start = time.perf_counter()
        try:
            row = known[name](device, smoke)
        except BaseException:
            row = {"error": traceback.format_exc()[-2000:]}
            raise
        finally:
            signal.alarm(0)
            document["results"][name] = {
                **row,
                "step_s": round(time.perf_counter() - start, 2),
            }
            write(out, document)
        print(f"{name}: {json.dumps(row)}", flush=True)


def device_of(*, smoke: bool) -> str:
    """The CPU for --smoke, else the card, which must be there."""
    import torch

    if smoke:
        torch.set_num_threads(1)
        return "cpu"
    if not torch.cuda.is_available():
        sys.exit(
            "gpu_proof needs a CUDA device; --smoke goes through its steps on the CPU"
        )
    return "cuda"


def described(device: str) -> str:
    """Its name, memory and compute capability."""
    if device == "cpu":
        return "cpu"
    import torch

    card = torch.cuda.get_device_properties(0)
    return f"{card.name}, {card.total_memory >> 30} GiB, sm_{card.major}{card.minor}"


def write(out: Path, document: dict[str, Any]) -> None:
    """Replaces the JSON at once: who reads it sees all steps that ended."""
    part = out.with_suffix(".part")
    part.write_text(json.dumps(document, indent=2) + "\n")
    part.replace(out)


def table(document: dict[str, Any]) -> str:
    """Markdown: a row for each step."""
    rows = [f"| {document['device']} | |", "|---|---|"]
    for name, row in document["results"].items():
        found = {k: v for k, v in row.items() if k != "step_s"}
        if "error" in found:
            found = {"failed": found["error"].strip().splitlines()[-1]}
        text = ", ".join(f"{k} {_short(v)}" for k, v in found.items())
        rows.append(f"| {name} | {text} |")
    return "\n".join(rows)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{k} {_short(v)}" for k, v in value.items()) + ")"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
