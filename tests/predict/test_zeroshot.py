"""Zero-shot classes from stored embeddings: transformers' logits, torch's top K, a heatmap."""

import copy
import csv
import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.shell import thinsection
from tests.support.two_towers import CONTEXT, write_clip

import thinsection as ts
from thinsection.encode.text import Tokenizer, load_text_encoder
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.predict.zeroshot import Prompts, top_k_scores
from thinsection.testing.synthetic import write_he_slide

CLASSES = {"tumour": ("tumour", "dense gland"), "stroma": ("stroma", "loose pink")}
PROMPTS = Prompts(classes=CLASSES, templates=("an image of {}", "{}"), name="tissue")
GRID = "32px_2mpp"
Made = tuple[Path, Path, Any]  # see `made`


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Results with embeddings of a small CLIP model, its folder, and transformers' model."""
    home = tmp_path_factory.mktemp("zeroshot")
    model = write_clip(home / "small_clip")
    for number in range(2):
        path = home / "slides" / f"s{number}.svs"
        path.parent.mkdir(exist_ok=True)
        write_he_slide(path, (1100 + 64 * number, 800), seed=number, downsamples=(1, 4))
    ts.run(
        [home / "slides"],
        out=home / "results",
        encoders=(str(home / "small_clip"),),
        tile_px=32,
        tile_mpp="2",
        device="cpu",
        precision="fp32",
    )
    return home / "results", home / "small_clip", model


def test_scores_are_the_pooled_logits_of_transformers(made: Made) -> None:
    results, folder, model = made
    texts = load_text_encoder(str(folder), device="cpu")
    answer = ts.zeroshot(results, PROMPTS, text_encoder=texts, top_k=7)
    assert [row.slide_id for row in answer.rows] == ["s0", "s1"]
    weights = []
    with torch.no_grad():
        for name in CLASSES:
            vectors = []
            for text in PROMPTS.texts(name):
                tokens = Tokenizer(folder / "tokenizer.json")([text], CONTEXT, 0)
                vector = model.get_text_features(tokens)
                vectors.append(torch.nn.functional.normalize(_tensor(vector), dim=-1))
            mean = torch.cat(vectors).mean(0)
            weights.append(mean / mean.norm())
    classifier = torch.stack(weights, dim=1)
    opened = ts.open_results(results)
    for row in answer.rows:
        stored = opened.tile_embeddings(row.slide_id).features
        unit = torch.nn.functional.normalize(torch.from_numpy(stored), dim=-1)
        cosines = unit @ classifier
        best = cosines.topk(min(7, len(cosines)), dim=0).values.mean(0)
        torch.testing.assert_close(
            torch.tensor(list(row.scores.values()), dtype=torch.float32), best
        )
        scale = model.logit_scale.exp().item()
        torch.testing.assert_close(
            torch.tensor(list(row.probabilities.values()), dtype=torch.float32),
            (scale * best).softmax(0),
        )
        assert row.predicted == [*CLASSES][int(best.argmax())]
        columns = opened.tiles(row.slide_id).columns
        for number, column in enumerate(answer.columns):
            np.testing.assert_allclose(columns[column], cosines[:, number], atol=1e-6)


def _tensor(answer: Any) -> torch.Tensor:
    """Features of transformers, whose version 5 wraps them."""
    vector = getattr(answer, "pooler_output", answer)
    assert isinstance(vector, torch.Tensor)
    return vector


def test_top_k_is_a_mean_of_the_highest_and_of_all_where_there_are_fewer() -> None:
    values = np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32)
    for top_k in (1, 5, 30, 50):
        best = torch.from_numpy(values).topk(min(top_k, 30), dim=0).values.mean(0)
        np.testing.assert_allclose(top_k_scores(values, top_k), best, rtol=1e-5)


def test_the_command_writes_a_table_and_names_its_heatmaps(
    made: Made, tmp_path: Path
) -> None:
    results, folder, _ = made
    prompts = tmp_path / "words.toml"
    prompts.write_text('[classes]\ntumour = ["tumour"]\nstroma = ["stroma"]\n')
    done = thinsection(
        "zeroshot",
        str(results),
        "--prompts",
        str(prompts),
        "--text-encoder",
        str(folder),
        "--top-k",
        "5",
    )
    assert done.returncode == 0, done.stderr
    (home,) = results.glob(f"{GRID}/zeroshot_*_words")
    with (home / "scores.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["slide_id"] for row in rows] == ["s0", "s1"]
    for row in rows:
        shares = [float(row[f"probability_{name}"]) for name in CLASSES]
        assert sum(shares) == pytest.approx(1) and row["top_k"] == "5"
        best = max(CLASSES, key=lambda name: float(row[f"score_{name}"]))
        assert row["predicted"] == best
    document = json.loads((home / "zeroshot.json").read_text())
    assert document["prompts"] == {"tumour": ["tumour"], "stroma": ["stroma"]}
    command = next(line for line in done.stdout.splitlines() if " heatmap " in line)
    column = command.split()[2]
    assert column == f"{home.name}:tumour"
    (picture, *_) = ts.heatmap(column, results)
    with Image.open(picture) as drawn:
        pixels = np.asarray(drawn.convert("RGB")).reshape(-1, 3)
    assert len(np.unique(pixels, axis=0)) > 100


def test_a_text_encoder_and_the_scores_travel(made: Made) -> None:
    results, folder, _ = made
    texts = load_text_encoder(str(folder), device="cpu")
    answer = ts.zeroshot(results, PROMPTS, text_encoder=texts, top_k=3)
    for copied in (copy.deepcopy(texts), pickle.loads(pickle.dumps(texts))):  # noqa: S301
        torch.testing.assert_close(
            copied.encode(["a gland", "pink"]),
            texts.encode(["a gland", "pink"]),
            rtol=0,
            atol=0,
        )
        again = ts.zeroshot(results, PROMPTS, text_encoder=copied, top_k=3)
        assert again.rows == answer.rows
        assert repr(copied) == repr(texts) and "0x" not in repr(texts)
    assert pickle.loads(pickle.dumps(answer)) == answer  # noqa: S301
    assert len(repr(answer)) < 300


def test_a_column_below_zero_uses_all_colours(made: Made) -> None:
    results, folder, _ = made
    texts = load_text_encoder(str(folder), device="cpu")
    answer = ts.zeroshot(results, PROMPTS, text_encoder=texts)
    column = answer.columns[0]
    for path in answer.folder.glob("*.h5"):
        _shift(path, "tumour", -2.0)
    ts.heatmap(column, results)
    slug = column.replace(":", "-")
    scale = json.loads((results / GRID / f"heatmap_{slug}" / "scale.json").read_text())
    assert scale["limits"]
    for limits in scale["limits"].values():
        low, high = limits[column]
        assert low < high < -1


def _shift(path: Path, column: str, by: float) -> None:
    """Writes the table again with other values in a column."""
    from thinsection.stages.tiles import write_columns
    from thinsection.store.tiles_h5 import read_tiles

    tiles = read_tiles(path)
    values = dict(tiles.columns)
    values[column] = values[column] + np.float32(by)
    write_columns(path, tiles.coords_l0, values, tiles.attributes)


def test_embeddings_of_other_weights_are_refused(made: Made, tmp_path: Path) -> None:
    results, _, _ = made
    write_clip(tmp_path / "other", seed=1)
    with pytest.raises(
        InvalidInputError, match="must come from the image tower of 'other'"
    ):
        ts.zeroshot(
            results, PROMPTS, text_encoder=load_text_encoder(str(tmp_path / "other"))
        )


def test_an_encoder_without_texts_is_refused(made: Made, tmp_path: Path) -> None:
    slides = made[0].parent / "slides" / "s0.svs"
    ts.run([slides], out=tmp_path, tile_px=256, tile_mpp="1", device="cpu")
    with pytest.raises(InvalidInputError, match="got 'efficientnet_lite0'; these have"):
        ts.zeroshot(tmp_path, PROMPTS)


def test_the_encoder_of_a_folder_is_asked_for(made: Made) -> None:
    with pytest.raises(InvalidInputError, match="for embeddings of 'small_clip'"):
        ts.zeroshot(made[0], PROMPTS)


def test_settings_and_files_are_checked_before_any_work(
    made: Made, tmp_path: Path
) -> None:
    results, _, _ = made
    with pytest.raises(InvalidInputError, match="top_k must be >= 1, got 0"):
        ts.zeroshot(results, PROMPTS, top_k=0)
    done = thinsection(
        "zeroshot", str(results), "--prompts", str(tmp_path / "none.toml")
    )
    assert done.returncode == 2 and "must be an existing file" in done.stderr
    with pytest.raises(ConfigError, match="unknown setting"):
        ts.zeroshot(results, PROMPTS, topk=3)  # type: ignore[call-arg]


def test_a_damaged_slide_is_left_out_and_its_earlier_table_stays(
    made: Made, tmp_path: Path
) -> None:
    results, folder, _ = made
    copy = tmp_path / "results"
    shutil.copytree(results, copy)
    texts = load_text_encoder(str(folder), device="cpu")
    first = ts.zeroshot(copy, PROMPTS, text_encoder=texts)
    table = first.folder / "s1.h5"
    content = table.read_bytes()
    (path,) = copy.glob(f"{GRID}/features_*/s1.h5")
    path.write_bytes(path.read_bytes()[:1000])
    lines: list[str] = []
    # another K changes the scores of slides, not the tables of tiles
    second = ts.zeroshot(
        copy, PROMPTS, text_encoder=texts, top_k=3, on_message=lines.append
    )
    assert [row.slide_id for row in second.rows] == ["s0"]
    assert [line.split(":")[:2] for line in lines] == [
        ["s1", " left out"],
        ["s1", " the tile table of an earlier call stays"],
    ]
    assert (first.unread, second.unread) == ((), ("s1",))
    assert table.read_bytes() == content
    words = tmp_path / "words.toml"
    words.write_text('[classes]\ntumour = ["tumour"]\nstroma = ["stroma"]\n')
    command = ("zeroshot", str(copy), "--prompts", str(words))
    done = thinsection(*command, "--text-encoder", str(folder))
    assert done.returncode == 3
    assert "s1: left out" in done.stdout


def test_tables_of_other_prompts_or_of_slides_that_are_gone_are_named_and_removed(
    made: Made, tmp_path: Path
) -> None:
    results, folder, _ = made
    copy = tmp_path / "results"
    shutil.copytree(results, copy)
    texts = load_text_encoder(str(folder), device="cpu")
    first = ts.zeroshot(copy, PROMPTS, text_encoder=texts)
    shutil.rmtree(copy / "slides" / "s1")
    lines: list[str] = []

    def score(prompts: Prompts) -> set[str]:
        lines.clear()
        ts.zeroshot(copy, prompts, text_encoder=texts, on_message=lines.append)
        return {path.name for path in first.folder.glob("*.h5")}

    assert score(PROMPTS) == {"s0.h5"}
    (line,) = lines
    assert "1 earlier tile tables" in line
    assert line.endswith("their slides have no embeddings any more: s1")
    assert score(PROMPTS) == {"s0.h5"} and lines == []
    # the embeddings cannot be read, so no table of the new prompts can replace the old one
    (path,) = copy.glob(f"{GRID}/features_*/s0.h5")
    path.write_bytes(path.read_bytes()[:1000])
    others = replace(PROMPTS, templates=("a slide of {}",))
    assert score(others) == set()
    assert lines[0].endswith("prompts or weights are others or unknown: s0")
    assert lines[1].startswith("s0: left out")
    document = json.loads((first.folder / "zeroshot.json").read_text())
    assert document["prompts"]["tumour"][0] == "a slide of tumour"
    assert "s0" not in (first.folder / "scores.csv").read_text()


def test_a_slide_without_tiles_has_no_class(made: Made, tmp_path: Path) -> None:
    _, folder, _ = made
    blank = tmp_path / "blank.svs"
    write_he_slide(blank, (1100, 800), seed=0, downsamples=(1, 4))
    ts.run(
        [blank],
        out=tmp_path / "out",
        encoders=(str(folder),),
        tile_px=32,
        tile_mpp="2",
        tile_filter=("tissue_fraction>2",),
        device="cpu",
        precision="fp32",
    )
    texts = load_text_encoder(str(folder), device="cpu")
    (row,) = ts.zeroshot(tmp_path / "out", PROMPTS, text_encoder=texts).rows
    assert (row.num_tiles, row.predicted, row.scores) == (0, "", {})
