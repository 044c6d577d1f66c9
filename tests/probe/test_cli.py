"""`thinsection probe` from the shell: files, strict JSON, pages that fetch nothing, errors."""

import csv
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.probe.make import FEATURES, rectangle, two_regions, write_tiles_h5
from typer.testing import CliRunner

from thinsection.cli.app import build_app
from thinsection.config import as_mapping
from thinsection.errors import ConfigError, DatasetError
from thinsection.probe.protocol import HONEST


def invoke(*arguments: object) -> str:
    """Standard output; an exception of the command is raised."""
    result = CliRunner().invoke(build_app(["probe"]), ["probe", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def strict_json(path: Path) -> dict[str, Any]:
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    document: dict[str, Any] = json.loads(path.read_text(), parse_constant=refuse)
    return document


@pytest.mark.parametrize("probe", ["knn", "fewshot", "linear"])
def test_regions_of_one_slide_are_probed_from_the_shell(
    probe: str, tmp_path: Path
) -> None:
    run, labels = two_regions(tmp_path)
    out = tmp_path / "out"
    printed = invoke(
        probe,
        run,
        "--labels",
        labels,
        "--allow-leakage",
        "--out",
        out,
        "--device",
        "cpu",
    )
    result = strict_json(out / f"{probe}.json")
    assert result["score"] > 0.85
    assert f"macro F1 {result['score']:.4f}" in printed
    assert "settings: " in printed
    assert result["protocol"] == json.loads(json.dumps(as_mapping(HONEST)))
    assert (result["interval"]["low"], result["interval"]["units"]) == (None, 1)
    assert "no interval: at least 5 slides" in printed and "got 1" in printed
    assert "share 1 slides (&#39;slide-1&#39;)" in (out / f"{probe}.html").read_text()
    assert np.sum(result["confusion_matrix"]) == result["data"]["val_rows"]
    rows = list(csv.DictReader((out / f"{probe}.csv").read_text().splitlines()))
    assert len(rows) == result["data"]["val_rows"]
    assert {r["truth"] for r in rows} == {"stroma", "tumour"}
    right = sum(int(r["correct"]) for r in rows)
    assert right == np.trace(np.array(result["confusion_matrix"]))
    assert math.isclose(
        float(rows[0]["p_stroma"]) + float(rows[0]["p_tumour"]), 1, abs_tol=1e-6
    )
    page = (out / f"{probe}.html").read_text()
    assert page.count("data:image/png;base64,") >= 3
    assert not re.search(r"""(src|href)=["']?(https?:|//|file:)""", page)
    images = list(out.glob(f"{probe}_*.png"))
    assert len(images) >= 3
    for image in images:
        assert image.read_bytes().startswith(b"\x89PNG")


def test_the_same_command_writes_the_same_bytes(tmp_path: Path) -> None:
    run, labels = two_regions(tmp_path)
    for name in ("a", "b"):
        invoke(
            "knn", run, "--labels", labels, "--allow-leakage", "--out", tmp_path / name
        )
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_class_names_are_text_in_pages_and_no_formula_in_tables(tmp_path: Path) -> None:
    run, labels = two_regions(tmp_path)
    evil = "=cmd()|<script>alert(1)</script>"
    features = [
        rectangle((0, 0, 7 * 512, 5000), evil),
        rectangle((7 * 512, 0, 14 * 512, 5000), "tumour"),
    ]
    labels.write_text(json.dumps({"features": features}))
    invoke("knn", run, "--labels", labels, "--allow-leakage", "--out", tmp_path)
    assert "<script>" not in (tmp_path / "knn.html").read_text()
    assert ",=cmd" not in (tmp_path / "knn.csv").read_text()


def test_the_tile_set_score_is_the_mean_of_the_three(tmp_path: Path) -> None:
    run, labels = two_regions(tmp_path)
    config = tmp_path / "probe.toml"
    config.write_text(
        f'[data]\nlabels = "{labels}"\nallow_leakage = true\n[compute]\nseed = 7\n'
    )
    invoke("tileset", run, "--config", config, "--out", tmp_path)
    names = ("linear", "knn", "fewshot")
    three = [strict_json(tmp_path / f"{p}.json") for p in names]
    whole = strict_json(tmp_path / "tileset.json")
    assert whole["score"] == pytest.approx(np.mean([r["score"] for r in three]))
    assert whole["protocol"]["seed"] == 7


def slides(root: Path, n: int = 18) -> Path:
    rng = np.random.default_rng(0)
    for i in range(n):
        tiles = rng.normal(size=(6, 5)) + 2.0 * (i % 2)
        write_tiles_h5(
            root / "feats" / f"s{i}.h5", np.zeros((6, 2)), tiles.astype("f4")
        )
    rows = [
        f"s{i},{'ab'[i % 2]},{int(i % 3 > 0)},{200 - 60 * (i % 2) - i}"
        for i in range(n)
    ]
    (root / "cases.csv").write_text("\n".join(["slide_id,label,event,time", *rows]))
    return root


@pytest.mark.parametrize(
    ("arguments", "name", "metric", "picture"),
    [
        (("slide",), "slide", "auroc", "roc"),
        (("survival",), "survival", "c_index", "survival"),
    ],
)
def test_cases_are_probed_from_the_shell(
    arguments: tuple[str, ...], name: str, metric: str, picture: str, tmp_path: Path
) -> None:
    root = slides(tmp_path)
    probe, *flags = arguments
    table, feats = root / "cases.csv", root / "feats"
    invoke(probe, table, "--embeddings", feats, "--out", root / "out", *flags)
    result = strict_json(root / "out" / f"{name}.json")
    assert result["metric"] == metric
    assert result["score"] > 0.65
    rows = 3 * 18  # of each seed
    assert len((root / "out" / f"{name}.csv").read_text().splitlines()) == 1 + rows
    assert (root / "out" / f"{name}.html").is_file()
    assert (root / "out" / f"{name}_{picture}.png").read_bytes().startswith(b"\x89PNG")


def test_robustness_is_probed_from_the_shell(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    biology, centre = rng.integers(0, 2, 60), rng.integers(0, 2, 60)
    x = rng.normal(size=(60, 4)) + 1.5 * np.stack(
        [biology, centre, biology, centre], axis=1
    )
    np.save(tmp_path / "e.npy", x.astype(np.float32))
    rows = [f"s{i // 3}-{c},b{b},m{c}" for i, (b, c) in enumerate(zip(biology, centre))]
    table = tmp_path / "own.csv"
    table.write_text("\n".join(["slide_id,biological_class,medical_center", *rows]))
    invoke(
        "robustness",
        table,
        "--embeddings",
        tmp_path / "e.npy",
        "--out",
        tmp_path,
        "--k",
        5,
    )
    result = strict_json(tmp_path / "robustness.json")
    assert result["details"]["k"] == 5
    assert 0 < result["score"] < 1
    assert {"ss", "so", "os", "oo"} <= result[
        "details"
    ].keys()  # neighbours of each kind


def mistake_no_labels(root: Path) -> list[object]:
    return ["knn", two_regions(root)[0] / FEATURES / "slide-1.h5"]


def mistake_no_data(root: Path) -> list[object]:
    return ["knn", root / "absent"]


def mistake_no_embeddings(root: Path) -> list[object]:
    return ["slide", slides(root) / "cases.csv"]


def mistake_protocol(root: Path) -> list[object]:
    run, labels = two_regions(root)
    return ["knn", run, "--labels", labels, "--allow-leakage", "--protocol", "eva"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (mistake_no_labels, ConfigError, r"pass labels="),
        (mistake_no_data, DatasetError, r"data must exist, got .*absent"),
        (
            mistake_no_embeddings,
            ConfigError,
            r"must be a folder of slides, got None; pass embed",
        ),
        (
            mistake_protocol,
            ConfigError,
            r"define the knn probe, got 'eva'; use 'honest' or 'nanopath'",
        ),
    ],
)
def test_a_mistake_says_what_to_do(
    arguments: Callable[[Path], list[object]],
    error: type[Exception],
    message: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=message):
        invoke(*arguments(tmp_path), "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
