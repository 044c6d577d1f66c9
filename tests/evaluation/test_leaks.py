"""Leaks on pure noise are refused or named before training, in the words that a person reads.

In each cohort the embeddings say nothing of the label; what is known twice would raise the score.
"""

import hashlib
import shutil
import tracemalloc
from collections.abc import Callable
from itertools import product
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
import pytest
from tests.predict.planted import write_embeddings

from thinsection.errors import DatasetError
from thinsection.evaluation.label_values import LabelsConfig
from thinsection.evaluation.labels import read_cohort
from thinsection.evaluation.leaks import (
    BLOCK_VALUES,
    SKETCH_NEAR,
    content_digest,
    crossing_equals,
    is_near,
    near_limit,
    near_pairs,
    read_contents,
    rounded,
    sides_of_slides,
    sketches,
)
from thinsection.files.atomic import read_table
from thinsection.predict.config import FitConfig, FoldsConfig, TrainConfig
from thinsection.predict.experiment import plan, train
from thinsection.predict.heads.config import HeadConfig
from thinsection.predict.predicting import predict
from thinsection.store.hdf5 import add_dataset
from thinsection.store.tile_tables import EmbeddingRows

DIM = 24
Names = Callable[[int], str]


def noise(root: Path, names: list[str], labels: list[str], *, seed: int = 0) -> None:
    """Slides of 12 tiles of pure noise, and labels.csv."""
    rng = np.random.default_rng(seed)
    root.mkdir(parents=True, exist_ok=True)
    for name in names:
        write_embeddings(root / f"{name}.h5", rng.normal(size=(12, DIM)))
    rows = [f"{name},{label}" for name, label in zip(names, labels, strict=True)]
    (root / "labels.csv").write_text("\n".join(["slide_id,label", *rows]) + "\n")


def coin(n: int, seed: int = 0) -> list[str]:
    return np.random.default_rng(seed).permutation(["a", "b"] * (n // 2)).tolist()


def planned(root: Path, **cross: object) -> tuple[tuple[str, ...], str]:
    """The warnings, and all other sentences, of a training that is about to begin."""
    labels = LabelsConfig(labels=root / "labels.csv", target=("label",))
    cohort = read_cohort(root, labels)
    contents = read_contents([path for paths in cohort.paths for path in paths])
    study, notes = plan(cohort, contents, FoldsConfig(folds=4, **cross), seed=0)  # type: ignore[arg-type]
    return study.warnings, "\n".join((*cohort.account, *notes))


def add_copies(root: Path, copy: Callable[[str], str], *, half: bool = False) -> None:
    """Every slide once more under another name, with its label; in float16 with `half`."""
    rows = (root / "labels.csv").read_text().splitlines()
    for row in rows[1:]:
        name, label = row.split(",")
        target = root / f"{copy(name)}.h5"
        shutil.copy(root / f"{name}.h5", target)
        if half:
            with h5py.File(target, "r+") as file:
                x = file["features"][:]  # type: ignore[index]
                del file["features"]
                add_dataset(file, "features", x.astype(np.float16))
        rows.append(f"{copy(name)},{label}")
    (root / "labels.csv").write_text("\n".join(rows) + "\n")


@pytest.mark.parametrize("half", [False, True])
def test_one_file_under_two_names_is_refused(tmp_path: Path, half: bool) -> None:
    root = tmp_path / "f"
    noise(root, [f"s{i:02}x" for i in range(20)], coin(20))
    add_copies(root, lambda name: f"copy{name}", half=half)
    sentence = (
        r"test cases must not have the embeddings of training cases, got \d+ pairs equal "
        r"in float16 \('s\d\dx' and 'copys\d\dx', .*\); remove the copies, give both slides one "
        r"case_id, or pass allow_leakage=True"
    )
    with pytest.raises(DatasetError, match=sentence):
        planned(root)
    warnings, _ = planned(root, allow_leakage=True)
    assert warnings[-1].startswith("training and test set share slides")
    assert warnings[-1].endswith("the score is too optimistic")


def test_copies_of_one_case_are_no_leak(tmp_path: Path) -> None:
    root = tmp_path / "f"
    noise(root, [f"s{i:02}x" for i in range(20)], coin(20))
    add_copies(root, lambda name: f"copy{name}")
    rows = (root / "labels.csv").read_text().splitlines()[1:]
    cases = [f"{row},{row.split(',')[0].removeprefix('copy')}" for row in rows]
    table = "\n".join(["slide_id,label,case_id", *cases])
    (root / "labels.csv").write_text(table + "\n")
    assert planned(root)[0] == ()


def test_nearly_the_same_tissue_is_named_in_a_warning(tmp_path: Path) -> None:
    root = tmp_path / "f"
    noise(root, [f"s{i:02}x" for i in range(20)], coin(20))
    add_copies(root, lambda name: f"copy{name}")
    rng = np.random.default_rng(1)
    for path in sorted(root.glob("copy*.h5")):
        with h5py.File(path, "r+") as file:
            x = file["features"][:]  # type: ignore[index]
            del file["features"]
            x += 1e-3 * rng.normal(size=x.shape)
            add_dataset(file, "features", x)
    (warning,) = planned(root)[0]
    assert "pairs of slides with nearly the same mean embedding" in warning
    assert "give both one case_id" in warning


@pytest.mark.parametrize(
    "name",
    [
        lambda i: f"TCGA-AB-{i // 2:04}-01Z-00-DX{i % 2 + 1}",
        lambda i: f"C3L-{i // 2:05}-2{i % 2 + 1}",
        lambda i: f"{i // 2:02}BR001-{i % 2}f3a",
        lambda i: f"GTEX-11{i // 2:02}F-0{i % 2 + 1}26",
    ],
)
def test_barcodes_of_tcga_cptac_and_gtex_make_one_case(
    tmp_path: Path, name: Names
) -> None:
    root = tmp_path / "f"
    noise(root, [name(i) for i in range(40)], [x for x in coin(20) for _ in "12"])
    warnings, told = planned(root)
    assert warnings == ()
    assert "40 slides of 20 cases for training" in told
    assert "barcode gives the case of 40 slides" in told


def test_slides_that_begin_alike_are_named_where_nobody_knows_whose_they_are(
    tmp_path: Path,
) -> None:
    root = tmp_path / "f"
    names = [f"P{i // 2:03}_{'AB'[i % 2]}" for i in range(40)]
    noise(root, names, [x for x in coin(20) for _ in "12"])
    (warning,) = planned(root)[0]
    assert warning == (
        "the patients of 40 slides are unknown, so each slide counts as one patient; add a column "
        "case_id if a patient has several slides; 40 names begin with the same letters (P000_A and "
        "P000_B, P001_A and P001_B, P002_A and P002_B, ...): slides of one patient in training and "
        "test would make the score too optimistic"
    )


def test_numbered_slides_are_no_suspects_and_it_is_said_that_nobody_knows(
    tmp_path: Path,
) -> None:
    root = tmp_path / "f"
    noise(root, [f"slide_{i}" for i in range(40)], coin(40))
    warnings, told = planned(root)
    assert warnings == ()
    assert "the patients of 40 slides are" in told


@pytest.mark.parametrize(
    ("first", "second"), [("Pat{}", "pat{} "), ("{:03}", "{}"), ("P{:02}", " p{}")]
)
def test_spellings_of_one_id_are_one_case(
    tmp_path: Path, first: str, second: str
) -> None:
    root = tmp_path / "f"
    noise(root, [f"x{i:02}y" for i in range(40)], [x for x in coin(20) for _ in "12"])
    rows = (root / "labels.csv").read_text().splitlines()[1:]
    cases = [(first, second)[i % 2].format(i // 2 + 1) for i in range(40)]
    lines = [f"{row},{case}" for row, case in zip(rows, cases, strict=True)]
    (root / "labels.csv").write_text(
        "\n".join(["slide_id,label,case_id", *lines]) + "\n"
    )
    warnings, told = planned(root)
    assert warnings == ()
    assert "40 slides of 20 cases for training" in told
    assert "ids are compared without spaces, capital letters and leading zeros" in told


def test_cases_of_one_patient_are_never_parted(tmp_path: Path) -> None:
    root = tmp_path / "f"
    noise(root, [f"x{i:02}y" for i in range(40)], coin(40))
    rows = (root / "labels.csv").read_text().splitlines()[1:]
    lines = [f"{row},case{i},p{i // 2}" for i, row in enumerate(rows)]
    table = "\n".join(["slide_id,label,case_id,patient_id", *lines])
    (root / "labels.csv").write_text(table + "\n")
    labels = LabelsConfig(labels=root / "labels.csv", target=("label",))
    cohort = read_cohort(root, labels)
    contents = read_contents([path for paths in cohort.paths for path in paths])
    study, notes = plan(cohort, contents, FoldsConfig(folds=4), seed=0)
    assert len(cohort.cases) == 40
    assert "4 stratified folds of cases, patients whole, seed 0" in notes
    for part in study.parts:
        sides = [
            {cohort.patients[i] for i in s} for s in (part.train, part.stop, part.test)
        ]
        assert not sides[0] & sides[1]
        assert not (sides[0] | sides[1]) & sides[2]


def test_a_split_of_slides_that_parts_a_case_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "f"
    noise(
        root,
        [f"C3L-{i // 2:05}-2{i % 2 + 1}" for i in range(40)],
        ["a", "a", "b", "b"] * 10,
    )
    rows = [
        f"C3L-{i // 2:05}-2{i % 2 + 1},{['train', 'test'][i % 2]}" for i in range(40)
    ]
    (root / "split.csv").write_text("\n".join(["slide_id,split", *rows]) + "\n")
    with pytest.raises(
        DatasetError, match="a case must be on one side of a split, got 'C3L-0"
    ):
        planned(root, splits=root / "split.csv")


def test_a_split_that_tests_on_copies_of_training_rows_is_refused(
    tmp_path: Path,
) -> None:
    root = tmp_path / "f"
    noise(root, [f"s{i:02}x" for i in range(20)], coin(20))
    add_copies(root, lambda name: f"t{name}")
    names = [
        row.split(",")[0] for row in (root / "labels.csv").read_text().splitlines()[1:]
    ]
    rows = [f"{n},{'test' if n.startswith('t') else 'train'}" for n in names]
    (root / "split.csv").write_text("\n".join(["slide_id,split", *rows]) + "\n")
    with pytest.raises(DatasetError, match="got 20 pairs equal in float16"):
        planned(root, splits=root / "split.csv")


def test_all_zero_embeddings_and_two_widths_are_refused_by_name(tmp_path: Path) -> None:
    root = tmp_path / "f"
    noise(root, [f"s{i:02}x" for i in range(20)], coin(20))
    write_embeddings(root / "s03x.h5", np.zeros((12, DIM)))
    with pytest.raises(
        DatasetError,
        match=r"must not be all zero, got only zeros in 1 of 20 slides \(s03x\)",
    ):
        planned(root)
    write_embeddings(root / "s03x.h5", np.ones((12, 8)))
    sentence = r"same number of channels, got 24 in '.*s00x\.h5' and 8 in '.*s03x\.h5'"
    with pytest.raises(DatasetError, match=sentence):
        planned(root)


def small(root: Path) -> TrainConfig:
    return TrainConfig(
        labels=LabelsConfig(labels=root / "labels.csv", target=("label",)),
        head=HeadConfig(head="linear"),
        fit=FitConfig(epochs=2, device="cpu"),
        cross=FoldsConfig(folds=3, inner_folds=3),
    )


def test_a_renamed_training_slide_is_known_again_by_its_content(tmp_path: Path) -> None:
    root, new = tmp_path / "f", tmp_path / "new"
    noise(root, [f"s{i:02}x" for i in range(24)], coin(24))
    train(root, out=tmp_path / "e", config=small(root))
    by_fold = {
        r["slide_id"]: float(r["p_a"])
        for r in read_table(tmp_path / "e" / "predictions.csv")
    }
    new.mkdir()
    shutil.copy(root / "s00x.h5", new / "renamed.h5")
    rng = np.random.default_rng(5)
    write_embeddings(new / "stranger.h5", rng.normal(size=(12, DIM)))
    with h5py.File(root / "s01x.h5") as file:
        tiles = file["features"][:]  # type: ignore[index]
    write_embeddings(new / "rescan.h5", tiles + 1e-3 * rng.normal(size=tiles.shape))
    found = predict(tmp_path / "e" / "model.safetensors", new, out=tmp_path / "p")
    rows = {row.name: row for row in found.rows}
    assert rows["renamed"].warnings == (
        "the embeddings of a training slide with another name: predicted by the models of "
        "folds that did not train on it",
    )
    assert rows["renamed"].answers[0] == pytest.approx(by_fold["s00x"], abs=1e-6)
    assert (
        rows["rescan"]
        .warnings[0]
        .startswith("nearly the mean embedding of a training slide")
    )
    assert not any("training slide" in line for line in rows["stranger"].warnings)


def test_the_page_shows_the_warnings(tmp_path: Path) -> None:
    root = tmp_path / "f"
    noise(
        root,
        [f"P{i // 2:03}_{'AB'[i % 2]}" for i in range(24)],
        ["a", "a", "b", "b"] * 6,
    )
    document = train(root, out=tmp_path / "e", config=small(root))
    assert "24 names begin with the same letters" in document["warnings"][0]
    assert (
        "24 names begin with the same letters"
        in (tmp_path / "e" / "index.html").read_text()
    )


def test_a_digest_knows_values_through_float16_and_tells_small_ones_apart() -> None:
    x = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    assert content_digest(x) == content_digest(x.astype(np.float16))
    assert content_digest(x) != content_digest(x + np.float32(0.01))
    tiny = x * np.float32(1e-9)  # zero in float16
    assert content_digest(tiny) != content_digest(-tiny)


@pytest.mark.parametrize("last", [1.0, 1e6])
def test_a_digest_of_blocks_is_that_of_the_whole(tmp_path: Path, last: float) -> None:
    """Also if only the last block has a value that does not fit into float16."""
    x = (
        np.random.default_rng(0)
        .normal(size=(BLOCK_VALUES // 3 + 5, 3))
        .astype(np.float32)
    )
    x[-1, 0] = last
    x[3, 1] = -0.0
    path = tmp_path / "a.h5"
    write_embeddings(path, x)
    expected = hashlib.sha256(rounded(x).data).hexdigest()
    assert content_digest(x) == expected
    assert content_digest(EmbeddingRows(path)) == expected


def test_rounding_by_bits_is_rounding_by_arithmetic() -> None:
    """Every float16 number, values between two of them, zeros, and values that do not fit."""
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    between = halves.astype(np.float64) * 1.0003
    cases: list[npt.NDArray[np.floating]] = [
        halves[None],
        between[None, np.abs(between) < 65_000],
        np.array([[1.0, -0.0], [0.0, -1e-9]], dtype=np.float32).T,
        np.array([[2.0**-10, -0.0]]),
    ]
    for x in cases:
        plain = x.astype(np.float16) + np.float16(0)
        assert rounded(x).tobytes() == np.ascontiguousarray(plain).tobytes()
    for x in (np.array([[1.0, 65_520.0]]), np.array([[2.0**-11, 0.0]])):
        assert rounded(x).tobytes() == x.astype(np.float32).tobytes()


def test_near_pairs_are_those_of_cosine_and_length() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1500, DIM)) + 100  # the mean of all says nothing
    x[1400] = x[3] + 1e-4
    x[1401] = x[4] + 0.5
    assert near_pairs(x) == [(3, 1400)]


def test_a_sketch_is_near_where_the_angle_is_small() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 64))
    known = sketches(x, np.zeros(64))
    limit = near_limit(known)
    assert limit == SKETCH_NEAR
    moved = sketches(x + 0.01 * rng.normal(size=x.shape), np.zeros(64))
    others = sketches(rng.normal(size=x.shape), np.zeros(64))
    assert all(is_near(a, [b], limit) for a, b in zip(known, moved, strict=True))
    assert not any(is_near(sketch, known, limit) for sketch in others)


@pytest.mark.parametrize(("channels", "slides"), [(8, 20), (8, 219), (64, 219)])
def test_slides_of_few_directions_are_near_only_where_chance_cannot_be(
    channels: int, slides: int
) -> None:
    """Clean cohorts whose variance lies in three directions, with rescans planted."""
    rng = np.random.default_rng(1)
    scale = np.r_[3 * np.ones(3), 0.3 * np.ones(channels - 3)]
    by_angle = 0
    by_chance = 0
    rescans = 0
    for _ in range(5):
        trained = rng.normal(size=(slides, channels)) * scale
        center = trained.mean(axis=0)
        known = sketches(trained, center)
        limit = near_limit(known)
        strangers = sketches(rng.normal(size=trained.shape) * scale, center)
        by_angle += sum(is_near(one, known, SKETCH_NEAR) for one in strangers)
        by_chance += sum(is_near(one, known, limit) for one in strangers)
        copied = sketches(trained + 1e-4 * rng.normal(size=trained.shape), center)
        rescans += sum(is_near(one, known, limit) for one in copied)
    assert by_chance <= 3
    assert by_angle > 10 or (channels, slides) != (8, 219)
    assert rescans == 5 * slides


def test_fewer_than_three_slides_say_nothing_of_chance() -> None:
    known = sketches(np.eye(8)[:2], np.zeros(8))
    assert near_limit(known) < 0
    assert not is_near(known[0], known, near_limit(known))
    assert near_limit(()) < 0


def test_equal_slides_are_counted_as_their_pairs_would_be() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        case_of = rng.integers(0, 12, size=40)
        # case 11 is on no side
        turns = np.array_split(rng.permutation(11), 4)
        folds = [(np.setdiff1d(np.arange(11), test), test) for test in turns]
        numbers = rng.integers(0, 6, size=40)
        groups = [np.flatnonzero(numbers == n).tolist() for n in range(6)]
        crossed = {
            (int(i), int(j))
            for train, test in folds
            for one, two in ((train, test), (test, train))
            for i, j in product(one, two)
        }
        pairs = [
            (earlier, slide)
            for group in groups
            for slide in group
            for earlier in group
            if earlier < slide and (case_of[earlier], case_of[slide]) in crossed
        ]
        found = crossing_equals(groups, sides_of_slides(case_of, folds))
        assert found == (len(pairs), pairs[:3])


def test_the_pairs_of_many_equal_slides_are_counted_without_a_list_of_them() -> None:
    slides = 6_000
    sides = [(1, -1) if slide % 2 else (-1, 1) for slide in range(slides)]
    tracemalloc.start()
    found = crossing_equals([[*range(slides)]], sides)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == (9_000_000, [(0, 1), (1, 2), (0, 3)])
    assert peak_bytes < 1_000_000  # a list of the pairs would take hundreds of MB
