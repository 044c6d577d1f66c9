"""The three layouts: what is read, how it is split, and what a wrong folder is told."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat
from tests.support.segmentation import consep, monusac, pannuke

from thinsection.errors import DatasetError
from thinsection.evaluation.splits import shuffled_folds
from thinsection.probe.segment.data import (
    SEGMENT_DATASETS,
    load_consep,
    load_monusac,
    load_pannuke,
    pannuke_label,
)


def test_pannuke_trains_on_fold_1_and_validates_on_fold_2(tmp_path: Path) -> None:
    data = load_pannuke(pannuke(tmp_path, (5, 3)))
    ((train, val),) = data.folds
    assert (train.tolist(), val.tolist()) == ([0, 1, 2, 3, 4], [5, 6, 7])
    assert data.ids[4:6] == ("fold1:4", "fold2:0")
    stored = np.load(tmp_path / "Fold2" / "images" / "fold2" / "images.npy")
    assert data.image(6).dtype == np.uint8
    assert np.array_equal(data.image(6), stored[1])
    masks = np.load(tmp_path / "Fold1" / "masks" / "fold1" / "masks.npy")
    labels = data.labels()
    for c in range(5):
        assert np.array_equal(labels[0] == c + 1, masks[0, ..., c] > 0)
    assert [len(b) for b in data.image_batches(2, 4)] == [4, 2]


def test_where_pannuke_channels_meet_the_later_one_wins() -> None:
    mask = np.zeros((2, 3, 6))
    mask[0, 0, [1, 3]] = 7, 2
    mask[1, 2, 0] = 1
    mask[..., 5] = 1
    assert pannuke_label(mask).tolist() == [[4, 0, 0], [0, 0, 1]]


def test_monusac_folds_keep_a_slide_whole(tmp_path: Path) -> None:
    data = load_monusac(monusac(tmp_path, 6))
    assert len(data) == 12
    slides = np.array([name.split("/")[0] for name in data.ids])
    names = sorted(set(slides))
    for (train, val), (_, want) in zip(data.folds, shuffled_folds(6), strict=True):
        assert set(slides[val]) == {names[i] for i in want}
        assert not set(slides[val]) & set(slides[train])
        assert len(train) + len(val) == 12
    path = tmp_path / "MoNuSAC_images_and_annotations" / "TCGA-01" / "TCGA-01_1.npy"
    row = data.ids.index("TCGA-01/TCGA-01_1")
    nearest = Image.fromarray(np.load(path)).resize(
        (256, 256), Image.Resampling.NEAREST
    )
    assert np.array_equal(data.label(row), np.asarray(nearest))


def test_consep_types_are_remapped_and_an_image_keeps_its_aspect_as_a_square(
    tmp_path: Path,
) -> None:
    root = consep(tmp_path, 3)
    types = np.arange(8.0).repeat(32)[None].repeat(128, axis=0)
    savemat(root / "Train" / "Labels" / "train_1.mat", {"type_map": types})
    image = np.zeros((128, 256, 3), dtype=np.uint8)
    Image.fromarray(image).save(root / "Train" / "Images" / "train_1.png")
    data = load_consep(root)
    assert data.label(0)[0, 16::32].tolist() == [0, 1, 2, 3, 3, 4, 4, 4]
    assert data.image(0).shape == (256, 256, 3)
    assert [len(val) for _, val in data.folds] == [1, 1, 1]


def no_mask(root: Path) -> None:
    (pannuke(root) / "Fold2" / "masks" / "fold2" / "masks.npy").unlink()


def cut_images(root: Path) -> None:
    path = pannuke(root) / "Fold1" / "images" / "fold1" / "images.npy"
    path.write_bytes(path.read_bytes()[:-100])


def wrong_shape(root: Path) -> None:
    np.save(
        pannuke(root) / "Fold1" / "masks" / "fold1" / "masks.npy",
        np.zeros((8, 256, 256, 5)),
    )


def fewer_masks(root: Path) -> None:
    np.save(
        pannuke(root) / "Fold1" / "masks" / "fold1" / "masks.npy",
        np.zeros((7, 256, 256, 6)),
    )


def nothing(root: Path) -> None:
    del root


def no_npy(root: Path) -> None:
    next(monusac(root).glob("*/*/*.npy")).unlink()


def small_label(root: Path) -> None:
    np.save(next(monusac(root).glob("*/*/*.npy")), np.zeros((9, 9), np.uint8))


def strange_class(root: Path) -> None:
    path = next(monusac(root).glob("*/*/*.npy"))
    np.save(path, np.full_like(np.load(path), 5))


def strange_type(root: Path) -> None:
    savemat(
        consep(root) / "Train" / "Labels" / "train_2.mat",
        {"type_map": np.full((9, 9), 8)},
    )


def no_type_map(root: Path) -> None:
    savemat(
        consep(root) / "Train" / "Labels" / "train_2.mat",
        {"inst_map": np.zeros((9, 9))},
    )


@pytest.mark.parametrize(
    ("harm", "load", "message"),
    [
        (no_mask, load_pannuke, "Fold2/masks/fold2/masks.npy"),
        (cut_images, load_pannuke, "must be a complete .npy, got .*fold1/images.npy"),
        (
            wrong_shape,
            load_pannuke,
            r"masks must be of shape \(N, 256, 256, 6\), got \(8, 256, 2",
        ),
        (
            fewer_masks,
            load_pannuke,
            r"must have equal numbers, got \[8, 5\] and \[7, 5\]",
        ),
        (nothing, load_monusac, "MoNuSAC_images_and_annotations/<slide>/<x>.tif"),
        (no_npy, load_monusac, r"<x>.npy beside TCGA-0\d_\d.tif"),
        (
            small_label,
            load_monusac,
            r"must have the size of its image, \(\d+, \d+\), got \(9, 9\)",
        ),
        (strange_class, load_monusac, r"labels must be 0..4, got 5 in 'TCGA-0\d/"),
        (nothing, load_consep, r"Train/Images/\*.png"),
        (
            strange_type,
            load_consep,
            r"whole numbers 0..7 .* got .*, 8..8 in .*train_2.mat",
        ),
        (
            no_type_map,
            load_consep,
            "label must be readable, got .*train_2.mat.*type_map",
        ),
    ],
)
def test_a_folder_that_is_not_as_expected_is_told_what_was_looked_for(
    harm: Callable[[Path], None], load: Callable, message: str, tmp_path: Path
) -> None:
    harm(tmp_path)
    with pytest.raises(DatasetError, match=message):
        load(tmp_path).labels()


@pytest.mark.parametrize(
    ("name", "picture", "label"),
    [
        ("monusac", "**/TCGA-01_1.tif", "**/TCGA-03_0.npy"),
        ("consep", "**/train_1.png", "**/train_3.mat"),
    ],
)
def test_a_bad_picture_and_a_bad_label_are_left_out_and_the_others_stay(
    name: str, picture: str, label: str, tmp_path: Path
) -> None:
    root = {"monusac": monusac, "consep": consep}[name](tmp_path, 6)
    whole = SEGMENT_DATASETS[name](root)
    assert whole.readable() is whole
    before = {row: (whole.image(i), whole.label(i)) for i, row in enumerate(whole.ids)}
    folds = [
        ({whole.ids[i] for i in train}, {whole.ids[i] for i in val})
        for train, val in whole.folds
    ]
    (bad_picture,) = root.glob(picture)
    (bad_label,) = root.glob(label)
    bad_picture.write_bytes(bad_picture.read_bytes()[:60])
    bad_label.write_bytes(b"no label")
    data = SEGMENT_DATASETS[name](root).readable()
    assert len(data.left_out) == 2
    for path in (bad_picture, bad_label):
        (reason,) = [why for key, why in data.left_out.items() if path.stem in key]
        assert path.name in reason
    assert {*data.ids} == {*whole.ids} - {*data.left_out}
    for row, key in enumerate(data.ids):
        assert np.array_equal(data.image(row), before[key][0])
        assert np.array_equal(data.label(row), before[key][1])
    for (train, val), (train_ids, val_ids) in zip(data.folds, folds, strict=True):
        assert {data.ids[i] for i in train} == train_ids - {*data.left_out}
        assert {data.ids[i] for i in val} == val_ids - {*data.left_out}
    assert data.contents_hash() != whole.contents_hash()
    assert data.labels().shape[0] == len(data.ids)
