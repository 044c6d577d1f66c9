"""Do the peers' own commands give the same inside `thinsection rescue`, and in how much memory?

Each command runs twice on the same seeded weights and the same file of tile embeddings: as it is,
and in the rescue. Peak memory and CPU time are those of the whole process. The weights of TITAN are
gated, so the hub's cache holds a stand-in with its published interface and sizes of a layer.

THINSECTION_TEST_PEER_ENVIRONMENTS names a folder with one environment for each tool (slide2vec,
mussel, trident, lazyslide, stamp), made as its users do: the tool with its own requirements, then
thinsection without an extra. THINSECTION_TEST_TRIDENT and THINSECTION_TEST_GIGAPATH name checkouts
of mahmoodlab/TRIDENT and prov-gigapath/prov-gigapath. Commands with GigaPath run only if `--only`
names them: its authors' code evaluates the text of numbers, which NumPy 2 writes otherwise, so they
need NumPy 1. With `--only`, rows of other commands with as many tiles stay in the file. The smoke
size runs a program with transformers in this environment.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import RESULTS, arguments, finish
from benchmarks.peer_commands import COMMANDS, ROOT, PeerCommand, write_inputs
from thinsection.types import GIB

NUM_TILES = 8_000
SMOKE_TILES = 200
ERROR_GROWTH = 1.5
_VERSIONS = """
import importlib.metadata, json, platform
names = ("numpy", "torch", "transformers", "typer")
found = {name: importlib.metadata.version(name) for name in names}
print(json.dumps({"python": platform.python_version(), **found}))
"""


def main() -> None:
    """Runs the commands one after another."""
    args = arguments(
        __doc__ or "", only="comma-separated names", tiles="number of tiles"
    )
    names = [name for name, peer in COMMANDS.items() if peer.rescue != "gigapath"]
    if args.smoke:
        names = ["transformers titan"]
    if args.only:
        names = args.only.split(",")
    num_tiles = SMOKE_TILES if args.smoke else int(args.tiles or NUM_TILES)
    results: dict[str, Any] = {"num_tiles": num_tiles, "commands": {}}
    if args.only and not args.smoke:
        results["commands"] = earlier_rows(num_tiles)
    embeddings: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_inputs(folder, num_tiles, {COMMANDS[name].rescue for name in names})
        for name in names:
            row, embeddings[name], rescued = compared(name, folder)
            reference = embeddings.get(COMMANDS[name].reference)
            if reference is not None:
                # what the peer's own precision changes, without and with the rescue
                row["own_error"] = largest_difference(embeddings[name], reference)
                row["rescued_error"] = largest_difference(rescued, reference)
            check(name, row)
            print(name, row, flush=True)
            results["commands"][name] = row
    finish("bench_rescue_commands", results, args)


def earlier_rows(num_tiles: int) -> dict[str, Any]:
    """Rows of the last run, if it had as many tiles; each has the versions that it ran with."""
    path = RESULTS / "bench_rescue_commands.json"
    last: dict[str, Any] = json.loads(path.read_text())["results"]
    rows: dict[str, Any] = last["commands"] if last["num_tiles"] == num_tiles else {}
    return rows


def compared(name: str, folder: Path) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """Figures of both ways, and the embeddings of the command as it is and in the rescue."""
    peer = COMMANDS[name]
    place = folder / name.replace(" ", "_")
    place.mkdir()
    words = peer.prepare(folder, place)
    line = " ".join(words).replace(str(folder), "FOLDER").replace(f"{ROOT}/", "")
    row: dict[str, Any] = {"command": line}
    if peer.stops_with:
        stopped = run(peer, [*peer.start(words), *words[1:]], place, folder)
        assert peer.stops_with in stopped["output"], stopped["output"]
        row["as_it_is"] = f"stops: {peer.stops_with}"
        # with a plain softmax in the place of FlashAttention
        ends = run(peer, reference_words(peer, words), place, folder)
    else:
        ends = run(peer, [*peer.start(words), *words[1:]], place, folder)
    row["before"] = figures(ends)
    row["versions"] = versions(peer)
    theirs = peer.read(place)
    ends = run(peer, rescue_words(peer, words), place, folder)
    row["rescued"] = figures(ends)
    ours = peer.read(place)
    row["largest_difference"] = largest_difference(ours, theirs)
    row["largest_value"] = float(np.abs(theirs).max())
    return row, theirs, ours


def largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference of two embeddings."""
    return float(np.abs(a.astype(np.float64) - b).max())


def check(name: str, row: dict[str, Any]) -> None:
    """Raises AssertionError where the rescue costs more than the peer's own precision does.

    Two roundings of one value differ by up to the sum of their errors. So a peer in bfloat16 or
    float16 is compared by its error against the same model in float32, which may grow by a half.
    """
    if "own_error" in row:
        assert row["rescued_error"] <= ERROR_GROWTH * row["own_error"], (name, row)
        return
    bound = COMMANDS[name].tolerance * max(1.0, row["largest_value"])
    assert row["largest_difference"] <= bound, (name, row)


def rescue_words(peer: PeerCommand, words: list[str]) -> list[str]:
    """Command line of the rescue."""
    start = [peer.python, "-m", "thinsection", "rescue", peer.rescue, "--"]
    return [*start, *words]


def reference_words(peer: PeerCommand, words: list[str]) -> list[str]:
    """Command line with a plain softmax in the place of FlashAttention."""
    return [peer.python, "-m", "benchmarks.plain_flash", *words]


def run(
    peer: PeerCommand, line: list[str], place: Path, folder: Path
) -> dict[str, Any]:
    """Output, exit code, peak memory and CPU time of a command, whose last output is removed."""
    peer.output(place).unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, peer.search)),
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    child = subprocess.Popen(
        line,
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert child.stdout is not None
    output = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return {
        "output": output,
        "exit_code": child.returncode,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_gib": usage.ru_maxrss * 1024 / GIB,
        "command": " ".join(line),
    }


def versions(peer: PeerCommand) -> dict[str, str]:
    """Versions of Python and of the packages that a rescue shares with a tool."""
    answer = subprocess.run(
        [peer.python, "-c", _VERSIONS], capture_output=True, text=True, check=True
    )
    found: dict[str, str] = json.loads(answer.stdout)
    return found


def figures(ends: dict[str, Any]) -> dict[str, float]:
    """Peak and CPU time; exits where the command has failed."""
    if ends["exit_code"] != 0:
        sys.exit(f"{ends['command']} failed:\n{ends['output'][-4000:]}")
    return {"peak_gib": ends["peak_gib"], "cpu_s": ends["cpu_s"]}


if __name__ == "__main__":
    main()
