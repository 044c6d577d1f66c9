"""A machine whose rates are known, for plans that need not measure it for half a minute.

What measuring gives is tested in tests/run/test_plan.py; `thinsection plan` of the documentation's
pages measures this machine.
"""

from pathlib import Path

import pytest

from thinsection.run import measuring
from thinsection.run.calibration import Calibration, store_calibration
from thinsection.types import MIB

MACHINE = Calibration(
    process_bytes=300 * MIB,
    start_s=5.0,
    libraries_s=1.5,
    decode_px_per_s=1e8,
    slide_s=0.5,
)
_TILES_PER_S = 25.0
_OPERATIONS_PER_S = 1e11
_PEAK_BYTES = 500 * MIB


def know_machine(patch: pytest.MonkeyPatch, cache: Path) -> None:
    """Stores the machine in an own cache folder; rates and peaks of encoders are stated."""
    patch.setenv("XDG_CACHE_HOME", str(cache))
    store_calibration(MACHINE)
    patch.setattr(measuring, "measure_encoder", lambda *_, **__: _TILES_PER_S)
    patch.setattr(measuring, "measure_transformer", lambda **_: _OPERATIONS_PER_S)
    patch.setattr(measuring, "measure_cpu_peak", lambda *_, **__: _PEAK_BYTES)
