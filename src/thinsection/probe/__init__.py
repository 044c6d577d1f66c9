"""Probes of frozen embeddings: linear, kNN, few-shot, slide, survival, robustness, segmentation.

Every default lives in a frozen protocol (`NANOPATH`, `EVA`, `PATHOBENCH`); every result carries it.
"""

from typing import TYPE_CHECKING

from thinsection.evaluation.cases import Groups, group_rows, table_groups
from thinsection.evaluation.rows import Predictions, Risks
from thinsection.probe.config import ProbeConfig
from thinsection.probe.data.sets import (
    CaseSet,
    RobustnessSet,
    Split,
    SurvivalSet,
    TileSet,
    make_split,
)
from thinsection.probe.protocol import (
    EVA,
    HONEST,
    NANOPATH,
    PATHOBENCH,
    Protocol,
    get_protocol,
)
from thinsection.probe.registry import PROBES
from thinsection.probe.result import ProbeResult, classified, tileset_result
from thinsection.registry import lazy_names

if TYPE_CHECKING:
    from thinsection.probe.probes.cases import slide_probe, survival_probe
    from thinsection.probe.probes.pathorob import robustness_probe
    from thinsection.probe.probes.tiles import fewshot_probe, knn_probe, linear_probe

# torch and scikit-learn are imported with what needs them
_LAZY = {
    "probes.cases": "slide_probe survival_probe",
    "probes.pathorob": "robustness_probe",
    "probes.tiles": "fewshot_probe knn_probe linear_probe",
}
__getattr__ = lazy_names(__name__, _LAZY)

__all__ = [
    "EVA",
    "HONEST",
    "NANOPATH",
    "PATHOBENCH",
    "PROBES",
    "CaseSet",
    "Groups",
    "Predictions",
]
__all__ += ["ProbeConfig", "ProbeResult", "Protocol", "Risks", "RobustnessSet", "Split"]
__all__ += [
    "SurvivalSet",
    "TileSet",
    "classified",
    "fewshot_probe",
    "get_protocol",
]
__all__ += ["group_rows", "knn_probe", "linear_probe", "make_split", "robustness_probe"]
__all__ += ["slide_probe", "survival_probe", "table_groups", "tileset_result"]
