"""For tests, ours and our users': synthetic slides, contract suites, a peak-memory probe."""

from thinsection.testing.memory import PeakMemory, run_and_measure

__all__ = ["PeakMemory", "run_and_measure"]
