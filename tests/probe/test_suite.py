"""`thinsection bench`: suites of encoders and tasks, in the files that other suites publish."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.probe.make import write_tiles_h5
from typer.testing import CliRunner

import thinsection
from thinsection.cli.app import build_app
from thinsection.errors import ConfigError, DatasetError, InvalidInputError
from thinsection.files.atomic import write_text
from thinsection.probe.data import images
from thinsection.probe.data.cases import load_case_table
from thinsection.probe.grid import find_tasks, suite_jobs
from thinsection.probe.protocol import NANOPATH
from thinsection.probe.scores import read_scores, score_table
from thinsection.probe.segment.data import load_bcss


def published(root: Path, n: int = 60) -> Path:
    """A list of tiles, one of slides and one of survival, with the embeddings of two encoders."""
    rng = np.random.default_rng(0)
    labels = (np.arange(n) % 2).tolist()
    parts = {"train": range(40), "val": range(40, n), "test": range(0)}
    tiles = {
        name: {
            "images": [f"{i}.png" for i in rows],
            "labels": [labels[i] for i in rows],
        }
        for name, rows in parts.items()
    }
    slides = {
        name: {
            "slide_ids": [f"s{i}" for i in rows],
            "labels": [labels[i] for i in rows],
        }
        for name, rows in parts.items()
    }
    cases = [f"s{i}" for i in range(n)]
    folds = [
        {"train": cases[:40], "val": cases[40:]},
        {"train": cases[20:], "val": cases[:20]},
    ]
    days = [200.0 - 60 * y - i for i, y in enumerate(labels)]
    survival = {"case_ids": cases, "case_slides": [[c] for c in cases], "folds": folds}
    survival |= {"events": [int(i % 3 > 0) for i in range(n)], "days": days}
    lists = {"mini": tiles, "ward": slides, "years": survival}
    for name, content in lists.items():
        write_text(root / "lists" / f"{name}.json", json.dumps(content))
    for encoder, signal in (("strong", 2.0), ("weak", 0.1)):
        x = (rng.normal(size=(n, 6)) + signal * np.array(labels)[:, None]).astype("f4")
        (root / "features" / encoder).mkdir(parents=True)
        np.save(root / "features" / encoder / "mini.npy", x)
        for i in range(n):
            place = root / "features" / encoder / "slides" / f"s{i}.h5"
            write_tiles_h5(place, np.zeros((1, 2)), x[i : i + 1])
    suite = """
name = "mini"
encoders = ["strong", "weak"]
protocol = "nanopath"
device = "cpu"
[[tasks]]
data = "lists/mini.json"
embeddings = "features/{encoder}/{task}.npy"
probes = ["knn", "retrieval"]
[[tasks]]
data = "lists/ward.json"
embeddings = "features/{encoder}/slides"
[[tasks]]
data = "lists/years.json"
embeddings = "features/{encoder}/slides"
"""
    write_text(root / "suite.toml", suite)
    return root / "suite.toml"


def bench(suite: Path, out: Path) -> str:
    arguments = ["bench", str(suite), "--executor", "inline", "--out", str(out)]
    result = CliRunner().invoke(build_app(["bench"]), arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_a_suite_runs_resumes_and_ends_in_one_json_and_one_page(tmp_path: Path) -> None:
    suite = published(tmp_path)
    assert "mini-strong-knn: done" in bench(suite, tmp_path / "out")
    document = json.loads((tmp_path / "out" / "suite.json").read_text())
    assert len(document["rows"]) == 8
    scores = read_scores([tmp_path])
    assert len(scores) == 8
    assert {each["data"]["encoder"] for each in scores} == {"strong", "weak"}
    assert all(len(each["data"]["embeddings_sha256"]) == 64 for each in scores)
    compared = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert {t["task"] for t in compared["tasks"]} == {
        *("mini, knn", "mini, retrieval", "ward, slide", "years, survival")
    }
    assert compared["models"][0]["model"] == "strong"
    assert compared["models"][0]["mean_rank"] == 1
    assert "skipped" in bench(suite, tmp_path / "out")
    assert read_scores([tmp_path / "out"]) == scores


def test_small_results_say_what_made_them_and_become_one_table(tmp_path: Path) -> None:
    bench(published(tmp_path), tmp_path / "out")
    small = json.loads((tmp_path / "out/scores/mini-strong-knn.json").read_text())
    full = json.loads((tmp_path / "out/mini-strong-knn/knn.json").read_text())
    for key in ("score", "interval", "metric", "dataset"):
        assert small[key] == full[key]
    assert small["protocol"] == {"name": "nanopath", "seed": 1337}
    assert small["versions"]["thinsection"] == thinsection.__version__
    assert small["versions"]["numpy"] == np.__version__
    assert small["data"]["rows_sha256"] == full["data"]["rows_sha256"]
    size = (tmp_path / "out/scores/mini-strong-knn.json").stat().st_size
    assert size < 2_000 < (tmp_path / "out/mini-strong-knn/knn.json").stat().st_size

    # one bench a machine: the files of two encoders come from two folders
    for path in sorted((tmp_path / "out/scores").glob("*-weak-*.json")):
        write_text(tmp_path / "other/scores" / path.name, path.read_text())
        path.unlink()
    answer = CliRunner().invoke(
        build_app(["probe"]),
        ["probe", "scores", str(tmp_path / "out"), str(tmp_path / "other")],
    )
    assert answer.exit_code == 0, answer.output
    heading, _, *lines = answer.output.splitlines()
    assert heading == "| task | probe | metric | protocol | `strong` | `weak` |"
    assert [line.split(" | ")[:2] for line in lines] == [
        ["| mini", "knn"],
        ["| mini", "retrieval"],
        ["| ward", "slide"],
        ["| years", "survival"],
    ]
    low, high = small["interval"]["low"], small["interval"]["high"]
    assert f"| {small['score']:.3f} [{low:.3f}, {high:.3f}] |" in lines[0]


def test_a_table_has_a_row_for_each_protocol_and_refuses_two_scores_of_one(
    tmp_path: Path,
) -> None:
    bench(published(tmp_path), tmp_path / "out")
    path = tmp_path / "out/scores/mini-weak-knn.json"
    other = json.loads(path.read_text())
    other["protocol"]["seed"] = 3
    write_text(tmp_path / "second/scores/a.json", json.dumps(other))
    lines = score_table(read_scores([tmp_path])).splitlines()
    assert [line.split(" | ")[4] == "" for line in lines if "| knn |" in line] == [
        *(False, True)
    ]
    other["protocol"]["seed"] = 1337
    other["score"] += 0.01
    write_text(tmp_path / "second/scores/a.json", json.dumps(other))
    with pytest.raises(InvalidInputError, match=r"must be equal, got .*mini-weak-knn"):
        read_scores([tmp_path])
    with pytest.raises(InvalidInputError, match="must hold scores/"):
        read_scores([tmp_path / "lists"])


def test_tasks_are_found_in_the_folders_of_other_suites(tmp_path: Path) -> None:
    published(tmp_path)
    task = tmp_path / "bench" / "cptac" / "os"
    write_text(task / "k=all.tsv", "case_id\tslide_id\tfold_0\tos_event\tos_days\n")
    write_text(task / "config.yaml", "task_col: os\n")
    write_text(tmp_path / "eva" / "bach" / "manifest.csv", "embeddings,target,split\n")
    kinds = {name: kind for name, _, kind in find_tasks(tmp_path / "lists")}
    assert kinds == {"mini": "tiles", "ward": "slide", "years": "survival"}
    assert [*find_tasks(tmp_path / "bench")] == [("os", task, "survival")]
    assert [t[0] for t in find_tasks(tmp_path / "eva")] == ["bach"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("encoders = []", "encoders must name at least one"),
        (
            'encoders = ["a"]\nprotocoll = "eva"',
            "unknown setting 'protocoll'; did you mean",
        ),
        ('encoders = ["a"]\ntasks = [{probes = ["knn"]}]', "each task must have data"),
        (
            'encoders = ["a"]\ntasks = [{data = "x.csv", probes = ["kn"]}]',
            "did you mean 'knn'",
        ),
    ],
)
def test_a_mistake_in_a_suite_is_told_before_anything_runs(
    line: str, message: str, tmp_path: Path
) -> None:
    import tomllib

    document = tomllib.loads(line)
    document.setdefault("tasks", [{"data": "x.csv"}])
    with pytest.raises(ConfigError, match=message):
        suite_jobs(tmp_path / "suite.toml", document)


def picture(path: Path, size: tuple[int, int] = (8, 6)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (200, 120, 160)).save(path)


def test_bach_is_split_by_patient_as_eva_has_it(tmp_path: Path) -> None:
    for name in ("Benign", "InSitu", "Invasive", "Normal"):
        for i in range(100):
            picture(
                tmp_path / "ICIAR2018_BACH_Challenge" / "Photos" / name / f"i{i:03}.tif"
            )
    data = images.load_images("bach", tmp_path)
    train, val = data.fold
    assert (len(train), len(val)) == (268, 132)
    assert not set(train) & set(val)
    assert data.images[val[0]].path.name == "i041.tif"


def test_crc_validates_on_its_second_part(tmp_path: Path) -> None:
    for part, count in (("NCT-CRC-HE-100K", 3), ("CRC-VAL-HE-7K", 2)):
        for name in ("ADI", "TUM"):
            for i in range(count):
                picture(tmp_path / part / name / f"{i}.tif")
    data = images.load_images("crc", tmp_path)
    assert [len(rows) for rows in data.fold] == [6, 4]
    assert data.class_names == ("ADI", "TUM")


def test_unitopatho_goes_by_its_tables(tmp_path: Path) -> None:
    for i in range(4):
        picture(tmp_path / "800" / "HP" / f"{i}.png")
    write_text(
        tmp_path / "800" / "train.csv",
        "image_id,top_label\n0.png,0\n1.png,3\n2.png,0\n",
    )
    write_text(tmp_path / "800" / "test.csv", "image_id,top_label\n3.png,5\n")
    data = images.load_images("unitopatho", tmp_path)
    assert [len(rows) for rows in data.fold] == [3, 1]
    assert data.labels.tolist() == [0, 3, 0, 5]
    write_text(tmp_path / "800" / "test.csv", "image_id,top_label\n9.png,5\n")
    with pytest.raises(
        DatasetError, match=r"image must exist, got \['9.png'\], which the tables name"
    ):
        images.load_images("unitopatho", tmp_path)


def test_gleason_validates_on_one_array_and_leaves_the_test_array_shut(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "train_validation_patches_750"
    for name in (
        "ZT111/ZT111_1_A_1_0_2",
        "ZT199/ZT199_1_A_1_0_0",
        "ZT76/ZT76_1_A_1_0_3",
    ):
        picture(folder / f"{name}.jpg")
    picture(tmp_path / "test_patches_750" / "patho_1" / "ZT80_1_A_1_0_1.jpg")
    data = images.load_images("gleason", tmp_path)
    assert data.labels.tolist() == [2, 0, 3]
    assert [rows.tolist() for rows in data.fold] == [[0, 1], [2]]


def test_pandas_table_is_read_without_noisy_labels(tmp_path: Path) -> None:
    rows = "image_id,isup_grade,noise_ratio_10\na,0,0\nb,3,0\nc,5,1\n"
    write_text(tmp_path / "train.csv", rows)
    table = load_case_table(tmp_path / "train.csv", NANOPATH, survival=False)
    assert table.ids == ("a", "b")


def test_bcss_is_cut_into_squares_of_the_region_by_institute(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("TCGA-A1-x", "TCGA-D8-y", "TCGA-OL-z"):
        mask = np.zeros((1100, 1600), dtype=np.uint8)
        mask[:1024, :1024] = rng.choice([1, 2, 20, 21], (1024, 1024))
        for folder, content in (
            ("masks", mask),
            ("rgbs_colorNormalized", np.stack([mask] * 3, -1)),
        ):
            (tmp_path / folder).mkdir(exist_ok=True)
            Image.fromarray(content).save(tmp_path / folder / f"{name}.png")
    data = load_bcss(tmp_path)
    assert (
        len(data) == 8
    )  # four squares inside each region; the third column lies outside
    assert [len(rows) for rows in data.folds[0]] == [4, 4]
    assert not any("OL" in name for name in data.ids)
    assert set(np.unique(data.label(0))) == {1, 2, 5}
    assert data.image(0).shape == (256, 256, 3)
