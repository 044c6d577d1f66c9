"""Progress of a run, as its listeners are told."""

from collections.abc import Callable
from dataclasses import dataclass

from thinsection.pipeline.results import SlideResult


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Progress of a run; may be emitted from any thread."""

    # opening, started, tiles, ended; waiting: another process holds the slide
    kind: str
    slide_id: str
    num_tiles: int = 0  # of 'started': to come; of 'tiles': done
    # of 'opening': what is done before tiles are; of 'tiles': what sets their pace;
    # of 'waiting': who holds the slide
    text: str = ""
    result: SlideResult | None = None  # of 'ended'


OnEvent = Callable[[RunEvent], None]
