"""A small network of one's own with our attention: it learns, by the dense gradients."""

from collections.abc import Callable

import pytest
import torch
from tests.support.plain_gigapath import plain_dilated
from torch import Tensor, nn
from torch.nn import functional as F

from thinsection.attention import (
    Branch,
    alibi2d_attention,
    alibi_slopes,
    dilated_attention,
)

HEADS = 4
DIM = 16
STEPS = 50
# largest difference from the dense gradient, relative to its largest value; float32
TOLERANCE = 2e-5
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
PLAIN = ((6, 1), (16, 2))


def alibi(prefix: int, impl: str = "chunked") -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, cells: Tensor) -> Tensor:
        return alibi2d_attention(
            q,
            k,
            v,
            cells,
            alibi_slopes(HEADS),
            num_prefix_tokens=prefix,
            impl=impl,  # type: ignore[arg-type]
        )

    return attend


def dilated(q: Tensor, k: Tensor, v: Tensor, cells: Tensor) -> Tensor:
    branches = [Branch(length=s, dilation=r) for s, r in PLAIN]
    return dilated_attention(q, k, v, branches)


def dilated_dense(q: Tensor, k: Tensor, v: Tensor, cells: Tensor) -> Tensor:
    items = [
        plain_dilated(*(t.transpose(0, 1) for t in item), branches=PLAIN)
        for item in zip(q, k, v, strict=True)
    ]
    return torch.stack(items).transpose(1, 2)


class Network(nn.Module):
    """A layer of attention over tiles, with prefix tokens, and a classifier of their mean."""

    def __init__(self, attend: Attend, prefix: int) -> None:
        super().__init__()
        self.attend = attend
        self.prefix = nn.Parameter(torch.randn(prefix, DIM) * 0.02)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, 2)

    def forward(self, tiles: Tensor, cells: Tensor) -> Tensor:
        """Logits (B, 2) of bags (B, N, DIM)."""
        first = self.prefix.expand(len(tiles), -1, -1)
        x = torch.cat([first, tiles], dim=1)
        qkv = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv
        mixed = self.attend(q, k, v, cells).transpose(1, 2).flatten(2)
        return self.out(mixed[:, 0] if len(self.prefix) else mixed.mean(1))


def bags() -> tuple[Tensor, Tensor, Tensor]:
    """Bags of tiles on a grid; in those of class 1, two neighbouring tiles are alike."""
    generator = torch.Generator().manual_seed(0)
    tiles = torch.randn(8, 30, DIM, generator=generator)
    labels = torch.arange(8) % 2
    tiles[labels == 1, 10:13, :4] += 2.5
    cells = torch.stack([torch.arange(30) // 6, torch.arange(30) % 6], dim=1)
    return tiles, labels, cells


def gradients_of(network: Network, attend: Attend) -> Tensor:
    """Gradients of all parameters, one after another, with another attention in the network."""
    tiles, labels, cells = bags()
    own = network.attend
    network.attend = attend
    loss = F.cross_entropy(network(tiles, cells), labels)
    found = torch.autograd.grad(loss, [*network.parameters()])
    network.attend = own
    return torch.cat([gradient.flatten() for gradient in found])


@pytest.mark.parametrize(
    ("attend", "dense", "prefix"),
    [
        pytest.param(alibi(0), alibi(0, "reference"), 0, id="alibi without prefix"),
        pytest.param(alibi(1), alibi(1, "reference"), 1, id="alibi with cls"),
        pytest.param(alibi(3), alibi(3, "reference"), 3, id="alibi with three"),
        pytest.param(dilated, dilated_dense, 0, id="dilated without prefix"),
        pytest.param(dilated, dilated_dense, 1, id="dilated with cls"),
    ],
)
def test_the_loss_falls_in_fifty_steps_by_the_dense_gradients(
    attend: Attend, dense: Attend, prefix: int
) -> None:
    torch.manual_seed(0)
    network = Network(attend, prefix)
    tiles, labels, cells = bags()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        if step in (0, STEPS - 1):
            ours = gradients_of(network, attend)
            wanted = gradients_of(network, dense)
            assert wanted.abs().max() > 1e-5
            assert (ours - wanted).abs().max() <= TOLERANCE * wanted.abs().max()
        loss = F.cross_entropy(network(tiles, cells), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 0.5 and losses[-1] < 0.2 * losses[0], losses
