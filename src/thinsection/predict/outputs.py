"""Outputs of heads for a bag in its files, which is read in blocks if the heads allow it."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from thinsection.predict.bags import StoredBag
from thinsection.predict.heads.config import BLOCK_ROWS
from thinsection.predict.heads.head import Head, HeadOutput, Survey


def reads_whole(head: Head | type[Head]) -> bool:
    """True if a head holds all tiles of a bag."""
    return not (head.reads_blocks or head.reads_mean)


def outputs_of(
    heads: Mapping[int, Head],
    bag: StoredBag,
    device: torch.device,
    *,
    covariates: Tensor | None,
) -> Iterator[tuple[int, HeadOutput]]:
    """Yields the key of each head and its output; all heads are of the same kind.

    Memory: a head that reads blocks: four blocks of BLOCK_ROWS x D values, and its values of all
    tiles (`Head.of_block`). A head of the mean: one block. Another head: the bag, 4 N D bytes, and
    its own memory (`Head.forward`).
    """
    first = next(iter(heads.values()))
    if reads_whole(first):
        features, cells, _ = bag.read(cells=first.needs_cells).tensors(device)
        for key, head in heads.items():
            yield key, head(features, cells, covariates)
    elif first.reads_mean:
        mean = torch.from_numpy(bag.mean().astype(np.float32)).to(device)
        for key, head in heads.items():
            yield key, head(mean[None], None, covariates)
    else:
        values = _values_of_blocks(heads, bag, device)
        for key, head in heads.items():
            yield key, head.of_case(values.pop(key), covariates)


def _values_of_blocks(
    heads: Mapping[int, Head], bag: StoredBag, device: torch.device
) -> dict[int, list[Tensor]]:
    """Values of all tiles for each head; the heads share each block.

    A block is read once, and twice for a head that surveys the bag.
    """
    surveys: dict[int, Survey] = dict.fromkeys(heads, ())
    if any(head.surveys for head in heads.values()):
        for block in bag.blocks(BLOCK_ROWS):
            tensor = torch.from_numpy(block).to(device)
            for key, head in heads.items():
                surveys[key] = head.survey(tensor, surveys[key])
    values: dict[int, list[Tensor]] = {}
    start = 0
    for block in bag.blocks(BLOCK_ROWS):
        end = start + len(block)
        tensor = torch.from_numpy(block).to(device)
        for key, head in heads.items():
            survey = (surveys[key],) if head.surveys else ()
            parts = head.of_block(tensor, *survey)
            # small tensors that are kept between the blocks would split the freed memory
            if key not in values:
                values[key] = [
                    part.new_empty(len(bag), *part.shape[1:]) for part in parts
                ]
            for whole, part in zip(values[key], parts, strict=True):
                whole[start:end] = part
        start = end
    return values
