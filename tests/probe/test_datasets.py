"""Datasets in the layouts of their owners, with small images; what is missing is said."""

from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from tests.probe.make import split_tiles, write_tiles_h5

from thinsection.errors import DatasetError
from thinsection.evaluation.embeddings import (
    find_tile_files,
    read_embeddings,
    slide_files,
)
from thinsection.probe.config import DataSection
from thinsection.probe.data.images import (
    class_and_mean,
    embed_images,
    embed_rows,
    image_batches,
    load_images,
    read_image,
    read_images,
)
from thinsection.probe.data.load import load_manifest
from thinsection.probe.data.sets import ImageRef
from thinsection.weights.origin import Origin

BRACS_CLASSES = ("0_N", "1_PB", "2_UDH", "3_FEA", "4_ADH", "5_DCIS", "6_IC")
BREAKHIS_CLASSES = {
    **{"fibroadenoma": "benign", "tubular_adenoma": "benign"},
    **{"ductal_carcinoma": "malignant", "mucinous_carcinoma": "malignant"},
}


def image(path: Path, value: int = 100, size: tuple[int, int] = (7, 5)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, 0, 255 - value)).save(path)
    return path


class ColourEncoder:
    """Mean colour as the embedding: knows which image it saw."""

    origin = Origin()
    fingerprint = "none"
    spec = SimpleNamespace(
        name="colour", pooling="cls", supports_tokens=True, revision=None
    )
    dim, precision, weights_hash, engine = 3, "fp32", "0", "stub 1.0"
    device = torch.device("cpu")
    has_tokens = True

    def encode(self, tiles: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(
            tiles.reshape(len(tiles), -1, 3).mean(axis=1).astype(np.float32)
        )

    def encode_with_tokens(
        self, tiles: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = tiles.reshape(len(tiles), -1, 3).astype(np.float32) * 2
        return self.encode(tiles), torch.from_numpy(tokens)


def test_folders_with_splits_are_read_and_test_is_never_opened(tmp_path: Path) -> None:
    for split, value in (("train", 10), ("valid", 20)):
        for name in ("a", "b"):
            image(tmp_path / split / name / "1.png", value)
    (tmp_path / "test" / "a").mkdir(parents=True)
    (tmp_path / "test" / "a" / "1.png").write_text("opening this would fail")
    data = load_images("folder", tmp_path)
    assert data.class_names == ("a", "b")
    tiles = embed_rows(data, ColourEncoder())
    np.testing.assert_array_equal(tiles.train.embeddings[:, 0], [10, 10])
    np.testing.assert_array_equal(tiles.val.embeddings[:, 0], [20, 20])
    assert tiles.facts["encoder"] == "colour"


def test_folders_without_splits_let_a_stratified_fold_validate(tmp_path: Path) -> None:
    for i in range(12):
        image(tmp_path / f"class{i % 2}" / f"{i}.png")
    data = load_images("folder", tmp_path)
    assert list(map(len, data.fold)) == [8, 4]
    assert sorted(data.labels[data.fold[1]]) == [0, 0, 1, 1]
    assert "stratified fold 0 of 3" in data.facts["split_rule"]


def test_a_folder_of_another_kind_says_what_is_there_and_what_was_looked_for(
    tmp_path: Path,
) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(
        DatasetError, match=r"got notes.txt in .*searched for train/<class>/\* and"
    ):
        load_images("folder", tmp_path)
    with pytest.raises(DatasetError, match="no such folder"):
        load_images("folder", tmp_path / "absent")


def test_images_of_other_sizes_end_a_batch_and_keep_their_order(tmp_path: Path) -> None:
    sizes = [(4, 4), (4, 4), (6, 3), (4, 4)]
    refs = tuple(
        ImageRef(image(tmp_path / f"{i}.png", i, s)) for i, s in enumerate(sizes)
    )
    batches = list(image_batches([read_image(ref.path) for ref in refs], 64))
    assert [b.shape for b in batches] == [(2, 4, 4, 3), (1, 3, 6, 3), (1, 4, 4, 3)]
    assert [int(v) for b in batches for v in b[:, 0, 0, 0]] == [0, 1, 2, 3]


def test_pathorobs_embedding_joins_the_class_token_and_the_mean_of_the_patches(
    tmp_path: Path,
) -> None:
    encode, words = class_and_mean(ColourEncoder())
    vectors, _ = embed_images([ImageRef(image(tmp_path / "1.png", 9))], encode)
    np.testing.assert_allclose(vectors, [[9, 0, 246, 18, 0, 492]])
    assert words == "class token and mean of the patch tokens"
    pooled = ColourEncoder()
    pooled.spec = SimpleNamespace(name="colour", pooling="mean", supports_tokens=True)
    assert class_and_mean(pooled)[1] == "the output that the encoder declares (mean)"


def test_an_image_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"\x89PNG but no more")
    with pytest.raises(DatasetError, match=r"image must be readable, got .*bad.png"):
        list(read_images((ImageRef(tmp_path / "bad.png"),)))


def test_images_that_cannot_be_read_are_left_out_and_the_others_are_as_without_them(
    tmp_path: Path,
) -> None:
    """Of every kind of damage one, in train and in val, two of the same name."""
    for split in ("train", "valid"):
        for number in range(4):
            image(tmp_path / split / "ab"[number % 2] / f"{number}.png", 10 * number)
    whole = embed_rows(load_images("folder", tmp_path), ColourEncoder())
    picture = image(tmp_path / "noise.png", size=(90, 70)).read_bytes()
    bad = {
        tmp_path / "train" / "a" / "00.png": b"",
        tmp_path / "train" / "b" / "text.png": b"no picture",
        tmp_path / "valid" / "a" / "00.png": picture[: len(picture) // 2],
        tmp_path / "valid" / "b" / "9.jpg": b"\xff\xd8\xff\xe0 cut",
    }
    for path, content in bad.items():
        path.write_bytes(content)
    data = load_images("folder", tmp_path)
    tiles = embed_rows(data, ColourEncoder(), batch_size=2)
    assert set(tiles.left_out) == {str(path) for path in bad}
    for part, expected in ((tiles.train, whole.train), (tiles.val, whole.val)):
        assert part.ids == expected.ids
        np.testing.assert_array_equal(part.labels, expected.labels)
        np.testing.assert_array_equal(part.embeddings, expected.embeddings)
    for path in (tmp_path / "valid").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(DatasetError, match="an image of 6 must be readable, got none"):
        embed_rows(data, ColourEncoder())


def test_rows_of_an_hdf5_file_that_cannot_be_opened_are_left_out(
    tmp_path: Path,
) -> None:
    with h5py.File(tmp_path / "good.h5", "w") as file:
        file["x"] = np.arange(3)[:, None, None, None] * np.ones((1, 4, 4, 3), np.uint8)
    (tmp_path / "bad.h5").write_bytes(b"\x89HDF")
    refs = [ImageRef(tmp_path / "bad.h5", 0)]
    refs += [ImageRef(tmp_path / "good.h5", row) for row in (2, 7, 0)]
    left_out: dict[str, str] = {}
    vectors, kept = embed_images(
        refs, ColourEncoder().encode, leave_out=left_out.__setitem__
    )
    assert kept.tolist() == [1, 3]
    np.testing.assert_array_equal(vectors[:, 0], [2, 0])
    assert set(left_out) == {str(tmp_path / "bad.h5"), f"{tmp_path / 'good.h5'}:7"}


def test_bracs_has_its_seven_classes_in_order(tmp_path: Path) -> None:
    base = tmp_path / "BRACS_RoI" / "latest_version"
    for split in ("train", "val"):
        for name in BRACS_CLASSES:
            image(base / split / name / f"BRACS_{name}.png")
    data = load_images("bracs", tmp_path)
    assert data.class_names == BRACS_CLASSES
    np.testing.assert_array_equal(data.labels[data.fold[1]], range(7))
    assert {data.images[i].path.parent.parent.name for i in data.fold[1]} == {"val"}
    (base / "val" / "3_FEA" / "BRACS_3_FEA.png").unlink()
    with pytest.raises(DatasetError, match=r"searched for .*3_FEA"):
        load_images("bracs", tmp_path)


def test_breakhis_takes_four_classes_at_40x_and_keeps_patients_apart(
    tmp_path: Path,
) -> None:
    base = tmp_path / "BreaKHis_v1" / "histology_slides" / "breast"
    for c, (name, group) in enumerate(BREAKHIS_CLASSES.items()):
        for patient in range(6):
            for letter in ("", "AB"):
                slide = f"SOB_X_{c}-14-{c}{patient}00{letter}"
                for zoom in ("40", "100"):
                    file = f"{slide}-{zoom}-001.png"
                    image(base / group / "SOB" / name / slide / f"{zoom}X" / file)
    image(
        base / "benign" / "SOB" / "adenosis" / "s" / "40X" / "SOB_B_A-14-1-40-001.png"
    )
    data = load_images("breakhis", tmp_path)
    assert data.class_names == tuple(sorted(BREAKHIS_CLASSES))
    assert data.groups is not None
    train, val = ({data.groups.of_row[i] for i in rows} for rows in data.fold)
    assert train | val == {
        f"14-{c}{patient}00" for c in range(4) for patient in range(6)
    }
    assert not train & val
    assert sum(map(len, data.fold)) == len(data.images) == 48


def test_a_breakhis_file_of_another_form_is_refused(tmp_path: Path) -> None:
    for name, group in BREAKHIS_CLASSES.items():
        image(tmp_path / group / "SOB" / name / "s" / "40X" / "image_1.png")
    with pytest.raises(
        DatasetError, match=r"BreaKHis file must be named like .*got 'benign/SOB/fibr"
    ):
        load_images("breakhis", tmp_path)


def test_mhist_takes_only_the_train_partition(tmp_path: Path) -> None:
    rows = [
        "Image Name,Majority Vote Label,Number of Annotators who Selected SSA,Partition"
    ]
    for i in range(12):
        image(tmp_path / "images" / f"MHIST_{i}.png")
        rows.append(f"MHIST_{i}.png,{'SSA' if i % 2 else 'HP'},3,train")
    rows.append("MHIST_sealed.png,SSA,7,test")  # is not even on disk
    (tmp_path / "annotations.csv").write_text("\n".join(rows))
    data = load_images("mhist", tmp_path)
    assert data.class_names == ("HP", "SSA")
    assert list(map(len, data.fold)) == [8, 4]


def test_pcam_reads_rows_of_its_hdf5_files(tmp_path: Path) -> None:
    for split, n in (("train", 6), ("valid", 4)):
        with h5py.File(
            tmp_path / f"camelyonpatch_level_2_split_{split}_x.h5", "w"
        ) as file:
            file["x"] = np.arange(n)[:, None, None, None] * np.ones(
                (1, 96, 96, 3), np.uint8
            )
        with h5py.File(
            tmp_path / f"camelyonpatch_level_2_split_{split}_y.h5", "w"
        ) as file:
            file["y"] = (np.arange(n) % 2).reshape(n, 1, 1, 1)
    tiles = embed_rows(load_images("pcam", tmp_path), ColourEncoder(), batch_size=4)
    np.testing.assert_array_equal(tiles.train.embeddings[:, 1], range(6))
    np.testing.assert_array_equal(tiles.val.labels, [0, 1, 0, 1])
    with pytest.raises(
        DatasetError, match=r"unzip .*searched for camelyonpatch_level_2_split_train"
    ):
        load_images("pcam", tmp_path / "absent")


def test_evas_manifest_is_read_and_its_test_rows_are_not(tmp_path: Path) -> None:
    rows = ["origin,embeddings,target,split"]
    for i in range(6):
        vector = torch.full((4,), float(i))
        torch.save([vector] if i == 3 else vector, tmp_path / f"{i}.pt")
        rows.append(f"{i}.png,{i}.pt,{i % 2},{'train' if i < 4 else 'val'}")
    rows.append("9.png,missing.pt,1,test")
    (tmp_path / "manifest.csv").write_text("\n".join(rows))
    data = split_tiles(load_manifest(tmp_path / "manifest.csv"))
    np.testing.assert_array_equal(data.train.embeddings[:, 0], [0, 1, 2, 3])
    np.testing.assert_array_equal(data.val.labels, [0, 1])
    assert data.class_names == ("0", "1")


def test_a_pt_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"x": torch.nn.Linear(2, 2)}, tmp_path / "model.pt")
    with pytest.raises(DatasetError, match="must be a plain tensor"):
        read_embeddings(tmp_path / "model.pt")


def test_a_manifest_picks_rows_of_one_embedding_file(tmp_path: Path) -> None:
    np.save(tmp_path / "all.npy", np.arange(12, dtype=np.float16).reshape(6, 2))
    text = "row,label,split\n5,b,train\n0,a,train\n2,a,val\n3,b,val\n"
    (tmp_path / "m.csv").write_text(text)
    section = DataSection(embeddings=tmp_path / "all.npy")
    data = split_tiles(load_manifest(tmp_path / "m.csv", section))
    np.testing.assert_array_equal(data.train.embeddings, [[10, 11], [0, 1]])
    assert data.val.ids == ("m:2", "m:3")  # whichever file holds them
    (tmp_path / "m.csv").write_text(text + "6,a,val\n")
    with pytest.raises(
        DatasetError, match=r"row must be in 0..5 of 'all.npy', got '6'"
    ):
        load_manifest(tmp_path / "m.csv", section)


def test_a_manifest_of_images_is_an_image_set_with_numeric_labels_in_order(
    tmp_path: Path,
) -> None:
    rows = ["path,label"]
    for i in range(9):
        image(tmp_path / "tiles" / f"{i}.png")
        rows.append(f"tiles/{i}.png,{(2, 10, 1)[i % 3]}")
    (tmp_path / "m.csv").write_text("\n".join(rows))
    data = load_manifest(tmp_path / "m.csv")
    assert (len(data.images), data.embeddings) == (9, None)
    assert data.class_names == ("1", "2", "10")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,labl\na.png,1\n", r"column 'label' or 'target', got path, labl"),
        ("label\n1\n1\n", r"column 'embeddings' or 'path' or 'image'"),
        (
            "path,label,split\na.png,1,train\n",
            "must name training and validation rows, got 1 and 0",
        ),
        (
            "path,label,split\na.png,1,test\n",
            "must name training and validation rows, got 0 and 0",
        ),
        (
            "path,label,split\na.png,1,trian\n",
            "split must be train, val or test, got 'trian'",
        ),
        ("path,label\na.png,\nb.png,1\n", "label must not be missing, got '' in row 0"),
        ("path,label\n", "table must have rows"),
    ],
)
def test_a_manifest_with_a_mistake_says_which(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "m.csv").write_text(text)
    with pytest.raises(DatasetError, match=message):
        load_manifest(tmp_path / "m.csv")


def test_tridents_features_with_a_leading_axis_are_n_by_d(tmp_path: Path) -> None:
    features = np.arange(12, dtype=np.float16).reshape(4, 3)
    coords = np.zeros((4, 2))
    plain = write_tiles_h5(tmp_path / "a.h5", coords, features)
    leading = write_tiles_h5(tmp_path / "b.h5", coords, features, leading_axis=True)
    for path in (plain, leading):
        array = read_embeddings(path)
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, features)


def test_embeddings_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "cut.h5").write_bytes(b"\x89HDF\r\n\x1a\n then nothing")
    with pytest.raises(
        DatasetError, match=r"embeddings must be readable, got .*cut.h5"
    ):
        read_embeddings(tmp_path / "cut.h5")
    with h5py.File(tmp_path / "grid.h5", "w") as file:
        file["coords"] = np.zeros((3, 2))
    with pytest.raises(DatasetError, match=r"dataset 'features', got \['coords'\]"):
        read_embeddings(tmp_path / "grid.h5")
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DatasetError, match=r"objects.npy'.*Python objects"):
        read_embeddings(tmp_path / "objects.npy")


def test_slides_are_found_with_and_without_their_extension(tmp_path: Path) -> None:
    for name in ("a.h5", "b.h5", "TCGA.1.h5"):
        write_tiles_h5(tmp_path / name, np.zeros((1, 2)), np.ones((1, 2), np.float32))
    found = slide_files(tmp_path, ["a.svs", "b", "TCGA.1"])
    assert [p.name for p in found.values()] == ["a.h5", "b.h5", "TCGA.1.h5"]
    with pytest.raises(
        DatasetError, match=r"none for 2 of 3 \(x, y\); searched for files of"
    ):
        slide_files(tmp_path, ["a", "x", "y"])
    assert len(find_tile_files(tmp_path)) == 3
    with pytest.raises(
        DatasetError, match=r"searched for <slide_id>.h5 and \*/features_<encoder>"
    ):
        find_tile_files(tmp_path / "none")
