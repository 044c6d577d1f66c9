"""Verdicts of slides in words, their order, and the page and Parquet table that show them."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from thinsection.errors import ConfigError
from thinsection.qc import run_qc
from thinsection.qc.rules import parse_rule
from thinsection.report.qc_sheet import write_qc_parquet, write_qc_sheet
from thinsection.report.values import column_order, natural_key
from thinsection.report.verdict import load_rules, verdict
from thinsection.testing.synthetic import ArraySlide

READY = load_rules(None)


def row(slide_id: str = "s1", **more: float | str) -> dict[str, float | str]:
    known = {
        "slide_id": slide_id,
        "slide_path": f"/x/a/{slide_id}.svs",
        "status": "done",
    }
    return {**known, "pixels_to_use": 9000.0, "pen_markings": 0.0, **more}


def test_ready_rules_say_what_is_wrong_and_the_worst_verdict_wins() -> None:
    assert verdict(row(), READY) == ("good", "")
    assert verdict(row(pen_markings=0.05), READY) == ("look", "pen")
    bad = row(pixels_to_use=10.0, pen_markings=0.05)
    assert verdict(bad, READY) == ("exclude", "little usable tissue, pen")
    assert verdict(row(), READY, ["chan1_brightness"])[0] == "look"
    assert verdict(row() | {"status": "failed"}, READY) == ("failed", "")


def test_every_ready_rule_is_of_a_column_that_auto_or_histoqc_writes() -> None:
    blank = ArraySlide([np.full((400, 500, 3), 230, np.uint8)], slide_mpp=(8.0, 8.0))
    columns = {c for p in ("auto", "histoqc-default") for c in run_qc(blank, p).row}
    columns |= {"focus_removed_percent"}  # where there is tissue
    # of a network's classes, under the names that the docs give them
    columns |= {f"{name}_removed_percent" for name in ("ink", "folds", "bubbles")}
    assert {parse_rule(rule.rule).column for rule in READY} <= columns
    assert verdict(row(ink=0.05, bubbles=0.1), READY) == (
        "look",
        "pen, air bubbles",
    )


def test_rules_of_a_file_take_the_place_of_the_ready_ones(tmp_path: Path) -> None:
    path = tmp_path / "clinical.toml"
    path.write_text(
        '[[verdict]]\nwords = "too dark"\nrule = "dark>0.5"\nverdict = "exclude"\n'
    )
    rules = load_rules(path)
    assert verdict(row(dark=0.6), rules) == ("exclude", "too dark")
    assert verdict(row(pen_markings=1.0), rules) == ("good", "")
    path.write_text('[[verdict]]\nwords = "too dark"\nrule = "dark > much"\n')
    with pytest.raises(ConfigError, match="must have the form"):
        load_rules(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="tables"):
        load_rules(path)


def test_slides_are_sorted_as_people_count_and_telling_columns_come_first() -> None:
    assert sorted(["s10", "S2", "s1"], key=natural_key) == ["s1", "S2", "s10"]
    columns = [
        "height",
        "rms_contrast",
        "folds_removed_percent",
        "mystery",
        "pixels_to_use",
    ]
    ordered = [
        "pixels_to_use",
        "folds_removed_percent",
        "rms_contrast",
        "height",
        "mystery",
    ]
    assert column_order(columns) == ordered


def test_the_page_holds_every_slide_once_in_natural_order(tmp_path: Path) -> None:
    rows = [row("s10"), row("s2", pen_markings=0.5), row("s1")]
    write_qc_sheet(tmp_path / "qc.html", rows, title="QC")
    text = (tmp_path / "qc.html").read_text()
    places = [text.index(f'data-sort="{name}"') for name in ("s1", "s2", "s10")]
    assert places == sorted(places)
    assert (
        "2 good" in text
        and "1 look" in text
        and "look: pen (pen, fraction &gt; 0.02)" in text
    )


def test_the_parquet_table_has_the_rows_of_the_csv(tmp_path: Path) -> None:
    write_qc_parquet(
        tmp_path / "qc.parquet", [row("s1"), row("s2", stain="H&E", mpp_x="NA")]
    )
    table = pq.read_table(tmp_path / "qc.parquet").to_pydict()
    assert table["slide_id"] == ["s1", "s2"] and table["pixels_to_use"] == [
        9000.0,
        9000.0,
    ]
    assert table["stain"] == [None, "H&E"]
