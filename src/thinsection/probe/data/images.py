"""Public image datasets in the folders that their owners publish, and images to embeddings.

Official test splits stay shut. docs/probes.md tells what each layout looks for.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from thinsection.config import from_mapping, read_toml
from thinsection.errors import DatasetError, rewording, slide_boundary
from thinsection.evaluation import tables
from thinsection.evaluation.embeddings import Embeddings
from thinsection.evaluation.metrics import IndexArray
from thinsection.evaluation.tables import SPLITS, TRAIN, VAL, TextRow, read_rows
from thinsection.files.atomic import read_json
from thinsection.probe.data.sets import (
    ImageRef,
    LabelledRows,
    Square,
    TileSet,
    label_rows,
    left_out_fact,
)
from thinsection.types import MIB, RgbArray

if TYPE_CHECKING:
    import torch

    from thinsection.encode import TileEncoder

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")
BATCH_BYTES = 64 * MIB  # of decoded images at a time (one image may be larger)
# rows of BACH that validate, of the 400 images in the order of their names
BACH_VAL = ((41, 59), (60, 90), (139, 169), (240, 258), (260, 273), (345, 368))

# edge of the square around a cell of OCELOT, px of 0.2 µm
OCELOT_PX = 96

Encode = Callable[[RgbArray], "torch.Tensor"]  # uint8 (B, H, W, 3) to (B, D)
LeaveOut = Callable[[str, str], None]  # receives an image and why it is left out
LabelledImage = tuple[ImageRef, TextRow]  # the row as a manifest would have it
BY_FOLDER = "(?P<split>[^/]+)/(?P<label>[^/]+)"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Form of a dataset's folder, a table of `layouts.toml`."""

    kind: str  # in errors
    looked_for: tuple[str, ...]  # patterns, something of each must be there
    form: str = BY_FOLDER  # of a path: what names label, split, slide_id and case_id
    val: str = VAL  # the word for split that validates; all others train
    rule: str = "eva's"  # of the split; {}: the one drawn
    class_names: tuple[str, ...] = ()  # of numbers; (): the labels as they are
    places: tuple[str, ...] = ("", "*")  # below the folder that is named
    name: str = ""  # in results, where it is not the layout's


def load_images(layout: str, root: Path, *, seed: int = 1337) -> LabelledRows:
    """The labelled images of a dataset's folder, split as published, else drawn by patient.

    Raises DatasetError: it shows what is there and what was looked for.
    """
    form = LAYOUTS[layout]
    base = _base_folder(root, form)
    labelled = [*_READERS.get(layout, _named_images)(base, form)]
    rows = [row for _, row in labelled]
    return label_rows(
        rows,
        root.name if layout == "folder" else form.name or layout,
        where=repr(str(base)),
        seed=seed,
        class_names=form.class_names or sorted({row["label"] for row in rows}),
        rule=form.rule,
        images=[image for image, _ in labelled],
    )


def _base_folder(root: Path, layout: Layout) -> Path:
    """The folder, at or below a root, that holds all that the layout looks for."""
    for place in layout.places:
        for folder in sorted(root.glob(place)) if place else [root]:
            if all(any(folder.glob(pattern)) for pattern in layout.looked_for):
                return folder
    raise tables.unexpected(root, layout.kind, layout.looked_for)


def _named_images(base: Path, layout: Layout) -> Iterator[LabelledImage]:
    """Images whose paths name their label."""
    for pattern in layout.looked_for:
        for path in sorted(base.glob(pattern)):
            place = path.relative_to(base).as_posix()
            match = re.match(layout.form, place)
            if match is None:
                raise DatasetError(
                    f"{layout.kind} file must be named like {layout.form}, got {place!r}"
                )
            row = {name: text or "" for name, text in match.groupdict().items()}
            if "split" in row:
                row["split"] = VAL if row["split"] == layout.val else TRAIN
            if row["label"].isdigit():
                row["label"] = layout.class_names[int(row["label"])]
            yield ImageRef(path), row


def _folders(base: Path, layout: Layout) -> Iterator[LabelledImage]:
    """Images in one folder per class, with or without split folders above."""
    splits = {SPLITS.get(p.name.lower(), ""): p for p in sorted(base.glob("*/"))}
    if {TRAIN, VAL} <= splits.keys():
        train = _images_by_class(splits[TRAIN])
        val = _images_by_class(splits[VAL])
        if [*train] != [*val] or len(train) < 2:
            raise DatasetError(
                f"train and val must contain the same >= 2 class folders, got {[*train]} and "
                f"{[*val]} in {str(base)!r}"
            )
        images_by_split = {TRAIN: train, VAL: val}
    else:
        images_by_split = {"": _images_by_class(base)}
        if splits.keys() - {""} or len(images_by_split[""]) < 2:
            looked_for = [
                "train/<class>/* and val/<class>/*",
                "<class>/* (at least two classes)",
            ]
            raise tables.unexpected(base, layout.kind, looked_for)
    for split, classes in images_by_split.items():
        for label, paths in classes.items():
            for path in paths:
                yield ImageRef(path), {"label": label, "split": split}


def _images_by_class(folder: Path) -> dict[str, list[Path]]:
    """Images of each folder of a class, in the order of their paths."""
    images: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*/*")):
        if path.suffix.lower() in IMAGE_SUFFIXES:
            images.setdefault(path.parent.name, []).append(path)
    return images


def _mhist(base: Path, layout: Layout) -> Iterator[LabelledImage]:
    """Only rows of its 'train' partition."""
    table = base / "annotations.csv"
    label = "Majority Vote Label"
    for row in read_rows(table, ("Image Name", label, "Partition")):
        if tables.split_name(row["Partition"], str(table)) == TRAIN:
            path = base / "images" / row["Image Name"]
            if not path.is_file():
                raise DatasetError(
                    f"image must exist, got {str(path)!r}, which {str(table)!r} names"
                )
            yield ImageRef(path), {"label": row[label]}


def _unitopatho(base: Path, layout: Layout) -> Iterator[LabelledImage]:
    """train.csv trains, test.csv validates, as in eva (by patient)."""
    rows: dict[str, TextRow] = {}
    for table, split in zip(layout.looked_for[1:], (TRAIN, VAL), strict=True):
        for row in read_rows(base / table, ("image_id", "top_label")):
            label = layout.class_names[int(row["top_label"])]
            rows[row["image_id"]] = {"label": label, "split": split}
    paths = sorted(base.glob(layout.looked_for[0]))
    absent = sorted(rows.keys() - {path.name for path in paths})
    if absent:
        raise DatasetError(f"image must exist, got {absent[:1]}, which the tables name")
    for path in paths:
        if path.name in rows:
            yield ImageRef(path), rows[path.name]


def _pcam(base: Path, layout: Layout) -> Iterator[LabelledImage]:
    """Rows of HDF5 files."""
    import h5py

    paths = [base / name for name in layout.looked_for]
    for split, x, y in zip((TRAIN, VAL), paths[::2], paths[1::2], strict=True):
        rule = "PCam file must contain 'x' or 'y'"
        whole = rewording(rule, x, OSError, KeyError, error=DatasetError)
        with whole, h5py.File(x, "r") as images, h5py.File(y, "r") as labels:
            num_images = len(images["x"])
            truth = np.asarray(labels["y"]).ravel().tolist()
        if num_images != len(truth):
            raise DatasetError(
                f"x and y must have the same number of rows, got {num_images} and {len(truth)} "
                f"in {str(x)!r}"
            )
        row_by_label = [{"label": name, "split": split} for name in layout.class_names]
        for number, label in enumerate(truth):
            yield ImageRef(x, number), row_by_label[label]


def _bach(base: Path, layout: Layout) -> Iterator[LabelledImage]:
    """400 microscopy images, split by patient as eva does."""
    labelled = [*_named_images(base, layout)]
    if len(labelled) != 400:
        raise DatasetError(
            f"BACH must have 400 images, got {len(labelled)} in {str(base)!r}"
        )
    for number, (image, row) in enumerate(labelled):
        validates = any(first <= number < end for first, end in BACH_VAL)
        yield image, {**row, "split": VAL if validates else TRAIN}


def _ocelot(base: Path, layout: Layout) -> Iterator[LabelledImage]:
    """Squares around the annotated cells of the cell patches; the test set stays shut."""
    slides = _ocelot_slides(base / "metadata.json")
    for split in (TRAIN, VAL):
        for table in sorted((base / "annotations" / split / "cell").glob("*.csv")):
            image = base / "images" / split / "cell" / f"{table.stem}.jpg"
            if not image.is_file():
                raise DatasetError(
                    f"image must exist, got no {str(image)!r}, which {str(table)!r} annotates"
                )
            if table.stem not in slides:
                raise DatasetError(
                    f"metadata must have each sample, got no {table.stem!r} in "
                    f"{str(base / 'metadata.json')!r}"
                )
            row = {"split": split, "slide_id": slides[table.stem]}
            for x, y, number in _ocelot_cells(table):
                square = Square(x, y, OCELOT_PX)
                label = layout.class_names[number - 1]
                yield ImageRef(image, square=square), {**row, "label": label}


def _ocelot_slides(path: Path) -> dict[str, str]:
    """Slide of each sample of OCELOT."""
    errors = (OSError, ValueError, KeyError, TypeError, AttributeError)
    rule = "metadata must be JSON with sample_pairs and slide_name"
    with rewording(rule, path, *errors, error=DatasetError):
        pairs = read_json(path)["sample_pairs"]
        return {name: str(pair["slide_name"]) for name, pair in pairs.items()}


def _ocelot_cells(table: Path) -> Iterator[tuple[int, int, int]]:
    """x, y and number of the class of each cell of a table without header."""
    with rewording("cells must be readable", table, OSError, error=DatasetError):
        lines = table.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        match = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*,\s*([12])\s*", line)
        if match is None:
            raise DatasetError(
                "a cell must be x,y,class with class 1 (other cell) or 2 (tumour cell), got "
                f"{line!r} in line {number} of {str(table)!r}"
            )
        x, y, label = match.groups()
        yield int(x), int(y), int(label)


_READERS = {
    "folder": _folders,
    "mhist": _mhist,
    "pcam": _pcam,
    "unitopatho": _unitopatho,
    "bach": _bach,
    "ocelot": _ocelot,
}
LAYOUTS = {
    name: from_mapping(Layout, table)
    for name, table in read_toml(Path(__file__).with_name("layouts.toml")).items()
}


def embed_rows(
    data: LabelledRows, encoder: "TileEncoder", *, batch_size: int = 64
) -> TileSet:
    """The set with embeddings in place of images; the encoder does its own preprocessing.

    An image that cannot be read is left out; the facts say which, and why.

    Memory: 4 N D + 2 BATCH_BYTES (or two images) + the encoder.
    """
    left_out: dict[str, str] = {}

    def embed(rows: IndexArray) -> tuple[Embeddings, IndexArray]:
        vectors, kept = embed_images(
            [data.images[i] for i in rows],
            embeddings_by(encoder),
            batch_size=batch_size,
            leave_out=left_out.__setitem__,
        )
        return vectors, rows[kept]

    train_vectors, train = embed(data.fold[0])
    val_vectors, val = embed(data.fold[1])
    return replace(data, fold=(train, val)).tile_set(
        (train_vectors, val_vectors),
        **left_out_fact(left_out),
        **encoder_facts(encoder),
    )


def encoder_facts(encoder: "TileEncoder") -> dict[str, str]:
    """Facts of the encoder for a result file."""
    return {
        # a name that tells apart the input sizes of one encoder
        "encoder": encoder.origin.name or encoder.spec.name,
        "precision": encoder.precision,
        "engine": encoder.engine,
        "fingerprint": encoder.fingerprint,
        "weights_sha256": encoder.weights_hash,
        "encoder_commit": encoder.spec.revision or "none",
    }


def embed_images(
    images: Sequence[ImageRef],
    encode: Encode,
    *,
    batch_size: int = 64,
    leave_out: LeaveOut | None = None,
) -> tuple[Embeddings, IndexArray]:
    """Embeddings (M, D) of the images that can be read, in their order, and their rows (M,).

    Memory: 4 N D + 2 BATCH_BYTES (or two images) + the encoder.

    Args:
        images: N images.
        encode: the encoder.
        batch_size: most images of a batch.
        leave_out: receives the place of an image that cannot be read, and the reason; None raises
            the error.

    Raises DatasetError: no image can be read, or without `leave_out` one cannot.
    """
    reasons: dict[str, str] = {}
    kept: list[int] = []

    def report(place: str, reason: str) -> None:
        reasons[place] = reason
        if leave_out is not None:
            leave_out(place, reason)

    def readable() -> Iterator[RgbArray]:
        listener = None if leave_out is None else report
        for row, image in enumerate(read_images(images, listener)):
            if image is not None:
                kept.append(row)
                yield image

    out = np.empty((0, 0), dtype=np.float32)
    done = 0
    for batch in image_batches(readable(), batch_size):
        vectors = encode(batch).float().cpu().numpy()
        if not done:
            out = np.empty((len(images), vectors.shape[1]), dtype=np.float32)
        out[done : done + len(batch)] = vectors
        done += len(batch)
    if not images:
        raise DatasetError("images must be passed to embed, got none")
    if not done:
        first = next(iter(reasons.values()))
        raise DatasetError(
            f"an image of {len(images)} must be readable, got none: {first}"
        )
    return out[:done], np.array(kept, dtype=np.int64)


def embeddings_by(encoder: "TileEncoder") -> Encode:
    """Function that gives an encoder's embeddings of a batch, checked."""
    from thinsection.encode.answers import encoded

    return lambda batch: encoded(encoder, batch)[0]


def class_and_mean(encoder: "TileEncoder") -> tuple[Encode, str]:
    """PathoROB's embedding, [CLS | mean of the patch tokens], and what it is made of.

    An encoder that joins both already, or has no class token, gives its own embedding.
    """
    import torch

    from thinsection.encode.answers import encoded

    if encoder.spec.pooling != "cls" or not encoder.has_tokens:
        return (
            embeddings_by(encoder),
            f"the output that the encoder declares ({encoder.spec.pooling})",
        )

    def encode(batch: RgbArray) -> torch.Tensor:
        embeddings, tokens = encoded(encoder, batch, with_tokens=True)
        return torch.cat([embeddings, tokens.mean(dim=1)], dim=1)

    return encode, "class token and mean of the patch tokens"


def image_batches(images: Iterable[RgbArray], batch_size: int) -> Iterator[RgbArray]:
    """Batches uint8 (B, H, W, 3) in order; a batch ends where the image size changes.

    Memory: 2 BATCH_BYTES, or two images: those read, and the batch made of them.
    """
    pending: list[RgbArray] = []
    for image in images:
        full = (
            len(pending) == batch_size or sum(i.nbytes for i in pending) >= BATCH_BYTES
        )
        if pending and (full or pending[0].shape != image.shape):
            yield np.stack(pending)
            pending = []
        pending.append(image)
    if pending:
        yield np.stack(pending)


def read_images(
    refs: Iterable[ImageRef], leave_out: LeaveOut | None = None
) -> Iterator[RgbArray | None]:
    """Each image as uint8 (H, W, 3), RGB; an HDF5 file is opened once for its run of rows.

    None for an image that cannot be read, which `leave_out` receives with the reason; without
    `leave_out` the error is raised.

    Memory: one image.
    """
    for path, run in groupby(refs, key=lambda ref: ref.path):
        of_file = list(run)
        if of_file[0].row is not None:
            yield from _read_rows(path, of_file, leave_out)
            continue
        pixels = None
        with slide_boundary(str(path), leave_out):
            pixels = read_image(path)
        for ref in of_file:
            if ref.square is None or pixels is None:
                yield pixels
                continue
            part = None
            with slide_boundary(ref.place, leave_out):
                part = _cut(pixels, ref)
            yield part


def _cut(pixels: RgbArray, ref: ImageRef) -> RgbArray:
    """The square of an image; black beyond its edges."""
    from PIL import Image

    square = ref.square
    assert square is not None
    height, width = pixels.shape[:2]
    if not (0 <= square.x < width and 0 <= square.y < height):
        raise DatasetError(
            f"point must lie in its image of {width} x {height} px, got {square.x}, {square.y} in "
            f"{str(ref.path)!r}"
        )
    left = square.x - square.size // 2
    top = square.y - square.size // 2
    box = (left, top, left + square.size, top + square.size)
    return np.asarray(Image.fromarray(pixels).crop(box))


def read_image(path: Path) -> RgbArray:
    """The pixels of an image file, uint8 (H, W, 3), RGB."""
    from PIL import Image

    # Pillow warns of a TIFF that is cut short, which is an error where warnings are errors
    damage = (OSError, SyntaxError, ValueError, UserWarning)
    errors = (*damage, Image.DecompressionBombError)
    with (
        rewording("image must be readable", path, *errors, error=DatasetError),
        Image.open(path) as image,
    ):
        return np.asarray(image.convert("RGB"))


def _read_rows(
    path: Path, refs: Sequence[ImageRef], leave_out: LeaveOut | None
) -> Iterator[RgbArray | None]:
    """Rows of a dataset of an HDF5 file."""
    import h5py

    errors = (OSError, KeyError, ValueError, IndexError)
    rewords = partial(
        rewording, "image must be readable", path, *errors, error=DatasetError
    )
    with ExitStack() as stack:
        images = None
        # a file that cannot be opened has no row that can be read
        with slide_boundary(str(path), leave_out), rewords():
            images = stack.enter_context(h5py.File(path, "r"))[refs[0].dataset]
        for ref in refs:
            pixels = None
            if images is not None:
                with slide_boundary(ref.place, leave_out), rewords():
                    pixels = np.asarray(images[ref.row], dtype=np.uint8)
            yield pixels
