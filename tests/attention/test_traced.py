"""torch.func, torch.compile and torch.export give the same attention, or say at once why not."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from thinsection.attention import alibi2d_attention, alibi_slopes
from thinsection.attention.api import Impl
from thinsection.errors import (
    BudgetError,
    ConfigError,
    DeviceError,
    InvalidInputError,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of PyTorch while it traces
SLOPES = alibi_slopes(4)
TOLERANCE = 4e-6


def inputs(
    batch: int = 2,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v [B, 4, 21, 16] with two prefix tokens, and cells [B, 19, 2]."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, batch, 4, 21, 16, generator=generator)
    return q, k, v, torch.randint(0, 9, (batch, 19, 2), generator=generator)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cells: torch.Tensor,
    impl: Impl = "auto",
) -> torch.Tensor:
    return alibi2d_attention(
        q, k, v, cells, SLOPES, num_prefix_tokens=2, scale=0.3, impl=impl
    )


def wanted() -> torch.Tensor:
    q, k, v, cells = inputs()
    return attend(q.double(), k.double(), v.double(), cells, impl="reference")


def assert_same(got: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), other.double(), rtol=0, atol=TOLERANCE)


def test_vmap_over_slides_of_their_own_cells() -> None:
    def one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, c: torch.Tensor):  # type: ignore[no-untyped-def]
        return attend(q[None], k[None], v[None], c)[0]

    assert_same(torch.func.vmap(one)(*inputs()), wanted())


def test_gradients_of_torch_func_are_those_of_backward() -> None:
    q, k, v, cells = inputs()
    got = torch.func.grad(lambda x: attend(x, k, v, cells).square().sum())(q)
    x = q.clone().requires_grad_()
    (plain,) = torch.autograd.grad(
        attend(x, k, v, cells, impl="chunked").square().sum(), x
    )
    assert_same(got, plain)
    per_slide = torch.func.vmap(
        torch.func.grad(
            lambda a, b, c, d: attend(a[None], b[None], c[None], d).square().sum()
        )
    )(q, k, v, cells)
    assert_same(per_slide, plain)


@pytest.mark.parametrize("impl", ["flex", "reference"])
def test_a_whole_graph_by_torch_compile(impl: Impl) -> None:
    compiled = torch.compile(
        lambda q, k, v, cells: attend(q, k, v, cells, impl),
        fullgraph=True,
        backend="eager",
    )
    assert_same(compiled(*inputs()), wanted())


def test_blocks_interrupt_a_graph_and_a_whole_graph_says_why() -> None:
    compiled = torch.compile(attend, backend="eager")
    assert_same(compiled(*inputs()), wanted())
    torch._dynamo.reset()
    whole = torch.compile(attend, fullgraph=True, backend="eager")
    reason = r"depend on values, .* pass impl='flex' or impl='reference'"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=reason):
        whole(*inputs())


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_takes_other_values(strict: bool) -> None:
    class Network(torch.nn.Module):
        def forward(self, *x):  # type: ignore[no-untyped-def]
            return attend(*x)

    other = tuple(torch.zeros_like(x) for x in inputs())
    program = torch.export.export(Network(), other, strict=strict)
    assert_same(program.module()(*inputs()), wanted())


def vmapped(**options: Any) -> Callable[[], torch.Tensor]:
    q, k, v, cells = inputs()
    arguments: dict[str, Any] = {"num_prefix_tokens": 2, **options}

    def one(a: torch.Tensor) -> torch.Tensor:
        got = alibi2d_attention(a[None], k[:1], v[:1], cells[:1], SLOPES, **arguments)
        return got[0]

    return lambda: torch.func.vmap(one)(q)


def test_what_a_transform_cannot_do_is_said_at_once() -> None:
    mask = torch.ones(1, 21, dtype=torch.bool)
    for options, error, message in (
        (
            {"impl": "chunked"},
            ConfigError,
            "'auto' or 'reference' within a transform",
        ),
        ({"key_mask": mask}, InvalidInputError, "key_mask and out must be None"),
        ({"budget_bytes": 1000}, BudgetError, "'reference' needs .* for T=21"),
        ({"num_prefix_tokens": 22}, InvalidInputError, r"must be in 0\.\.21, got 22"),
    ):
        with pytest.raises(error, match=message):
            vmapped(**options)()


def test_flex_by_itself_needs_a_gpu() -> None:
    with pytest.raises(DeviceError, match="'flex' needs a CUDA device"):
        attend(*inputs(), impl="flex")


def test_pytorchs_compiler_is_imported_only_where_it_is_used() -> None:
    """Its import takes seconds and makes a folder in TMPDIR."""
    code = (
        "import sys, torch\n"
        "from thinsection.attention import alibi2d_attention\n"
        "q = torch.ones(1, 1, 5, 16)\n"
        "cells = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])\n"
        "alibi2d_attention(q, q, q, cells, torch.ones(1))\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
