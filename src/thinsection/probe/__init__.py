"""Probes of frozen embeddings: linear, kNN, few-shot, slide, survival, robustness; splits, metrics.

Every default lives in a frozen protocol (`NANOPATH`, `EVA`, `PATHOBENCH`); every result carries it.
"""

from thinsection.probe.examples import Split, TileSet, make_split
from thinsection.probe.fewshot import fewshot_probe
from thinsection.probe.knn import knn_probe
from thinsection.probe.linear import linear_probe
from thinsection.probe.protocol import EVA, NANOPATH, PATHOBENCH, Protocol, get_protocol
from thinsection.probe.result import Predictions, ProbeResult

__all__ = [
    "EVA",
    "NANOPATH",
    "PATHOBENCH",
    "Predictions",
    "ProbeResult",
    "Protocol",
    "Split",
    "TileSet",
    "fewshot_probe",
    "get_protocol",
    "knn_probe",
    "linear_probe",
    "make_split",
]
