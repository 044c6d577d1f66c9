"""`run` with a network or function of its process: stored, resumed, never mixed with another."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import thinsection as ts
from thinsection.errors import ConfigError, InvalidInputError, UnknownEncoderError
from thinsection.predict.inputs import training_inputs
from thinsection.stages.config import RunConfig
from thinsection.testing.synthetic import write_he_slide

SETTINGS: dict[str, Any] = {"tile_px": 64, "memory": "256MiB", "overview": False}
GRID = "64px_0.5mpp"


class Pixels(nn.Module):
    """A linear map of a tile's mean colour, with a switch that no weight shows."""

    def __init__(self, power: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(3, 4)
        self.power = power

    def forward(self, tiles: Tensor) -> Tensor:
        colours = (tiles.float() / 255).mean(dim=(2, 3)) ** self.power
        answer: Tensor = self.last(colours)
        return answer


def encoder_of(network: nn.Module, **more: Any) -> Any:
    return ts.make_encoder(network, name="pixels", device="cpu", tile_px=64, **more)


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slides")
    for name in "ab":
        write_he_slide(folder / f"{name}.svs", (500, 400), seed=ord(name))
    return folder


def run(slides: Path, out: Path, encoder: Any, **more: Any) -> list[str]:
    summary = ts.run([slides], out=out, encoder=encoder, **SETTINGS | more)
    return [result.status for result in summary.results]


def test_a_run_stores_the_embeddings_under_the_name_and_resumes(
    slides: Path, tmp_path: Path
) -> None:
    network = Pixels()
    encoder = encoder_of(network)
    assert run(slides, tmp_path, encoder) == ["done", "done"]
    assert run(slides, tmp_path, encoder_of(Pixels())) == ["skipped", "skipped"]
    results = ts.open_results(tmp_path)
    assert results.features == (f"{GRID}/features_{encoder.label}",)
    stored = results.tile_embeddings("a")
    with ts.open_slide(slides / "a.svs") as slide:
        for (x, y), row in zip(stored.coords_l0.tolist(), np.asarray(stored.features)):
            tile = torch.from_numpy(slide.read_region((x, y), 0, (64, 64)).copy())
            with torch.no_grad():
                plain = network(tile.permute(2, 0, 1)[None])[0].numpy()
            np.testing.assert_allclose(row, plain, atol=1e-5)
    facts = training_inputs([results.file("a", results.features[0])])
    assert (facts.encoder, facts.weights_hash) == ("pixels", encoder.weights_hash)
    assert facts.run["encode"]["encoders"] == ["own:pixels"]
    assert "sample" not in (tmp_path / "summary.csv").read_text()


def test_a_network_that_is_trained_on_gets_a_folder_of_its_own(
    slides: Path, tmp_path: Path
) -> None:
    network = Pixels()
    encoder = encoder_of(network)
    run(slides, tmp_path, encoder)
    with torch.no_grad():
        network.last.bias.add_(1)
    assert run(slides, tmp_path, encoder) == ["done", "done"]
    results = ts.open_results(tmp_path)
    first, second = (
        np.asarray(results.tile_embeddings("a", name).features)
        for name in results.features
    )
    np.testing.assert_allclose(np.abs(first - second), 1, atol=1e-5)


@pytest.mark.parametrize("overwrite", [False, True])
def test_other_code_under_the_same_name_and_weights_is_refused(
    slides: Path, tmp_path: Path, overwrite: bool
) -> None:
    run(slides / "a.svs", tmp_path, encoder_of(Pixels()))
    changed = encoder_of(Pixels(power=2))
    with pytest.raises(InvalidInputError, match="its code or transform has changed"):
        run(slides, tmp_path, changed, overwrite=overwrite)
    versioned = encoder_of(Pixels(power=2), version="2")
    assert run(slides, tmp_path, versioned) == ["done", "done"]
    assert len(ts.open_results(tmp_path).features) == 2


def test_weights_that_change_during_a_run_are_an_error(
    slides: Path, tmp_path: Path
) -> None:
    network = Pixels()

    def train(event: Any) -> None:
        if event.kind == "ended":
            with torch.no_grad():
                network.last.bias.add_(1)

    with pytest.raises(InvalidInputError, match="weights must not change"):
        run(slides, tmp_path, encoder_of(network), on_event=train)


def test_a_loaded_encoder_equals_its_name(slides: Path, tmp_path: Path) -> None:
    plain: dict[str, Any] = {"engine": "torch", "device": "cpu"}
    loaded = ts.load_encoder("efficientnet_lite0", **plain)
    assert run(slides / "a.svs", tmp_path, loaded) == ["done"]
    name = "efficientnet_lite0"
    assert run(slides / "a.svs", tmp_path, name, **plain) == ["skipped"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 2}, "executor must be 'inline' .* got 'pool'; other processes"),
        ({"executor": object()}, "executor must be 'inline' .* got 'dask'"),
        ({"weights": "w.pth"}, "^weights must be left out"),
        ({"precision": "bf16"}, "^precision must be left out"),
        ({"pretrained": False}, "^pretrained must be left out"),
    ],
)
def test_settings_that_an_own_encoder_cannot_follow_are_refused(
    slides: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(slides, tmp_path / "out", encoder_of(Pixels()), **settings)
    assert not (tmp_path / "out").exists()


def test_a_bare_network_and_a_name_without_its_network_say_what_to_do(
    slides: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"got Pixels; name a network .*make_encoder"):
        run(slides, tmp_path, Pixels())
    config = RunConfig()
    with pytest.raises(UnknownEncoderError, match="'pixels' must be passed in Python"):
        ts.run([slides], out=tmp_path, config=config, encoders=("own:pixels",))
