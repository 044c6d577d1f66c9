"""A small stand-in for STAMP's ALiBi attention: names, call and order of its steps, plainly."""

import torch
from torch import nn

DIM, HEADS = 32, 4


class Scaler(nn.Module):
    """Divides by the running mean of what it saw in training."""

    def __init__(self) -> None:
        super().__init__()
        # nn.Buffer is not in PyTorch 2.4
        self.register_buffer("running_mean", torch.tensor([700.0]))

    def forward(self, x):  # type: ignore[no-untyped-def]
        if self.training:
            self.running_mean.copy_((self.running_mean + x.mean()) / 2)
        return x / self.running_mean


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale_distance, self.bias_scale = Scaler(), nn.Parameter(torch.rand(1))
        self.dense_calls = 0

    def forward(self, *, q, k, v, coords_q, coords_k, attn_mask, alibi_mask):  # type: ignore[no-untyped-def]
        self.dense_calls += 1
        steps = coords_q[:, :, None] - coords_k[:, None]
        bias = self.scale_distance(steps.norm(dim=-1)) * self.bias_scale
        if alibi_mask is not None:
            bias = bias.where(~alibi_mask, 0.0)
        weights = torch.softmax(q @ k.mT * k.shape[-1] ** -0.5, -1) - bias
        if attn_mask is not None:
            weights = weights.where(~attn_mask, 0.0)
        return weights @ v


class MultiHeadALiBi(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        names = ("query_encoders", "key_encoders", "value_encoders")
        for name in names:
            setattr(
                self,
                name,
                nn.ModuleList(nn.Linear(DIM, DIM // HEADS) for _ in range(HEADS)),
            )
        self.attentions = nn.ModuleList(Head() for _ in range(HEADS))
        self.fc = nn.Linear(DIM, DIM)

    def forward(self, *, q, k, v, coords_q, coords_k, attn_mask, alibi_mask):  # type: ignore[no-untyped-def]
        heads = [
            head(
                q=q_of(q), k=k_of(k), v=v_of(v), coords_q=coords_q, coords_k=coords_k,
                attn_mask=attn_mask, alibi_mask=alibi_mask,
            )
            for q_of, k_of, v_of, head in zip(
                self.query_encoders, self.key_encoders, self.value_encoders,
                self.attentions, strict=True,
            )
        ]  # fmt: skip
        return self.fc(torch.cat(heads, -1))


class Model(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MultiHeadALiBi(), MultiHeadALiBi()])

    def forward(self, x, coords, mask=None):  # type: ignore[no-untyped-def]
        square = None if mask is None else mask[:, :, None] & mask[:, None]
        corner = None
        if square is not None:
            corner = torch.zeros_like(square)
            corner[:, 0] = corner[:, :, 0] = True
        for layer in self.layers:
            x = x + layer(
                q=x, k=x, v=x, coords_q=coords, coords_k=coords,
                attn_mask=square, alibi_mask=corner,
            )  # fmt: skip
        return x


def model() -> Model:
    """Seeded weights."""
    torch.manual_seed(0)
    return Model().eval()


def dense_calls(stamp: Model) -> int:
    return sum(m.dense_calls for m in stamp.modules() if isinstance(m, Head))
