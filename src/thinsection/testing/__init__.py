"""For the tests of our users: synthetic slides, contract suites, a peak-memory probe."""

from thinsection.testing.memory import Measured, run_and_measure

__all__ = ["Measured", "run_and_measure"]
