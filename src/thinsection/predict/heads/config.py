"""The settings of heads, and the heads by name; torch is imported with the head that is built."""

from dataclasses import dataclass
from typing import Any

from thinsection.config import option
from thinsection.registry import Entry, Registry

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
            target=f"{_PLACE}.instances:ClamHead",
        ),
        Entry(
            name="clam_mb",
            help="CLAM, an attention a class, instance loss.",
            target=f"{_PLACE}.instances:ClamBranchesHead",
        ),
        Entry(
            name="dsmil",
            help="Dual stream around the critical tile (Li 2021).",
            target=f"{_PLACE}.instances:DsmilHead",
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

    head: str = option("abmil", "head on the embeddings", choices=HEADS.names)
    hidden_dim: int = option(
        512, "channels that an embedding is projected to; 0: no projection"
    )
    attention_dim: int = option(256, "hidden channels of gated attention")
    dropout: float = option(0.25, "share of channels dropped while training")
    num_layers: int = option(2, "layers of the transformer")
    num_heads: int = option(8, "attention heads of transmil and transformer")
    instances: int = option(
        8, "tiles of highest and of lowest attention in CLAM's loss"
    )
    instance_weight: float = option(
        0.3, "weight of CLAM's instance loss beside the bag's"
    )
    subtyping: bool = option(
        False, "CLAM: classes exclude each other, their tiles are negatives"
    )
