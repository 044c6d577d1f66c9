"""Public image datasets in the folders that their owners publish. Official test splits stay shut.

| layout | train | validation |
|---|---|---|
| folder | train/<class>/* | val/<class>/*; without splits: one of three stratified folds |
| bracs | train/0_N ... 6_IC | val/0_N ... 6_IC |
| breakhis | 40X images of F, TA, DC, MC, two of three folds over patients | the third fold |
| mhist | annotations.csv, Partition 'train', two of three stratified folds | the third fold |
| pcam | camelyonpatch_level_2_split_train_{x,y}.h5 | ..._valid_{x,y}.h5 |
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from thinsection.errors import DatasetError
from thinsection.probe.data.sets import IMAGE_SUFFIXES, ImagePart, ImageRef, ImageSet
from thinsection.probe.data.tables import (
    FOLDS,
    TRAIN,
    VAL,
    encode_labels,
    read_rows,
    split_name,
    unexpected,
)
from thinsection.probe.statistics import grouped_folds, stratified_folds

BRACS_CLASSES = ("0_N", "1_PB", "2_UDH", "3_FEA", "4_ADH", "5_DCIS", "6_IC")
BREAKHIS_CLASSES = {
    "fibroadenoma": "benign",
    "tubular_adenoma": "benign",
    "ductal_carcinoma": "malignant",
    "mucinous_carcinoma": "malignant",
}
PCAM_FILE = "camelyonpatch_level_2_split_{split}_{part}.h5"


def load_folder(root: Path, *, seed: int = 1337) -> ImageSet:
    """Images in one folder per class, with or without split folders above."""
    splits: dict[str, Path] = {}
    for path in sorted(p for p in _listed(root) if p.is_dir()):
        try:
            splits[split_name(path.name, str(root))] = path
        except DatasetError:
            continue  # a class folder, not a split
    if TRAIN in splits and VAL in splits:
        names, train = _class_folders(splits[TRAIN])
        val_names, val = _class_folders(splits[VAL])
        if names != val_names or len(names) < 2:
            raise DatasetError(
                f"train and val must hold the same >= 2 class folders, got {list(names)} and "
                f"{list(val_names)} in {str(root)!r}"
            )
        return _image_set(root.name, names, train, val, rule="folders")
    names, whole = _class_folders(root) if not splits else ((), None)
    if whole is None or len(names) < 2:
        looked_for = ["train/<class>/* and val/<class>/*", "<class>/* (at least two classes)"]
        raise unexpected(root, "one folder per class", looked_for)
    folds = stratified_folds(whole.labels, folds=FOLDS, seed=seed, class_names=names)
    rule = f"stratified fold 0 of {FOLDS}, seed {seed}"
    return _image_set(root.name, names, *map(whole.take, folds[0]), rule=rule)


def load_bracs(root: Path, *, seed: int = 1337) -> ImageSet:
    """BRACS regions of interest: train/ and val/ with seven class folders."""
    del seed  # its split is published
    places = [root, root / "BRACS_RoI" / "latest_version", root / "latest_version"]
    base = next((p for p in places if (p / "train").is_dir() and (p / "val").is_dir()), None)
    if base is None:
        raise unexpected(root, "BRACS_RoI", [f"{s}/{BRACS_CLASSES[0]}/*.png" for s in (TRAIN, VAL)])
    parts = []
    for split in (TRAIN, VAL):
        names, part = _class_folders(base / split)
        if names != BRACS_CLASSES:
            raise unexpected(base / split, "BRACS_RoI", [f"{name}/*.png" for name in BRACS_CLASSES])
        parts.append(part)
    return _image_set("bracs", BRACS_CLASSES, *parts, rule="published train and val")


def load_breakhis(root: Path, *, seed: int = 1337) -> ImageSet:
    """BreaKHis at 40X, four classes, split by patient (SOB_B_F-14-14134-40-001.png: 14-14134)."""
    tail = Path("histology_slides") / "breast"
    places = [root / "BreaKHis_v1" / tail, root / tail, root]
    base = next((p for p in places if (p / "benign").is_dir()), None)
    looked_for = [f"{g}/SOB/{c}/*/40X/*.png" for c, g in BREAKHIS_CLASSES.items()]
    if base is None:
        raise unexpected(root, "BreaKHis_v1/histology_slides/breast", looked_for)
    refs: list[ImageRef] = []
    texts: list[str] = []
    for name, group in BREAKHIS_CLASSES.items():
        found = sorted((base / group / "SOB" / name).glob("*/40X/*.png"))
        if not found:
            raise unexpected(base / group, "BreaKHis", looked_for)
        refs += map(ImageRef, found)
        texts += [name] * len(found)
    names, labels = encode_labels(texts, str(base))
    patients = [breakhis_patient(ref.path.name) for ref in refs]
    fold = grouped_folds(labels, patients, folds=FOLDS, seed=seed)[0]
    whole = ImagePart(images=tuple(refs), labels=labels)
    rule = f"fold 0 of {FOLDS} over patients, seed {seed}"
    return _image_set("break_his", names, *map(whole.take, fold), rule=rule)


def breakhis_patient(file_name: str) -> str:
    """'14-14134' of 'SOB_B_F-14-14134-40-001.png' (a letter suffix names a slide: '14-14134E').

    Raises:
        DatasetError: another form.
    """
    pieces = file_name.rsplit(".", 1)[0].split("-")
    if len(pieces) != 5 or not pieces[0].startswith("SOB_"):
        raise DatasetError(
            f"BreaKHis file must be named SOB_<B|M>_<type>-<year>-<slide>-<zoom>-<number>, "
            f"got {file_name!r}"
        )
    return f"{pieces[1]}-{pieces[2].rstrip('ABCDEFGHIJKLMNOPQRSTUVWXYZ')}"


def load_mhist(root: Path, *, seed: int = 1337) -> ImageSet:
    """MHIST: annotations.csv and images/; only rows of its 'train' partition."""
    table, images = root / "annotations.csv", root / "images"
    if not table.is_file() or not images.is_dir():
        raise unexpected(root, "MHIST", ["annotations.csv", "images/MHIST_*.png"])
    label_column = "Majority Vote Label"
    rows = read_rows(table, ("Image Name", label_column, "Partition"))
    rows = [r for r in rows if split_name(r["Partition"], str(table)) == TRAIN]
    names, labels = encode_labels([r[label_column] for r in rows], str(table))
    refs = tuple(ImageRef(_existing(images / r["Image Name"], table)) for r in rows)
    fold = stratified_folds(labels, folds=FOLDS, seed=seed, class_names=names)[0]
    rule = f"published train partition, stratified fold 0 of {FOLDS} validates, seed {seed}"
    whole = ImagePart(images=refs, labels=labels)
    return _image_set("mhist", names, *map(whole.take, fold), rule=rule)


def load_pcam(root: Path, *, seed: int = 1337) -> ImageSet:
    """PatchCamelyon's HDF5 files, unzipped."""
    del seed  # its split is published
    parts = []
    for published in ("train", "valid"):
        x, y = (root / PCAM_FILE.format(split=published, part=part) for part in "xy")
        if not (x.is_file() and y.is_file()):
            wanted = [PCAM_FILE.format(split=s, part=p) for s in ("train", "valid") for p in "xy"]
            raise unexpected(root, "PatchCamelyon (unzip *.h5.gz first)", wanted)
        parts.append(_pcam_part(x, y))
    return _image_set("pcam", ("normal", "metastasis"), *parts, rule="published train and valid")


LAYOUTS: dict[str, Callable[..., ImageSet]] = {
    "folder": load_folder,
    "bracs": load_bracs,
    "breakhis": load_breakhis,
    "mhist": load_mhist,
    "pcam": load_pcam,
}


def _pcam_part(x: Path, y: Path) -> ImagePart:
    import h5py

    try:
        with h5py.File(x, "r") as images, h5py.File(y, "r") as labels:
            count, truth = len(images["x"]), np.asarray(labels["y"]).ravel().astype(np.int64)
    except (OSError, KeyError) as error:
        raise DatasetError(f"PCam file must hold 'x' or 'y', got {str(x)!r}: {error}") from error
    if count != len(truth):
        raise DatasetError(
            f"x and y must have the same N, got {count} and {len(truth)} in {str(x)!r}"
        )
    return ImagePart(images=tuple(ImageRef(x, row) for row in range(count)), labels=truth)


def _class_folders(root: Path) -> tuple[tuple[str, ...], ImagePart]:
    """Class names (folders with images in them) and their images."""
    refs: list[ImageRef] = []
    labels: list[int] = []
    names: list[str] = []
    for folder in sorted(p for p in _listed(root) if p.is_dir()):
        found = sorted(p for p in folder.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)
        if found:
            refs += map(ImageRef, found)
            labels += [len(names)] * len(found)
            names.append(folder.name)
    return tuple(names), ImagePart(images=tuple(refs), labels=np.array(labels, dtype=np.int64))


def _image_set(
    name: str, class_names: tuple[str, ...], train: ImagePart, val: ImagePart, *, rule: str
) -> ImageSet:
    facts = {"split_rule": rule}
    return ImageSet(name=name, class_names=class_names, train=train, val=val, facts=facts)


def _listed(root: Path) -> list[Path]:
    return list(root.iterdir()) if root.is_dir() else []


def _existing(path: Path, table: Path) -> Path:
    if not path.is_file():
        raise DatasetError(f"image must exist, got {str(path)!r}, named in {str(table)!r}")
    return path
