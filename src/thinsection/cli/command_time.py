"""Time of the commands that read stored embeddings, by formulas.

n slides, T tiles, B bytes of embeddings in the folder. S is the time of a run to the tile grid
beside its slides, and L that of loading PyTorch and OpenVINO, both measured once on this machine
(`run.rates`). Constants are CPU-seconds of a machine whose S is `REFERENCE_START_S`; the other
parts grow with S:

    start    a S / 0.5, and 0.91 L if the command loads PyTorch
    work     (b n + c T + d B) S / 0.5, divided by the number of workers where the command has them

`train` and `view` are planned up to the first epoch and the first page: how long a training goes on
depends on its losses. The constants were fitted on 2026-11-30 over folders of 2 to 24 slides and
of 2 to 150 MB, those of aggregate to 420 MB.
"""

from dataclasses import dataclass

from thinsection.cli.command_memory import (
    StoredSize,
    check_command,
    is_in_workers,
    loads_torch,
)
from thinsection.run.calibration import Calibration

REFERENCE_START_S = 0.5
_TORCH_SHARE = (
    0.91  # of `Calibration.libraries_s`, which also has OpenVINO and a small network
)


@dataclass(frozen=True, slots=True)
class _Rates:
    """CPU-seconds on the reference machine."""

    start_s: float
    slide_s: float = 0.0
    tile_s: float = 0.0
    byte_s: float = 0.0


_RATES = {
    "import": _Rates(0.55, slide_s=0.045, byte_s=1.5e-9),
    "export trident": _Rates(0.54, slide_s=0.01, byte_s=1e-9),
    "export stamp": _Rates(0.54, slide_s=0.02, byte_s=3.7e-9),
    "export qupath": _Rates(0.54, slide_s=0.01, tile_s=8e-6),
    "export anndata": _Rates(1.35, slide_s=0.02, tile_s=3e-6),
    "export clam": _Rates(0.55, slide_s=0.015, byte_s=3.5e-9),
    "export slide2vec": _Rates(0.55, slide_s=0.02, byte_s=4.5e-9),
    "aggregate": _Rates(0.48, slide_s=0.02, byte_s=2.2e-9),
    "predict": _Rates(0.85, slide_s=0.013, byte_s=3.5e-9),
    "heatmap": _Rates(0.98, slide_s=0.8, byte_s=1.2e-8),
    "train": _Rates(1.1, slide_s=0.02, byte_s=2.8e-9),
    "view": _Rates(1.0),
}
# command -> what its planned time does not contain
_OPEN_ENDED = {
    "train": "the time is that before the first epoch: how many follow depends on the losses",
    "view": "the time is that to the first page",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandTime:
    """CPU-seconds of a command; of several workers those of the longest."""

    start_s: float
    work_s: float
    warnings: tuple[str, ...] = ()

    @property
    def wall_s(self) -> float:
        """Seconds on an idle machine."""
        return self.start_s + self.work_s


def command_time(
    command: str, size: StoredSize, machine: Calibration, *, workers: int = 1
) -> CommandTime:
    """Time of a command over stored embeddings.

    Args:
        command: a name in `command_memory.COMMANDS`.
        size: the embeddings.
        machine: rates of this machine.
        workers: number of processes, for commands with --workers.

    Raises ConfigError: another command.
    """
    check_command(command)
    rates = _RATES[command]
    scale = machine.start_s / REFERENCE_START_S
    start_s = rates.start_s * scale
    if loads_torch(command):
        start_s += _TORCH_SHARE * machine.libraries_s
    num_tiles = sum(size.num_tiles)
    stored_bytes = size.item_bytes * size.dim * num_tiles
    work_s = rates.slide_s * len(size.num_tiles)
    work_s += rates.tile_s * num_tiles + rates.byte_s * stored_bytes
    processes = min(workers, len(size.num_tiles)) if is_in_workers(command) else 1
    warnings = (_OPEN_ENDED[command],) if command in _OPEN_ENDED else ()
    return CommandTime(
        start_s=start_s, work_s=work_s * scale / processes, warnings=warnings
    )
