"""The contract of 2-D ALiBi attention: every implementation gives the float64 answer.

Subclass `Alibi2dContract`, set `impl` and the tolerances, and pytest runs the whole suite.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest
import torch

from thinsection.attention import alibi2d_attention, alibi_slopes

Layout = Literal["tissue", "one cell", "far apart", "wide", "single"]
LAYOUTS: tuple[Layout, ...] = ("tissue", "one cell", "far apart", "wide", "single")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One seeded input: [1, heads, num_prefix + num_tokens, dim] and its cells."""

    num_tokens: int = 83
    heads: int = 3
    dim: int = 32
    layout: Layout = "tissue"
    num_prefix: int = 1
    logit_scale: float = 1.0
    batch: int = 1

    def cells(self) -> torch.Tensor:
        """int64 (num_tokens, 2)."""
        generator = torch.Generator().manual_seed(7)
        n = self.num_tokens
        side = int((2 * n) ** 0.5) + 2
        spots = torch.randperm(side * (side + 3), generator=generator)[:n].sort().values
        tissue = torch.stack([spots // (side + 3), spots % (side + 3)], 1)
        if self.layout == "one cell":
            return torch.full((n, 2), 5)
        if self.layout == "far apart":
            return (
                tissue
                + torch.tensor([0, 100_000]) * (torch.arange(n) >= n // 2)[:, None]
            )
        if self.layout == "wide":
            return torch.randint(0, 100_001, (n, 2), generator=generator)
        return tissue

    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Three float64 tensors [batch, heads, T, dim]."""
        generator = torch.Generator().manual_seed(3)
        shape = (self.batch, self.heads, self.num_prefix + self.num_tokens, self.dim)
        q, k, v = (
            torch.randn(shape, generator=generator, dtype=torch.float64)
            for _ in range(3)
        )
        return q * self.logit_scale, k, v


class Alibi2dContract:
    """Properties of every implementation; tolerances are (pointwise, relative RMS)."""

    impl: ClassVar[Literal["reference", "chunked", "triton", "flex"]]
    device: ClassVar[str] = "cpu"
    tolerances: ClassVar[dict[torch.dtype, tuple[float, float]]] = {
        torch.float32: (4e-6, 1e-6),
        torch.float16: (4e-3, 6e-4),
        torch.bfloat16: (4e-2, 6e-3),
    }

    def attend(self, *qkv_cells_slopes: torch.Tensor, **options: Any) -> torch.Tensor:
        """The call under test."""
        return alibi2d_attention(*qkv_cells_slopes, impl=self.impl, **options)

    def check(
        self, case: Case, dtype: torch.dtype = torch.float32, slack: float = 1.0
    ) -> None:
        """The implementation against dense float64 on the same rounded input."""
        q, k, v = (x.to(self.device, dtype) for x in case.qkv())
        cells, slopes = case.cells().to(self.device), alibi_slopes(case.heads)
        got = self.attend(q, k, v, cells, slopes, num_prefix_tokens=case.num_prefix)
        assert got.dtype == dtype
        wanted = dense_float64((q, k, v), cells, slopes, case.num_prefix)
        self.compare(got, wanted, dtype, slack)

    def compare(
        self,
        got: torch.Tensor,
        wanted: torch.Tensor,
        dtype: torch.dtype,
        slack: float = 1.0,
    ) -> None:
        """Pointwise and relative RMS."""
        pointwise, relative_rms = self.tolerances[dtype]
        error = got.double() - wanted
        assert got.shape == wanted.shape
        assert bool(got.isfinite().all())
        worst = float(error.abs().max() / max(1.0, float(wanted.abs().max())))
        assert worst <= pointwise * slack, worst
        rms = float(error.square().mean().sqrt() / wanted.square().mean().sqrt())
        assert rms <= relative_rms * slack, rms

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
    )
    def test_agrees_with_float64_on_every_layout(
        self, layout: Layout, dtype: torch.dtype
    ) -> None:
        self.check(
            Case(layout=layout, num_tokens=1 if layout == "single" else 83), dtype
        )

    @pytest.mark.parametrize("heads", [1, 3, 12, 16])
    @pytest.mark.parametrize("dim", [32, 64, 128])
    def test_agrees_for_every_number_of_heads_and_channels(
        self, heads: int, dim: int
    ) -> None:
        self.check(Case(heads=heads, dim=dim, num_tokens=47))

    @pytest.mark.parametrize("num_tokens", [1, 2, 15, 63, 64, 65, 127, 128, 129, 200])
    @pytest.mark.parametrize("num_prefix", [0, 1, 5])
    def test_agrees_around_block_edges(self, num_tokens: int, num_prefix: int) -> None:
        self.check(Case(num_tokens=num_tokens, num_prefix=num_prefix, heads=2))

    @pytest.mark.parametrize("logit_scale", [30.0, 1000.0])
    def test_huge_logits_neither_overflow_nor_vanish(self, logit_scale: float) -> None:
        """Scores up to +-5,000: float32 keeps them to about 5e-4, hence the slack."""
        self.check(Case(logit_scale=logit_scale), slack=3 * logit_scale)

    def test_only_prefix_tokens(self) -> None:
        self.check(Case(num_tokens=0, num_prefix=4))

    def test_padded_items_equal_the_same_items_alone(self) -> None:
        case = Case(batch=3, num_tokens=50)
        q, k, v = (x.to(self.device, torch.float32) for x in case.qkv())
        cells = torch.stack([case.cells(), case.cells() * 2, case.cells()[:, [1, 0]]])
        mask = torch.ones(3, 51, dtype=torch.bool)
        mask[1, 31:] = False
        mask[2, [4, 9, 50]] = False
        slopes, device = alibi_slopes(3), self.device
        got = self.attend(q, k, v, cells.to(device), slopes, key_mask=mask.to(device))
        for b in range(3):
            kept = mask[b].nonzero()[:, 0]
            real = [t[b : b + 1, :, kept.to(device)] for t in (q, k, v)]
            alone = dense_float64(real, cells[b, kept[1:] - 1].to(device), slopes, 1)
            self.compare(got[b : b + 1, :, kept.to(device)], alone, torch.float32)
        assert not bool(got[1, :, 31:].any())

    def test_gradients_equal_those_of_float64(self) -> None:
        case = Case(num_tokens=70, heads=3)
        leaves = [x.to(self.device, torch.float32).requires_grad_() for x in case.qkv()]
        exact = [x.detach().double().requires_grad_() for x in leaves]
        cells, slopes = case.cells().to(self.device), alibi_slopes(3)
        out = self.attend(*leaves, cells, slopes)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(
            self.device
        )
        dense = dense_float64(exact, cells, slopes, 1)
        got = torch.autograd.grad((out * weight).sum(), leaves)
        wanted = torch.autograd.grad((dense * weight.double()).sum(), exact)
        for got_x, wanted_x in zip(got, wanted, strict=True):
            self.compare(got_x, wanted_x, torch.float32)


def dense_float64(
    qkv: Sequence[torch.Tensor],
    cells: torch.Tensor,
    slopes: torch.Tensor,
    num_prefix: int,
) -> torch.Tensor:
    """Attention with the bias in full, in float64, head by head: written for this suite alone."""
    q, k, v = qkv
    bias = torch.zeros(q.shape[2], q.shape[2], dtype=torch.float64, device=q.device)
    bias[num_prefix:, num_prefix:] = torch.hypot(
        (cells[:, None, 0] - cells[None, :, 0]).double(),
        (cells[:, None, 1] - cells[None, :, 1]).double(),
    )
    heads = []
    for h in range(q.shape[1]):
        logits = torch.einsum("bid,bjd->bij", q[:, h].double(), k[:, h].double())
        logits = logits / q.shape[-1] ** 0.5 - float(slopes[h]) * bias
        weights = torch.exp(logits - logits.amax(-1, keepdim=True))
        weights = weights / weights.sum(-1, keepdim=True)
        heads.append(torch.einsum("bij,bjd->bid", weights, v[:, h].double()))
    return torch.stack(heads, 1)
