"""Where weights came from, and what a model that uses them is called in a folder of results."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a model's weights came from, as its loader was asked."""

    name: str | None = (
        None  # what the model is called in a label; None: the name in its registry
    )
    revision: str | None = (
        None  # commit on the hub; None where they did not come from there
    )
    own_weights: bool = (
        False  # whether the caller brought them: a local checkpoint, or `weights`
    )
    # what was read of them, with its folder; None where that is not all that decides what they are
    files: tuple[str, ...] | None = None
    seed: int | None = None  # of random weights; None: published or own ones

    def label(self, name: str, *, precision: str, weights_hash: str | None) -> str:
        """A readable folder name: 'uni2_h_bf16', own weights 'uni_w1a2b3c', random 'uni_seed0'."""
        half = "" if precision == "fp32" else precision
        own = (
            f"w{weights_hash[:6]}"
            if self.own_weights and weights_hash is not None
            else ""
        )
        seed = "" if self.seed is None else f"seed{self.seed}"
        return "_".join(filter(None, (slug(self.name or name), half, own, seed)))

    def identity(
        self, name: str, *, precision: str, weights_hash: str | None
    ) -> dict[str, str]:
        """Name, weights_hash and precision; and for the record the revision on the hub, if any.

        The hash sees every weight: two revisions of equal weights give the same results.
        """
        found = {
            "name": name,
            "weights_hash": weights_hash or "",
            "precision": precision,
        }
        return found | ({"revision": self.revision} if self.revision else {})


def slug(name: str) -> str:
    """A name as a file name: 'timm:resnet18' is 'timm-resnet18'; commits keep seven digits."""
    short = re.sub("[0-9a-f]{40}", lambda commit: commit[0][:7], name)
    return re.sub(r"[^\w.]+", "-", short, flags=re.ASCII).strip("-.") or "model"
