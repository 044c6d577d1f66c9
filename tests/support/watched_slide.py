"""A slide made of arrays that says whether it was closed, and breaks where it is told to."""

from collections.abc import Sequence
from typing import Any

from thinsection.errors import SlideReadError
from thinsection.testing.synthetic import ArraySlide
from thinsection.types import RgbArray


class WatchedSlide(ArraySlide):
    """Reading fails from the row `broken_below_lv` of a level on, as of a truncated file."""

    def __init__(
        self,
        levels: Sequence[RgbArray],
        *,
        broken_below_lv: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(levels, **options)
        self._broken_below_lv = broken_below_lv

    @property
    def closed(self) -> bool:
        """Whether somebody closed it."""
        return self._closed

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        end = origin_lv[1] + len(out)
        if self._broken_below_lv is not None and end > self._broken_below_lv:
            raise SlideReadError(f"region must be readable, got rows to {end}")
        super()._fill(origin_lv, level, out)
