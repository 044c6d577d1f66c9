"""Origin of weights, and what a model that uses them is called in a folder of results."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Origin of a model's weights, as its loader was asked.

    Attributes:
        name: what the model is called in a label; None: the name in its registry.
        revision: commit on the hub; None where they did not come from there.
        own_weights: True where the caller brought them: a local checkpoint, or `weights`.
        files: what was read of them, with its folder; None where that is not all that decides what
            they are.
        seed: seed of random weights; None: published or own ones.
    """

    name: str | None = None
    revision: str | None = None
    own_weights: bool = False
    files: tuple[str, ...] | None = None
    seed: int | None = None

    def label(self, name: str, *, precision: str, weights_hash: str | None) -> str:
        """Returns a folder name: 'uni2_h_bf16', own weights 'uni_w1a2b3c', random 'uni_seed0'."""
        parts = [slug(self.name or name)]
        if precision != "fp32":
            parts.append(precision)
        if self.own_weights and weights_hash is not None:
            parts.append(f"w{weights_hash[:6]}")
        if self.seed is not None:
            parts.append(f"seed{self.seed}")
        return "_".join(parts)

    def identity(
        self, name: str, *, precision: str, weights_hash: str | None
    ) -> dict[str, str]:
        """Returns name, weights_hash and precision, and the revision on the hub, if any.

        The hash sees every weight: two revisions of equal weights give the same results.
        """
        identity = {
            "name": name,
            "weights_hash": weights_hash or "",
            "precision": precision,
        }
        if self.revision:
            identity["revision"] = self.revision
        return identity


def slug(name: str) -> str:
    """Makes a file name of a name: 'timm-resnet18' of 'timm:resnet18'; commits keep 7 digits."""
    short = re.sub("[0-9a-f]{40}", lambda commit: commit[0][:7], name)
    return re.sub(r"[^\w.]+", "-", short, flags=re.ASCII).strip("-.") or "model"
