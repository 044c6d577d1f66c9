"""Rates of this machine: the stored ones, or measured where they are absent or outdated."""

from collections.abc import Callable

from thinsection.run.calibration import Calibration, calibrate


def machine_rates(on_message: Callable[[str], None]) -> Calibration:
    """Rates of this machine: stored ones, or measured now, which takes some seconds."""

    def measure() -> Calibration:
        # measuring imports torch: it is imported only where something is not stored yet
        from thinsection.run.measuring import measure_machine

        on_message(
            "measuring this machine: process start and decoding (about 15 s, once)"
        )
        return measure_machine()

    return calibrate(measure)
