"""Rates of this machine: the stored ones, or measured where they are absent or outdated."""

from collections.abc import Callable

from thinsection.run import calibration


def machine_rates(on_message: Callable[[str], None]) -> calibration.Calibration:
    """Rates of this machine: stored ones, or measured now, which takes some seconds."""
    if calibration.is_outdated(calibration.stored_calibration()):
        on_message(
            "measuring this machine: process start and decoding (about 15 s, once)"
        )
    return calibration.calibrate(_measure_machine)


def _measure_machine() -> calibration.Calibration:
    # measuring imports torch: it is imported only where something is not stored yet
    from thinsection.run.measuring import measure_machine

    return measure_machine()
