"""Checks that only show what they find, and tissue at the border that has no context."""

import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.qc.slides import ArraySlide
from tests.qc.views import view_of

from thinsection.arrays import get_namespace
from thinsection.errors import ConfigError
from thinsection.qc import load_pipeline, pipeline_identity, run_qc, tile_qc_columns
from thinsection.qc.checks.artefact_network import CLASSES
from thinsection.qc.checks.artefacts import Bubbles, Dirt, Folds
from thinsection.qc.checks.border import CONTEXT_UM, tissue_at_border
from thinsection.qc.checks.check import Outcome, QcCheck, QcView
from thinsection.qc.pipeline import Pipeline, dump_pipeline, pipeline_from_mapping
from thinsection.report.layers import Stripes, Tint, overlay_layers, paint
from thinsection.report.picture import Picture
from thinsection.report.qc_files import write_qc
from thinsection.report.stored import QC_FILE, features_of_masks
from thinsection.report.verdict import load_rules
from thinsection.results.folder import Results
from thinsection.store.ledger import SlideLedger, StageRecord
from thinsection.types import MaskArray
from thinsection.view.layers import layers_of

HEIGHT, WIDTH = 120, 160


def view_with(name: str, found: MaskArray, tissue: MaskArray) -> QcView:
    """A view on which the network is sure of one class in an area."""
    rgb = np.full((*found.shape, 3), 200, np.uint8)
    maps = {one: np.zeros(found.shape, np.uint8) for one in CLASSES}
    maps[name] = np.where(found, 255, 0).astype(np.uint8)
    return replace(view_of(rgb, tissue), artefact_maps=lambda: maps)


def band(columns: slice) -> MaskArray:
    found = np.zeros((HEIGHT, WIDTH), bool)
    found[:, columns] = True
    return found


class Everywhere(QcCheck, kind="everywhere"):
    """Finds an artefact in the right half."""

    name: str = "everywhere"
    remove: bool = False

    @property
    def removes(self) -> bool:
        return self.remove

    def removing(self) -> "Everywhere":
        return replace(self, remove=True)

    def __call__(self, view: QcView) -> Outcome:
        xp = view.ns.xp
        found = xp.zeros(view.mask_use.shape, dtype=bool)
        found[:, found.shape[1] // 2 :] = True
        return view.without(found, self.name)


def picture() -> ArraySlide:
    rgb = np.full((HEIGHT, WIDTH, 3), 150, np.uint8)
    return ArraySlide([rgb], slide_mpp=(8.0, 8.0))


def test_a_check_that_only_shows_leaves_the_tissue_and_keeps_mask_and_columns() -> None:
    shown = Pipeline(name="t", work_from="mpp", checks=(Everywhere(),))
    removing = shown.removing(["everywhere"])
    quiet, loud = (run_qc(picture(), one) for one in (shown, removing))
    np.testing.assert_array_equal(quiet.masks["everywhere"], loud.masks["everywhere"])
    assert quiet.scores["everywhere"] == loud.scores["everywhere"] == 0.5
    assert quiet.mask_use.all()
    assert loud.mask_use.mean() == 0.5
    assert quiet.shown == {"everywhere"}
    assert loud.shown == frozenset()
    coords_l0 = np.array([[0, 0], [WIDTH - 16, 0]])
    for result in (quiet, loud):
        shares = tile_qc_columns(result, coords_l0, 16)["everywhere"]
        np.testing.assert_array_equal(shares, [0, 1])


def test_a_check_that_only_shows_is_not_overruled_and_warns_of_nothing() -> None:
    class All(Everywhere, kind="all_of_it"):
        """Finds an artefact in every pixel."""

        name: str = "all"

        def __call__(self, view: QcView) -> Outcome:
            return view.without(view.ns.xp.ones_like(view.mask_use), self.name)

    shown = Pipeline(name="t", work_from="mpp", checks=(All(),))
    assert not [w for w in run_qc(picture(), shown).warnings if w.startswith("all ")]
    loud = run_qc(picture(), shown.removing(["all"]))
    assert [w for w in loud.warnings if w.startswith("all ")]
    assert not loud.mask_use.any()


def test_auto_shows_folds_and_dust_and_removes_the_rest() -> None:
    auto = load_pipeline("auto")
    shown = {check.name for check in auto.checks if not check.removes}
    assert shown == {"folds", "dust"}
    both = load_pipeline("auto", remove=("folds", "dust"))
    assert all(check.removes for check in both.checks)
    one = load_pipeline("auto", remove=("folds",))
    assert {check.name for check in one.checks if not check.removes} == {"dust"}
    # what a pipeline removes is part of its identity, and of the file that it is written to
    identities = [repr(pipeline_identity(p)) for p in (auto, one, both)]
    assert len(set(identities)) == 3
    for made in (auto, one, both):
        again = pipeline_from_mapping(tomllib.loads(dump_pipeline(made)))
        assert again == made


@pytest.mark.parametrize(
    ("pipeline", "name", "words"),
    [
        ("auto", "fold", r"\(folds, dust\), got 'fold'; did you mean 'folds'"),
        ("auto", "focus", r"\(folds, dust\), got 'focus'"),
        ("auto", "coverslip_edge", r"got 'coverslip_edge'"),
        (
            "histoqc-light",
            "folds",
            "left out, because all checks .* remove, got 'folds'$",
        ),
    ],
)
def test_a_name_that_is_no_such_check_is_refused(
    pipeline: str, name: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=f"qc_remove must be .*{words}"):
        load_pipeline(
            pipeline, remove=("folds", name) if "auto" in pipeline else (name,)
        )


def test_no_ready_verdict_rests_on_an_experimental_check() -> None:
    shown = [check for check in load_pipeline("auto").checks if not check.removes]
    rules = load_rules(None)
    assert not [r for r in rules for c in shown if r.rule.startswith(c.name)]
    assert any(rule.rule.startswith("unjudged_percent>") for rule in rules)


@pytest.mark.parametrize("mpp_th", [4.0, 8.0])
def test_tissue_that_the_edge_of_the_picture_cuts_has_no_context(mpp_th: float) -> None:
    ns = get_namespace("cpu")
    reach = CONTEXT_UM / mpp_th
    tissue = np.zeros((HEIGHT, WIDTH), bool)
    tissue[:70, 30:60] = True  # the upper edge cuts it
    tissue[90:110, 100:160] = True  # the right edge cuts it
    tissue[40:60, 70:150] = True  # it lies free, near the edge
    found = tissue_at_border(ns, tissue, mpp_th)
    # the distance of each pixel to the tissue on the edge, pixel by pixel
    expected = np.zeros_like(tissue)
    edges = [(0, x) for x in range(30, 60)] + [(y, WIDTH - 1) for y in range(90, 110)]
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    for y, x in edges:
        expected |= np.hypot(rows - y, columns - x) <= reach
    expected &= tissue
    assert (found ^ expected).sum() <= 0.03 * expected.sum()
    assert found[0, 45]
    assert found[100, WIDTH - 1]
    assert not found[50, 140]
    assert not found[69, 45] or reach > 60
    assert not tissue_at_border(ns, np.zeros_like(tissue), mpp_th).any()


def test_one_pixel_of_glass_at_the_edge_is_no_margin() -> None:
    tissue = np.ones((HEIGHT, WIDTH), bool)
    tissue[0] = False
    found = tissue_at_border(get_namespace("cpu"), tissue, 8.0)
    assert found[5, WIDTH // 2]
    tissue[:4] = False
    found = tissue_at_border(get_namespace("cpu"), tissue, 8.0)
    assert not found[5, WIDTH // 2]


def test_folds_bubbles_and_dust_are_not_judged_at_a_cut_edge_and_edges_are() -> None:
    tissue = np.ones((HEIGHT, WIDTH), bool)
    border = tissue_at_border(get_namespace("cpu"), tissue, 8.0)
    assert border.any()
    assert not border.all()
    checks: list[tuple[QcCheck, str]] = [
        (Folds(), "fold"),
        (Dirt(), "dust"),
        (Bubbles(min_seen=0.01), "bubble"),
    ]
    for check, name in checks:
        outcome = check(view_with(name, band(slice(70, 78)), tissue))
        np.testing.assert_array_equal(outcome.unjudged_area, border)
        assert not (outcome.affected_area & border).any()
    free = np.zeros_like(tissue)
    free[30:90, 30:130] = True
    for check, name in checks:
        outcome = check(view_with(name, band(slice(70, 78)) & free, free))
        assert not outcome.unjudged_area.any()
    folds = Folds()(view_with("fold", band(slice(70, 78)) & free, free))
    assert folds.affected_area.any()
    edge = Dirt(name="slide_edge", shows="edge")
    outcome = edge(view_with("edge", band(slice(0, 9)), tissue))
    assert outcome.unjudged_area is None
    assert outcome.affected_area[:, :9].all()
    assert edge.removes


def test_the_overlay_shows_what_was_not_judged_and_what_is_only_shown() -> None:
    pipeline = Pipeline(name="t", work_from="mpp", checks=(Everywhere(),))
    result = run_qc(picture(), pipeline)
    unjudged = band(slice(0, 40))
    result = replace(result, unjudged={"a": unjudged, "b_c": band(slice(0, 20))})
    layers = overlay_layers(result)
    labels = [layer.label for layer in layers]
    assert "everywhere (only shown), 50.00% of the slide" in labels
    assert "not judged (a, b c), 25.00% of the slide" in labels
    (stripes,) = [layer for layer in layers if isinstance(layer, Stripes)]
    (tint,) = [one for one in layers if isinstance(one, Tint) and "shown" in one.label]
    size_l0 = (WIDTH, HEIGHT)
    base = Picture(rgb=result.rgb, size_l0=size_l0, slide_mpp=None)
    drawn = paint(base, [stripes, tint])
    changed = (drawn != result.rgb).any(axis=2)
    # stripes leave the tissue visible between them
    assert 0.2 < changed[:, 4:36].mean() < 0.8
    assert not changed[:, 46:76].any()
    assert changed[:, 84:].all()
    seen = result.overlay()
    assert (seen[:, 84:150] != result.rgb[:, 84:150]).any(axis=2).all()
    assert (
        0.1 < (seen[10:110, 4:36] != result.rgb[10:110, 4:36]).any(axis=2).mean() < 0.9
    )
    assert (seen[10:110, 46:76] == result.rgb[10:110, 46:76]).all()
    plain = run_qc(picture(), pipeline.removing(["everywhere"]))
    assert not [one for one in overlay_layers(plain) if isinstance(one, Stripes)]


def test_viewer_and_qupath_have_an_outline_of_what_each_check_did_not_judge(
    tmp_path: Path,
) -> None:
    fresh = run_qc(picture(), "auto")
    found = band(slice(100, 140))
    fresh = replace(
        fresh,
        mask_use=np.ones_like(found),
        masks={"folds": found, "focus": band(slice(150, 155))},
        unjudged={
            "folds": band(slice(0, 9)),
            "pen_any": band(slice(0, 20)),
            "dust": found & False,
        },
    )
    folder = tmp_path / "slides" / "a" / "qc_auto"
    write_qc(fresh, folder)
    files = {f"slides/a/qc_auto/{QC_FILE}": 1}
    record = StageRecord(key="k", files=files, needs=(), facts={}, sums={})
    ledger = SlideLedger(out=tmp_path, slide_id="a", stages={"slides/qc_auto": record})
    outlines = features_of_masks(ledger, "slides/qc_auto")
    classes = [one["properties"]["classification"]["name"] for one in outlines]
    assert classes == [
        "Usable tissue",
        "folds",
        "focus",
        "folds not judged",
        "pen_any not judged",
    ]
    (widest,) = [one for one in outlines if "pen_any" in str(one["properties"])]
    xs = [x for ring in widest["geometry"]["coordinates"] for x, _ in ring]
    assert (min(xs), max(xs)) == (0, 20)
    results = Results(folder=tmp_path, ledgers={"a": ledger})
    words = [layer.words for layer in layers_of(results, "a", 3, 1 << 20)]
    assert words == [
        "Usable tissue",
        "Folds (experimental), only shown",
        "Out of focus",
        "Folds not judged",
        "Pen any not judged",
    ]
