"""Networks over slides: windows leave no trace, entries of TOML, shares as columns and filters."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from safetensors.torch import save_file

from thinsection.errors import BudgetError, ConfigError, WeightsError
from thinsection.results.folder import open_results
from thinsection.run.run import run
from thinsection.segment import Segmenter, load_segmenter, segment
from thinsection.segment.channels import StainChannels
from thinsection.slide import open_slide
from thinsection.store.tiles_h5 import read_tiles
from thinsection.testing.synthetic import ArraySlide, write_he_slide
from thinsection.types import MaskFrame

ENTRY = """
[segmenter]
name = "colours"
outputs = ["glass", "red", "blue"]
background = "glass"
mpp = {mpp}
px = {px}
overlap = 0.3
mean = [0.0, 0.0, 0.0]
std = [1.0, 1.0, 1.0]
architecture = "torch.nn:Conv2d"
options = {{ in_channels = 3, out_channels = 3, kernel_size = 1 }}
weights = "colours.safetensors"
"""
WEIGHTS = torch.tensor(
    [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
)  # of R, G and B
BIAS = torch.tensor([0.0, 0.3, 0.6])  # so that no two outputs are equal


def write_entry(folder: Path, *, px: int = 64, mpp: float = 0.5) -> Path:
    """A network of one px: 'red' where red is the largest of R, G and B, 'blue' alike."""
    state = {"weight": WEIGHTS[:, :, None, None].contiguous(), "bias": BIAS / 255}
    save_file(state, folder / "colours.safetensors")
    (folder / "colours.toml").write_text(ENTRY.format(px=px, mpp=mpp))
    return folder / "colours.toml"


def truth(rgb: np.ndarray) -> np.ndarray:
    scores = (
        rgb.astype(np.float64) @ WEIGHTS.numpy().T.astype(np.float64) + BIAS.numpy()
    )
    return np.where(
        scores[..., 1:].max(axis=-1) > scores[..., 0], scores.argmax(axis=-1), 0
    )


def whole(slide: ArraySlide) -> tuple[np.ndarray, MaskFrame]:
    return np.ones((1, 1), dtype=bool), MaskFrame(size_th=(1, 1), size_l0=slide.size)


@pytest.fixture
def slide() -> ArraySlide:
    """331 x 210 px, no multiple of anything."""
    rgb = np.random.default_rng(3).integers(0, 256, (210, 331, 3), dtype=np.uint8)
    return ArraySlide([rgb])


@pytest.mark.parametrize(
    "memory", ["512MiB", "150KiB"], ids=["one strip", "bands of columns"]
)
def test_windows_and_bands_leave_no_trace_in_the_labels(
    slide: ArraySlide, tmp_path: Path, memory: str
) -> None:
    path, entry = tmp_path / "labels.tif", write_entry(tmp_path)
    found = segment(slide, entry, tissue=whole(slide), labels_path=path, memory=memory)
    rgb = slide.read_region((0, 0), 0, slide.size)
    assert np.array_equal(tifffile.imread(path), truth(rgb))
    assert found.num_windows >= 7 * 5 and found.size == slide.size


def test_a_slide_smaller_than_a_window_is_labelled(tmp_path: Path) -> None:
    rgb = np.random.default_rng(1).integers(0, 256, (40, 51, 3), dtype=np.uint8)
    small, path = ArraySlide([rgb]), tmp_path / "labels.tif"
    segment(small, write_entry(tmp_path), tissue=whole(small), labels_path=path)
    assert np.array_equal(tifffile.imread(path), truth(rgb))


def test_what_is_no_tissue_has_no_class_and_costs_no_window(
    slide: ArraySlide, tmp_path: Path
) -> None:
    mask = np.zeros((21, 33), dtype=bool)
    mask[2:6, 3:9] = True
    frame, path = (
        MaskFrame(size_th=(33, 21), size_l0=slide.size),
        tmp_path / "labels.tif",
    )
    found = segment(
        slide, write_entry(tmp_path), tissue=(mask, frame), labels_path=path
    )
    labels = tifffile.imread(path)
    assert 1 <= found.num_windows <= 6
    assert (
        labels[25:55, 32:88].any()
        and not labels[65:].any()
        and not labels[:, 95:].any()
    )


def test_shares_of_tiles_are_those_of_the_labels_below_them(
    slide: ArraySlide, tmp_path: Path
) -> None:
    entry = write_entry(tmp_path)
    found = segment(slide, entry, tissue=whole(slide), share_mpp=4.0)
    coords = np.array([[0, 0], [64, 32], [120, 88]], dtype=np.int64)
    columns, labels = (
        found.tile_columns(coords, (64, 64)),
        truth(slide.read_region((0, 0), 0, slide.size)),
    )
    for number, name in enumerate(("red", "blue"), start=1):
        exact = [
            (labels[y : y + 64, x : x + 64] == number).mean()
            for x, y in coords.tolist()
        ]
        np.testing.assert_allclose(columns[name], exact, atol=0.01)


def test_a_memory_that_holds_no_two_windows_is_refused(
    slide: ArraySlide, tmp_path: Path
) -> None:
    with pytest.raises(BudgetError, match=r"segment_memory must be >= 128.0 KiB"):
        segment(slide, write_entry(tmp_path), tissue=whole(slide), memory="60KiB")


def test_wrong_entries_and_missing_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'lavlab-shell'"):
        load_segmenter("lavlab")
    entry = write_entry(tmp_path)
    entry.write_text(entry.read_text().replace("overlap", "overlpa"))
    with pytest.raises(ConfigError, match=r"did you mean 'segmenter\.overlap'"):
        load_segmenter(entry)
    entry.write_text(
        entry.read_text().replace("overlpa", "overlap") + f'sha256 = "{"0" * 64}"\n'
    )
    with pytest.raises(WeightsError, match="must have sha256 0000"):
        load_segmenter(entry)
    with pytest.raises(WeightsError, match="pass segment_weights="):
        load_segmenter("hest-tissue")


def test_of_several_classes_above_the_threshold_the_first_one_wins(
    tmp_path: Path,
) -> None:
    spec = load_segmenter(write_entry(tmp_path)).spec
    kind = {"rule": "threshold", "threshold": 0.0, "outputs": ("a", "b", "rest")}
    names = {
        field: getattr(spec, field) for field in ("name", "mpp", "px", "architecture")
    }
    one = Segmenter(spec=type(spec)(**names, **kind, background="rest"), weights=None)
    outputs = np.array([[1, 2, -1, 3], [2, -1, -1, 5], [0, 0, -3, 4]], dtype=np.float32)
    assert one.labels(outputs[:, None]).tolist() == [[1, 1, 0, 2]]


def test_a_stain_picture_without_tissue_is_refused() -> None:
    with pytest.raises(ValueError, match="must have >= 100 stained pixels"):
        StainChannels.fit(np.full((50, 50, 3), 240, dtype=np.uint8), "empty.svs")


@pytest.fixture(scope="module")
def he(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slide") / "he.tiff"
    write_he_slide(path, (3000, 2500), seed=5)
    return path


def test_a_run_keeps_shares_as_columns_filters_by_them_and_resumes(
    he: Path, tmp_path: Path
) -> None:
    entry = write_entry(tmp_path, px=128, mpp=2.0)
    settings = {"segmenters": [str(entry)], "overview": False}
    assert (
        run([he], out=tmp_path / "out", until="segments", **settings).counts["done"]
        == 1
    )
    folder = tmp_path / "out" / "slides" / "he" / "segment_colours_w"
    (folder,) = folder.parent.glob("segment_colours_w*")
    assert {p.name for p in folder.iterdir()} == {
        *(
            "labels.tif",
            "overlay.png",
            "share_red.png",
            "share_blue.png",
            "outlines.geojson",
        )
    }
    assert (
        run([he], out=tmp_path / "out", until="segments", **settings).counts["skipped"]
        == 1
    )
    stamp = (folder / "labels.tif").stat().st_mtime_ns
    run([he], out=tmp_path / "out", until="tiles", **settings)
    (grid,) = (tmp_path / "out").glob("256px*/tiles/he.h5")
    everything = read_tiles(grid)
    rule = f"red>{float(np.median(everything.columns['red'])):.3f}"
    run(
        [he],
        out=tmp_path / "out",
        until="tiles",
        tile_filter=["tissue", rule],
        **settings,
    )
    (other,) = set((tmp_path / "out").glob("256px*/tiles/he.h5")) - {grid}
    kept = read_tiles(other)
    assert 0 < len(kept.coords_l0) < len(everything.coords_l0)
    chosen = everything.columns["red"] > float(rule.removeprefix("red>"))
    assert np.array_equal(kept.coords_l0, everything.coords_l0[chosen])
    assert (
        folder / "labels.tif"
    ).stat().st_mtime_ns == stamp  # nothing was computed twice
    share = np.asarray(Image.open(folder / "share_red.png"))
    assert open_results(tmp_path / "out").slides and share.max() > 128


def test_a_rule_on_a_column_that_is_not_there_says_which_are(
    he: Path, tmp_path: Path
) -> None:
    summary = run(
        [he], out=tmp_path, until="tiles", tile_filter=["tissue", "epithelium>0.3"]
    )
    (result,) = summary.results
    assert (
        result.status == "failed" and "tile_filter must name a column" in result.error
    )


@pytest.mark.filterwarnings("ignore:`timm-` encoders are deprecated")
@pytest.mark.parametrize("name", ["hest-tissue", "grandqc-tissue"])
@pytest.mark.check
def test_published_tissue_detectors_take_local_weights(
    tmp_path: Path, name: str
) -> None:
    """Seeded weights of the same architecture, saved as a safe .pth, wrapped as Lightning does."""
    seeded = load_segmenter(name, seed=4)
    module = seeded.network.__closure__  # the torch module of the network
    assert module is not None
    (net,) = [
        c.cell_contents for c in module if isinstance(c.cell_contents, torch.nn.Module)
    ]
    state = {f"model.{key}": value for key, value in net.state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "weights.pth")
    he = tmp_path / "he.tiff"
    write_he_slide(he, (1100, 900), seed=2)
    settings = {"segmenters": [name], "segment_weights": str(tmp_path / "weights.pth")}
    summary = run(
        [he],
        out=tmp_path / "out",
        until="tissue",
        tissue_segmenter=True,
        device="cpu",
        **settings,
    )
    assert summary.counts["done"] == 1, summary.results
    loaded = load_segmenter(name, weights=tmp_path / "weights.pth")
    planes = np.random.default_rng(0).random((1, 3, 64, 64), dtype=np.float32)
    np.testing.assert_array_equal(loaded.network(planes), seeded.network(planes))


@pytest.mark.filterwarnings("ignore:`timm-` encoders are deprecated")
@pytest.mark.parametrize("suffix", ["", "-1.5", "-2"])
@pytest.mark.check
def test_grandqcs_artefact_network_is_its_authors_module(
    tmp_path: Path, suffix: str
) -> None:
    """GrandQC's classes 1 to 7 have the same numbers as our outputs; 7 is the background."""
    smp = pytest.importorskip("segmentation_models_pytorch")
    torch.manual_seed(7)
    module = smp.Unet("timm-efficientnet-b0", encoder_weights=None, classes=8).eval()
    torch.save(module.state_dict(), tmp_path / "state.pth")
    loaded = load_segmenter(
        f"grandqc-artefacts{suffix}", weights=tmp_path / "state.pth", device="cpu"
    )
    planes = np.random.default_rng(0).random((1, 3, 64, 64), dtype=np.float32)
    theirs = module.predict(torch.from_numpy(planes)).numpy()
    np.testing.assert_array_equal(loaded.network(planes), theirs)
    numbers = {name: loaded.spec.outputs.index(name) for name in loaded.spec.outputs}
    assert (numbers["fold"], numbers["pen"], numbers["out_of_focus"]) == (2, 4, 6)
    assert loaded.spec.outputs.index(str(loaded.spec.background)) == 7
    torch.save(module, tmp_path / "GrandQC_MPP1.pth")
    pickled = replace(loaded, weights=tmp_path / "GrandQC_MPP1.pth")
    with pytest.raises(
        WeightsError, match=r"plain tensors.* save the `state_dict\(\)`"
    ):
        _ = pickled.network


@pytest.mark.skipif(
    find_spec("shell") is None, reason="needs pip install --no-deps lavlab-shell"
)
@pytest.mark.check
def test_the_network_of_an_installed_wheel_names_the_tissue_of_a_slide(
    tmp_path: Path,
) -> None:
    write_he_slide(tmp_path / "a.svs", (1600, 1200))
    with open_slide(tmp_path / "a.svs") as slide:
        found = segment(
            slide, load_segmenter("lavlab-shell"), labels_path=tmp_path / "labels.tif"
        )
    assert set(found.fractions) >= {"epithelium", "stroma"}
    labels = tifffile.imread(tmp_path / "labels.tif")
    assert labels.shape == found.size[::-1]
    assert 0.1 < (labels > 0).mean() < 0.9  # the glass stays without a name
