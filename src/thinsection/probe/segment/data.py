"""Segmentation datasets in the folders that their owners publish. Official test splits stay shut.

| dataset | on disk | split |
|---|---|---|
| pannuke | Fold{1,2}/{images,masks}/fold{1,2}/{images,masks}.npy | Fold1 train, Fold2 validation |
| monusac | MoNuSAC_images_and_annotations/<slide>/<x>.tif and <x>.npy | 3 folds over slides |
| consep | Train/Images/*.png, Train/Labels/*.mat with `type_map` | 3 folds over images |

Images of any size become 256 px squares: bilinear with Pillow's antialias, labels nearest.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.errors import DatasetError
from thinsection.probe.data.images import ImageReader
from thinsection.probe.data.sets import ImageRef
from thinsection.probe.data.tables import unexpected
from thinsection.probe.statistics import Fold, shuffled_folds
from thinsection.types import RgbArray

PX = 256
LabelImage = npt.NDArray[np.uint8]  # (256, 256)

PANNUKE_CLASSES = ("background", "neoplastic", "inflammatory", "connective", "dead", "epithelial")
MONUSAC_CLASSES = ("background", "epithelial", "lymphocyte", "neutrophil", "macrophage")
CONSEP_CLASSES = ("background", "other", "inflammatory", "epithelial", "spindle-shaped")
CONSEP_REMAP = np.array((0, 1, 2, 3, 3, 4, 4, 4), dtype=np.uint8)
MONUSAC_FOLDER = "MoNuSAC_images_and_annotations"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSet:
    """Images with label images, read one by one.

    Attributes:
        name: of the dataset.
        class_names: of labels 0..K-1; 0 is background.
        ids: (N,) names of the images.
        folds: (training rows, validation rows), one or more.
        files: whose contents are the images, in order.
        image: row -> uint8 (256, 256, 3).
        label: row -> uint8 (256, 256).
        split_rule: for the result file.
    """

    name: str
    class_names: tuple[str, ...]
    ids: tuple[str, ...]
    folds: tuple[Fold, ...]
    files: tuple[Path, ...]
    image: Callable[[int], RgbArray]
    label: Callable[[int], LabelImage]
    split_rule: str

    def __len__(self) -> int:
        return len(self.ids)

    def contents_hash(self) -> str:
        """sha256 over the name and the files' contents in their order. Memory: 256 KiB.

        Raises:
            DatasetError: a file cannot be read.
        """
        whole = hashlib.sha256(self.name.encode())
        for path in self.files:
            try:
                with path.open("rb") as file:
                    whole.update(hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise DatasetError(
                    f"data file must be readable, got {str(path)!r}: {error}"
                ) from error
        return whole.hexdigest()

    def image_batches(self, start: int, batch_size: int) -> Iterator[RgbArray]:
        """uint8 (B, 256, 256, 3) from row `start` on. Memory: one batch."""
        for first in range(start, len(self), batch_size):
            last = min(first + batch_size, len(self))
            yield np.stack([self.image(i) for i in range(first, last)])

    def labels(self) -> npt.NDArray[np.uint8]:
        """uint8 (N, 256, 256), checked. Memory: 65,536 N bytes.

        Raises:
            DatasetError: a label that is no class, or an image without a label of its size.
        """
        out = np.empty((len(self), PX, PX), dtype=np.uint8)
        for i in range(len(self)):
            out[i] = self.label(i)
            if out[i].max() >= len(self.class_names):
                raise DatasetError(
                    f"labels must be 0..{len(self.class_names) - 1}, got {out[i].max()} in "
                    f"{self.ids[i]!r} of {self.name}"
                )
        return out


def load_pannuke(root: Path) -> SegmentSet:
    """PanNuke's folds 1 and 2, read image by image; fold 3 is never opened."""
    names = [(f"Fold{k}", f"fold{k}") for k in (1, 2)]
    paths = [
        (root / outer / part / inner / f"{part}.npy")
        for outer, inner in names
        for part in ("images", "masks")
    ]
    if not all(path.is_file() for path in paths):
        raise unexpected(root, "PanNuke", [str(p.relative_to(root)) for p in paths])
    images, masks = ([NpyRows(p) for p in paths[k::2]] for k in (0, 1))
    for path, array, channels in zip(
        paths, [a for pair in zip(images, masks) for a in pair], (3, 6) * 2
    ):
        if array.shape[1:] != (PX, PX, channels):
            raise DatasetError(
                f"{path.stem} must be of shape (N, {PX}, {PX}, {channels}), "
                f"got {array.shape} in {str(path)!r}"
            )
    sizes = [len(a) for a in images]
    if sizes != [len(m) for m in masks]:
        raise DatasetError(
            f"images and masks must be as many, got {sizes} and {[len(m) for m in masks]}"
        )
    first = sizes[0]

    def row(arrays: list[NpyRows], i: int) -> npt.NDArray:
        return arrays[0].row(i) if i < first else arrays[1].row(i - first)

    everything = np.arange(sum(sizes), dtype=np.int64)
    return SegmentSet(
        name="pannuke",
        class_names=PANNUKE_CLASSES,
        ids=tuple(f"fold{k + 1}:{i}" for k, size in enumerate(sizes) for i in range(size)),
        folds=((everything[:first], everything[first:]),),
        files=tuple(paths[::2]),
        image=lambda i: row(images, i).astype(np.uint8),  # published as float64 of whole numbers
        label=lambda i: pannuke_label(row(masks, i)),
        split_rule="Fold1 train, Fold2 validation",
    )


def pannuke_label(mask: npt.NDArray) -> LabelImage:
    """(H, W, 6) instance maps -> (H, W): j + 1 where channel j (0..4) > 0, a later one wins."""
    label = np.zeros(mask.shape[:2], dtype=np.uint8)
    for channel in range(5):
        label[mask[..., channel] > 0] = channel + 1
    return label


def load_monusac(root: Path, *, folds: int = 3, seed: int = 1337) -> SegmentSet:
    """MoNuSAC's training images with rasterised labels; folds keep a slide whole."""
    base = root if root.name == MONUSAC_FOLDER else root / MONUSAC_FOLDER
    images = sorted(base.glob("*/*.tif"))
    without = [p for p in images if not p.with_suffix(".npy").is_file()]
    if not images or without:
        lost = f" beside {without[0].name}" if without else ""
        looked_for = [
            f"{MONUSAC_FOLDER}/<slide>/<x>.tif",
            f"<x>.npy{lost}: the label image (H, W), values 0..{len(MONUSAC_CLASSES) - 1}",
        ]
        raise unexpected(root, "MoNuSAC", looked_for)
    slides = sorted({p.parent.name for p in images})
    rows_of = {s: [i for i, p in enumerate(images) if p.parent.name == s] for s in slides}

    def rows(members: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.array(sorted(i for m in members.tolist() for i in rows_of[slides[m]]), np.int64)

    over_slides = shuffled_folds(len(slides), folds=folds, seed=seed)
    return _from_files(
        "monusac",
        MONUSAC_CLASSES,
        images=images,
        labels=[p.with_suffix(".npy") for p in images],
        folds=tuple((rows(train), rows(val)) for train, val in over_slides),
        split_rule=f"{folds} folds over {len(slides)} slides, seed {seed}",
    )


def load_consep(root: Path, *, folds: int = 3, seed: int = 1337) -> SegmentSet:
    """CoNSeP's training images, seven types remapped to four; `Test` is never opened."""
    images = sorted((root / "Train" / "Images").glob("*.png"))
    labels = [root / "Train" / "Labels" / f"{p.stem}.mat" for p in images]
    without = [p for p in labels if not p.is_file()]
    if not images or without:
        wanted = without[0].name if without else "*.mat"
        raise unexpected(root, "CoNSeP", ["Train/Images/*.png", f"Train/Labels/{wanted}"])
    return _from_files(
        "consep",
        CONSEP_CLASSES,
        images=images,
        labels=labels,
        folds=tuple(shuffled_folds(len(images), folds=folds, seed=seed)),
        split_rule=f"{folds} folds over images, seed {seed}",
    )


SEGMENT_DATASETS: dict[str, Callable[[Path], SegmentSet]] = {
    "pannuke": load_pannuke,
    "monusac": load_monusac,
    "consep": load_consep,
}


def read_label(path: Path) -> npt.NDArray[np.uint8]:
    """The label image of a .npy (as it is) or of a .mat (`type_map`, remapped).

    Raises:
        DatasetError: it cannot be read, or is no label image.
    """
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    try:
        if path.suffix == ".npy":
            label = np.load(path, allow_pickle=False)
        else:
            label = loadmat(path, variable_names=["type_map"])["type_map"]
    except (OSError, ValueError, KeyError, MatReadError, NotImplementedError) as error:
        raise DatasetError(f"label must be readable, got {str(path)!r}: {error}") from error
    top = len(CONSEP_REMAP) if path.suffix == ".mat" else 256
    if label.ndim != 2 or label.min() < 0 or label.max() >= top or (label != label.round()).any():
        raise DatasetError(
            f"label must be whole numbers 0..{top - 1} of shape (H, W), got {label.dtype} "
            f"{label.shape}, {label.min()}..{label.max()} in {str(path)!r}"
        )
    whole: npt.NDArray[np.uint8] = label.astype(np.uint8)
    return CONSEP_REMAP[whole] if path.suffix == ".mat" else whole


def _from_files(
    name: str,
    class_names: tuple[str, ...],
    *,
    images: list[Path],
    labels: list[Path],
    folds: tuple[Fold, ...],
    split_rule: str,
) -> SegmentSet:
    def image(i: int) -> RgbArray:
        picture = Image.fromarray(ImageReader().read(ImageRef(images[i])))
        return np.asarray(picture.resize((PX, PX), Image.Resampling.BILINEAR))

    def label(i: int) -> LabelImage:
        found = read_label(labels[i])
        with Image.open(images[i]) as picture:
            width, height = picture.size
        if found.shape != (height, width):
            raise DatasetError(
                f"label must be of its image's size {(height, width)}, got {found.shape} in "
                f"{str(labels[i])!r}"
            )
        return np.asarray(Image.fromarray(found).resize((PX, PX), Image.Resampling.NEAREST))

    return SegmentSet(
        name=name,
        class_names=class_names,
        ids=tuple(f"{p.parent.name}/{p.stem}" for p in images),
        folds=folds,
        files=tuple(images),
        image=image,
        label=label,
        split_rule=split_rule,
    )


class NpyRows:
    """Rows of a .npy file, read one by one: mapped pages would count as this process's memory.

    Raises:
        DatasetError: not a whole .npy in C order.
    """

    def __init__(self, path: Path) -> None:
        try:
            mapped = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DatasetError(f"array must be a whole .npy, got {str(path)!r}: {error}") from error
        if not mapped.flags.c_contiguous:
            raise DatasetError(f"array must be in C order, got Fortran's in {str(path)!r}")
        self.path, self.shape, self._dtype = path, mapped.shape, mapped.dtype
        self._offset, self._values = mapped.offset, int(np.prod(mapped.shape[1:]))

    def __len__(self) -> int:
        return int(self.shape[0])

    def row(self, i: int) -> npt.NDArray:
        """Row i. Memory: itself."""
        offset = self._offset + i * self._values * self._dtype.itemsize
        flat = np.fromfile(self.path, self._dtype, self._values, offset=offset)
        return flat.reshape(self.shape[1:])
