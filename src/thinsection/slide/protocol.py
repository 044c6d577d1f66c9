"""What every reader offers: the vocabulary of OpenSlide, with numpy arrays and one colour model."""

from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from thinsection.types import CoordsL0, Level, Mpp, PointL0, RgbArray, Size, TileArray


@runtime_checkable
class Slide(Protocol):
    """An opened slide. Thread-safe: any number of threads may read at once.

    Attributes:
        slide_path: the path or URL it was opened from.
        reader: name of the reader that holds it: 'openslide', 'tiff', 'cucim', 'image'.
        levels: finest first; `levels[0].downsample == 1.0`.
        slide_mpp: (x, y) µm per level-0 px, or None where the file does not say.
        objective_power: nominal magnification of the objective, or None.
        vendor: the scanner family as OpenSlide names it, or None.
        properties: the file's own metadata, as strings.
        associated_names: names of associated images ('label', 'macro', 'thumbnail').
    """

    @property
    def slide_path(self) -> str: ...
    @property
    def reader(self) -> str: ...
    @property
    def levels(self) -> tuple[Level, ...]: ...
    @property
    def size(self) -> Size:
        """(width, height) of level 0, px."""
        ...

    @property
    def slide_mpp(self) -> Mpp | None: ...
    @property
    def objective_power(self) -> float | None: ...
    @property
    def vendor(self) -> str | None: ...
    @property
    def properties(self) -> Mapping[str, str]: ...
    @property
    def associated_names(self) -> tuple[str, ...]: ...

    def read_region(
        self, origin_l0: PointL0, level: int, size: Size, *, out: RgbArray | None = None
    ) -> RgbArray:
        """Pixels of one level as uint8 (size[1], size[0], 3), RGB.

        Args:
            origin_l0: (x, y) of the top-left corner in level-0 px; may lie outside the slide.
            level: pyramid level to read from.
            size: (width, height) in px of that level, each >= 1.
            out: C-contiguous uint8 array of that shape to decode into; it is what is returned.

        Returns:
            The region; px outside the slide, and transparent ones, are white (255). Px (0, 0) of
            it is px round(origin_l0 / downsample) of the level.

        Memory: the region plus the compressed and decoded segments that it touches.

        Raises:
            SlideReadError: a segment cannot be decoded.
            InvalidInputError: no such level, or an empty size.
        """
        ...

    def read_regions(self, origins_l0: CoordsL0, level: int, *, out: TileArray) -> None:
        """Fills `out` with several regions of one size, each as `read_region` gives it.

        Args:
            origins_l0: int64 (B, 2), their top-left corners in level-0 px.
            level: pyramid level to read from.
            out: C-contiguous uint8 (B, height, width, 3); the size is read off it.

        Memory: as of one region, and up to 1 MiB of compressed segments.

        Raises:
            SlideReadError: a segment cannot be decoded.
            InvalidInputError: no such level, or an `out` of another kind.
        """
        ...

    def thumbnail(self, max_size: Size) -> RgbArray:
        """The whole slide, aspect kept, fitted into max_size, uint8 (H, W, 3).

        Memory: O(thumbnail + one strip of the level that is read), also when levels are missing.
        """
        ...

    def associated_image(self, name: str) -> RgbArray:
        """One associated image, uint8 (H, W, 3)."""
        ...

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
