"""Scripts in a process of their own, which does not import PyTorch and the like anew.

`python -m tests.support.warm_scripts` imports them once, and forks for each line of its input: a
folder and the scripts that run there. It prints an exit code for each. Three CPU-seconds less for a
script.
"""

import importlib
import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# none starts a thread, which a fork would lose
_IMPORTED = (
    "matplotlib.pyplot",
    "pandas",
    "torch",
    "thinsection.predict.experiment",
    "thinsection.run.run",
)
_OUTPUT = "output.txt"


@contextmanager
def warm_process() -> Iterator[Callable[[Sequence[Path], Path], None]]:
    """A function that runs scripts in one fork, each in a new folder of its name below another.

    It raises AssertionError with what was printed, if one does not end well.
    """
    command = [sys.executable, "-m", "tests.support.warm_scripts"]
    paths = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        requests, codes = server.stdin, server.stdout

        def run_scripts(scripts: Sequence[Path], top: Path) -> None:
            requests.write(json.dumps([str(top), *map(str, scripts)]) + "\n")
            requests.flush()
            code = codes.readline()
            assert code, "the warm process ended; its error is above"
            assert code == "0\n", (top / _OUTPUT).read_text()

        yield run_scripts


def main() -> None:
    """Answers requests until the input ends."""
    for name in _IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        top, *scripts = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(_run_here(Path(top), [Path(script) for script in scripts]))
        status = os.waitpid(child, 0)[1]
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def _run_here(top: Path, scripts: Sequence[Path]) -> int:
    """Runs each script as `python SCRIPT`; 0 if all ended well."""
    output = os.open(top / _OUTPUT, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        for script in scripts:
            folder = top / script.stem
            folder.mkdir()
            os.chdir(folder)
            sys.argv = [str(script)]
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return int(bool(end.code))
    except BaseException:  # noqa: BLE001 - it is printed
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    main()
