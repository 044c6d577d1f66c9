"""Tissue masks by another tool: `python tissue_masks.py TOOL FOLDER`.

FOLDER has, for each slide, NAME.tif (one level) and NAME.png (8 µm/px, or coarser where the slide
is). Both files state their resolution. The masks go to NAME.TOOL.mask.png, of any size, over the
whole slide. Nothing of thinsection is imported.

CLAM's own code segments the picture as level of a slide of 0.25 µm/px, with the parameters that
CLAM publishes for TCGA (presets/tcga.csv) and, for 'clam_biopsy', for biopsies. The environment
variable THINSECTION_TEST_CLAM names a checkout of mahmoodlab/CLAM.
"""

import os
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

LEVEL_0_MPP = 0.25
UM_PER_INCH = 25_400.0
# presets/tcga.csv and presets/bwh_biopsy.csv of CLAM
CLAM = {
    "clam": (
        {"sthresh": 8, "mthresh": 7, "close": 4, "use_otsu": False},
        {"a_t": 16, "a_h": 4, "max_n_holes": 8},
    ),
    "clam_otsu": (
        {"sthresh": 8, "mthresh": 7, "close": 4, "use_otsu": True},
        {"a_t": 16, "a_h": 4, "max_n_holes": 8},
    ),
    "clam_biopsy": (
        {"sthresh": 15, "mthresh": 11, "close": 2, "use_otsu": False},
        {"a_t": 1, "a_h": 1, "max_n_holes": 2},
    ),
}


def mpp_of(picture: Image.Image) -> float:
    """µm per px that the file of a picture states."""
    return UM_PER_INCH / picture.info["dpi"][0]


class Picture:
    """An OpenSlide object of one level, for CLAM."""

    def __init__(self, path: Path) -> None:
        opened = Image.open(path)
        self.mpp = mpp_of(opened)
        self.image = opened.convert("RGB")

    def read_region(self, *place: object) -> Image.Image:
        return self.image


def clam(tool: str, path: Path) -> np.ndarray:
    """CLAM's `segmentTissue`: contours minus holes."""
    sys.path.insert(0, os.environ["THINSECTION_TEST_CLAM"])
    import cv2
    from wsi_core.WholeSlideImage import WholeSlideImage

    picture = Picture(path.with_suffix(".png"))
    downsample = picture.mpp / LEVEL_0_MPP
    slide = WholeSlideImage.__new__(WholeSlideImage)
    slide.wsi = picture
    slide.level_dim = [picture.image.size]
    slide.level_downsamples = [(downsample, downsample)]
    segmentation, areas = CLAM[tool]
    mask = np.zeros(picture.image.size[::-1], np.uint8)
    try:
        slide.segmentTissue(seg_level=0, filter_params=areas, **segmentation)
    except np.exceptions.AxisError:
        # CLAM stops so where it finds no contour: on a grey slide, for example
        return mask
    for contour, holes in zip(slide.contours_tissue, slide.holes_tissue):
        one = np.zeros_like(mask)
        cv2.drawContours(one, [(contour / downsample).astype(int)], -1, 1, cv2.FILLED)
        for hole in holes:
            cv2.drawContours(one, [(hole / downsample).astype(int)], -1, 0, cv2.FILLED)
        mask |= one
    return mask


def lazyslide(tool: str, path: Path) -> np.ndarray:
    """LazySlide's `find_tissues` with its defaults, on the only level; it asks for 4 µm/px."""
    import lazyslide as zs
    from wsidata import open_wsi

    wsi = open_wsi(str(path.with_suffix(".tif")), store=None)
    height, width = wsi.properties.shape
    image = Image.new("L", (width, height), 0)
    if zs.pp.find_tissues(wsi) is False:
        return np.asarray(image)
    pen = ImageDraw.Draw(image)
    for polygon in wsi.shapes["tissues"].geometry:
        pen.polygon(list(polygon.exterior.coords), fill=1)
        for hole in polygon.interiors:
            pen.polygon(list(hole.coords), fill=0)
    return np.asarray(image)


def tiatoolbox(tool: str, path: Path) -> np.ndarray:
    """TIAToolbox's `MorphologicalMasker`; its `tissue_mask` asks for 8 µm/px."""
    from tiatoolbox.tools.tissuemask import MorphologicalMasker

    picture = Picture(path.with_suffix(".png"))
    masker = MorphologicalMasker(mpp=picture.mpp)
    return masker.fit_transform([np.asarray(picture.image)])[0].astype(np.uint8)


def trident(tool: str, path: Path) -> np.ndarray:
    """TRIDENT's segmenter 'otsu' (0: tissue), on the picture."""
    from trident.segmentation_models.model_zoo.otsu import apply_otsu_thresholding

    return 1 - apply_otsu_thresholding(
        np.asarray(Picture(path.with_suffix(".png")).image)
    )


TOOLS = {
    "lazyslide": lazyslide,
    "tiatoolbox": tiatoolbox,
    "trident_otsu": trident,
    **dict.fromkeys(CLAM, clam),
}


def main() -> None:
    """Writes a mask for each slide of the folder."""
    tool = sys.argv[1]
    for path in sorted(Path(sys.argv[2]).glob("*.tif")):
        mask = TOOLS[tool](tool, path)
        image = Image.fromarray((np.asarray(mask) > 0).astype(np.uint8) * 255)
        image.save(path.with_suffix(f".{tool}.mask.png"))


if __name__ == "__main__":
    main()
