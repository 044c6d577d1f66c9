"""The probes by name, what each wants, and how another package adds one (docs/own_probe.md).

A probe is a function `(data, config) -> ProbeResult`, or several results in a tuple. The types that
it declares say what is read for it (see `DATA_KINDS`) and which flags it has, its docstring is its
help. Probes whose `config` is a `ProbeConfig` run in a grid too. Torch and scikit-learn are
imported when a probe runs.
"""

import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from thinsection.errors import (
    DatasetError,
    InvalidInputError,
    ThinsectionError,
    naming_part,
)
from thinsection.probe.config import ProbeConfig, RobustnessConfig, SegmentConfig
from thinsection.probe.data.cases import load_cases, load_survival
from thinsection.probe.data.load import load_robustness, load_tiles, load_values
from thinsection.probe.data.sets import (
    LEFT_OUT,
    CaseSet,
    RobustnessSet,
    SurvivalSet,
    TileSet,
    ValueSet,
)
from thinsection.probe.result import ProbeResult, tileset_result
from thinsection.registry import Entry, Registry

ProbeFunction = Callable[..., ProbeResult | tuple[ProbeResult, ...]]


class DataKind(NamedTuple):
    """Name of a probe's data in the shell, its help, and what reads it."""

    metavar: str
    help: str
    load: Callable[..., object]  # of a path and a configuration
    # settings of the section `data` that `load` does not use; its commands have no flag for them
    unused: tuple[str, ...] = ()


_TILES = "A table of tiles (manifest), a data set folder, tile embeddings, or a results folder."
_CASES = "A table of slides, or a Patho-Bench task folder (k=all.tsv and config.yaml)."
_VALUES = (
    "A table of tiles: path (embedding file) or row (in --embeddings), numbers to predict, and "
    "optionally slide_id, split, fold_0, ...; or the folder of a task of HEST-bench."
)
_CENTRES = (
    "A table of tiles: slide_id, biological_class, medical_center, and path (image) or row (in "
    "--embeddings)."
)
_OF_TILES = ("layout", "labels", "test")
DATA_KINDS: dict[type, DataKind] = {
    TileSet: DataKind("DATA", _TILES, load_tiles),
    CaseSet: DataKind("TABLE", _CASES, load_cases, (*_OF_TILES, "encoder")),
    SurvivalSet: DataKind("TABLE", _CASES, load_survival, (*_OF_TILES, "encoder")),
    RobustnessSet: DataKind("TABLE", _CENTRES, load_robustness, _OF_TILES),
    ValueSet: DataKind("TABLE", _VALUES, load_values, _OF_TILES),
    Path: DataKind(
        "DATA", "Folder or file of the data set.", lambda path, config: path
    ),
}


@dataclass(frozen=True, slots=True)
class Probe:
    """A probe with what its function declares."""

    name: str
    function: ProbeFunction
    kind: DataKind
    config_type: type

    def run(self, data: object, config: object) -> tuple[ProbeResult, ...]:
        """The results on data that `kind.load` gave.

        Raises:
            DatasetError: what is left without damaged slides does not do for the probe.
        """
        try:
            with naming_part("probe", self.name, self.function):
                returned = self.function(data, config)
        except ThinsectionError as error:
            facts: Mapping[str, Any] = getattr(data, "facts", {})
            left_out: Mapping[str, str] = facts.get(LEFT_OUT, {})
            if not left_out:
                raise
            reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
            raise DatasetError(f"{error}; left out were {reasons}") from error
        results = returned if isinstance(returned, tuple) else (returned,)
        if not results or not all(isinstance(r, ProbeResult) for r in results):
            raise InvalidInputError(
                f"probe {self.name!r} must return a ProbeResult or a tuple of them, "
                f"got {returned!r}"
            )
        return results


def load_probe(name: str) -> Probe:
    """The probe of that name; an error says what is missing or what its package must mend."""
    function = PROBES.load(name)
    try:
        hints = typing.get_type_hints(function)
    except (TypeError, NameError) as error:
        raise InvalidInputError(
            f"probe {name!r} must be a function with types, got {error}"
        ) from error
    data = hints.get("data")
    config_type = hints.get("config")
    if data not in DATA_KINDS or not isinstance(config_type, type):
        kinds = ", ".join(kind.__name__ for kind in DATA_KINDS)
        raise InvalidInputError(
            f"probe {name!r} must declare data as one of {kinds} and config as a dataclass of "
            f"sections, got {data} and {config_type}"
        )
    return Probe(name, function, DATA_KINDS[data], config_type)


def linear(data: TileSet, config: ProbeConfig) -> ProbeResult:
    """Train one linear layer on the embeddings of tiles.

    The protocol decides on which data the learning rate and the epoch are chosen.

    \b
    Examples:
      thinsection probe linear results --labels regions.geojson --out probe
      thinsection probe linear BRACS_RoI/ --layout bracs --encoder uni --out probe
    """
    from thinsection.probe.probes.tiles import linear_probe

    return linear_probe(
        data,
        protocol=config.protocol,
        device=config.compute.device,
    )


def knn(data: TileSet, config: ProbeConfig) -> ProbeResult:
    """Classify tiles by the vote of their nearest neighbours (cosine).

    The protocol decides on which data k is chosen.
    """
    from thinsection.probe.probes.tiles import knn_probe

    return knn_probe(
        data,
        protocol=config.protocol,
        device=config.compute.device,
        budget_bytes=config.budget_bytes,
    )


def fewshot(data: TileSet, config: ProbeConfig) -> ProbeResult:
    """Classify tiles from 16 labelled tiles per class (SimpleShot)."""
    from thinsection.probe.probes.tiles import fewshot_probe

    return fewshot_probe(
        data,
        protocol=config.protocol,
        device=config.compute.device,
        budget_bytes=config.budget_bytes,
    )


def tileset(data: TileSet, config: ProbeConfig) -> tuple[ProbeResult, ...]:
    """Run linear, knn and fewshot on the same tiles, and average the scores."""
    from thinsection.probe.probes.tiles import check_all

    checked = check_all(data, config.protocol)
    results = [probe(checked, config) for probe in (linear, knn, fewshot)]
    return (*results, tileset_result(results))


def slide(data: CaseSet, config: ProbeConfig) -> ProbeResult:
    """Predict a label of slides or cases (AUROC over folds).

    \b
    Example:
      thinsection probe slide labels.csv --embeddings results --out probe
    """
    from thinsection.probe.probes.cases import slide_probe

    return slide_probe(data, protocol=config.protocol)


def survival(data: SurvivalSet, config: ProbeConfig) -> ProbeResult:
    """Predict the survival of cases by Cox regression (c-index)."""
    from thinsection.probe.probes.cases import survival_probe

    return survival_probe(data, protocol=config.protocol)


def robustness(data: RobustnessSet, config: RobustnessConfig) -> ProbeResult:
    """Test if neighbours share biology or hospital (PathoROB)."""
    from thinsection.probe.probes.pathorob import robustness_probe

    return robustness_probe(
        data,
        k=config.robustness.k,
        choose_k=config.robustness.choose_k,
        protocol=config.protocol,
        device=config.compute.device,
        budget_bytes=config.budget_bytes,
    )


def regression(data: ValueSet, config: ProbeConfig) -> ProbeResult:
    """Predict numbers per tile, such as gene expression (HEST).

    The method is HEST's: PCA and ridge regression, scored by Pearson correlation for each target.

    \b
    Example:
      thinsection probe regression genes.csv --embeddings spots.npy --out probe
      thinsection probe regression bench_data/IDC --encoder uni --out probe
    """
    from thinsection.probe.probes.cases import regression_probe

    return regression_probe(data, protocol=config.protocol)


def retrieval(data: TileSet, config: ProbeConfig) -> ProbeResult:
    """Search similar tiles in the training set.

    Scores: recall, majority vote and mean average precision at k.
    """
    from thinsection.probe.probes.tiles import retrieval_probe

    return retrieval_probe(
        data,
        protocol=config.protocol,
        device=config.compute.device,
        budget_bytes=config.budget_bytes,
    )


def calibration(data: TileSet, config: ProbeConfig) -> ProbeResult:
    """Compare predicted probabilities with observed frequencies."""
    from thinsection.probe.probes.tiles import calibration_probe

    return calibration_probe(
        data,
        protocol=config.protocol,
        device=config.compute.device,
    )


def invariance(data: Path, config: ProbeConfig) -> ProbeResult:
    """Measure how stain, blur, JPEG and rotation change embeddings.

    Also measures how the kNN score changes.
    """
    from thinsection.probe.probes.invariance import invariance_probe

    return invariance_probe(data, config)


def croma(data: RobustnessSet, config: ProbeConfig) -> ProbeResult:
    """Measure the margin between biology and hospital (CRoMa).

    The score is the median of the cross-confounder robustness margin over tiles: above 0 the same
    class from other hospitals is nearer than other classes from the same hospital.
    """
    from thinsection.probe.probes.croma import croma_probe

    return croma_probe(
        data,
        protocol=config.protocol,
        device=config.compute.device,
        budget_bytes=config.budget_bytes,
    )


def clustering(data: RobustnessSet, config: ProbeConfig) -> ProbeResult:
    """Test if clusters follow biology or hospital (PathoROB)."""
    from thinsection.probe.probes.pathorob import clustering_probe

    return clustering_probe(data, protocol=config.protocol)


def apd(data: RobustnessSet, config: ProbeConfig) -> ProbeResult:
    """Measure the performance drop if class and hospital correlate.

    The score is PathoROB's average performance drop.
    """
    from thinsection.probe.probes.pathorob import apd_probe

    return apd_probe(data, protocol=config.protocol)


def segment(data: Path, config: SegmentConfig) -> ProbeResult:
    """Train a segmentation head (MaskTransformer) on patch tokens.

    The patch tokens are stored in the feature cache, so a second run is faster.

    \b
    Example:
      thinsection probe segment PanNuke/ --dataset pannuke --encoder uni --out probe
    """
    from thinsection.probe.segment.probe import run_segment_probe

    return run_segment_probe(data, config)


_OUR_PROBES: tuple[ProbeFunction, ...] = (
    linear,
    knn,
    fewshot,
    tileset,
    slide,
    survival,
    robustness,
    segment,
    regression,
    retrieval,
    calibration,
    invariance,
    croma,
    clustering,
    apd,
)
PROBES: Registry[ProbeFunction] = Registry(
    "probe",
    "thinsection.probes",
    [
        Entry(
            name=function.__name__,
            help=str(function.__doc__).splitlines()[0],
            target=function,
        )
        for function in _OUR_PROBES
    ],
)
