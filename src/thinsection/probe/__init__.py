"""Probes of frozen embeddings: linear, kNN, few-shot, slide, survival, robustness, segmentation.

Every default lives in a frozen protocol (`NANOPATH`, `EVA`, `PATHOBENCH`); every result carries it.
The probes' functions are resolved on first use: they need torch or scikit-learn.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from thinsection.probe.config import ProbeConfig
from thinsection.probe.data.sets import (
    CaseSet,
    RobustnessSet,
    Split,
    SurvivalSet,
    TileSet,
    make_split,
)
from thinsection.probe.protocol import EVA, NANOPATH, PATHOBENCH, Protocol, get_protocol
from thinsection.probe.registry import PROBES
from thinsection.probe.result import Predictions, ProbeResult, Risks, classified, tileset_result

if TYPE_CHECKING:
    from thinsection.probe.probes.fewshot import fewshot_probe as fewshot_probe
    from thinsection.probe.probes.knn import knn_probe as knn_probe
    from thinsection.probe.probes.linear import linear_probe as linear_probe
    from thinsection.probe.probes.robustness import robustness_probe as robustness_probe
    from thinsection.probe.probes.slide import abmil_probe as abmil_probe
    from thinsection.probe.probes.slide import slide_probe as slide_probe
    from thinsection.probe.probes.survival import survival_probe as survival_probe

_LAZY = {
    **{f"{name}_probe": name for name in ("fewshot", "knn", "linear", "robustness", "survival")},
    **{"abmil_probe": "slide", "slide_probe": "slide"},
}

__all__ = [  # noqa: PLE0604
    "EVA",
    "NANOPATH",
    "PATHOBENCH",
    "PROBES",
    "CaseSet",
    "Predictions",
    "ProbeConfig",
    "ProbeResult",
    "Protocol",
    "Risks",
    "RobustnessSet",
    "Split",
    "SurvivalSet",
    "TileSet",
    "classified",
    "get_protocol",
    "make_split",
    "tileset_result",
    *_LAZY,
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"thinsection.probe.probes.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'thinsection.probe' has no attribute {name!r}")
