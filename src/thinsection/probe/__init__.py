"""Probes of frozen embeddings: linear, kNN, few-shot, slide, survival, robustness, segmentation.

Every default lives in a frozen protocol (`NANOPATH`, `EVA`, `PATHOBENCH`); every result carries it.
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
from thinsection.probe.groups import Groups, group_rows, table_groups
from thinsection.probe.protocol import EVA, HONEST, NANOPATH, PATHOBENCH, Protocol, get_protocol
from thinsection.probe.registry import PROBES
from thinsection.probe.result import Predictions, ProbeResult, Risks, classified, tileset_result

if TYPE_CHECKING:
    from thinsection.probe.probes.cases import abmil_probe as abmil_probe
    from thinsection.probe.probes.cases import slide_probe as slide_probe
    from thinsection.probe.probes.cases import survival_probe as survival_probe
    from thinsection.probe.probes.pathorob import robustness_probe as robustness_probe
    from thinsection.probe.probes.tiles import fewshot_probe as fewshot_probe
    from thinsection.probe.probes.tiles import knn_probe as knn_probe
    from thinsection.probe.probes.tiles import linear_probe as linear_probe

_FILES = {
    **dict.fromkeys(("abmil_probe", "slide_probe", "survival_probe"), "cases"),
    **dict.fromkeys(("fewshot_probe", "knn_probe", "linear_probe"), "tiles"),
    "robustness_probe": "pathorob",
}

__all__ = ["EVA", "HONEST", "NANOPATH", "PATHOBENCH", "PROBES", "CaseSet", "Groups", "Predictions"]
__all__ += ["ProbeConfig", "ProbeResult", "Protocol", "Risks", "RobustnessSet", "Split"]
__all__ += ["SurvivalSet", "TileSet", "classified", "get_protocol", "group_rows", "make_split"]
__all__ += ["table_groups", "tileset_result", *_FILES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:  # torch and scikit-learn are imported with what needs them
    if name in _FILES:
        return getattr(import_module(f"thinsection.probe.probes.{_FILES[name]}"), name)
    raise AttributeError(f"module 'thinsection.probe' has no attribute {name!r}")
