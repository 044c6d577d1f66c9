"""Pages of the results in the viewer: which files are served, where it opens, what is new."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.view.conftest import A, B
from tests.view.test_server import ask

from thinsection.config import replace_flat
from thinsection.errors import ConfigError
from thinsection.report.index import viewer_place
from thinsection.results.folder import Results
from thinsection.view import ViewConfig, Viewer
from thinsection.view.layers import group_words, layer_words
from thinsection.view.shown import ShownSlides


@pytest.fixture
def copied(view_results: Results, tmp_path: Path) -> Path:
    """A copy of the results that a test may change."""
    shutil.copytree(view_results.folder, tmp_path / "results")
    return tmp_path / "results"


@pytest.fixture
def served(copied: Path, viewer: Viewer) -> Iterator[Viewer]:
    """Viewer of the copy; skipped as the other viewer is."""
    with Viewer([copied]) as running:
        yield running


def test_a_page_is_served_with_the_address_of_the_viewer_and_in_a_sandbox(
    served: Viewer, copied: Path
) -> None:
    status, data, headers = ask(served, "results/index.html")
    assert status == 200
    assert b'<meta name="thinsection-viewer" content="../">' in data
    policy = headers["content-security-policy"].split("; ")
    sandbox = policy[0].split()
    assert sandbox[0] == "sandbox" and "allow-same-origin" not in sandbox
    assert "default-src 'none'" in policy
    assert headers["referrer-policy"] == "no-referrer"
    (record,) = (copied / "records").glob("*/efficiency.html")
    name = record.relative_to(copied).as_posix()
    status, data, _ = ask(served, f"results/{name}")
    assert status == 200
    assert b'<meta name="thinsection-viewer" content="../../../">' in data
    assert b'<a href="../../index.html">Results</a>' in data
    status, data, headers = ask(served, "results/summary.csv")
    assert (status, data) == (200, (copied / "summary.csv").read_bytes())
    assert headers["content-type"].startswith("text/csv")


@pytest.mark.parametrize(
    "path",
    [
        "../secret.txt",
        "..%2Fsecret.txt",
        "%2e%2e/secret.txt",
        "slides/../../secret.txt",
        "slides/..%5C..%5Csecret.txt",
        "/etc/passwd",
        "%2Fetc%2Fpasswd",
        "linked.txt",
        "linked/secret.txt",
        "index.html%00.txt",
        "slides",
        "",
        "private.pem",
        "weights.h5",
    ],
)
def test_only_pages_pictures_and_tables_of_the_folder_are_served(
    served: Viewer, copied: Path, path: str
) -> None:
    (copied.parent / "secret.txt").write_text("secret")
    (copied / "linked.txt").symlink_to(copied.parent / "secret.txt")
    (copied / "linked").symlink_to(copied.parent)
    for name in ("private.pem", "weights.h5"):
        (copied / name).write_text("secret")
    status, data, _ = ask(served, f"results/{path}")
    assert status == 404
    assert b"secret" not in data


def test_a_viewer_of_slides_serves_no_pages(view_slides: Path, viewer: Viewer) -> None:
    with Viewer([view_slides]) as slides_only:
        assert ask(slides_only, "results/index.html")[0] == 404
        assert json.loads(ask(slides_only, "news")[1])["index"] is False


def test_it_opens_where_a_copied_link_leads(copied: Path, viewer: Viewer) -> None:
    place = viewer_place(A, layers=["qc_auto/"])
    link = f"http://127.0.0.1:1/TOKEN/#{place}&x=7&y=8&downsample=2"
    for at in (link, link.partition("#")[2]):
        with Viewer([copied], at=at) as opened:
            parts = urlsplit(opened.url)
            assert parse_qs(parts.fragment) == {
                "slide": [A],
                "layer": ["qc_auto/"],
                "x": ["7"],
                "y": ["8"],
                "downsample": ["2"],
            }
    with pytest.raises(ConfigError, match="at must name a slide that the viewer shows"):
        Viewer([copied], at="slide=nobody")


def test_slides_that_finish_later_are_new(copied: Path) -> None:
    """One slide's ledger is moved away, and comes back while the viewer runs."""
    ledger = copied / "slides" / B / "slide.json"
    text = ledger.read_text()
    ledger.unlink()
    shown = ShownSlides([copied], ViewConfig())
    assert shown.listed() == [A]
    before = shown.news()
    assert before == {"new": [], "version": 0, "index": True}
    ledger.write_text(text)
    after = shown.news()
    assert after["new"] == [B] and after["version"] == 1
    assert shown.listed() == [A, B] and shown.facts(B)["layers"]
    assert shown.news() == after


def test_a_viewer_may_start_before_the_first_slide_has_a_result(copied: Path) -> None:
    texts = {p: p.read_text() for p in (copied / "slides").glob("*/slide.json")}
    for path in texts:
        path.unlink()
    shown = ShownSlides([copied], ViewConfig())
    assert shown.listed() == []
    for path, text in texts.items():
        path.write_text(text)
    assert shown.news()["new"] == [A, B] == shown.listed()


def test_slides_are_found_beside_the_results_if_a_run_recorded_relative_paths(
    copied: Path, view_slides: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(view_slides, tmp_path / "slides")
    for path in (copied / "slides").glob("*/slide.json"):
        document = json.loads(path.read_text())
        name = Path(document["slide"]["slide_path"]).name
        document["slide"]["slide_path"] = f"slides/{name}"
        path.write_text(json.dumps(document))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert ShownSlides([copied], ViewConfig()).facts(B)["size"] == (1300, 1700)


def test_layers_that_show_nothing_are_named_empty(
    view_results: Results, annotations: Path
) -> None:
    """Columns whose largest value is 0, by a reader of the table that is not the viewer's."""
    config = replace_flat(ViewConfig(), {"annotations": annotations})
    facts = ShownSlides(view_results, config).facts(A)
    columns = view_results.tiles(A).columns
    checks = 0
    for layer in facts["layers"]:  # type: ignore[attr-defined]
        if layer["kind"] == "values" and layer["name"] in columns:
            values = columns[layer["name"]]
            assert layer["empty"] == bool((values == 0).all()), layer["name"]
            checks += 1
        elif layer["kind"] == "outlines":
            assert not layer["empty"]
    assert checks > 10
    names = [layer["name"] for layer in facts["layers"] if layer["empty"]]  # type: ignore[attr-defined]
    assert "qc_ink" in names and "tissue_fraction" not in names
    keys = [layer["key"] for layer in facts["layers"]]  # type: ignore[attr-defined]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("group", "name", "kind", "words"),
    [
        ("256px_0.5mpp/tiles", "qc_ink", "values", "Ink"),
        ("256px_0.5mpp/tiles", "qc_focus", "values", "Out of focus"),
        ("256px_0.5mpp/measures", "px_focus", "values", "Sharpness"),
        ("g/heatmap_m", "heatmap_m:score_high", "values", "Score, high"),
        (
            "g/heatmap_m",
            "heatmap_m:attention",
            "values",
            "Attention, 1 = mean of the slide",
        ),
        ("g/heatmap_m", "heatmap_m:<b>", "values", "<b>"),
        ("qc_auto", "ink", "outlines", "Ink"),
        ("qc_auto", "spur", "outlines", "Thin lines removed"),
        ("tissue", "tissue", "outlines", "Tissue"),
        ("qc_auto", "Usable tissue", "outlines", "Usable tissue"),
        ("annotations", "my_class", "outlines", "my_class"),
        ("g", "graph_knn-8", "edges", "Graph, knn 8"),
        ("g/features_uni", "principal components", "colours", "Principal components"),
    ],
)
def test_layers_have_names_in_words(
    group: str, name: str, kind: str, words: str
) -> None:
    assert layer_words(group, name, kind) == words


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ("256px_0.5mpp_qc-auto", "Tiles, 256 px at 0.5 µm/px"),
        ("256px_0.5mpp/tiles", "Tiles, their tissue and checks"),
        ("256px_0.5mpp/heatmap_grade", "Heatmap, grade"),
        ("qc_auto", "Quality control, auto"),
        ("annotations", "Annotations"),
    ],
)
def test_groups_of_layers_have_names_in_words(group: str, words: str) -> None:
    assert group_words(group) == words


def test_a_place_keeps_any_name() -> None:
    place = viewer_place(A, layers=["256px_0.5mpp/heatmap_m:a&b=c#d"])
    assert parse_qs(place) == {
        "slide": [A],
        "layer": ["256px_0.5mpp/heatmap_m:a&b=c#d"],
    }
