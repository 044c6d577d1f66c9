"""Public image datasets in the folders that their owners publish, and images to embeddings.

Official test splits stay shut. docs/probes.md tells what each layout looks for.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thinsection.errors import DatasetError, rewording
from thinsection.probe.data import files
from thinsection.probe.data.files import FOLDS, TRAIN, VAL
from thinsection.probe.data.sets import Embeddings, ImageRef, LabelledRows, Labels, TileSet
from thinsection.probe.groups import group_rows
from thinsection.probe.statistics import IndexArray, first_fold
from thinsection.types import MIB, RgbArray

if TYPE_CHECKING:
    import torch

    from thinsection.encode import TileEncoder

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")
BATCH_BYTES = 64 * MIB  # of decoded images at a time (one image may be larger)
BRACS_CLASSES = ("0_N", "1_PB", "2_UDH", "3_FEA", "4_ADH", "5_DCIS", "6_IC")
BREAKHIS_CLASSES = {
    **{"fibroadenoma": "benign", "tubular_adenoma": "benign"},
    **{"ductal_carcinoma": "malignant", "mucinous_carcinoma": "malignant"},
}

# rows that validate, of the 400 images in the order of their names
BACH_VAL = ((41, 59), (60, 90), (139, 169), (240, 258), (260, 273), (345, 368))

Names = tuple[str, ...]
Encode = Callable[[RgbArray], "torch.Tensor"]  # uint8 (B, H, W, 3) to (B, D)


def load_folder(root: Path, *, seed: int = 1337) -> LabelledRows:
    """Images in one folder per class, with or without split folders above."""
    splits: dict[str, Path] = {}
    for path in _folders(root):
        with suppress(DatasetError):  # a class folder, not a split
            splits[files.split_name(path.name, str(root))] = path
    if TRAIN in splits and VAL in splits:
        (names, *train), (val_names, *val) = (_class_folders(splits[s]) for s in (TRAIN, VAL))
        if names != val_names or len(names) < 2:
            found = f"{list(names)} and {list(val_names)} in {str(root)!r}"
            raise DatasetError(f"train and val must hold the same >= 2 class folders, got {found}")
        return _published(root.name, names, train, val, rule="folders")
    names, images, labels = _class_folders(root)
    if splits or len(names) < 2:
        looked_for = ["train/<class>/* and val/<class>/*", "<class>/* (at least two classes)"]
        raise files.unexpected(root, "one folder per class", looked_for)
    fold, rule = first_fold(labels, None, folds=FOLDS, seed=seed, class_names=names)
    return LabelledRows(root.name, names, labels, fold, {"split_rule": rule}, images=images)


def load_bracs(root: Path, *, seed: int = 1337) -> LabelledRows:
    """BRACS regions of interest: train/ and val/ with seven class folders."""
    del seed  # its split is published
    places = [root, root / "BRACS_RoI" / "latest_version", root / "latest_version"]
    base = next((p for p in places if (p / TRAIN).is_dir() and (p / VAL).is_dir()), None)
    if base is None:
        looked_for = [f"{split}/{BRACS_CLASSES[0]}/*.png" for split in (TRAIN, VAL)]
        raise files.unexpected(root, "BRACS_RoI", looked_for)
    parts = []
    for folder in (base / TRAIN, base / VAL):
        names, *part = _class_folders(folder)
        if names != BRACS_CLASSES:
            looked_for = [f"{name}/*.png" for name in BRACS_CLASSES]
            raise files.unexpected(folder, "BRACS_RoI", looked_for)
        parts.append(part)
    data = _published("bracs", BRACS_CLASSES, *parts, rule="published train and val")
    slides = ["_".join(image.path.name.split("_")[:2]) for image in data.images]  # BRACS_<slide>
    return replace(data, groups=group_rows(slides, where=repr(str(base))))


def load_breakhis(root: Path, *, seed: int = 1337) -> LabelledRows:
    """BreaKHis at 40X, four classes, split by patient (SOB_B_F-14-14134-40-001.png: 14-14134)."""
    tail = Path("histology_slides") / "breast"
    places = [root / "BreaKHis_v1" / tail, root / tail, root]
    base = next((p for p in places if (p / "benign").is_dir()), None)
    looked_for = [f"{g}/SOB/{c}/*/40X/*.png" for c, g in BREAKHIS_CLASSES.items()]
    if base is None:
        raise files.unexpected(root, "BreaKHis_v1/histology_slides/breast", looked_for)
    texts: dict[Path, str] = {}
    for name, group in BREAKHIS_CLASSES.items():
        found = sorted((base / group / "SOB" / name).glob("*/40X/*.png"))
        if not found:
            raise files.unexpected(base / group, "BreaKHis", looked_for)
        texts |= dict.fromkeys(found, name)
    names, labels = files.encode_labels([*texts.values()], str(base))
    patients = [breakhis_patient(path.name) for path in texts]
    groups = group_rows((), patients, where=repr(str(base)))
    fold, rule = first_fold(labels, groups, folds=FOLDS, seed=seed, class_names=names)
    facts, images = {"split_rule": rule}, [*map(ImageRef, texts)]
    return LabelledRows("break_his", names, labels, fold, facts, images=images, groups=groups)


def breakhis_patient(file_name: str) -> str:
    """'14-14134' of 'SOB_B_F-14-14134-40-001.png' (a letter suffix names a slide: '14-14134E')."""
    pieces = file_name.rsplit(".", 1)[0].split("-")
    if len(pieces) != 5 or not pieces[0].startswith("SOB_"):
        form = "SOB_<B|M>_<type>-<year>-<slide>-<zoom>-<number>"
        raise DatasetError(f"BreaKHis file must be named {form}, got {file_name!r}")
    return f"{pieces[1]}-{pieces[2].rstrip('ABCDEFGHIJKLMNOPQRSTUVWXYZ')}"


def load_mhist(root: Path, *, seed: int = 1337) -> LabelledRows:
    """MHIST: annotations.csv and images/; only rows of its 'train' partition."""
    table, images = root / "annotations.csv", root / "images"
    if not table.is_file() or not images.is_dir():
        raise files.unexpected(root, "MHIST", ["annotations.csv", "images/MHIST_*.png"])
    rows = files.read_rows(table, ("Image Name", "Majority Vote Label", "Partition"))
    rows = [r for r in rows if files.split_name(r["Partition"], str(table)) == TRAIN]
    names, labels = files.encode_labels([r["Majority Vote Label"] for r in rows], str(table))
    paths = [images / r["Image Name"] for r in rows]
    if absent := [str(path) for path in paths if not path.is_file()]:
        raise DatasetError(f"image must exist, got {absent[0]!r}, named in {str(table)!r}")
    fold, drawn = first_fold(labels, None, folds=FOLDS, seed=seed, class_names=names)
    rule = f"published train partition, {drawn} validates"
    refs = [*map(ImageRef, paths)]
    return LabelledRows("mhist", names, labels, fold, {"split_rule": rule}, images=refs)


def load_pcam(root: Path, *, seed: int = 1337) -> LabelledRows:
    """PatchCamelyon's HDF5 files, unzipped."""
    import h5py

    del seed  # its split is published
    names = [f"camelyonpatch_level_2_split_{s}_{p}.h5" for s in ("train", "valid") for p in "xy"]
    paths = [root / name for name in names]
    if not all(path.is_file() for path in paths):
        raise files.unexpected(root, "PatchCamelyon (unzip *.h5.gz first)", names)
    parts = []
    for x, y in (paths[:2], paths[2:]):
        rule = "PCam file must hold 'x' or 'y'"
        whole = rewording(rule, x, OSError, KeyError, error=DatasetError)
        with whole, h5py.File(x, "r") as images, h5py.File(y, "r") as labels:
            n, truth = len(images["x"]), np.asarray(labels["y"]).ravel().astype(np.int64)
        found = f"{n} and {len(truth)} in {str(x)!r}"
        files.check(n == len(truth), "x and y must have the same N", found)
        parts.append(([ImageRef(x, row) for row in range(n)], truth))
    return _published("pcam", ("normal", "metastasis"), *parts, rule="published train and valid")


def load_bach(root: Path, *, seed: int = 1337) -> LabelledRows:
    """BACH's 400 microscopy images, split by patient as eva does."""
    paths, classes = _sorted(root, "Photos/*/*.tif"), ("Benign", "InSitu", "Invasive", "Normal")
    files.check(len(paths) == 400, "BACH must be 400 images", f"{len(paths)} in {str(root)!r}")
    val = {paths[i] for span in BACH_VAL for i in range(*span)}
    return _told("bach", classes, paths, val.__contains__, lambda p: classes.index(p.parent.name))


def load_crc(root: Path, *, seed: int = 1337) -> LabelledRows:
    """NCT-CRC-HE-100K trains, CRC-VAL-HE-7K (other patients) validates, as in eva."""
    paths = _sorted(root, "NCT-CRC-HE-100K/*/*.tif") + _sorted(root, "CRC-VAL-HE-7K/*/*.tif")
    names = tuple(sorted({path.parent.name for path in paths}))
    of_val = lambda p: p.parts[-3] == "CRC-VAL-HE-7K"  # noqa: E731
    return _told("crc", names, paths, of_val, lambda p: names.index(p.parent.name))


def load_unitopatho(root: Path, *, seed: int = 1337) -> LabelledRows:
    """UniToPatho at 800 µm: train.csv trains, test.csv validates, as in eva (by patient)."""
    names, paths = (
        ("HP", "NORM", "TA.HG", "TA.LG", "TVA.HG", "TVA.LG"),
        _sorted(root, "800/**/*.png"),
    )
    columns = ("image_id", "top_label")
    train, val = (
        {r["image_id"]: int(r["top_label"]) for r in files.read_rows(root / "800" / name, columns)}
        for name in ("train.csv", "test.csv")
    )
    label, there = train | val, {path.name for path in paths}
    absent = sorted(label.keys() - there)
    files.check(not absent, "image must exist", f"{absent[:1]}, named in its tables")
    paths = [path for path in paths if path.name in label]
    return _told("unitopatho", names, paths, lambda p: p.name in val, lambda p: label[p.name])


def load_gleason(root: Path, *, seed: int = 1337) -> LabelledRows:
    """Arvaniti's Gleason patches: array ZT76 validates, as in eva; the test array stays shut."""
    paths = _sorted(root, "train_validation_patches_750/**/*.jpg")
    names = ("benign", "Gleason 3", "Gleason 4", "Gleason 5")
    of_val = lambda p: p.stem.startswith("ZT76_")  # noqa: E731
    return _told("gleason", names, paths, of_val, lambda p: int(p.stem.rsplit("_", 1)[-1]))


def _sorted(root: Path, pattern: str) -> list[Path]:
    found = sorted(root.glob(pattern)) or sorted(root.glob(f"*/{pattern}"))
    if not found:
        raise files.unexpected(root, "the published folder", [pattern])
    return found


def _told(
    name: str,
    names: Names,
    paths: Sequence[Path],
    of_val: Callable[[Path], bool],
    label: Callable[[Path], int],
) -> LabelledRows:
    """Images whose split and label their places tell."""
    labels, val = np.array([*map(label, paths)]), np.array([*map(of_val, paths)])
    fold = (np.flatnonzero(~val), np.flatnonzero(val))
    return LabelledRows(
        name, names, labels, fold, {"split_rule": "eva's"}, images=[*map(ImageRef, paths)]
    )


LAYOUTS: dict[str, Callable[..., LabelledRows]] = {
    **{"folder": load_folder, "bracs": load_bracs, "breakhis": load_breakhis},
    **{"mhist": load_mhist, "pcam": load_pcam, "bach": load_bach, "crc": load_crc},
    **{"unitopatho": load_unitopatho, "gleason": load_gleason},
}


def _published(name: str, names: Names, train: Any, val: Any, *, rule: str) -> LabelledRows:
    """`train` and `val`: images and labels that their owners put apart."""
    images, labels = [*train[0], *val[0]], np.concatenate([train[1], val[1]])
    first, second = np.split(np.arange(len(images)), [len(train[0])])
    return LabelledRows(name, names, labels, (first, second), {"split_rule": rule}, images=images)


def _class_folders(root: Path) -> tuple[Names, list[ImageRef], Labels]:
    """Class names (folders with images in them), their images and labels."""
    found: dict[str, list[ImageRef]] = {}
    for folder in _folders(root):
        for path in sorted(folder.iterdir()):
            if path.suffix.lower() in IMAGE_SUFFIXES:
                found.setdefault(folder.name, []).append(ImageRef(path))
    labels = np.repeat(np.arange(len(found)), [*map(len, found.values())])
    return tuple(found), [*chain(*found.values())], labels


def _folders(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if p.is_dir()) if root.is_dir() else []


def embed_rows(data: LabelledRows, encoder: "TileEncoder", *, batch_size: int = 64) -> TileSet:
    """The set with embeddings in place of images; the encoder does its own preprocessing.

    Memory: 4 N D + 2 BATCH_BYTES (or two images) + the encoder.
    """

    def embed(rows: IndexArray) -> Embeddings:
        return embed_images([data.images[i] for i in rows], encoder.encode, batch_size=batch_size)

    return data.tile_set(embed, **encoder_facts(encoder))


def encoder_facts(encoder: "TileEncoder") -> dict[str, Any]:
    """What a result file says of the encoder."""
    facts = {"encoder": encoder.spec.name, "precision": encoder.precision}
    facts |= {"engine": encoder.engine, "weights_sha256": encoder.weights_hash}
    return facts | {"encoder_commit": encoder.spec.revision or "none"}


def embed_images(images: Sequence[ImageRef], encode: Encode, *, batch_size: int = 64) -> Embeddings:
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
    files.check(done, "images must be given to embed", "none")
    return out


def class_and_mean(encoder: "TileEncoder") -> tuple[Encode, str]:
    """PathoROB's embedding, [CLS | mean of the patch tokens], and what it is made of.

    An encoder that joins both already, or has no class token, gives its own embedding.
    """
    import torch

    if encoder.spec.pooling != "cls" or not encoder.spec.supports_tokens:
        return encoder.encode, f"the encoder's own ({encoder.spec.pooling})"

    def encode(batch: RgbArray) -> torch.Tensor:
        return torch.cat([encoder.encode(batch), encoder.encode_tokens(batch).mean(dim=1)], dim=1)

    return encode, "class token and mean of the patch tokens"


def image_batches(images: Sequence[ImageRef], batch_size: int) -> Iterator[RgbArray]:
    """Batches uint8 (B, H, W, 3) in order; a batch ends where the image size changes.

    Memory: 2 BATCH_BYTES, or two images: those read, and the batch made of them.
    """
    pending: list[RgbArray] = []
    for image in read_images(images):
        full = len(pending) == batch_size or sum(i.nbytes for i in pending) >= BATCH_BYTES
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
        rows, errors = [ref.row for ref in run], (OSError, KeyError, Image.DecompressionBombError)
        with rewording("image must be readable", path, *errors, error=DatasetError):
            if rows[0] is not None:
                with h5py.File(path, "r") as file:
                    yield from (np.asarray(file["x"][row], dtype=np.uint8) for row in rows)
                continue
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("RGB"))
        yield from [pixels] * len(rows)
