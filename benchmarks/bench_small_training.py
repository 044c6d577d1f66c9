"""What does a whole `train` cost on few or small bags, and does it find what is planted?

The command as users start it, with imports, audit, five folds, scores and page, beside a plain
loop: gated-attention MIL in PyTorch on bags in memory, the same folds, one start, patience of 40
epochs. The loop's CPU time has no imports, no files and no page.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.predict.planted import planted
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import arguments, finish
from thinsection.files.atomic import read_json
from thinsection.predict.bags import Bags
from thinsection.predict.folds import Study

# name: cases, tiles, channels, shift of the planted tiles, hidden channels
COHORTS = {
    "12 cases of 4 tiles": (12, (4, 5), 768, 8.0, 512),
    "60 cases of 200 to 400 tiles, 16 channels": (60, (200, 400), 16, 8.0, 64),
    "60 cases of 300 tiles": (60, (300, 301), 768, 8.0, 512),
}
EPOCHS = 100
PATIENCE = 40


def command(
    root: Path, out: Path, hidden: int, *more: str, bytecode: Path
) -> dict[str, Any]:
    """CPU-seconds of the command and its children, its AUROC, and its epochs.

    Compiled sources are kept in `bytecode`, as an installed package has them.
    """
    flags = ["--labels", f"{root}/labels.csv", "--target", "label", "--device", "cpu"]
    flags += ["--hidden-dim", f"{hidden}", "--attention-dim", f"{hidden // 2}", *more]
    call = [sys.executable, "-m", "thinsection", "train", f"{root}", *flags]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPYCACHEPREFIX": f"{bytecode}",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    quiet = subprocess.DEVNULL
    subprocess.run(
        [*call, "--out", f"{out}"], check=True, stdout=quiet, env=environment
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    document = read_json(out / "experiment.json")
    epochs = [sum(fold["epochs"]) for fold in document["folds"]]
    return {"cpu_s": cpu_s, "auroc": document["value"], "epochs": epochs}


class Abmil(nn.Module):
    """Gated attention over one bag (N, D)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Dropout(0.25))
        self.tanh = nn.Sequential(
            nn.Linear(hidden, hidden // 2), nn.Tanh(), nn.Dropout(0.25)
        )
        self.gate = nn.Sequential(
            nn.Linear(hidden, hidden // 2), nn.Sigmoid(), nn.Dropout(0.25)
        )
        self.score = nn.Linear(hidden // 2, 1)
        self.classify = nn.Linear(hidden, 2)

    def forward(self, bag: Tensor) -> Tensor:
        """Logits (1, 2)."""
        h = self.embed(bag)
        attention = self.score(self.tanh(h) * self.gate(h)).softmax(0)
        logits: Tensor = self.classify(attention.T @ h)
        return logits


def plain_fold(
    bags: list[Tensor], y: Tensor, rows: Sequence[Sequence[int]], hidden: int, seed: int
) -> list[float]:
    """Probabilities of the test cases; rows of training, validation and test."""
    torch.manual_seed(seed)
    model = Abmil(bags[0].shape[1], hidden)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-4, weight_decay=1e-3)
    least = float("inf")
    since = 0
    for _ in range(EPOCHS):
        model.train()
        for i in np.random.permutation(rows[0]):
            optimizer.zero_grad()
            F.cross_entropy(model(bags[i]), y[i : i + 1]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            losses = [F.cross_entropy(model(bags[i]), y[i : i + 1]) for i in rows[1]]
        loss = float(torch.stack(losses).mean())
        since += 1
        if loss < least:
            least = loss
            since = 0
            best = {name: value.clone() for name, value in model.state_dict().items()}
        if since >= PATIENCE:
            break
    model.load_state_dict(best)
    with torch.no_grad():
        return [float(model(bags[i]).softmax(1)[0, 1]) for i in rows[2]]


def plain(out: Path, hidden: int) -> dict[str, float]:
    """CPU-seconds and AUROC of the loop over the folds of an experiment."""
    study = Study.load(out)
    with Bags(study.cohort.paths) as stored:
        bags = [torch.from_numpy(stored.read(i).features) for i in range(len(stored))]
    y = torch.tensor([int(values[0]) for values in study.cohort.values])
    start = time.process_time()
    wins = []
    for fold, part in enumerate(study.parts):
        rows = (part.train, part.stop, part.test)
        p = np.array(plain_fold(bags, y, rows, hidden, fold))
        truth = y[list(part.test)].numpy()
        gap = p[truth == 1][:, None] - p[truth == 0]
        wins.append(((gap > 0) + 0.5 * (gap == 0)).ravel())
    return {
        "cpu_s": time.process_time() - start,
        "auroc": float(np.concatenate(wins).mean()),
    }


def main() -> None:
    """All cohorts."""
    args = arguments(__doc__ or "")
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    cohorts = COHORTS
    if args.smoke:
        cohorts = {"smoke": (12, (4, 5), 32, 8.0, 16)}
    with tempfile.TemporaryDirectory() as name:
        bytecode = Path(name) / "bytecode"
        warm = Path(name) / "warm"
        planted(warm, cases=12, tiles=(4, 5), dim=32)
        command(warm, Path(name) / "ew", 16, bytecode=bytecode)
        for i, (words, (cases, tiles, dim, shift, hidden)) in enumerate(
            cohorts.items()
        ):
            root = Path(name) / f"{i}"
            planted(root, cases=cases, tiles=tiles, dim=dim, shift=shift)
            results[words] = {
                "train": command(root, Path(name) / f"e{i}", hidden, bytecode=bytecode),
                "one start": command(
                    root,
                    Path(name) / f"s{i}",
                    hidden,
                    "--starts",
                    "1",
                    bytecode=bytecode,
                ),
                "plain loop": plain(Path(name) / f"e{i}", hidden),
            }
            print(words, results[words], flush=True)
    finish("bench_small_training", results, args)


if __name__ == "__main__":
    main()
