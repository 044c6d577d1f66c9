"""The settings of heads, and the heads by name; torch is imported with the head that is built."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from thinsection.config import option
from thinsection.errors import ConfigError, require
from thinsection.registry import Entry, Registry

if TYPE_CHECKING:
    from thinsection.predict.heads.head import Head

_OURS = {
    "linear": (
        "head:LinearHead",
        "Linear on the mean of the rows; on slide embeddings too.",
    ),
    "mlp": (
        "head:MlpHead",
        "Two layers on the mean of the rows; on slide embeddings too.",
    ),
    "abmil": ("head:AbmilHead", "Gated attention (Ilse 2018)."),
    "clam_sb": ("head:ClamHead", "CLAM, one attention, instance loss (Lu 2021)."),
    "clam_mb": ("head:ClamBranchesHead", "CLAM, an attention a class, instance loss."),
    "dsmil": ("head:DsmilHead", "Dual stream around the critical tile (Li 2021)."),
    "transmil": (
        "tokens:TransmilHead",
        "Nyström attention, convolutions for place (Shao 2021).",
    ),
    "transformer": (
        "tokens:TransformerHead",
        "Attention with 2-D ALiBi in O(N) memory.",
    ),
}
HEADS: Registry[type["Head"]] = Registry(
    "head",
    "thinsection.heads",
    [
        Entry(name=n, help=h, target=f"thinsection.predict.heads.{t}")
        for n, (t, h) in _OURS.items()
    ],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a head is trained unless the user says otherwise.

    Attention heads stay near chance for some dozens of epochs before they find the tiles that
    matter, so patience is longer than that. docs/predictions.md compares each head with its
    authors' training.
    """

    lr: float = 5e-4
    epochs: int = 100
    patience: int = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Which head, and what it is made of; CLAM's and MIL-Lab's defaults."""

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


def build_head(settings: HeadConfig, dim: int, outputs: int) -> "Head":
    """A new head for embeddings (D,), initialised from torch's generator.

    `outputs` is K: two for two classes, whose probabilities are a softmax.

    Raises ConfigError: no such head, or settings that do not fit.
    """
    for field, low in {
        "attention_dim": 1,
        "num_heads": 1,
        "instances": 1,
        "hidden_dim": 0,
    }.items():
        found = getattr(settings, field)
        require(found >= low, f"{field} must be >= {low}", found, error=ConfigError)
    rule = "dropout must be in [0, 1)"
    require(0 <= settings.dropout < 1, rule, settings.dropout, error=ConfigError)
    return HEADS.load(settings.head)(dim, outputs, settings)
