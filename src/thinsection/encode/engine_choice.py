"""Choice between the engines of a CPU, by settings and installed packages; imports neither."""

from importlib.metadata import version
from typing import Literal, get_args

from thinsection.errors import InvalidInputError
from thinsection.extras import is_installed

EngineChoice = Literal["auto", "torch", "openvino"]

# precisions of OpenVINO on CPUs, with OpenVINO's names for them
PRECISIONS = {"fp32": "f32", "bf16": "bf16"}


def why_torch(engine: EngineChoice, device: str, *, is_random: bool) -> str:
    """Reason why PyTorch is used without trying OpenVINO; '' if OpenVINO is to be tried.

    The reason 'torch': PyTorch was asked for, or the device is not a CPU.

    Raises InvalidInputError: unknown engine, or openvino on a device other than a CPU.
    """
    choices = get_args(EngineChoice)
    if engine not in choices:
        raise InvalidInputError(
            f"engine must be one of {', '.join(choices)}, got {engine!r}"
        )
    on_cpu = device.partition(":")[0] == "cpu"
    if engine == "openvino":
        if not on_cpu:
            raise InvalidInputError(
                f"engine must be auto or torch on a device that is not a CPU, got {engine!r} on "
                f'{device}; pass device="cpu"'
            )
        return ""
    if engine == "torch" or not on_cpu:
        return "torch"
    if is_random:
        return "random weights"
    return "" if is_installed("openvino") else "not installed"


def engine_version(engine: str) -> str:
    """Engine and its installed version, such as 'torch 2.13.0'."""
    return f"{engine} {version(engine)}"
