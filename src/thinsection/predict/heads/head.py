"""What every head offers.

Shapes: N rows of a bag (the tiles of a slide, or of all slides of a case; one row a slide where
they are slide embeddings), D channels of an embedding, H hidden ones, A attentions (1, or one an
output), K outputs: classes, values, a risk, intervals of time.

**Evidence.** `evidence[n, k]` is what tile n adds to logit k. In `additive` heads it is attention
times class evidence, a_n w_k . h_n, and evidence.sum(0) + bias = logits exactly (Javed et al.,
"Additive MIL", 2022, eq. 5, on a linear classifier). CLAM and MIL-Lab show the attention alone:
that is `attention`. What a head does beyond this is said in its docstring.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from thinsection.predict.heads.config import HeadConfig
from thinsection.types import CoordsL0

Criterion = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # logits (K,), target -> loss


class HeadOutput(NamedTuple):
    """Of one bag."""

    logits: torch.Tensor  # (K,)
    attention: torch.Tensor | None = None  # (N, A), a softmax over tiles
    evidence: torch.Tensor | None = None  # (N, K), see above
    instances: torch.Tensor | None = None  # (N, H or K), what `extra_loss` reads


class Head(nn.Module, ABC):
    """One bag in, its logits out; a bag is a batch of its own."""

    needs_cells = False  # whether `forward` reads coords
    bag_weight = 1.0  # of the bag's loss; the rest is of `extra_loss`
    needs_cells = False  # whether `forward` reads where tiles lie

    def __init__(self, dim: int, outputs: int, settings: HeadConfig) -> None:
        super().__init__()
        self.dim, self.outputs, self.settings = dim, outputs, settings

    @abstractmethod
    def forward(self, features: torch.Tensor, coords: torch.Tensor | None = None) -> HeadOutput:
        """Logits, attention and evidence of one bag.

        Args:
            features: (N, D) float32, N >= 1.
            coords: int64 (N, 2), column and row of each tile in units of tiles (`grid_cells`); only
                'transformer' reads them.

        Memory: 4 N (D + H + 3 attention_dim) bytes in inference unless the head says otherwise.
        """

    def extra_loss(
        self, output: HeadOutput, target: torch.Tensor, criterion: Criterion
    ) -> torch.Tensor:
        """What the method's authors add to the bag's loss; weighs 1 - `bag_weight`."""
        return output.logits.new_zeros(())

    def loss(self, output: HeadOutput, target: torch.Tensor, criterion: Criterion) -> torch.Tensor:
        """bag_weight * criterion(logits, target) + (1 - bag_weight) * extra_loss."""
        bag = criterion(output.logits, target)
        if self.bag_weight == 1:
            return bag
        extra = self.extra_loss(output, target, criterion)
        return self.bag_weight * bag + (1 - self.bag_weight) * extra


def grid_cells(slides: Sequence[tuple[CoordsL0, int]]) -> npt.NDArray[np.int64]:
    """Column and row (N, 2) of each tile of a bag; its slides lie side by side, 1,024 cells apart.

    Args:
        slides: for each slide its tiles' corners, level-0 px, and a tile's edge, level-0 px.
    """
    parts, left = [], 0
    for coords_l0, edge in slides:
        cells = (coords_l0 - coords_l0.min(0)) // edge + np.array([left, 0])
        left = int(cells[:, 0].max()) + 1024
        parts.append(cells)
    return np.concatenate(parts).astype(np.int64)
