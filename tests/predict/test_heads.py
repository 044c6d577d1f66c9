"""Heads against plain references written from the papers, tile by tile in float64."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from thinsection.config import from_mapping
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.evaluation.target import Kind, Target
from thinsection.predict.bags import grid_cells
from thinsection.predict.heads.config import BLOCK_ROWS, HEADS, HeadConfig
from thinsection.predict.heads.head import (
    Head,
    HeadOutput,
    Survey,
    build_head,
    head_for,
)
from thinsection.predict.heads.pooled import AbmilHead

DIM, SETTINGS = (
    12,
    {"hidden_dim": 8, "attention_dim": 6, "num_heads": 2, "instances": 3},
)
ADDITIVE = ("linear", "abmil", "clam_sb", "clam_mb", "dsmil", "transformer")


def made(name: str, outputs: int = 3, seed: int = 0, **settings: object) -> Head:
    torch.manual_seed(seed)
    head = build_head(HeadConfig(head=name, **{**SETTINGS, **settings}), DIM, outputs)
    head = head.double().eval().requires_grad_(False)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return head


def bag(n: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n, DIM, generator=generator, dtype=torch.float64)
    place = torch.arange(n)
    return features, torch.stack([place % 5, place // 5], 1)


@pytest.mark.parametrize("name", ["abmil", "clam_sb", "clam_mb"])
def test_a_long_bag_gives_in_blocks_what_it_gives_as_a_whole(name: str) -> None:
    head = made(name).float()
    assert isinstance(head, AbmilHead)
    features = bag(2 * BLOCK_ROWS + 77)[0].float()
    whole = head.pool(head.embed(features))
    output = head(features)
    for part in ("logits", "attention", "evidence"):
        torch.testing.assert_close(
            getattr(output, part), getattr(whole, part), rtol=1e-5, atol=1e-7
        )
    # only the loss of CLAM needs the projected tiles
    if name == "abmil":
        assert output.instances is None
    else:
        assert output.instances is not None and whole.instances is not None
        torch.testing.assert_close(output.instances, whole.instances)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("abmil", "multiclass"),
        ("abmil", "ordinal"),
        ("clam_sb", "multiclass"),
        ("clam_mb", "multiclass"),
        ("linear", "multiclass"),
        ("linear", "ordinal"),
        ("dsmil", "multiclass"),
        ("dsmil", "ordinal"),
    ],
)
@pytest.mark.parametrize("count", [BLOCK_ROWS, 2 * BLOCK_ROWS + 77])
def test_blocks_that_come_one_by_one_give_the_bits_of_the_bag(
    name: str, kind: Kind, count: int
) -> None:
    target = Target(kind=kind, columns=("grade",), names=("a", "b", "c"))
    head = head_for(HeadConfig(head=name, **SETTINGS), DIM, target).eval()
    features = bag(count)[0].float()
    with torch.inference_mode():
        whole = head(features)
        survey: Survey = ()
        for block in features.split(BLOCK_ROWS):
            if head.surveys:
                survey = head.survey(block, survey)
        parts = [head.of_block(block, survey) for block in features.split(BLOCK_ROWS)]
        joined = head.of_values(
            *(torch.cat(values) for values in zip(*parts, strict=True))
        )
    assert head.reads_blocks
    for part in ("logits", "attention", "evidence"):
        assert torch.equal(getattr(joined, part), getattr(whole, part)), part


def test_a_head_with_another_forward_reads_whole_bags() -> None:
    class Doubled(AbmilHead):
        def forward(
            self, embeddings: torch.Tensor, coords: torch.Tensor | None = None
        ) -> HeadOutput:
            return super().forward(2 * embeddings, coords)

    class Grandchild(Doubled):
        pass

    class Renamed(AbmilHead):
        pass

    class Halving:
        def pool(self, hidden: torch.Tensor) -> HeadOutput:
            return super().pool(hidden / 2)  # type: ignore[misc]

    class Mixed(Halving, AbmilHead):
        pass

    heads = (Doubled, Grandchild, Mixed, Renamed)
    assert [head.reads_blocks for head in heads] == [False, False, False, True]
    with pytest.raises(NotImplementedError, match="MlpHead is not read in blocks"):
        made("mlp").of_block(bag(3)[0])


def linear(x: np.ndarray, state: dict[str, np.ndarray], name: str) -> np.ndarray:
    return state[f"{name}.weight"] @ x + state[f"{name}.bias"]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def plain_abmil(
    head: Head, features: torch.Tensor
) -> tuple[list[np.ndarray], np.ndarray]:
    """Projected tiles, and attention (A, N): Ilse 2018, equations 8 and 9."""
    s = {k: v.numpy() for k, v in head.state_dict().items()}
    hidden = [np.maximum(linear(x, s, "embed.0"), 0) for x in features.numpy()]
    gates = [1 / (1 + np.exp(-linear(h, s, "attention.U"))) for h in hidden]
    scores = [
        linear(np.tanh(linear(h, s, "attention.V")) * g, s, "attention.w")
        for h, g in zip(hidden, gates, strict=True)
    ]
    return hidden, softmax(np.stack(scores, 1))


@pytest.mark.parametrize("name", ["abmil", "clam_sb", "clam_mb"])
@pytest.mark.parametrize("n", [1, 7])
def test_attention_heads_pool_as_the_papers_say(name: str, n: int) -> None:
    head, (features, coords) = made(name), bag(n)
    hidden, attention = plain_abmil(head, features)
    weight, bias = (
        head.classifier.weight.detach().numpy(),
        head.classifier.bias.detach().numpy(),
    )
    out = head(features, coords)
    for k in range(3):
        a = attention[k if name == "clam_mb" else 0]
        pooled = sum(a[i] * hidden[i] for i in range(n))
        assert float(out.logits[k]) == pytest.approx(
            weight[k] @ pooled + bias[k], abs=1e-12
        )
    np.testing.assert_allclose(out.attention.detach().numpy().T, attention, atol=1e-12)


@pytest.mark.parametrize("name", ["clam_sb", "clam_mb"])
@pytest.mark.parametrize("subtyping", [False, True])
@pytest.mark.parametrize("n", [2, 9])
def test_clams_instance_loss_is_that_of_its_highest_and_lowest_tiles(
    name: str, subtyping: bool, n: int
) -> None:
    head, (features, coords) = made(name, subtyping=subtyping), bag(n)
    hidden, attention = plain_abmil(head, features)
    s = {k: v.numpy() for k, v in head.state_dict().items()}
    true, total, count = 1, 0.0, min(3, n)
    for k in range(3):
        order = np.argsort(-attention[k if name == "clam_mb" else 0])
        pairs = [(i, 0) for i in order[:count]] if subtyping else []
        if k == true:
            pairs = [(i, 1) for i in order[:count]] + [
                (i, 0) for i in order[n - count :]
            ]
        losses = [
            -np.log(
                softmax(linear(hidden[i], s, f"instance_classifiers.{k}"))[positive]
            )
            for i, positive in pairs
        ]
        total += float(np.mean(losses)) if losses else 0.0
    wanted = total / 3 if subtyping else total
    out, target = head(features, coords), torch.tensor(true)
    assert float(head.extra_loss(out, target, F.cross_entropy)) == pytest.approx(
        wanted, abs=1e-12
    )
    hot = F.one_hot(target, 3).double()
    assert torch.equal(
        head.extra_loss(out, hot, F.cross_entropy),
        head.extra_loss(out, target, F.cross_entropy),
    )
    bag_loss = float(F.cross_entropy(out.logits, target))
    both = float(head.loss(out, target, F.cross_entropy))
    assert both == pytest.approx(0.7 * bag_loss + 0.3 * wanted, abs=1e-12)


def test_clam_refuses_targets_that_are_no_classes() -> None:
    head, (features, coords) = made("clam_sb", outputs=1), bag(4)
    with pytest.raises(ConfigError, match=r"must be classes, got .*use head 'abmil'"):
        head.loss(head(features, coords), torch.tensor([2.5]), F.mse_loss)


def test_dsmil_weighs_tiles_by_their_likeness_to_the_critical_one() -> None:
    head, (features, coords) = made("dsmil"), bag(7)
    s, x = {k: v.numpy() for k, v in head.state_dict().items()}, features.numpy()
    tile_logits = np.stack([linear(t, s, "instance_classifier") for t in x])

    def query(t: np.ndarray) -> np.ndarray:
        return np.tanh(linear(np.maximum(linear(t, s, "query.0"), 0), s, "query.2"))

    pooled = []
    for k in range(3):
        critical = query(x[tile_logits[:, k].argmax()])
        a = softmax(np.array([query(t) @ critical for t in x]) / math.sqrt(128))
        pooled.append(sum(a[i] * x[i] for i in range(7)))
    wanted = (s["classifier.weight"] * np.stack(pooled)).sum((1, 2)) + s[
        "classifier.bias"
    ]
    out, target = head(features, coords), torch.tensor([0.0, 1, 0], dtype=torch.float64)
    np.testing.assert_allclose(out.logits.detach().numpy(), wanted, atol=1e-12)
    bce = torch.nn.BCEWithLogitsLoss()
    highest = torch.from_numpy(tile_logits.max(0))
    both = 0.5 * bce(torch.from_numpy(wanted), target) + 0.5 * bce(highest, target)
    assert float(head.loss(out, target, bce)) == pytest.approx(float(both), abs=1e-12)


def plain_nystrom(x: np.ndarray, s: dict[str, np.ndarray], heads: int) -> tuple:
    """Output (T, C) and the approximated attention by head: Xiong 2021, equations 13 to 15."""
    n, width = x.shape
    m, d = width // 2, width // heads
    x = np.concatenate([np.zeros((-n % m, width)), x])
    per = len(x) // m
    qkv = x @ s["to_qkv.weight"].T
    parts, maps = [], []
    for h in range(heads):
        q, k, v = (
            qkv[:, i * width + h * d : i * width + (h + 1) * d] for i in range(3)
        )
        maps.append((q / math.sqrt(d), k, v))
    middle = []
    for q, k, _ in maps:
        q_mark = np.stack([q[i * per : (i + 1) * per].mean(0) for i in range(m)])
        k_mark = np.stack([k[i * per : (i + 1) * per].mean(0) for i in range(m)])
        middle.append(
            (softmax(q @ k_mark.T), softmax(q_mark @ k_mark.T), softmax(q_mark @ k.T))
        )
    columns = max(np.abs(a).sum(1).max() for _, a, _ in middle)
    rows = max(np.abs(a).sum(0).max() for _, a, _ in middle)
    attentions = []
    for h, ((left, a, right), (_, _, v)) in enumerate(zip(middle, maps, strict=True)):
        z, eye = a.T / (columns * rows), np.eye(m)
        for _ in range(6):
            az = a @ z
            z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
        attentions.append(left @ z @ right)
        padded, kernel = np.pad(v, ((16, 16), (0, 0))), s["res_conv.weight"][h, 0, :, 0]
        residual = sum(kernel[j] * padded[j : j + len(v)] for j in range(33))
        parts.append(attentions[-1] @ v + residual)
    out = np.concatenate(parts, 1) @ s["to_out.0.weight"].T + s["to_out.0.bias"]
    return out[-n:], [a[-n:, -n:] for a in attentions]


def plain_norm(x: np.ndarray, s: dict[str, np.ndarray], name: str) -> np.ndarray:
    z = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    return z * s[f"{name}.weight"] + s[f"{name}.bias"]


@pytest.mark.parametrize("n", [1, 7, 9])
def test_transmil_is_the_papers(n: int) -> None:
    """Shao 2021, algorithms 2 and 3: square, Nyström layer, convolutions, Nyström layer."""
    head, (features, coords) = made("transmil"), bag(n)
    s = {k: v.numpy() for k, v in head.state_dict().items()}
    layer = [
        {
            k.removeprefix(f"layers.{i}."): v
            for k, v in s.items()
            if k.startswith(f"layers.{i}.")
        }
        for i in range(2)
    ]
    h = np.stack([np.maximum(linear(t, s, "embed.0"), 0) for t in features.numpy()])
    side = math.ceil(math.sqrt(n))
    h = np.concatenate([s["cls_token"], h, h[: side * side - n]])
    h = h + plain_nystrom(plain_norm(h, s, "norms.0"), layer[0], 2)[0]
    square, placed = h[1:].reshape(side, side, 8), h[1:].reshape(side, side, 8).copy()
    for i, edge in enumerate((7, 5, 3)):
        padded = np.pad(
            square, ((edge // 2, edge // 2), (edge // 2, edge // 2), (0, 0))
        )
        for r in range(side):
            for c in range(side):
                window = padded[r : r + edge, c : c + edge]
                kernel = s[f"places.{i}.weight"][:, 0].transpose(1, 2, 0)
                placed[r, c] += (window * kernel).sum((0, 1)) + s[f"places.{i}.bias"]
    h = np.concatenate([h[:1], placed.reshape(-1, 8)])
    out, attentions = plain_nystrom(plain_norm(h, s, "norms.1"), layer[1], 2)
    states = plain_norm(h + out, s, "norms.2")
    found = head(features, coords)
    logits = linear(states[0], s, "classifier")
    np.testing.assert_allclose(found.logits.detach().numpy(), logits, atol=1e-10)
    of_cls = np.mean([a[0, 1:] for a in attentions], 0)
    attention = of_cls[:n].copy()
    attention[: side * side - n] += of_cls[n:]
    np.testing.assert_allclose(
        found.attention[:, 0].detach().numpy(), attention, atol=1e-10
    )
    assert found.evidence is None  # its logits are no sum over tiles


def test_the_transformers_attention_is_softmax_with_distance() -> None:
    head, (features, coords) = made("transformer", num_layers=1), bag(6)
    s = {k: v.numpy() for k, v in head.state_dict().items()}
    h = np.stack([np.maximum(linear(t, s, "embed.0"), 0) for t in features.numpy()])
    normed = plain_norm(h, s, "blocks.0.norm1")
    qkv = np.stack([linear(t, s, "blocks.0.qkv") for t in normed]).reshape(6, 3, 2, 4)
    place = coords.numpy().astype(float)
    distance = np.sqrt(((place[:, None] - place[None]) ** 2).sum(-1))
    heads = []
    for i, slope in enumerate((2.0**-4, 2.0**-8)):  # 2^(-8 i / H), Press 2022
        q, k, v = qkv[:, 0, i], qkv[:, 1, i], qkv[:, 2, i]
        heads.append(softmax(q @ k.T / 2 - slope * distance) @ v)
    h = h + np.stack([linear(t, s, "blocks.0.proj") for t in np.concatenate(heads, 1)])
    erf = np.vectorize(math.erf)
    mid = [linear(t, s, "blocks.0.mlp.fc1") for t in plain_norm(h, s, "blocks.0.norm2")]
    mid = [0.5 * t * (1 + erf(t / math.sqrt(2))) for t in mid]
    h = plain_norm(h + [linear(t, s, "blocks.0.mlp.fc2") for t in mid], s, "norm")
    wanted = head.pool(torch.from_numpy(h)).logits.detach().numpy()
    np.testing.assert_allclose(
        head(features, coords).logits.detach().numpy(), wanted, atol=1e-6
    )


@pytest.mark.parametrize("name", ADDITIVE)
def test_the_evidence_of_tiles_adds_up_to_the_logits(name: str) -> None:
    head, (features, coords) = made(name), bag(9)
    out = head(features, coords)
    assert out.attention is not None and out.evidence.shape == (9, 3)
    total = out.evidence.sum(0) + head.classifier.bias
    np.testing.assert_allclose(
        total.detach().numpy(), out.logits.detach().numpy(), atol=1e-10
    )
    np.testing.assert_allclose(out.attention.detach().sum(0), 1, atol=1e-6)


@pytest.mark.parametrize("name", HEADS.names())
def test_every_head_learns_from_a_bag_of_one_and_of_many(name: str) -> None:
    torch.manual_seed(0)
    head = build_head(HeadConfig(head=name, **SETTINGS), DIM, 2).train()
    for n in (1, 50):
        features, coords = bag(n)
        out: HeadOutput = head(features.float(), coords)
        head.loss(out, torch.tensor(1), F.cross_entropy).backward()
    silent = [
        k for k, p in head.named_parameters() if p.grad is None or not p.grad.any()
    ]
    # other classes' tile classifiers are asked with subtyping only; few landmarks leave biases out
    assert all("instance_classifiers.0" in k or k.endswith("w.bias") for k in silent), (
        silent
    )


def test_only_the_transformer_reads_places_and_it_says_so_where_they_are_missing() -> (
    None
):
    features, coords = bag(6)
    for name in HEADS.names():
        head = made(name)
        if name == "transformer":
            moved = head(features, coords * 3).logits
            assert not torch.allclose(moved, head(features, coords).logits)
            with pytest.raises(
                InvalidInputError, match=r"coords must be of shape \(6, 2\), got None"
            ):
                head(features)
        else:
            assert torch.equal(head(features).logits, head(features, coords).logits)


def test_slides_of_a_case_lie_apart() -> None:
    first, second = np.array([[512, 0], [1024, 512]]), np.array([[0, 224], [224, 0]])
    cells = grid_cells([(first, 512), (second, 224)])
    assert cells.tolist() == [[0, 0], [1, 1], [1025, 1], [1026, 0]]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("abmill", {}, "head must be a known name, got 'abmill'; did you mean 'abmil'"),
        ("abmil", {"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        (
            "abmil",
            {"hiden_dim": 4},
            "unknown config key 'head.hiden_dim'; did you mean",
        ),
        ("transmil", {"hidden_dim": 24}, "hidden_dim must be a multiple of 16"),
        ("abmil", {"attention_dim": 0}, "attention_dim must be >= 1, got 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    name: str, settings: dict, message: str
) -> None:
    with pytest.raises((ConfigError, InvalidInputError), match=message):
        build_head(
            from_mapping(HeadConfig, {"head": name, **settings}, where="head."), DIM, 2
        )
