"""Real tissue of the training: layouts of nuclei and regions of whole slides, and pictures.

Layouts come from polygons that histolytics brings (BSD-3-Clause): every nucleus of a section of
high-grade serous carcinoma with its omental fat, necrosis and haemorrhage, and of two cervix
biopsies. A scene stains them in any way. Pictures are real light: a frozen section of the TCGA,
two crops of histolytics, and scikit-image's immunohistochemistry (Hamilton, of public domain).
No figure is reported on any of them.
"""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw
from scipy import ndimage

from thinsection.slide import open_slide
from thinsection.types import RgbArray

# µm per pixel of layouts and pictures, and of the polygons.
MPP = 4.0
_POLYGON_MPP = 0.25
# File of nuclei, file of regions.
_LAYOUTS = (
    ("hgsc_nuclei_wsi", "hgsc_tissue_wsi"),
    ("cervix_biopsy_nuclei", "cervix_biopsy_tissue"),
    ("cervix_nuclei_crop", "cervix_tissue_crop"),
)
# Classes of regions, and what a scene draws for each.
REGIONS = ("none", "stroma", "epithelium", "fat", "blood", "necrosis", "fluid")
_REGION_OF = {
    "stroma": "stroma",
    "tumor": "epithelium",
    "omental_fat": "fat",
    "hemorragia": "blood",
    "necrosis": "necrosis",
    "serum": "fluid",
    "blood": "blood",
    "slime": "fluid",
    "gland": "epithelium",
    "cin": "epithelium",
    "squamous": "epithelium",
}
# Drawn first to last: small regions lie on large ones.
_ORDER = ("stroma", "fat", "epithelium", "necrosis", "fluid", "blood")
_TCGA = "tcga-cr-7395-01a-01-ts1.svs"
_CROPS = ("hgsc_nest.jpg", "hgsc_stromal_he.jpg")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Nuclei and regions of a real section, at `MPP`."""

    # share of each pixel that nuclei cover, float32 (H, W)
    nuclei: npt.NDArray[np.float32]
    # index in `REGIONS`, uint8 (H, W)
    regions: npt.NDArray[np.uint8]


def histolytics_folder() -> Path:
    """Folder `data` of histolytics: HISTOLYTICS_DATA, or that of the installed package.

    Raises:
        FileNotFoundError: neither exists.
    """
    named = os.environ.get("HISTOLYTICS_DATA")
    if named:
        return Path(named)
    spec = find_spec("histolytics")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "histolytics must be installed, got no such package; "
            "`pip download --no-deps histolytics==0.3.0`, unpack the wheel, and set "
            "HISTOLYTICS_DATA to its folder histolytics/data"
        )
    return Path(spec.submodule_search_locations[0]) / "data"


def files() -> list[Path]:
    """Files that the training reads, whose hashes its record has."""
    folder = histolytics_folder()
    names = [f"{name}.parquet" for pair in _LAYOUTS for name in pair]
    slides = Path(os.environ["THINSECTION_TEST_SLIDES"])
    return [folder / name for name in (*names, *_CROPS)] + [slides / _TCGA]


def sha256(path: Path) -> str:
    """Hash of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def layouts(cache_dir: Path) -> list[Layout]:
    """Layouts of the three sections; drawn once, kept in `cache_dir`.

    Memory: 2 GB while the polygons are drawn, 5 bytes per pixel of `MPP` afterwards.
    """
    found = []
    for nuclei_name, regions_name in _LAYOUTS:
        path = cache_dir / f"{nuclei_name}.npz"
        if not path.is_file():
            cache_dir.mkdir(parents=True, exist_ok=True)
            nuclei, regions = _draw(nuclei_name, regions_name)
            np.savez_compressed(path, nuclei=nuclei, regions=regions)
        with np.load(path, allow_pickle=False) as arrays:
            share = arrays["nuclei"].astype(np.float32) / 255
            found.append(Layout(nuclei=share, regions=arrays["regions"]))
    return found


def _draw(
    nuclei_name: str, regions_name: str
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    import shapely
    from pyarrow import parquet

    folder = histolytics_folder()
    table = parquet.read_table(folder / f"{nuclei_name}.parquet")
    nuclei = shapely.from_wkb(table["geometry"].to_numpy())
    table = parquet.read_table(folder / f"{regions_name}.parquet")
    regions = shapely.from_wkb(table["geometry"].to_numpy())
    names = table["class_name"].to_pylist()
    left, top, right, bottom = shapely.total_bounds(regions)
    scale = _POLYGON_MPP / MPP
    width = int((right - left) * scale) + 1
    height = int((bottom - top) * scale) + 1
    centres = shapely.centroid(nuclei)
    column = ((shapely.get_x(centres) - left) * scale).astype(int).clip(0, width - 1)
    row = ((shapely.get_y(centres) - top) * scale).astype(int).clip(0, height - 1)
    share = np.zeros((height, width), np.float32)
    np.add.at(share, (row, column), shapely.area(nuclei) * scale**2)
    canvas = Image.new("L", (width, height), 0)
    pen = ImageDraw.Draw(canvas)
    for wanted in _ORDER:
        chosen = [g for g, name in zip(regions, names) if _REGION_OF[name] == wanted]
        for polygon in _polygons(chosen):
            ring = (np.asarray(polygon.exterior.coords) - (left, top)) * scale
            pen.polygon([(x, y) for x, y in ring], fill=REGIONS.index(wanted))
    drawn = np.array(canvas)
    # squares of fat that its authors did not segment
    holes = ndimage.binary_fill_holes(drawn > 0) & (drawn == 0)
    drawn[holes] = REGIONS.index("fat")
    return (share.clip(0, 1) * 255).astype(np.uint8), drawn


def _polygons(geometries: Iterable[object]) -> list:  # type: ignore[type-arg]
    import shapely

    parts = shapely.get_parts(np.asarray(list(geometries), dtype=object))
    return [part for part in parts if isinstance(part, shapely.Polygon)]


@cache
def pictures() -> tuple[RgbArray, ...]:
    """Real light at about `MPP`, uint8 (H, W, 3) each."""
    from skimage import data

    folder = histolytics_folder()
    slide_path = Path(os.environ["THINSECTION_TEST_SLIDES"]) / _TCGA
    with open_slide(slide_path) as slide:
        section = slide.read_region((0, 0), 0, slide.size)
    found = [np.asarray(Image.fromarray(section).reduce(8))]
    # finer than `MPP`, so that a crop shows more than a few pixels: structures look larger
    for name in _CROPS:
        with Image.open(folder / name) as crop:
            found.append(np.asarray(crop.convert("RGB").reduce(4)))
    found.append(np.asarray(Image.fromarray(data.immunohistochemistry()).reduce(2)))
    return tuple(found)
