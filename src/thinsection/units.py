"""Sizes and resolutions, as people write and read them."""

import re

from thinsection.errors import ConfigError
from thinsection.types import Mpp

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)


def parse_bytes(text: str | int, *, name: str = "size") -> int:
    """Bytes from '2GiB', '512 MB', '1.5g' or a plain number; ConfigError: no size, or not > 0."""
    match = _PATTERN.fullmatch(str(text))
    unit = match.group(2).lower() if match else "?"
    if match is None or unit not in _UNITS or float(match.group(1)) <= 0:
        raise ConfigError(f"{name} must be a size such as '2GiB' or '800MB', got {text!r}")
    return int(float(match.group(1)) * _UNITS[unit])


def format_bytes(num_bytes: float) -> str:
    """'1.5 GiB': the size in the largest binary unit that keeps it >= 1."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_mpp(mpp: Mpp | None) -> str:
    """'0.25 µm/px', '0.25 x 0.5 µm/px' for px that are not square, 'no mpp' for None."""
    if mpp is None:
        return "no mpp"
    return " x ".join(dict.fromkeys(f"{value:.4g}" for value in mpp)) + " µm/px"
