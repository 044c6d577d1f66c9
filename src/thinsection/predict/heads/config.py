"""The settings of heads, and the heads by name; torch is imported with the head that is built."""

from dataclasses import dataclass
from typing import Any

from thinsection.config import option
from thinsection.registry import Entry, Registry

# tiles that are projected at a time in inference; a longer bag has no copy of its width
BLOCK_ROWS = 4096
# heads that read a bag in blocks (`Head.reads_blocks`), or only its mean (`Head.reads_mean`)
BLOCK_HEADS = ("linear", "mlp", "abmil", "clam_sb", "clam_mb", "dsmil")
_PLACE = "thinsection.predict.heads"
# `head.load_head` gives an entry its type: this file is read by the command line, without torch
HEADS: Registry[Any] = Registry(
    "head",
    "thinsection.heads",
    [
        Entry(
            name="linear",
            help="Linear on the mean of the rows; on slide embeddings too.",
            target=f"{_PLACE}.pooled:LinearHead",
        ),
        Entry(
            name="mlp",
            help="Two layers on the mean of the rows; on slide embeddings too.",
            target=f"{_PLACE}.pooled:MlpHead",
        ),
        Entry(
            name="abmil",
            help="Gated attention (Ilse 2018).",
            target=f"{_PLACE}.pooled:AbmilHead",
        ),
        Entry(
            name="clam_sb",
            help="CLAM, one attention, instance loss (Lu 2021).",
            target=f"{_PLACE}.pooled:ClamHead",
        ),
        Entry(
            name="clam_mb",
            help="CLAM, an attention a class, instance loss.",
            target=f"{_PLACE}.pooled:ClamBranchesHead",
        ),
        Entry(
            name="dsmil",
            help="Dual stream around the critical tile (Li 2021).",
            target=f"{_PLACE}.pooled:DsmilHead",
        ),
        Entry(
            name="transmil",
            help="Nyström attention, convolutions for place (Shao 2021).",
            target=f"{_PLACE}.tokens:TransmilHead",
        ),
        Entry(
            name="transformer",
            help="Attention with 2-D ALiBi in O(N) memory.",
            target=f"{_PLACE}.tokens:TransformerHead",
        ),
    ],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Settings of a head; CLAM's and MIL-Lab's defaults."""

    head: str = option(
        "abmil",
        "Model that is trained. linear, mlp: mean embedding; abmil, clam_sb, clam_mb, "
        "dsmil: attention over tiles; transmil, transformer: also self-attention between tiles.",
        daily=True,
        choices=HEADS.names,
    )
    hidden_dim: int = option(
        512, "Channels to which an embedding is projected; 0 means no projection."
    )
    attention_dim: int = option(256, "Hidden channels of the gated attention.")
    dropout: float = option(0.25, "Share of channels that are dropped during training.")
    num_layers: int = option(2, "Number of layers of the head transformer.")
    num_heads: int = option(8, "Attention heads of transmil and transformer.")
    instances: int = option(
        8,
        "CLAM: number of tiles with the highest and with the lowest attention in the "
        "instance loss.",
    )
    instance_weight: float = option(
        0.3, "CLAM: weight of the instance loss; the loss of the case has the rest."
    )
    subtyping: bool = option(
        False,
        "CLAM: tiles of one class are negative examples for the others. Use it for "
        "classes that exclude each other.",
    )
