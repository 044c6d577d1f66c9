"""Plots for notebooks show what is stored: pictures in mm, tiles, columns, embeddings."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import thinsection as ts
from thinsection.errors import InvalidInputError
from thinsection.report.draw import draw
from thinsection.report.layers import Values
from thinsection.report.picture import Picture
from thinsection.results.folder import Results
from thinsection.run.run import run
from thinsection.testing.synthetic import write_he_slide
from thinsection.types import RgbArray

pytest.importorskip("matplotlib", reason="matplotlib is not installed")
import matplotlib as mpl
from matplotlib.axes import Axes


@pytest.fixture(autouse=True)
def figures() -> Iterator[None]:
    from matplotlib import pyplot

    mpl.use("Agg")
    pyplot.close("all")  # those that other modules left
    yield
    pyplot.close("all")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("plot")
    lines = ["slide_path,label"]
    for name, seed in (("a", 3), ("b", 5)):
        write_he_slide(folder / f"{name}.svs", (1500, 1200), seed=seed)
        lines.append(f"{name}.svs,{'tumor' if name == 'a' else 'normal'}")
    (folder / "cohort.csv").write_text("\n".join(lines))
    settings = {
        "pretrained": False,
        "memory": "256MiB",
        "tile_px": 128,
        "engine": "torch",
    }
    run([folder / "cohort.csv"], out=folder / "out", until="embeddings", **settings)
    return ts.open_results(folder / "out")


def pixels_of(ax: Axes) -> RgbArray:
    (image,) = ax.get_images()
    return np.asarray(image.get_array(), dtype=np.uint8)


def test_a_slide_is_drawn_in_mm_with_its_tissue_and_tiles(results: Results) -> None:
    ax = ts.plot.tiles(results, "a")
    (image,) = ax.get_images()
    assert image.get_extent() == pytest.approx(
        [0, 1500 * 0.5 / 1000, 1200 * 0.5 / 1000, 0]
    )
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == [f"{len(results.tiles('a').coords_l0)} tiles", "tissue"]
    plain = ts.plot.tissue(results, "a").get_images()[0].get_array()
    assert (np.asarray(image.get_array()) != np.asarray(plain)).any()


def test_a_slide_is_drawn_with_the_tissue_that_quality_control_left(
    results: Results, tmp_path: Path
) -> None:
    slide = results.folder.parent / "a.svs"
    run([slide], out=tmp_path, until="tiles", qc="histoqc-light", tile_px=128)
    checked = ts.open_results(tmp_path)
    assert ts.plot.tiles(checked, "a").get_legend() is not None
    drawn = np.asarray(ts.plot.tissue(checked, "a").get_images()[0].get_array())
    plain = np.asarray(ts.plot.tissue(results, "a").get_images()[0].get_array())
    assert drawn.shape == plain.shape
    assert (drawn != plain).any()  # another mask


def test_an_opened_slide_is_drawn_with_the_tissue_and_tiles_that_one_holds(
    results: Results,
) -> None:
    """The same picture as the folder's JPEG, at its size, with the same tiles and values."""
    with ts.open_slide(results.folder.parent / "a.svs") as slide:
        mask = ts.tissue_mask(slide)
        tiles = ts.tile_grid(slide, tissue=mask, tile_px=128)
        axes = [
            ts.plot.tissue(slide, mask),
            ts.plot.tissue(slide, (mask.mask, mask.frame)),
            ts.plot.tiles(slide, tiles),
            ts.plot.tiles(slide, results.tiles("a")),
            ts.plot.heatmap(slide, tiles, "tissue_fraction"),
        ]
    first, again, outlined, stored, colours = map(pixels_of, axes)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(outlined, stored)
    of_folder = pixels_of(ts.plot.tissue(results, "a"))
    # the stored picture has fewer pixels where its JPEG would have too many bytes
    size = (of_folder.shape[1], of_folder.shape[0])
    means = []
    for pixels in (first, outlined, colours):
        resized = Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS)
        means.append(np.abs(np.asarray(resized) - of_folder.astype(float)).mean())
    assert means[0] < 3 < min(means[1:])
    labels = [text.get_text() for text in axes[2].get_legend().get_texts()]
    assert labels == [f"{len(tiles)} tiles"]


def test_embeddings_as_an_array_are_drawn_with_their_colours(results: Results) -> None:
    stored = [results.tile_embeddings(name).features for name in ("a", "b")]
    names = np.repeat(["a", "b"], [len(rows) for rows in stored])
    by_array = ts.plot.embedding(np.concatenate(stored), color=names)
    of_folder = ts.plot.embedding(results)
    for one, other in zip(by_array.collections, of_folder.collections, strict=True):
        np.testing.assert_allclose(one.get_offsets(), other.get_offsets(), atol=1e-4)
    numbers = ts.plot.embedding(np.concatenate(stored), color=np.arange(len(names)))
    assert len(numbers.figure.axes) == 2


@pytest.mark.parametrize(
    ("plot", "arguments", "message"),
    [
        ("tissue", ("out", "a"), r"got 'out'; pass thinsection.open_results\(folder\)"),
        ("tiles", ("results", 7), "the id of a slide of the results folder, got int"),
        (
            "heatmap",
            ("slide", "a", "x"),
            "must be the tiles of the slide, got 'a'; pass",
        ),
        ("tissue", ("slide", 7), "tissue must be a TissueMask, .* got int"),
        ("embedding", (np.ones(3),), r"\(N, D\) with N >= 3, got \(3,\)"),
        ("embedding", ("nothing",), "a results folder, an opened slide or an array"),
    ],
)
def test_what_cannot_be_drawn_is_named(
    results: Results, plot: str, arguments: tuple[object, ...], message: str
) -> None:
    with ts.open_slide(results.folder.parent / "a.svs") as slide:
        held = {"results": results, "slide": slide}
        given = [
            held.get(one, one) if isinstance(one, str) else one for one in arguments
        ]
        with pytest.raises(InvalidInputError, match=message):
            getattr(ts.plot, plot)(*given)


def test_a_heatmap_has_the_colours_of_a_column_and_a_colour_bar(
    results: Results,
) -> None:
    ax = ts.plot.heatmap(results, "a", "tissue_fraction")
    bar = ax.figure.axes[1]
    values = results.tiles("a").columns["tissue_fraction"]
    assert bar.get_ylim() == pytest.approx((0, values.max()))
    assert bar.get_ylabel() == "tissue fraction"
    again = ts.plot.heatmap(results, "a", values, ax=ax)
    assert again is ax
    with pytest.raises(
        InvalidInputError, match=r"column must be one of .*did you mean 'tissue_fr"
    ):
        ts.plot.heatmap(results, "a", "tisue_fraction")
    with pytest.raises(
        InvalidInputError, match=r"values must be of shape \(\d+,\), got \(2,\)"
    ):
        ts.plot.heatmap(results, "a", np.ones(2))
    with pytest.raises(
        InvalidInputError, match="slide_id must be in this folder, got 'c'"
    ):
        ts.plot.tissue(results, "c")


def test_embeddings_are_shown_by_their_first_components_and_coloured_by_what_is_known(
    results: Results,
) -> None:
    rows = np.concatenate(
        [results.tile_embeddings(i).features for i in ("a", "b")]
    ).astype(float)
    ax = ts.plot.embedding(results, color="label")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "normal",
        "tumor",
    ]
    points = np.concatenate([dots.get_offsets() for dots in ax.collections])
    singular = np.linalg.svd(rows - rows.mean(axis=0), compute_uv=False)[:2]
    assert np.linalg.norm(points, axis=0) == pytest.approx(singular, rel=1e-3)
    by_number = ts.plot.embedding(results, color="tissue_fraction", max_tiles=20)
    assert by_number.figure.axes[1].get_ylabel() == "tissue_fraction"
    assert 20 <= len(by_number.collections[0].get_offsets()) <= 22


def test_a_column_with_one_value_is_named_and_has_no_scale(results: Results) -> None:
    count = len(results.tiles("a").coords_l0)
    for values, words in (
        (np.full(count, 0.25), "value: 0.25"),
        (np.full(count, np.nan), "value: no value"),
    ):
        ax = ts.plot.heatmap(results, "a", values)
        assert (
            len(ax.figure.axes) == 1
        )  # no colour bar, which would make 0.225 to 0.275
        labels = [text.get_text() for text in ax.get_legend().get_texts()]
        assert words in labels
    picture = Picture(rgb=np.full((300, 400, 3), 255, np.uint8), size_l0=(400, 300))
    for values, least in ((np.ones(2), 1), (np.array([0.0, 1.0]), 10)):
        layer = Values(np.array([[0, 0], [50, 0]]), (50, 50), values, "x", "amount")
        strip = draw(picture, [layer])[300:]
        colours = np.unique(
            strip.reshape(-1, 3)[np.ptp(strip, axis=2).ravel() > 40], axis=0
        )
        assert (len(colours) == 1) == (least == 1) and len(colours) >= least


@pytest.mark.check
def test_umap_draws_the_same_twice(results: Results) -> None:
    pytest.importorskip("umap", reason="umap-learn is not installed")
    first, again = (
        np.concatenate(
            [
                d.get_offsets()
                for d in ts.plot.embedding(results, method="umap").collections
            ]
        )
        for _ in range(2)
    )
    assert (first == again).all()
    assert np.isfinite(first).all()


def test_nothing_is_drawn_of_a_folder_without_embeddings(
    results: Results, tmp_path: Path
) -> None:
    (tmp_path / "slides").mkdir()
    with pytest.raises(InvalidInputError, match="features must match one of"):
        ts.plot.embedding(ts.open_results(tmp_path))
