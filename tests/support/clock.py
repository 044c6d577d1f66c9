"""A clock that stands still until a test sets it."""

from types import ModuleType

import pytest


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def set_clock(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> Clock:
    """Puts a clock in the place of a module's `time`."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock
