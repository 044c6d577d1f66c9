"""A fingerprint proves the features of an encoder, and names the fault where they differ."""

import base64
import hashlib
import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from training.encoders.default_fingerprint import timm_embedding
from typer.testing import CliRunner

from thinsection.cli.app import build_app
from thinsection.encode import agreement as agreement_module
from thinsection.encode import declared_encoders, load_encoder
from thinsection.encode.agreement import (
    TOLERANCE,
    compare,
    make_fingerprint,
    unnoticed_faults,
)
from thinsection.encode.backbone import build_backbone
from thinsection.encode.check import check_encoder
from thinsection.encode.encoder import NetworkTileEncoder
from thinsection.encode.fingerprint import (
    TILE_EDGE,
    TILE_SHA256,
    drawn_tile,
    encoded_vector,
    find_fingerprint,
    fingerprint_paths,
    read_fingerprint,
)
from thinsection.encode.registry import IMAGENET_MEAN, IMAGENET_STD, EncoderSpec
from thinsection.errors import InvalidInputError, WeightsError
from thinsection.stages.features import result_fields
from thinsection.weights.origin import Origin
from thinsection.weights.placement import Placement, optional_package

CPU = Placement(torch.device("cpu"), "fp32")
HALF = (0.5, 0.5, 0.5)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def write_checkpoint(folder: Path, **published) -> None:
    """A tiny vision transformer with its config, which states the preprocessing."""
    folder.mkdir(exist_ok=True)
    if not (folder / "model.safetensors").exists():
        torch.manual_seed(1)
        timm = optional_package("timm")
        network = timm.create_model("vit_tiny_patch16_224", num_classes=0, depth=3)
        save_file(network.state_dict(), folder / "model.safetensors")
    stated = {
        "input_size": [3, 224, 224],
        "mean": HALF,
        "std": HALF,
        "interpolation": "bicubic",
        "crop_pct": 1.0,
    }
    config = {
        "architecture": "vit_tiny_patch16_224",
        "model_args": {"depth": 3},
        "pretrained_cfg": {**stated, **published},
    }
    (folder / "config.json").write_text(json.dumps(config))


def authors_embedding(folder: Path, *, mean=HALF, std=HALF, edge: int = 224):
    """What a script of the authors computes: timm's network, Pillow's resize, no code of ours."""
    from safetensors.torch import load_file

    timm = optional_package("timm")
    network = timm.create_model("vit_tiny_patch16_224", num_classes=0, depth=3).eval()
    network.load_state_dict(load_file(folder / "model.safetensors"))
    picture = Image.fromarray(drawn_tile()).resize(
        (edge, edge), Image.Resampling.BICUBIC
    )
    start = (edge - 224) // 2
    seen = picture.crop((start, start, start + 224, start + 224))
    pixels = torch.from_numpy(np.asarray(seen).copy()).permute(2, 0, 1) / 255
    pixels = (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[
        :, None, None
    ]
    with torch.no_grad():
        return network(pixels[None])[0].numpy()


def keep(fingerprint) -> Path:
    path = fingerprint_paths(fingerprint.encoder)[1]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(fingerprint.to_toml())
    return path


def proved_checkpoint(folder: Path, **changes) -> Path:
    """A checkpoint with a fingerprint of its authors; returns the fingerprint's file."""
    write_checkpoint(folder)
    encoder = load_encoder(str(folder), device="cpu", precision="fp32", engine="torch")
    fingerprint = make_fingerprint(
        encoder, embedding=authors_embedding(folder), code="timm", who="me, today"
    )
    return keep(replace(fingerprint, **changes))


def load(folder: Path, **options):
    options = {"precision": "fp32", "engine": "torch", **options}
    return load_encoder(str(folder), device="cpu", **options)


def seeded(name: str, *, seed: int = 3, **changes) -> NetworkTileEncoder:
    """A declared network with seeded weights, under another declaration."""
    spec = replace(small(name), **changes)
    return NetworkTileEncoder(spec, build_backbone(spec, seed=seed), CPU, Origin())


def small(name: str) -> EncoderSpec:
    """A declaration with two layers, which a test can run often."""
    spec = declared_encoders()[name]
    options = {**spec.architecture.options, "depth": 2}
    architecture = replace(spec.architecture, options=options)
    return replace(spec, architecture=architecture, num_params=None)


def test_the_tile_has_the_same_bytes_everywhere_and_no_symmetry() -> None:
    tile = drawn_tile()
    assert tile.shape == (TILE_EDGE, TILE_EDGE, 3) and tile.dtype == np.uint8
    assert hashlib.sha256(tile.tobytes()).hexdigest() == TILE_SHA256
    for other in (tile[::-1], tile[:, ::-1], tile.swapaxes(0, 1), tile[..., ::-1]):
        assert np.abs(tile.astype(int) - other).mean() > 5
    edges = {s.resize_px or s.input_px for s in declared_encoders().values()}
    assert max(edges) <= TILE_EDGE


def test_the_default_encoder_gives_the_embedding_that_timm_gives(own_cache) -> None:
    stored = find_fingerprint("efficientnet_lite0")
    assert stored is not None and stored.made_by == "port"
    expected = timm_embedding(Image.fromarray(drawn_tile()))
    np.testing.assert_allclose(stored.vector, expected, rtol=0, atol=2e-5)
    encoder = load_encoder("efficientnet_lite0", device="cpu", precision="fp32")
    assert encoder.fingerprint.startswith("embeddings agree with a port, timm")
    assert ": 1.0000 (largest difference " in encoder.fingerprint


def test_an_encoder_that_agrees_says_so_in_its_records_and_keeps_its_key(
    tmp_path: Path,
) -> None:
    write_checkpoint(tmp_path / "vit")
    before = load(tmp_path / "vit")
    assert before.provenance["fingerprint"] == "none"
    proved_checkpoint(tmp_path / "vit")
    after = load(tmp_path / "vit")
    said = after.provenance["fingerprint"]
    assert said.startswith("embeddings agree with the authors' code: 1.0000 (")
    assert "fp32" in said and "torch" in said
    assert result_fields(after.provenance) == result_fields(before.provenance)


@pytest.mark.parametrize(
    ("published", "reason"),
    [
        (
            {"mean": IMAGENET_MEAN, "std": IMAGENET_STD},
            r"with mean \(0.5, 0.5, 0.5\) in place of \(0.485, 0.456, 0.406\) and std",
        ),
        ({"mean": (0.0, 0.0, 0.0)}, "with mean "),
        ({"interpolation": "bilinear"}, "interpolation bicubic in place of bilinear"),
        ({"crop_pct": 0.875}, "resize_px 224 in place of 256"),
    ],
)
def test_a_tampered_preprocessing_falls_at_the_load_with_its_name(
    tmp_path: Path, published, reason
) -> None:
    proved_checkpoint(tmp_path / "vit")
    assert load(tmp_path / "vit")
    write_checkpoint(tmp_path / "vit", **published)
    with pytest.raises(WeightsError, match=f"do not agree .*; they would .*{reason}"):
        load(tmp_path / "vit")


@pytest.mark.parametrize(
    ("authors", "reason"),
    [
        (
            {"mean": IMAGENET_MEAN, "std": IMAGENET_STD},
            "they would with ImageNet's mean and std",
        ),
        ({"edge": 256}, "they would with a resize to 256 px"),
        ({"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}, "with no mean and std"),
    ],
)
def test_a_declaration_that_is_wrong_from_the_start_is_explained(
    tmp_path: Path, authors, reason
) -> None:
    write_checkpoint(tmp_path / "vit")
    encoder = load(tmp_path / "vit")
    vector = authors_embedding(tmp_path / "vit", **authors)
    agreement = compare(encoder, make_fingerprint(encoder, embedding=vector, code="x"))
    assert not agreement.agrees and reason in str(agreement)
    assert agreement.cosine < 0.9999


@pytest.mark.parametrize(
    ("right", "wrong", "reason"),
    [
        ("cls", "mean", "its pooling is 'cls', here it is 'mean'"),
        (
            "mean",
            "cls",
            "the mean of the patch tokens in place of the class token",
        ),
        ("cls_mean", "cls", "the class token with the mean of the patch tokens in"),
        ("cls", "cls_mean", "the class token in place of the class token with the"),
    ],
)
def test_another_pooling_falls_with_its_name(right, wrong, reason) -> None:
    dim = {"cls": 384, "mean": 384, "cls_mean": 768}
    truth = seeded("lunit_vits16", pooling=right, dim=dim[right])
    tampered = seeded("lunit_vits16", pooling=wrong, dim=dim[wrong])
    assert compare(truth, make_fingerprint(truth)).agrees
    agreement = compare(tampered, make_fingerprint(truth))
    assert not agreement.agrees and reason in agreement.reason


@pytest.mark.parametrize("name", ["lunit_vits16", "kaiko_vits16"])
def test_each_usual_fault_is_noticed_and_named_in_fp32(name) -> None:
    encoder = seeded(name)
    fingerprint = make_fingerprint(encoder)
    assert not unnoticed_faults(encoder)
    faults = list(agreement_module._usual_faults(encoder.spec, drawn_tile()))
    assert len(faults) >= 9
    for fault in faults:
        answer = agreement_module._answers(encoder, fault.tile, fault.spec)[0]
        wrong = replace(fingerprint, embedding=encoded_vector(answer.numpy()))
        agreement = compare(encoder, wrong)
        assert agreement.reason == f"they would with {fault.name}"


def test_a_network_that_hardly_sees_its_input_says_what_it_would_not_notice() -> None:
    # layers of a seeded DINOv2 begin with a scale of 1e-5
    names = unnoticed_faults(seeded("dinov2_vits14"))
    assert "bilinear interpolation" in names and "no mean and std" in names


def test_another_version_of_timm_is_named_where_no_usual_fault_explains_it(
    tmp_path: Path,
) -> None:
    write_checkpoint(tmp_path / "vit")
    encoder = load(tmp_path / "vit")
    old = replace(make_fingerprint(encoder), versions="timm 0.9.16, torch 2.13.0+cpu")
    assert compare(encoder, old).agrees  # a version that changes nothing is no fault
    # another epsilon of layer norms, as a version of a package may bring
    for layer in encoder.backbone.modules():
        if isinstance(layer, torch.nn.LayerNorm):
            layer.eps = 0.1
    agreement = compare(encoder, old)
    assert not agreement.agrees
    assert "no usual fault explains it; versions differ: timm 0.9.16 there and" in (
        agreement.reason
    )
    stated = make_fingerprint(encoder, embedding=old.vector, code="card, timm 0.6.13")
    assert stated.versions == "timm 0.6.13"
    here = version("timm")
    assert f"versions differ: timm 0.6.13 there and {here} here" in (
        compare(encoder, stated).reason
    )
    unstated = make_fingerprint(encoder, embedding=old.vector, code="their script")
    assert "compare versions of packages with 'their script'" in (
        compare(encoder, unstated).reason
    )
    new = make_fingerprint(encoder)
    same = replace(old, versions=new.versions)
    assert "check the architecture" in compare(encoder, same).reason


@pytest.mark.parametrize(
    ("precision", "engine"), [("bf16", "torch"), ("fp32", "openvino")]
)
def test_engines_and_precisions_agree_and_a_fault_still_falls(
    tmp_path: Path, precision, engine
) -> None:
    if engine == "openvino":
        pytest.importorskip("openvino")
    proved_checkpoint(tmp_path / "vit")
    encoder = load(tmp_path / "vit", precision=precision, engine=engine)
    assert f"{precision}, {engine}" in encoder.fingerprint
    write_checkpoint(tmp_path / "vit", mean=IMAGENET_MEAN, std=IMAGENET_STD)
    with pytest.raises(WeightsError, match="in place of"):
        load(tmp_path / "vit", precision=precision, engine=engine)


def test_the_comparison_is_kept_until_the_fingerprint_changes(
    tmp_path: Path, monkeypatch
) -> None:
    path = proved_checkpoint(tmp_path / "vit")
    first = load(tmp_path / "vit").fingerprint
    monkeypatch.setattr(agreement_module, "compare", lambda *_args: pytest.fail())
    assert load(tmp_path / "vit").fingerprint == first
    fingerprint = read_fingerprint(path)
    keep(replace(fingerprint, who="another one"))
    with pytest.raises(pytest.fail.Exception):
        load(tmp_path / "vit")


def test_other_weights_and_random_ones_are_not_compared(tmp_path: Path) -> None:
    proved_checkpoint(tmp_path / "vit", weights="0" * 64)
    assert load(tmp_path / "vit").fingerprint == "none of these weights"
    assert load(tmp_path / "vit", pretrained=False).fingerprint == "none"


def test_a_damaged_fingerprint_and_one_of_another_tile_are_refused(
    tmp_path: Path,
) -> None:
    path = proved_checkpoint(tmp_path / "vit")
    text = path.read_text()
    path.write_text(text.replace('embedding = """', 'embedding = """\n!'))
    with pytest.raises(InvalidInputError, match="must be a file of `thinsection"):
        load(tmp_path / "vit")
    path.write_text(text.replace("made_by", "made_from"))
    with pytest.raises(InvalidInputError, match="made_from"):
        load(tmp_path / "vit")
    path.write_text(text.replace(TILE_SHA256, "0" * 64))
    with pytest.raises(InvalidInputError, match="must be of the tile of this version"):
        load(tmp_path / "vit")


def test_an_embedding_must_be_one_finite_vector() -> None:
    np.testing.assert_array_equal(
        np.frombuffer(base64.b64decode(encoded_vector([[1, 2.5]])), "<f4"),
        [1, 2.5],
    )
    for wrong in (np.ones((2, 3)), [np.nan, 1], []):
        with pytest.raises(InvalidInputError, match="must be one vector"):
            encoded_vector(wrong)


def invoke(*arguments: str):
    return CliRunner().invoke(
        build_app(["models"]), ["models", *arguments], env={"COLUMNS": "160"}
    )


def test_the_command_makes_a_file_that_a_later_check_compares(tmp_path: Path) -> None:
    folder = tmp_path / "vit"
    write_checkpoint(folder)
    arguments = ("fingerprint", str(folder), "--device", "cpu")
    unproved = invoke("check", str(folder), "--device", "cpu")
    assert unproved.exit_code == 0 and "none, so nobody has proved" in unproved.stdout
    assert invoke(*arguments, "--tile", str(tmp_path / "t.png")).exit_code == 0
    picture = np.asarray(Image.open(tmp_path / "t.png"))
    np.testing.assert_array_equal(picture, drawn_tile())
    np.save(tmp_path / "e.npy", authors_embedding(folder))
    embedding = ("--embedding", str(tmp_path / "e.npy"))
    refused = invoke(*arguments, *embedding)
    assert isinstance(refused.exception, InvalidInputError)
    made = invoke(*arguments, *embedding, "--code", "their script", "--write")
    assert made.exit_code == 0, made.output
    assert "agree with the authors' code: 1.0000" in made.stderr
    (tmp_path / "printed.toml").write_text(made.stdout)
    assert read_fingerprint(tmp_path / "printed.toml") == find_fingerprint("vit")
    proved = invoke("check", str(folder), "--device", "cpu")
    assert proved.exit_code == 0 and "agree with the authors' code" in proved.stdout
    write_checkpoint(folder, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    fallen = invoke("check", str(folder), "--device", "cpu")
    assert (
        fallen.exit_code == 1 and "in place of (0.485, 0.456, 0.406)" in fallen.stdout
    )


def test_an_embedding_that_disagrees_is_printed_with_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / "vit"
    write_checkpoint(folder)
    np.save(
        tmp_path / "e.npy",
        authors_embedding(folder, mean=IMAGENET_MEAN, std=IMAGENET_STD),
    )
    result = invoke(
        *("fingerprint", str(folder), "--device", "cpu", "--code", "their script"),
        *("--embedding", str(tmp_path / "e.npy")),
    )
    assert result.exit_code == 1
    assert "they would with ImageNet's mean and std" in result.stderr


def test_weights_that_are_not_here_are_not_compared(monkeypatch) -> None:
    keep(make_fingerprint(seeded("dinov2_vits14")))
    monkeypatch.setattr(
        "thinsection.encode.check.find_local_weights", lambda _spec: None
    )
    monkeypatch.setattr(
        "thinsection.encode.check._download_obstacle", lambda *_args: None
    )
    *_, last = check_encoder("dinov2_vits14", device="cpu")
    assert last.name == "fingerprint" and last.detail.startswith("not compared")


def test_the_tolerances_lie_between_rounding_and_the_smallest_fault() -> None:
    encoder = seeded("kaiko_vits16")
    fingerprint = make_fingerprint(encoder)
    half = NetworkTileEncoder(
        encoder.spec,
        build_backbone(encoder.spec, seed=3),
        Placement(torch.device("cpu"), "bf16"),
        Origin(),
    )
    rounded = compare(half, fingerprint)
    assert rounded.agrees and rounded.difference > TOLERANCE["fp32"]
