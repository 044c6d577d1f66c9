"""The nets behind folds, ink, bubbles and dirt: what they give, and where they come from."""

import hashlib

import numpy as np
import pytest
import torch
from benchmarks.bench_artefacts import real_pen
from tests.qc.slides import REAL
from tests.support import convnet_training as training
from tests.support.tuning_slide import tuning_slide

from thinsection.arrays import get_namespace
from thinsection.qc.checks import convnet
from thinsection.qc.checks.artefact_features import Features
from thinsection.qc.checks.artefact_maps import CLASSES, artefact_maps

PICTURES = REAL.parents[1] / "pictures"


def test_the_net_in_numpy_gives_what_its_twin_in_torch_gives() -> None:
    torch.manual_seed(1)
    net = training.folded(training.Net().eval())
    rgb = tuning_slide(9_500, size=(411, 333), mpp=8.0).rgb
    density = -np.log(np.maximum(rgb, 4).astype(np.float32) / training.glass_of(rgb))
    density = density.clip(-0.1, 4)
    weights = {
        name: value.astype(np.float32) for name, value in training.arrays(net).items()
    }
    squares, place = convnet.convnet_squares(
        get_namespace("cpu"), list(density.transpose(2, 0, 1)), weights
    )
    squares = squares / convnet.WHOLE
    (height, width), classes = place.shape, squares.shape[2]
    tall = squares[place].reshape(height, width, 2, 2, classes).transpose(4, 0, 2, 1, 3)
    found = tall.reshape(classes, 2 * height, 2 * width)[:, :333, :411]

    whole = np.pad(density, ((0, 1), (0, 1), (0, 0)), mode="edge")
    with torch.no_grad():
        logits, asked = net(torch.from_numpy(whole.transpose(2, 0, 1)[None].copy()))
        p = torch.nn.functional.pixel_shuffle(
            torch.softmax(logits, 1).flatten(1, 2), 2
        )[0].numpy()
    inside = np.zeros(rgb.shape[:2], bool)  # at the border, glass is measured otherwise
    inside[8:-8, 8:-8] = True
    inside &= asked[0, 0].numpy().repeat(2, axis=0).repeat(2, axis=1)[:333, :411]
    assert 0.1 < inside.mean() < 0.9
    assert np.abs(found - p[:, :333, :411])[:, inside].max() < 1e-3
    assert not found.sum(axis=0).all()  # of plain glass nothing is said


@pytest.mark.parametrize("mpp", [4.0, 8.0, 11.0])
def test_maps_have_the_shape_of_their_image_and_are_probabilities(mpp: float) -> None:
    rgb = tuning_slide(9_501, size=(301, 203), mpp=4.0, stain="he").rgb
    found = artefact_maps(get_namespace("cpu"), rgb, mpp)
    assert list(found) == list(CLASSES)
    total = sum(plane / 255 for plane in found.values())
    assert all(plane.shape == (203, 301) for plane in found.values())
    # rings are the wide net's alone, so that the sum may be off by what the other said
    assert np.median(np.abs(total - 1)) < 3 / 255
    assert all(plane.dtype == np.uint8 for plane in found.values())


@pytest.mark.parametrize("mpp", [5.3, 8.0])
def test_bands_of_rows_do_not_show(monkeypatch: pytest.MonkeyPatch, mpp: float) -> None:
    rgb = tuning_slide(9_502, size=(331, 283), mpp=mpp).rgb
    ns = get_namespace("cpu")
    monkeypatch.setattr("thinsection.qc.checks.artefact_features._BAND_PX", 1 << 30)
    whole = artefact_maps(ns, rgb, mpp)
    monkeypatch.setattr("thinsection.qc.checks.artefact_features._BAND_PX", 1)
    assert len(Features(ns, rgb, mpp).bands) > 12
    bands = artefact_maps(ns, rgb, mpp)
    for name, plane in whole.items():
        assert np.abs(plane.astype(int) - bands[name]).max() <= 1, name
    assert (
        sum((plane > 127).any() for plane in whole.values()) > 3
    )  # it shows something


@pytest.mark.skipif(
    not PICTURES.is_dir(), reason="no pictures beside THINSECTION_TEST_SLIDES"
)
def test_real_ink_of_each_colour_is_found_also_where_one_net_takes_it_for_the_slides_edge() -> (
    None
):
    found = real_pen("auto", PICTURES)
    for color, recall, precision in (
        ("black", 0.95, 0.92),
        # with the rim that the default tissue mask removes too
        ("green", 0.95, 0.9),
        ("red", 0.85, 0.77),
    ):
        assert found[color]["recall"] >= recall, color
        assert found[color]["precision"] >= precision, color


def test_the_weights_are_those_that_the_training_script_made() -> None:
    found = hashlib.sha256(convnet._MODEL.read_bytes()).hexdigest()
    assert found == training.SHA256
    assert convnet._MODEL.stat().st_size < 1_000_000
