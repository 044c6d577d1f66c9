"""An end that was asked for: SIGTERM and Ctrl-C unwind the process as an exception does.

So locks are released, unfinished files removed and tables written. A second Ctrl-C ends it at once.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from thinsection.errors import Stopped

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def stopping() -> Iterator[None]:
    """Raises `Stopped` in the main thread when a signal asks the process to end.

    A signal that somebody ignores on purpose (nohup) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = (signal.SIG_DFL, signal.default_int_handler)
    before = {s: signal.signal(s, _stop) for s in _SIGNALS if signal.getsignal(s) in usual}
    try:
        yield
    finally:
        for one, handler in before.items():
            if signal.getsignal(one) is _stop:
                signal.signal(one, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    # schedulers may send SIGTERM more than once, and have SIGKILL for who does not listen
    signal.signal(number, signal.SIG_DFL if number == signal.SIGINT else signal.SIG_IGN)
    raise Stopped(signal.Signals(number).name, 128 + number)
