"""Progress of a run, as values for its listeners."""

from collections.abc import Callable
from dataclasses import dataclass

from thinsection.results.outcome import SlideResult


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Progress of a run; may be emitted from any thread."""

    # opening, started, tiles, ended; waiting: another process works on the slide
    kind: str
    slide_id: str
    num_tiles: int = 0  # 'started': tiles to come; 'tiles': tiles done
    # 'opening': steps before the tiles; 'tiles': the slowest step;
    # 'waiting': the process that works on the slide
    text: str = ""
    result: SlideResult | None = None  # only for 'ended'


OnEvent = Callable[[RunEvent], None]
