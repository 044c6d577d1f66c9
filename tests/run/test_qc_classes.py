"""A run whose quality control takes the classes of a segmenter: areas, resume, other weights."""

from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from safetensors.torch import save_file

from thinsection import qc as qc_room
from thinsection.config import replace_flat
from thinsection.errors import ConfigError, WeightsError
from thinsection.report.qc_files import load_qc
from thinsection.run.ending import RunSummary
from thinsection.run.qc_run import QcRunConfig, check_slides
from thinsection.run.run import run
from thinsection.store.tiles_h5 import read_tiles
from thinsection.testing.synthetic import write_he_slide

NET = """
[segmenter]
name = "purple"
outputs = ["glass", "pink", "purple"]
background = "glass"
mpp = 4.0
px = 64
mean = [0.0, 0.0, 0.0]
std = [1.0, 1.0, 1.0]
architecture = "torch.nn:Conv2d"
options = { in_channels = 3, out_channels = 3, kernel_size = 1 }
weights = "purple.safetensors"
"""
PIPELINE = """
name = "net"
work_mpp = 8.0
work_from = "mpp"
[segmenter]
name = "purple.toml"
[segmenter.classes]
purple = "focus"
[[check]]
kind = "tissue"
"""


def write_weights(folder: Path, purple: float) -> None:
    """A network of one pixel: 'purple' where the green channel is below `purple`."""
    weight = torch.tensor([[0.0, 0.0, 0.0], [0.0, -1.0, 0.0], [0.0, -2.0, 0.0]])
    bias = torch.tensor([-0.8, 0.0, purple])
    state = {"weight": weight[:, :, None, None].contiguous(), "bias": bias}
    save_file(state, folder / "purple.safetensors")


@pytest.fixture(scope="module")
def he(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slide") / "he.svs"
    write_he_slide(path, (3000, 2500), seed=5)
    return path


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The pipeline file, with a network beside it."""
    write_weights(tmp_path, 0.55)
    (tmp_path / "purple.toml").write_text(NET)
    (tmp_path / "net.toml").write_text(PIPELINE)
    return tmp_path / "net.toml"


def run_once(he: Path, own: Path, **settings: object) -> RunSummary:
    return run(
        [he],
        out=own.parent / "out",
        until="tiles",
        qc=str(own),
        overview=False,
        **settings,  # type: ignore[arg-type]
    )


def folders(own: Path, pattern: str) -> list[Path]:
    return sorted((own.parent / "out" / "slides" / "he").glob(pattern))


def test_quality_control_removes_the_pixels_of_the_networks_own_label_map(
    he: Path, own: Path
) -> None:
    assert run_once(he, own).counts["done"] == 1
    (segments,) = folders(own, "segment_*")
    (folder,) = folders(own, "qc_*")
    qc = load_qc(folder)
    # the label map as another program reads it: 1 is pink, 2 is purple
    labels = tifffile.imread(segments / "labels.tif")
    area = qc.masks["focus"]
    y = ((np.arange(area.shape[0]) + 0.5) * 2500 / area.shape[0] / 8).astype(int)
    x = ((np.arange(area.shape[1]) + 0.5) * 3000 / area.shape[1] / 8).astype(int)
    np.testing.assert_array_equal(area, labels[np.ix_(y, x)] == 2)
    glass = qc.masks["glass"]
    np.testing.assert_array_equal(qc.mask_use, ~glass & ~area)
    assert 0.05 < area[~glass].mean() < 0.95
    (grid,) = (own.parent / "out").glob("256px*/tiles/he.h5")
    assert read_tiles(grid).columns["qc_focus"].max() > 0.3


def test_nothing_is_computed_twice(
    he: Path, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(qc_room, "run_qc", lambda *args, **kwargs: 1 / 0)
        assert run_once(he, own).counts["failed"] == 1
    (labels,) = folders(own, "segment_*/labels.tif")
    stamp = labels.stat().st_mtime_ns
    resumed = check_slides(
        [he],
        out=own.parent / "out",
        config=QcRunConfig(checks=type(QcRunConfig().checks)(qc=str(own))),
    )
    assert resumed.num_failed == 0
    (page,) = (own.parent / "out").glob("qc_net-*.html")
    assert resumed.page == page
    (qc,) = folders(own, "qc_*/qc.zip")
    qc_stamp = qc.stat().st_mtime_ns
    assert run_once(he, own).counts["done"] == 1
    assert run_once(he, own).counts["skipped"] == 1
    # the same network for columns of tiles, and alone
    network = {"segmenters": [str(own.parent / "purple.toml")]}
    assert run_once(he, own, **network).counts["done"] == 1
    run([he], out=own.parent / "out", until="segments", **network)
    assert folders(own, "segment_*/labels.tif") == [labels]
    assert labels.stat().st_mtime_ns == stamp
    assert qc.stat().st_mtime_ns == qc_stamp
    tables = (own.parent / "out").glob("256px*/tiles/he.h5")
    assert any("purple" in read_tiles(table).columns for table in tables)


def test_other_weights_and_another_resolution_are_other_results(
    he: Path, own: Path
) -> None:
    run_once(he, own)
    write_weights(own.parent, 0.45)
    assert run_once(he, own).counts["done"] == 1
    assert run_once(he, own, segment_mpp=8.0).counts["done"] == 1
    assert len(folders(own, "segment_*")) == len(folders(own, "qc_*")) == 3
    areas = {
        load_qc(folder).masks["focus"].tobytes() for folder in folders(own, "qc_*")
    }
    assert len(areas) == 3


def test_a_run_says_before_it_opens_a_slide_what_the_segmenter_lacks(
    he: Path, own: Path
) -> None:
    own.write_text(PIPELINE.replace("purple = ", "purpel = "))
    with pytest.raises(ConfigError, match="got 'purpel'; did you mean 'purple'"):
        run_once(he, own)
    own.write_text(PIPELINE)
    (own.parent / "purple.safetensors").unlink()
    with pytest.raises(WeightsError, match="must be an existing file"):
        run_once(he, own)
    assert not (own.parent / "out" / "slides").exists()


OWN_NET = """
from torch import nn
class Purple(nn.Conv2d):
    def __init__(self):
        super().__init__(3, 3, 1)
"""


def test_a_network_of_ones_own_class_runs_where_its_file_is_trusted(
    he: Path, own: Path, tmp_path: Path
) -> None:
    text = NET.replace("torch.nn:Conv2d", "my_net:Purple")
    options = "options = { in_channels = 3, out_channels = 3, kernel_size = 1 }\n"
    (tmp_path / "purple.toml").write_text(text.replace(options, ""))
    (tmp_path / "my_net.py").write_text(OWN_NET)
    with pytest.raises(ConfigError, match="trust_code=FILE"):
        run_once(he, own)
    assert not (tmp_path / "out" / "slides").exists()
    trusted = (str(tmp_path / "my_net.py"),)
    assert run_once(he, own, trust_code=trusted).counts["done"] == 1
    (folder,) = folders(own, "qc_*")
    config = replace_flat(QcRunConfig(), {"qc": str(own), "trust_code": trusted})
    summary = check_slides([he], out=tmp_path / "checked", config=config)
    assert summary.num_failed == 0
    (checked,) = (tmp_path / "checked" / "slides" / "he").glob("qc_*")
    expected = load_qc(folder).masks["focus"]
    np.testing.assert_array_equal(load_qc(checked).masks["focus"], expected)
    assert expected.any()
