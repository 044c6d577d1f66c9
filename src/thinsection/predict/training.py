"""One head trained on one fold, to the same bytes however often it is killed on the way.

All that is drawn (order, tiles, dropout) comes from the seed, the epoch and the case, never from a
state that would have to be kept. A checkpoint holds weights, optimiser and history.
"""

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import safe_open
from torch.nn import functional as F

from thinsection.config import as_mapping, option
from thinsection.errors import InvalidInputError
from thinsection.evaluation.labels import Cohort, Floats, Target, several
from thinsection.evaluation.parts import Part
from thinsection.files.json_text import parse_json
from thinsection.predict.bags import Bag, Bags
from thinsection.predict.heads.config import HEADS, HeadConfig, build_head
from thinsection.predict.heads.head import Criterion, HeadOutput
from thinsection.weights.files import write_tensors
from thinsection.weights.placement import resolve_device

State = dict[str, torch.Tensor]
Losses = list[tuple[float, float]]  # of training and of the stop part, by epoch
TOLD = "told"  # all metadata are one value: several have no order of their own
_STOP = 1 << 30  # in place of an epoch, in seeds
COX_CASES = 16  # whose risks are compared in a step


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """How a head is trained."""

    epochs: int = option(0, "most passes over the training cases; 0: the head's own")
    patience: int = option(
        0,
        "epochs without a lower validation loss after which training ends; 0: the head's own",
    )
    lr: float = option(0.0, "learning rate of AdamW; 0: the head's own")
    weight_decay: float = option(1e-3, "decoupled weight decay of AdamW")
    bag_size: int = option(2048, "tiles drawn of a case and epoch; 0: all")
    batch_cases: int = option(
        0, "cases a step; 0: 16 for cox, whose loss compares cases, else 1"
    )
    class_weights: bool = option(
        False,
        "rare classes weigh more; probabilities are then of classes of equal size",
    )
    seed: int = option(0, "seed of folds, order, tiles, weights and dropout")
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    precision: Literal["auto", "fp32", "bf16"] = option(
        "auto", "of products while training; auto: bf16 on CUDA, else fp32"
    )
    checkpoint_s: float = option(20.0, "seconds between checkpoints, at ends of epochs")


def with_recipe(fit: FitConfig, head: str) -> FitConfig:
    """The settings with the head's own learning rate, epochs and patience where they are 0."""
    recipe = HEADS.load(head).recipe
    return replace(
        fit,
        lr=fit.lr or recipe.lr,
        epochs=fit.epochs or recipe.epochs,
        patience=fit.patience or recipe.patience,
    )


def targets_of(target: Target, values: Floats) -> torch.Tensor:
    """What the criterion takes, a row a case: class; labels; scaled value; event and time."""
    if target.exclusive:
        return torch.from_numpy(values[:, 0].astype(np.int64))
    if target.kind == "regression":
        values = (values - target.center) / target.spread
    if target.kind == "discrete":
        bins = np.searchsorted(target.edges, values[:, 1], side="left")
        values = np.stack([values[:, 0], bins], axis=1)
    return torch.from_numpy(values.astype(np.float32))


def criterion_of(target: Target, train: torch.Tensor, *, weighted: bool) -> Criterion:
    """The loss of one case, logits (K,) and its target; 'cox' has none, see `cox_loss`."""
    if target.exclusive:
        counts = torch.bincount(train, minlength=len(target.names))
        share = (
            len(train) / (len(counts) * counts) if weighted else torch.ones(len(counts))
        )
        return lambda z, y: F.cross_entropy(z.float(), y) * share.to(z.device)[y]
    if target.kind == "multilabel":
        up, loss = train.sum(0), F.binary_cross_entropy_with_logits
        share = (len(train) - up) / up if weighted else torch.ones_like(up)
        return lambda z, y: loss(z.float(), y, pos_weight=share.to(z.device))
    if target.kind == "regression":
        return lambda z, y: F.mse_loss(z.float(), y)
    return discrete_loss


def discrete_loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """-log likelihood of an event in an interval, or of none up to it; y = (event, interval).

    Source: Zadeh and Schmid, Bias in cross-entropy-based training of deep survival networks, 2020.
    """
    event, at = y[0], int(y[1])
    survived = F.logsigmoid(-logits.float()).cumsum(0)
    before = survived[at - 1] if at else survived.new_zeros(())
    seen = before + F.logsigmoid(logits[at].float())
    return torch.where(event == 1, -seen, -survived[at])


def cox_loss(risk: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """-log partial likelihood (Breslow) an event, risks (n,) and y (n, 2): event, time."""
    seen, time = y[:, 0] == 1, y[:, 1]
    at_risk = torch.where(time[None] >= time[:, None], risk[None].float(), -torch.inf)
    return (at_risk.logsumexp(1) - risk.float())[seen].sum() / max(1, int(seen.sum()))


class Trainer:
    """One fold on its way.

    Memory: the head five times (weights, gradient, AdamW's two, the best so far), the bags of a
    step, and what one bag takes on its way through the head.
    """

    def __init__(
        self, bags: Bags, cohort: Cohort, part: Part, *, fold: int, fit: FitConfig
    ) -> None:
        self.bags, self.cohort, self.part, self.fold, self.fit = (
            bags,
            cohort,
            part,
            fold,
            fit,
        )
        for name in ("lr", "epochs", "patience"):
            if not getattr(fit, name) > 0:
                raise InvalidInputError(
                    f"{name} must be > 0, got {getattr(fit, name)}; see with_recipe"
                )
        target = cohort.target.fitted(cohort.array[list(part.train)])
        self.target = target
        self.device = resolve_device(fit.device, mps=False)
        auto = fit.precision == "auto" and self.device.type == "cuda"
        self.bf16 = auto or fit.precision == "bf16"
        y = targets_of(target, cohort.array)
        self.y, self.cox = y.to(self.device), target.kind == "cox"
        self.criterion = criterion_of(
            target, y[list(part.train)], weighted=fit.class_weights
        )

    def run(self, config: HeadConfig, checkpoint: Path, key: str) -> None:
        """Trains from the checkpoint of this key, if there is one, to the end of patience.

        Then `head` is that of the best epoch; `losses` tell the way.
        """
        first = self.bags.read(self.part.train[0], most=1, rng=np.random.default_rng(0))
        dim, outputs = first.features.shape[1], len(self.target.names)
        cards = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cards):
            self._seed(_STOP, 0)
            self.head = build_head(config, dim, outputs).to(self.device)
            fit, parameters = self.fit, self.head.parameters()
            self.optimizer = torch.optim.AdamW(
                parameters, fit.lr, weight_decay=fit.weight_decay
            )
            losses, best = self._restore(checkpoint, key)
            self.losses = losses
            saved = time.monotonic()
            while (
                len(losses) < fit.epochs and len(losses) - _best(losses) < fit.patience
            ):
                losses.append((self._epoch(len(losses) + 1), self._stop_loss()))
                rule = f"loss must stay finite, got {losses[-1]} in epoch {len(losses)}"
                if not np.isfinite(losses[-1]).all():
                    raise InvalidInputError(f"{rule} of fold {self.fold}; lower --lr")
                if _best(losses) == len(losses):
                    best = {
                        k: v.detach().clone() for k, v in self.head.state_dict().items()
                    }
                if time.monotonic() - saved >= fit.checkpoint_s:
                    self._save(best, losses, checkpoint, key)
                    saved = time.monotonic()
        self.head.load_state_dict(best)
        self.head.eval()

    def _seed(self, epoch: int, case: int) -> None:
        words = np.random.SeedSequence(
            [self.fit.seed, self.fold, epoch, case]
        ).generate_state(1)
        torch.manual_seed(int(words[0]))

    def _put(self, bag: Bag) -> list[torch.Tensor | None]:
        """The bag on the device: features, cells."""
        return [
            None if part is None else torch.from_numpy(part).to(self.device)
            for part in bag
        ]

    def _forward(self, bag: Bag, epoch: int, case: int) -> HeadOutput:
        """The bag through the head, with the dropout of this epoch and case."""
        self._seed(epoch, case)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            output: HeadOutput = self.head(*self._put(bag))
        return output

    def _epoch(self, epoch: int) -> float:
        """The mean loss of the training cases, a step for every `batch_cases` of them."""
        seed = [self.fit.seed, self.fold, epoch]
        order = np.random.default_rng(seed).permutation(self.part.train).tolist()
        stream, total = self.bags.stream(order, most=self.fit.bag_size, seed=seed), 0.0
        size = self.fit.batch_cases or (COX_CASES if self.cox else 1)
        self.head.train()
        while batch := list(islice(stream, size)):
            self.optimizer.zero_grad(set_to_none=True)
            criteria = (
                self._slopes(batch, epoch)
                if self.cox
                else [self.criterion] * len(batch)
            )
            for (case, bag), criterion in zip(batch, criteria, strict=True):
                loss = self.head.loss(
                    self._forward(bag, epoch, case), self.y[case], criterion
                )
                total += float(loss.detach())
                (loss if self.cox else loss / len(batch)).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        return total / len(order)

    def _slopes(self, batch: Sequence[tuple[int, Bag]], epoch: int) -> list[Criterion]:
        """Of each case z times d loss / d risk: so one bag at a time is held with its gradients."""
        with torch.no_grad():
            risks = [
                self._forward(bag, epoch, case).logits[0].float() for case, bag in batch
            ]
        risk = torch.stack(risks).requires_grad_()
        loss = self._loss_of(risk[:, None], [case for case, _ in batch])
        return [partial(_times, slope) for slope in torch.autograd.grad(loss, risk)[0]]

    def _stop_loss(self) -> float:
        """Mean loss of the inner cases, on the same draw of their tiles after every epoch."""
        rows, seed = list(self.part.stop), [self.fit.seed, self.fold, _STOP]
        bags = self.bags.stream(rows, most=self.fit.bag_size, seed=seed)
        self.head.eval()
        with torch.no_grad():
            logits = torch.stack(
                [self._forward(bag, _STOP, case).logits for case, bag in bags]
            )
            return float(self._loss_of(logits, rows))

    def _loss_of(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Mean loss of some cases by their logits (n, K)."""
        y = self.y[list(rows)]
        if self.cox:
            return cox_loss(logits[:, 0], y)
        return torch.stack(
            [self.criterion(z, t) for z, t in zip(logits, y, strict=True)]
        ).mean()

    def whole(self, bags: Bags, cases: Sequence[int]) -> torch.Tensor:
        """Logits (n, K) float64 of whole bags, in fp32."""
        logits = []
        self.head.eval()
        with torch.inference_mode():
            for _, bag in bags.stream(cases):
                logits.append(self.head(*self._put(bag)).logits.double().cpu())
        return torch.stack(logits or [torch.zeros(0)])

    def write(self, path: Path, key: str) -> None:
        """Writes the head, and its logits of inner and test cases and their slides, in fp32."""
        files = self.cohort.files
        stop = self.whole(self.bags, self.part.stop)
        logits = self.whole(self.bags, self.part.test)
        single = [
            [Path(file)] for case in self.part.test for file in several(files[case])
        ]
        with Bags(single, cells=self.bags.cells) as bags:
            slides = self.whole(bags, range(len(bags)))
        said = {"key": key, "losses": self.losses, "best": _best(self.losses)}
        said |= {"target": as_mapping(self.target)}
        told = {TOLD: json.dumps(said)}
        tensors = {
            f"head.{k}": v.cpu().contiguous() for k, v in self.head.state_dict().items()
        }
        tensors |= {"logits": logits, "stop": stop, "slides": slides}
        write_tensors(path, tensors, told)

    def _save(self, best: State, losses: Losses, path: Path, key: str) -> None:
        states = {
            f"adam{i}": own for i, own in self.optimizer.state_dict()["state"].items()
        }
        states = {"head": self.head.state_dict(), "best": best, **states}
        flat = {
            f"{n}.{k}": v.contiguous()
            for n, own in states.items()
            for k, v in own.items()
        }
        said = {"key": key, "losses": losses}
        write_tensors(path, flat, {TOLD: json.dumps(said)})

    def _restore(self, path: Path, key: str) -> tuple[Losses, State]:
        """The history and the best weights so far; head and optimiser are put where they were."""
        said, flat = read_told(path) if path.exists() else ({}, {})
        if said.get("key") != key:
            return [], {}
        states = defaultdict[str, State](dict)
        for name, value in flat.items():
            part, _, rest = name.partition(".")
            states[part][rest] = value
        self.head.load_state_dict(states.pop("head"))
        best, told = states.pop("best"), self.optimizer.state_dict()
        told["state"] = {
            int(part.removeprefix("adam")): own for part, own in states.items()
        }
        self.optimizer.load_state_dict(told)
        return [(train, stop) for train, stop in said["losses"]], best


def _times(slope: torch.Tensor, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (logits * slope).sum()


def read_told(path: Path) -> tuple[dict[str, Any], State]:
    """What a file of ours tells in its metadata, and its tensors."""
    with safe_open(path, framework="pt") as file:
        tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118 - no mapping
        return parse_json(file.metadata()[TOLD]), tensors


def _best(losses: Losses) -> int:
    """The epoch of the lowest inner loss, from 1, the first of equals; 0 before any."""
    return 1 + min(range(len(losses)), key=lambda i: losses[i][1]) if losses else 0
