"""Two towers: equal to transformers' CLIP and to open_clip, strict, and never mixed up."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.two_towers import CONTEXT, write_clip, write_tokenizer
from torch import Tensor, nn
from torch.nn import functional

from thinsection.encode import load_encoder
from thinsection.encode.backbone import Backbone, pretrained_backbone
from thinsection.encode.preprocessing import preprocess
from thinsection.encode.registry import EncoderSpec
from thinsection.encode.specs import from_open_clip
from thinsection.encode.text import Tokenizer, load_text_encoder
from thinsection.encode.towers import (
    ClipImage,
    ClipText,
    ConchImage,
    ConchText,
    ConchTowersConfig,
    clip_config,
    in_open_clip_names,
)
from thinsection.errors import InvalidInputError, WeightsError
from thinsection.predict.zeroshot import Prompts, class_vectors
from thinsection.weights.placement import importable_torchvision

TEXTS = ["an image of tumour", "stroma", "dense pink gland necrosis"]
Clip = tuple[Path, Any]  # its folder, and transformers' model
TILES = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
SMALL_CONCH = ConchTowersConfig(
    embed_dim=24,
    width=32,
    layers=2,
    heads=4,
    image_px=32,
    context=CONTEXT,
    vocabulary=20,
)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Clip:
    folder = tmp_path_factory.mktemp("clip") / "small_clip"
    return folder, write_clip(folder)


def test_both_towers_are_those_of_transformers(clip: Clip) -> None:
    folder, model = clip
    tiles = load_encoder(str(folder), device="cpu", precision="fp32")
    texts = load_text_encoder(str(folder), device="cpu")
    tokens, mask = _padded(Tokenizer(folder / "tokenizer.json"))
    pixels = preprocess(torch.from_numpy(TILES), tiles.spec)
    with torch.no_grad():
        theirs = model(input_ids=tokens, attention_mask=mask, pixel_values=pixels)
    embeddings = tiles.encode(TILES)
    vectors = texts.encode(TEXTS)
    torch.testing.assert_close(texts.project(embeddings), theirs.image_embeds)
    torch.testing.assert_close(vectors, theirs.text_embeds)
    logits = texts.scale * texts.project(embeddings) @ vectors.T
    torch.testing.assert_close(logits, theirs.logits_per_image)
    assert texts.image_hash == tiles.weights_hash


def _padded(tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """Token ids with padding, as transformers' tokenizer gives them, and their mask."""
    rows = [tokenizer([text], CONTEXT, 0)[0] for text in TEXTS]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = nn.utils.rnn.pad_sequence(
        [torch.ones_like(row) for row in rows], batch_first=True
    )
    return tokens, mask


def _write_wide(folder: Path) -> Path:
    """A small CLIP in open_clip's form: its text blocks are four times as wide inside."""
    folder.mkdir()
    sizes = {
        "embed_dim": 24,
        "vision_cfg": {
            "image_size": 32,
            "patch_size": 8,
            "layers": 2,
            "width": 40,
            "head_width": 8,
        },
        "text_cfg": {
            "context_length": CONTEXT,
            "vocab_size": 13,
            "width": 32,
            "heads": 4,
            "layers": 2,
        },
    }
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": sizes}))
    config = clip_config(from_open_clip({"model_cfg": sizes}, "test"))
    torch.manual_seed(3)
    state = ClipImage(config).state_dict() | ClipText(config).state_dict()
    state = {
        name: tensor + torch.randn_like(tensor) * 0.1 for name, tensor in state.items()
    }
    save_file(state, folder / "open_clip_model.safetensors")
    write_tokenizer(folder / "tokenizer.json")
    return folder


def test_an_image_tower_whose_hash_is_known_is_not_read_for_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("thinsection.weights.origin._SETTLED_NS", 0)
    folder = _write_wide(tmp_path / "wide")
    first = load_text_encoder(str(folder), device="cpu")
    read = list[Path]()

    def noted(spec: EncoderSpec, path: Path) -> Backbone:
        read.append(path)
        return pretrained_backbone(spec, path)

    monkeypatch.setattr("thinsection.encode.load_network.pretrained_backbone", noted)
    again = load_text_encoder(str(folder), device="cpu")
    assert not read
    assert again.image_hash == first.image_hash
    assert torch.equal(again.encode(TEXTS), first.encode(TEXTS))
    # other image weights have another hash
    weights = folder / "open_clip_model.safetensors"
    state = load_file(weights)
    save_file(
        {
            name: tensor + 1 if name.startswith("visual.") else tensor
            for name, tensor in state.items()
        },
        weights,
    )
    other = load_text_encoder(str(folder), device="cpu")
    assert read == [weights]
    assert other.image_hash != first.image_hash
    tiles = load_encoder(str(folder), device="cpu", precision="fp32")
    assert other.image_hash == tiles.weights_hash


def test_both_towers_and_the_classifier_are_those_of_open_clip(tmp_path: Path) -> None:
    folder = _write_wide(tmp_path / "wide")
    tiles = load_encoder(str(folder), device="cpu", precision="fp32")
    texts = load_text_encoder(str(folder), device="cpu")
    importable_torchvision()
    open_clip = pytest.importorskip("open_clip", reason="pip install open_clip_torch")
    config = json.loads((folder / "open_clip_config.json").read_text())["model_cfg"]
    theirs = open_clip.CLIP(**config).eval()
    theirs.load_state_dict(load_file(folder / "open_clip_model.safetensors"))

    def tokenize(sentences: list[str]) -> Tensor:
        tokens = Tokenizer(folder / "tokenizer.json")(sentences, CONTEXT, 0)
        return functional.pad(tokens, (0, CONTEXT - tokens.shape[1]))

    pixels = preprocess(torch.from_numpy(TILES), tiles.spec)
    with torch.no_grad():
        images = theirs.encode_image(pixels, normalize=True)
        words = theirs.encode_text(tokenize(TEXTS), normalize=True)
        templates = ["an image of {}", "dense {}"]
        classifier = open_clip.build_zero_shot_classifier(
            theirs, tokenize, ["tumour", "stroma"], templates
        )
    prompts = Prompts(
        classes={"a": ("tumour",), "b": ("stroma",)}, templates=tuple(templates)
    )
    torch.testing.assert_close(texts.project(tiles.encode(TILES)), images)
    torch.testing.assert_close(texts.encode(TEXTS), words)
    torch.testing.assert_close(
        torch.from_numpy(class_vectors(texts, prompts)), classifier.T
    )


def test_equal_weights_have_one_hash_in_both_forms(clip: Clip, tmp_path: Path) -> None:
    folder, _ = clip
    other = _write_wide(tmp_path / "other")
    path = other / "open_clip_config.json"
    config = json.loads(path.read_text())
    config["model_cfg"] |= {"quick_gelu": True}
    config["model_cfg"]["vision_cfg"]["mlp_ratio"] = 2.0
    config["preprocess_cfg"] = {"mean": [0.48, 0.46, 0.41], "std": [0.27, 0.26, 0.28]}
    path.write_text(json.dumps(config))
    state = in_open_clip_names(load_file(folder / "model.safetensors"))
    save_file(state, other / "open_clip_model.safetensors")
    first = load_encoder(str(folder), device="cpu", precision="fp32")
    second = load_encoder(str(other), device="cpu", precision="fp32")
    assert first.weights_hash == second.weights_hash
    assert torch.equal(first.encode(TILES), second.encode(TILES))


def test_the_pooler_of_conch_is_torchs_attention_with_other_keys() -> None:
    torch.manual_seed(1)
    pooler = ConchImage(SMALL_CONCH).visual.attn_pool_contrast
    theirs = nn.MultiheadAttention(24, 8, kdim=32, vdim=32, batch_first=True)
    theirs.load_state_dict(pooler.attn.state_dict(), strict=True)
    tokens = torch.randn(3, 7, 32)
    keys = pooler.ln_k(tokens)
    query = pooler.ln_q(pooler.query).expand(3, -1, -1)
    with torch.no_grad():
        expected = theirs(query, keys, keys, need_weights=False)[0][:, 0]
        torch.testing.assert_close(pooler(tokens), expected)


def test_a_text_of_conch_does_not_depend_on_the_length_of_others() -> None:
    torch.manual_seed(2)
    tower = ConchText(SMALL_CONCH).eval()
    short = torch.tensor([[1, 5, 2]])
    both = torch.tensor([[1, 5, 2, 0, 0, 0], [1, 6, 7, 8, 9, 2]])
    with torch.no_grad():
        torch.testing.assert_close(tower(short)[0], tower(both)[0])
        assert (tower(both)[0] - tower(both)[1]).abs().max() > 1e-3


def test_an_encoder_without_a_text_tower_is_named_with_those_that_have_one() -> None:
    with pytest.raises(InvalidInputError, match="'uni'; these have: conch, plip, keep"):
        load_text_encoder("uni")


def test_a_missing_tokenizer_is_asked_for(clip: Clip, tmp_path: Path) -> None:
    folder, _ = clip
    lone = tmp_path / "lone"
    lone.mkdir()
    for name in ("config.json", "preprocessor_config.json", "model.safetensors"):
        (lone / name).symlink_to(folder / name)
    with pytest.raises(WeightsError, match="tokenizer must be an existing file"):
        load_text_encoder(str(lone))
    elsewhere = folder / "tokenizer.json"
    found = load_text_encoder(str(lone), tokenizer=elsewhere, device="cpu")
    assert found.encode(["stroma"]).shape == (1, 24)


def test_a_tokenizer_that_does_not_fit_is_refused(clip: Clip, tmp_path: Path) -> None:
    folder, _ = clip
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(WeightsError, match=r"must be a tokenizer\.json"):
        load_text_encoder(str(folder), tokenizer=path)
    without_ends = json.loads((folder / "tokenizer.json").read_text())
    without_ends["post_processor"] = None
    path.write_text(json.dumps(without_ends))
    with pytest.raises(WeightsError, match="must put start and end tokens around"):
        load_text_encoder(str(folder), tokenizer=path)
    text = (folder / "tokenizer.json").read_text()
    path.write_text(text.replace('"stroma": 5', '"stroma": 70'))
    larger = load_text_encoder(str(folder), tokenizer=path, device="cpu")
    with pytest.raises(WeightsError, match="at most 13 tokens, got the id 70"):
        larger.encode(["stroma"])


def test_a_prompt_is_never_cut(clip: Clip) -> None:
    texts = load_text_encoder(str(clip[0]), device="cpu")
    assert texts.encode(["gland " * (CONTEXT - 2)]).shape == (1, 24)
    with pytest.raises(InvalidInputError, match="at most 12 tokens, got 13"):
        texts.encode(["gland " * (CONTEXT - 1)])


def test_weights_that_do_not_fit_are_refused(clip: Clip, tmp_path: Path) -> None:
    folder, _ = clip
    state = load_file(folder / "model.safetensors")
    del state["text_model.final_layer_norm.bias"]
    path = tmp_path / "model.safetensors"
    save_file(state, path)
    with pytest.raises(WeightsError, match=r"ln_final\.bias"):
        load_text_encoder(str(folder), weights=path)
    torch.save({"a": object()}, tmp_path / "weights.pth")
    with pytest.raises(WeightsError, match="must be plain tensors"):
        load_text_encoder(str(folder), weights=tmp_path / "weights.pth")


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("vision_cfg", {"timm_model_name": "vit_base"}, "got timm_model_name"),
        ("text_cfg", {"hf_model_name": "bert"}, "got hf_model_name"),
        ("vision_cfg", {"layers": None}, None),
    ],
)
def test_another_architecture_of_open_clip_is_refused(
    part: str,
    change: dict[str, object],
    message: str | None,
    tmp_path: Path,
) -> None:
    folder = _write_wide(tmp_path / "other")
    path = folder / "open_clip_config.json"
    config = json.loads(path.read_text())
    config["model_cfg"][part] |= change
    if message is None:
        del config["model_cfg"][part]["layers"]
        message = "got no layers"
    path.write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=message):
        load_encoder(str(folder))


def test_another_activation_of_transformers_is_refused(
    clip: Clip, tmp_path: Path
) -> None:
    folder, _ = clip
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["hidden_act"] = "relu"
    (tmp_path / "config.json").write_text(json.dumps(config))
    pixels = (folder / "preprocessor_config.json").read_text()
    (tmp_path / "preprocessor_config.json").write_text(pixels)
    with pytest.raises(
        WeightsError, match="hidden_act must be one of quick_gelu, gelu"
    ):
        load_encoder(str(tmp_path))
