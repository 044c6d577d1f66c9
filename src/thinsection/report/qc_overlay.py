"""What quality control marked, as layers over a slide's picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinsection.report.layers import Layer, Outline, Tint

if TYPE_CHECKING:
    from thinsection.qc.result import QcResult


def overlay_layers(result: QcResult) -> list[Layer]:
    """Layers of the overlay: passed tissue is unchanged, other areas lighter, the largest first."""
    use = result.mask_use
    num_px = max(1, use.size)
    glass_checks = {
        check.name
        for check in result.pipeline.checks
        if check.removes_glass or check.fills
    }
    taken = {
        name: mask & ~use
        for name, mask in result.masks.items()
        if name not in glass_checks
    }
    counts = {name: int(mask.sum()) for name, mask in taken.items()}
    layers: list[Layer] = [Tint(~use, color=(255, 255, 255), opacity=0.5)]
    for name in sorted(counts, key=lambda name: -counts[name]):
        if counts[name]:
            words = name.replace("_", " ")
            label = f"{words}, {counts[name] / num_px:.2%} of the slide"
            layers.append(Tint(taken[name], label, result.colors[name]))
    what = "tissue without artefacts" if taken else "tissue"
    layers.append(Outline(use, f"{what}, {use.mean():.1%} of the slide"))
    return layers
