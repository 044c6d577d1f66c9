"""Rules that convert pixels to RGB: which channels are shown, and the colour profile."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thinsection.errors import ChannelsError, ConfigError
from thinsection.types import counted

MAX_SHOWN = 3  # channels that a picture can show


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Rule that converts pixels to RGB; the default does not change them.

    Attributes:
        channels: names, or numbers from 0, of the channels that are shown as red, green and blue.
        percentiles: percentiles of a channel's pixels whose values become 0 and 255.
        icc: True to apply the colour profile of the file.
    """

    channels: tuple[str, ...] = ()
    percentiles: tuple[float, float] = (0.5, 99.5)
    icc: bool = False

    def __post_init__(self) -> None:
        count = len(self.channels)
        low, high = self.percentiles
        if count > MAX_SHOWN:
            raise ConfigError(
                f"slides.channels must name at most {MAX_SHOWN} channels, got {count}"
            )
        if count and self.icc:
            raise ConfigError(
                "slides.icc must be off with channels, got both; omit one"
            )
        if not 0 <= low < high <= 100:
            raise ConfigError(
                f"slides.channel_range must rise within [0, 100], got {low:g},{high:g}"
            )


@dataclass(frozen=True, kw_only=True)
class Channels:
    """Channels of a file that is not RGB or gray of 8 bits."""

    names: tuple[str, ...]
    dtype: np.dtype[np.generic]

    def __str__(self) -> str:
        kind = "float " if self.dtype.kind == "f" else ""
        bits = self.dtype.itemsize * 8
        return (
            f"{counted(len(self.names), 'channel')} of {kind}{bits} bits "
            f"({', '.join(self.names)})"
        )

    def index(self, wanted: str) -> int:
        """Returns the number of the channel with this name (in any capitals) or this number."""
        names = [name.lower() for name in self.names]
        if wanted.lower() in names:
            return names.index(wanted.lower())
        if wanted.isdigit() and int(wanted) < len(names):
            return int(wanted)
        raise ConfigError(
            f"slides.channels must be channels of the file, got {wanted!r}; it has {self}"
        )


def channel_names(names: Sequence[str], count: int) -> tuple[str, ...]:
    """Returns `count` names of channels; a missing or empty name becomes 'channel N'."""
    padded = [*names, *[""] * count][:count]
    return tuple(name or f"channel {number}" for number, name in enumerate(padded))


def unpicked_channels_error(channels: Channels, path: str) -> ChannelsError:
    """Returns the error for a file of which the user must pick channels, with an example."""
    picks = []
    for number, name in enumerate(channels.names):
        picks += [str(number)] if "," in name else [name]
    example = ",".join(picks[:MAX_SHOWN])
    return ChannelsError(
        f"slide must be RGB or gray of 8 bits, got {channels} in {Path(path).name!r}; choose "
        f'one to three: channels="{example}"'
    )
