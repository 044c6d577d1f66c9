"""Slide encoders against their authors' own modules, on seeded weights.

The embeddings of `authors/` were made by `tests.support.author_embeddings`; each file names the
commit of the authors' code.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.support.author_embeddings import (
    AUTHORS,
    GOLDEN,
    SEED,
    TILE_PX_L0,
    moozy_payload,
    seeded_slides,
    seeded_tiles,
)

from thinsection.errors import BudgetError, ConfigError, InvalidInputError, WeightsError
from thinsection.pool import (
    AbmilSlideEncoder,
    LoadOptions,
    SlideEncoder,
    TileLayout,
    check_fit,
    load_slide_encoder,
    patient_embedding,
)
from thinsection.pool.abmil import SoftmaxSums
from thinsection.pool.attention_pools import ChiefSlideEncoder, FeatherSlideEncoder
from thinsection.pool.cobra import CobraSlideEncoder, HeadScores
from thinsection.pool.moozy import MoozySizes, MoozySlideEncoder, heads_at_a_time
from thinsection.pool.prism import PrismSlideEncoder
from thinsection.weights.hub import hub_library

# of the largest absolute value: float32 rounds by 6e-8, and sums of some hundred products by more
TOLERANCE = 3e-6
QUICK = [name for name, case in AUTHORS.items() if case.is_quick]


def seeded_encoder(name: str) -> SlideEncoder:
    """Our encoder with the weights that the authors' module had."""
    case = AUTHORS[name]
    weights = case.encoder.random_weights(case.config, seed=SEED)
    encoder: SlideEncoder = case.encoder.from_state_dict(
        weights,
        config=case.config,
        options=LoadOptions(device="cpu", output=case.output),
    )
    return encoder


def embedding_of(name: str, encoder: SlideEncoder, num_tiles: int) -> np.ndarray:
    """Our embedding of the first tiles of the slides that the authors' module had."""
    layout = TileLayout.square(TILE_PX_L0)
    slides = seeded_slides(AUTHORS[name])
    return encoder.encode_case(
        [(t[:num_tiles], c[:num_tiles], layout) for t, c in slides]
    )


@pytest.mark.parametrize("name", QUICK)
def test_an_embedding_is_that_of_the_authors_module(name: str) -> None:
    golden = np.load(GOLDEN / f"{name}.npz")
    assert str(golden["commit"]) == AUTHORS[name].commit
    encoder = seeded_encoder(name)
    embedding = embedding_of(name, encoder, AUTHORS[name].num_tiles)
    exact = golden["float64"]
    assert embedding.shape == exact.shape
    largest = np.abs(exact).max()
    error_of_theirs = np.abs(golden["float32"] - exact).max()
    assert np.abs(embedding - exact).max() <= max(
        TOLERANCE * largest, 2 * error_of_theirs
    )
    # the yardstick is not degenerate: its channels differ, and so does it from other tiles'
    assert np.ptp(exact) > largest / 10
    others = embedding_of(name, encoder, 37)
    assert np.abs(others - exact).max() > 1000 * TOLERANCE * largest


@pytest.mark.parametrize("name", QUICK)
def test_early_and_late_fusion_of_one_slide_are_the_slide_embedding(name: str) -> None:
    encoder = seeded_encoder(name)
    tiles, coords = seeded_slides(AUTHORS[name])[0]
    one_slide = [(tiles[:50], coords[:50])]
    wanted = encoder.encode(*one_slide[0], tile_px_l0=512)
    for fusion in ("early", "late"):
        got = patient_embedding(
            one_slide,
            slide_encoder=encoder,
            tile_px_l0=512,
            fusion=fusion,
        )
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("gated", [True, False])
def test_abmil_takes_a_head_of_mil_lab_by_its_names(gated: bool) -> None:
    weights = FeatherSlideEncoder.random_weights(seed=SEED)
    if not gated:
        weights = {
            name.replace("attention_a.0", "module.0").replace(
                "attention_c", "module.3"
            ): value
            for name, value in weights.items()
            if "attention_b" not in name
        }
    named = {f"model.{name}": value for name, value in weights.items()}
    classifier = {"model.classifier.weight": torch.ones(2, 512)}
    head = AbmilSlideEncoder(named | classifier)
    tiles, coords = seeded_slides(AUTHORS["feather"])[0]
    got = head.encode(tiles, coords, tile_px_l0=512)
    if gated:
        golden = np.load(GOLDEN / "feather.npz")["float64"]
        assert np.abs(got - golden).max() <= TOLERANCE * np.abs(golden).max()
    else:
        x = torch.from_numpy(tiles).double()
        w = {name: value.double() for name, value in weights.items()}
        h = (x @ w["patch_embed.0.weight"].T + w["patch_embed.0.bias"]).relu()
        a = (
            h @ w["global_attn.module.0.weight"].T + w["global_attn.module.0.bias"]
        ).tanh()
        scores = a @ w["global_attn.module.3.weight"].T + w["global_attn.module.3.bias"]
        wanted = (scores.softmax(0) * h).sum(0).numpy()
        assert np.abs(got - wanted).max() <= TOLERANCE * np.abs(wanted).max()
    with pytest.raises(WeightsError, match=r"1 unexpected \(0.embed.3.weight"):
        AbmilSlideEncoder(named | {"model.patch_embed.3.weight": torch.ones(512, 512)})


def test_softmax_sums_are_those_of_one_block_wherever_blocks_end() -> None:
    generator = torch.Generator().manual_seed(3)
    scores = (
        torch.randn(90, 4, generator=generator) * 30
    )  # far beyond what exp can hold
    values = torch.randn(90, 4, 5, generator=generator).double()
    weights = scores.double().softmax(0)
    wanted = torch.einsum("na,nae->ae", weights, values)
    for ends in ([90], [1, 2, 50, 90], [89, 90]):
        sums = SoftmaxSums()
        for start, end in zip([0, *ends], ends):
            sums.add(scores[start:end], values[start:end])
        torch.testing.assert_close(sums.result(), wanted, rtol=1e-12, atol=1e-14)
    shared = SoftmaxSums()
    shared.add(scores[:60], values[:60, 0])
    shared.add(scores[60:], values[60:, 0])
    torch.testing.assert_close(
        shared.result(), weights.T @ values[:, 0], rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chief", "must be passed, got none; download them from https://github.com"),
        ("tangle", "must be passed, got none; download them from https://github.com"),
        ("madeleine", "must name a full commit, MahmoodLab/madeleine@COMMIT"),
        ("feather", "must name a full commit, MahmoodLab/abmil.base.conch_v15"),
    ],
)
def test_weights_that_no_commit_pins_must_be_named(name: str, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        load_slide_encoder(name, device="cpu")


def test_names_and_shapes_must_fit_one_by_one() -> None:
    weights = ChiefSlideEncoder.random_weights(seed=0)
    beside = {"organ_embedding": torch.ones(19, 768)}
    same = ChiefSlideEncoder.from_state_dict(weights | beside)
    assert same.weights_hash == ChiefSlideEncoder.from_state_dict(weights).weights_hash
    with pytest.raises(WeightsError, match=r"1 unexpected .other."):
        ChiefSlideEncoder.from_state_dict(weights | {"other": torch.ones(1)})
    name = "attention_net.0.bias"
    with pytest.raises(WeightsError, match=f"1 missing .{name}."):
        ChiefSlideEncoder.from_state_dict(
            {k: v for k, v in weights.items() if k != name}
        )
    with pytest.raises(WeightsError, match=f"1 misshapen .{name}"):
        ChiefSlideEncoder.from_state_dict(weights | {name: torch.ones(3)})
    with pytest.raises(ConfigError, match=r"precision must be fp32 .* 'chief'"):
        load_slide_encoder("chief", pretrained=False, precision="bf16", device="cpu")


def test_embeddings_of_another_tile_encoder_are_refused_by_name() -> None:
    chief = load_slide_encoder("chief", pretrained=False, device="cpu")
    with pytest.raises(InvalidInputError, match=r"must be ctranspath .* got 'uni2_h'"):
        check_fit(chief, "uni2_h", 256, 1.0)
    assert check_fit(chief, "ctranspath", 256, 1.0) == ()
    with pytest.raises(InvalidInputError, match=r"tile_mpp must be 1 .* got 0\.5; "):
        check_fit(chief, "ctranspath", 256, 0.5)


def test_prism_takes_repeated_weights_if_they_are_equal() -> None:
    config = AUTHORS["prism_small"].config
    weights = PrismSlideEncoder.random_weights(config, seed=SEED)
    layers = "image_resampler.perceiver.layers"
    shared = f"{layers}.2.xattn.ff.norm.bias"
    block = f"{layers}.0.tf.1.ff.net.2.weight"
    copies = {
        f"{layers}.4.xattn.ff.norm.bias": weights[shared].clone(),
        f"{layers}.3.tf.1.ff.net.2.weight": weights[block].clone(),
        "text_decoder.cls": torch.ones(3),
        "image_resampler.img_norm.weight": torch.ones(48),
    }
    once = PrismSlideEncoder.from_state_dict(weights, config=config)
    again = PrismSlideEncoder.from_state_dict(weights | copies, config=config)
    assert again.weights_hash == once.weights_hash
    for name, value in copies.items():
        if name.startswith(layers):
            with pytest.raises(
                WeightsError, match="copies of a shared weight must be equal"
            ):
                PrismSlideEncoder.from_state_dict(
                    weights | {name: value + 1}, config=config
                )


def test_moozy_takes_every_size_from_the_tables_of_its_checkpoint(
    tmp_path: Path,
) -> None:
    """Six heads of the case, as MOOZY's own loader makes them of the same file."""
    sizes = AUTHORS["moozy_six_heads"].config
    golden = np.load(GOLDEN / "moozy_six_heads.npz")["float64"]
    weights = MoozySlideEncoder.random_weights(sizes, seed=SEED)
    payload = moozy_payload(sizes, weights)
    torch.save(payload, tmp_path / "moozy.pt")
    encoder = load_slide_encoder("moozy:case", weights=tmp_path, device="cpu")
    assert isinstance(encoder, MoozySlideEncoder)
    assert encoder.net.sizes == sizes
    num_tiles = AUTHORS["moozy_six_heads"].num_tiles
    embedding = embedding_of("moozy_six_heads", encoder, num_tiles)
    assert np.abs(embedding - golden).max() <= TOLERANCE * np.abs(golden).max()

    payload["case_transformer_config"]["num_heads"] = 4
    torch.save(payload, tmp_path / "moozy.pt")
    other = load_slide_encoder("moozy:case", weights=tmp_path, device="cpu")
    changed = embedding_of("moozy_six_heads", other, num_tiles)
    assert np.abs(changed - golden).max() > 0.01 * np.abs(golden).max()


@pytest.mark.parametrize(
    ("table", "changes", "message"),
    [
        ("slide", {"n_layers": 3}, r"slide_encoder_config.n_layers .* got 3 .* show 2"),
        ("slide", {"n_heads": 8}, r"slide_encoder_config.n_heads .* got 8 .* show 4"),
        ("slide", {"qk_norm": True}, r"qk_norm must agree .* got True"),
        ("slide", {"d_model": 64}, r"d_model must be .* 64, got 48"),
        ("slide", {"n_heads": None}, r"n_heads must be a whole number >= 0, got none"),
        ("case", {"num_heads": 5}, r"num_heads must divide the 48 channels .* got 5"),
        ("case", {"num_heads": 0}, r"num_heads must divide the 48 channels .* got 0"),
        ("case", {"num_heads": "6"}, r"num_heads must be a whole number .* got '6'"),
        ("case", {"num_layers": 1}, r"case_transformer_config.num_layers .* got 1"),
        ("case", {"dim_feedforward": 56}, r"dim_feedforward .* got 56 .* show 72"),
        ("case", {"num_registers": 0}, r"num_registers must agree .* got 0 .* show 1"),
        ("case", {"layerscale_init": 0.0}, r"layerscale_init must agree"),
    ],
)
def test_a_table_of_moozy_that_contradicts_its_weights_is_refused(
    tmp_path: Path, table: str, changes: dict[str, object], message: str
) -> None:
    sizes = AUTHORS["moozy_six_heads"].config
    payload = moozy_payload(sizes, MoozySlideEncoder.random_weights(sizes, seed=SEED))
    name = {"slide": "slide_encoder_config", "case": "case_transformer_config"}[table]
    payload[name] |= changes
    torch.save(payload, tmp_path / "moozy.pt")
    with pytest.raises(WeightsError, match=message):
        load_slide_encoder("moozy", weights=tmp_path, device="cpu")


def test_without_tables_only_the_published_sizes_of_moozy_load(tmp_path: Path) -> None:
    sizes = AUTHORS["moozy_six_heads"].config
    weights = MoozySlideEncoder.random_weights(sizes, seed=SEED)
    payload = moozy_payload(sizes, weights)
    del payload["case_transformer_config"]
    torch.save(payload, tmp_path / "moozy.pt")
    with pytest.raises(WeightsError, match="got no case_transformer_config in"):
        load_slide_encoder("moozy", weights=tmp_path, device="cpu")
    del payload["slide_encoder_config"]
    torch.save(payload, tmp_path / "moozy.pt")
    with pytest.raises(WeightsError, match="number of heads of the case transformer"):
        load_slide_encoder("moozy", weights=tmp_path, device="cpu")
    save_file(weights, tmp_path / "moozy.safetensors")
    with pytest.raises(WeightsError, match="number of heads of the case transformer"):
        load_slide_encoder("moozy:case", weights=tmp_path, device="cpu")
    # the norms of heads have the length of a head, so these say how many there are
    normed = replace(sizes, case_normed_heads=True, case_heads=6)
    weights = MoozySlideEncoder.random_weights(normed, seed=SEED)
    encoder = MoozySlideEncoder.from_state_dict(weights)
    assert encoder.net.sizes == normed
    published = MoozySlideEncoder.random_weights(seed=SEED)
    assert MoozySlideEncoder.from_state_dict(published).net.sizes == MoozySizes()


# `perceiver_config` of "prism_small"
SMALL_PRISM = {
    "context_dim": 40,
    "latent_dim": 48,
    "latent_seq": 6,
    "mhsa_heads": 4,
    "perceiver_depth": 5,
    "share_xattn_start_layer": 2,
    "transformer_depth": 2,
    "xattn_heads": 3,
}


def test_prism_takes_its_sizes_from_the_config_beside_its_weights(
    tmp_path: Path,
) -> None:
    case = AUTHORS["prism_small"]
    golden = np.load(GOLDEN / "prism_small.npz")["float64"]
    weights = PrismSlideEncoder.random_weights(case.config, seed=SEED)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="must be equal"):
        load_slide_encoder("prism", weights=tmp_path, device="cpu")
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"model_type": "prism", "perceiver_config": SMALL_PRISM})
    )
    encoder = load_slide_encoder("prism", weights=tmp_path, device="cpu")
    assert isinstance(encoder, PrismSlideEncoder)
    assert encoder.net.sizes == case.config
    embedding = embedding_of("prism_small", encoder, case.num_tiles)
    assert np.abs(embedding - golden).max() <= TOLERANCE * np.abs(golden).max()
    for change, message in (
        ({"mhsa_heads": 5}, "mhsa_heads must divide the 48 channels .* got 5"),
        ({"xattn_heads": True}, "xattn_heads must be a whole number .* got True"),
        ({"mlp_mult": 4}, "mlp_mult must be 1, the published one, got 4"),
        ({"latent_seq": 7}, "misshapen"),
    ):
        config.write_text(json.dumps({"perceiver_config": SMALL_PRISM | change}))
        with pytest.raises(WeightsError, match=message):
            load_slide_encoder("prism", weights=tmp_path, device="cpu")
    config.write_text("{")
    with pytest.raises(WeightsError, match="config must be JSON"):
        load_slide_encoder("prism", weights=tmp_path, device="cpu")


def test_another_repository_of_prism_must_have_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two repositories in the hub's cache, one without a config; there is no network."""
    constants = hub_library().constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    commit = "0123456789abcdef" * 2 + "01234567"
    sizes = AUTHORS["prism_small"].config
    weights = PrismSlideEncoder.random_weights(sizes, seed=SEED)
    for name in ("complete", "bare"):
        folder = tmp_path / f"models--owner--{name}" / "snapshots" / commit
        folder.mkdir(parents=True)
        save_file(weights, folder / "model.safetensors")
        if name == "complete":
            text = json.dumps({"perceiver_config": SMALL_PRISM})
            (folder / "config.json").write_text(text)
    encoder = PrismSlideEncoder.from_pretrained(f"owner/complete@{commit}")
    assert encoder.net.sizes == sizes
    with pytest.raises(WeightsError, match=r"hf download owner/bare config\.json"):
        PrismSlideEncoder.from_pretrained(f"owner/bare@{commit}")


def test_prism_refuses_a_depth_that_its_names_contradict(tmp_path: Path) -> None:
    config = AUTHORS["prism_small"].config
    weights = PrismSlideEncoder.random_weights(config, seed=SEED)
    layers = "image_resampler.perceiver.layers"
    last = f"{layers}.4.xattn.ff.norm.bias"
    weights[last] = weights[f"{layers}.2.xattn.ff.norm.bias"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    table = {"perceiver_depth": 6, "share_xattn_start_layer": 2}
    text = json.dumps({"perceiver_config": table})
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(WeightsError, match="got 6 where their names show 5"):
        load_slide_encoder("prism", weights=tmp_path, device="cpu")


def test_moozy_reads_the_tables_and_the_sizes_of_its_file(tmp_path: Path) -> None:
    sizes = replace(AUTHORS["moozy_small"].config, case_heads=12)
    weights = MoozySlideEncoder.random_weights(sizes, seed=SEED)
    payload = moozy_payload(sizes, weights)
    torch.save(payload, tmp_path / "moozy.pt")
    encoder = load_slide_encoder("moozy:case", weights=tmp_path, device="cpu")
    same = MoozySlideEncoder.from_state_dict(weights)
    assert isinstance(encoder, MoozySlideEncoder)
    assert encoder.net.sizes == same.net.sizes == sizes
    assert encoder.weights_hash == same.weights_hash
    assert (encoder.name, same.name) == ("moozy:case", "moozy")

    slopes = payload["teacher_slide_encoder"]
    assert isinstance(slopes, dict)
    slopes["blocks.1.pos_bias.slopes"] = slopes["pos_bias.slopes"] * 2
    torch.save(payload, tmp_path / "moozy.pt")
    with pytest.raises(WeightsError, match="copies of a shared weight must be equal"):
        load_slide_encoder("moozy", weights=tmp_path, device="cpu")
    with pytest.raises(WeightsError, match=r"slopes of .* must be <= 0"):
        turned = {n: -v if n.endswith("slopes") else v for n, v in weights.items()}
        MoozySlideEncoder.from_state_dict(turned)
    with pytest.raises(ConfigError, match="must be slide or case, got 'cls'"):
        load_slide_encoder("moozy:cls", pretrained=False, device="cpu")


def test_moozy_in_groups_of_heads_is_the_same_and_too_small_a_budget_is_refused() -> (
    None
):
    case = AUTHORS["moozy_small"]
    weights = case.encoder.random_weights(case.config, seed=SEED)
    tiles, coords = seeded_slides(case)[0]
    embeddings = []
    least = heads_budget(case.config, 1)
    for budget_bytes in (heads_budget(case.config, 6), least):
        options = LoadOptions(device="cpu", budget_bytes=budget_bytes)
        encoder = case.encoder.from_state_dict(
            weights, config=case.config, options=options
        )
        embeddings.append(encoder.encode(tiles, coords, tile_px_l0=TILE_PX_L0))
    np.testing.assert_allclose(embeddings[0], embeddings[1], rtol=0, atol=1e-6)
    options = LoadOptions(device="cpu", budget_bytes=least - 1)
    encoder = case.encoder.from_state_dict(weights, config=case.config, options=options)
    with pytest.raises(BudgetError, match=r"moozy needs .* for 299 tokens"):
        encoder.encode(tiles, coords, tile_px_l0=TILE_PX_L0)


def heads_budget(sizes: MoozySizes, heads: int) -> int:
    """Smallest budget with which 299 tokens have so many heads at a time."""
    low, high = 1, 2**40
    while low < high:
        middle = (low + high) // 2
        try:
            fits = heads_at_a_time(299, sizes, budget_bytes=middle) >= heads
        except BudgetError:
            fits = False
        low, high = (low, middle) if fits else (middle + 1, high)
    return low


def test_moozy_refuses_tiles_off_one_grid_and_slides_without_tissue() -> None:
    encoder = seeded_encoder("moozy_small")
    tiles, coords = seeded_slides(AUTHORS["moozy_small"])[0]
    with pytest.raises(InvalidInputError, match="one grid of tiles without overlap"):
        encoder.encode(tiles, coords, tile_px_l0=TILE_PX_L0 * 2)
    with pytest.raises(InvalidInputError, match="a row that is not all zero"):
        encoder.encode(tiles * 0, coords, tile_px_l0=TILE_PX_L0)


def test_early_fusion_lays_slides_of_any_offset_onto_one_grid() -> None:
    config = AUTHORS["moozy_small"].config
    weights = MoozySlideEncoder.random_weights(config, seed=SEED)
    encoder = MoozySlideEncoder.from_state_dict(weights, config=config)
    places = np.arange(30)
    grid = np.stack([places % 6, places // 6], 1) * 512
    tiles = seeded_tiles(60, 20)
    first = grid + np.array([301, 77])
    second = grid + np.array([2460, 1300])
    slides = [(tiles[:30], first), (tiles[30:], second)]
    got = patient_embedding(
        slides, slide_encoder=encoder, tile_px_l0=512, fusion="early"
    )
    # two empty columns between them; rows stay, so the second begins two rows further down
    laid = np.concatenate([grid, grid + np.array([8 * 512, 2 * 512])])
    wanted = encoder.encode(tiles, laid, tile_px_l0=512)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)
    late = patient_embedding(slides, slide_encoder=encoder, tile_px_l0=512)
    each = [encoder.encode(t, c, tile_px_l0=512) for t, c in slides]
    np.testing.assert_allclose(late, np.mean(each, 0), rtol=0, atol=1e-6)


def test_cobra_takes_what_it_was_trained_on_and_the_averaged_encoder_of_a_checkpoint() -> (
    None
):
    config = AUTHORS["cobra_1"].config
    weights = CobraSlideEncoder.random_weights(config, seed=SEED)
    same = CobraSlideEncoder.from_state_dict(weights)
    assert same.net.sizes == config
    checkpoint = {
        f"module.momentum_enc.{name}": value for name, value in weights.items()
    }
    checkpoint |= {
        f"module.base_enc.{name}": value + 1 for name, value in weights.items()
    }
    checkpoint["module.momentum_enc.proj.0.weight"] = torch.ones(2, 2)
    averaged = CobraSlideEncoder.from_state_dict(checkpoint)
    assert averaged.weights_hash == same.weights_hash
    tiles, coords = seeded_slides(AUTHORS["cobra_1"])[0]
    with pytest.raises(
        InvalidInputError, match=r"must have 768, 1024, 1280, 1536 channels"
    ):
        same.encode(tiles[:, :512], coords, tile_px_l0=TILE_PX_L0)
    turned = same.encode(tiles[::-1].copy(), coords, tile_px_l0=TILE_PX_L0)
    assert (
        np.abs(turned - same.encode(tiles, coords, tile_px_l0=TILE_PX_L0)).max() > 1e-3
    )


def test_scores_of_all_heads_at_once_are_those_of_each_head() -> None:
    net = CobraSlideEncoder.build(AUTHORS["cobra_1"].config)
    names = [name for name in net.state_dict() if name.startswith("attn.")]
    assert len(names) == 6 * net.sizes.num_heads
    assert "attn.1.attention_a.0.weight" in names
    heads = HeadScores(24, 10, num_heads=3)
    before = heads(torch.ones(1, 3, 24))
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(value.shape, generator=generator)
        for name, value in heads.state_dict().items()
    }
    heads.load_state_dict(weights, assign=True)
    values = torch.randn(37, 24, 3, generator=generator).transpose(1, 2)
    each = torch.cat([head(values[:, i]) for i, head in enumerate(heads)], 1)
    torch.testing.assert_close(heads(values), each, rtol=1e-6, atol=1e-6)
    assert not torch.equal(heads(torch.ones(1, 3, 24)), before)


def test_cobra_takes_the_class_token_of_virchow2_and_its_authors_resolutions() -> None:
    sizes = AUTHORS["cobra_1"].config
    weights = CobraSlideEncoder.random_weights(sizes, seed=SEED)
    first = CobraSlideEncoder.from_state_dict(weights)
    tiles = seeded_tiles(60, 2560)
    coords = np.stack([np.arange(60) % 10, np.arange(60) // 10], 1) * TILE_PX_L0
    whole = first.encode(tiles, coords, tile_px_l0=TILE_PX_L0)
    class_token = first.encode(tiles[:, :1280], coords, tile_px_l0=TILE_PX_L0)
    np.testing.assert_array_equal(whole, class_token)
    assert whole.shape == (1280,)
    mean = first.encode(tiles[:, 1280:], coords, tile_px_l0=TILE_PX_L0)
    assert np.abs(mean - whole).max() > 1e-2

    second = load_slide_encoder("cobra", pretrained=False, device="cpu")
    for mpp in (0.5, 1.0, 256 / 224):
        assert check_fit(second, "virchow2", 224, mpp) == ()
    with pytest.raises(InvalidInputError, match=r"must be 1 or 0\.5 or 1\.14 .* got 2"):
        check_fit(second, "virchow2", 224, 2.0)
    with pytest.raises(InvalidInputError, match=r"got 'virchow'"):
        check_fit(second, "virchow", 224, 1.0)
    # COBRA was trained on CTransPath, COBRA II on CONCH in its place
    assert check_fit(first, "ctranspath", 224, 1.0) == ()
    assert check_fit(second, "conch", 224, 1.0) == ()
    for encoder, other in ((first, "conch"), (second, "ctranspath")):
        with pytest.raises(InvalidInputError, match=f"got '{other}'"):
            check_fit(encoder, other, 224, 1.0)
    narrow = replace(sizes, tile_dims=(768, 1024))
    weights = CobraSlideEncoder.random_weights(narrow, seed=SEED)
    without = CobraSlideEncoder.from_state_dict(weights)
    with pytest.raises(InvalidInputError, match=r"have 768, 1024 channels .* got 2560"):
        without.encode(tiles, coords, tile_px_l0=TILE_PX_L0)


def test_cobra_on_two_tile_encoders_has_two_folders() -> None:
    cobra = load_slide_encoder("cobra", pretrained=False, device="cpu")
    uni = cobra.label("uni")
    virchow2 = cobra.label("virchow2")
    assert uni.endswith("-uni") and virchow2.endswith("-virchow2")
    assert uni.removesuffix("-uni") == virchow2.removesuffix("-virchow2")
    # one tile encoder, under two names
    chief = load_slide_encoder("chief", pretrained=False, device="cpu")
    assert chief.label("ctranspath") == chief.label("chief_ctranspath")
    assert chief.label("ctranspath") != chief.label("uni")
