"""Slide of a results folder, to open its file as the run has read it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from thinsection.config import from_mapping
from thinsection.errors import InvalidInputError
from thinsection.files.trust import check_table_url
from thinsection.files.urls import is_url
from thinsection.results.records import Record
from thinsection.slide import Slide
from thinsection.slide.cohort import SlideEntry
from thinsection.slide.cohort_table import SlidesConfig
from thinsection.store.ledger import SlideLedger
from thinsection.store.slide_ids import check_slide_exists, slide_place
from thinsection.types import Size


@dataclass(frozen=True, kw_only=True)
class RecordedSlide:
    """A slide of a results folder: plain values that travel between processes.

    Attributes:
        entry: the slide's id, file, resolution, picture and look, as in the run.
        size_l0: (width, height) of the slide in level-0 px; None if it is not known.
        reader: reader that was used to make the results.
        rendering: description of the look by the reader; '' if pixels were not changed.
    """

    entry: SlideEntry
    size_l0: Size | None
    reader: str
    rendering: str

    def open(self) -> Slide:
        """Opens the slide with the reader of the run.

        Raises:
            SlideOpenError: the file is no longer at its path; also as `open_slide`.
            InvalidInputError: the file is not the one that the run has read.
        """
        check_slide_exists(self.entry.slide_path, self.entry.slide_id)
        # the look decides which reader is used for picked channels
        slide = self.entry.open("auto" if self.entry.look else self.reader)
        is_same = slide.rendering == self.rendering
        if self.size_l0 is not None and slide.size != self.size_l0:
            is_same = False
        if not is_same:
            slide.close()
            raise InvalidInputError(
                f"slide must be the file of the run, got {slide.size} px "
                f"{slide.rendering!r} for {self.size_l0} px {self.rendering!r} in "
                f"{self.entry.slide_path!r}; run again"
            )
        return slide


def recorded_slide(
    ledger: SlideLedger, read_records: Callable[[], Iterable[Record]]
) -> RecordedSlide:
    """Slide of a ledger, with the reader, picture, µm/px and look of its run.

    Args:
        ledger: ledger of the slide.
        read_records: returns the invocations of the folder, oldest first; called only for a slide
            with a look.

    Raises InvalidInputError: the slide was imported without the path of its file.
    """
    slide = ledger.slide
    if not slide.get("slide_path"):
        raise InvalidInputError(
            f"slide_path is missing in {ledger.slide_id!r}; import it with slides=..."
        )
    if is_url(slide["slide_path"]):
        # own runs may read from this machine, and a ledger does not show whose run it was
        check_table_url(
            slide["slide_path"], f"the ledger of {ledger.slide_id!r}", allow_local=True
        )
    rendering = slide.get("rendering") or ""
    look = None  # look of the last invocation that set one
    for record in read_records() if rendering else ():
        section = record.document.get("config", {}).get("slides")
        if section:
            look = from_mapping(SlidesConfig, section).look or look
    entry = SlideEntry(
        slide_id=ledger.slide_id,
        slide_path=slide_place(ledger),
        slide_mpp=(slide["mpp_x"], slide["mpp_y"]) if slide.get("mpp_x") else None,
        look=look,
        image=slide.get("image"),
    )
    return RecordedSlide(
        entry=entry,
        size_l0=(slide["width"], slide["height"]) if slide.get("width") else None,
        reader=slide.get("reader") or "auto",
        rendering=rendering,
    )
