"""Public image datasets in the folders that their owners publish, and images to embeddings.

Official test splits stay shut. docs/probes.md tells what each layout looks for.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from thinsection.errors import DatasetError, rewording
from thinsection.evaluation import tables
from thinsection.evaluation.embeddings import Embeddings
from thinsection.evaluation.metrics import IndexArray
from thinsection.evaluation.tables import SPLITS, TRAIN, VAL, TextRow, check, read_rows
from thinsection.probe.data.sets import ImageRef, LabelledRows, TileSet, label_rows
from thinsection.types import MIB, RgbArray

if TYPE_CHECKING:
    import torch

    from thinsection.encode import TileEncoder

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")
BATCH_BYTES = 64 * MIB  # of decoded images at a time (one image may be larger)
# rows of BACH that validate, of the 400 images in the order of their names
BACH_VAL = ((41, 59), (60, 90), (139, 169), (240, 258), (260, 273), (345, 368))

Encode = Callable[[RgbArray], "torch.Tensor"]  # uint8 (B, H, W, 3) to (B, D)
LabelledImage = tuple[ImageRef, TextRow]  # the row as a manifest would have it
BY_FOLDER = "(?P<split>[^/]+)/(?P<label>[^/]+)"


class Layout(NamedTuple):
    """How a dataset lies in its folder."""

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
    known = LAYOUTS[layout]
    places = [
        p
        for place in known.places
        for p in (sorted(root.glob(place)) if place else [root])
    ]
    whole = (
        p for p in places if all(any(p.glob(pattern)) for pattern in known.looked_for)
    )
    if (base := next(whole, None)) is None:
        raise tables.unexpected(root, known.kind, known.looked_for)
    found = [*_READERS.get(layout, _told)(base, known)]
    rows, images = [row for _, row in found], [image for image, _ in found]
    names = known.class_names or sorted({row["label"] for row in rows})
    told: dict[str, Any] = {"class_names": names, "rule": known.rule, "images": images}
    name = root.name if layout == "folder" else known.name or layout
    return label_rows(rows, name, where=repr(str(base)), seed=seed, **told)


def _told(base: Path, layout: Layout) -> Iterator[LabelledImage]:
    """Images whose paths say what they are."""
    for path in (
        path for pattern in layout.looked_for for path in sorted(base.glob(pattern))
    ):
        found = re.match(layout.form, place := path.relative_to(base).as_posix())
        rule = f"{layout.kind} file must be named as {layout.form}"
        row = {k: v or "" for k, v in found.groupdict().items()} if found else {}
        check(row, rule, repr(place))
        if "split" in row:
            row["split"] = VAL if row["split"] == layout.val else TRAIN
        if row["label"].isdigit():
            row["label"] = layout.class_names[int(row["label"])]
        yield ImageRef(path), row


def _folders(base: Path, layout: Layout) -> Iterator[LabelledImage]:
    """Images in one folder per class, with or without split folders above."""

    def by_class(folder: Path) -> dict[str, list[Path]]:
        paths = [
            p for p in sorted(folder.glob("*/*")) if p.suffix.lower() in IMAGE_SUFFIXES
        ]
        return {name: [*of] for name, of in groupby(paths, key=lambda p: p.parent.name)}

    splits = {SPLITS.get(p.name.lower(), ""): p for p in sorted(base.glob("*/"))}
    if {TRAIN, VAL} <= splits.keys():
        found = {split: by_class(splits[split]) for split in (TRAIN, VAL)}
        train, val = ([*of_split] for of_split in found.values())
        rule = "train and val must hold the same >= 2 class folders"
        check(
            train == val and len(train) >= 2,
            rule,
            f"{train} and {val} in {str(base)!r}",
        )
    else:
        found = {"": by_class(base)}
        if splits.keys() - {""} or len(found[""]) < 2:
            looked_for = [
                "train/<class>/* and val/<class>/*",
                "<class>/* (at least two classes)",
            ]
            raise tables.unexpected(base, layout.kind, looked_for)
    for split, classes in found.items():
        for label, paths in classes.items():
            yield from (
                (ImageRef(path), {"label": label, "split": split}) for path in paths
            )


def _mhist(base: Path, layout: Layout) -> Iterator[LabelledImage]:
    """Only rows of its 'train' partition."""
    table, label = base / "annotations.csv", "Majority Vote Label"
    for row in read_rows(table, ("Image Name", label, "Partition")):
        if tables.split_name(row["Partition"], str(table)) == TRAIN:
            path = base / "images" / row["Image Name"]
            check(
                path.is_file(),
                "image must exist",
                f"{str(path)!r}, named in {str(table)!r}",
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
    check(not absent, "image must exist", f"{absent[:1]}, named in its tables")
    yield from (
        (ImageRef(path), rows[path.name]) for path in paths if path.name in rows
    )


def _pcam(base: Path, layout: Layout) -> Iterator[LabelledImage]:
    """Rows of HDF5 files."""
    import h5py

    paths = [base / name for name in layout.looked_for]
    for split, x, y in zip((TRAIN, VAL), paths[::2], paths[1::2], strict=True):
        rule = "PCam file must hold 'x' or 'y'"
        whole = rewording(rule, x, OSError, KeyError, error=DatasetError)
        with whole, h5py.File(x, "r") as images, h5py.File(y, "r") as labels:
            n, truth = len(images["x"]), np.asarray(labels["y"]).ravel().tolist()
        found = f"{n} and {len(truth)} in {str(x)!r}"
        check(n == len(truth), "x and y must have the same N", found)
        shared = [{"label": name, "split": split} for name in layout.class_names]
        yield from ((ImageRef(x, i), shared[label]) for i, label in enumerate(truth))


def _bach(base: Path, layout: Layout) -> Iterator[LabelledImage]:
    """400 microscopy images, split by patient as eva does."""
    found, val = [*_told(base, layout)], {i for span in BACH_VAL for i in range(*span)}
    check(
        len(found) == 400, "BACH must be 400 images", f"{len(found)} in {str(base)!r}"
    )
    for i, (image, row) in enumerate(found):
        yield image, {**row, "split": VAL if i in val else TRAIN}


_READERS = {"folder": _folders, "mhist": _mhist, "pcam": _pcam}
_READERS |= {"unitopatho": _unitopatho, "bach": _bach}
_BRACS = ("0_N", "1_PB", "2_UDH", "3_FEA", "4_ADH", "5_DCIS", "6_IC")
_BREAKHIS, _ZOOM = "histology_slides/breast", "/*/40X/*.png"
_FOUR = ["benign/SOB/fibroadenoma", "benign/SOB/tubular_adenoma"]
_FOUR += ["malignant/SOB/ductal_carcinoma", "malignant/SOB/mucinous_carcinoma"]
_MHIST, _PCAM = (
    "published train partition, {} validates",
    "camelyonpatch_level_2_split_",
)
LAYOUTS = {
    "folder": Layout("one folder per class", (), rule="folders"),
    "bracs": Layout(
        "BRACS_RoI",
        tuple(f"{split}/{name}/*.png" for split in (TRAIN, VAL) for name in _BRACS),
        f"{BY_FOLDER}/(?P<slide_id>[^_/]+_[^_/]+)",  # BRACS_<slide>_<type>_1.png
        rule="published train and val",
        places=("", "BRACS_RoI/latest_version", "latest_version"),
    ),
    "breakhis": Layout(  # SOB_B_F-14-14134E-40-001.png is of patient 14-14134
        "BreaKHis",
        tuple(name + _ZOOM for name in _FOUR),
        r"\w+/SOB/(?P<label>\w+)/[^/]+/40X/SOB_[^-]*-(?P<case_id>[^-]+-[^-]*?)[A-Z]*-[^-]+-[^-]+$",
        name="break_his",
        places=("", f"BreaKHis_v1/{_BREAKHIS}", _BREAKHIS),
    ),
    "mhist": Layout("MHIST", ("annotations.csv", "images"), rule=_MHIST),
    "pcam": Layout(
        "PatchCamelyon (unzip *.h5.gz first)",
        tuple(
            f"{_PCAM}{part}.h5" for part in ("train_x", "train_y", "valid_x", "valid_y")
        ),
        rule="published train and valid",
        class_names=("normal", "metastasis"),
    ),
    "bach": Layout("BACH", ("Photos/*/*.tif",), "Photos/(?P<label>[^/]+)"),
    "crc": Layout(
        "CRC", ("NCT-CRC-HE-100K/*/*.tif", "CRC-VAL-HE-7K/*/*.tif"), val="CRC-VAL-HE-7K"
    ),
    "unitopatho": Layout(
        "UniToPatho at 800 µm",
        ("800/**/*.png", "800/train.csv", "800/test.csv"),
        class_names=("HP", "NORM", "TA.HG", "TA.LG", "TVA.HG", "TVA.LG"),
    ),
    "gleason": Layout(  # Arvaniti's, by array; the test array stays shut
        "Gleason patches",
        ("train_validation_patches_750/**/*.jpg",),
        r"(?:.*/)?(?P<split>ZT\d+)_[^/]*_(?P<label>\d)\.jpg$",
        "ZT76",
        class_names=("benign", "Gleason 3", "Gleason 4", "Gleason 5"),
    ),
}


def embed_rows(
    data: LabelledRows, encoder: "TileEncoder", *, batch_size: int = 64
) -> TileSet:
    """The set with embeddings in place of images; the encoder does its own preprocessing.

    Memory: 4 N D + 2 BATCH_BYTES (or two images) + the encoder.
    """

    def embed(rows: IndexArray) -> Embeddings:
        return embed_images(
            [data.images[i] for i in rows], encoder.encode, batch_size=batch_size
        )

    return data.tile_set(embed, **encoder_facts(encoder))


def encoder_facts(encoder: "TileEncoder") -> dict[str, Any]:
    """What a result file says of the encoder."""
    facts = {"encoder": encoder.spec.name, "precision": encoder.precision}
    facts |= {"engine": encoder.engine, "weights_sha256": encoder.weights_hash}
    return facts | {"encoder_commit": encoder.spec.revision or "none"}


def embed_images(
    images: Sequence[ImageRef], encode: Encode, *, batch_size: int = 64
) -> Embeddings:
    """Embeddings (N, D) of images, in their order; raises DatasetError where one cannot be read.

    Memory: 4 N D + 2 BATCH_BYTES (or two images) + the encoder.
    """
    out, done = np.empty((0, 0), dtype=np.float32), 0
    for batch in image_batches(images, batch_size):
        vectors = encode(batch).float().cpu().numpy()
        if not done:
            out = np.empty((len(images), vectors.shape[1]), dtype=np.float32)
        out[done : done + len(batch)] = vectors
        done += len(batch)
    tables.check(done, "images must be given to embed", "none")
    return out


def class_and_mean(encoder: "TileEncoder") -> tuple[Encode, str]:
    """PathoROB's embedding, [CLS | mean of the patch tokens], and what it is made of.

    An encoder that joins both already, or has no class token, gives its own embedding.
    """
    import torch

    if encoder.spec.pooling != "cls" or not encoder.spec.supports_tokens:
        return encoder.encode, f"the encoder's own ({encoder.spec.pooling})"

    def encode(batch: RgbArray) -> torch.Tensor:
        return torch.cat(
            [encoder.encode(batch), encoder.encode_tokens(batch).mean(dim=1)], dim=1
        )

    return encode, "class token and mean of the patch tokens"


def image_batches(images: Sequence[ImageRef], batch_size: int) -> Iterator[RgbArray]:
    """Batches uint8 (B, H, W, 3) in order; a batch ends where the image size changes.

    Memory: 2 BATCH_BYTES, or two images: those read, and the batch made of them.
    """
    pending: list[RgbArray] = []
    for image in read_images(images):
        full = (
            len(pending) == batch_size or sum(i.nbytes for i in pending) >= BATCH_BYTES
        )
        if pending and (full or pending[0].shape != image.shape):
            yield np.stack(pending)
            pending = []
        pending.append(image)
    if pending:
        yield np.stack(pending)


def read_images(refs: Iterable[ImageRef]) -> Iterator[RgbArray]:
    """Each image as uint8 (H, W, 3), RGB; an HDF5 file is opened once for its run of rows.

    Memory: one image.
    """
    import h5py
    from PIL import Image

    for path, run in groupby(refs, key=lambda ref: ref.path):
        rows, errors = (
            [ref.row for ref in run],
            (OSError, KeyError, Image.DecompressionBombError),
        )
        with rewording("image must be readable", path, *errors, error=DatasetError):
            if rows[0] is not None:
                with h5py.File(path, "r") as file:
                    yield from (
                        np.asarray(file["x"][row], dtype=np.uint8) for row in rows
                    )
                continue
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("RGB"))
        yield from [pixels] * len(rows)
