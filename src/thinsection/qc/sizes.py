"""Lengths and areas of a check as people write them: in px of the work image, or in µm and mm²."""

import re

from thinsection.errors import ConfigError

_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(px|um|mm|um2|mm2)\s*")
_LENGTH_UM = {"um": 1.0, "mm": 1000.0}
_AREA_UM2 = {"um2": 1.0, "mm2": 1e6}


def length_px(text: str, mpp_th: float, *, key: str = "length") -> float:
    """Px of the work image.

    Args:
        text: '10 px', '80 um' or '0.5 mm'.
        mpp_th: µm per px of the work image.
        key: what the message calls it.

    Raises:
        ConfigError: the text is no length.
    """
    value, unit = _parse(text)
    if unit == "px":
        return value
    if unit not in _LENGTH_UM:
        raise ConfigError(f"{key} must be a length such as '10 px' or '80 um', got {text!r}")
    return value * _LENGTH_UM[unit] / mpp_th


def area_px(text: str, mpp_th: float, *, key: str = "area") -> float:
    """Px of the work image.

    Args:
        text: '64 px', '4096 um2' or '0.65 mm2'.
        mpp_th: µm per px of the work image.
        key: what the message calls it.

    Raises:
        ConfigError: the text is no area.
    """
    value, unit = _parse(text)
    if unit == "px":
        return value
    if unit not in _AREA_UM2:
        raise ConfigError(f"{key} must be an area such as '64 px' or '0.65 mm2', got {text!r}")
    return value * _AREA_UM2[unit] / mpp_th**2


def _parse(text: str) -> tuple[float, str]:
    match = _PATTERN.fullmatch(text)
    return (float(match.group(1)), match.group(2)) if match else (0.0, "")
