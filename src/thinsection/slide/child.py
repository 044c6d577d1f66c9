"""A process that opens files for us first, so that a C library's abort or hang costs only itself.

OpenSlide, cuCIM and their like end the process where a damaged file asks for the impossible. What
our own parser has not found sound is opened first, and read in a few places, by a child of this
process, which stays warm for the next file. Sound TIFFs never need it.
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
from typing import Any

from thinsection import errors
from thinsection.slide.geometry import corner_l0
from thinsection.slide.look import Look
from thinsection.slide.readers import load_slide
from thinsection.types import GIB

MAX_CPU_S, MAX_WAIT_S = 20, 300  # of one file; waiting is for slow network drives
MAX_BYTES = GIB  # of the child's own memory
_PROBE_PX = 256
_PLACES = (0.0, 0.5, 1.0)  # of a level's width and height


def try_in_child(
    path: str, reader: str, *, whole: bool = False, channels: Sequence[str] = ()
) -> None:
    """Returns where a reader opens a file, and survives it, in another process.

    With `whole` a thumbnail is made too: a damaged file may promise more px than anybody can read.
    With `channels` these are what is read. Memory: up to `MAX_BYTES`, in that process. Raises
    SlideOpenError: it does not open the file, or died or hung over it.
    """
    if answer := _child(os.getpid()).ask(reader, path, whole, list(channels)):
        raise errors.SlideOpenError(answer)


@cache
def _child(pid: int) -> "_Child":
    """The child of this process; a fork of it has one of its own."""
    return _Child()


class _Child:
    """Started by the first file and again after a death; takes one file at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, *request: str | bool | list[str]) -> str:
        """Why the reader does not open the file; '' where it does."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                if selector.select(MAX_WAIT_S) and (line := process.stdout.readline()):
                    return str(json.loads(line))
            self._process = None
            return f"{request[0]}: {_ended(process)} over it; the file is damaged"

    def _start(self) -> "subprocess.Popen[bytes]":
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [
            sys.executable,
            "-c",
            "from thinsection.slide import child; child.serve()",
        ]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=env, **pipes)
        weakref.finalize(self, _ended, process)  # at the latest when this process ends
        return process


def _ended(process: "subprocess.Popen[bytes]") -> str:
    """Ends the child, and says of what it died."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        code = process.wait(timeout=1)  # it is dying, or it hangs
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"a process of its own hung for {MAX_WAIT_S} s"
    finally:
        process.stdout.close()
    if code == -signal.SIGXCPU:
        return f"a process of its own took more than {MAX_CPU_S} CPU-s"
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"a process of its own died ({name})"


def serve() -> None:
    """The child: lines of [reader, path, whole, channels] in, a line with its answer out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end of its input ends it
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most_s = resource.getrlimit(resource.RLIMIT_CPU)
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)  # some libraries print
        for line in sys.stdin:
            used = resource.getrusage(resource.RUSAGE_SELF)
            soft_s = int(used.ru_utime + used.ru_stime) + MAX_CPU_S
            resource.setrlimit(resource.RLIMIT_CPU, (soft_s, most_s))
            answers.write(json.dumps(_attempt(*json.loads(line))) + "\n")


def _attempt(reader: str, path: str, whole: bool, channels: list[str]) -> str:
    """Opens and reads what the parent will; damage that is said in time is not the child's."""
    try:
        look: dict[str, Any] = (
            {"look": Look(channels=tuple(channels))} if channels else {}
        )
        with load_slide(reader, path, **look) as slide:
            size, reads = (_PROBE_PX, _PROBE_PX), list[Callable[[], Any]]()
            for level, share in product(slide.levels, _PLACES):
                origin = corner_l0(level, *(int(share * (px - 1)) for px in level.size))
                reads.append(partial(slide.read_region, origin, level.index, size))
            reads += [partial(slide.thumbnail, size)] * whole
            reads += [
                partial(slide.associated_image, name) for name in slide.associated_names
            ]
            for read in reads:
                with suppress(
                    errors.SlideReadError
                ):  # said again when the place is asked for
                    read()
    except (
        errors.ChannelsError,
        errors.ConfigError,
    ):  # the parent meets them too, and says them
        return ""
    except errors.ThinsectionError as error:
        return str(error)
    except MemoryError as error:
        return f"{reader}: {error!r}"
    return ""
