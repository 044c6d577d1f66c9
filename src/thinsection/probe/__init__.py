"""Probes of frozen embeddings: linear, kNN, few-shot, slide, survival, robustness; splits, metrics.

Every default lives in a frozen protocol (`NANOPATH`, `EVA`, `PATHOBENCH`); every result carries it.
"""

from thinsection.probe.abmil import abmil_probe
from thinsection.probe.cases import CaseSet, SurvivalSet
from thinsection.probe.config import ProbeConfig
from thinsection.probe.examples import Split, TileSet, make_split
from thinsection.probe.fewshot import fewshot_probe
from thinsection.probe.knn import knn_probe
from thinsection.probe.linear import linear_probe
from thinsection.probe.protocol import EVA, NANOPATH, PATHOBENCH, Protocol, get_protocol
from thinsection.probe.result import Predictions, ProbeResult, Risks
from thinsection.probe.robustness import RobustnessSet, robustness_probe
from thinsection.probe.slide import slide_probe
from thinsection.probe.survival import survival_probe
from thinsection.probe.tileset import tileset_result

__all__ = [
    "EVA",
    "NANOPATH",
    "PATHOBENCH",
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
    "abmil_probe",
    "fewshot_probe",
    "get_protocol",
    "knn_probe",
    "linear_probe",
    "make_split",
    "robustness_probe",
    "slide_probe",
    "survival_probe",
    "tileset_result",
]
