"""Heatmaps: a planted lesion is found on a real slide; pictures, GeoJSON and sheets say so."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import roc_auc_score
from tests.predict.lesions import HEAD, Trained, train
from tests.support.lesion import Box, inside, write_with_lesion
from tests.support.shell import thinsection

import thinsection as ts
from thinsection.config import replace_flat
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.evaluation.embeddings import open_embeddings
from thinsection.evaluation.target import Target
from thinsection.files.atomic import TMP_MARK
from thinsection.predict.answering import through, tile_scores
from thinsection.predict.bags import StoredBag
from thinsection.predict.heatmap import (
    GAP_PX,
    TEXT_PX,
    HeatmapConfig,
    HeatmapRunConfig,
    _caption,
    draw_top_tiles,
    heatmap,
)
from thinsection.predict.model_file import load_model, save_model
from thinsection.predict.replacing import remove_stale_heatmaps
from thinsection.results.relink import relink
from thinsection.results.tiled_slide import tiled_slide
from thinsection.store.geojson import write_tiles_geojson
from thinsection.store.slide_ids import move_slides
from thinsection.store.tiles_h5 import TilesFile, read_tiles

LESION: Box = (2100, 900, 2950, 1750)


@pytest.fixture(scope="module")
def drawn(
    source: Path, trained: Trained, tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """Of the whole slide with a lesion at a place of which no training slide has one."""
    folder = tmp_path_factory.mktemp("whole")
    write_with_lesion(source, folder / "whole.tif", LESION, mpp=0.5, seed=77)
    return ts.heatmap(trained.model, folder / "whole.tif", out=folder / "results")


def test_the_top_tiles_lie_in_the_lesion_and_the_others_rank_below(
    drawn: list[Path],
) -> None:
    results = ts.open_results(drawn[0].parents[2])
    table = results.tiles("whole")
    share = inside(table.coords_l0, 512 // 2, LESION)
    planted = share > 0.5
    score = table.columns["heatmap_grade:score_high"]
    assert planted.sum() >= 9
    assert (share[np.argsort(-score)[: planted.sum() // 2]] > 0).all()
    # tiles that the border cuts are neither
    clear = planted | (share == 0)
    assert roc_auc_score(planted[clear], score[clear]) >= 0.95
    attention = table.columns["heatmap_grade:attention"]
    assert attention.sum() == pytest.approx(1, abs=1e-5)
    low = table.columns["heatmap_grade:score_low"]
    np.testing.assert_allclose(low, -score, atol=1e-6)


def test_the_scores_of_two_classes_add_up_to_the_log_odds(
    trained: Trained, drawn: list[Path]
) -> None:
    """The members' log-odds less their bias, which no tile adds."""
    model = load_model(trained.model)
    table = ts.open_results(drawn[0].parents[2]).tiles("whole")
    (features,) = drawn[0].parents[1].glob("features_*/whole.h5")
    bag = StoredBag([open_embeddings(features)], [features])
    logits, _ = through(
        model, [0, 1], bag, "cpu", tiles=False, budget_bytes=bag.num_bytes
    )
    bias = np.stack([h.classifier.bias.detach().numpy() for h in model.heads])
    temperature = np.array([m.temperature for m in model.card.members])
    log_odds = np.diff(logits - bias, axis=1)[:, 0] / temperature
    total = table.columns["heatmap_grade:score_high"].astype(np.float64).sum()
    assert total == pytest.approx(log_odds.mean(), rel=1e-4)


def test_scores_of_three_classes_are_logits_less_the_mean_of_the_others() -> None:
    evidence = np.random.default_rng(0).normal(size=(20, 3))
    target = Target(kind="multiclass", columns=("grade",), names=("a", "b", "c"))
    scores = tile_scores(evidence, target)
    total = evidence.sum(axis=0)
    expected = [
        total[0] - (total[1] + total[2]) / 2,
        total[1] - (total[0] + total[2]) / 2,
        total[2] - (total[0] + total[1]) / 2,
    ]
    np.testing.assert_allclose(scores.sum(axis=0), expected, atol=1e-12)
    two = replace(target, kind="binary", names=("a", "b"))
    np.testing.assert_allclose(
        tile_scores(evidence[:, :2], two)[:, 1], evidence[:, 1] - evidence[:, 0]
    )
    several = replace(target, kind="multilabel")
    np.testing.assert_array_equal(tile_scores(evidence, several), evidence)


def limits_of(home: Path) -> dict[str, dict[str, list[float]]]:
    """Values of the first and last colour, by slide and column."""
    record: dict[str, Any] = json.loads((home / "scale.json").read_text())
    limits: dict[str, dict[str, list[float]]] = record["limits"]
    return limits


def test_with_one_scale_a_colour_means_the_same_on_every_slide_and_after_a_second_run(
    trained: Trained, tmp_path: Path
) -> None:
    """One slide first, then all: the first is drawn again as the cohort's scale wants it."""
    settings: dict[str, Any] = {"top_tiles": 0, "geojson": False, "scale": "cohort"}
    first = trained.slides[0]
    out = tmp_path / "results"
    shutil.copytree(trained.results, out)  # embeddings are there
    alone = ts.heatmap(trained.model, first, out=out, **settings)
    picture = next(p for p in alone if "score_" in p.name)
    home = picture.parent
    before = picture.read_bytes()
    limits_alone = limits_of(home)[first.stem]
    together = ts.heatmap(trained.model, list(trained.slides), out=out, **settings)
    by_slide = limits_of(home)
    limits = by_slide[first.stem]
    assert all(by_slide[slide.stem] == limits for slide in trained.slides)
    assert limits["score_high"] != limits_alone["score_high"]
    assert picture.read_bytes() != before
    again = picture.read_bytes()
    # the same slide alone once more: nothing of the others changes the scale back
    ts.heatmap(trained.model, first, out=out, **settings)
    assert limits_of(home) == by_slide
    assert picture.read_bytes() == again
    # every slide shows the same class: a negative slide is blue, a positive one red
    assert {p.name.split(".")[1] for p in together} == {"attention", "score_high"}
    low, low_and_scale = limits["score_high"]
    assert low == -low_and_scale
    colours = {}
    for path in (p for p in together if "score_high" in p.name):
        rgb = np.asarray(Image.open(path).convert("RGB")).astype(int)
        colours[path.name] = (rgb[..., 0] - rgb[..., 2]).mean()
    high = [v for name, v in colours.items() if "high.score" in name.replace("-", ".")]
    rest = [v for name, v in colours.items() if "low.score" in name.replace("-", ".")]
    assert len(high) == len(rest) == 4 and np.mean(high) > np.mean(rest)


def test_each_slide_has_its_own_scale_and_another_slide_changes_no_picture(
    trained: Trained, tmp_path: Path
) -> None:
    out = tmp_path / "results"
    shutil.copytree(trained.results, out)
    first, *others = trained.slides
    settings: dict[str, Any] = {"top_tiles": 0, "geojson": False}
    alone = ts.heatmap(trained.model, first, out=out, **settings)
    before = {path: path.read_bytes() for path in alone}
    home = alone[0].parent
    ts.heatmap(trained.model, others, out=out, **settings)
    assert {path: path.read_bytes() for path in alone} == before
    limits = limits_of(home)
    assert set(limits) == {slide.stem for slide in trained.slides}
    highest = {}
    for slide in trained.slides:
        values = np.abs(read_tiles(home / f"{slide.stem}.h5").columns["score_high"])
        own = np.percentile(values, 99, method="inverted_cdf")
        low, high = limits[slide.stem]["score_high"]
        assert high == pytest.approx(max(own, 1 / len(values)), rel=1e-6)
        assert low == -high
        highest[slide.stem] = high
    assert len(set(highest.values())) > 1
    # another kind of scale draws the earlier slides again, too
    ts.heatmap(trained.model, first, out=out, scale="cohort", **settings)
    assert len({str(of_slide) for of_slide in limits_of(home).values()}) == 1
    assert {path: path.read_bytes() for path in alone} != before
    ts.heatmap(trained.model, others[0], out=out, **settings)
    assert limits_of(home) == limits
    assert {path: path.read_bytes() for path in alone} == before


def test_a_slide_that_moved_is_named_and_found_by_relink(
    trained: Trained, tmp_path: Path
) -> None:
    """Its stored picture is drawn on; the sheet of top tiles needs the slide."""
    out = tmp_path / "results"
    shutil.copytree(trained.results, out)
    slides = tmp_path / "slides"
    slides.mkdir()
    for path in trained.slides:
        shutil.copy(path, slides)
    move_slides(out, {p.stem: str(slides / p.name) for p in trained.slides})
    moved = trained.slides[1].name
    (tmp_path / "elsewhere").mkdir()
    (slides / moved).rename(tmp_path / "elsewhere" / moved)
    command = ("heatmap", trained.model, out, "--no-geojson")
    ended = thinsection(*command)
    assert ended.returncode == 3, ended.stdout + ended.stderr
    (line,) = (one for one in ended.stdout.splitlines() if "left out" in one)
    assert line.startswith(f"{Path(moved).stem}: left out: ")
    assert "`thinsection relink RESULTS NEW_PLACE` finds" in line
    ids = {path.stem for path in trained.slides}
    for kind, expected in ("attention", ids), ("top", ids - {Path(moved).stem}):
        pictures = out.glob(f"*/heatmap_*/*.{kind}.png")
        assert {path.name.partition(".")[0] for path in pictures} == expected
    relink(out, [tmp_path / "elsewhere"])
    ended = thinsection(*command)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "left out" not in ended.stdout


def test_the_scale_is_that_of_all_tiles_of_all_slides(
    trained: Trained, tmp_path: Path
) -> None:
    out = tmp_path / "results"
    shutil.copytree(trained.results, out)
    drawn = ts.heatmap(
        trained.model,
        list(trained.slides),
        out=out,
        top_tiles=0,
        geojson=False,
        scale="cohort",
    )
    home = drawn[0].parent
    values = [read_tiles(p).columns["score_high"] for p in home.glob("*.h5")]
    every = np.abs(np.concatenate(values))
    expected = np.percentile(every, 99, method="inverted_cdf")
    highest = limits_of(home)[trained.slides[0].stem]["score_high"][1]
    assert highest == pytest.approx(expected, rel=1e-6)


def test_the_class_that_is_drawn_can_be_chosen(
    trained: Trained, tmp_path: Path
) -> None:
    drawn = ts.heatmap(
        trained.model,
        trained.slides[0],
        out=tmp_path / "results",
        positive="low",
        top_tiles=0,
        geojson=False,
    )
    assert [p.name.split(".")[1] for p in drawn] == ["attention", "score_low"]
    with pytest.raises(
        ConfigError, match="positive must be one of low, high, got 'hihg'"
    ):
        ts.heatmap(
            trained.model, trained.slides[0], out=tmp_path / "r", positive="hihg"
        )


def test_a_head_without_evidence_shows_its_attention(
    source: Path, trained: Trained, tmp_path: Path
) -> None:
    ids = [path.stem for path in trained.slides[:4]]
    path = tmp_path / "trans.safetensors"
    model = train(trained.results, ids, replace_head("transmil"), path)
    drawn = ts.heatmap(model.model, trained.slides[0], out=tmp_path / "results")
    assert {p.name.split(".", 1)[1] for p in drawn} == {
        "attention.png",
        "geojson",
        "top.png",
    }


def test_the_pictures_show_the_lesion_over_the_slide(drawn: list[Path]) -> None:
    names = {path.name for path in drawn}
    assert names == {
        *(
            "whole.attention.png",
            "whole.score_high.png",
            "whole.geojson",
            "whole.top.png",
        ),
    }
    picture = np.asarray(Image.open(drawn[1]).convert("RGB")).astype(int)
    assert max(picture.shape) >= 800
    scale = picture.shape[1] / 4443
    left, top, right, bottom = (round(v * scale) for v in LESION)
    redder = picture[..., 0] - picture[..., 2]
    assert redder[top:bottom, left:right].mean() > redder[: top // 2].mean() + 50


def test_tutorial_from_heatmap_to_qupath(trained: Trained, drawn: list[Path]) -> None:
    """docs/heatmaps.md: every tile is a tile object of QuPath with its measurements."""
    document = json.loads(next(p for p in drawn if p.suffix == ".geojson").read_text())
    table = ts.open_results(drawn[0].parents[2]).tiles("whole")
    assert len(document["features"]) == len(table.coords_l0)
    for feature, (x, y), value in zip(
        document["features"],
        table.coords_l0.tolist(),
        table.columns["heatmap_grade:score_high"],
        strict=True,
    ):
        ring = feature["geometry"]["coordinates"][0]
        assert ring[0] == ring[-1] == [x, y] and ring[2] == [x + 256, y + 256]
        assert feature["properties"]["objectType"] == "tile"
        measured = feature["properties"]["measurements"]
        assert measured.keys() == {"attention", "score_low", "score_high"}
        assert measured["score_high"] == pytest.approx(value, rel=1e-5, abs=1e-12)


def test_any_column_of_a_tile_table_can_be_drawn(
    trained: Trained, tmp_path: Path
) -> None:
    paths = heatmap("tissue_fraction", trained.results, top_tiles=0)
    assert {p.suffix for p in paths} == {".png", ".geojson"} and len(paths) == 16
    assert all(p.is_file() and "heatmap_tissue_fraction" in str(p) for p in paths)
    # the command passes a list
    assert heatmap("tissue_fraction", [trained.results], top_tiles=0) == paths
    with pytest.raises(InvalidInputError, match=r"one results folder .* got 2"):
        heatmap("tissue_fraction", [trained.results, tmp_path])
    with pytest.raises(
        InvalidInputError, match=r"model file or one of tissue_fraction, got 'px_fcus'"
    ):
        heatmap("px_fcus", trained.results)
    with pytest.raises(InvalidInputError, match=r"did you mean 'tissue_fraction'\?"):
        heatmap("tissue_fractio", trained.results)


def test_a_column_of_one_of_two_tile_grids_is_drawn_by_its_name(
    trained: Trained, tmp_path: Path
) -> None:
    out = tmp_path / "two"
    for tile_px in (256, 200):
        ts.run(trained.slides[:1], out=out, tile_px=tile_px, until="tiles")
    # without a name the newest run's
    for name, grid in ((None, "200px"), ("256px", "256px"), ("200px", "200px")):
        paths = heatmap("tissue_fraction", out, top_tiles=0, grid=name)
        assert {p.relative_to(out).parts[0] for p in paths} == {f"{grid}_0.5mpp"}
    with pytest.raises(ConfigError, match="grid must go without a model"):
        heatmap(trained.model, out, grid="200px")


def test_a_head_without_attention_is_refused_for_heatmaps(
    source: Path, trained: Trained, tmp_path: Path
) -> None:
    ids = [path.stem for path in trained.slides[:4]]
    mlp = train(trained.results, ids, replace_head("mlp"), tmp_path / "mlp.safetensors")
    config = replace_flat(HeatmapRunConfig(), {"top_tiles": 0})
    assert not heatmap(mlp.model, trained.results, config=config)
    rows = ts.predict(mlp.model, trained.results).rows
    assert all(row.answers for row in rows)
    failed = ts.predict(mlp.model, trained.results, heatmaps=True).rows
    assert all(
        "head 'mlp' must have attention for heatmaps" in row.error for row in failed
    )


def replace_head(name: str) -> object:
    return replace(HEAD, head=name)


def test_geojson_leaves_out_what_json_does_not_know_and_holds_no_tiles_at_all(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.geojson"
    coords = np.array([[0, 0], [8, 0]])
    table = TilesFile(
        coords_l0=coords,
        features=None,
        attributes={"tile_size_l0": (8, 6)},
        columns={"a": np.array([1.0, np.nan]), "b": np.ones(2)},
    )
    write_tiles_geojson(path, table)
    first, second = json.loads(path.read_text())["features"]
    assert first["properties"]["measurements"] == {"a": 1.0, "b": 1.0}
    assert second["properties"]["measurements"] == {"b": 1.0}
    write_tiles_geojson(path, replace(table, coords_l0=coords[:0], columns={}))
    assert json.loads(path.read_text())["features"] == []


def test_what_a_killed_process_left_of_a_picture_goes_with_the_next(
    trained: Trained,
) -> None:
    first = heatmap("tissue_fraction", trained.results, top_tiles=0)
    name = f".{first[0].stem}{TMP_MARK}999-abcd.png"
    left = first[0].with_name(name)
    left.write_bytes(b"half")
    heatmap("tissue_fraction", trained.results, top_tiles=0)
    assert not left.exists()


def test_out_gets_all_files_and_another_model_of_the_name_replaces_them(
    trained: Trained, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    shutil.copytree(trained.results, results)
    before = sorted(results.rglob("*"))
    model = tmp_path / "grade.safetensors"
    shutil.copy(trained.model, model)
    lines: list[str] = []
    out = tmp_path / "out"
    drawn = ts.heatmap(model, results, out=out, top_tiles=0, on_message=lines.append)
    (home,) = {path.parent for path in drawn}
    assert home.parents[1] == out and home.name == "heatmap_grade"
    assert (out / "predictions_grade.csv").is_file()
    assert {*home.glob("*.h5")}
    assert sorted(results.rglob("*")) == before
    # the screen has the prediction of each slide
    names = [path.stem for path in home.glob("*.h5")]
    for name in names:
        assert any(
            line.startswith(f"{name}: ") and ", predicted probability 0." in line
            for line in lines
        )
    # another model of the same name: nothing of the first one stays
    first = load_model(model)
    members = [replace(member, temperature=3.0) for member in first.card.members]
    card = replace(first.card, members=tuple(members))
    save_model(model, replace(first, card=card))
    lines.clear()
    slide = trained.slides[0].stem
    one = tmp_path / "one"
    shutil.copytree(results, one)
    for path in one.glob("*/*/*.h5"):
        if path.stem != slide:
            path.unlink()
    scores = read_tiles(home / f"{slide}.h5").columns["score_high"]
    ts.heatmap(model, one, out=out, top_tiles=0, on_message=lines.append)
    assert any("of another model with this name" in line for line in lines)
    assert [path.stem for path in home.glob("*.h5")] == [slide]
    now = read_tiles(home / f"{slide}.h5").columns["score_high"]
    assert not np.allclose(scores, now)
    assert {path.name.split(".")[0] for path in home.glob("*.png")} == {slide}


def test_training_removes_the_heatmaps_of_the_model_that_it_replaces(
    tmp_path: Path,
) -> None:
    heatmaps = tmp_path / "256px_0.5mpp" / "heatmap_e"
    heatmaps.mkdir(parents=True)
    names = ("s.attention.png", "s.geojson", "s.h5")
    for name in names:
        (heatmaps / name).write_text("")
    assert remove_stale_heatmaps(heatmaps, "new") == 0  # nobody knows who drew them
    (heatmaps / "scale.json").write_text(json.dumps({"model": "new"}))
    assert remove_stale_heatmaps(heatmaps, "new", replaced_sum="old") == 0
    (heatmaps / "scale.json").write_text(json.dumps({"model": "old"}))
    assert remove_stale_heatmaps(heatmaps, "new") == len(names)
    assert not [*heatmaps.iterdir()]


def test_a_sheet_says_that_no_tile_speaks_for_a_class(drawn: list[Path]) -> None:
    results = ts.open_results(drawn[0].parents[2])
    table = read_tiles(drawn[0].parent / "whole.h5")
    tiled = tiled_slide(results, results.ledgers["whole"], results.grids[0])
    against = replace(
        table, columns={"score_high": np.full(len(table.coords_l0), -1.0)}
    )
    sheet = draw_top_tiles(tiled, against, ["score_high"], 4)
    pixels = np.asarray(sheet)
    assert (pixels[TEXT_PX + 2 * GAP_PX :] == 255).all()
    assert (pixels[: TEXT_PX + 2 * GAP_PX] < 255).any()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("binary", "red speaks for grade, blue against it"),
        ("ordinal", "red speaks for a higher grade, blue for a lower one"),
        ("cox", "red speaks for a higher grade, blue for a lower one"),
    ],
)
def test_a_caption_says_what_red_means(kind: str, words: str) -> None:
    drawing: Any = SimpleNamespace(
        model_name="m", target_kind=kind, config=HeatmapConfig()
    )
    layer: Any = SimpleNamespace(kind="signed")
    caption = _caption(drawing, "a", "model:score_grade", layer)
    assert caption.split(" | ")[:3] == ["a", "model m", words]
