"""Device of quality control by a measurement, for `--qc-device auto`.

Both devices check one slide of the run, once per machine and pipeline; the seconds are stored with
the rates of this machine. The GPU is chosen only where it takes at most half of the CPU's time,
since it has the encoders to run as well.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from thinsection.errors import DeviceError, ThinsectionError
from thinsection.extras import is_installed
from thinsection.jobs.executor import chosen_executor
from thinsection.machine import gpu_models, visible_gpus
from thinsection.run import calibration
from thinsection.run.rates import machine_rates
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.config import AUTO_DEVICE, RunConfig
from thinsection.types import Document

LARGEST_SHARE = 0.5  # of the CPU's time, for which the GPU is chosen
_LOCAL = ("inline", "pool")  # executors whose work runs on this machine
_PASSES = 2  # timed checks of the slide on each device, after one to warm up

Listener = Callable[[str], None]
# seconds of the checks of a pipeline on a slide, by device
Measure = Callable[[SlideEntry, str], dict[str, float]]


def with_chosen_qc_device(
    spec: RunConfig,
    entries: Sequence[SlideEntry],
    on_message: Listener,
    *,
    measure: Measure | None = None,
) -> RunConfig:
    """Settings with the device of the checks in place of 'auto'; a message has the reason.

    Args:
        spec: settings of the run.
        entries: slides of the run, of which the first that opens is checked.
        on_message: called with the choice and its reason.
        measure: measures a slide and a pipeline; tests pass their own.

    Raises ConfigError: there is no such pipeline.
    """
    if spec.qc.qc == "off" or spec.qc.qc_device != AUTO_DEVICE:
        return spec
    device, reason = _choice(spec, entries, on_message, measure or measure_qc)
    on_message(f"quality control on {device}: {reason}")
    return replace(spec, qc=replace(spec.qc, qc_device=device))


def _choice(
    spec: RunConfig,
    entries: Sequence[SlideEntry],
    on_message: Listener,
    measure: Measure,
) -> tuple[str, str]:
    """Device, and the reason for it."""
    reason = _why_unmeasured(spec)
    if reason:
        return "cpu", reason
    machine_rates(on_message)
    key = _key(spec)
    if not calibration.is_stored("qc", key):
        on_message(
            "measuring quality control on the CPU and the GPU (once per machine)"
        )
    try:
        seconds = calibration.measurement(
            "qc", key, lambda: _of_first_slide(entries, spec.qc.qc, measure)
        )
    except DeviceError as error:
        return "cpu", str(error)
    return _faster(seconds)


def planned_qc_device(spec: RunConfig) -> str:
    """Sentence about the device that a run would use for 'auto', from stored seconds alone.

    It is '' unless the device of the checks is 'auto'.

    Raises ConfigError: there is no such pipeline.
    """
    if spec.qc.qc == "off" or spec.qc.qc_device != AUTO_DEVICE:
        return ""
    device = "cpu"
    reason = _why_unmeasured(spec)
    if not reason:
        machine = calibration.stored_calibration()
        key = _key(spec)
        if machine is None or key not in machine.qc:
            return (
                "quality control: the run measures the CPU and the GPU on a slide, and uses the "
                "GPU if it takes at most half of the time"
            )
        device, reason = _faster(machine.qc[key])
    return f"quality control on {device}: {reason}"


def _why_unmeasured(spec: RunConfig) -> str:
    """Reason why the CPU checks without a measurement; '' if both devices can be measured."""
    from thinsection.qc import load_pipeline

    name = chosen_executor(spec.executor)
    if name not in _LOCAL:
        return f"the slides are checked on other machines ({name})"
    if not visible_gpus():
        return "there is no GPU"
    if not is_installed("cupy"):
        return "CuPy is not installed"
    if load_pipeline(spec.qc.qc).segmenter is not None:
        return "checks of classes of a network are not measured"
    return ""


def _key(spec: RunConfig) -> str:
    """Key of the seconds of this pipeline with the GPUs of this machine."""
    from thinsection.qc import load_pipeline

    return "|".join([str(load_pipeline(spec.qc.qc).as_mapping()), *gpu_models()])


def _faster(seconds: Document) -> tuple[str, str]:
    """Device, and the reason for it, by the seconds of a slide; empty if none was measured."""
    if not seconds:
        return "cpu", "no slide could be opened to measure it"
    cpu_s = float(seconds["cpu"])
    cuda_s = float(seconds["cuda"])
    device = "cuda" if cuda_s <= LARGEST_SHARE * cpu_s else "cpu"
    return (
        device,
        f"a slide took {cpu_s:.2f} s on the CPU and {cuda_s:.2f} s on the GPU",
    )


def _of_first_slide(
    entries: Sequence[SlideEntry], pipeline: str, measure: Measure
) -> Document:
    """Seconds by device on the first slide that can be checked; empty if none can."""
    for entry in entries:
        try:
            return dict(measure(entry, pipeline))
        except DeviceError:
            raise
        except ThinsectionError:  # the run reports what is wrong with the slide
            continue
    return {}


def measure_qc(entry: SlideEntry, pipeline: str) -> dict[str, float]:
    """Fewest seconds of the checks on this slide, by device.

    Raises ThinsectionError: the slide cannot be checked, or a device is not there.
    """
    from thinsection.qc import run_qc
    from thinsection.slide import open_slide

    seconds: dict[str, float] = {}
    with open_slide(entry.slide_path) as slide:
        for device in ("cpu", "cuda"):
            spent = []
            for _ in range(1 + _PASSES):
                start = time.perf_counter()
                run_qc(slide, pipeline, device=device)
                spent.append(time.perf_counter() - start)
            # the first pass loads and compiles
            seconds[device] = min(spent[1:])
    return seconds
