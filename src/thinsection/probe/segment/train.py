"""The segmentation head, and its training and scoring from any source of feature batches.

A MaskTransformer compares patch tokens and learned class tokens by cosine. Shapes: B images,
T = g * g tokens of D channels, K classes, C = width of the head. The order of images, the weights
and every operation are the same whether features come from RAM or from the cache, so that losses
and scores agree to the bit.

Source: Strudel et al., Segmenter, arXiv:2105.05633, as THUNDER and nanopath use it.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from thinsection.errors import require
from thinsection.probe.protocol import Geometry, SegmentSettings
from thinsection.probe.statistics import Counts, IndexArray, image_counts
from thinsection.store.cache import FeatureCache

INIT_STD, NORM_EPS = 0.02, 1e-5
LabelImages = npt.NDArray[np.uint8]  # (N, H, W)
Pair = tuple[LabelImages, LabelImages]  # truth, prediction


class Block(nn.Module):
    """Pre-norm transformer block: attention with biases, exact GELU, no dropout."""

    def __init__(self, width: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width, eps=NORM_EPS)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width, eps=NORM_EPS)
        self.up = nn.Linear(width, mlp)
        self.down = nn.Linear(mlp, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T + K, C] -> the same shape."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))  # type: ignore[no-any-return]


class MaskTransformer(nn.Module):
    """[B, T, D] tokens -> [B, K, g, g] class scores per token."""

    def __init__(self, dim: int, num_classes: int, settings: SegmentSettings) -> None:
        super().__init__()
        width = settings.width
        self.project = nn.Linear(dim, width)
        self.class_tokens = nn.Parameter(torch.empty(1, num_classes, width))
        blocks = (Block(width, settings.heads, settings.mlp) for _ in range(settings.blocks))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.patch_projection = nn.Parameter(torch.empty(width, width))
        self.class_projection = nn.Parameter(torch.empty(width, width))
        self.norm_scores = nn.LayerNorm(num_classes, eps=NORM_EPS)

    def forward(self, tokens: Tensor) -> Tensor:
        num_classes = self.class_tokens.shape[1]
        x = torch.cat([self.project(tokens), self.class_tokens.expand(len(tokens), -1, -1)], dim=1)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        patches = F.normalize(x[:, :-num_classes] @ self.patch_projection, dim=-1)
        classes = F.normalize(x[:, -num_classes:] @ self.class_projection, dim=-1)
        scores = self.norm_scores(patches @ classes.transpose(1, 2))
        edge = grid_edge(tokens.shape[1])
        return scores.transpose(1, 2).reshape(len(x), num_classes, edge, edge)  # type: ignore[no-any-return]


def grid_edge(num_tokens: int) -> int:
    """g of T = g * g tokens; raises InvalidInputError where T is no square."""
    edge, remedy = (
        math.isqrt(num_tokens),
        "the encoder must give patch tokens without prefix tokens",
    )
    require(edge * edge == num_tokens, "tokens must form a square grid", f"{num_tokens}; {remedy}")
    return edge


def initial_head(
    dim: int, num_classes: int, settings: SegmentSettings, generator: torch.Generator
) -> MaskTransformer:
    """A head whose weights come from the generator alone: truncated normal 0.02, P and C scaled."""
    with torch.device("meta"):
        head = MaskTransformer(dim, num_classes, settings)
    head = head.to_empty(device="cpu")
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=INIT_STD, generator=generator)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()  # ones and zeros
    nn.init.trunc_normal_(head.class_tokens, std=INIT_STD, generator=generator)
    for projection in (head.patch_projection, head.class_projection):
        nn.init.normal_(projection, std=settings.width**-0.5, generator=generator)
    return head


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFit:
    """A trained head and how it came about."""

    head: MaskTransformer  # at the epoch of the best validation loss
    best_epoch: int  # from 1; the first one on ties
    train_losses: list[float]  # mean over batches of each epoch, however small the last
    val_losses: list[float]
    train_loss_first: float  # of the first batch, before any step
    counts: Counts  # confusion matrices (N, K, K) of the validation images


def dice_loss(scores: Tensor, labels: Tensor, smooth: float) -> Tensor:
    """1 - mean over classes of (2 I + s) / (U + s), I and U over batch and space, s `smooth`.

    `scores`: [B, K, H, W] before the softmax; `labels`: int64 [B, H, W].
    """
    probability = scores.softmax(dim=1)
    truth = F.one_hot(labels, scores.shape[1]).permute(0, 3, 1, 2).to(probability.dtype)
    overlap = (probability * truth).sum(dim=(0, 2, 3))
    total = (probability + truth).sum(dim=(0, 2, 3))
    return 1 - ((2 * overlap + smooth) / (total + smooth)).mean()


def upsampled(scores: Tensor, settings: SegmentSettings, geometry: Geometry) -> Tensor:
    """[B, K, g, g] -> [B, K, px, px] to hold against the label.

    'compatible' stretches the crop's prediction over the whole label, as the suite does: away from
    the centre, prediction and label part by up to (image_px - crop_px) / 2 px. 'correct' gives the
    crop's own px; the label is cropped alike.
    """
    edge = settings.image_px if geometry == "compatible" else settings.crop_px
    return F.interpolate(scores, size=(edge, edge), mode="bilinear", align_corners=False)


def label_window(labels: LabelImages, settings: SegmentSettings, geometry: Geometry) -> LabelImages:
    """The part of the labels that is trained on and scored; a view."""
    if geometry == "compatible":
        return labels
    margin = (settings.image_px - settings.crop_px) // 2
    return labels[:, margin : margin + settings.crop_px, margin : margin + settings.crop_px]


@dataclass(frozen=True, slots=True)
class SegmentTrainer:
    """One training: the data, what decides the score, and where it computes.

    Memory: the head with Adam's state (4 times 768 D + 15.4 M parameters in float32), activations
    of one batch, and what the features' source takes.
    """

    features: FeatureCache  # or what has its `shape` and `batches`
    labels: LabelImages
    num_classes: int
    settings: SegmentSettings
    geometry: Geometry
    device: torch.device

    def fit(self, train: IndexArray, val: IndexArray, *, seed: int) -> SegmentFit:
        """Trains on rows `train`, keeps the epoch with the best dice loss on rows `val`."""
        generator, s, k = torch.Generator().manual_seed(seed), self.settings, self.num_classes
        head = initial_head(self.features.shape[2], k, s, generator).to(self.device)
        optimizer = torch.optim.Adam(head.parameters(), lr=s.lr, weight_decay=s.weight_decay)
        best: dict[str, Any] = {}
        history: list[tuple[float, float, float]] = []  # first, train and val loss of an epoch
        for epoch in range(1, s.epochs + 1):
            order = train[torch.randperm(len(train), generator=generator).numpy()]
            loss, first = self._epoch(head, order, optimizer)
            val_loss, _ = self._epoch(head, val)
            found = f"{loss} in epoch {epoch}; scale the features"
            require(math.isfinite(loss + val_loss), "training loss must stay finite", found)
            if val_loss < min((past[2] for past in history), default=math.inf):
                best = copy.deepcopy(head.state_dict())
            history.append((first, loss, val_loss))
        head.load_state_dict(best)
        first_losses, train_losses, val_losses = map(list, zip(*history, strict=True))
        return SegmentFit(
            head=head,
            best_epoch=1 + int(np.argmin(val_losses)),
            train_losses=train_losses,
            val_losses=val_losses,
            train_loss_first=first_losses[0],
            counts=np.concatenate([image_counts(*p, k) for p in self.predict(head, val)]),
        )

    def _epoch(
        self, head: MaskTransformer, rows: IndexArray, optimizer: Optimizer | None = None
    ) -> tuple[float, float]:
        """Dice loss of rows in their order, mean over batches as the suite has it, and the first's.

        With an optimizer the head is trained on each batch.
        """
        losses = []
        with torch.set_grad_enabled(optimizer is not None):
            for scores, labels in self._scored(head, rows):
                loss = dice_loss(scores, labels, self.settings.dice_smooth)
                if optimizer is not None:
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                losses.append(loss.detach())
        values = np.array([float(loss) for loss in losses])
        return float(values.mean()), float(values[0])

    def predict(self, head: MaskTransformer, rows: IndexArray) -> Iterator[Pair]:
        """uint8 (truth, prediction) of rows, batch by batch, in the frame that is scored."""
        with torch.no_grad():
            for scores, labels in self._scored(head, rows):
                yield labels.byte().cpu().numpy(), scores.argmax(dim=1).byte().cpu().numpy()

    def _scored(self, head: MaskTransformer, rows: IndexArray) -> Iterator[tuple[Tensor, Tensor]]:
        """(scores, labels) of each batch on the device."""
        done = 0
        for tokens in self.features.batches(rows, self.settings.batch_size, device=self.device):
            truth = self.labels[rows[done : done + len(tokens)]]
            truth = np.ascontiguousarray(label_window(truth, self.settings, self.geometry))
            labels = torch.from_numpy(truth).to(self.device).long()
            yield upsampled(head(tokens), self.settings, self.geometry), labels
            done += len(tokens)
