"""Report of de-identification about a slide: looked at, removed, kept, and not looked at."""

from collections.abc import Iterator
from dataclasses import dataclass, field

# no program of this kind sees these; a person has to
NEVER_LOOKED_AT = (
    "text or faces within the pixels, such as a marker's writing on the glass",
    "pixels of border tiles that lie outside the image",
    "digits of numbers that can be what their field says, such as a resolution",
    "the name of the file",
)


@dataclass(kw_only=True)
class Report:
    """Four lists of sentences about one slide, each in the order of the file.

    Attributes:
        looked_at: places that were read, with counts.
        removed: what is in the slide and not in the copy; empty where all that was read is clean.
        kept: images and values that are in the copy.
        not_looked_at: places that nobody read, so that they may still identify somebody.
    """

    looked_at: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    not_looked_at: list[str] = field(default_factory=lambda: list(NEVER_LOOKED_AT))

    def remove(self, what: str) -> None:
        """Adds to `removed` what is not there yet."""
        if what not in self.removed:
            self.removed.append(what)

    def lines(self) -> Iterator[str]:
        """Yields the report as text."""
        yield f"inspected: {'; '.join(self.looked_at)}"
        for line in self.removed:
            yield f"removed: {line}"
        if not self.removed:
            yield "removed: nothing, in the places that were inspected"
        for line in self.kept:
            yield f"kept: {line}"
        yield f"not inspected: {'; '.join(self.not_looked_at)}"
