"""Loading: strict, without code, without network surprises, and the same every time."""

import hashlib
import json
import re
import shutil
import time
from dataclasses import replace
from importlib import import_module, metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from thinsection.encode import TileEncoder, declared_encoders, load_encoder
from thinsection.encode import load_network as load_module
from thinsection.encode.backbone import PACKAGED_WEIGHTS
from thinsection.encode.registry import (
    ENCODERS,
    IMAGENET_MEAN,
    IMAGENET_STD,
    PublishedFile,
)
from thinsection.errors import (
    InvalidInputError,
    MissingDependencyError,
    UnknownEncoderError,
    WeightsError,
)
from thinsection.qc.tissue import TissueConfig
from thinsection.stages.features import FeaturesStage
from thinsection.stages.masks import TissueStage
from thinsection.stages.tiles import TilesStage
from thinsection.store.identity import Source
from thinsection.tiles.grid import TilesConfig
from thinsection.weights import hub as hub_module
from thinsection.weights.files import hash_state_dict, read_state_dict
from thinsection.weights.origin import slug
from thinsection.weights.placement import optional_package

TILES = np.random.default_rng(0).integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def timm_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_vit")
    timm = optional_package("timm")
    torch.manual_seed(1)
    network = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10)
    save_file(network.state_dict(), folder / "model.safetensors")
    shown = {
        "input_size": [3, 64, 64],
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "classifier": "head",
    }
    config = {"architecture": "vit_tiny_patch16_224", "model_args": {"img_size": 64}}
    (folder / "config.json").write_text(json.dumps({**config, "pretrained_cfg": shown}))
    return folder


@pytest.fixture(scope="module")
def transformers_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_dino")
    transformers = optional_package("transformers")
    config = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=56
    )
    torch.manual_seed(2)
    transformers.Dinov2Model(config).save_pretrained(folder)
    shown = {
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"shortest_edge": 56},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(shown))
    return folder


def test_a_folder_of_timms_form_gives_timms_embedding(timm_folder: Path) -> None:
    encoder = load_encoder(str(timm_folder), device="cpu", precision="fp32")
    timm = optional_package("timm")
    theirs = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, num_classes=10
    ).eval()
    theirs.load_state_dict(read_state_dict(timm_folder / "model.safetensors"))
    pixels = torch.from_numpy(TILES).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        tokens = theirs.forward_features(pixels)
        expected = theirs.forward_head(tokens, pre_logits=True)
    torch.testing.assert_close(encoder.encode(TILES), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        encoder.encode_tokens(TILES), tokens[:, 1:], rtol=1e-5, atol=1e-5
    )
    assert encoder.spec.name == timm_folder.name and encoder.dim == 192


def test_a_folder_of_transformers_form_gives_its_class_token(
    transformers_folder: Path,
) -> None:
    encoder = load_encoder(str(transformers_folder), device="cpu", precision="fp32")
    transformers = optional_package("transformers")
    theirs = transformers.Dinov2Model.from_pretrained(transformers_folder).eval()
    pixels = torch.from_numpy(TILES[:, :56, :56].copy()).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        expected = theirs(pixel_values=pixels).last_hidden_state
    tiles = TILES[:, :56, :56].copy()
    torch.testing.assert_close(
        encoder.encode(tiles), expected[:, 0], rtol=1e-5, atol=1e-5
    )
    assert encoder.encode_tokens(tiles).shape == (4, 16, 32)


def test_what_no_checkpoint_holds_is_computed_when_the_network_is_built(
    tmp_path: Path,
) -> None:
    timm = optional_package("timm")
    torch.manual_seed(3)
    theirs = timm.create_model("vit_small_patch16_dinov3_qkvb", num_classes=0).eval()
    state = theirs.state_dict()
    assert not [name for name in state if "periods" in name]  # of rotary positions
    save_file(state, tmp_path / "model.safetensors")
    encoder = load_encoder(
        "dinov3_vits16",
        weights=tmp_path / "model.safetensors",
        device="cpu",
        precision="fp32",
        engine="torch",
    )
    tiles = np.random.default_rng(1).integers(0, 256, (1, 256, 256, 3), dtype=np.uint8)
    mean = torch.tensor(IMAGENET_MEAN)[:, None, None]
    std = torch.tensor(IMAGENET_STD)[:, None, None]
    pixels = (torch.from_numpy(tiles).permute(0, 3, 1, 2) / 255 - mean) / std
    with torch.no_grad():
        expected = theirs.forward_features(pixels)
    torch.testing.assert_close(
        encoder.encode(tiles), expected[:, 0], rtol=1e-4, atol=1e-5
    )
    assert encoder.encode_tokens(tiles).shape == (1, 256, 384)


def test_weights_of_another_architecture_are_refused_by_name(timm_folder: Path) -> None:
    with pytest.raises(
        WeightsError, match=r"150 misshapen \(.*; check that the file belongs"
    ):
        load_encoder("lunit_vits16", weights=timm_folder / "model.safetensors")
    with pytest.raises(WeightsError, match="missing"):
        load_encoder("efficientnet_lite0", weights=timm_folder / "model.safetensors")


def test_a_config_that_contradicts_the_declaration_is_refused(
    transformers_folder: Path,
) -> None:
    with pytest.raises(WeightsError, match=r"hidden_size 1024 for 'phikon_v2', got 32"):
        load_encoder("phikon_v2", weights=transformers_folder, device="cpu")


def test_a_missing_weight_of_transformers_is_refused_not_made_up(
    transformers_folder: Path, tmp_path: Path
) -> None:
    state = read_state_dict(transformers_folder / "model.safetensors")
    removed = next(name for name in state if name.endswith("mlp.fc1.weight"))
    kept = {name: tensor for name, tensor in state.items() if name != removed}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = (transformers_folder / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(
        WeightsError, match="must state hidden_size, image_mean and image_std"
    ):
        load_encoder(str(tmp_path), device="cpu")  # no normalisation is made up either
    shown = (transformers_folder / "preprocessor_config.json").read_text()
    (tmp_path / "preprocessor_config.json").write_text(shown)
    with pytest.raises(WeightsError, match="1 missing_keys"):
        load_encoder(str(tmp_path), device="cpu")
    (tmp_path / "model.safetensors").rename(tmp_path / "mine.safetensors")
    with pytest.raises(WeightsError, match=r"must be named model\.safetensors or"):
        load_encoder(str(tmp_path / "mine.safetensors"), device="cpu")


def test_code_of_a_repository_does_not_run_unless_allowed(
    transformers_folder: Path, tmp_path: Path, monkeypatch
) -> None:
    modules = import_module("transformers.dynamic_module_utils")
    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    config = json.loads((transformers_folder / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling_evil.Evil"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shown = (transformers_folder / "preprocessor_config.json").read_text()
    (tmp_path / "preprocessor_config.json").write_text(shown)
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit('ran')")
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="run code of its repository"):
        load_encoder(str(tmp_path))
    with pytest.raises(WeightsError, match="must be pretrained"):
        load_encoder(str(tmp_path), pretrained=False)
    with pytest.raises(SystemExit, match="ran"):  # allowed, it does run
        load_encoder(str(tmp_path), allow_remote_code=True)


def test_an_encoder_without_a_known_commit_is_refused_unless_its_name_states_one(
    monkeypatch,
) -> None:
    asked = []

    def downloaded(repo, _names, *, revision=None):
        asked.append((repo, revision))
        raise WeightsError("no network")

    monkeypatch.setattr("thinsection.encode.backbone.hub_file", downloaded)
    with pytest.raises(
        WeightsError, match=r"pinned to a commit of 'vinid/plip'.*'plip@main'"
    ):
        load_encoder("plip", device="cpu")
    assert not asked
    commit = "0123456789" * 4
    for name in ("plip@main", f"plip@{commit}", f"uni_v1@{commit}", "uni"):
        with pytest.raises(WeightsError, match="no network"):
            load_encoder(name, device="cpu")
    pinned = declared_encoders()["uni"].revision
    assert asked == [
        ("vinid/plip", "main"),
        ("vinid/plip", commit),
        ("MahmoodLab/UNI", commit),
        ("MahmoodLab/UNI", pinned),
    ]
    with pytest.raises(UnknownEncoderError, match="commit or branch"):
        load_encoder("plip@", device="cpu")
    with pytest.raises(UnknownEncoderError, match="commit or branch"):
        load_encoder("efficientnet_lite0@main", device="cpu")


def test_random_weights_and_own_weights_need_no_commit() -> None:
    encoder = load_encoder("lunit_vits16", pretrained=False, device="cpu")
    assert encoder.spec.pin == "unpinned"


def test_a_file_that_is_not_the_published_one_is_refused(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    file = PublishedFile(name=path.name, sha256=digest, size_bytes=7)
    spec = replace(declared_encoders()["uni"], published=(file,))
    load_module._check_published(spec, path)
    other = replace(spec, published=(replace(file, size_bytes=8),))
    with pytest.raises(WeightsError, match=r"must have 8 bytes, got 7 in .*delete it"):
        load_module._check_published(other, path)
    path.write_bytes(b"Weights")
    with pytest.raises(WeightsError, match=f"must have sha256 {digest}, got "):
        load_module._check_published(spec, path)
    load_module._check_published(spec, path.rename(tmp_path / "pytorch_model.bin"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "timm:resnet18.untrained",
            r"with published weights, got 'timm:resnet18.untrained'; timm has resnet18\.",
        ),
        ("timm:vit_small_patch14_dinov2.nope", r"timm has .*dinov2\.lvd142m; random"),
        ("hf:a/b/c", r"got 'hf:a/b/c': HFValidationError: Repo id must be .*; check"),
    ],
)
def test_a_name_that_another_package_rejects_is_a_line_of_ours(
    name: str, message: str
) -> None:
    error = UnknownEncoderError if name.startswith("timm") else WeightsError
    with pytest.raises(error, match=message) as raised:
        load_encoder(name, device="cpu", pretrained=False)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architecture": "resnet18.untrained"}, "Invalid pretrained tag"),
        (
            {"architecture": "vit_tiny_patch16_224", "model_args": {"no_such": 3}},
            "network must build, got .* unexpected keyword argument 'no_such'",
        ),
        (
            {
                "architecture": "vit_tiny_patch16_224",
                "pretrained_cfg": {"input_size": [3, 100, 100]},
            },
            r"can be read, got .*AssertionError: Input height \(100\)",
        ),
        ({"model_type": "no_such", "hidden_size": 3}, "model type `no_such`"),
        (
            {"model_type": "bert", "hidden_size": 32},
            "network must build, got .*not a multiple of the number of attention heads",
        ),
    ],
)
def test_a_config_that_another_package_rejects_is_a_line_of_ours(
    tmp_path: Path, config, message
) -> None:
    shown = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": 56}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(shown))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=message) as raised:
        load_encoder(str(tmp_path), device="cpu", pretrained=False)
    assert "\n" not in str(raised.value)


def test_a_checkpoint_without_config_says_how_to_name_its_architecture(
    tmp_path: Path,
) -> None:
    save_file({"w": torch.zeros(1)}, tmp_path / "mine.safetensors")
    with pytest.raises(WeightsError, match='encoder="uni", weights='):
        load_encoder(str(tmp_path / "mine.safetensors"))


def test_offline_fails_in_seconds_and_says_what_to_do(
    monkeypatch, tmp_path: Path
) -> None:
    hub = hub_module.hub_library()
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(
        hub.constants, "ENDPOINT", "http://127.0.0.1:9"
    )  # nobody listens there
    started = time.monotonic()
    with pytest.raises(
        WeightsError,
        match=r"got no answer from .*; download it on a machine with a network",
    ):
        load_encoder("conch_v15", device="cpu")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        WeightsError, match=r"HF_HUB_OFFLINE is set.*--revision dac6773"
    ):
        load_encoder("conch_v15", device="cpu")
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("GatedRepoError", "accept the terms at .* and set HF_TOKEN"),
        ("RepositoryNotFoundError", "check the name"),
        ("LocalEntryNotFoundError", "broken connection"),
        (
            "RemoteEntryNotFoundError",
            "must have one of model.safetensors, pytorch_model.bin",
        ),
    ],
)
def test_what_the_hub_answers_becomes_advice(
    monkeypatch, error: str, message: str
) -> None:
    hub = hub_module.hub_library()
    kind = getattr(hub.errors, error)

    def refuse(*_args, **_kwargs):
        raise kind.__new__(kind)

    monkeypatch.setattr(hub, "hf_hub_download", refuse)
    monkeypatch.setattr(hub_module, "is_reachable", lambda _endpoint: True)
    monkeypatch.setattr(hub_module, "cached_file", lambda *_args: None)
    with pytest.raises(WeightsError, match=message):
        load_encoder("uni", device="cpu")


def test_a_package_that_is_not_there_is_named() -> None:
    with pytest.raises(
        MissingDependencyError,
        match=r"got no no_such_package; pip install no_such_package$",
    ):
        optional_package("no_such_package")


def test_an_entry_point_brings_an_encoder_and_is_held_to_the_protocol(
    monkeypatch,
) -> None:
    for name, value in (("mine", f"{__name__}:make_mine"), ("broken", "builtins:dict")):
        point = metadata.EntryPoint(name, value, ENCODERS.group)
        monkeypatch.setitem(ENCODERS._points, name, point)
    monkeypatch.setattr(
        metadata.EntryPoint, "load", lambda point: FACTORIES[point.name]
    )
    mine = load_encoder("mine", device="cpu", precision="fp32")
    assert mine.dim == 384 and mine.label == "mine"
    with pytest.raises(InvalidInputError, match="must return a TileEncoder, got dict"):
        load_encoder("broken", device="cpu")
    with pytest.raises(UnknownEncoderError, match="did you mean 'broken'"):
        load_encoder("brokn", device="cpu")


def make_mine(*, device, precision, weights, pretrained, seed) -> TileEncoder:
    assert weights is None and pretrained
    encoder = load_encoder(
        "lunit_vits16", device=device, precision=precision, pretrained=False, seed=seed
    )
    encoder.spec = replace(encoder.spec, name="mine")
    return encoder


FACTORIES = {"mine": make_mine, "broken": dict}


def test_random_weights_come_from_the_seed_alone() -> None:
    hashes = []
    for seed in (0, 0, 1):
        torch.manual_seed(
            len(hashes)
        )  # the global state must not matter, nor be changed
        before = torch.get_rng_state()
        encoder = load_encoder(
            "lunit_vits16", device="cpu", pretrained=False, seed=seed
        )
        assert torch.equal(torch.get_rng_state(), before)
        hashes.append(encoder.weights_hash)
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_label_says_what_was_loaded_and_an_identity_what_decides(
    timm_folder: Path, tmp_path: Path
) -> None:
    default = load_encoder("efficientnet_lite0", device="cpu")
    assert default.label == "efficientnet_lite0"
    assert default.identity == {
        "name": "efficientnet_lite0",
        "weights_hash": default.weights_hash,
        "precision": "fp32",
        "preprocessing": '{"input_px": 224, "interpolation": "bicubic", '
        '"mean": [0.5, 0.5, 0.5], "resize_px": 224, "std": [0.5, 0.5, 0.5]}',
    }
    half = load_encoder("efficientnet_lite0", device="cpu", precision="bf16")
    assert (
        half.label == "efficientnet_lite0_bf16" and half.identity["precision"] == "bf16"
    )
    own = load_encoder(
        "efficientnet_lite0",
        device="cpu",
        precision="fp16",
        weights=PACKAGED_WEIGHTS,
    )
    assert own.label == f"efficientnet_lite0_fp16_w{default.weights_hash[:6]}"
    options = {"device": "cpu", "precision": "fp32"}
    random = load_encoder("timm:resnet18", pretrained=False, seed=3, **options)
    assert random.label == "timm-resnet18_seed3"
    local = load_encoder(str(timm_folder), **options)
    assert local.label == f"{timm_folder.name}_w{local.weights_hash[:6]}"
    same_name = timm_folder / "model.safetensors"
    assert load_encoder(str(same_name), **options).label == local.label
    (tmp_path / "config.json").write_bytes((timm_folder / "config.json").read_bytes())
    (tmp_path / "epoch 7.safetensors").write_bytes(same_name.read_bytes())
    renamed = load_encoder(str(tmp_path / "epoch 7.safetensors"), **options)
    assert renamed.label == f"epoch-7_w{local.weights_hash[:6]}"


@pytest.mark.parametrize("pretrained", [True, False])
def test_two_local_checkpoints_of_one_name_have_two_labels(
    timm_folder: Path, tmp_path: Path, pretrained: bool
) -> None:
    """Two folders `model/`, of other weights or, with random ones, of another architecture."""
    config = json.loads((timm_folder / "config.json").read_text())
    state = read_state_dict(timm_folder / "model.safetensors")
    labels = []
    for parent, depth in (("a", 2), ("b", 3)):
        folder = tmp_path / parent / "model"
        shutil.copytree(timm_folder, folder)
        if pretrained:
            changed = state | {"norm.bias": state["norm.bias"] + depth}
            save_file(changed, folder / "model.safetensors")
        else:
            options = {"model_args": {"img_size": 64, "depth": depth}}
            (folder / "config.json").write_text(json.dumps(config | options))
        encoder = load_encoder(
            str(folder), device="cpu", precision="fp32", pretrained=pretrained
        )
        assert encoder.label.startswith(f"model_w{encoder.weights_hash[:6]}")
        labels.append(encoder.label)
    assert len(set(labels)) == 2


@pytest.mark.parametrize(
    "other",
    [
        {"mean": [0.4] * 3},
        {"std": [0.4] * 3},
        {"crop_pct": 0.5},
        {"interpolation": "bilinear"},
    ],
    ids=["mean", "std", "resize", "interpolation"],
)
def test_one_name_and_weights_with_another_preprocessing_are_another_encoder(
    timm_folder: Path, tmp_path: Path, other: dict
) -> None:
    """Else embeddings of `a/model` would be taken for those of `b/model`."""
    encoders, keys = [], []
    for parent, changed in (("a", {}), ("b", other), ("again", {})):
        folder = tmp_path / parent / "model"
        shutil.copytree(timm_folder, folder)
        config = json.loads((folder / "config.json").read_text())
        config["pretrained_cfg"] |= changed
        (folder / "config.json").write_text(json.dumps(config))
        encoder = load_encoder(str(folder), device="cpu", precision="fp32")
        tiles = TilesStage(
            config=TilesConfig(), mask=TissueStage(config=TissueConfig())
        )
        stage = FeaturesStage(
            tiles=tiles, encoder=encoder.label, identity=encoder.identity
        )
        encoders.append(encoder)
        keys.append(stage.key(Source(key="pixels")))
    assert len({encoder.label for encoder in encoders}) == 1  # so that reuse is refused
    assert len({encoder.weights_hash for encoder in encoders}) == 1
    assert keys[0] == keys[2] != keys[1]


def test_a_slug_is_a_file_name() -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    assert slug(f"hf:owner/Name_b@{commit}") == "hf-owner-Name_b-0123456"
    assert slug("../..") == "model" and slug("größe.v2") == "gr-e.v2"


def test_the_weights_hash_is_that_of_the_network_without_its_classifier() -> None:
    published = read_state_dict(PACKAGED_WEIGHTS)
    assert load_encoder(
        "efficientnet_lite0", device="cpu"
    ).weights_hash == hash_state_dict(
        {k: v for k, v in published.items() if not k.startswith("_fc.")}
    )


@pytest.fixture
def unpinned_cache(timm_folder: Path, tmp_path: Path, monkeypatch) -> str:
    """The hub's cache with a repository whose main is at some commit, and no network."""
    hub = hub_module.hub_library()
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    commit = "0123456789abcdef" * 2 + "01234567"
    repo = tmp_path / "models--owner--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    shutil.copytree(timm_folder, repo / "snapshots" / commit)
    return commit


def test_a_moving_branch_is_loaded_with_a_warning_and_its_commit_is_recorded(
    unpinned_cache: str,
) -> None:
    options = {"device": "cpu", "precision": "fp32"}
    with pytest.warns(
        UserWarning, match=f"'owner/tiny' is not pinned .*'main' is {unpinned_cache}"
    ):
        moving = load_encoder("hf:owner/tiny", **options)
    assert (
        moving.identity["revision"] == unpinned_cache
        and moving.label == "hf-owner-tiny"
    )
    pinned = load_encoder(
        f"hf:owner/tiny@{unpinned_cache}", **options
    )  # warns of nothing
    assert pinned.identity["revision"] == unpinned_cache
    assert pinned.weights_hash == moving.weights_hash
    given = load_encoder("lunit_vits16", pretrained=False, **options)
    assert "revision" not in given.identity


def test_every_encoder_of_the_hub_is_pinned_or_said_not_to_be() -> None:
    """No commit was found of these in public code; `models` and the docs say so."""
    unknown = {
        n for n, s in declared_encoders().items() if s.repo and s.revision is None
    }
    assert unknown == {
        *("hibou_b", "hibou_l", "lunit_vits16", "lunit_vits8", "dinov2_vitg14"),
        *("plip", "keep", "gpfm", "mstar", "gigapath_flash", "openmidnight"),
        *("musk", "isight"),
        *("kaiko_vits16", "kaiko_vits8", "kaiko_vitb16", "kaiko_vitb8", "kaiko_vitl14"),
    }
    for spec in declared_encoders().values():
        assert spec.revision is None or re.fullmatch("[0-9a-f]{40}", spec.revision), (
            spec.name
        )


def test_sharded_transformers_weights_load_as_whole_ones(
    transformers_folder: Path, tmp_path: Path
) -> None:
    transformers = optional_package("transformers")
    whole = transformers.Dinov2Model.from_pretrained(transformers_folder)
    whole.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    shown = (transformers_folder / "preprocessor_config.json").read_text()
    (tmp_path / "preprocessor_config.json").write_text(shown)
    folders = [
        load_encoder(str(f), device="cpu", precision="fp32")
        for f in (transformers_folder, tmp_path)
    ]
    assert folders[0].weights_hash == folders[1].weights_hash
