"""Dilated attention against its plain form in float64, around every segment edge."""

import pytest
import torch
from tests.support.plain_gigapath import plain_dilated, plain_dilated_row

from thinsection.attention.dilated import Branch, dilated_heads
from thinsection.errors import InvalidInputError
from thinsection.pool.gigapath import LongNetConfig
from thinsection.types import MIB


@pytest.fixture(params=["in blocks", "fused"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As on a CPU; and as on a card, by PyTorch's fused attention for CPUs."""
    if request.param == "fused":
        monkeypatch.setattr("thinsection.attention.dilated.is_fused", lambda q: True)
    return str(request.param)


BRANCHES = ((8, 1), (22, 2), (45, 4), (64, 8), (256, 16))


def qkv(tokens: int, *, heads: int = 16, dim: int = 6) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(
        3, heads, tokens, dim, generator=generator, dtype=torch.float64
    ).unbind()


def ours(x: tuple[torch.Tensor, ...], first_head: int = 0) -> torch.Tensor:
    branches = tuple(Branch(length=s, dilation=r) for s, r in BRANCHES)
    return dilated_heads(
        (x[0], x[1], x[2]),
        branches,
        first_head=first_head,
        num_heads=16,
        budget_bytes=16 * MIB,
    )


@pytest.mark.parametrize(
    "tokens", [1, 2, 7, 8, 9, 21, 22, 23, 44, 45, 46, 63, 64, 65, 130, 256, 300]
)
def test_agrees_with_padding_in_memory_around_every_segment_length(tokens: int) -> None:
    x = qkv(tokens)
    wanted = plain_dilated(*(t.transpose(0, 1) for t in x), branches=BRANCHES)
    torch.testing.assert_close(ours(x).transpose(0, 1), wanted, rtol=0, atol=1e-12)


def test_float32_stays_near_float64() -> None:
    x = qkv(150)
    got = ours(tuple(t.float() for t in x))
    assert got.dtype == torch.float32
    assert float((got - ours(x)).abs().max()) <= 2e-6


def test_a_part_of_the_heads_sees_its_own_offsets() -> None:
    x = qkv(100)
    whole = ours(x)
    part = ours(tuple(t[4:8] for t in x), first_head=4)
    torch.testing.assert_close(part, whole[4:8], rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("tokens", "launches"),
    [
        # whole segments and the rest: two of the first branch, two of the second, then one a branch
        (8_000, 7),
        # offsets that see one token more are a launch of their own
        (8_001, 2 + 3 + 2 + 2 + 2),
    ],
)
def test_launches_are_few_and_small(
    tokens: int, launches: int, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A launch has all heads of a branch, whatever their offsets."""
    shapes: list[tuple[int, ...]] = []

    def counted(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shapes.append(tuple(q.shape))
        return q, q[..., 0]

    monkeypatch.setattr("thinsection.attention.dilated.fused_attention", counted)
    if way == "in blocks":
        return
    x = torch.zeros(16, tokens, 48)
    branches = LongNetConfig().branches
    dilated_heads((x, x, x), branches, first_head=0, num_heads=16, budget_bytes=MIB)
    seen = sum(s * g * n for s, g, n, _ in shapes)
    assert seen == pytest.approx(16 * tokens * (1 + 1 / 2 + 1 / 4 + 1 / 8 + 1 / 16))
    assert len(shapes) == launches


def test_launches_of_many_tokens_are_bounded(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Segments of one branch are divided over launches, and give the same."""
    x = qkv(300)
    whole = ours(x)
    monkeypatch.setattr("thinsection.attention.dilated._LAUNCH_TOKENS", 16 * 60)
    torch.testing.assert_close(ours(x), whole, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("first_head", "heads"), [(0, 1), (1, 5), (3, 10), (6, 10)])
def test_heads_that_divide_the_offsets_unequally(first_head: int, heads: int) -> None:
    x = qkv(130)
    some = tuple(t[first_head : first_head + heads] for t in x)
    part = ours(some, first_head=first_head)
    whole = ours(x)[first_head : first_head + heads]
    torch.testing.assert_close(part, whole, rtol=0, atol=1e-14)


def test_strides_of_one_product_for_q_k_and_v_are_followed() -> None:
    """As GigaPath has them: (3, L, h, D) in memory, transposed."""
    x = qkv(77)
    packed = torch.stack(x).transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(
        ours(tuple(packed.unbind())), ours(x), rtol=0, atol=1e-14
    )


def test_zero_padding_takes_part() -> None:
    """The third token is alone in a segment of two: a key of logit 0 and value 0 joins it."""
    q, k, v = qkv(3)
    branches = (Branch(length=2, dilation=1),)
    out = dilated_heads(
        (q, k, v), branches, first_head=0, num_heads=16, budget_bytes=MIB
    )
    logit = (q[:, 2] * k[:, 2]).sum(-1) * 6**-0.5
    torch.testing.assert_close(out[:, 2], v[:, 2] * logit.sigmoid()[:, None])


def test_dilations_that_do_not_divide_the_heads_are_refused() -> None:
    x = qkv(5)
    with pytest.raises(InvalidInputError, match="dilations that divide 16 heads"):
        dilated_heads(
            (x[0], x[1], x[2]),
            (Branch(length=8, dilation=3),),
            first_head=0,
            num_heads=16,
            budget_bytes=MIB,
        )


@pytest.mark.parametrize("tokens", [130, 256])
def test_the_reference_of_one_row_is_the_plain_one(tokens: int) -> None:
    q, k, v = qkv(tokens)
    wanted = plain_dilated(*(t.transpose(0, 1) for t in (q, k, v)), branches=BRANCHES)
    for head in (0, 7, 15):
        for token in (0, 44, 45, tokens - 1):
            row = plain_dilated_row(
                q[head],
                k[head],
                v[head],
                branches=BRANCHES,
                head=head,
                num_heads=16,
                token=token,
            )
            torch.testing.assert_close(row, wanted[token, head], rtol=0, atol=1e-12)


@pytest.mark.parametrize("tokens", [6_001, 12_001])
def test_agrees_across_the_published_segments(tokens: int) -> None:
    """Around the ends of GigaPath's segments of 1,024 and 5,792 tokens, in float32."""
    q, k, v = (x.float() for x in qkv(tokens, dim=48))
    branches = LongNetConfig().branches
    heads = slice(6, 10)
    got = dilated_heads(
        (q[heads], k[heads], v[heads]),
        branches,
        first_head=6,
        num_heads=16,
        budget_bytes=64 * MIB,
    )
    near = [
        edge + shift
        for edge in (1_024, 5_120, 5_792, 11_584)
        for shift in (-2, -1, 0, 1, 2)
    ]
    plain = [(b.length, b.dilation) for b in branches]
    for token in [0, *(t for t in near if t < tokens), tokens - 2, tokens - 1]:
        for h in range(4):
            row = plain_dilated_row(
                q[6 + h],
                k[6 + h],
                v[6 + h],
                branches=plain,
                head=6 + h,
                num_heads=16,
                token=token,
            )
            assert float((got[h, token].double() - row).abs().max()) <= 2e-6, (h, token)
