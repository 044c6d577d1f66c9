"""Child process that opens unknown files first: an abort or hang of a C library ends only it.

OpenSlide and other C libraries may abort the process if a damaged file asks for the impossible. So
a file that our own parser has not found sound is first opened, and read in a few places, by a child
process. The child stays alive for the next file. Sound TIFFs never need it.
"""

import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import product

from thinsection import errors
from thinsection.errors import SlideOpenError, SlideReadError
from thinsection.slide.geometry import corner_l0
from thinsection.slide.look import Look
from thinsection.slide.readers import load_slide
from thinsection.types import GIB, RgbArray

MAX_CPU_S = 20  # most CPU time for one file
MAX_WAIT_S = 300  # most time for one file, as network drives may be slow
MAX_BYTES = GIB  # most memory of the child
_PROBE_PX = 256
_PLACES = (0.0, 0.5, 1.0)  # shares of a level's width and height
_COMMAND = "from thinsection.slide import child; child.serve()"


def try_in_child(
    path: str,
    reader: str,
    *,
    whole: bool = False,
    channels: Sequence[str] = (),
    image: str | None = None,
) -> None:
    """Returns if a reader opens a file in another process without dying or hanging.

    Args:
        path: the file.
        reader: name of the reader.
        whole: True to read a thumbnail too, because a damaged file may declare more pixels than it
            has.
        channels: names of the channels to read.
        image: name or number of the picture to read.

    Memory: up to `MAX_BYTES` in the child process.

    Raises:
        SlideOpenError: the reader does not open the file, or the child died or hung over it.
    """
    request = json.dumps([reader, path, whole, list(channels), image])
    refusal = _child(os.getpid()).ask(reader, request)
    if refusal:
        raise SlideOpenError(refusal)


@cache
def _child(pid: int) -> "_Child":
    """Returns the child of this process; `pid` gives each fork of the process its own child."""
    return _Child()


class _Child:
    """Process that is started for the first file, and again after a death; one file at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, reader: str, request: str) -> str:
        """Returns the reason why the reader does not open the file; '' if it does."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                folders = os.pathsep.join(folder for folder in sys.path if folder)
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _COMMAND],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": folders},
                )
                # ends the child at the latest when this process ends
                weakref.finalize(self, _end_process, self._process)
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(request.encode() + b"\n")
            process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                has_answer = bool(selector.select(MAX_WAIT_S))
            line = process.stdout.readline() if has_answer else b""
            if line:
                return str(json.loads(line))
            self._process = None
            return f"{reader}: {_end_process(process)} while it read this file; the file is damaged"


def _end_process(process: "subprocess.Popen[bytes]") -> str:
    """Ends the child, and returns the cause of its death in words."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        code = process.wait(timeout=1)  # it is dying, or it hangs
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"its separate process did not answer for {MAX_WAIT_S} s"
    finally:
        process.stdout.close()
    if code == -signal.SIGXCPU:
        return f"its separate process used more than {MAX_CPU_S} CPU-s"
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"its separate process died ({name})"


# functions that run in the child


def serve() -> None:
    """Answers requests: one line of JSON with the arguments in, one line with the answer out."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # the child ends at the end of its input
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard_limit_s = resource.getrlimit(resource.RLIMIT_CPU)
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)  # some libraries print to standard output
        for line in sys.stdin:
            usage = resource.getrusage(resource.RUSAGE_SELF)
            limit_s = int(usage.ru_utime + usage.ru_stime) + MAX_CPU_S
            resource.setrlimit(resource.RLIMIT_CPU, (limit_s, hard_limit_s))
            answers.write(json.dumps(_attempt(*json.loads(line))) + "\n")


def _attempt(
    reader: str, path: str, whole: bool, channels: list[str], image: str | None
) -> str:
    """Opens a slide and reads some places; returns why it cannot be opened, or ''."""
    try:
        look = Look(channels=tuple(channels)) if channels else None
        with load_slide(reader, path, look=look, image=image) as slide:
            size = (_PROBE_PX, _PROBE_PX)
            reads: list[Callable[[], RgbArray]] = []
            for level, share in product(slide.levels, _PLACES):
                x = int(share * (level.size[0] - 1))
                y = int(share * (level.size[1] - 1))
                origin_l0 = corner_l0(level, x, y)
                reads.append(partial(slide.read_region, origin_l0, level.index, size))
            if whole:
                reads.append(partial(slide.thumbnail, size))
            for name in slide.associated_names:
                reads.append(partial(slide.associated_image, name))
            for read in reads:
                # damage is reported later, when the parent reads the place
                with suppress(SlideReadError):
                    read()
    except (errors.ChannelsError, errors.ConfigError, errors.ImageError):
        return ""  # the parent gets the same error, and reports it
    except errors.ThinsectionError as error:
        return str(error)
    except MemoryError as error:
        return f"{reader}: {error!r}"
    return ""
