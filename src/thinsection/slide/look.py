"""How px become RGB where a person says so: a value, without what does it (nothing slow here)."""

from dataclasses import dataclass

from thinsection.errors import ConfigError

MOST = 3  # channels that a picture shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How px become RGB; the default leaves them as they are."""

    channels: tuple[str, ...] = ()  # names or numbers from 0, shown as red, green and blue
    percentiles: tuple[float, float] = (0.5, 99.5)  # of a channel's px that become 0 and 255
    icc: bool = False  # whether the file's colour profile is applied

    def __post_init__(self) -> None:
        if len(self.channels) > MOST:
            raise ConfigError(f"slides.channels must be 1 to {MOST}, got {len(self.channels)}")
        if self.channels and self.icc:
            raise ConfigError("slides.icc must be off with channels, got both; leave one out")
        low, high = self.percentiles
        if not 0 <= low < high <= 100:
            raise ConfigError(
                f"slides.channel_range must rise within [0, 100], got {low:g},{high:g}"
            )
