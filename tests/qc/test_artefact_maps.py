"""The nets behind folds, ink, bubbles and dirt: what they give, and where they come from."""

import hashlib

import numpy as np
import pytest
import torch
from tests.support import convnet_training as training
from tests.support.tuning_slide import tuning_slide

from thinsection.arrays import get_namespace
from thinsection.qc.checks import convnet
from thinsection.qc.checks.artefact_maps import CLASSES, INKS, artefact_maps


def test_the_net_in_numpy_gives_what_its_twin_in_torch_gives() -> None:
    torch.manual_seed(1)
    net = training.folded(training.Net().eval())
    rgb = tuning_slide(9_500, size=(411, 333), mpp=8.0).rgb
    density = -np.log(np.maximum(rgb, 4).astype(np.float32) / training.glass_of(rgb))
    density = density.clip(-0.1, 4)
    weights = {name: value.astype(np.float32) for name, value in training.arrays(net).items()}
    found = convnet.convnet_maps(get_namespace("cpu"), density, weights)

    whole = np.pad(density, ((0, 1), (0, 1), (0, 0)), mode="edge")
    with torch.no_grad():
        logits, asked = net(torch.from_numpy(whole.transpose(2, 0, 1)[None].copy()))
        p = torch.nn.functional.pixel_shuffle(torch.softmax(logits, 1).flatten(1, 2), 2)[0].numpy()
    inside = np.zeros(rgb.shape[:2], bool)  # at the border, glass is measured otherwise
    inside[8:-8, 8:-8] = True
    inside &= asked[0, 0].numpy().repeat(2, axis=0).repeat(2, axis=1)[:333, :411]
    assert 0.1 < inside.mean() < 0.9
    assert np.abs(found - p[:, :333, :411])[:, inside].max() < 1e-3
    assert (found[0] == 1).any()  # plain glass


@pytest.mark.parametrize("mpp", [4.0, 8.0, 11.0])
def test_maps_have_the_shape_of_their_image_and_are_probabilities(mpp: float) -> None:
    rgb = tuning_slide(9_501, size=(301, 203), mpp=4.0, stain="he").rgb
    found = artefact_maps(get_namespace("cpu"), rgb, mpp)
    assert list(found) == list(CLASSES)
    total = sum(found.values())
    assert all(plane.shape == (203, 301) for plane in found.values())
    # rings are the wide net's alone, so that the sum may be off by what the other said
    assert np.median(np.abs(total - 1)) < 2e-3
    assert min(float(plane.min()) for plane in found.values()) >= -1e-6


def test_black_ink_is_ink_where_a_net_takes_it_for_the_edge_of_the_slide() -> None:
    """A stroke of 2 mm: wider than what the wide net knows of ink."""
    rgb = tuning_slide(9_502, size=(900, 700), mpp=8.0, stain="he", artefacts=()).rgb.copy()
    rgb[200:450, 150:700] = (24, 22, 26)
    found = artefact_maps(get_namespace("cpu"), rgb, 8.0)
    ink = sum(found[f"pen_{name}"] for name in INKS)
    assert (ink[210:440, 160:690] > 0.5).mean() > 0.95


def test_the_weights_are_those_that_the_training_script_made() -> None:
    found = hashlib.sha256(convnet._MODEL.read_bytes()).hexdigest()
    assert found == training.SHA256
    assert convnet._MODEL.stat().st_size < 1_000_000
