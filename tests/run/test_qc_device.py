"""`--qc-device auto`: the faster device by a measurement that is stored, and the reason is said."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from thinsection.errors import ConfigError, DeviceError, SlideOpenError
from thinsection.machine import gpu_models
from thinsection.run import calibration, qc_device
from thinsection.run.calibration import Calibration
from thinsection.run.plan import plan
from thinsection.run.qc_device import (
    measure_qc,
    planned_qc_device,
    with_chosen_qc_device,
)
from thinsection.run.run import run
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.config import RunConfig
from thinsection.stages.spec import resolve

SLIDES = [SlideEntry(slide_id=name, slide_path=f"{name}.svs") for name in "ab"]


@pytest.fixture(autouse=True)
def machine_with_a_gpu(monkeypatch, tmp_path):
    """A calibrated machine with one GPU and CuPy, whose cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(qc_device, "visible_gpus", lambda: ("0",))
    monkeypatch.setattr(qc_device, "gpu_models", lambda: ("NVIDIA H200",))
    monkeypatch.setattr(qc_device, "is_installed", lambda name: name == "cupy")
    rates = Calibration(process_bytes=10**8, start_s=1.0, decode_px_per_s=1e8)
    calibration.store_calibration(rates)


class _Clock:
    """Seconds by device in place of a measurement; slides in `broken` do not open."""

    def __init__(self, cpu: float, cuda: float, *, broken: str = "") -> None:
        self.seconds = {"cpu": cpu, "cuda": cuda}
        self.broken = broken
        self.measured: list[str] = []

    def __call__(self, entry: SlideEntry, pipeline: str) -> dict[str, float]:
        self.measured.append(entry.slide_id)
        if entry.slide_id in self.broken:
            raise SlideOpenError("not a slide")
        return self.seconds


def chosen(
    measure: Callable[[SlideEntry, str], dict[str, float]], **settings
) -> tuple[str, list[str]]:
    """Device, and the messages."""
    settings = {"until": "qc", "qc": "auto", "qc_device": "auto"} | settings
    spec = resolve(RunConfig(), settings)
    messages: list[str] = []
    spec = with_chosen_qc_device(spec, SLIDES, messages.append, measure=measure)
    return spec.qc.qc_device, messages


@pytest.mark.parametrize(
    ("cuda_s", "device"), [(0.49, "cuda"), (0.51, "cpu"), (1.58, "cpu")]
)
def test_the_gpu_is_used_where_it_takes_half_of_the_time(cuda_s, device):
    clock = _Clock(1.0, cuda_s)
    assert chosen(clock)[0] == device
    found, messages = chosen(clock)
    assert found == device
    assert clock.measured == ["a"]
    assert messages == [
        f"quality control on {device}: a slide took 1.00 s on the CPU and {cuda_s:.2f} s on the GPU"
    ]


def test_another_pipeline_and_other_gpus_are_measured_again(monkeypatch):
    clock = _Clock(1.0, 0.2)
    chosen(clock)
    chosen(clock, qc="histoqc-light")
    chosen(clock, qc="histoqc-light")
    assert clock.measured == ["a", "a"]
    monkeypatch.setattr(qc_device, "gpu_models", lambda: ("NVIDIA A40",))
    chosen(clock)
    assert clock.measured == ["a"] * 3


def test_the_next_slide_is_measured_where_one_does_not_open():
    clock = _Clock(1.0, 0.2, broken="a")
    assert chosen(clock)[0] == "cuda"
    assert clock.measured == ["a", "b"]


def test_the_cpu_checks_where_nothing_can_be_measured(monkeypatch):
    clock = _Clock(1.0, 0.2, broken="ab")
    device, messages = chosen(clock)
    assert (device, messages[-1]) == (
        "cpu",
        "quality control on cpu: no slide could be opened to measure it",
    )

    def refuse(entry, pipeline):
        raise DeviceError("device 'cuda' must have a driver")

    assert chosen(refuse, qc="histoqc-light")[0] == "cpu"
    monkeypatch.setattr(qc_device, "is_installed", lambda name: False)
    assert chosen(clock)[1] == ["quality control on cpu: CuPy is not installed"]
    monkeypatch.setattr(qc_device, "visible_gpus", lambda: ())
    assert chosen(clock)[1] == ["quality control on cpu: there is no GPU"]
    device, messages = chosen(clock, executor="slurm")
    assert "on other machines (slurm)" in messages[0]


def test_a_device_by_name_is_not_measured():
    clock = _Clock(1.0, 0.2)
    assert chosen(clock, qc_device="cpu") == ("cpu", [])
    assert chosen(clock, qc_device="cuda:1") == ("cuda:1", [])
    assert chosen(clock, qc="off", until="tiles") == ("auto", [])
    assert not clock.measured


def planned(**settings) -> str:
    settings = {"until": "qc", "qc": "auto", "qc_device": "auto"} | settings
    return planned_qc_device(resolve(RunConfig(), settings))


@pytest.mark.parametrize("cuda_s", [0.2, 0.9])
def test_the_planned_device_is_that_of_the_run_once_it_is_measured(cuda_s, monkeypatch):
    assert planned() == (
        "quality control: the run measures the CPU and the GPU on a slide, and uses the GPU if it "
        "takes at most half of the time"
    )
    _, messages = chosen(_Clock(1.0, cuda_s))
    assert planned() == messages[-1]
    assert planned(qc="histoqc-light").startswith("quality control: the run measures")
    assert planned(qc_device="cpu") == planned(qc="off", until="tiles") == ""
    assert "on other machines (slurm)" in planned(executor="slurm")
    monkeypatch.setattr(qc_device, "visible_gpus", lambda: ())
    assert planned() == "quality control on cpu: there is no GPU"


def test_a_plan_says_the_device_of_quality_control(he_slide, capsys):
    from thinsection.cli.plan import _show_plan

    chosen(_Clock(1.0, 0.2))
    settings = {"until": "qc", "qc": "auto"}
    predicted = plan([he_slide], qc_device="auto", **settings)
    sentence = (
        "quality control on cuda: a slide took 1.00 s on the CPU and 0.20 s on the GPU"
    )
    assert predicted.qc_device == sentence
    assert sentence in predicted._repr_html_()
    _show_plan(predicted)
    assert sentence in " ".join(capsys.readouterr().out.split())
    assert plan([he_slide], qc_device="cpu", **settings).qc_device == ""


def test_a_run_checks_on_the_chosen_device_and_its_results_are_kept(
    he_slide, tmp_path, monkeypatch
):
    monkeypatch.setattr(qc_device, "measure_qc", _Clock(1.0, 1.5))
    messages: list[str] = []
    settings = {"out": tmp_path / "out", "until": "qc", "qc": "histoqc-light"}
    first = run([he_slide], qc_device="auto", on_message=messages.append, **settings)
    assert first.counts["done"] == 1
    assert any(line.startswith("quality control on cpu") for line in messages)
    assert run([he_slide], qc_device="cpu", **settings).counts["skipped"] == 1


def test_the_time_is_of_the_checks_on_both_devices(he_slide, monkeypatch):
    import thinsection.qc

    run_qc = thinsection.qc.run_qc
    devices: list[str] = []

    def noted(slide, pipeline, *, device):
        devices.append(device)
        return run_qc(slide, pipeline)

    monkeypatch.setattr(thinsection.qc, "run_qc", noted)
    entry = SlideEntry(slide_id="he", slide_path=str(he_slide))
    seconds = measure_qc(entry, "histoqc-light")
    assert devices == ["cpu"] * 3 + ["cuda"] * 3
    assert seconds["cpu"] > 0 and seconds["cuda"] > 0


def test_models_of_gpus_are_read_from_the_driver(tmp_path: Path):
    for number, model in enumerate(("NVIDIA H200", "NVIDIA A40")):
        folder = tmp_path / "proc" / "driver" / "nvidia" / "gpus" / f"0000:{number}"
        folder.mkdir(parents=True)
        text = f"Model: \t\t {model}\nIRQ:   \t\t 1\n"
        (folder / "information").write_text(text)
    assert gpu_models(tmp_path) == ("NVIDIA A40", "NVIDIA H200")
    assert gpu_models(tmp_path / "proc") == ()


def test_an_unknown_pipeline_is_still_an_error(tmp_path):
    spec = resolve(RunConfig(), {"until": "qc", "qc": "auto", "qc_device": "auto"})
    spec = replace(spec, qc=replace(spec.qc, qc=str(tmp_path / "none.toml")))
    with pytest.raises(ConfigError):
        with_chosen_qc_device(spec, SLIDES, print, measure=_Clock(1, 1))
