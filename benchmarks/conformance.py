"""Do our probes give the figures of the suites whose protocols they follow?

    python -m benchmarks.conformance --suites FOLDER [--out benchmarks/results/conformance.json]

FOLDER holds clones of the suites under the names in SUITES. Their own functions and ours
run on the same random arrays. The JSON keeps each suite's commit and the largest
difference of any figure; the table of docs/conformance.md.j2 is made of it. Nothing of the
suites is copied into this repository. Modules that only draw, log or download are
replaced by empty ones.
"""

import argparse
import contextlib
import importlib
import io
import json
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import environment
from thinsection.evaluation.splits import stratified_folds
from thinsection.probe import knn_probe, linear_probe, slide_probe, survival_probe
from thinsection.probe.data.sets import (
    CaseSet,
    RobustnessSet,
    SurvivalSet,
    TileSet,
    ValueSet,
    make_split,
)
from thinsection.probe.probes.cases import regression_probe
from thinsection.probe.probes.pathorob import apd_probe, robustness_probe
from thinsection.probe.probes.tiles import (
    fewshot_probe,
    retrieval_probe,
    thunder_calibration,
)
from thinsection.probe.protocol import NANOPATH, PATHOBENCH

RESULT = Path(__file__).parent / "results" / "conformance.json"
# name in FOLDER -> (repository, folder of its Python packages)
SUITES = {
    "nanopath": ("MedARC-AI/nanopath", "."),
    "Patho-Bench": ("mahmoodlab/Patho-Bench", "."),
    "THUNDER": ("MICS-Lab/thunder", "src"),
    "PathoROB": ("bifold-pathomics/PathoROB", "."),
    "HEST": ("mahmoodlab/HEST", "src/hest/bench"),
}
SILENT = ("seaborn", "wandb", "thunder.utils.data", "thunder.utils.utils")
# packages whose own __init__ would load every model they know: only the modules below are run
BARE = ("thunder", "thunder.tasks", "thunder.utils")
Row = dict[str, Any]


def main() -> None:
    """Runs every comparison and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suites", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    for name in SILENT:
        sys.modules.setdefault(name, _Silent(name))
    commits = {}
    for name, (_, packages) in SUITES.items():
        clone = args.suites / name
        sys.path.insert(0, str((clone / packages).resolve()))
        commits[name] = subprocess.run(
            ["git", "-C", str(clone), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    for name in BARE:
        package = types.ModuleType(name)
        folder = args.suites / "THUNDER" / "src" / name.replace(".", "/")
        package.__path__ = [str(folder.resolve())]
        sys.modules[name] = package
    rows: list[Row] = []
    for comparison in (nanopath, patho_bench, thunder, pathorob, hest):
        with quiet():
            found = [*comparison()]
        for row in found:
            print(f"{row['suite']:12} {row['task']:60} {row['difference']:.2g}")
        rows += merged(found)
    repositories = {name: repository for name, (repository, _) in SUITES.items()}
    results = {"rows": rows, "commits": commits, "repositories": repositories}
    document = {"benchmark": "conformance", **environment(), "results": results}
    args.out.write_text(json.dumps(document, indent=2) + "\n")


class _Silent(types.ModuleType):
    """A module whose functions do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides what the suites print."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        yield


def row(suite: str, task: str, theirs: Any, ours: Any, note: str = "") -> Row:
    """One line of the table: the largest difference of figures that both give."""
    theirs = np.asarray(theirs, dtype=np.float64)
    ours = np.asarray(ours, dtype=np.float64)
    assert theirs.shape == ours.shape, (task, theirs.shape, ours.shape)
    difference = float(np.abs(theirs - ours).max())
    return {
        "suite": suite,
        "task": task,
        "figures": int(theirs.size),
        "difference": difference,
        "note": note,
    }


def merged(rows: list[Row]) -> list[Row]:
    """One row a task: figures added up, the largest difference."""
    by_task: dict[str, Row] = {}
    for row in rows:
        first = by_task.setdefault(row["task"], row)
        if first is not row:
            first["figures"] += row["figures"]
            first["difference"] = max(first["difference"], row["difference"])
    return [*by_task.values()]


def clusters(
    seed: int, sizes: tuple[int, ...], dim: int, *, distance: float
) -> tuple[np.ndarray, np.ndarray]:
    """Gaussian rows (N, dim) float32 around a centre a class, and labels (N,), shuffled."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    rng.shuffle(labels)
    centres = rng.normal(size=(len(sizes), dim)) * distance
    return (centres[labels] + rng.normal(size=(len(labels), dim))).astype(
        np.float32
    ), labels


def tile_set(seed: int) -> TileSet:
    """A tile classification task of three uneven classes."""
    x, y = clusters(seed, (260, 150, 90), 96, distance=0.09)
    names = ("a", "b", "c")
    train, val = make_split(x[:330], y[:330]), make_split(x[330:], y[330:])
    return TileSet(name="conformance", class_names=names, train=train, val=val)


def case_set(seed: int, sizes: tuple[int, ...], dim: int, **known: Any) -> CaseSet:
    """Cases with a vector each."""
    x, y = clusters(seed, sizes, dim, distance=0.12)
    return CaseSet(
        name="conformance",
        ids=tuple(f"case{i}" for i in range(len(y))),
        vectors=x,
        class_names=tuple("abcdef"[: len(sizes)]),
        labels=y,
        **known,
    )


def nanopath() -> Iterator[Row]:
    """Tile tasks, slide logistic regression and the robustness index of nanopath's probe.py."""
    probe = importlib.import_module("probe")
    for seed in (1, 2, 3):
        data = tile_set(seed)
        arrays = (
            data.train.embeddings,
            data.train.labels,
            data.val.embeddings,
            data.val.labels,
        )
        by_k = probe.inline_knn_val_f1(*arrays, probe.KNN_K_VALS)[2]
        ours = knn_probe(data, protocol=NANOPATH).details["score_by_k"]
        yield row(
            "nanopath", "kNN (each k)", [*by_k.values()], [ours[str(k)] for k in by_k]
        )
        theirs = probe.inline_fewshot_val_f1(*arrays, 16, NANOPATH.seed)
        yield row(
            "nanopath", "16-shot", theirs, fewshot_probe(data, protocol=NANOPATH).score
        )
        theirs = probe.inline_linear_val_f1(*arrays, seed=NANOPATH.seed)
        yield row(
            "nanopath", "linear", theirs, linear_probe(data, protocol=NANOPATH).score
        )
    for sizes in ((60, 45), (50, 40, 30)):
        cases = case_set(7, sizes, 64)
        found = probe.slide_linear_auc_metrics(cases.vectors, cases.labels)
        result = slide_probe(cases, protocol=NANOPATH)
        theirs = [*found["val_auc_per_c"].values()]
        ours = [*result.details["score_by_c"].values()]
        task = f"slide logistic regression, {len(sizes)} classes (each C)"
        yield row("nanopath", task, theirs, ours)


class OneBatch:
    """A data loader of Patho-Bench's that holds all samples of a split in one batch."""

    def __init__(self, batch: dict[str, Any], size: int) -> None:
        self.batch = batch
        self.dataset = range(size)

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield self.batch


class FoldedCases:
    """A dataset of Patho-Bench's: `get_dataloader(fold, split)` of cases with folds."""

    def __init__(self, cases: CaseSet | SurvivalSet, task: str) -> None:
        assert cases.folds is not None
        self.cases = cases
        self.task = task
        self.folds = cases.folds
        self.num_folds = len(cases.folds)

    def get_dataloader(self, fold: int, split: str) -> OneBatch | None:
        """All cases of a split; there is no validation set."""
        if split == "val":
            return None
        rows = self.folds[fold][0 if split == "train" else 1]
        labels: dict[str, Any]
        if isinstance(self.cases, CaseSet):
            labels = {self.task: torch.from_numpy(self.cases.labels[rows])}
        else:
            labels = {
                "extra_attrs": {
                    f"{self.task}_event": torch.from_numpy(self.cases.event[rows]),
                    f"{self.task}_days": torch.from_numpy(self.cases.time[rows]),
                }
            }
        features = torch.from_numpy(self.cases.vectors[rows])
        return OneBatch({"slide": {"features": features}, "labels": labels}, len(rows))


def patho_bench() -> Iterator[Row]:
    """Logistic regression, Coxnet and retrieval, run by Patho-Bench's experiment classes."""
    experiments = "patho_bench.experiments"
    logistic = importlib.import_module(f"{experiments}.LinearProbeExperiment")
    coxnet = importlib.import_module(f"{experiments}.CoxNetExperiment")
    retriever = importlib.import_module(f"{experiments}.utils.Retriever")
    metrics = importlib.import_module(f"{experiments}.utils.RetrievalMixin")
    for sizes in ((60, 40), (45, 40, 35)):
        cases = case_set(11, sizes, 256)
        folds = stratified_folds(cases.labels, folds=5, seed=1)
        cases = replace(cases, folds=tuple(folds))
        result = slide_probe(cases, protocol=PATHOBENCH)
        with tempfile.TemporaryDirectory() as folder:
            experiment = logistic.LinearProbeExperiment(
                dataset=FoldedCases(cases, "grade"),
                task_name="grade",
                num_classes=len(sizes),
                num_bootstraps=1,
                cost=0.5,
                max_iter=10_000,
                balanced_class_weights=True,
                results_dir=folder,
            )
            experiment.save_config = lambda *_: None
            experiment.train()
            experiment.test()
            theirs = [
                json.loads(path.read_text())["overall"]["macro-ovr-auc"]
                for path in sorted(
                    Path(folder).glob("test_metrics/fold_*/metrics.json")
                )
            ]
        task = (
            f"logistic regression (C 0.5, balanced), {len(sizes)} classes (each fold)"
        )
        yield row("Patho-Bench", task, theirs, result.details["fold_scores"])
    yield coxnet_row(coxnet)
    data = tile_set(5)
    model = retriever.Retriever("l2", False)
    model.fit(
        torch.from_numpy(data.train.embeddings.copy()),
        torch.from_numpy(data.train.labels),
    )
    found = model.retrieve(torch.from_numpy(data.val.embeddings.copy()), 10)
    details = retrieval_probe(data, protocol=PATHOBENCH).details
    mixin = metrics.RetrievalMixin
    truth = torch.from_numpy(data.val.labels)
    theirs, ours = [], []
    for k in (1, 3, 5, 10):
        theirs.append(mixin.acc_at_k(found, truth, k))
        theirs.append(mixin.mv_acc_at_k(found, truth, k))
        theirs.append(mixin.map_at_k(found, truth, k))
        ours.append(details[f"recall_at_{k}"])
        ours.append(details[f"majority_at_{k}"])
        ours.append(details[f"map_at_{k}"])
    task = "retrieval by l2: top-k, majority vote, mAP at 1, 3, 5, 10"
    yield row("Patho-Bench", task, theirs, ours, "Patho-Bench averages in float32")


def coxnet_row(coxnet: Any) -> Row:
    """Coxnet at alpha 0.07, l1 ratio 0.5."""
    rng = np.random.default_rng(13)
    n = 120
    x = rng.normal(size=(n, 64)).astype(np.float32)
    risk = x[:, :4].sum(axis=1)
    time = rng.exponential(np.exp(-risk) * 100) + 1
    event = rng.random(n) < 0.6
    cases = SurvivalSet(
        name="conformance",
        ids=tuple(f"case{i}" for i in range(n)),
        vectors=x,
        event=event,
        time=time,
    )
    folds = stratified_folds(event.astype(int), folds=5, seed=1)
    cases = replace(cases, folds=tuple(folds))
    result = survival_probe(cases, protocol=PATHOBENCH)
    experiment_class = coxnet.CoxNetExperiment
    structured = experiment_class._to_structured_array
    theirs = []
    for train, test in folds:
        model = coxnet.CoxnetSurvivalAnalysis(
            alphas=[0.07], l1_ratio=0.5, max_iter=100_000
        )
        fitted = structured(
            torch.from_numpy(event[train]), torch.from_numpy(time[train])
        )
        scored = structured(torch.from_numpy(event[test]), torch.from_numpy(time[test]))
        model.fit(torch.from_numpy(x[train]), fitted)
        theirs.append(model.score(torch.from_numpy(x[test]), scored))
    task = "Coxnet, alpha 0.07 (each fold)"
    return row("Patho-Bench", task, theirs, result.details["fold_scores"])


def thunder() -> Iterator[Row]:
    """kNN and the five calibration errors of THUNDER."""
    calibration = importlib.import_module("thunder.utils.calibration_metrics")
    retrieval = importlib.import_module("thunder.tasks.image_retrieval")
    data = tile_set(17)
    ks = [1, 3, 5, 10, 20, 30, 40, 50]
    arrays = (
        data.train.embeddings,
        data.train.labels,
        data.val.embeddings,
        data.val.labels,
    )
    by_k = retrieval.topk_retrieval(*arrays, ks)[0]
    ours = knn_probe(data, protocol=NANOPATH).details["score_by_k"]
    theirs = [float(np.mean(by_k[k]["f1"])) for k in ks]
    yield row("THUNDER", "kNN macro F1 (each k)", theirs, [ours[str(k)] for k in ks])
    rng = np.random.default_rng(19)
    theirs, mine = [], []
    for classes in (2, 3, 7):
        logits = rng.normal(size=(457, classes)) * 2
        share = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        truth = rng.integers(0, classes, len(share))
        found = calibration.compute_calibration_metrics(
            torch.from_numpy(share), torch.from_numpy(truth)
        )
        theirs += [found[name] for name in ("ECE", "MCE", "SCE", "ACE", "TACE")]
        errors = thunder_calibration(share, truth)
        mine += [errors[name] for name in ("ece", "mce", "sce", "ace", "tace")]
    yield row("THUNDER", "calibration: ECE, MCE, SCE, ACE, TACE (5 bins)", theirs, mine)


def robustness_set(name: str, *, pairs: bool) -> RobustnessSet:
    """Tiles whose embeddings follow class and centre alike; a pair mixes two of each."""
    rng = np.random.default_rng(23)
    columns: list[tuple[str, str, str, str]] = []
    vectors = []
    class_centres = rng.normal(size=(4, 48)) * 0.35
    centre_shifts = rng.normal(size=(4, 48)) * 0.3
    for pair in range(3 if pairs else 1):
        for biology in (pair, (pair + 1) % 4):
            for centre in (pair, (pair + 1) % 4):
                for slide in range(8):
                    shift = rng.normal(size=48) * 0.3
                    for _ in range(12):
                        noise = rng.normal(size=48)
                        vectors.append(
                            class_centres[biology]
                            + centre_shifts[centre]
                            + shift
                            + noise
                        )
                        slide_id = f"{biology}-{centre}-{slide}"
                        columns.append(
                            (f"b{biology}", f"c{centre}", slide_id, f"pair{pair}")
                        )
    biology, centre, slide_ids, pair_names = zip(*columns, strict=True)
    return RobustnessSet(
        name=name,
        embeddings=np.array(vectors, dtype=np.float32),
        biological_class=biology,
        medical_center=centre,
        slide_id=slide_ids,
        pair=pair_names if pairs else (),
    )


def pathorob() -> Iterator[Row]:
    """Robustness index, whole and in pairs, and APD, by PathoROB's own functions."""
    utils = importlib.import_module("pathorob.robustness_index.robustness_index_utils")
    for name, k, pairs in (("camelyon", 11, False), ("tcga", 61, True)):
        data = robustness_set(name, pairs=pairs)
        theirs = pathorob_index(utils, data, k)
        result = robustness_probe(data)
        assert result.details["k"] == k
        words = "in pairs, " if pairs else ""
        yield row("PathoROB", f"robustness index, {words}k {k}", theirs, result.score)
    yield apd_row()


def pathorob_index(utils: Any, data: RobustnessSet, k: int) -> float:
    """The index at k of `robustness_index_paired`, fed by arrays instead of files."""
    import pandas as pd
    from sklearn.preprocessing import Normalizer

    vectors = Normalizer(norm="l2").fit_transform(data.embeddings)
    count = len(vectors)
    meta = pd.DataFrame(
        {
            "subset": data.pair or ["all"] * count,
            "slide_id": data.slide_id,
            "biological_class": data.biological_class,
            "medical_center": data.medical_center,
            "patch_index": np.arange(count),
        }
    )
    stats = []
    for name in np.unique(meta.subset.values):
        part = utils.get_combi_meta_info(meta, np.arange(count), vectors, name)
        x = np.vstack(part.embedding.values)
        labels = np.unique(part.biological_class.values, return_inverse=True)[1]
        neighbours = utils.evaluate_knn_accuracy(
            part, data.name, x, x, labels, labels, k, 1
        )[3]
        stats.append(utils.evaluate_embeddings(data.name, part, neighbours))
    for found in stats:  # scores of another table, which the index does not use
        for name in (
            "prediction_log_reg_AUC",
            "OOD_prediction_log_reg_AUC",
            "confounder_log_reg_AUC",
        ):
            found[name] = 0.5
    total = utils.aggregate_stats(stats, compute_bootstrapped_robustness_index=False)
    return float(total["robustness_index"][total["k"].index(k)])


def apd_row() -> Row:
    """APD in and out of domain for two centres, with PathoROB's training function."""
    import random

    model = importlib.import_module("pathorob.apd.train_model")
    apd = importlib.import_module("pathorob.apd.utils")
    data, chunks, per_slide = apd_set()
    protocol = replace(NANOPATH, pathorob=replace(NANOPATH.pathorob, iterations=2))
    result = apd_probe(data, protocol=protocol)
    splits = 4  # 3 slides more or fewer, of 9
    random.seed(1000)
    inside: list[list[float]] = [[] for _ in range(splits)]
    outside: list[list[float]] = [[] for _ in range(splits)]
    outer = [(v, b) for v, b, c in _rows(data) if c == "c2"]
    for seed in random.sample(range(0, 10_000), 2):
        random.seed(seed)
        for centre in range(2):
            for biology in range(2):
                tiles = chunks[centre][biology]
                slides = [
                    tiles[i : i + per_slide] for i in range(0, len(tiles), per_slide)
                ]
                random.shuffle(slides)
                chunks[centre][biology] = [tile for slide in slides for tile in slide]
        for split in range(splits):
            train, val, test = [], [], []
            for centre in range(2):
                for biology in range(2):
                    more = split if (biology == 0) == (centre == 1) else -split
                    used = (3 + more) * per_slide
                    tiles = chunks[centre][biology]
                    train += [(tile, biology) for tile in tiles[:used]]
                    held = used + int(used / 6)
                    val += [(tile, biology) for tile in tiles[used:held]]
                    test += [(tile, biology) for tile in tiles[7 * per_slide :]]
            parts = [
                tuple(zip(*part, strict=True)) for part in (train, val, test, outer)
            ]
            scores = model.train_logistic_regression(
                *parts[0],
                *parts[1],
                [parts[2][0], parts[3][0]],
                [parts[2][1], parts[3][1]],
            )[2]
            inside[split].append(scores[0])
            outside[split].append(scores[1])
    theirs = [np.mean(apd.compute_apd(inside)), np.mean(apd.compute_apd(outside))]
    ours = [result.score, result.details["apd_out_of_domain"]]
    return row("PathoROB", "APD in and out of domain, two centres", theirs, ours)


def apd_set() -> tuple[RobustnessSet, list[list[list[np.ndarray]]], int]:
    """Nine slides of each class at two centres, some of a third, tiles in slide order."""
    rng = np.random.default_rng(29)
    per_slide = 12
    columns, vectors = [], []
    chunks: list[list[list[np.ndarray]]] = [[[], []], [[], []]]
    for centre in range(3):
        for biology in range(2):
            for slide in range(9):
                for _ in range(per_slide):
                    vector = rng.normal(size=32).astype(np.float32)
                    vector[0] += 0.7 * biology
                    vector[1] += 1.5 * centre
                    vectors.append(vector)
                    columns.append(
                        (f"b{biology}", f"c{centre}", f"{biology}{centre}{slide}")
                    )
                    if centre < 2:
                        chunks[centre][biology].append(vector)
    biology, centre, slide_ids = zip(*columns, strict=True)
    data = RobustnessSet(
        name="own",
        embeddings=np.array(vectors),
        biological_class=biology,
        medical_center=centre,
        slide_id=slide_ids,
    )
    return data, chunks, per_slide


def _rows(data: RobustnessSet) -> Iterator[tuple[np.ndarray, int, str]]:
    """Vector, number of the class, and centre of each tile."""
    columns = (data.embeddings, data.biological_class, data.medical_center)
    for vector, biology, centre in zip(*columns, strict=True):
        yield vector, int(biology[1:]), centre


def hest() -> Iterator[Row]:
    """Ridge regression of HEST's trainer, after its scaler and PCA."""
    from sklearn.decomposition import PCA
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import StandardScaler

    trainer = importlib.import_module("trainer")
    rng = np.random.default_rng(31)
    x = rng.normal(size=(420, 300)).astype(np.float32)
    y = x[:, :12] @ rng.normal(size=(12, 20)) + rng.normal(size=(420, 20)) * 4
    folds = tuple(
        (np.flatnonzero(np.arange(420) % 3 != f), np.arange(f, 420, 3))
        for f in range(3)
    )
    data = ValueSet(
        name="conformance",
        ids=tuple(f"spot{i}" for i in range(420)),
        embeddings=x,
        target_names=tuple(f"gene{i}" for i in range(20)),
        targets=y,
        folds=folds,
    )
    result = regression_probe(data)
    theirs = []
    for train, test in folds:
        steps = [
            ("scaler", StandardScaler()),
            ("PCA", PCA(n_components=256, random_state=1)),
        ]
        pipe = Pipeline(steps)
        components = torch.Tensor(pipe.fit_transform(x[train]))
        held_out = torch.Tensor(pipe.transform(x[test]))
        found, _ = trainer.train_test_reg(
            components,
            held_out,
            y[train],
            y[test],
            random_state=1,
            genes=data.target_names,
        )
        theirs.append(found["pearson_mean"])
    task = "PCA and ridge, mean Pearson (each fold)"
    yield row("HEST", task, theirs, result.details["fold_scores"])


if __name__ == "__main__":
    main()
