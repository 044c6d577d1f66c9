"""Segmentation datasets in the folders that their owners publish. Official test splits stay shut.
docs/cache.md tells what is looked for and how it is split.
Images of any size become 256 px squares: bilinear with Pillow's antialias, labels nearest.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy.io import loadmat
from scipy.io.matlab import MatReadError

from thinsection.errors import DatasetError, rewording, slide_boundary
from thinsection.evaluation.cases import Groups, group_rows
from thinsection.evaluation.metrics import Fold
from thinsection.evaluation.splits import shuffled_folds
from thinsection.evaluation.tables import unexpected
from thinsection.probe.data.images import read_image
from thinsection.types import RgbArray

PX = 256
FOLDS = 3
SEED = 1337
LabelImage = npt.NDArray[np.uint8]  # (256, 256)

PANNUKE_CLASSES = (
    "background",
    "neoplastic",
    "inflammatory",
    "connective",
    "dead",
    "epithelial",
)
MONUSAC_CLASSES = ("background", "epithelial", "lymphocyte", "neutrophil", "macrophage")
CONSEP_CLASSES = ("background", "other", "inflammatory", "epithelial", "spindle-shaped")
CONSEP_REMAP = np.array((0, 1, 2, 3, 3, 4, 4, 4), dtype=np.uint8)
BCSS_CLASSES = ("outside", "tumor", "stroma", "inflammatory", "necrosis", "other")
# of its 22 classes; those that are not named here are other
BCSS_REMAP = np.full(256, 5, dtype=np.uint8)
BCSS_REMAP[[0, 1, 19, 20, 2, 3, 10, 11, 4]] = (0, 1, 1, 1, 2, 3, 3, 3, 4)
BCSS_PX = 512  # edge of a square, px at 0.25 µm/px
BCSS_VAL = {"BH", "C8", "A8", "A1", "E9"}
BCSS_TEST = {"OL", "LL", "E2", "EW", "GM", "S3"}
MONUSAC_FOLDER = "MoNuSAC_images_and_annotations"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSet:
    """Images with label images, read one by one."""

    name: str
    class_names: tuple[str, ...]  # of labels 0..K-1; 0 is background
    ids: tuple[str, ...]  # (N,)
    folds: tuple[Fold, ...]
    files: tuple[Path, ...]  # whose contents are the images, in order
    image: Callable[[int], RgbArray]  # of a row, (256, 256, 3)
    label: Callable[[int], LabelImage]  # of a row
    split_rule: str  # for the result file
    groups: Groups | None = None  # whose the images are, where their folders say so
    # why an image cannot be used, by its id
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def readable(self) -> "SegmentSet":
        """The images that can be read, with labels of these classes; the others are left out.

        Every image is decoded once. Memory: one image.

        Raises:
            DatasetError: a fold has no image for training, or none for validation.
        """
        left_out: dict[str, str] = {}
        kept = []
        for row, name in enumerate(self.ids):
            with slide_boundary(name, left_out.__setitem__):
                self.image(row)
                self._class_label(row)
                kept.append(row)
        if not left_out:
            return self
        rows = np.array(kept, np.int64)
        folds = []
        for training, validation in self.folds:
            # places in `rows` of those that are also in a part
            fold = (
                np.flatnonzero(np.isin(rows, training)),
                np.flatnonzero(np.isin(rows, validation)),
            )
            if not all(map(len, fold)):
                reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
                raise DatasetError(
                    f"a fold must have images for training and validation, got {reasons}"
                )
            folds.append(fold)
        files = self.files
        if len(files) == len(self.ids):
            files = tuple(files[row] for row in kept)
        return replace(
            self,
            ids=tuple(self.ids[row] for row in kept),
            folds=tuple(folds),
            files=files,
            image=lambda row: self.image(kept[row]),
            label=lambda row: self.label(kept[row]),
            groups=self.groups and self.groups.take(rows),
            left_out=left_out,
        )

    def contents_hash(self) -> str:
        """sha256 over the name and the files' contents in their order. Memory: 256 KiB."""
        whole = hashlib.sha256(self.name.encode())
        if self.left_out:
            whole.update("\n".join(self.ids).encode())
        for path in self.files:
            rule = "data file must be readable"
            errors = rewording(rule, path, OSError, error=DatasetError)
            with errors, path.open("rb") as file:
                whole.update(hashlib.file_digest(file, "sha256").digest())
        return whole.hexdigest()

    def image_batches(self, start: int, batch_size: int) -> Iterator[RgbArray]:
        """uint8 (B, 256, 256, 3) from row `start` on. Memory: one batch."""
        for first in range(start, len(self), batch_size):
            rows = range(first, min(first + batch_size, len(self)))
            yield np.stack([self.image(i) for i in rows])

    def labels(self) -> npt.NDArray[np.uint8]:
        """uint8 (N, 256, 256), checked to be classes. Memory: 65,536 N bytes."""
        out = np.empty((len(self), PX, PX), dtype=np.uint8)
        for row in range(len(self)):
            out[row] = self._class_label(row)
        return out

    def _class_label(self, row: int) -> LabelImage:
        """The label of a row, checked to be classes."""
        label = self.label(row)
        top = len(self.class_names) - 1
        if label.max() > top:
            raise DatasetError(
                f"labels must be 0..{top}, got {label.max()} in {self.ids[row]!r} of "
                f"{self.name}"
            )
        return label


def load_pannuke(root: Path) -> SegmentSet:
    """PanNuke's folds 1 and 2, read image by image; fold 3 is never opened."""
    paths = [
        root / f"Fold{k}" / part / f"fold{k}" / f"{part}.npy"
        for k, part in product((1, 2), ("images", "masks"))
    ]
    if not all(path.is_file() for path in paths):
        raise unexpected(root, "PanNuke", [str(p.relative_to(root)) for p in paths])
    shapes = [_mapped(path).shape for path in paths]
    for path, shape, channels in zip(paths, shapes, (3, 6, 3, 6), strict=True):
        if shape[1:] != (PX, PX, channels):
            raise DatasetError(
                f"{path.stem} must be of shape (N, {PX}, {PX}, {channels}), "
                f"got {shape} in {str(path)!r}"
            )
    sizes = [shape[0] for shape in shapes[0::2]]
    masks = [shape[0] for shape in shapes[1::2]]
    if sizes != masks:
        raise DatasetError(
            f"images and masks must have equal numbers, got {sizes} and {masks}"
        )

    def image(i: int) -> RgbArray:
        fold, row = places[i]
        # published as float64 of whole numbers
        return np.array(_mapped(paths[2 * fold])[row], np.uint8)

    def label(i: int) -> LabelImage:
        fold, row = places[i]
        return pannuke_label(_mapped(paths[2 * fold + 1])[row])

    places = [(0, row) for row in range(sizes[0])]
    places += [(1, row) for row in range(sizes[1])]
    first, second = np.split(np.arange(len(places)), sizes[:1])
    return SegmentSet(
        name="pannuke",
        class_names=PANNUKE_CLASSES,
        ids=tuple(f"fold{fold + 1}:{row}" for fold, row in places),
        folds=((first, second),),
        files=tuple(paths[::2]),
        image=image,
        label=label,
        split_rule="Fold1 train, Fold2 validation",
    )


def _mapped(path: Path) -> npt.NDArray[np.number]:
    """The array of a .npy, mapped. For one row: pages that stay mapped count as our memory."""
    with rewording(
        "array must be a complete .npy", path, OSError, ValueError, error=DatasetError
    ):
        array: npt.NDArray[np.number] = np.load(path, mmap_mode="r", allow_pickle=False)
    if not array.flags.c_contiguous:
        raise DatasetError(
            f"array must be in C order, got Fortran order in {str(path)!r}"
        )
    return array


def pannuke_label(mask: npt.NDArray[np.number]) -> LabelImage:
    """(H, W, 6) instance maps -> (H, W): j + 1 where channel j (0..4) > 0, a later one wins."""
    label = np.zeros(mask.shape[:2], dtype=np.uint8)
    for channel in range(5):
        label[mask[..., channel] > 0] = channel + 1
    return label


def load_monusac(root: Path) -> SegmentSet:
    """MoNuSAC's training images with rasterised labels; folds keep a slide whole."""
    base = root if root.name == MONUSAC_FOLDER else root / MONUSAC_FOLDER
    images = sorted(base.glob("*/*.tif"))
    without = [p for p in images if not p.with_suffix(".npy").is_file()]
    if not images or without:
        beside = f" beside {without[0].name}" if without else ""
        content = f"the label image (H, W), values 0..{len(MONUSAC_CLASSES) - 1}"
        raise unexpected(
            root,
            "MoNuSAC",
            [f"{MONUSAC_FOLDER}/<slide>/<x>.tif", f"<x>.npy{beside}: {content}"],
        )
    slide_by_image = [path.parent.name for path in images]
    slides, slide_index = np.unique(slide_by_image, return_inverse=True)
    folds = []
    for train, val in shuffled_folds(len(slides), folds=FOLDS, seed=SEED):
        in_train = np.isin(slide_index, train)
        in_val = np.isin(slide_index, val)
        folds.append((np.flatnonzero(in_train), np.flatnonzero(in_val)))
    return _from_files(
        "monusac",
        MONUSAC_CLASSES,
        images,
        [path.with_suffix(".npy") for path in images],
        folds=folds,
        split_rule=f"{FOLDS} folds over {len(slides)} slides, seed {SEED}",
        groups=group_rows(slide_by_image, where=repr(str(base))),
    )


def load_consep(root: Path) -> SegmentSet:
    """CoNSeP's training images, seven types remapped to four; `Test` is never opened."""
    images = sorted((root / "Train" / "Images").glob("*.png"))
    labels = [root / "Train" / "Labels" / f"{p.stem}.mat" for p in images]
    without = [p for p in labels if not p.is_file()]
    if not images or without:
        missing = without[0].name if without else "*.mat"
        raise unexpected(
            root, "CoNSeP", ["Train/Images/*.png", f"Train/Labels/{missing}"]
        )
    return _from_files(
        "consep",
        CONSEP_CLASSES,
        images,
        labels,
        folds=shuffled_folds(len(images), folds=FOLDS, seed=SEED),
        split_rule=f"{FOLDS} folds over images, seed {SEED}",
    )


def load_bcss(root: Path) -> SegmentSet:
    """BCSS' regions as squares of 512 px at 0.25 µm/px; eva's institutes validate, test stays shut.

    Squares that lie outside the region by half are left out. eva leaves `tumor` itself among
    `other`; here it is tumor, as in the challenge's baseline.
    """
    images = sorted((root / "rgbs_colorNormalized").glob("*.png"))
    masks = [root / "masks" / path.name for path in images]
    if not images or not all(mask.is_file() for mask in masks):
        raise unexpected(
            root, "BCSS", ["rgbs_colorNormalized/*.png", "masks/<the same name>.png"]
        )
    # squares that lie inside their region by half
    places: list[tuple[int, int, int]] = []
    institutes = [path.stem.split("-")[1] for path in images]
    for i, mask in enumerate(masks):
        if institutes[i] in BCSS_TEST:
            continue
        inside = _picture(mask) > 0
        h = inside.shape[0] // BCSS_PX
        w = inside.shape[1] // BCSS_PX
        squares = inside[: h * BCSS_PX, : w * BCSS_PX]
        share = squares.reshape(h, BCSS_PX, w, BCSS_PX).mean(axis=(1, 3))
        places += [(i, y, x) for y, x in np.argwhere(share >= 0.5)]
    in_val = np.array([institutes[i] in BCSS_VAL for i, _, _ in places])
    if not in_val.any() or in_val.all():
        raise DatasetError(f"BCSS must contain both splits, got {set(institutes)}")

    def square(
        paths: list[Path], row: int, resampling: Image.Resampling
    ) -> npt.NDArray[np.uint8]:
        i, y, x = places[row]
        rows = slice(y * BCSS_PX, (y + 1) * BCSS_PX)
        columns = slice(x * BCSS_PX, (x + 1) * BCSS_PX)
        part = np.ascontiguousarray(_picture(paths[i])[rows, columns])
        return np.asarray(Image.fromarray(part).resize((PX, PX), resampling))

    return SegmentSet(
        name="bcss",
        class_names=BCSS_CLASSES,
        ids=tuple(f"{images[i].stem}:{x}x{y}" for i, y, x in places),
        folds=((np.flatnonzero(~in_val), np.flatnonzero(in_val)),),
        files=tuple(images),
        image=lambda row: square(images, row, Image.Resampling.BILINEAR)[..., :3],
        label=lambda row: BCSS_REMAP[square(masks, row, Image.Resampling.NEAREST)],
        split_rule="eva's institutes: BH, C8, A8, A1 and E9 validate",
    )


@lru_cache(maxsize=2)  # an image and its mask, as rows come in order
def _picture(path: Path) -> npt.NDArray[np.uint8]:
    with rewording("image must be readable", path, OSError, error=DatasetError):
        return np.asarray(Image.open(path))


SEGMENT_DATASETS = {
    "pannuke": load_pannuke,
    "monusac": load_monusac,
    "consep": load_consep,
    "bcss": load_bcss,
}


def read_label(path: Path) -> npt.NDArray[np.uint8]:
    """The label image of a .npy (as it is) or of a .mat (`type_map`, remapped)."""
    is_mat = path.suffix == ".mat"
    errors = (OSError, ValueError, KeyError, MatReadError, NotImplementedError)
    with rewording("label must be readable", path, *errors, error=DatasetError):
        label = (
            loadmat(path, variable_names=["type_map"])["type_map"]
            if is_mat
            else np.load(path)
        )
    top = len(CONSEP_REMAP) - 1 if is_mat else 255
    low = label.min()
    high = label.max()
    in_range = low >= 0 and high <= top
    if label.ndim != 2 or not in_range or (label != label.round()).any():
        raise DatasetError(
            f"label must have whole numbers 0..{top} of shape (H, W), got {label.dtype} "
            f"{label.shape}, {low}..{high} in {str(path)!r}"
        )
    whole: npt.NDArray[np.uint8] = label.astype(np.uint8)
    return CONSEP_REMAP[whole] if is_mat else whole


def _from_files(
    name: str,
    class_names: tuple[str, ...],
    images: list[Path],
    labels: list[Path],
    *,
    folds: list[Fold],
    split_rule: str,
    groups: Groups | None = None,
) -> SegmentSet:
    """Images of any size with their labels."""

    def image(i: int) -> RgbArray:
        picture = Image.fromarray(read_image(images[i]))
        return np.asarray(picture.resize((PX, PX), Image.Resampling.BILINEAR))

    def label(i: int) -> LabelImage:
        classes = read_label(labels[i])
        with Image.open(images[i]) as picture:
            size = (picture.height, picture.width)
        if classes.shape != size:
            raise DatasetError(
                f"label must have the size of its image, {size}, got {classes.shape} in "
                f"{str(labels[i])!r}"
            )
        return np.asarray(
            Image.fromarray(classes).resize((PX, PX), Image.Resampling.NEAREST)
        )

    return SegmentSet(
        name=name,
        class_names=class_names,
        ids=tuple(f"{path.parent.name}/{path.stem}" for path in images),
        folds=tuple(folds),
        files=tuple(images),
        image=image,
        label=label,
        split_rule=split_rule,
        groups=groups,
    )
