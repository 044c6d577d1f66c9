"""A check whose area somebody else computed: pixels of a segmenter's classes."""

from dataclasses import replace

from thinsection.arrays import morphology
from thinsection.qc.checks.check import Outcome, QcCheck, QcView, area


class ClassCheck(QcCheck, kind="class"):
    """Removes pixels of the segmenter's classes that the table `[segmenter.classes]` gives it."""

    # as in that table
    name: str = "class"
    # True: the area is removed even if it is most of the tissue
    sure: bool = False
    # smaller finds are dropped
    min_area: str = area("0 um2")

    def __call__(self, view: QcView) -> Outcome:
        found = morphology.drop_small(
            view.ns, view.class_areas[self.name], view.area_px(self.min_area)
        )
        outcome = view.left_regions(
            view.mask_use & ~found, f"{self.name}_removed", found
        )
        return replace(outcome, enforce=True, sure_area=found if self.sure else None)
