"""Does each head's default recipe learn what its authors' training loop learns?

    python -m benchmarks.recipes --authors FOLDER --head clam_sb [--seeds 0] [--loops ours 1e-3]

FOLDER holds clones of the authors' repositories under the names in AUTHORS (and einops for
TransMIL must be installed). Cohorts of 60 cases, 200 to 500 tiles of 16 channels a bag, 1 % of the
tiles carry the class (`tests/predict/planted.py`): a cohort, its three folds and all that is drawn
for each seed. The widths are the same on both sides: 64 hidden channels, 32 of the attention.

The authors' models and loops run as they are published, at their default learning rate and at each
of RATES; ours is `thinsection train` with the head's recipe. The JSON keeps, for each cell, the
AUROC over pairs of cases of the same fold, that of each fold, and CPU seconds. Cells that the JSON
has are not run again. Nothing of the authors' is copied into this repository.
"""

import argparse
import contextlib
import copy
import importlib
import io
import json
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tests.predict.planted import planted
from torch import nn

from benchmarks.harness import environment
from thinsection.evaluation.label_values import LabelsConfig
from thinsection.evaluation.leaks import read_labelled
from thinsection.evaluation.parts import FoldCases
from thinsection.files.lock import hold
from thinsection.predict.bags import Bags
from thinsection.predict.config import FitConfig, FoldsConfig, TrainConfig
from thinsection.predict.experiment import plan, train
from thinsection.predict.heads.config import HeadConfig
from thinsection.weights.placement import importable_torchvision

RESULT = Path(__file__).parent / "results" / "recipes.json"
DIM = 16
HIDDEN_DIM = 64
ATTENTION_DIM = 32
NUM_HEADS = 8
CASES = 60
TILES = (200, 500)
FOLDS = 3
RATES = (5e-4, 1e-3, 2e-3)
# head -> (name in FOLDER, repository)
AUTHORS = {
    "abmil": ("AttentionDeepMIL", "AMLab-Amsterdam/AttentionDeepMIL"),
    "clam_sb": ("CLAM", "mahmoodlab/CLAM"),
    "clam_mb": ("CLAM", "mahmoodlab/CLAM"),
    "dsmil": ("dsmil-wsi", "binli123/dsmil-wsi"),
    "transmil": ("TransMIL", "szc19990412/TransMIL"),
}
DEFAULT_RATES = {
    "abmil": 5e-4,
    "clam_sb": 1e-4,
    "clam_mb": 1e-4,
    "dsmil": 1e-4,
    "transmil": 2e-4,
}
Bag = tuple[torch.Tensor, torch.Tensor]  # tiles (N, D), label (1,) int64
Scores = np.ndarray  # (cases,), higher for the second class
# training bags, inner bags, test bags, learning rate -> scores of the test bags
Loop = Callable[[Sequence[Bag], Sequence[Bag], Sequence[Bag], float], Scores]


class Place(NamedTuple):
    """A cell of the table."""

    head: str
    loop: str  # 'ours', or the learning rate of the authors'
    seed: str


def main() -> None:
    """Runs the cells of one head that the JSON lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--authors", type=Path, required=True)
    parser.add_argument("--head", choices=list(AUTHORS), required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--loops", nargs="+", help="'ours', or learning rates of theirs"
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    importable_torchvision()  # CLAM and DSMIL import it
    clone = args.authors / AUTHORS[args.head][0]
    sys.path.insert(0, str(clone.resolve()))
    sys.path.insert(0, str((args.authors / "nystrom-attention").resolve()))
    commits = {AUTHORS[args.head][1]: commit_of(clone)}
    rates = sorted({DEFAULT_RATES[args.head], *RATES})
    with tempfile.TemporaryDirectory() as name:
        for seed in args.seeds:
            root = planted(Path(name) / f"{seed}", cases=CASES, tiles=TILES, seed=seed)
            for key in args.loops or ("ours", *(f"{rate:g}" for rate in rates)):
                place = Place(args.head, key, str(seed))
                if has_cell(args.out, place):
                    continue
                if key == "ours":
                    cell = run_ours(root, args.head, seed)
                else:
                    cell = run_authors(LOOPS[args.head], root, float(key), seed)
                save(args.out, place, cell, commits)


def commit_of(clone: Path) -> str:
    """Commit of an authors' repository."""
    return subprocess.run(
        ["git", "-C", str(clone), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def train_config(root: Path, head: str, seed: int) -> TrainConfig:
    """Settings of `thinsection train` with the head's recipe."""
    return TrainConfig(
        labels=LabelsConfig(labels=root / "labels.csv", target=("label",)),
        head=HeadConfig(
            head=head,
            hidden_dim=HIDDEN_DIM,
            attention_dim=ATTENTION_DIM,
            num_heads=NUM_HEADS,
        ),
        fit=FitConfig(device="cpu", seed=seed),
        cross=FoldsConfig(folds=FOLDS),
    )


def run_ours(root: Path, head: str, seed: int) -> dict[str, Any]:
    """`thinsection train` with the head's recipe."""
    config = train_config(root, head, seed)
    start = time.process_time()
    document = train(root, out=root / f"out_{head}", config=config)
    return {
        "auroc": document["value"],
        "by_fold": [fold["score"] for fold in document["folds"]],
        "best_epochs": [fold["best_epoch"] for fold in document["folds"]],
        "starts": [fold["starts"] for fold in document["folds"]],
        "cpu_s": round(time.process_time() - start, 1),
    }


def run_authors(loop: Loop, root: Path, rate: float, seed: int) -> dict[str, Any]:
    """An authors' loop on the folds of `run_ours`."""
    config = train_config(root, "linear", seed)
    cohort, contents, _ = read_labelled(root, config.labels)
    study, _ = plan(cohort, contents, config.cross, seed)
    labels = study.cohort.array[:, 0].astype(np.int64)
    with Bags(study.cohort.paths) as bags:
        read = [
            (torch.from_numpy(bags.read(i).features), torch.tensor([label]))
            for i, label in enumerate(labels.tolist())
        ]
    start = time.process_time()
    scores = np.zeros(len(labels))
    for fold, part in enumerate(study.parts):
        torch.manual_seed(1000 * seed + fold)
        train_bags, inner_bags, test_bags = (
            [read[i] for i in rows] for rows in (part.train, part.stop, part.test)
        )
        with quiet():
            scores[list(part.test)] = loop(train_bags, inner_bags, test_bags, rate)
    return {
        **auroc(scores, labels, study.parts),
        "cpu_s": round(time.process_time() - start, 1),
    }


def auroc(
    scores: Scores, labels: np.ndarray, parts: Sequence[FoldCases]
) -> dict[str, Any]:
    """Share of concordant pairs of cases of the same fold, and that of each fold."""
    shares = []
    pairs = []
    for part in parts:
        rows = list(part.test)
        positive = scores[rows][labels[rows] == 1]
        negative = scores[rows][labels[rows] == 0]
        difference = positive[:, None] - negative
        shares.append(float(((difference > 0) + 0.5 * (difference == 0)).mean()))
        pairs.append(difference.size)
    return {"auroc": float(np.average(shares, weights=pairs)), "by_fold": shares}


class Shuffled:
    """A data loader: the bags in a new order in every epoch."""

    def __init__(self, bags: Sequence[Bag]) -> None:
        self.bags = bags

    def __len__(self) -> int:
        return len(self.bags)

    def __iter__(self) -> Iterator[Bag]:
        for i in torch.randperm(len(self.bags)).tolist():
            yield self.bags[i]


def clam(model_name: str) -> Loop:
    """CLAM's main.py: Adam, weight decay 1e-5, 200 epochs, no early stopping, dropout .25."""

    def loop(
        train_bags: Sequence[Bag], _: Sequence[Bag], test_bags: Sequence[Bag], lr: float
    ) -> Scores:
        clam_models = importlib.import_module("models.model_clam")
        core = importlib.import_module("utils.core_utils")
        branches = 2 if model_name == "CLAM_MB" else 1
        model = getattr(clam_models, model_name)(
            dropout=0.25, k_sample=8, n_classes=2, embed_dim=DIM
        )
        # the published widths, 512 and 256, are no arguments
        model.attention_net = nn.Sequential(
            nn.Linear(DIM, HIDDEN_DIM),
            nn.ReLU(),
            nn.Dropout(0.25),
            clam_models.Attn_Net_Gated(
                L=HIDDEN_DIM, D=ATTENTION_DIM, dropout=0.25, n_classes=branches
            ),
        )
        model.instance_classifiers = nn.ModuleList(
            nn.Linear(HIDDEN_DIM, 2) for _ in range(2)
        )
        model.classifiers = nn.Linear(HIDDEN_DIM, 2)
        if branches == 2:
            model.classifiers = nn.ModuleList(
                nn.Linear(HIDDEN_DIM, 1) for _ in range(2)
            )
        optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=1e-5)
        loader = Shuffled(train_bags)
        for epoch in range(200):
            core.train_loop_clam(
                epoch, model, loader, optimizer, 2, 0.7, None, nn.CrossEntropyLoss()
            )
        model.eval()
        with torch.inference_mode():
            return np.array([float(model(x)[1][0, 1]) for x, _ in test_bags])

    return loop


def dsmil(
    train_bags: Sequence[Bag],
    inner_bags: Sequence[Bag],
    test_bags: Sequence[Bag],
    lr: float,
) -> Scores:
    """DSMIL's train_tcga.py with one class: Adam (.5, .9), cosine, 50 epochs, patience 10."""
    script = importlib.import_module("train_tcga")
    models = importlib.import_module("dsmil")
    vars(script)["torch"] = _CpuTorch("torch")
    args = types.SimpleNamespace(
        feats_size=DIM, dropout_patch=0, average=False, num_classes=1
    )
    model = models.MILNet(
        models.FCLayer(in_size=DIM, out_size=1),
        models.BClassifier(input_size=DIM, output_class=1),
    )
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv1d):
            nn.init.orthogonal_(module.weight)
            nn.init.constant_(module.bias, 0)
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(
        model.parameters(), lr=lr, betas=(0.5, 0.9), weight_decay=1e-3
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50, 0.000005)

    def stacked(bags: Sequence[Bag]) -> list[torch.Tensor]:
        return [
            torch.cat([x, label.float().expand(len(x), 1)], dim=1) for x, label in bags
        ]

    train_data = stacked(train_bags)
    inner_data = stacked(inner_bags)
    best_score = 0.0
    best = copy.deepcopy(model)
    since_best = 0
    for _ in range(50):
        since_best += 1
        script.train(args, train_data, model, criterion, optimizer)
        _, accuracy, aucs, _ = script.test(args, inner_data, model, criterion)
        schedule.step()
        score = script.get_current_score(accuracy, aucs)
        if score > best_score:
            since_best = 0
            best_score = score
            best = copy.deepcopy(model)
        if since_best > 10:
            break
    best.eval()
    with torch.inference_mode():
        return np.array([float(best(x)[1]) for x, _ in test_bags])


class _CpuTorch(types.ModuleType):
    """torch on a CPU for a script that names CUDA; what it loads are tensors in memory."""

    cuda = types.SimpleNamespace(FloatTensor=lambda tensor: tensor)

    def load(self, item: torch.Tensor, **_: Any) -> torch.Tensor:
        """The tensor itself."""
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def transmil(
    train_bags: Sequence[Bag],
    inner_bags: Sequence[Bag],
    test_bags: Sequence[Bag],
    lr: float,
) -> Scores:
    """TransMIL.yaml: lookahead RAdam, two bags a step, patience 10 of the validation loss.

    Its RAdam does not run with current torch: torch's stands in its place.
    """
    _bare_package("models")
    _bare_package("MyOptimizer")
    module = importlib.import_module("models.TransMIL")
    lookahead = importlib.import_module("MyOptimizer.lookahead").Lookahead
    model = module.TransMIL(n_classes=2)
    # the published widths, 1,024 and 512, are no arguments
    model._fc1 = nn.Sequential(nn.Linear(DIM, HIDDEN_DIM), nn.ReLU())
    model.cls_token = nn.Parameter(torch.randn(1, 1, HIDDEN_DIM))
    model.layer1 = module.TransLayer(dim=HIDDEN_DIM)
    model.layer2 = module.TransLayer(dim=HIDDEN_DIM)
    model.pos_layer = module.PPEG(dim=HIDDEN_DIM)
    model.norm = nn.LayerNorm(HIDDEN_DIM)
    model._fc2 = nn.Linear(HIDDEN_DIM, 2)
    optimizer = lookahead(
        torch.optim.RAdam(
            model.parameters(), lr=lr, weight_decay=1e-5, decoupled_weight_decay=True
        )
    )
    criterion = nn.CrossEntropyLoss()
    best_loss = np.inf
    best = model.state_dict()
    since_best = 0
    with _on_cpu():
        for _ in range(200):
            model.train()
            for step, (x, label) in enumerate(Shuffled(train_bags), start=1):
                loss = criterion(model(data=x[None])["logits"], label)
                (loss / 2).backward()
                if step % 2 == 0 or step == len(train_bags):
                    optimizer.step()
                    optimizer.base_optimizer.zero_grad()
            model.eval()
            with torch.inference_mode():
                losses = [
                    float(criterion(model(data=x[None])["logits"], label))
                    for x, label in inner_bags
                ]
            since_best += 1
            if np.mean(losses) < best_loss:
                best_loss = float(np.mean(losses))
                best = copy.deepcopy(model.state_dict())
                since_best = 0
            if since_best >= 10:
                break
        model.load_state_dict(best)
        model.eval()
        with torch.inference_mode():
            return np.array(
                [float(model(data=x[None])["Y_prob"][0, 1]) for x, _ in test_bags]
            )


def _bare_package(name: str) -> None:
    """A package of the authors whose own __init__ imports what is not used, and not installed."""
    package = types.ModuleType(name)
    package.__path__ = [str(Path(folder) / name) for folder in sys.path]
    sys.modules[name] = package


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    """`tensor.cuda()` stays on the CPU."""
    original = torch.Tensor.cuda
    torch.Tensor.cuda = lambda tensor, *_: tensor  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.Tensor.cuda = original  # type: ignore[method-assign]


def abmil(
    train_bags: Sequence[Bag], _: Sequence[Bag], test_bags: Sequence[Bag], lr: float
) -> Scores:
    """AttentionDeepMIL's main.py: Adam, weight decay 1e-4, 20 epochs; `GatedAttention`."""
    model = importlib.import_module("model").GatedAttention()
    # its images' 800 channels stand in `forward`: ours are padded, and cut again
    model.feature_extractor_part1 = _Padded()
    model.feature_extractor_part2 = nn.Sequential(
        _Cut(), nn.Linear(DIM, HIDDEN_DIM), nn.ReLU()
    )
    model.attention_V = nn.Sequential(nn.Linear(HIDDEN_DIM, ATTENTION_DIM), nn.Tanh())
    model.attention_U = nn.Sequential(
        nn.Linear(HIDDEN_DIM, ATTENTION_DIM), nn.Sigmoid()
    )
    model.attention_w = nn.Linear(ATTENTION_DIM, 1)
    model.classifier = nn.Sequential(nn.Linear(HIDDEN_DIM, 1), nn.Sigmoid())
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=10e-5)
    model.train()
    for _epoch in range(20):
        for x, label in Shuffled(train_bags):
            optimizer.zero_grad()
            loss, _attention = model.calculate_objective(x[None], label)
            loss.backward()
            optimizer.step()
    model.eval()
    with torch.inference_mode():
        return np.array([float(model(x[None])[0]) for x, _ in test_bags])


class _Padded(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(x, (0, 800 - x.shape[1]))


class _Cut(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :DIM]


LOOPS: dict[str, Loop] = {
    "abmil": abmil,
    "clam_sb": clam("CLAM_SB"),
    "clam_mb": clam("CLAM_MB"),
    "dsmil": dsmil,
    "transmil": transmil,
}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides what the loops print."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        yield


def read_results(path: Path) -> dict[str, Any]:
    """Results so far: cells by head, learning rate or 'ours', and seed; commits."""
    if not path.is_file():
        return {"cells": {}, "commits": {}}
    results: dict[str, Any] = json.loads(path.read_text())["results"]
    return results


def has_cell(path: Path, place: Place) -> bool:
    """Whether an earlier call ran the cell."""
    cells = read_results(path)["cells"]
    return place.seed in cells.get(place.head, {}).get(place.loop, {})


def save(
    path: Path, place: Place, cell: dict[str, Any], commits: dict[str, str]
) -> None:
    """Adds a cell to the JSON; another process may add to it too."""
    print(*place, cell, flush=True)
    with hold(path.with_suffix(".lock")):
        results = read_results(path)
        of_head = results["cells"].setdefault(place.head, {})
        of_head.setdefault(place.loop, {})[place.seed] = cell
        results["commits"] |= commits
        results["mean_cpu_s"] = {
            head: {
                loop: float(np.mean([cell["cpu_s"] for cell in cells.values()]))
                for loop, cells in loops.items()
            }
            for head, loops in results["cells"].items()
        }
        results["default_rates"] = {n: f"{rate:g}" for n, rate in DEFAULT_RATES.items()}
        document = {"benchmark": "recipes", **environment(), "results": results}
        path.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
