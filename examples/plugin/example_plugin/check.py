"""A quality check: removes a strip at the left border of the slide."""

# --8<-- [start:check]
from dataclasses import dataclass
from typing import ClassVar

from thinsection.qc import Outcome, QcCheck, QcView, length


@dataclass(frozen=True, kw_only=True)
class LeftStrip(QcCheck):
    """Removes what lies left of a line."""

    kind: ClassVar[str] = "left_strip"  # the name of the entry point

    # the fields are the settings of a [[check]] table
    name: str = "left_strip"
    width: str = length("100 um")

    def __call__(self, view: QcView) -> Outcome:
        """The usable tissue without the strip."""
        # `ns.xp` is NumPy, or CuPy on a GPU
        strip = view.ns.xp.zeros_like(view.mask_use)
        strip[:, : round(view.length_px(self.width))] = True
        return view.left(view.mask_use & ~strip, self.name)


# --8<-- [end:check]
