"""A model is one file; what was not written here is refused before a tensor is read."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from thinsection.errors import (
    ConfigError,
    InvalidInputError,
    ThinsectionError,
    WeightsError,
)
from thinsection.evaluation.target import Target
from thinsection.pool import load_slide_encoder
from thinsection.pool.encoder import Expects, check_fit
from thinsection.predict.heads.config import HeadConfig
from thinsection.predict.heads.head import build_head
from thinsection.predict.inputs import Inputs, run_config
from thinsection.predict.model_file import (
    Lock,
    Member,
    Model,
    ModelCard,
    card_markdown,
    case_mark,
    load_model,
    read_card,
    save_model,
)
from thinsection.predict.usual import Usual
from thinsection.weights.files import MODEL_KEY

DIM = 6


def model(head: str = "clam_mb") -> Model:
    torch.manual_seed(3)
    config = HeadConfig(head=head, hidden_dim=8, attention_dim=4, num_heads=2)
    usual = Usual.of(np.random.default_rng(0).normal(size=(40, DIM)))
    card = ModelCard(
        name="grade",
        head=config,
        target=Target(kind="binary", columns=("grade",), names=("low", "high")),
        inputs=Inputs(
            encoder="uni2_h", revision="a" * 40, dim=DIM, tile_px=256, tile_mpp=0.5
        ),
        members=(
            Member(temperature=1.5, held_out=(case_mark("P1"),)),
            Member(temperature=0.8),
        ),
        floor=usual.floor,
        threshold=usual.threshold,
        table_sha256="ab" * 32,
        data={"cases": 40},
        scores={"auroc": 0.91},
        versions={"thinsection": "0.1.0"},
    )
    heads = tuple(build_head(config, DIM, 2).eval() for _ in card.members)
    return Model(card=card, heads=heads, usual=usual)


@pytest.mark.parametrize(
    "head", ["linear", "abmil", "clam_mb", "dsmil", "transmil", "transformer"]
)
def test_a_model_reads_back_as_it_was_and_its_bytes_are_the_same_each_time(
    head: str, tmp_path: Path
) -> None:
    first = model(head)
    save_model(tmp_path / "a.safetensors", first)
    save_model(tmp_path / "b.safetensors", model(head))
    assert (tmp_path / "a.safetensors").read_bytes() == (
        tmp_path / "b.safetensors"
    ).read_bytes()
    again = load_model(tmp_path / "a.safetensors")
    assert again.card == first.card == read_card(tmp_path / "a.safetensors")
    bag, cells = torch.randn(9, DIM), torch.arange(18).view(9, 2)
    for one, two in zip(first.heads, again.heads, strict=True):
        assert torch.equal(one(bag, cells).logits, two(bag, cells).logits)
    far = np.full(DIM, 5.0)
    assert again.usual.distance(far) == pytest.approx(
        first.usual.distance(far), rel=1e-5
    )


@pytest.mark.parametrize(
    ("head", "sums"), [("abmil", 2), ("clam_sb", 2), ("clam_mb", 4)]
)
def test_a_model_with_an_attention_is_a_slide_encoder(
    head: str, sums: int, tmp_path: Path
) -> None:
    trained, tiles = model(head), torch.randn(31, DIM)
    save_model(path := tmp_path / "m.safetensors", trained)
    encoder = load_slide_encoder("abmil", weights=path, device="cpu")
    found = encoder.encode(tiles, np.zeros((31, 2), np.int64), tile_px_l0=256)
    wanted = []
    for member in trained.heads:
        output = member(tiles)
        wanted.append(
            (output.attention.double().T @ output.instances.double()).flatten()
        )
    assert encoder.dim == sums * 8 == len(found)
    np.testing.assert_allclose(found, torch.cat(wanted).detach().numpy(), atol=1e-6)
    trained_on = {"tile_dim": DIM, "tile_px": 256, "tile_mpp": 0.5}
    assert encoder.expects == Expects(tile_encoders=("uni2_h",), **trained_on)
    with pytest.raises(InvalidInputError, match="tile encoder must be uni2_h"):
        check_fit(encoder, "conch_v15", 256, 0.5)


def test_a_model_without_an_attention_is_no_slide_encoder(tmp_path: Path) -> None:
    save_model(path := tmp_path / "m.safetensors", model("linear"))
    with pytest.raises(WeightsError, match="abmil weights must contain V"):
        load_slide_encoder("abmil", weights=path, device="cpu")


def test_calibration_divides_the_logits_of_each_member() -> None:
    logits = np.array([[1.5, 0.0], [0.0, 0.8]])
    likely = np.e / (1 + np.e)
    wanted = [[likely, 1 - likely], [1 - likely, likely]]
    np.testing.assert_allclose(model().answers(logits, [0, 1]), wanted)


def test_a_training_case_is_answered_by_those_that_have_not_seen_it() -> None:
    assert model().asked([case_mark("P1")]) == [0]
    assert model().asked([case_mark("P2")]) == [0, 1]


@pytest.mark.parametrize(("n", "dim"), [(60, 4), (60, 200), (400, 30)])
def test_one_in_a_hundred_usual_slides_and_every_strange_one_is_far(
    n: int, dim: int
) -> None:
    rng = np.random.default_rng(n + dim)
    mixing = rng.normal(size=(dim, dim)) / np.sqrt(dim)

    def drawn(count: int) -> np.ndarray:
        return rng.normal(size=(count, dim)) @ mixing + 3

    usual, new = Usual.of(drawn(n)), drawn(4000)
    share = np.mean([usual.distance(row) > usual.threshold for row in new])
    assert 0.001 <= share <= 0.06
    strange = drawn(200) + 4 * rng.choice([-1, 1], dim)
    assert np.mean([usual.distance(row) > usual.threshold for row in strange]) > 0.9


def test_the_distance_is_mahalanobis_where_cases_are_many() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(5000, 3)) * [1, 2, 3]
    x = np.array([2.0, -1, 4])
    z = x - rows.mean(0)
    wanted = np.sqrt(z @ np.linalg.solve(np.cov(rows.T, bias=True), z))
    assert Usual.of(rows).distance(x) == pytest.approx(wanted, rel=1e-2)


def test_the_threshold_is_of_each_case_against_the_others() -> None:
    """Leave-one-out by doing it, with the shrinkage of all: the closed form is exact."""
    rows = np.random.default_rng(1).normal(size=(30, 50))
    n, found = len(rows), Usual.of(rows)
    s = np.cov(rows.T, bias=True)
    shrink = found.floor / (np.trace(s) / 50)
    distances = []
    for i in range(n):
        rest = np.delete(rows, i, 0)
        cov = (1 - shrink) * np.cov(rest.T, bias=True) + found.floor * np.eye(50)
        z = rows[i] - rest.mean(0)
        distances.append(np.sqrt(z @ np.linalg.solve(cov, z)))
    assert found.threshold == pytest.approx(np.quantile(distances, 0.99), rel=1e-6)


def test_the_card_says_use_data_figures_and_limits() -> None:
    text = card_markdown(model().card)
    for words in (
        "# grade",
        "For research use only",
        "predicts: class of grade (binary)",
        "tile embeddings of uni2_h, 6 dimensions",
        f"commit: {'a' * 40}",
        "256 px at 0.5 µm/px",
        "clam_mb, 2 trained models",
        "cases: 40",
        f"SHA-256 of the table: {'ab' * 32}",
        "auroc: 0.91",
        "## Limits",
    ):
        assert words in text


def test_the_card_has_a_line_for_the_thresholds() -> None:
    lock = Lock(thresholds={"high": 0.235}, inner_cases=12)
    lines = card_markdown(replace(model().card, lock=lock)).splitlines()
    assert "- thresholds, chosen on 12 validation cases: high 0.235" in lines


def spoiled(
    path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]
) -> None:
    told, tensors = json.loads(_metadata(path)), load_file(path)
    change(told, tensors)
    save_file(tensors, path, {MODEL_KEY: json.dumps(told)})


def _metadata(path: Path) -> str:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return str(json.loads(data[8 : 8 + size])["__metadata__"][MODEL_KEY])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c, t: c.update(format=99),
            "format must be 2, got 99; update thinsection",
        ),
        (
            lambda c, t: c.update(nmae="x"),
            "unknown config key 'model.nmae'; did you mean",
        ),
        (lambda c, t: c.pop("inputs"), r"model.inputs must be set"),
        (
            lambda c, t: c["head"].update(hidden_dim="8"),
            "head.hidden_dim must be int, got '8'",
        ),
        (lambda c, t: c["head"].update(head="os.system"), "head must be a known name"),
        (
            lambda c, t: c["head"].update(hidden_dim=1 << 40),
            "hidden_dim must be in 1..16384",
        ),
        (
            lambda c, t: c["head"].update(num_layers=10**9),
            "num_layers must be in 1..64",
        ),
        (lambda c, t: c["inputs"].update(dim=10**9), "dim must be in 1..65536"),
        (
            lambda c, t: c["target"].update(names=["x"] * 5000),
            "outputs must be in 1..4096",
        ),
        (lambda c, t: c.update(members=[]), "members must be in 1..1000, got 0"),
        (lambda c, t: c["members"][0].update(temperature=0.0), "must be > 0"),
        (
            lambda c, t: c["members"][0].update(temperature=float("nan")),
            "temperature must be finite",
        ),
        (lambda c, t: c.update(threshold="far"), "threshold must be float"),
        (
            lambda c, t: c["head"].update(hidden_dim=16),
            "weights must fit the architecture name by name",
        ),
        (
            lambda c, t: t.update(extra=torch.zeros(1)),
            r"name by name, got 1 unexpected \(extra\)",
        ),
        (lambda c, t: t.pop("0.classifier.bias"), r"1 missing \(0.classifier.bias\)"),
        (
            lambda c, t: t.update(mean=torch.zeros(7)),
            r"mean, axes, variances, within must have matching shapes, got \[\(7,\)",
        ),
        (lambda c, t: t.update(mean=torch.full((DIM,), np.nan)), "must be finite"),
    ],
)
def test_a_header_or_tensors_that_do_not_fit_are_refused(
    change: Callable[..., None], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    save_model(path, model())
    spoiled(path, change)
    with pytest.raises((WeightsError, ConfigError), match=message):
        load_model(path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04K\x01.",
        (1 << 60).to_bytes(8, "little") + b"{}",
        (9).to_bytes(8, "little") + b"[1, 2, 3]",
        (60_000).to_bytes(8, "little") + b"[" * 60_000,
        (2).to_bytes(8, "little") + b"{}",
        (22).to_bytes(8, "little") + b'{"__metadata__": [[]]}',
    ],
    ids=[
        "empty",
        "pickle",
        "huge header",
        "a list",
        "nested",
        "no metadata",
        "odd metadata",
    ],
)
def test_other_files_are_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(
        ThinsectionError,
        match=r"model must be a file of .*, got '.*model\.safetensors'",
    ):
        read_card(path)


def test_a_truncated_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_model(path, model())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsError, match="weights must be complete"):
        load_model(path)


@pytest.mark.parametrize("value", [0.0, 0.25, 1e6])
def test_the_distance_to_equal_training_cases_is_a_finite_number(value: float) -> None:
    usual = Usual.of(np.full((8, DIM), value))
    assert usual.distance(np.full(DIM, value)) <= 1e-3
    far = usual.distance(np.full(DIM, 1e6) + np.arange(DIM))
    assert np.isfinite(far)
    assert far > usual.threshold


def test_corrections_of_the_training_slides_are_not_those_of_other_slides() -> None:
    run = {"qc": {"qc": "auto", "qc_edits": "/somebody/corrections"}}
    config = run_config(Inputs(dim=8, run=run), "m")
    assert (config.qc.qc, config.qc.qc_edits) == ("auto", None)
