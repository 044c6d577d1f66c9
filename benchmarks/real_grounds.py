"""Pictures of real slides that others publish: fetched, cut and measured, never committed.

`python -m benchmarks.real_grounds FOLDER --checkouts CHECKOUTS` writes each picture of
real_grounds.toml to FOLDER/NAME.png, and its owner's mask, if it has one, to NAME_mask.png.
CHECKOUTS holds one git repository for each owner+name; one that is missing is cloned from GitHub.

The table says for each picture where it comes from, its licence, and its role. A picture that
chose a rule ("chosen") judges nothing; one that judges ("judge") was shown to no rule; a blind one
("blind") was outlined before any mask of it was seen, and judged the rule that stood then; a ground
("ground") has no truth and only lies below planted ink and folds.

The truth of a picture is its owner's mask, or is set by hand: a density above which pixels are
tissue, which was chosen by looking at its outline, and polygons that say where this holds. Both
were looked at, one by one. `Truth.counted` leaves out what is a matter of taste: ink, and the
clear spaces of fat and of loose tissue.
"""

import argparse
import io
import os
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw
from scipy import ndimage

from thinsection.arrays import get_namespace
from thinsection.arrays.morphology import drop_small, fill_small
from thinsection.types import MaskArray, RgbArray

TABLE = Path(__file__).with_suffix(".toml")
# Environment variable that names FOLDER for tests and benchmarks.
FOLDER_VARIABLE = "THINSECTION_TEST_GROUNDS"
# Smaller pieces and holes are not drawn: those of the tissue mask's default, and twice its holes.
_LEAST_UM2 = 20_000.0

Role = Literal["chosen", "judge", "blind", "ground"]
Box = tuple[int, int, int, int]  # left, top, right, bottom
Polygon = tuple[int, ...]  # x, y, x, y, ...: px of the cut picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """Tissue of a picture, bool (H, W), and the pixels on which a mask is judged."""

    tissue: MaskArray
    counted: MaskArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """A picture of a slide in someone's public repository."""

    name: str
    repository: str  # owner/name on GitHub
    commit: str
    path: str
    licence: str
    mpp: float  # µm per px; `mpp_from` says how it is known
    mpp_from: Literal["stated", "estimated"]
    role: Role
    box: Box | None = None  # part of the file's picture
    mask_path: str = ""  # the owner's mask: a file of the repository
    mask_box: Box | None = None
    density: float = 0.0  # relative to the picture's glass; more is tissue
    tissue: tuple[Polygon, ...] = ()  # tissue lies only here; none: anywhere
    solid: tuple[Polygon, ...] = ()  # all of it is tissue
    glass: tuple[Polygon, ...] = ()  # none of it is tissue: dirt, and the slide's edge
    loose: tuple[Polygon, ...] = ()  # its clear spaces are not counted
    unsure: tuple[Polygon, ...] = ()  # not counted
    ink: tuple[Polygon, ...] = ()  # lines of pen: width, x, y, ...; not counted

    def read(self, folder: Path) -> RgbArray:
        """The picture, uint8 (H, W, 3)."""
        with Image.open(folder / f"{self.name}.png") as image:
            return np.asarray(image.convert("RGB"))

    def truth(self, folder: Path) -> Truth:
        """The tissue that its owner or a person drew."""
        rgb = self.read(folder)
        cpu = get_namespace("cpu")
        if self.density:
            tissue = _density(rgb) > self.density
        else:
            with Image.open(folder / f"{self.name}_mask.png") as image:
                resized = image.convert("L").resize((rgb.shape[1], rgb.shape[0]))
                tissue = np.asarray(resized) > 127
        if self.tissue:
            tissue &= _drawn(self.tissue, rgb.shape)
        tissue &= ~_drawn(self.glass, rgb.shape)
        tissue |= _drawn(self.solid, rgb.shape)
        if self.density:
            padded = np.pad(tissue, 3, mode="edge")
            tissue = ndimage.binary_closing(padded)[3:-3, 3:-3]
            least_px = _LEAST_UM2 / self.mpp**2
            tissue = fill_small(cpu, tissue, least_px)
            tissue = drop_small(cpu, tissue, least_px)
        counted = ~_drawn(self.unsure, rgb.shape) & ~_lines(self.ink, rgb.shape)
        counted &= tissue | ~_drawn(self.loose, rgb.shape)
        return Truth(tissue=tissue, counted=counted)


def read_table(path: Path = TABLE) -> list[Ground]:
    """All pictures of the table, in its order."""
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["picture"]
    return [
        Ground(**{key: _frozen(value) for key, value in row.items()}) for row in rows
    ]


def _frozen(value: Any) -> Any:
    """Tuples in place of lists."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def grounds_folder() -> Path | None:
    """The folder with fetched pictures that the environment names; None without one."""
    name = os.environ.get(FOLDER_VARIABLE, "")
    return Path(name) if name else None


def fetch(ground: Ground, checkouts: Path, folder: Path) -> None:
    """Writes a picture, and its owner's mask, from a checkout of its repository."""
    repository = _git_folder(ground.repository, checkouts)
    picture = _cut(_blob(repository, ground.commit, ground.path), ground.box)
    picture.save(folder / f"{ground.name}.png")
    if ground.mask_path:
        mask = _cut(_blob(repository, ground.commit, ground.mask_path), ground.mask_box)
        mask.convert("L").save(folder / f"{ground.name}_mask.png")


def _git_folder(repository: str, checkouts: Path) -> Path:
    """The git folder of a checkout; clones it without its files where there is none."""
    place = checkouts / repository.replace("/", "+")
    for folder in (place / "repo" / ".git", place / "repo", place / ".git", place):
        if (folder / "HEAD").is_file():
            return folder
    address = f"https://github.com/{repository}.git"
    command = ["git", "clone", "-q", "--bare", "--filter=blob:none", address]
    subprocess.run([*command, str(place)], check=True)
    return place


def _blob(repository: Path, commit: str, path: str) -> bytes:
    command = ["git", f"--git-dir={repository}", "cat-file", "blob", f"{commit}:{path}"]
    return subprocess.run(command, check=True, capture_output=True).stdout


def _cut(content: bytes, box: Box | None) -> Image.Image:
    """A part of a picture, in RGB on white."""
    image = Image.open(io.BytesIO(content)).convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image)
    return white.convert("RGB").crop(box)


def _density(rgb: RgbArray) -> npt.NDArray[np.float64]:
    """Smooth density relative to the most common bright colour; a channel may stand for all."""
    values = rgb.astype(np.float64)
    grey = values.mean(axis=2)
    is_scanned = values.min(axis=2) < 254
    counts = np.histogram(grey[is_scanned], 256, (0, 256))[0]
    smooth = ndimage.uniform_filter1d(counts.astype(float), 5)
    # the glass under a dim lamp is darker; a glint may be brighter
    first = 180 if counts[180:].sum() > 0.01 * counts.sum() else 100
    peak = first + int(smooth[first:].argmax())
    glass = np.median(values[is_scanned & (abs(grey - peak) < 4)], axis=0)
    density = -np.log10(np.maximum(values, 1) / glass)
    strongest = np.maximum(density.mean(axis=2), 0.7 * density.max(axis=2))
    return np.asarray(ndimage.gaussian_filter(strongest, 0.8))


def _drawn(polygons: Sequence[Polygon], shape: tuple[int, ...]) -> MaskArray:
    image = Image.new("1", (shape[1], shape[0]))
    pen = ImageDraw.Draw(image)
    for polygon in polygons:
        pen.polygon(polygon, fill=1)
    return np.array(image)


def _lines(lines: Sequence[Polygon], shape: tuple[int, ...]) -> MaskArray:
    image = Image.new("1", (shape[1], shape[0]))
    pen = ImageDraw.Draw(image)
    for width, *points in lines:
        pen.line(points, fill=1, width=width, joint="curve")
    return np.array(image)


def main() -> None:
    """Fetches all pictures, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="fetch only these")
    parser.add_argument("--checkouts", type=Path, required=True)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for ground in read_table():
        if not args.names or ground.name in args.names:
            fetch(ground, args.checkouts, args.folder)
            print(f"{ground.name}: {ground.repository}, {ground.licence}")


if __name__ == "__main__":
    main()
