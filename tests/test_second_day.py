"""A results folder on its second day: one slide more, or one slide again, and nothing is lost.

Every table and page is made of the folder. What one invocation was given decides what is done, and
never what is told.
"""

import csv
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.links import broken_links, shown_addresses

import thinsection as ts
from thinsection.config import replace_flat
from thinsection.files.atomic import write_table
from thinsection.predict.config import TrainConfig
from thinsection.predict.experiment import train
from thinsection.predict.heatmap import heatmap
from thinsection.predict.predicting import predict
from thinsection.results.records import read_records
from thinsection.run.pooling import aggregate_folder
from thinsection.run.qc_run import QcRunConfig, check_slides
from thinsection.stages.config import AggregateRunConfig
from thinsection.testing.synthetic import PyramidKind, write_he_slide, write_levels

NAMES = ("a #1", "b 50%", "c;d=e+", "d%23", "e & 'f'", "g", "h", "i")
WHITE, BROKEN = "white", "broken #2"
AGAIN = NAMES[0]
TABLES = ("*.csv", "*.tsv", "*.html", "*.js")
PLURALS = (
    "slides|cases|patients|sites|tiles|rows|folds|heads|events|pairs|encoders|processes|warnings|"
    "requests|experiments|permutations|GPUs|CPUs"
)
QUIET: dict[str, Any] = {"memory": "256MiB", "pretrained": False, "engine": "torch"}


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight slides with ids that break addresses, one without tissue, and one that is none.

    cohort.csv names all, one.csv the first, labels.txt what is learnt.
    """
    folder = tmp_path_factory.mktemp("slides")
    for seed in range(len(NAMES)):
        write_he_slide(folder / f"{seed}.svs", (700, 600), seed=seed, downsamples=(1,))
    glass = np.full((600, 700, 3), 243, np.uint8)
    kind = PyramidKind(downsamples=(1,), mpp=(0.5, 0.5))
    write_levels(folder / "8.svs", [glass], kind)
    (folder / "9.svs").write_text("no slide")
    write_cohort(folder / "cohort.csv", [*NAMES, WHITE, BROKEN])
    write_cohort(folder / "one.csv", [AGAIN])
    write_cohort(folder / "labels.txt", NAMES)
    return folder


def write_cohort(path: Path, names: Sequence[str]) -> None:
    every = (*NAMES, WHITE, BROKEN)
    numbers = {name: every.index(name) for name in names}
    rows = [
        {"slide_id": name, "slide_path": f"{n}.svs", "label": "ab"[n % 2]}
        for name, n in numbers.items()
    ]
    write_table(path, rows)


def run_all(given: Path, out: Path) -> None:
    """What a user runs on new slides."""
    ts.run([given], out=out, qc="auto", measures=True, tile_px=128, **QUIET)
    config = replace_flat(QcRunConfig(), {"write": ("histoqc", "parquet")})
    check_slides([given], out=out, config=config)
    aggregate_folder(
        out, config=replace_flat(AggregateRunConfig(), {"slide_encoder": "max"})
    )


def predict_all(given: Path, out: Path) -> None:
    model = out / "experiments" / "grade? #1" / "model.safetensors"
    predict(model, given, out=out)
    heatmap(model, given, out=out, top_tiles=2)
    heatmap("px_focus", out, top_tiles=2)


def tables_of(out: Path) -> dict[str, bytes]:
    """Every table and page, but for the records of single invocations."""
    files = [path for pattern in TABLES for path in out.rglob(pattern)]
    names = {str(path.relative_to(out)): path.read_bytes() for path in files}
    tables = {n: data for n, data in names.items() if not n.startswith("records/")}
    if "results.tsv" in tables:  # HistoQC's head names the invocation
        lines = tables["results.tsv"].splitlines()
        kept = [one for one in lines if one[:1] != b"#" or b"#dataset" in one]
        tables["results.tsv"] = b"\n".join(kept)
    return tables


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True)
class TwoDays:
    """A results folder after two days of work, and its tables as they were after the first."""

    folder: Path
    first_tables: dict[str, bytes]


@pytest.fixture(scope="module")
def two_days(slides: Path, tmp_path_factory: pytest.TempPathFactory) -> TwoDays:
    """All slides on the first day; everything again for one of them on the second."""
    folder = tmp_path_factory.mktemp("100%? #1") / "out"
    run_all(slides / "cohort.csv", folder)
    flat = {"target": ("label",), "epochs": 2, "folds": 2, "inner_folds": 2}
    config = replace_flat(TrainConfig(), {"labels": slides / "labels.txt", **flat})
    train(folder, out=folder / "experiments" / "grade? #1", config=config)
    predict_all(slides / "cohort.csv", folder)
    first_tables = tables_of(folder)
    run_all(slides / "one.csv", folder)
    predict_all(slides / "one.csv", folder)
    return TwoDays(folder, first_tables)


@pytest.fixture(scope="module")
def out(two_days: TwoDays) -> Path:
    return two_days.folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("chromium is not installed")
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed"
    )
    with sync_api.sync_playwright() as play:
        running = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running
        running.close()


def test_every_table_and_page_is_the_same_after_one_slide_again(
    two_days: TwoDays,
) -> None:
    before = two_days.first_tables
    after = tables_of(two_days.folder)
    assert len(rows_of(two_days.folder / "qc_auto.csv")) == len(NAMES) + 2
    assert len(rows_of(two_days.folder / "summary.csv")) == len(NAMES) + 2
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == []


def test_a_slide_that_is_added_gives_the_folder_of_all_at_once(
    slides: Path, tmp_path: Path
) -> None:
    """The later invocation has no measures of its own; rows of the failed slide keep a label."""
    table, first, more = (slides / f"{name}.csv" for name in ("some", "first", "more"))
    names = [*NAMES[:3], BROKEN, "g"]
    write_cohort(table, names)
    write_cohort(first, names[:-1])
    write_cohort(more, names[-1:])
    settings: dict[str, Any] = {"qc": "auto", "until": "tiles", "memory": "256MiB"}
    whole, grown = tmp_path / "whole", tmp_path / "grown"
    ts.run([table], out=whole, measures=True, **settings)
    ts.run([first], out=grown, measures=True, **settings)
    ts.run([more], out=grown, measures=True, **settings)
    ts.run([more], out=grown, **settings)
    assert tables_of(whole) == tables_of(grown)
    labels = {row["slide_id"]: row["label"] for row in rows_of(grown / "summary.csv")}
    assert labels == {
        name: "ab"[(*NAMES, WHITE, BROKEN).index(name) % 2] for name in names
    }


def test_every_link_of_every_page_leads_somewhere(out: Path, browser: Any) -> None:
    assert len(list(out.rglob("*.html"))) >= 4
    assert broken_links(out, shown_addresses(browser)) == {}
    page = browser.new_page()
    page.goto((out / "index.html").as_uri())
    heatmaps = page.evaluate("Object.keys(data.heatmaps)")
    unanswered = page.evaluate("slides.filter(s => !predicted(s, models[0])).length")
    lead = page.inner_text("#lead")
    runs = page.text_content("#runs")
    page.goto((out / "experiments" / "grade? #1" / "index.html").as_uri())
    linked = page.locator("a.heatmap:visible").count()
    pictures = page.locator("figure img[alt='g']").count()
    page.close()
    assert set(heatmaps) == set(NAMES)
    assert unanswered == 2
    assert linked == len(NAMES) and pictures == 1
    assert (
        lead.startswith("Last command: thinsection heatmap") and "1 predicted" in lead
    )
    assert "not finished" not in runs


def test_no_page_counts_one_thing_in_the_plural(out: Path, browser: Any) -> None:
    page = browser.new_page()
    for path in sorted(out.rglob("*.html")):
        page.goto(path.as_uri())
        text = page.inner_text("body") + page.title()
        assert re.findall(rf"(?<![\d.,])1 (?:{PLURALS})\b", text) == [], path
        assert "undefined" not in text and "None" not in text, path
    page.close()


def test_every_invocation_says_how_it_ended(out: Path) -> None:
    commands = [record.document["command"] for record in read_records(out)]
    assert {"run", "qc", "aggregate", "predict", "heatmap"} <= {*commands}
    assert all("counts" in record.document for record in read_records(out))


def test_everyone_whom_the_umask_lets_may_read_every_file(out: Path) -> None:
    modes = {oct(path.stat().st_mode) for path in out.rglob("*") if path.is_file()}
    assert len(modes) == 1


def test_a_slide_of_which_nothing_was_measured_has_no_unusual_stain(out: Path) -> None:
    rows = {row["slide_id"]: row for row in rows_of(out / "qc_auto.csv")}
    assert rows[WHITE]["deconv_c0_mean"] == "-100"
    assert "nothing was measured" in rows[WHITE]["why"]
    assert "unusual stain" not in rows[WHITE]["why"]


def test_slides_have_a_thumbnail_with_quality_control_too(out: Path) -> None:
    assert ts.open_results(out)._repr_html_().count("<img") >= len(NAMES)
