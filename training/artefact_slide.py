"""What both generators of slides with artefacts share: the order of drawing, noise, the camera.

`tuning_slide` (generator A) is what checks are tuned and models are trained on; `held_out_slide`
(B) draws by other rules and only reports. docs/validation/qc.md says which seeds are for what.
"""

import io
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.testing.synthetic import ArraySlide, PyramidKind, write_levels
from thinsection.types import MaskArray, RgbArray, Size

Light = npt.NDArray[
    np.floating
]  # (H, W) or (H, W, 3), transmitted light in [0, 1], or a field
STAINS = ("he", "ihc", "grey", "dark", "faint", "tiled")  # tiled: white balance by tile
ARTEFACTS = (
    "fold",
    "blur",
    "bubble",
    "coverslip",
    "pen",
    "dust",
    "edge",
)  # as they are drawn
INKS = ("blue", "green", "red", "black", "brown")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtefactSlide:
    """A generated picture of a slide and where its artefacts are.

    `masks`: 'tissue' (under artefacts too, holes of fat included), the `ARTEFACTS` that it has,
    and 'pen_<ink>' beside 'pen'. Blur of a sigma under 1 µm is 'slight_blur': no score.
    """

    rgb: RgbArray
    masks: Mapping[str, MaskArray]
    mpp: float  # µm per px
    stain: str  # of `STAINS`
    blur_um: float  # sigma of the blur that it has, else 0

    @property
    def clean(self) -> MaskArray:
        """Tissue that no check has a reason to take."""
        clean = self.masks["tissue"].copy()
        for name, mask in self.masks.items():
            if name != "tissue":
                clean &= ~mask
        return clean

    def open(self) -> ArraySlide:
        """The picture as a slide of one level."""
        return ArraySlide([self.rgb], slide_mpp=(self.mpp, self.mpp))

    def write(self, path: Path, downsamples: Sequence[int] = (1, 4)) -> None:
        """Writes it as a tiled JPEG pyramid (.tif)."""
        kind = PyramidKind(downsamples=tuple(downsamples), mpp=(self.mpp, self.mpp))
        image = Image.fromarray(self.rgb)
        write_levels(
            path, [np.asarray(image.reduce(down)) for down in downsamples], kind
        )


class Scene(ABC):
    """A slide that is being drawn; a generator says how each thing looks. Lengths are in µm."""

    stream: ClassVar[
        int
    ]  # of random numbers: generators of one seed have nothing in common

    def __init__(self, seed: int, size: Size, mpp: float, stain: str | None) -> None:
        self.rng = np.random.default_rng([seed, self.stream])
        self.mpp, self.shape = mpp, (size[1], size[0])
        drawn = str(self.rng.choice(STAINS))
        self.stain, self.blur_um = stain or drawn, 0.0
        self.light: Light = np.ones((*self.shape, 3), np.float32)
        self.masks: dict[str, MaskArray] = {}

    @abstractmethod
    def draw_tissue(self) -> None:
        """Sets `light`, and `masks['tissue']`."""

    @abstractmethod
    def draw(self, artefact: str) -> None:
        """Draws one of `ARTEFACTS` and marks it."""

    @abstractmethod
    def photograph(self) -> RgbArray:
        """White balance, noise and compression of a scanner."""

    def slide(self, artefacts: Sequence[str]) -> ArtefactSlide:
        """The tissue with these artefacts."""
        self.draw_tissue()
        for name in ARTEFACTS:
            if name in artefacts:
                self.draw(name)
        for name in ("fold", "blur", "slight_blur"):
            if name in self.masks:
                self.masks[name] = self.masks[name] & self.masks["tissue"]
        about: dict[str, Any] = {
            "mpp": self.mpp,
            "stain": self.stain,
            "blur_um": self.blur_um,
        }
        return ArtefactSlide(rgb=self.photograph(), masks=self.masks, **about)

    def mark(self, name: str, where: MaskArray) -> None:
        self.masks[name] = self.masks[name] | where if name in self.masks else where

    def some(self, low: float, high: float) -> float:
        """A draw between two bounds, even in its logarithm."""
        return float(np.exp(self.rng.uniform(np.log(low), np.log(high))))

    def noise(self, sigma_um: float, along: float = 1.0) -> Light:
        """Smooth noise of mean 0 and deviation 1; `along` stretches it in a random direction."""
        from scipy import ndimage

        sigma = max(0.4, sigma_um / self.mpp)
        step = max(1, int(sigma / 2))
        height, width = (edge // step + 2 for edge in self.shape)
        field = self.rng.standard_normal((height, width), dtype=np.float32)
        wide = (sigma / step, sigma / step * along)[:: self.rng.choice((-1, 1))]
        field = ndimage.gaussian_filter(field, wide, mode="wrap")
        field -= field.mean()
        field /= field.std() + 1e-6
        return self.stretched(field, step)

    def stretched(self, field: Light, step: int) -> Light:
        """A field on a grid of every step-th px, at every px."""
        if step == 1:
            return field[: self.shape[0], : self.shape[1]]
        image = Image.fromarray(field).resize(
            (field.shape[1] * step, field.shape[0] * step), Image.Resampling.BICUBIC
        )
        return np.asarray(image)[: self.shape[0], : self.shape[1]]

    def centre(self, *, in_tissue: bool) -> npt.NDArray[np.float64]:
        """A px (y, x), of the tissue or anywhere."""
        places = np.flatnonzero(self.masks["tissue"][::8, ::8]) if in_tissue else ()
        if len(places):
            columns = self.masks["tissue"][::8, ::8].shape[1]
            return np.array(divmod(int(self.rng.choice(places)), columns)) * 8.0
        return self.rng.uniform(0.05, 0.95, 2) * self.shape

    def cover(self, rgb_light: npt.ArrayLike, opacity: Light) -> None:
        """Multiplies the light by a layer of a colour where its opacity is 1."""
        layer = np.asarray(rgb_light, np.float32)
        self.light *= 1 - opacity[..., None] * (1 - layer)


def jpeg(light: Light, quality: int) -> RgbArray:
    """Light as uint8, compressed once."""
    file = io.BytesIO()
    picture = Image.fromarray(np.clip(np.rint(light * 255), 0, 255).astype(np.uint8))
    picture.save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file).convert("RGB"))
